"""Unit-wise plans, drawn decision by decision: every place, action and knob that changes what runs on one device."""

from __future__ import annotations

import random
from dataclasses import replace

from tierplan.planner.plan import GradientsByLink, UnitPlan, UnitwisePlan
from tierplan.planner.plan_rules import PlanError
from tierplan.sim.workloads.workload import Unit, Workload


def random_plan(workload: Workload, rng: random.Random) -> UnitwisePlan:
    """Any plan of one device that fits the workload and what its training asks for."""
    while True:
        plan = _draw(workload, rng)
        try:
            plan.check(workload)
        except PlanError:
            continue  # such as a delayed update with states on the device
        return _with_more(plan, workload)


def _with_more(plan: UnitwisePlan, workload: Workload) -> UnitwisePlan:
    """What plans could not say when others began to draw from `rng`: late updates of exact clipping, late writes, and
    where tied gradients wait."""
    rng = random.Random(str(plan))
    if plan.write_back == "at once" and plan.updates_in_flight == 0:
        plan = replace(plan, late_writes=rng.choice([0, 1, 2]))
    able = [c.grads != "nvme" and c.states != "device" and rng.random() < 0.3 for c in plan.units]
    if plan.semantics == "exact-clip":
        pairs = zip(plan.units, able, strict=True)
        plan = replace(plan, units=tuple(replace(choice, late_update=late) for choice, late in pairs))
    are_tied = [unit.shares is not None and unit.adds_to_shared and rng.random() < 0.5 for unit in workload.units]
    pairs = zip(plan.units, are_tied, strict=True)
    units = (replace(choice, tied_grads="host") if is_tied else choice for choice, is_tied in pairs)
    return replace(plan, units=tuple(units))


def as_first_drawn(plan: UnitwisePlan) -> UnitwisePlan:
    """Without what plans could not say when digests of schedules of random ones were taken."""
    plan = replace(plan, late_writes=0, units=tuple(replace(choice, tied_grads="device") for choice in plan.units))
    if plan.semantics == "exact-clip":
        plan = replace(plan, units=tuple(replace(choice, late_update=False) for choice in plan.units))
    return plan


def with_some_in_host(plan: UnitwisePlan, rng: random.Random, *, most_shards: int = 4) -> UnitwisePlan:
    """The plan with states on NVMe in shards, some of which stay in host memory."""
    units = list(plan.units)
    for u, choice in enumerate(units):
        if choice.states == "nvme" != choice.grads and not choice.updates_here:
            num = rng.randint(1, most_shards)
            units[u] = replace(choice, state_shards=num, host_shards=rng.randrange(num))
    return replace(plan, units=tuple(units))


def with_updates_here(plan: UnitwisePlan, rng: random.Random) -> UnitwisePlan:
    """The plan with some updates on the device, wherever what they read waits."""
    units = tuple(
        replace(choice, update="device")
        if choice.states != "device" and plan.semantics != "delayed-1" and rng.random() < 0.3
        else choice
        for choice in plan.units
    )
    return replace(plan, units=units)


def _draw(workload: Workload, rng: random.Random) -> UnitwisePlan:
    clips = workload.training.max_grad_norm is not None
    semantics = "exact-clip" if clips else rng.choice(["in-backward", "in-backward", "exact-clip", "delayed-1"])
    segment_units = rng.choice([1, 1, 1, 2, 3])
    units = tuple(_draw_unit(unit, rng, semantics, segment_units) for unit in workload.units)
    said = str(units).replace(", tied_grads='device'", "")  # what it was when others began to draw
    other = random.Random(said + "link")  # of `rng`, others draw what they always have
    by_link = GradientsByLink(
        waits=other.choice(["at the end", "in the last", "always"]),  # type: ignore[arg-type]
        returns_first=other.random() < 0.5,
        slowdown=other.choice([1.0, 2.5]),
    )
    return UnitwisePlan(
        policy="random",
        units=units,
        semantics=semantics,  # type: ignore[arg-type]
        order=rng.choice(["horizontal", "vertical"]),  # type: ignore[arg-type]
        prefetch_params_units=rng.randint(0, 2),
        prefetch_acts_units=rng.randint(0, 2),
        prefetch_states_units=rng.randint(0, 2),
        strict_windows=rng.random() < 0.3,
        updates_in_flight=rng.choice([0, 0, 1, 2, 4]),
        write_back=rng.choice(["at once", "delayed", "awaited"]),  # type: ignore[arg-type]
        update_order=rng.choice(["forward", "backward"]),  # type: ignore[arg-type]
        hold_updates=semantics == "exact-clip" and rng.random() < 0.5,
        by_link=by_link if rng.random() < 0.5 else None,
        segment_units=segment_units,
        overtaking=random.Random(said).random() < 0.5,  # of `rng`, others draw what they always have
    )


def _draw_unit(unit: Unit, rng: random.Random, semantics: str, segment_units: int) -> UnitPlan:
    params, grads, states = (rng.choice(["device", "host", "nvme"]) for _ in range(3))
    if rng.random() < 0.2 and semantics != "delayed-1":
        params = grads = states = "device"
    elif states == "device":
        states = "host"
    if semantics == "delayed-1" and grads == "nvme":
        grads = "host"
    late = semantics == "in-backward" and grads != "nvme" and rng.random() < 0.3 and states != "device"
    actions = ["keep", "host", "nvme", "recompute"] if unit.kind == "block" else ["keep", "host", "nvme"]
    acts: object = tuple(rng.choice(actions) for _ in unit.saved)
    if segment_units > 1 and unit.kind == "block":
        acts = "recompute"
    place = rng.choice(["keep", "host", "nvme"])
    parts = rng.choice([1, 2, 3]) if states == "nvme" else 1
    return UnitPlan(
        params=params, grads=grads, states=states, acts=acts, input=place, late_update=late, state_shards=parts
    )  # type: ignore[arg-type]
