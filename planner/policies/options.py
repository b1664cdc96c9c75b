"""What all policies share: the settings that a user may give one, and a few questions about workload and machine.

PlanError(ValueError)
└── OptionError     no such policy or option, or a value that an option cannot have
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from math import inf
from typing import Any, TypeVar, get_args

from tierplan.hwmodels.description import KEYS
from tierplan.hwmodels.machine import Machine
from tierplan.planner.plan import GradientsByLink, Plan, Sharing, UnitPlan, UnitwisePlan
from tierplan.planner.plan_rules import Place, PlanError
from tierplan.sim.step import Action, Semantics
from tierplan.sim.workloads.workload import DTYPE_BYTES, Unit, Workload

Policy = Callable[[Workload, Machine, Mapping[str, object]], Plan]
Word = TypeVar("Word", bound=str)


WHOLE = Sharing(divided="nothing")
"""Every device has the model, and gradients are summed after the last micro-batch."""


class OptionError(PlanError):
    """A policy or an option that does not exist, or a value that it cannot have."""


class Options(dict[str, object]):
    """What a user may set of a policy, by name: its defaults, and the given values over them.

    All policies have option `devices`, and may be asked for semantics. Raises `OptionError` for an option that this one
    does not have.
    """

    def __init__(self, policy: str, known: Mapping[str, object], given: Mapping[str, object]) -> None:
        super().__init__({**known, "devices": None})
        self.policy, self.given = policy, frozenset(given)
        if "semantics" in given and "semantics" not in known:  # one way alone, which `decide` compares
            if (asked := given["semantics"]) is not None:
                Options(policy, {"semantics": asked}, {}).choice("semantics", *get_args(Semantics))
            given = {name: value for name, value in given.items() if name != "semantics"}
        if unknown := sorted(set(given) - set(self)):
            raise OptionError(f"policy {policy!r} has no option {unknown[0]!r}; it has {', '.join(sorted(self))}")
        self.update(given)

    def number(self, name: str, *, low: float, high: float = inf) -> float:
        """An option that is a number within bounds, given as a number or as text."""
        try:
            value = float(str(self[name]))
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            bounds = f"of {low:g} or more" if high == inf else f"from {low:g} to {high:g}"
            raise OptionError(f"option {name!r} of policy {self.policy!r} is {self[name]!r}; give a number {bounds}")
        return value

    def whole_number(self, name: str, *, low: int, high: float = inf) -> int:
        """An option that is a whole number within bounds, and so a finite one."""
        value = self.number(name, low=low, high=high)
        if not value.is_integer():
            raise OptionError(f"option {name!r} of policy {self.policy!r} is {self[name]!r}; give a whole number")
        return int(value)

    def choice(self, name: str, *allowed: Word) -> Word:
        """An option that is one of several words."""
        for word in allowed:
            if word == str(self[name]):
                return word
        raise OptionError(
            f"option {name!r} of policy {self.policy!r} is {str(self[name])!r}; choose among {', '.join(allowed)}"
        )

    def refuse_idle(self, where: str, *names: str) -> None:
        """Raises `OptionError` for the first of these that was given, as it does nothing `where` the policy is."""
        for name in names:
            if name in self.given:
                raise OptionError(
                    f"option {name!r} of policy {self.policy!r} is {str(self[name])!r}, but does nothing {where}; "
                    "leave it out"
                )

    def num_devices(self, machine: Machine) -> int:
        """On how many devices the plan trains: all that the machine has, unless option `devices` says fewer."""
        self["devices"] = self["devices"] or machine.num_devices
        return self.whole_number("devices", low=1, high=machine.num_devices)


def by_kind(workload: Workload, block: UnitPlan, other: UnitPlan) -> tuple[UnitPlan, ...]:
    """One choice for all blocks, one for embedding and head."""
    return tuple(block if unit.kind == "block" else other for unit in workload.units)


def with_checkpointing(options: Options, workload: Workload, unit: UnitPlan) -> tuple[UnitPlan, ...]:
    """The choice for all units, blocks recomputed from their inputs unless option `checkpointing` is off.

    Where it is `selective`, attention and every other product are kept, and the rest is made again, as torchtitan does.
    """
    how = options.choice("checkpointing", "on", "off", "selective")
    if how == "selective":
        return tuple(replace(unit, acts=_selective(u)) if u.kind == "block" else unit for u in workload.units)
    return by_kind(workload, replace(unit, acts="recompute") if how == "on" else unit, unit)


def _selective(block: Unit) -> tuple[Action, ...]:
    def takes(work: str) -> list[int]:
        return [t.index for t in block.saved if any(kind.startswith(work) for kind in t.recompute)]

    kept = {*takes("attention"), *takes("matmul")[::2]}
    return tuple("keep" if t.index in kept or not t.replayable else "recompute" for t in block.saved)


def bounded_semantics(options: Options, workload: Workload, own: Semantics) -> Semantics:
    """The semantics that the option asks for; else exact clipping where training clips, else the policy's own."""
    if options.get("semantics") is None:
        return "exact-clip" if workload.training.max_grad_norm is not None else own
    chosen: Semantics = options.choice("semantics", *get_args(Semantics))
    return chosen


