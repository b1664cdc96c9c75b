"""A machine as the simulator and the planner use it: tiers, streams with rates, and shared limits.

People describe a machine by its parts (GPU, host, drives, links) in a TOML file, which `tierplan.hwmodels.description`
reads and `tierplan.hwmodels.build` turns into a `Machine`.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import exp, inf, isfinite, log
from typing import TYPE_CHECKING, Literal, TypeVar

from tierplan.hwmodels.values.shown import Shown

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

PAGE_BYTES = 4096
SECONDS = "s"
"""Work kind of ops whose time is known (measured): one second of work takes one second, on any stream."""
KERNELS = "kernels"
"""Work kind that says how many kernels an op launches: it takes their launches, or its other work if that is longer."""
PARTS = "parts"
"""Work kind that says of how many units an op's work is: rates are those of one unit's amounts, not of all together."""


class MachineError(ValueError):
    """A machine that contradicts itself, or a question that it cannot answer. Says what is missing and what exists."""


MOST_WIDTH = 100.0
"""Of an interval: a factor of 10^43, either way."""


@dataclass(frozen=True, slots=True)
class PredictionBasis:
    """What predictions for a machine rest on, and how far off they are."""

    text: str
    """`calibrated here`, `measured here`, `catalog`, with what else there is to say of the whole."""
    half_width: float
    """Nine in ten predicted times are off by a factor of at most `exp(half_width)`, either way."""
    reference_s: tuple[float, float] = (0.0, 0.0)
    """Seconds of the reference work on this machine, alone and beside other streams; 0 where nobody timed it."""
    num_threads: int = 0
    """Of kernels on the CPU, in the calibration; 0 without one."""
    stretch: tuple[Mapping[str, float], Mapping[str, float]] = ({}, {})
    """By stream: seconds of ops in the calibration over those with a core; alone, and beside other streams."""
    weakest: Mapping[str, str] = field(default_factory=dict)
    """By part (`gpu`, `link`, `host`, `nvme`), the weakest basis of its rates, where that is to be said."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """By part, what else there is to say of it."""

    def __post_init__(self) -> None:
        if not 0 <= self.half_width <= MOST_WIDTH:
            raise MachineError(f"half_width is {self.half_width}; it must be between 0 and {MOST_WIDTH:g}")

    def said(self, parts: Collection[str] | None = None) -> str:
        """The text with what there is to say of these parts of the machine; of all if not given."""
        weakest, notes = (
            {part: text for part, text in texts.items() if parts is None or part in parts}
            for texts in (self.weakest, self.notes)
        )
        by_part = ", ".join(f"{part} {basis}" for part, basis in weakest.items())
        return "; ".join([self.text + (f" (weakest: {by_part})" if by_part else ""), *notes.values()])

    def interval_s(self, predicted_s: float) -> tuple[float, float]:
        """The 90 % interval of a predicted time."""
        return predicted_s * exp(-self.half_width), predicted_s * exp(self.half_width)


CATALOG = PredictionBasis("catalog: data sheets and published figures", 0.4)
"""Nine in ten published steps are predicted within a factor of 1.5, also where kernels and settings are asked as by a
stranger (docs/points.md, docs/finetuning.md, docs/validation.md). Those beyond it were slower than predicted."""
MEASURED = PredictionBasis("measured here, not calibrated", 0.6)
"""Of seven runs on 2 shared cores (2026-11-22), six were predicted within a factor of 1.5, and one was 3.4 off."""


Rounding = Literal["exact", "page", "power-of-two"]
"""How an allocator rounds buffers up."""
Size = TypeVar("Size", int, "npt.NDArray[np.int64]")


def held_bytes(size_bytes: Size, rounding: Rounding) -> Size:
    """What a buffer of this size takes from its tier; of many buffers, where the size is an array."""
    if rounding == "exact":
        return size_bytes
    if rounding == "page":
        return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
    filled = size_bytes - 1
    for shift in (1, 2, 4, 8, 16, 32):  # all bits below the highest one
        filled |= filled >> shift
    return filled + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSpec:
    """A place with a capacity."""

    name: str
    kind: Literal["device", "host", "nvme"]
    capacity_bytes: int
    """Usable by a plan: what the part has, less context and reserve."""
    rounding: Rounding = "exact"
    """How the allocator rounds a buffer up."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Units of work per second: a constant, or a curve over the amount of one op, interpolated in log-log."""

    points: tuple[tuple[float, float], ...]
    """(amount, units per second), by rising amount; below the first and above the last point the rate is constant."""

    def __post_init__(self) -> None:
        amounts = [amount for amount, _ in self.points]
        if not amounts or not all(0 < x < inf for point in self.points for x in point) or amounts != sorted({*amounts}):
            raise MachineError(
                f"a rate has the points {self.points}; give (amount, units per second) by rising amount, all finite "
                "and above 0"
            )

    @classmethod
    def constant(cls, per_s: float) -> Rate:
        return cls(((1.0, per_s),))

    def at(self, amount: float) -> float:
        """Units per second for an op of this amount."""
        points = self.points
        if len(points) == 1 or amount <= points[0][0]:
            return points[0][1]
        if amount >= points[-1][0]:
            return points[-1][1]
        k = bisect.bisect_right(points, (amount, float("inf")))
        (x0, y0), (x1, y1) = points[k - 1], points[k]
        return float(y0 * (y1 / y0) ** (log(amount / x0) / log(x1 / x0)))


