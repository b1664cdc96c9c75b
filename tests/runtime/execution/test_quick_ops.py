"""Ops that take less time than to wake up a thread are done by the thread that lets them start."""

from __future__ import annotations

import copy
import threading
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.runtime.execution.test_executor import check_against_simulator
from tests.runtime.models import make_batches, make_model, observed_workload
from tests.runtime.test_trainer import CPU, machine
from tests.toys import uniform_plan
from tierplan.hwmodels.names import COMPUTE
from tierplan.planner.lowering import lower
from tierplan.planner.plan import UnitPlan
from tierplan.runtime.execution.executor import Executor
from tierplan.runtime.execution.instances import Call
from tierplan.runtime.execution.ops import Bodies
from tierplan.runtime.optim.adam import OptimizerSettings
from tierplan.runtime.reference import train_plainly
from tierplan.runtime.trainer import train
from tierplan.sim.schedule import Buffer, Op, Schedule, Tier, validate


def there_and_back(num: int) -> Schedule:
    """Ops of two streams that wait for each other in turns."""
    tier = Tier(name="t", capacity_bytes=num)
    buffers = tuple(Buffer(name=f"x{k}", tier="t", size_bytes=1, content="x", kind="x") for k in range(num))
    ops = tuple(
        Op(key=f"op{k}", stream="ab"[k % 2], kind="x", reads=(f"x{k - 1}",) if k else (), writes=(f"x{k}",))
        for k in range(num)
    )
    return validate(Schedule(name="there and back", tiers=(tier,), buffers=buffers, ops=ops))


@pytest.mark.parametrize("quick", ["", "b"])
def test_quick_ops_are_done_by_the_thread_that_lets_them_start(quick: str) -> None:
    """Nobody wakes up for them, but where their own thread is awake anyhow."""
    by: dict[str, list[str]] = {"a": [], "b": []}

    def body(call: Call) -> None:
        if (call.op.stream, call.step) == ("a", 0):
            time.sleep(0.02)  # until the thread of the other stream sleeps, on however busy a computer
        by[call.op.stream].append(threading.current_thread().name)

    executor = Executor(there_and_back(8), body, is_quick=lambda op: op.stream == quick)
    executor.run(1)
    assert set(by["a"]) == {"tierplan a"}
    assert by["b"].count("tierplan a") >= 3 * len(quick)
    assert set(by["b"]) <= {"tierplan b", "tierplan a"}
    assert bool(quick) or set(by["b"]) == {"tierplan b"}
    check_against_simulator(there_and_back(8), 1, executor)


def test_an_error_of_a_quick_op_names_it() -> None:
    def body(call: Call) -> None:
        time.sleep(0.02)
        if call.op.key == "op3":
            raise RuntimeError("no")

    executor = Executor(there_and_back(8), body, is_quick=lambda op: op.stream == "b")
    with pytest.raises(RuntimeError, match="no") as error:
        executor.run(2)
    assert error.value.__notes__ == ["in op 'op3' of step 0"]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("is_autocast", [False, True])
def test_what_a_model_sets_for_itself_does_not_reach_them(is_autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compute stream's thread does them in the midst of the model's forward."""
    model, batches = make_model("gpt2"), make_batches(6)
    kind = type(model)

    def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_autocast):
            return kind.forward(self, *args, **kwargs)

    model.__class__ = type(kind.__name__, (kind,), {"forward": forward})
    training = replace(CPU, gradient_accumulation_steps=2, max_grad_norm=0.5)
    workload = observed_workload(model, batches[0], training)
    plan = UnitPlan(params="host", grads="host", states="host", acts="host", input="host")
    schedule = lower(uniform_plan(workload, plan, semantics="exact-clip"), workload, machine())
    settings, plain = OptimizerSettings(lr=1e-2), copy.deepcopy(model)
    more = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5}
    losses = train_plainly(plain, batches, steps=3, optimizer=settings, **more)
    done, do = list[tuple[str, str, bool]](), Bodies.__call__

    def spied(self: Bodies, call: Call) -> None:
        if call.op.stream != COMPUTE:
            done.append((call.op.kind, threading.current_thread().name, torch.is_autocast_enabled("cpu")))
        do(self, call)

    monkeypatch.setattr(Bodies, "__call__", spied)
    result = train(schedule, model, batches, steps=3, optimizer=settings)
    assert result.losses == tuple(losses)
    there = {kind for kind, name, _ in done if name == f"tierplan {COMPUTE}"}
    assert there >= {"copy", "norm", "clip", "update"}
    assert not any(in_autocast for _, _, in_autocast in done)
