"""Closed-form workloads: against published counts, by properties, and by their errors."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.configs import CLOSED, config_of
from tierplan.sim.workloads.adapters import read_adapters
from tierplan.sim.workloads.formats import bases
from tierplan.sim.workloads.models import SUPPORTED, load_workload, named_models, read_config, workload_of
from tierplan.sim.workloads.workload import NOT_OF_AMOUNTS, NotCovered, Training, Unit, WorkloadError
from tierplan.studies.defaults import load_or_trace

BASE = Training(sequence_length=32)


def amounts(unit: Unit) -> dict[str, float]:
    """All amounts of a unit, by name."""
    found: dict[str, float] = {f"forward {k}": v for k, v in unit.forward.items()}
    found |= {f"backward {k}": v for k, v in unit.backward.items()}
    found |= {f"slot {t.index}": t.size_bytes for t in unit.saved}
    found |= {f"slot {t.index} {k}": v for t in unit.saved for k, v in t.recompute.items()}
    return found | {"input": unit.input_bytes, "output": unit.output_bytes}


@pytest.mark.parametrize(
    ("name", "layers", "hidden"), [("gpt-6.7b", 32, 4096), ("gpt-13b", 40, 5120), ("gpt-175b", 96, 12288)]
)
def test_parameters_of_gpt(name: str, layers: int, hidden: int) -> None:
    """By hand: matrices 12 h^2, biases and norms 13 h per block; embeddings; the final norm."""
    expected = layers * (12 * hidden**2 + 13 * hidden) + (50257 + 1024) * hidden + 2 * hidden
    assert load_workload(name, Training()).num_parameters == expected


def test_saved_bytes_of_a_gpt_block_by_hand() -> None:
    """bf16 on CUDA with one-kernel GELU, per token and width h: 2 norms, qkv 3, attention 1, residual 1, MLP 4 + 4."""
    batch, length, hidden, heads = 4, 1024, 5120, 40
    block = load_workload("gpt-13b", Training(per_device_train_batch_size=batch)).blocks[0]
    tokens = batch * length
    big = 2 * tokens * hidden * (2 + 3 + 1 + 1 + 4 + 4)
    statistics = 4 * tokens * 4 + 4 * tokens * heads + 16 + 8
    assert block.saved_bytes == big + statistics


@given(
    family=st.sampled_from(CLOSED),
    backend=st.sampled_from(["cpu", "cuda"]),
    dtype=st.sampled_from(["bf16", "fp16"]),
    length=st.integers(2, 64),
    batch=st.integers(3, 9),
)
@settings(max_examples=40, deadline=None)
def test_amounts_are_affine_in_batch(family: str, backend: str, dtype: str, length: int, batch: int) -> None:
    """Bytes and FLOPs grow by the same amount with each sequence; some, such as seeds, do not grow at all."""
    of = {
        b: workload_of(
            "x",
            config_of(family),
            Training(per_device_train_batch_size=b, sequence_length=length, dtype=dtype, backend=backend),
        )
        for b in (2, 3, batch + 1)
    }
    for first, second, other in zip(*(w.units for w in of.values()), strict=True):
        two, three, many = amounts(first), amounts(second), amounts(other)
        assert two.keys() == three.keys() == many.keys()
        for name, value in two.items():
            assert many[name] == value + (batch - 1) * (three[name] - value), (first.name, name)


@given(family=st.sampled_from(CLOSED), batch=st.integers(1, 8), factor=st.integers(2, 4))
@settings(max_examples=30, deadline=None)
def test_flops_are_linear_in_batch(family: str, batch: int, factor: int) -> None:
    def flops(b: int) -> list[float]:
        workload = workload_of("x", config_of(family), replace(BASE, per_device_train_batch_size=b))
        works = [work for u in workload.units for work in (u.forward, u.backward)]
        return [sum(v for k, v in work.items() if k.endswith("_flops")) for work in works]

    assert flops(factor * batch) == [factor * value for value in flops(batch)]


@given(family=st.sampled_from(CLOSED), depth=st.integers(1, 12))
@settings(max_examples=30, deadline=None)
def test_totals_are_affine_in_depth(family: str, depth: int) -> None:
    def totals(layers: int) -> tuple[float, ...]:
        name = "n_layer" if family == "gpt2" else "num_hidden_layers"
        workload = workload_of("x", {**config_of(family), name: layers}, BASE)
        works = [work for u in workload.units for work in (u.forward, u.backward)]
        return workload.num_parameters, sum(u.saved_bytes for u in workload.units), sum(sum(w.values()) for w in works)

    one, two, many = totals(1), totals(2), totals(depth)
    assert many == tuple(a + (depth - 1) * (b - a) for a, b in zip(one, two, strict=True))


def test_recomputation_starts_from_other_saved_tensors() -> None:
    """Each slice's cost is that of the operations between; together they do not exceed the forward."""
    block = load_workload("gpt-13b", Training()).blocks[0]
    for t in block.saved:
        assert t.index not in t.needs
        assert all(k < len(block.saved) for k in t.needs)
        for kind, amount in t.recompute.items():
            assert 0 < amount <= block.forward[kind]
    products = [t.recompute["matmul_bf16_flops"] for t in block.saved if t.recompute.get("matmul_bf16_flops")]
    assert len(products) == 3  # qkv, the residual behind the output projection, the MLP's first product


