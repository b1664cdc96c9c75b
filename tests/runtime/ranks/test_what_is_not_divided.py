"""What ranks cannot share is refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.runtime.models import make_batches, make_model, observed_workload
from tests.runtime.ranks.test_ranks import Case, several
from tests.runtime.test_trainer import CPU
from tierplan.planner.lowering import lower
from tierplan.runtime.execution.executable import executable_step
from tierplan.runtime.execution.placement import TrainingError


def test_states_that_are_not_alike_for_all_values_are_not_divided() -> None:
    model = make_model("gpt2", num_blocks=2)
    workload = observed_workload(model, make_batches(1)[0], CPU)
    plan = Case("zero-infinity").plan(workload, 2)
    coded = replace(workload, training=replace(workload.training, optimizer="adamw:states=8bit"))
    what = "has states of adamw:states=8bit, not alike for all values, on 2 devices, which is simulated only; plan for"
    with pytest.raises(TrainingError, match=what):
        executable_step(lower(plan, coded, several(2)), 1, 2)


def test_frozen_parameters_are_not_divided() -> None:
    model = make_model("gpt2", num_blocks=2)
    model.transformer.wte.weight.requires_grad_(False)  # type: ignore[union-attr,operator]
    workload = observed_workload(model, make_batches(1)[0], CPU)
    divided, whole = (lower(Case(name).plan(workload, 2), workload, several(2)) for name in ("zero-3", "zero-2"))
    with pytest.raises(TrainingError, match=r"a device's share of frozen parameters, .* Take policy ddp or zero-2"):
        executable_step(divided, 1, 2)
    assert executable_step(whole, 1, 2) is not None
