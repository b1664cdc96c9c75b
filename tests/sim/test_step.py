"""What a schedule says of its step, against its own ops and buffers."""

from __future__ import annotations

import random

import pytest

from tests.toys import toy_machine, toy_workload
from tierplan.planner.lowering import lower
from tierplan.planner.plan import UnitPlan, UnitwisePlan
from tierplan.planner.plan_rules import ACTIONS
from tierplan.planner.policies import POLICIES, decide
from tierplan.sim.columns import unroll
from tierplan.sim.contents import KeptActs, RecomputedActs, SavedActs, parse_content
from tierplan.sim.schedule import Schedule
from tierplan.sim.step import SavedTensorSpec, StepSpec, UnitSpec
from tierplan.sim.workloads.workload import Training


def tensor(action: str, size_bytes: int = 8) -> SavedTensorSpec:
    return SavedTensorSpec(size_bytes=size_bytes, action=action)  # type: ignore[arg-type]


def test_what_happens_to_saved_tensors() -> None:
    saved = (tensor("keep"), tensor("host"), tensor("recompute"), tensor("nvme"), tensor("host", 0), tensor("keep", 1))
    unit = UnitSpec(name="L0", num_parameters=4, saved=saved)
    assert unit.moved == (1, 3), "an empty tensor has no bytes to move"
    assert unit.recomputed == (2,)
    assert [unit.bytes_of(a) for a in ("keep", "recompute", "host", "nvme")] == [9, 8, 8, 8]


@pytest.mark.parametrize(
    ("semantics", "late", "before"),
    [("in-backward", {"a"}, {"a"}), ("exact-clip", {"a"}, {"a"}), ("delayed-1", {"a"}, {"a", "b"})],
)
def test_which_updates_take_the_gradients_of_the_step_before(semantics: str, late: set[str], before: set[str]) -> None:
    units = (UnitSpec(name="a", num_parameters=1, late_update=True), UnitSpec(name="b", num_parameters=1))
    step = StepSpec(training=Training(), semantics=semantics, units=units)  # type: ignore[arg-type]
    assert (step.late_updates, step.updates_of_step_before) == (late, before)


def check_against_buffers(schedule: Schedule) -> None:
    """Buffers of saved tensors are those that the step's actions ask for."""
    assert schedule.step is not None
    units = {unit.name: unit for unit in schedule.step.units}
    sizes: dict[object, int] = {}
    for b in schedule.buffers:
        content = parse_content(b.content)
        assert sizes.setdefault(content, b.size_bytes) == b.size_bytes
    expected: dict[object, int] = {}
    together = {(c.unit, c.micro_batch, k): c for c in sizes if isinstance(c, SavedActs) for k in c.indices}
    for m in range(schedule.step.training.gradient_accumulation_steps):
        for unit in units.values():
            for k in unit.moved:
                content = together[unit.name, m, k]
                expected[content] = expected.get(content, 0) + unit.saved[k].size_bytes
                assert {unit.saved[i].action for i in content.indices} == {unit.saved[k].action}
            expected[KeptActs(unit.name, m)] = unit.bytes_of("keep")
            expected[RecomputedActs(unit.name, m)] = unit.bytes_of("recompute")
    kinds = SavedActs, KeptActs, RecomputedActs
    assert {c: n for c, n in sizes.items() if n and isinstance(c, kinds)} == {c: n for c, n in expected.items() if n}


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_buffers_of_every_policy(policy: str) -> None:
    workload, machine = toy_workload(gradient_accumulation_steps=2), toy_machine()
    schedule = lower(decide(policy, workload, machine), workload, machine)
    if schedule.step is None:
        assert policy in ("virtual-memory", "roundpipe", "roundpipe-sync", "mobius"), "only these are never executed"
    else:
        check_against_buffers(schedule)
        assert unroll(schedule, 2).step == schedule.step


@pytest.mark.parametrize("seed", range(12))
def test_buffers_of_any_actions(seed: int) -> None:
    rng = random.Random(seed)
    workload = toy_workload(gradient_accumulation_steps=2)
    units = tuple(
        UnitPlan(
            params="host", grads="host", states="host", late_update=rng.random() < 0.5,
            acts=tuple(rng.choice(ACTIONS if u.kind == "block" else ("keep", "host", "nvme")) for _ in u.saved),
        )
        for u in workload.units
    )  # fmt: skip
    plan = UnitwisePlan(policy="any", units=units)
    schedule = lower(plan, workload, toy_machine())
    check_against_buffers(schedule)
    assert schedule.step is not None
    assert schedule.step.late_updates == {u.name for u, c in zip(workload.units, units, strict=True) if c.late_update}
