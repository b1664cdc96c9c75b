"""What the ops of a training step do: the bodies that `executor.Executor` calls, by kind of op."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch

from tierplan.hwmodels.names import COMPUTE, D2H, DEVICE, H2D, HOST_ADAM
from tierplan.runtime.autograd.coded import decode_acts, encode_acts
from tierplan.runtime.autograd.units import ModelError, ModelUnit
from tierplan.runtime.execution.computing import Computing
from tierplan.runtime.execution.device import TORCH_DTYPES, Device
from tierplan.runtime.execution.gradients import flat_gradients, gather, gradients_of, take_over
from tierplan.runtime.execution.instances import Call, Instance
from tierplan.runtime.execution.threads import threads_here
from tierplan.runtime.execution.values import (
    BufferValue,
    Places,
    SavedTensorsHandle,
    content_of,
    expect,
    strides_of,
    value_of,
)
from tierplan.runtime.memory.arena import Block
from tierplan.runtime.memory.store import Extent
from tierplan.runtime.optim.adam import OptimizerSettings, update_states
from tierplan.runtime.optim.groups import segments
from tierplan.runtime.optim.states import StateLayout, View, layout_of
from tierplan.runtime.ranks.collectives import (
    copy_bytes,
    do_collective,
    do_send,
    global_norm,
    header_from,
    own_part,
    shard_gradients,
    shard_part,
    with_shards_of_states,
)
from tierplan.runtime.ranks.group import Ranks
from tierplan.sim.contents import CastGradients, Clip, Frozen, Gradients, Params, States, TiedGradients
from tierplan.sim.ranks import COLLECTIVES, SEND
from tierplan.sim.schedule import Op, Schedule
from tierplan.sim.workloads.formats import format_of

QUICK_KINDS = {"copy", "accumulate", "cast", "norm", "clip", "update"}
QUICK_AMOUNTS = {"bytes": 1 << 20, "elementwise_bytes": 1 << 20, "parameters": 1 << 17}
"""The most, by work kind, that is done within some 100 us: so long another thread takes to wake up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Updated:
    """Of an update, what is the same in every step."""

    layout: StateLayout
    own: range
    """What the gradient has of the unit's values."""
    part: range
    """What of them is updated."""
    dtype: torch.dtype
    """The gradient's, where it is flat."""
    clip: int | None
    """The position of the coefficient among what is read."""
    is_late: bool

    def views(self, states: torch.Tensor) -> list[View]:
        return [*self.layout.views(states, self.part)]

    def values(self, dtype: torch.dtype, memory: torch.Tensor) -> torch.Tensor:
        """Those that are updated, in memory that has all of the unit's or what the gradient has."""
        flat = memory.view(dtype)
        begin = self.own.start if len(flat) == len(self.own) else 0
        return flat[self.part.start - begin : self.part.stop - begin]


