"""Executes a schedule for real, by the four rules of the schedule language (docs/design.md), for any number of steps.

One worker thread per stream walks its ops in list order (rule 1). An op may start when its stream has reached it, all
that it waits for has ended (rule 2) and its memory is granted (rule 3): `rules.Rules` says when. What an op does is the
business of a body, a function that is called in the worker with the op and its buffers; this module knows nothing of
models. A thread takes some 100 us to wake up, in which a small op is done: whoever lets such an op start does it.

An op of a device that works by itself (CUDA) is *issued* when its body returns, and has *ended* when an event behind
it says so (docs/design.md has the rules and the proof).

A run that does not come to its end raises `TierFullError`, or the error of the op whose body has raised one.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field

from tierplan.runtime.execution.device import DEVICE_STREAMS, Device
from tierplan.runtime.execution.instances import Call, ExecutionError, Instance, OpRun
from tierplan.runtime.execution.rules import Rules
from tierplan.runtime.execution.threads import LastingThread, coreless_ns, let_helpers_go
from tierplan.runtime.memory.freed_memory import only_new_objects_searched
from tierplan.sim.schedule import Op, Schedule, ScheduleError
from tierplan.sim.trace import Trace

MOST_ISSUED = 64
"""Ops that a stream of the device is given before their ends are waited for."""
OBJECTS = 25
"""Of Python, that the steps under way have for each op of one."""
TRACED_STEPS, TRACED_OPS = 20, 20_000
"""A trace covers the first so many steps of a run; or more, as long as they have no more ops together: a machine
becomes a tenth slower or quicker within seconds, so few short steps say little of it."""


def traced_steps(schedule: Schedule) -> int:
    """Steps of a run that its trace covers where nobody asked for more."""
    return max(TRACED_STEPS, TRACED_OPS // max(1, len(schedule.ops)))


class _ToDo(threading.local):
    """Of each thread."""

    def __init__(self) -> None:
        self.quick = deque[OpRun]()
        """Ops that it has let start, and does for their streams."""


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
    is_quick: Callable[[Op], bool] = lambda op: False
    """Whether an op waits for nobody and takes less time than to wake up the thread of its stream: then who lets it
    start does it, and is asked. Not where a device runs ahead, or others are awaited."""
    await_others: Callable[[Call], None] | None = None
    """Called with each op when its stream has come to it: returns when other ranks have done what it waits for."""
    first_step: int = 0
    """Number of the first step, for a run that goes on where another has ended."""

    def __post_init__(self) -> None:
        streams = self.schedule.streams
        self._trace_end = math.inf if self.trace_steps is None else self.first_step + self.trace_steps
        self._lock = threading.Lock()
        self._wakeup = {stream: threading.Condition(self._lock) for stream in streams}
        self._news = threading.Condition(self._lock)
        """A step or a worker has ended."""
        is_ahead = self.device.is_asynchronous
        self._issued = {stream: deque[OpRun]() for stream in streams if is_ahead and stream in DEVICE_STREAMS}
        """By stream that runs ahead, ops that have not ended, in order."""
        self._is_shared = not self._issued and self.await_others is None
        self._asleep: set[str] = set()
        """Streams whose workers sleep until the op that they have come to may start."""
        self._to_do = _ToDo()
        self._moves = {stream: threading.Condition(self._lock) for stream in self._issued}
        """An op was issued there, or has ended."""
        self._done_issuing: set[str] = set()
        self._last_end_ns = dict.fromkeys(self._issued, 0)
        self._waited_ns: dict[str, int] = {}
        """By stream, its waits for a core when they were last asked for."""
        self._stop_wanted = False
        self._num_workers = 0
        self._num_told = 0
        """Steps that `on_step_end` was called for."""
        self._failure: BaseException | None = None
        self._rules = Rules(
            self.schedule,
            self._issued,
            first_step=self.first_step,
            trace_end=self._trace_end,
            on_start=self._on_start,
            on_step_end=self._news.notify,
            on_grant=self.on_grant,
            release=self.release,
            on_free=self.on_free,
        )
        self.ledger = self._rules.ledger
        self._threads = [
            (LastingThread(f"tierplan {name}{stream}"), functools.partial(work, stream))
            for work, name, streams in ((self._work, "", streams), (self._await, "end of ", self._issued))
            for stream in streams
        ]

    @property
    def carried(self) -> dict[str, Instance]:
        """The initial buffers as they stand between calls of `run`: fill their values before the first call."""
        return self._rules.unrolling.carried

    @property
    def begun_ns(self) -> int:
        """When the first call of `run` was, by `time.perf_counter_ns`, which processes of a machine share."""
        return self._rules.zero_ns

    @property
    def num_steps_done(self) -> int:
        """Steps completed by all calls of `run`, and before `first_step`."""
        return self.first_step + len(self._rules.step_ends_ns)

    @property
    def step_ends_ns(self) -> tuple[int, ...]:
        """When the last op of each step ended that was completed, since the first call of `run`."""
        return tuple(self._rules.step_ends_ns)

    def run(self, num_steps: int) -> None:
        """Runs so many steps more. Raises what a body raised, or `TierFullError`; all workers have ended then."""
        with only_new_objects_searched(OBJECTS * len(self.schedule.ops)):
            self._run(num_steps)

    def _run(self, num_steps: int) -> None:
        if self._failure is not None:
            raise ExecutionError("this execution has failed and cannot go on; start a new one from the last commit")
        rules = self._rules
        if rules.end + num_steps > self.first_step + 1 and (lost := rules.unrolling.lost):
            raise ScheduleError(
                f"initial buffer {lost[0]!r} has no buffer that becomes it, so a second step would lack it; "
                "declare `becomes` on the buffer that outlives the step"
            )
        if self.schedule.next_devices:
            raise ScheduleError(
                f"schedule {self.schedule.name!r} has next_devices, which take turns from step to step: this "
                "is simulated, and not executed; take packs without goes_on"
            )
        rules.zero_ns = rules.zero_ns or time.perf_counter_ns()
        rules.end += num_steps
        if num_steps:
            rules.open_step()
        rules.num_running = len(self._wakeup)
        self._num_workers = len(self._wakeup) + len(self._issued)
        self._done_issuing.clear()
        try:
            for thread, work in self._threads:
                thread.begin(work)
            self._watch()
            for thread, _ in self._threads:
                thread.wait()
        except BaseException as error:
            with self._lock:
                self._fail(error)
            self.close()
            rules.carry_over()
            raise
        self._stop_wanted = False  # not at the beginning: a stop may be asked for right before
        rules.carry_over()
        if self._failure is not None:
            self.close()
            raise self._failure

    def close(self) -> None:
        """Ends the workers, which else are there as long as this object. It cannot run any more."""
        for thread, _ in self._threads:
            thread.end()

    def request_stop(self) -> None:
        """Lets every step that a stream has begun run to its end, and no more. For signal handlers and bodies, too."""
        self._stop_wanted = True

    def _watch(self) -> None:
        """Tells of each step that ends, and stops when that is wanted, until the last worker has no more to do."""
        is_over, ends_ns = False, self._rules.step_ends_ns
        while not is_over:
            with self._lock:
                if self._num_workers and self._num_told == len(ends_ns):
                    self._news.wait(0.1)  # in pieces, so that Ctrl-C and a wish to stop arrive
                is_over = not self._num_workers
                if self._stop_wanted:
                    self._rules.end = min(self._rules.end, max(self._rules.num_begun, self.first_step + 1))
            while self._num_told < len(ends_ns):
                self._num_told += 1
                self.on_step_end(self.first_step + self._num_told - 1, ends_ns[self._num_told - 1])

    def trace(self, meta: Mapping[str, object] | None = None) -> Trace:
        """What has happened so far; times count from the first call of `run`. Keys have the prefix `s0/`, `s1/`, ..."""
        with self._lock:
            return Trace(
                name="measured",
                spans=tuple(sorted(self._rules.spans, key=lambda s: s.start_ns)),
                memory=tuple(self.ledger.events),
                capacity_bytes=dict(self.ledger.capacity_bytes),
                peak_bytes=dict(self.ledger.peak_bytes),
                meta=dict(meta or {}),
            )

    # ---- streams ----

    def _work(self, stream: str) -> None:
        try:
            self.on_thread_start(stream)
            self._waited_ns[stream] = coreless_ns()
            while (node := self._begin_next(stream)) is not None:
                self.body(node)
        except BaseException as error:
            self._fail_in(self._rules.at.get(stream), error)
        finally:
            let_helpers_go()
            with self._lock:
                self._rules.num_running -= 1
                self._num_workers -= 1
                self._done_issuing.add(stream)
                if stream in self._moves:
                    self._moves[stream].notify_all()
                self._check_stalled()
                self._news.notify()

    def go_on(self, stream: str) -> Call:
        """For a body that does the stream's next op, too, in whatever thread: ends its own, and begins that one."""
        if (node := self._begin_next(stream)) is None:
            raise ExecutionError("this execution has failed")
        return node

    def _begin_next(self, stream: str) -> OpRun | None:
        """Ends the op that the stream has come to, whose body is done, and begins its next one; None when there is no
        more to do."""
        done, is_ahead = self._rules.at.get(stream), stream in self._issued
        if done is not None and is_ahead:
            self._note_issued(done)
        elif done is not None and done.step < self._trace_end:
            end_ns = coreless_ns()
            done.coreless_ns, self._waited_ns[stream] = end_ns - self._waited_ns[stream], end_ns
        with self._lock:
            if done is not None and not is_ahead:
                self._rules.end_op(done)
            node = self._rules.come_to_next(stream) if self._failure is None else None
            if node is None:
                self._do_quick()
            elif self.await_others is None:
                node = self._await_start(node, node.free_ns)
        if node is not None and self.await_others is not None:  # who may take long, and other streams need the lock
            self.await_others(node)
            with self._lock:
                node = self._await_start(node, self._rules.now_ns())
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
            self._rules.issue(node)
            self._issued[stream].append(node)
            self._moves[stream].notify_all()

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
            first.take_times(self._rules.zero_ns, self._last_end_ns[first.op.stream])
            self._last_end_ns[first.op.stream] = first.end_ns
            self._rules.end_issued(first)
            self._moves[first.op.stream].notify_all()
        self._check_stalled()

    def _await_start(self, node: OpRun, now_ns: int) -> OpRun | None:
        """Returns the stream's op that may start: this one, or one behind it; None where no more is to be done."""
        stream = node.op.stream
        self._reach(node, now_ns)
        self._do_quick()
        if not node.is_started:
            self._asleep.add(stream)
            while stream in self._asleep and self._failure is None:
                self._wakeup[stream].wait()
        if (at := self._rules.at[stream]) is not None:
            at.start_ns = self._rules.now_ns()  # here, not where it was granted: waking up is not work of the op
        return at

    def _reach(self, node: OpRun, now_ns: int) -> None:
        self._rules.reach(node, now_ns)
        if self._rules.num_running <= 0:
            self._check_stalled()

    def _on_start(self, node: OpRun) -> None:
        if node.op.stream in self._asleep:
            if self._is_shared and self.is_quick(node.op):
                self._to_do.quick.append(node)
            else:
                self._wake(node.op.stream)

    def _wake(self, stream: str) -> None:
        self._asleep.discard(stream)
        self._wakeup[stream].notify()

    def _do_quick(self) -> None:
        """Does ops of streams whose workers sleep, who would take longer to wake up."""
        quick = self._to_do.quick
        while quick and self._failure is None:
            node = quick.popleft()
            self._lock.release()
            try:
                self._do(node)
            finally:
                self._lock.acquire()
            if self._failure is not None:
                return
            self._rules.end_op(node)
            if (following := self._rules.come_to_next(node.op.stream)) is None:
                self._wake(node.op.stream)
            else:
                self._reach(following, following.free_ns)

    def _do(self, node: OpRun) -> None:
        """An op of another stream than this thread's."""
        is_traced = node.step < self._trace_end
        begin_ns, node.start_ns = coreless_ns() if is_traced else 0, self._rules.now_ns()
        try:
            self.body(node)
        except BaseException as error:
            self._fail_in(node, error)
        node.coreless_ns = coreless_ns() - begin_ns if is_traced else 0

    # ---- when it goes wrong ----

    def _fail_in(self, node: OpRun | None, error: BaseException) -> None:
        if node is not None:
            error.add_note(f"in op {node.op.key!r} of step {node.step}")
        with self._lock:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
            self.on_failure(error)
        for wakeup in (*self._wakeup.values(), *self._moves.values()):
            wakeup.notify_all()

    def _check_stalled(self) -> None:
        if self._failure is None and (error := self._rules.stalled()) is not None:
            self._fail(error)
