"""Single saved tensors are made again by their own operations: the same bits, and no operation more than they need."""

from __future__ import annotations

import copy
import random
import time
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tests.runtime.models import (
    VOCABULARY,
    OwnModel,
    bind_all,
    make_batches,
    make_model,
    micro_batch,
    observed_workload,
    schedule_for,
)
from tests.runtime.test_trainer import CPU, machine
from tests.toys import uniform_plan
from tierplan.hwmodels.names import COMPUTE
from tierplan.planner.lowering import lower
from tierplan.planner.plan import UnitPlan
from tierplan.runtime.autograd.hooks import ModelHooks
from tierplan.runtime.autograd.replay import Recipe
from tierplan.runtime.autograd.units import ModelError, ModelUnit, split_model
from tierplan.runtime.checkpoint.weights import hollow_model, random_weights
from tierplan.runtime.execution.device import Device, Event
from tierplan.runtime.reference import same_weights, train_plainly, without_cache
from tierplan.runtime.tracing.trace import trace_module
from tierplan.runtime.trainer import Trainer, train
from tierplan.sim.step import Action, SavedTensorSpec, UnitSpec
from tierplan.sim.workloads.workload import Training


def spec_of(unit: ModelUnit, dropped: frozenset[int]) -> UnitSpec:
    actions: list[Action] = ["recompute" if k in dropped else "keep" for k in range(max(dropped, default=-1) + 1)]
    saved = tuple(SavedTensorSpec(size_bytes=1, action=action) for action in actions)
    return UnitSpec(name=unit.name, num_parameters=unit.num_trained, saved=saved)


def gradients(
    family: str,
    dropped: frozenset[int],
    *,
    dropout: float = 0.0,
    dtype: str = "fp32",
    repeats: int = 3,
    timed_on: Device | None = None,
) -> tuple[list[list[torch.Tensor]], Recipe | None]:
    """Gradients of the middle block's parameters, by repetition, and its recipe if there is one."""
    model = make_model(family, dropout=dropout, dtype=dtype)
    (batch,) = make_batches(1)
    changed = ExitStack()
    changed.enter_context(without_cache(model))
    units = split_model(model, batch)
    bind_all(units)
    hooks = ModelHooks(model, units, are_replays_timed=timed_on is not None)
    specs = [spec_of(unit, dropped if i == 2 else frozenset()) for i, unit in enumerate(units)]
    out = []
    for _ in range(repeats):
        batch_run = micro_batch(model, batch, units, hooks, specs=specs, device=timed_on or Device(), seed=11)
        for i in range(len(units)):
            batch_run.run_forward(i)
        for i in reversed(range(len(units))):
            if i == 2 and dropped:
                batch_run.run_again(i)
            batch_run.run_backward(i)
        out.append([p.grad.clone() for _, p in units[2].parameters if p.grad is not None])
        model.zero_grad()
    return out, next((recipe for _, recipe in hooks.recipes.values()), None)


