"""The units of a model: embed, blocks and head, with their parameters in flat buffers.

Blocks are the elements of the model's outermost lists of equal modules. What lies outside of them belongs to `embed` if
it is used before the first block, to `between3` if it is used in front of block 3 (the end of an encoder, and the
decoder's embedding), else to `head`; which of these is found by running a copy of the model on fake tensors and
watching which parameters are read when. A parameter of `embed` that is used again later stays there, and those that use
it share it.

A unit's trained parameters lie in one flat buffer, in the model's order, except that those whose size is not a
multiple of 16 elements come last: so nearly all of them start on a boundary of 64 bytes with no padding between. Those
that are not trained lie in another one, in the same order, but wider types first.

Shapes: `n` parameters of a unit.

    ModelError(ValueError)   a model that cannot be cut into units; says which part and what is supported
"""

from __future__ import annotations

import copy
import functools
import itertools
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.autograd.graph import Node
from torch.utils import checkpoint

from tierplan.runtime.autograd.nests import Forms, forms_of, in_order, nodes_of, tensors_in
from tierplan.runtime.memory.arena import Block
from tierplan.runtime.tracing.record import ExpertsOnFakes, Passages, ReadRecorder, says_looks
from tierplan.sim.workloads.optimizers import in_flat_order

_BINDING = threading.Lock()
"""Memory is bound by the stream that computes, and taken away by whichever stream used it last."""

_HERE = threading.local()
LOOKS = (DataDependentOutputException, DynamicOutputShapeException)
"""What fake tensors raise where a forward asks for values, or how many there are of some kind."""


class ModelError(ValueError):
    """A model that cannot be cut into units."""


@dataclass(eq=False)
class FlatParameters:
    """Parameters of a unit that lie in one flat buffer, of bytes."""

    parameters: tuple[tuple[str, nn.Parameter], ...] = ()
    """By name in the model, in flat order."""
    bound: torch.Tensor | None = field(default=None, repr=False)
    """The flat tensor that the parameters are views of now."""
    references: dict[int, Any] = field(default_factory=dict, repr=False)
    """By identity of a parameter that autograd has saved whole, what its graphs hold for it (`saved`)."""
    _nothing: dict[torch.device, list[torch.Tensor]] = field(default_factory=dict, repr=False)

    @functools.cached_property
    def forms(self) -> Forms:
        """Of the parameters, in flat order."""
        return forms_of(tuple((p.dtype, p.shape) for _, p in self.parameters))

    def views_in(self, block: Block) -> list[torch.Tensor]:
        """The parameters' parts of a block's memory, in their types and shapes."""
        return block.once(self.forms, self.forms.split)  # type: ignore[no-any-return]

    def bind(self, block: Block) -> None:
        """Makes the model's parameters views of this block's memory."""
        with _BINDING:
            if self.is_bound_to(block.data.data_ptr()):
                return
            for (_, p), view in zip(self.parameters, self.views_in(block), strict=True):
                p.data = view
            self.bound = block.data

    def unbind(self, address: int | None = None) -> None:
        """Takes the parameters' memory away, if it is the one at this address, where one is given.

        They keep their shapes, and nan is all that can be read there. One thread may take old memory away while another
        binds new memory, which then stays.
        """
        with _BINDING:
            if address is None or self.is_bound_to(address):
                for (_, p), nothing in zip(self.parameters, self._placeholders(), strict=True):
                    p.data = nothing
                self.bound = None

    def _placeholders(self) -> list[torch.Tensor]:
        """One for each parameter, where it is now; looked up together where they have been bound."""
        there = self._nothing.get(self.bound.device) if self.bound is not None else None
        if there is None:
            there = [placeholder(p.shape, p.dtype, p.device) for _, p in self.parameters]
        if self.bound is not None:
            self._nothing[self.bound.device] = there
        return there

    @functools.cached_property
    def identities(self) -> frozenset[int]:
        """Of the parameters."""
        return frozenset(id(p) for _, p in self.parameters)

    def with_other_memory(self) -> str | None:
        """The name of a parameter that somebody has given other memory than `bind` and `unbind` did, if there is one.
        Nobody may bind meanwhile."""
        begins: Iterable[int] = (_nan(p.dtype, p.device).data_ptr() for _, p in self.parameters)
        if self.bound is not None:
            begins = itertools.accumulate(self.forms.sizes_bytes, initial=self.bound.data_ptr())
        own = zip(self.parameters, begins, strict=False)
        return next((name for (name, p), begin in own if p.data_ptr() != begin and p.numel()), None)

    def is_bound_to(self, address: int) -> bool:
        return self.bound is not None and self.bound.data_ptr() == address


