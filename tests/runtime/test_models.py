"""Models beyond the plain case: padding, a user's own module, and those that cannot be cut into units."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.runtime.models import (
    VOCABULARY,
    make_batches,
    make_model,
    observed_workload,
    resume_as_plainly,
    schedule_for,
    train_as_plainly,
)
from tests.runtime.test_trainer import CPU, machine
from tests.runtime.test_trainer import check as train_both
from tests.toys import uniform_plan
from tierplan.planner.lowering import lower
from tierplan.planner.plan import UnitPlan, UnitwisePlan
from tierplan.planner.policies import decide
from tierplan.runtime.autograd.units import ModelError, split_model
from tierplan.runtime.execution.values import SizeError
from tierplan.runtime.tracing.trace import trace_config, trace_module
from tierplan.runtime.trainer import train
from tierplan.sim.step import Action
from tierplan.sim.workloads.workload import WorkloadError

pytestmark = pytest.mark.usefixtures("one_thread")

MIXED = UnitPlan(params="nvme", grads="host", states="nvme", acts="recompute", input="host")


def check(model: nn.Module, batches: list[dict[str, torch.Tensor]], tmp_path: Path, acts: str) -> None:
    """Three steps on a schedule with everything elsewhere, and plainly."""
    workload = observed_workload(model, batches[0], CPU)
    choice = UnitPlan(params="nvme", grads="host", states="nvme", acts=acts, input="host")  # type: ignore[arg-type]
    train_as_plainly(lower(uniform_plan(workload, choice), workload, machine()), model, batches, nvme_dir=tmp_path)


@pytest.mark.sampled
@pytest.mark.parametrize("family", ["gpt2", "opt", "llama", "bert"])
@pytest.mark.parametrize("acts", ["recompute", "nvme"])
def test_padded_batches(family: str, acts: str, tmp_path: Path) -> None:
    batches = make_batches(3)
    for k, batch in enumerate(batches):
        mask = torch.ones_like(batch["input_ids"])
        mask[0, 12 - k :] = 0
        batch["attention_mask"] = mask
        batch["labels"] = batch["labels"].masked_fill(mask == 0, -100)
    check(make_model(family, num_blocks=2, dropout=0.1), batches, tmp_path, acts)


def phi3() -> nn.Module:
    """Makes queries, keys and values in one product: without a mask, all of it is saved for the values."""
    import transformers as hf

    torch.manual_seed(17)
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 80, "pad_token_id": 0}
    heads: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return hf.Phi3ForCausalLM(hf.Phi3Config(**sizes, **heads))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("family", "seed"),
    [*product(["gpt2", "opt", "llama", "bert"], range(4)), ("phi3", 0), ("phi3", 1), ("phi3", 3)],  # 2 has no room
)
def test_batches_with_and_without_padding_in_a_plan_for_each_saved_tensor(
    family: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention without a mask saves other tensors, smaller ones with grouped heads; a plan fits both."""
    if seed % 4 > 1:  # as if all were large
        monkeypatch.setattr("tierplan.planner.lowering.sketch.MOST_TOGETHER_BYTES", 0)
    model = phi3() if family == "phi3" else make_model(family, num_blocks=2)
    batches, draw = make_batches(5), random.Random(seed)
    for k, batch in enumerate(batches):
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][0, 12 if k % 2 == seed % 2 else 16 :] = 0
        batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
    workload = trace_module(model, batches[0], CPU)
    actions: list[Action] = ["keep", "recompute", "host", "nvme"]
    acts = [tuple(draw.choices(actions, k=len(u.saved))) if u.kind == "block" else "keep" for u in workload.units]
    units = tuple(UnitPlan(params="nvme", grads="host", states="nvme", acts=each) for each in acts)
    schedule = lower(UnitwisePlan(policy="random", units=units), workload, machine())
    train_as_plainly(schedule, model, batches, nvme_dir=tmp_path)


def test_a_batch_without_padding_for_which_a_plan_has_no_room_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierplan.planner.lowering.sketch.MOST_TOGETHER_BYTES", 0)
    model, (batch,) = phi3(), make_batches(1)
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    workload = trace_module(model, batch, CPU)
    schedule = lower(uniform_plan(workload, UnitPlan(acts="host")), workload, machine())
    with pytest.raises(SizeError, match=r"a batch in which nothing is padded .* has no room: it fits padded"):
        train(schedule, model, [batch], steps=1, nvme_dir=tmp_path)


