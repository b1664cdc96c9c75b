"""What could be bought for a machine (modules of DRAM, drives, cards that fit the case), and what a training job costs.

Sizes are those that shops sell. Prices that no description gives are in `PriceList`, with their date.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tierplan.hwmodels import Description
from tierplan.hwmodels.build import GPU_FORMS
from tierplan.hwmodels.catalog import catalog_names, load_description, load_part
from tierplan.hwmodels.description import find_key, override
from tierplan.hwmodels.machine import MachineError
from tierplan.planner.questions.endurance import SECONDS_PER_YEAR
from tierplan.studies.study import Point

GIB = 2**30
SOON_S = 2 * SECONDS_PER_YEAR
"""Drives that live less than this belong into the first lines."""
TOKENS = 1e9
"""Of a job, where nobody says how much is to be trained in all."""
MOST_OF_A_KIND = 2
"""Purchases of one kind that are planned."""
DRIVE = "990-pro"
"""Of the catalog: what is bought for a machine without drives."""
NO_MORE_FRAC = 0.02
"""A purchase promises more than a cheaper one by more than this."""
MADE_OF = (
    "gpu.part", "gpu.count", "gpu.capacity", "host.capacity", "nvme.part", "nvme.drives", "nvme.capacity",
)  # fmt: skip
"""Of a rented machine, what nobody changes for the same rent."""
GPU_FIGURES = ("gpu.capacity", "gpu.memory_bandwidth", "gpu.peak_fp32", "gpu.peak_bf16", "gpu.peak_fp16")


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceList:
    """What parts and power cost, where the machine's description does not say."""

    drive_usd: float = 180.0
    """One 2 TB NVMe drive: the most that https://www.indiekings.com says of PCIe 4.0 ones, February 2026."""
    dram_usd_per_gib: float = 10.6
    """Modules of DDR5: 680 USD for 64 GB, PCPartPicker in https://www.techtimes.com, June 2026."""
    host_power_w: float = 150.0
    """The machine without GPUs and drives, under load."""
    electricity_usd_per_kwh: float = 0.20
    years: float = 3.0
    """Over which the machine's price is written off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What fits into a kind of case."""

    dram_gib: Mapping[int, str]
    """Sizes of all modules together, and what they are."""
    drives: int

    def sold_gib(self, capacity_bytes: float) -> float:
        """The smallest of these sizes that is about as much: the system sees a little less than is sold. Where none is,
        the capacity itself."""
        return next((gib for gib in self.dram_gib if 1.1 * gib * GIB >= capacity_bytes), capacity_bytes / GIB)

    def own_gib(self, capacity_bytes: float) -> float:
        """The size that is sold of which this is what the system sees; where there is none, the capacity itself."""
        sold_gib = self.sold_gib(capacity_bytes)
        return sold_gib if abs(sold_gib * GIB - capacity_bytes) < 0.1 * capacity_bytes else capacity_bytes / GIB


FORMS: Mapping[str, Form] = {
    "laptop": Form(dram_gib={32: "2 x 16", 64: "2 x 32", 96: "2 x 48"}, drives=2),
    "desktop": Form(dram_gib={64: "2 x 32", 96: "2 x 48", 128: "4 x 32", 192: "4 x 48"}, drives=4),
    "server": Form(
        dram_gib={128: "8 x 16", 256: "8 x 32", 512: "16 x 32", 1024: "16 x 64", 2048: "32 x 64"}, drives=24
    ),
}
"""By `host.form`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Purchase:
    """One thing that can be bought."""

    what: str
    overrides: Mapping[str, object]
    """What it changes of the machine."""
    price_usd: float
    machine: str = ""
    """In place of all of the machine, which has none of its changes then."""

    @property
    def kind(self) -> str:
        """Purchases of one kind take each other's place."""
        return "machine" if self.machine else next(iter(self.overrides))

    def applied(self, point: Point) -> Point:
        """The same question for what was bought."""
        if self.machine:
            return point.on_machine(self.machine)
        devices = None if "gpu.count" in self.overrides else point.devices
        kept = {  # what says nothing of a part in whose place another one is bought
            name: value
            for name, value in point.overrides.items()
            if (key := find_key(name)).whole or f"{key.section}.part" not in self.overrides
        }
        return replace(point, overrides={**kept, **self.overrides}, devices=devices)


