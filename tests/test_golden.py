"""Schedules, step times, peaks and losses are those of `tests/golden/golden.json`, to the last bit.

Where a change is meant to alter them: `python -m tests.golden.regenerate`, and the diff says what it altered.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tierplan as tp
from tests.golden import results
from tests.golden.scenarios import SCENARIOS, run
from tests.golden.trainings import TRAININGS

GOLDEN: dict[str, Any] = json.loads(results.GOLDEN_FILE.read_text(encoding="utf-8"))


def test_the_file_has_all_scenarios_and_no_others() -> None:
    assert list(GOLDEN["results"]) == results.names()


@pytest.mark.parametrize("name", results.names())
def test_results_are_as_they_were(name: str, tmp_path: Path) -> None:
    then, now = GOLDEN["environment"], results.environment()
    if name in TRAININGS and (then["cpu"], then["torch"]) != (now["cpu"], now["torch"]):
        pytest.skip(f"losses are those of torch {then['torch']} on {then['cpu']}; here: {now['torch']}, {now['cpu']}")
    if changed := results.differences(name, GOLDEN["results"][name], results.compute(name, tmp_path)):
        others = [f"made with {key} {then[key]}, here {now[key]}" for key in now if then.get(key) != now[key]]
        pytest.fail("\n".join([*changed, *others]), pytrace=False)


# ---- the comparison itself ----


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> tp.Schedule:
    return run(SCENARIOS["zero-infinity gpt2"], tmp_path_factory.mktemp("golden")).schedule


def test_whatever_an_executor_looks_at_changes_the_hash(schedule: tp.Schedule) -> None:
    op, buffer, tier = schedule.ops[5], schedule.buffers[5], schedule.tiers[0]
    others = [
        replace(schedule, ops=(*schedule.ops[:5], changed, *schedule.ops[6:]))
        for changed in (
            replace(op, stream="elsewhere"),
            replace(op, work={kind: amount * (1 + 1e-15) for kind, amount in op.work.items()}),
            replace(op, after=("x",)),
            replace(op, reads=(*op.reads, "x")),
        )
    ]
    others += [
        replace(schedule, ops=schedule.ops[::-1]),
        replace(schedule, buffers=(*schedule.buffers[:5], replace(buffer, size_bytes=1), *schedule.buffers[6:])),
        replace(schedule, tiers=(replace(tier, capacity_bytes=1), *schedule.tiers[1:])),
    ]
    assert len({results.digest(one) for one in (schedule, *others)}) == 1 + len(others)


def test_a_renamed_kind_is_declared_in_one_place(schedule: tp.Schedule) -> None:
    """A word that was renamed throughout gives the old hash once the new word is known to be the old one."""
    ops = tuple(
        replace(
            op,
            kind=op.kind.replace("update", "renew"),
            key=op.key.replace("update/", "renew/"),
            after=tuple(key.replace("update/", "renew/") for key in op.after),
        )
        for op in schedule.ops
    )
    renamed = replace(schedule, ops=ops)
    assert results.digest(renamed) != results.digest(schedule)
    assert results.digest(renamed, {**results.RENAMED, "renew": "update"}) == results.digest(schedule)


def test_a_difference_names_the_scenario_and_both_values() -> None:
    old = {"schedule": "a", "step_ns": 1, "peaks": {"gpu0": 5}}
    assert results.differences("s", old, dict(old)) == []
    [one] = results.differences("s", old, {**old, "step_ns": 2})
    assert one == "s: step_ns changed\n    old 1\n    new 2"
