"""The four rules of the schedule language (docs/design.md), as what an execution knows of its ops, buffers and tiers.

`Rules` says what comes next on a stream (rule 1), what an op still waits for (rule 2), grants memory in list order
(rule 3) and takes it back (rule 4). It has no threads and does no work: whoever calls it has the one lock that keeps
callers apart, and hears of each op that may start. All times are nanoseconds since the first run.

Steps run back to back: a step is *opened* (joined to the one before, as `columns.unroll` does) when a stream reaches
the step before it, so a stream that is done with one step goes on with the next.

TierFullError(ExecutionError)   no op can go on for want of memory in a tier; names op, tier and holders
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import KW_ONLY, dataclass

from tierplan.runtime.execution.instances import ExecutionError, Instance, OpRun, Unrolling
from tierplan.sim.contents import step_prefix
from tierplan.sim.schedule import Op, Schedule
from tierplan.sim.trace import MemoryEvent, Span


class TierFullError(ExecutionError):
    """No op can go on for want of memory in a tier. Nothing was allocated beyond its capacity."""


class Ledger:
    """What each tier holds: bytes as they are granted and freed, whose they are, and the most that ever were."""

    def __init__(self, schedule: Schedule) -> None:
        tiers = {t.name: t for t in schedule.tiers}
        self.capacity_bytes = {name: tier.capacity_bytes for name, tier in tiers.items()}
        self.held_bytes = {b.name: tiers[b.tier].held_bytes(b.size_bytes) for b in schedule.buffers}
        """What buffers hold in their tiers, by name."""
        self.used_bytes = dict.fromkeys(tiers, 0)
        self.peak_bytes = dict.fromkeys(tiers, 0)
        self.held: dict[Instance, None] = {}
        self.events: list[MemoryEvent] = []
        self.is_noted = True
        """Events are kept."""
        self._private_bytes: dict[str, dict[str, int]] = {name: {} for name in tiers}
        """By tier and stream, bytes that are that stream's again, and nobody else's yet."""

    def hold(self, now_ns: int, instance: Instance) -> int:
        """The bytes that it holds from now on."""
        b = instance.buffer
        tier, held_bytes = b.tier, self.held_bytes[b.name]
        self.held[instance] = None
        used_bytes = self.used_bytes[tier] = self.used_bytes[tier] + held_bytes
        if used_bytes > self.peak_bytes[tier]:
            self.peak_bytes[tier] = used_bytes
        if self.is_noted:
            self._note(now_ns, instance, 1)
        return held_bytes

    def drop(self, now_ns: int, instance: Instance) -> None:
        self.held.pop(instance, None)  # an empty one was never granted
        self.used_bytes[instance.buffer.tier] -= self.held_bytes[instance.buffer.name]
        if self.is_noted:
            self._note(now_ns, instance, -1)

    def keep_private(self, instance: Instance, stream: str, sign: int) -> None:
        """What was dropped is free for this stream alone; with sign -1, for everybody."""
        private = self._private_bytes[instance.buffer.tier]
        private[stream] = private.get(stream, 0) + sign * self.held_bytes[instance.buffer.name]

    def take_over(self, now_ns: int, instance: Instance, old: Instance) -> None:
        """The bytes are another buffer's."""
        if self.is_noted and old.buffer.kind != instance.buffer.kind:
            self._note(now_ns, old, -1)
            self._note(now_ns, instance, 1)
        self.held.pop(old, None)
        self.held[instance] = None

    def has_room(self, tier: str, node: OpRun) -> bool:
        return node.needs[tier] <= self._free_bytes(tier, node.op.stream)

    def _free_bytes(self, tier: str, stream: str) -> int:
        """For an op of this stream."""
        free_bytes = self.capacity_bytes[tier] - self.used_bytes[tier]
        if private := self._private_bytes[tier]:
            free_bytes -= sum(size for owner, size in private.items() if owner != stream)
        return free_bytes

    def full(self, tier: str, node: OpRun) -> TierFullError:
        """Nothing runs, and this op is next in the tier and does not fit."""
        held = [x.buffer for x in self.held if x.buffer.tier == tier]
        largest = sorted(((self.held_bytes[b.name], b.name) for b in held), reverse=True)[:5]
        return TierFullError(
            f"op {node.op.key!r} of step {node.step} wants {node.needs[tier]:,} bytes in tier {tier!r}, but "
            f"{self._free_bytes(tier, node.op.stream):,} of {self.capacity_bytes[tier]:,} are free and nothing that "
            f"still runs will free more; held by {', '.join(f'{n} {size:,} B' for size, n in largest) or 'nothing'}. "
            f"Raise the capacity of {tier!r}, or choose a plan that keeps less there"
        )

    def _note(self, now_ns: int, instance: Instance, sign: int) -> None:
        b = instance.buffer
        if b.size_bytes:
            self.events.append(MemoryEvent(now_ns, b.tier, b.kind, sign * self.held_bytes[b.name]))


