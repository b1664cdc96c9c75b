"""What a thread has waited for a core is known, with what others waited for it, and stands in the spans of ops.
A thread that lasts does what it is given, and ends."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from tests.toys import toy_machine, toy_workload, uniform_plan
from tierplan.planner.lowering import lower
from tierplan.planner.plan import UnitPlan
from tierplan.runtime.execution import executor, threads
from tierplan.runtime.execution.threads import LastingThread, coreless_ns

COUNTS = Path("/proc/thread-self/schedstat").exists()


@pytest.mark.skipif(not COUNTS, reason="this kernel does not count waits for a core")
def test_waits_beside_another_program_on_the_only_core_are_counted() -> None:
    """A thread that may use one core, on which another program computes, either works or waits. Where the computer is
    itself taken away for a while, as a virtual one is, neither counts; so one of a few tries has to add up."""
    allowed = os.sched_getaffinity(0)
    core = {min(allowed)}
    other = subprocess.Popen([sys.executable, "-c", f"import os\nos.sched_setaffinity(0, {core})\nwhile True: pass"])
    accounted = []
    try:
        time.sleep(0.2)
        os.sched_setaffinity(0, core)
        for _ in range(10):
            began_ns, worked_ns, waited_ns = time.perf_counter_ns(), time.thread_time_ns(), coreless_ns()
            while time.perf_counter_ns() - began_ns < 2e8:
                pass
            waited_ns, worked_ns = coreless_ns() - waited_ns, time.thread_time_ns() - worked_ns
            accounted.append((waited_ns + worked_ns) / (time.perf_counter_ns() - began_ns))
            assert waited_ns > 0
            if abs(accounted[-1] - 1) < 0.1:
                break
    finally:
        os.sched_setaffinity(0, allowed)
        other.kill()
        other.wait()
    assert accounted[-1] == pytest.approx(1, abs=0.1), accounted


def test_what_a_coroutine_waits_while_it_works_counts_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """By clocks: 100 ns pass with every wait of a thread; the kernel says that each thread waits 10 ns while it works,
    and 1000 ns after it has let the other work, when nobody needs it."""
    now, waited = [0], threading.local()
    monkeypatch.setattr(threads.time, "perf_counter_ns", lambda: now[0])
    monkeypatch.setattr(threads, "coreless_ns", lambda: getattr(waited, "ns", 0) + threads._own.clock.helpers_ns)
    found = []

    def wait(ns: int) -> None:
        waited.ns = getattr(waited, "ns", 0) + ns

    class AboutToSleep(threading.Semaphore):  # type: ignore[misc, unused-ignore]
        def acquire(self, *args: object, **kwargs: object) -> bool:  # type: ignore[override]
            wait(1000)
            return super().acquire()

    monkeypatch.setattr(threads.threading, "Semaphore", AboutToSleep)

    def work() -> None:
        for _ in range(2):
            wait(10)
            now[0] += 100
            other.stop()

    other = threads.Coroutine(work, "other")
    for _ in range(2):
        before_ns = threads.coreless_ns()
        wait(10)
        other.go_on()
        found.append(threads.coreless_ns() - before_ns)
    other.cancel()
    assert found == [20, 20], "10 ns of each, and none of those in which the other worked"


def test_spans_say_how_long_their_ops_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that waits 7 ns in each op and 100 ns between two."""
    clock = threading.local()

    def read_ns() -> int:
        if not hasattr(clock, "ticks"):
            clock.ticks = count()
        tick = next(clock.ticks)
        return 107 * (tick // 2) + 100 * (tick % 2)

    monkeypatch.setattr(executor, "coreless_ns", read_ns)
    machine, workload = toy_machine(), toy_workload(3)
    schedule = lower(uniform_plan(workload, UnitPlan(acts="host")), workload, machine)
    run = executor.Executor(schedule, lambda call: None)
    run.run(2)
    spans = run.trace().spans
    assert {span.coreless_ns for span in spans} == {7}
    assert {span.late_ns for span in spans} == {100}
    assert all(0 <= span.delayed_ns <= min(100, span.dispatch_ns) for span in spans)


def test_a_lasting_thread_does_all_that_it_is_given_in_order_and_then_ends() -> None:
    done: list[tuple[int, int]] = []
    thread = LastingThread("one")
    for k in range(3):
        thread.begin(partial(lambda k: done.append((k, threading.get_native_id())), k))
    thread.wait()
    assert [k for k, _ in done] == [0, 1, 2]
    assert len({native for _, native in done}) == 1
    thread.end()
    with pytest.raises(RuntimeError, match="thread 'one' has ended"):
        thread.begin(lambda: None)


def test_an_error_in_a_lasting_thread_is_told_and_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []
    told: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    thread = LastingThread("one")
    thread.begin(lambda: done.append(1 // 0))
    thread.begin(lambda: done.append(1))
    thread.wait()
    thread.end()
    assert done == [1]
    assert [(args.exc_type, args.thread and args.thread.name) for args in told] == [(ZeroDivisionError, "one")]


def test_a_stream_keeps_its_thread_from_run_to_run_until_it_is_closed() -> None:
    """So what an op has freed, the op of a later run takes again."""
    used: dict[str, set[threading.Thread]] = {}
    schedule = lower(uniform_plan(toy_workload(3), UnitPlan(acts="host")), toy_workload(3), toy_machine())
    run = executor.Executor(
        schedule, lambda call: used.setdefault(call.op.stream, set()).add(threading.current_thread())
    )
    for _ in range(3):
        run.run(2)
    assert len(used) > 2
    assert all(len(those) == 1 for those in used.values())
    run.close()
    assert not any(thread.is_alive() for those in used.values() for thread in those)
    with pytest.raises(RuntimeError, match="has ended"):
        run.run(1)


def test_a_lasting_thread_that_nobody_has_any_more_ends() -> None:
    threads: list[threading.Thread] = []
    thread = LastingThread("one")
    thread.begin(lambda: threads.append(threading.current_thread()))
    thread.wait()
    del thread
    threads[0].join(30)
    assert not threads[0].is_alive()


def test_no_thread_that_is_at_work_keeps_python_from_ending() -> None:
    code = (
        "import time\n"
        "from tierplan.runtime.execution.threads import LastingThread\n"
        "thread = LastingThread('one')\n"
        "thread.begin(lambda: time.sleep(600))\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
