"""What the commands say of one question: that it was heard, in the same words, and true to whoever reads it."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.studies.test_page import embedded
from tierplan.cli import main
from tierplan.planner.plan import PackPlan, Packs
from tierplan.sim.analysis.explain import Sensitivity
from tierplan.sim.output.text import format_frac, format_s
from tierplan.sim.workloads.models import load_workload
from tierplan.sim.workloads.workload import Training
from tierplan.studies import evaluate
from tierplan.studies.advice_text import advice_lines
from tierplan.studies.advise import advise
from tierplan.studies.answer import _decisions, answer_lines, limited_text, limits_note
from tierplan.studies.evaluate import best_plan, bounded_plan, predict_point
from tierplan.studies.study import Point

WORN = ["--model", "gpt-6.7b", "--machine", "desktop-4090", "--batch", "8"]


def test_policies_are_compared_for_drives_that_last(capsys: pytest.CaptureFixture[str]) -> None:
    """`plan`, `advise` and `sweep` were asked for that, and `compare-policies` listed plans that they leave out."""
    asked = ["compare-policies", *WORN, "--policies", "fuyou", "zero-infinity", "--json"]
    assert main(asked) == 0
    free = json.loads(capsys.readouterr().out)
    life_s = max(p["drive_lifetime_s"] for p in free.values())
    assert main([*asked, "--drive-lifetime-years", f"{2 * life_s / (365.25 * 86400):g}"]) == 3
    for p in json.loads(capsys.readouterr().out).values():
        assert not p["fits"]
        assert "years that were asked for" in p["why_not"]


def test_a_page_is_asked_for_drives_that_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And the commands that it names say the same: `simulate` knows of no lifetime."""
    asked = ["page", "-o", str(tmp_path / "p.html"), "--model", "gpt-6.7b", "--gpu", "rtx-4090", "--dram", "64"]
    asked += ["--drives", "1", "--method", "fuyou", "zero-offload", "--sequences", "8", "--workers", "1"]
    assert main([*asked, "--drive-lifetime-years", "3"]) == 0
    capsys.readouterr()
    page = (tmp_path / "p.html").read_text(encoding="utf-8")
    assert "Plans that wear drives out in less than 3 years are left out." in page
    rows = embedded(tmp_path / "p.html")["rows"]
    assert "of the 3 years that were asked for" in rows[0]["why"]
    for row in rows:
        words = shlex.split(row["command"])[1:]
        assert main([*words, "--json"]) == (0 if row["fits"] else 3)
        (told,) = json.loads(capsys.readouterr().out).values()
        assert (told["fits"], told["step_s"]) == (row["fits"], row.get("step_s"))


