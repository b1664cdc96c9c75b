"""Ops that compute a unit: micro-batches on their way through the model.

What an op's buffers are to it is worked out once, by their positions among what it reads and writes, since an op is the
same in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tierplan.runtime.autograd.absent import refuse_count
from tierplan.runtime.autograd.flow import Flow, flow_of
from tierplan.runtime.autograd.micro_batch import MicroBatchRun
from tierplan.runtime.autograd.plain_values import PlainState
from tierplan.runtime.autograd.units import FlatParameters, ModelUnit, first_trained
from tierplan.runtime.execution.gradients import GradientRole, WithoutGradient, begin_gradients, end_gradients
from tierplan.runtime.execution.instances import Call
from tierplan.runtime.execution.values import (
    REMEDY,
    BufferValue,
    InputHandle,
    SavedTensorsHandle,
    SizeError,
    begin_input,
    content_of,
    expect,
    expect_at_most,
    value_of,
)
from tierplan.sim.contents import (
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
from tierplan.sim.schedule import Buffer, Op, Schedule


class Roles(NamedTuple):
    """What the buffers of one op are to it."""

    parameters: tuple[tuple[int, FlatParameters], ...]
    """That it reads, and whose memory they are."""
    outputs: tuple[int, ...]
    """Inputs of units that it writes."""
    kept: tuple[int, ...]
    """Saved tensors that stay, or are made again."""
    saved: tuple[tuple[int, tuple[int, ...]], ...]
    """Saved tensors that go their own way, with their indices."""
    gradients: tuple[GradientRole, ...]
    input_gradients: tuple[int, ...]


def _roles_of(op: Op, buffers: Mapping[str, Buffer], unit_of: Callable[[str], ModelUnit]) -> Roles:
    """Those of a computing op's buffers; `buffers` and `unit_of` know them by name."""
    reads = [parse_content(buffers[name].content) for name in op.reads]
    writes = [parse_content(buffers[name].content) for name in op.writes]
    tied_at = {content.unit: k for k, content in enumerate(reads) if isinstance(content, TiedGradients)}
    parameters, saved, gradients = [], [], []
    for k, content in enumerate(reads):
        if isinstance(content, Params | Frozen):
            unit = unit_of(content.unit)
            parameters.append((k, unit if isinstance(content, Params) else unit.frozen))
    for k, content in enumerate(writes):
        if isinstance(content, SavedActs):
            saved.append((k, content.indices))
        elif isinstance(content, Gradients | TiedGradients):
            is_whole = isinstance(content, Gradients)
            tied = tied_at.get(content.unit) if is_whole else None
            gradients.append(GradientRole(k, unit_of(content.unit), tied, is_whole))

    def written(*kinds: type) -> tuple[int, ...]:
        return tuple(k for k, content in enumerate(writes) if isinstance(content, kinds))

    kept = written(KeptActs, RecomputedActs)
    return Roles(tuple(parameters), written(Input), kept, tuple(saved), tuple(gradients), written(InputGradient))


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
        buffers = self.schedule.buffers_by_name()
        self._roles = {
            op.key: _roles_of(op, buffers, lambda name: self.units[self._index[name]])
            for op in self.schedule.ops
            if op.kind in ("forward", "recompute", "backward")
        }

    def close(self) -> None:
        """Ends micro-batches that are under way."""
        for batch_run in self._runs.values():
            batch_run.cancel()
        self._runs.clear()

    def _arrive(self, call: Call, batch_run: MicroBatchRun, wanted: type[Input | InputGradient], index: int) -> None:
        """What another rank has sent becomes a unit's input, or its gradient."""
        for instance in call.reads:
            value = instance.value
            if isinstance(content_of(instance), wanted) and isinstance(value, BufferValue) and value.handle is None:
                leaves = batch_run.skip_front(value.rng) if wanted is Input else batch_run.runs[index].leaves
                expect(instance, sum(leaf.nbytes for leaf in leaves))
                for leaf, part in zip(leaves, value.block.data.split([x.nbytes for x in leaves]), strict=True):
                    t = part.view(leaf.dtype).view(leaf.shape)
                    if wanted is Input:
                        leaf.data = t
                    else:
                        leaf.grad = t
                InputHandle(leaves, is_gradient=wanted is InputGradient).begin(value)

    def _bind(self, call: Call) -> Roles:
        """Makes the parameters that the op reads those of the model, and what else it reads autograd's."""
        for instance in call.reads:
            if isinstance(value := instance.value, BufferValue) and value.handle is not None:
                value.handle.use(value)
        roles = self._roles[call.op.key]
        for k, part in roles.parameters:
            block = value_of(call.reads[k]).block
            if part.bound is not block.data or block.unbind is None:
                block.unbind = part.unbind
                part.bind(block)
        return roles

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
        roles = self._bind(call)

        def goes_on() -> bool:
            nonlocal call, roles
            if call.op.key not in self.flow.followed:
                return False
            self._end_forward(call, roles, batch_run)
            call = self.go_on(call.op.stream)
            roles = self._bind(call)
            return True

        batch_run.run_forward(index, goes_on, is_in_one=call.op.micro_batch in self.flow.in_one)
        if index == turn.units.start and (turn.is_visit or turn.is_one_of):
            self._check_front(call, batch_run)
        self._end_forward(call, roles, batch_run)

    def _check_front(self, call: Call, batch_run: MicroBatchRun) -> None:
        """Each turn leads the model through its front anew: it must have the same plain values there."""
        now = batch_run.hooks.values_of(0)
        self._fronts = {key: values for key, values in self._fronts.items() if key[0] == call.step}
        refuse_count("the model", self._fronts.setdefault((call.step, call.op.micro_batch), now), now)

    def _end_forward(self, call: Call, roles: Roles, batch_run: MicroBatchRun) -> None:
        index, turn = self._index[call.op.unit], self._turn(call)
        recorder = batch_run.runs[index].recorder
        assert recorder is not None
        kept = recorder.kept_bytes
        for k in roles.outputs:
            value = begin_input(call.writes[k], batch_run.hand_over(index + 1, call.writes[k].buffer.size_bytes))
            value.rng = batch_run.rng if turn.is_visit or index + 1 == turn.units.stop else ()
        for k in roles.kept:
            self.expect(call.writes[k], kept)
            kept = 0
        for k, indices in roles.saved:
            saved = [recorder.away.pop(i) for i in indices if i in recorder.away]
            self.expect(call.writes[k], sum([each.size_bytes for each in saved]))
            call.writes[k].value = SavedTensorsHandle(saved).begin()
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
        roles = self._bind(call)
        made_bytes = batch_run.run_again(index, makes_output=bool(roles.outputs))
        for k in roles.kept:
            self.expect(call.writes[k], made_bytes)
        for k in roles.outputs:
            begin_input(call.writes[k], batch_run.runs[index + 1].leaves)

    def backward(self, call: Call) -> None:
        index, units = self._index[call.op.unit], self._turn(call).units
        batch_run = self._runs[key := self._run_key(call)]
        if index + 1 == units.stop:
            self._arrive(call, batch_run, InputGradient, index + 1)
        roles = self._bind(call)
        looks = begin_gradients(call, roles.gradients)
        batch_run.run_backward(index)
        self.without.note(call.step, end_gradients(call, roles.gradients, looks))
        for k in roles.input_gradients:
            begin_input(call.writes[k], batch_run.runs[index].leaves, is_gradient=True)
        if index == max(self._first_trained, units.start):
            self._runs.pop(key)
            if units.stop < len(self.units):
                batch_run.cancel()
