"""Fuyou (arXiv 2403.06504; later LoHan, Ratel): everything on NVMe, the optimizer runs inside backward.

Each unit's gradients are consumed as they arrive in host memory: its states are read, updated and written back while
backward goes on; the next forward waits for all of it (synchronous, the numbers of plain training). Gradients are never
on NVMe. As in the authors' code (Crispig/Ratel, `single_step`), one thread reads one unit's states, hands it to the
process of Adam, and writes the unit before back, waiting for each with Python's lock held: what it handed over arrives
when the write-back has ended, and Adam runs beside the next read (`write_back=awaited`). With `delayed`, as the paper
draws it, Adam runs beside the write-back. Parameters come through a window of one block ahead.

Which activations are swapped to host memory and which are made again follows Fuyou's rule: saved tensors are ranked by
the compute that swapping saves per byte, and more are swapped as long as the modelled iteration time, convex in the
swapped bytes, falls. Blocks that save the same tensors share their ranks. A block works on `sub_batches` one after the
other where the whole batch's tensors would not fit the device. On several devices, which share the drives and the
host, parameters and gradients are divided as in ZeRO-3; each has activations of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.names import COMPUTE, D2H, DEVICE, H2D, HOST_ADAM, NVME_READ, NVME_WRITE
from tierplan.planner.plan import UnitPlan, UnitwisePlan
from tierplan.planner.plan_rules import PlanError
from tierplan.planner.policies.options import Options, need_nvme, unitwise_plan
from tierplan.sim.step import Action
from tierplan.sim.workloads.workload import Unit, Workload

NAME = "fuyou"
OPTIONS: Mapping[str, object] = {
    "swap": "convex",  # or all, none
    "write_back": "awaited",  # or delayed
    "window": 1,
    "sub_batches": 0,  # 0: as few as fit
    "semantics": None,
}
Slot = tuple[int, int]
"""A saved tensor: number of the first block that saves the same ones, and its index there."""
SMALL_FRAC = 0.02
"""Saved tensors below this share of their block (statistics of norms and attention) stay on the device."""


def policy(workload: Workload, machine: Machine, given: Mapping[str, object]) -> UnitwisePlan:
    """Parameters and states on NVMe, updates in backward, activations swapped or recomputed by the convex rule."""
    need_nvme(NAME, machine)
    options = Options(NAME, OPTIONS, given)
    devices = options.num_devices(machine)
    window = options.whole_number("window", low=0)
    sub_batches = options.whole_number("sub_batches", low=0) or _fewest_sub_batches(workload, machine, window)
    swap = options.choice("swap", "convex", "all", "none")
    write_back = options.choice("write_back", "awaited", "delayed")
    kinds = _kinds(workload)
    rank = _by_saving(workload, kinds, machine)
    count = {"all": len(rank), "none": 0}.get(swap)
    if count is None:
        count = min(range(len(rank) + 1), key=lambda k: iteration_s(workload, machine, rank[:k], devices))
    swapped = set(rank[:count])
    room = next(t.capacity_bytes for t in machine.tiers if t.kind == "host") * 3 // 4 // devices
    other, units = UnitPlan(params="nvme", grads="device", states="nvme"), []
    for unit in workload.units:
        if unit.kind != "block":
            units.append(other)
            continue
        leaving = {index for kind, index in swapped if kind == kinds[unit.name]}
        moved = partial(workload.training.moved_bytes, unit)
        room -= moved() + sum(moved(t) for t in unit.saved if t.index in leaving)
        lower: Action = "host" if room > 0 else "nvme"
        large = set(_large(unit))
        acts = tuple(
            "keep" if t.index not in large else lower if t.index in leaving else "recompute" for t in unit.saved
        )
        units.append(replace(other, input=lower, acts=acts))  # type: ignore[arg-type]
    options |= {"sub_batches": sub_batches, "swapped": len(swapped)}
    return unitwise_plan(
        options, workload, machine, "in-backward",
        units=tuple(units),
        order="vertical",
        sub_batches=sub_batches,
        sums_tied=sub_batches > 1 and any(unit.shares and unit.adds_to_shared for unit in workload.units),
        prefetch_params_units=window,
        prefetch_acts_units=1,
        prefetch_states_units=int(write_back == "awaited"),
        strict_windows=True,
        updates_in_flight=2,
        write_back=write_back,
    )  # fmt: skip


def _kinds(workload: Workload) -> dict[str, int]:
    """For each block by name, the number of the first block that saves the same tensors."""
    saved = [unit.saved for unit in workload.blocks]
    return {unit.name: saved.index(unit.saved) for unit in workload.blocks}


def _by_saving(workload: Workload, kinds: Mapping[str, int], machine: Machine) -> list[Slot]:
    """Slots by the seconds of recomputation that swapping saves per byte, best first; without the small ones."""

    def saving(slot: Slot) -> float:
        kind, index = slot
        block = workload.blocks[kind]
        moved_bytes = workload.training.moved_bytes(block, block.saved[index])
        return machine.cost(COMPUTE, block.saved[index].recompute).work_s / moved_bytes

    slots = [(kind, index) for kind in sorted(set(kinds.values())) for index in _large(workload.blocks[kind])]
    return sorted(slots, key=lambda slot: (-saving(slot), slot))


def _large(block: Unit) -> list[int]:
    least_bytes = SMALL_FRAC * block.saved_bytes
    return [t.index for t in block.saved if t.size_bytes >= least_bytes]


def iteration_s(workload: Workload, machine: Machine, swapped: Sequence[Slot], devices: int = 1) -> float:
    """Fuyou's model of the iteration: in each phase the busiest of compute, link down, link up, drive and CPU Adam."""
    t, batches = workload.training, workload.training.gradient_accumulation_steps

    def seconds(stream: str, work: Mapping[str, float]) -> float:
        return machine.cost(stream, work).work_s

    known: dict[int, float] = {}  # blocks that are alike have one work

    def computing_s(work: Mapping[str, float]) -> float:
        return known[id(work)] if id(work) in known else known.setdefault(id(work), seconds(COMPUTE, work))

    n = workload.num_parameters
    params = {"bytes": float(n * t.param_bytes)}
    share = {"bytes": params["bytes"] / devices}  # by each link
    kinds, leaving = _kinds(workload), set(swapped)
    acts = 0  # per micro-batch
    for unit in workload.blocks:
        kind = kinds[unit.name]
        acts += t.moved_bytes(unit)
        acts += sum(t.moved_bytes(unit, tensor) for tensor in unit.saved if (kind, tensor.index) in leaving)
    forward = batches * sum(computing_s(u.forward) for u in workload.units)
    backward = batches * sum(computing_s(u.backward) for u in workload.units)
    for kind in set(kinds.values()):
        block = workload.blocks[kind]
        again = block.work_again([k for k in _large(block) if (kind, k) not in leaving])
        backward += batches * list(kinds.values()).count(kind) * seconds(COMPUTE, again)
    down, up = {"bytes": float(batches * acts)}, {"bytes": batches * acts + share["bytes"]}
    states = {"bytes": float(workload.states_bytes)}
    drive = seconds(NVME_READ, {"bytes": params["bytes"] + states["bytes"]})
    drive += seconds(NVME_WRITE, {"bytes": params["bytes"] + states["bytes"]})
    in_forward = max(forward, seconds(D2H, down), seconds(NVME_READ, params), seconds(H2D, share))
    adam = sum(t.host_work(unit)["parameters"] for unit in workload.units)
    return in_forward + max(backward, seconds(H2D, up), drive + seconds(HOST_ADAM, {"parameters": float(adam)}))


def _fewest_sub_batches(workload: Workload, machine: Machine, window: int) -> int:
    """The fewest equal parts of the batch with which a unit's tensors fit the device beside its parameters.

    Raises `PlanError` when not even single sequences do.
    """
    capacity = machine.tier(DEVICE).capacity_bytes
    t, batch = workload.training, workload.training.per_device_train_batch_size
    block = max((u.num_parameters for u in workload.blocks), default=0)
    other = max((u.num_parameters for u in workload.units if u.kind != "block"), default=0)
    parameters = block * (t.param_bytes * (1 + window) + 2 * t.grad_bytes) + other * (t.param_bytes + t.grad_bytes)
    borders = 4 * max(u.input_bytes for u in workload.units) * t.gradient_accumulation_steps
    need = 0
    for num in (k for k in range(1, batch + 1) if batch % k == 0):
        work = max(2 * u.saved_bytes + max(u.forward_work_bytes, u.backward_work_bytes) for u in workload.units)
        need = parameters + borders + work // num
        if need <= capacity:
            return num
    if parameters > capacity:
        raise PlanError(
            f"policy {NAME!r} needs about {need:,} bytes on the device for one sequence, but it has {capacity:,}; "
            "take a larger device or a model with smaller blocks"
        )
    return batch
