"""Can I train this model on this machine, how fast, what limits it, and what should I buy?

Every answer is a simulation: the policies and the planner at several batch sizes on the machine as it is, then the same
with one thing changed at a time. Prices that neither the machine's description nor the user gives are assumptions, and
are said to be.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tierplan.hwmodels import Description, MachineError, load_description
from tierplan.hwmodels.catalog import catalog_names, load_part
from tierplan.validation.study import Point
from tierplan.validation.sweep import Row, sweep

__all__ = ["Advice", "Change", "Prices", "advise"]

POLICIES = ("in-memory", "full-recompute", "zero-offload", "zero-infinity", "fuyou", "sliding-window")
"""Tried beside the planner: those that need one GPU only."""
BATCHES = (1, 4, 16, 64)
MODELS = (
    "gpt-6.7b", "gpt-10b-zero-offload", "gpt-13b", "gpt-30b", "gpt-65b", "gpt-100b", "gpt-135b", "gpt-175b", "gpt-276b",
)  # fmt: skip
"""Named configurations by rising size, for the largest model."""
SECONDS_PER_YEAR = 365.25 * 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What parts and power cost, where the machine's description does not say."""

    drive_usd: float = 160.0
    """One 2 TB NVMe drive."""
    dram_usd_per_gib: float = 3.0
    """DDR5 modules, per GiB."""
    host_power_w: float = 150.0
    """The machine without GPUs and drives, under load."""
    electricity_usd_per_kwh: float = 0.20
    years: float = 3.0
    """Over which the machine's price is written off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One thing bought, and what it does."""

    what: str
    overrides: Mapping[str, object]
    price_usd: float
    fits: bool
    policy: str = ""
    batch: int = 0
    tokens_per_s: float = 0.0
    gain_frac: float | None = None
    """Of tokens per second, relative to the machine as it is; None where that cannot train the model at all."""

    @property
    def gain_per_1000_usd(self) -> float | None:
        """Percentage points of speed per 1000 USD."""
        return None if self.gain_frac is None or not self.price_usd else self.gain_frac * 100 / self.price_usd * 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The answers, with the rows they were taken from."""

    model: str
    machine: str
    seq: int
    fits: bool
    why_not: Mapping[str, str] = field(default_factory=dict)
    """By policy, at the smallest batch, where nothing fits."""
    best: Row = field(default_factory=dict)
    """The row of the fastest scenario."""
    rows: tuple[Row, ...] = ()
    """All scenarios on the machine as it is."""
    changes: tuple[Change, ...] = ()
    """By gain per price, best first."""
    largest_model: str = ""
    """The largest named configuration that fits with one sequence, under any policy tried."""
    days_per_billion_tokens: float | None = None
    usd_per_billion_tokens: float | None = None
    """Electricity, the machine written off over its years, and the part of the drives' lives that is used up."""
    drive_life_years: float | None = None
    """Of continuous training, until the drives' rated writes are reached."""
    written_bytes_per_step: float = 0.0
    assumptions: tuple[str, ...] = ()

    def record(self) -> dict[str, object]:
        """The advice as JSON values."""
        record = asdict(self)
        record["changes"] = [{**asdict(c), "gain_per_1000_usd": c.gain_per_1000_usd} for c in self.changes]
        return record


