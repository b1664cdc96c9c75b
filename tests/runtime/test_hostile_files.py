"""Files that are broken, or made to do harm, are one clear error with their path, before anything is allocated."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.runtime.checkpoint.test_weights import raw_config
from tests.runtime.models import make_model
from tests.runtime.test_trainer import CPU, machine
from tests.toys import uniform_plan
from tierplan.cli import main
from tierplan.planner.lowering import lower
from tierplan.planner.plan import UnitPlan
from tierplan.runtime.execution.executable import executable_step
from tierplan.runtime.execution.ops import Bodies
from tierplan.runtime.execution.plausible import STREAMS_BY_KIND
from tierplan.runtime.tracing.trace import trace_config
from tierplan.sim.digest import digest
from tierplan.sim.schedule import Schedule
from tierplan.sim.schedule_file import load_schedule, save_schedule

pytestmark = pytest.mark.usefixtures("one_thread")

Record = dict[str, Any]


@pytest.fixture(scope="module")
def schedule() -> Schedule:
    raw = {**raw_config(make_model("gpt2", num_blocks=2)), "vocab_size": 256}
    workload = trace_config("tiny", raw, CPU)
    choice = UnitPlan(params="nvme", grads="host", states="nvme", acts="host")
    return lower(uniform_plan(workload, choice), workload, machine())


@pytest.fixture
def files(tmp_path: Path, schedule: Schedule) -> Path:
    raw = {**raw_config(make_model("gpt2", num_blocks=2)), "vocab_size": 256}
    save_schedule(schedule, tmp_path / "plan.json")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "text.txt").write_text("the quick brown fox\n" * 100)
    return tmp_path


def refused(files: Path, capsys: pytest.CaptureFixture[str], **changes: str) -> str:
    """The one line that is said; nothing is allocated, and the run's folder has no commit."""
    paths = {"model": "config.json", "data": "text.txt", "out": "out"} | changes
    command = ["run", str(files / "plan.json"), "--steps", "2", "--threads", "1"]
    command += [word for name, path in paths.items() for word in (f"--{name}", str(files / path))]
    with mock.patch("tierplan.runtime.memory.arena.map_host", side_effect=AssertionError("allocated")):
        assert main(command) == 1
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert not (files / "out" / "commit.json").exists()
    return said[0]


def each(records: list[Record], **conditions: Any) -> list[Record]:
    found = [r for r in records if all(r[name] == value for name, value in conditions.items())]
    assert found
    return found


def set_all(records: list[Record], **fields: Any) -> None:
    for record in records:
        record.update(fields)


