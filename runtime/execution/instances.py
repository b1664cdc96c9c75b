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
    num_left: int = 0
    """Readers that have not ended yet."""
    num_unissued: int = 0
    """Those that have not been put on their stream yet."""
    private_to: str | None = None
    """The one stream of the device that writes and reads it, if there is one."""
    is_reused: bool = False
    outlives: bool = False
    """It is an initial buffer of the step that follows the last opened one, so it is not freed yet."""
    outside_bytes: int = 0
    """Of it, in its tier, outside the memory that the bodies have there for such buffers."""
    over: Instance | None = field(default=None, repr=False)
    """The instance whose bytes this one takes over, until its writer has ended."""
    is_free: bool = False

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
    at_end: Sequence[Callable[[], None]] = field(default=(), repr=False)
    """Called when what the body has put on a stream is done. Must be quick."""


@dataclass(eq=False, slots=True)
class OpRun(Call):
    """As the executor sees it."""

    waiting_for: int = 0
    needs: Mapping[str, int] = field(default_factory=dict)
    grants_left: int = 0
    followers: Sequence[OpRun] = field(default=(), repr=False)
    """Ops that wait for it."""
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
    behind: Sequence[OpRun] = field(default=(), repr=False)
    """Ops that were issued, and that its stream has to wait for."""
    begun: Event | None = None
    ended: Event | None = None
    freed: Sequence[Instance] = field(default=(), repr=False)
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
        self.behind = ()


@dataclass(frozen=True, slots=True)
class _OpPlan:
    """What is the same for an op in every step. Ops are given by their positions in a step."""

    op: Op
    is_ahead: bool
    needs: Mapping[str, int]
    """Bytes that it is granted, by tier."""
    num_inputs: int
    """Ops of the step that it waits for."""
    followers: Sequence[int]
    """Those that wait for it."""
    earlier: Sequence[tuple[int, int]]
    """Ops of steps before that it waits for: so many steps ago, and the position."""
    writes: Sequence[tuple[Buffer, int, str | None, bool, bool]]
    """By buffer, the number of its readers, and `private_to`, `is_reused` and `outlives` of its instance."""


