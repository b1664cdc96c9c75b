"""Single saved tensors are made again by their own operations: the same bits, and no operation more than they need."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.runtime.models import VOCABULARY, make_batches, make_model, observed_workload
from tests.runtime.test_trainer import CPU, machine
from tests.toys import uniform_plan
from tierplan.planner.lowering import lower
from tierplan.planner.plan import UnitPlan
from tierplan.planner.policies import decide
from tierplan.runtime.autograd.hooks import ModelHooks
from tierplan.runtime.autograd.micro_batch import MicroBatchRun
from tierplan.runtime.autograd.nests import batch_addresses
from tierplan.runtime.autograd.replay import Recipe
from tierplan.runtime.autograd.units import ModelError, ModelUnit, split_model
from tierplan.runtime.checkpoint.weights import hollow_model, random_weights
from tierplan.runtime.execution.device import Device
from tierplan.runtime.execution.placement import TrainingError
from tierplan.runtime.reference import loss_of, train_plainly, without_cache
from tierplan.runtime.tracing.trace import trace_module
from tierplan.runtime.trainer import Trainer, train
from tierplan.sim.step import Action, SavedTensorSpec, UnitSpec
from tierplan.sim.workloads.workload import Training


def spec_of(unit: ModelUnit, dropped: frozenset[int]) -> UnitSpec:
    actions: list[Action] = ["recompute" if k in dropped else "keep" for k in range(max(dropped, default=-1) + 1)]
    saved = tuple(SavedTensorSpec(size_bytes=1, action=action) for action in actions)
    return UnitSpec(name=unit.name, num_parameters=unit.num_trained, saved=saved)


def gradients(
    family: str, dropped: frozenset[int], *, dropout: float = 0.0, dtype: str = "fp32", repeats: int = 3
) -> tuple[list[list[torch.Tensor]], Recipe | None]:
    """Gradients of the middle block's parameters, by repetition, and its recipe if there is one."""
    model = make_model(family, dropout=dropout, dtype=dtype)
    torch.manual_seed(5)
    ids = torch.randint(0, VOCABULARY, (2, 16))
    batch = {"input_ids": ids, "labels": ids}
    changed = ExitStack()
    changed.enter_context(without_cache(model))
    units = split_model(model, batch)
    for unit in units:
        if unit.num_trained:
            flat = torch.cat([p.detach().reshape(-1) for _, p in unit.parameters])
            unit.bind(flat)
    hooks = ModelHooks(units)
    specs = [spec_of(unit, dropped if i == 2 else frozenset()) for i, unit in enumerate(units)]
    out = []
    for _ in range(repeats):
        batch_run = MicroBatchRun(
            hooks=hooks,
            units=units,
            specs=specs,
            forward=lambda: loss_of(model, batch, None),
            external=batch_addresses(batch, model.modules()),
            device=Device(),
            own=range(len(units)),
            seed=11,
        )
        for i in range(len(units)):
            batch_run.run_forward(i)
        for i in reversed(range(len(units))):
            if i == 2:
                batch_run.run_again(i)
            batch_run.run_backward(i)
        out.append([p.grad.clone() for _, p in units[2].parameters if p.grad is not None])
        model.zero_grad()
    return out, next(iter(hooks.recipes.values()), None)


