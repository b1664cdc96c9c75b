"""Advice: the arithmetic against hand calculation, what can be bought, and what is said when nothing fits."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.studies.test_costs import row
from tierplan.cli import main
from tierplan.hwmodels import load_description
from tierplan.hwmodels.catalog import load_part
from tierplan.planner.infeasible import InfeasiblePlan
from tierplan.sim.output.text import format_s
from tierplan.sim.workloads.models import load_workload
from tierplan.sim.workloads.workload import Training
from tierplan.studies.advice_text import advice_lines, write_advice
from tierplan.studies.advise import (
    Advice,
    _assumptions,
    advise,
    answer_point,
    largest_model_of,
    rental_of,
    worth_telling,
    worthwhile,
)
from tierplan.studies.evaluate import QUICK, BestPlan, best_plan, machine_of, most_tokens_per_s
from tierplan.studies.purchases import PriceList, Purchase, costs_of, purchases, worth_planning
from tierplan.studies.study import Point

CONFIG = {"model_type": "gpt2", "n_embd": 256, "n_layer": 3, "n_head": 4, "vocab_size": 1000, "n_positions": 256}
TIGHT = {"gpu.reserve": 0, "host.reserve": 0, "gpu.capacity": "30 MiB", "host.capacity": "20 MiB"}


@pytest.fixture(scope="module")
def point(tmp_path_factory: pytest.TempPathFactory) -> Point:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return Point(model=str(folder), machine="desktop-4090", batch=4, seq=256, overrides=TIGHT)


@pytest.fixture(scope="module")
def advice(point: Point) -> Advice:
    return advise(point, quick=True, num_workers=1)


def bought(what: str, price_usd: float) -> Purchase:
    return Purchase(what=what, overrides={}, price_usd=price_usd)


def test_a_rented_machine_is_not_compared_with_itself(point: Point) -> None:
    cloud = advise(replace(point, machine="cloud-h100", overrides={}), quick=True, num_workers=1)
    assert cloud.rented is None
    assert cloud.costs is not None
    said = " ".join(" ".join(advice_lines(cloud)).split())
    assert f"cost {cloud.costs.total_usd:,.2f} USD: rent" in said
    assert "or rented" not in said
    assert "electricity costs" not in said
    assert "cloud-h100 costs 2.95 USD an hour" in said


def test_a_job_is_at_least_one_step(advice: Advice) -> None:
    assert costs_of(row(1000.0), load_description("desktop-4090"), PriceList(), 10).seconds == 10.0
    rented = rental_of(row(1000.0), 10)
    assert rented is not None
    assert rented.seconds == 10.0
    assert advice.costs is not None
    one = replace(advice, costs=replace(advice.costs, tokens=10, seconds=advice.answer["step_s"]))
    said = " ".join(" ".join(advice_lines(one)).split())
    assert f"10 tokens {format_s(advice.answer['step_s'])} (one step, of 1,024), " in said
    assert "(one step" not in " ".join(advice_lines(advice))


def test_only_what_is_quicker_is_listed_most_per_price_first() -> None:
    things = [bought("slower", 10), bought("a bit", 10), bought("dear", 1000), bought("cheap", 100), bought("none", 1)]
    rows = [row(90.0), row(100.5), row(200.0), row(150.0), {"error": "has no bf16"}]
    changes = worthwhile(row(100.0), things, rows)
    assert [(c.bought.what, c.gain_frac) for c in changes] == [("cheap", 0.5), ("dear", 1.0)]
    assert changes[0].gain_per_1000_usd == pytest.approx(500.0)
    made_to_fit = worthwhile({"fits": False}, things[2:], rows[2:])
    assert [(c.bought.what, c.gain_frac) for c in made_to_fit] == [("cheap", None), ("dear", None)]


def test_a_purchase_without_an_answer_is_named(point: Point) -> None:
    """A GTX 1080 Ti has no bf16: it was said not to fit, and what failed later was not named at all."""
    slow = {"gpu.part": "rtx-3060", "gpu.capacity": "4 GiB", "gpu.peak_bf16": "1 TFLOP/s"}
    found = advise(replace(point, dtype="bf16", overrides=slow), quick=True, num_workers=1)
    assert "matmul_bf16" in found.no_answer["gtx-1080-ti"]
    said = " ".join(" ".join(advice_lines(found)).split())
    assert "No answer for gtx-1080-ti: stream 'gpu0.compute'" in said
    assert "gtx-1080-ti (" not in said


def test_drives_that_cost_nothing_are_bought_for_nothing() -> None:
    """The costs counted 0 USD, and another drive 180."""
    described = load_description("desktop-4090", ["nvme.price=0"])
    assert costs_of(row(1000.0, drive_lifetime_s=5e4), described, PriceList(), 1e8).drives_usd == 0
    more = [p for p in purchases(described, PriceList()) if "nvme.drives" in p.overrides]
    assert {p.price_usd for p in more} == {0}
    assert worth_planning(more, [10.0, 20.0], now=5.0) == [True, True]
    changes = worthwhile(row(100.0), [bought("dear", 1000), *more[:1]], [row(200.0), row(110.0)])
    assert [c.bought.price_usd for c in changes] == [0, 1000], "most gain per price first"


def test_what_shops_sell() -> None:
    desktop = {p.what: p for p in purchases(load_description("desktop-4090"), PriceList())}
    assert desktop["128 GiB DRAM (4 x 32)"].price_usd == pytest.approx(64 * 10.6)
    assert desktop["192 GiB DRAM (4 x 48)"].price_usd == pytest.approx(192 * 10.6)
    assert not any("96 GiB" in what for what in desktop), "it costs more than 128"
    assert desktop["1 more drive"].overrides == {"nvme.drives": 2}
    assert desktop["a second rtx-4090"].overrides["gpu.count"] == 2
    assert desktop["a second rtx-4090"].price_usd == 1599
    assert "rtx-3090" not in desktop, "it has the memory of a 4090 and half its speed"
    assert "rtx-5090" in desktop
    older = purchases(load_description("desktop-4090", ["gpu.part=gtx-1080-ti"]), PriceList())
    assert {p.overrides["gpu.part"] for p in older if "gpu.part" in p.overrides} >= {"rtx-3090", "rtx-4090"}
    laptop = purchases(load_description("laptop"), PriceList())
    assert laptop
    assert not any("gpu.part" in p.overrides for p in laptop)
    assert max(int(str(p.overrides.get("nvme.drives", 0))) for p in laptop) <= 2
    memory = next(p for p in laptop if p.what == "64 GiB DRAM (2 x 32)")
    assert memory.price_usd == pytest.approx(64 * 10.6), "modules of 16 GiB go"
    assert [p.machine for p in laptop if p.machine] == ["desktop-4090"]
    assert all(p.machine for p in purchases(load_description("cloud-h100"), PriceList())), "it is rented"
    drive_usd = load_description("desktop-4090").number("nvme.price") or PriceList().drive_usd
    assert next(p.price_usd for p in laptop if p.machine) == 1500 + 1599 + drive_usd


def test_another_card_has_its_own_numbers_and_not_those_that_were_set_for_the_one_that_is_there() -> None:
    now = Point(model="gpt2", machine="desktop-4090", overrides={"gpu.capacity": "12 GiB", "gpu.launch": "9 us"})
    card, module = (Purchase(what="", price_usd=1.0, overrides={k: v}) for k, v in (
        ("gpu.part", "rtx-5090"), ("host.capacity", "128 GiB"),
    ))  # fmt: skip
    assert card.applied(now).overrides == {"gpu.part": "rtx-5090", "gpu.launch": "9 us"}
    assert module.applied(now).overrides == {**now.overrides, "host.capacity": "128 GiB"}


def test_a_first_drive_is_for_sale(tmp_path: Path) -> None:
    """`laptop` without drives could train gpt-6.7b with one, and was advised to be another machine."""
    laptop = {p.what: p for p in purchases(load_description("laptop", ["nvme.drives=0"]), PriceList())}
    own_usd = load_description("laptop").number("nvme.price")
    assert (laptop["1 drive"].overrides, laptop["1 drive"].price_usd) == ({"nvme.drives": 1}, own_usd)
    assert laptop["2 drives"].overrides == {"nvme.drives": 2}
    text = (files("tierplan.hwmodels") / "catalog" / "machines" / "desktop-4090.toml").read_text(encoding="utf-8")
    path = tmp_path / "none.toml"
    path.write_text(text.partition("[nvme]")[0] + "[nvme]\ndrives = 0\n")
    none = {p.what: p for p in purchases(load_description(str(path)), PriceList())}
    with_one = none["1 drive"].applied(Point(model="gpt2", machine=str(path)))
    assert machine_of(with_one).tier("nvme").capacity_bytes == 2 * 10**12
    assert none["1 drive"].price_usd == load_part("nvme", "990-pro").number("nvme.price")


def test_purchases_for_a_machine_that_was_measured(tmp_path: Path) -> None:
    """`machine measure` writes rates as curves, of which the drives' was no number, and all advice ended there."""
    text = (files("tierplan.hwmodels") / "catalog" / "machines" / "desktop-4090.toml").read_text(encoding="utf-8")
    path = tmp_path / "measured.toml"
    path.write_text("".join(line for line in text.splitlines(True) if not line.startswith(("host_h2d", "p2p"))))
    curves = ["nvme.read=[[262144, 3e9], [4194304, 4e9]]", "link.h2d=[[1e6, 1e10], [1e8, 2e10]]"]
    measured = {p.what: p for p in purchases(load_description(str(path), curves), PriceList())}
    assert measured["1 more drive"].overrides == {"nvme.drives": 2}
    lanes = measured["a second rtx-4090"].overrides
    assert (lanes["link.host_h2d"], lanes["link.p2p"]) == ("20000000000.0 B/s", "10000000000.0 B/s")


