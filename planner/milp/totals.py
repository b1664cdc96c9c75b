"""What a step's totals take, whoever does what and when: a bound for plans of every kind, on all devices together.

Every unit has one of the placements of `modes`. What is updated on the host sends its gradients down and its new
parameters up, to some device; what is not at home on a device comes there to be used; what lives on drives is read,
and written where it has changed. Where gradients are clipped, all of them are held at once. No stream, shared limit or
tier has more of all that than it can take in a step. Nothing is said of the order, nor of activations.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf, isfinite

from tierplan.hwmodels.names import COMPUTE, HOST_ADAM, NVME_READ, NVME_WRITE, compute, d2h, h2d
from tierplan.planner.milp.amounts import Problem, UnitAmounts
from tierplan.planner.milp.bounds import MEMORY_FAMILIES, Bound, alone_s, shares_of, worth_of_memory
from tierplan.planner.milp.capacities import ENDURANCE, drive_pairs
from tierplan.planner.milp.columns import minus, times
from tierplan.planner.milp.modes import MODES, Mode
from tierplan.planner.milp.program import Draft, Solver, Terms
from tierplan.planner.milp.rates import GB, has_rates

SAFE_FRAC = 1e-6
"""By which the optimum is lowered, for the solver's tolerances."""
Totals = dict[str, Terms]
"""By flow, tier or place of updates."""


def bound_of_totals(p: Problem, num_batches: int) -> Bound:
    """No step in which all devices of the problem's machine together do `num_batches` times its micro-batches, for one
    update, is shorter. `p` is that of one device, whatever its order. Infinite where nothing fits."""
    passes = num_batches * p.workload.training.gradient_accumulation_steps
    lp, num = Draft(), p.machine.num_devices
    forward_and_backward_s = passes * at_once_s(p)
    step = lp.column(cost=1.0)
    moved, held, updated = _totals(lp, p)
    sizes = {"device": num * p.device_gb, "host": p.host_gb, "nvme": p.nvme_gb if p.has_nvme else 0.0}
    if p.workload.training.max_grad_norm is not None:  # until their norm is known all gradients wait somewhere
        waiting = {place: lp.column() for place, gb in sizes.items() if gb}
        lp.row([(1.0, column) for column in waiting.values()], low=sum(u.grads_gb for u in p.units), family="gradients")
        for place, column in waiting.items():
            held[place].append((1.0, column))
            for way in ("read", "write") if place == "nvme" else ():
                moved[way].append((1.0, column))

    def fit(terms: Terms, family: str, *, fixed: float = 0.0, each: float = 1.0) -> None:
        """All of it in a step."""
        if terms or fixed:
            lp.row([*terms, (-each, step)], high=-fixed, family=family)

    fit(updated["device"], COMPUTE, fixed=forward_and_backward_s, each=num)
    fit(times(1 / p.rates.adam if p.rates.adam else 0.0, updated["host"]), HOST_ADAM)
    taken = {HOST_ADAM: updated["host"], NVME_READ: moved["read"], NVME_WRITE: moved["write"]}
    for way, stream_of in (("up", h2d), ("down", d2h)) if p.host_gb else ():
        columns = [lp.column() for _ in range(num)]  # over whichever device's link
        lp.row([*((1.0, c) for c in columns), *minus(moved[way])], low=0.0, family="what moves")
        taken |= {stream_of(k): [(1.0, column)] for k, column in enumerate(columns)}
        for k in range(num):
            fit(times(_s_per_gb(p, stream_of(k)), taken[stream_of(k)]), stream_of(0))
    if p.has_nvme:
        for stream in (NVME_READ, NVME_WRITE):
            fit(times(_s_per_gb(p, stream), taken[stream]), stream)
        for limit, loads in drive_pairs(p):
            fit([t for stream, load in loads.items() for t in times(load, taken[stream])], limit)
        if isfinite(p.write_limit_gb_per_s):
            fit(times(1 / p.write_limit_gb_per_s, taken[NVME_WRITE]), ENDURANCE)
    by_all = p.machine.stream(compute(num - 1)).takes  # what other devices' computing takes of, too
    for limit, loads in p.loads.items():
        each = sum(u.fwd_load.get(limit, 0.0) + u.bwd_load.get(limit, 0.0) for u in p.units)
        fixed = passes * each if limit in by_all else 0.0
        fit([t for s, load in loads.items() for t in times(load, taken.get(s, []))], limit, fixed=fixed)
    for family, place in MEMORY_FAMILIES.items():
        if held[place]:
            lp.row(held[place], high=sizes[place], family=family)

    program = lp.program()
    solution, least_s = Solver().solve(program), forward_and_backward_s / num
    if solution.status == "infeasible":
        return Bound(step_s=inf, shares={}, s_per_gb={}, feasible=False, solution=solution)
    if solution.status != "optimal":
        return Bound(step_s=least_s, shares={COMPUTE: 1.0}, s_per_gb={}, proven=False)
    return Bound(
        step_s=min(max(solution.objective * (1 - SAFE_FRAC), least_s), alone_s(p)),
        shares=shares_of(program, solution, [step]),
        s_per_gb=worth_of_memory(program, solution),
        solution=solution,
    )


