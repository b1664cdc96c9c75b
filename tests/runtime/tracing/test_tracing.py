"""Traced workloads against real CPU steps: PyTorch's hooks, counter and memory tracker are the judges."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import transformers
from torch.distributed._tools.mem_tracker import MemTracker
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import flop_counter
from torch.utils.flop_counter import FlopCounterMode

from tests.configs import CONFIGS, config_of
from tests.runtime.models import skip_older
from tierplan.runtime.autograd.units import find_blocks
from tierplan.runtime.checkpoint import weights
from tierplan.runtime.checkpoint.weights import hollow_model
from tierplan.runtime.data.synthetic import random_batches
from tierplan.runtime.execution.device import TORCH_DTYPES
from tierplan.runtime.tracing import record
from tierplan.runtime.tracing.backend import backend_rules, behind_autocast, cuda_attention
from tierplan.runtime.tracing.models import build_config, build_model
from tierplan.runtime.tracing.trace import trace_config, trace_one_size
from tierplan.sim.workloads.workload import Training, Workload, WorkloadError

SIZES = (1, 2)
FAMILIES = tuple(CONFIGS)


def training_of(dtype: str, **other: Any) -> Training:
    return Training(
        **{"per_device_train_batch_size": 2, "sequence_length": 16, "dtype": dtype, "backend": "cpu", **other}
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_is_not_left_to_guess_the_loss(family: str) -> None:
    """It says so on stderr whenever it has to, as for GPT-2."""
    from transformers.loss.loss_utils import LOSS_MAPPING

    assert hollow_model(config_of(family), training_of("fp32")).loss_type in LOSS_MAPPING


@contextmanager
def saved_by_block(model: torch.nn.Module) -> Iterator[list[list[tuple[int, str]]]]:
    """Storages that autograd saves inside each block, in order of first save, as (bytes, dtype)."""
    blocks = [block for _, block in find_blocks(model)]
    found: list[list[tuple[int, str]]] = [[] for _ in blocks]
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    current: list[int] = []
    seen: dict[int, StorageWeakRef] = {}
    alive: list[StorageWeakRef] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        """Knows which storages were made inside the block that runs now."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            reads = {
                t.untyped_storage()._cdata
                for t in torch.utils._pytree.tree_leaves((args, kwargs))
                if isinstance(t, torch.Tensor)
            }
            for t in torch.utils._pytree.tree_leaves(out):
                if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in reads and current:
                    alive.append(StorageWeakRef(t.untyped_storage()))
            return out

    def pack(t: torch.Tensor) -> torch.Tensor:
        if current:
            storage = t.untyped_storage()
            made_here = any(ref.cdata == storage._cdata and not ref.expired() for ref in alive)
            known = storage._cdata in seen and not seen[storage._cdata].expired()
            if made_here and not known and storage.data_ptr() not in parameters and storage.nbytes():
                seen[storage._cdata] = StorageWeakRef(storage)
                found[current[-1]].append((storage.nbytes(), str(t.dtype)))
        return t

    def enter(i: int) -> Any:
        def hook(*_: Any) -> None:
            current.append(i)
            alive.clear()

        return hook

    def leave(*_: Any) -> None:
        current.pop()

    handles = []
    for i, block in enumerate(blocks):
        handles += [block.register_forward_pre_hook(enter(i)), block.register_forward_hook(leave)]
    with Watch(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield found
    for handle in handles:
        handle.remove()


TORCH_NAMES = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp64": "torch.float64"}


def autocast_of(training: Training) -> torch.autocast:
    """As the Trainer runs a forward, where the training says so."""
    return torch.autocast("cpu", torch.bfloat16, enabled=bool(training.autocast))


@pytest.mark.sampled
@pytest.mark.parametrize("precision", [{"dtype": "fp32"}, {"dtype": "bf16"}, {"dtype": "fp32", "autocast": "bf16"}])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_saved_tensors_are_those_of_a_real_step(family: str, size: int, precision: dict[str, str]) -> None:
    skip_older(family)
    raw, training = config_of(family, size), training_of(**precision)
    workload = trace_one_size(family, raw, hollow_model(raw, training), training)
    model = build_model(raw, training)
    assert workload.num_parameters == sum(p.numel() for p in model.parameters())
    with saved_by_block(model) as real, autocast_of(training):
        loss = model(**next(random_batches(model.config, training))).loss
    assert torch.isfinite(loss)
    blocks = [u for u in workload.blocks if u.name.startswith("L")]
    for unit, expected in zip(blocks, real, strict=True):
        traced = [(t.size_bytes, TORCH_NAMES.get(t.dtype, f"torch.{t.dtype}")) for t in unit.saved]
        assert traced == expected, unit.name


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_adapters_under_autocast_save_what_pefts_do(family: str) -> None:
    pytest.importorskip("peft")
    raw, training = config_of(family, 1), training_of("bf16", lora="r=4,dropout=0.1", autocast="bf16")
    workload, model = trace_config(family, raw, training), build_model(raw, training)
    with saved_by_block(model) as real, autocast_of(training):
        model(**next(random_batches(model.config, training)))
    for unit, expected in zip([u for u in workload.blocks if u.name.startswith("L")], real, strict=True):
        assert [(t.size_bytes, TORCH_NAMES.get(t.dtype, f"torch.{t.dtype}")) for t in unit.saved] == expected


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "mixtral"])
def test_matmul_flops_are_those_of_pytorchs_counter(family: str) -> None:
    skip_older(family)
    raw, training = config_of(family, 1), training_of("fp32")
    workload = trace_one_size(family, raw, hollow_model(raw, training), training)
    model = build_model(raw, training)
    with FlopCounterMode(display=False) as counter:
        model(**next(random_batches(model.config, training))).loss.backward()
    ours = sum(work.get("matmul_fp32_flops", 0) for u in workload.units for work in (u.forward, u.backward))
    assert ours == counter.get_total_flops()


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore:Module is None")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_peaks_are_those_of_pytorchs_memory_tracker(family: str, size: int) -> None:
    """The peaks of forward and of a whole step, put together from the units, against the tracker on the real model.

    Activations outweigh gradients here, as in practice: a unit's gradients count from the start of its backward, since
    a schedule grants them then, while plain training makes them one by one.
    """
    skip_older(family)
    raw = config_of(family, size)
    training = training_of("bf16", per_device_train_batch_size=32, sequence_length=32)
    workload = trace_one_size(family, raw, hollow_model(raw, training), training)
    model = build_model(raw, training)
    batch = next(random_batches(model.config, training))
    tracker = MemTracker()
    tracker.track_external(model, *batch.values())
    cpu = torch.device("cpu")
    with tracker:
        loss = model(**batch).loss
        forward_bytes = tracker.get_tracker_snapshot("peak")[cpu]["Total"]
        loss.backward()
    step_bytes = tracker.get_tracker_snapshot("peak")[cpu]["Total"]
    batch_bytes = sum(t.nbytes for t in batch.values())
    predicted_forward, predicted_step = (batch_bytes + p for p in predicted_peaks(workload))
    assert predicted_forward == pytest.approx(forward_bytes, rel=0.02)
    assert predicted_step == pytest.approx(step_bytes, rel=0.02)


