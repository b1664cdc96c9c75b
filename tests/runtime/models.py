"""Small real models, their workloads as observed in one forward pass, schedules of them, and training on these."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.gpu import not_planned
from tests.toys import uniform_plan
from tierplan.hwmodels.machine import Machine, Rate, Stream, TierSpec
from tierplan.planner.lowering import lower
from tierplan.planner.plan import UnitPlan
from tierplan.runtime.autograd.hooks import ModelHooks
from tierplan.runtime.autograd.micro_batch import MicroBatchRun
from tierplan.runtime.autograd.nests import outside_storages
from tierplan.runtime.autograd.units import ModelUnit, first_trained, split_model
from tierplan.runtime.execution.device import Device
from tierplan.runtime.memory.arena import Block
from tierplan.runtime.reference import loss_of, same_weights, train_plainly, without_cache
from tierplan.runtime.tracing.trace import trace_module
from tierplan.runtime.trainer import Trainer, train
from tierplan.sim.schedule import Schedule
from tierplan.sim.step import UnitSpec
from tierplan.sim.workloads.workload import SavedTensor, Training, Unit, Workload

VOCABULARY = 96
CPU = Training(per_device_train_batch_size=2, sequence_length=16, dtype="fp32", backend="cpu")


def machine(device_bytes: int = 1 << 30, host_bytes: int = 1 << 30) -> Machine:
    kinds = ("bytes", "parameters", "elementwise_bytes")
    products = ("matmul", "attention", "noncausal_attention")
    flops = (f"{what}_{dtype}_flops" for what in products for dtype in ("fp32", "bf16"))
    rates = {kind: Rate.constant(1e9) for kind in (*kinds, *flops)}
    sizes = {"gpu0": device_bytes, "host": host_bytes, "nvme": 1 << 30}
    tiers: dict[str, Any] = {"gpu0": "device", "host": "host", "nvme": "nvme"}
    streams = ("gpu0.compute", "gpu0.h2d", "gpu0.d2h", "nvme.read", "nvme.write", "host.adam")
    return Machine(
        name="test",
        tiers=tuple(TierSpec(name=n, kind=tiers[n], capacity_bytes=size) for n, size in sizes.items()),
        streams=tuple(Stream(name=n, rates=rates) for n in streams),
    )


def make_model(family: str = "gpt2", *, num_blocks: int = 3, dropout: float = 0.0, dtype: str = "fp32") -> nn.Module:
    """An unmodified `transformers` model with random weights, the same for equal arguments."""
    import transformers as hf

    skip_older(family)
    torch.manual_seed(17)
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": num_blocks}
    sizes["max_position_embeddings"] = 64
    model: nn.Module
    match family:
        case "gpt2" | "gpt2 of odd width":
            width, heads = (32, 2) if family == "gpt2" else (33, 3)
            drops: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
            shape = {"n_positions": 64, "n_embd": width, "n_layer": num_blocks, "n_head": heads}
            ends = {"bos_token_id": 0, "eos_token_id": 0}
            model = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=VOCABULARY, **shape, **drops, **ends))
        case "opt":
            sizes |= {"word_embed_proj_dim": 32, "ffn_dim": 64, "num_attention_heads": 2}
            model = hf.OPTForCausalLM(hf.OPTConfig(**sizes, dropout=dropout, attention_dropout=dropout))
        case "llama":
            sizes |= {"intermediate_size": 80, "num_attention_heads": 4, "num_key_value_heads": 2}
            model = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, attention_dropout=dropout))
        case "bert":
            sizes |= {"intermediate_size": 64, "num_attention_heads": 2}
            drops = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
            model = hf.BertForMaskedLM(hf.BertConfig(**sizes, **drops))
        case "mixtral":
            sizes |= {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
            sizes |= {"num_local_experts": 4, "num_experts_per_tok": 2}
            model = hf.MixtralForCausalLM(hf.MixtralConfig(**sizes, attention_dropout=dropout))
        case "t5":
            shape = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": num_blocks, "num_heads": 2}
            config = hf.T5Config(vocab_size=VOCABULARY, **shape, dropout_rate=dropout, decoder_start_token_id=0)
            model = hf.T5ForConditionalGeneration(config)
        case _:
            raise AssertionError(family)
    model.train()
    return model.to({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])


def skip_older(family: str) -> None:
    """Skips the test where the installed transformers is too old to plan for the family."""
    if family in not_planned():
        pytest.skip(f"{family} cannot be planned with this version of transformers")


class OwnModel(nn.Module):
    """Somebody's own: an embedding, blocks, which are told what else it is told, and an output matrix. Gives a loss."""

    def __init__(self, blocks: Iterable[nn.Module], width: int = 16, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.layers = nn.ModuleList(blocks)

    def through(self, x: torch.Tensor, *told: Any, **named: Any) -> torch.Tensor:
        """From the embedding to the output matrix."""
        for layer in self.layers:
            x = layer(x, *told, **named)
        return x

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, *told: Any, **named: Any) -> torch.Tensor:
        x = self.through(self.embed(input_ids), *told, **named)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def make_batches(count: int, *, batch: int = 2, length: int = 16, seed: int = 3) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        ids = torch.randint(0, VOCABULARY, (batch, length), generator=generator)
        found.append({"input_ids": ids, "labels": ids.clone()})
    return found


