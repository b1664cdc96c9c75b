"""The published systems as policies: one file each, a function from a workload and a machine to a plan.

    plan = POLICIES["fuyou"](workload, machine, {"swap": "all"})

A policy decides; it does not simulate, and it does not promise that its plan fits: that is the simulator's answer. A
module here or in `several` that defines `NAME` and `policy`, or `VARIANTS` (policies by name), is found without being
registered, with what it says of several devices; `docs/policies.md` is the guide to writing one.

in_memory        everything on the device
full_recompute   activations made again in backward
zero_offload     gradients and states in host memory (ZeRO-Offload)
zenflow          the same, updated beside the next steps (ZenFlow)
zero_infinity    parameters and states anywhere, updates after backward (ZeRO-Infinity)
fuyou            states on NVMe, updates inside backward (Fuyou)
ssdtrain         activations on NVMe (SSDTrain)
sliding_window   a window of blocks on the device (Superpipeline)
vertical         all micro-batches of a unit, then the next unit (GreedySnake)
several          systems whose devices divide the work: ZeRO, FSDP, Megatron, RoundPipe, Mobius, Harmony
options          what all policies share: their options, and questions about workload and machine
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from pkgutil import walk_packages

from tierplan.hwmodels.machine import Machine
from tierplan.planner.plan import Plan, is_same
from tierplan.planner.plan_rules import PlanError, check_clipping
from tierplan.planner.policies.options import OptionError, Policy
from tierplan.sim.workloads.workload import Workload

__all__ = ["ESTIMATES", "NEED_SEVERAL_DEVICES", "POLICIES", "SHARED", "Policy", "check_name", "comparable", "decide"]


ORDER = (
    "in_memory", "full_recompute", "zero_offload", "zero_infinity", "fuyou", "ssdtrain", "harmony", "sliding_window",
    "vertical", "virtual_memory", "zero", "fsdp", "megatron",
    "roundpipe",
)  # fmt: skip
"""Of modules, in tables and in the search; others come last, by name."""


def _decided(policy: Policy, workload: Workload, machine: Machine, options: Mapping[str, object]) -> Plan:
    """What a policy decides. Raises `PlanError` where it updates in another way than it was asked for."""
    plan = policy(workload, machine, options)
    if asked := options.get("semantics"):
        check_clipping(str(asked), workload.training.max_grad_norm)
        if not is_same(plan, str(asked)):
            raise PlanError(f"it updates by {plan.semantics!r} alone, not by {asked!r}")
    return plan


def _find() -> tuple[dict[str, Policy], dict[str, Policy], set[str], set[str]]:
    """The policies of all modules here, by their names; those that need several devices, and those that share."""
    found = (module.name for module in walk_packages(__path__, f"{__name__}.") if not module.ispkg)
    modules = {name.rpartition(".")[2]: name for name in found}
    policies: dict[str, Policy] = {}
    estimates: dict[str, Policy] = {}
    several, shared = set[str](), set[str]()
    for name in [*ORDER, *sorted(modules.keys() - {*ORDER})]:
        module = import_module(modules[name])
        variants = getattr(module, "VARIANTS", None) or (
            {module.NAME: module.policy} if hasattr(module, "NAME") else {}
        )
        assert not variants.keys() & policies.keys(), f"{modules[name]} has the name of another policy"
        policies |= {name: partial(_decided, policy) for name, policy in variants.items()}
        estimates |= getattr(module, "ESTIMATES", {})
        if ".several." in modules[name]:
            several |= variants.keys() - {*getattr(module, "ON_ONE_DEVICE", ())}
        if getattr(module, "SHARES_BATCHES", False):
            shared |= variants.keys()
    return policies, estimates, several, shared


POLICIES, ESTIMATES, NEED_SEVERAL_DEVICES, SHARED = _find()
"""By the name that the command line takes. Plans near those whose decision takes simulations, by an estimate. Those of
`several` that do not say `ON_ONE_DEVICE`, which have nothing of their own there. Those whose devices share the
micro-batches of one step (`SHARES_BATCHES`)."""


def comparable(num_devices: int) -> list[str]:
    """The policies with something of their own on so many devices."""
    return [name for name in POLICIES if num_devices > 1 or name not in NEED_SEVERAL_DEVICES]


def check_name(name: str, *others: str) -> None:
    """Raises `OptionError` for a name of no policy, nor of `others`, with the closest one and all that there are."""
    known = (*others, *POLICIES)
    if name not in known:
        close = get_close_matches(name, known, n=1)
        meant = f"did you mean {close[0]!r}? " if close else ""
        meant = "its plan is that of `tierplan plan`; " if name == "planner" else meant
        raise OptionError(f"there is no policy {name!r}; {meant}choose among {', '.join(known)}")


def decide(
    name: str,
    workload: Workload,
    machine: Machine,
    options: Mapping[str, object] | None = None,
    *,
    nearly: bool = False,
) -> Plan:
    """The plan of the policy called `name`, or `nearly` that, by an estimate. Raises `OptionError` for an unknown name,
    listing the known ones, and `PlanError` where it updates in another way than option `semantics` asks for."""
    check_name(name)
    return _decided((ESTIMATES if nearly else POLICIES)[name], workload, machine, options or {})
