"""How long DeepSpeed's copies of gradients take, by its settings."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.toys import toy_machine, toy_workload
from tierplan.hwmodels import load_machine
from tierplan.hwmodels.machine import Machine
from tierplan.planner.prediction import predict
from tierplan.sim.workloads.models import load_workload
from tierplan.sim.workloads.workload import Training


@pytest.mark.parametrize("policy", ["zero-offload", "zero-infinity"])
def test_copies_of_gradients_cost_what_deepspeed_s_settings_say(policy: str) -> None:
    """Memory that is not pinned is slower than waiting for pinned copies, which is slower than copies beside compute;
    streamed ones, which the host adds up, are not slower than those."""
    workload, machine = toy_workload(8, gradient_accumulation_steps=3), toy_machine()
    places = {} if policy == "zero-offload" else {"params": "host", "optimizer": "host", "host_buffers": "none"}
    settings: list[dict[str, object]] = [
        {"pin_memory": "off", "overlap": "on"}, {"overlap": "off"}, {"overlap": "on"},
        *([{"gradients": "streamed"}] if policy == "zero-offload" else []),
    ]  # fmt: skip
    step_s = [predict(policy, workload, machine, {**places, **more}).step_s or 0 for more in settings]
    assert step_s == sorted(step_s, reverse=True)
    assert len(set(step_s[:3])) == 3


def test_pageable_copies_have_the_machines_rate() -> None:
    workload = load_workload("gpt-1.3b", Training(dtype="bf16"))
    quick, slow = (
        predict(
            "zero-2", workload, load_machine("zenflow-2xa100", [f"link.pageable_frac={frac}"]),
            {"optimizer": "host", "pin_memory": "off"},
        ).step_s or 0
        for frac in (0.4, 0.2)
    )  # fmt: skip
    copied_s = 4 * workload.num_parameters / 25e9
    assert slow - quick == pytest.approx(copied_s * (1 / 0.2 - 1 / 0.4), rel=0.02)


def test_zero_2_copies_gradients_one_device_after_the_other_unless_round_robin() -> None:
    """By arithmetic: four bytes per parameter over one link, or over two at once."""
    workload, machine = load_workload("gpt-1.3b", Training(dtype="bf16")), load_machine("zenflow-2xa100")
    in_turn, at_once = (
        predict("zero-2", workload, machine, {"optimizer": "host", "round_robin": word}).step_s or 0
        for word in ("off", "on")
    )
    assert in_turn - at_once == pytest.approx(4 * workload.num_parameters / 25e9 / 2, rel=0.02)


def test_what_gradients_hold_a_link_for_is_that_of_the_machine_that_is_asked_for() -> None:
    """Schedules of several devices are known by names alone: the seconds of another machine's link stayed in them."""
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "sequence_length": 128}
    options = {"optimizer": "host", "pin_memory": "off"}
    slow, quick = (
        load_machine("desktop-4090", ["gpu.count=2", "link.p2p=9 GB/s", f"link.h2d={rate}", f"link.d2h={rate}"])
        for rate in ("6 GB/s", "25 GB/s")
    )

    def step_s(*machines: Machine) -> float | None:
        """On the last, by a workload that nothing is known of."""
        workload = replace(load_workload("gpt2", Training(**sizes)), name=f"gpt2 {len(machines)}")  # type: ignore[arg-type]
        return [predict("zero-2", workload, machine, options).step_s for machine in machines][-1]

    assert step_s(quick, slow) == step_s(slow)