def test_every_named_model_can_be_read() -> None:
    for name, config in named_models().items():
        if config["model_type"] in SUPPORTED:
            assert load_workload(name, Training(sequence_length=128)).blocks
        else:
            with pytest.raises(WorkloadError, match=r"--exact"):
                load_workload(name, Training(sequence_length=128))


PUBLISHED = {
    "llama-2-7b": 6_738_415_616, "llama-2-13b": 13_015_864_320, "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824, "llama-3.1-8b": 8_030_261_248, "llama-3.3-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800, "mistral-7b-v0.3": 7_248_023_552, "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200, "mixtral-8x7b": 46_702_792_704, "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-3b": 3_085_938_688, "qwen2.5-7b": 7_615_616_512, "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352, "qwen2.5-72b": 72_706_203_648, "qwen3-0.6b": 596_049_920,
    "qwen2.5-1.5b": 1_543_714_304, "qwen3-1.7b": 1_720_574_976, "llama-2-70b": 68_976_648_192, "yi-34b": 34_388_917_248,
    "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360, "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624, "gemma-3-1b": 999_885_952, "phi-3-mini": 3_821_079_552,
    "phi-4": 14_659_507_200, "gpt-oss-20b": 20_914_757_184, "gpt-oss-120b": 116_829_156_672,
    "deepseek-v2-lite": 15_706_484_224, "gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200, "qwen3-235b-a22b": 235_093_634_560,
}  # fmt: skip
"""Parameters, as the model cards and the files of weights say."""
ROUNDED = {
    "deepseek-llm-7b": 6.91e9, "deepseek-llm-67b": 67.4e9, "gemma-3-4b": 3.884e9, "gemma-3-12b": 11.771e9,
    "gemma-3-27b": 27.016e9, "qwen-1.8b": 1.84e9, "qwen-7b": 7.721e9, "qwen-14b": 14.17e9, "qwen-72b": 72.29e9,
}  # fmt: skip
"""The same where only rounded figures are published: Gemma's text models from table 1 of its report, both columns."""
TRACED_HERE = ("qwen3-30b-a3b",)


QUICK = {name for name in PUBLISHED if named_models()[name]["model_type"] in SUPPORTED} | {*TRACED_HERE}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.nightly) for name in PUBLISHED]
)
def test_a_model_by_name_has_its_published_size(name: str) -> None:
    assert load_or_trace(name, Training(sequence_length=64)).num_parameters == PUBLISHED[name]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly if "gemma" in name else ()) for name in ROUNDED]
)
def test_a_model_by_name_has_its_rounded_size(name: str) -> None:
    found = load_or_trace(name, Training(sequence_length=64)).num_parameters
    assert found == pytest.approx(ROUNDED[name], rel=0.002)


def test_at_least_25_models_that_people_have_are_known_with_their_source() -> None:
    sources = [str(config["source"]) for config in named_models().values() if "source" in config]
    assert len(sources) >= 25
    assert [
        source for source in sources if not re.fullmatch(r"https://huggingface.co/[\w./-]+ \([\w., -]+\)", source)
    ] == []


def test_every_model_with_a_source_is_counted() -> None:
    assert {name for name, c in named_models().items() if "source" in c} == PUBLISHED.keys() | ROUNDED.keys()


