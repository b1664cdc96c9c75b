"""Workloads made from what publications say of a model: measured layer times, or sizes by a formula.

They are what their authors simulated or measured, so that the same inputs can be put to our simulator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from tierplan.sim.workload import SavedTensor, Training, Unit, Workload

__all__ = ["layered_workload", "tensor_parallel_workload"]

MIB = 2**20
FP32_BYTES = 4


def layered_workload(profile: Mapping[str, Any], *, micro_batches: int) -> Workload:
    """A model from measured layers (Harmony's profiles): seconds of forward and backward, MiB of weights and inputs.

    Weights count with the buffers that move with them, in fp32. Backward is measured with its recomputation, which is
    taken out again (a schedule recomputes by an op of its own). What a layer saves follows from its measured peaks.
    """
    layers: list[Mapping[str, Any]] = []
    for entry in profile["layers"]:
        first, _, last = entry["index"].partition("-")
        layers += [entry] * (int(last or first) - int(first) + 1)
    units = []
    for i, layer in enumerate(layers):
        following = layers[i + 1]["x_mib"] if i + 1 < len(layers) else 0.0
        units.append(_profiled_unit(i, layer, following, is_last=i + 1 == len(layers)))
    return Workload(
        name=profile["model"],
        model_type="profile",
        training=Training(
            per_device_train_batch_size=profile["micro_batch"],
            gradient_accumulation_steps=micro_batches,
            dtype="fp32",
        ),
        units=tuple(units),
    )


def _profiled_unit(index: int, layer: Mapping[str, Any], output_mib: float, *, is_last: bool) -> Unit:
    weights = layer["w_mib"] + layer.get("buffer_mib", 0.0)
    x = layer["x_mib"]
    held_in_forward = max(layer.get("peak_f_mib", 0.0) - weights - x - output_mib, 0.0)
    saved = max(layer.get("peak_b_mib", 0.0) - 2 * weights - 2 * x - output_mib, 0.0)
    kind: Literal["embed", "block", "head"] = layer.get("kind", "head" if is_last else "block")
    return Unit(
        name="embed" if kind == "embed" else "head" if is_last else f"L{index - 1}",
        kind=kind,
        num_parameters=round(weights * MIB / FP32_BYTES),
        forward={"s": layer["f_ms"] / 1e3},
        backward={"s": (layer["b_ms"] - layer["f_ms"]) / 1e3},
        saved=(SavedTensor(index=0, name="all", size_bytes=round(saved * MIB), dtype="fp32"),) if saved else (),
        input_bytes=round(x * MIB),
        output_bytes=round(output_mib * MIB),
        forward_work_bytes=max(round((held_in_forward - saved) * MIB), 0),
        saves_input=True,
    )


def tensor_parallel_workload(
    name: str,
    *,
    hidden: int,
    layers: int,
    batch: int,
    seq: int,
    tensor_parallel: int,
    modules: Sequence[tuple[str, float]],
) -> Workload:
    """One GPU's part of a transformer trained with tensor parallelism and SGD in fp16 (SSDTrain's models).

    `modules` lists what a layer saves, in order, in units of `seq * batch * hidden` bytes on this GPU.
    """
    unit_bytes = seq * batch * hidden
    matmul = 24.0 * batch * seq * hidden**2 / tensor_parallel
    attention = 4.0 * batch * seq**2 * hidden / tensor_parallel
    work = {"matmul_fp16_flops": matmul, "attention_fp16_flops": attention}
    total = sum(amount for _, amount in modules)
    saved = tuple(
        SavedTensor(
            index=i,
            name=module,
            size_bytes=round(amount * unit_bytes),
            dtype="fp16",
            recompute={kind: flops * amount / total for kind, flops in work.items()},
        )
        for i, (module, amount) in enumerate(modules)
    )
    border = 2 * unit_bytes
    blocks = [
        Unit(
            name=f"L{i}",
            kind="block",
            num_parameters=12 * hidden**2 // tensor_parallel,
            forward=work,
            backward={kind: 2 * flops for kind, flops in work.items()},
            saved=saved,
            input_bytes=border,
            output_bytes=border,
            saves_input=False,  # the formula counts the input among what a layer saves
        )
        for i in range(layers)
    ]
    embed = Unit(
        name="embed", kind="embed", num_parameters=0, forward={}, backward={}, output_bytes=border, saves_input=False
    )
    head = Unit(name="head", kind="head", num_parameters=0, forward={}, backward={}, input_bytes=border)
    return Workload(
        name=name,
        model_type="formula",
        training=Training(
            per_device_train_batch_size=batch,
            sequence_length=seq,
            dtype="fp16",
            optimizer="sgd",
            master_weights=False,
        ),
        units=(embed, *blocks, head),
    )