def advise(
    model: str,
    machine: str,
    *,
    overrides: Mapping[str, object] | None = None,
    batches: Sequence[int] = BATCHES,
    seq: int = 1024,
    policies: Sequence[str] = POLICIES,
    planner_s: float = 10.0,
    prices: Prices | None = None,
    executor: Executor | None = None,
    num_workers: int | None = None,
    progress: bool = False,
) -> Advice:
    """The advice for training `model` (a name or a `config.json`) on `machine` (a name or a TOML file).

    Parameters
    ----------
    batches
        Micro-batch sizes to try; the one with most tokens per second is taken.
    planner_s
        Seconds that the planner may take at the best batch of each machine that is looked at; 0 leaves it out.
    """
    prices = prices or Prices()
    overrides = dict(overrides or {})
    description = load_description(machine, [f"{k}={v}" for k, v in overrides.items()])
    ask = _Asker(
        base=Point(model=model, machine=machine, seq=seq, overrides=overrides, planner_s=planner_s),
        batches=tuple(batches),
        policies=tuple(policies),
        with_planner=planner_s > 0,
        settings={"executor": executor, "num_workers": num_workers, "progress": progress},
    )
    wished = _wishes(description, prices)
    as_is, *changed = ask([{}, *(changes for _, changes, _ in wished)])
    assumptions = _assumptions(description, prices)
    if all("error" in row for row in as_is):
        raise MachineError(str(as_is[0]["error"]))
    advice = Advice(
        model=model, machine=description.name, seq=seq, fits=False, rows=tuple(as_is), assumptions=assumptions
    )
    best = _fastest(as_is)
    advice = replace(
        advice,
        changes=_changes(wished, changed, best),
        largest_model=_largest_model(ask),
    )
    if best is None:
        first = {str(r["policy"]): str(r.get("why_not", r.get("error"))) for r in as_is if r["batch"] == min(batches)}
        return replace(advice, why_not=first)
    return replace(_with_costs(advice, best, description, prices), fits=True, best=best)


@dataclass(frozen=True, slots=True)
class _Asker:
    """Asks for several machines at once, so that the executor has much to do."""

    base: Point
    batches: tuple[int, ...]
    policies: tuple[str, ...]
    with_planner: bool
    settings: Mapping[str, Any]

    def __call__(self, machines: Sequence[Mapping[str, object]]) -> list[list[Row]]:
        """The rows of each machine, given by its changes."""
        bases = [replace(self.base, overrides={**self.base.overrides, **changes}) for changes in machines]
        per_machine = [
            [replace(base, policy=p, batch=b) for b in self.batches for p in self.policies] for base in bases
        ]
        rows = sweep([point for points in per_machine for point in points], **self.settings)
        size = len(self.batches) * len(self.policies)
        found = [rows[i * size : (i + 1) * size] for i in range(len(bases))]
        if self.with_planner:
            planned = []
            for base, its_rows in zip(bases, found, strict=True):
                fastest = _fastest(its_rows)
                batch = fastest["batch"] if fastest is not None else min(self.batches)
                planned.append(replace(base, policy="planner", batch=batch))
            for its_rows, row in zip(found, sweep(planned, **self.settings), strict=True):
                its_rows.append(row)
        return found

    def fits(self, model: str) -> bool:
        """Whether the model fits with one sequence under any policy."""
        points = [replace(self.base, model=model, policy=p, batch=1) for p in self.policies]
        return any(row.get("fits") for row in sweep(points, **self.settings))


def _fastest(rows: Sequence[Row]) -> Row | None:
    """The row with most tokens per second; of those within 1 %, the one with the smallest batch."""
    fitting = [row for row in rows if row.get("fits")]
    if not fitting:
        return None
    most = max(float(row["tokens_per_s"]) for row in fitting)
    near = [row for row in fitting if float(row["tokens_per_s"]) >= 0.99 * most]
    return min(near, key=lambda row: (row["batch"], -float(row["tokens_per_s"])))


def _wishes(description: Description, prices: Prices) -> list[tuple[str, dict[str, object], float]]:
    """What could be bought: (what, changes to the machine, price)."""
    found: list[tuple[str, dict[str, object], float]] = []
    drives = int(description.number("nvme.drives") or 0)
    if drives and description.number("nvme.read"):
        price = description.number("nvme.price") or prices.drive_usd
        found.append((f"{_plural(drives + 1)} in place of {drives}", {"nvme.drives": drives + 1}, price))
        found.append(
            (f"{_plural(2 * drives + 2)} in place of {drives}", {"nvme.drives": 2 * drives + 2}, (drives + 2) * price)
        )
    capacity = description.number("host.capacity")
    if capacity:
        for factor in (2, 4):
            gib = factor * capacity / 2**30
            added = (factor - 1) * capacity / 2**30
            what = f"{gib:.0f} GiB of DRAM in place of {capacity / 2**30:.0f}"
            found.append((what, {"host.capacity": f"{gib:.2f} GiB"}, added * prices.dram_usd_per_gib))
    part = description.quantity("gpu.part")
    for name in catalog_names("gpus"):
        its_price = load_part("gpu", name).number("gpu.price")
        if its_price and (part is None or name != part.value):
            found.append((f"a {name} as GPU", {"gpu.part": name}, its_price))
    return found


