"""Weights in and out, one unit at a time: a model larger than memory is never whole in memory.

model = hollow_model(config, training)              the model's class without parameters
train(..., weights=random_weights(model, seed=0))   or checkpoint_weights(model, folder)
export(trainer, folder)                             a folder that `from_pretrained` loads

WeightsError(ValueError)   a checkpoint that lacks a parameter, or a module that cannot be initialised
"""

from __future__ import annotations

import itertools
import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from tierplan.runtime.autograd.coded import CodedLinear
from tierplan.runtime.autograd.units import ModelUnit, placeholder
from tierplan.runtime.execution.placement import Weights
from tierplan.runtime.memory.files import Folder, make_folder, naming, remove_file, sync_folder
from tierplan.runtime.tracing.models import build_model
from tierplan.sim.contents import Frozen, Params
from tierplan.sim.trace import write_atomically
from tierplan.sim.workloads.workload import Training

if TYPE_CHECKING:
    from tierplan.runtime.trainer import Trainer

INDEX_NAME = "model.safetensors.index.json"
SAVED_MODULE = ".modules_to_save.default."
"""In the names of what PEFT trains a copy of."""
SAFETENSORS_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
LARGE = 2**27
"""Values of a tensor that is none but a parameter: no mask or table of positions is as large."""


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class WeightsError(ValueError):
    """Weights that cannot be had. Names the parameter and the place."""


def hollow_model(config: Mapping[str, object], training: Training) -> nn.Module:
    """The model of a `config.json`, in training mode, with parameters that have shapes and no memory; buffers are
    real."""
    with register_module_parameter_registration_hook(_on_meta), _LargeOnMeta():  # type: ignore[arg-type]
        model = build_model(config, training)
    hollow: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                if id(p) not in hollow:
                    hollow[id(p)] = nn.Parameter(placeholder(p.shape, p.dtype), requires_grad=p.requires_grad)
                module._parameters[name] = hollow[id(p)]
    return model


def _on_meta(module: nn.Module, name: str, p: nn.Parameter) -> nn.Parameter | None:
    """Parameters lose their memory as they are registered; buffers, which some models compute, keep theirs."""
    return None if p.device.type == "meta" else nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad)


class _LargeOnMeta(TorchFunctionMode):
    """Inside, tensors that only parameters are as large as never have memory: all experts of a layer lie in one. What
    has none is given no first values, for which it would take as long as for real ones."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if getattr(kwargs.get("tensor"), "device", None) == torch.device("meta"):  # a first value, by `torch.nn.init`
            return kwargs["tensor"]
        if func in (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn) and kwargs.get("device") is None:
            sizes = kwargs.get("size") or (args[0] if args and isinstance(args[0], Sequence) else args)
            if math.prod(sizes) >= LARGE:
                kwargs["device"] = "meta"
        return func(*args, **kwargs)


def random_weights(model: nn.Module, *, seed: int) -> Weights:
    """Random parameters by the model's own rule for each module; a unit's depend on the seed and its name alone."""
    children_first = [(m, {id(p) for p in m.parameters()}) for m in reversed(list(model.modules()))]
    rule: Any = getattr(model, "_init_weights", None)

    def weights(unit: ModelUnit) -> list[torch.Tensor]:
        otherwise = f"{type(model).__name__} has no rule to initialise {{!r}}; start from a checkpoint"
        with _made(unit, dict(unit.all_parameters), seed, otherwise) as wanted:
            for p in model.parameters():
                p._is_hf_initialized = id(p) not in wanted  # type: ignore[attr-defined]  # what transformers goes by
            for module, inside in children_first:
                if inside & wanted and rule is not None:
                    module._is_hf_initialized = False  # type: ignore[assignment]
                    rule(module)
                elif inside & wanted:
                    getattr(module, "reset_parameters", lambda: None)()
            _reset_adapters(model, wanted)
            for layer in (m for m, inside in children_first if isinstance(m, CodedLinear) and inside & wanted):
                plain = nn.Linear(layer.in_features, layer.out_features, bias=False, dtype=layer.dtype)
                if rule is not None:
                    rule(plain)
                layer.take(plain.weight.view(layer.shape))
        return [p.detach() for _, p in unit.all_parameters]

    return weights


@contextmanager
def _made(
    unit: ModelUnit, parameters: Mapping[str, torch.Tensor], seed: int, otherwise: str
) -> Iterator[frozenset[int]]:
    """Inside, these parameters of a unit are given values, with random numbers of the unit's own; by identity.

    Raises `WeightsError` where one has none afterwards.
    """
    for p in parameters.values():
        p.data = torch.full(p.shape, torch.nan if p.is_floating_point() else 0, dtype=p.dtype)
    with torch.random.fork_rng(devices=()), torch.no_grad():
        torch.manual_seed(seed * 1_000_003 + sum(unit.name.encode()) * 7919 + len(unit.name))
        yield frozenset(map(id, parameters.values()))
    for name, p in parameters.items():
        if torch.isnan(p).any():
            raise WeightsError(otherwise.format(name))


def _reset_adapters(model: nn.Module, wanted: Set[int]) -> None:
    """Gives adapters that have one of these parameters their first values, by PEFT's own rules."""
    for module in model.modules() if hasattr(model, "peft_config") else ():
        for name, more in (("reset_lora_parameters", (True,)), ("reset_ia3_parameters", ())):
            if hasattr(module, name) and any(id(p) in wanted for p in module.parameters()):
                getattr(module, name)("default", *more)