def predicted_peaks(workload: Workload) -> tuple[int, int]:
    """Peaks of forward, and of forward and backward, of one micro-batch with everything kept, from the units."""
    grad_bytes, units = workload.training.grad_bytes, workload.units
    held, below = workload.params_bytes + workload.shared_bytes, workload.first_trained
    kept = [u.output_bytes if behind.saves_input else 0 for u, behind in pairwise(units)]
    peak = 0
    for unit, kept_bytes in zip(units, [*kept, 0], strict=True):
        peak = max(peak, held + unit.saved_bytes + unit.output_bytes + unit.forward_work_bytes)
        held += unit.saved_bytes + kept_bytes
    forward_peak = peak
    for i in reversed(range(below, len(units))):
        unit = units[i]
        borrowed = next((u.num_trained for u in units if u.name == unit.shares and unit.adds_to_shared), 0)
        gradients, passed_back = unit.num_trained * grad_bytes, unit.input_bytes if i > below else 0
        now = gradients + borrowed * grad_bytes + unit.output_bytes + passed_back + unit.backward_work_bytes
        peak = max(peak, held + now)
        held += gradients + borrowed * grad_bytes - unit.saved_bytes - (kept[i - 1] if i else 0)
    return forward_peak, peak


def test_unknown_model_type_names_the_nearest() -> None:
    with pytest.raises(WorkloadError, match=r"model_type 'lama' is unknown.*llama"):
        trace_config("x", {"model_type": "lama"}, training_of("fp32"))


