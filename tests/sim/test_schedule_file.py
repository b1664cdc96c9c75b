"""The schedule file: what is written is read back, and nothing else is. The JSON Schema is a second witness."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from tests.sim.random_schedules import schedules, turning_schedules
from tests.toys import toy_machine, toy_workload, uniform_plan
from tierplan.planner.lowering import lower
from tierplan.planner.plan import UnitPlan
from tierplan.sim.schedule import Buffer, Op, Schedule, ScheduleError, Tier, validate
from tierplan.sim.schedule_file import ScheduleFileError, json_schema, load_schedule, save_schedule
from tierplan.sim.step import SavedTensorSpec, StepSpec, UnitSpec
from tierplan.sim.workloads.workload import Training

SMALL = Schedule(
    name="small",
    tiers=(Tier(name="gpu0", capacity_bytes=10),),
    buffers=(
        Buffer(name="w", tier="gpu0", size_bytes=4, content="params/L0", kind="params", initial=True),
        Buffer(name="w'", tier="gpu0", size_bytes=4, content="params/L0", kind="params", reuses="w", becomes="w"),
    ),
    ops=(
        Op(key="fwd/L0", stream="gpu0.compute", kind="forward", work={"s": 0.1}, reads=("w",)),
        Op(key="upd/L0", stream="host.adam", kind="update", reads=("w",), writes=("w'",), after=("fwd/L0",)),
    ),
    step=StepSpec(
        training=Training(max_grad_norm=0.5),
        semantics="exact-clip",
        units=(
            UnitSpec(
                name="L0",
                num_parameters=2,
                saved=(SavedTensorSpec(size_bytes=4, action="host"), SavedTensorSpec(size_bytes=0, action="nvme")),
                late_update=True,
            ),
        ),
    ),
    meta={"policy": "none"},
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(schedules() | turning_schedules())
def test_round_trip_of_any_schedule(tmp_path: Path, schedule: Schedule) -> None:
    path = tmp_path / "schedule.json"
    save_schedule(schedule, path)
    assert load_schedule(path) == schedule
    jsonschema.validate(json.loads(path.read_text()), json_schema())


def test_round_trip_of_a_lowered_plan(tmp_path: Path) -> None:
    workload = toy_workload(gradient_accumulation_steps=2)
    choice = UnitPlan(params="host", grads="host", states="nvme", acts=("nvme", "host", "recompute", "keep"))
    schedule = lower(uniform_plan(workload, choice), workload, toy_machine())
    path = tmp_path / "plan" / "schedule.json"
    save_schedule(schedule, path)
    loaded = load_schedule(path)
    assert loaded == schedule
    save_schedule(loaded, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()
    assert [p.name for p in path.parent.iterdir()] == ["schedule.json"], "no temporary file stays behind"


def small_record(tmp_path: Path) -> dict:
    save_schedule(SMALL, tmp_path / "small.json")
    record: dict = json.loads((tmp_path / "small.json").read_text())
    return record


REFUSED = [
    ("ops", 1, "color", "red", r"ops\[1\] \('upd/L0'\) has an unknown field 'color'"),
    ("ops", 0, "work", {"s": -1}, r"ops\[0\] \('fwd/L0'\): work\['s'\] is -1; it must be a whole number >= 0"),
    ("ops", 0, "work", {"s": True}, r"work\['s'\] is True; it must be a whole number or a number"),
    ("ops", 0, "reads", "w", r"reads is 'w'; it must be a list"),
    ("ops", 0, "micro_batch", 0.5, "micro_batch is 0.5; it must be a whole number"),
    ("ops", 0, "micro_batch", False, "it must be a whole number"),
    ("ops", 0, "stream", None, "stream is None; it must be text"),
    ("buffers", 0, "initial", 1, r"buffers\[0\] \('w'\): initial is 1; it must be true or false"),
    ("buffers", 0, "size_bytes", -4, "size_bytes is -4"),
    ("tiers", 0, "capacity_bytes", "10", "capacity_bytes is '10'"),
]


@pytest.mark.parametrize(("where", "position", "field", "value", "message"), REFUSED)
def test_wrong_fields_are_named(
    tmp_path: Path, where: str, position: int, field: str, value: object, message: str
) -> None:
    record = small_record(tmp_path)
    record[where][position][field] = value
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(record))
    with pytest.raises(ScheduleFileError, match=f"wrong.json is not a schedule .*{message}"):
        load_schedule(path)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(record, json_schema())


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("semantics",), "later", "step.semantics is 'later'; it must be one of in-backward, exact-clip, delayed-1"),
        (("training", "dtype"), "int8", r"step.training.dtype is 'int8'; it must be one of fp32, bf16, fp16"),
        (("training", "sequence_length"), 0, "step.training.sequence_length is 0"),
        (("training", "max_grad_norm"), "much", "step.training.max_grad_norm is 'much'"),
        (("training", "gpu"), 1, "step.training has an unknown field 'gpu'"),
        (("units", 0, "late_update"), 1, r"step.units\[0\] \('L0'\): late_update is 1; it must be true or false"),
        (
            ("units", 0, "saved", 1, "action"),
            "drop",
            r"step.units\[0\] \('L0'\): saved\[1\].action is 'drop'; it must be one",
        ),
    ],
)
def test_wrong_fields_of_the_step_are_named(tmp_path: Path, path: tuple, value: object, message: str) -> None:
    record = small_record(tmp_path)
    place = record["step"]
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    file = tmp_path / "wrong.json"
    file.write_text(json.dumps(record))
    with pytest.raises(ScheduleFileError, match=message):
        load_schedule(file)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(record, json_schema())


def test_every_missing_field_is_an_error(tmp_path: Path) -> None:
    record = small_record(tmp_path)
    path = tmp_path / "missing.json"
    places = [(record, "missing.json")] + [(record[name][0], f"{name}\\[0\\]") for name in ("tiers", "buffers", "ops")]
    step = record["step"]
    places += [(step, "step"), (step["training"], "step.training"), (step["units"][0], "step.units"),
               (step["units"][0]["saved"][0], "saved")]  # fmt: skip
    for place, label in places:
        for field in list(place):
            kept = place.pop(field)
            path.write_text(json.dumps(record))
            with pytest.raises(ScheduleFileError, match=label):
                load_schedule(path)
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate(record, json_schema())
            place[field] = kept


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON"),
        ("[]", "is not a schedule .* has format None"),
        ('{"format": "tierplan-trace"}', "has format 'tierplan-trace'"),
        ('{"format": "tierplan-schedule", "version": 1}', "version 1; this reader takes 'tierplan-schedule' version 3"),
        ('{"format": "tierplan-schedule", "version": 2, "version": 2}', "'version' is there twice"),
        ('{"format": "tierplan-schedule", "version": NaN}', "NaN is not JSON"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ScheduleFileError, match=message):
        load_schedule(path)


def test_a_file_that_breaks_the_language_is_refused(tmp_path: Path) -> None:
    record = small_record(tmp_path)
    record["ops"].reverse()
    path = tmp_path / "reversed.json"
    path.write_text(json.dumps(record))
    with pytest.raises(ScheduleError, match=r"reversed.json: op 'upd/L0' comes after 'fwd/L0'"):
        load_schedule(path)


@pytest.mark.parametrize(("where", "position", "field", "value", "message"), REFUSED[1:])
def test_what_a_file_may_not_say_an_object_may_not_either(
    tmp_path: Path, where: str, position: int, field: str, value: object, message: str
) -> None:
    items = list(getattr(SMALL, where))
    items[position] = replace(items[position], **{field: value})
    with pytest.raises(ScheduleError, match=message):
        validate(wrong := replace(SMALL, **{where: tuple(items)}))
    with pytest.raises(ScheduleError, match=message):
        save_schedule(wrong, tmp_path / "wrong.json")
    assert not list(tmp_path.iterdir())


def test_sizes_that_are_not_whole_are_refused() -> None:
    for size in (200.5, 200.0, True):
        wrong = replace(SMALL, buffers=tuple(replace(b, size_bytes=size) for b in SMALL.buffers))  # type: ignore[arg-type]
        with pytest.raises(ScheduleError, match=rf"\('w'\): size_bytes is {size}; it must be a whole number"):
            validate(wrong)


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    tiers = (Tier(name="gpu0", capacity_bytes=np.int64(10)),)  # type: ignore[arg-type]
    ops = (replace(SMALL.ops[0], work={"s": np.float64(0.1), "bytes": np.int64(3)}), SMALL.ops[1])  # type: ignore[dict-item]
    save_schedule(replace(SMALL, tiers=tiers, ops=ops), tmp_path / "numpy.json")
    ops = (replace(SMALL.ops[0], work={"s": 0.1, "bytes": 3}), SMALL.ops[1])
    assert load_schedule(tmp_path / "numpy.json") == replace(SMALL, ops=ops)


def test_what_json_cannot_say_is_refused(tmp_path: Path) -> None:
    empty = Schedule(name="x", tiers=(), buffers=(), ops=())
    endless = StepSpec(training=Training(max_grad_norm=math.inf), semantics="exact-clip", units=())
    metas: list[object] = [object(), math.nan, "\ud800", {1: 2, "1": 3}]
    for wrong in [replace(empty, meta={"what": value}) for value in metas] + [replace(empty, step=endless)]:
        with pytest.raises(ScheduleFileError, match="it holds something that JSON has not"):
            save_schedule(wrong, tmp_path / "x.json")
    with pytest.raises(ScheduleError, match=r"meta is \{1: 2\}; its keys must be text"):
        save_schedule(replace(empty, meta={1: 2}), tmp_path / "x.json")  # type: ignore[dict-item]
    assert not list(tmp_path.iterdir())
