"""What a model does across the cuts between its units: plain training's numbers, or a refusal by name."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.runtime.models import VOCABULARY, make_batches
from tests.runtime.test_trainer import CPU, machine
from tests.toys import uniform_plan
from tierplan.planner.lowering import lower
from tierplan.planner.plan import UnitPlan
from tierplan.planner.policies import decide
from tierplan.runtime.autograd.units import ModelError, split_model
from tierplan.runtime.reference import same_weights, train_plainly
from tierplan.runtime.tracing.trace import trace_module
from tierplan.runtime.trainer import train
from tierplan.sim.schedule import Schedule
from tierplan.sim.workloads.workload import WorkloadError

pytestmark = pytest.mark.usefixtures("one_thread")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x))


class OfBlocks(nn.Module):
    """Blocks in a row, between a table and a head that reads what all of them give, or the last one alone."""

    def __init__(self, kind: type[nn.Module] = Block, *, reads: str = "last") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.head, self.reads = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY), reads
        self.layers = nn.ModuleList(kind() for _ in range(3))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x, all_of_them = self.embed(input_ids), []
        for layer in self.layers:
            all_of_them.append(x := layer(x))
        last = torch.stack(all_of_them).sum(0) if self.reads == "sum" else x
        loss = nn.functional.cross_entropy(self.head(last).flatten(0, 1), labels.flatten())
        return loss + sum(h.square().mean() for h in all_of_them) if self.reads == "squares" else loss


def check(model: nn.Module, schedule: Schedule, nvme_dir: Path) -> None:
    """Three steps on the schedule, and plainly."""
    batches, plain = make_batches(3), copy.deepcopy(model)
    result = train(schedule, model, batches, steps=3, nvme_dir=nvme_dir)
    assert list(result.losses) == train_plainly(plain, batches, steps=3)
    assert same_weights(model, plain)


@pytest.mark.parametrize("reads", ["sum", "squares"])
@pytest.mark.parametrize("place", ["keep", "host", "nvme"])
def test_what_the_head_reads_of_earlier_blocks_does_not_leave_the_device(
    reads: str, place: str, tmp_path: Path
) -> None:
    """As a mixture of all hidden states does; refused by name, where its bytes would be gone."""
    model = OfBlocks(reads=reads)
    workload = trace_module(copy.deepcopy(model), make_batches(1)[0], CPU)
    schedule = lower(uniform_plan(workload, UnitPlan(input=place)), workload, machine())  # type: ignore[arg-type]
    if place == "keep":
        check(model, schedule, tmp_path)
        return
    with pytest.raises(ModelError, match=r"'head' reads what 'L[12]' has as its input, which the plan takes off"):
        train(schedule, model, make_batches(3), steps=3, nvme_dir=tmp_path)


@pytest.mark.parametrize("reads", ["sum", "squares"])
def test_what_the_head_reads_of_earlier_blocks_is_not_made_again(reads: str, tmp_path: Path) -> None:
    model = OfBlocks(reads=reads)
    workload = trace_module(copy.deepcopy(model), make_batches(1)[0], CPU)
    schedule = lower(decide("full-recompute", workload, machine(), {"every": 2}), workload, machine())
    with pytest.raises(ModelError, match=r"'head' reads what 'L[12]' has as its input, which the plan takes off"):
        train(schedule, model, make_batches(3), steps=3, nvme_dir=tmp_path)


class Turned(nn.Module):
    """A block that gives a view of what lies the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.inner(x)).transpose(0, 1).contiguous().transpose(0, 1)


class Convolved(nn.Module):
    """A block that begins by turning what it gets, whose gradient so lies the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Conv1d(16, 16, 3, padding=1), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x.transpose(1, 2)).transpose(1, 2))


@pytest.mark.parametrize("kind", [Turned, Convolved])
@pytest.mark.parametrize("acts", ["keep", "recompute", "host"])
def test_gradients_lie_as_in_plain_training(kind: type[nn.Module], acts: str, tmp_path: Path) -> None:
    """Else a bias, whose gradient is a sum over them, has other last bits."""
    model = OfBlocks(kind)
    workload = trace_module(copy.deepcopy(model), make_batches(1)[0], CPU)
    choice = UnitPlan(acts=acts, input="keep" if acts == "keep" else "host")  # type: ignore[arg-type]
    check(model, lower(uniform_plan(workload, choice), workload, machine()), tmp_path)


class Skipped(nn.Module):
    """A block that somebody has switched off."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Kept(Block):
    """A block that holds what it has computed last."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = super().forward(x)
        return self.last


class Deep(nn.Module):
    """A block with a kernel for each channel, which lies along its channels."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(16, 16, 3, padding=1, groups=16).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x.mT.unflatten(-1, (4, 4))).flatten(2).mT  # type: ignore[no-any-return]


