"""A stage of a pipeline leads the model there without numbers; what its blocks are given is that of plain training."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.runtime.models import VOCABULARY, bind_all, make_batches, make_model, micro_batch
from tests.runtime.ranks.test_ranks import several
from tests.runtime.test_trainer import CPU
from tierplan.planner.plan_rules import PlanError
from tierplan.planner.policies import decide
from tierplan.runtime.autograd.hooks import ModelHooks
from tierplan.runtime.autograd.units import ModelError, split_model
from tierplan.runtime.execution.device import Device
from tierplan.runtime.reference import loss_of, without_cache
from tierplan.runtime.tracing.trace import trace_module


class _Told(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop, self.num_calls, self.counts = nn.Linear(8, 8), nn.Dropout(0.2), 0, False

    def forward(self, x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        self.num_calls += self.counts
        return x + self.drop(torch.tanh(self.inner(x))) * m


class _Mixed(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.inner, self.way = nn.Linear(8, 8), way

    def forward(self, x: Any, more: Any) -> Any:
        if self.way == "tuple":
            x, more = x
        elif self.way == "dictionary" and "first" in more:
            x = x + more["first"]
        y = x + torch.tanh(self.inner(x))
        match self.way:
            case "tuple":
                return y, more + y.mean()
            case "list":
                more.append(y.mean())
            case "dictionary":
                more.setdefault("first", torch.sin(y))
            case "mask":
                return y * (more.pop() if more else 1), more.append((y.detach() > 0).float())
        return y


class _OfMixed(nn.Module):
    """Its blocks hand on more than one tensor: in a tuple, or in a list or dictionary that they fill."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.embed, self.head, self.way = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY), way
        self.layers = nn.ModuleList(_Mixed(way) for _ in range(4))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x, more = self.embed(input_ids), {} if self.way == "dictionary" else []
        x = (x, x.mean()) if self.way == "tuple" else x
        for layer in self.layers:
            x = layer(x, more)
            x = x[0] if self.way == "mask" else x
        x, beside = x if self.way == "tuple" else (x, sum(more) if self.way == "list" else 0)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()) + 0.1 * beside


class _Teller(nn.Module):
    """Gives its blocks a tensor beside activations, or uses one behind them."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.embed, self.drop, self.way = nn.Embedding(VOCABULARY, 8), nn.Dropout(0.1), way
        self.layers, self.head = nn.ModuleList(_Told() for _ in range(4)), nn.Linear(8, VOCABULARY)

    def told(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        match self.way:
            case "random numbers" | "random numbers each time" | "random numbers between blocks":
                return (torch.rand(*ids.shape, 1) > 0.3).float()
            case "the batch":
                return (ids % 3 != 0).float()[..., None]
            case "shapes":
                return torch.ones_like(x) * 0.5
            case "a comparison" | "a number behind the blocks":
                return 1 + 0.5 * (self.embed.weight.detach().mean() > -1).float()
            case "a mean":
                return 1 + self.embed.weight.detach().mean()
            case "activations":
                return torch.zeros(ids.shape).copy_(x.detach().mean(-1) > 0).unsqueeze(-1)
        raise AssertionError(self.way)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.embed(input_ids))
        m = self.told(input_ids, x)
        for k, layer in enumerate(self.layers):
            if "each time" in self.way or (k == 1 and "between" in self.way):
                m = self.told(input_ids, x)
            x = layer(x, torch.ones(()) if "behind" in self.way else m)
        logits = self.head(x * m if "behind" in self.way else x)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def loss_in_stages(model: nn.Module, ends: Sequence[int], seed: int | None = 7, **more: Any) -> float:
    """The loss of a micro-batch, each stage of which runs in a model of its own that has the stage's parameters alone,
    and goes on with the activations and the generator of the one before. The last unit of each is before its end."""
    (batch,), handed, rng = make_batches(1), list[torch.Tensor](), Device().rng_state()
    for start, stop in zip((0, *ends), ends, strict=False):
        own = copy.deepcopy(model)
        torch.manual_seed(100 + start)
        with without_cache(own):
            units = split_model(own, batch)
            bind_all(units)
            there = [name for unit in units[start:stop] for name in (unit.name, unit.shares)]
            for unit in (unit for unit in units if unit.name not in there):
                unit.unbind()
            hooks = ModelHooks(own, units)
            run = micro_batch(own, batch, units, hooks, own=range(start, stop), seed=seed, **more)
            try:
                for leaf, t in zip(run.skip_front(rng) if start else [], handed, strict=True):
                    leaf.data = t
                for k in range(start, stop):
                    run.run_forward(k)
            finally:
                run.cancel()
                hooks.remove()
        rng, loss = run.rng, run.loss
        handed = [leaf.detach().clone() for leaf in run.runs[stop].leaves] if stop < len(units) else []
    return loss.item()


def plain_loss(model: nn.Module) -> float:
    torch.manual_seed(7)
    (batch,) = make_batches(1)
    with without_cache(model):
        return loss_of(model, batch, None).item()


@pytest.mark.parametrize("ends", [(3, 6), (1, 2, 4, 5, 6)])
@pytest.mark.parametrize("way", ["random numbers", "random numbers each time", "the batch", "shapes"])
def test_what_blocks_are_given_beside_activations_is_alike_on_all_stages(way: str, ends: Sequence[int]) -> None:
    """Random numbers in front of the blocks were those of each stage's own generator."""
    torch.manual_seed(0)
    model = _Teller(way)
    assert loss_in_stages(model, ends) == plain_loss(model)