@pytest.mark.sampled
@pytest.mark.parametrize("family", ["gpt2", "opt", "llama", "bert"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_each_slot_alone_and_all_together_are_the_same_bits(family: str, dtype: str) -> None:
    (plain, *_), _ = gradients(family, frozenset(), dtype=dtype, repeats=1)
    model = make_model(family, dtype=dtype)
    ids = torch.randint(0, VOCABULARY, (2, 16))
    workload = observed_workload(model, {"input_ids": ids, "labels": ids}, Training(dtype=dtype, sequence_length=16))  # type: ignore[arg-type]
    num_slots = len(workload.blocks[1].saved)
    sets = [frozenset({k}) for k in range(num_slots)]
    sets += [frozenset(pair) for pair in combinations(range(0, num_slots, 3), 2)]
    for dropped in (*sets, frozenset(range(num_slots))):
        found, recipe = gradients(family, dropped, dtype=dtype, repeats=2)
        assert recipe is not None, dropped
        for repetition in found:  # the first runs the block again, the second replays
            assert len(repetition) == len(plain)
            assert all(torch.equal(a, b) for a, b in zip(repetition, plain, strict=True)), dropped


def test_only_what_is_needed_is_replayed() -> None:
    """GPT-2's block: the product in GELU needs no matrix product; the attention's projection needs one."""
    matmuls = {}
    model = make_model("gpt2")
    ids = torch.randint(0, VOCABULARY, (2, 16))
    workload = observed_workload(model, {"input_ids": ids, "labels": ids}, Training(dtype="fp32", sequence_length=16))
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
    ids = torch.randint(0, VOCABULARY, (2, 16))
    training = Training(dtype="fp32", sequence_length=16, backend="cpu")
    saved = trace_module(model, {"input_ids": ids, "labels": ids}, training).blocks[1].saved
    replayable = [t.index for t in saved if t.replayable]
    assert 0 < len(replayable) < len(saved)
    for dropped in (*(frozenset({k}) for k in replayable), frozenset(replayable)):
        found, recipe = gradients("gpt2", dropped, dropout=0.2, repeats=2)
        assert recipe is not None, dropped
        for repetition in found:
            assert all(torch.equal(a, b) for a, b in zip(repetition, plain, strict=True)), dropped


def test_timed_replays_say_what_each_slot_takes() -> None:
    _, recipe = gradients("gpt2", frozenset({3, 10}), repeats=1)
    assert recipe is not None
    timed = replace(recipe, seconds={})
    timed._attribute([1.0] * len(recipe.calls))
    assert set(timed.seconds) == {3, 10}
    assert sum(sum(v) for v in timed.seconds.values()) == pytest.approx(len(recipe.calls))


class _Scaled(nn.Module):
    """A block whose forward depends on a number beside its input: given by position or by name, or set on it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.inner, self.way, self.scale = nn.Linear(16, 16), way, 0.0

    def forward(self, x: torch.Tensor, t: float = 0.0, *, a: object = None, b: object = None) -> torch.Tensor:
        by_name = 1.5 if a is not None else 0.5
        factor = {"number": t, "name": by_name, "attribute": self.scale}[self.way]
        return x + torch.tanh(self.inner(x) * factor)


class _OfScaled(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.layers = nn.ModuleList(_Scaled(way) for _ in range(2))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, t: float) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            layer.scale = t
            x = layer(x, t, **{"a" if int(t) % 2 else "b": x})
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("way", ["number", "name", "attribute"])
def test_what_a_block_is_told_beside_tensors_is_not_that_of_another_micro_batch(way: str, tmp_path: Path) -> None:
    batches = [{**batch, "t": 1.0 + k} for k, batch in enumerate(make_batches(4))]
    model = _OfScaled(way)
    plain = copy.deepcopy(model)
    workload = trace_module(copy.deepcopy(model), batches[0], CPU)
    schedule = lower(decide("full-recompute", workload, machine(), {}), workload, machine())
    result = train(schedule, model, batches, steps=4, nvme_dir=tmp_path)
    assert list(result.losses) == train_plainly(plain, batches, steps=4)


class _Branches(nn.Module):
    """A block, one branch of which is taken in every other micro-batch, or never."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.second, self.never = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor, t: int) -> torch.Tensor:
        x = x + torch.tanh(self.always(x))
        return x + self.second(x) if t % 2 else x


class _OfBranches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.layers = nn.ModuleList(_Branches() for _ in range(2))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, t: int) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, t)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize(("accumulation", "freezes"), [(1, True), (2, True), (2, False)])
def test_a_parameter_without_a_gradient_in_a_step_is_refused(accumulation: int, freezes: bool, tmp_path: Path) -> None:
    """Plain training leaves it as it is. One that a micro-batch of the step gives one is trained."""
    batches = [{**batch, "t": 1 + k} for k, batch in enumerate(make_batches(4))]
    model = _OfBranches()
    for layer in model.layers if freezes else ():
        layer.never.requires_grad_(False)  # type: ignore[union-attr]
    plain = copy.deepcopy(model)
    training = replace(CPU, gradient_accumulation_steps=accumulation)
    workload = trace_module(copy.deepcopy(model), batches[0], training)
    schedule = lower(decide("in-memory", workload, machine(), {}), workload, machine())
    if accumulation == 1 or not freezes:
        names = "'layers.0.never.bias'.*" if not freezes else "second.*in step 1"
        with pytest.raises(ModelError, match=rf"{names}: plain training leaves such parameters"):
            train(schedule, model, batches, steps=4 // accumulation, nvme_dir=tmp_path)
        return
    result = train(schedule, model, batches, steps=2, nvme_dir=tmp_path)
    assert list(result.losses) == train_plainly(plain, batches, steps=2, gradient_accumulation_steps=2)


class _Logging(_Scaled):
    """A block that computes something for its log, of which no gradient is wanted."""

    def forward(self, x: torch.Tensor, t: float = 0.0, *, a: object = None, b: object = None) -> torch.Tensor:
        self.log = torch.exp(x).mean().detach()
        return super().forward(x, 1.0)


@pytest.mark.parametrize("acts", ["host", "nvme", "recompute", "keep"])
def test_what_is_saved_on_a_branch_that_leads_nowhere_is_not_missed(acts: Action, tmp_path: Path) -> None:
    model = _OfScaled("number")
    model.layers = nn.ModuleList(_Logging("number") for _ in range(2))
    plain, batches = copy.deepcopy(model), [{**batch, "t": 1.0} for batch in make_batches(3)]
    workload = trace_module(copy.deepcopy(model), batches[0], CPU)
    schedule = lower(uniform_plan(workload, UnitPlan(acts=acts)), workload, machine())
    result = train(schedule, model, batches, steps=3, nvme_dir=tmp_path)
    assert list(result.losses) == train_plainly(plain, batches, steps=3)


class _Normed(_Scaled):
    """A block with running means, which are buffers that forward changes."""

    def __init__(self) -> None:
        super().__init__("number")
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor, t: float = 0.0, *, a: object = None, b: object = None) -> torch.Tensor:
        return super().forward(self.norm(x.flatten(0, 1)).view_as(x), t)