def checkpoint_weights(model: nn.Module, folder: Folder, *, seed: int = 0) -> Weights:
    """Parameters from the safetensors files of a folder, read tensor by tensor; adapters begin by PEFT's rules."""
    files = _files_by_key(Path(folder))
    prefix = f"{getattr(model, 'base_model_prefix', '')}."

    is_adapted = hasattr(model, "peft_config")
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}

    def known_key(name: str) -> str | None:
        if is_adapted:
            name = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
            name = name.replace(".original_module.", ".").replace(SAVED_MODULE, ".")
            name = tied.get(name, name)  # its copy is a parameter of its own
        bare = name.removeprefix(prefix)
        for key in (name, bare, prefix + name):
            for candidate in (key, key.replace("LayerNorm.weight", "LayerNorm.gamma").replace(".bias", ".beta")):
                if candidate in files:
                    return candidate
        return None

    def key_of(name: str) -> str:
        if (key := known_key(name)) is not None:
            return key
        raise WeightsError(
            f"{folder} has no tensor {name!r}, which {type(model).__name__} needs; it has {len(files)} others. Is this "
            "the config.json of the checkpoint? If transformers renames tensors as it loads them, as it does experts', "
            "save it once more: from_pretrained(...).save_pretrained(..., save_original_format=False)"
        )

    coded = [(name, module) for name, module in model.named_modules() if isinstance(module, CodedLinear)]
    of_coded = {id(p) for _, layer in coded for p in layer.coded}

    def read(name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        key = key_of(name)
        with _tensors_in(files[key]) as file:
            tensor: torch.Tensor = file.get_tensor(key)
        if tensor.shape != shape:
            raise WeightsError(
                f"{key!r} in {files[key]} has shape {tuple(tensor.shape)}, but the model needs {tuple(shape)}; is "
                "the config.json that of this checkpoint?"
            )
        return tensor.to(dtype)

    for name, buffer in saved_buffers(model).items():
        if known_key(name) is not None:
            buffer.copy_(read(name, buffer.shape, buffer.dtype))

    def weights(unit: ModelUnit) -> list[torch.Tensor]:
        adapters = {name: p for name, p in unit.parameters if is_adapted and SAVED_MODULE not in name}
        otherwise = "adapter {!r} has no rule of its own to begin with; train it from Python"
        with _made(unit, adapters, seed, otherwise) as adapted:
            _reset_adapters(model, adapted)
        for name, layer in coded:
            if not {id(p) for p in layer.coded}.isdisjoint(id(p) for _, p in unit.all_parameters):
                layer.take(read(f"{name}.weight", layer.shape, layer.dtype))
        there = adapted | of_coded
        return [p.detach() if id(p) in there else read(name, p.shape, p.dtype) for name, p in unit.all_parameters]

    return weights


@contextmanager
def _tensors_in(path: Path) -> Iterator[Any]:
    """The safetensors file. Raises `WeightsError` where it is broken."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path} is no whole safetensors file ({error}); get the checkpoint again") from error


def _files_by_key(folder: Path) -> dict[str, Path]:
    index = folder / INDEX_NAME
    if index.exists():
        return {key: folder / name for key, name in _weight_map(index).items()}
    file_of: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with _tensors_in(path) as file:
            file_of.update(dict.fromkeys(file.keys(), path))
    if not file_of:
        raise WeightsError(f"{folder} holds no *.safetensors; give a checkpoint in that format, or a config.json alone")
    return file_of


BUFFERS_NAME = "model-buffers.safetensors"
OTHER_FORMATS = ("pytorch_model*.bin*", "consolidated*.pth", "tf_model*.h5", "flax_model*.msgpack", "*.gguf")


def _weight_map(index: Path) -> dict[str, str]:
    """By tensor, the name of the file in the index's own folder."""
    try:
        names = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise WeightsError(f"{index} is no index of a checkpoint: {error}; get the checkpoint again") from error
    for key, name in names.items():
        if name in ("", "..") or name != Path(name).name:
            raise WeightsError(f"{index} looks for {key!r} in {name!r}; the files of a checkpoint lie beside its index")
    return names


def saved_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a checkpoint has beside parameters, by name: the bias of a router, running means."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    state = model.state_dict()
    return {name: t for name, t in state.items() if name not in parameters and isinstance(t, torch.Tensor)}


def has_weights(folder: Path) -> bool:
    """Whether a folder holds a safetensors checkpoint, or the index of one; raises `WeightsError` for weights in
    another format, which would be passed over."""
    if not folder.is_dir() or any(folder.glob("*.safetensors")) or (folder / INDEX_NAME).exists():
        return folder.is_dir()
    if others := sorted({path.name for pattern in OTHER_FORMATS for path in folder.glob(pattern)}):
        raise WeightsError(
            f"{folder} holds {others[0]!r} and no *.safetensors, which alone is read; save it as such "
            "(model.save_pretrained of current transformers does), or give the config.json alone, for random weights"
        )
    return False


def export(trainer: Trainer, folder: Folder) -> None:
    """Writes all parameters as a checkpoint that `from_pretrained` loads, one file per unit; of adapters, these alone.

    Needs memory for one unit. Tied parameters are written once, under the name of their owner. Earlier weights there
    are removed before the first is written, and the index comes last: an export that is cut off, which the trainer can
    do again, leaves nothing that loads, never weights of two steps.
    """
    target = Path(folder)
    if trainer.ranks is not None and trainer.ranks.rank > 0:  # the first one writes what all have
        for unit in trainer.units:
            if unit.parameters:
                trainer.placement.content(Params(unit.name))
        return
    from safetensors.torch import save

    if hasattr(trainer.model, "peft_config"):
        _export_adapters(trainer, target)
        return
    make_folder(target)
    shards = sorted(target.glob("model-*-of-*.safetensors"))
    for path in (target / INDEX_NAME, target / "model.safetensors", *shards, target / BUFFERS_NAME):
        remove_file(path)
    sync_folder(target)
    model: Any = trainer.model
    for part in ("config", "generation_config"):
        if getattr(model, part, None) is not None:
            with naming("write", target / f"{part}.json"):
                getattr(model, part).save_pretrained(target)
    weight_map: dict[str, str] = {}
    total_bytes = 0
    if buffers := saved_buffers(trainer.model):
        write_atomically(target / BUFFERS_NAME, save(buffers, metadata={"format": "pt"}))
        total_bytes += sum(t.nbytes for t in buffers.values())
        weight_map.update(dict.fromkeys(buffers, BUFFERS_NAME))
    owners = [unit for unit in trainer.units if unit.all_parameters]
    for number, unit in enumerate(owners, 1):
        name = f"model-{number:05d}-of-{len(owners):05d}.safetensors"
        contents = [kind(unit.name) for part, kind in zip(unit.parts, (Params, Frozen), strict=True) if part.parameters]
        parts = [trainer.placement.content(content) for content in contents]
        write_flat(target / name, unit.all_parameters, parts)
        total_bytes += sum(map(len, parts))
        weight_map.update(dict.fromkeys((key for key, _ in unit.all_parameters), name))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    write_atomically(target / INDEX_NAME, json.dumps(index, indent=2))


def _export_adapters(trainer: Trainer, target: Path) -> None:
    """As PEFT saves them, for `PeftModel.from_pretrained`."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save

    model: Any = trainer.model
    tensors: dict[str, torch.Tensor] = {}
    for unit in trainer.units:
        if unit.parameters:
            views = unit.forms.split(trainer.placement.content(Params(unit.name)))
            tensors.update((name, view.clone()) for (name, _), view in zip(unit.parameters, views, strict=True))
    own = get_peft_model_state_dict(model, state_dict=tensors, save_embedding_layers=False)
    write_atomically(target / "adapter_model.safetensors", save(own, metadata={"format": "pt"}))
    with naming("write", target / "adapter_config.json"):
        replace(model.peft_config["default"], inference_mode=True).save_pretrained(str(target))


def write_flat(path: Path, parameters: Sequence[tuple[str, torch.Tensor]], parts: Sequence[torch.Tensor]) -> None:
    """A safetensors file of flat parameters, which lie in the file as they lie in memory."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    borders = itertools.accumulate((p.numel() * p.element_size() for _, p in parameters), initial=0)
    for (name, p), (begin, end) in zip(parameters, itertools.pairwise(borders), strict=True):
        dtype = SAFETENSORS_DTYPES[p.dtype]
        header[name] = {"dtype": dtype, "shape": list(p.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    write_atomically(path, struct.pack("<Q", len(text)), text, *(part.numpy().data for part in parts))
