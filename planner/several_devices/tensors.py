"""Operators that all devices share (Megatron's tensor parallelism), with what their memory has room to keep.

Megatron makes all activations again, collectives included, or all but the products, or none. Between these, the last
blocks keep more, which go first: as many as fit, found by bisection, from one way to the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf
from typing import Protocol

from tierplan.planner.plan import Plan, UnitwisePlan, is_same
from tierplan.planner.plan_rules import PLANNER, PlanError, refuse_codes, refuse_uneven
from tierplan.planner.policies import decide
from tierplan.planner.search.budget import Budget
from tierplan.planner.search.candidates import Candidate, PlanSimulator
from tierplan.planner.search.incumbents import Incumbents, per_batch_s, step_s_of
from tierplan.sim.step import Semantics
from tierplan.sim.workloads.workload import Workload

POLICY, WAYS = "megatron-tp", ("on", "selective", "off")
"""The policy, and what its option `checkpointing` says of blocks, which keep more each time."""
MOST_EACH, MUCH_LESS, PROMISING = 2, 0.25, 0.8
"""Sequences for each device from which on operators are cut only where nothing else fits or is as quick, or where sums
of activations are less than so much of what shards exchange; and part of what is known that the bound of such plans has
to be below, where each device may have sequences of its own."""
SHARE, FIRST_FRAC, NEAR, NEARLY = 0.4, 0.6, 1.2, 1.05
"""Of so much work as the budget has, what such a search may take beside it; the part of this after which what is found
takes at most so many times what is known, or it ends; and so many times, for it to have more than that."""
OF_BOUND = 1.1
"""Of their bound, what the program of such plans may take, where updates have room in every window."""
LEAST_FRAC = 0.6
"""Of a step that makes all activations again, what is left at least where none is: of computing three parts of four, of
what is exchanged two of three."""


def may_cut(workload: Workload, devices: int) -> bool:
    """Whether so many devices can cut the operators of this workload."""
    try:
        refuse_uneven(f"policy {POLICY!r}", workload, devices)
        refuse_codes(f"policy {POLICY!r}", workload.training)
    except PlanError:
        return False
    return True


def sequences_each(workload: Workload, devices: int) -> float:
    """Of a step that so many devices share."""
    training = workload.training
    return training.per_device_train_batch_size * training.gradient_accumulation_steps / devices


def is_cut(plan: Plan) -> bool:
    """Whether its devices cut operators."""
    return isinstance(plan, UnitwisePlan) and plan.devices > 1 and plan.sharing.divided == "tensors"


def to_beat_s(workload: Workload, devices: int, known: Candidate[Plan] | None, wanted_s: float) -> float:
    """What the bound of plans that cut operators has to be below for a search of them, beside what is known, and steps
    of `wanted_s` that are not; 0 where there is none."""
    known_s = inf if known is None else per_batch_s(known)
    if not may_cut(workload, devices):
        return 0.0
    if (each := sequences_each(workload, devices)) < 1:
        return min(wanted_s, known_s)
    nothing_fits = min(wanted_s, known_s) == inf
    is_tried = each < MOST_EACH or nothing_fits or (known is not None and is_cut(known.plan))
    is_tried = is_tried or _summed_bytes(workload) < MUCH_LESS * _gathered_bytes(workload)
    return min(wanted_s, PROMISING * known_s) if is_tried else 0.0


def _summed_bytes(workload: Workload) -> float:
    """What sums of activations exchange in a step: twice in each pass of a block, and each sum goes around twice."""
    return 8.0 * workload.training.gradient_accumulation_steps * sum(block.output_bytes for block in workload.blocks)


def _gathered_bytes(workload: Workload) -> float:
    """The same of parameters that are gathered for each pass, and of gradients, where all are in shards."""
    t, trained = workload.training, sum(u.num_trained for u in workload.units)
    return 2.0 * sum(u.frozen_bytes for u in workload.units) + trained * (2.0 * t.param_bytes + t.grad_bytes)


class Rounds(Protocol):
    """A search in rounds."""

    in_rounds: Iterator[None]
    budget: Budget
    incumbents: Incumbents

    @property
    def best_s(self) -> float: ...


def go_on_while_promising(search: Rounds, known_s: float, told: Incumbents) -> None:
    """Rounds of a search that has `SHARE` of the budget, and more while it leads. What it finds is `told`, after Ctrl-C
    too."""
    budget, num_ops = search.budget, SHARE * search.budget.num_ops
    budget.ops_left = num_ops  # bounds are beside it, which of long chains take more
    try:
        for _ in search.in_rounds:
            is_begun = budget.ops_left > (1 - FIRST_FRAC) * num_ops
            is_far = search.best_s > known_s * (NEAR if budget.ops_left > 0 else NEARLY)
            if budget.is_out_of_time or (is_far and not is_begun):
                break
    finally:
        if search.incumbents.best is not None:
            told.consider(search.incumbents.best)


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
