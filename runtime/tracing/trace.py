"""Exact workloads: the model's own class runs on fake tensors, which have shapes and no memory.

The model is cut at its blocks. Each part that differs runs once, forward and backward, under a recorder that sees every
operation, every saved tensor and every release of memory. 175 billion parameters take seconds and no memory.

    trace_workload(model, training)          the workload of a config.json, a folder, or a known name
    trace_module(module, batch, training)    that of a model in memory, your own or one with frozen parameters
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from tierplan.runtime.autograd.chunked_loss import loss_in_chunks
from tierplan.runtime.autograd.coded import CodedLinear
from tierplan.runtime.autograd.containers import HandBack, Lent
from tierplan.runtime.autograd.cuts import check_loss
from tierplan.runtime.autograd.nests import flatten, form_of, tensors_in
from tierplan.runtime.autograd.units import (
    LOOKS,
    ModelError,
    fake_batch,
    fake_twin,
    find_blocks,
    placeholder,
    refuse_frozen_encoder,
    uses_of,
    without_checkpoints,
)
from tierplan.runtime.checkpoint.weights import hollow_model
from tierplan.runtime.execution.device import TORCH_DTYPES
from tierplan.runtime.reference import loss_of, without_cache
from tierplan.runtime.tracing.backend import as_made_before, backend_rules, behind_autocast
from tierplan.runtime.tracing.models import experts_of, refusals_of_transformers, refuse_untrained
from tierplan.runtime.tracing.record import UnitRecorder, block_likeness, says_looks
from tierplan.sim.workloads.families.slices import SUB_BATCHES, with_other_sizes
from tierplan.sim.workloads.fused import with_fused
from tierplan.sim.workloads.models import check_settings, read_config
from tierplan.sim.workloads.optimizers import in_flat_order
from tierplan.sim.workloads.workload import Training, Unit, Workload, WorkloadError


def trace_workload(model: str | Path, training: Training) -> Workload:
    """What one training step of `model` computes, keeps and owns, exactly.

    Raises `WorkloadError` for a model that has no blocks, or that cannot run without data.
    """
    return trace_config(*read_config(model, training), training)


def trace_config(
    name: str, raw: Mapping[str, object], training: Training, *, at: Callable[[Training], Workload] | None = None
) -> Workload:
    """The same for a config that is at hand; `at` gives the workload in other settings, where some are kept."""
    check_settings(name, raw, training)
    # peft converts types in place, and some models draw until all values are in bounds: fake parameters stand neither
    of_size = partial(trace_one_size, name, raw, hollow_model(raw, training))
    sizes = (training.per_device_train_batch_size // parts for parts in SUB_BATCHES)
    return with_other_sizes(of_size(training), at or of_size, sizes)


def trace_one_size(name: str, raw: Mapping[str, object], model: nn.Module, training: Training) -> Workload:
    """That of `hollow_model(raw, training)`, and no word of micro-batches of other sizes."""
    shape = (training.per_device_train_batch_size, training.sequence_length)
    names = ("input_ids", "labels", *(["attention_mask"] if training.padded else []))
    batch = {key: placeholder(shape, torch.int64) for key in names}
    with refusals_of_transformers(raw, training):
        tracer = _traced(name, model, training, batch)
        config = experts_of(model.config) | dict(raw)  # which a class may have by default, or by names of its own
    refuse_untrained(name, {n: p.numel() for n, p in tracer.of_name.items() if p.requires_grad}, used=tracer.owner)
    return with_fused(tracer.workload(name, str(raw["model_type"]), config=config))


def trace_module(
    module: nn.Module,
    batch: Mapping[str, Any],
    training: Training,
    *,
    loss: Callable[[Any, Mapping[str, Any]], torch.Tensor] | None = None,
) -> Workload:
    """The workload of a model as it is, on batches like this one; it is not run, and stays as it is.

    Parameters
    ----------
    module
        Its parameters with `requires_grad=False` are not trained.
    batch
        The keyword arguments of its forward.
    loss
        That of `tierplan.runtime.trainer.train`.

    Raises `WorkloadError` where the model has no blocks, is of another type than `training`, or looks at values of its
    inputs.
    """
    name = type(module).__name__
    training = _with_trained_dtype(name, module, training)
    training = replace(training, padded=training.padded or batch.get("attention_mask") is not None)
    with without_cache(module):
        try:
            refuse_frozen_encoder(module)
            uses_of(module, [block for block, _ in find_blocks(module)], batch)
        except ModelError as error:
            raise WorkloadError(f"{name}: {error}") from error
        return with_fused(_traced(name, module, training, batch, loss, refuses_glue=True).workload(name, "module"))


@torch.inference_mode(False)
@torch.enable_grad()
def _traced(
    name: str,
    model: nn.Module,
    training: Training,
    batch: Mapping[str, Any],
    loss: Callable[[Any, Mapping[str, Any]], torch.Tensor] | None = None,
    *,
    refuses_glue: bool = False,
) -> _Tracer:
    """What a run of the model on fake tensors like these has shown."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    twin = fake_twin(model, mode)
    try:
        with mode, backend_rules(training), loss_in_chunks(twin, training.loss_chunks):
            fakes = fake_batch(batch)
            tracer = _Tracer(twin, training, [block for _, block in find_blocks(twin)], refuses_glue)
            of_model = (*twin.buffers(), *model.parameters(), *model.buffers())  # a loss function may use the model's
            tracer.elsewhere.update(t.untyped_storage()._cdata for t in (*tensors_in(fakes), *of_model))
            with _without_gradients(model) if loss is not None else nullcontext(), without_checkpoints():
                tracer.run(lambda: loss_of(twin, fakes, loss), model)
    except LOOKS as error:
        raise WorkloadError(f"{name} {says_looks(error)}") from error
    except ModelError as error:
        raise WorkloadError(f"{name}: {error}") from error
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise
        raise WorkloadError(
            f"{name} uses what it gave to a block again behind it, or what is inside of one: a residual that is added "
            "outside of the blocks, inputs of each layer (Gemma 3n and 4), or losses of routers (set "
            "output_router_logits=False), which no plan can say; let blocks of your own do that"
        ) from error
    return tracer


