"""A point of a study is answered from its files as they are now, not as they were when they were first read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tierplan.studies.evaluate import evaluate_point
from tierplan.studies.study import Point

MACHINE = """
name = "mine"
[gpu]
part = "rtx-4090"
[link]
h2d = "{rate} GB/s"
d2h = "{rate} GB/s"
[host]
capacity = "256 GiB"
adam = "700 M/s"
[nvme]
drives = 0
"""
SMALL = {
    "gpt2": {"n_embd": 64, "n_head": 2, "vocab_size": 256, "n_positions": 64},
    "gpt_neox": {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128, "vocab_size": 256},
}
NUM_BLOCKS = {"gpt2": "n_layer", "gpt_neox": "num_hidden_layers"}


def test_a_machine_file_that_was_edited_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    step_s = []
    for rate in (25, 12, 25):
        file.write_text(MACHINE.format(rate=rate))
        found = evaluate_point(Point(model="gpt-6.7b", machine=str(file), policy="sliding-window", batch=1))
        step_s.append(found["step_s"])
    assert step_s[0] == step_s[2]
    assert step_s[0] < step_s[1]  # type: ignore[operator]


@pytest.mark.parametrize("kind", list(SMALL))  # by closed forms, and traced
def test_a_model_file_that_was_edited_is_read_again(kind: str, tmp_path: Path) -> None:
    num_parameters = []
    for blocks in (2, 3, 2):
        config = {"model_type": kind, **SMALL[kind], NUM_BLOCKS[kind]: blocks}
        (tmp_path / "config.json").write_text(json.dumps(config))
        point = Point(model=str(tmp_path), machine="desktop-4090", policy="in-memory", batch=1, seq=16)
        num_parameters.append(evaluate_point(point)["num_parameters"])
    assert num_parameters[0] == num_parameters[2]
    assert num_parameters[0] < num_parameters[1]  # type: ignore[operator]
