"""Can I train this model on this machine, how fast, what limits it, and what should I buy?

Every answer is a simulation. First come the policies at several batch sizes on the machine as it is, then the planner
at the best of these, then the policies with one change of the machine at a time. Scenarios whose outcome is known are
not simulated: a policy that does not fit with few sequences does not fit with more, or with a larger model, and another
drive gives it no memory. Prices that neither the machine's description nor the user gives are listed as assumptions.
"""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tierplan.hwmodels import Description, MachineError, load_description
from tierplan.hwmodels.catalog import catalog_names, load_part
from tierplan.hwmodels.names import NVME_WRITE
from tierplan.studies.study import Point
from tierplan.studies.sweep import Row, sweep

__all__ = ["Advice", "Change", "PriceList", "advise"]

POLICIES = ("in-memory", "full-recompute", "zero-offload", "zero-infinity", "fuyou", "sliding-window")
"""Tried beside the planner: those that need one GPU only."""
BATCHES = (1, 4, 16, 64)
MODELS = (
    "gpt-6.7b", "gpt-10b-zero-offload", "gpt-13b", "gpt-30b", "gpt-65b", "gpt-100b", "gpt-135b", "gpt-175b", "gpt-276b",
)  # fmt: skip
"""Named configurations by rising size, for the largest model."""
GPU_FIGURES = ("gpu.capacity", "gpu.memory_bandwidth", "gpu.peak_fp32", "gpu.peak_bf16", "gpu.peak_fp16")
SECONDS_PER_YEAR = 365.25 * 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceList:
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
    """Of tokens per second, relative to the machine as it is, both under the policies alone; None where those cannot
    train the model there at all."""

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
    planner_s: float = 3.0,
    prices: PriceList | None = None,
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
        Seconds that the planner may take at the best batch, on the machine as it is; 0 leaves it out. It is asked about
        a changed machine only where the policies fit neither there nor here.
    num_workers
        Processes; by default this one alone, since most questions take less than starting others.
    """
    prices = prices or PriceList()
    overrides = dict(overrides or {})
    description = load_description(machine, [f"{k}={v}" for k, v in overrides.items()])
    with ExitStack() as life:
        if executor is None and (num_workers or 1) > 1:
            pool = ProcessPoolExecutor(num_workers, mp_context=multiprocessing.get_context("spawn"))
            executor = life.enter_context(pool)
        scenarios = _Scenarios(
            base=Point(model=model, machine=machine, seq=seq, overrides=overrides, planner_s=planner_s),
            batches=tuple(sorted(batches)),
            policies=tuple(policies),
            settings={"executor": executor, "num_workers": 1, "progress": progress},
        )
        as_is = scenarios.as_it_is()
        if all("error" in row for row in as_is):
            raise MachineError(str(as_is[0]["error"]))
        reference = _fastest(as_is)
        if planner_s > 0:
            as_is += scenarios.planner([{}], reference)[0]
        best = _fastest(as_is)
        purchases = _purchases(description, prices)
        changed = scenarios.changed([changes for _, changes, _ in purchases], as_is)
        if planner_s > 0 and best is None:
            hopeless = [i for i, rows in enumerate(changed) if _fastest(rows) is None]
            for i, rows in zip(hopeless, scenarios.planner([purchases[i][1] for i in hopeless], None), strict=True):
                changed[i] += rows
        largest_model = _largest_model(scenarios, as_is)
    advice = Advice(
        model=model,
        machine=description.name,
        seq=seq,
        fits=False,
        rows=tuple(as_is),
        changes=_changes(purchases, changed, reference),
        largest_model=largest_model,
        assumptions=_assumptions(description, prices),
    )
    if best is None:
        first = {str(r["policy"]): str(r.get("why_not", r.get("error"))) for r in as_is if r["batch"] == min(batches)}
        return replace(advice, why_not=first)
    return replace(_with_costs(advice, best, description, prices), fits=True, best=best)


@dataclass(frozen=True, slots=True)
class _Scenarios:
    """Asks the simulator, and only what it does not know the answer of."""

    base: Point
    batches: tuple[int, ...]
    """Rising."""
    policies: tuple[str, ...]
    settings: Mapping[str, Any]

    def _rows(self, points: Sequence[Point]) -> list[Row]:
        return sweep(points, **self.settings)

    def _rising(self, base: Point, policies: Sequence[str], batches: Sequence[int]) -> list[Row]:
        """The policies at rising batch sizes, each until one does not fit."""
        rising: list[Row] = []
        for batch in batches:
            rows = self._rows([replace(base, policy=p, batch=batch) for p in policies])
            rising += rows
            policies = [str(row["policy"]) for row in rows if row.get("fits")]
            if not policies:
                break
        return rising

    def as_it_is(self) -> list[Row]:
        """The machine as it is."""
        return self._rising(self.base, self.policies, self.batches)

    def planner(self, machines: Sequence[Mapping[str, object]], reference: Row | None) -> list[list[Row]]:
        """The planner's row for each machine, given by its changes, at the batch of the reference."""
        batch = self.batches[0] if reference is None else int(reference["batch"])
        return [[row] for row in self._rows([replace(self._on(m), policy="planner", batch=batch) for m in machines])]

    def changed(self, machines: Sequence[Mapping[str, object]], as_is: Sequence[Row]) -> list[list[Row]]:
        """The rows of each machine, given by its changes.

        What fits as it is is tried from its best batch on; the rest from the smallest one on, but not for drives, which
        give no memory to anything.
        """
        fitting = [p for p in self.policies if any(r["policy"] == p and r.get("fits") for r in as_is)]
        others = [p for p in self.policies if p not in fitting]
        by_machine = []
        for changes in machines:
            base, rows = self._on(changes), []
            for policy in fitting:
                best = _fastest([r for r in as_is if r["policy"] == policy])
                assert best is not None
                rows += self._rising(base, [policy], [b for b in self.batches if b >= best["batch"]])
                if not any(row.get("fits") for row in rows if row["policy"] == policy):
                    rows += self._rising(base, [policy], [b for b in self.batches if b < best["batch"]])
            if not fitting or set(changes) != {"nvme.drives"}:
                rows += self._rising(base, others, self.batches)
            by_machine.append(rows)
        return by_machine

    def fits(self, model: str, policies: Sequence[str]) -> bool:
        """Whether the model fits with one sequence under any of the policies."""
        points = (replace(self.base, model=model, policy=p, batch=1) for p in policies)
        return any(row.get("fits") for point in points for row in self._rows([point]))

    def _on(self, changes: Mapping[str, object]) -> Point:
        return replace(self.base, overrides={**self.base.overrides, **changes})


