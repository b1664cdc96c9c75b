"""Steps of packs whose moments differ from step to step: the step time of a long run, and what is said of it."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest

from tierplan.planner.prediction import predict
from tierplan.sim.compiled.simulation import simulate_columns
from tierplan.studies.answer import prediction_text
from tierplan.studies.evaluate import machine_of, workload_at
from tierplan.studies.study import Point


@pytest.mark.parametrize(
    ("devices", "batch", "accumulation", "cycle_steps"), [(7, 2, 7, 14), (7, 1, 14, 0), (3, 1, 6, 1), (4, 1, 4, 1)]
)
def test_the_step_is_that_of_a_long_run(devices: int, batch: int, accumulation: int, cycle_steps: int) -> None:
    """Some repeat when they have gone around twice. Those that are not found to repeat say so."""
    point = Point(model="gpt2", machine="server-8xh100", batch=batch, accumulation=accumulation, devices=devices)
    machine = machine_of(point)
    found = predict("roundpipe", workload_at(point, machine), machine)
    assert found.columns is not None
    assert found.steady is not None
    num_steps, begin, end = 70, 27, 55  # 28 steps: of cycles of 1, 2, 4, 7 and 14 steps a whole number
    ends_ns = simulate_columns(found.columns.unrolled(num_steps), machine).end_ns.reshape(num_steps, -1).max(axis=1)
    done_s = np.maximum.accumulate(ends_ns) / 1e9
    rel = 1e-5 if cycle_steps else 1e-3
    assert found.step_s == pytest.approx((done_s[end] - done_s[begin]) / (end - begin), rel=rel)
    assert found.steady.cycle_steps == cycle_steps
    assert sum(asdict(found.phases).values()) == pytest.approx(found.step_s)  # type: ignore[call-overload]
    note = None if cycle_steps else f"a mean of {found.steady.mean_steps} steps that do not repeat exactly"
    assert found.record()["step_note"] == note
    assert ("do not repeat exactly" in prediction_text(found)) == (note is not None)
