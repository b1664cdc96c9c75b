"""Advice: the arithmetic against hand calculation, and the answers for a machine and model that are known."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tierplan.hwmodels import load_description
from tierplan.studies.advice_text import advice_lines, write_advice
from tierplan.studies.advise import SECONDS_PER_YEAR, Advice, PriceList, _purchases, advise
from tierplan.studies.evaluate import evaluate_point
from tierplan.studies.study import Point

POLICIES = ("in-memory", "fuyou")


@pytest.fixture(scope="module")
def advice() -> Advice:
    with ThreadPoolExecutor(2) as threads:
        return advise("gpt-6.7b", "desktop-4090", batches=(1, 16), policies=POLICIES, planner_s=0, executor=threads)


def test_model_that_needs_the_drive_trains_with_fuyou_alone(advice: Advice) -> None:
    assert advice.fits
    assert advice.best["policy"] == "fuyou"
    assert advice.best["batch"] == 16
    assert {(r["policy"], r["fits"]) for r in advice.rows} == {("in-memory", False), ("fuyou", True)}


def test_time_and_lifetime_are_those_of_the_best_step(advice: Advice) -> None:
    best = advice.best
    seconds = 1e9 / best["tokens_per_s"]
    assert advice.days_per_billion_tokens == pytest.approx(seconds / 86_400)
    assert best["tokens_per_s"] == pytest.approx(16 * 1024 / best["step_s"])
    assert advice.written_bytes_per_step == best["bytes.nvme.write"]
    # a 990 PRO of 2 TB is rated for 1200 TB
    assert advice.drive_life_years == pytest.approx(
        1200e12 / best["bytes.nvme.write"] * best["step_s"] / SECONDS_PER_YEAR
    )


def test_cost_is_electricity_depreciation_and_wear(advice: Advice) -> None:
    prices, description = PriceList(), load_description("desktop-4090")
    seconds = 1e9 / advice.best["tokens_per_s"]
    watts = 450 + (description.number("host.power") or prices.host_power_w) + (description.number("nvme.power") or 0)
    electricity = watts / 1000 * seconds / 3600 * prices.electricity_usd_per_kwh
    owned = (1599 + 1500) * seconds / (3 * SECONDS_PER_YEAR)
    assert advice.drive_life_years is not None
    worn = prices.drive_usd * seconds / (min(advice.drive_life_years, 3) * SECONDS_PER_YEAR)
    assert advice.usd_per_billion_tokens == pytest.approx(electricity + owned + worn)


def test_another_drive_helps_where_the_drive_is_the_limit(advice: Advice) -> None:
    assert str(advice.best["bound_by"]).startswith("nvme")
    drives = next(c for c in advice.changes if c.what.startswith("2 drives"))
    assert drives.gain_frac is not None
    assert drives.gain_frac > 0.2
    assert drives.gain_per_1000_usd == pytest.approx(drives.gain_frac * 100 / 160 * 1000)
    gains = [c.gain_per_1000_usd or 0.0 for c in advice.changes if c.fits]
    assert gains == sorted(gains, reverse=True)


def test_a_gpu_that_is_in_nothing_better_is_not_offered() -> None:
    """A 3090 has the memory of a 4090 and half its speed; for a 1080 Ti it would be a gain in all figures."""
    own = [what for what, _, _ in _purchases(load_description("desktop-4090"), PriceList())]
    assert not any("GPU" in what for what in own)
    older = load_description("desktop-4090", ["gpu.part=gtx-1080-ti"])
    assert {what for what, _, _ in _purchases(older, PriceList()) if "GPU" in what} == {
        "rtx-3090 as GPU",
        "rtx-4090 as GPU",
    }


def test_nothing_is_simulated_whose_answer_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """In-memory training does not fit one sequence, so it is not tried with more, nor with a second drive."""
    asked: list[Point] = []

    def noted(point: Point) -> dict[str, object]:
        asked.append(point)
        return evaluate_point(point)

    monkeypatch.setattr("tierplan.studies.evaluate.evaluate_point", noted)
    found = advise("gpt-6.7b", "desktop-4090", batches=(1, 16), policies=POLICIES, planner_s=0)
    mine = [p for p in asked if p.model == "gpt-6.7b"]
    assert [p.batch for p in mine if p.policy == "in-memory" and not p.overrides] == [1]
    assert {p.policy for p in mine if set(p.overrides) == {"nvme.drives"}} == {"fuyou"}
    assert {p.policy for p in asked if p.model != "gpt-6.7b"} == {"fuyou"}
    everything = {
        m: evaluate_point(Point(model=m, machine="desktop-4090", policy="fuyou")) for m in ("gpt-135b", "gpt-175b")
    }
    assert [bool(row["fits"]) for row in everything.values()] == [True, False]
    assert found.largest_model == "gpt-135b"


def test_what_does_not_fit_says_why_and_what_would() -> None:
    found = advise("gpt-6.7b", "desktop-4090", batches=(1,), policies=("in-memory",), planner_s=0, num_workers=1)
    assert not found.fits
    assert "gpu0" in found.why_not["in-memory"]
    lines = advice_lines(found)
    assert lines[2].startswith("No: it does not fit")
    assert "GiB in tier 'gpu0'" in lines[4]
    assert "held by" not in "".join(lines)
    assert found.largest_model == ""


def test_the_planner_is_asked_at_the_best_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that fits anyway: quick to plan, and nothing beats keeping it in memory."""
    monkeypatch.setattr("tierplan.studies.advise._purchases", lambda description, prices: [])
    found = advise(
        "gpt-6.7b",
        "desktop-4090",
        overrides={"gpu.capacity": "200 GiB"},
        batches=(1,),
        policies=("in-memory",),
        planner_s=0.5,
        num_workers=1,
    )
    planned = next(r for r in found.rows if r["policy"] == "planner")
    in_memory = next(r for r in found.rows if r["policy"] == "in-memory")
    assert planned["batch"] == 1
    assert planned["step_s"] <= in_memory["step_s"] * 1.001


def test_unknown_machine_or_model_is_an_error() -> None:
    with pytest.raises(ValueError, match="no machine 'desktop-4091'"):
        advise("gpt-6.7b", "desktop-4091", policies=("in-memory",), planner_s=0, num_workers=1)
    with pytest.raises(ValueError, match="gpt-9b"):
        advise("gpt-9b", "desktop-4090", batches=(1,), policies=("in-memory",), planner_s=0, num_workers=1)


def test_text_page_and_json_say_the_same(advice: Advice, tmp_path: Path) -> None:
    write_advice(tmp_path / "advice.html", advice)
    page = (tmp_path / "advice.html").read_text(encoding="utf-8")
    lines = advice_lines(advice)
    assert lines[2] in page.replace("&#x27;", "'")
    assert all(f"Assumed: {a}." in lines for a in advice.assumptions)
    record = json.loads(json.dumps(advice.record()))
    assert record["best"]["step_s"] == advice.best["step_s"]
    assert record["changes"][0]["gain_per_1000_usd"] == advice.changes[0].gain_per_1000_usd
