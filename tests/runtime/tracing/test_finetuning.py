"""Adapters and frozen parameters: what is planned for them is what PyTorch holds in a real step, byte for byte."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from tests.configs import config_of
from tests.runtime.test_trainer import machine
from tests.runtime.tracing.test_tracing import TORCH_NAMES, predicted_peaks, saved_by_block, training_of
from tests.toys import uniform_plan
from tierplan.planner.lowering import lower
from tierplan.planner.plan import UnitPlan
from tierplan.runtime.checkpoint.weights import hollow_model
from tierplan.runtime.data.synthetic import random_batches
from tierplan.runtime.tracing.models import build_model
from tierplan.runtime.tracing.trace import trace_config, trace_module, trace_one_size
from tierplan.sim.contents import Frozen, Gradients, Params, States, parse_content
from tierplan.sim.workloads.workload import Training, Workload

IA3_INPUTS = "method=ia3,targets=q_proj+gate_proj+up_proj,feedforward=gate_proj+up_proj"
TUNED: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2, LoRA": ("gpt2", {"lora": "r=4"}),
    "gpt2, LoRA of one layer": ("gpt2", {"lora": "r=16,targets=c_attn,dropout=0.1"}),
    "gpt2, DoRA": ("gpt2", {"lora": "method=dora,r=4"}),
    "gpt2, IA3": ("gpt2", {"lora": "method=ia3"}),
    "gpt2, no embedding": ("gpt2", {"freeze": "*.wte.*,*.wpe.*"}),
    "gpt2, last block and head": ("gpt2", {"freeze": "*.wte.*,*.wpe.*,*.h.0.*"}),
    "gpt2, positions alone": ("gpt2", {"freeze": "*.wte.*,*.h.*,*.ln_f.*"}),
    "llama, LoRA": ("llama", {"lora": "r=4,alpha=8"}),
    "llama, LoRA in 16 bits": ("llama", {"lora": "r=4", "trained_dtype": "bf16"}),
    "llama, IA3 at the input of the MLP": ("llama", {"lora": IA3_INPUTS}),
    "llama, LoRA of queries and values": ("llama", {"lora": "r=4,targets=q_proj+v_proj"}),
    "llama, IA3": ("llama", {"lora": "method=ia3"}),
    "llama, norms alone": ("llama", {"freeze": "*proj*,*embed*,lm_head*"}),
    "mixtral, LoRA": ("mixtral", {"lora": "r=4"}),
    "gpt2, QLoRA": ("gpt2", {"lora": "r=4", "base": "nf4"}),
    "gpt2, last block and head on NF4": ("gpt2", {"freeze": "*.wte.*,*.wpe.*,*.h.0.*", "base": "nf4"}),
    "llama, QLoRA": ("llama", {"lora": "r=4", "base": "nf4"}),
    "llama, int8 and DoRA": ("llama", {"lora": "r=4,method=dora", "base": "int8"}),
    "llama, fp8 and LoRA": ("llama", {"lora": "r=4", "base": "fp8"}),
    "llama, LoRA beside words and output": ("llama", {"lora": "r=4,save=embed_tokens+lm_head"}),
    "llama, QLoRA beside norms": ("llama", {"lora": "r=4,save=norm+input_layernorm", "base": "nf4"}),
    "gpt2, LoRA beside words that were tied": ("gpt2", {"lora": "r=4,save=wte"}),
    "mixtral, LoRA beside words and output": ("mixtral", {"lora": "r=4,save=embed_tokens+lm_head"}),
    "bert, LoRA": ("bert", {"lora": "r=4,targets=query+value"}),
}

EACH_KIND = ("gpt2, LoRA of one layer", "gpt2, DoRA", "gpt2, positions alone", "gpt2, last block and head on NF4",
             "gpt2, LoRA beside words that were tied", "llama, LoRA in 16 bits", "llama, IA3 at the input of the MLP",
             "llama, norms alone", "llama, int8 and DoRA", "llama, fp8 and LoRA", "llama, QLoRA beside norms",
             "mixtral, LoRA beside words and output", "bert, LoRA")  # fmt: skip
"""Each family, method, base and way to freeze or to save once: with each `make test`. All others are nightly."""
SAMPLE = [pytest.param(which, marks=() if which in EACH_KIND else pytest.mark.nightly) for which in TUNED]


def described(which: str, **settings: Any) -> tuple[torch.nn.Module, Workload]:
    family, tuning = TUNED[which]
    training: Training = training_of(**{"dtype": "bf16", **settings}, **tuning)
    raw = config_of(family, 1)
    return build_model(raw, training), trace_one_size(family, raw, hollow_model(raw, training), training)


@pytest.mark.sampled
@pytest.mark.parametrize("which", TUNED)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_planned_bytes_are_those_that_pytorch_holds(which: str, dtype: str) -> None:
    model, workload = described(which, dtype=dtype, master_weights=False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW([p for p in trained])
    with saved_by_block(model) as saved:
        loss = model(**next(random_batches(model.config, workload.training))).loss
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    for p in trained:
        assert p.grad is not None
        assert p.grad.dtype == p.dtype
    optimizer.step()
    moments = [m for state in optimizer.state.values() for k, m in state.items() if k != "step"]
    schedule = lower(uniform_plan(workload, UnitPlan()), workload, machine())
    planned: dict[type, int] = dict.fromkeys((Params, Frozen, States, Gradients), 0)
    for b in schedule.buffers:
        kind = type(parse_content(b.content))
        if kind in planned and b.reuses is None:
            planned[kind] += b.size_bytes
    assert planned[Params] == sum(p.nbytes for p in trained)
    assert planned[Frozen] == sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    assert planned[Gradients] == sum(p.grad.nbytes for p in trained if p.grad is not None)
    # PyTorch keeps moments in the type of their parameters; here they are in fp32
    assert planned[States] == sum(m.numel() * 4 for m in moments)
    for unit, expected in zip(workload.blocks, saved, strict=True):
        assert [(t.size_bytes, TORCH_NAMES.get(t.dtype, f"torch.{t.dtype}")) for t in unit.saved] == expected, unit.name
    if dtype == "fp32" and "mixtral" not in which:
        flops = [amount for u in workload.units for kind, amount in u.backward.items() if kind.startswith("matmul_")]
        assert sum(flops) == counter.get_total_flops()


@pytest.mark.parametrize("which", SAMPLE)
def test_a_module_in_memory_is_traced_as_its_config_is(which: str) -> None:
    """PEFT's own model as `trace_module` sees it: also DoRA, IA3, Mixtral and bases in codes."""
    model, workload = described(which, per_device_train_batch_size=1)
    module = trace_module(model, next(random_batches(model.config, workload.training)), workload.training)
    assert module.units == workload.units
    assert module.shared_bytes == workload.shared_bytes


