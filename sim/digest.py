"""The fingerprint (SHA-256) of a workload, machine or schedule: what was made for it can tell whether it changed.

`sealed` puts one of a whole schedule, with what its `meta` says of it, into the `meta` of what a command writes to a
file. Whoever writes schedules by hand has none."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace

import msgspec

from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.values.records import plain
from tierplan.sim.schedule import Schedule
from tierplan.sim.workloads.workload import Workload

SEAL_KEY = "sha256"
"""Where in `meta` the seal stands."""
PLAN_KEY = "tierplan-plan"
"""Where in `meta` the record of a plan stands."""


def digest(thing: Workload | Machine | Schedule) -> str:
    """SHA-256 of all that a workload, a machine or a schedule says; what is only for people is left out."""
    record = msgspec.to_builtins(thing, enc_hook=lambda v: dict(v) if isinstance(v, Mapping) else str(v))
    for name in ("meta", "description", "nameplate", "basis", "computed_for"):
        record.pop(name, None)
    for unit in record.get("units", ()):
        del unit["num_kernels"], unit["num_elementwise"], unit["num_modules"]  # which follow from the model
    for stream in record.get("streams", ()):
        for name in ("beside_s", "wake_s", "launch_s", "kernel_s"):  # of few; others stay as they were
            if not stream[name]:
                del stream[name]
    if isinstance(thing, Schedule):
        if not record["next_devices"]:  # of few; others have the fingerprint that they had before
            del record["next_devices"]
        for op in record["ops"]:
            op["work"] = {kind: float(amount) for kind, amount in op["work"].items()}  # as a file gives it back
    text = json.dumps(record, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def sealed(schedule: Schedule) -> Schedule:
    """The schedule with a seal: the digest of all that it says, `meta` included."""
    meta = {name: value for name, value in schedule.meta.items() if name != SEAL_KEY}
    text = json.dumps([digest(schedule), json.loads(json.dumps(meta, default=plain))], sort_keys=True)
    return replace(schedule, meta={**meta, SEAL_KEY: hashlib.sha256(text.encode()).hexdigest()})


def is_as_written(schedule: Schedule) -> bool:
    """Whether nothing was changed since it was sealed. A plan has a seal; another schedule may have none."""
    if SEAL_KEY not in schedule.meta:
        return PLAN_KEY not in schedule.meta
    return sealed(schedule).meta[SEAL_KEY] == schedule.meta[SEAL_KEY]


def changed_text(path: object) -> str:
    """What is said of a file that is not as it was written."""
    return (
        f"{path} is not as it was written: its ops, its plan or its figures were changed afterwards; plan again, with "
        "other options where another plan is wanted"
    )
