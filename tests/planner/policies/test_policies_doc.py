"""The how-to for policies is true: its example runs, and its table lists what there is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.toys import toy_machine, toy_workload
from tierplan.planner.policies import POLICIES
from tierplan.planner.prediction import predict_plan

PAGE = Path(__file__).parents[3] / "docs" / "policies.md"


def test_the_example_is_a_policy() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    plan = names["policy"](toy_workload(4), toy_machine(), {"ahead": "2"})
    found = predict_plan(plan, toy_workload(4), toy_machine())
    assert found.fits
    assert found.schedule is not None
    assert found.schedule.bytes_moved()["nvme.read"] > 0


def test_the_table_lists_all_policies() -> None:
    text = PAGE.read_text(encoding="utf-8")
    missing = [name for name in POLICIES if f"`{name}`" not in text]
    assert missing == [], "add a row for it to the table of docs/policies.md"
