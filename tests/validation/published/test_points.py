"""Measured points keep what was published, and rules put them to the simulator without knowing the time."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatch

import pytest

from tests.planner.test_plan import devices
from tierplan.hwmodels import load_machine
from tierplan.hwmodels.catalog import catalog_names
from tierplan.planner.policies import POLICIES
from tierplan.planner.prediction import Prediction
from tierplan.sim.builder import Builder, tiers_of
from tierplan.sim.pricing import simulate_on
from tierplan.sim.workloads.workload import Training
from tierplan.validation.published.points import (
    LAUNCH_S,
    POINTS,
    Question,
    _table,
    driven_by_one_process,
    load_points,
    measured_s,
    question_of,
    reproduce_points,
)
from tierplan.validation.published.reproduce import PEAKS, Report, Row


def test_every_point_has_a_name_of_its_own_and_a_source() -> None:
    assert len(load_points()) == sum(len(group["points"]) for group in _table("facts")["from"]) == 246
    assert all(facts["source"] for facts in load_points().values())


@pytest.mark.parametrize("name", POINTS)
def test_rules_match_points_and_name_what_exists(name: str) -> None:
    ids = list(load_points())
    for rule in _table(name)["rule"]:
        assert all(any(fnmatch(point, pattern) for point in ids) for pattern in rule["ids"]), rule["ids"]
        assert "cannot" in rule or (rule["policy"] in POLICIES and rule["machine"] in catalog_names())


def test_every_point_of_several_gpus_has_a_rule() -> None:
    patterns = [pattern for rule in _table("points")["rule"] for pattern in rule["ids"]]
    several = [point for point, facts in load_points().items() if facts.get("gpus", 1) > 1]
    assert [point for point in several if not any(fnmatch(point, pattern) for pattern in patterns)] == []


def test_what_was_measured_becomes_seconds_of_a_step() -> None:
    assert measured_s({"step_s": 2.0}, 8, 100) == 2.0
    assert measured_s({"s_per_sample": 0.5}, 8, 100) == 4.0
    assert measured_s({"tokens_per_s": 400}, 8, 100) == 2.0
    assert measured_s({}, 8, 100) is None


def test_sequences_are_shared_by_ranks_and_micro_batches() -> None:
    facts = {"gpus": 8, "model": "m", "seq": 2048, "sequences_per_step": 512, "accumulation": 16}
    asked = question_of(facts, {"machine": "x", "policy": "p", "dtype": "fp16"}, {"m": "gpt2"})
    assert (asked.training.per_device_train_batch_size, asked.training.gradient_accumulation_steps) == (4, 16)
    assert (asked.sequences, asked.model, asked.settings) == (512, "gpt2", ("gpu.count=8",))
    on, off = (question_of({**facts, "checkpointing": x}, {"machine": "x", "policy": "p"}, {}) for x in (True, False))
    assert (on.options, off.options) == ({"checkpointing": "on"}, {"checkpointing": "off"})
    shared = question_of(facts, {"machine": "x", "policy": "p", "shared": True, "micro_batch": 4}, {})
    assert (shared.training.gradient_accumulation_steps, shared.sequences) == (128, 512)


def test_rows_are_ranked_by_speed_among_those_of_one_machine_and_model() -> None:
    def row(group: str, measured: float, predicted: float, tokens: int = 100) -> Row:
        return Row("s", "check", "step_s", "l", measured, measured, predicted, group=group, tokens=tokens)

    rows = (row("x, 8", 1, 1), row("x, 8", 2, 3), row("x, 8", 3, 2), row("y, 8", 1, 1), row("y, 8", 3, 1.5, 200))
    assert Report("s", "", rows, ()).rankings == {"x": pytest.approx(1 / 3), "y": -1.0}
    assert Report("s", "", (row("x", 1, 1), row("x", 1.005, 0.9)), ()).rankings == {}, "equal but for noise"


def test_devices_that_one_process_drives_compute_as_fast_as_it_launches() -> None:
    """Two devices work at once, but no faster than their launches, one after the other."""
    for launch_s, took_s in ((0.2, 1.0), (0.8, 1.6)):
        builder, work = Builder(), {"s": 1.0, LAUNCH_S: launch_s}
        for device in range(2):
            builder.op(f"fwd/L{device}", f"gpu{device}.compute", "forward", work=work)
        machine = driven_by_one_process(devices(2))
        assert simulate_on(builder.schedule("x", tiers_of(machine), meta={}), machine).duration_s == pytest.approx(
            took_s
        )


def test_what_cannot_be_expressed_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Question, "answer", lambda self: Prediction(policy="p", model="m", machine="x", plan=None))
    rows = {row.label: row for row in reproduce_points("points").rows if row.why_not}
    assert "no sequence length" in rows["muon-cpu"].why_not
    assert "a block's time alone" in rows["roundpipe-layer-qwen3-235b-lora"].why_not


def test_every_row_that_fine_tunes_on_one_gpu_has_a_rule() -> None:
    patterns = [pattern for rule in _table("finetuning")["rule"] for pattern in rule["ids"]]
    words = ("lora", "full", "peft", "torchao", "torchtune")
    rows = [p for p, f in load_points().items() if f.get("gpus", 1) == 1 and any(word in p for word in words)]
    unmatched = [p for p in rows if not any(fnmatch(p, pattern) for pattern in patterns)]
    assert [name for name in unmatched if not name.startswith(("roundpipe-", "torchtitan"))] == []


def test_every_published_quantity_is_a_row_answered_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    unanswered = Prediction(policy="p", model="m", machine="x", plan=None)
    monkeypatch.setattr(Question, "answer", lambda self: unanswered)
    rows = reproduce_points("finetuning").rows
    facts = load_points()
    published = [(name, quantity) for name in dict.fromkeys(row.label for row in rows)
                 for quantity in ("step_s", *(peak for peak in PEAKS if peak in facts[name]))]  # fmt: skip
    assert [(row.label, row.quantity) for row in rows] == published
    unsaid = {row.label: row.why_not for row in rows if row.quantity == "peak_gib"}
    assert "of another kind than LoRA" in unsaid["peft-gralora--llama-3.2-3B-rank32"]


@pytest.mark.parametrize(("name", "most"), [("h100-13b-2048", 0.15), ("h100-30b-2048", 0.15), ("a100-13b-2048", 0.10)])
def test_h100_is_as_quick_in_training_as_it_keeps_up(name: str, most: float) -> None:
    """With its table's rates, those of moments, the first two took 24 and 18 % less than was measured."""
    (row,) = reproduce_points("points", only=f"llmfoundry-{name}").rows
    assert row.role == "check"
    assert row.error is not None
    assert abs(row.error) < most