@dataclass(eq=False)
class ModelUnit(FlatParameters):
    """One unit's modules and parameters. Those that it trains lie in a flat buffer of their type."""

    name: str = ""
    block: nn.Module | None = None
    """None for what lies outside of blocks: embed, head, and what is between them."""
    frozen: FlatParameters = field(default_factory=FlatParameters)
    """Those that it owns and does not train."""
    shares: str | None = None
    changed: Mapping[str, bool] = field(default_factory=dict)
    """Names of the parameters that forward writes to, as in `Uses`."""

    def __post_init__(self) -> None:
        self.shapes = tuple(p.shape for _, p in self.parameters)
        dtypes = {p.dtype for _, p in self.parameters}
        if len(dtypes) > 1:
            raise ModelError(
                f"unit {self.name!r} trains parameters in {sorted(map(str, dtypes))}; they must be of one dtype"
            )
        self.dtype = dtypes.pop() if dtypes else torch.float32

    @functools.cached_property
    def lengths(self) -> list[int]:
        return [shape.numel() for shape in self.shapes]

    @functools.cached_property
    def num_trained(self) -> int:
        return sum(self.lengths)

    @property
    def parts(self) -> tuple[FlatParameters, FlatParameters]:
        """What it trains, and what it does not."""
        return self, self.frozen

    @property
    def all_parameters(self) -> tuple[tuple[str, nn.Parameter], ...]:
        """Of both parts."""
        return (*self.parameters, *self.frozen.parameters)


@dataclass(frozen=True)
class Uses:
    """What a model's forward does with its parameters, by their names."""

    outside: Mapping[int, set[str]]
    """Those that are used outside of blocks, by how many blocks have run before."""
    changed: Mapping[str, bool]
    """Those that it writes to: whether it changes their values, or just where these are."""


