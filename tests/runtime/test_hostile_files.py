"""Files that are broken, or made to do harm, are one clear error with their path, before anything is allocated."""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.runtime.checkpoint.test_weights import raw_config
from tests.runtime.models import make_model
from tests.runtime.test_trainer import CPU, machine
from tests.toys import uniform_plan
from tierplan.cli import main
from tierplan.planner.lowering import lower
from tierplan.planner.plan import UnitPlan
from tierplan.runtime.data.text import read_tokens
from tierplan.runtime.execution.executable import STREAMS_BY_KIND
from tierplan.runtime.execution.ops import Bodies
from tierplan.runtime.job import _tokenizer_files
from tierplan.runtime.tracing.trace import trace_config
from tierplan.sim.digest import is_as_written, sealed
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
        lambda q: q["step"]["training"].update(gradient_accumulation_steps=10**9), "no step has so many"
    ),
    "accumulation of 60,000": (
        lambda q: q["step"]["training"].update(gradient_accumulation_steps=60_000),
        "unit 'embed' runs forward 0 times with micro-batch 1 of 60,000; it must run it once",
    ),
    "a batch of 60,000": (
        lambda q: q["step"]["training"].update(per_device_train_batch_size=60_000),
        "a micro-batch has 960,000 tokens",
    ),
    "a sequence of 1e15": (
        lambda q: q["step"]["training"].update(sequence_length=10**15), "a micro-batch has 2,000,000,000,000,000 tokens"
    ),
    "an optimizer that is code": (
        lambda q: q["step"]["training"].update(optimizer="__import__('os')"), "is unknown; choose among adamw, sgd"
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
        "has 10,000,000,000,000,000,000,000,000 bytes; more than 1,152,921,504,606,846,976 are not counted",
    ),
    "large parameters": (
        lambda q: [
            set_all(q["tiers"], capacity_bytes=10**30),
            set_all([b for b in q["buffers"] if b["content"] == "params/L0"], size_bytes=10**15),
        ],
        "has 1,000,000,000,000,000 bytes; those of",
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
    planned = replace(schedule, meta={**schedule.meta, "tierplan-plan": {"prediction": {"step_s": 2.0}}})
    save_schedule(sealed(planned), files / "plan.json")
    whole = (files / "plan.json").read_text()
    assert is_as_written(load_schedule(files / "plan.json"))
    for change in (
        lambda r: r["buffers"][0].update(kind="other"),
        lambda r: r["meta"]["tierplan-plan"]["prediction"].update(step_s=1.0),
        lambda r: r["meta"].update({"tierplan-plan": []}),
        lambda r: r["meta"].update(sha256=3),
        lambda r: r["meta"].pop("sha256"),
    ):
        record = json.loads(whole)
        change(record)
        (files / "plan.json").write_text(json.dumps(record))
        assert "plan.json is not as it was written" in refused(files, capsys)


@pytest.fixture
def checkpoint(files: Path) -> Path:
    """A folder with a whole model."""
    folder = files / "hub" / "snapshots" / "1"
    make_model("gpt2", num_blocks=2).save_pretrained(folder)  # type: ignore[operator]
    (files / "config.json").rename(folder / "config.json")
    return folder


@pytest.mark.parametrize("name", ["/etc/passwd", "../../../elsewhere.safetensors", "sub/x.safetensors", "", ".."])
def test_an_index_does_not_lead_out_of_its_folder(
    name: str, checkpoint: Path, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index = checkpoint / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"transformer.wte.weight": name}}))
    said = refused(files, capsys, model="hub/snapshots/1")
    assert f"{index} looks for 'transformer.wte.weight' in {name!r}" in said


