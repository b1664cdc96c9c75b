"""Workloads from a model's config by closed forms: without torch, in milliseconds even for the largest models.

    load_workload(model, training)     the amounts of one training step
    read_config(model)                 the config behind a path or a name
    named_models()                     the names that the package knows

`tierplan.runtime.tracing` makes the same by running the model's class on fake tensors, for any family.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import lru_cache
from importlib import import_module, resources
from pathlib import Path

from tierplan.sim.workloads.families.tape import Tape, Value
from tierplan.sim.workloads.families.units import Config, Family, measure_unit
from tierplan.sim.workloads.workload import Training, Unit, Workload, WorkloadError

__all__ = ["SUPPORTED", "load_workload", "named_models", "read_config"]

SUPPORTED: Mapping[str, str] = {
    "gpt2": "gpt2",
    "opt": "opt",
    "bert": "bert",
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "llama",
}
"""Model types with closed forms, and the module in `tierplan.sim.workloads.families` that has them."""
NO_DROPOUT: Mapping[str, tuple[str, ...]] = {
    "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "t5": ("dropout_rate",),
}
"""What is 0 in the configurations that are known by name."""
POSITIONS: Mapping[str, str] = {"gpt2": "n_positions", "bert": "max_position_embeddings"}
"""What is as long as the sequences there, since the papers' models have positions for the sequences they report on."""


@lru_cache(maxsize=1)
def named_models() -> dict[str, dict[str, object]]:
    """The configurations that the package knows by name."""
    text = resources.files("tierplan.sim.workloads").joinpath("named_models.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def read_config(model: str | Path, training: Training) -> tuple[str, dict[str, object]]:
    """Name and config of a model: a `config.json`, a folder that holds one, or a known name."""
    path = Path(model)
    named = named_models()
    if not path.exists() and str(model) in named:
        config = dict(named[str(model)])
        kind = str(config["model_type"])
        common: dict[str, object] = {"vocab_size": 50257, "tie_word_embeddings": True} if kind == "gpt2" else {}
        if kind in POSITIONS:
            common[POSITIONS[kind]] = training.sequence_length
        return str(model), {**common, **dict.fromkeys(NO_DROPOUT[kind], 0.0), **config}
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        close = get_close_matches(str(model), named, n=1)
        meant = f"did you mean {close[0]!r}? " if close else ""
        raise WorkloadError(
            f"model {str(model)!r} is neither a config.json, nor a folder that holds one, nor a known name; {meant}"
            f"known names: {', '.join(named)}"
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise WorkloadError(f"{file} is not JSON ({error}); give the config.json of a model") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise WorkloadError(f"{file} has no model_type; give the config.json of a `transformers` model")
    name = file.resolve().parent.name if file.name == "config.json" else file.stem
    return name or file.stem, config


def load_workload(model: str | Path, training: Training) -> Workload:
    """What one training step of `model` computes, keeps and owns, by closed forms.

    Raises `WorkloadError` for a model type or a setting that the closed forms do not cover; tracing may cover it.
    """
    name, config = read_config(model, training)
    return workload_of(name, config, training)


def workload_of(name: str, raw: Mapping[str, object], training: Training) -> Workload:
    """The same for a config that is at hand."""
    family, config = family_of(raw), Config(raw)
    if training.attention == "plain":
        raise WorkloadError("plain attention is not covered by the closed forms; use flash, or tracing (--exact)")
    family.check(config, training)
    positions = config.raw.get("n_positions", config.raw.get("max_position_embeddings"))
    if isinstance(positions, int) and training.sequence_length > positions:
        raise WorkloadError(
            f"sequence_length is {training.sequence_length}, but {name} has {positions} positions; "
            "use shorter sequences, or a model with more positions"
        )
    batch, length = training.per_device_train_batch_size, training.sequence_length
    hidden = (batch, length, config.hidden)
    embed = measure_unit("embed", "embed", training, lambda t, ids: family.embed(t, config, ids), (batch, length))
    block = measure_unit("L0", "block", training, lambda t, x: family.block(t, config, x), hidden)

    def run_head(tape: Tape, x: Value) -> Value:
        return family.head(tape, config, x, tape.outside(batch, length, dtype="int64"))

    head = measure_unit("head", "head", training, run_head, hidden)
    blocks: list[Unit] = [replace(block, name=f"L{i}") for i in range(config.layers)]
    return Workload(
        name=name,
        model_type=str(raw["model_type"]),
        training=training,
        units=(embed, *blocks, head),
        shared_bytes=family.shared(config, training),
        config=dict(raw),
    )


def family_of(raw: Mapping[str, object]) -> Family:
    model_type = raw.get("model_type")
    if model_type not in SUPPORTED:
        raise WorkloadError(
            f"model_type {model_type!r} has no closed forms here; there are some for {', '.join(SUPPORTED)}. "
            "Tracing (--exact) covers every transformer class of `transformers`"
        )
    family = import_module(f"tierplan.sim.workloads.families.{SUPPORTED[str(model_type)]}").FAMILY
    assert isinstance(family, Family)
    return family
