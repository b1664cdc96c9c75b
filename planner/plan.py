"""A plan: the decisions, readable by a person. There are three kinds, and `Plan` is any of them:

UnitwisePlan    every unit has its own places and actions
PackPlan        runs of units visit the devices in turn (Harmony)
PagedPlan       devices page weights in and out for every use (virtual memory)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import ClassVar, Literal

from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.scaling import Part
from tierplan.hwmodels.values.records import Count, Whole, check_record
from tierplan.hwmodels.values.shown import Shown
from tierplan.planner.plan_rules import (
    Divided,
    InputAction,
    Order,
    PackForm,
    Place,
    PlanError,
    Runs,
    TiedPlace,
    UpdateOrder,
    UpdatePlace,
    WriteBack,
    check_packs,
    check_unitwise,
    refuse_clipping,
    refuse_codes,
    refuse_frozen,
)
from tierplan.sim.columns import ScheduleColumns
from tierplan.sim.step import Action, Semantics
from tierplan.sim.workloads.workload import Training, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPlan:
    """Where one unit's bytes live, and what happens to what its forward saves."""

    params: Place = "device"
    frozen: Place | None = None
    """Where parameters live that are not trained; None for where the others are."""
    grads: Place = "device"
    """Where gradients wait for the update (and accumulate). Backward makes them on the device.

    Where they come back for the update and one turn has those of all micro-batches, they accumulate there first."""
    tied_grads: TiedPlace = "device"
    """Where the gradients wait that it makes of parameters which it shares with an earlier unit (a tied head's, of the
    embedding's), until that one's backward."""
    states: Place = "device"
    """Where optimizer states live between steps; `device` updates on the device, the others on the host's cores."""
    update: UpdatePlace = "home"
    """`device`: what the update reads comes there from host memory or NVMe (states, parameters, gradients that waited),
    and what it writes goes back."""
    input: InputAction = "keep"
    """What happens to the unit's input between forward and backward."""
    acts: Action | tuple[Action, ...] = "keep"
    """What happens to the saved tensors: one action for all, or one per tensor."""
    late_update: bool = False
    """With updates in backward: this one is made in the next step, in time for its forward, which it overlaps.

    Its gradients wait in host memory, or where `grads` says for an update on the device. The numbers are the same;
    after the last step, one such update is still due."""

    state_shards: int = 1
    """Shards, at most, in which states travel to the update and back (from NVMe, or to the device), each an update of
    its own: what has to have room on the way is a shard of the states rather than all of them, and within a unit reads,
    update and writes overlap."""
    host_shards: int = 0
    """Of the shards on NVMe, so many (the first) live in host memory instead: what room is left there."""

    @property
    def host_frac(self) -> float:
        """Share of its optimizer states that lives in host memory although the others do not."""
        return self.host_shards / self.state_shards

    @property
    def states_travel(self) -> bool:
        """Whether the update is made elsewhere than where optimizer states live."""
        return self.states == "nvme" or (self.states == "host" and self.update == "device")

    @property
    def updated(self) -> Literal["device", "host", "brought"]:
        """Where the update is made: on the device with states that are there, or brought there; or by the host."""
        return "device" if self.states == "device" else "brought" if self.update == "device" else "host"

    @property
    def updates_here(self) -> bool:
        """Whether the update runs on the device."""
        return self.updated != "host"

    @property
    def returns_grads(self) -> bool:
        """Whether gradients leave the device and come back for the update."""
        return self.update == "device" and self.grads != "device"

    @property
    def leaves(self) -> bool:
        """Whether gradients leave the device for the update, or to wait for it."""
        return self.grads != "device" or self.updated == "host"

    @property
    def late_grads(self) -> Place:
        """Where gradients wait for a late update."""
        return self.grads if self.update == "device" or self.grads == "nvme" else "host"

    def action(self, index: int) -> Action:
        return self.acts if isinstance(self.acts, str) else self.acts[index]