@pytest.mark.parametrize("content", [b"", b"{", b"null", b'{"weight_map": 3}', b'{"weight_map": {"a": 3}}', b"\xff"])
def test_an_index_that_is_none(
    content: bytes, checkpoint: Path, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index = checkpoint / "model.safetensors.index.json"
    index.write_bytes(content)
    assert f"{index} is no index of a checkpoint" in refused(files, capsys, model="hub/snapshots/1")


@pytest.mark.parametrize("num_bytes", [0, 5, 1000])
def test_weights_that_were_cut(
    num_bytes: int, checkpoint: Path, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:num_bytes])
    assert f"{weights} is no whole safetensors file" in refused(files, capsys, model="hub/snapshots/1")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_a_config_that_is_none(content: bytes, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "config.json").write_bytes(content)
    assert str(files / "config.json") in refused(files, capsys)


def test_a_tokenizer_that_is_a_link(checkpoint: Path, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Links of a download cache are followed; others would put somebody's file into the exported model."""
    blobs = files / "hub" / "blobs"
    blobs.mkdir()
    for folder in (blobs, files):
        (folder / "123").write_text("{}")
    (checkpoint / "vocab.txt").symlink_to("../../blobs/123")
    assert [path.name for path in _tokenizer_files(checkpoint)] == ["vocab.txt"]
    (checkpoint / "vocab.json").symlink_to(files / "123")
    assert f"{checkpoint / 'vocab.json'} is a link to {files / '123'}" in refused(
        files, capsys, model="hub/snapshots/1"
    )


def test_links_where_tokens_and_weights_are_written(tmp_path: Path) -> None:
    """A link that waits under the name of a temporary file is replaced, and not written through."""
    victim, out = tmp_path / "victim", tmp_path / "out"
    victim.write_text("precious")
    (tmp_path / "a.txt").write_text("some text")
    tokens = read_tokens(tmp_path / "a.txt", vocab_size=256, cache_dir=out)
    (kept,) = out.iterdir()
    kept.unlink()
    (out / f".{kept.name}.{os.getpid()}.tmp").symlink_to(victim)
    assert read_tokens(tmp_path / "a.txt", vocab_size=256, cache_dir=out).tolist() == tokens.tolist()
    assert np.load(kept).tolist() == tokens.tolist()
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("content", [b"", b"x", b"\x93NUMPY\x01\x00", pickle.dumps([1, 2])])
@pytest.mark.parametrize("name", ["text.npy", "text.bin"])
def test_tokens_that_are_none(content: bytes, name: str, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / name).write_bytes(content)
    if name == "text.npy" or len(content) < 2:
        assert f"{files / name} holds no tokens" in refused(files, capsys, data=name)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("name", ["trace.json", "model/model-00002-of-00004.safetensors", "model/config.json"])
def test_a_full_or_failing_drive_at_the_end(
    name: str, code: int, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file is named; all steps are committed, and the run is exported when it is resumed."""
    command = ["run", str(files / "plan.json"), "--model", str(files / "config.json"), "--steps", "1", "--threads", "1"]
    command += ["--data", str(files / "text.txt"), "--out", str(files / "out")]
    original, path = io.open, files / "out" / name

    def fail(file: Any, *args: Any, **settings: Any) -> Any:
        if path.name in str(file) and Path(file).parent == path.parent:
            raise OSError(code, os.strerror(code))
        return original(file, *args, **settings)

    with mock.patch("io.open", fail), mock.patch("builtins.open", fail):
        assert main(command) == 1
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert str(path) in said
    assert "write" in said or "written" in said
    assert os.strerror(code).lower() in said.lower()
    assert main([*command, "--resume"]) == 0
    assert path.exists() or name == "trace.json"


def test_all_kinds_of_the_runtime_are_known() -> None:
    """The table of kinds and streams is that of the functions that execute them."""
    step = mock.Mock(units=(), training=mock.Mock(dtype_of_trained="fp32"))
    schedule = mock.Mock(ops=(), step=step)
    bodies = mock.Mock(units=[], parameters=[], optimizer=mock.Mock(groups=()), schedule=schedule, ranks=None)
    Bodies.__post_init__(bodies)
    assert set(bodies._kinds) == set(STREAMS_BY_KIND)