def test_few_of_a_kind_are_planned_and_the_others_named(advice: Advice) -> None:
    def card(name: str, usd: float) -> Purchase:
        return Purchase(what=name, overrides={"gpu.part": name}, price_usd=usd)

    cards = [
        card("slow and dear", 500),
        card("cheap", 100),
        card("middle", 400),
        card("quickest", 900),
        card("none", 1),
    ]
    memory = Purchase(what="memory", overrides={"host.capacity": "1 GiB"}, price_usd=1)
    assert worth_planning([*cards, memory], [10, 10, 15, 30, 0, 5]) == [False, True, False, True, False, True]
    by_gain = worth_planning([*cards, memory], [10, 10, 15, 30, 0, 5], now=9.5)
    assert by_gain == [False, False, True, True, False, False], "the cheap one hardly gains, and memory nothing"
    text = " ".join(" ".join(advice_lines(replace(advice, left_out={"card": 0.0, "two": 1e9, "memory": 1.0}))).split())
    assert text.index("in all: two (+") < text.index("they gain nothing: card (does not fit), memory (-")
    planned = {change.bought.what for change in advice.changes}
    assert not planned & advice.left_out.keys()


def test_the_bound_of_a_purchase_is_not_below_its_plan(advice: Advice, point: Point) -> None:
    for answer, asked in (
        (advice.answer, point),
        *((change.answer, change.bought.applied(point)) for change in advice.changes),
    ):
        assert answer["tokens_per_s"] <= most_tokens_per_s(asked)