def test_a_model_of_the_hubs_cache_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(WorkloadError, match="nor in the cache of the Hugging Face hub"):
        load_workload("some/model", BASE)
    folder = tmp_path / "models--some--model" / "snapshots" / "1a2b"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config_of("llama")))
    assert load_workload("some/model", BASE).units == load_workload(folder, BASE).units
    assert load_workload("some/model", BASE).name == "some/model"
    assert load_workload("Qwen/Qwen3-0.6B", BASE) == load_workload("qwen3-0.6b", BASE), "its source is that of the hub"


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("gpt2", {"n_head": 3, "n_embd": 64}, "n_embd is 64, which n_head, 3, does not divide"),
        ("llama", {"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be a whole number of 1 or more"),
        ("llama", {"num_key_value_heads": 3}, "which num_key_value_heads, 3, does not divide"),
        ("mixtral", {"vocab_size": -1}, "vocab_size is -1"),
        ("gpt2", {"n_embd": "64"}, "n_embd is '64'; it must be a whole number"),
    ],
)
def test_an_impossible_model_is_refused_by_name(
    tmp_path: Path, family: str, change: dict[str, object], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**config_of(family), **change}))
    with pytest.raises(WorkloadError, match=message):
        load_or_trace(str(tmp_path), BASE)


def test_what_the_closed_forms_do_not_cover_is_traced_without_being_asked(tmp_path: Path) -> None:
    """GPT-2's own dropout on a CPU, which has no fused attention with dropout."""
    pytest.importorskip("transformers")
    raw = {**config_of("gpt2"), "attn_pdrop": 0.1}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    on_cpu = replace(BASE, backend="cpu")
    with pytest.raises(NotCovered, match="attn_pdrop"):
        load_workload(tmp_path, on_cpu)
    assert load_or_trace(str(tmp_path), on_cpu).num_parameters == load_workload(tmp_path, BASE).num_parameters


def test_a_trace_has_no_more_positions_than_the_closed_forms() -> None:
    trace = pytest.importorskip("tierplan.runtime.tracing.trace")
    with pytest.raises(WorkloadError, match="x has 64 positions"):
        trace.trace_config("x", config_of("gpt2"), replace(BASE, sequence_length=65))


@pytest.mark.parametrize(("setting", "value"), [("attention", "eager"), ("backend", "tpu"), ("dtype", "fp8")])
def test_settings_that_do_not_exist_are_refused(setting: str, value: str) -> None:
    with pytest.raises(WorkloadError, match=f"{setting} is '{value}'; it must be one of"):
        replace(BASE, **{setting: value})  # type: ignore[arg-type]


def test_a_folder_and_a_file_give_the_same(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("llama")))
    assert load_workload(tmp_path, BASE) == load_workload(tmp_path / "config.json", BASE)