@dataclass(eq=False)
class Rules:
    """One execution of a schedule, between its steps and in them."""

    schedule: Schedule
    streams_ahead: Collection[str]
    """Those of a device that works by itself."""
    _: KW_ONLY
    first_step: int
    trace_end: float
    """Spans and memory events are kept before this step."""
    on_start: Callable[[OpRun], None]
    """Called with each op that its stream has come to, when it may start."""
    on_step_end: Callable[[], None]
    """Called when the last op of a step has ended."""
    on_grant: Callable[[Op, Instance, int], None]
    release: Callable[[Instance], None]
    on_free: Callable[[Instance], None]

    def __post_init__(self) -> None:
        schedule = self.schedule
        self.zero_ns = 0
        """When the first run was, by `time.perf_counter_ns`."""
        self.ledger = Ledger(schedule)
        self.unrolling = Unrolling(schedule, self.ledger.held_bytes, self.streams_ahead)
        self.at: dict[str, OpRun | None] = {}
        """By stream, the op that it has come to; None where there is no more to do."""
        self.end = self.num_begun = self.first_step
        """The step behind the last one that is to run, and behind the last one that a stream has begun."""
        self.num_running = 0
        """Of streams that have not come to their next op, and of ops that have started and not ended."""
        self.step_ends_ns: list[int] = []
        self.spans: list[Span] = []
        self._num_opened = self.first_step
        self._queue: dict[str, deque[OpRun]] = {stream: deque() for stream in schedule.streams}
        self._grants: dict[str, deque[OpRun]] = {name: deque() for name in self.ledger.capacity_bytes}
        self._ops_left: dict[int, int] = {}
        self._latest_ns: dict[int, int] = {}
        read = {name for op in schedule.ops for name in op.reads}
        for name, instance in self.unrolling.carried.items():
            if name in read or instance.buffer.becomes is not None:
                self.ledger.hold(0, instance)

    def now_ns(self) -> int:
        return time.perf_counter_ns() - self.zero_ns

    # ---- steps ----

    def open_step(self) -> None:
        nodes = self.unrolling.open(self._num_opened)
        for node in nodes:
            self._queue[node.op.stream].append(node)
            for tier in node.needs:
                self._grants[tier].append(node)
        self._ops_left[self._num_opened], self._latest_ns[self._num_opened] = len(nodes), 0
        self._num_opened += 1

    def carry_over(self) -> None:
        """After the last step that has ended. When it was stopped early, or failed, others were opened ahead."""
        self.unrolling.carry_over(self.first_step + len(self.step_ends_ns))
        self._num_opened = self.end
        self._ops_left.clear()
        for nodes in (*self._queue.values(), *self._grants.values()):
            nodes.clear()

    # ---- before an op ----

    def come_to_next(self, stream: str) -> OpRun | None:
        """Takes the stream's next op off its list, and opens a step where it is the first to reach the one before."""
        queue, node = self._queue[stream], None
        if queue and queue[0].step < self.end:
            node = queue.popleft()
            if node.step >= self.num_begun:
                self.num_begun = node.step + 1
                self.ledger.is_noted = node.step < self.trace_end
            if node.step + 1 == self._num_opened < self.end:
                self.open_step()
            node.free_ns = self.now_ns()
        self.at[stream] = node
        return node

    def reach(self, node: OpRun, now_ns: int) -> None:
        """The op that its stream has come to starts as soon as it may."""
        node.is_reached = True
        self.num_running -= 1  # until `_start`
        if node.waiting_for == 0:
            self._make_eligible(node, now_ns)

    def _make_eligible(self, node: OpRun, now_ns: int) -> None:
        node.is_eligible = True
        if node.grants_left == 0:
            self._start(node, now_ns)
        else:
            self._grant(node.needs, now_ns)

    def _grant(self, tiers: Iterable[str], now_ns: int) -> None:
        """Grants memory of each tier in list order, as far as the next op is eligible and fits."""
        for tier in tiers:
            queue = self._grants[tier]
            while queue and queue[0].is_eligible and self.ledger.has_room(tier, queue[0]):
                node = queue.popleft()
                for instance in node.writes:
                    b = instance.buffer
                    if b.tier == tier and b.reuses is None:
                        self.on_grant(node.op, instance, self.ledger.hold(now_ns, instance))
                node.grants_left -= 1
                if node.grants_left == 0:
                    self._start(node, now_ns)

    def _start(self, node: OpRun, now_ns: int) -> None:
        node.is_started = True
        node.granted_ns = now_ns if node.needs else max(node.free_ns, node.ready_ns)
        self.num_running += 1
        self.on_start(node)

    def stalled(self) -> TierFullError | None:
        """Nothing runs, yet an eligible op waits at the head of a tier's grants: that tier is too small."""
        if self.num_running > 0:
            return None
        heads = ((tier, queue[0]) for tier, queue in self._grants.items() if queue and queue[0].is_eligible)
        return next((self.ledger.full(tier, node) for tier, node in heads), None)

    # ---- after it ----

    def end_op(self, node: OpRun) -> None:
        """An op of the host is done."""
        now_ns = node.end_ns = self.now_ns()
        self._take_over(node, now_ns)
        self._finish(node, now_ns)

    def issue(self, node: OpRun) -> None:
        """An op has been put on its stream of the device, behind what it waits for."""
        now_ns, node.is_issued = self.now_ns(), True
        self._take_over(node, now_ns)
        for instance in node.reads:
            instance.num_unissued -= 1
        for instance in (*node.reads, *node.writes):
            if instance.is_dead_to_its_stream:
                self._free(instance, now_ns)
                self.ledger.keep_private(instance, node.op.stream, 1)
                node.freed = (*node.freed, instance)
        on_host = list[OpRun]()
        for later in node.followers:
            if later.op.stream in self.streams_ahead:
                later.behind = (*later.behind, node)
                later.waiting_for -= 1
                if later.waiting_for == 0 and later.is_reached:
                    self._make_eligible(later, now_ns)
            else:
                on_host.append(later)
        node.followers = on_host
        self.num_running += 1  # until it has ended
        self._grant({instance.buffer.tier: None for instance in node.freed}, now_ns)

    def end_issued(self, node: OpRun) -> None:
        """An op that was issued has ended, and has its times."""
        self.num_running -= 1
        for instance in node.freed:
            self.ledger.keep_private(instance, node.op.stream, -1)
            self.on_free(instance)
        self._finish(node, self.now_ns())

    def _take_over(self, node: OpRun, now_ns: int) -> None:
        """What the op has written over is gone."""
        for instance in node.writes:
            over, instance.over = instance.over, None
            if over is not None:
                self.ledger.take_over(now_ns, instance, over)
                over.value = None
                instance.outside_bytes, over.outside_bytes = over.outside_bytes, 0

    def _free(self, instance: Instance, now_ns: int) -> None:
        self.release(instance)
        instance.value, instance.is_free = None, True
        self.ledger.drop(now_ns, instance)

    def _finish(self, node: OpRun, now_ns: int) -> None:
        end_ns, node.has_ended = node.end_ns, True
        for call in node.at_end:
            call()
        if node.step < self.trace_end:
            times = (node.free_ns, node.ready_ns, node.start_ns, end_ns)
            key = step_prefix(node.step) + node.op.key
            waits = (node.granted_ns, node.coreless_ns, node.late_ns)
            self.spans.append(Span(key, node.op.stream, *times, -1, *waits))
        tiers = {instance.buffer.tier: None for instance in node.freed}
        for instance in node.reads:
            instance.num_left -= 1
        for instance in (*node.reads, *node.writes):
            if instance.num_left or instance.is_reused or instance.outlives or instance.is_free:
                continue
            self._free(instance, now_ns)
            self.on_free(instance)
            tiers[instance.buffer.tier] = None
        for later in node.followers:
            if end_ns > later.ready_ns:
                later.ready_ns = end_ns
            later.waiting_for -= 1
            if later.waiting_for == 0 and later.is_reached:
                self._make_eligible(later, now_ns)
        self._grant(tiers, now_ns)
        node.followers = node.freed = ()
        if end_ns > self._latest_ns[node.step]:
            self._latest_ns[node.step] = end_ns
        self._ops_left[node.step] -= 1
        if self._ops_left[node.step] == 0:
            del self._ops_left[node.step]
            # in order, since every stream runs the steps in order
            self.step_ends_ns.append(self._latest_ns.pop(node.step))
            self.unrolling.end(node.step)
            self.on_step_end()