def test_a_peak_stands_beside_its_time() -> None:
    name = "qwen-1.8b-full-parameter-1x1-s256"
    rows = [row for row in reproduce_points("finetuning", only=name).rows if row.label == name]
    assert [row.quantity for row in rows] == ["step_s", "peak_gb"]
    assert all(row.predicted is not None for row in rows)


def test_a_block_takes_no_less_than_its_process_takes_to_issue_it() -> None:
    machine = ("dgx-8xa100-80gb", ("gpu.count=1", "gpu.launch=0 us"))
    plain = Question(*machine, "full-recompute", {}, "llama-3.2-1b", Training(lora="r=4"), 1)
    launched = replace(plain, training=replace(plain.training, sequence_length=16), launch_s=0.01)
    step_s = launched.answer().step_s
    assert step_s is not None
    assert 16 * 3 * 0.01 < step_s < 16 * 3 * 0.01 + 0.05
    assert replace(plain, launch_s=1e-6).answer().step_s == pytest.approx(plain.answer().step_s, rel=1e-6)


def test_a_slower_attention_takes_longer_by_its_share() -> None:
    plain = Question(
        "dgx-8xa100-80gb", ("gpu.count=1",), "in-memory", {}, "llama-3.2-1b", Training(sequence_length=4096), 1
    )
    machine = load_machine(plain.machine)
    blocks = plain.workload().blocks
    passes = [work for block in blocks for work in (block.forward, block.backward)]
    works = [{kind: amount for kind, amount in work.items() if "attention" in kind} for work in passes]
    attention_s = sum(machine.cost("gpu0.compute", work).work_s for work in works)
    scales = (f"gpu.attention_scale={scale}" for scale in (0.5, 1.0))
    took_s = [replace(plain, settings=(*plain.settings, scale)).answer().step_s for scale in scales]
    assert took_s[0] is not None
    assert took_s[1] is not None
    assert took_s[0] - took_s[1] == pytest.approx(attention_s, rel=1e-3)


def test_changed_sizes_hold_where_the_model_is_traced() -> None:
    training = Training(sequence_length=16, lora="r=4", freeze="*lora_A*")
    question = Question("x", (), "p", {}, "llama-3.2-1b", training, 1, config=(("num_hidden_layers", 2),))
    assert len(question.workload().blocks) == 2