def test_what_is_bought_changes_the_question() -> None:
    asked = Point(model="gpt2", machine="laptop", batch=4, overrides={"nvme.drives": 1})
    more = Purchase(what="", overrides={"host.capacity": "64 GiB"}, price_usd=1)
    assert more.applied(asked) == replace(asked, overrides={"nvme.drives": 1, "host.capacity": "64 GiB"})
    other = replace(more, machine="desktop-4090", overrides={})
    assert other.applied(asked) == replace(asked, machine="desktop-4090", overrides={})
    of_file, without = (replace(asked, calibration=which) for which in ("mine.json", "none"))
    assert other.applied(of_file) == other.applied(asked), "that file is of the machine that is there"
    assert other.applied(without).calibration == "none"
    assert more.applied(of_file).calibration == "mine.json"


def test_what_is_rented_costs_hours_at_its_price(advice: Advice) -> None:
    assert advice.rented is not None
    assert advice.rented.usd == pytest.approx(advice.rented.seconds / 3600 * advice.rented.usd_per_hour)
    planned = answer_point(replace(advice.point, machine=advice.rented.machine, overrides={}))
    quickest_s = 1e9 / planned["tokens_per_s"]  # type: ignore[operator]
    assert advice.rented.seconds >= quickest_s * (1 - 1e-9), "a quick answer is at most as quick as plan's"
    text = " ".join(" ".join(advice_lines(advice)).split())
    assert "or rented" in text
    assert f"costs {advice.rented.usd_per_hour:g} USD an hour ({advice.rented.source}" in text