def test_no_torch_is_imported() -> None:
    code = (
        "import sys; from tierplan.sim.workloads.models import load_workload; "
        "from tierplan.sim.workloads.workload import Training; "
        "load_workload('gpt-13b', Training()); assert 'torch' not in sys.modules, 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("model", "content", "training", "message"),
    [
        ("no-such-model", None, BASE, r"neither a config.json.*has the known names"),
        ("x.json", "{", BASE, "is not JSON"),
        ("x.json", "[]", BASE, "no model_type"),
        (
            "x.json",
            json.dumps({**config_of("gpt2"), "initializer_range": float("nan")}),
            BASE,
            "number NaN is not JSON",
        ),
        ("x.json", '{"model_type": "gpt2", "n_layer": 2, "n_layer": 3}', BASE, "field 'n_layer' is there twice"),
        ("x.json", json.dumps({**config_of("gpt2"), "n_layer": 10**30}), BASE, "it must be 10,000 or less"),
        (
            "x.json",
            json.dumps({**config_of("gpt2"), "n_head": 10**12}),
            BASE,
            "n_head is .* must be 10,000,000 or less",
        ),
        ("x.json", json.dumps({**config_of("gpt2"), "resid_pdrop": 2}), BASE, "resid_pdrop is 2 .* between 0 and 1"),
        ("x.json", json.dumps({**config_of("gpt2"), "tie_word_embeddings": 0}), BASE, "is 0 .* true or false"),
        ("x.json", json.dumps({**config_of("llama"), "head_dim": 15}), BASE, "heads are 15 wide"),
        (
            "x.json",
            json.dumps({"model_type": "mamba"}),
            BASE,
            r"'mamba' has no closed forms.*gpt2, opt, bert, llama.*tp\.trace_workload",
        ),
        ("x.json", json.dumps({"model_type": "gpt2"}), BASE, "none of hidden_size, n_embd, d_model"),
        ("x.json", json.dumps({**config_of("gpt2"), "n_embd": -1}), BASE, "n_embd is -1"),
        ("x.json", json.dumps(config_of("gpt2")), replace(BASE, sequence_length=100), "has 64 positions"),
        ("gpt2", None, replace(BASE, sequence_length=1025), "sequence_length is 1025, but gpt2 has 1024 positions"),
        (
            "x.json",
            json.dumps({**config_of("gpt2"), "quantization_config": {"load_in_4bit": True}}),
            BASE,
            "lie in codes of 'bitsandbytes' that are none of fp8, .*; remove it from the config to train all in bf16",
        ),
        (
            "x.json",
            json.dumps({**config_of("gpt2"), "quantization_config": {"quant_method": "fp8"}}),
            BASE,
            r"layers of this model lie in fp8; train adapters on them \(--lora with --base fp8\), or remove it",
        ),
        ("x.json", json.dumps(config_of("gpt2")), replace(BASE, attention="plain"), "plain attention is not covered"),
        (
            "x.json",
            json.dumps({**config_of("gpt2"), "attn_pdrop": 0.1}),
            replace(BASE, backend="cpu"),
            r"attn_pdrop is 0.1.*set attn_pdrop to 0",
        ),
        ("x.json", json.dumps({**config_of("mistral"), "sliding_window": 8}), BASE, "attention window of 8"),
    ],
)
def test_errors(tmp_path: Path, model: str, content: str | None, training: Training, message: str) -> None:
    path = Path(model)
    if content is not None:
        path = tmp_path / model
        path.write_text(content)
    with pytest.raises(WorkloadError, match=message):
        load_workload(path if content is not None else model, training)


def test_numbers_of_numpy_are_pythons_in_training_settings() -> None:
    found = Training(per_device_train_batch_size=np.int64(2), padded=np.bool_(True), max_grad_norm=np.float32(1))
    assert found == Training(per_device_train_batch_size=2, padded=True, max_grad_norm=1.0)
    assert [type(x) for x in (found.per_device_train_batch_size, found.padded, found.max_grad_norm)] == [
        int,
        bool,
        float,
    ]


def test_positions_under_both_names_are_those_that_transformers_takes(tmp_path: Path) -> None:
    config = {**config_of("gpt2"), "n_positions": 64, "max_position_embeddings": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    workload = load_workload(tmp_path, replace(BASE, sequence_length=100))
    transformers = pytest.importorskip("transformers")
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**config))
    assert workload.num_parameters == sum(p.numel() for p in model.parameters())


QUANTIZED: list[tuple[dict[str, object], str]] = [
    ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "int4"),
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "nf4"),
    ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}, "nf4-double"),
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
    ({"quant_method": "gptq", "bits": 3}, ""),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, ""),
    ({"quant_method": "mxfp4"}, ""),
]


@pytest.mark.parametrize(("quantization", "held"), QUANTIZED, ids=str)
@pytest.mark.parametrize("base", bases())
def test_a_base_is_in_the_codes_that_the_checkpoint_has(
    tmp_path: Path, quantization: dict[str, object], held: str, base: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**config_of("llama"), "quantization_config": quantization}))
    training = replace(BASE, lora="r=4", base=base)
    if base == held:
        assert load_workload(tmp_path, training).training.base == base
        return
    method = quantization.get("quant_method")
    lie = f"lie in {held}" if held else f"lie in codes of '{method}' that are none of fp8, int8"
    give = f"give --base {held}, or remove" if held else "remove"
    with pytest.raises(WorkloadError, match=rf"{lie}.*, but base is '{base}'; {give} it from the config for a base"):
        load_workload(tmp_path, training)


@pytest.mark.parametrize(
    ("change", "training", "message"),
    [
        ({"max_position_embeddings": 16}, BASE, "sequence_length is 32, but .* has 16 positions"),
        ({"hidden_size": 63}, BASE, "hidden_size is 63, which num_attention_heads, 4, does not divide"),
        ({"quantization_config": {"quant_method": "x"}}, BASE, "has a quantization_config: layers of this model lie"),
    ],
    ids=str,
)
def test_the_text_model_among_others_is_looked_at(
    tmp_path: Path, change: dict[str, object], training: Training, message: str
) -> None:
    """As a model that has no images beside is."""
    text = {**config_of("llama"), **change}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": text}))
    with pytest.raises(WorkloadError, match=message):
        load_or_trace(str(tmp_path), training)


