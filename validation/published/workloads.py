"""Workloads made from what publications say of a model: measured layer times, or sizes by a formula.

Our simulator is then given the same inputs as the authors' own simulation or measurement.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from tierplan.sim.workloads.workload import SavedTensor, Training, Unit, Workload

MIB = 2**20
FP32_BYTES, FP16_BYTES = 4, 2
Rows = Sequence[Mapping[str, Any]]


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


def tensor_parallel_workload(settings: Mapping[str, Any], chunks: Rows, head_saves: Rows) -> Workload:
    """One GPU's part of a transformer trained with tensor parallelism and SGD in fp16 (SSDTrain's models).

    Each layer is a chain of chunks, each with its share of the layer's FLOPs and what it saves beside its input, in
    units of `seq * batch * hidden` bytes (`units`, the same on each GPU, and `parallel_units`, divided among them); so
    does the head (`head_saves`). The last `decoder_layers` also have the chunks that are marked `decoder`; the first
    such chunk saves the encoder's output (`once`), which the others share.

    Logits are divided by vocabulary. The loss in fp16 holds them three times while it runs (logits, what is left after
    their maximum, exponentials), saves the last as the softmax, and makes the gradient in place of it.
    """
    names = ("hidden", "layers", "vocabulary", "batch", "seq", "tensor_parallel")
    hidden, layers, vocabulary, batch, seq, tensor_parallel = (settings[name] for name in names)
    unit_bytes = seq * batch * hidden
    border = 2 * unit_bytes
    matmul = 24.0 * batch * seq * hidden**2 / tensor_parallel
    attention = 4.0 * batch * seq**2 * hidden / tensor_parallel
    blocks: list[Unit] = []
    decoder_begins = layers - settings.get("decoder_layers", 0)

    def size_bytes(tensor: Mapping[str, Any]) -> int:
        units = float(tensor.get("units", 0.0)) + float(tensor.get("parallel_units", 0.0)) / tensor_parallel
        return round(units * unit_bytes)

    def saved(sizes: Iterable[tuple[str, int]]) -> tuple[SavedTensor, ...]:
        return tuple(SavedTensor(index=i, name=name, size_bytes=n, dtype="fp16") for i, (name, n) in enumerate(sizes))

    for layer in range(layers):
        for chunk in chunks:
            if chunk.get("decoder") and layer < decoder_begins:
                continue
            saves = [*chunk["saves"], *(chunk.get("once", ()) if layer == decoder_begins else ())]
            work = {"matmul_fp16_flops": matmul * chunk["flops_share"]}
            if chunk.get("attention"):
                work["attention_fp16_flops"] = attention
            blocks.append(
                Unit(
                    name=f"L{len(blocks)}",
                    kind="block",
                    num_parameters=round(12 * hidden**2 * chunk["flops_share"] / tensor_parallel),
                    forward=work,
                    backward={kind: 2 * flops for kind, flops in work.items()},
                    saved=saved((tensor["name"], size_bytes(tensor)) for tensor in saves),
                    input_bytes=border,
                    output_bytes=border,
                    backward_work_bytes=size_bytes(chunk["gradients"]),
                )
            )
    embed = Unit(
        name="embed", kind="embed", num_parameters=0, forward={}, backward={}, output_bytes=border, saves_input=False
    )
    logits = seq * batch * vocabulary // tensor_parallel
    of_head = [*((tensor["name"], size_bytes(tensor)) for tensor in head_saves), ("softmax", FP16_BYTES * logits)]
    head = Unit(
        name="head",
        kind="head",
        num_parameters=0,
        forward={},
        backward={},
        saved=saved(of_head),
        input_bytes=border,
        forward_work_bytes=2 * FP16_BYTES * logits,
        backward_work_bytes=border,
    )
    return Workload(
        name=f"transformer-{hidden}",
        model_type="formula",
        training=Training(
            per_device_train_batch_size=batch, sequence_length=seq, dtype="fp16", optimizer="sgd", master_weights=False
        ),
        units=(embed, *blocks, head),
    )