def at_once_s(p: Problem) -> float:
    """Least seconds of computing of a micro-batch: packs compute units at once, whose latencies are one, and kernels of
    some are launched while those of others run."""
    found = 0.0
    for way in ("forward", "backward"):
        works = [work for u in p.workload.units if has_rates(p.machine, COMPUTE, work := getattr(u, way))]
        costs = [p.machine.cost(COMPUTE, work) for work in works]
        found += max(sum(cost.work_s for cost in costs), sum(cost.launch_s for cost in costs))
    return found


def _totals(lp: Draft, p: Problem) -> tuple[Totals, Totals, Totals]:
    """How many units of each kind have which placement, as columns. Of these, by way the GB that a step moves, by tier
    the GB that it holds, and by place the updates: seconds on devices, 1e9 parameters on the host.
    """
    moved: Totals = {way: [] for way in ("up", "down", "read", "write")}
    held: Totals = {place: [] for place in MEMORY_FAMILIES.values()}
    updated: Totals = {"device": [], "host": []}
    # several devices update a unit in parts; what the host has no rate for, it does at once
    roomy = replace(p, device_gb=inf, rates=replace(p.rates, adam=p.rates.adam or inf))
    alike: dict[tuple[float, ...], list[int]] = {}
    for k, u in enumerate(p.units):
        sizes = u.params_gb, u.frozen_gb, u.grads_gb, u.states_gb, u.gparams
        alike.setdefault((*sizes, u.update_s, u.host_update_s), []).append(k)
    for (first, *_), number in ((units, len(units)) for units in alike.values()):
        modes = dict.fromkeys(replace(MODES[k], grads="device") for k in roomy.modes(first))
        columns = {mode: lp.column() for mode in modes}
        lp.row([(1.0, c) for c in columns.values()], low=number, high=number, family="units")
        for mode, column in columns.items():
            for of, gb in _moved_gb(p.units[first], mode).items():
                moved[of].append((gb, column))
            for place, gb in _held_gb(p.units[first], mode):
                held[place].append((gb, column))
            if mode.updated == "host":
                updated["host"].append((p.host_gparams(p.units[first]), column))
            else:
                updated["device"].append((p.units[first].update_s, column))
    return moved, held, updated


def _held_gb(u: UnitAmounts, mode: Mode) -> list[tuple[str, float]]:
    """What a unit with this placement has at home, by tier."""
    return [(mode.params, u.params_gb), (mode.states, u.states_gb), (mode.frozen or mode.params, u.frozen_gb)]


def _moved_gb(u: UnitAmounts, mode: Mode) -> dict[str, float]:
    """What a step moves at least of such a unit, by way."""
    on_host, brought = mode.updated == "host", mode.updated == "brought"
    away, frozen_away = mode.params != "device", mode.frozen not in (None, "device")
    on_drive_gb = u.states_gb * (mode.states == "nvme")
    return {
        "up": u.params_gb * (on_host or away) + u.frozen_gb * frozen_away + u.states_gb * brought,
        "down": u.grads_gb * on_host + u.params_gb * (brought and away) + u.states_gb * brought,
        "read": u.frozen_gb * (mode.frozen == "nvme") + on_drive_gb,
        "write": u.params_gb * (mode.params == "nvme") + on_drive_gb,
    }


def _s_per_gb(p: Problem, stream: str) -> float:
    """Without latency: however much of it a plan moves at a time."""
    return GB / max(per_s for _, per_s in p.machine.stream(stream).rates["bytes"].points)
