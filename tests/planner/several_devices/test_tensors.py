"""Operators that all devices share: what is kept, against all there is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planner.several_devices.test_stages import devices, simulator
from tierplan.planner.plan import UnitwisePlan
from tierplan.planner.planning import plan
from tierplan.planner.policies import decide
from tierplan.planner.search.incumbents import Incumbents
from tierplan.planner.several_devices.tensors import search_tensors
from tierplan.sim.workloads.models import load_workload
from tierplan.sim.workloads.workload import Training

MIB = 2**20


@pytest.mark.parametrize("mib", [1700, 1800, 1900, 2100])
def test_as_much_is_kept_as_fits(mib: int) -> None:
    """Of all plans whose last blocks keep all and those before them the products, hardly any is quicker; with more
    memory more is kept, in the end all."""
    whole = load_workload("gpt2-large", Training(per_device_train_batch_size=4, sequence_length=512))
    workload, machine = replace(whole, units=(*whole.units[:6], whole.units[-1])), devices(2, mib * MIB)
    simulate_plan, found = simulator(workload, machine), Incumbents("shared", 1, 1)
    search_tensors(found, simulate_plan, "in-backward", beat_s=float("inf"))
    ways = [decide("megatron-tp", workload, machine, {"checkpointing": way}) for way in ("on", "selective", "off")]
    again, products, kept = (way for way in ways if isinstance(way, UnitwisePlan))
    steps_s = [
        simulate_plan(
            replace(again, units=(*again.units[:first], *products.units[first:middle], *kept.units[middle:]))
        ).step_s
        for first in range(1, 7)
        for middle in range(first, 7)
    ]
    best_s = min((step_s for step_s in steps_s if step_s is not None), default=None)
    assert (found.best is None) == (mib == 1700)
    if found.best is not None:
        assert best_s is not None
        assert found.best.step_s is not None
        assert best_s <= found.best.step_s <= 1.03 * best_s
        assert (found.best.step_s == simulate_plan(kept).step_s) == (mib == 2100)


def test_the_planner_keeps_more_than_megatron() -> None:
    """One micro-batch, which no GPU has room for by itself."""
    workload, machine = load_workload("gpt2-large", Training(sequence_length=512)), devices(4, 5 * 1024 * MIB)
    found = plan(workload, machine, batches="shared", time_limit_s=1.0, by_clock=False)
    reached = found.policies["megatron-tp"].step_s
    assert reached is not None
    assert found.step_s < 0.9 * reached
