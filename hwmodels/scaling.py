"""Machines like a given one, with more memory or other rates: for what-if questions, budgets and calibration."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from tierplan.hwmodels.machine import Machine, Rate, Stream

AMPLE_BYTES = 1 << 50


def with_capacity(machine: Machine, capacity_bytes: Mapping[str, int]) -> Machine:
    """The machine with other capacities, by tier."""
    tiers = tuple(replace(t, capacity_bytes=capacity_bytes.get(t.name, t.capacity_bytes)) for t in machine.tiers)
    return replace(machine, tiers=tiers)


def with_ample_memory(machine: Machine) -> Machine:
    """The machine with more memory in each tier than any plan needs."""
    return with_capacity(machine, {tier.name: AMPLE_BYTES for tier in machine.tiers})


def with_faster(machine: Machine, names: Collection[str], factor: float) -> Machine:
    """The machine with the streams and shared limits of these names `factor` times as fast. Latencies stay."""
    streams = tuple(
        replace(s, rates={kind: _times(rate, factor) for kind, rate in s.rates.items()}) if s.name in names else s
        for s in machine.streams
    )
    limits = tuple(replace(x, limit=x.limit * factor) if x.name in names else x for x in machine.shared_limits)
    return replace(machine, streams=streams, shared_limits=limits)


def with_rate_factors(stream: Stream, factors: Mapping[str, float]) -> Stream:
    """The stream with its rates multiplied, by kind of work; at full speed it takes as much of limits as before."""
    rates = {kind: _times(rate, factors.get(kind, 1.0)) for kind, rate in stream.rates.items()}
    takes = {
        limit: {kind: weight / factors.get(kind, 1.0) for kind, weight in weights.items()}
        for limit, weights in stream.takes.items()
    }
    return replace(stream, rates=rates, takes=takes)


def with_demand(stream: Stream, limits: Collection[str], factor: float) -> Stream:
    """The stream taking `factor` times as much of these shared limits."""
    takes = {
        limit: {kind: weight * factor for kind, weight in weights.items()} if limit in limits else weights
        for limit, weights in stream.takes.items()
    }
    return replace(stream, takes=takes)


def _times(rate: Rate, factor: float) -> Rate:
    return Rate(tuple((amount, per_s * factor) for amount, per_s in rate.points))
