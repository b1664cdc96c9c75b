"""Workloads from a model's config by closed forms: without torch, in milliseconds even for the largest models.

    load_workload(model, training)     the amounts of one training step
    read_config(model)                 the config behind a path or a name
    named_models()                     the names that the package knows

`tierplan.runtime.tracing` makes the same by running the model's class on fake tensors, for most families.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import lru_cache, partial
from importlib import resources
from pathlib import Path
from typing import Any

from tierplan.hwmodels.values.records import RecordError, parse_json
from tierplan.sim.workloads.adapters import read_adapters
from tierplan.sim.workloads.families import bert, gpt2, llama, opt, qwen
from tierplan.sim.workloads.families.slices import with_other_sizes
from tierplan.sim.workloads.families.tape import Tape, Value
from tierplan.sim.workloads.families.units import Config, Family, check_fields, measure_unit
from tierplan.sim.workloads.formats import bases
from tierplan.sim.workloads.fused import with_fused
from tierplan.sim.workloads.workload import NotCovered, Training, Unit, Workload, WorkloadError

SUPPORTED: Mapping[str, Family] = {
    "gpt2": gpt2.FAMILY,
    "opt": opt.FAMILY,
    "bert": bert.FAMILY,
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), llama.FAMILY),
    "qwen": qwen.FAMILY,
}
"""Model types with closed forms, and these."""
NO_DROPOUT: Mapping[str, tuple[str, ...]] = {
    "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "t5": ("dropout_rate",),
}
"""What is 0 in the configurations that are known by name."""
POSITIONS: Mapping[str, str] = {"gpt2": "n_positions", "bert": "max_position_embeddings"}
"""What is as long as the sequences there, since the papers' models have positions for the sequences they report on."""
DEFAULT_POSITIONS: Mapping[str, int] = {"gpt2": 1024, "opt": 2048, "bert": 512}
"""Of models whose config does not say."""
DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
}
"""Sizes of the classes in `transformers` that do not follow from others, where a config leaves them out."""
BATCHES = (1, 2, 4, 8, 16)
"""Sequences in micro-batches, and parts of those asked for, of which it is known what units hold for a while."""

MOST_LAYERS, MOST_OF_A_SIZE = 10_000, 10_000_000
"""Many times those of any model: a unit is made for each layer, and bytes are counted in 64 bits."""
SIZES: Sequence[Sequence[str]] = (
    ("hidden_size", "n_embd", "d_model"),
    ("num_attention_heads", "n_head", "num_heads"),
    ("num_key_value_heads",),
    ("num_hidden_layers", "n_layer", "num_layers"),
    ("vocab_size",),
    ("intermediate_size", "n_inner"),
)
"""One thing each, under the names that families give it."""