@contextmanager
def _without_gradients(model: nn.Module) -> Iterator[None]:
    """Inside, the model's parameters have none; behind it, those of before. A loss function may use the parameters."""
    before = [(p, p.grad) for p in model.parameters()]
    for p, _ in before:
        p.grad = None
    try:
        yield
    finally:
        for p, gradient in before:
            p.grad = gradient


def _with_trained_dtype(name: str, module: nn.Module, training: Training) -> Training:
    """`training` with the type of the parameters that are trained, where some are frozen and it is another."""
    dtypes = {p.dtype for p in module.parameters()}
    trained = {p.dtype for p in module.parameters() if p.requires_grad}
    own = next((known for known, dtype in TORCH_DTYPES.items() if trained == {dtype}), None)
    if TORCH_DTYPES[training.dtype] not in dtypes or (dtypes == trained and len(trained) > 1) or own is None:
        raise WorkloadError(
            f"{name} has parameters in {', '.join(sorted(map(str, dtypes)))}, of which those in "
            f"{', '.join(sorted(map(str, trained))) or 'none'} are trained, but training is in {training.dtype!r}; "
            "convert the model, or change `dtype`. Trained parameters are of one type, which may be another"
        )
    return replace(training, trained_dtype=None if own == training.dtype else own)  # type: ignore[arg-type]


@dataclass
class _Part:
    """What is known about a part once it has run: its unit, how its outputs look, and what hands them back."""

    unit: Unit
    outputs: list[_Look]
    hand_back: HandBack