@pytest.mark.sampled
@pytest.mark.parametrize("family", ["gpt2", "opt", "llama", "bert"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_each_slot_alone_and_all_together_are_the_same_bits(family: str, dtype: str) -> None:
    (plain, *_), _ = gradients(family, frozenset(), dtype=dtype, repeats=1)
    model = make_model(family, dtype=dtype)
    workload = observed_workload(model, make_batches(1)[0], Training(dtype=dtype, sequence_length=16))  # type: ignore[arg-type]
    num_slots = len(workload.blocks[1].saved)
    sets = [frozenset({k}) for k in range(num_slots)]
    sets += [frozenset(pair) for pair in combinations(range(0, num_slots, 3), 2)]
    for dropped in (*sets, frozenset(range(num_slots))):
        found, recipe = gradients(family, dropped, dtype=dtype, repeats=2)
        assert recipe is not None, dropped
        for repetition in found:  # the first runs the block again, the second replays
            assert len(repetition) == len(plain)
            assert all(torch.equal(a, b) for a, b in zip(repetition, plain, strict=True)), dropped


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_what_is_made_again_together_runs_each_operation_once(family: str) -> None:
    """And costs no more: attention makes four tensors (two here), several tensors come from one norm."""
    block = trace_module(make_model(family), make_batches(1)[0], CPU).blocks[1]
    of_attention = next(c.tensors for c in block.common if any("attention" in kind for kind in c.work))
    assert len(of_attention) > 1
    draw = random.Random(7)
    sets = [frozenset(draw.sample(range(len(block.saved)), num)) for num in (2, 4, 6, 9, len(block.saved) - 1)]
    for dropped in (frozenset(of_attention), *sets):
        counted, recipe = replayed(family, dropped)
        work = block.work_again(dropped)
        assert work.get("matmul_fp32_flops", 0) == counted
        num = sum("attention" in call.func._schema.name for call in recipe.calls)  # which the counter does not know
        assert work.get("attention_fp32_flops", 0) == num * block.forward["attention_fp32_flops"]
        assert all(amount <= block.forward[kind] for kind, amount in work.items())


def replayed(family: str, dropped: frozenset[int]) -> tuple[int, Recipe]:
    """Operations of matrix products in a replay, by PyTorch's counter, and what is replayed."""
    counted = {}
    for tensors in (frozenset[int](), dropped):
        for num in (1, 2):  # the first run is another one
            with FlopCounterMode(display=False) as counter:
                _, recipe = gradients(family, tensors, repeats=num)
            counted[len(tensors), num] = counter.get_total_flops()
    assert recipe is not None
    with_them, without = (counted[num, 2] - counted[num, 1] for num in (len(dropped), 0))
    return with_them - without, recipe


def test_only_what_is_needed_is_replayed() -> None:
    """GPT-2's block: the product in GELU needs no matrix product; the attention's projection needs one."""
    matmuls = {}
    model = make_model("gpt2")
    workload = observed_workload(model, make_batches(1)[0], Training(dtype="fp32", sequence_length=16))
    num_slots = len(workload.blocks[1].saved)
    for k in range(num_slots):
        _, recipe = gradients("gpt2", frozenset({k}), repeats=1)
        matmuls[k] = sum("addmm" in str(call.func) for call in recipe.calls)
    assert set(matmuls.values()) == {0, 1}
    assert list(matmuls.values()).count(0) > num_slots / 2
    _, recipe = gradients("gpt2", frozenset(range(num_slots)), repeats=1)
    assert sum("addmm" in str(call.func) for call in recipe.calls) == 3  # qkv, its projection, the first of the MLP


def test_dropout_is_run_again_and_still_the_same_bits() -> None:
    (plain, *_), _ = gradients("gpt2", frozenset(), dropout=0.2, repeats=1)  # range(30): all that it saves
    found, recipe = gradients("gpt2", frozenset(range(30)), dropout=0.2)
    assert recipe is None
    for repetition in found:
        assert all(torch.equal(a, b) for a, b in zip(repetition, plain, strict=True))


def test_beside_dropout_what_needs_no_random_numbers_is_replayed() -> None:
    """Attention's dropout mask is divided in place before it is saved: replays start from what it became."""
    (plain, *_), _ = gradients("gpt2", frozenset(), dropout=0.2, repeats=1)
    model = make_model("gpt2", dropout=0.2)
    training = Training(dtype="fp32", sequence_length=16, backend="cpu")
    saved = trace_module(model, make_batches(1)[0], training).blocks[1].saved
    replayable = [t.index for t in saved if t.replayable]
    assert 0 < len(replayable) < len(saved)
    for dropped in (*(frozenset({k}) for k in replayable), frozenset(replayable)):
        found, recipe = gradients("gpt2", dropped, dropout=0.2, repeats=2)
        assert recipe is not None, dropped
        for repetition in found:
            assert all(torch.equal(a, b) for a, b in zip(repetition, plain, strict=True)), dropped


class LateDevice(Device):
    """Returns at once; by its events each operation takes a second more than the one before."""

    is_asynchronous = True

    def __init__(self) -> None:
        super().__init__()
        self.num_recorded = self.num_awaited = 0

    def record(self, stream: str) -> Event:
        assert stream == COMPUTE
        self.num_recorded += 1
        return LateEvent(self, self.num_recorded)


@dataclass
class LateEvent:
    device: LateDevice
    number: int

    def wait(self) -> None:
        self.device.num_awaited = self.number

    def time_ns(self) -> int:
        assert self.number <= self.device.num_awaited
        return sum(range(self.number)) * 10**9


def test_timed_replays_say_what_each_slot_takes_on_the_device() -> None:
    """Launching says nothing of it: events between the operations do, and nothing waits for them meanwhile."""
    device = LateDevice()
    _, recipe = gradients("gpt2", frozenset({3, 10}), repeats=3, timed_on=device)
    assert recipe is not None
    num_calls = len(recipe.calls)
    assert (device.num_recorded, device.num_awaited) == (2 * (num_calls + 1), 0)
    found = recipe.seconds()
    assert set(found) == {3, 10}
    first = sum(range(1, num_calls + 1))
    assert [sum(times) for times in zip(*found.values(), strict=True)] == [first, first + num_calls * (num_calls + 1)]
    makes_10 = [
        k + 1 for k, call in enumerate(recipe.calls) if 10 in map(recipe.target.get, filter(None, call.results))
    ]
    assert found[10][0] >= sum(makes_10) > 0


def test_timed_replays_say_what_each_slot_takes_on_the_cpu() -> None:
    began_s = time.perf_counter()
    _, recipe = gradients("gpt2", frozenset({3, 10}), repeats=3, timed_on=Device())
    assert recipe is not None
    found = recipe.seconds()
    assert {index: len(times) for index, times in found.items()} == {3: 2, 10: 2}
    assert 0 < sum(map(sum, found.values())) < time.perf_counter() - began_s


def test_recomputations_are_replayed_where_weights_came_late(tmp_path: Path) -> None:
    """What initialises weights marks the modules, which is no reason to run blocks again."""
    hollow = hollow_model({**make_model("gpt2").config.to_dict(), "architectures": ["GPT2LMHeadModel"]}, CPU)  # type: ignore[union-attr, operator]
    workload = observed_workload(make_model("gpt2"), make_batches(1)[0], CPU)
    schedule = lower(uniform_plan(workload, UnitPlan(acts="recompute")), workload, machine())
    with Trainer(
        schedule, hollow, nvme_dir=tmp_path, weights=random_weights(hollow, seed=1), time_replays=True
    ) as trainer:
        trainer.run(make_batches(3), 3)
        assert trainer.replay_seconds().keys() == {unit.name for unit in workload.blocks}


class _Gated(nn.Module):
    """A block with a gate, of which no gradient is wanted: what its graph saves is gone when forward ends."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.inner(x)
        return torch.exp(torch.tanh(inner).detach() + inner) * x


class _OfGated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(VOCABULARY, 12), nn.Linear(12, VOCABULARY)
        self.layers = nn.ModuleList(_Gated() for _ in range(2))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.table(input_ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.out(x).flatten(0, 1), labels.flatten())


def test_what_would_start_from_a_tensor_that_is_gone_is_run_again() -> None:
    model, batches = _OfGated(), make_batches(3)
    plain, workload = copy.deepcopy(model), trace_module(model, batches[0], CPU)
    gate, product = workload.units[1].saved
    assert product.needs == (gate.index,)
    schedule = lower(uniform_plan(workload, UnitPlan(acts=("keep", "recompute"))), workload, machine())
    assert list(train(schedule, model, batches, steps=3).losses) == train_plainly(plain, batches, steps=3)
    assert same_weights(model, plain)


class _Draws(nn.Module):
    """A block with a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.generator = nn.Linear(16, 16), torch.Generator().manual_seed(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x) * torch.rand(x.shape, generator=self.generator))


def test_a_block_with_a_generator_of_its_own_is_not_run_again() -> None:
    """It would draw other numbers than in its forward; where it runs once, it has those of plain training."""
    model, batches = OwnModel([_Draws()]), make_batches(2)
    kept, again = (schedule_for(model, UnitPlan(acts=acts), traced=batches[0]) for acts in ("keep", "recompute"))
    plain = OwnModel([_Draws()])
    plain.load_state_dict(model.state_dict())
    assert list(train(kept, model, batches, steps=2).losses) == train_plainly(plain, batches, steps=2)
    assert same_weights(model, plain)
    with pytest.raises(ModelError, match=r"'L0' has a torch\.Generator of its own"):
        train(again, model, batches, steps=2)
