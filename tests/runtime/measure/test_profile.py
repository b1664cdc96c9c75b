"""Profiling through the runtime: every unit gets a time, parameters stay as they were, alike blocks share one."""

from __future__ import annotations

import pytest
import torch

from tests.runtime.models import make_batches, make_model, observed_workload
from tierplan.runtime.measure.units import profile_workload, profiling_schedule, with_times
from tierplan.runtime.tracing.trace import trace_config
from tierplan.sim.schedule import Schedule
from tierplan.sim.trace import Span, Trace
from tierplan.sim.workloads.workload import Training


@pytest.mark.parametrize(("family", "optimizer"), [("gpt2", "adamw"), ("llama", "adamw:states=8bit")])
def test_every_unit_is_timed_and_the_model_is_left_as_it_was(family: str, optimizer: str) -> None:
    model = make_model(family)
    before = [p.detach().clone() for p in model.parameters()]
    (batch,) = make_batches(1)
    training = Training(per_device_train_batch_size=2, sequence_length=16, dtype="fp32", optimizer=optimizer)
    workload = observed_workload(model, batch, training)
    measured = profile_workload(workload, model, [batch] * 9, num_steps=3)
    assert all(set(u.forward) == {"s"} and u.forward["s"] > 0 for u in measured.units)
    assert all(u.backward["s"] > 0 for u in measured.units)
    assert len({u.forward["s"] for u in measured.blocks}) == 1
    for p, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, old)


def test_the_parts_of_an_encoder_decoder_are_timed() -> None:
    model = make_model("t5", num_blocks=2)
    (batch,) = make_batches(1)
    workload = observed_workload(model, batch, Training(sequence_length=16, dtype="fp32"))
    measured = profile_workload(workload, model, [batch] * 9, num_steps=3)
    assert [u.name for u in measured.units if u.forward["s"] > 0] == [u.name for u in workload.units]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_what_a_tensor_takes_to_be_made_again_adds_up(dropout: float) -> None:
    model = make_model("gpt2", dropout=dropout)
    (batch,) = make_batches(1)
    workload = observed_workload(model, batch, Training(sequence_length=16, dtype="fp32"))
    measured = profile_workload(workload, model, [batch] * 10, num_steps=4)
    for unit in measured.blocks:
        assert unit.recompute is not None
        each = [t.recompute["s"] for t in unit.saved]
        assert sum(each) == pytest.approx(unit.recompute["s"]) or sum(each) == 0


def test_medians_leave_warm_up_and_strays_out() -> None:
    model = make_model("gpt2", num_blocks=2)
    (batch,) = make_batches(1, batch=1, length=8)
    workload = observed_workload(model, batch, Training(sequence_length=8, dtype="fp32"))
    kept = _trace(profiling_schedule(workload), (900, 10, 12, 11, 500))
    again = _trace(profiling_schedule(workload, drops="all"), (900, 23), recompute=7)
    measured = with_times(workload, kept, again, {})
    assert all(u.forward["s"] == pytest.approx(0.0115) for u in measured.units)
    assert all(u.spread < 0.2 for u in measured.units)
    assert all(u.recompute == {"s": pytest.approx(0.0035)} for u in measured.blocks), "the second run was half as fast"


def test_tensors_of_one_operation_share_its_time_by_size() -> None:
    """A layer norm saves its output and two small statistics; its time is noted for one of them."""
    config = {"model_type": "opt", "hidden_size": 32, "ffn_dim": 64, "num_attention_heads": 2, "num_hidden_layers": 2,
              "word_embed_proj_dim": 32, "vocab_size": 64, "dropout": 0.0}  # fmt: skip
    workload = trace_config("opt", config, Training(sequence_length=8, dtype="fp32", backend="cpu"))
    block = workload.blocks[0]
    norms = [t for t in block.saved if "native_layer_norm" in t.name and t.name == block.saved[0].name]
    assert len(norms) == 3
    times = {t.index: [0.0] for t in block.saved} | {norms[0].index: [0.003]}
    traces = _trace(profiling_schedule(workload), (9, 9)), _trace(profiling_schedule(workload, drops="all"), (9, 9), 9)
    measured = with_times(workload, *traces, {u.name: times for u in workload.blocks})
    by_size = sorted((t.size_bytes, t.recompute["s"]) for t in measured.blocks[0].saved if t.name == norms[0].name)
    assert by_size[-1][1] > 10 * by_size[0][1] > 0.0
    assert sum(s for _, s in by_size) == pytest.approx(sum(t.recompute["s"] for t in measured.blocks[0].saved))


def _trace(schedule: Schedule, milliseconds: tuple[int, ...], recompute: int = 0) -> Trace:
    spans = []
    for step, ms in enumerate(milliseconds):
        for op in schedule.ops:
            its_ms = recompute if op.kind == "recompute" else ms
            spans.append(Span(f"s{step}/{op.key}", op.stream, 0, 0, 0, its_ms * 1_000_000))
    return Trace(name="t", spans=tuple(spans), memory=(), capacity_bytes={}, peak_bytes={})
