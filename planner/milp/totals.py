"""What a step's totals take, whoever does what and when: a bound for plans of every kind, on all devices together.

Every unit has one of the placements of `modes`. What is updated on the host sends its gradients down and its new
parameters up, to some device; what is not at home on a device comes there to be used; what lives on drives is read,
and written where it has changed. No stream, shared limit or tier has more of all that than it can take in a step.
Nothing is said of the order, nor of activations.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf, isfinite

from tierplan.hwmodels.names import COMPUTE, D2H, H2D, HOST_ADAM, NVME_READ, NVME_WRITE, compute, d2h, h2d
from tierplan.planner.milp.amounts import Problem, UnitAmounts
from tierplan.planner.milp.bounds import MEMORY_FAMILIES, Bound, compute_s, shares_of, worth_of_memory
from tierplan.planner.milp.capacities import ENDURANCE, drive_pairs
from tierplan.planner.milp.columns import minus, times
from tierplan.planner.milp.modes import MODES, Mode
from tierplan.planner.milp.program import Draft, Solver, Terms

SAFE_FRAC = 1e-6
"""By which the optimum is lowered, for the solver's tolerances."""
Totals = dict[str, Terms]
"""By flow, tier or place of updates."""


def bound_of_totals(p: Problem, num_batches: int) -> Bound:
    """No step in which all devices of the problem's machine together do `num_batches` times its micro-batches, for one
    update, is shorter. `p` is that of one device, whatever its order. Infinite where nothing fits."""
    lp, num, forward_and_backward_s = Draft(), p.machine.num_devices, num_batches * compute_s(p)
    step = lp.column(cost=1.0)
    moved, held, updated = _totals(lp, p)

    def fit(terms: Terms, family: str, *, fixed: float = 0.0, each: float = 1.0) -> None:
        """All of it in a step."""
        if terms or fixed:
            lp.row([*terms, (-each, step)], high=-fixed, family=family)

    fit(updated["device"], COMPUTE, fixed=forward_and_backward_s, each=num)
    fit(times(1 / p.rates.adam if p.rates.adam else 0.0, updated["host"]), HOST_ADAM)
    taken = {
        HOST_ADAM: updated["host"],
        NVME_READ: [*moved["read params"], *moved["read states"]],
        NVME_WRITE: [*moved["write params"], *moved["write states"]],
    }
    for way, rates, stream_of, family in (("up", p.rates.up, h2d, H2D), ("down", p.rates.down, d2h, D2H)):
        kinds = {kind: [lp.column() for _ in range(num)] for kind in ("params", "states")}
        for kind, columns in kinds.items():  # over whichever device's link
            lp.row([*((1.0, c) for c in columns), *minus(moved[f"{way} {kind}"])], low=0.0, family="what moves")
        for k, (params, states) in enumerate(zip(*kinds.values(), strict=True)):
            taken[stream_of(k)] = [(1.0, params), (1.0, states)]
            fit([(1 / rates["params"], params), (1 / rates["states"], states)], family)
    if p.has_nvme:
        for way, rates, family in (("read", p.rates.read, NVME_READ), ("write", p.rates.write, NVME_WRITE)):
            fit([t for kind in ("params", "states") for t in times(1 / rates[kind], moved[f"{way} {kind}"])], family)
        for limit, loads in drive_pairs(p):
            fit([t for stream, load in loads.items() for t in times(load, taken[stream])], limit)
        if isfinite(p.write_limit_gb_per_s):
            fit(times(1 / p.write_limit_gb_per_s, taken[NVME_WRITE]), ENDURANCE)
    own = {limit for limit in p.loads if limit not in p.machine.stream(compute(num - 1)).takes}
    for limit, loads in p.loads.items():
        batches = 0 if limit in own else num_batches * p.workload.training.gradient_accumulation_steps
        fixed = batches * sum(u.fwd_load.get(limit, 0.0) + u.bwd_load.get(limit, 0.0) for u in p.units)
        fit([t for s, load in loads.items() for t in times(load, taken.get(s, []))], limit, fixed=fixed)
    sizes = {"device": num * p.device_gb, "host": p.host_gb, "nvme": p.nvme_gb}
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
        step_s=max(solution.objective * (1 - SAFE_FRAC), least_s),
        shares=shares_of(program, solution, [step]),
        s_per_gb=worth_of_memory(program, solution),
        solution=solution,
    )


def _totals(lp: Draft, p: Problem) -> tuple[Totals, Totals, Totals]:
    """How many units of each kind have which placement, as columns. Of these, by way and kind of bytes the GB that a
    step moves, by tier the GB that it holds, and by place the updates: seconds on devices, 1e9 parameters on the host.
    """
    ways, kinds = ("up", "down", "read", "write"), ("params", "states")
    moved: Totals = {f"{way} {kind}": [] for way in ways for kind in kinds}
    held: Totals = {place: [] for place in MEMORY_FAMILIES.values()}
    updated: Totals = {"device": [], "host": []}
    roomy = replace(p, device_gb=inf)  # several devices update a unit in parts
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
    """What a step moves at least of such a unit, by way and kind of bytes."""
    on_host, brought = mode.updated == "host", mode.updated == "brought"
    away, frozen_away = mode.params != "device", mode.frozen not in (None, "device")
    return {
        "up params": u.params_gb * (on_host or away) + u.frozen_gb * frozen_away,
        "up states": u.states_gb * brought,
        "down params": u.grads_gb * on_host + u.params_gb * (brought and away),
        "down states": u.states_gb * brought,
        "read params": u.frozen_gb * (mode.frozen == "nvme"),
        "read states": u.states_gb * (mode.states == "nvme"),
        "write params": u.params_gb * (mode.params == "nvme"),
        "write states": u.states_gb * (mode.states == "nvme"),
    }
