"""What planning gives, copied, and sent to another process."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest

from tests.toys import MIB, toy_machine, toy_workload
from tierplan.hwmodels import load_machine
from tierplan.planner.planning import plan
from tierplan.planner.prediction import predict


@pytest.mark.parametrize("num_devices", [1, 2])
def test_what_planning_gives_can_be_sent_to_another_process(num_devices: int) -> None:
    workload = toy_workload(4)
    result = plan(workload, load_machine("server-8xh100", [f"gpu.count={num_devices}"]), time_limit_s=1)
    again = pickle.loads(pickle.dumps(result))
    for same in (again, copy.copy(result), copy.deepcopy(result)):
        assert same == result
    assert replace(again, lower_bound_s=result.lower_bound_s / 2) != result
    assert again.policies == result.policies
    assert again.rows() == result.rows()
    assert again.prediction.record() == result.prediction.record()
    assert (again.schedule, again.steady.trace) == (result.schedule, result.steady.trace)
    assert pickle.loads(pickle.dumps(again)).rows() == result.rows()


def test_a_prediction_that_does_not_fit_can_be_sent_to_another_process() -> None:
    found = predict("in-memory", toy_workload(4), toy_machine(device_bytes=MIB))
    assert pickle.loads(pickle.dumps(found)).record() == found.record()
    assert found.shortage is not None
