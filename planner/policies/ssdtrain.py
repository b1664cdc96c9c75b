"""SSDTrain (arXiv 2408.10013): activations go to NVMe during forward and come back in reverse order for backward.

Parameters, gradients and optimizer states stay on the device. Saved tensors are stored once per storage (a workload
lists them so). The tail of the forward pass is kept: offloading what backward wants next cannot hide. The first module
to be kept is the first that the drive could not have stored in time by SSDTrain's rule,

    (bytes of the modules before it + 2 * its own bytes) / (3 * F - 2 * forward seconds before it) > write bandwidth

with F the seconds of the whole forward pass. SSDTrain also forwards tensors whose store is still in flight when
backward asks for them, and cancels stores that have not begun. A schedule is fixed before the step, so that decision is
made here, on the modelled times: what could not be stored and back by then is kept. The rest comes back in reverse
order, each block's part while the blocks just after it run backward. As far as the device has room, no more leaves a
block than comes back in that time, so that nothing waits for the drive; where it has none, the rule alone decides.

Drive lifetime follows from the bytes written and the drives' rated endurance (`tierplan simulate` reports it).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.names import COMPUTE, D2H, DEVICE, H2D, NVME_READ, NVME_WRITE
from tierplan.planner.plan import UnitPlan, UnitwisePlan
from tierplan.planner.policies.options import WHOLE, Options, need_nvme, unitwise_plan
from tierplan.sim.step import Action
from tierplan.sim.workloads.workload import Workload

NAME = "ssdtrain"
OPTIONS: Mapping[str, object] = {"tail": "rule", "prefetch": 1, "semantics": None}
INPUT = -1
"""Stands for a unit's input among its slots."""