def purchases(description: Description, prices: PriceList) -> list[Purchase]:
    """What could be bought for the machine, one thing at a time; no card that is in nothing better than its own.

    Of a machine that is rented, no part is bought: another one takes its place.
    """
    machines = [m for name in catalog_names() if name != description.name and (m := _as_a_whole(name))]
    if description.number("host.rent"):
        return machines
    case = str(description.quantity("host.form").value)  # type: ignore[union-attr]  # it has a default
    form = FORMS[case]
    found: list[Purchase] = []
    drives = int(description.number("nvme.drives") or 0)
    is_described = description.quantity("nvme.read") is not None
    drive = description if is_described else load_part("nvme", DRIVE)
    price = _drive_usd(drive, prices)
    for number in sorted({drives + 1, min(2 * drives + 2, form.drives)}):
        if drives < number <= form.drives:
            what = f"{number - drives}{' more' * bool(drives)} drive{'s' * (number > drives + 1)}"
            overrides = {"nvme.drives": number, **({} if is_described else {"nvme.part": DRIVE})}
            found.append(Purchase(what=what, overrides=overrides, price_usd=(number - drives) * price))
    capacity = description.number("host.capacity") or 0.0
    now_gib = form.own_gib(capacity)
    # more modules of the size that is there are bought beside them, everything else in their place
    module = form.dram_gib.get(int(now_gib), "").split()[-1:]
    usd_of = {
        gib: (gib - now_gib if form.dram_gib[gib].split()[-1:] == module else gib) * prices.dram_usd_per_gib
        for gib in form.dram_gib
        if gib * GIB > 1.1 * capacity
    }
    for gib, usd in list(usd_of.items())[:4]:
        if all(usd < other for more_gib, other in usd_of.items() if more_gib > gib):
            what = f"{gib} GiB DRAM ({form.dram_gib[gib]})"
            found.append(Purchase(what=what, overrides={"host.capacity": f"{gib} GiB"}, price_usd=usd))
    part = description.quantity("gpu.part")
    has_sockets = _is_module(description)  # that no card fits into
    for name, other in gpus_for(case).items():
        if has_sockets and not _is_module(other):
            continue
        if (part is None or name != part.value) and not _is_lesser(other, description):
            number, usd_each = int(description.number("gpu.count") or 1), other.number("gpu.price") or 0.0
            what = name if number == 1 else f"{number} x {name}"
            found.append(Purchase(what=what, overrides={"gpu.part": name}, price_usd=number * usd_each))
    found += _second_card(description) if form is FORMS["desktop"] else []
    return found + machines


def priced(point: Point, prices: PriceList) -> Description:
    """The point's machine with all GPUs that it has, and more where more are asked for, at the price of one that is
    built so: `host.price` is that with the DRAM that it has where none is set, and other DRAM costs what modules of so
    much cost more or less.

    Raises `MachineError` where it is rented, and made of something else than what has that rent.
    """
    settings = point.own_settings
    here = load_description(point.machine, settings)
    if (point.devices or 0) > (here.number("gpu.count") or 1):
        here = load_description(point.machine, point.settings)
    check_rent(here, load_description(point.machine, settings if "host.rent" in point.overrides else []))
    usd = here.number("host.price")
    own = load_description(point.machine, [s for s in settings if not s.startswith("host.capacity=")])
    capacity, own_capacity = (one.number("host.capacity") for one in (here, own))
    if usd is None or capacity is None or own_capacity is None or capacity == own_capacity:
        return here
    form = FORMS[str(here.quantity("host.form").value)]  # type: ignore[union-attr]  # it has a default
    more_gib = form.sold_gib(capacity) - form.sold_gib(own_capacity)
    return override(here, [f"host.price={max(0.0, usd + more_gib * prices.dram_usd_per_gib)}"])


def check_rent(here: Description, rented: Description) -> None:
    """Raises `MachineError` where `here` is made of something else than is rented; fewer GPUs have all of its rent."""
    rent_usd_per_hour = here.number("host.rent")
    if not rent_usd_per_hour:
        return
    for name in MADE_OF:
        now, own = here.quantity(name), rented.quantity(name)
        if name == "gpu.count" and (here.number(name) or 1) <= (rented.number(name) or 1):
            continue
        if now and (own is None or now.value != own.value):
            has = "not known" if own is None else own.text(find_key(name))
            raise MachineError(
                f"{here.name!r} is rented as it is, at {rent_usd_per_hour:g} USD an hour: {name} is "
                f"{now.text(find_key(name))}, and its own is {has}; leave it out (--set, --devices; of a page --gpu, "
                "--gpus, --dram, --drives), or say what such a machine costs an hour, 0 for one that is bought "
                "(--set host.rent=)"
            )