ROUTED = {"model_type": "llama4_text", **CONFIGS["llama"], "head_dim": 16, "num_local_experts": 2}


@pytest.mark.parametrize(
    ("raw", "training", "message"),
    [
        ({"hidden_act": "banana"}, {}, "hidden_act is 'banana', which it does not know; change the config$"),
        ({"rope_scaling": {"rope_type": "magic"}}, {}, "rope_type is 'magic', which it does not know"),
        ({"hidden_size": 66, "head_dim": 36}, {}, r"The hidden size \(66\) is not a multiple of the number"),
        ({"layer_types": ["full_attention"]}, {}, r"`num_hidden_layers` \(3\) must be equal"),
        ({"return_dict": False}, {}, "AttributeError: 'tuple' object has no attribute"),
        (ROUTED, {"lora": "r=8"}, "AttributeError: 'tuple' .*, or name the layers of adapters"),
    ],
    ids=str,
)
def test_what_transformers_refuses_is_said_in_one_error(
    raw: dict[str, object], training: dict[str, Any], message: str
) -> None:
    """It raises errors of many kinds while it reads a config, builds a model, or runs it."""
    raw = {**config_of("llama"), **raw}
    with pytest.raises(
        WorkloadError, match=rf"transformers .* cannot train model_type '{raw['model_type']}'.*{message}"
    ):
        trace_config("x", raw, training_of("fp32", **training))


IMAGES = {"hidden_size": 32, "image_size": 28, "intermediate_size": 64, "num_attention_heads": 2,
          "num_hidden_layers": 1, "vision_output_dim": 32, "projector_input_dim": 32,
          "projector_output_dim": 32}  # fmt: skip
DEEPSEEK = {"num_key_value_heads": 4, "first_k_dense_replace": 1, "n_routed_experts": 16}


@pytest.mark.parametrize(
    ("raw", "num_experts", "chosen"),
    [
        ({"model_type": "mixtral", **CONFIGS["llama"]}, 8, 2),
        ({"model_type": "ernie4_5_moe", **CONFIGS["llama"], "moe_num_experts": 4, "moe_k": 3}, 4, 3),
        (
            {
                "model_type": "llama4",
                "architectures": ["Llama4ForConditionalGeneration"],
                "text_config": {**ROUTED},
                "vision_config": IMAGES,
            },
            2,
            1,
        ),
        ({"model_type": "deepseek_v3", **CONFIGS["llama"], **DEEPSEEK}, 16, 8),
        (config_of("llama"), 1, 1),
    ],
    ids=lambda x: x["model_type"] if isinstance(x, dict) else str(x),
)
def test_a_token_meets_the_experts_that_it_is_sent_to(raw: dict[str, object], num_experts: int, chosen: int) -> None:
    """However the class calls their number, and whether the config says it; counted in the model's own parameters."""
    of_images = "vision_model.*,multi_modal_projector.*" if "vision_config" in raw else ""
    training = training_of("bf16", freeze=of_images)
    counts = {name: p.numel() for name, p in hollow_model(raw, training).named_parameters()}
    of_experts = sum(numel for name, numel in counts.items() if ".experts." in name)
    workload = trace_config("x", raw, training)
    assert (of_experts > 0) == (num_experts > 1)
    assert workload.num_active == sum(counts.values()) - of_experts * (num_experts - chosen) // num_experts
    assert trace_config("x", workload.config, training).units == workload.units, "and it is still that config"


@pytest.mark.parametrize("family", ["falcon_h1", "bamba", "granitemoehybrid"])
def test_a_config_is_read_as_transformers_has_written_it(family: str, tmp_path: Path) -> None:
    """JSON has no infinite numbers, which these have for a limit of time steps."""
    transformers.AutoConfig.for_model(family).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    read = transformers.AutoConfig.from_pretrained(tmp_path)
    assert build_config(raw).time_step_limit == read.time_step_limit == (0.0, inf)


def test_errors_of_our_own_stay_as_they_are() -> None:
    with pytest.raises(KeyError, match="no_such_dtype"):
        build_model(config_of("llama"), cast(Any, SimpleNamespace(attention="flash", dtype="no_such_dtype")))


def test_more_tokens_than_positions_are_refused() -> None:
    with pytest.raises(WorkloadError, match="has 16 positions"):
        trace_config("x", {"model_type": "gpt2", "n_positions": 16}, replace(training_of("fp32"), sequence_length=17))


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(WorkloadError, match="no class with a language-modelling loss"):
        trace_config("x", {"model_type": "resnet"}, training_of("fp32"))