@dataclass(eq=False)
class Bodies:
    """Executes ops on a model. `__call__` and `release` are what the executor wants."""

    units: Sequence[ModelUnit]
    device: Device
    places: Places
    optimizer: OptimizerSettings
    learning_rate: Callable[[int], float]
    """By step, from 0."""
    computing: Computing
    while_computing: Callable[[], None]
    """Called when the device has been told to run a forward, and may still be at it."""
    num_threads: int
    parameters: Sequence[torch.nn.Parameter]
    """In the model's order, which is that of the global norm."""
    schedule: Schedule
    ranks: Ranks | None = None
    """The processes that execute the other devices of the schedule."""
    stages: Mapping[str, int] = field(default_factory=dict)
    """Of a pipeline: by unit, the rank that has it."""
    sends: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """By key of an op that sends, from which rank to which."""
    grad_norm: torch.Tensor | None = None
    """Of all gradients of the last step, before they were clipped."""
    working: set[str] = field(default_factory=set)
    """Streams inside an op."""
    moved_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes that copies have moved, by stream."""
    frozen_sums: dict[str, str] = field(default_factory=dict)
    """By content, checksums of what is not trained: it is no part of commits, which name them alone."""
    commits_after: int | None = None
    """The number of steps after which the next commit is expected: what the last of them leaves gets checksums."""

    def __post_init__(self) -> None:
        assert self.schedule.step is not None
        self.training, self._updated_late = self.schedule.step.training, self.schedule.step.updates_of_step_before
        self.dtype = TORCH_DTYPES[self.training.dtype_of_trained]
        self._units = {unit.name: unit for unit in self.units}
        self.segments = {u.name: segments(u, self.optimizer) for u in self.units}
        """By unit, what of it is updated how."""
        spec, dtype, has_master = self.optimizer.name, self.training.dtype_of_trained, self.training.has_master
        self.layouts = {
            u.name: layout_of(spec, u.shapes, dtype, is_block=u.name not in ("embed", "head"), has_master=has_master)
            for u in self.units
        }
        """By unit, how its states lie."""
        self._has_shards_of = with_shards_of_states(self.schedule, self.layouts) if self.ranks else frozenset()
        self._position = {id(p): k for k, p in enumerate(self.parameters)}
        self._headers: dict[str, torch.Tensor] = {}
        self._updates: dict[str, _Updated] = {}
        """By key of an op."""
        slow = ["clip"] * (self.ranks is not None) + ["update"] * (not self.training.optim.is_flat)
        self._quick = {
            op.key
            for op in self.schedule.ops
            if op.kind in QUICK_KINDS.difference(slow) and op.stream in (H2D, D2H, HOST_ADAM)
            if all(amount <= QUICK_AMOUNTS.get(kind, 0) for kind, amount in op.work.items())
        }
        """Ops that wait for nobody, and of which another thread would hardly be awake before they are done."""
        self._has_shards = False  # norms are those of a rank's shards
        self._kinds: Mapping[str, Callable[[Call], None]] = {
            "forward": self.computing.forward, "recompute": self.computing.recompute,
            "backward": self.computing.backward,
            "encode": self._encode, "decode": self._decode, "copy": self._copy,
            "accumulate": self._accumulate, "cast": self._cast, "norm": self._norm, "clip": self._clip,
            "update": self._update, **dict.fromkeys(COLLECTIVES, self._collective), SEND: self._send,
            "leave": lambda call: None,  # the end of a pack's turn: its buffers are free now
            "wait": lambda call: None,  # for what it reads
        }  # fmt: skip

    def __call__(self, call: Call) -> None:
        is_forward = call.op.kind == "forward"
        if call.op.stream == COMPUTE and not is_forward:
            self.computing.compute_with(None)
        self.working.add(call.op.stream)
        try:
            with self.device.on(call.op.stream):
                if call.op.stream == COMPUTE and not is_forward:
                    self.computing.before_computing(call.step)
                self._kinds[call.op.kind](call)
                if is_forward:
                    self.while_computing()
        finally:
            self.working.discard(call.op.stream)

    def is_quick(self, op: Op) -> bool:
        """Whether this thread may do the op beside its own: not within what the model sets for itself (autocast), and
        not where an op may have to wait for a commit."""
        is_as_ever = not torch._C._is_any_autocast_enabled() and not torch._C._len_torch_function_stack()
        return op.key in self._quick and is_as_ever and not self.places.snapshot.is_left

    def close(self) -> None:
        """Ends micro-batches that are under way, and lets go of the pools' memory."""
        self.computing.close()
        self.device.settle()
        self.places.close()

    # ---- copies ----

    def _copy(self, call: Call) -> None:
        source, target = call.reads[0], call.writes[0]
        old = value_of(source)
        self.moved_bytes[call.op.stream] += min(source.buffer.size_bytes, target.buffer.size_bytes)
        if isinstance(old.handle, SavedTensorsHandle) and target.buffer.tier == DEVICE:
            self._bring_back(old.handle, source, target)
            return
        if target.buffer.tier == DEVICE and isinstance(content := content_of(source), TiedGradients):
            self._bring_tied_back(old, self.unit_of(content), target)
            return
        new = self.places.place(target)
        new.handle, new.coded, new.filled, new.is_absent = old.handle, old.coded, old.filled, old.is_absent
        new.strides = old.strides
        if self.stages and old.rng:  # for another turn, in which autograd knows it as another input
            new.handle, new.rng = None, old.rng
            new.strides = strides_of(old)
        if old.gradients is not None:
            content = content_of(source)
            assert isinstance(content, Gradients | TiedGradients)
            gather(old, self.unit_of(content), new)
        elif isinstance(new.place, Extent):
            is_left = target.buffer.becomes is not None and call.step + 1 == self.commits_after
            self.places.drives.write(new.place, self._memory(source), will_be_committed=is_left)
        elif isinstance(old.place, Extent):
            self.places.drives.read(old.place, new.block.pages)
        elif old.place is None and old.handle is not None:
            self.computing.expect(source, old.handle.forms.size_bytes)
            _copy_each(old.handle.parts_of(new.block), old.handle.parts())
        else:
            copy_bytes(new.block.data, self._memory(source), call.op.unit, self.units, self.ranks)
        if new.handle is not None and target.buffer.tier == DEVICE:
            new.arrived = new.handle.unpack(new.handle.parts_of(new.block))
            self.device.lend(new.arrived, COMPUTE)

    def _bring_back(self, handle: SavedTensorsHandle, source: Instance, target: Instance) -> None:
        """Saved tensors return in memory of their own: backward frees each when it has used it, as if it had been kept.

        What an op may make beside its buffers is declared on that condition.
        """
        parts, device = handle.parts_of(value_of(source).block), self.device.torch_device
        arrived = [torch.empty_like(part, device=device) for part in parts]
        _copy_each(arrived, parts)
        self.device.lend(arrived, COMPUTE)
        target.value = BufferValue(handle=handle, arrived=arrived)

    def _bring_tied_back(self, old: BufferValue, unit: ModelUnit, target: Instance) -> None:
        """Tied gradients return as autograd made them: in flat memory there would be room for those of parameters that
        have none yet, which backward makes beside it."""
        views, device = gradients_of(old, unit), self.device.torch_device
        arrived = [None if view is None else torch.empty_like(view, device=device) for view in views]
        there = [gradient for gradient in arrived if gradient is not None]
        _copy_each(there, [view for view in views if view is not None])
        self.device.lend(there, COMPUTE)
        target.value = BufferValue(gradients=arrived)

    def _encode(self, call: Call) -> None:
        """Activations that leave the device, in codes."""
        handle, form = value_of(call.reads[0]).handle, self.training.activation_format
        assert handle is not None
        if not handle.dtype.is_floating_point:
            raise ModelError(
                f"op {call.op.key!r} is to code values of {handle.dtype}, or of several types, in {form!r}; only "
                "floating ones of one type are: plan without activation_format"
            )
        values = self._memory(call.reads[0]).view(handle.dtype)
        expect(call.writes[0], format_of(form).size_bytes(values.numel()))
        self.places.place(call.writes[0]).coded = handle
        encode_acts(values, value_of(call.writes[0]).block.data, form)

    def _decode(self, call: Call) -> None:
        """They are back, in memory of their own: see `_bring_back`."""
        target, handle = call.writes[0], value_of(call.reads[0]).coded
        assert handle is not None
        memory = torch.empty(target.buffer.size_bytes, dtype=torch.uint8, device=self.device.torch_device)
        decode_acts(value_of(call.reads[0]).block.data, memory.view(handle.dtype), self.training.activation_format)
        target.value = BufferValue(handle=handle, arrived=handle.forms.split(memory))

    def _memory(self, instance: Instance) -> torch.Tensor:
        """The bytes of a buffer in memory; whole pages where it lies in a block."""
        value = value_of(instance)
        if isinstance(value.place, Block):
            return value.place.data
        assert value.handle is not None
        memory = value.handle.memory()
        expect(instance, memory.numel())
        return memory

    def _collective(self, call: Call) -> None:
        assert self.ranks is not None
        target = self.places.place(call.writes[0])
        self.moved_bytes[call.op.stream] += do_collective(call, self.unit_of(call.op), target, self.ranks)

    def _send(self, call: Call) -> None:
        assert self.ranks is not None
        way = self.sends[call.op.key]
        header = self._headers.pop(call.op.key, None)
        coming = None if header is None else (self.places.place(call.writes[0]), header)
        content = content_of((call.reads if header is None else call.writes)[0])
        unit = self.unit_of(content) if isinstance(content, TiedGradients) else self.units[0]
        self.moved_bytes[call.op.stream] += do_send(call, unit, way, coming, self.ranks)

    def await_others(self, call: Call) -> None:
        """Returns when what the op receives, if it does, is on its way."""
        way = self.sends.get(call.op.key)
        if self.ranks is not None and way is not None and way[1] == self.ranks.rank:
            self._headers[call.op.key] = header_from(way, self.ranks)

    # ---- gradients ----

    def unit_of(self, named: Op | Params | Frozen | States | Gradients | TiedGradients) -> ModelUnit:
        return self._units[named.unit]

    def _accumulate(self, call: Call) -> None:
        total, new = self.places.place(call.writes[0]), value_of(call.reads[1])
        if new.gradients is None:
            total.block.data.view(self.dtype).add_(new.block.data.view(self.dtype))
        else:
            take_over(total, self.unit_of(call.op), new)

    def _cast(self, call: Call) -> None:
        """A gradient in fp32, on its way to host memory in systems that keep it so there."""
        old, cast = value_of(call.reads[0]), self.places.place(call.writes[0])
        unit, in_fp32 = self.unit_of(call.op), cast.block.data.view(torch.float32)
        if old.gradients is None:
            in_fp32.copy_(old.block.data.view(self.dtype))
        else:
            own = zip(in_fp32.split(unit.lengths), gradients_of(old, unit), strict=True)
            into, of = zip(*((part, gradient.view(-1)) for part, gradient in own if gradient is not None), strict=True)
            torch._foreach_copy_(into, of)

    def _norm(self, call: Call) -> None:
        """The norm of what this rank has of each parameter's gradient, as `clip_grad_norm_(foreach=False)` takes it."""
        unit = self.unit_of(call.op)
        self._has_shards = len(own_part(call.reads[0], unit, self.ranks)) < unit.num_trained
        ranks, value = self.ranks if self._has_shards else None, value_of(call.reads[0])
        parts = gradients_of(value, unit) if ranks is None else shard_gradients(value, unit, ranks)
        with threads_here(self.num_threads):
            norms = {
                self._position[id(p)]: torch.linalg.vector_norm(part, 2.0)
                for (_, p), part in zip(unit.parameters, parts, strict=True)
                if part is not None
            }
        on_host = self.device.to_host(torch.stack(list(norms.values()))) if norms else ()
        call.writes[0].value = BufferValue(norms=list(zip(norms, on_host, strict=True)))

    def _clip(self, call: Call) -> None:
        max_norm = self.training.max_grad_norm
        assert max_norm is not None
        pairs = [pair for x in call.reads for pair in value_of(x).norms]
        ranks = self.ranks if self._has_shards or self.stages else None
        self.grad_norm = global_norm(pairs, len(self.parameters), ranks, call.step, self.dtype)
        coefficient = torch.clamp(max_norm / (self.grad_norm + 1e-6), max=1.0)
        memory = self.places.place(call.writes[0]).block.data.zero_()
        memory[: coefficient.itemsize].view(coefficient.dtype).copy_(coefficient)

    # ---- update ----

    def _update(self, call: Call) -> None:
        unit, reads = self.unit_of(call.op), call.reads
        if (own := self._updates.get(call.op.key)) is None:
            own = self._updates[call.op.key] = self._updated(call, unit)
        views, layout = list[View](), own.layout
        for instance in call.writes:
            block = self.places.place(instance).block
            if isinstance(content_of(instance), States):
                views = block.once(call.op.key, own.views)
                continue
            if instance.over is None and not layout.has_master:
                raise ModelError(f"op {call.op.key!r} writes parameters, with no master copy to make them from")
            flat = block.once((call.op.key, self.dtype), functools.partial(own.values, self.dtype))
        grads = value_of(reads[0])
        if grads.is_absent:
            for view in views if layout.has_master else ():
                flat[view.begin - own.part.start :][: view.length].copy_(view.tensors["master"])
            return
        gradient: torch.Tensor | list[torch.Tensor]
        if grads.gradients is not None:
            gradient = flat_gradients(grads, unit, own.part)
        else:
            flat_gradient = grads.block.once((call.op.key, own.dtype), functools.partial(own.values, own.dtype))
            gradient = flat_gradient.to(self.dtype)  # exact either way
        clip = None if own.clip is None else self.clip_of(reads[own.clip])
        threads = threads_here(self.num_threads) if layout.optimizer.grain is None else nullcontext()
        with self.places.changing(call.step), threads:
            self.update(unit.name, flat, gradient, views, own.part, call.step - own.is_late, clip)

    def clip_of(self, instance: Instance) -> torch.Tensor:
        """What gradients are multiplied with, a scalar of the dtype that norms have."""
        return value_of(instance).block.data[: self.dtype.itemsize].view(self.dtype)[0]

    def _updated(self, call: Call, unit: ModelUnit) -> _Updated:
        of, reads = States.updated_by(call.op.key), [*map(content_of, call.reads)]
        own = own_part(call.reads[0], unit, self.ranks)
        has_states = any(isinstance(content_of(x), States) for x in call.writes)
        return _Updated(
            layout=self.layouts[unit.name],
            own=own,
            part=self.states_part(of) if has_states or of.num_parts > 1 else own,
            dtype=torch.float32 if isinstance(reads[0], CastGradients) else self.dtype,
            clip=next((k for k, content in enumerate(reads) if isinstance(content, Clip)), None),
            is_late=unit.name in self._updated_late,
        )

    def states_part(self, content: States) -> range:
        """The parameters whose states these are, of all or of this rank's shard."""
        unit, ranks = self.unit_of(content), self.ranks if content.unit in self._has_shards_of else None
        return shard_part(content, unit, ranks.rank, ranks.size) if ranks else self.layouts[unit.name].part(content)

    def update(
        self,
        name: str,
        params: torch.Tensor,
        gradient: torch.Tensor | Sequence[torch.Tensor],
        views: Sequence[View],
        part: range,
        step: int,
        clip: torch.Tensor | None = None,
    ) -> None:
        """The update of a part of a unit with the gradients of a step, from 0."""
        update_states(
            params, gradient, views, self.layouts[name], self.optimizer, part=part, step=step + 1,
            lr=self.learning_rate(step), clip=clip, segments=self.segments[name], label=name,
        )  # fmt: skip


def _copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """None, where a batch has saved nothing that goes there."""
    if targets:
        torch._foreach_copy_(targets, sources, non_blocking=True)  # type: ignore[arg-type]
