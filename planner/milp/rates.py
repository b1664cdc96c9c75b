"""How fast transfers and updates go at most, each stream by itself, and what they take of shared limits; GB and s."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tierplan.hwmodels.machine import Machine, MachineError
from tierplan.hwmodels.names import COMPUTE, D2H, H2D, HOST_ADAM, NVME_READ, NVME_WRITE
from tierplan.planner.lowering.sketch import MOST_TOGETHER_BYTES
from tierplan.sim.workloads.workload import Training, Unit, Workload

GB = 1e9
STATE_SHARDS = (4, 16, 1, 2, 8)
"""Numbers of shards in which states travel, as they are tried. In the program they are fluid; in schedules those of one
or two shards are on the way at a time, so what is in flight is a unit's states over its shards."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates by stream and class of bytes (GB/s), the most that any transfer of that class reaches alone."""

    up: Mapping[str, float]
    down: Mapping[str, float]
    read: Mapping[str, float]
    write: Mapping[str, float]
    adam: float
    """1e9 parameters per second on the host's cores; 0 where the host has none for it."""
    update: float
    """The same on the device."""
    chain_s: Mapping[str, tuple[float, ...]]
    """By home of the parameters (`nvme`, else `host`), per unit: least seconds from gradients on the device, through
    an update on the host, to parameters that compute can use."""


def seconds_alone(machine: Machine, stream: str, work: Mapping[str, float], *, is_alone: bool = False) -> float:
    """Of work on a stream that has all that it shares to itself; 0 where the machine has no such stream. `is_alone`
    where no other stream works in the step."""
    try:
        return machine.cost(stream, work, is_alone=is_alone).alone_s if any(work.values()) else 0.0
    except MachineError:
        return 0.0


def has_rates(machine: Machine, stream: str, work: Mapping[str, float]) -> bool:
    """Whether a stream of the machine does work of these kinds."""
    try:
        machine.cost(stream, work)
    except MachineError:
        return False
    return True


def limit_seconds(machine: Machine, stream: str, work: Mapping[str, float]) -> dict[str, float]:
    """Seconds at full use of each shared limit that work on a stream takes."""
    cost = machine.cost(stream, work)
    limits = machine.limits
    return {name: demand * cost.work_s / limits[name] for name, demand in cost.demand.items()}


def host_update_s(unit: Unit, training: Training, machine: Machine) -> float:
    """Seconds of a unit's update on the host's cores, in the shards in which it takes least."""
    work = training.host_work(unit)
    return min(
        num * seconds_alone(machine, HOST_ADAM, {kind: amount / num for kind, amount in work.items()})
        for num in STATE_SHARDS
    )


def _best_rate(machine: Machine, stream: str, sizes: Iterable[int]) -> float:
    """Highest bytes per second (in GB/s) that transfers of these sizes reach alone, latency included."""
    best = 0.0
    for size in {s for s in sizes if s > 0}:
        seconds = seconds_alone(machine, stream, {"bytes": size})
        best = max(best, size / seconds / GB if seconds > 0 else 1e6)
    return best or 1e6


def _travelling(unit: Unit, training: Training) -> list[tuple[int, int]]:
    """Bytes on the device, and on their way, of what a unit saves, of its input, and of the most small ones at once."""
    found = [(t.size_bytes, training.moved_bytes(unit, t)) for t in unit.saved]
    together_bytes = min(MOST_TOGETHER_BYTES, sum(t.size_bytes for t in unit.saved))
    return [*found, (unit.input_bytes, training.moved_bytes(unit)), (together_bytes, together_bytes)]


def coded_frac_of(workload: Workload, alike: Sequence[int]) -> float:
    """Bytes with which activations travel, of those that they have on the device: the least of any. `alike` are the
    first units like each."""
    found = [pair for first in set(alike) for pair in _travelling(workload.units[first], workload.training)]
    return min((moved / whole for whole, moved in found if whole), default=1.0)


def stream_rates(
    workload: Workload, machine: Machine, has_nvme: bool, alike: Sequence[int], coded_frac: float
) -> Rates:
    """The most that streams of this machine reach with what the workload moves and updates; activations are told in
    bytes on the device."""
    t = workload.training
    kinds = {first: workload.units[first] for first in alike}
    sizes = {
        "acts": {moved for u in kinds.values() for _, moved in _travelling(u, t)},
        "params": {n for u in kinds.values() for n in (u.num_trained * t.param_bytes, u.frozen_bytes)},
        "grads": {u.num_trained * t.grad_bytes for u in kinds.values()},
        "states": {t.states_bytes(u) // num for u in kinds.values() for num in STATE_SHARDS},
    }
    streams = {s.name for s in machine.streams}

    def by_class(stream: str) -> dict[str, float]:
        best = {name: _best_rate(machine, stream, found) if stream in streams else 0.0 for name, found in sizes.items()}
        return {**best, "acts": best["acts"] / coded_frac}

    up, down = by_class(H2D), by_class(D2H)
    read, write = by_class(NVME_READ), by_class(NVME_WRITE)
    adam = update = 0.0
    chain_s: dict[int, tuple[float, float]] = {}
    for first, u in kinds.items():
        n, adam_s = u.num_trained, host_update_s(u, t, machine)
        update_s = seconds_alone(machine, COMPUTE, t.update_work(u))
        adam = max(adam, n / adam_s / 1e9 if adam_s else 0.0)
        update = max(update, n / update_s / 1e9 if update_s else 0.0)
        arrive = seconds_alone(machine, D2H, {"bytes": n * t.grad_bytes})
        home = seconds_alone(machine, H2D, {"bytes": n * t.param_bytes})
        moved = {"bytes": n * t.param_bytes}
        ways = (NVME_WRITE, NVME_READ) if has_nvme else ()
        through = sum(seconds_alone(machine, stream, moved) for stream in ways)
        chain_s[first] = arrive + adam_s + home, arrive + adam_s + through + home
    chain = {place: tuple(chain_s[first][k] for first in alike) for k, place in enumerate(("host", "nvme"))}
    return Rates(up, down, read, write, adam, update or 1e6, chain)


def limit_loads(workload: Workload, machine: Machine) -> dict[str, dict[str, float]]:
    """Of each shared limit, what a GB or 1e9 parameters on each stream take; where units differ, the least."""
    found: dict[str, dict[str, float]] = {}
    owners = [(u.num_trained, workload.training.host_work(u)["parameters"]) for u in workload.units]
    work = min((work / num for num, work in owners if num), default=1.0)
    for stream in machine.streams:
        for limit, weights in stream.takes.items():
            kind = "parameters" if stream.name == HOST_ADAM else "bytes"
            if weight := weights.get(kind, 0.0) * (work if kind == "parameters" else 1.0):
                found.setdefault(limit, {})[stream.name] = weight * GB / machine.limits[limit]
    return found