@lru_cache(maxsize=1)
def named_models() -> dict[str, dict[str, Any]]:
    """The configurations that the package knows by name."""
    text = resources.files("tierplan.sim.workloads").joinpath("named_models.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def read_config(model: str | Path, training: Training) -> tuple[str, dict[str, object]]:
    """Name and config of a model: a `config.json`, a folder that holds one, a known name, or one of the hub, that its
    cache has or that is known."""
    path, file, named = Path(model), config_path(model), named_models()
    if file is None:
        asked, entry = next((name, e) for name, e in named.items() if str(model) in (name, _hub_name(e)))
        config = {key: value for key, value in entry.items() if key not in ("source", "null")}
        config |= dict.fromkeys(entry.get("null", ()))
        kind = str(config["model_type"])
        common: dict[str, object] = {"vocab_size": 50257, "tie_word_embeddings": True} if kind == "gpt2" else {}
        if kind in POSITIONS and "source" not in entry:
            common[POSITIONS[kind]] = training.sequence_length
        return asked, {**common, **dict.fromkeys(NO_DROPOUT.get(kind, ()), 0.0), **config}
    if path.suffix == ".gguf" or (not file.is_file() and any(path.glob("*.gguf"))):
        raise WorkloadError(f"{model} holds weights of llama.cpp (GGUF); give the config.json of the model they are of")
    adapters = path / "adapter_config.json"
    if not file.is_file() and adapters.is_file():
        raise WorkloadError(
            f"{path} holds adapters alone (adapter_config.json); give the model that they are of (its "
            "base_model_name_or_path), with --lora"
        )
    if not file.is_file():
        meant = f"did you mean {' or '.join(map(repr, close))}? " if (close := _similar(str(model), named)) else ""
        if file.suffix in (".json", ".toml") or path.is_absolute():
            raise WorkloadError(f"there is no file {str(file)!r}; give the config.json of a model, or a known name")
        raise WorkloadError(
            f"model {str(model)!r} is neither a config.json, nor a folder that holds one, nor a known name, nor in the "
            f"cache of the Hugging Face hub; {meant}`tierplan workload list` has the known names"
        )
    try:
        config = parse_json(file.read_bytes())
    except RecordError as error:
        raise WorkloadError(f"{file}: {error}; give the config.json of a model") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise WorkloadError(f"{file} has no model_type; give the config.json of a `transformers` model")
    config = {**DEFAULTS.get(config["model_type"], {}), **config}
    _check_codes(file, config.get("quantization_config") or text_of(config).get("quantization_config"), training)
    name = file.resolve().parent.name if file.name == "config.json" else file.stem
    for part in (config, text_of(config)):
        _check_shape(file if path.exists() else model, part)
    return (name or file.stem) if path.exists() else str(model), config


def _check_codes(file: Path, quantization: object, training: Training) -> None:
    """Refuses a checkpoint in codes where all is trained, or where the base is to be in others."""
    if not quantization:
        return
    codes = format_of_checkpoint(quantization) if isinstance(quantization, Mapping) else ""
    method = quantization.get("quant_method", "bitsandbytes") if isinstance(quantization, Mapping) else quantization
    lie = f"in {codes}" if codes else f"in codes of {method!r} that are none of {', '.join(bases())}"
    if not training.base:
        adapters = f"train adapters on them (--lora with --base {codes}), or " * bool(codes)
        raise WorkloadError(
            f"{file} has a quantization_config: layers of this model lie {lie}; {adapters}remove it from the config to "
            f"train all in {training.dtype}"
        )
    if codes != training.base:
        give = f"give --base {codes}, or " * bool(codes)
        raise WorkloadError(
            f"{file} has a quantization_config: layers of this model lie {lie}, but base is {training.base!r}; {give}"
            f"remove it from the config for a base that is made of plain weights"
        )


def format_of_checkpoint(quantization: Mapping[str, object]) -> str:
    """The format in which a `quantization_config` has linear layers; nothing where it is none of those of a base."""
    method, bits = str(quantization.get("quant_method", "bitsandbytes")), quantization.get("bits")
    if method == "bitsandbytes" and quantization.get("load_in_8bit"):
        return "int8"
    if method == "bitsandbytes" and quantization.get("bnb_4bit_quant_type") == "nf4":
        return "nf4-double" if quantization.get("bnb_4bit_use_double_quant") else "nf4"
    if method == "gptq" and (bits, quantization.get("group_size", 128)) == (4, 128):
        return "int4"
    return "fp8" if method in ("fp8", "fbgemm_fp8") else ""


def config_path(model: str | Path) -> Path | None:
    """The file that a model's config is read from, there or not; None for a model that is known by name."""
    path, asked, named = Path(model), str(model), named_models()
    if path.exists():
        return path / "config.json" if path.is_dir() else path
    if asked in named:
        return None
    return _cached(asked) or (None if asked in map(_hub_name, named.values()) else path)


def _similar(asked: str, names: Iterable[str]) -> list[str]:
    """Those that begin as `asked` does, whatever is between letters and digits; else the nearest one."""

    def plain(name: str) -> str:
        return re.sub("[^a-z0-9]", "", name.lower())

    begin = [name for name in names if plain(asked) and plain(name).startswith(plain(asked))]
    return begin or get_close_matches(asked, names, n=1)


def _hub_name(entry: Mapping[str, object]) -> str:
    """`org/name` of a known model whose source is the hub."""
    return str(entry.get("source", "")).removeprefix("https://huggingface.co/").partition(" ")[0]


def _cached(model: str) -> Path | None:
    """The `config.json` of `org/name` in the hub's cache, the newest snapshot's."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    folder = Path(os.environ.get("HF_HUB_CACHE", home / "hub")) / f"models--{model.replace('/', '--')}" / "snapshots"
    configs = folder.glob("*/config.json") if model.count("/") == 1 else ()
    return max(configs, key=lambda file: file.stat().st_mtime, default=None)


def _check_shape(where: str | Path, raw: Mapping[str, object]) -> None:
    """Refuses sizes that no model has, by name, before anything is computed or traced from them."""
    for names in SIZES:
        for name in names:
            value = raw.get(name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise WorkloadError(f"{where}: {name} is {value!r}; it must be a whole number of 1 or more")
            most = MOST_LAYERS if names is SIZES[3] else MOST_OF_A_SIZE
            if value is not None and value > most:
                raise WorkloadError(f"{where}: {name} is {value:,}; it must be {most:,} or less")
    (hidden_name, hidden), (heads_name, heads), (kv_name, kv) = (
        next(((name, raw[name]) for name in names if raw.get(name) is not None), ("", 0)) for names in SIZES[:3]
    )
    if hidden and heads and not ("head_dim" in raw or "d_kv" in raw) and int(hidden) % int(heads):  # type: ignore[call-overload]
        raise WorkloadError(
            f"{where}: {hidden_name} is {hidden}, which {heads_name}, {heads}, does not divide; attention's heads have "
            "all the same width, so change one of the two, or give head_dim"
        )
    if heads and kv and int(heads) % int(kv):  # type: ignore[call-overload]
        raise WorkloadError(
            f"{where}: {heads_name} is {heads}, which {kv_name}, {kv}, does not divide; as many heads share each key"
        )


def load_workload(model: str | Path, training: Training) -> Workload:
    """What one training step of `model` computes, keeps and owns, by closed forms.

    Raises `WorkloadError` for a model type or a setting that the closed forms do not cover; tracing may cover it.
    """
    name, config = read_config(model, training)
    return workload_of(name, config, training)


def workload_of(name: str, raw: Mapping[str, object], training: Training) -> Workload:
    """The same for a config that is at hand."""
    batch = training.per_device_train_batch_size
    sizes = [*BATCHES, *(batch // parts for parts in BATCHES)]
    return with_other_sizes(_of_one_size(name, raw, training), partial(_of_one_size, name, raw), sizes)


def _of_one_size(name: str, raw: Mapping[str, object], training: Training) -> Workload:
    family, config = family_of(raw), Config(raw)
    adapters = read_adapters(training.lora or "targets=all-linear")
    is_known = adapters.targets == ("all-linear",) or {*adapters.targets} <= {*family.layers}
    is_known &= {*adapters.save} <= {family.words, "lm_head"}
    is_plain = not training.lora or (adapters.method == "lora" and is_known and bool(family.layers))
    if not is_plain or training.freeze or (training.base and not training.lora):
        raise NotCovered(
            "of adapters and frozen parameters, the closed forms cover LoRA on linear layers of a base, with "
            f"words and output saved: of {raw['model_type']}, on {', '.join(sorted(family.layers)) or 'none'}, and "
            f"save={family.words}+lm_head; use tracing (--exact, tp.trace_workload)"
        )
    if training.autocast and not (family.casts and training.lora):
        raise NotCovered("autocast is not covered by the closed forms; use tracing (--exact, tp.trace_workload)")
    if training.padded:
        raise NotCovered("padded batches are not covered by the closed forms; use tracing (--exact, tp.trace_workload)")
    if training.attention == "plain":
        raise NotCovered(
            "plain attention is not covered by the closed forms; use flash, or tracing (--exact, tp.trace_workload)"
        )
    check_fields(config, family)
    family.check(config, training)
    check_settings(name, raw, training)
    batch, length = training.per_device_train_batch_size, training.sequence_length
    hidden = (batch, length, config.hidden)
    embed = measure_unit("embed", "embed", training, lambda t, ids: family.embed(t, config, ids), (batch, length))

    def run_block(tape: Tape, x: Value) -> Value:
        return family.block(tape, config, x)

    def run_head(tape: Tape, x: Value) -> Value:
        return family.head(tape, config, x, tape.outside(batch, length, dtype="int64"))

    head = measure_unit("head", "head", training, run_head, hidden)
    block = measure_unit("L0", "block", training, run_block, hidden)
    blocks: list[Unit] = [replace(block, name=f"L{i}") for i in range(config.layers)]
    if embed.is_frozen:  # nobody wants the gradient of what it makes
        blocks[0] = measure_unit("L0", "block", training, run_block, hidden, passes_back=False)
    return with_fused(
        Workload(
            name=name,
            model_type=str(raw["model_type"]),
            training=training,
            units=(embed, *blocks, head),
            shared_bytes=family.shared(config, training),
            config=dict(raw),
        )
    )


def by_operator(workload: Workload) -> Workload:
    """The workload where it is chosen operator by operator what is kept: of compiled blocks what PyTorch's own keep."""
    if not workload.training.torch_compile:
        return workload
    plain = workload_of(workload.name, workload.config, replace(workload.training, torch_compile=False))
    pairs = zip(workload.units, plain.units, strict=True)
    return replace(workload, units=tuple(replace(unit, saved=own.saved, common=own.common) for unit, own in pairs))


def check_settings(name: str, raw: Mapping[str, object], training: Training) -> None:
    """Refuses sequences that are longer than the positions that a model has, but for relative ones (T5); and another
    type for trained parameters where these are the model's own."""
    if training.trained_dtype not in (None, training.dtype) and not training.lora:
        raise WorkloadError(
            f"trained_dtype is {training.trained_dtype!r}, but without adapters the parameters of the model are "
            f"trained, which are in {training.dtype!r}; leave it out, or give adapters to train, such as lora r=16"
        )
    text = text_of(raw)
    positions = text.get(
        "max_position_embeddings", text.get("n_positions", DEFAULT_POSITIONS.get(str(text.get("model_type"))))
    )
    is_relative = "relative_attention_num_buckets" in text
    if isinstance(positions, int) and training.sequence_length > positions and not is_relative:
        raise WorkloadError(
            f"sequence_length is {training.sequence_length}, but {name} has {positions} positions; "
            "use shorter sequences, or a model with more positions"
        )


def text_of(raw: Mapping[str, object]) -> Mapping[str, object]:
    """The part of a config that describes the text model, where it has others beside; else all of it."""
    nested = raw.get("text_config")
    return nested if isinstance(nested, Mapping) else raw


def sizes_of(raw: Mapping[str, object]) -> tuple[int, int, int]:
    """Heads of attention, those of keys and values, and the width of feed-forward; 0 for what a config does not say."""
    text = text_of(raw)
    heads, groups, width = (
        next((size for name in SIZES[k] if isinstance(size := text.get(name), int)), 0) for k in (1, 2, 5)
    )
    return heads, groups, width


def family_of(raw: Mapping[str, object]) -> Family:
    model_type = raw.get("model_type")
    if model_type not in SUPPORTED:
        raise NotCovered(
            f"model_type {model_type!r} has no closed forms here; there are some for {', '.join(SUPPORTED)}. "
            "Tracing (--exact, tp.trace_workload) covers most other classes of `transformers`; docs/limits.md says "
            "which it does not"
        )
    return SUPPORTED[str(model_type)]