Keeps = Literal["nothing", "ends", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """What several devices divide among them, and when they exchange it."""

    divided: Divided = "all"
    """All: parameters, gradients and states are cut into shards (ZeRO-3). Gradients: these and the states (ZeRO-2).
    States: they alone (ZeRO-1). Nothing: every device has the model (data parallelism). Tensors: every operator, and
    all devices work on the same micro-batches (Megatron)."""
    reduces: Literal["last", "each"] = "last"
    """After which micro-batch gradients that stay on the device are summed over devices."""
    by: Literal["reduce", "all_reduce"] = "reduce"
    """How, where each device keeps a shard: DeepSpeed's ZeRO-2 all-reduces, and drops what is not its own."""
    waits: bool = False
    """Compute waits for each collective; else one turn runs beside it."""
    ahead: bool = False
    """Parameters are gathered for a turn before the gradients of the turn before are summed: beside its backward, with
    room for both. And these are summed beside the next one, behind which an update on the device comes. Else the sum
    comes before the gather, and an update at once."""
    keeps: Keeps = "nothing"
    """Whose parameters are gathered once for a micro-batch, and stay for its backward. Ends: those of embedding and
    head, FSDP's root. All: every unit's, as FSDP does that does not reshard after forward (`SHARD_GRAD_OP`)."""
    hooks: float = 0.0
    """Host time of the framework's hooks around a pass of a unit, over that of launching a kernel."""
    module_hooks: float = 0.0
    """The same of hooks around each module of the unit that has parameters of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientsByLink:
    """How DeepSpeed adds up gradients that wait off the device: what has added up so far comes to the device, is added
    to there, and goes again. After the last micro-batch the sum goes in fp32."""

    waits: Literal["at the end", "in the last", "always"] = "at the end"
    """Compute waits for these copies at the end of each micro-batch; or after each backward too, of the last
    micro-batch or of all."""
    returns_first: bool = False
    """Those of the first micro-batch come back, too, and all leave in the dtype of training first (ZeRO-3)."""
    once: bool = False
    """Those that add up on the device leave it so, too: once, in fp32 (ZeRO-1); else in the dtype of training."""
    slowdown: float = 1.0
    """How many times as long these copies hold the link as one of pinned memory does: from and to pageable memory, or
    one device after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitwisePlan(Shown):
    """One decision for each unit, on one device or on several that each train on micro-batches of their own."""

    policy: str
    """Who decided: a policy's name or `planner`."""
    units: tuple[UnitPlan, ...]
    """Parallel to `Workload.units`."""
    semantics: Semantics = "in-backward"
    """When updates happen, hence which numbers training gives: see docs/design.md."""
    order: Order = "horizontal"
    """Horizontal: all units of a micro-batch, then the next. Vertical: all micro-batches of a unit, then the next."""
    prefetch_params_units: Whole = 1
    """How many units ahead parameters may be fetched, beside the next, which arrives while its predecessor computes."""
    prefetch_acts_units: Whole = 1
    """The same for offloaded activations in backward."""
    prefetch_states_units: Whole = 1
    """How many updates ahead optimizer states may be read from NVMe."""
    strict_windows: bool = False
    """The windows above bind even where memory has room, as in systems with a fixed number of buffers."""
    overtaking: bool = False
    """Links, drives and the host's cores are listed to run whichever op is ready, rather than wait for one whose inputs
    are late."""
    updates_in_flight: Whole = 0
    """How many units' states may be between NVMe and their return to it at once; 0 leaves that to memory."""
    write_back: WriteBack = "at once"
    """When updated states go home. Delayed: when those of the next update have been read, so that the drive reads and
    writes in turns. Awaited: at once, and the next update waits for it."""
    late_writes: Whole = 0
    """Units, the last of those whose states come from NVMe for updates on the host, that write them only when all these
    have been read: drives read sooner what forward waits for, and write when they would be idle."""
    update_order: UpdateOrder = "forward"
    """Of updates after backward: in the order in which the next step needs them, or in that of the gradients."""
    hold_updates: bool = False
    """No update before backward has ended, as in systems that look for overflow in all gradients first."""
    update_over_units: Count = 1
    """Turns of units over which an update is spread whose states come to the device: its parts run between the
    backwards of the units that follow, so that compute need not wait until the link has brought them all."""
    by_link: GradientsByLink | None = None
    """How gradients that wait off the device add up there; None where the host's cores add what leaves the device."""
    fp32_by_link: bool = False
    """Parameters that are trained come from host memory, and their gradients go there, in fp32, as FSDP's do, whose
    shards there are the fp32 ones: a copy holds the link for as many bytes. What is copied is in the dtype of
    training."""
    segment_units: Count = 1
    """Blocks that are recomputed together: only the first one's input is kept, the others are made again too."""
    sub_batches: Count = 1
    """Parts that a micro-batch is cut into; with vertical order a unit works on them one after the other."""
    sums_tied: bool = False
    """A tied head's gradients of all micro-batches are added up before the embedding's, in vertical order: they are
    held once, and the last bits are others than plain training's."""
    operator_tiles: Count = 1
    """Units that each block is cut into by cutting its operators: fewer parameters are on the device at once."""
    devices: Count = 1
    """On which the plan trains."""
    sharing: Sharing = Sharing()
    """What they divide; of no account on one device."""
    parts: tuple[Part, ...] = ()
    """Of tiers and streams that are not used in full: its name, the kind of work (or `capacity`), and the part of it
    that is used. So a plan may run as on a lesser machine, where more would be in its way."""
    options: Mapping[str, object] = field(default_factory=dict)
    """The policy's own settings, for the record; lowering does not look at them."""

    kind: ClassVar[str] = "unitwise"

    @property
    def num_batches(self) -> int:
        """How many times the workload's micro-batches one step trains on: once per device, unless operators are cut."""
        return 1 if self.sharing.divided == "tensors" else self.devices

    def check(self, workload: Workload) -> None:
        """Raises `PlanError` if the plan contradicts itself, or does not fit the workload or what training asks for."""
        check_unitwise(self, workload)

    def rows(self) -> list[dict[str, object]]:
        """What is decided of each unit."""
        return [{"unit": k, **asdict(unit)} for k, unit in enumerate(self.units)]

    def __repr__(self) -> str:
        """One line: as many units as are alike, and where their parameters and states are."""
        places = Counter(
            f"{unit.params}/{unit.states}" + (f"/frozen {unit.frozen}" if unit.frozen else "") for unit in self.units
        )
        alike = ", ".join(f"{number} x {place}" for place, number in places.items())
        parts = f", {self.sub_batches} sub-batches" if self.sub_batches > 1 else ""
        return f"<UnitwisePlan {self.policy}: {self.order} order{parts}, {self.semantics}; parameters/states {alike}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Packs:
    """Harmony's decisions: runs of units that visit a device together, and which device takes which.

    Micro-batches are grouped: all of them go through a pack before the next pack. Backward makes a pack's activations
    again from its stashed input; its last pack does its forward there too.
    """

    form: PackForm
    """Data: every device takes every pack, with its part of the micro-batches. Pipeline: devices take packs in turn.
    Resident: backward packs are stages, which stay on their devices and go forward too, one forward and one backward in
    turns (1F1B); with more stages than devices, each device has every so many-th (interleaved), and one stage more than
    that is the first device's."""
    devices: Count
    forward: Runs
    """First unit and the one after the last, in order; together all units before the last backward pack."""
    backward: Runs
    """The same over all units."""
    cleanup_s: float = 0.0
    """Seconds of the compute stream that the end of each pack's turn costs."""
    host_copy_bytes_per_s: float = 0.0
    """At which a stashed input passes from one device's process to another's in host memory; 0: nothing is copied."""
    rounds: Count = 1
    """Parts of the step's micro-batches, each of which goes through all packs before the next; gradients add up."""
    flushes: bool = False
    """A round begins when the one before has left all devices; else devices take its packs as they fall idle."""
    streams: bool = False
    """A pack's parameters come while the pack before computes, and its gradients leave while the next one does."""
    late_updates: bool = False
    """Updates run during the next step, whose passes use the parameters of before (another algorithm)."""
    goes_on: bool = False
    """The next step begins on the device behind the one where this one ended; else always on the first."""
    hold_updates: bool = False
    """Gradients wait in host memory for the norm of all of them, by which they are clipped; then come the updates."""
    kept: tuple[int, ...] = ()
    """In stages that stay: blocks whose activations wait for backward, by number; others are made again from their
    inputs."""
    host_states: tuple[int, ...] = ()
    """In stages that stay: units, by number, whose optimizer states are in host memory. The host updates them: their
    gradients go there after the last micro-batch, and new parameters come back."""
    updates_here: tuple[int, ...] = ()
    """Units that their device updates: their states come, and go back. In stages that stay, some of `host_states`, in
    the end. In packs that go round, those of whole backward packs, between the micro-batches of the device's next one,
    or in the end where updates are held; the host updates all others."""
    state_shards: Count = 1
    """Parts in which these come and go, one after the other."""
    sums_tied: bool = False
    """In stages that stay: a tied head's gradients of all micro-batches are added up before they are sent to the
    embedding's, once a step (Megatron's). Else each is, as in plain training."""
    own_memory: bool = False
    """Each device's process has host memory of its own, as ranks have, and is sent what another has made. Else all see
    one host memory, as Harmony's processes do."""

    @property
    def stays(self) -> bool:
        """Whether packs stay on their devices, where all that they have is."""
        return self.form == "resident"

    @property
    def is_executed(self) -> bool:
        """Whether ops are those of units, as the runtime executes them; else one op stands for a whole pack."""
        is_plain = self.rounds == 1 and not (self.streams or self.late_updates)
        return self.stays or (is_plain and (self.devices == 1 or self.own_memory))


@dataclass(frozen=True, slots=True, kw_only=True)
class PackPlan:
    """Packs of units visit one or several devices in turn, which share the micro-batches (Harmony).

    Parameters, gradients and optimizer states live in host memory. A pack is updated as soon as its gradients are
    there, or all are in the end (`hold_updates`). Stages that stay on their devices have everything there but what
    `host_states` says, and are updated in the end.
    """

    policy: str
    """Who decided: a policy's name or `planner`."""
    packs: Packs
    options: Mapping[str, object] = field(default_factory=dict)
    """The policy's own settings, for the record; lowering does not look at them."""
    kind: ClassVar[str] = "packs"
    overtaking: ClassVar[bool] = False
    num_batches: ClassVar[int] = 1
    """The devices share the workload's micro-batches."""

    @property
    def devices(self) -> int:
        return self.packs.devices

    @property
    def sums_tied(self) -> bool:
        return self.packs.sums_tied

    @property
    def semantics(self) -> Semantics:
        if self.packs.stays or self.packs.hold_updates:
            return "exact-clip"
        return "delayed-1" if self.packs.late_updates else "in-backward"

    def check(self, workload: Workload) -> None:
        """Raises `PlanError` if packs leave out units or take some twice, or for training that they cannot do."""
        check_packs(self, workload)


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedPlan:
    """Devices page weights, gradients and states in and out for every single use, and share the micro-batches.

    The baseline that Harmony beats. Units are updated in backward.
    """

    policy: str
    """Who decided: a policy's name or `planner`."""
    devices: Count
    options: Mapping[str, object] = field(default_factory=dict)
    """The policy's own settings, for the record; lowering does not look at them."""
    kind: ClassVar[str] = "paged"
    sums_tied: ClassVar[bool] = False
    overtaking: ClassVar[bool] = False
    semantics: ClassVar[Semantics] = "in-backward"
    num_batches: ClassVar[int] = 1
    """The devices share the workload's micro-batches."""

    def check(self, workload: Workload) -> None:
        """Raises `PlanError` for a wrong number of devices, or training that paging cannot do."""
        check_record(self, PlanError, f"plan {self.policy!r}: ")
        refuse_frozen(f"plan {self.policy!r} pages weights", workload)
        refuse_clipping(f"plan {self.policy!r} pages weights", workload.training)
        refuse_codes(f"plan {self.policy!r} pages weights", workload.training)


Plan = UnitwisePlan | PackPlan | PagedPlan
"""All decisions for one training step of one workload. Every kind has `policy`, `kind`, `semantics`, `devices`,
`num_batches`, `options` and `check`; `tierplan.planner.lowering.lower` turns each into a schedule."""
KINDS: Mapping[str, type[UnitwisePlan | PackPlan | PagedPlan]] = {
    plan.kind: plan for plan in (UnitwisePlan, PackPlan, PagedPlan)
}
"""The kinds of plans by the names that they have in plan files."""


def facts_of(plan: Plan, workload: Workload, machine: Machine, **more: object) -> dict[str, object]:
    """What a schedule's `meta` says of where it comes from."""
    whose = {"policy": plan.policy, "semantics": plan.semantics, "model": workload.name, "machine": machine.name}
    return {**whose, "training": asdict(workload.training), **more}


def plain_semantics(training: Training) -> Semantics:
    """What gives the numbers of plain training: exact clipping where it clips, else updates in backward."""
    return "in-backward" if training.max_grad_norm is None else "exact-clip"


def is_same(plan: Plan, semantics: str) -> bool:
    """Whether it is the same algorithm as one of these semantics."""
    return plan.semantics == semantics or "delayed-1" not in (plan.semantics, semantics)


def other_numbers(plan: Plan, columns: ScheduleColumns | None, asked: str = "") -> str:
    """Why the plan's numbers are not those of plain training, or of delayed updates that were `asked` for; empty where
    they are, in some micro-batches. `columns` are its schedule's; None where activations leave the device as they are.
    """
    why = []
    if plan.semantics == "delayed-1" != asked:
        why.append("updates come a step late")
    if plan.sums_tied:
        why.append("a tied head's gradients are summed before the embedding's, which changes last bits")
    labels = None if columns is None else columns.labels()
    if labels is not None and labels.step is not None and any(op.kind == "encode" for op in labels.ops):
        why.append(f"activations leave the device in {labels.step.training.activation_format}")
    return "; ".join(why)
