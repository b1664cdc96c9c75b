"""What a thread has made of workloads, for the next plan and the next machine.

No template of a turn depends on the machine. No rate and no capacity decides what is in a schedule of several devices
before its order is improved: so whoever asks for a machine with one thing bought after the other has each plan's
schedule once. Of these, arrays alone are kept: names, which hardly anybody asks for, are made anew.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from typing import TypeVar

from tierplan.hwmodels.machine import Machine
from tierplan.planner.lowering.sketch import Terms
from tierplan.planner.lowering.templates import Chain
from tierplan.planner.plan import Plan
from tierplan.sim.builder import tiers_of
from tierplan.sim.columns import Labels, ScheduleColumns
from tierplan.sim.workloads.workload import Workload

PlanT = TypeVar("PlanT", bound=Plan)
Chains = dict[tuple[int, int, Terms], Chain]
"""Of a workload, by sub-batches, tiles of operators and terms."""
MOST_OPS = 1_000_000
"""Of all schedules that are kept, in about 80 bytes each."""
NUM_WORKLOADS = 32
"""Those of one question that asks for several machines."""


class _Known(threading.local):
    """Of all, the last that was asked for comes last."""

    def __init__(self) -> None:
        self.workloads: list[tuple[int, Workload, Chains]] = []
        self.schedules: dict[tuple[object, ...], ScheduleColumns] = {}
        self.num_ops = self.num_workloads = 0

    def of(self, workload: Workload) -> tuple[int, Workload, Chains]:
        """Its number and its chains, the same for equal workloads; of these the last object is kept, which is asked for
        again and again."""
        known = self.workloads
        at = next((k for k, (_, other, _) in enumerate(known) if other is workload), None)
        if at is None:
            at = next((k for k, (_, other, _) in enumerate(known) if other == workload), None)
        self.num_workloads += at is None
        number, _, chains = (self.num_workloads, workload, {}) if at is None else known.pop(at)
        known.append((number, workload, chains))
        del known[:-NUM_WORKLOADS]
        return known[-1]


_KNOWN = _Known()


def chains_of(workload: Workload) -> Chains:
    """The chains of a workload with what they have drawn so far, in this thread."""
    return _KNOWN.of(workload)[2]


def known_columns(
    make: Callable[[PlanT, Workload, Machine], ScheduleColumns],
    plan: PlanT,
    workload: Workload,
    machine: Machine,
) -> ScheduleColumns:
    """What `make` makes of these: of the machine, from the names of tiers and streams and from how tiers round alone.

    Names in the schedule may be made from all else.
    """
    tiers, kept = tiers_of(machine), _KNOWN.schedules
    decisions = (getattr(plan, f.name) for f in fields(plan) if f.name not in ("policy", "options"))
    places = (*((t.name, t.rounding) for t in tiers), *(s.name for s in machine.streams))
    key = (make, _KNOWN.of(workload)[0], type(plan), *decisions, places)
    if (known := kept.pop(key, None)) is None:
        columns = make(plan, workload, machine)
        kept[key] = replace(columns, labels=_no_labels)
        _KNOWN.num_ops += columns.num_ops
        while _KNOWN.num_ops > MOST_OPS:
            _KNOWN.num_ops -= kept.pop(next(iter(kept))).num_ops
        return columns
    kept[key] = known
    tiers = tuple(replace(k, capacity_bytes=t.capacity_bytes) for k, t in zip(known.tiers, tiers, strict=True))
    return replace(known, tiers=tiers, labels=cache(lambda: make(plan, workload, machine).labels()))


def _no_labels() -> Labels:
    raise AssertionError("a schedule that is kept has no names")
