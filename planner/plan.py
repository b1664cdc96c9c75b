"""A plan: the decisions, readable by a person. `tierplan.planner.lowering.unitwise` turns one into a schedule.

PlanError(ValueError)   a plan that contradicts itself, its workload or its machine
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from tierplan.sim.workloads.workload import Training, Unit, Workload

__all__ = [
    "ACTIONS",
    "PLACES",
    "PLANNER",
    "Action",
    "Order",
    "Packs",
    "Place",
    "Plan",
    "PlanError",
    "Semantics",
    "UnitPlan",
    "plain_semantics",
]

Place = Literal["device", "host", "nvme"]
Action = Literal["keep", "recompute", "host", "nvme"]
InputAction = Literal["keep", "host", "nvme"]
Semantics = Literal["in-backward", "exact-clip", "delayed-1"]
Order = Literal["horizontal", "vertical"]
WriteBack = Literal["at once", "delayed", "awaited"]
UpdateOrder = Literal["forward", "backward"]
PLACES: tuple[Place, ...] = get_args(Place)
PLANNER = "planner"
"""The name under which the planner's own plans stand among policies."""
ACTIONS: tuple[Action, ...] = get_args(Action)

UNIT_WORDS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("params", "grads", "states"), PLACES),
    "input": get_args(InputAction),
}
PLAN_WORDS: Mapping[str, tuple[str, ...]] = {
    "semantics": get_args(Semantics),
    "order": get_args(Order),
    "write_back": get_args(WriteBack),
    "update_order": get_args(UpdateOrder),
}
PLAN_NUMBERS: Mapping[str, int] = {
    **dict.fromkeys(("prefetch_params_units", "prefetch_acts_units", "prefetch_states_units", "updates_in_flight"), 0),
    **dict.fromkeys(("segment_units", "tiles", "operator_tiles", "devices"), 1),
    "paged_devices": 0,
}
"""Fields that are whole numbers, each with the least that it may be."""


class PlanError(ValueError):
    """A plan that contradicts itself, its workload or its machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPlan:
    """Where one unit's bytes live, and what happens to what its forward saves."""

    params: Place = "device"
    grads: Place = "device"
    """Where gradients wait for the update (and accumulate). Backward makes them on the device."""
    states: Place = "device"
    """Where optimizer states live between steps; `device` updates on the device, the others on the host's cores."""
    input: InputAction = "keep"
    """What happens to the unit's input between forward and backward."""
    acts: Action | tuple[Action, ...] = "keep"
    """What happens to the saved tensors: one action for all, or one per slot."""
    late_update: bool = False
    """With updates in backward: this one is made in the next step, in time for its forward, which it overlaps.

    Its gradients wait in host memory. The numbers are the same; after the last step, one such update is still due."""

    state_parts: int = 1
    """Parts, at most, in which states on NVMe travel to the update and back, each an update of its own: what is in host
    memory on the way is a part of the states rather than the whole, and within a unit reads, update and writes overlap.
    """

    def action(self, index: int) -> Action:
        return self.acts if isinstance(self.acts, str) else self.acts[index]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packs:
    """Harmony's decisions: runs of units that visit a device together, and which device takes which.

    Micro-batches are grouped: all of them go through a pack before the next pack. Backward makes a pack's activations
    again from its stashed input; its last pack does its forward there too.
    """

    form: Literal["data", "pipeline"]
    """Data: every device takes every pack, with its part of the micro-batches. Pipeline: devices take packs in turn."""
    devices: int
    forward: tuple[tuple[int, int], ...]
    """First unit and the one after the last, in order; together all units before the last backward pack."""
    backward: tuple[tuple[int, int], ...]
    """The same over all units."""
    cleanup_s: float = 0.0
    """Seconds of the compute stream that the end of each pack's turn costs."""
    host_copy_bytes_per_s: float = 0.0
    """At which a stashed input passes from one device's process to another's in host memory; 0: nothing is copied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All decisions for one training step of one workload on one device."""

    policy: str
    """Who decided: a policy's name or `planner`."""
    units: tuple[UnitPlan, ...]
    """Parallel to `Workload.units`."""
    semantics: Semantics = "in-backward"
    """When updates happen, hence which numbers training gives: see docs/design.md."""
    order: Order = "horizontal"
    """Horizontal: all units of a micro-batch, then the next. Vertical: all micro-batches of a unit, then the next."""
    prefetch_params_units: int = 1
    """How many units ahead parameters may be fetched, beside the next, which arrives while its predecessor computes."""
    prefetch_acts_units: int = 1
    """The same for offloaded activations in backward."""
    prefetch_states_units: int = 1
    """How many updates ahead optimizer states may be read from NVMe."""
    strict_windows: bool = False
    """The windows above bind even where memory has room, as in systems with a fixed number of buffers."""
    updates_in_flight: int = 0
    """How many units' states may be between NVMe and their return to it at once; 0 leaves that to memory."""
    write_back: WriteBack = "at once"
    """When updated states go home. Delayed: when those of the next update have been read, so that the drive reads and
    writes in turns. Awaited: at once, and the next update waits for it."""
    update_order: UpdateOrder = "forward"
    """Of updates after backward: in the order in which the next step needs them, or in that of the gradients."""
    hold_updates: bool = False
    """No update before backward has ended, as in systems that look for overflow in all gradients first."""
    wide_grads: bool = False
    """Gradients that go to NVMe are widened to fp32 in host memory first."""
    segment_units: int = 1
    """Blocks that are recomputed together: only the first one's input is kept, the others are made again too."""
    tiles: int = 1
    """Parts that a micro-batch is cut into; with vertical order a unit works on them one after the other."""
    operator_tiles: int = 1
    """Units that each block is cut into by cutting its operators: fewer parameters are on the device at once."""
    devices: int = 1
    """Devices, each with micro-batches of its own; parameters, gradients and states are cut into as many parts."""
    packs: Packs | None = None
    """Packs of units that visit the device(s) in turn (Harmony); the fields above but semantics do not apply then."""
    paged_devices: int = 0
    """Devices that page weights in and out for every single use (the baseline that Harmony beats); 0: none does."""
    options: Mapping[str, object] = field(default_factory=dict)
    """The policy's own settings, for the record; lowering does not look at them."""

    def check(self, workload: Workload) -> Plan:
        """The plan itself, or `PlanError` if it does not fit the workload or what training asks for."""
        _check_words(f"plan {self.policy!r}", self, PLAN_WORDS)
        for name, least in PLAN_NUMBERS.items():
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise PlanError(
                    f"plan {self.policy!r}: {name} is {value!r}; it must be a whole number of {least} or more"
                )
        if len(self.units) != len(workload.units):
            raise PlanError(
                f"plan {self.policy!r} has {len(self.units)} units, but workload {workload.name!r} has "
                f"{len(workload.units)}; make the plan from this workload"
            )
        for unit, choice in zip(workload.units, self.units, strict=True):
            _check_unit(unit, choice)
        _check_semantics(self, workload.training)
        _check_pieces(self, workload)
        return self


