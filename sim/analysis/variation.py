"""How far a step time may be off, given the spread of measured rates: many simulations with drawn rates.

Two things vary. A machine as a whole may be faster or slower than it was measured to be (`rates`: one factor per stream
or limit, the same for all of its ops); this does not average out. And each op may take a little longer or shorter
(`ops`: one factor per op); this averages out over a step, except where streams wait for each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tierplan.hwmodels.description import KEYS
from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.names import DRAM_LIMIT, NVME_LIMIT, parse_stream
from tierplan.sim.columns import columns_of
from tierplan.sim.compiled.graph_columns import graph_columns
from tierplan.sim.compiled.rules import Prices
from tierplan.sim.compiled.simulation import prices_on, run
from tierplan.sim.pricing import on_machine
from tierplan.sim.schedule import Schedule

INTERVAL = (0.05, 0.95)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variation:
    """Step times under drawn rates."""

    nominal_s: float
    """With the rates as they are."""
    median_s: float
    low_s: float
    """5 % of the draws are quicker."""
    high_s: float
    """5 % of the draws are slower: from `low_s` to `high_s` is the 90 % interval."""
    samples_s: tuple[float, ...]
    """All draws, in the order of drawing."""
    seed: int

    def __str__(self) -> str:
        return f"{self.median_s:.4g} s (90 %: {self.low_s:.4g} to {self.high_s:.4g} s, {len(self.samples_s)} draws)"


def vary(
    schedule: Schedule,
    machine: Machine,
    *,
    rates: Mapping[str, float] | None = None,
    ops: Mapping[str, float] | float = 0.0,
    num_samples: int = 64,
    num_steps: int = 3,
    seed: int = 0,
) -> Variation:
    """Step times of `schedule` on `machine` with rates drawn anew `num_samples` times; the same seed, the same result.

    Parameters
    ----------
    rates:
        Relative standard deviation by stream or shared limit; what is absent does not vary. If not given, the spreads
        that the machine's description states (`measured_spreads`).
    ops:
        Relative standard deviation of single ops: one for all, or by stream.
    num_steps:
        Steps per draw: 1, or 3 and more, of which the first is warm-up and the last, with nothing behind it, is left
        out of the step time.

    Factors are log-normal with mean 1, since times scatter to the long side and are never negative.

    Raises `ValueError` when nothing varies, a spread is not a number of 0 or more, or names no stream or limit of the
    machine; when `num_steps` is 2 or below 1, or `num_samples` below 1.
    """
    if num_samples < 1:
        raise ValueError(f"num_samples is {num_samples}; give 1 or more")
    if num_steps < 1 or num_steps == 2:
        raise ValueError(f"num_steps is {num_steps}; give 1, or 3 or more: the first and the last do not count")
    rates = measured_spreads(machine) if rates is None else dict(rates)
    streams, limits = {s.name for s in machine.streams}, machine.limits
    by_stream = dict(ops) if isinstance(ops, Mapping) else dict.fromkeys(sorted(streams), ops)
    _check(rates, streams | limits.keys())
    _check(by_stream, streams)
    if not any(rates.values()) and not any(by_stream.values()):
        raise ValueError(
            f"nothing varies: the description of machine {machine.name!r} states no spread; "
            "give `rates` or `ops`, or measure the machine"
        )
    columns = columns_of(on_machine(schedule, machine))
    columns = columns if num_steps == 1 else columns.unrolled(num_steps)
    graph, by_work, is_alone = graph_columns(columns), prices_on(columns, machine), len(columns.streams) == 1
    works = [columns.works[w] for w in columns.op_work.tolist()]
    work_s = np.array([machine.cost(work.stream, work.amounts, is_alone=is_alone).work_s for work in works])
    by_op = [of_works[columns.op_work] for of_works in by_work[1:-1]]  # all but the first field and the limits
    prices = Prices._make([np.arange(columns.num_ops, dtype=np.int32), *by_op, by_work.limits])

    def step_s(prices: Prices) -> float:
        ends_ns = run(columns, graph, prices).end_ns.reshape(num_steps, -1).max(axis=1, initial=0).tolist()
        return float(ends_ns[0] / 1e9 if num_steps == 1 else (ends_ns[-2] - ends_ns[0]) / (num_steps - 2) / 1e9)

    draw = np.random.default_rng(seed)
    samples = []
    for _ in range(num_samples):
        whole = {name: _factor(draw, rates[name]) for name in sorted(rates)}
        slower = [whole.get(w.stream, 1.0) * _factor(draw, by_stream.get(w.stream, 0.0)) for w in works]
        drawn_limits = [limit / whole.get(name, 1.0) for name, limit in limits.items()]
        # Demand per second stays the same: a faster draw stands for faster hardware, so shared limits do not cap it.
        work_ns = np.rint(work_s * slower * 1e9).astype(np.int64)
        samples.append(step_s(prices._replace(work_ns=work_ns, limits=np.array(drawn_limits, np.float64))))
    low, median, high = np.quantile(samples, (INTERVAL[0], 0.5, INTERVAL[1]))
    return Variation(
        nominal_s=step_s(prices),
        median_s=float(median),
        low_s=float(low),
        high_s=float(high),
        samples_s=tuple(samples),
        seed=seed,
    )


def measured_spreads(machine: Machine) -> dict[str, float]:
    """Relative standard deviation by stream and shared limit, where the machine's description states one.

    A stream with several kinds of work has the largest of their spreads; latencies, which are drawn for none, have no
    part in it.
    """
    limits = machine.description.get("limits", {})
    assert isinstance(limits, Mapping)
    entries = [(_named_by(key, machine), entry) for key, entry in machine.description.items()]
    entries += [([name], entry) for name, entry in limits.items()]
    spreads: dict[str, float] = {}
    for names, entry in entries:
        spread = entry.get("spread") if isinstance(entry, Mapping) else None
        if isinstance(spread, int | float):
            for name in names:
                spreads[name] = max(spreads.get(name, 0.0), float(spread))
    return spreads


def _named_by(key: str, machine: Machine) -> list[str]:
    """Streams and limits whose rate an entry of the description gives: `link.h2d` is that of `gpu0.h2d`, `gpu1.h2d`."""
    part, _, what = key.partition(".")
    if part == "gpu" and KEYS[key].unit != "s":
        return [s.name for s in machine.streams if parse_stream(s.name).is_compute]
    if part == "link":
        return [s.name for s in machine.streams if parse_stream(s.name).task == what]
    limits = {"host.memory_bandwidth": DRAM_LIMIT, "nvme.mixed": NVME_LIMIT}
    known = {s.name for s in machine.streams} | machine.limits.keys()
    return [name for name in (limits.get(key, key),) if name in known]


def _check(spreads: Mapping[str, float], known: set[str]) -> None:
    for name, spread in spreads.items():
        if name not in known:
            raise ValueError(f"a spread is given for {name!r}; the machine has {', '.join(sorted(known))}")
        if not (math.isfinite(spread) and spread >= 0):
            raise ValueError(f"the spread of {name!r} is {spread}; it must be 0 or more, and 0.02 means 2 %")


def _factor(draw: np.random.Generator, spread: float) -> float:
    """A factor on time, log-normal, of mean 1 and this relative standard deviation."""
    if spread == 0.0:
        return 1.0
    variance = math.log1p(spread * spread)
    return math.exp(draw.normal(-variance / 2, math.sqrt(variance)))
