"""Records what one unit does on fake tensors: operations, saved storages, and the memory that is live.

`UnitRecorder` is a dispatch mode: it sees every aten operation of forward and backward. Storages are numbered when they
are first seen; one is gone when PyTorch releases it, so peaks are those of the real run.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from tierplan.runtime.autograd.coded import decoded_weight
from tierplan.runtime.autograd.nests import nodes_of, tensors_in
from tierplan.runtime.autograd.replay import changed, is_random
from tierplan.runtime.execution.device import TORCH_DTYPES
from tierplan.runtime.tracing.backend import result_on
from tierplan.sim.workloads.adapters import is_thin
from tierplan.sim.workloads.families.slices import Operation, Recording
from tierplan.sim.workloads.formats import format_of
from tierplan.sim.workloads.workload import Training

aten = torch.ops.aten
DTYPE_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()} | {torch.float64: "fp64"}
ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
}
ATTENTION_BACKWARD = {
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
}
DECODED = torch.ops.tierplan.decoded_weight.default if decoded_weight else None
GROUPED_MM = aten._grouped_mm.default
GATHERS = {aten.embedding.default}
"""Operations that read as many rows of their first argument as they write."""


def dtype_name(dtype: torch.dtype) -> str:
    return DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))


def bytes_touched(t: torch.Tensor) -> int:
    """Bytes of a tensor that a kernel reads or writes: those of an expanded dimension count once."""
    return min(t.numel() * t.element_size(), t.untyped_storage().nbytes())


def is_causal(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a kernel of attention knows that it may leave out half of the square of scores. One that takes a mask as
    a tensor does not, whatever the mask says."""
    names = [argument.name for argument in func._schema.arguments]
    return (dict(zip(names, args, strict=False)) | dict(kwargs)).get("is_causal") is True


def work_of(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: object, lora: str = ""
) -> dict[str, float]:
    """The work of one operation: FLOPs where PyTorch's counter has a formula, or for attention; else bytes. Both for
    thin products beside adapters (`is_thin`)."""
    ins, outs = tensors_in((args, kwargs)), tensors_in(out)
    kind = next((dtype_name(t.dtype) for t in (*ins, *outs) if t.dtype in DTYPE_NAMES), "fp32")
    attention = "attention" if is_causal(func, args, kwargs) else "noncausal_attention"
    if func in ATTENTION:
        return {f"{attention}_{kind}_flops": sdpa_flop_count(*_with_equal_heads(args[:3]))}
    if func in ATTENTION_BACKWARD:
        flops = sdpa_backward_flop_count(args[0].shape, *_with_equal_heads(args[1:4]))
        return {f"{attention}_{kind}_flops": flops}
    if func is GROUPED_MM:  # one product per expert, over the tokens that it gets: together those of all tokens
        return {f"matmul_{kind}_flops": 2 * args[0].numel() * args[1].shape[-1]}
    if func is DECODED:
        base = args[1]
        wide = tensors_in(out)[0]
        return {"elementwise_bytes": format_of(base).coding_bytes(wide.numel(), wide.element_size(), wide.shape[0])}
    formula = flop_registry.get(func.overloadpacket)
    if formula is not None:
        what = attention if "attention" in func.overloadpacket.__name__ else "matmul"
        work: dict[str, float] = {f"{what}_{kind}_flops": formula(*args, **kwargs, out_val=out)}
        if func is aten.mm.default and is_thin(lora, *args[0].shape, args[1].shape[1]):
            work["elementwise_bytes"] = sum(map(bytes_touched, (*ins, *outs)))
        return work
    if func in GATHERS:
        return {"elementwise_bytes": bytes_touched(args[1]) + 2 * sum(map(bytes_touched, outs))}
    return {"elementwise_bytes": sum(map(bytes_touched, (*ins, *outs)))}


def _with_equal_heads(tensors: Sequence[torch.Tensor]) -> list[Sequence[int]]:
    """Shapes of queries, keys and values. Grouped heads count as many, and PyTorch before 2.13 counts no others."""
    query_bhtk, *pair = tensors
    batch, heads, *_ = query_bhtk.shape
    return [query_bhtk.shape, *((batch, heads, *t.shape[2:]) for t in pair)]