def test_what_holds_weights_alone_is_named(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "some/model"}')
    with pytest.raises(WorkloadError, match=r"holds adapters alone \(adapter_config.json\); give the model"):
        load_workload(tmp_path, BASE)
    (tmp_path / "model.gguf").write_bytes(b"GGUF\x03\x00\xff\xfe")
    (tmp_path / "adapter_config.json").unlink()
    for model in (tmp_path, tmp_path / "model.gguf"):
        with pytest.raises(WorkloadError, match=r"holds weights of llama.cpp \(GGUF\); give the config.json"):
            load_workload(model, BASE)


def test_a_model_is_called_by_its_folder_or_its_file(tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    for path in (tmp_path / "small" / "config.json", tmp_path / "tiny.json"):
        path.write_text('{"model_type": "gpt2"}')
    assert read_config(tmp_path / "small", Training())[0] == "small"
    assert read_config(tmp_path / "small" / "config.json", Training())[0] == "small"
    assert read_config(tmp_path / "tiny.json", Training())[0] == "tiny"


def test_a_traced_workload_is_the_same_from_what_was_kept() -> None:
    """Micro-batches of other sizes share the sizes of one sequence, and accumulation is no other trace."""
    from tierplan.runtime.tracing.trace import trace_workload

    for batch, accumulation in ((1, 4), (2, 2), (4, 1)):
        training = replace(BASE, per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation)
        assert load_or_trace("gpt2", training, exact=True) == trace_workload("gpt2", training)


def test_feedforward_layers_are_those_of_ia3() -> None:
    assert read_adapters("method=ia3,targets=up_proj,feedforward=up_proj").feedforward == ("up_proj",)
    with pytest.raises(ValueError, match="feedforward layers, which are those of method=ia3"):
        read_adapters("r=4,targets=up_proj,feedforward=up_proj")


@pytest.mark.parametrize("part", ["r=8", "alpha=8", "dropout=0"])
def test_a_rank_is_not_of_ia3(part: str) -> None:
    """PEFT's own settings of IA3 have none of them."""
    name = {"r": "r", "alpha": "lora_alpha", "dropout": "lora_dropout"}[part.partition("=")[0]]
    with pytest.raises(TypeError, match=name):
        pytest.importorskip("peft").IA3Config(**{name: 8})
    for text in (f"method=ia3,{part}", f"{part},method=ia3"):
        with pytest.raises(ValueError, match=rf"adapters '{text}' have {part.partition('=')[0]}.*leave it out"):
            read_adapters(text)
    assert read_adapters(f"method=dora,{part}").method == "dora"


@pytest.mark.parametrize("text", ["r=8,r=16", "r=8,targets=up_proj, r=8", "method=ia3,method=ia3"])
def test_what_adapters_say_twice_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="twice; leave one of them out"):
        read_adapters(text)


OTHER_SETTINGS: dict[str, object] = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "sequence_length": 512, "dtype": "fp16",
    "trained_dtype": "fp32", "autocast": "bf16", "master_weights": False, "optimizer": "adamw:states=8bit",
    "attention": "plain", "max_grad_norm": 1.0, "padded": True, "loss_chunks": 4, "backend": "cpu",
    "loss": "fused", "torch_compile": True, "lora": "r=4", "freeze": "wte*", "base": "nf4", "activation_format": "fp8",
}  # fmt: skip


@pytest.mark.parametrize("name", [f.name for f in fields(Training)])
def test_other_settings_beside_the_same_amounts_are_refused(name: str) -> None:
    """Or their amounts are the same: then the model at these settings says so."""
    training = Training(lora="r=8" if name in ("lora", "base") else "", dtype="fp32" if name == "autocast" else "bf16")
    workload, other = load_workload("gpt2", training), replace(training, **{name: OTHER_SETTINGS[name]})  # type: ignore[arg-type]
    if name in NOT_OF_AMOUNTS:
        assert replace(workload, training=other) == load_workload("gpt2", other)
        return
    with pytest.raises(WorkloadError, match=f"'gpt2' was computed for {name} .*make it anew with these settings"):
        replace(workload, training=other)
    assert replace(workload, training=other, computed_for=None).training == other, "for whoever computed units, too"
