"""Small real models, and their workloads as observed in one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from tierplan.runtime.autograd.hooks import ModelHooks
from tierplan.runtime.autograd.micro_batch import MicroBatchRun
from tierplan.runtime.autograd.nests import outside_storages
from tierplan.runtime.autograd.units import ModelUnit, first_trained, split_model
from tierplan.runtime.execution.device import Device
from tierplan.runtime.memory.arena import Block
from tierplan.runtime.reference import loss_of, without_cache
from tierplan.sim.step import UnitSpec
from tierplan.sim.workloads.workload import SavedTensor, Training, Unit, Workload

VOCABULARY = 96


def make_model(family: str = "gpt2", *, num_blocks: int = 3, dropout: float = 0.0, dtype: str = "fp32") -> nn.Module:
    """An unmodified `transformers` model with random weights, the same for equal arguments."""
    import transformers as hf

    torch.manual_seed(17)
    if family in ("gpt2", "gpt2 of odd width"):
        is_odd = family != "gpt2"
        config: Any = hf.GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=64,
            n_embd=33 if is_odd else 32,
            n_layer=num_blocks,
            n_head=3 if is_odd else 2,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            bos_token_id=0,
            eos_token_id=0,
        )
        model: nn.Module = hf.GPT2LMHeadModel(config)
    elif family == "opt":
        config = hf.OPTConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            word_embed_proj_dim=32,
            ffn_dim=64,
            num_hidden_layers=num_blocks,
            num_attention_heads=2,
            max_position_embeddings=64,
            dropout=dropout,
            attention_dropout=dropout,
        )
        model = hf.OPTForCausalLM(config)
    elif family == "llama":
        config = hf.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=80,
            num_hidden_layers=num_blocks,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            attention_dropout=dropout,
        )
        model = hf.LlamaForCausalLM(config)
    elif family == "bert":
        config = hf.BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=num_blocks,
            num_attention_heads=2,
            max_position_embeddings=64,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
        model = hf.BertForMaskedLM(config)
    elif family == "mixtral":
        config = hf.MixtralConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=num_blocks,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=64,
            attention_dropout=dropout,
        )
        model = hf.MixtralForCausalLM(config)
    elif family == "t5":
        config = hf.T5Config(
            vocab_size=VOCABULARY,
            d_model=32,
            d_kv=16,
            d_ff=64,
            num_layers=num_blocks,
            num_heads=2,
            dropout_rate=dropout,
            decoder_start_token_id=0,
        )
        model = hf.T5ForConditionalGeneration(config)
    else:
        raise AssertionError(family)
    model.train()
    return model.to({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])


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


def observed_workload(model: nn.Module, batch: dict[str, torch.Tensor], training: Training) -> Workload:
    """Sizes as one real forward shows them; works are made up. The model is unchanged."""
    changed = ExitStack()
    changed.enter_context(without_cache(model))
    units = split_model(model, batch)
    hooks = ModelHooks(model, units)
    batch_run = MicroBatchRun(
        hooks=hooks,
        units=units,
        specs=[UnitSpec(name=unit.name, num_parameters=unit.num_trained) for unit in units],
        forward=lambda: loss_of(model, batch, None),
        external=outside_storages(batch, model.modules()),
        device=Device(),
        own=range(len(units)),
        seed=1,
    )
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
    tied = {id(p) for name, p in model.named_parameters(remove_duplicate=False) if "head" in name or "decoder" in name}
    return [(name, p) for name, p in owner.all_parameters if id(p) in tied]