def plain_semantics(training: Training) -> Semantics:
    """What gives the numbers of plain training: exact clipping where it clips, else updates in backward."""
    return "in-backward" if training.max_grad_norm is None else "exact-clip"


def _check_words(whose: str, choices: object, allowed: Mapping[str, tuple[str, ...]]) -> None:
    for name, words in allowed.items():
        if (word := getattr(choices, name)) not in words:
            raise PlanError(f"{whose} has {name} {word!r}; choose among {', '.join(words)}")


def _check_unit(unit: Unit, choice: UnitPlan) -> None:
    _check_words(f"unit {unit.name!r}", choice, UNIT_WORDS)
    if not isinstance(choice.acts, str) and len(choice.acts) != len(unit.saved):
        raise PlanError(
            f"unit {unit.name!r} saves {len(unit.saved)} tensors, but the plan has {len(choice.acts)} actions "
            "for it; give one action for all, or one per tensor"
        )
    if choice.state_parts < 1 or (choice.state_parts > 1 and choice.states != "nvme"):
        raise PlanError(
            f"unit {unit.name!r} has optimizer states in {choice.states!r} in {choice.state_parts} parts; the "
            "number must be 1 or more, and only states on 'nvme' travel in parts"
        )
    actions = {choice.acts} if isinstance(choice.acts, str) else set(choice.acts)
    if unknown := sorted(actions - set(ACTIONS)):
        raise PlanError(f"unit {unit.name!r} has action {unknown[0]!r}; choose among {', '.join(ACTIONS)}")
    if unit.kind != "block" and "recompute" in actions and unit.saved:
        raise PlanError(
            f"unit {unit.name!r} is no block, so what it saves cannot be made again; "
            "keep it, or move it to host or nvme"
        )


def _check_semantics(plan: Plan, training: Training) -> None:
    """Whether updates come when the plan says, and give the numbers that training asks for."""
    if plan.hold_updates and plan.semantics == "in-backward":
        raise PlanError(
            f"plan {plan.policy!r} holds updates until backward ends, but its semantics are 'in-backward'; choose "
            "semantics 'exact-clip', or do not hold them"
        )
    if training.max_grad_norm is not None and plan.semantics == "in-backward":
        raise PlanError(
            f"training asks for clipping at norm {training.max_grad_norm}, but the plan updates in "
            "backward, before the norm is known; use semantics 'exact-clip' or drop max_grad_norm"
        )
    if training.max_grad_norm is not None and plan.semantics == "delayed-1":
        raise PlanError(
            f"training asks for clipping at norm {training.max_grad_norm}, but updates that are delayed "
            "by a step are not clipped; use semantics 'exact-clip' or drop max_grad_norm"
        )


def _check_pieces(plan: Plan, workload: Workload) -> None:
    """Whether segments are recomputed as a whole, and tiles divide the micro-batch."""
    if plan.segment_units > 1 and any(
        unit.kind == "block" and choice.acts != "recompute"
        for unit, choice in zip(workload.units, plan.units, strict=True)
    ):
        raise PlanError(
            f"plan {plan.policy!r} recomputes segments of {plan.segment_units} blocks, but keeps or moves saved "
            "tensors of some; segments need acts='recompute' in every block"
        )
    if workload.training.per_device_train_batch_size % plan.tiles:
        raise PlanError(
            f"plan {plan.policy!r} cuts micro-batches of {workload.training.per_device_train_batch_size} sequences "
            f"into {plan.tiles} tiles; the number of tiles must divide the number of sequences"
        )
