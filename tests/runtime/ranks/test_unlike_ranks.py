"""What one rank's micro-batches or stages do and another's do not."""

from __future__ import annotations

import copy
import re
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.runtime.models import OwnModel, make_batches
from tests.runtime.ranks.pair import run_ranks
from tests.runtime.ranks.test_ranks import ADAM, OWN_MEMORY, several
from tests.runtime.test_own_blocks import OfScaled
from tests.runtime.test_trainer import CPU
from tierplan.planner.lowering import lower
from tierplan.planner.policies import decide
from tierplan.runtime.data.ahead import Batch
from tierplan.runtime.ranks import group
from tierplan.runtime.ranks.alike import UnlikeRanksError
from tierplan.runtime.ranks.group import Ranks
from tierplan.runtime.reference import same_weights, train_plainly
from tierplan.runtime.tracing.trace import trace_module
from tierplan.runtime.trainer import Trainer
from tierplan.sim.schedule import Schedule

VOCABULARY, HIDDEN, STEPS = 64, 8, 3


class Experts(nn.Module):
    """A block of which each micro-batch uses one of two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(2))

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return x + torch.tanh(self.experts[which](x))


class Counting(Experts):
    """One that counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        self.seen += 1
        return super().forward(x, which)


def mixture(block: type[Experts] = Experts) -> OwnModel:
    torch.manual_seed(5)
    return OwnModel((block() for _ in range(4)), HIDDEN, VOCABULARY)


def batches(which: list[int]) -> list[Batch]:
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(0, VOCABULARY, (2, 6), generator=generator) for _ in which]
    return [{"input_ids": t, "labels": t, "which": k} for t, k in zip(ids, which, strict=True)]


def planned(model: nn.Module, policy: str, options: dict[str, object], accumulation: int, num: int = 2) -> Schedule:
    training = replace(CPU, gradient_accumulation_steps=accumulation)
    workload = trace_module(copy.deepcopy(model), batches([0])[0], training)
    return lower(decide(policy, workload, several(num), options), workload, several(num))


def train_mixtures(ranks: Ranks, which: list[int]) -> list[str]:
    """What is wrong with a mixture whose micro-batches use these experts, two of them in a step."""
    found = []
    for policy, options, accumulation in [("ddp", {}, 1), ("zero-3", {}, 1), ("harmony-dp", OWN_MEMORY, 2)]:
        model = mixture()
        plain, given = copy.deepcopy(model), batches(which)
        schedule = planned(model, policy, options, accumulation)
        with Trainer(schedule, model, optimizer=ADAM, ranks=ranks) as trainer:
            trainer.run(given, STEPS)
            trainer.restore_model()
            losses = list(trainer.result().losses)
        wanted = train_plainly(plain, given, steps=STEPS, optimizer=ADAM, gradient_accumulation_steps=2)
        if losses != wanted or not same_weights(model, plain):
            found.append(f"{policy}: losses {losses} are {wanted} plainly, or weights differ")
    return found


def test_an_expert_that_one_rank_alone_uses_is_trained_as_in_plain_training() -> None:
    assert run_ranks(train_mixtures, 2, [0, 1, 1, 0, 0, 1]) == [[], []]


def test_an_expert_that_no_rank_uses_is_refused_by_name() -> None:
    for error in run_ranks(train_mixtures, 2, [0, 1, 1, 1, 0, 1]):
        assert "'layers.0.experts.0.weight', 'layers.0.experts.0.bias' of unit 'L0' had no gradient in step 1" in str(
            error
        )


def train_counting(ranks: Ranks, policy: str) -> None:
    model = mixture(Counting)
    schedule = planned(model, policy, {}, 2 if policy == "megatron-pp" else 1)
    with Trainer(schedule, model, optimizer=ADAM, ranks=ranks) as trainer:
        trainer.run(batches([0, 1]), 1)


@pytest.mark.parametrize("policy", ["ddp", "megatron-pp"])
def test_buffers_that_each_device_would_change_for_itself_are_refused_by_name(policy: str) -> None:
    for error in run_ranks(train_counting, 2, policy):
        assert re.search(r"forward changes 'layers\.\d\.seen' .* each would change its own; plan for one", str(error))


class OfCounting(OfScaled):
    """Its blocks are told how often the model was called."""

    num_calls = 0

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, t: float) -> torch.Tensor:
        self.num_calls += 1
        return super().forward(input_ids, labels, float(self.num_calls))


def train_by_plain_values(ranks: Ranks) -> list[str]:
    """What is wrong with pipelines of models that compute by plain values, the last of which is refused."""
    torch.manual_seed(0)  # the same models on all ranks
    ways: list[tuple[str, dict[str, object], nn.Module]] = [
        ("megatron-pp", {}, OfScaled("count")),
        ("megatron-pp", {}, OfCounting("number")),
        ("harmony-pp", {**OWN_MEMORY, "pack": 1}, OfScaled("attribute")),
        ("harmony-pp", {**OWN_MEMORY, "pack": 1}, OfCounting("number")),
    ]
    for policy, options, model in ways:
        plain, batches = copy.deepcopy(model), [{**b, "t": 1.0 + k % 3} for k, b in enumerate(make_batches(4))]
        workload = trace_module(copy.deepcopy(model), batches[0], replace(CPU, gradient_accumulation_steps=2))
        schedule = lower(decide(policy, workload, several(2), options), workload, several(2))
        with Trainer(schedule, model, optimizer=ADAM, ranks=ranks) as trainer:
            trainer.run(batches, 2)
            losses = list(trainer.result().losses)
        if losses != train_plainly(plain, batches, steps=2, optimizer=ADAM, gradient_accumulation_steps=2):
            return [f"{policy} with {type(model).__name__}({model.way}): losses differ"]
    return ["nothing was refused"]


