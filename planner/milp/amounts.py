"""The amounts of the planning problem: what each unit computes, holds and moves, in seconds and gigabytes.

`docs/planner.md` has the mathematics; this module only collects its data. The step is cut into *windows* at the ends
of compute ops, one window per turn of a unit in forward and in backward; transfers are fluid inside a window.
Everything is in GB and s, since solvers fail on bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.names import COMPUTE, HOST_ADAM, NVME_READ, NVME_WRITE
from tierplan.planner.lowering.launches import with_launches
from tierplan.planner.lowering.tiling import cut_batches
from tierplan.planner.milp.modes import MODES, Mode
from tierplan.planner.milp.rates import (
    GB,
    STATE_SHARDS,
    Rates,
    coded_frac_of,
    has_rates,
    host_update_s,
    limit_loads,
    limit_seconds,
    seconds_alone,
    stream_rates,
)
from tierplan.planner.plan import Keeps
from tierplan.planner.plan_rules import Order
from tierplan.sim.step import Action, Semantics
from tierplan.sim.workloads.work import total_work
from tierplan.sim.workloads.workload import SavedTensor, Unit, Workload, first_alike

SMALL_FRAC = 0.02
"""Slots below this share of a unit's saved bytes, and of the time to make all of them again, are planned together:
moving them one by one is not worth an op."""
TINY_FRAC = 0.001
"""Below this share of bytes, together, too, whatever they cost: they nearly always stay."""

ALIKE = 1.1
"""Times the quickest unit's seconds per parameter, up to which updates are alike."""
NUM_ALONE = 3
"""Units at either end of the chain that always have a window of their own: there, what is first and last matters."""
MAX_RUNS = 16
"""Windows between them, at most, per pass over the units. Four times as many lift the bound of 96 blocks by 0.0 to
0.1 %, and take three to seven times as long."""


@dataclass(frozen=True, slots=True)
class SlotGroup:
    """Saved tensors of one unit that share a decision."""

    slots: tuple[int, ...]
    """Slot numbers, the largest tensor's first; empty for the unit's input. One that autograd does not save is
    `recomputable`: backward needs it only where something is made again from it, and else it is dropped."""
    gb: float
    recompute_s: float
    recompute_load: Mapping[str, float]
    """Seconds at full use of each shared limit."""
    recomputable: bool
    movable: bool
    beside: tuple[int, ...] = ()
    """Slots that stay where the others leave: too small for a copy of their own."""

    def acts(self, action: Action) -> dict[int, Action]:
        """By slot, what an action on the group is."""
        stays: Action = "keep" if action in ("host", "nvme") else action
        return {k: stays if k in self.beside else action for k in self.slots}


_Key = tuple[int, bool]
"""Of a group while it is made up: its large slot (beyond the unit's, one for small and one for tiny ones), and whether
it may be made again."""


@dataclass(frozen=True, slots=True)
class UnitAmounts:
    """One unit in GB and s, for one micro-batch."""

    name: str
    is_block: bool
    params_gb: float
    frozen_gb: float
    grads_gb: float
    states_gb: float
    gparams: float
    """Trained parameters, in units of 1e9."""
    fetched_from: int
    """The unit whose parameters it reads: itself, or the owner of tied ones; -1 for none."""
    fwd_s: float
    bwd_s: float
    update_s: float
    """Of the update on the device."""
    updates_on_device: bool
    """Whether the device has rates for that (cards without bf16 have none for Muon's products)."""
    host_update_s: float
    """Of the update on the host's cores, in the shards in which it takes least."""
    accumulate_s: float
    """On the host's cores, per arriving gradient."""
    norm_s: float
    fwd_load: Mapping[str, float]
    bwd_load: Mapping[str, float]
    groups: tuple[SlotGroup, ...]
    saved_gb: float
    fwd_fixed_gb: float
    """On the device while forward runs, whatever is decided: work, output, an input that is no slot."""
    bwd_fixed_gb: float
    adding_gb: float
    """More than that where its gradients are added to earlier ones on the device."""
    input_gb: float
    """Of its input, and so of the gradient of that; of the first unit nothing."""
    output_gb: float
    tied_gb: float
    """A gradient of parameters that it shares, on the device from its backward to their owner's."""
    fwd_reads_params: bool
    bwd_reads_params: bool
    stays: int | None
    """A tiny saved tensor, where all of forward takes longer than making all of them again: where everything is
    dropped, forward runs again with what comes after the last of them, too."""

    def acts(self, each: Sequence[Action]) -> Action | tuple[Action, ...]:
        """Of the unit's saved tensors; one for all where they are the same."""
        if self.stays is not None and all(act == "recompute" for act in each):
            each = [*each[: self.stays], "keep", *each[self.stays + 1 :]]
        return tuple(each) if len(set(each)) > 1 else next(iter(each), "keep")

    gathered_gb: float = 0.0
    """Of its parameters, what its ops have on the device beside this one's shard."""
    fwd_waits_s: float = 0.0
    """Of the seconds of its forward, those in which it waits for what devices sum: updates may be made meanwhile."""
    bwd_waits_s: float = 0.0
    again_waits_frac: float = 0.0
    """Of the seconds in which groups are made again."""


