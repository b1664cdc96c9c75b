"""Machines like a given one, with more memory or other rates: for what-if questions, budgets and calibration."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from tierplan.hwmodels.machine import SECONDS, Machine, Rate, Stream
from tierplan.hwmodels.names import CORES_LIMIT, kernels_limit

AMPLE_BYTES = 1 << 50
CAPACITY = "capacity"
A_SECOND = Rate.constant(1.0)
"""Of work in seconds, where a stream has no other rate for it."""
Part = tuple[str, str, float]
"""Of a tier or stream: its name, `CAPACITY` or a kind of work, and the part of that which is used."""


def with_capacity(machine: Machine, capacity_bytes: Mapping[str, int]) -> Machine:
    """The machine with other capacities, by tier."""
    tiers = tuple(replace(t, capacity_bytes=capacity_bytes.get(t.name, t.capacity_bytes)) for t in machine.tiers)
    return replace(machine, tiers=tiers)


def with_ample_memory(machine: Machine) -> Machine:
    """The machine with more memory in each tier than any plan needs."""
    return with_capacity(machine, {tier.name: AMPLE_BYTES for tier in machine.tiers})


def with_faster(machine: Machine, names: Collection[str], factor: float) -> Machine:
    """The machine with the streams and shared limits of these names `factor` times as fast. Latencies stay.

    So does what a stream takes of cores and of a GPU's kernels while it works; where these are faster too, it takes
    the same part of them. By a factor of 1 the machine is as it was, to the last bit of every rate.
    """
    if factor == 1:
        return machine
    shares = {CORES_LIMIT, *map(kernels_limit, range(machine.num_devices))}.difference(names)

    def faster(stream: Stream) -> Stream:
        quick = replace(stream, rates={kind: scaled(rate, factor) for kind, rate in rates_of(stream).items()})
        return with_demand(quick, shares, 1 / factor)

    streams = tuple(faster(s) if s.name in names else s for s in machine.streams)
    limits = tuple(replace(x, limit=x.limit * factor) if x.name in names else x for x in machine.shared_limits)
    return replace(machine, streams=streams, shared_limits=limits)


def own_limits(machine: Machine, streams: Collection[str]) -> set[str]:
    """Names of the shared limits that these streams load, and no others."""
    takers = {x.name: {s.name for s in machine.streams if x.name in s.takes} for x in machine.shared_limits}
    return {limit for limit, names in takers.items() if names and names <= set(streams)}


def with_rate_factors(stream: Stream, factors: Mapping[str, float]) -> Stream:
    """The stream with its rates multiplied, by kind of work; at full speed it takes as much of limits as before."""
    rates = {kind: scaled(rate, factors.get(kind, 1.0)) for kind, rate in stream.rates.items()}
    return replace(stream, rates=rates, takes=_takes(stream, lambda _, kind, weight: weight / factors.get(kind, 1.0)))


def with_demand(stream: Stream, limits: Collection[str], factor: float) -> Stream:
    """The stream taking `factor` times as much of these shared limits."""
    takes = _takes(stream, lambda limit, _, weight: weight * factor if limit in limits else weight)
    return replace(stream, takes=takes)


def _takes(stream: Stream, weight_of: Callable[[str, str, float], float]) -> dict[str, dict[str, float]]:
    """What it takes of each limit, by kind of work, with other weights."""
    return {limit: {k: weight_of(limit, k, w) for k, w in weights.items()} for limit, weights in stream.takes.items()}


def lesser(machine: Machine, other: Machine) -> Machine:
    """The machine, with what the other has less of as the other has it, and without drives where that has none; things
    are compared by name."""
    tiers, streams, limits = {t.name: t for t in other.tiers}, {s.name: s for s in other.streams}, other.limits
    machine = _without_tiers(machine, {t.name for t in machine.tiers if t.kind == "nvme"} - set(tiers))
    sizes = {t.name: min(t.capacity_bytes, tiers.get(t.name, t).capacity_bytes) for t in machine.tiers}
    return replace(
        with_capacity(machine, sizes),
        streams=tuple(_slower(s, streams.get(s.name, s)) for s in machine.streams),
        shared_limits=tuple(replace(x, limit=min(x.limit, limits.get(x.name, x.limit))) for x in machine.shared_limits),
    )


def _without_tiers(machine: Machine, gone: Collection[str]) -> Machine:
    """The machine without these tiers, the streams that are named after them, and what only these share."""
    streams = tuple(s for s in machine.streams if s.name.split(".")[0] not in gone)
    limits = {limit for s in streams for limit in s.takes}
    return replace(
        machine,
        tiers=tuple(t for t in machine.tiers if t.name not in gone),
        streams=streams,
        shared_limits=tuple(x for x in machine.shared_limits if not gone or x.name in limits),
    )


def _slower(stream: Stream, other: Stream) -> Stream:
    least = {kind: _least(rate, rates_of(other).get(kind, rate)) for kind, rate in stream.rates.items()}
    return replace(
        stream,
        rates={kind: rate for kind, rate in least.items() if (kind, rate) != (SECONDS, A_SECOND)},
        takes=_takes(stream, lambda limit, kind, weight: max(weight, other.takes.get(limit, {}).get(kind, weight))),
        **{
            name: max(getattr(stream, name), getattr(other, name))
            for name in ("latency_s", "beside_s", "wake_s", "launch_s", "kernel_s")
        },
    )


def _least(rate: Rate, other: Rate) -> Rate:
    amounts = sorted({amount for amount, _ in rate.points + other.points})
    least = tuple((a, min(rate.at(a), other.at(a))) for a in amounts)
    same = (one for one in (rate, other) if all(one.at(amount) == per_s for amount, per_s in least))
    return next(same, Rate(least))


def parts_of(machine: Machine, less: Machine) -> tuple[Part, ...]:
    """What of the machine is used where it runs as one that has less; its plans use nothing that this one lacks.

    A part is one number: where rates over the amount differ in shape, it is the least, and the machine runs slower than
    the one that has less at other amounts.
    """
    parts = [
        (tier.name, CAPACITY, smaller.capacity_bytes / tier.capacity_bytes)
        for tier in machine.tiers
        for smaller in less.tiers
        if smaller.name == tier.name
    ]
    parts += [
        (stream.name, kind, min(slow.at(amount) / rate.at(amount) for amount, _ in slow.points))
        for stream in machine.streams
        for slower in less.streams
        if slower.name == stream.name
        for kind, rate in stream.rates.items()
        for slow in [rates_of(slower)[kind]]
    ]
    return tuple(part for part in parts if part[2] < 1)


def with_parts(machine: Machine, parts: Collection[Part]) -> Machine:
    """The machine with only these parts of its tiers and streams."""
    factors: dict[str, dict[str, float]] = {}
    for name, kind, part in parts:
        factors.setdefault(name, {})[kind] = part
    sizes = {t.name: round(t.capacity_bytes * factors.get(t.name, {}).get(CAPACITY, 1.0)) for t in machine.tiers}
    streams = tuple(with_rate_factors(s, factors[s.name]) if s.name in factors else s for s in machine.streams)
    return replace(with_capacity(machine, sizes), streams=streams)


def rates_of(stream: Stream) -> dict[str, Rate]:
    """Of all that it works on, in seconds too."""
    return {SECONDS: A_SECOND, **stream.rates}


def scaled(rate: Rate, factor: float) -> Rate:
    """So many times the rate, whatever the amount."""
    return Rate(tuple((amount, per_s * factor) for amount, per_s in rate.points))