def _is_module(gpu: Description) -> bool:
    form = gpu.quantity("gpu.form")
    return form is not None and form.value == "module"


def gpus_for(case: str) -> dict[str, Description]:
    """GPUs of the catalog by name, which are sold and for which a case (`host.form`) has room."""
    parts = {name: load_part("gpu", name) for name in catalog_names("gpus")}
    form_of = {name: form.value for name, part in parts.items() if (form := part.quantity("gpu.form"))}
    return {n: part for n, part in parts.items() if form_of.get(n) in GPU_FORMS[case] and part.number("gpu.price")}


def worth_planning(bought: Sequence[Purchase], bounds: Sequence[float], now: float = 0.0) -> list[bool]:
    """Whether each is one of the few of its kind that matter, by what its bound promises (in any unit) beyond what
    there is `now`.

    These are the one with most more for its price and the one with most of all; none that promises no more than a
    cheaper, or than there is.
    """
    chosen: list[str] = []
    for kind in {b.kind for b in bought}:
        able: list[tuple[float, Purchase]] = []
        pairs = [(most, b) for most, b in zip(bounds, bought, strict=True) if b.kind == kind and most > now]
        for most, b in sorted(pairs, key=lambda pair: pair[1].price_usd):
            if not able or most > able[-1][0] * (1 + NO_MORE_FRAC):
                able.append((most, b))
        by_price = sorted(able, key=lambda pair: (now - pair[0]) / (pair[1].price_usd or 1e-9))
        chosen += list(dict.fromkeys(b.what for _, b in (*by_price[:1], *able[-1:], *by_price)))[:MOST_OF_A_KIND]
    return [b.what in chosen for b in bought]


def _second_card(description: Description) -> list[Purchase]:
    """One more of the card that is there: they share the lanes that a desktop has for cards."""
    price, part, number = (description.quantity(f"gpu.{key}") for key in ("price", "part", "count"))
    if price is None or (number is not None and number.value != 1):
        return []
    per_s = {way: description.quantity(f"link.{way}") for way in ("h2d", "d2h")}
    alone = {way: max(rate for _, rate in rates.points) for way, rates in per_s.items() if rates}  # both are given
    lanes = {f"link.host_{way}": f"{description.number(f'link.host_{way}') or most} B/s" for way, most in alone.items()}
    p2p = f"{description.number('link.p2p') or alone['h2d'] / 2} B/s"
    what = f"a second {part.value if part else 'card'}"
    return [Purchase(what=what, overrides={"gpu.count": 2, "link.p2p": p2p, **lanes}, price_usd=float(price.value))]  # type: ignore[arg-type]


def _as_a_whole(name: str) -> Purchase | None:
    """A machine of the catalog, where the prices of all its parts are known."""
    other = load_description(name)
    price_usd = computer_price_usd(other)
    if price_usd is None:
        return None
    drives = (other.number("nvme.drives") or 0) * _drive_usd(other, PriceList())
    return Purchase(what=f"another machine: {name}", overrides={}, price_usd=price_usd + drives, machine=name)


def _drive_usd(description: Description, prices: PriceList) -> float:
    """Of one drive; 0 where the description says that it costs nothing."""
    price = description.number("nvme.price")
    return prices.drive_usd if price is None else price


def computer_price_usd(description: Description) -> float | None:
    """Of host and GPUs; None where one is not known."""
    host, card = description.number("host.price"), description.number("gpu.price")
    return None if host is None or card is None else host + card * (description.number("gpu.count") or 1)


