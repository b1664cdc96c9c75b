"""Ops that compute a unit: micro-batches on their way through the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tierplan.runtime.autograd.absent import refuse_count
from tierplan.runtime.autograd.cuts import check_input
from tierplan.runtime.autograd.flow import Flow, flow_of
from tierplan.runtime.autograd.micro_batch import MicroBatchRun
from tierplan.runtime.autograd.plain_values import PlainState
from tierplan.runtime.autograd.units import ModelUnit, first_trained
from tierplan.runtime.execution.gradients import (
    WithoutGradient,
    WrittenGradient,
    begin_gradients,
    end_gradients,
    refuse_left,
)
from tierplan.runtime.execution.instances import Call, Instance
from tierplan.runtime.execution.values import (
    REMEDY,
    BufferValue,
    InputHandle,
    SavedTensorsHandle,
    SizeError,
    begin_input,
    expect,
    expect_at_most,
    laid_out,
    value_of,
)
from tierplan.sim.contents import (
    Content,
    Frozen,
    Gradients,
    Input,
    InputGradient,
    KeptActs,
    Params,
    RecomputedActs,
    SavedActs,
    TiedGradients,
    parse_content,
)
from tierplan.sim.ranks import Turn, is_pipeline, turns
from tierplan.sim.schedule import Schedule

OF_PADDED = (
    "a batch in which nothing is padded has no mask in attention, and may save other tensors than a padded one, for "
    "which this schedule, which treats those of a block one by one, has no room: it fits padded batches alone. Pad "
    "each batch somewhere, or choose a plan that treats a block's alike (in-memory, full-recompute)"
)
OF_OTHERS = (
    "a padded batch was given, with zeros in its attention_mask, and the schedule is for batches without padding, "
    "which keep less: plan with --padded (in Python, Training(padded=True))"
)


def _by_kind(contents: Iterable[Content]) -> dict[type[Content], list[tuple[int, Content]]]:
    """By kind, the positions and the contents of it."""
    positions: dict[type[Content], list[tuple[int, Content]]] = {}
    for k, content in enumerate(contents):
        positions.setdefault(type(content), []).append((k, content))
    return positions


@dataclass(eq=False)
class Computing:
    """The ops of a model's units: forward, recompute and backward of micro-batches on their way."""

    units: Sequence[ModelUnit]
    schedule: Schedule
    begin_micro_batch: Callable[[int, int, Turn], MicroBatchRun]
    """Starts micro-batch m of a step, for a turn of this process."""
    before_computing: Callable[[int], None]
    """Called with the step where an op of the compute stream begins in the stream's own thread."""
    go_on: Callable[[str], Call]
    """Ends the op of a stream, and begins the next one, which is returned."""
    on_loss: Callable[[int, int, float], None]
    """Called with step, micro-batch and loss."""
    num_threads: int

    def __post_init__(self) -> None:
        assert self.schedule.step is not None
        self.expect = expect_at_most if self.schedule.step.training.padded else expect
        self._index = {unit.name: i for i, unit in enumerate(self.units)}
        self._turns, self._whole = turns(self.schedule), Turn(range(len(self.units)))
        """Of a pipeline, by key of an op that computes, the turn that it belongs to; and where all units run here."""
        self.flow = Flow() if is_pipeline(self.schedule) else flow_of(self.schedule, [*self._index])
        self._first_trained = first_trained(self.units)
        self._runs: dict[tuple[int, int, int], MicroBatchRun] = {}  # by step, micro-batch and the turn's first unit
        self._fronts: dict[tuple[int, int], PlainState] = {}  # by step and micro-batch, the model's plain values
        self.without = WithoutGradient()
        self._running: MicroBatchRun | None = None
        """Whose forward was the last op of the compute stream, where several threads help."""
        contents = {b.name: parse_content(b.content) for b in self.schedule.buffers}
        self._read = {op.key: _by_kind(map(contents.__getitem__, op.reads)) for op in self.schedule.ops}
        self._written = {op.key: _by_kind(map(contents.__getitem__, op.writes)) for op in self.schedule.ops}

    def close(self) -> None:
        """Ends micro-batches that are under way, and leaves none of their gradients."""
        for _, p in (named for unit in self.units if self._runs for named in unit.parameters):
            p.grad = None
        for batch_run in self._runs.values():
            batch_run.cancel()
        self._runs.clear()

    def _arrive(self, call: Call, batch_run: MicroBatchRun, wanted: type[Input | InputGradient], index: int) -> None:
        """What another rank has sent becomes a unit's input, or its gradient."""
        for instance, _ in self._reads(call, wanted):
            value = instance.value
            if isinstance(value, BufferValue) and value.handle is None:
                leaves = batch_run.skip_front(value.rng) if wanted is Input else batch_run.runs[index].leaves
                expect(instance, sum(leaf.nbytes for leaf in leaves))
                flat = value.block.data.split([x.nbytes for x in leaves])
                parts = [part.view(leaf.dtype).view(leaf.shape) for leaf, part in zip(leaves, flat, strict=True)]
                for leaf, t in zip(leaves, laid_out(parts, value.strides), strict=True):
                    if wanted is Input:
                        leaf.data = t
                    else:
                        leaf.grad = t
                InputHandle(leaves, is_gradient=wanted is InputGradient).begin(value)

    def _reads(self, call: Call, *kinds: type[Content]) -> list[tuple[Instance, Any]]:
        """What the op reads of these kinds, each with its content."""
        read = self._read[call.op.key]
        return [(call.reads[k], content) for kind in kinds for k, content in read.get(kind, ())]

    def _writes(self, call: Call, *kinds: type[Content]) -> list[tuple[Instance, Any]]:
        """What it writes of them."""
        written = self._written[call.op.key]
        return [(call.writes[k], content) for kind in kinds for k, content in written.get(kind, ())]

    def _unit(self, name: str) -> ModelUnit:
        return self.units[self._index[name]]

    def _bind(self, call: Call) -> None:
        """Makes the parameters that the op reads those of the model, and what else it reads autograd's."""
        for instance in call.reads:
            if isinstance(value := instance.value, BufferValue) and value.handle is not None:
                value.handle.use(value)
        for instance, content in self._reads(call, Params, Frozen):
            unit = self._unit(content.unit)
            part, block = unit.frozen if isinstance(content, Frozen) else unit, value_of(instance).block
            if part.bound is not block.data or block.unbind is None:
                block.unbind = part.unbind
                part.bind(block)

    def compute_with(self, batch_run: MicroBatchRun | None) -> None:
        """The thread of this micro-batch, or the stream's own, computes now and is the one with helpers."""
        if self._running is not None and self._running is not batch_run:
            self._running.rest()
        self._running = batch_run if self.num_threads > 1 else None

    def forward(self, call: Call) -> None:
        index, turn = self._index[call.op.unit], self._turn(call)
        key = self._run_key(call)
        if index == turn.units.start:
            self.before_computing(call.step)
            self._runs[key] = self.begin_micro_batch(call.step, call.op.micro_batch, turn)
        batch_run = self._runs[key]
        self.compute_with(batch_run)
        if index == turn.units.start:
            self._arrive(call, batch_run, Input, index)
        self._bind(call)

        def goes_on() -> bool:
            nonlocal call
            if call.op.key not in self.flow.followed:
                return False
            self._end_forward(call, batch_run)
            call = self.go_on(call.op.stream)
            self._bind(call)
            return True

        try:
            batch_run.run_forward(index, goes_on, is_in_one=call.op.micro_batch in self.flow.in_one)
            if index == turn.units.start and (turn.is_visit or turn.is_one_of):
                self._check_front(call, batch_run)
            self._end_forward(call, batch_run)
        except SizeError as error:
            if other := self._other_batch(batch_run):
                raise SizeError(f"{other}: {error}") from error
            raise

    def _other_batch(self, batch_run: MicroBatchRun) -> str:
        """What is to be said of a batch with no tensor of as many rows as the schedule's micro-batches have, whose
        tokens are in rows of another length, or which may be one without padding among padded ones, or the reverse."""
        assert self.schedule.step is not None
        training = self.schedule.step.training
        planned = training.per_device_train_batch_size
        rows = [shape[0] for shape, _ in batch_run.shapes if shape]
        lengths = {shape[1] for shape, dtype in batch_run.shapes if len(shape) == 2 and dtype == torch.int64}
        if planned in rows and len(lengths) == 1 and training.sequence_length not in lengths:
            return (
                f"a batch of sequences of {lengths.pop()} tokens was given, and the schedule is for "
                f"{training.sequence_length}: pad all of them to so many (padding='max_length'), or plan for those of "
                "the batch (sequence_length)"
            )
        if not rows or planned in rows:
            mask = batch_run.batch.get("attention_mask")
            is_padded = isinstance(mask, torch.Tensor) and not mask.all()
            return "" if is_padded == training.padded else OF_OTHERS if is_padded else OF_PADDED
        return (
            f"a batch of {rows[0]} sequences was given, and the schedule is of micro-batches of {planned}, into which "
            f"its plan may have cut those that were asked for. Give it batches of {planned}, as its step.training says"
        )

    def _check_front(self, call: Call, batch_run: MicroBatchRun) -> None:
        """Each turn leads the model through its front anew: it must have the same plain values there."""
        now = batch_run.hooks.values_of(0)
        self._fronts = {key: values for key, values in self._fronts.items() if key[0] == call.step}
        refuse_count("the model", self._fronts.setdefault((call.step, call.op.micro_batch), now), now)

    def _end_forward(self, call: Call, batch_run: MicroBatchRun) -> None:
        index, turn = self._index[call.op.unit], self._turn(call)
        run = batch_run.runs[index]
        recorder = run.recorder
        assert recorder is not None
        kept = recorder.kept_bytes
        if index in self.flow.inputs_away:
            check_input(call.op.unit, run.leaves, run.handed_over)
        for instance, _ in self._writes(call, Input):
            value = begin_input(instance, batch_run.hand_over(index + 1, instance.buffer.size_bytes))
            value.rng = batch_run.rng if turn.is_visit or index + 1 == turn.units.stop else ()
        for instance, _ in self._writes(call, KeptActs, RecomputedActs):
            self.expect(instance, kept)
            kept = 0
        for instance, content in self._writes(call, SavedActs):
            saved = [recorder.away.pop(i) for i in content.indices if i in recorder.away]
            self.expect(instance, sum([each.size_bytes for each in saved]))
            instance.value = SavedTensorsHandle(saved).begin()
        if kept:
            raise SizeError(
                f"op {call.op.key!r} saved {kept:,} bytes for backward that no buffer of the schedule is declared for; "
                f"the unit saves tensors of {recorder.sizes} bytes here. {REMEDY}"
            )
        if batch_run.runs[-1].recorder is not None and index + 1 == len(self.units):
            loss, step, m = batch_run.loss, call.step, call.op.micro_batch
            call.at_end = [*call.at_end, lambda: self.on_loss(step, m, loss.item())]
        if turn.is_visit and not turn.goes_back and index + 1 == turn.units.stop:
            self._runs.pop(self._run_key(call)).cancel()

    def _turn(self, call: Call) -> Turn:
        return self._turns.get(call.op.key, self._whole)

    def _run_key(self, call: Call) -> tuple[int, int, int]:
        return call.step, call.op.micro_batch, self._turn(call).units.start

    def recompute(self, call: Call) -> None:
        if self._turn(call).is_visit:
            self.forward(call)
            return
        index, batch_run = self._index[call.op.unit], self._runs[self._run_key(call)]
        self._bind(call)
        outputs = self._writes(call, Input)
        made_bytes = batch_run.run_again(index, makes_output=bool(outputs))
        for instance, _ in self._writes(call, KeptActs, RecomputedActs):
            self.expect(instance, made_bytes)
        for instance, _ in outputs:
            begin_input(instance, batch_run.runs[index + 1].leaves)

    def backward(self, call: Call) -> None:
        index, units = self._index[call.op.unit], self._turn(call).units
        batch_run = self._runs[key := self._run_key(call)]
        if index + 1 == units.stop:
            self._arrive(call, batch_run, InputGradient, index + 1)
        self._bind(call)
        tied = {content.unit: instance for instance, content in self._reads(call, TiedGradients)}
        written = []
        for instance, content in self._writes(call, Gradients, TiedGradients):
            is_whole = isinstance(content, Gradients)
            of_head = tied.get(content.unit) if is_whole else None
            written.append(WrittenGradient(instance, self._unit(content.unit), of_head, is_whole))
        looks = begin_gradients(written)
        batch_run.run_backward(index)
        self.without.note(call.step, end_gradients(written, looks))
        if (owner := self.units[index].shares) is not None:
            refuse_left(call.op.unit, self._unit(owner))
        for instance, _ in self._writes(call, InputGradient):
            begin_input(instance, batch_run.runs[index].leaves, is_gradient=True)
        if index == max(self._first_trained, units.start):
            self._runs.pop(key)
            if units.stop < len(self.units):
                batch_run.cancel()
