"""The published systems as policies: one file each, a function from a workload and a machine to a plan.

    plan = POLICIES["fuyou"](workload, machine, {"swap": "all"})

`docs/policies.md` says how to write another one. A policy decides; it does not simulate, and it does not promise that
its plan fits: that is the simulator's answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

from tierplan.hwmodels.machine import Machine
from tierplan.planner.plan import Plan
from tierplan.planner.policies import (
    full_recompute,
    fuyou,
    harmony,
    in_memory,
    sliding_window,
    ssdtrain,
    vertical,
    virtual_memory,
    zero_infinity,
    zero_offload,
)
from tierplan.planner.policies.options import OptionError, Policy
from tierplan.sim.workloads.workload import Workload

__all__ = ["POLICIES", "Policy", "check_name", "decide"]

POLICIES: dict[str, Policy] = {
    "in-memory": in_memory.policy,
    "full-recompute": full_recompute.policy,
    "zero-offload": zero_offload.policy,
    "zero-infinity": zero_infinity.policy,
    "fuyou": fuyou.policy,
    "ssdtrain": ssdtrain.policy,
    "harmony": harmony.single,
    "harmony-dp": harmony.data_parallel,
    "harmony-pp": harmony.pipeline,
    "sliding-window": sliding_window.policy,
    "vertical": vertical.policy,
    "virtual-memory": virtual_memory.policy,
}
"""By the name that the command line takes."""


def check_name(name: str) -> None:
    """Raises `OptionError` for an unknown policy, with the closest one and all that there are."""
    if name not in POLICIES:
        close = get_close_matches(name, POLICIES, n=1)
        meant = f"did you mean {close[0]!r}? " if close else ""
        raise OptionError(f"there is no policy {name!r}; {meant}choose among {', '.join(POLICIES)}")


def decide(name: str, workload: Workload, machine: Machine, options: Mapping[str, object] | None = None) -> Plan:
    """The plan of the policy called `name`. Raises `OptionError` for an unknown name, listing the known ones."""
    check_name(name)
    return POLICIES[name](workload, machine, options or {})