NO_DEMAND: Mapping[str, float] = {}
OF_OPTIMIZERS = (
    "; where only the optimizer's update on a GPU is in bf16 (Muon's, GaLore's, APOLLO's), take another optimizer or a "
    "policy that updates on the host"
)
"""What else a GPU without bf16 may lack its rate for."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The price of one op on one machine, when nothing else runs."""

    latency_s: float
    """Fixed part, paid before the work and not slowed by others: launch, allocation, seek."""
    work_s: float
    """The part that shared limits can slow down."""
    demand: Mapping[str, float] = field(default_factory=dict)
    """Per shared limit, the units per second that the op takes at full speed."""
    share: float = 1.0
    """Weight under contention: speeds (fractions of full speed) grow in proportion to it until a limit is reached."""
    wake_s: float = 0.0
    """Added to the fixed part where the stream stood still until an input was complete."""
    launch_s: float = 0.0
    """In which its kernels are launched, from the moment that the stream is free: the op does not end before that."""

    @property
    def alone_s(self) -> float:
        """Seconds from start to end when nothing else runs."""
        return max(self.latency_s + self.work_s, self.launch_s)

    def fault(self, limits: Mapping[str, float]) -> str:
        """Why no op can cost this where these limits (units per second, by name) are shared; empty if it can."""
        for what in ("latency_s", "work_s", "wake_s", "launch_s"):
            seconds = getattr(self, what)
            if not (isfinite(seconds) and seconds >= 0):
                return f"costs {what} = {seconds}; it must be finite and 0 or more"
        if not 0 < self.share < inf:
            return f"has a share of {self.share}; it must be finite and above 0"
        for name, need in self.demand.items():
            if not 0 <= need < inf:
                return f"takes {need:g} per second of shared limit {name!r}; it must be finite and 0 or more"
            if need > 0 and not limits.get(name, 0.0) > 0:
                return (
                    f"takes {need:g} per second of shared limit {name!r}, which is {limits.get(name, 'unknown')}; it "
                    "would never end. Give the limit a value above 0"
                )
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """A serial executor with a rate for each kind of work that it takes."""

    name: str
    rates: Mapping[str, Rate]
    """By work kind: `bytes`, `parameters`, `matmul_bf16_flops`, ..."""
    latency_s: float = 0.0
    """Paid once per op."""
    beside_s: float = 0.0
    """Paid once more per op where other streams work in the step too."""
    wake_s: float = 0.0
    """Paid once more by an op for whose input the stream stood still: its thread has to wake up."""
    launch_s: float = 0.0
    """In which the process that drives it launches one kernel. It launches those of an op once the stream is free,
    whatever the op waits for, and the op does not end before the last of them."""
    kernel_s: float = 0.0
    """What each kernel between products takes beside the bytes that it moves."""
    takes: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Shared limits that its work loads: limit name -> work kind -> units of the limit per unit of work."""
    share: float = 1.0
    """Weight under contention, see `Cost.share`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedLimit:
    """A linear inequality on concurrent stream rates: the sum of what they take per second is at most `limit`."""

    name: str
    limit: float