HOSTILE: dict[str, tuple[Callable[[Record], object], str]] = {
    "an unknown kind": (lambda q: q["ops"][-1].update(kind="exec"), "is of kind 'exec'; the runtime knows forward"),
    "a stream of its own": (
        lambda q: set_all(each(q["ops"], stream="host.adam"), stream="../../dev/sda"),
        "is on stream '../../dev/sda'; ops of kind update run on",
    ),
    "a stream for each op": (
        lambda q: [op.update(stream=f"s{k}") for k, op in enumerate(q["ops"])],
        "is on stream 's0'; ops of kind",
    ),
    "an update on a link": (
        lambda q: set_all(each(q["ops"], kind="update"), stream="gpu0.h2d"),
        "is on stream 'gpu0.h2d'; ops of kind update run on gpu0.compute, host.adam",
    ),
    "a copy the wrong way": (
        lambda q: set_all(each(q["ops"], stream="nvme.read"), stream="nvme.write"),
        "stream nvme.write does from host to nvme",
    ),
    "a tier of its own": (
        lambda q: [
            set_all(each(q["tiers"], name="host"), name="../x"),
            set_all(each(q["buffers"], tier="host"), tier="../x"),
        ],
        "it has buffers in tier '../x'; the tiers of the runtime are gpu0, host, nvme",
    ),
    "an unknown unit": (
        lambda q: set_all(each(q["buffers"], content="params/L0"), content="params/nowhere"),
        "is of unit 'nowhere', which the step has not",
    ),
    "a content that is none": (
        lambda q: set_all(each(q["buffers"], content="params/L0"), content="../../etc/passwd"),
        "is no content of a training step",
    ),
    "states of another unit": (
        lambda q: set_all(each(q["buffers"], content="states/L0"), content="states/embed"),
        "bytes; those of",
    ),
    "a unit called after a path": (
        lambda q: q["step"]["units"][0].update(name="../../etc/x"), "'../../etc/x'"
    ),
    "accumulation of 1e9": (
        lambda q: q["step"]["training"].update(gradient_accumulation_steps=10**9),
        "gradient_accumulation_steps=1,000,000,000, but the first unit runs forward 1 times",
    ),
    "a batch of 1e12": (
        lambda q: q["step"]["training"].update(per_device_train_batch_size=10**12),
        "a micro-batch has 16,000,000,000,000 tokens",
    ),
    "a sequence of 1e15": (
        lambda q: q["step"]["training"].update(sequence_length=10**15), "a micro-batch has 2,000,000,000,000,000 tokens"
    ),
    "an optimizer that is code": (
        lambda q: q["step"]["training"].update(optimizer="__import__('os')"), "must be one of adamw, sgd"
    ),
    "an extra setting": (lambda q: q["step"]["training"].update(evil=1), "unknown field 'evil'"),
    "a dtype that is a path": (lambda q: q["step"]["training"].update(dtype="../x"), "must be one of fp32"),
    "huge host buffers": (
        lambda q: [
            set_all(q["tiers"], capacity_bytes=10**30),
            set_all([b for b in q["buffers"] if b["tier"] == "host" and b["kind"] == "acts"], size_bytes=10**14),
        ],
        "bytes in host memory at once, but this machine has",
    ),
    "huge parameters": (
        lambda q: [
            set_all(q["tiers"], capacity_bytes=10**30),
            set_all([b for b in q["buffers"] if b["content"] == "params/L0"], size_bytes=10**25),
        ],
        "has 10,000,000,000,000,000,000,000,000 bytes; those of",
    ),
    "units that are text": (lambda q: q["step"].update(units="abc"), "must be a list"),
    "units that are numbers": (lambda q: q["step"].update(units=[1, 2]), "must be an object"),
    "no step": (lambda q: q.update(step=None), "does not say what it trains"),
    "a step that is text": (lambda q: q.update(step="x"), "must be an object"),
    "an op of micro-batch 7": (lambda q: q["ops"][0].update(micro_batch=7), "is of micro-batch 7"),
}  # fmt: skip


@pytest.mark.parametrize("case", list(HOSTILE))
def test_a_hostile_schedule_is_refused(case: str, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = files / "plan.json"
    record = json.loads(path.read_text())
    change, message = HOSTILE[case]
    change(record)
    path.write_text(json.dumps(record))
    said = refused(files, capsys)
    assert message in said
    assert str(path) in said


@pytest.mark.parametrize(
    "text", ["", "{", "null", "[]", "3", '"x"', "[" * 200_000, '{"format":"tierplan-schedule","meta":' + "[" * 200_000,
             '{"format":"tierplan-schedule","version":' + "9" * 5000 + "}"], ids=lambda text: text[:40]
)  # fmt: skip
def test_a_file_that_is_no_schedule(text: str, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "plan.json").write_text(text)
    assert str(files / "plan.json") in refused(files, capsys)


def test_a_plan_that_was_changed_is_not_run(
    files: Path, schedule: Schedule, capsys: pytest.CaptureFixture[str]
) -> None:
    record = json.loads((files / "plan.json").read_text())
    for plan in ({"schedule_sha256": "0" * 64}, {"schedule_sha256": 3}, [], "x"):
        record["meta"]["tierplan-plan"] = plan
        (files / "plan.json").write_text(json.dumps(record))
        assert "plan.json: the schedule is not the one that the planner wrote" in refused(files, capsys)
    record["meta"]["tierplan-plan"] = {"schedule_sha256": digest(load_schedule(files / "plan.json"))}
    record["buffers"][0]["kind"] = "other"
    (files / "plan.json").write_text(json.dumps(record))
    assert "plan.json: the schedule is not the one that the planner wrote" in refused(files, capsys)
    record["buffers"][0]["kind"] = schedule.buffers[0].kind
    (files / "plan.json").write_text(json.dumps(record))
    assert executable_step(load_schedule(files / "plan.json")) == schedule.step


def test_all_kinds_of_the_runtime_are_known() -> None:
    """The table of kinds and streams is that of the functions that execute them."""
    bodies = mock.Mock(units=[], parameters=[], optimizer=mock.Mock(groups=()))
    Bodies.__post_init__(bodies)
    assert set(bodies._kinds) == set(STREAMS_BY_KIND)
