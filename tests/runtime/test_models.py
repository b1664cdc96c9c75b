"""Models beyond the plain case: padding, a user's own module, and those that cannot be cut into units."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from tests.runtime.models import VOCABULARY, make_batches, make_model, observed_workload
from tests.runtime.test_trainer import CPU, machine
from tests.toys import uniform_plan
from tierplan.planner.lowering import lower
from tierplan.planner.plan import UnitPlan
from tierplan.runtime.reference import train_plainly
from tierplan.runtime.trainer import train
from tierplan.runtime.units import ModelError, split_model

MIXED = UnitPlan(params="nvme", grads="host", states="nvme", acts=("host",), input="host")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def check(make: Any, batches: list[dict[str, torch.Tensor]], tmp_path: Path, acts: str) -> None:
    """Three steps on a schedule with everything elsewhere, and plainly."""
    model, plain = make(), make()
    workload = observed_workload(model, batches[0], CPU)
    choice = UnitPlan(params="nvme", grads="host", states="nvme", acts=acts, input="host")  # type: ignore[arg-type]
    schedule = lower(uniform_plan(workload, choice), workload, machine())
    losses = train_plainly(plain, batches, steps=len(batches))
    result = train(schedule, model, batches, steps=len(batches), nvme_dir=tmp_path)
    assert result.losses == tuple(losses)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("family", ["gpt2", "opt", "llama", "bert"])
@pytest.mark.parametrize("acts", ["recompute", "nvme"])
def test_padded_batches(family: str, acts: str, tmp_path: Path) -> None:
    batches = make_batches(3)
    for k, batch in enumerate(batches):
        mask = torch.ones_like(batch["input_ids"])
        mask[0, 12 - k :] = 0
        batch["attention_mask"] = mask
        batch["labels"] = batch["labels"].masked_fill(mask == 0, -100)
    check(lambda: make_model(family, num_blocks=2, dropout=0.1), batches, tmp_path, acts)


class Gate(nn.Module):
    """A block with two inputs that both need gradients, a constant, and a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 12)
        self.drop = nn.Dropout(0.2)
        self.scale = nn.Parameter(torch.ones(7))  # not whole vectors

    def forward(self, x: torch.Tensor, skip: torch.Tensor, *, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.drop(torch.tanh(self.inner(x))) * factor
        return out + skip * self.scale.sum(), (skip + out).transpose(0, 1).contiguous().transpose(0, 1)


class Own(nn.Module):
    """Somebody's own model: returns the loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 12)
        self.layers = nn.ModuleList(Gate() for _ in range(3))
        self.out = nn.Linear(12, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.table(input_ids)
        skip = x * 0.5
        for layer in self.layers:
            x, skip = layer(x, skip, factor=0.9)
        return nn.functional.cross_entropy(self.out(x + skip).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("acts", ["keep", "recompute", "host"])
def test_a_user_s_own_module(acts: str, tmp_path: Path) -> None:
    def make() -> nn.Module:
        torch.manual_seed(3)
        return Own()

    check(make, make_batches(3), tmp_path, acts)


def test_units_of_a_model() -> None:
    units = split_model(make_model("opt"), make_batches(1)[0])
    assert [u.name for u in units] == ["embed", "L0", "L1", "L2", "head"]
    assert [n for n, _ in units[-1].parameters] == [
        "model.decoder.final_layer_norm.weight",
        "model.decoder.final_layer_norm.bias",
    ]
    assert units[-1].shares == "embed"
    own = split_model(Own(), make_batches(1)[0])
    assert own[1].parameters[0][0] == "layers.0.inner.weight"  # whole vectors first
    assert own[1].odd_lengths == [7, 12]


def test_models_that_cannot_be_cut_say_why() -> None:
    batch = make_batches(1)[0]
    with pytest.raises(ModelError, match=r"has no nn\.ModuleList"):
        split_model(nn.Linear(2, 2), batch)
    config = hf.T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    with pytest.raises(ModelError, match="between its blocks, as encoder-decoders do"):
        split_model(hf.T5ForConditionalGeneration(config), batch)
    frozen = make_model("gpt2")
    next(frozen.parameters()).requires_grad_(False)
    with pytest.raises(ModelError, match="is frozen"):
        split_model(frozen, batch)
    shared = Own()
    shared.layers[1].inner = shared.layers[0].inner  # type: ignore[union-attr]
    with pytest.raises(ModelError, match="must not share parameters"):
        split_model(shared, batch)