def bind_all(units: Sequence[ModelUnit]) -> None:
    """Parameters lie in blocks, as when a schedule has brought them to the device."""
    for part in (part for unit in units for part in unit.parts if part.parameters):
        flat = torch.cat([p.detach().reshape(-1).view(torch.uint8) for _, p in part.parameters])
        part.bind(Block(flat, flat))


def micro_batch(
    model: nn.Module, batch: dict[str, torch.Tensor], units: list[ModelUnit], hooks: ModelHooks, **more: Any
) -> MicroBatchRun:
    """A run of the batch on all units, each of which keeps what it saves, unless told otherwise."""
    settings: dict[str, Any] = {
        "specs": [UnitSpec(name=unit.name, num_parameters=unit.num_trained) for unit in units],
        "device": Device(),
        "own": range(len(units)),
        **more,
    }
    external = outside_storages(batch, model.modules())
    return MicroBatchRun(
        hooks=hooks, units=units, forward=lambda: loss_of(model, batch, None), external=external, **settings
    )


def observed_workload(model: nn.Module, batch: dict[str, torch.Tensor], training: Training) -> Workload:
    """Sizes as one real forward shows them; works are made up. The model is unchanged."""
    changed = ExitStack()
    changed.enter_context(without_cache(model))
    units = split_model(model, batch)
    hooks = ModelHooks(model, units)
    batch_run = micro_batch(model, batch, units, hooks, seed=1)
    bind_all(units)
    for i in range(len(units)):
        batch_run.run_forward(i)
    runs = list(batch_run.runs)
    handed, shared_bytes = [], 0
    for i, run in enumerate(runs):
        later = {id(leaf) for other in runs[i + 1 :] for leaf in other.read}
        shared = [leaf for leaf in run.leaves[1:] if id(leaf) in later]
        if shared:  # then the schedule calls the first one the unit's input, and the others shared
            shared = run.leaves[1:]
        handed.append(sum(leaf.nbytes for leaf in run.leaves) - sum(leaf.nbytes for leaf in shared))
        shared_bytes += 2 * sum(leaf.nbytes for leaf in shared)
    described = []
    for i, (unit, run) in enumerate(zip(units, runs, strict=True)):
        assert run.recorder is not None
        described.append(
            Unit(
                name=unit.name,
                kind="embed" if i == 0 else "head" if i + 1 == len(units) else "block",
                shapes=tuple(map(tuple, unit.shapes)),
                num_parameters=sum(p.numel() for _, p in unit.all_parameters),
                num_frozen=sum(p.numel() for _, p in unit.frozen.parameters),
                frozen_bytes=unit.frozen.forms.size_bytes,
                shares=unit.shares,
                adds_to_shared=not unit.shares or all(p.requires_grad for _, p in tied_of(units, unit, model)),
                forward={"matmul_fp32_flops": 1e6},
                backward={"matmul_fp32_flops": 2e6},
                saved=tuple(
                    SavedTensor(
                        index=k, name=f"slot{k}", size_bytes=size, dtype="fp32", recompute={"elementwise_bytes": 1}
                    )
                    for k, size in enumerate(run.recorder.sizes)
                ),
                input_bytes=handed[i],
                saves_parameters=run.recorder.saves_parameters,
                output_bytes=handed[i + 1] if i + 1 < len(units) else 0,
            )
        )
    for i in reversed(range(first_trained(units), len(units))):
        batch_run.run_backward(i)
    model.zero_grad()
    hooks.remove()
    changed.close()
    for unit in units:
        for _, p in unit.all_parameters:
            p.data = p.data.clone()
    return Workload(
        name="observed", model_type="test", training=training, units=tuple(described), shared_bytes=shared_bytes
    )


