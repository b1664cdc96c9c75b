"""Operators that all devices share (Megatron's tensor parallelism), with what their memory has room to keep.

Megatron makes all activations again, collectives included, or all but the products, or none. Between these, the last
blocks keep more, which go first: as many as fit, found by bisection, from one way to the next.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from tierplan.planner.plan import UnitwisePlan, is_same
from tierplan.planner.plan_rules import PLANNER, PlanError, refuse_codes, refuse_uneven
from tierplan.planner.policies import decide
from tierplan.planner.search.candidates import PlanSimulator
from tierplan.planner.search.incumbents import Incumbents, step_s_of
from tierplan.sim.step import Semantics
from tierplan.sim.workloads.workload import Workload

POLICY, WAYS = "megatron-tp", ("on", "selective", "off")
"""The policy, and what its option `checkpointing` says of blocks, which keep more each time."""
LEAST_FRAC = 0.6
"""Of a step that makes all activations again, what is left at least where none is: of computing three parts of four, of
what is exchanged two of three."""


def is_worth_cutting(workload: Workload, devices: int, known_s: float) -> bool:
    """Whether so many devices can cut the operators of this workload, and have no sequence of their own each; or else
    where no step is known, whose seconds are infinite."""
    training = workload.training
    try:
        refuse_uneven(f"policy {POLICY!r}", workload, devices)
        refuse_codes(f"policy {POLICY!r}", training)
    except PlanError:
        return False
    sequences = training.per_device_train_batch_size * training.gradient_accumulation_steps
    return sequences < devices or known_s == inf


def search_tensors(
    incumbents: Incumbents, simulate_plan: PlanSimulator, semantics: Semantics, *, beat_s: float
) -> None:
    """The quickest of such plans, where devices share micro-batches; none that cannot take less than `beat_s`, or than
    what is known."""
    if incumbents.batches == "each":
        return
    workload = simulate_plan.workload
    try:
        again, *others = (decide(POLICY, workload, simulate_plan.machine, {"checkpointing": way}) for way in WAYS)
    except PlanError:
        return
    assert isinstance(again, UnitwisePlan)
    least_s = LEAST_FRAC * step_s_of(simulate_plan(again))
    if least_s >= min(beat_s, step_s_of(incumbents.best)) or not is_same(again, semantics):
        return
    blocks, units = [k for k, u in enumerate(workload.units) if u.kind == "block"], again.units
    for way in others:
        assert isinstance(way, UnitwisePlan)
        fits, fails, less = 0, len(blocks) + 1, units
        while fits + 1 < fails:
            number = (fits + fails) // 2
            more = (*less[: blocks[-number]], *way.units[blocks[-number] :])
            tried = simulate_plan(replace(again, policy=PLANNER, options={}, units=more))
            if tried.step_s is None:
                fails = number
            else:
                fits, units = number, more
                incumbents.consider(tried)
