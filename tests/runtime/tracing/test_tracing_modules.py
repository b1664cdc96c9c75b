"""A model in memory is traced as it is, and a plan made from that trains the numbers of plain training."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from tests.runtime.models import VOCABULARY, make_batches, make_model, observed_workload
from tests.runtime.test_models import Own
from tests.runtime.test_trainer import CPU, check, machine
from tierplan.planner.lowering import lower
from tierplan.planner.policies import decide
from tierplan.runtime.autograd.units import ModelError
from tierplan.runtime.reference import train_plainly
from tierplan.runtime.tracing.trace import trace_module
from tierplan.runtime.trainer import train
from tierplan.sim.workloads.workload import Workload, WorkloadError

pytestmark = pytest.mark.usefixtures("one_thread")


def sizes(workload: Workload) -> list[object]:
    return [
        (u.name, u.num_parameters, u.shares, u.input_bytes, u.output_bytes, [t.size_bytes for t in u.saved])
        for u in workload.units
    ]


def freeze(model: nn.Module, *parts: str) -> nn.Module:
    for name, p in model.named_parameters():
        p.requires_grad_(not any(part in name for part in parts))
    return model


@pytest.mark.sampled
@pytest.mark.parametrize("family", ["gpt2", "opt", "llama", "bert", "t5", "mixtral"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_against_a_real_forward(family: str, dropout: float) -> None:
    model = make_model(family, dropout=dropout)
    batch = make_batches(1)[0]
    assert sizes(trace_module(model, batch, CPU)) == sizes(observed_workload(model, batch, CPU))


@pytest.mark.sampled
@pytest.mark.parametrize("parts", [("wte", "wpe"), (".h.0.", ".h.1."), ("mlp",), ("weight",)])
@pytest.mark.parametrize("policy", ["in-memory", "full-recompute", "zero-infinity", "fuyou"])
def test_frozen_parts_are_traced_and_trained(parts: tuple[str, ...], policy: str, tmp_path: Path) -> None:
    model = freeze(make_model("gpt2", dropout=0.1), *parts)
    batch = make_batches(1)[0]
    workload = trace_module(model, batch, CPU)
    assert sizes(workload) == sizes(observed_workload(copy.deepcopy(model), batch, CPU))
    options: dict[str, object] = {"host_buffers": "none"} if policy == "zero-infinity" else {}
    check(model, CPU, decide(policy, workload, machine(), options), tmp_path, workload=workload)


@pytest.mark.parametrize("policy", ["in-memory", "full-recompute", "vertical"])
def test_a_user_s_own_module(policy: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = Own()
    workload = trace_module(model, make_batches(1)[0], CPU)
    check(model, CPU, decide(policy, workload, machine()), tmp_path, workload=workload)


def test_the_model_is_left_as_it_was() -> None:
    model: Any = make_model("gpt2")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trace_module(model, make_batches(1)[0], CPU)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert model.config.use_cache
    assert all("forward" not in vars(m) for m in model.modules())


class Residual(nn.Module):
    """Adds residuals outside of its blocks: `what` to each next block, or the embedding's output at the end."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.table, self.out = nn.Embedding(VOCABULARY, 12), nn.Linear(12, VOCABULARY)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(3))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        first = x = self.table(input_ids)
        for layer in self.layers:
            x = x + layer(x) if self.what == "each" else layer(x)
        return nn.functional.cross_entropy(self.out(x + first).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize(("what", "where"), [("each", "'L1'"), ("end", "'head'")])
def test_residuals_outside_of_blocks_are_refused(what: str, where: str) -> None:
    with pytest.raises(ModelError, match=f"uses what it gave to an earlier block again at {where}"):
        observed_workload(Residual(what), make_batches(1)[0], CPU)


def test_what_cannot_be_traced_says_why() -> None:
    batch = make_batches(1)[0]
    with pytest.raises(WorkloadError, match="in front of block 1 that is no part of a block, such as a residual"):
        trace_module(Residual("each"), batch, CPU)
    with pytest.raises(WorkloadError, match="uses what it gave to a block again behind it"):
        trace_module(Residual("end"), batch, CPU)
    with pytest.raises(WorkloadError, match=r"has no nn\.ModuleList"):
        trace_module(nn.Linear(2, 2), batch, CPU)
    with pytest.raises(WorkloadError, match=r"are trained, but training is in 'fp32'"):
        trace_module(make_model("gpt2", dtype="bf16"), batch, CPU)


def test_losses_of_routers_and_masks_of_a_model_s_own_are_named() -> None:
    mixtral, batch = make_model("mixtral"), make_batches(1)[0]
    mixtral.config.output_router_logits = True  # type: ignore[union-attr]
    with pytest.raises(WorkloadError, match=r"losses of routers \(set output_router_logits=False"):
        trace_module(mixtral, batch, CPU)
    sizes = {f"decoder_{name}": 2 for name in ("layers", "attention_heads", "ffn_dim")}
    decoder = hf.BartForCausalLM(hf.BartConfig(vocab_size=VOCABULARY, d_model=32, **sizes))
    decoder.model.decoder.training = False  # of its modules, this alone: versions before 5.23 draw a number per layer
    with pytest.raises(WorkloadError, match=r"looks at the values.*a mask of its own.*attention_mask"):
        trace_module(decoder, batch, CPU)
    assert trace_module(decoder, {**batch, "attention_mask": torch.ones_like(batch["labels"])}, CPU).training.padded


def test_a_block_that_runs_several_times_is_named() -> None:
    config = hf.AlbertConfig(
        vocab_size=64, hidden_size=32, embedding_size=16, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4,
    )  # fmt: skip
    batch = {k: v.remainder(64) for k, v in make_batches(1)[0].items()}
    with pytest.raises(WorkloadError, match="runs a block several times in one forward, as ALBERT does"):
        trace_module(hf.AlbertForMaskedLM(config), batch, CPU)


@pytest.mark.sampled
@pytest.mark.parametrize("policy", ["in-memory", "full-recompute", "zero-infinity"])
@pytest.mark.parametrize("family", ["gpt2", "opt", "llama", "bert", "mixtral", "t5"])
def test_padded_batches_are_planned_for_and_others_are_trained_too(family: str, policy: str, tmp_path: Path) -> None:
    """One batch in three has no padding: then its attention takes no mask, and keeps less."""
    batches = make_batches(3)
    for k, batch in enumerate(batches):
        mask = torch.ones_like(batch["input_ids"])
        mask[0, (12, 16, 11)[k] :] = 0
        batch["attention_mask"], batch["labels"] = mask, batch["labels"].masked_fill(mask == 0, -100)
    model, plain = (make_model(family, num_blocks=2) for _ in range(2))
    workload = trace_module(model, batches[0], CPU)
    assert workload.training.padded
    schedule = lower(decide(policy, workload, machine()), workload, machine())
    result = train(schedule, model, batches, steps=3, nvme_dir=tmp_path)
    assert list(result.losses) == train_plainly(plain, batches, steps=3)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    whole = {key: value for key, value in batches[0].items() if key != "attention_mask"}
    unmasked = trace_module(make_model(family, num_blocks=2), whole, CPU)
    assert sum(u.saved_bytes for u in unmasked.units) < sum(u.saved_bytes for u in workload.units)