def _fastest(rows: Sequence[Row]) -> Row | None:
    """The row with most tokens per second; of those within 1 %, the one with the smallest batch."""
    fitting = [row for row in rows if row.get("fits")]
    if not fitting:
        return None
    most = max(float(row["tokens_per_s"]) for row in fitting)
    near = [row for row in fitting if float(row["tokens_per_s"]) >= 0.99 * most]
    return min(near, key=lambda row: (row["batch"], -float(row["tokens_per_s"])))


def _purchases(description: Description, prices: PriceList) -> list[tuple[str, dict[str, object], float]]:
    """What could be bought: (what, changes to the machine, price)."""
    purchases: list[tuple[str, dict[str, object], float]] = []
    drives = int(description.number("nvme.drives") or 0)
    if drives and description.number("nvme.read"):
        price = description.number("nvme.price") or prices.drive_usd
        purchases.append((f"{_plural(drives + 1)} in place of {drives}", {"nvme.drives": drives + 1}, price))
        purchases.append(
            (f"{_plural(2 * drives + 2)} in place of {drives}", {"nvme.drives": 2 * drives + 2}, (drives + 2) * price)
        )
    capacity = description.number("host.capacity")
    if capacity:
        for factor in (2, 4):
            gib = factor * capacity / 2**30
            added = (factor - 1) * capacity / 2**30
            what = f"{gib:.0f} GiB of DRAM in place of {capacity / 2**30:.0f}"
            purchases.append((what, {"host.capacity": f"{gib:.2f} GiB"}, added * prices.dram_usd_per_gib))
    part = description.quantity("gpu.part")
    for name in catalog_names("gpus"):
        other = load_part("gpu", name)
        its_price = other.number("gpu.price")
        if its_price and (part is None or (name != part.value and not _is_lesser(other, description))):
            purchases.append((f"{name} as GPU", {"gpu.part": name}, its_price))
    return purchases


