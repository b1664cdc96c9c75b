"""Whether a trace is of the schedule that it is compared with, by what the `meta` of both says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tierplan.hwmodels.values.records import shown
from tierplan.planner.plan_file import MACHINE_KEY
from tierplan.sim.digest import PLAN_KEY, SEAL_KEY
from tierplan.sim.schedule import Schedule
from tierplan.sim.trace import Trace

PLAIN = ("machine", "policy", "semantics", "order", "devices", "form")
"""Facts that stand in `meta` as they are."""


def check_same_plan(schedule: Schedule, trace: Trace) -> None:
    """Raises `ValueError` for a trace of another plan, as far as both say which plan they are of.

    A plan by data sheets and the same plan from a calibration are one plan, though their seals are not the same: they
    differ in what the machine was predicted to do, and so does the basis of their predictions.
    """
    ours, theirs = schedule.meta, trace.meta
    pairs = [(name, ours[name], theirs[name]) for name in PLAIN if name in ours and name in theirs]
    for group in ("training", "config"):
        if isinstance(mine := ours.get(group), Mapping) and isinstance(other := theirs.get(group), Mapping):
            pairs += [(name, mine.get(name), other.get(name)) for name in {**mine, **other}]
        elif group == "config" and "model" in ours and "model" in theirs:
            pairs.append(("model", ours["model"], theirs["model"]))
    differing = [
        f"{name} is {shown(mine)} in the schedule and {shown(other)} in the trace"
        for name, mine, other in pairs
        if _text(mine) != _text(other)
    ]
    plans = [_part(meta, PLAN_KEY, "plan") for meta in (ours, theirs)]
    if None not in plans and _text(plans[0]) != _text(plans[1]):
        differing.append("their plans decide otherwise")
    if not differing and _text(_part(ours, MACHINE_KEY, "basis")) == _text(_part(theirs, MACHINE_KEY, "basis")):
        machines = [meta.get(MACHINE_KEY) for meta in (ours, theirs)]
        seals = {meta[SEAL_KEY] for meta in (ours, theirs) if SEAL_KEY in meta}
        if None not in machines and _text(machines[0]) != _text(machines[1]):
            differing.append("their machines have one name, but other rates or capacities")
        elif None in plans and len(seals) > 1:
            differing.append("they have other seals (sha256 in meta), so decisions or settings differ")
    if differing:
        raise ValueError(
            f"trace {trace.name!r} is of another plan than schedule {schedule.name!r}: {'; '.join(differing)}. Compare "
            "the trace with the file that was run, or run this one and compare with that run"
        )


def _part(meta: Mapping[str, object], key: str, name: str) -> Any:
    record = meta.get(key)
    return record.get(name) if isinstance(record, Mapping) else None


def _text(value: object) -> str:
    """The value as a file has it: one that was read from a file, and one that was not, are alike."""
    return json.dumps(value, sort_keys=True, default=lambda x: dict(x) if isinstance(x, Mapping) else str(x))
