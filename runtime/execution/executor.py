"""Executes a schedule for real, by the four rules of the schedule language (docs/design.md), for any number of steps.

One worker thread per stream walks its ops in list order (rule 1). An op is *eligible* when its stream has reached it
and all that it waits for has ended (rule 2). Each tier grants memory to eligible ops strictly in list order (rule 3)
and takes it back when a buffer's last reader ends (rule 4). What an op does is the business of a body, a function that
is called in the worker with the op and its buffers; this module knows nothing of models.

Steps run back to back: a step is *opened* (joined to the one before, as `columns.unroll` does) when a stream reaches
the step before it, so a stream that is done with one step goes on with the next. Errors:

    ExecutionError(RuntimeError)     the schedule was not executed to its end
    └── TierFullError                no op can go on for want of memory in a tier; names op, tier and holders

An op whose body raises ends the run with the body's own error.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tierplan.sim.contents import step_prefix
from tierplan.sim.schedule import Buffer, Op, Schedule, ScheduleError
from tierplan.sim.trace import MemoryEvent, Span, Trace


class ExecutionError(RuntimeError):
    """The schedule was not executed to its end."""


class TierFullError(ExecutionError):
    """No op can go on for want of memory in a tier. Nothing was allocated beyond its capacity."""


@dataclass(eq=False, slots=True)
class Instance:
    """One buffer in one step, or one that was there before: what is granted, filled, read and freed."""

    buffer: Buffer
    """Under the name of the step that wrote it."""
    value: object = None
    """What the bodies keep in it."""
    readers_left: int = 0
    is_reused: bool = False
    outside_bytes: int = 0
    """Of it, in its tier, outside the memory that the bodies have there for such buffers."""
    outlives: bool = False
    """It is an initial buffer of the step that follows the last opened one, so it is not freed yet."""
    over: Instance | None = field(default=None, repr=False)
    """The instance whose bytes this one takes over, until its writer has ended."""
    writer: _Node | None = field(default=None, repr=False)
    readers: list[_Node] = field(default_factory=list, repr=False)
    """Ops that may not have ended yet; for those that write over it."""

    @property
    def is_dead(self) -> bool:
        return self.readers_left == 0 and not self.is_reused and not self.outlives


@dataclass(eq=False, slots=True)
class Call:
    """One op in one step, as its body sees it."""

    op: Op
    step: int
    reads: tuple[Instance, ...]
    writes: tuple[Instance, ...]


@dataclass(eq=False, slots=True)
class _Node(Call):
    """As the executor sees it."""

    waiting_for: int = 0
    followers: list[_Node] = field(default_factory=list, repr=False)
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


class Executor:
    """Runs a valid schedule; `run` may be called again and goes on where the last call ended.

    Parameters
    ----------
    body
        Called for each op in its stream's thread, when its inputs are complete and its memory is granted.
    on_grant
        Called with each instance that is granted bytes, the op that will write it, and how many. Must be quick.
    release
        Called with each instance that is freed, before its bytes are granted to anybody else. Must be quick.
    on_thread_start
        Called at the start of each worker with the stream's name.
    on_step_end
        Called with (step, nanoseconds since the first `run`) when the last op of a step has ended: in the thread that
        called `run`, in order, while the workers go on. An error that it raises ends the run.
    trace_steps
        Spans and memory events are kept for the first so many steps; None keeps all.
    first_step
        Number of the first step, for a run that goes on where another has ended.
    """

    def __init__(
        self,
        schedule: Schedule,
        body: Callable[[Call], None],
        *,
        on_grant: Callable[[Op, Instance, int], None] = lambda op, instance, size_bytes: None,
        release: Callable[[Instance], None] = lambda instance: None,
        on_thread_start: Callable[[str], None] = lambda stream: None,
        on_step_end: Callable[[int, int], None] = lambda step, time_ns: None,
        trace_steps: int | None = None,
        first_step: int = 0,
    ) -> None:
        self.schedule = schedule
        self._body, self._on_grant, self._release = body, on_grant, release
        self._on_thread_start, self._on_step_end = on_thread_start, on_step_end
        self._trace_end = None if trace_steps is None else first_step + trace_steps
        self._capacity = {t.name: t.capacity_bytes for t in schedule.tiers}
        self._buffers = schedule.buffers_by_name()
        tiers = {t.name: t for t in schedule.tiers}
        self._sizes = {b.name: tiers[b.tier].held_bytes(b.size_bytes) for b in schedule.buffers}
        """What buffers hold in their tiers, by name."""
        self._reused = {b.reuses for b in schedule.buffers if b.reuses is not None}
        self._successor = {b.becomes: b.name for b in schedule.buffers if b.becomes is not None}
        self._initial = {b.name for b in schedule.buffers if b.initial}
        self._needs = [self._needed(op) for op in schedule.ops]
        self._lock = threading.Lock()
        self._wakeup = {stream: threading.Condition(self._lock) for stream in schedule.streams}
        self._news = threading.Condition(self._lock)
        """A step or a worker has ended."""
        self._queue: dict[str, deque[_Node]] = {stream: deque() for stream in schedule.streams}
        self._grants: dict[str, deque[_Node]] = {name: deque() for name in self._capacity}
        self._ops_left: dict[int, int] = {}
        self._names: dict[str, Instance] = {}
        """Instances by the name that the last opened step knows them by."""
        self._first_step = self._num_opened = self._num_begun = self._end = first_step
        self._stop_wanted = False
        self._num_workers = self._num_running = 0
        self._step_ends_ns: list[int] = []
        self._num_told = 0
        """Steps that `on_step_end` was called for."""
        self._failure: BaseException | None = None
        self._held: dict[Instance, None] = {}
        self._spans: list[Span] = []
        self._memory: list[MemoryEvent] = []
        self._zero_ns: int | None = None
        self._used = {name: 0 for name in self._capacity}
        self._peak = dict(self._used)
        self.carried: dict[str, Instance] = {b.name: Instance(b) for b in schedule.buffers if b.initial}
        """The initial buffers as they stand between calls of `run`: fill their values before the first call."""
        read = {name for op in schedule.ops for name in op.reads}
        for name, instance in self.carried.items():
            if name in read or instance.buffer.becomes is not None:
                self._hold(0, instance)

    @property
    def held(self) -> tuple[Instance, ...]:
        """What the tiers hold now."""
        return tuple(self._held)

    @property
    def num_steps_done(self) -> int:
        """Steps completed by all calls of `run`, and before `first_step`."""
        return self._first_step + len(self._step_ends_ns)

    @property
    def step_ends_ns(self) -> tuple[int, ...]:
        """When the last op of each step ended that was completed, since the first call of `run`."""
        return tuple(self._step_ends_ns)

    def run(self, num_steps: int) -> None:
        """Runs so many steps more. Raises what a body raised, or `TierFullError`; all workers have ended then."""
        if self._failure is not None:
            raise ExecutionError("this execution has failed and cannot go on; start a new one from the last commit")
        if lost := sorted(
            self._initial - self._successor.keys() if self._end + num_steps > self._first_step + 1 else ()
        ):
            raise ScheduleError(
                f"initial buffer {lost[0]!r} has no buffer that becomes it, so a second step would lack it; "
                "declare `becomes` on the buffer that outlives the step"
            )
        if self._zero_ns is None:
            self._zero_ns = time.perf_counter_ns()
        self._end += num_steps
        if num_steps:
            self._open_step()
        self._num_running = self._num_workers = len(self._queue)
        workers = [
            threading.Thread(target=self._work, args=(stream,), name=f"tierplan {stream}", daemon=True)
            for stream in self._queue
        ]
        try:
            for worker in workers:
                worker.start()
            self._watch()
            for worker in workers:
                worker.join()
        except BaseException as error:
            with self._lock:
                self._fail(error)
            for worker in workers:
                if worker.ident is not None:
                    worker.join()
            raise
        self._stop_wanted = False  # not at the beginning: a stop may be asked for right before
        if self._failure is not None:
            raise self._failure
        self._carry_over()

    def request_stop(self) -> None:
        """Lets every step that a stream has begun run to its end, and no more. For signal handlers and bodies, too."""
        self._stop_wanted = True

    def _watch(self) -> None:
        """Tells of each step that ends, and stops when that is wanted, until the last worker has no more to do."""
        is_over = False
        while not is_over:
            with self._lock:
                if self._num_workers and self._num_told == len(self._step_ends_ns):
                    self._news.wait(0.1)  # in pieces, so that Ctrl-C and a wish to stop arrive
                is_over = not self._num_workers
            if self._stop_wanted:
                self._stop()
            while self._num_told < len(self._step_ends_ns):
                self._num_told += 1
                self._on_step_end(self._first_step + self._num_told - 1, self._step_ends_ns[self._num_told - 1])

    def _stop(self) -> None:
        with self._lock:
            self._end = min(self._end, max(self._num_begun, self._first_step + 1))
            for wakeup in self._wakeup.values():
                wakeup.notify_all()

    def trace(self, name: str = "measured", meta: Mapping[str, object] | None = None) -> Trace:
        """What has happened so far; times count from the first call of `run`. Keys have the prefix `s0/`, `s1/`, ..."""
        with self._lock:
            return Trace(
                name=name,
                spans=tuple(sorted(self._spans, key=lambda s: s.start_ns)),
                memory=tuple(self._memory),
                capacity_bytes=dict(self._capacity),
                peak_bytes=dict(self._peak),
                meta=dict(meta or {}),
            )

    # ---- opening a step: one more turn of `unroll` ----

    def _needed(self, op: Op) -> dict[str, int]:
        needs: dict[str, int] = {}
        for b in (self._buffers[name] for name in op.writes):
            if b.reuses is None and b.size_bytes > 0:
                needs[b.tier] = needs.get(b.tier, 0) + self._sizes[b.name]
        return needs

    def _open_step(self) -> None:
        step = self._num_opened
        self._num_opened += 1
        names = self._names = self._initial_names()
        for name, instance in names.items():
            self._set_lifetime(instance, name)
            instance.readers = [node for node in instance.readers if not node.has_ended]
        nodes: dict[str, _Node] = {}
        for op, needs in zip(self.schedule.ops, self._needs, strict=True):
            inputs = {nodes[key] for key in op.after}
            reads = tuple(names[name] for name in op.reads)
            for instance in reads:
                instance.readers_left += 1
                if instance.writer is not None:
                    inputs.add(instance.writer)
            writes = []
            for name in op.writes:
                b = self._buffers[name]
                instance = names[name] = Instance(b)
                self._set_lifetime(instance, name)
                writes.append(instance)
                if b.reuses is not None:
                    instance.over = names[b.reuses]
                    inputs.update(instance.over.readers)
            node = nodes[op.key] = _Node(op, step, reads, tuple(writes), needs=needs, grants_left=len(needs))
            for instance in reads:
                instance.readers.append(node)
            for instance in writes:
                instance.writer = node
            for earlier in inputs:
                if not earlier.has_ended:
                    earlier.followers.append(node)
                    node.waiting_for += 1
            self._queue[op.stream].append(node)
            for tier in needs:
                self._grants[tier].append(node)
        self._ops_left[step] = len(nodes)

    def _initial_names(self) -> dict[str, Instance]:
        """The initial buffers of the step to open: what outlives the step before it, or what was carried."""
        if not self._names:
            return dict(self.carried)
        return {name: self._names[self._successor[name]] for name in self.carried if name in self._successor}

    def _set_lifetime(self, instance: Instance, name: str) -> None:
        instance.is_reused = instance.is_reused or name in self._reused
        instance.outlives = self._buffers[name].becomes is not None

    def _carry_over(self) -> None:
        """After the last step: what outlives it takes its place among the initial buffers."""
        if self._num_opened > self._end:  # stopped early: the step that was opened ahead did not run
            carried = {name: self._names[name] for name in self.carried if name in self._names}
        else:
            carried = self._initial_names()
        self.carried = carried
        for name, instance in carried.items():
            instance.buffer = self._buffers[name]
            instance.readers_left, instance.readers, instance.writer, instance.is_reused = 0, [], None, False
        self._names = {}
        self._num_opened = self._end
        self._ops_left.clear()
        for nodes in (*self._queue.values(), *self._grants.values()):
            nodes.clear()

    # ---- the four rules ----

    def _work(self, stream: str) -> None:
        node = None
        try:
            self._on_thread_start(stream)
            while (node := self._next(stream)) is not None:
                self._body(node)
                self._finish(node)
        except BaseException as error:
            if node is not None:
                error.add_note(f"in op {node.op.key!r} of step {node.step}")
            with self._lock:
                self._fail(error)
        finally:
            with self._lock:
                self._num_running -= 1
                self._num_workers -= 1
                self._check_stalled()
                self._news.notify()

    def _next(self, stream: str) -> _Node | None:
        """The stream's next op, when it may start; None when there is no more to do."""
        with self._lock:
            queue = self._queue[stream]
            if self._failure is not None or not queue or queue[0].step >= self._end:
                return None
            node = queue.popleft()
            self._num_begun = max(self._num_begun, node.step + 1)
            if node.step + 1 == self._num_opened < self._end:
                self._open_step()
            node.free_ns = self._now_ns()
            node.is_reached = True
            self._num_running -= 1  # until `_start`
            if node.waiting_for == 0:
                self._make_eligible(node)
            self._check_stalled()
            while not node.is_started and self._failure is None:
                self._wakeup[stream].wait()
            node.start_ns = self._now_ns()  # here, not where it was granted: waking up is not work of the op
            return None if self._failure is not None else node

    def _make_eligible(self, node: _Node) -> None:
        node.is_eligible = True
        if node.grants_left == 0:
            self._start(node)
        else:
            for tier in node.needs:
                self._grant(tier)

    def _grant(self, tier: str) -> None:
        """Grants memory of one tier in list order, as far as the next op is eligible and fits."""
        queue = self._grants[tier]
        while queue and queue[0].is_eligible and self._used[tier] + queue[0].needs[tier] <= self._capacity[tier]:
            node = queue.popleft()
            now_ns = self._now_ns()
            for instance in node.writes:
                if instance.buffer.tier == tier and instance.buffer.reuses is None:
                    self._hold(now_ns, instance)
                    self._on_grant(node.op, instance, self._sizes[instance.buffer.name])
            node.grants_left -= 1
            if node.grants_left == 0:
                self._start(node)

    def _start(self, node: _Node) -> None:
        node.is_started = True
        node.granted_ns = self._now_ns() if node.needs else max(node.free_ns, node.ready_ns)
        self._num_running += 1
        self._wakeup[node.op.stream].notify()

    def _finish(self, node: _Node) -> None:
        with self._lock:
            now_ns = self._now_ns()
            node.has_ended = True
            if self._trace_end is None or node.step < self._trace_end:
                times = (node.free_ns, node.ready_ns, node.start_ns, now_ns)
                key = step_prefix(node.step) + node.op.key
                self._spans.append(Span(key, node.op.stream, *times, granted_ns=node.granted_ns))
            dead = []
            for instance in node.reads:
                instance.readers_left -= 1
                if instance.is_dead:
                    dead.append(instance)
            for instance in node.writes:
                instance.writer = None
                if instance.over is not None:
                    if instance.over.buffer.kind != instance.buffer.kind:
                        self._note(now_ns, instance.over, -1)
                        self._note(now_ns, instance, 1)
                    instance.over.value = None
                    instance.outside_bytes, instance.over.outside_bytes = instance.over.outside_bytes, 0
                    self._held.pop(instance.over, None)
                    self._held[instance], instance.over = None, None
                if instance.is_dead:
                    dead.append(instance)
            for instance in dead:
                self._release(instance)
                instance.value = None
                self._drop(now_ns, instance)
            for later in node.followers:
                later.waiting_for -= 1
                if later.waiting_for == 0:
                    later.ready_ns = now_ns
                    if later.is_reached:
                        self._make_eligible(later)
            for tier in {instance.buffer.tier: None for instance in dead}:
                self._grant(tier)
            node.followers = []
            self._ops_left[node.step] -= 1
            if self._ops_left[node.step] == 0:
                del self._ops_left[node.step]
                self._step_ends_ns.append(now_ns)  # in order, since every stream runs the steps in order
                self._news.notify()

    def _hold(self, now_ns: int, instance: Instance) -> None:
        tier = instance.buffer.tier
        self._held[instance] = None
        self._used[tier] += self._sizes[instance.buffer.name]
        self._peak[tier] = max(self._peak[tier], self._used[tier])
        self._note(now_ns, instance, 1)

    def _drop(self, now_ns: int, instance: Instance) -> None:
        self._held.pop(instance, None)  # an empty one was never granted
        self._used[instance.buffer.tier] -= self._sizes[instance.buffer.name]
        self._note(now_ns, instance, -1)

    def _note(self, now_ns: int, instance: Instance, sign: int) -> None:
        b = instance.buffer
        if b.size_bytes and (self._trace_end is None or self._num_begun <= self._trace_end):
            self._memory.append(MemoryEvent(now_ns, b.tier, b.kind, sign * self._sizes[b.name]))

    def _now_ns(self) -> int:
        assert self._zero_ns is not None
        return time.perf_counter_ns() - self._zero_ns

    # ---- when it goes wrong ----

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
        for wakeup in self._wakeup.values():
            wakeup.notify_all()

    def _check_stalled(self) -> None:
        """Nothing runs, yet an eligible op waits at the head of a tier's grants: that tier is too small."""
        if self._num_running > 0 or self._failure is not None:
            return
        for tier, queue in self._grants.items():
            if queue and queue[0].is_eligible:
                self._fail(self._tier_full(tier, queue[0]))
                return

    def _tier_full(self, tier: str, node: _Node) -> TierFullError:
        held = [x.buffer for x in self._held if x.buffer.tier == tier]
        largest = sorted(((self._sizes[b.name], b.name) for b in held), reverse=True)[:5]
        free = self._capacity[tier] - self._used[tier]
        return TierFullError(
            f"op {node.op.key!r} of step {node.step} wants {node.needs[tier]:,} bytes in tier {tier!r}, but {free:,} "
            f"of {self._capacity[tier]:,} are free and nothing that still runs will free more; held by "
            f"{', '.join(f'{name} {size:,} B' for size, name in largest) or 'nothing'}. "
            f"Raise the capacity of {tier!r}, or choose a plan that keeps less there"
        )
