"""What a training job takes: hours, energy, money, and how much of the drives' lives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tierplan.hwmodels import Description
from tierplan.planner.questions.endurance import SECONDS_PER_YEAR
from tierplan.studies.purchases import PriceList, computer_price_usd

SOON_S = 2 * SECONDS_PER_YEAR
"""Drives that live less than this belong into the first lines."""
TOKENS = 1e9
"""Of a job, where nobody says how much is to be trained in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What the job takes on one machine."""

    tokens: float
    seconds: float
    energy_kwh: float
    energy_usd: float
    machine_usd: float
    """The part of the machine's price that is written off meanwhile, without drives."""
    drives_usd: float
    """The same of the drives, or the part of their lives that is used up, whichever is more."""
    wear_frac: float | None
    """Of all drives' rated endurance: above 1, drives have to be replaced before the job is done."""
    drive_life_s: float | None
    """Of training without pause; None where nothing wears them, or their endurance is not known."""
    machine_price_usd: float | None
    """New, with GPUs and drives; None where a price is not known."""

    @property
    def total_usd(self) -> float:
        return self.energy_usd + self.machine_usd + self.drives_usd


def costs_of(answer: Mapping[str, Any], description: Description, prices: PriceList, tokens: float) -> Costs:
    """What the job takes at the speed of a prediction's record."""

    def number(key: str, otherwise: float = 0.0) -> float:
        value = description.number(key)
        return otherwise if value is None else value

    seconds = tokens / float(answer["tokens_per_s"])
    price_usd = computer_price_usd(description)
    gpus, drives = number("gpu.count", 1.0), number("nvme.drives")
    power_w = gpus * number("gpu.power") + number("host.power", prices.host_power_w) + drives * number("nvme.power")
    energy_kwh = power_w / 1000 * seconds / 3600
    life_s = answer["drive_lifetime_s"]
    computer_usd = gpus * number("gpu.price") + number("host.price")
    drives_usd = drives * number("nvme.price", prices.drive_usd)
    written_off_frac = seconds / (prices.years * SECONDS_PER_YEAR)
    wear_frac = None if life_s is None else seconds / float(life_s)
    return Costs(
        tokens=tokens,
        seconds=seconds,
        energy_kwh=energy_kwh,
        energy_usd=energy_kwh * prices.electricity_usd_per_kwh,
        machine_usd=computer_usd * written_off_frac,
        drives_usd=drives_usd * max(wear_frac or 0.0, written_off_frac),
        wear_frac=wear_frac,
        drive_life_s=life_s,
        machine_price_usd=computer_usd + drives_usd if price_usd is not None else None,
    )
