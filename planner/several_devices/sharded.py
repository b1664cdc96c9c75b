"""The planning problem of several devices that divide parameters, gradients and states.

All of them do the same at once, so it is that of one of them. Either each trains on micro-batches of its own (ZeRO-3):
of all else it has its shard, and what its ops need of others' is gathered meanwhile. Or they cut operators, and all
work on the same micro-batches (tensor parallelism): then it has its part of work and activations, too, and computing
waits for their sums. Of what they share, host memory, drives and the host's cores, it has its part, and of shared
limits it takes what all take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate

from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.names import COMPUTE, collective, parse_stream
from tierplan.planner.milp.amounts import Problem, UnitAmounts
from tierplan.planner.milp.rates import GB, has_rates, limit_loads, limit_seconds, seconds_alone
from tierplan.planner.plan import Keeps
from tierplan.planner.several_devices.alike import first_for_all
from tierplan.planner.several_devices.collectives import collective_work, product_flops, work_of_part
from tierplan.planner.several_devices.dividing import OF_BLOCK
from tierplan.sim.workloads.work import Amounts
from tierplan.sim.workloads.workload import Unit

COLLECTIVE = collective(0)


def sharded(p: Problem, devices: int, keeps: Keeps, *, divides_params: bool = True) -> Problem:
    """The problem of one of so many devices, given that of one which has all micro-batches' work by itself.

    For bounds alone: what stays of the ends, where `keeps` says so, has no room of its own here; and where parameters
    are not divided, each device has them all, nothing is gathered, and all else is in shards.
    """
    first = first_for_all(p.machine, devices) or p.machine
    gathered_frac = 1 - 1 / devices if divides_params else 0.0
    gathered_gb = [gathered_frac * (u.params_gb + u.frozen_gb) for u in p.units]
    kept_gb = [0.0] * len(p.units)
    if keeps == "all":
        kept_gb = [before - own for before, own in zip(accumulate(gathered_gb), gathered_gb, strict=True)]
    exchanged: dict[tuple[object, ...], tuple[Mapping[str, float], Mapping[str, float]]] = {}
    units = []
    for u, own_gb, before_gb in zip(p.units, gathered_gb, kept_gb, strict=True):
        gathers_again = keeps == "nothing" or (keeps == "ends" and u.is_block)
        kind = u.params_gb, u.frozen_gb, u.grads_gb, u.fwd_reads_params, u.bwd_reads_params and gathers_again
        if kind not in exchanged:
            gathers = 0 if not divides_params else 2 if gathers_again else 1
            exchanged[kind] = _exchanged(p, u, devices, first, gathers)
        fwd_load, bwd_load = map(_with, (u.fwd_load, u.bwd_load), exchanged[kind])
        own = replace(_of_one(u, devices, own_gb, before_gb), fwd_load=fwd_load, bwd_load=bwd_load)
        units.append(own if divides_params else replace(own, params_gb=u.params_gb, frozen_gb=u.frozen_gb))
    return replace(_sharing(p, devices, units, first), keeps=keeps)


def tensor_parallel(p: Problem, devices: int, *, waits: bool = False) -> Problem:
    """The problem of one of so many devices that cut operators, given that of one which has all work by itself: for a
    bound where it `waits`, else for plans."""
    first = first_for_all(p.machine, devices) or p.machine
    summed, last = cache(partial(_summed, first, devices)), len(p.units) - 1

    def computing_s(work: Amounts, sums_s: float) -> float:
        if not has_rates(p.machine, COMPUTE, work) or not any(work.values()):
            return sums_s
        cost = p.machine.cost(COMPUTE, work_of_part(work, devices))
        return max(cost.latency_s + cost.work_s + sums_s, cost.launch_s)  # kernels are launched meanwhile

    def of_one(k: int, u: UnitAmounts, unit: Unit) -> UnitAmounts:
        border_gb, below = max(u.input_gb, u.output_gb), p.workload.first_trained
        # what a unit waits for are sums of the unit before, of which the ends have fewer
        again_s, _ = summed(border_gb, OF_BLOCK if u.is_block else 0)
        fwd_s, fwd_load = summed(border_gb, OF_BLOCK if 1 < k < last else int(k == 1 < last))
        bwd_s, bwd_load = summed(border_gb, (OF_BLOCK if 0 < k < last - 1 else int(0 < k == last - 1)) * (k >= below))
        # other kernels than products run again without sums
        have = [any(product_flops(unit.saved[k].recompute) > 0 for k in group.slots) for group in u.groups]
        products_s = sum(group.recompute_s for group, has in zip(u.groups, have, strict=True) if has) or 1.0

        def of_part(whole: float, border_gb: float) -> float:  # what goes from unit to unit is whole on each device
            return border_gb + max(0.0, whole - border_gb) / devices

        return replace(
            _of_one(u, devices, 0.0, 0.0),
            fwd_s=computing_s(unit.forward, fwd_s),
            bwd_s=computing_s(unit.backward, bwd_s),
            fwd_waits_s=computing_s(unit.forward, fwd_s) - computing_s(unit.forward, 0.0),
            bwd_waits_s=computing_s(unit.backward, bwd_s) - computing_s(unit.backward, 0.0),
            again_waits_frac=again_s / (again_s + products_s / devices),
            fwd_load=_with(u.fwd_load, fwd_load),
            bwd_load=_with(u.bwd_load, bwd_load),
            groups=tuple(
                replace(
                    group,
                    gb=group.gb / devices if group.slots else group.gb,
                    recompute_s=group.recompute_s / devices + again_s * has * group.recompute_s / products_s,
                )
                for group, has in zip(u.groups, have, strict=True)
            ),
            saved_gb=u.saved_gb / devices,
            fwd_fixed_gb=of_part(
                u.fwd_fixed_gb, u.output_gb + (u.input_gb if all(group.slots for group in u.groups) else 0.0)
            ),
            bwd_fixed_gb=of_part(
                u.bwd_fixed_gb, (u.output_gb if k >= below else 0.0) + (u.input_gb if k > below else 0.0)
            ),
            adding_gb=u.adding_gb / devices,
            tied_gb=u.tied_gb / devices,
        )

    units = [of_one(k, u, unit) for k, (u, unit) in enumerate(zip(p.units, p.workload.units, strict=True))]
    return replace(_sharing(p, devices, units, first), divided="tensors", waits=waits)


def _summed(first: Machine, devices: int, border_gb: float, calls: int) -> tuple[float, Mapping[str, float]]:
    """What so many sums of activations over devices take: seconds, and those at full use of each shared limit."""
    work = collective_work("all_reduce", calls * border_gb * GB, devices, calls=calls)
    if not calls * border_gb or COLLECTIVE not in {s.name for s in first.streams}:
        return 0.0, {}
    return seconds_alone(first, COLLECTIVE, work), limit_seconds(first, COLLECTIVE, work)


def _with(load: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    """By shared limit, both."""
    return {limit: load.get(limit, 0.0) + more.get(limit, 0.0) for limit in {**load, **more}}


def _sharing(p: Problem, devices: int, units: Sequence[UnitAmounts], first: Machine) -> Problem:
    """With its part of what all of them share."""
    taken = {limit: _of_all(each, devices) for limit, each in limit_loads(p.workload, first).items()}
    return replace(
        p,
        devices=devices,
        units=tuple(units),
        host_gb=p.host_gb / devices,
        nvme_gb=p.nvme_gb / devices,
        write_limit_gb_per_s=p.write_limit_gb_per_s / devices,
        rates=replace(
            p.rates,
            read=_divided(p.rates.read, devices),
            write=_divided(p.rates.write, devices),
            adam=p.rates.adam / devices,
            chain_s={home: tuple(s / devices for s in each) for home, each in p.rates.chain_s.items()},
        ),
        loads={**taken, COLLECTIVE: {}},
    )


def _of_one(u: UnitAmounts, devices: int, gathered_gb: float, kept_gb: float) -> UnitAmounts:
    """One device's part of a unit, with what it gathers for it, and has kept of what it gathered for others."""
    return replace(
        u,
        params_gb=u.params_gb / devices,
        frozen_gb=u.frozen_gb / devices,
        grads_gb=u.grads_gb / devices,
        states_gb=u.states_gb / devices,
        gparams=u.gparams / devices,
        update_s=u.update_s / devices,
        gathered_gb=gathered_gb,
        fwd_fixed_gb=u.fwd_fixed_gb + kept_gb + (gathered_gb if u.fwd_reads_params else 0.0),
        bwd_fixed_gb=u.bwd_fixed_gb
        + kept_gb
        + (gathered_gb if u.bwd_reads_params else 0.0)
        + (1 - 1 / devices) * u.grads_gb,
    )