@functools.lru_cache(maxsize=4096)
def placeholder(shape: torch.Size, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """A tensor of this shape that has no memory of its own, and reads as nan everywhere (codes, as 0)."""
    return _nan(dtype, torch.device(device)).expand(shape)


def is_placeholder(t: torch.Tensor) -> bool:
    """Whether this is such a tensor, or a view of one."""
    return t.untyped_storage()._cdata in _OF_PLACEHOLDERS


_OF_PLACEHOLDERS: set[int] = set()
"""The identities of their storages, which live as long as this process."""


@functools.cache
def _nan(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    nan = torch.full((), torch.nan if dtype.is_floating_point else 0, dtype=dtype, device=device)
    _OF_PLACEHOLDERS.add(nan.untyped_storage()._cdata)
    return nan


@contextmanager
def without_checkpoints() -> Iterator[None]:
    """Inside, in this thread, `torch.utils.checkpoint` raises `ModelError`: a schedule says what is made again."""
    _watch_checkpoints()
    before, _HERE.refuses_checkpoints = getattr(_HERE, "refuses_checkpoints", False), True
    try:
        yield
    finally:
        _HERE.refuses_checkpoints = before


@functools.cache
def _watch_checkpoints() -> None:
    """For good: who has imported PyTorch's function comes through here too, by either of its ways."""

    def watched(way: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(way)
        def run(*args: Any, **kwargs: Any) -> Any:
            if getattr(_HERE, "refuses_checkpoints", False):
                raise ModelError(
                    "the model's forward makes activations again itself (torch.utils.checkpoint), but the plan says "
                    "what is made again; take that out of the model, and plan again"
                )
            return way(*args, **kwargs)

        return run

    for owner, name in (
        (checkpoint.CheckpointFunction, "apply"),
        (checkpoint, "_checkpoint_without_reentrant_generator"),
    ):
        setattr(owner, name, staticmethod(watched(getattr(owner, name))))


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The model's repeated blocks with their names, in the order of registration; of a model that takes images too,
    those that text goes through. Raises `ModelError` where there are none, or they share parameters."""
    if any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules()):
        raise ModelError(
            "the model makes activations again itself (gradient checkpointing), but the plan says what "
            "is made again; call its gradient_checkpointing_disable(), and plan again"
        )
    outer: list[tuple[str, nn.ModuleList]] = []
    inside = set(_text_model(model).modules())
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) == 0 or module not in inside:
            continue
        if any(name.startswith(f"{other}.") for other, _ in outer) or len({type(m) for m in module}) > 1:
            continue
        outer.append((name, module))
    if not outer:
        raise ModelError(
            f"{type(model).__name__} has no nn.ModuleList of equal blocks; the runtime runs models that are a list of "
            "blocks between an embedding and a head"
        )
    longest = max(outer, key=lambda item: len(item[1]))[1]
    kind = type(longest[0])
    other = next(((name, blocks) for name, blocks in outer if type(blocks[0]) is not kind), None)
    if other is not None and getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ModelError(
            f"{type(model).__name__} has blocks of two types: {kind.__name__}, and {type(other[1][0]).__name__} in "
            f"{other[0]!r}. Of encoder-decoders, only those with one type of block and something behind the encoder's "
            "last block are supported, as T5 is; take such a model, or one without an encoder"
        )
    named_blocks = [
        (f"{name}.{i}", m) for name, blocks in outer if type(blocks[0]) is kind for i, m in enumerate(blocks)
    ]
    owner: dict[int, str] = {}
    for name, block in named_blocks:
        for key, p in block.named_parameters():
            if (first := owner.setdefault(id(p), name)) != name:
                raise ModelError(f"parameter '{name}.{key}' is also one of {first!r}; blocks must not share parameters")
    return named_blocks


def _text_model(model: nn.Module) -> nn.Module:
    """Of a model of `transformers` for text beside images or sound, the part that text goes through; else the model."""
    config = getattr(model, "config", None)
    if not hasattr(config, "text_config") or getattr(config, "is_encoder_decoder", False):
        return model
    return getattr(model, "get_decoder", lambda: None)() or model


def refuse_frozen_encoder(model: nn.Module) -> None:
    """Raises `ModelError` for an encoder-decoder of which not all parameters are trained."""
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    why = "of encoder-decoders the runtime trains all parameters; frozen ones and adapters are simulated only there"
    if frozen and getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ModelError(f"parameter {frozen[0]!r} is frozen, but {why}")


def split_model(model: nn.Module, batch: Mapping[str, object]) -> list[ModelUnit]:
    """The units of the model, in the order in which a forward on such a batch runs them."""
    blocks = find_blocks(model)
    for name, module in (("the model", model), *blocks):
        if _is_compiled(module):
            raise ModelError(
                f"{name} is compiled, but a schedule executes block by block, with its own hooks on what each saves; "
                "compile modules inside of the blocks, or nothing"
            )
    in_block = {id(p): name for name, block in blocks for p in block.parameters()}
    uses = uses_of(model, [name for name, _ in blocks], batch)
    used = uses.outside
    parameters = dict(model.named_parameters())
    if not any(p.requires_grad for p in parameters.values()):
        raise ModelError(f"all parameters of {type(model).__name__} are frozen; there is nothing to train")
    refuse_frozen_encoder(model)
    last = len(blocks)
    outside: dict[int, list[tuple[str, nn.Parameter]]] = {0: [], **{at: [] for at in sorted(used)}, last: []}
    sharing: set[int] = set()
    for name, p in parameters.items():
        if id(p) in in_block:
            continue
        places = [at for at in outside if name in used.get(at, ())] or [last]
        outside[places[0]].append((name, p))
        sharing.update(places[1:])
    units = [_unit("embed", None, outside[0])]
    for i, (name, block) in enumerate(blocks):
        if i in outside and i:
            units.append(_unit(f"between{i}", None, outside[i], shares="embed" if i in sharing else None))
        units.append(_unit(f"L{i}", block, [(f"{name}.{key}", p) for key, p in block.named_parameters()]))
    units.append(_unit("head", None, outside[last], shares="embed" if last in sharing else None))
    for unit in units:
        unit.changed = {name: uses.changed[name] for name, _ in unit.all_parameters if name in uses.changed}
    return units


def _is_compiled(module: nn.Module) -> bool:
    """By `torch.compile`, by the module's own `compile`, or as to its `forward`."""
    is_wrapped = hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
    return is_wrapped or hasattr(module.forward, "_torchdynamo_orig_callable")


def _unit(
    name: str, block: nn.Module | None, parameters: Sequence[tuple[str, nn.Parameter]], shares: str | None = None
) -> ModelUnit:
    ordered = in_flat_order(parameters, lambda item: item[1].shape)
    frozen = sorted(((key, p) for key, p in ordered if not p.requires_grad), key=lambda item: -item[1].element_size())
    trained = tuple((key, p) for key, p in ordered if p.requires_grad)
    return ModelUnit(trained, name=name, block=block, frozen=FlatParameters(tuple(frozen)), shares=shares)


def first_trained(units: Sequence[ModelUnit]) -> int:
    """The first unit with a backward, as in `Workload.first_trained`."""
    trained = (u for u, unit in enumerate(units) if unit.parameters or not unit.frozen.parameters)
    return next(trained, len(units))


@torch.inference_mode(False)
@torch.enable_grad()
def uses_of(model: nn.Module, blocks: Sequence[str], batch: Mapping[str, object]) -> Uses:
    """What a run on fake tensors shows. Raises `ModelError` where a schedule would not have what is used."""
    own = ((name, p) for name, p in model.named_parameters() if not is_placeholder(p))
    if (first := next((name for name, p in own if p.stride() != in_order(p.shape)), None)) is not None:
        raise ModelError(
            f"parameter {first!r} is not contiguous, as a transposed one or channels_last, but a schedule has it so, "
            "and kernels add up in another order; set p.data = p.data.clone(memory_format=torch.contiguous_format)"
        )
    _refuse_shared_memory(model)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    twin = fake_twin(model, mode)
    having: dict[int, list[str]] = {}
    for block in blocks:
        for p in twin.get_submodule(block).parameters():
            having.setdefault(id(p), []).append(block)
    owners = {name: having.get(id(p), []) for name, p in twin.named_parameters()}
    recorder = ReadRecorder(memory := {p.untyped_storage()._cdata: name for name, p in twin.named_parameters()})
    recorder.place, ended = 0, itertools.count(1)
    cuts, given, passages = list[tuple[str, torch.Tensor, Node]](), list[torch.Tensor](), Passages()

    def cut(what: str, values: object) -> None:
        cuts.extend((what, t, t.grad_fn) for t in tensors_in(values) if t.grad_fn is not None)

    def enter(name: str, module: nn.Module, args: object, kwargs: object) -> None:
        recorder.place, given[:] = name, [t for t in tensors_in((args, kwargs)) if t.requires_grad]
        cut(f"an input of block {name!r}", (args, kwargs))
        passages.enter(name, (args, kwargs))

    def leave(name: str, module: nn.Module, args: object, kwargs: object, out: object) -> None:
        recorder.place = next(ended)
        results = [t for t in tensors_in(out) if t.requires_grad]
        if results and all(any(t is own for own in given) for t in results):
            raise ModelError(f"block {name!r} gives back what it is given; leave it out, or let it return x.clone()")
        cut(f"an output of block {name!r}", out)
        passages.leave((args, kwargs, out))

    for name in blocks:
        twin.get_submodule(name).register_forward_pre_hook(functools.partial(enter, name), with_kwargs=True)
        twin.get_submodule(name).register_forward_hook(functools.partial(leave, name), with_kwargs=True)
    try:
        with mode, ExpertsOnFakes(), recorder, passages, without_checkpoints():  # with gradients, for their hooks
            ends = tensors_in(out := twin(**fake_batch(batch)))
    except ModelError:
        raise
    except LOOKS as error:
        raise ModelError(f"it {says_looks(error)}") from error
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__} could not be run on fake tensors, to see which parameters its embedding and its "
            f"head use: {error}; pass a batch of the form that training uses"
        ) from error
    used = {place: set(names) for place, names in recorder.reads.items() if isinstance(place, int)}
    for place, names in recorder.reads.items():
        for name in names:
            if not owners[name] and not isinstance(place, int):
                raise ModelError(
                    f"block {place!r} uses parameter {name!r}, which is not its own; register it in the block, or use "
                    "it outside of blocks"
                )
            if owners[name] and place not in owners[name]:
                where = "outside of all blocks" if isinstance(place, int) else f"by block {place!r}"
                raise ModelError(
                    f"parameter {name!r} of block {owners[name][0]!r} is also used {where}, where a schedule need not "
                    "have it; use it in its block alone (the optimizer decays weights, without a term of the loss)"
                )
    for at in sorted(used):
        later = set[str]().union(*(own for k, own in used.items() if k > at)) - used.get(0, set())
        if again := sorted(used[at] & later):
            raise ModelError(
                f"{again[0]!r} is used both in front of block {at} and behind it; only those of the embedding may be "
                "used again"
            )
    if (changed := next((what for what, t, node in cuts if t.grad_fn is not node), None)) is not None:
        raise ModelError(
            f"{changed} is changed in place behind the end of a unit, where autograd's graph is cut; make a new tensor "
            "there: x = x + y, and not x += y"
        )
    loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", ends[0] if len(ends) == 1 else None)
    if (passage := passages.found(loss)) is not None:
        name = next((name for name, p in twin.named_parameters() if any(p is own for own in passage[1])), "")
        raise ModelError(
            f"what is used {passage[0]} comes past a block, as what another encoder gives, or losses of routers (set "
            f"output_router_logits=False), from parameters such as {name!r}, whose gradients a schedule does not take "
            "there; let the blocks take and return it, or freeze these (requires_grad_(False))"
        )
    nodes = {node for _, _, node in cuts}
    _refuse_looks(twin, used.get(0, set()) & used.get(len(blocks), set()), nodes, len(blocks))
    moved = {address: f"parameter {name!r}" for address, name in memory.items()}
    moved |= {t.untyped_storage()._cdata: what for what, t, _ in cuts}
    _refuse_kept(nodes_of(nodes | {t.grad_fn for t in ends if t.grad_fn is not None}), moved)
    return Uses(used, recorder.changed)


def _refuse_shared_memory(model: nn.Module) -> None:
    """Raises `ModelError` where a parameter shares memory with another one or a buffer: schedules keep them apart."""
    own = {name for name, _ in model.named_parameters()}
    places = []
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        if t.numel() and not is_placeholder(t):
            begin = int(t.storage_offset()) * t.itemsize
            places.append((t.untyped_storage()._cdata, begin, begin + t.nbytes, name))
    for (storage, _, end, name), (other_storage, begin, _, other) in itertools.pairwise(sorted(places)):
        if storage == other_storage and begin < end and {name, other} & own:
            raise ModelError(
                f"{name!r} and {other!r} share memory, which a schedule does not keep so, but are two parameters, or "
                "one is a buffer; have one in both places (head.weight = embed.weight), or give one a copy (clone())"
            )


def _refuse_kept(nodes: Iterable[Node], moved: Mapping[int, str]) -> None:
    """Raises `ModelError` where a function of these holds, past autograd, memory that a schedule moves: by address of
    the storage, what it is."""
    for node in nodes:
        for t in tensors_in([*getattr(node, "__dict__", {}).values()]):
            if (what := moved.get(t.untyped_storage()._cdata)) is not None:
                raise ModelError(
                    f"{type(node).__name__} keeps {what} as an attribute of its ctx, where a schedule, which moves it, "
                    "does not see that backward needs it; give it to ctx.save_for_backward"
                )


def _refuse_looks(model: nn.Module, names: Collection[str], given: Collection[Node], num_blocks: int) -> None:
    """Raises `ModelError` where a parameter of these names, which are used in front of the blocks and behind them, is
    in no graph of what they are given: then it is trained behind them alone."""
    looked_at = {name: p for name, p in model.named_parameters() if name in names and p.requires_grad}
    if not looked_at:
        return
    nodes = nodes_of(given)
    trained = {id(node.variable) for node in nodes if hasattr(node, "variable")}
    if name := next((name for name, p in looked_at.items() if id(p) not in trained), None):
        raise ModelError(
            f"parameter {name!r} is trained behind block {num_blocks - 1}, but also looked at without a gradient in "
            "front of block 0, where a schedule need not have it; look at it behind the blocks alone"
        )


def fake_twin(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A copy of the model whose parameters and buffers have no memory; ties between parameters are kept."""
    memo: dict[int, object] = {}
    with mode:
        for p in model.parameters():
            memo[id(p)] = nn.Parameter(torch.empty(p.shape, dtype=p.dtype), requires_grad=p.requires_grad)
        for b in model.buffers():
            memo[id(b)] = torch.empty(b.shape, dtype=b.dtype)
    try:
        return copy.deepcopy(model, memo)
    except RuntimeError as error:
        raise ModelError(
            f"the model cannot be copied: {str(error).partition('.')[0]}. Where a module holds a tensor with a graph, "
            "such as a loss of its last forward, detach it, or set it to None; weight_norm and spectral_norm are to be "
            "those of torch.nn.utils.parametrizations"
        ) from error


def fake_batch(batch: Mapping[str, object]) -> dict[str, Any]:
    """The arguments of a forward of such a twin, made inside of its mode."""
    return {k: torch.empty(v.shape, dtype=v.dtype) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
