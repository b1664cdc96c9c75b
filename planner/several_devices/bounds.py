"""What no step of several devices is shorter than, whatever they divide.

Plans of units alone can use drives, and they are bounded by programs of one device: in shards, with what is gathered
once or twice; or with all parameters on every device (data parallelism, ZeRO-1 and 2), where these fit there. Packs and
stages have the step's totals without drives. The least of these is a bound; and so are the totals of whatever plan.
Where all of a model has room on the devices together, operators may be cut (Megatron), which totals alone bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from tierplan.planner.milp.amounts import Problem
from tierplan.planner.milp.bounds import Bound, lower_bound
from tierplan.planner.milp.totals import bound_of_totals
from tierplan.planner.plan import Keeps
from tierplan.planner.several_devices.sharded import sharded

WAYS: tuple[Keeps, ...] = ("ends", "all")
"""Whose gathered parameters stay, as bounds ask: with those of the ends, whatever is kept beside them costs no less."""


def bound_of_several(posed: Sequence[Problem], devices: int, num_batches: int, in_shards: Iterable[Bound]) -> Bound:
    """No step in which so many devices do `num_batches` times the problem's micro-batches is shorter.

    The problem is that of one device with the machine's memory, in both orders, and in others that a plan has which is
    known, such as with micro-batches that are cut; `in_shards` are bounds of plans in shards that were searched. Those
    are of steps in which every device has all micro-batches of the problem: others have totals alone.
    """
    one = posed[0]
    totals = bound_of_totals(one, num_batches)
    whole_gb = sum(u.params_gb + u.frozen_gb for u in one.units)
    homes_gb = whole_gb + sum(u.states_gb for u in one.units)
    if num_batches != devices or homes_gb <= devices * one.device_gb or not totals.feasible:
        return totals
    problems = {(p.order, p.sub_batches): p for p in posed}.values()  # one micro-batch has no order
    of_one = [sharded(p, devices, keeps) for p in problems for keeps in WAYS]
    if whole_gb <= one.device_gb:
        of_one += [sharded(p, devices, "all", divides_params=False) for p in problems]
    bounds = [*in_shards, *(lower_bound(p, beat_s=0.0) for p in of_one)]
    # more memory is every device's there, and a part of what the host has
    bounds = [replace(b, s_per_gb={tier: s / devices for tier, s in b.s_per_gb.items()}) for b in bounds if b.feasible]
    bounds.append(bound_of_totals(replace(one, has_nvme=False), num_batches))
    return max(totals, min(bounds, key=lambda b: b.step_s), key=lambda b: b.step_s)