def test_a_padded_batch_in_a_plan_for_such_is_not_said_to_be_another(tmp_path: Path) -> None:
    """What does not fit then is the model, which keeps more than was planned."""
    (batch,) = make_batches(1)
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][0, 12:] = 0
    schedule = schedule_for(make_model("gpt2"), traced=batch)
    with pytest.raises(SizeError, match=r"^buffer 'acts.* holds .*the model keeps other tensors"):
        train(schedule, make_model("gpt2", dropout=0.1), [batch], steps=1, nvme_dir=tmp_path)


def test_a_padded_batch_in_a_plan_for_others_is_named_and_foretold(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    model, batches = make_model("llama", num_blocks=2), make_batches(2)
    schedule = schedule_for(model, UnitPlan(acts="recompute"), traced=batches[0])
    for k, batch in enumerate(batches):
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][0, 16 - k :] = 0
    with pytest.raises(SizeError, match=r"a padded batch was given, .* in its attention_mask.* for batches without"):
        train(schedule, model, batches, steps=2, nvme_dir=tmp_path)
    assert "a padded one may end" in caplog.text
    train(schedule, model, batches, steps=1, nvme_dir=tmp_path)


@pytest.mark.parametrize("length", [12, 20])
def test_a_batch_of_another_length_is_named(length: int, tmp_path: Path) -> None:
    """As those of a collator that pads to the longest sequence of each batch."""
    model, (batch,) = make_model("llama", num_blocks=2), make_batches(1)
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    workload = trace_module(model, batch, CPU)
    schedule = lower(uniform_plan(workload, UnitPlan(acts="recompute")), workload, machine())
    (other,) = make_batches(1, length=length)
    other["attention_mask"] = torch.ones_like(other["input_ids"])
    with pytest.raises(SizeError, match=rf"a batch of sequences of {length} tokens was given, .* is for 16: pad all"):
        train(schedule, model, [other], steps=1, nvme_dir=tmp_path)


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
    torch.manual_seed(3)
    check(Own(), make_batches(3), tmp_path, acts)


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
    assert own[1].lengths == [144, 7, 12]


def test_units_of_an_encoder_decoder() -> None:
    units = split_model(make_model("t5", num_blocks=2), make_batches(1)[0])
    assert [u.name for u in units] == ["embed", "L0", "L1", "between2", "L2", "L3", "head"]
    assert [(u.name, u.shares) for u in units if u.shares] == [("between2", "embed"), ("head", "embed")]
    assert [n for n, _ in units[3].parameters] == ["encoder.final_layer_norm.weight"]


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("accumulation", "clip"), [(1, None), (2, 0.5)])
@pytest.mark.parametrize("acts", ["keep", "recompute", "host"])
def test_t5(acts: str, accumulation: int, clip: float | None, dtype: str, tmp_path: Path) -> None:
    """Encoder states, position biases and their gradients go to many blocks; the table has three users."""
    training = replace(CPU, dtype=dtype, gradient_accumulation_steps=accumulation, max_grad_norm=clip)  # type: ignore[arg-type]
    choice = UnitPlan(params="nvme", grads="host", states="nvme", acts=acts, input="host")  # type: ignore[arg-type]
    train_both(make_model("t5", dropout=0.1, dtype=dtype), training, choice, tmp_path)


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        pytest.param("in-memory", {}, marks=pytest.mark.nightly),
        pytest.param("full-recompute", {}, marks=pytest.mark.nightly),
        ("full-recompute", {"every": 2}),
        pytest.param("zero-offload", {}, marks=pytest.mark.nightly),
        ("zero-infinity", {}),
        ("fuyou", {}),
        ("vertical", {}),
    ],
)
def test_t5_by_policies_on_its_traced_workload(policy: str, options: dict[str, object], tmp_path: Path) -> None:
    model: Any = make_model("t5", num_blocks=2, dropout=0.1)
    training = replace(CPU, gradient_accumulation_steps=2)
    workload = trace_config("t5", json.loads(model.config.to_json_string(use_diff=False)), training)
    train_both(model, training, decide(policy, workload, machine(), options), tmp_path, workload=workload)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("acts", ["keep", "recompute", "host"])
def test_a_mixture_of_experts(acts: str, dtype: str, tmp_path: Path) -> None:
    """What a block saves has the same sizes wherever tokens go: experts' products are grouped."""
    training = replace(CPU, dtype=dtype, gradient_accumulation_steps=2)  # type: ignore[arg-type]
    choice = UnitPlan(params="nvme", grads="host", states="nvme", acts=acts, input="host")  # type: ignore[arg-type]
    train_both(make_model("mixtral", num_blocks=2, dropout=0.1, dtype=dtype), training, choice, tmp_path)


