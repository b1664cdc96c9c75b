"""The published systems as policies: one file each, a function from a workload and a machine to a plan.

    plan = POLICIES["fuyou"](workload, machine, {"swap": "all"})

A policy decides; it does not simulate, and it does not promise that its plan fits: that is the simulator's answer. A
module here that defines `NAME` and `policy`, or `VARIANTS` (policies by name), is found without being registered;
`docs/policies.md` is the guide to writing one.

in_memory        everything on the device
full_recompute   activations made again in backward
zero_offload     gradients and states in host memory (ZeRO-Offload)
zenflow          the same, updated beside the next steps (ZenFlow)
zero_infinity    parameters and states anywhere, updates after backward (ZeRO-Infinity)
fuyou            states on NVMe, updates inside backward (Fuyou)
zero             states, gradients, parameters divided among devices (ZeRO-1, 2, 3)
fsdp             PyTorch's own: DDP, FSDP2, FSDP2 with CPU offload
megatron         operators, or the chain of units, cut among devices (Megatron-LM)
roundpipe        packs of blocks dispatched to the devices round robin (RoundPipe)
mobius           stages in host memory, the same forward and backward (Mobius)
ssdtrain         activations on NVMe (SSDTrain)
harmony          packs of units that visit the devices in turn (Harmony)
sliding_window   a window of blocks on the device (Superpipeline)
vertical         all micro-batches of a unit, then the next unit (GreedySnake)
virtual_memory   weights paged in and out for every use: the baseline that Harmony beats
options          what all policies share: their options, and questions about workload and machine
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from pkgutil import iter_modules

from tierplan.hwmodels.machine import Machine
from tierplan.planner.plan import Plan
from tierplan.planner.policies.options import OptionError, Policy
from tierplan.sim.workloads.workload import Workload

__all__ = ["POLICIES", "Policy", "check_name", "decide"]


ORDER = (
    "in_memory", "full_recompute", "zero_offload", "zero_infinity", "fuyou", "ssdtrain", "harmony", "sliding_window",
    "vertical", "virtual_memory", "zero", "fsdp", "megatron",
    "roundpipe",
)  # fmt: skip
"""Of modules, in tables and in the search; others come last, by name."""


def _find() -> dict[str, Policy]:
    """The policies of all modules here, by their names."""
    others = sorted(module.name for module in iter_modules(__path__) if module.name not in ORDER)
    policies: dict[str, Policy] = {}
    for name in [*ORDER, *others]:
        module = import_module(f"{__name__}.{name}")
        variants = getattr(module, "VARIANTS", None) or (
            {module.NAME: module.policy} if hasattr(module, "NAME") else {}
        )
        assert not variants.keys() & policies.keys(), f"planner/policies/{name}.py has the name of another policy"
        policies |= variants
    return policies


POLICIES = _find()
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
