"""Near the published settings answers move the way they must: drives, batches and memory never make things worse."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from tierplan.hwmodels import load_machine
from tierplan.planner.prediction import Prediction, predict
from tierplan.planner.questions.largest import largest_model
from tierplan.sim.workloads.models import load_workload
from tierplan.sim.workloads.workload import Training

SLACK = 1.002


def ask(policy: str, model: str, machine: str, batch: int, *changes: str) -> Prediction:
    training = Training(per_device_train_batch_size=batch, dtype="fp16")
    return predict(policy, load_workload(model, training), load_machine(machine, changes))


@pytest.mark.parametrize("policy", ["fuyou", "zero-infinity"])
@pytest.mark.parametrize(("model", "batch"), [("gpt-13b", 24), ("gpt-30b", 8)])
def test_more_drives_are_never_slower(policy: str, model: str, batch: int) -> None:
    steps = [ask(policy, model, "fuyou-4090", batch, f"nvme.drives={n}").step_s or 0.0 for n in (1, 2, 4, 8, 12)]
    assert min(steps) > 0
    assert all(more <= SLACK * fewer for fewer, more in pairwise(steps))


@pytest.mark.parametrize(
    ("policy", "model", "machine"),
    [
        ("fuyou", "gpt-13b", "fuyou-4090"),
        ("zero-infinity", "gpt-13b", "fuyou-4090"),
        ("zero-offload", "gpt-10b-zero-offload", "zero-offload-v100"),
        ("harmony", "gpt-6.7b", "fuyou-4090"),
        ("ssdtrain", "gpt-6.7b", "server-8xh100"),
    ],
)
def test_a_larger_batch_is_never_less_efficient_until_it_does_not_fit(policy: str, model: str, machine: str) -> None:
    changes = ("gpu.capacity=160 GB", "gpu.count=1", "gpu.matmul_frac=0.6") if policy == "ssdtrain" else ()
    answers = [ask(policy, model, machine, batch, *changes) for batch in (1, 4, 8, 16, 32)]
    fits = [answer.fits for answer in answers]
    assert fits[0]
    assert fits == sorted(fits, reverse=True)
    rates = [answer.tflops_8nd or 0.0 for answer in answers if answer.fits]
    assert all(larger * SLACK >= smaller for smaller, larger in pairwise(rates))
    for answer in answers:
        assert answer.fits or (answer.shortage is not None and answer.shortage.short_bytes > 0)


@pytest.mark.parametrize(
    ("policy", "machine"),
    [
        ("in-memory", "fuyou-4090"),
        ("zero-offload", "zero-offload-v100"),
        ("zero-infinity", "fuyou-4090"),
        ("fuyou", "fuyou-4090"),
    ],
)
def test_more_device_memory_never_fits_a_smaller_model(policy: str, machine: str) -> None:
    training = Training(dtype="fp16")
    found = [largest_model(policy, load_machine(machine, [f"gpu.capacity={n} GB"]), training).fits for n in (10, 24)]
    sizes = [0 if fits is None else fits.num_parameters for fits in found]
    assert sizes == sorted(sizes)
    assert sizes[-1] > sizes[0]


def test_a_card_without_half_precision_says_what_to_do() -> None:
    found = ask("zero-infinity", "gpt-6.7b", "harmony-4x1080ti", 1)
    assert re.search(r"no rate for 'matmul_fp16_flops'.*train in a dtype that it has$", found.why_not)
