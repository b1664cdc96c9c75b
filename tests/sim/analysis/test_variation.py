"""Drawn rates: the same seed gives the same result, and the spread of simple schedules is known in closed form."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.sim.test_schedule import op
from tests.toys import toy_machine, toy_workload, uniform_plan
from tierplan.hwmodels import load_machine
from tierplan.hwmodels.machine import Machine, Rate, SharedLimit, Stream
from tierplan.planner.lowering import lower
from tierplan.planner.plan import UnitPlan
from tierplan.sim.analysis.steady import steady_state
from tierplan.sim.analysis.variation import measured_spreads, vary
from tierplan.sim.schedule import Schedule


def chain(num_ops: int, seconds: float = 1.0) -> Schedule:
    return Schedule(
        name="chain", tiers=(), buffers=(), ops=tuple(op(f"o{i}", work={"s": seconds}) for i in range(num_ops))
    )


ONE = Machine(name="one", tiers=(), streams=(Stream(name="s", rates={"bytes": Rate.constant(1.0)}),))


def test_a_common_factor_scales_the_whole_step() -> None:
    found = vary(chain(10), ONE, rates={"s": 0.1}, num_samples=2000, num_steps=1, seed=3)
    assert found.nominal_s == 10.0
    assert np.mean(found.samples_s) == pytest.approx(10.0, rel=0.01)
    assert np.std(found.samples_s) == pytest.approx(1.0, rel=0.06)
    sigma = np.sqrt(np.log(1.01))
    assert found.low_s == pytest.approx(10 * np.exp(-(sigma**2) / 2 - 1.645 * sigma), rel=0.01)
    assert found.high_s == pytest.approx(10 * np.exp(-(sigma**2) / 2 + 1.645 * sigma), rel=0.01)
    assert found.low_s < found.median_s < found.high_s


def test_scatter_of_single_ops_evens_out_with_the_root_of_their_number() -> None:
    found = vary(chain(100), ONE, rates={}, ops=0.2, num_samples=500, num_steps=1)
    assert np.std(found.samples_s) / 100 == pytest.approx(0.2 / np.sqrt(100), rel=0.1)


def test_the_same_seed_gives_the_same_result_and_another_another() -> None:
    workload, machine = toy_workload(), toy_machine(shared=True)
    schedule = lower(uniform_plan(workload, UnitPlan(params="host", grads="host", states="nvme")), workload, machine)
    spreads = {"nvme.read": 0.05, "gpu0.compute": 0.02, "drive": 0.1}
    one, two = (vary(schedule, machine, rates=spreads, num_samples=8, seed=5) for _ in range(2))
    assert one == two
    other = vary(schedule, machine, rates=spreads, num_samples=8, seed=6)
    assert other.samples_s != one.samples_s
    assert other.nominal_s == one.nominal_s == pytest.approx(steady_state(schedule, machine).period_s, rel=0.02)
    assert "90 %" in str(one)


def test_a_limit_that_binds_varies_the_step() -> None:
    machine = replace(
        ONE,
        streams=(Stream(name="s", rates={"bytes": Rate.constant(1.0)}, takes={"bus": {"s": 1.0}}),),
        shared_limits=(SharedLimit(name="bus", limit=0.5),),
    )
    found = vary(chain(1), machine, rates={"bus": 0.2}, num_samples=500, num_steps=1)
    assert found.nominal_s == 2.0
    assert np.std(found.samples_s) == pytest.approx(0.4, rel=0.15)
    slow = vary(chain(1), machine, rates={"s": 0.2}, num_samples=200, num_steps=1)
    assert np.mean(slow.samples_s) == pytest.approx(2.0, rel=0.03), (
        "half speed of a slower stream needs less of the bus"
    )


def test_a_stream_that_fills_a_limit_alone_varies_to_both_sides() -> None:
    """Computation on the host's cores takes nearly all of them: on a quicker machine it is quicker all the same."""
    machine = replace(
        ONE,
        streams=(Stream(name="s", rates={"bytes": Rate.constant(1.0)}, takes={"cores": {"s": 0.97}}),),
        shared_limits=(SharedLimit(name="cores", limit=1.0),),
    )
    found = vary(chain(10), machine, rates={"s": 0.1}, num_samples=500, num_steps=1)
    assert found.low_s < 0.9 * found.nominal_s
    assert found.high_s > 1.1 * found.nominal_s


def test_spreads_are_read_from_the_description() -> None:
    described = {
        "summary": "text",
        "gpu.matmul_bf16": {"value": 1e14, "spread": 0.02},
        "gpu.elementwise": {"value": 1e12, "spread": 0.03},
        "link.h2d": {"value": 2e10, "spread": 0.01},
        "nvme.read": {"value": 1e9, "spread": 0.1},
        "nvme.write": {"value": 1e9},
        "host.memory_bandwidth": {"value": 1e11, "spread": 0.5},
    }
    machine = replace(toy_machine(), description=described)
    assert measured_spreads(machine) == {"gpu0.compute": 0.03, "gpu0.h2d": 0.01, "nvme.read": 0.1}
    with_dram = replace(machine, shared_limits=(SharedLimit(name="dram", limit=1e11),))
    assert measured_spreads(with_dram)["dram"] == 0.5
    slow_start = {**machine.description, "gpu.latency": {"value": 1e-5, "spread": 0.7}}
    assert measured_spreads(replace(machine, description=slow_start)) == measured_spreads(machine)


def test_the_spread_of_a_listed_limit_reaches_the_draws(tmp_path: Path) -> None:
    """Half the cores for two who want all of them: the step is as long as the limit says, and varies as it does."""
    described = """
name = "mine"
[gpu]
part = "rtx-4090"
[link]
h2d = "25 GB/s"
d2h = "25 GB/s"
[host]
capacity = "64 GiB"
adam = "700 M/s"
[nvme]
drives = 0
[[limit]]
name = "cores"
limit = 0.5
takes = { "gpu0.compute" = 1.0, "host.adam" = 1.0 }
spread = 0.2
basis = "measured"
source = "mixes"
"""
    (tmp_path / "mine.toml").write_text(described)
    machine = load_machine(str(tmp_path / "mine.toml"))
    assert measured_spreads(machine) == {"cores": 0.2}
    ops = (op("o", stream="gpu0.compute", work={"s": 1.0}),)
    found = vary(Schedule(name="one", tiers=(), buffers=(), ops=ops), machine, num_samples=500, num_steps=1)
    assert found.nominal_s == pytest.approx(2.0, rel=1e-3)
    assert np.std(found.samples_s) == pytest.approx(0.4, rel=0.15)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({}, "nothing varies: the description of machine 'one' states no spread"),
        ({"rates": {"gpu9": 0.1}}, "a spread is given for 'gpu9'; the machine has s"),
        ({"rates": {"s": -0.1}}, "the spread of 's' is -0.1"),
        ({"ops": {"s": float("nan")}}, "the spread of 's' is nan"),
        ({"ops": 0.1, "num_steps": 2}, "num_steps is 2; give 1, or 3 or more"),
        ({"ops": 0.1, "num_samples": 0}, "num_samples is 0; give 1 or more"),
    ],
)
def test_what_makes_no_sense_is_refused(more: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        vary(chain(1), ONE, **more)