class Supervised(OfBlocks):
    """A model with a loss behind each block."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x, losses = self.embed(input_ids), []
        for layer in self.layers:
            x = layer(x)
            losses.append(nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()))
        return torch.stack(losses).sum()


def test_a_head_that_is_used_between_blocks_too_is_refused_while_it_is_traced() -> None:
    with pytest.raises(WorkloadError, match=r"'head.bias' is used both in front of block 1 and behind it"):
        trace_module(Supervised(), make_batches(1)[0], CPU)


class Forward(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.jvp(super().forward, (x,), (torch.ones_like(x),))[1]  # type: ignore[no-any-return]


class Backward(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, back = torch.func.vjp(super().forward, x)
        return out + back(out)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Skipped, "block 'layers.0' gives back what it is given"),
        (Kept, r"the model cannot be copied: .* holds a tensor with a graph"),
        (Forward, r"it takes derivatives forward \(torch\.func\.jvp, forward_ad\), which gives zeros without memory"),
        (Backward, r"torch\.func\.\{grad, vjp, jacrev, hessian\} don't yet support saved tensor hooks"),
        (Deep, r"parameter 'layers.0.inner.weight' is not contiguous.*channels_last.*torch.contiguous_format"),
    ],
)
def test_a_model_that_cannot_be_cut_so_is_refused_by_name(kind: type[nn.Module], says: str) -> None:
    model, batch = OfBlocks(kind), make_batches(1)[0]
    if kind is Kept:
        model(**batch)
    with pytest.raises(ModelError, match=says):
        split_model(model, batch)
    with pytest.raises(WorkloadError, match=says):
        trace_module(model, batch, CPU)


class Masked(OfBlocks):
    """A model that makes a mask in front of its blocks, and weighs its loss by it; its blocks may read it, too."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        mask = (input_ids > VOCABULARY // 4).float()
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x) if self.reads == "last" else layer(x, mask.unsqueeze(-1))
        losses = nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), reduction="none")
        return (losses * mask.flatten()).sum() / mask.sum()


class Weighed(Block):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) * (1 + mask)


@pytest.mark.parametrize(("kind", "reads"), [(Block, "last"), (Weighed, "mask")])
@pytest.mark.parametrize("acts", ["keep", "host", "recompute"])
def test_what_is_made_in_front_of_blocks_may_be_used_behind_them(
    kind: type[nn.Module], reads: str, acts: str, tmp_path: Path
) -> None:
    """As a mask of the loss: the head saves it for its backward."""
    model = Masked(kind, reads=reads)
    workload = trace_module(copy.deepcopy(model), make_batches(1)[0], CPU)
    check(model, lower(uniform_plan(workload, UnitPlan(acts=acts)), workload, machine()), tmp_path)  # type: ignore[arg-type]


class Passing(OfBlocks):
    """Something with a gradient comes past blocks to where it is used: from in front of them, or from in one."""

    def __init__(self, way: str) -> None:
        super().__init__(Weighed if way == "to a block" else Remembering)
        self.way, self.gate = way, nn.Linear(16, 16)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x, beside = self.embed(input_ids), torch.tanh(self.gate(self.embed(input_ids)))
        for k, layer in enumerate(self.layers):
            if self.way == "to a block":
                x = layer(x, beside if k == 1 else torch.zeros(()))
            else:
                x = layer(x)
        beside = self.layers[0].seen if self.way == "of a block" else beside if self.way == "behind" else x  # type: ignore[assignment]
        return nn.functional.cross_entropy(self.head(x + beside).flatten(0, 1), labels.flatten())


class Remembering(Block):
    """As one that keeps a term of the loss for its model."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = torch.tanh(self.inner(x))
        return x + self.seen


@pytest.mark.parametrize(
    ("way", "says"),
    [
        ("behind", r"behind the blocks comes past a block, .* 'embed\.weight', whose gradients"),
        ("of a block", r"behind the blocks comes past a block, .* 'layers\.0\.inner\.weight', whose gradients"),
        ("to a block", r"by block 'layers\.1' comes past a block, .* 'embed\.weight', whose gradients"),
    ],
)
def test_what_comes_past_a_block_is_refused_by_name(way: str, says: str) -> None:
    """As the images of CLIP, or a loss of routers. With accumulation its gradients were lost, and nothing said so."""
    model, batch = Passing(way), make_batches(1)[0]
    with pytest.raises(ModelError, match=says):
        split_model(model, batch)
    with pytest.raises(WorkloadError, match=says):
        trace_module(Passing(way), batch, CPU)
