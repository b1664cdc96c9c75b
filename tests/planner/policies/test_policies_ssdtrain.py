"""SSDTrain costs no time where the device has room to keep what the drive could not bring back, and saves memory."""

from __future__ import annotations

import pytest

from tierplan.hwmodels import load_machine
from tierplan.planner.prediction import Prediction, predict
from tierplan.planner.questions.largest import family
from tierplan.sim.workloads.workload import Training, Workload


def decoder(batch: int, name: str = "gpt-1.3b") -> Workload:
    training = Training(per_device_train_batch_size=batch, optimizer="sgd", master_weights=False)
    return next(workload for workload in family(training) if workload.name == name)


def beside_keeping(machine: str, batch: int, *changes: str) -> tuple[Prediction, Prediction]:
    workload, found = decoder(batch), load_machine(machine, changes)
    return predict("ssdtrain", workload, found), predict("in-memory", workload, found, {"semantics": "in-backward"})


def peak_bytes(prediction: Prediction) -> int:
    assert prediction.steady is not None
    return prediction.steady.peak_bytes["gpu0"]


def step_s(prediction: Prediction) -> float:
    assert prediction.step_s is not None
    return prediction.step_s


@pytest.mark.parametrize(("machine", "batch"), [("desktop-4090", 4), ("fuyou-4090", 4), ("ssdtrain-a100", 8)])
def test_offloading_takes_keeps_time_and_less_memory(machine: str, batch: int) -> None:
    offloaded, kept = beside_keeping(machine, batch)
    assert step_s(offloaded) <= 1.05 * step_s(kept)
    assert peak_bytes(offloaded) < peak_bytes(kept)


@pytest.mark.parametrize("drives", [1, 2, 4])
def test_more_drives_take_more_off_the_peak_and_never_cost_time(drives: int) -> None:
    fewer, kept = beside_keeping("desktop-4090", 4, f"nvme.drives={drives}")
    more, _ = beside_keeping("desktop-4090", 4, f"nvme.drives={2 * drives}")
    assert peak_bytes(more) <= 1.02 * peak_bytes(fewer)
    assert max(step_s(fewer), step_s(more)) <= 1.06 * step_s(kept)


def test_where_keeping_does_not_fit_the_rule_alone_decides() -> None:
    offloaded, kept = beside_keeping("fuyou-4090", 10)
    assert not kept.fits
    assert offloaded.fits
