"""Mistakes that only a GPU would show, planted into the runtime one by one: the fake device finds each of them.

Each is a change of one line of the code as it stands, found by its text, so that it is still the line that it was.
"""

from __future__ import annotations

import copy
import inspect
import textwrap
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.runtime.models import make_batches, make_model, observed_workload
from tests.runtime.test_trainer import CPU, machine
from tests.toys import uniform_plan
from tierplan.planner.lowering import lower
from tierplan.planner.plan import UnitPlan
from tierplan.runtime.autograd.saved import AbsentError
from tierplan.runtime.execution.computing import Computing
from tierplan.runtime.execution.executor import Executor
from tierplan.runtime.execution.fake_device import FakeCuda, PlaceError, RaceError
from tierplan.runtime.execution.instances import Instance, Unrolling
from tierplan.runtime.execution.ops import Bodies
from tierplan.runtime.execution.placement import TrainingError
from tierplan.runtime.execution.rules import Rules
from tierplan.runtime.execution.values import SizeError
from tierplan.runtime.memory.arena import Pool
from tierplan.runtime.optim.adam import OptimizerSettings
from tierplan.runtime.reference import train_plainly
from tierplan.runtime.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS = 3
LATENESS_S = (0.001, 0.2)
"""By the parity of the seed. An op that ended long ago, and of which the host knows nothing, shows other mistakes."""
ON_HOST = UnitPlan(params="host", grads="host", states="host", acts="host", input="host")
RACES: dict[str, tuple[Any, str, str, str]] = {
    "streams do not wait for each other": (
        Executor, "_wait_on_device", "self.device.wait_for(stream, earlier.ended)", "pass",
    ),
    "the event is recorded before the work": (
        Executor, "_note_issued", "node.ended = self.device.record(stream)", "node.ended = node.begun",
    ),
    "the host goes on when an op is issued": (
        Rules, "issue", "if later.op.stream in self.streams_ahead", "if True",
    ),
    "memory that another stream reads is private": (
        Unrolling, "_private_to", "return own if", "return own if True or",
    ),
    "blocks of a pool are given back when an op is issued": (
        Instance, "is_dead_to_its_stream", "self.private_to is not None and self.outside_bytes > 0", "True",
    ),
    "fetched memory is not lent to the stream that frees it": (
        Bodies, "_bring_back", "self.device.lend(arrived, COMPUTE)", "pass",
    ),
    "work is not put on its stream": (
        Bodies, "__call__", "self.device.on(call.op.stream)", "self.device.on('nvme.read')",
    ),
    "a loss is read when its forward is issued": (
        Computing, "_end_forward", "[*call.at_end, lambda: self.on_loss(step, m, loss.item())]",
        "call.at_end or self.on_loss(step, m, loss.item()) or ()",
    ),
    "an op uses the copy that is on its way out": (
        Computing, "_bind", "value.handle.use(value)", "value.handle._at or value.handle.use(value)",
    ),
    "memory stays pinned when a run is over": (Pool, "close", "self.release(pages)", "pass"),
    "memory is unpinned while it is copied": (Bodies, "close", "self.device.settle()", "pass"),
}  # fmt: skip


def plant(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, old: str, new: str) -> None:
    own = inspect.getattr_static(owner, name)
    source = textwrap.dedent(inspect.getsource(own.fget if isinstance(own, property) else own))
    assert source.count(old) >= 1
    space: dict[str, Any] = {}
    exec(source.replace(old, new), vars(inspect.getmodule(owner)), space)  # type: ignore[arg-type]
    monkeypatch.setattr(owner, name, space[name])


def train_twice(seed: int, *, stops: bool = False) -> None:
    """Two runs in one process, with every kind of op that crosses streams; raises where not all is as it should be."""
    training = replace(CPU, gradient_accumulation_steps=2, max_grad_norm=0.5)
    model, batches = make_model("gpt2", num_blocks=2), make_batches(2 * STEPS)
    workload = observed_workload(model, batches[0], training)
    first, *others = uniform_plan(workload, ON_HOST, semantics="exact-clip").units
    choices = (first, replace(others[0], acts="keep", input="keep", grads="device"), *others[1:])
    plan = replace(uniform_plan(workload, ON_HOST, semantics="exact-clip"), units=choices)
    schedule = lower(plan, workload, machine())
    plain = copy.deepcopy(model)
    settings = OptimizerSettings(lr=1e-2)
    losses = train_plainly(
        plain, batches, steps=STEPS, optimizer=settings, gradient_accumulation_steps=2, max_grad_norm=0.5
    )
    device = FakeCuda(seed, lateness_s=LATENESS_S[seed % 2])
    for _ in range(2):
        here = copy.deepcopy(model)
        with Trainer(schedule, here, optimizer=settings, device=device) as trainer:
            if stops:
                with pytest.raises(TrainingError, match="batches ended"):
                    trainer.run(batches[:3], STEPS)
                continue
            trainer.run(batches, STEPS)
            trainer.restore_model()
            assert trainer.result().losses == tuple(losses)
        for (name, a), (_, b) in zip(here.named_parameters(), plain.named_parameters(), strict=True):
            assert torch.equal(a, b), name
    assert device.races == []
    assert device.pinned_bytes == 0


def train_until_found(*, stops: bool) -> None:
    for seed in range(60):  # nearly all show in the first two, most with little lateness
        train_twice(seed ^ 1, stops=stops)


BY_LUCK = "an op uses the copy that is on its way out"
"""Found after one to dozens of runs, which takes up to a minute."""


@pytest.mark.parametrize(
    "race",
    [None, *(r for r in RACES if r != BY_LUCK), pytest.param(BY_LUCK, marks=pytest.mark.nightly)],
)
def test_planted_races_are_found(race: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    stops = race == "memory is unpinned while it is copied"
    if race is None:
        for seed in range(2):
            train_twice(seed)
        train_twice(0, stops=True)
        return
    plant(monkeypatch, *RACES[race])
    found = RaceError, PlaceError, AbsentError, MemoryError, AssertionError, SizeError
    with pytest.raises(found):  # whichever comes first
        train_until_found(stops=stops)