@pytest.mark.parametrize("family", ["gpt2", "opt", "llama", "mixtral", "bert"])
def test_transformers_models_run_in_stages(family: str) -> None:
    model = make_model(family, num_blocks=4, dropout=0.1)
    assert loss_in_stages(model, (3, 6)) == plain_loss(model)


@pytest.mark.parametrize("ends", [(3, 6), (1, 2, 4, 5, 6)])
@pytest.mark.parametrize(
    "way",
    ["a comparison", "a number behind the blocks", "a mean", "activations", "random numbers between blocks"],
)
def test_a_tensor_that_comes_of_what_other_stages_have_is_refused(way: str, ends: Sequence[int]) -> None:
    """A comparison with their nan was False in silence; a mean ended as a gradient that is not finite."""
    torch.manual_seed(0)
    first = 3 if "between" in way and len(ends) > 2 else ends[0] - 1
    whose = "the loss is" if "behind" in way else f"'L{first}' is given"
    with pytest.raises(ModelError, match=rf"{whose} a tensor of shape .* that comes of parameters"):
        loss_in_stages(_Teller(way), ends)


def test_random_numbers_without_a_seed_are_refused_where_stages_would_draw_their_own() -> None:
    with pytest.raises(ModelError, match=r"with a seed"):
        loss_in_stages(_Teller("random numbers"), (3, 6), seed=None)


def test_a_block_that_counts_is_refused_where_its_forward_is_run_again() -> None:
    """Its second forward, maybe of another rank, saw another count in silence."""
    model = _Teller("the batch")
    for layer in model.layers:
        layer.counts = True
    assert loss_in_stages(model, (3, 6)) == plain_loss(model)
    with pytest.raises(ModelError, match=r"forward of 'L0' changes 'num_calls'"):
        loss_in_stages(model, (3, 6), is_first_of_two=True)


OWN_MEMORY = {"host_memory": "own", "pack": 1}


@pytest.mark.parametrize("way", ["tuple", "list", "dictionary", "mask", "t5"])
def test_a_pipeline_of_blocks_that_hand_on_several_tensors_is_refused_when_it_is_planned(way: str) -> None:
    """It was planned and simulated, and its first step said that the plan was of another model."""
    model = make_model("t5", num_blocks=4) if way == "t5" else _OfMixed(way)
    workload = trace_module(model, make_batches(1)[0], replace(CPU, gradient_accumulation_steps=2))
    why = (
        "chains of blocks" if way == "t5" else r"send each other one tensor of activations, but at unit '(embed|L0|L1)'"
    )
    for policy, options in [("megatron-pp", {}), ("harmony-pp", OWN_MEMORY)]:
        with pytest.raises(PlanError, match=why):
            decide(policy, workload, several(2), options).check(workload)
    for policy in ("ddp", "zero-3", *(["harmony-dp"] if way != "t5" else [])):
        decide(policy, workload, several(2), OWN_MEMORY if policy == "harmony-dp" else {}).check(workload)


@pytest.mark.parametrize("way", ["tuple", "list"])
def test_a_stage_that_begins_with_several_tensors_is_refused(way: str) -> None:
    """The schedule may be of another model."""
    with pytest.raises(ModelError, match=r"unit 'L2', with which a stage .* begins, is handed [23] tensors"):
        loss_in_stages(_OfMixed(way), (3, 6))
