"""From a config to a model of `transformers`, and to the inputs that training gives it."""

from __future__ import annotations

import fnmatch
import traceback
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import accumulate
from typing import Any

from torch import nn

from tierplan.hwmodels.values.extras import words_of_missing
from tierplan.runtime.autograd.chunked_loss import set_loss_chunks
from tierplan.runtime.autograd.coded import code_base
from tierplan.runtime.execution.device import TORCH_DTYPES
from tierplan.sim.workloads.adapters import Adapters, read_adapters
from tierplan.sim.workloads.families.units import NO_NEXT_TOKEN
from tierplan.sim.workloads.workload import EXPERTS, Training, WorkloadError

MAPPINGS = [f"MODEL_FOR_{task}_LM_MAPPING" for task in ("CAUSAL", "SEQ_TO_SEQ_CAUSAL", "MASKED")]


@contextmanager
def refusals_of_transformers(raw: Mapping[str, object], training: Training) -> Iterator[None]:
    """Inside, what a class of `transformers` or peft raises becomes a `WorkloadError`; our own errors stay as they
    are."""
    try:
        yield
    except Exception as error:
        import transformers

        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__")).startswith("tierplan."):
            raise
        unknown = [
            name for name, value in _named_settings(raw) if isinstance(error, KeyError) and error.args == (value,)
        ]
        what = f"{unknown[0]} is {error}, which it does not know; " if unknown else ""
        what = what or f"{type(error).__name__}: {' '.join(str(error).split())}; "
        layers = ", or name the layers of adapters (targets=q_proj+v_proj)" if training.lora else ""
        raise WorkloadError(
            f"transformers {transformers.__version__} cannot train model_type {raw.get('model_type')!r} with this "
            f"config: {what}change the config{layers}"
        ) from error


