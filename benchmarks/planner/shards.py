"""What it is worth that optimizer states travel in shards: gaps to the bound without and with them.

    python -m benchmarks.planner.shards

Scenarios of `benchmarks.planner.grid` with large units beside little host memory. Without shards the planner is the
same in all else. Takes ten seconds of computing for each line and column.
"""

from __future__ import annotations

from contextlib import ExitStack
from unittest import mock

from benchmarks.planner.grid import MACHINES, SEQUENCE, one_device
from tierplan.hwmodels import load_machine
from tierplan.planner.planning import plan
from tierplan.planner.results import PlanResult
from tierplan.sim.workloads.models import load_workload
from tierplan.sim.workloads.workload import Training

TIME_LIMIT_S = 10.0
SCENARIOS = (
    ("desktop 4090, 64 GB", "gpt-6.7b", 8),
    ("desktop 4090, 64 GB", "gpt-13b", 32),
    ("desktop 4090, 64 GB", "gpt-65b", 32),
    ("4090, 768 GB, 3 drives", "gpt-175b", 8),
)


def answer(label: str, model: str, batch: int, *, in_parts: bool) -> PlanResult:
    machine = one_device(load_machine(*MACHINES[label]))
    training = Training(per_device_train_batch_size=batch, sequence_length=SEQUENCE, dtype="bf16")
    with ExitStack() as stack:
        if not in_parts:
            for module in ("moves", "from_program"):
                stack.enter_context(mock.patch(f"tierplan.planner.search.{module}.with_shards", lambda plan, *_: plan))
        return plan(load_workload(model, training), machine, time_limit_s=TIME_LIMIT_S)


def main() -> None:
    print("| machine | model | batch | bound, s | whole, s | gap | in shards, s | gap | shards |")
    print("|---|---|---|---|---|---|---|---|---|")
    for label, model, batch in SCENARIOS:
        whole, split = (answer(label, model, batch, in_parts=in_parts) for in_parts in (False, True))
        shards = max(unit.state_shards for unit in split.plan.units)
        print(
            f"| {label} | {model} | {batch} | {split.lower_bound_s:.2f} | {whole.step_s:.2f} | "
            f"{whole.gap * 100:.1f} % | {split.step_s:.2f} | {split.gap * 100:.1f} % | {shards} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