def test_t5_with_frozen_parameters_is_refused() -> None:
    model = make_model("t5", num_blocks=2)
    for p in model.get_input_embeddings().parameters():  # type: ignore[operator]
        p.requires_grad_(False)
    with pytest.raises(ModelError, match=r"'shared\.weight' is frozen, but of encoder-decoders the runtime trains all"):
        split_model(model, make_batches(1)[0])


def test_t5_goes_on_from_a_commit(tmp_path: Path) -> None:
    model = make_model("t5", num_blocks=2, dropout=0.1)
    schedule = schedule_for(model, MIXED)
    resume_as_plainly(schedule, schedule, model, make_batches(5), tmp_path)


class Late(nn.Module):
    """Uses a table of its own in front of the second block, and again behind the last."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.other = nn.Embedding(VOCABULARY, 12), nn.Embedding(VOCABULARY, 12)
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(2))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.layers[1](self.layers[0](self.table(input_ids)) + self.other(input_ids))
        return (x * self.other(labels)).sum()


class Rooted(nn.Module):
    """Has a parameter of its own beside its modules, and uses it there: in front of the blocks, in one, behind them."""

    def __init__(self, *where: str) -> None:
        super().__init__()
        self.where, self.scale = where, nn.Parameter(torch.tensor([1.3]))
        self.table, self.layers = nn.Embedding(VOCABULARY, 12), nn.ModuleList(nn.Linear(12, 12) for _ in range(2))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.table(input_ids)
        x = x * self.scale if "front" in self.where else x
        for layer in self.layers:
            x = layer(x)
        x = x * self.scale if "behind" in self.where else x
        weight = self.table.weight.T
        return nn.functional.cross_entropy((x @ weight).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("where", [("front",), ("behind",), ("front", "behind"), ()])
@pytest.mark.parametrize("acts", ["keep", "host"])
def test_a_parameter_of_the_model_itself_is_of_the_unit_that_first_uses_it(
    where: tuple[str, ...], acts: Action, tmp_path: Path
) -> None:
    """As it is for the tracer, whichever module has it; so a schedule that was made from the model is for the model."""
    torch.manual_seed(3)
    model, batches = Rooted(*where), make_batches(3)
    workload = trace_module(model, batches[0], CPU)
    units = split_model(model, batches[0])
    assert [unit.num_trained for unit in units] == [unit.num_parameters for unit in workload.units]
    assert [unit.name for unit in units if "scale" in dict(unit.parameters)] == [
        "embed" if "front" in where else "head"
    ]
    schedule = lower(uniform_plan(workload, UnitPlan(acts=acts)), workload, machine())
    if not where:
        with pytest.raises(ModelError, match="'scale' of unit 'head' had no gradient in step 0"):
            train(schedule, model, batches, steps=3, nvme_dir=tmp_path)
        return
    train_as_plainly(schedule, model, batches, nvme_dir=tmp_path)


class Borrowing(nn.Linear):
    """A block that uses a parameter that it does not own."""

    scale: list[nn.Parameter]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input * self.scale[0])


def test_an_encoder_decoder_with_two_types_of_blocks_is_refused() -> None:
    """Its encoder's states are both what the last block of one type hands over, and read by all of the other."""
    import transformers as hf

    sizes = {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    config = hf.BartConfig(vocab_size=VOCABULARY, d_model=32, max_position_embeddings=64, **sizes)
    why = r"two types: BartEncoderLayer, and BartDecoderLayer in 'model.decoder.layers'.* as T5 is"
    model = hf.BartForConditionalGeneration(config)
    with pytest.raises(ModelError, match=why):
        split_model(model, make_batches(1)[0])
    with pytest.raises(WorkloadError, match=why):
        trace_module(model, make_batches(1)[0], CPU)
    with pytest.raises(WorkloadError, match=why):
        trace_config("bart", json.loads(config.to_json_string(use_diff=False)), CPU)


def test_models_that_cannot_be_cut_say_why() -> None:
    batch = make_batches(1)[0]
    with pytest.raises(ModelError, match=r"has no nn\.ModuleList"):
        split_model(nn.Linear(2, 2), batch)
    with pytest.raises(ModelError, match=r"other.weight' is used both in front of block 1 and behind it"):
        split_model(Late(), batch)
    shared = Own()
    shared.layers[1].inner = shared.layers[0].inner  # type: ignore[union-attr]
    with pytest.raises(ModelError, match="must not share parameters"):
        split_model(shared, batch)
    lent = Rooted()
    lent.layers = nn.ModuleList(Borrowing(12, 12) for _ in range(2))
    for layer in lent.layers:
        layer.scale = [lent.scale]  # type: ignore[assignment]
    with pytest.raises(ModelError, match=r"block 'layers.0' uses parameter 'scale', which is not its own"):
        split_model(lent, batch)
