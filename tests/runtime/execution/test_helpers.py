"""Of the threads that compute in turns, one at a time keeps helpers of OpenMP's."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.runtime.models import make_batches, make_model, observed_workload
from tests.runtime.test_trainer import machine
from tests.toys import uniform_plan
from tierplan.planner.lowering import lower
from tierplan.planner.plan import UnitPlan
from tierplan.planner.plan_rules import Order
from tierplan.runtime.execution import threads
from tierplan.runtime.execution.ops import Bodies
from tierplan.runtime.trainer import train
from tierplan.sim.workloads.workload import Training

TASKS = Path("/proc/self/task")


def helpers(most: int = 1) -> int:
    """Threads of this process that are not Python's. A thread that is about to end is neither for a moment: more than
    `most` are counted again."""
    for _ in range(100):
        if (num := len(list(TASKS.iterdir())) - len(threading.enumerate())) <= most:
            break
        time.sleep(0.005)
    return num


@pytest.mark.skipif(not TASKS.exists(), reason="this kernel does not list threads")
@pytest.mark.parametrize("order", ["horizontal", "vertical"])
def test_one_thread_has_helpers_at_a_time(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(
        per_device_train_batch_size=16, sequence_length=64, gradient_accumulation_steps=2, backend="cpu", dtype="fp32"
    )
    model, batches = make_model(num_blocks=2), make_batches(4, batch=16, length=64)
    plan = replace(uniform_plan(observed_workload(model, batches[0], training), UnitPlan()), order=order)
    schedule = lower(plan, observed_workload(model, batches[0], training), machine())
    before = torch.get_num_threads()
    found: list[int] = []
    plainly = Bodies.__call__

    def counted(self: Bodies, call: object) -> None:
        plainly(self, call)  # type: ignore[arg-type]
        found.append(helpers(others + 1) - others)

    monkeypatch.setattr(Bodies, "__call__", counted)
    try:
        torch.set_num_threads(2)
        threads.let_helpers_go()
        others = helpers(0)
        train(schedule, model, batches, steps=2, num_threads=2)
    finally:
        torch.set_num_threads(before)
    assert max(found) == 1, "some op has a helper, and none is left over from another thread"