def _is_lesser(gpu: Description, description: Description) -> bool:
    """Whether the GPU is in nothing better than the machine's own, by the figures that its part has."""
    own = {key: description.number(key) or 0.0 for key in description.part_values if key in GPU_FIGURES}
    return bool(own) and all((gpu.number(key) or 0.0) <= 1.01 * value for key, value in own.items())


def _plural(drives: int) -> str:
    return "1 drive" if drives == 1 else f"{drives} drives"


def _changes(
    purchases: Sequence[tuple[str, dict[str, object], float]],
    rows_of: Sequence[Sequence[Row]],
    best: Row | None,
) -> tuple[Change, ...]:
    changes = []
    for (what, overrides, price_usd), rows in zip(purchases, rows_of, strict=True):
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


def _largest_model(scenarios: _Scenarios, as_is: Sequence[Row]) -> str:
    """By bisection: a larger model never needs less memory."""
    low, high, policies = 0, len(MODELS), scenarios.policies
    if scenarios.base.model in MODELS:
        fitting = {str(row["policy"]) for row in as_is if row.get("fits")}
        if fitting & set(policies):
            low, policies = MODELS.index(scenarios.base.model) + 1, tuple(p for p in policies if p in fitting)
        elif scenarios.batches[0] == 1:
            high = MODELS.index(scenarios.base.model)
    while low < high:
        middle = (low + high) // 2
        if scenarios.fits(MODELS[middle], policies):
            low = middle + 1
        else:
            high = middle
    return MODELS[low - 1] if low else ""


def _with_costs(advice: Advice, best: Row, description: Description, prices: PriceList) -> Advice:
    seconds = 1e9 / float(best["tokens_per_s"])
    gpus, drives = description.number("gpu.count") or 1.0, description.number("nvme.drives") or 0.0
    power_w = (
        gpus * (description.number("gpu.power") or 0.0)
        + (description.number("host.power") or prices.host_power_w)
        + drives * (description.number("nvme.power") or 0.0)
    )
    energy_usd = power_w / 1000 * seconds / 3600 * prices.electricity_usd_per_kwh
    written = float(best.get(f"bytes.{NVME_WRITE}") or 0.0)
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


def _assumptions(description: Description, prices: PriceList) -> tuple[str, ...]:
    """What was assumed for want of a number in the description."""
    assumptions = [f"electricity costs {prices.electricity_usd_per_kwh:g} USD per kWh"]
    assumptions.append(f"the machine's price is written off over {prices.years:g} years of continuous training")
    assumptions.append(f"DRAM costs {prices.dram_usd_per_gib:g} USD per GiB")
    if description.number("nvme.drives") and description.number("nvme.price") is None:
        assumptions.append(f"a drive costs {prices.drive_usd:g} USD")
    if description.number("host.power") is None:
        assumptions.append(f"the machine without GPUs and drives takes {prices.host_power_w:g} W")
    for key, what in (
        ("gpu.price", "the GPU's price"),
        ("host.price", "the host's price"),
        ("gpu.power", "the GPU's power"),
    ):
        if description.number(key) is None:
            assumptions.append(f"{what} is not known and counts as 0")
    return tuple(assumptions)