def test_adapters_have_the_type_of_trained_parameters() -> None:
    raw = config_of("llama", 1)
    for base in ("", "nf4", "int4"):
        training = training_of(dtype="bf16", trained_dtype="bf16", lora="r=4", base=base)
        if base != "int4":  # which is not executed
            assert {p.dtype for p in build_model(raw, training).parameters() if p.requires_grad} == {torch.bfloat16}
        block = trace_config("llama", raw, training).blocks[0]
        assert {kind for kind in block.forward if "matmul" in kind} == {"matmul_bf16_flops"}


def test_gptq_codes_are_decoded_once_for_forward_and_backward() -> None:
    """Beside the codes of NF4, which backward decodes anew: so their weights are not saved."""
    of = {base: trace_config("llama", config_of("llama", 2), training_of("bf16", lora="r=4", base=base)).blocks[1]
          for base in ("nf4", "int4")}  # fmt: skip
    weights = {base: [t for t in unit.saved if "decoded_weight" in t.name] for base, unit in of.items()}
    assert (len(weights["nf4"]), len(weights["int4"])) == (0, 7)
    assert of["int4"].backward["elementwise_bytes"] < of["nf4"].backward["elementwise_bytes"]


class LiveBytes(TorchDispatchMode):
    """Bytes of all storages that operations have made and that live: PyTorch's tracker takes no frozen parameters."""

    def __init__(self, *held: torch.Tensor) -> None:
        super().__init__()
        self.known = {t.untyped_storage()._cdata for t in held}
        self.live = self.peak = sum(t.untyped_storage().nbytes() for t in held)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and (storage := t.untyped_storage())._cdata not in self.known:
                self.known.add(storage._cdata)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self.forget, storage._cdata, storage.nbytes())
        return out

    def forget(self, address: int, size_bytes: int) -> None:
        self.known.discard(address)
        self.live -= size_bytes


@pytest.mark.parametrize("which", SAMPLE)
def test_peaks_are_those_of_a_real_step(which: str) -> None:
    model, workload = described(which, per_device_train_batch_size=32, sequence_length=32)
    batch = next(random_batches(model.config, workload.training))
    unique = {t.untyped_storage()._cdata: t for t in (*model.parameters(), *batch.values())}
    with LiveBytes(*unique.values()) as tracker:
        model(**batch).loss.backward()
    predicted = predicted_peaks(workload)[1] + sum(t.nbytes for t in batch.values())
    assert predicted == pytest.approx(tracker.peak, rel=0.02)