def test_an_encoder_decoder_need_not_say_where_its_decoder_starts() -> None:
    raw = {"model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
    training = Training(sequence_length=8, backend="cpu")
    said = trace_config("said", {**raw, "decoder_start_token_id": 0}, training)
    assert trace_config("not said", raw, training).units == said.units


def test_what_autocast_has_in_fp32_on_cuda_is_so() -> None:
    """Powers, norms and softmax, which a CPU's autocast leaves as they are: so GPT-2's GELU keeps wider tensors."""
    training = training_of("fp32", autocast="bf16", backend="cuda")
    narrow = torch.zeros(2, 3, dtype=torch.bfloat16)
    with backend_rules(training):
        assert torch.nn.functional.linear(narrow.float(), torch.zeros(4, 3)).dtype == torch.bfloat16
        for wide in (narrow**3, narrow.softmax(-1), torch.nn.functional.layer_norm(narrow, (3,)), narrow.sum()):
            assert wide.dtype == torch.float32
        with behind_autocast():
            assert (narrow**3).dtype == torch.bfloat16
    dtypes = {}
    for backend in ("cpu", "cuda"):
        block = trace_config("gpt2", config_of("gpt2"), replace(training, backend=backend)).blocks[0]
        dtypes[backend] = {t.dtype for t in block.saved if t.name.startswith("mlp.act")}
    assert dtypes == {"cpu": {"bf16"}, "cuda": {"bf16", "fp32"}}


def test_autocast_is_of_weights_in_fp32() -> None:
    for wrong in ({"dtype": "bf16"}, {"dtype": "fp16", "lora": "r=8"}, {"dtype": "bf16", "lora": "r=8", "base": "nf4"}):
        with pytest.raises(WorkloadError, match="give dtype fp32, or with adapters bf16, or leave out autocast"):
            training_of(**wrong, autocast="bf16")


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("dtype", "is_causal"), [("fp32", True), ("fp32", False), ("bf16", False)])
def test_grouped_heads_without_a_kernel_are_products_as_pytorch_computes_them(
    dtype: str, is_causal: bool, batch: int
) -> None:
    """The same numbers, gradients and saved tensors. Of CUDA's kernels, flash alone has grouped heads, which knows
    neither fp32 nor a mask."""
    mask = None if is_causal else torch.rand(batch, 1, 6, 6) > 0.3

    def done_by(attend: Any) -> tuple[list[Any], list[Any]]:
        generator = torch.Generator().manual_seed(4)
        leaves = [torch.randn(batch, 6, heads, 8, generator=generator).to(TORCH_DTYPES[dtype]) for heads in (4, 2, 2)]
        query, key, value = (leaf.requires_grad_().transpose(1, 2) for leaf in leaves)
        saved: dict[int, object] = {}

        def pack(t: torch.Tensor) -> torch.Tensor:
            saved.setdefault(t.untyped_storage()._cdata, (t.shape, t.dtype))
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = attend(query, key, value, mask, is_causal=is_causal, scale=0.3, enable_gqa=True)
        out.sum().backward()
        return list(saved.values()), [out, *(leaf.grad for leaf in leaves)]

    with sdpa_kernel(SDPBackend.MATH):
        saved, numbers = done_by(torch.nn.functional.scaled_dot_product_attention)
    my_saved, mine = done_by(cuda_attention)
    assert my_saved == saved
    for a, b in zip(mine, numbers, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_grouped_heads_are_counted_where_pytorch_counts_no_others(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As PyTorch 2.11, in which each model with grouped heads was said not to be one that can be trained."""

    def strict(count: Any) -> Any:
        def counted(*shapes: Any) -> int:
            assert len({shape[1] for shape in shapes}) == 1, "shapes are incompatible"
            return count(*shapes)  # type: ignore[no-any-return]

        return counted

    training, raw = Training(sequence_length=16, dtype="bf16", backend=backend), config_of("llama")
    expected = trace_config("llama", raw, training)
    for name in ("sdpa_flop_count", "sdpa_backward_flop_count"):
        own = strict(getattr(flop_counter, name))
        for module in (flop_counter, record):
            monkeypatch.setattr(module, name, own)
    assert raw["num_attention_heads"] != raw["num_key_value_heads"]
    assert trace_config("llama", raw, training) == expected


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_grouped_heads_in_fp32_keep_their_weights_on_cuda(dropout: float) -> None:
    """By hand: queries, keys and values of all heads, the weights of all pairs (with dropout before and behind, and its
    mask), and what attention gives, in the layout that the next product reads."""
    training = training_of("fp32", backend="cuda", sequence_length=24)
    block = trace_config("llama", {**config_of("llama"), "attention_dropout": dropout}, training).blocks[0]
    own = [(t.name.partition("/")[2], t.size_bytes) for t in block.saved if t.name.startswith("self_attn/")]
    each, pairs = 4 * 2 * 24 * 64, 2 * 4 * 24 * 24
    mask, weights = ([("native_dropout", pairs)], [("native_dropout", 4 * pairs)]) if dropout else ([], [])
    key_and_query = [("mul", each), ("clone", each)]
    assert own == [*key_and_query, ("_safe_softmax", 4 * pairs), *mask, ("clone", each), *weights, ("clone", each)]


def test_under_autocast_each_product_keeps_its_own_cast_of_what_a_block_gets() -> None:
    """A cast of a leaf is kept for all products, as of a parameter: a block's input was a leaf to the trace. BERT's
    query, key and value have no norm in front of them."""
    test_saved_tensors_are_those_of_a_real_step("bert", 1, {"dtype": "fp32", "autocast": "bf16"})


@pytest.mark.parametrize("num_image_blocks", [1, 3])
def test_what_a_batch_of_text_gives_no_gradient_is_to_be_frozen(num_image_blocks: int) -> None:
    """The image tower's states were counted, and the first step ended in an error; plain training makes none.

    A Gemma 3 as its config.json is: the initialisation of the tower looks at values.
    """
    size = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    text = {**size, "num_hidden_layers": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 300_000}
    image = {**size, "num_hidden_layers": num_image_blocks, "image_size": 56, "patch_size": 14}
    raw = {"model_type": "gemma3", "text_config": text, "vision_config": image, "mm_tokens_per_image": 16}
    training = training_of("fp32")
    model: Any = build_model(raw, training)
    model(**next(random_batches(model.config, training))).loss.backward()
    without = {name for name, p in model.named_parameters() if p.grad is None}
    with pytest.raises(WorkloadError, match="get no gradient from a batch of text") as error:
        trace_config("gemma3", raw, training)
    patterns = [pattern.strip(" '") for pattern in str(error.value).split("--freeze ")[1:]]
    assert len(patterns) == 2, "the tower, and what projects"
    frozen = replace(training, freeze=",".join(patterns))
    assert {name for name, p in build_model(raw, frozen).named_parameters() if not p.requires_grad} == without
    workload = trace_config("gemma3", raw, frozen)
    assert [unit.name for unit in workload.units] == ["embed", "L0", "L1", "head"]
    assert workload.num_parameters == sum(p.numel() for p in model.parameters())
    assert workload.num_trained == sum(p.numel() for name, p in model.named_parameters() if name not in without)


def test_experts_take_no_memory_while_a_model_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a layer's lie in one tensor, which Llama 4 fills with zeros: two of its layers took 20 GiB."""
    monkeypatch.setattr(weights, "LARGE", 1024)
    largest: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.device.type == "cpu":
                largest.append(out.untyped_storage().nbytes())
            return out

    with Watch():
        model = hollow_model(config_of("mixtral"), training_of("fp32"))
    assert 0 < max(largest) < 4 * 1024 < max(p.numel() for p in model.parameters())


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("model_type", "window", "padded"),
    [("mistral", None, False), ("mistral", None, True), ("mistral", 8, False), ("bert", None, False)],
)
def test_attention_that_is_not_causal_has_a_rate_of_its_own(
    model_type: str, backend: str, window: int | None, padded: bool
) -> None:
    """It was as quick as a causal kernel's, which skips half of the square."""
    kind = {"model_type": model_type, "attention_probs_dropout_prob": 0.0}
    raw = {**config_of("llama"), **kind, "sliding_window": window}
    block = trace_config("x", raw, training_of("bf16", backend=backend, padded=padded)).blocks[0]
    kinds = [{kind for kind in work if "attention" in kind} for work in (block.forward, block.backward)]
    is_whole = window or padded or model_type == "bert"
    assert kinds == [{"noncausal_attention_bf16_flops" if is_whole else "attention_bf16_flops"}] * 2
