"""Whole models and single layers that others timed, beside the GPUs' curves: nothing of these rows went into them, nor
into what an H100 keeps up. Fourteen more rows of the same table are among the measured points, two of them fitted.

Only what the GPU computes is predicted: the collectives of FSDP on NVLink are taken to be hidden. MPT's blocks have the
shapes of GPT-2's; its kernels differ (fused layer norms; on the H100 an attention in Triton, slower than today's).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median

import pytest

from tierplan.hwmodels import load_machine
from tierplan.sim.workloads.models import load_workload
from tierplan.sim.workloads.workload import Training, Workload

ROWS = list(csv.DictReader(Path(__file__).with_name("llm_foundry.csv").read_text().splitlines()[1:]))
MACHINES = {"h100_80gb": "fsdp-qlora-h100", "a100_80gb": "dgx-8xa100-80gb", "a100_40gb": "fsdp-qlora-a100"}
MPT = {
    "125m": (768, 12, 12), "350m": (1024, 24, 16), "760m": (1536, 24, 16), "1b": (2048, 24, 16), "3b": (2560, 32, 20),
    "7b": (4096, 32, 32), "13b": (5120, 40, 40), "30b": (7168, 48, 56),
}  # fmt: skip
"""Width, layers and heads."""


def workload(folder: Path, config: Mapping[str, object], batch: int, seq: int, dtype: str) -> Workload:
    (folder / "config.json").write_text(json.dumps(config))
    return load_workload(
        folder / "config.json", Training(per_device_train_batch_size=batch, sequence_length=seq, dtype=dtype)
    )


def error(row: Mapping[str, str], folder: Path) -> float:
    """Predicted over measured seconds of one micro-batch, less 1."""
    hidden, layers, heads = MPT[row["model"]]
    seq, batch = int(row["seq"]), int(row["micro_batch"])
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = {"model_type": "gpt2", "n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": seq}
    mpt = workload(folder, {**config, **dropout, "vocab_size": 50368, "tie_word_embeddings": True}, batch, seq, "bf16")
    machine = load_machine(MACHINES[row["gpu"]])
    works = [work for unit in mpt.units for work in (unit.forward, unit.backward)]
    works += [unit.forward for unit in mpt.blocks if row["checkpointing"] == "1"]
    update = {"elementwise_bytes": 30 * mpt.num_parameters / 8 / int(row["accumulation"])}
    seconds = sum(machine.cost("gpu0.compute", work, is_alone=True).alone_s for work in (*works, update))
    return seconds / (batch * seq / float(row["tokens_per_s_per_gpu"])) - 1


@pytest.mark.parametrize(
    ("rows", "most"), [(ROWS[::5], 0.11), pytest.param(ROWS, 0.10, marks=pytest.mark.nightly)], ids=["some", "all"]
)
def test_whole_models_of_llm_foundry(rows: list[Mapping[str, str]], most: float, tmp_path: Path) -> None:
    assert len(ROWS) == 85
    assert median(abs(error(row, tmp_path)) for row in rows) <= most


BERT_LAYER = {"a100-sxm-80gb": 136, "rtx-a6000": 70, "rtx-3090-ti": 62, "rtx-4090": 109}
"""TFLOP/s forward and backward, mli/transformers-benchmarks@3370b2b (Apache-2.0) README.md."""


def test_a_bert_layer_of_transformers_benchmarks(tmp_path: Path) -> None:
    batch, seq, hidden = 128, 128, 1024
    config = {"model_type": "bert", "hidden_size": hidden, "num_attention_heads": 16, "intermediate_size": 4096}
    config |= {"num_hidden_layers": 2, "vocab_size": 30522, "max_position_embeddings": 512}
    layer = workload(tmp_path, config, batch, seq, "fp16").blocks[0]
    flops = 3 * (24 * batch * seq * hidden**2 + 4 * batch * seq**2 * hidden)
    errors = []
    for gpu, measured in BERT_LAYER.items():
        machine = load_machine("desktop-4090", [f"gpu.part={gpu}"])
        works = (layer.forward, layer.backward)
        seconds = sum(machine.cost("gpu0.compute", work, is_alone=True).alone_s for work in works)
        errors.append(abs(flops / seconds / (measured * 1e12) - 1))
    assert median(errors) <= 0.10
