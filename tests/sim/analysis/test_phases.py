"""Phases of a step: by hand, and their sum."""

from __future__ import annotations

import pytest

from tests.toys import toy_machine, toy_workload, uniform_plan
from tierplan import Training, load_machine, load_workload
from tierplan.planner.plan import UnitPlan
from tierplan.planner.prediction import predict, predict_plan
from tierplan.sim.analysis.phases import phases


@pytest.mark.parametrize("batches", [1, 3])
def test_in_memory_each_phase_is_the_sum_of_its_ops(batches: int) -> None:
    """One stream does everything, so nothing overlaps, whatever the order of micro-batches."""
    workload = toy_workload(2, gradient_accumulation_steps=batches)
    found = predict_plan(uniform_plan(workload, UnitPlan()), workload, toy_machine())
    assert found.schedule is not None
    assert found.phases is not None
    spans = found.steady.trace.by_key()  # type: ignore[union-attr]
    by_kind: dict[str, float] = {}
    for op in found.steady.schedule.ops[: len(found.schedule.ops)]:  # type: ignore[union-attr]
        by_kind[op.kind] = by_kind.get(op.kind, 0.0) + spans[op.key].duration_ns / 1e9
    assert found.phases.forward_s == pytest.approx(by_kind["forward"])
    assert found.phases.backward_s == pytest.approx(by_kind["backward"])
    assert found.phases.update_s == pytest.approx(by_kind["update"])


@pytest.mark.parametrize("states", ["host", "nvme"])
def test_phases_add_up_to_the_step(states: str) -> None:
    workload = toy_workload(3, gradient_accumulation_steps=2)
    choice = UnitPlan(params="host", grads="host", states=states, acts=("nvme", "host", "recompute", "keep"))  # type: ignore[arg-type]
    found = predict_plan(uniform_plan(workload, choice), workload, toy_machine())
    assert found.steady is not None
    spent = phases(found.steady)
    assert spent.forward_s + spent.backward_s + spent.update_s == pytest.approx(found.steady.period_s, rel=1e-4)
    assert min(spent.forward_s, spent.backward_s) > 0


def test_packs_that_go_forward_on_some_devices_and_backward_on_others_have_both_phases() -> None:
    """Of twelve GPUs nine had work, and none went both ways: backward was said to take no time."""
    workload = load_workload("gpt2", Training(gradient_accumulation_steps=12))
    found = predict("harmony-pp", workload, load_machine("roundpipe-8x4090", ["gpu.count=12"]))
    assert found.phases is not None
    assert 0 < found.phases.forward_s < found.phases.backward_s
