"""The reference work is timed rarely enough, and when it is asked for."""

from __future__ import annotations

import pytest
import torch

from tests.runtime.models import make_batches, make_model, observed_workload
from tests.runtime.test_trainer import machine
from tests.toys import uniform_plan
from tierplan.planner.lowering import lower
from tierplan.planner.plan import UnitPlan
from tierplan.runtime.execution.device import Device
from tierplan.runtime.measure import reference_work
from tierplan.runtime.measure.reference_work import NUM_ASKED, ReferenceWork
from tierplan.runtime.trainer import Trainer
from tierplan.sim.workloads.workload import Training

CPU = Device()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that the reference work moves on by 2 ms, and the test by steps of 0.1 s."""
    now_s = [0.0]
    monkeypatch.setattr(reference_work.time, "perf_counter", lambda: now_s[0])

    def work(self: ReferenceWork) -> float:
        now_s[0] += 0.002
        return 0.002

    monkeypatch.setattr(ReferenceWork, "_time_s", work)
    return now_s


def test_it_takes_at_most_its_part_of_the_time(clock: list[float]) -> None:
    state = torch.get_rng_state()
    timed = ReferenceWork(CPU, torch.float32, 0.005)
    begin_s = clock[0]
    for step in range(100):
        clock[0] += 0.1
        timed.on_op(step)
    spent_s = 0.002 * sum(map(len, timed.seconds.values()))
    assert 0.004 * (clock[0] - begin_s) < spent_s <= 0.005 * (clock[0] - begin_s) + 1e-9
    assert torch.equal(torch.get_rng_state(), state), "training draws the same numbers as without it"


def test_it_is_timed_when_asked_and_only_then() -> None:
    timed = ReferenceWork(CPU, torch.bfloat16, 0.0, asked_step=3)
    for step in range(6):
        timed.on_op(step)
    assert list(timed.seconds) == [3]
    assert len(timed.seconds[3]) == NUM_ASKED
    assert timed.seconds[3][0] > 0


def test_a_run_whose_streams_never_rest_has_moments_before_and_after_it(clock: list[float]) -> None:
    timed = ReferenceWork(CPU, torch.float32, 0.005)
    timed.is_alone = lambda: True
    timed.at_rest(0)
    timed.is_alone = lambda: False
    for step in range(40):
        clock[0] += 0.1
        timed.on_op(step)
    timed.is_alone = lambda: True
    for _ in range(3):
        timed.at_rest(39)
        assert {step: len(times) for step, times in timed.seconds.items()} == {0: 4, 39: 5}, "9 in 3.9 s are 0.5 %"


def test_moments_in_which_other_streams_work_say_nothing_of_the_machine() -> None:
    alone = iter([False, False, True, True, True, False, False, True, True, False])
    timed = ReferenceWork(CPU, torch.float32, 0.0, lambda: next(alone, False), asked_step=3)
    for step in (2, 3, 3, 3, 3, 4):
        timed.on_op(step)
    assert {step: len(times) for step, times in timed.seconds.items()} == {3: 2}, "alone at its beginning and its end"


def test_it_has_several_moments_of_a_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one begins, states of the step before may be on their way to drives; later others may rest."""
    moments: list[int] = []
    at_rest: list[int] = []
    monkeypatch.setattr(ReferenceWork, "on_op", lambda self, step: moments.append(step))
    monkeypatch.setattr(ReferenceWork, "at_rest", lambda self, step: at_rest.append(step))
    training = Training(per_device_train_batch_size=2, sequence_length=16, dtype="fp32", backend="cpu")
    model, batches = make_model(), make_batches(2)
    workload = observed_workload(model, batches[0], training)
    plan = uniform_plan(workload, UnitPlan(params="host", grads="host", states="host"))
    with Trainer(lower(plan, workload, machine()), model, reference_frac=0.5) as trainer:
        trainer.run(batches, 2)
    assert moments == sorted(moments)
    assert at_rest == [0, 1], "before the first step, and after the last one"
    assert min(moments.count(0), moments.count(1)) > 1