@pytest.mark.parametrize(
    ("acts", "out", "says"), [("keep", "", ""), ("recompute", "", "run again"), ("keep", "out", "are com")]
)
def test_buffers_that_forward_changes_are_refused_where_they_matter(
    acts: Action, out: str, says: str, tmp_path: Path
) -> None:
    model = _OfScaled("number")
    model.layers = nn.ModuleList(_Normed() for _ in range(2))
    plain, batches = copy.deepcopy(model), [{**batch, "t": 1.0} for batch in make_batches(3)]
    workload = trace_module(copy.deepcopy(model), batches[0], CPU)
    schedule = lower(uniform_plan(workload, UnitPlan(acts=acts)), workload, machine())
    more: dict[str, Any] = {"out_dir": tmp_path / "out"} if out else {}
    if says:
        with pytest.raises(TrainingError, match=rf"forward changes 'layers\.0\.norm\..*, but .* {says}"):
            train(schedule, model, batches, steps=3, nvme_dir=tmp_path, **more)
        return
    assert list(train(schedule, model, batches, steps=3, nvme_dir=tmp_path).losses) == train_plainly(
        plain, batches, steps=3
    )
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), plain.buffers(), strict=True))


def test_training_within_autocast_is_refused(tmp_path: Path) -> None:
    model, batches = make_model("gpt2"), make_batches(1)
    workload = observed_workload(model, batches[0], CPU)
    schedule = lower(uniform_plan(workload, UnitPlan()), workload, machine())
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TrainingError, match="within torch"):
        train(schedule, model, batches, steps=1, nvme_dir=tmp_path)


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