@dataclass(frozen=True, slots=True)
class Window:
    """The time from the end of one compute op to the end of the next (of all micro-batches of a turn, and of a run)."""

    block: int
    phase: Literal["fwd", "bwd"]
    units: tuple[int, ...]
    """In order of execution; mostly one."""

    @property
    def first(self) -> int:
        """The unit whose op is the first in the window."""
        return self.units[0]

    @property
    def last(self) -> int:
        return self.units[-1]


@dataclass(frozen=True, slots=True)
class BatchGroup:
    """Micro-batches that look alike: the first, those between (once, with their number), the last."""

    copies: int
    first: bool
    last: bool


class Shape(NamedTuple):
    """What a search for plans does not change."""

    order: Order
    """Of micro-batches."""
    sub_batches: int
    """Parts that each is cut into."""
    keeps: Keeps = "nothing"
    """Of gathered parameters, on several devices."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """All data of one planning problem."""

    workload: Workload
    """With micro-batches cut into sub-batches, where there are any."""
    machine: Machine
    semantics: Semantics
    order: Order
    sub_batches: int
    units: tuple[UnitAmounts, ...]
    runs: tuple[range, ...]
    """Units that share a window, in order of the chain."""
    blocks: tuple[BatchGroup, ...]
    turn: int
    """Micro-batches in one window: all of them in vertical order, else 1."""
    device_gb: float
    host_gb: float
    nvme_gb: float
    has_nvme: bool
    rates: Rates
    coded_frac: float
    """Bytes with which activations travel and wait, of those that they have on the device: the least of any."""
    loads: Mapping[str, Mapping[str, float]]
    """Shared limit -> stream -> seconds of the limit per GB (or 1e9 parameters) on that stream."""
    shared_gb: float
    write_limit_gb_per_s: float = float("inf")
    """What may be written to NVMe on average over the step, for the drives to last."""
    brings_states: bool
    """Whether states may come to the device for their update and go back."""
    devices: int = 1
    """That divide the work: the amounts are those of one of them."""
    divided: Literal["all", "tensors"] = "all"
    """What they divide: all but micro-batches, of which each has its own; or operators, for the same micro-batches."""
    waits: bool = False
    """Whether updates on the device go on while computing waits for what devices sum: then only a step has room for
    all. So it is in bounds; plans come nearer to a program whose windows have room for each."""
    keeps: Keeps = "nothing"
    """Of several devices: whose gathered parameters stay for backward."""
    keeps_grads: bool = False
    """Whether gradients of such an update stay on the device until then, though they might leave and come back."""

    @property
    def returns_grads(self) -> bool:
        """Whether gradients may leave the device and come back for the update: where they wait for their norm."""
        return self.brings_states and self.semantics == "exact-clip" and not self.keeps_grads

    @cached_property
    def clip_s(self) -> float:
        """Seconds between the last norm and the first update, of what makes the coefficient of clipping."""
        clips = self.semantics == "exact-clip" and self.workload.training.max_grad_norm is not None
        return self.machine.cost(HOST_ADAM, {}).alone_s if clips and self.rates.adam else 0.0

    def moved_frac(self, flow: str) -> float:
        """Bytes that a flow moves, of those that it stands for: those of activations on the device."""
        return self.coded_frac if flow in ("uA", "dA", "rA", "wA") else 1.0

    @property
    def shape(self) -> Shape:
        """Of its plans."""
        return Shape(self.order, self.sub_batches, self.keeps)

    @property
    def windows(self) -> list[Window]:
        forward: list[tuple[int, ...]] = [tuple(run) for run in self.runs]
        backward = [units[::-1] for units in reversed(forward)]
        return [
            Window(b, phase, units)  # type: ignore[arg-type]
            for b in range(len(self.blocks))
            for phase, found in (("fwd", forward), ("bwd", backward))
            for units in found
        ]

    def has_room_for_update(self, unit: int) -> bool:
        """Whether all that an update on the device reads and writes at a time is less than the device has: gradients
        and parameters, and a shard of the states."""
        u = self.units[unit]
        return u.states_gb / max(STATE_SHARDS) + u.grads_gb + u.params_gb <= self.device_gb

    def host_gparams(self, unit: UnitAmounts) -> float:
        """What the rate of updates on the host is told for: 1e9 parameters of the unit whose update is quickest."""
        return self._of_quickest(unit.gparams, unit.host_update_s * self.rates.adam)

    def slower_update_s(self, unit: UnitAmounts) -> float:
        """What an update on the device takes more than by the rate of the unit whose update is quickest."""
        rate = self.rates.update
        return (self._of_quickest(unit.gparams, unit.update_s * rate) - unit.gparams) / rate

    def _of_quickest(self, gparams: float, equal_gparams: float) -> float:
        """What another unit takes as long for, where the optimizer treats units unlike."""
        is_alike = self.workload.training.optim.is_flat or equal_gparams < ALIKE * gparams
        return gparams if is_alike else equal_gparams

    def may_be(self, group: SlotGroup, action: str) -> bool:
        """Whether saved tensors that share a decision may have this action. An input cannot be made again."""
        if action == "recompute":
            return group.recomputable and bool(group.slots)
        return action == "keep" or (group.movable and self.host_gb > 0 and (action == "host" or self.has_nvme))

    def modes(self, unit: int) -> Sequence[int]:
        """Numbers of the placements that this unit may have."""
        u = self.units[unit]
        kind = u.frozen_gb > 0.0, u.gparams > 0.0, u.updates_on_device, self.has_room_for_update(unit)
        if kind not in self._modes:
            self._modes[kind] = tuple(k for k, mode in enumerate(MODES) if self._allows(mode, *kind))
        return self._modes[kind]

    @cached_property
    def _modes(self) -> dict[tuple[bool, bool, bool, bool], tuple[int, ...]]:
        """Those of units that are alike, as they are asked for."""
        return {}

    def _allows(self, mode: Mode, has_frozen: bool, is_trained: bool, has_rates: bool, has_room: bool) -> bool:
        """Whether a unit may have a placement, by what it has, what there is for it, and when it is updated."""
        if (mode.frozen is not None) != has_frozen or (mode.frozen == "host" and not self.host_gb):
            return False
        if "nvme" in (mode.params, mode.states, mode.grads, mode.frozen) and not self.has_nvme:
            return False
        if not is_trained or mode.states == "device":
            return mode.states == "device" and not (is_trained and (self.semantics == "delayed-1" or not has_rates))
        if not self.rates.adam or not self.host_gb:
            return False
        if mode.updated == "brought":
            return self.brings_states and has_rates and has_room and (self.returns_grads or not mode.returns_grads)
        if (mode.grads == "device") != (self.turn > 1) and len(self.blocks) == 1:
            return False  # one micro-batch: the same thing twice; a vertical turn accumulates on the device
        return mode.grads != "nvme" or self.semantics == "exact-clip"


def problem(
    workload: Workload,
    machine: Machine,
    *,
    semantics: Semantics,
    order: Order = "horizontal",
    sub_batches: int = 1,
    runs: Iterable[range] | None = None,
    write_limit_bytes_per_s: float = float("inf"),
) -> Problem:
    """The planning problem of one optimizer step of `workload` on `machine`, with micro-batches cut into `sub_batches`.

    `runs` are the units that share a window; by default those of `runs_of`. The first and the last unit are alone.
    """
    workload = with_launches(workload, machine)
    if sub_batches > 1:
        workload = cut_batches(workload, sub_batches)
    batches = workload.training.gradient_accumulation_steps
    vertical = order == "vertical" and batches > 1
    between = [BatchGroup(batches - 2, False, False)] if batches > 2 else []
    several = BatchGroup(1, True, False), *between, BatchGroup(1, False, True)
    tiers = {t.kind: t.capacity_bytes / GB for t in reversed(machine.tiers)}
    streams = {s.name for s in machine.streams}
    has_nvme = "nvme" in tiers and {NVME_READ, NVME_WRITE} <= streams and {"host"} <= tiers.keys()
    alike = first_alike(workload.units)
    coded_frac = coded_frac_of(workload, alike)
    rates = stream_rates(workload, machine, has_nvme, alike, coded_frac)
    return Problem(
        workload=workload,
        machine=machine,
        semantics=semantics,
        order="vertical" if vertical else "horizontal",
        sub_batches=sub_batches,
        units=_units(workload, machine, alike),
        runs=runs_of(len(workload.units)) if runs is None else tuple(runs),
        blocks=(BatchGroup(1, True, True),) if vertical or batches == 1 else several,
        turn=batches if vertical else 1,
        device_gb=tiers["device"],
        host_gb=tiers.get("host", 0.0),
        nvme_gb=tiers.get("nvme", 0.0),
        has_nvme=has_nvme,
        rates=rates,
        coded_frac=coded_frac,
        loads=limit_loads(workload, machine),
        shared_gb=workload.shared_bytes / GB,
        write_limit_gb_per_s=write_limit_bytes_per_s / GB,
        brings_states=bool("host" in tiers and rates.adam and semantics != "delayed-1"),
    )


def runs_of(num_units: int, max_runs: int = MAX_RUNS, num_alone: int = NUM_ALONE) -> tuple[range, ...]:
    """Units by window: one each, but in long chains several between the ends, so that the program hardly grows."""
    between = max(0, num_units - 2 * num_alone)
    size = max(1, -(-between // max_runs))
    first = range(min(num_alone, num_units))
    last = range(max(num_alone, num_units - num_alone), num_units)
    end = num_alone + between
    middle = [range(u, min(u + size, end)) for u in range(num_alone, end, size)]
    return (*(range(u, u + 1) for u in first), *middle, *(range(u, u + 1) for u in last))


def _units(workload: Workload, machine: Machine, alike: Sequence[int]) -> tuple[UnitAmounts, ...]:
    """Those of units that differ in no more than their names are counted once."""
    names = {u.name: i for i, u in enumerate(workload.units)}
    below, found = workload.first_trained, list[UnitAmounts]()
    known: dict[tuple[object, ...], UnitAmounts] = {}
    for u, (unit, first) in enumerate(zip(workload.units, alike, strict=True)):
        place = first, u == 0, u <= below, u >= below
        if place not in known:
            known[place] = _unit(unit, workload, machine, names)
        one = known[place]
        own = u if unit.num_parameters and not unit.shares else one.fetched_from
        found.append(replace(one, name=unit.name, fetched_from=own))
    return tuple(found)


def _unit(unit: Unit, workload: Workload, machine: Machine, names: Mapping[str, int]) -> UnitAmounts:
    t, n = workload.training, unit.num_trained
    is_first = names[unit.name] == 0
    owner = names[unit.shares] if unit.shares else (names[unit.name] if unit.num_parameters else -1)
    work_gb = unit.forward_work_bytes / GB
    transient_input = 0 if is_first else unit.input_bytes
    groups = _groups(unit, machine, is_first)
    has_input = any(not group.slots for group in groups)
    below = workload.first_trained
    passed_back = 0 if names[unit.name] <= below else unit.input_bytes
    taken_back = unit.output_bytes if names[unit.name] >= below else 0
    return UnitAmounts(
        name=unit.name,
        is_block=unit.kind == "block",
        params_gb=n * t.param_bytes / GB,
        frozen_gb=unit.frozen_bytes / GB,
        grads_gb=n * t.grad_bytes / GB,
        states_gb=t.states_bytes(unit) / GB,
        gparams=n / 1e9,
        fetched_from=owner,
        fwd_s=seconds_alone(machine, COMPUTE, unit.forward),
        bwd_s=seconds_alone(machine, COMPUTE, unit.backward),
        update_s=seconds_alone(machine, COMPUTE, t.update_work(unit)),
        updates_on_device=has_rates(machine, COMPUTE, t.update_work(unit)),
        host_update_s=host_update_s(unit, t, machine),
        accumulate_s=seconds_alone(machine, HOST_ADAM, {"elementwise_bytes": 3 * n * t.grad_bytes}),
        norm_s=seconds_alone(machine, HOST_ADAM, {"elementwise_bytes": n * t.grad_bytes})
        if t.max_grad_norm is not None
        else 0.0,
        fwd_load=limit_seconds(machine, COMPUTE, unit.forward),
        bwd_load=limit_seconds(machine, COMPUTE, unit.backward),
        groups=groups,
        saved_gb=unit.saved_bytes / GB,
        fwd_fixed_gb=work_gb + (unit.output_bytes + (0 if has_input else transient_input)) / GB,
        bwd_fixed_gb=(unit.backward_work_bytes + taken_back + passed_back) / GB,
        adding_gb=max(0, unit.accumulating_work_bytes - unit.backward_work_bytes) / GB,
        input_gb=transient_input / GB,
        output_gb=unit.output_bytes / GB,
        tied_gb=workload.units[names[unit.shares]].num_trained * t.grad_bytes / GB
        if unit.shares and unit.adds_to_shared
        else 0.0,
        fwd_reads_params=owner >= 0,
        bwd_reads_params=owner >= 0 and unit.saves_parameters,
        stays=_stays(unit, machine),
    )


def _groups(unit: Unit, machine: Machine, is_first: bool) -> tuple[SlotGroup, ...]:
    """The input first (if backward may read it), then slots that are large or take long to make again, one by one, each
    with what the same operations make; then the small ones together, and the tiny ones. What groups come from in common
    costs each its share: together they cost it once."""
    found = []
    is_block = unit.kind == "block"  # the runtime runs blocks again, nothing else
    if (unit.saves_input or (is_block and unit.saved)) and unit.input_bytes and not is_first:
        found.append(SlotGroup((), unit.input_bytes / GB, 0.0, {}, not unit.saves_input, True))
    # All that is made again is one op: it has one latency (which is left out), and the rate of a large amount.
    whole = {k: v for k, v in unit.work_again(range(len(unit.saved))).items() if has_rates(machine, COMPUTE, {k: v})}
    each_s = {kind: machine.cost(COMPUTE, {kind: amount}).work_s / amount for kind, amount in whole.items()}

    def seconds_of(work: Mapping[str, float]) -> float:
        return sum(each_s.get(kind, 0.0) * amount for kind, amount in work.items())

    least_bytes, least_s = SMALL_FRAC * unit.saved_bytes, SMALL_FRAC * seconds_of(whole)
    members, small = dict[_Key, list[SavedTensor]](), len(unit.saved)
    for alike in unit.made_together:
        first = max((unit.saved[k] for k in alike), key=lambda t: t.size_bytes)
        again = first.replayable and is_block
        is_tiny = first.size_bytes < TINY_FRAC * unit.saved_bytes
        is_large = first.size_bytes >= least_bytes or (again and seconds_of(first.recompute) > least_s)
        which = small + 1 if is_tiny else first.index if is_large else small
        members.setdefault((which, again), []).extend(unit.saved[k] for k in alike)
    works = _works_of(unit, members)
    seconds = {key: seconds_of(work) for key, work in works.items()}
    apart_s, together_s = sum(seconds.values()), seconds_alone(machine, COMPUTE, unit.recompute or unit.forward)
    frac = min(1.0, together_s / apart_s) if apart_s else 1.0  # of the whole unit, run again at once, it may be less
    for key in sorted(members):
        by_size = sorted(members[key], key=lambda t: -t.size_bytes)
        found.append(
            SlotGroup(
                slots=tuple(t.index for t in by_size),
                gb=sum(t.size_bytes for t in members[key]) / GB,
                recompute_s=frac * seconds[key],
                recompute_load={k: frac * v for k, v in limit_seconds(machine, COMPUTE, works[key]).items()},
                recomputable=key[1],
                movable=key[0] < small,
                beside=tuple(t.index for t in by_size[1:] if key[0] < small and t.size_bytes < least_bytes),
            )
        )
    return tuple(found)


def _stays(unit: Unit, machine: Machine) -> int | None:
    least = min(unit.saved, key=lambda t: t.size_bytes, default=None)
    if least is None or unit.kind != "block" or unit.recompute is not None or not all(t.replayable for t in unit.saved):
        return None
    again_s, whole_s = (
        seconds_alone(machine, COMPUTE, work) for work in (unit.work_again(range(len(unit.saved))), unit.forward)
    )
    return least.index if least.size_bytes < TINY_FRAC * unit.saved_bytes and again_s < whole_s else None


def _works_of(unit: Unit, members: Mapping[_Key, Sequence[SavedTensor]]) -> dict[_Key, dict[str, float]]:
    """What each group's tensors take to be made again, with its share of what others come from, too."""
    found = {}
    for key, tensors in members.items():
        indices = {t.index for t in tensors}
        works = [unit.work_again(indices)]
        for common in unit.common:
            num = sum(any(t.index in common.tensors for t in others) for others in members.values())
            if num > 1 and not indices.isdisjoint(common.tensors):
                works.append({kind: amount * (1 / num - 1) for kind, amount in common.work.items()})
        found[key] = total_work(works)
    return found
