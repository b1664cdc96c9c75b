"""The fingerprint (SHA-256) of a workload, machine or schedule: what was made for it can tell whether it changed."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict

from tierplan.hwmodels.machine import Machine
from tierplan.sim.schedule import Schedule
from tierplan.sim.workloads.workload import Workload


def digest(thing: Workload | Machine | Schedule) -> str:
    """SHA-256 of all that a workload, a machine or a schedule says; `meta` and descriptions are left out."""
    record = asdict(thing)
    for name in ("meta", "description", "nameplate", "basis"):
        record.pop(name, None)
    for unit in record.get("units", ()):
        del unit["num_kernels"], unit["num_elementwise"], unit["num_modules"]  # which follow from the model
    for stream in record.get("streams", ()):
        for name in (
            "beside_s",
            "wake_s",
            "launch_s",
            "kernel_s",
        ):  # of few; others stay as they were
            if not stream[name]:
                del stream[name]
    if isinstance(thing, Schedule):
        if not record["next_devices"]:  # of few; others have the fingerprint that they had before
            del record["next_devices"]
        for op in record["ops"]:
            op["work"] = {kind: float(amount) for kind, amount in op["work"].items()}  # as a file gives it back
    text = json.dumps(record, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()