def _named_settings(raw: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Names and values of a config, those of its parts, too."""
    for name, value in raw.items():
        if isinstance(value, Mapping):
            yield from _named_settings(value)
        else:
            yield name, value


def build_config(raw: Mapping[str, object]) -> Any:
    """The config object, with settings that only inference has a use for switched off."""
    import transformers

    values = {name: _decoded(value) for name, value in raw.items()}
    model_type = values.pop("model_type", None)
    if model_type not in transformers.CONFIG_MAPPING:
        known = sorted(k for k in transformers.CONFIG_MAPPING if isinstance(k, str))
        near = get_close_matches(str(model_type), known, n=5) or ["gpt2", "llama", "bert", "t5"]
        raise WorkloadError(
            f"model_type {model_type!r} is unknown to transformers {transformers.__version__}; "
            f"it knows {len(known)}, among them {', '.join(near)}"
        )
    for name in ("torch_dtype", "dtype", "transformers_version", "_name_or_path"):
        values.pop(name, None)
    # Token ids that a small vocabulary does not have are of no use here, and are complained about.
    vocabulary = values.get("vocab_size")
    config_class = transformers.CONFIG_MAPPING[model_type]
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        default = values.get(name, getattr(config_class, name, None))
        if isinstance(default, int) and isinstance(vocabulary, int) and default >= vocabulary:
            values[name] = None
    config = config_class(**values)
    config.use_cache = False
    return config


def _decoded(value: Any) -> Any:
    """With infinite numbers, and nan, where `save_pretrained` has written `{"__float__": "Infinity"}`."""
    if isinstance(value, dict):
        is_float = [*value] == ["__float__"]
        return float(value["__float__"]) if is_float else {name: _decoded(one) for name, one in value.items()}
    return [*map(_decoded, value)] if isinstance(value, list) else value


def experts_of(config: Any) -> dict[str, int]:
    """How many experts a block has, and how many of them a token is sent to, under the names of `Workload.num_active`;
    nothing of a model without experts."""
    text = config.get_text_config()
    counts = {name: getattr(text, name, None) for name in (*EXPERTS, "num_experts_per_tok")}
    return {name: count for name, count in counts.items() if isinstance(count, int)}


def model_class(config: Any) -> type[nn.Module]:
    """The class that has a loss for language modelling: the config's own architecture if it is one, else by type."""
    import transformers
    from transformers.models.auto import modeling_auto

    for name in config.architectures or ():
        candidate = getattr(transformers, name, None)
        if candidate is not None and ("LM" in name or "ConditionalGeneration" in name):
            return candidate  # type: ignore[no-any-return]
    order = MAPPINGS if not config.is_encoder_decoder else MAPPINGS[1:]
    for mapping in order:
        table = getattr(modeling_auto, mapping)
        if type(config) in table and (mapping != MAPPINGS[0] or config.model_type not in ("bert", "roberta")):
            return table[type(config)]  # type: ignore[no-any-return]
    raise WorkloadError(
        f"transformers has no class with a language-modelling loss for model_type {config.model_type!r}; "
        "causal, masked and sequence-to-sequence models are supported"
    )


def build_model(raw: Mapping[str, object], training: Training) -> nn.Module:
    """The model in training mode, with random weights (or none, on the meta device or in a fake-tensor mode)."""
    with refusals_of_transformers(raw, training):
        config = build_config(raw)
        implementation = "sdpa" if training.attention == "flash" else "eager"
        cls = model_class(config)
        dtype = TORCH_DTYPES[training.dtype]
        if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0  # any: only sizes matter here
        try:
            model = cls._from_config(config, dtype=dtype, attn_implementation=implementation)  # type: ignore[attr-defined]
        except ValueError as error:
            if "scaled_dot_product_attention" not in str(error):
                raise
            model = cls._from_config(config, dtype=dtype, attn_implementation="eager")  # type: ignore[attr-defined]
        model.config.loss_type = getattr(model, "loss_type", None) or model.config.__dict__.get("loss_type")
        model.loss_type = model.config.loss_type or "ForCausalLM"  # which it takes then, with a warning
        model.tie_weights()  # those of a model without memory have come apart; once adapted, they stay as they are
        base, model = model, tuned(model.train(), training)
        if training.sequence_length == 1 and base.loss_type == "ForCausalLM":
            if training.loss_chunks > 1:  # of the next token by name
                _no_next_token()
            base.loss_function = _no_next_token  # which models that look for no next token do not call
        else:
            set_loss_chunks(model, training.loss_chunks)
        return model


def _no_next_token(*unused: object, **ignored: object) -> None:
    raise WorkloadError(NO_NEXT_TOKEN)


def tuned(model: Any, training: Training) -> nn.Module:
    """The model with only those parameters trained that the training asks for: with adapters, or parts of it frozen."""
    if training.lora:
        if training.base:
            code_base(model, training.base, whole=True)
        model = _with_adapters(model, read_adapters(training.lora))
        unknown = {*training.saved_modules} - {name.rpartition(".")[2] for name, _ in model.named_modules()}
        if unknown:
            raise WorkloadError(f"save has {'+'.join(sorted(unknown))}, which no module of the model is called")
        for parameter in filter(lambda p: p.requires_grad, model.parameters()):
            parameter.data = parameter.data.to(TORCH_DTYPES[training.dtype_of_trained])
    for name in matching(model, filter(None, training.freeze.split(","))):
        model.get_parameter(name).requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise WorkloadError(
            f"freeze {training.freeze!r} matches all parameters, so that nothing is trained; freeze fewer"
        )
    if training.base and not training.lora:
        code_base(model, training.base, whole=False)
    return model  # type: ignore[no-any-return]


def _with_adapters(model: Any, adapters: Adapters) -> Any:
    try:
        import peft
    except ImportError as error:
        raise WorkloadError(words_of_missing(error, "a model with adapters")) from error
    targets = (adapters.targets[0] if adapters.targets == ("all-linear",) else list(adapters.targets)) or None
    common: dict[str, Any] = {"target_modules": targets, "modules_to_save": list(adapters.save) or None}
    if not model.config.is_encoder_decoder and type(model).__name__.endswith(("ForCausalLM", "LMHeadModel")):
        common["task_type"] = "CAUSAL_LM"
    if adapters.method != "ia3":
        common |= {"r": adapters.r, "lora_alpha": adapters.alpha, "lora_dropout": adapters.dropout}
        common["use_dora"] = adapters.method == "dora"
    elif adapters.feedforward:
        common["feedforward_modules"] = list(adapters.feedforward)
    kind = peft.IA3Config if adapters.method == "ia3" else peft.LoraConfig
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what peft sets by itself for the family
            return peft.get_peft_model(model, kind(**common))
    except (ValueError, RuntimeError) as error:  # such as a copy of codes, which cannot be trained
        raise WorkloadError(f"peft cannot adapt {type(model).__name__}: {error}") from error


def matching(model: nn.Module, patterns: Iterable[str]) -> tuple[str, ...]:
    """Names of the model's parameters that match shell patterns, of which each must match one."""
    names = [name for name, _ in model.named_parameters()]
    chosen: set[str] = set()
    for pattern in patterns:
        matched = fnmatch.filter(names, pattern)
        if not matched:
            raise WorkloadError(
                f"no parameter of {type(model).__name__} matches {pattern!r}; its names are such as {names[0]!r} and "
                f"{names[-1]!r}, a tied parameter has the one where it comes first, and * stands for any characters"
            )
        chosen.update(matched)
    return tuple(name for name in names if name in chosen)


def refuse_untrained(name: str, trained: Mapping[str, int], *, used: Collection[str]) -> None:
    """Refuses parameters (a number by name) that a batch does not use, by few patterns that match none that it does."""
    unused = [name for name in trained if name not in used]
    patterns = set()
    for of_parameter in unused:
        modules = accumulate(of_parameter.split(".")[:-1], "{}.{}".format)
        patterns.add(next((f"{m}.*" for m in modules if not fnmatch.filter(used, f"{m}.*")), of_parameter))
    if unused:
        raise WorkloadError(
            f"{name}: {sum(trained[n] for n in unused):,} parameters get no gradient from a batch of text, such as "
            "those of an image tower: plain training leaves them as they are; freeze them, with "
            + " ".join(f"--freeze {pattern!r}" for pattern in sorted(patterns))
        )