def _plural(drives: int) -> str:
    return "1 drive" if drives == 1 else f"{drives} drives"


def _changes(
    wished: Sequence[tuple[str, dict[str, object], float]], found: Sequence[Sequence[Row]], best: Row | None
) -> tuple[Change, ...]:
    changes = []
    for (what, overrides, price_usd), rows in zip(wished, found, strict=True):
        if all("error" in row for row in rows):
            continue  # the change does not apply to this machine
        change = Change(what=what, overrides=overrides, price_usd=price_usd, fits=False)
        fastest = _fastest(rows)
        if fastest is not None:
            speed = float(fastest["tokens_per_s"])
            gain = None if best is None else speed / float(best["tokens_per_s"]) - 1.0
            if gain is not None and gain < -0.01:
                continue  # a lesser part
            change = replace(
                change,
                fits=True,
                policy=str(fastest["policy"]),
                batch=int(fastest["batch"]),
                tokens_per_s=speed,
                gain_frac=gain,
            )
        changes.append(change)
    return tuple(sorted(changes, key=lambda c: (not c.fits, -(c.gain_per_1000_usd or 0.0), c.price_usd)))


def _largest_model(ask: _Asker) -> str:
    """By bisection: a larger model never needs less memory."""
    low, high = 0, len(MODELS)
    while low < high:
        middle = (low + high) // 2
        if ask.fits(MODELS[middle]):
            low = middle + 1
        else:
            high = middle
    return MODELS[low - 1] if low else ""


def _with_costs(advice: Advice, best: Row, description: Description, prices: Prices) -> Advice:
    seconds = 1e9 / float(best["tokens_per_s"])
    gpus, drives = description.number("gpu.count") or 1.0, description.number("nvme.drives") or 0.0
    power_w = (
        gpus * (description.number("gpu.power") or 0.0)
        + (description.number("host.power") or prices.host_power_w)
        + drives * (description.number("nvme.power") or 0.0)
    )
    energy_usd = power_w / 1000 * seconds / 3600 * prices.electricity_usd_per_kwh
    written = sum(float(v) for k, v in best.items() if k.startswith("bytes.") and k.endswith("nvme.write"))
    endurance = (description.number("nvme.endurance") or 0.0) * drives
    life_s = endurance / written * float(best["step_s"]) if written and endurance else None
    drives_usd = drives * (description.number("nvme.price") or prices.drive_usd)
    price_usd = gpus * (description.number("gpu.price") or 0.0) + (description.number("host.price") or 0.0)
    wear_usd = drives_usd * seconds / min(life_s or math.inf, prices.years * SECONDS_PER_YEAR)
    return replace(
        advice,
        days_per_billion_tokens=seconds / 86_400,
        usd_per_billion_tokens=energy_usd + wear_usd + price_usd * seconds / (prices.years * SECONDS_PER_YEAR),
        drive_life_years=None if life_s is None else life_s / SECONDS_PER_YEAR,
        written_bytes_per_step=written,
    )


def _assumptions(description: Description, prices: Prices) -> tuple[str, ...]:
    """What was assumed for want of a number in the description."""
    found = [f"electricity costs {prices.electricity_usd_per_kwh:g} USD per kWh"]
    found.append(f"the machine's price is written off over {prices.years:g} years of continuous training")
    found.append(f"DRAM costs {prices.dram_usd_per_gib:g} USD per GiB")
    if description.number("nvme.drives") and description.number("nvme.price") is None:
        found.append(f"a drive costs {prices.drive_usd:g} USD")
    if description.number("host.power") is None:
        found.append(f"the machine without GPUs and drives takes {prices.host_power_w:g} W")
    for key, what in (
        ("gpu.price", "the GPU's price"),
        ("host.price", "the host's price"),
        ("gpu.power", "the GPU's power"),
    ):
        if description.number(key) is None:
            found.append(f"{what} is not known and counts as 0")
    return tuple(found)
