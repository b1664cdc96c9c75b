"""Schedules of several devices that were made for one machine, for the next one with the same tiers and streams.

No rate and no capacity decides what is in a schedule before its order is improved. So whoever asks for a machine with
one thing bought after the other has each plan's schedule once. Arrays alone are kept: names, which hardly anybody asks
for, are made anew.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import fields, replace
from typing import TypeVar

from tierplan.hwmodels.machine import Machine
from tierplan.planner.plan import Plan
from tierplan.sim.builder import tiers_of
from tierplan.sim.columns import Labels, ScheduleColumns
from tierplan.sim.workloads.workload import Workload

PlanT = TypeVar("PlanT", bound=Plan)
MOST_OPS = 1_000_000
"""Of all schedules that are kept, in about 80 bytes each."""
NUM_WORKLOADS = 32


class _Kept(threading.local):
    """What a thread has made; the last that was asked for comes last."""

    def __init__(self) -> None:
        self.workloads: list[tuple[int, Workload]] = []
        self.schedules: dict[tuple[object, ...], ScheduleColumns] = {}
        self.num_ops = self.num_workloads = 0

    def number(self, workload: Workload) -> int:
        """The same for equal workloads; of these the last object is kept, which is asked for again and again."""
        known = self.workloads
        at = next((k for k, (_, other) in enumerate(known) if other is workload), None)
        if at is None:
            at = next((k for k, (_, other) in enumerate(known) if other == workload), None)
        self.num_workloads += at is None
        known.append((self.num_workloads if at is None else known.pop(at)[0], workload))
        del known[:-NUM_WORKLOADS]
        return known[-1][0]

    def keep(self, key: tuple[object, ...], columns: ScheduleColumns) -> None:
        self.schedules[key] = columns
        self.num_ops += columns.num_ops
        while self.num_ops > MOST_OPS:
            self.num_ops -= self.schedules.pop(next(iter(self.schedules))).num_ops


_KEPT = _Kept()


def known_columns(
    make: Callable[[PlanT, Workload, Machine], ScheduleColumns],
    plan: PlanT,
    workload: Workload,
    machine: Machine,
) -> ScheduleColumns:
    """What `make` makes of these: of the machine, from the names of tiers and streams and from how tiers round alone.

    Names in the schedule may be made from all else.
    """

    tiers = tiers_of(machine)
    decisions = (getattr(plan, f.name) for f in fields(plan) if f.name not in ("policy", "options"))
    places = (*((t.name, t.rounding) for t in tiers), *(s.name for s in machine.streams))
    key = (make, _KEPT.number(workload), type(plan), *decisions, places)
    if (known := _KEPT.schedules.pop(key, None)) is None:
        columns = make(plan, workload, machine)
        _KEPT.keep(key, replace(columns, labels=_no_labels))
        return columns
    _KEPT.schedules[key] = known
    tiers = tuple(replace(k, capacity_bytes=t.capacity_bytes) for k, t in zip(known.tiers, tiers, strict=True))
    return replace(known, tiers=tiers, labels=lambda: make(plan, workload, machine).labels())


def _no_labels() -> Labels:
    raise AssertionError("a schedule that is kept has no names")