class Unrolling:
    """The buffers that outlive steps, by the names that the last opened step knows them by."""

    def __init__(self, schedule: Schedule, held_bytes: Mapping[str, int], streams_ahead: Container[str]) -> None:
        self._schedule, self._held_bytes = schedule, held_bytes
        self._buffers = schedule.buffers_by_name()
        reused = {b.reuses for b in schedule.buffers if b.reuses is not None}
        self._lifetimes = {b.name: (b.name in reused, b.becomes is not None) for b in schedule.buffers}
        """Whether another buffer takes over its bytes, and whether it outlives the step."""
        self._successor = {b.becomes: b.name for b in schedule.buffers if b.becomes is not None}
        self._readers: dict[str, list[int]] = {b.name: [] for b in schedule.buffers}
        """Ops that read a buffer, by their positions."""
        for k, op in enumerate(schedule.ops):
            for name in op.reads:
                self._readers[name].append(k)
        self._plans = self._planned(streams_ahead)
        self._names: dict[str, Instance] = {}
        self._before: list[list[OpRun]] = []
        """The ops of the steps before, the last one first, as far as later ones may wait for them."""
        self._begins: dict[int, dict[str, Instance]] = {}
        """By step that has not ended, the initial buffers that it begins with."""
        self.carried: dict[str, Instance] = {b.name: Instance(b) for b in schedule.buffers if b.initial}
        """The initial buffers as they stand between runs."""

    @property
    def lost(self) -> list[str]:
        """Initial buffers that a second step would lack."""
        return sorted(b.name for b in self._schedule.buffers if b.initial and b.name not in self._successor)

    def _planned(self, streams_ahead: Container[str]) -> list[_OpPlan]:
        ops, readers = self._schedule.ops, self._readers
        position = {op.key: k for k, op in enumerate(ops)}
        writer = {name: k for k, op in enumerate(ops) for name in op.writes}
        inputs, earlier = list[set[int]](), list[set[tuple[int, int]]]()
        for k, op in enumerate(ops):
            over = [old for name in op.writes if (old := self._buffers[name].reuses) is not None]
            inputs.append({position[key] for key in op.after} | {writer[name] for name in op.reads if name in writer})
            inputs[k].update(j for name in over for j in readers[name] if j < k)
            past = {name: list(enumerate(self._names_before(name), start=1)) for name in op.reads}
            earlier.append({(ago, writer[old]) for name in op.reads for ago, old in past[name] if old in writer})
            earlier[k].update((ago, j) for name in over for ago, old in past[name] for j in readers[old])
        self._most_ago = max((ago for waited_for in earlier for ago, _ in waited_for), default=0)
        followers: list[list[int]] = [[] for _ in ops]
        for k, waited_for in enumerate(inputs):
            for j in waited_for:
                followers[j].append(k)
        plans = []
        for k, op in enumerate(ops):
            is_ahead, needs, writes = op.stream in streams_ahead, dict[str, int](), []
            for b in (self._buffers[name] for name in op.writes):
                private_to = self._private_to(op.stream if is_ahead else None, b.name)
                writes.append((b, len(readers[b.name]), private_to, *self._lifetimes[b.name]))
                if b.reuses is None and b.size_bytes > 0:
                    needs[b.tier] = needs.get(b.tier, 0) + self._held_bytes[b.name]
            plans.append(_OpPlan(op, is_ahead, needs, len(inputs[k]), followers[k], sorted(earlier[k]), writes))
        return plans

    def _private_to(self, own: str | None, name: str) -> str | None:
        """The stream that alone has used a buffer so far, where all that read it under this name are on it, too."""
        return own if all(self._schedule.ops[k].stream == own for k in self._readers[name]) else None

    def _names_before(self, name: str) -> list[str]:
        """The names that an initial buffer had in the step before, in the one before that, and so on."""
        names: list[str] = []
        while (old := self._successor.get(name)) is not None and old not in names:
            names.append(name := old)
        return names

    def open(self, step: int) -> list[OpRun]:
        """The ops of the next step, in order, knowing what they wait for."""
        names = self._names = self._initial_names()
        self._begins[step] = dict(names)
        for name, instance in names.items():
            is_reused, instance.outlives = self._lifetimes[name]
            instance.is_reused |= is_reused
            instance.num_left += len(self._readers[name])
            instance.num_unissued += len(self._readers[name])
            if instance.private_to is not None:
                instance.private_to = self._private_to(instance.private_to, name)
        before, nodes = self._before, list[OpRun]()
        for plan in self._plans:
            op, needs = plan.op, plan.needs
            reads, writes = [*map(names.__getitem__, op.reads)], list[Instance]()
            node = OpRun(op, step, reads, writes, (), plan.num_inputs, needs, len(needs))
            nodes.append(node)
            for b, num, private_to, is_reused, outlives in plan.writes:
                instance = names[b.name] = Instance(b, None, num, num, private_to, is_reused, outlives)
                writes.append(instance)
                if b.reuses is not None:
                    instance.over = names[b.reuses]
            for ago, k in plan.earlier:
                if ago > len(before):
                    continue
                earlier = before[ago - 1][k]
                if earlier.is_issued and not earlier.has_ended and plan.is_ahead:
                    node.behind = (*node.behind, earlier)
                elif not earlier.has_ended:
                    earlier.followers = (*earlier.followers, node)
                    node.waiting_for += 1
        for node, plan in zip(nodes, self._plans, strict=True):
            node.followers = [*map(nodes.__getitem__, plan.followers)]
        self._before = [nodes, *before][: self._most_ago]
        return nodes

    def _initial_names(self) -> dict[str, Instance]:
        """The initial buffers of the step to open: what outlives the step before it, or what was carried."""
        if not self._names:
            return dict(self.carried)
        return {name: self._names[self._successor[name]] for name in self.carried if name in self._successor}

    def end(self, step: int) -> None:
        """The step has ended."""
        del self._begins[step]

    def carry_over(self, num_steps: int) -> None:
        """What outlives the last step that has ended, after so many, takes its place among the initial buffers."""
        self.carried = self._begins.get(num_steps) or self._initial_names()
        self._begins.clear()
        for name, instance in self.carried.items():
            instance.buffer = self._buffers[name]
            instance.is_reused, instance.private_to = False, None
            instance.num_left = instance.num_unissued = 0
        self._names, self._before = {}, []
