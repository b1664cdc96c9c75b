"""What it is worth that optimizer states travel in shards: gaps to the bound without and with them.

    python -m benchmarks.planner.shards

Scenarios of `benchmarks.planner.grid` with large units beside little host memory. Without shards the planner is the
same in all else. Takes ten seconds of computing for each line and column.
"""

from __future__ import annotations

from contextlib import ExitStack
from unittest import mock

from benchmarks.planner.grid import MACHINES, question
from tierplan.planner.plan import UnitwisePlan
from tierplan.planner.planning import plan
from tierplan.planner.results import PlanResult
from tierplan.sim.output.text import markdown_table

TIME_LIMIT_S = 10.0
SCENARIOS = (
    ("desktop 4090, 64 GB", "gpt-6.7b", 8),
    ("desktop 4090, 64 GB", "gpt-13b", 32),
    ("desktop 4090, 64 GB", "gpt-65b", 32),
    ("4090, 768 GB, 3 drives", "gpt-175b", 8),
)


def answer(label: str, model: str, batch: int, *, in_parts: bool) -> PlanResult:
    with ExitStack() as stack:
        if not in_parts:
            for module in ("local.moves", "from_program"):
                stack.enter_context(mock.patch(f"tierplan.planner.search.{module}.with_shards", lambda plan, *_: plan))
        return plan(*question(*MACHINES[label], model, batch), time_limit_s=TIME_LIMIT_S)


def main() -> None:
    head = ("machine", "model", "batch", "bound, s", "whole, s", "gap", "in shards, s", "gap", "shards")
    rows = []
    for label, model, batch in SCENARIOS:
        whole, split = (answer(label, model, batch, in_parts=in_parts) for in_parts in (False, True))
        found = [cell for r in (whole, split) for cell in (f"{r.step_s:.2f}", f"{100 * r.gap:.1f} %")]
        assert isinstance(split.plan, UnitwisePlan), "one device has plans of units"
        shards = max(unit.state_shards for unit in split.plan.units)
        rows.append((label, model, str(batch), f"{split.lower_bound_s:.2f}", *found, str(shards)))
    print("\n".join(markdown_table(head, rows, right=range(2, 9))))


if __name__ == "__main__":
    main()