def _is_lesser(gpu: Description, description: Description) -> bool:
    """Whether the GPU is in nothing better than the machine's own, by the figures of its data sheet."""
    own = {key: value for key in GPU_FIGURES if (value := description.number(key))}
    return bool(own) and all((gpu.number(key) or 0.0) <= 1.01 * value for key, value in own.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What the job takes on one machine."""

    tokens: float
    seconds: float
    energy_kwh: float
    """At nameplate power of host, drives and the GPUs that train."""
    energy_usd: float
    machine_usd: float | None
    """The part of the machine's price that is written off meanwhile, without drives; None where no price is known."""
    drives_usd: float
    """The same of the drives, or the part of their lives that is used up, whichever is more."""
    wear_frac: float | None
    """Of all drives' rated endurance: above 1, drives have to be replaced before the job is done."""
    drive_life_s: float | None
    """Of training without pause; None where nothing wears them, or their endurance is not known."""
    machine_price_usd: float | None
    """New, with all its GPUs, idle ones too, and drives; None where a price is not known."""
    rent_usd: float | None = None
    """Of a machine that is rented, whose owner pays for all else."""

    @property
    def total_usd(self) -> float:
        return self.energy_usd + (self.machine_usd or 0.0) + self.drives_usd + (self.rent_usd or 0.0)

    @property
    def texts(self) -> dict[str, str]:
        """The whole `cost` and its parts, for people: parts are rounded first, so that they add up."""
        num_digits = 2 if self.total_usd < 100 else 0
        if self.rent_usd is not None:
            parts = {"rent": self.rent_usd}
        else:
            parts = {"electricity": self.energy_usd, "machine": self.machine_usd or 0.0}
            parts |= {"drives": self.drives_usd} if self.drives_usd else {}
        rounded = {name: round(usd, num_digits) for name, usd in parts.items()}
        texts = {name: f"{usd:,.{num_digits}f} USD" for name, usd in {"cost": sum(rounded.values()), **rounded}.items()}
        return {**texts, "machine": "of unknown price"} if "machine" in texts and self.machine_usd is None else texts


def energy_assumptions(description: Description, prices: PriceList) -> list[str]:
    """What an energy rests on: of a rented machine too, whose energy is told and not paid."""
    powers = {"gpu.power": "the GPU's power"}
    powers |= {"nvme.power": "the drives' power"} if description.number("nvme.drives") else {}
    assumptions = [
        "energy is at nameplate power: the host, the drives and the GPUs that train at full load all the time, GPUs "
        "that stand idle at 0 W"
    ]
    if unknown := [what for key, what in powers.items() if description.number(key) is None]:
        assumptions.append(f"{', '.join(unknown)}: not known, and counted as 0 W")
    if description.number("host.power") is None:
        assumptions.append(f"the machine without GPUs and drives takes {prices.host_power_w:g} W")
    return assumptions


def price_assumptions(description: Description) -> list[str]:
    """Whose price is missing in what a machine costs."""
    prices = {"gpu.price": "the GPU's price", "host.price": "the host's price"}
    unknown = [what for key, what in prices.items() if description.number(key) is None]
    return [f"{', '.join(unknown)}: not known, and counted as 0 USD"] if unknown else []


def job_s(answer: Mapping[str, Any], tokens: float) -> float:
    """Seconds of a job at the speed of a prediction's record: a step is the least that one can do."""
    return max(float(answer["step_s"]), tokens / float(answer["tokens_per_s"]))


def costs_of(answer: Mapping[str, Any], description: Description, prices: PriceList, tokens: float) -> Costs:
    """What the job takes at the speed of a prediction's record."""

    def number(key: str, otherwise: float = 0.0) -> float:
        value = description.number(key)
        return otherwise if value is None else value

    seconds = job_s(answer, tokens)
    rent_usd = seconds / 3600 * rent if (rent := number("host.rent")) else None
    is_own = rent_usd is None
    price_usd = computer_price_usd(description)
    gpus, drives = number("gpu.count", 1.0), number("nvme.drives")
    at_work = answer["devices"]  # of the GPUs; idle ones take nothing
    power_w = at_work * number("gpu.power") + number("host.power", prices.host_power_w) + drives * number("nvme.power")
    energy_kwh = power_w / 1000 * seconds / 3600
    life_s = answer["drive_lifetime_s"]
    computer_usd = gpus * number("gpu.price") + number("host.price")
    drives_usd = drives * _drive_usd(description, prices)
    written_off_frac = seconds / (prices.years * SECONDS_PER_YEAR)
    wear_frac = None if life_s is None else seconds / float(life_s)
    return Costs(
        tokens=tokens,
        seconds=seconds,
        energy_kwh=energy_kwh,
        energy_usd=is_own * energy_kwh * prices.electricity_usd_per_kwh,
        machine_usd=computer_usd * written_off_frac if is_own and (computer_usd or price_usd is not None) else None,
        drives_usd=is_own * drives_usd * max(wear_frac or 0.0, written_off_frac),
        wear_frac=wear_frac,
        drive_life_s=life_s,
        machine_price_usd=computer_usd + drives_usd if price_usd is not None and is_own else None,
        rent_usd=rent_usd,
    )