def test_a_quick_answer_is_a_lower_bound_and_says_so(advice: Advice, point: Point) -> None:
    assert advice.answer["tokens_per_s"] <= answer_point(point)["tokens_per_s"]  # type: ignore[operator]
    text = " ".join(" ".join(advice_lines(advice)).split())
    assert "Yes: at least " in text
    assert "finds a plan for this machine that is at least as quick" in text
    assert "further GPUs are not planned" in text
    assert f"rates {advice.answer['basis']}" in text, "as `plan` says"
    planned = {b.what for b in purchases(load_description(point.machine, point.settings), PriceList())
               if "gpu.count" not in b.overrides and b.what not in advice.left_out}  # fmt: skip
    assert planned, "nothing that shops sell is passed over in silence"
    assert all(what in text for what in planned)


def test_the_text_says_of_what_training_the_numbers_are_as_plan_does(advice: Advice) -> None:
    for numbers in ([], ["of training in 2 micro-batches of 2 sequences", "not of plain training: late"]):
        lines = advice_lines(replace(advice, answer={**advice.answer, "numbers": numbers}))
        rows = [" ".join(line.split()) for line in lines]
        assert [row for row in rows if row.startswith("numbers ")] == [f"numbers {text}" for text in numbers[:1]]
        assert {*numbers[1:]} <= {*rows}


def test_a_tier_that_holds_nothing_has_no_peak(advice: Advice) -> None:
    """`plan` leaves it out, too."""
    assert any(line.strip().startswith("peak memory") for line in advice_lines(advice))
    peaks = {**advice.answer["peak_bytes"], "host": 0}
    lines = advice_lines(replace(advice, answer={**advice.answer, "peak_bytes": peaks}))
    (peak,) = (line for line in lines if line.strip().startswith("peak memory"))
    assert "gpu0" in peak
    assert "host" not in peak


def test_prices_are_told_of_what_is_shown(advice: Advice) -> None:
    shown = {str(part) for c in advice.changes for part in c.bought.overrides.values()}
    told = {text.partition(" costs ")[0] for text in advice.assumptions if " costs " in text and "USD (" in text}
    assert told <= {*shown, "DRAM", "a drive", "cloud-h100"}


def test_drives_that_do_not_last_are_in_the_first_lines(advice: Advice) -> None:
    assert advice.costs is not None
    assert advice.costs.drive_life_s is not None
    weary = replace(advice, costs=replace(advice.costs, drive_life_s=5 * 86_400.0, wear_frac=3.0))
    assert "worn out after 5 days" in (said := " ".join(advice_lines(weary)[2:8]))
    assert "take 300 % of" in " ".join(said.split())
    short = replace(weary, costs=replace(weary.costs, wear_frac=0.00384))
    assert "take 0.384 % of" in " ".join(" ".join(advice_lines(short)).split()), "0 % were most of the cost"
    lasting = replace(advice, costs=replace(advice.costs, drive_life_s=1e10))
    assert "worn out" not in "\n".join(advice_lines(lasting))


