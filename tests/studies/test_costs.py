"""What a job costs, on a machine that is bought or rented: against hand calculation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tierplan.hwmodels import load_description
from tierplan.hwmodels.machine import MachineError
from tierplan.planner.questions.endurance import SECONDS_PER_YEAR
from tierplan.studies.purchases import PriceList, costs_of, priced, purchases
from tierplan.studies.study import Point


def row(tokens_per_s: float, **figures: object) -> dict[str, Any]:
    return {
        "fits": True,
        "step_s": 10.0,
        "tokens_per_s": tokens_per_s,
        "drive_lifetime_s": None,
        "devices": 1,
        **figures,
    }


def test_costs_are_electricity_depreciation_and_wear() -> None:
    prices, description = PriceList(), load_description("desktop-4090")
    costs = costs_of(row(1000.0, drive_lifetime_s=5e4), description, prices, 1e8)
    assert costs.seconds == 1e5
    watts = 450 + 150 + (description.number("nvme.power") or 0)
    assert costs.energy_kwh == pytest.approx(watts / 1000 * 1e5 / 3600)
    assert costs.machine_usd == pytest.approx((1599 + 1500) * 1e5 / (3 * SECONDS_PER_YEAR))
    assert costs.wear_frac == 2.0
    drive_usd = description.number("nvme.price") or prices.drive_usd
    assert costs.drives_usd == 2 * drive_usd
    unworn = costs_of(row(1000.0), description, prices, 1e8)
    assert unworn.drives_usd == pytest.approx(drive_usd * 1e5 / (3 * SECONDS_PER_YEAR))
    assert unworn.wear_frac is None


def test_a_machine_has_one_price_and_one_energy_however_many_gpus_are_asked_for() -> None:
    """With --devices 1, one of two GPUs was not owned, and without it, both took their power."""
    both = Point(model="gpt2", machine="desktop-4090", overrides={"gpu.count": 2})
    alike = [
        costs_of(row(1000.0), priced(replace(both, devices=devices), PriceList()), PriceList(), 1e8)
        for devices in (None, 1, 2)
    ]
    assert alike[0] == alike[1] == alike[2]
    drive_usd = load_description("desktop-4090").number("nvme.price")
    assert alike[0].machine_price_usd == 1500 + 2 * 1599 + drive_usd  # type: ignore[operator]
    drives_w = load_description("desktop-4090").number("nvme.power") or 0.0
    assert alike[0].energy_kwh == pytest.approx((450 + 150 + drives_w) / 1000 * 1e5 / 3600)
    three = priced(replace(both, devices=3), PriceList())
    assert three.number("gpu.count") == 3, "those that the answer needs"


def test_a_rented_machine_costs_the_rent_of_its_hours_and_nothing_else() -> None:
    cloud = load_description("cloud-h100")
    costs = costs_of(row(1000.0, drive_lifetime_s=5e4), cloud, PriceList(), 3.6e7)
    assert costs.total_usd == pytest.approx(10 * 2.95)
    assert costs.texts == {"cost": "29.50 USD", "rent": "29.50 USD"}
    assert (costs.energy_usd, costs.machine_usd, costs.drives_usd, costs.machine_price_usd) == (0, None, 0, None)
    assert costs.energy_kwh > 0
    with_prices = load_description("cloud-h100", ["gpu.price=20000", "host.price=5000"])
    assert costs_of(row(1000.0), with_prices, PriceList(), 3.6e7).total_usd == pytest.approx(10 * 2.95)
    owned = costs_of(row(1000.0), load_description("cloud-h100", ["host.rent=0"]), PriceList(), 3.6e7)
    assert owned.energy_usd > 0
    assert owned.rent_usd is None


RENTED_TWICE = """name = "two-rented"
[gpu]
part = "h100-sxm-80gb"
count = 2
[link]
h2d = "54.8 GB/s"
d2h = "46.8 GB/s"
p2p = "100 GB/s"
[host]
capacity = "250 GB"
memory_bandwidth = "60.8 GB/s"
adam = "1 G/s"
rent = 6
"""


@pytest.mark.parametrize(
    "changes",
    [
        {"overrides": {"gpu.count": 8}}, {"devices": 2}, {"overrides": {"gpu.part": "l4"}},
        {"overrides": {"host.capacity": "512 GiB"}}, {"overrides": {"nvme.drives": 4}},
        {"overrides": {"gpu.count": 2, "host.rent": 6}, "devices": 4},
    ],
)  # fmt: skip
def test_a_rented_machine_is_rented_as_it_is(changes: dict[str, Any]) -> None:
    """Eight GPUs had the rent of one, and the job cost an eighth."""
    name = next((key for key in changes.get("overrides", {}) if "devices" not in changes), "gpu.count")
    with pytest.raises(MachineError, match=f"'cloud-h100' is rented as it is, at .* USD an hour: {name} is "):
        priced(Point(model="gpt2", machine="cloud-h100", **changes), PriceList())


def test_fewer_gpus_than_a_rented_machine_has_cost_its_whole_rent(tmp_path: Path) -> None:
    path = tmp_path / "two.toml"
    path.write_text(RENTED_TWICE)
    for changes in ({}, {"devices": 1}, {"overrides": {"gpu.count": 1}}, {"overrides": {"gpu.part": "h100-sxm-80gb"}}):
        described = priced(Point(model="gpt2", machine=str(path), **changes), PriceList())
        assert costs_of(row(1000.0), described, PriceList(), 3.6e7).total_usd == pytest.approx(10 * 6)
    for rent, overrides in ((50.0, {"gpu.count": 8}), (0.0, {"gpu.part": "l4"})):
        described = priced(Point(model="", machine=str(path), overrides={**overrides, "host.rent": rent}), PriceList())
        assert described.number("host.rent") == rent, "who says the rent of such a machine has it"


def test_parts_of_the_costs_add_up_as_they_are_shown() -> None:
    for tokens in (1e5, 1.23e7, 4.56e8, 7.89e10):
        texts = dict(costs_of(row(1000.0), load_description("desktop-4090"), PriceList(), tokens).texts)
        whole, *parts = (float(text.removesuffix(" USD").replace(",", "")) for text in texts.values())
        assert whole == pytest.approx(sum(parts), abs=1e-9)
        assert len(parts) == 3


@pytest.mark.parametrize(("machine", "has_cards"), [("dgx-8xa100-80gb", False), ("roundpipe-8x4090", True)])
def test_no_card_is_bought_for_the_sockets_of_modules(machine: str, has_cards: bool) -> None:
    found = purchases(load_description(machine), PriceList())
    assert any("gpu.part" in bought.overrides for bought in found) == has_cards
