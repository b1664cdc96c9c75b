"""What a thread has waited for a core is known, with what others waited for it, and stands in the spans of ops."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from itertools import count
from pathlib import Path

import pytest

from tests.toys import toy_machine, toy_workload, uniform_plan
from tierplan.planner.lowering import lower
from tierplan.planner.plan import UnitPlan
from tierplan.runtime.execution import executor
from tierplan.runtime.execution.threads import add_coreless, coreless_ns

COUNTS = Path("/proc/thread-self/schedstat").exists()


@pytest.mark.skipif(not COUNTS, reason="this kernel does not count waits for a core")
def test_waits_beside_another_program_on_the_only_core_are_counted() -> None:
    """A thread that may use one core, on which another program computes, either works or waits."""
    allowed = os.sched_getaffinity(0)
    core = {min(allowed)}
    other = subprocess.Popen([sys.executable, "-c", f"import os\nos.sched_setaffinity(0, {core})\nwhile True: pass"])
    try:
        time.sleep(0.2)
        os.sched_setaffinity(0, core)
        began_ns, worked_ns, waited_ns = time.perf_counter_ns(), time.thread_time_ns(), coreless_ns()
        while time.perf_counter_ns() - began_ns < 2e8:
            pass
        waited_ns, worked_ns = coreless_ns() - waited_ns, time.thread_time_ns() - worked_ns
        passed_ns = time.perf_counter_ns() - began_ns
    finally:
        os.sched_setaffinity(0, allowed)
        other.kill()
        other.wait()
    assert waited_ns > 0
    assert waited_ns + worked_ns == pytest.approx(passed_ns, rel=0.1)


def test_what_others_waited_for_this_thread_is_its_own() -> None:
    found: list[int] = []

    def work() -> None:
        before_ns = coreless_ns()
        add_coreless(10**12)
        found.append(coreless_ns() - before_ns)

    before_ns = coreless_ns()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found[0] // 10**12 == 1
    assert coreless_ns() - before_ns < 10**12, "and no other thread's"


def test_spans_say_how_long_their_ops_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that waits 7 ns in each op and 100 ns between two."""
    clock = threading.local()

    def read_ns() -> int:
        if not hasattr(clock, "ticks"):
            clock.ticks = count()
        tick = next(clock.ticks)
        return 107 * (tick // 2) + 7 * (tick % 2)

    monkeypatch.setattr(executor, "coreless_ns", read_ns)
    machine, workload = toy_machine(), toy_workload(3)
    schedule = lower(uniform_plan(workload, UnitPlan(acts="host")), workload, machine)
    run = executor.Executor(schedule, lambda call: None)
    run.run(2)
    assert {span.coreless_ns for span in run.trace().spans} == {7}