def policy(workload: Workload, machine: Machine, given: Mapping[str, object]) -> UnitwisePlan:
    """Saved tensors and inputs of blocks on NVMe, but for the tail that the drive could not store in time."""
    need_nvme(NAME, machine)
    options = Options(NAME, OPTIONS, given)
    ahead = options.whole_number("prefetch", low=0)
    devices = options.num_devices(machine)
    kept = _kept(workload, machine, ahead, devices) if options.choice("tail", "rule", "none") == "rule" else set()
    units = [UnitPlan() for _ in workload.units]
    for u, unit in enumerate(workload.units):
        if unit.kind == "block":
            acts: list[Action] = ["keep" if (u, tensor.index) in kept else "nvme" for tensor in unit.saved]
            units[u] = UnitPlan(input="keep" if (u, INPUT) in kept else "nvme", acts=tuple(acts))
    return unitwise_plan(
        options, workload, machine, "in-backward",
        units=tuple(units),
        prefetch_acts_units=ahead,
        strict_windows=True,
        sharing=WHOLE,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Module:
    """One saved tensor of a block, or (slot `INPUT`) the block's input, with modelled times in seconds."""

    unit: int
    slot: int
    size_bytes: int
    moved_bytes: int
    forward_s: float
    """The part of the block's forward time that its bytes have."""
    made_s: float
    """End of the block's forward."""
    wanted_s: float
    """Begin of the block's backward."""


def _modules(workload: Workload, machine: Machine) -> tuple[list[_Module], float]:
    """All modules in order of forward, and the seconds of the whole forward pass."""
    forward = [machine.cost(COMPUTE, u.forward).work_s for u in workload.units]
    backward = [machine.cost(COMPUTE, u.backward).work_s for u in workload.units]
    total_s = sum(forward)
    modules = []
    for u, unit in enumerate(workload.units):
        if unit.kind != "block":
            continue
        moved = workload.training.moved_bytes
        sizes = [(INPUT, unit.input_bytes, moved(unit)) if unit.saves_input else (INPUT, 0, 0)]
        sizes += [(tensor.index, tensor.size_bytes, moved(unit, tensor)) for tensor in unit.saved]
        whole = max(sum(size for _, size, _ in sizes), 1)
        made_s, wanted_s = sum(forward[: u + 1]), total_s + sum(backward[u + 1 :])
        modules += [
            _Module(u, slot, size, moves, forward[u] * size / whole, made_s, wanted_s) for slot, size, moves in sizes
        ]
    return modules, total_s


def _kept(workload: Workload, machine: Machine, ahead: int, devices: int) -> set[tuple[int, int]]:
    """(unit, slot) of what is kept: the tail by SSDTrain's rule, what would be forwarded, what is not back in time."""

    def rate(*streams: str) -> float:
        """Of each device, where all share the drives."""
        shared = {stream: devices for stream in (NVME_READ, NVME_WRITE)}
        return min(machine.stream(name).rates["bytes"].at(1e9) / shared.get(name, 1) for name in streams)

    modules, total_s = _modules(workload, machine)
    store, load = rate(D2H, NVME_WRITE), rate(H2D, NVME_READ)
    before_bytes = before_s = stored_s = 0.0
    kept: set[tuple[int, int]] = set()
    is_tail = False
    load_s = {u: 0.0 for u in range(len(workload.units))}
    for module in modules:
        load_s[module.unit] += module.moved_bytes / load
    for module in modules:
        left_s = 3 * total_s - 2 * before_s
        is_tail = is_tail or left_s <= 0 or (before_bytes + 2 * module.moved_bytes) / left_s > rate(NVME_WRITE)
        before_bytes += module.moved_bytes
        before_s += module.forward_s
        done_s = max(stored_s, module.made_s) + module.moved_bytes / store
        if is_tail or done_s + load_s[module.unit] > module.wanted_s:
            kept.add((module.unit, module.slot))
        else:
            stored_s = done_s
    late = _late(modules, kept, (rate(H2D), rate(NVME_READ)), stored_s, ahead)
    room_bytes = _room_bytes(workload, machine, modules, kept)
    for module in modules:
        if (module.unit, module.slot) in late and module.size_bytes <= room_bytes:
            kept.add((module.unit, module.slot))
            room_bytes -= module.size_bytes
    return kept


def _room_bytes(workload: Workload, machine: Machine, modules: list[_Module], kept: set[tuple[int, int]]) -> int:
    """What the device surely has beside what is kept, parameters, gradients, states and what two units work on."""
    t = workload.training
    waiting = workload.num_trained if t.max_grad_norm else 2 * max(u.num_trained for u in workload.units)
    need = workload.num_parameters * t.param_bytes + workload.states_bytes + waiting * t.grad_bytes
    need += sum(m.size_bytes for m in modules if (m.unit, m.slot) in kept)
    need += sum(u.saved_bytes for u in workload.units if u.kind != "block")
    need += 2 * max(u.saved_bytes + u.input_bytes for u in workload.blocks)
    need += max(u.output_bytes + max(u.forward_work_bytes, u.backward_work_bytes) for u in workload.units)
    return machine.tier(DEVICE).capacity_bytes - need


def _late(
    modules: list[_Module], kept: set[tuple[int, int]], bytes_per_s: tuple[float, float], stored_s: float, ahead: int
) -> set[tuple[int, int]]:
    """(unit, slot) of what the drive could not bring back by the time that its unit's backward begins.

    A unit's loads begin with the backward of the unit that is `ahead` + 1 after it, when the drive has stored
    everything and loaded what comes before, over the drive and the link one after the other (`bytes_per_s`): the slower
    one takes all tensors, the other one more. A unit's last tensors are the first to be kept instead.
    """
    slower, faster = min(bytes_per_s), max(bytes_per_s)
    leaving: dict[int, list[_Module]] = {}
    wanted_s: dict[int, float] = {}
    for module in modules:
        wanted_s[module.unit] = module.wanted_s
        if (module.unit, module.slot) not in kept:
            leaving.setdefault(module.unit, []).append(module)
    late: set[tuple[int, int]] = set()
    free_s = stored_s
    for u in sorted(leaving, reverse=True):
        begin_s = max(free_s, wanted_s.get(u + 1 + ahead, min(wanted_s.values())))
        room_bytes = (wanted_s[u] - begin_s - max(m.moved_bytes for m in leaving[u]) / faster) * slower
        moved_bytes = 0.0
        for module in leaving[u]:
            if moved_bytes + module.moved_bytes > room_bytes:
                late.add((u, module.slot))
            else:
                moved_bytes += module.moved_bytes
        free_s = begin_s + moved_bytes / slower
    return late