def test_drives_of_unknown_endurance_are_said_to_be_so_wherever_they_are_written_to(
    advice: Advice, point: Point, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """They wore for nothing, and no text said so."""
    text, unknown = "not known (nvme.endurance)", {**TIGHT, "nvme.part": "nm800-pro"}
    found = advise(replace(point, overrides=unknown), quick=True, num_workers=1)
    said = " ".join(" ".join(advice_lines(found)).split())
    assert said.count(text) == 2, "beside the cost, and where it is assumed"
    assert text not in " ".join(" ".join(advice_lines(advice)).split())
    words = ["--model", point.model, "--machine", "desktop-4090", "--seq", "256"]
    sets = [word for key, value in unknown.items() for word in ("--set", f"{key}={value}")]
    roomy = [*sets, "--set", "host.capacity=64 MiB"]
    for command in (["simulate", "--policy", "fuyou", *roomy], ["plan", "--time-limit", "0.5", *sets]):
        assert main([*command, *words, "--batch", "4"]) == 0
        assert re.search(rf"drives last +{re.escape(text)}", capsys.readouterr().out)
    page = [
        *words,
        "--method",
        "fuyou",
        "--gpus",
        "1",
        "--sequences",
        "4",
        "--gpu",
        "rtx-4090",
        "--drives",
        "1",
        *roomy,
    ]
    assert main(["page", "-o", str(tmp_path / "p.html"), *page, "--workers", "1"]) == 0
    assert f'"lasts":"not known","life":"{text}"' in (tmp_path / "p.html").read_text(encoding="utf-8")


STICKER = Purchase(what="a sticker", overrides={"host.power": "151 W"}, price_usd=1.0)


@pytest.mark.parametrize("found_late", [False, True])
def test_what_this_machine_does_as_well_is_no_ground_for_a_purchase(
    point: Point, monkeypatch: pytest.MonkeyPatch, found_late: bool
) -> None:
    """A drive was the first thing to buy, for a plan that used none: purchases alone were asked in micro-batches of
    twice the size. A sticker on the case changes nothing that a plan can meet."""
    asked = replace(point, sequences=4)
    found = best_plan

    def poor(one: Point, **only: Any) -> BestPlan:
        if one.sequences:
            return found(replace(one, sequences=0, batch=1, accumulation=4))
        if found_late and one.overrides == asked.overrides:
            raise InfeasiblePlan(load_workload("gpt2", Training()), machine_of(one), ())
        return found(one, **only)

    before = poor(replace(asked, policy=QUICK, planner_s=2.0)).result.prediction.tokens_per_s or 0.0
    monkeypatch.setattr("tierplan.studies.advise.purchases", lambda d, p: [STICKER])
    monkeypatch.setattr("tierplan.studies.advise.best_plan", poor)
    advice = advise(asked, quick=True, num_workers=1)
    assert not advice.changes
    assert advice.answer["micro_batch"] > 1
    assert advice.answer["tokens_per_s"] > 1.01 * before
    assert advice.answer["gap"] >= 0


def test_what_does_not_fit_says_why_and_what_would(point: Point) -> None:
    small = replace(point, overrides={**TIGHT, "gpu.capacity": "1 MiB"})
    found = advise(small, quick=True, num_workers=1)
    assert not found.fits
    assert "device memory" in str(found.answer["reason"])
    text = " ".join(lines := advice_lines(found))
    assert ("", "") not in pairwise(lines)
    assert "No: it does not fit" in text
    assert "Device memory" not in text  # it is in the middle of a sentence
    assert found.record()["costs"] is None
    said = {name: found.record()[name] for name in ("policy", "dtype", "semantics")}
    assert said == {"policy": "planner", "dtype": "bf16", "semantics": "in-backward"}, "as where it fits"
    assert found.rented is not None
    assert re.search(r"1 B tokens +not on this machine +or rented .* USD, .* \(cloud-h100", text)


def test_the_cheapest_with_which_it_runs_is(point: Point, monkeypatch: pytest.MonkeyPatch) -> None:
    """A card of 8,565 USD was, where one of 1,999 has room: bounds of speed said that those with none give more for
    their price."""
    small = replace(point, overrides={**TIGHT, "gpu.capacity": "1 MiB"}, planner_s=0.5)
    sizes = {"1.1 MiB": 100, "1.2 MiB": 150, "1.3 MiB": 170, "30 MiB": 800, "40 MiB": 900, "60 MiB": 4000}
    cards = [
        Purchase(what=size, overrides={"gpu.capacity": size, "gpu.memory_bandwidth": f"{k + 10} GB/s"}, price_usd=usd)
        for k, (size, usd) in enumerate(sizes.items())
    ]
    monkeypatch.setattr("tierplan.studies.advise.purchases", lambda d, p: cards)
    found = advise(small, quick=True, num_workers=1)
    runs = [card.what for card in cards if answer_point(card.applied(small))["fits"]]
    assert runs == ["30 MiB", "40 MiB", "60 MiB"], "by `plan`, each by itself"
    assert {change.bought.what for change in found.changes} == {"30 MiB", "60 MiB"}
    text = " ".join(" ".join(advice_lines(found)).split())
    assert "The cheapest with which it runs is 30 MiB." in text
    assert found.left_out.keys() == {"40 MiB"}
    assert "or something of the kind that costs no more runs: 40 MiB (" in text
    assert found.num_tried == 5


def test_what_fits_and_wears_the_drives_is_not_said_not_to_fit(point: Point) -> None:
    asked = replace(point, drive_lifetime_years=500.0)
    found = advise(asked, quick=True, num_workers=1)
    assert not found.fits
    text = " ".join(" ".join(advice_lines(found)).split())
    assert "does not fit" not in text
    assert "No: the drives do not last 500 years" in text
    took = r"([\d.]+ h|[\d.]+ days|[\d.]+ min [\d.]+ s|[\d.]+ m?s)"
    assert re.search(rf"its step would have to take {took}\. By the bound, .* of less than {took};", text)
    assert "e+0" not in text


@pytest.mark.parametrize(
    ("machine", "changes", "largest", "larger"),
    [
        ("laptop", {}, "gpt-135b", "gpt-175b"),  # by a policy 30b
        pytest.param(  # by a policy 65b
            "desktop-4090", {"host.capacity": "32 GiB"}, "gpt-135b", "gpt-175b", marks=pytest.mark.nightly
        ),
        pytest.param("zero-offload-v100", {}, "gpt-100b", "gpt-135b", marks=pytest.mark.nightly),
        ("fsdp-qlora-2x4090", {}, "gpt-10b-zero-offload", "gpt-13b"),
        ("cloud-h100", {}, "gpt-276b", ""),
    ],
)
def test_the_largest_model_is_the_largest_that_plan_has_a_plan_for(
    machine: str, changes: dict[str, object], largest: str, larger: str
) -> None:
    """It was the largest by five of the published systems, a half or a third of that."""
    point = Point(model="gpt-0.1b", machine=machine, batch=4, seq=1024, overrides=changes)
    found = largest_model_of(point)
    assert (found["largest_model"], found["larger_model_may_fit"]) == (largest, not larger)
    one = replace(point, model=largest, batch=1, planner_s=0.5)
    assert answer_point(one)["fits"]
    assert not larger or not answer_point(replace(one, model=larger))["fits"]


def test_a_larger_model_that_no_bound_excludes_is_said_to_be_possible(
    advice: Advice,
) -> None:
    found = largest_model_of(Point(model="gpt-0.1b", machine="laptop", semantics="delayed-1"))
    assert (found["largest_model"], found["larger_model_may_fit"]) == ("gpt-2.7b", True)
    for may_fit in (False, True):
        told = replace(advice, largest_model="gpt-2.7b", larger_model_may_fit=may_fit)
        text = " ".join(" ".join(advice_lines(told)).split())
        assert ("one sequence at a time; none larger was found, and no bound excludes one" in text) == may_fit
        assert told.record()["larger_model_may_fit"] is may_fit
    assert advice.record()["larger_model_may_fit"] is None, "nobody looked"
    smaller, larger = ({"fits": True, "num_parameters": count} for count in (1e9, 140e9))
    assert worth_telling(found, smaller) == worth_telling(found, {"fits": False}) == "gpt-2.7b"
    assert not worth_telling(found, larger)


def test_unknown_machine_or_model_is_an_error() -> None:
    with pytest.raises(ValueError, match="no machine 'desktop-4091'"):
        advise(Point(model="gpt-6.7b", machine="desktop-4091"), quick=True, num_workers=1)
    with pytest.raises(ValueError, match="gpt-9b"):
        advise(Point(model="gpt-9b", machine="laptop"), quick=True, num_workers=1)


def test_a_card_that_idles_is_not_bought_again(point: Point, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("tierplan.studies.advise.purchases", lambda d, p: [
        b for b in purchases(d, p) if "second" in b.what and not asked.append(b.what)  # type: ignore[func-returns-value]
    ])  # fmt: skip
    monkeypatch.setattr("tierplan.studies.advise.largest_model_of", lambda point: {"largest_model": ""})
    of_two = replace(point, overrides={**TIGHT, "gpu.count": 2, "gpu.capacity": "1 MiB"}, devices=1)
    found = advise(of_two, num_workers=1)
    assert asked
    assert found.num_tried == 0
    assert any("GPUs that stand idle at 0 W" in text for text in found.assumptions)


def test_text_page_and_json_say_the_same(advice: Advice, tmp_path: Path) -> None:
    write_advice(tmp_path / "advice.html", advice)
    page = (tmp_path / "advice.html").read_text(encoding="utf-8").replace("&#x27;", "'")
    lines = advice_lines(advice)
    assert all(len(line) <= 80 for line in lines)
    record = json.loads(json.dumps(advice.record()))
    speed = f"{record['tokens_per_s']:,.0f} tokens/s"
    assert speed in lines[lines.index("") + 1]
    assert speed in page
    assert record["costs"] == asdict(advice.costs)  # type: ignore[call-overload]
    assert all(change.bought.what in page for change in advice.changes)
    for change in advice.changes:  # the bar of a gain stands behind it
        assert change.gain_frac is not None
        assert f'<td>{100 * change.gain_frac:+.0f} %</td><td class="bar">' in page


def test_a_short_search_that_the_clock_ended_is_no_ground_for_a_purchase(advice: Advice) -> None:
    """On a busy computer `advise --quick` said +355 % for a drive that gains a quarter: its base was no plan at all."""
    whole = replace(advice.point, policy="planner")
    for point, status in ((advice.point, "searched"), (advice.point, "time-limit"), (whole, "time-limit")):
        found = replace(advice, point=point, answer={**advice.answer, "status": status})
        said = point.policy == QUICK and status == "time-limit"
        assert ("The clock ended this short search" in "\n".join(advice_lines(found))) is said


@pytest.mark.parametrize("rent", [0, 5])
def test_a_power_that_nobody_knows_is_not_nothing(point: Point, tmp_path: Path, rent: int) -> None:
    """Drives were counted at 0 W, and rented GPUs too, without a word."""
    path = tmp_path / "own.toml"
    text = (files("tierplan.hwmodels") / "catalog" / "machines" / "desktop-4090.toml").read_text(encoding="utf-8")
    path.write_text(text.replace("[host]", f"[host]\nrent = {rent}"))
    asked = replace(point, machine=str(path), overrides=TIGHT)

    def powers(*settings: str, without: str = "") -> list[str]:
        own = load_description(str(path), settings)
        own = replace(own, part_values={name: q for name, q in own.part_values.items() if name != without})
        told = _assumptions(asked, own, PriceList(), [], is_life_unknown=False)
        return [text for text in told if "0 W" in text]

    nameplate, drives, host = powers()
    assert nameplate.startswith("energy is at nameplate power")
    assert drives == "the drives' power: not known, and counted as 0 W"
    assert host == "the machine without GPUs and drives takes 150 W"
    assert powers("nvme.drives=0") == [nameplate, host]
    assert powers("nvme.power=8", "host.power=99") == [nameplate]
    both = "the GPU's power, the drives' power: not known, and counted as 0 W"
    assert powers("host.power=99", without="gpu.power") == [nameplate, both]


def test_a_price_that_nobody_knows_is_not_nothing(advice: Advice) -> None:
    assert advice.costs is not None
    text = " ".join(advice_lines(replace(advice, costs=replace(advice.costs, machine_usd=None))))
    assert "machine of unknown price" in text
    described = load_description("laptop", ["nvme.price=100"])
    costs = costs_of(row(1.0), described, PriceList(), 1e6)
    assert costs.machine_usd is None
    assert costs.total_usd == costs.energy_usd + costs.drives_usd