@dataclass(eq=False)
class UnitRecorder(Recording, TorchDispatchMode):
    """Records one unit. Storages that it sees but that existed before belong to parameters, the input, or outside."""

    parameters: Mapping[int, str]
    """Names of the model's parameters, by the address of their storage."""
    training: Training
    scope: Callable[[], str] = str
    elsewhere: Collection[int] | None = None
    """Of a unit outside of blocks, storages that others hold; it saves what else it uses, such as a mask that the model
    has made in front of its blocks and reads behind them. A block has what it gets from others."""
    parameters_used: dict[str, None] = field(default_factory=dict)
    outside: dict[int, int] = field(default_factory=dict)
    """Bytes of the storages from outside that forward reads."""
    input_numbers: set[int] = field(default_factory=set)
    in_backward: bool = False

    def __post_init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self._numbers: dict[int, int] = {}
        self.own: set[int] = set()
        """Numbers of the storages that the unit has made."""
        self._new_numbers = itertools.count(1)
        self._pins: list[torch.UntypedStorage] = []

    # ---- storages ----

    def number(self, t: torch.Tensor) -> int:
        """The storage's number. Those from outside the unit are held until it is done, so that numbers stay true."""
        storage = t.untyped_storage()
        if storage._cdata not in self._numbers:
            self._numbers[storage._cdata] = next(self._new_numbers)
            self._pins.append(storage)
        return self._numbers[storage._cdata]

    def adopt(self, t: torch.Tensor) -> None:
        """Counts a new storage of the unit's own, until it is released."""
        storage = t.untyped_storage()
        if storage._cdata in self._numbers:
            return
        self._numbers[storage._cdata] = number = next(self._new_numbers)
        self.own.add(number)
        size_bytes = storage.nbytes()
        self.memory.add(size_bytes)
        weakref.finalize(storage, self._release, storage._cdata, size_bytes).atexit = False

    def _release(self, address: int, size_bytes: int) -> None:
        self._numbers.pop(address, None)
        self.memory.add(-size_bytes)

    # ---- hooks ----

    def pack(self, t: torch.Tensor) -> torch.Tensor:
        """The saved-tensor hook: notes the storage in order of first save."""
        storage = t.untyped_storage()
        if storage._cdata in self.parameters:
            self.saves_parameters = True
            return t
        if storage.nbytes() == 0:
            return t
        number = self.number(t)
        is_outside = number not in self.own and number not in self.input_numbers
        if number in self.own or (is_outside and self.elsewhere is not None and storage._cdata not in self.elsewhere):
            self.note_saved(number, storage.nbytes(), dtype_name(t.dtype))
        elif number in self.input_numbers:
            self.saves_input = True
        else:
            self.outside[storage._cdata] = storage.nbytes()
        return t

    @staticmethod
    def unpack(t: torch.Tensor) -> torch.Tensor:
        return t

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # questions about a tensor
            return func(*args, **kwargs)
        out = _grouped_mm(func, args, kwargs) if func is GROUPED_MM else func(*args, **kwargs)
        out = result_on(self.training, func, out)
        ins, outs = tensors_in((args, kwargs)), tensors_in(out)
        known = {t.untyped_storage()._cdata for t in ins}
        for t in outs:
            if t.untyped_storage()._cdata not in known:
                self.adopt(t)
        if only_looks(func, known, outs):
            return out
        work = work_of(func, args, kwargs, out, self.training.lora)
        if self.in_backward:
            self.backward_work.append(work)
            return out
        for t in ins:
            address = t.untyped_storage()._cdata
            if address in self.parameters:
                self.parameters_used[self.parameters[address]] = None
            else:
                number = self.number(t)
                if number not in self.own and number not in self.input_numbers:
                    self.outside[address] = t.untyped_storage().nbytes()
        name = func.overloadpacket.__name__
        where = self.scope()
        self.note(
            Operation(
                name=f"{where}/{name}" if where else name,
                reads=tuple(dict.fromkeys(self.number(t) for t in ins)),
                writes=tuple(dict.fromkeys(self.number(t) for t in outs)),
                work=work,
                random=is_random(func, args, kwargs),
            ),
            num_kernels=format_of(args[1]).num_kernels if func is DECODED else 1,
        )
        return out


def says_looks(error: Exception) -> str:
    """What is wrong with a forward that asks for values, as fake tensors say it."""
    return (
        f"looks at the values of its inputs ({error}), or at random numbers, which a plan does not know. Models of "
        "`transformers` do for losses of routers (set output_router_logits=False), for a mask of its own where none is "
        "given (give it an attention_mask), and to leave out layers by chance (set layerdrop=0, and take transformers "
        "5.23 or newer: OPT and BART draw a number before, too)"
    )