def _exchanged(
    p: Problem, u: UnitAmounts, devices: int, first: Machine, num_gathers: int
) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """What collectives of a unit take in forward and in backward, per micro-batch: seconds at full use of each shared
    limit, and of the stream itself. Gradients are summed after the last one, parameters gathered for both turns, or
    for the first alone, or not at all."""
    if COLLECTIVE not in {s.name for s in first.streams}:
        return {}, {}

    def taken(kind: str, gb: float) -> dict[str, float]:
        work = collective_work(kind, gb * GB, devices)
        found = {**limit_seconds(first, COLLECTIVE, work), COLLECTIVE: seconds_alone(first, COLLECTIVE, work)}
        return found if gb else {}

    num = p.workload.training.gradient_accumulation_steps
    gathers, reduces = taken("gather", u.params_gb + u.frozen_gb), taken("reduce", u.grads_gb)
    again = gathers if u.bwd_reads_params and num_gathers > 1 else {}
    at_first = gathers if u.fwd_reads_params and num_gathers else {}
    forward, again = ({limit: s / p.turn for limit, s in of.items()} for of in (at_first, again))
    return forward, _with(again, {limit: s / num for limit, s in reduces.items()})


def _divided(of: Mapping[str, float], devices: int) -> dict[str, float]:
    return {kind: rate / devices for kind, rate in of.items()}


def _of_all(taken: Mapping[str, float], devices: int) -> dict[str, float]:
    """What streams that serve all devices take for the part of one: those of the first take what all take already."""
    return {s: load * (devices if parse_stream(s).device is None else 1) for s, load in taken.items()}
