"""The page of predictions made by commands: a row that was run several times counts once."""

import json
from pathlib import Path

import pytest

from benchmarks import commands_campaign
from benchmarks.commands_campaign import Hour, page


def run_of(policy: str, measured_s: float, is_inside: bool = True) -> dict[str, object]:
    """One run of a row that was predicted to take a second."""
    error_frac = 1.0 / measured_s - 1.0
    return {
        "hour": "noon", "group": "gpt2", "policy": policy, "load": 1.0, "slowdown": 1.0, "interval_s": [0.9, 1.1],
        "step_s": {"predicted": 1.0, "measured": measured_s}, "step_error_frac": error_frac,
        "normalised_error_frac": error_frac / 2, "in_interval": is_inside,
    }  # fmt: skip


def test_a_row_of_several_runs_has_the_median_of_their_errors() -> None:
    runs = [run_of("fuyou", 1.25), run_of("in-memory", 0.5, False), run_of("fuyou", 2.0, False), run_of("fuyou", 1.0)]
    lines = page(runs).splitlines()
    figures = next(line for line in lines if line.startswith("| noon | 2 |"))
    # errors: fuyou -20 % (of 0, -20 and -50 %), in-memory +100 %
    assert [cell.strip() for cell in figures.split("|")[2:-1]] == [
        "2", "4", "4", "60.0 %", "100.0 %", "30.0 %", "50.0 %", "2 of 4",
    ]  # fmt: skip
    (fuyou,) = (line for line in lines if "| fuyou |" in line)
    assert "1 s, 1.25 s, 2 s" in fuyou
    assert "-20.0 %" in fuyou
    assert "-10.0 %" in fuyou


def test_a_row_without_an_answer_says_why() -> None:
    failed = {"hour": "noon", "group": "gpt2", "policy": "fuyou", "load": 1.0, "why_not": "no room"}
    assert "| gpt2 | fuyou | no room |" in page([failed]).partition("## Noon")[2]
    assert "| noon | 1 | 2 | 1 |" in page([failed, run_of("fuyou", 1.0)])


def test_each_row_has_a_plan_of_its_own_and_one_for_all_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[tuple[str, ...]] = []

    def tierplan(_: Hour, *words: object) -> str:
        said.append(tuple(map(str, words)))
        tiers = [{"peak_bytes": {"predicted": 1, "measured": 1}}]
        return json.dumps({"step_s": 1.0, "tiers": tiers, **dict.fromkeys(commands_campaign.KEPT)})

    monkeypatch.setattr(Hour, "tierplan", tierplan)
    hour = Hour(home=tmp_path, name="noon", results=tmp_path / "results.jsonl")
    for policy in ("fuyou", "in-memory", "fuyou", "zero-2 optimizer=host"):
        run = commands_campaign.run_row(hour, tmp_path / "gpt2.json", policy, [])
        assert "why_not" not in run
    planned = [words[words.index("-o") + 1] for words in said if words[0] == "simulate"]
    trained = [words[1] for words in said if words[0] == "run"]
    assert len({*planned}) == len(planned) == 3
    assert trained == [planned[0], planned[1], planned[0], planned[2]]
