"""Buffers and ops in one step of an execution, as bodies and the executor see them; and steps, each joined to the one
before as an execution opens it, as `columns.unroll` does beforehand.

ExecutionError(RuntimeError)   the schedule was not executed to its end
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field

from tierplan.runtime.execution.device import Event
from tierplan.sim.schedule import Buffer, Op, Schedule


class ExecutionError(RuntimeError):
    """The schedule was not executed to its end."""


@dataclass(eq=False, slots=True)
class Instance:
    """One buffer in one step, or one that was there before: what is granted, filled, read and freed."""

    buffer: Buffer
    """Under the name of the step that wrote it."""
    value: object = None
    """What the bodies keep in it."""
    num_unissued: int = 0
    """Readers that have not been put on their stream yet."""
    private_to: str | None = None
    """The one stream of the device that writes and reads it, if there is one."""
    is_reused: bool = False
    outlives: bool = False
    """It is an initial buffer of the step that follows the last opened one, so it is not freed yet."""
    outside_bytes: int = 0
    """Of it, in its tier, outside the memory that the bodies have there for such buffers."""
    over: Instance | None = field(default=None, repr=False)
    """The instance whose bytes this one takes over, until its writer has ended."""
    writer: OpRun | None = field(default=None, repr=False)
    readers: list[OpRun] = field(default_factory=list, repr=False)
    """Ops that have not ended yet; who writes over it waits for them."""

    is_free: bool = False

    @property
    def is_dead(self) -> bool:
        return not self.readers and not self.is_reused and not self.outlives and not self.is_free

    @property
    def is_dead_to_its_stream(self) -> bool:
        """What comes behind on the one stream that has used it may have its memory."""
        is_unused = self.num_unissued == 0 and not self.is_reused and not self.outlives and not self.is_free
        return is_unused and self.private_to is not None and self.outside_bytes > 0


@dataclass(eq=False, slots=True)
class Call:
    """One op in one step, as its body sees it."""

    op: Op
    step: int
    reads: Sequence[Instance]
    writes: Sequence[Instance]
    at_end: list[Callable[[], None]] = field(default_factory=list, repr=False)
    """Called when what the body has put on a stream is done. Must be quick."""


@dataclass(eq=False, slots=True)
class OpRun(Call):
    """As the executor sees it."""

    waiting_for: int = 0
    followers: list[OpRun] = field(default_factory=list, repr=False)
    needs: Mapping[str, int] = field(default_factory=dict)
    grants_left: int = 0
    is_reached: bool = False
    is_eligible: bool = False
    is_started: bool = False
    has_ended: bool = False
    free_ns: int = 0
    ready_ns: int = 0
    granted_ns: int = 0
    start_ns: int = 0
    is_issued: bool = False
    """Its body has put it on a stream of the device, where it may not be done yet."""
    behind: list[OpRun] = field(default_factory=list, repr=False)
    """Ops that were issued, and that its stream has to wait for."""
    begun: Event | None = None
    ended: Event | None = None
    freed: list[Instance] = field(default_factory=list, repr=False)
    """What its stream has back already, and others when it has ended."""
    end_ns: int = 0
    coreless_ns: int = 0
    late_ns: int = 0

    def take_times(self, zero_ns: int, last_end_ns: int) -> None:
        """Of an op that was issued and has ended, by its events; times count from the first one."""
        assert self.begun is not None
        assert self.ended is not None
        self.free_ns = max(self.free_ns, last_end_ns)
        self.ready_ns = max(self.ready_ns, *(earlier.end_ns for earlier in self.behind), 0)
        self.start_ns = max(self.begun.time_ns() - zero_ns, self.free_ns, self.ready_ns)
        self.end_ns = max(self.ended.time_ns() - zero_ns, self.start_ns)
        self.granted_ns = min(max(self.granted_ns, self.free_ns, self.ready_ns), self.start_ns)
        self.behind = []


class Unrolling:
    """The buffers that outlive steps, by the names that the last opened step knows them by."""

    def __init__(self, schedule: Schedule, held_bytes: Mapping[str, int], streams_ahead: Container[str]) -> None:
        self._schedule, self._held_bytes, self._streams_ahead = schedule, held_bytes, streams_ahead
        self._buffers = schedule.buffers_by_name()
        reused = {b.reuses for b in schedule.buffers if b.reuses is not None}
        self._lifetimes = {b.name: (b.name in reused, b.becomes is not None) for b in schedule.buffers}
        """Whether another buffer takes over its bytes, and whether it outlives the step."""
        self._successor = {b.becomes: b.name for b in schedule.buffers if b.becomes is not None}
        self._needs = [self._needed(op) for op in schedule.ops]
        self._names: dict[str, Instance] = {}
        self.carried: dict[str, Instance] = {b.name: Instance(b) for b in schedule.buffers if b.initial}
        """The initial buffers as they stand between runs."""

    @property
    def lost(self) -> list[str]:
        """Initial buffers that a second step would lack."""
        return sorted(b.name for b in self._schedule.buffers if b.initial and b.name not in self._successor)

    def _needed(self, op: Op) -> dict[str, int]:
        needs: dict[str, int] = {}
        for b in (self._buffers[name] for name in op.writes):
            if b.reuses is None and b.size_bytes > 0:
                needs[b.tier] = needs.get(b.tier, 0) + self._held_bytes[b.name]
        return needs

    def open(self, step: int) -> list[OpRun]:
        """The ops of the next step, in order, knowing what they wait for."""
        names = self._names = self._initial_names()
        for name, instance in names.items():
            is_reused, instance.outlives = self._lifetimes[name]
            instance.is_reused |= is_reused
        nodes: dict[str, OpRun] = {}
        for op, needs in zip(self._schedule.ops, self._needs, strict=True):
            is_ahead = op.stream in self._streams_ahead
            reads, writes = [names[name] for name in op.reads], list[Instance]()
            node = nodes[op.key] = OpRun(op, step, reads, writes, needs=needs, grants_left=len(needs))
            inputs = {nodes[key] for key in op.after} if op.after else set()
            for instance in reads:
                instance.num_unissued += 1
                if instance.private_to != op.stream:
                    instance.private_to = None
                if instance.writer is not None:
                    inputs.add(instance.writer)
                instance.readers.append(node)
            for name in op.writes:
                b = self._buffers[name]
                instance = names[name] = Instance(b, None, 0, op.stream if is_ahead else None, *self._lifetimes[name])
                instance.writer = node
                writes.append(instance)
                if b.reuses is not None:
                    instance.over = names[b.reuses]
                    inputs.update(instance.over.readers)
            inputs.discard(node)
            for earlier in inputs:
                if earlier.is_issued and is_ahead:
                    node.behind.append(earlier)
                elif not earlier.has_ended:
                    earlier.followers.append(node)
                    node.waiting_for += 1
        return list(nodes.values())

    def _initial_names(self) -> dict[str, Instance]:
        """The initial buffers of the step to open: what outlives the step before it, or what was carried."""
        if not self._names:
            return dict(self.carried)
        return {name: self._names[self._successor[name]] for name in self.carried if name in self._successor}

    def carry_over(self, *, is_last_run: bool) -> None:
        """What outlives the last step takes its place among the initial buffers; that step may not have run."""
        self.carried = (
            self._initial_names()
            if is_last_run
            else {name: self._names[name] for name in self.carried if name in self._names}
        )
        for name, instance in self.carried.items():
            instance.buffer = self._buffers[name]
            instance.readers, instance.writer, instance.is_reused = [], None, False
            instance.num_unissued, instance.private_to = 0, None
        self._names = {}
