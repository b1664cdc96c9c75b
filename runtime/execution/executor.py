"""Executes a schedule for real, by the four rules of the schedule language (docs/design.md), for any number of steps.

One worker thread per stream walks its ops in list order (rule 1). An op is *eligible* when its stream has reached it
and all that it waits for has ended (rule 2). Each tier grants memory to eligible ops strictly in list order (rule 3)
and takes it back when a buffer's last reader ends (rule 4). What an op does is the business of a body, a function that
is called in the worker with the op and its buffers; this module knows nothing of models.

An op of a device that works by itself (CUDA) is *issued* when its body returns, and has *ended* when an event behind
it says so. Streams of the device go on when it is issued, and wait for the event; the host goes on when it has ended.
What one stream alone has used is that stream's again when it is issued (docs/design.md has the proof).

Steps run back to back: a step is *opened* (joined to the one before, as `columns.unroll` does) when a stream reaches
the step before it, so a stream that is done with one step goes on with the next.

A run that does not come to its end raises `TierFullError`, or the error of the op whose body has raised one.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field

from tierplan.runtime.execution.device import DEVICE_STREAMS, Device
from tierplan.runtime.execution.instances import Call, ExecutionError, Instance, OpRun, Unrolling
from tierplan.runtime.execution.ledger import Ledger
from tierplan.runtime.execution.threads import coreless_ns
from tierplan.runtime.memory.freed_memory import only_new_objects_searched
from tierplan.sim.contents import step_prefix
from tierplan.sim.schedule import Op, Schedule, ScheduleError
from tierplan.sim.trace import Span, Trace

MOST_ISSUED = 64
"""Ops that a stream of the device is given before their ends are waited for."""
TRACED_STEPS, TRACED_OPS = 20, 20_000
"""A trace covers the first so many steps of a run; or more, as long as they have no more ops together: a machine
becomes a tenth slower or quicker within seconds, so few short steps say little of it."""


def traced_steps(schedule: Schedule) -> int:
    """Steps of a run that its trace covers where nobody asked for more."""
    return max(TRACED_STEPS, TRACED_OPS // max(1, len(schedule.ops)))


@dataclass(eq=False)
class Executor:
    """Runs a valid schedule; `run` may be called again and goes on where the last call ended."""

    schedule: Schedule
    body: Callable[[Call], None]
    """Called for each op in its stream's thread, when its inputs are complete and its memory is granted."""
    _: KW_ONLY
    on_grant: Callable[[Op, Instance, int], None] = lambda op, instance, size_bytes: None
    """Called with each instance that is granted bytes, the op that will write it, and how many. Must be quick."""
    release: Callable[[Instance], None] = lambda instance: None
    """Called with each instance that is freed, before its bytes are granted to anybody else. Must be quick, and start
    no work on the device."""
    on_free: Callable[[Instance], None] = lambda instance: None
    """Called with it when its bytes are everybody's."""
    on_thread_start: Callable[[str], None] = lambda stream: None
    """Called at the start of each worker with the stream's name."""
    on_step_end: Callable[[int, int], None] = lambda step, time_ns: None
    """Called with (step, nanoseconds since the first `run`) when the last op of a step has ended: in the thread that
    called `run`, in order, while the workers go on. An error that it raises ends the run."""
    on_failure: Callable[[BaseException], None] = lambda error: None
    """Called with the error that ends the run, before the workers have ended. Must be quick."""
    trace_steps: int | None = None
    """Spans and memory events are kept for the first so many steps; None keeps all."""
    device: Device = field(default_factory=Device)
    """Whose streams run ahead."""
    await_others: Callable[[Call], None] | None = None
    """Called with each op when its stream has come to it: returns when other ranks have done what it waits for."""
    first_step: int = 0
    """Number of the first step, for a run that goes on where another has ended."""

    def __post_init__(self) -> None:
        schedule = self.schedule
        self._trace_end = math.inf if self.trace_steps is None else self.first_step + self.trace_steps
        self.ledger = Ledger(schedule)
        self._lock = threading.Lock()
        self._wakeup = {stream: threading.Condition(self._lock) for stream in schedule.streams}
        self._news = threading.Condition(self._lock)
        """A step or a worker has ended."""
        is_ahead = self.device.is_asynchronous
        self._issued = {stream: deque[OpRun]() for stream in schedule.streams if is_ahead and stream in DEVICE_STREAMS}
        """By stream that runs ahead, ops that have not ended, in order."""
        self._moves = {stream: threading.Condition(self._lock) for stream in self._issued}
        """An op was issued there, or has ended."""
        self._done_issuing: set[str] = set()
        self._last_end_ns = dict.fromkeys(self._issued, 0)
        self._latest_ns: dict[int, int] = {}
        self._queue: dict[str, deque[OpRun]] = {stream: deque() for stream in schedule.streams}
        self._at: dict[str, OpRun | None] = {}
        """By stream, the op that it has come to; None where there is no more to do."""
        self._waited_ns: dict[str, int] = {}
        """By stream, its waits for a core when they were last asked for."""
        self._grants: dict[str, deque[OpRun]] = {name: deque() for name in self.ledger.capacity_bytes}
        self._ops_left: dict[int, int] = {}
        self._num_opened = self._num_begun = self._end = self.first_step
        self._stop_wanted = False
        self._num_workers = self._num_running = 0
        self._step_ends_ns: list[int] = []
        self._num_told = 0
        """Steps that `on_step_end` was called for."""
        self._failure: BaseException | None = None
        self._spans: list[Span] = []
        self._zero_ns = 0
        self._unrolling = Unrolling(schedule, self.ledger.held_bytes, self._issued)
        read = {name for op in schedule.ops for name in op.reads}
        for name, instance in self.carried.items():
            if name in read or instance.buffer.becomes is not None:
                self.ledger.hold(0, instance)

    @property
    def carried(self) -> dict[str, Instance]:
        """The initial buffers as they stand between calls of `run`: fill their values before the first call."""
        return self._unrolling.carried

    @property
    def begun_ns(self) -> int:
        """When the first call of `run` was, by `time.perf_counter_ns`, which processes of a machine share."""
        return self._zero_ns

    @property
    def num_steps_done(self) -> int:
        """Steps completed by all calls of `run`, and before `first_step`."""
        return self.first_step + len(self._step_ends_ns)

    @property
    def step_ends_ns(self) -> tuple[int, ...]:
        """When the last op of each step ended that was completed, since the first call of `run`."""
        return tuple(self._step_ends_ns)

    @only_new_objects_searched()
    def run(self, num_steps: int) -> None:
        """Runs so many steps more. Raises what a body raised, or `TierFullError`; all workers have ended then."""
        if self._failure is not None:
            raise ExecutionError("this execution has failed and cannot go on; start a new one from the last commit")
        if self._end + num_steps > self.first_step + 1 and (lost := self._unrolling.lost):
            raise ScheduleError(
                f"initial buffer {lost[0]!r} has no buffer that becomes it, so a second step would lack it; "
                "declare `becomes` on the buffer that outlives the step"
            )
        if self.schedule.next_devices:
            raise ScheduleError(
                f"schedule {self.schedule.name!r} has next_devices, which take turns from step to step: this "
                "is simulated, and not executed; take packs without goes_on"
            )
        if not self._zero_ns:
            self._zero_ns = time.perf_counter_ns()
        self._end += num_steps
        if num_steps:
            self._open_step()
        self._num_running, self._num_workers = len(self._queue), len(self._queue) + len(self._issued)
        self._done_issuing.clear()
        workers = [
            threading.Thread(target=target, args=(stream,), name=f"tierplan {name}{stream}", daemon=True)
            for target, name, streams in ((self._work, "", self._queue), (self._await, "end of ", self._issued))
            for stream in streams
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
                self.on_step_end(self.first_step + self._num_told - 1, self._step_ends_ns[self._num_told - 1])

    def _stop(self) -> None:
        with self._lock:
            self._end = min(self._end, max(self._num_begun, self.first_step + 1))

    def trace(self, meta: Mapping[str, object] | None = None) -> Trace:
        """What has happened so far; times count from the first call of `run`. Keys have the prefix `s0/`, `s1/`, ..."""
        with self._lock:
            return Trace(
                name="measured",
                spans=tuple(sorted(self._spans, key=lambda s: s.start_ns)),
                memory=tuple(self.ledger.events),
                capacity_bytes=dict(self.ledger.capacity_bytes),
                peak_bytes=dict(self.ledger.peak_bytes),
                meta=dict(meta or {}),
            )

    # ---- steps ----

    def _open_step(self) -> None:
        nodes = self._unrolling.open(self._num_opened)
        for node in nodes:
            self._queue[node.op.stream].append(node)
            for tier in node.needs:
                self._grants[tier].append(node)
        self._ops_left[self._num_opened], self._latest_ns[self._num_opened] = len(nodes), 0
        self._num_opened += 1

    def _carry_over(self) -> None:
        """After the last step. When it was stopped early, the step that was opened ahead did not run."""
        self._unrolling.carry_over(is_last_run=self._num_opened <= self._end)
        self._num_opened = self._end
        self._ops_left.clear()
        for nodes in (*self._queue.values(), *self._grants.values()):
            nodes.clear()

    # ---- the four rules ----

    def _work(self, stream: str) -> None:
        try:
            self.on_thread_start(stream)
            self._waited_ns[stream] = coreless_ns()
            node = self._begin_next(stream)
            while node is not None:
                self.body(node)
                node = self._begin_next(stream, self._at[stream])
        except BaseException as error:
            if (at := self._at.get(stream)) is not None:
                error.add_note(f"in op {at.op.key!r} of step {at.step}")
            with self._lock:
                self._fail(error)
        finally:
            with self._lock:
                self._num_running -= 1
                self._num_workers -= 1
                self._done_issuing.add(stream)
                if stream in self._moves:
                    self._moves[stream].notify_all()
                self._check_stalled()
                self._news.notify()

    def go_on(self, stream: str) -> Call:
        """For a body that does the stream's next op, too, in whatever thread: ends its own, and begins that one."""
        if (node := self._begin_next(stream, self._at[stream])) is None:
            raise ExecutionError("this execution has failed")
        return node

    def _begin_next(self, stream: str, done: OpRun | None = None) -> OpRun | None:
        """Ends the op whose body is done, and begins the stream's next one; None when there is no more to do."""
        is_ahead = stream in self._issued
        if done is not None and is_ahead:
            self._note_issued(done)
        elif done is not None and done.step < self._trace_end:
            end_ns = coreless_ns()
            done.coreless_ns, self._waited_ns[stream] = end_ns - self._waited_ns[stream], end_ns
        with self._lock:
            if done is not None and not is_ahead:
                now_ns = done.end_ns = self._now_ns()
                self._take_over(done, now_ns)
                self._finish(done, now_ns)
            node = self._come_to_next(stream)
            if node is not None and self.await_others is None:
                self._await_start(node, node.free_ns)
        if node is not None and self.await_others is not None:  # who may take long, and other streams need the lock
            self.await_others(node)
            with self._lock:
                self._await_start(node, self._now_ns())
        if node is None or self._failure is not None:
            return None
        if is_ahead:
            self._wait_on_device(node)
        elif node.step < self._trace_end:
            begin_ns = coreless_ns()
            node.late_ns, self._waited_ns[stream] = begin_ns - self._waited_ns[stream], begin_ns
        return node

    def _wait_on_device(self, node: OpRun) -> None:
        """Puts what the op has to wait for before it on its stream of the device."""
        stream = node.op.stream
        with self._lock:
            while len(self._issued[stream]) >= MOST_ISSUED and self._failure is None:
                self._moves[stream].wait()
        for earlier in node.behind:
            if earlier.op.stream != stream:
                assert earlier.ended is not None
                self.device.wait_for(stream, earlier.ended)
        node.begun = self.device.record(stream)

    def _note_issued(self, node: OpRun) -> None:
        """An op has been put on its stream of the device, behind what it waits for."""
        stream = node.op.stream
        node.ended = self.device.record(stream)
        with self._lock:
            now_ns, node.is_issued = self._now_ns(), True
            self._take_over(node, now_ns)
            for instance in node.reads:
                instance.num_unissued -= 1
            for instance in (*node.reads, *node.writes):
                if instance.is_dead_to_its_stream:
                    self._free(instance, now_ns)
                    self.ledger.keep_private(instance, stream, 1)
                    node.freed.append(instance)
            followers, node.followers = node.followers, []
            for later in followers:
                if later.op.stream in self._issued:
                    later.behind.append(node)
                    self._come_closer(later, now_ns)
                else:
                    node.followers.append(later)
            self._num_running += 1  # until it has ended
            self._issued[stream].append(node)
            self._moves[stream].notify_all()
            for tier in {instance.buffer.tier: None for instance in node.freed}:
                self._grant(tier, now_ns)

    def _await(self, stream: str) -> None:
        """Ends the ops of a stream that runs ahead, as events say that they have ended."""
        queue = self._issued[stream]
        try:
            while True:
                with self._lock:
                    while not queue and stream not in self._done_issuing and self._failure is None:
                        self._moves[stream].wait()
                    if not queue or self._failure is not None:
                        return
                    node = queue[0]
                assert node.ended is not None
                node.ended.wait()
                with self._lock:
                    self._end_issued(node)
        except BaseException as error:
            with self._lock:
                self._fail(error)
        finally:
            with self._lock:
                self._num_workers -= 1
                self._news.notify()

    def _end_issued(self, node: OpRun) -> None:
        """An issued op has ended; so has what it waited for, whoever hears of it first."""
        while not node.has_ended:
            first = self._issued[node.op.stream].popleft()
            for earlier in first.behind:
                self._end_issued(earlier)
            first.take_times(self._zero_ns, self._last_end_ns[first.op.stream])
            self._last_end_ns[first.op.stream] = first.end_ns
            self._num_running -= 1
            for instance in first.freed:
                self.ledger.keep_private(instance, first.op.stream, -1)
                self.on_free(instance)
            self._finish(first, self._now_ns())
            self._moves[first.op.stream].notify_all()
        self._check_stalled()

    def _come_to_next(self, stream: str) -> OpRun | None:
        """Takes the stream's next op off its list, and opens a step where it is the first to reach the one before."""
        queue, node = self._queue[stream], None
        if self._failure is None and queue and queue[0].step < self._end:
            node = queue.popleft()
            if node.step >= self._num_begun:
                self._num_begun = node.step + 1
                self.ledger.is_noted = node.step < self._trace_end
            if node.step + 1 == self._num_opened < self._end:
                self._open_step()
            node.free_ns = self._now_ns()
        self._at[stream] = node
        return node

    def _await_start(self, node: OpRun, now_ns: int) -> None:
        """Returns when the op that its stream has come to may start, or never will."""
        node.is_reached = True
        self._num_running -= 1  # until `_start`
        if node.waiting_for == 0:
            self._make_eligible(node, now_ns)
        self._check_stalled()
        while not node.is_started and self._failure is None:
            node.is_awaited = True
            self._wakeup[node.op.stream].wait()
        node.start_ns = self._now_ns()  # here, not where it was granted: waking up is not work of the op

    def _make_eligible(self, node: OpRun, now_ns: int) -> None:
        node.is_eligible = True
        if node.grants_left == 0:
            self._start(node, now_ns)
        else:
            for tier in node.needs:
                self._grant(tier, now_ns)

    def _grant(self, tier: str, now_ns: int) -> None:
        """Grants memory of one tier in list order, as far as the next op is eligible and fits."""
        queue = self._grants[tier]
        while queue and queue[0].is_eligible and self.ledger.has_room(tier, queue[0]):
            node = queue.popleft()
            for instance in node.writes:
                if instance.buffer.tier == tier and instance.buffer.reuses is None:
                    self.ledger.hold(now_ns, instance)
                    self.on_grant(node.op, instance, self.ledger.held_bytes[instance.buffer.name])
            node.grants_left -= 1
            if node.grants_left == 0:
                self._start(node, now_ns)

    def _start(self, node: OpRun, now_ns: int) -> None:
        node.is_started = True
        node.granted_ns = now_ns if node.needs else max(node.free_ns, node.ready_ns)
        self._num_running += 1
        if node.is_awaited:
            self._wakeup[node.op.stream].notify()

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
        if node.step < self._trace_end:
            times = (node.free_ns, node.ready_ns, node.start_ns, end_ns)
            key = step_prefix(node.step) + node.op.key
            waits = (node.granted_ns, node.coreless_ns, node.late_ns)
            self._spans.append(Span(key, node.op.stream, *times, -1, *waits))
        tiers: dict[str, None] = {}
        for instance in node.freed:
            tiers[instance.buffer.tier] = None
        for instance in node.reads:
            instance.num_left -= 1
        for instance in (*node.reads, *node.writes):
            if instance.num_left == 0 and not (instance.is_reused or instance.outlives or instance.is_free):
                self._free(instance, now_ns)
                self.on_free(instance)
                tiers[instance.buffer.tier] = None
        for later in node.followers:
            if end_ns > later.ready_ns:
                later.ready_ns = end_ns
            self._come_closer(later, now_ns)
        for tier in tiers:
            self._grant(tier, now_ns)
        node.followers, node.freed = [], []
        self._latest_ns[node.step] = max(end_ns, self._latest_ns[node.step])
        self._ops_left[node.step] -= 1
        if self._ops_left[node.step] == 0:
            del self._ops_left[node.step]
            # in order, since every stream runs the steps in order
            self._step_ends_ns.append(self._latest_ns.pop(node.step))
            self._news.notify()

    def _come_closer(self, node: OpRun, now_ns: int) -> None:
        """One thing less to wait for."""
        node.waiting_for -= 1
        if node.waiting_for == 0 and node.is_reached:
            self._make_eligible(node, now_ns)

    def _now_ns(self) -> int:
        return time.perf_counter_ns() - self._zero_ns

    # ---- when it goes wrong ----

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
            self.on_failure(error)
        for wakeup in (*self._wakeup.values(), *self._moves.values()):
            wakeup.notify_all()

    def _check_stalled(self) -> None:
        """Nothing runs, yet an eligible op waits at the head of a tier's grants: that tier is too small."""
        if self._num_running > 0 or self._failure is not None:
            return
        for tier, queue in self._grants.items():
            if queue and queue[0].is_eligible:
                self._fail(self.ledger.full(tier, queue[0]))
                return
