"""A pass of a unit takes at least what launching its kernels takes, where the machine says what that is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.toys import toy_machine, toy_workload, uniform_plan
from tierplan.hwmodels import load_machine
from tierplan.hwmodels.machine import KERNELS, Machine
from tierplan.hwmodels.names import COMPUTE
from tierplan.planner.lowering import lower
from tierplan.planner.milp.amounts import problem
from tierplan.planner.plan import UnitPlan
from tierplan.planner.policies import decide
from tierplan.planner.policies.several.fsdp import HOOKS
from tierplan.planner.policies.several.zero import MODULE_HOOKS
from tierplan.planner.prediction import predict
from tierplan.sim.digest import digest
from tierplan.sim.workloads.models import load_workload
from tierplan.sim.workloads.workload import Training, Workload

WITH_LAUNCHES, WITHOUT = (("gpu.count=2", f"gpu.launch={text}") for text in ("20 us", "0 us"))


def counted(num: int = 10, **training: object) -> Workload:
    workload = toy_workload(2, **training)
    return replace(workload, units=tuple(replace(unit, num_kernels=num) for unit in workload.units))


def launching(launch_s: float) -> Machine:
    machine = toy_machine()
    streams = (replace(s, launch_s=launch_s if s.name == COMPUTE else 0.0) for s in machine.streams)
    return replace(machine, streams=tuple(streams))


def test_an_op_takes_its_launches_or_its_work_whichever_is_longer() -> None:
    work = {"matmul_bf16_flops": 1e9, KERNELS: 10}  # 10 ms of work
    for launch_s, took_s in ((0.5e-3, 10e-3), (2e-3, 20e-3)):
        cost = launching(launch_s).cost(COMPUTE, work)
        assert (cost.alone_s, cost.work_s) == (pytest.approx(took_s), pytest.approx(10e-3))


def test_kernels_between_products_take_the_device_a_time_of_their_own() -> None:
    """Forward, forward again, and one and a half times as many in backward."""
    workload = load_workload("llama-3.2-1b", Training(sequence_length=2048))
    each = workload.blocks[0].num_elementwise
    assert 20 < each < workload.blocks[0].num_kernels
    settings = ("gpu.count=1", "gpu.launch=0 us")
    without, with_them = (
        predict("full-recompute", workload, load_machine("dgx-8xa100-80gb", (*settings, f"gpu.kernel={us} us"))).step_s
        for us in (0, 10)
    )
    assert without is not None
    assert with_them is not None
    ends = sum(unit.num_elementwise for unit in workload.units if unit.kind != "block")
    assert with_them - without == pytest.approx((16 * each * 3.5 + ends * 2.5) * 1e-5, rel=0.02)


@pytest.mark.parametrize("sub_batches", [1, 2])
def test_every_pass_launches_all_kernels_of_its_unit(sub_batches: int) -> None:
    workload, machine = counted(per_device_train_batch_size=2), launching(1e-3)
    plan = replace(uniform_plan(workload, UnitPlan(acts="recompute")), sub_batches=sub_batches)
    launched = {op.key: op.work.get(KERNELS) for op in lower(plan, workload, machine).ops}
    passes = [key for key in launched if key.split("/")[0] in ("fwd", "recompute", "bwd")]
    assert len(passes) == sub_batches * (4 + 2 + 4)
    assert {launched[key] for key in passes} == {10}
    assert problem(workload, machine, semantics="in-backward", sub_batches=sub_batches).units[1].fwd_s == 0.01


def test_nothing_changes_where_launches_cost_nothing() -> None:
    workload = counted()
    plan = uniform_plan(workload, UnitPlan(acts="recompute"))
    assert lower(plan, workload, toy_machine()) == lower(plan, toy_workload(2), toy_machine())
    assert digest(workload) == digest(toy_workload(2))
    assert digest(toy_machine()) == digest(launching(0.0)) != digest(launching(1e-3))


def test_kernels_are_counted_with_adapters_and_decoding() -> None:
    plain, adapted = (load_workload("llama-3.2-1b", Training(lora=lora)).blocks[0].num_kernels for lora in ("", "r=4"))
    assert 30 < plain < 50
    assert adapted > plain + 7 * 3, "two products and a sum for each of seven matrices"


def test_hooks_of_zero_3_are_those_of_modules() -> None:
    """Nine of Llama's block have parameters: seven matrices and two norms."""
    workload = load_workload("llama-3.2-1b", Training(sequence_length=16))
    machine = load_machine("dgx-8xa100-80gb", WITH_LAUNCHES)
    launched = {}
    for policy in ("ddp", "fsdp", "zero-3"):
        ops = lower(decide(policy, workload, machine), workload, machine).ops
        launched[policy] = next(op.work[KERNELS] for op in ops if op.kind == "forward" and op.unit == "L3")
    assert launched["zero-3"] == launched["ddp"] + 9 * MODULE_HOOKS
    assert launched["fsdp"] == launched["ddp"] + HOOKS


def test_a_step_of_few_tokens_is_as_long_as_its_launches() -> None:
    workload = load_workload("llama-3.2-1b", Training(sequence_length=16))
    took_s = [predict("zero-3", workload, load_machine("dgx-8xa100-80gb", s)).step_s for s in (WITH_LAUNCHES, WITHOUT)]
    block = workload.blocks[0]
    launches_s = 16 * 3 * (block.num_kernels + block.num_modules * MODULE_HOOKS) * 20e-6
    assert took_s[0] is not None
    assert took_s[1] is not None
    assert launches_s < took_s[0] < launches_s + took_s[1]