def tied_of(units: list[ModelUnit], unit: ModelUnit, model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The output matrix, where another unit owns it."""
    owner = next(u for u in units if u.name == unit.shares)
    heads = ("head", "predictions.decoder")
    named = model.named_parameters(remove_duplicate=False)
    tied = {id(p) for name, p in named if any(head in name for head in heads)}
    return [(name, p) for name, p in owner.all_parameters if id(p) in tied]


def schedule_for(
    model: nn.Module,
    choice: UnitPlan | None = None,
    training: Training = CPU,
    *,
    traced: dict[str, Any] | None = None,
    **plan: Any,
) -> Schedule:
    """That of a plan with the same for all blocks; of the model as observed, or as `traced` on such a batch."""
    if traced is None:
        workload = observed_workload(model, make_batches(1)[0], training)
    else:
        workload = trace_module(copy.deepcopy(model), traced, training)
    plan.setdefault("semantics", "exact-clip" if training.max_grad_norm else "in-backward")
    return lower(uniform_plan(workload, choice or UnitPlan(), **plan), workload, machine())


def resume_as_plainly(
    schedule: Schedule, then: Schedule, model: nn.Module, batches: Sequence[Any], folder: Path, **settings: Any
) -> None:
    """Commits half of the steps, and goes on from there in a copy: losses and weights are those of plain training."""
    plain, resumed, half = copy.deepcopy(model), copy.deepcopy(model), len(batches) // 2
    losses = train_plainly(plain, batches, steps=len(batches), **settings)
    settings |= {"nvme_dir": folder / "nvme", "out_dir": folder / "out"}
    with Trainer(schedule, model, **settings) as first:
        first.run(batches, half)
    with Trainer(then, resumed, resume=True, **settings) as second:
        second.run(batches, len(batches) - half)
        second.restore_model()
        assert list(second.result().losses) == losses
    assert same_weights(resumed, plain)


def train_as_plainly(schedule: Schedule, model: nn.Module, batches: Sequence[Any], **settings: Any) -> nn.Module:
    """Trains the model on the schedule, and a copy plainly, on all batches: losses and weights are equal. The copy."""
    assert schedule.step is not None
    plain, num = copy.deepcopy(model), schedule.step.training.gradient_accumulation_steps
    steps = len(batches) // num
    losses = train(schedule, model, batches, steps=steps, **settings).losses
    for name in ("nvme_dir", "out_dir"):
        settings.pop(name, None)
    assert list(losses) == train_plainly(plain, batches, steps=steps, gradient_accumulation_steps=num, **settings)
    assert same_weights(model, plain)
    return plain