def test_plain_values_are_those_of_plain_training_in_a_pipeline_or_refused() -> None:
    """What was run a second time saw the count of the first."""
    found = run_ranks(train_by_plain_values, 2)
    assert any("forward of the model changes 'num_calls'" in str(one) for one in found), found


UNLIKE: list[tuple[str, dict[str, Any], str]] = [
    ("zero-3", {"changed": "embed.weight"}, "the checksum of 'embed.weight' in the model is '"),
    ("megatron-pp", {"changed": "head.bias"}, "the checksum of 'head.bias' in the model is '"),
    ("frozen", {"changed": "layers.0.experts.1.bias"}, "the checksum of 'layers.0.experts.1.bias' in the model is '"),
    ("ddp", {"changed": "scale"}, "the checksum of 'scale' in the model is '"),
    ("ddp", {"optimizer": replace(ADAM, lr=0.02)}, "optimizer.lr is 0.02 on rank 1, and 0.01 on rank 0"),
    ("ddp", {"learning_rate": lambda step: 0.03}, "the learning rate of the next is 0.03 on rank 1, and 0.01 on"),
    ("ddp", {"seed": 1}, "seed is 1 on rank 1, and 0 on rank 0"),
    ("ddp", {"fixed": {"data": "b"}}, "data is 'b' on rank 1, and None on rank 0"),
    ("ddp", {"policy": "zero-2"}, "the checksum of the schedule is '"),
    ("ddp", {"checkpoint_every": 2}, "checkpoint_every is 2 on rank 1, and None on rank 0"),
    ("ddp", {"steps": 3}, "the number of steps to run is 3 on rank 1, and 2 on rank 0"),
]
"""A plan, what the second of two ranks is given otherwise, and what is said of it."""


def give_unlike(ranks: Ranks) -> list[str]:
    """What is said of each, before a step is made."""
    said = []
    for policy, ways, _ in UNLIKE:
        own: dict[str, Any] = dict(ways) if ranks.rank == 1 else {}
        model, steps, policy = mixture(), own.pop("steps", 2), own.pop("policy", policy)
        model.register_buffer("scale", torch.ones(()))
        model.layers[0].requires_grad_(policy != "frozen")
        policy = "ddp" if policy == "frozen" else policy
        schedule = planned(model, policy, {}, 2 if policy == "megatron-pp" else 1)
        if changed := own.pop("changed", None):
            model.state_dict()[changed].add_(0.01)
        try:
            with Trainer(schedule, model, ranks=ranks, **{"optimizer": ADAM, **own}) as trainer:
                trainer.run(batches([0, 1] * 3), steps)
            said.append("trained")
        except UnlikeRanksError as error:
            said.append(str(error))
    return said


def test_ranks_that_are_given_unlike_things_are_refused_by_name() -> None:
    """They trained on, each its own model, and mixed gradients and shards of both; or waited for each other."""
    for said in run_ranks(give_unlike, 2):
        for text, (_, _, wanted) in zip(said, UNLIKE, strict=True):
            assert text.startswith(wanted), said
            assert "; ranks train one model together: " in text


def read_for_long(ranks: Ranks) -> None:
    """As where the first one makes tokens of its text, for longer than ranks take to find each other."""
    with mock.patch.object(group, "TIMEOUT", timedelta(seconds=1)):
        ranks.connect([(0, 1)])
    if ranks.rank == 0:
        time.sleep(3)
    ranks.send(torch.ones(4), (0, 1))


def test_a_rank_that_works_is_waited_for() -> None:
    """After ten minutes it was given up, and each further run came as far."""
    assert run_ranks(read_for_long, 2, timeout_s=60) == [None, None]


def end_too_soon(ranks: Ranks) -> None:
    """The first rank ends while the others still send; that is well. Then one waits for those that have ended."""
    ranks.connect(ways := [(0, 1), (1, 2)])
    sent = torch.ones(4)
    for way in ways:
        if ranks.rank in way:
            ranks.send(sent, way)
        if ranks.rank == 1:
            time.sleep(1)
    if ranks.rank == 1:
        ranks.barrier()


def test_a_rank_that_has_ended_is_not_waited_for() -> None:
    """Its end was taken for what the other waited for, or nothing came within ten minutes."""
    for found in run_ranks(end_too_soon, 3, timeout_s=60):
        assert re.search(
            r"rank [02] of 3 has ended, and rank 1 waits for it; let all ranks do the same: as", str(found)
        )