def unitwise_plan(
    options: Options, workload: Workload, machine: Machine, own: Semantics, **fields: Any
) -> UnitwisePlan:
    """The policy's plan with these fields, by its `own` semantics unless option `semantics` says otherwise, on all
    devices unless option `devices` does. Updates are held only where they come after backward."""
    semantics = bounded_semantics(options, workload, own)
    fields["hold_updates"] = fields.get("hold_updates", False) and semantics == "exact-clip"
    devices = options.num_devices(machine)
    return UnitwisePlan(policy=options.policy, semantics=semantics, devices=devices, options=dict(options), **fields)


def data_parallel(
    options: Options, workload: Workload, machine: Machine, unit: UnitPlan, **fields: Any
) -> UnitwisePlan:
    """One choice for all units on all devices, updated after backward unless option `semantics` says otherwise.

    Parameters from the host come within the window alone: PyTorch and DeepSpeed free a unit's before they bring more.
    """
    fields["strict_windows"] = unit.params != "device"
    if "prefetch" in options:
        fields["prefetch_params_units"] = options.whole_number("prefetch", low=0)
    units = with_checkpointing(options, workload, unit)
    return unitwise_plan(options, workload, machine, "exact-clip", units=units, hold_updates=True, **fields)


def gradients_by_link(options: Options, machine: Machine, stage: int) -> GradientsByLink:
    """How a stage of DeepSpeed's ZeRO brings gradients to the host, by options `overlap` and `pin_memory`, and
    `round_robin` before stage 3.

    Copies from and to memory that is not pinned block the host. Without `overlap_comm` they are on compute's stream;
    with it, before stage 3, after the last micro-batch the host waits for each parameter's copy, as it looks for
    overflow (`update_offload_overflow_tracker`). There one device copies after the other, since a unit's gradients are
    one device's, and the others wait for it in the next reduction, unless `round_robin_gradients`.
    """
    pinned = options.choice("pin_memory", "on", "off") == "on"
    overlaps = options.get("overlap", "on") == "on" and pinned
    in_turn = stage < 3 and options.choice("round_robin", "off", "on") == "off"
    return GradientsByLink(
        waits="always" if not overlaps else "in the last" if stage < 3 else "at the end",
        returns_first=stage == 3,
        once=stage == 1,
        slowdown=(options.num_devices(machine) if in_turn else 1) / (1.0 if pinned else pageable_frac(machine)),
    )


def deepspeed_host_bytes(
    workload: Workload, units: Iterable[Unit], stage: int, params: Place = "device"
) -> tuple[int, int]:
    """Host memory that DeepSpeed has for the optimizer of these units, and for `params` there: in every step, and in
    buffers that it keeps throughout.

    A step has states, gradients in fp32, and parameters that live there. Buffers hold 16-bit parameters on their way
    back before stage 3 (`param_buffer_of_bit16_for_cpu_offload_groups`), and 16-bit gradients with accumulation
    (`accumulated_grads_in_cpu`) or in stage 3 (`grad_partitions_flat_buffer`).
    """
    t, held, buffers = workload.training, 0, 0
    home_bytes = t.param_bytes if params == "host" else 0
    has_grads = stage == 3 or t.gradient_accumulation_steps > 1
    for unit in units:
        held += t.states_bytes(unit) + unit.num_trained * (DTYPE_BYTES["fp32"] + home_bytes)
        held += unit.frozen_bytes if home_bytes else 0
        buffers += unit.num_trained * ((t.param_bytes if stage < 3 else 0) + (t.grad_bytes if has_grads else 0))
    return held, buffers


def check_host_memory(options: Options, machine: Machine, need: int, what: str, instead: str = "") -> None:
    """Raises `PlanError` where host memory has no room for all that DeepSpeed has there, unless option `host_buffers`
    is none: also where its step would have, or more memory would be refused where less is taken."""
    have = next(tier.capacity_bytes for tier in machine.tiers if tier.kind == "host")
    if options.choice("host_buffers", "deepspeed", "none") == "deepspeed" and have < need:
        raise PlanError(
            f"policy {options.policy!r} needs {need:,} bytes of host memory {what}, but machine {machine.name!r} has "
            f"{have:,}, {need - have:,} too few; take more host memory, a smaller model{instead}; host_buffers=none "
            "counts the step alone"
        )


def pageable_frac(machine: Machine) -> float:
    """The rate of copies from and to pageable memory over that of pinned memory."""
    key = "link.pageable_frac"
    said = machine.description.get(key)
    return float(str(said["value"] if isinstance(said, Mapping) else KEYS[key].default))


def has_nvme(machine: Machine) -> bool:
    return any(tier.kind == "nvme" for tier in machine.tiers)


def need_nvme(policy: str, machine: Machine) -> None:
    """Raises `PlanError` where the machine has no drive."""
    if not has_nvme(machine):
        raise PlanError(f"policy {policy!r} keeps data on NVMe, but machine {machine.name!r} has no drive; add one")