@dataclass
class _Tracer:
    """Runs the model once; each block that is new is recorded, and equal ones are passed over."""

    model: nn.Module
    training: Training
    blocks: list[nn.Module]
    refuses_glue: bool = False
    """What is computed between blocks without parameters is an error, as for the runtime."""
    units: list[Unit] = field(default_factory=list)
    known: dict[object, _Part] = field(default_factory=dict)
    cuts: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """By identity of a tensor that blocks get: the tensor, and the leaf that stands for it."""
    elsewhere: set[int] = field(default_factory=set)
    """Storages that live outside of all units, or are inputs of some: the batch, buffers, and what blocks get."""
    candidates: dict[int, tuple[torch.UntypedStorage, int]] = field(default_factory=dict)
    shared: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.parameters_of_model = list(self.model.parameters())
        self.parameters = {p.untyped_storage()._cdata: n for n, p in self.model.named_parameters()}
        self.of_name = dict(self.model.named_parameters())
        coded = {n: m for n, m in self.model.named_modules() if isinstance(m, CodedLinear)}
        self.values_of = {f"{n}.{own}": 0 for n, m in coded.items() for own, _ in m.named_parameters() if own != "bias"}
        self.values_of |= {f"{n}.codes": m.num_values for n, m in coded.items()}
        self.names = {id(m): n for n, m in self.model.named_modules()}
        self.scopes: list[str] = []
        self.prefix = ""
        self.owner: dict[str, str] = {}
        self.recorder: UnitRecorder | None = None
        self.recording, self.saving = ExitStack(), ExitStack()
        """Under the recorder, and in front of backward its hooks for what is saved."""
        self.given: list[torch.Tensor] = []
        self.first_with_more: str | None = None
        self.ran = 0

    def workload(self, name: str, model_type: str, **more: Any) -> Workload:
        """What `run` has seen."""
        units = tuple(replace(u, shapes=tuple(in_flat_order(u.shapes, lambda shape: shape))) for u in self.units)
        shared_bytes = sum(self.shared.values())
        more["first_with_more"] = self.first_with_more
        return Workload(
            name=name, model_type=model_type, training=self.training, units=units, shared_bytes=shared_bytes, **more
        )

    # ---- the walk ----

    def run(self, forward: Callable[[], torch.Tensor], original: nn.Module) -> None:
        """Finds the units of a model whose loss `forward` computes, which may use parameters of the `original`."""
        handles = [
            nn.modules.module.register_module_forward_pre_hook(
                lambda module, args: self.scopes.append(self.names.get(id(module), ""))
            ),
            nn.modules.module.register_module_forward_hook(self._leave, always_call=True),
        ]
        trained = [p for p in self.parameters_of_model if p.requires_grad]
        handles += [p.register_post_accumulate_grad_hook(self._complete) for p in trained]
        for i, block in enumerate(self.blocks):
            block.forward = partial(self._block, i, block, block.forward)  # type: ignore[method-assign]
        try:
            self._start(input_tensors=[])
            loss = forward()
            assert self.recorder is not None
            there = {self.owner.get(name) for name in self.recorder.parameters_used}
            owned = ((id(p), name, self.owner.get(name)) for name, p in original.named_parameters())
            check_loss(loss, {at: (name, unit) for at, name, unit in owned if unit is not None and unit not in there})
            if self.ran < len(self.blocks):
                raise WorkloadError(
                    f"{self.ran} of {len(self.blocks)} blocks of {type(self.model).__name__} ran; "
                    "models that skip blocks cannot be described"
                )
            self._finish("head", "head", [loss])
        finally:
            for handle in handles:
                handle.remove()
            self._stop()
        self._own_the_rest()

    def _leave(self, module: nn.Module, args: object, out: object) -> None:
        self.scopes.pop()
        if self.recorder is not None and any(True for _ in module.parameters(recurse=False)):
            self.recorder.num_modules += 1

    def _complete(self, p: torch.Tensor) -> None:
        """Called by autograd when a parameter's gradient is complete."""
        if self.recorder is not None and self.parameters[p.untyped_storage()._cdata] not in self.owner:
            assert p.grad is not None
            self.recorder.memory.complete_bytes += p.grad.untyped_storage().nbytes()

    def _scope(self) -> str:
        """The module that runs now, by its name inside the block."""
        return self.scopes[-1].removeprefix(self.prefix) if self.scopes else ""

    def _block(self, i: int, block: nn.Module, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Ends what ran before, records the block if there is none like it, and hands leaves to what comes next."""
        leaves, nested = flatten((args, kwargs))
        tensors = tensors_in(leaves)
        if not tensors:
            raise WorkloadError(f"block {self.names[id(block)]!r} gets no tensor; it cannot be described on its own")
        produced = [t for t in tensors if t.grad_fn is not None and id(t) not in self.cuts]
        if i == 0 or produced:
            if i and self.refuses_glue and self.recorder and not self.recorder.parameters_used:
                raise WorkloadError(
                    f"{type(self.model).__name__} computes something in front of block {i} that is no part of a block, "
                    "such as a residual; let blocks do that"
                )
            name, kind = ("embed", "embed") if i == 0 else (f"between{i}", "block")
            handed = [] if produced else [t for t in tensors if t.is_floating_point()][:1]  # by a frozen embedding
            unit = self._finish(name, kind, produced, passed_on=tensors, handed=handed)
            if self.refuses_glue and handed and not unit.num_parameters:
                raise WorkloadError(
                    f"unit {name!r} has no parameters, and what it hands to the first block has no gradient; a model "
                    "begins with an embedding that the batch goes through"
                )
        else:
            self._stop()
        trained = next((unit.name for unit in self.units if unit.shapes), None)
        if self.refuses_glue and trained is not None and not any(t.requires_grad for t in tensors):
            raise WorkloadError(
                f"nothing that block {i} gets has a gradient, but {trained!r} in front of it is trained; leave out "
                "detach() and no_grad() between blocks, or freeze all in front of them (requires_grad_(False))"
            )
        for t in tensors:  # what the block gets becomes leaves: the cut between units
            if id(t) not in self.cuts:
                self.cuts[id(t)] = (t, t.detach().requires_grad_(t.requires_grad) if t.is_floating_point() else t)
                self.elsewhere.update({t.untyped_storage()._cdata} if t.requires_grad else ())
        cut = [self.cuts[id(x)][1] if isinstance(x, torch.Tensor) else x for x in leaves]
        self._note_more(f"L{i}", (t for t in tensors_in(cut) if t.requires_grad))
        mine = [as_made_before(x) if isinstance(x, torch.Tensor) else x for x in cut]
        new_args, new_kwargs = nested(mine)
        strides = tuple(() if t.is_contiguous() else t.stride() for t in tensors_in(mine))
        key = (block_likeness(block), form_of(new_args, new_kwargs), strides)
        part = self.known.get(key)
        if part is None:
            self.prefix = f"{self.names[id(block)]}."
            self._start(input_tensors=tensors_in(cut)[:1], in_block=True)
            lent = Lent(self.names[id(block)], new_args, new_kwargs)
            out = forward(*new_args, **new_kwargs)
            out_leaves, hand_back = lent.outcome(out)
            position = {id(x): j for j, x in enumerate(mine) if isinstance(x, torch.Tensor)}
            looks = [_look(x, position) for x in out_leaves]
            out_tensors = tensors_in(out_leaves)
            results = [t for t in out_tensors if t.grad_fn is not None]
            self._note_more(f"L{i}", (t for t in out_tensors if id(t) not in position))
            handed = [] if results else [t for t in out_tensors if t.is_floating_point()][:1]
            del out, out_leaves, out_tensors, lent, new_args, new_kwargs
            inside = [f"{self.prefix}{name}" for name, _ in block.named_parameters()]
            unit = self._finish(f"L{i}", "block", results, handed=handed, inside=inside)
            part = self.known[key] = _Part(unit, looks, hand_back)
        else:
            self.units.append(replace(part.unit, name=f"L{i}"))
        for name, _ in block.named_parameters():
            self.owner[f"{self.names[id(block)]}.{name}"] = f"L{i}"
        self.ran += 1
        outputs = [look(cut) for look in part.outputs]
        for extra in outputs[1:]:  # position biases and the like: what later blocks read of them is shared
            if isinstance(extra, torch.Tensor) and extra.untyped_storage()._cdata not in self.candidates:
                self._offer(extra)
        result = part.hand_back(outputs, args, kwargs)
        self._start(input_tensors=tensors_in(outputs)[:1])
        return result

    # ---- one part ----

    def _start(self, *, input_tensors: list[torch.Tensor], in_block: bool = False) -> None:
        elsewhere = None if in_block else self.elsewhere
        self.recorder = UnitRecorder(self.parameters, self.training, self._scope, elsewhere)
        self.given = input_tensors
        self.recorder.input_numbers.update(map(self.recorder.number, input_tensors))
        self.recording.enter_context(self.recorder)
        self.saving.enter_context(saved_tensors_hooks(self.recorder.pack, self.recorder.unpack))

    def _stop(self) -> None:
        self.saving.close()
        self.recording.close()
        self.recorder = None

    def _finish(
        self,
        name: str,
        kind: str,
        results: list[torch.Tensor],
        passed_on: Sequence[torch.Tensor] = (),
        handed: Sequence[torch.Tensor] = (),
        inside: Iterable[str] = (),
    ) -> Unit:
        """Ends the part that is being recorded: runs its backward and adds its unit. Empties `results`.

        The first result goes to the next unit, or what is `handed` over where there is none that can be differentiated.
        Others, and what is `passed_on` beside, are shared by the units to come. Parameters that lie `inside` are its
        own whether they were used or not.
        """
        recorder = self.recorder
        assert recorder is not None
        self._note_more(name, results)
        self.saving.close()  # the recorder goes on, for backward
        given = (*results, *handed)[:1]
        out_bytes = 0 if kind == "head" else sum(t.untyped_storage().nbytes() for t in given)
        if self.refuses_glue and out_bytes and out_bytes != given[0].nbytes:
            raise WorkloadError(
                f"unit {name!r} hands over a tensor of {given[0].nbytes:,} bytes that lies in one of {out_bytes:,}; "
                "units hand over tensors that share memory with no other, so let it return a copy (clone())"
            )
        shared_bytes = self._share(recorder, given, results[1:], passed_on)
        forward_peak, saved_bytes = recorder.memory.peak_bytes, recorder.saved_bytes
        recorder.in_backward = True
        edges = [get_gradient_edge(t) for t in results]
        grads = [torch.empty_like(t) for t in results]
        shared_grad_bytes = sum(g.untyped_storage().nbytes() for g in grads[1:])
        results.clear()
        before = recorder.memory.live_bytes - sum(g.untyped_storage().nbytes() for g in grads)
        recorder.memory.restart()
        recorder.backward_work.clear()  # what it took to make up the output's gradient
        if edges:
            with behind_autocast():
                torch.autograd.backward(edges, grads)
        del grads, edges
        gradients = [p.grad for p in (*self.given, *self.parameters_of_model) if p.grad is not None]
        grad_bytes = sum(g.untyped_storage().nbytes() for g in gradients)
        del gradients
        self._stop()
        for t in (*self.given, *self.parameters_of_model):
            t.grad = None
        # Of what was passed on, that counts which is read later; with its gradient, if it has one.
        self.shared |= {at: self.candidates[at][1] for at in recorder.outside if at in self.candidates}
        for parameter in (*recorder.parameters_used, *inside):
            self.owner.setdefault(parameter, name)
        borrowed = [p for p in recorder.parameters_used if self.owner[p] != name]
        granted = before + out_bytes + shared_grad_bytes + grad_bytes
        unit = Unit(
            name=name,
            kind=kind,  # type: ignore[arg-type]
            **self._owned(p for p in self.of_name if self.owner.get(p) == name),
            shares=self.owner[borrowed[0]] if borrowed else None,
            adds_to_shared=any(self.of_name[p].requires_grad for p in borrowed) or not borrowed,
            input_bytes=sum(t.untyped_storage().nbytes() for t in self.given),
            output_bytes=out_bytes,
            forward_work_bytes=max(0, forward_peak - saved_bytes - out_bytes - shared_bytes),
            **recorder.amounts(granted),
        )
        self.units.append(unit)
        return unit

    def _note_more(self, name: str, tensors: Iterable[torch.Tensor]) -> None:
        """What a unit of this name gets, or gives, is one tensor in a chain of units."""
        if self.first_with_more is None and len({id(t) for t in tensors}) > 1:
            self.first_with_more = name

    def _share(self, recorder: UnitRecorder, given: Sequence[torch.Tensor], *more: Sequence[torch.Tensor]) -> int:
        """Bytes that this part made for several units: masks, rotary tables, encoder states. They outlive it."""
        seen = {t.untyped_storage()._cdata for t in given}
        shared_bytes = 0
        for t in itertools.chain(*more):
            storage = t.untyped_storage()
            address, number = storage._cdata, recorder.number(t)
            if address in seen or number in recorder.saves or number not in recorder.own:
                continue
            seen.add(address)
            shared_bytes += storage.nbytes()
            self._offer(t)
        return shared_bytes

    def _offer(self, t: torch.Tensor) -> None:
        """Notes what counts as shared if later parts read it: its bytes, and those of its gradient."""
        storage = t.untyped_storage()
        self.candidates[storage._cdata] = (storage, storage.nbytes() * (2 if t.requires_grad else 1))

    def _own_the_rest(self) -> None:
        """Parameters that no part used belong to the head, so that the count is the model's."""
        head = self.units[-1]
        rest = self._owned(name for name in self.of_name if name not in self.owner)
        self.units[-1] = replace(head, **{name: getattr(head, name) + more for name, more in rest.items()})

    def _owned(self, names: Iterable[str]) -> dict[str, Any]:
        """What a unit says of the parameters that it owns."""
        listed = list(names)
        owned = [self.of_name[name] for name in listed]
        frozen = [p for p in owned if not p.requires_grad]
        num = [self.values_of.get(name, p.numel()) for name, p in zip(listed, owned, strict=True)]
        return {
            "num_parameters": sum(num),
            "num_frozen": sum(n for n, p in zip(num, owned, strict=True) if not p.requires_grad),
            "frozen_bytes": sum(p.numel() * p.element_size() for p in frozen),
            "shapes": tuple(tuple(p.shape) for p in owned if p.requires_grad),
        }


_Look = Callable[[list[object]], object]
"""Makes an output like the one that was looked at, from a block's inputs."""


def _look(x: object, position: Mapping[int, int]) -> _Look:
    """How an output looks: an input that is passed on, a new tensor, or a plain value."""
    if not isinstance(x, torch.Tensor):
        return lambda inputs: x
    if id(x) in position:
        return itemgetter(position[id(x)])
    shape, dtype, requires_grad = x.shape, x.dtype, x.requires_grad  # and not the tensor, whose memory would count
    if x.is_contiguous() or x.nbytes != x.untyped_storage().nbytes():
        return lambda inputs: torch.empty(shape, dtype=dtype, requires_grad=requires_grad)
    stride = x.stride()
    return lambda inputs: torch.empty_strided(shape, stride, dtype=dtype, requires_grad=requires_grad)