def only_looks(func: Any, known: Collection[int], outs: Sequence[torch.Tensor]) -> bool:
    """Whether an operation on `known` storages computes nothing: it gives other views of them, or no tensor."""
    return all(t.untyped_storage()._cdata in known for t in outs) and not (outs and func._schema.is_mutable)


class ReadRecorder(TorchDispatchMode):
    """Notes which of some storages operations compute with, by the place where they are at the time, and which they
    write to."""

    def __init__(self, names: Mapping[int, str]) -> None:
        """By the address of each storage, what it is called."""
        super().__init__()
        self._names = names
        self.place: object = None
        self.reads: dict[object, dict[str, None]] = {}
        self.changed: dict[str, bool] = {}
        """Whether values are written, or just where they are (`set_`, by which parametrizations come and go)."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {t.untyped_storage()._cdata for t in tensors_in((args, kwargs or {}))}
        names = {self._names[address]: None for address in known if address in self._names}
        if names and not only_looks(func, known, tensors_in(out)):
            self.reads.setdefault(self.place, {}).update(names)
        if names:
            written = [t.untyped_storage()._cdata for t in changed(func, args, kwargs or {})]
            for name in [self._names[address] for address in written if address in self._names]:
                self.changed[name] = self.changed.get(name, False) or func.overloadpacket is not aten.set_
        return out


def _with_memory(t: torch.Tensor) -> torch.Tensor:
    if t._is_zerotensor():
        raise NotImplementedError(
            "it takes derivatives forward (torch.func.jvp, forward_ad), which gives zeros without memory, which no "
            "schedule can move; take them backward (torch.autograd.grad)"
        )
    return t


class Passages(saved_tensors_hooks):
    """Finds what comes past a block with a gradient: a plan cuts autograd's graph at what blocks are given and give.
    Inside, nothing is saved that has no memory."""

    def __init__(self) -> None:
        super().__init__(_with_memory, lambda t: t)
        self._cuts: set[Node] = set()
        self._uses: list[tuple[str, int, Node]] = []
        self._ended = -1
        """The number of the last node that was made when the last block ended."""

    def enter(self, name: str, given: object) -> None:
        """A block of this name is given this."""
        nodes = {t.grad_fn for t in tensors_in(given) if t.grad_fn is not None} - self._cuts
        self._uses += [(f"by block {name!r}", self._ended, node) for node in nodes]
        self._cuts |= nodes

    def leave(self, values: object) -> None:
        """A block has ended, and this is what it was given, with what it has put there, and what it gives."""
        self._cuts |= {t.grad_fn for t in tensors_in(values) if t.grad_fn is not None}
        last = torch.ones((), requires_grad=True).clone().grad_fn
        assert last is not None
        self._ended = last._sequence_nr()

    def found(self, loss: torch.Tensor | None) -> tuple[str, list[torch.Tensor]] | None:
        """Where some is used, and the parameters that it comes from."""
        if loss is not None and loss.grad_fn is not None:
            self._uses.append(("behind the blocks", self._ended, loss.grad_fn))
        for where, ended, start in self._uses:
            for node in nodes_of({start}, self._cuts) if ended >= 0 else ():
                if not hasattr(node, "variable") and node._sequence_nr() <= ended:
                    return where, [n.variable for n in nodes_of({node}, self._cuts) if hasattr(n, "variable")]
        return None


def _grouped_mm(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """Experts' products: fake tensors know them in bf16 alone, real kernels in every type."""
    dtype = args[0].dtype
    narrow = [t.to(torch.bfloat16) if isinstance(t, torch.Tensor) and t.dtype == dtype else t for t in args]
    out: torch.Tensor = func(*narrow, **kwargs)
    return out.to(dtype)


class ExpertsOnFakes(TorchDispatchMode):
    """Lets models with grouped products of experts run on fake tensors of any type."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _grouped_mm(func, args, kwargs or {}) if func is GROUPED_MM else func(*args, **(kwargs or {}))


def block_likeness(block: nn.Module) -> object:
    """Equal for blocks that compute the same: same classes, shapes and settings, whatever their index."""
    features: list[object] = []
    for name, module in block.named_modules():
        plain = sorted(
            (k, v)
            for k, v in vars(module).items()
            if isinstance(v, (bool, int, float, str)) and not k.startswith("_") and k not in ("layer_idx", "layer_id")
        )
        features.append((name, type(module), tuple(plain)))
    features.append(tuple((n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in block.named_parameters()))
    return tuple(features)