_T = TypeVar("_T", TierSpec, Stream)
OWN_DEVICES = "own_devices"
"""What a machine's description calls them in addition to the keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine(Shown):
    """Tiers, streams and shared limits."""

    name: str
    tiers: tuple[TierSpec, ...]
    streams: tuple[Stream, ...]
    shared_limits: tuple[SharedLimit, ...] = ()
    nameplate: tuple[str, ...] = ()
    """Names of the numbers that come from a data sheet rather than from a measurement, for reports."""
    description: Mapping[str, object] = field(default_factory=dict)
    """The parts it was built from; empty for a machine made in code."""
    basis: PredictionBasis = CATALOG
    """Of predictions for it."""

    def __post_init__(self) -> None:
        for what, parts in (("tiers", self.tiers), ("streams", self.streams), ("shared limits", self.shared_limits)):
            names = [part.name for part in parts]  # type: ignore[attr-defined]
            if len({*names}) < len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise MachineError(
                    f"machine {self.name!r} has two {what} called {twice!r}; give each a name of its own"
                )

    @property
    def limits(self) -> dict[str, float]:
        """Units per second by name of the shared limit, as the engine takes them."""
        return {limit.name: limit.limit for limit in self.shared_limits}

    @property
    def own_devices(self) -> int:
        """Those that the machine has, where somebody asks about another number of them."""
        own = self.description.get(OWN_DEVICES)
        return own if isinstance(own, int) else self.num_devices

    @property
    def num_devices(self) -> int:
        """GPUs, or whatever stands for them: the tiers that compute reads and writes."""
        return sum(tier.kind == "device" for tier in self.tiers)

    def tier(self, name: str) -> TierSpec:
        return _named("tier", name, self.tiers)

    def stream(self, name: str) -> Stream:
        return _named("stream", name, self.streams)

    def cost(self, stream_name: str, work: Mapping[str, float], *, is_alone: bool = False) -> Cost:
        """What one op of this work costs on the stream. Work of several kinds is done one after the other.

        `is_alone` where no other stream works in the step.

        Raises `MachineError` when the stream has no rate for a kind of work.
        """
        stream = self.stream(stream_name)
        seconds, num_parts = 0.0, work.get(PARTS, 1.0)
        taken: dict[str, float] = {}
        for kind, amount in work.items():
            if amount == 0 or kind in (KERNELS, PARTS):
                continue
            if kind in stream.rates:
                seconds += amount / stream.rates[kind].at(amount / num_parts)
            elif kind == SECONDS:
                seconds += amount
            else:
                raise MachineError(
                    f"stream {stream_name!r} of machine {self.name!r} has no rate for {kind!r}; "
                    f"it has {', '.join(sorted(stream.rates)) or 'none'}; describe that rate of the machine, or "
                    f"train in a dtype that it has{OF_OPTIMIZERS if kind == 'matmul_bf16_flops' else ''}"
                )
            for limit, weights in stream.takes.items():
                if weight := weights.get(kind, 0.0):
                    taken[limit] = taken.get(limit, 0.0) + weight * amount
        latency_s = stream.latency_s + (0.0 if is_alone else stream.beside_s)
        demand = {k: v / seconds for k, v in taken.items()} if taken and seconds else NO_DEMAND
        launch_s = work.get(KERNELS, 0.0) * stream.launch_s
        return Cost(latency_s, seconds, demand, stream.share, stream.wake_s, launch_s)

    def rows(self) -> list[dict[str, object]]:
        """Tiers with their sizes, and streams with their rates for much work."""
        tiers = [{"part": t.name, "of": t.kind, "figure": t.capacity_bytes / 2**30, "unit": "GiB"} for t in self.tiers]
        rates = [
            {"part": s.name, "of": work, "figure": rate.points[-1][1] / 1e9, "unit": "10^9/s"}
            for s in self.streams
            for work, rate in s.rates.items()
        ]
        return [*tiers, *rates]

    def __repr__(self) -> str:
        tiers: list[str] = []
        for (_, size), run in itertools.groupby(self.tiers, key=lambda tier: (tier.kind, tier.capacity_bytes)):
            first, *more = [tier.name for tier in run]
            to, each = (f" to {more[-1]}", " each") if more else ("", "")
            tiers.append(f"{first}{to} {size / 2**30:,.1f} GiB{each}")
        rest = f"{len(self.streams)} streams, {(n := len(self.shared_limits))} shared limit{'s' * (n != 1)}"
        return f"<Machine {self.name}: {', '.join(tiers)}; {rest}>"


def _named(what: str, name: str, items: tuple[_T, ...]) -> _T:
    for item in items:
        if item.name == name:
            return item
    raise MachineError(f"no {what} {name!r}; this machine has {', '.join(i.name for i in items) or 'none'}")
