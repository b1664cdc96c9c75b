"""What a run leaves to Python's search for unreachable rings of objects, and what that passes over meanwhile."""

from __future__ import annotations

import gc

from tests.runtime.execution.test_executor import chain
from tests.toys import toy_machine, toy_workload, uniform_plan
from tierplan.planner.lowering import lower
from tierplan.planner.plan import UnitPlan
from tierplan.runtime.execution.executor import Executor


def test_steps_leave_nothing_that_only_a_collection_finds() -> None:
    """Python looks through all that a process holds when enough has come together: a quarter of a second at a time."""
    workload, choice = toy_workload(), UnitPlan(states="host", grads="host", acts="host")
    schedule = lower(uniform_plan(workload, choice), workload, toy_machine())
    executor = Executor(schedule, lambda call: None, trace_steps=0)
    executor.run(2)
    gc.disable()
    gc.freeze()  # what is there before, and what tests before this one have left
    try:
        executor.run(5)
        assert gc.collect() < len(schedule.ops)
    finally:
        gc.unfreeze()
        gc.enable()


def test_the_search_for_rings_passes_over_what_was_there_before_a_run() -> None:
    seen: list[tuple[int, int]] = []
    before = gc.get_threshold()
    executor = Executor(chain(), lambda call: seen.append((gc.get_freeze_count(), gc.get_threshold()[0])))
    executor.run(2)
    assert min(seen) > (0, 0)
    assert min(objects for _, objects in seen) > before[0], "a step's objects, which live as long as it, are no news"
    assert (gc.get_freeze_count(), gc.get_threshold()) == (0, before)
    gc.set_threshold(0)
    try:
        executor.run(1)
        assert seen[-1][1] == 0, "nor does it begin for whoever has ended it"
    finally:
        gc.set_threshold(*before)
    gc.freeze()
    try:
        executor.run(1)
        assert gc.get_freeze_count() > 0, "who froze by himself is left alone"
    finally:
        gc.unfreeze()