def test_of_equal_divisions_the_largest_micro_batch_is_named() -> None:
    """Where drives are all that counts, a system takes as long in any: `plan` said 2 x 2, `compare-policies` 1 x 4."""
    asked = Point(model="llama-3.2-1b", machine="laptop", policy="vertical", seq=512, sequences=4)
    found = predict_point(asked)
    each = {b: predict_point(replace(asked, sequences=0, batch=b, accumulation=4 // b)) for b in (1, 2, 4)}
    equal = [b for b, p in each.items() if p.fits and p.step_s == found.step_s]
    assert len(equal) > 1
    assert found.micro_batch == max(equal)


def test_no_schedule_in_any_division_is_below_the_bound_that_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 sequences on a 4090: "no schedule is quicker than 11.2 s" was of 2 x 8 alone, and that of 1 x 16 is 10.7."""
    asked = Point(model="llama-3.1-8b", machine="desktop-4090", sequences=16, planner_s=0.1)
    in_eights, one_by_one = (best_plan(replace(asked, sequences=0, batch=b, accumulation=16 // b)) for b in (8, 1))
    least_s = one_by_one.result.lower_bound_s
    raced = replace(in_eights, result=replace(in_eights.result, lower_bound_s=1.2 * least_s, status="within-gap"))
    monkeypatch.setattr(evaluate, "best_plan", lambda point, **more: raced)
    shown = bounded_plan(asked).result
    assert shown.step_s == raced.result.step_s
    assert shown.lower_bound_s <= least_s * (1 + 1e-6)
    assert shown.status == "searched", "nor is it as quick as any can be"
    bound = f"no schedule is quicker than {format_s(least_s)}: gap {format_frac(shown.gap)}"
    assert bound in " ".join(" ".join(answer_lines(bounded_plan(asked))).split())
    given = replace(asked, sequences=0)
    assert bounded_plan(given).result.lower_bound_s == raced.result.lower_bound_s, "which are given have their own"


def test_json_has_what_the_lines_say_of_units_and_stages(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--model", "gpt-0.1b", "--machine", "laptop", "--seq", "64", "--batch", "1", "--time-limit", "0.1"]
    assert main(["plan", *asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert main(["plan", *asked]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for unit in told["units"]:
        assert any(f"x params {unit['params']}, states {unit['states']}" in line for line in lines)
        assert unit["updated"] in ("device", "host")
    assert sum(unit["num"] for unit in told["units"]) == len(load_workload("gpt-0.1b", Training()).units)
    assert sum(told["activations"].values()) == pytest.approx(1.0)
    assert (told["packs"], told["divided"], told["uses_only"]) == (None, None, [])


def test_json_has_what_the_lines_say_of_stages() -> None:
    packs = Packs(form="resident", devices=2, forward=((0, 2),), backward=((0, 2), (2, 4)), kept=(1,))
    told = _decisions(SimpleNamespace(plan=PackPlan(policy="x", packs=packs)))  # type: ignore[arg-type]
    assert (told["units"], told["activations"], told["divided"], told["uses_only"]) == (None, None, None, None)
    assert json.loads(json.dumps(told["packs"])) == {
        "form": "resident", "forward": [[0, 2]], "backward": [[0, 2], [2, 4]], "kept": [1], "host_states": [],
        "updates_here": [],
    }  # fmt: skip


def test_what_limits_says_that_the_plan_stays_and_purchases_are_planned_anew() -> None:
    """A full host memory saved 0.4 % when "twice as good", above 128 GiB of DRAM at +98 %, with no word between."""
    point = Point(model="llama-3.2-1b", machine="laptop", seq=512, batch=4, planner_s=0.3)
    advice = advise(point, quick=True, num_workers=1)
    said = " ".join(" ".join(advice_lines(advice)).split())
    assert said.index("With the plan as it is") < said.index("what to buy")

    def limit(name: str, used: float) -> Sensitivity:
        return Sensitivity(
            name=name, kind="memory" if "memory" in name else "part", busy_frac=used, step_s=1.0, gain_frac=0.0
        )

    tried = [limit("nvme", 0.99), limit("gpu0 memory", 0.97), limit("host memory", 1.0), limit("nvme memory", 0.2)]
    assert limits_note(tried, "x") == (
        "With the plan as it is (it fills gpu0 and host, and has little use for more): one for a better machine may "
        "save far more, and x."
    )
    assert limits_note(tried[:1], "x") == "With the plan as it is: one for a better machine may save far more, and x."
    assert limited_text(tried).endswith("saves less than 1 %, with the plan as it is")


def test_purchases_that_gain_nothing_are_named() -> None:
    """Who asks whether to buy 64 GiB saw neither a row nor a word of them, once they had been planned."""
    point = Point(model="llama-3.2-1b", machine="laptop", seq=512, batch=4, planner_s=0.3)
    advice = advise(point, quick=True, num_workers=1)
    bought = [change.bought.what for change in advice.changes]
    told = advice.record()
    assert told["purchases_tried"] == len(bought) + len(advice.no_gain)
    assert told["purchases_without_gain"] == list(advice.no_gain)
    assert advice.no_gain
    assert bought
    said = " ".join(" ".join(advice_lines(advice)).split())
    assert f"Planned, and gains less than 1 %: {', '.join(advice.no_gain)}." in said


def test_a_sweep_says_why_scenarios_do_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its table said "no" beside drives that last 11 days, and `compare-policies` says why."""
    (tmp_path / "s.toml").write_text(
        '[scenario]\nmodel = "gpt-1.3b"\nmachine = "laptop"\npolicy = "fuyou"\nseq = [128, 256]\nbatch = 1\n'
        "drive_lifetime_years = 1\n"
    )
    assert main(["sweep", str(tmp_path / "s.toml"), "-o", str(tmp_path / "out"), "--workers", "1"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"[12] of 2 do not run: its drives last [\d.]+ days of the 1 year that was asked for", said)


def test_what_fits_and_wears_drives_is_not_made_to_fit_by_purchases() -> None:
    """Memory in which drives are not needed "makes it fit", said the row below "the drives do not last 5 years"."""
    point = Point(model="gpt-6.7b", machine="laptop", planner_s=0.5, drive_lifetime_years=5)
    advice = advise(point, quick=True, num_workers=1)
    assert advice.answer["wears_drives"]
    said = " ".join(" ".join(advice_lines(advice)).split())
    assert "No: the drives do not last 5 years" in said
    assert "make it fit" not in said
    assert "makes it fit" not in said
    assert " drives last " in said[said.index("what to buy") :]
