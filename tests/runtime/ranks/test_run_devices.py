"""`tierplan run --devices 2` does what one device does with twice the micro-batches, and says so once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.runtime.ranks.test_ranks import several
from tests.runtime.test_job import START, arguments, files, metrics, same_weights_in, write_plan
from tests.runtime.test_trainer import CPU
from tierplan.cli import main
from tierplan.planner.lowering import lower
from tierplan.planner.policies import decide
from tierplan.runtime.tracing.trace import trace_config
from tierplan.sim.schedule_file import load_schedule, save_schedule
from tierplan.sim.trace import Trace

__all__ = ["files"]


def run_of_two(files: Path, steps: int, *more: str) -> list[str]:
    """The command of a run by two ranks."""
    return [sys.executable, "-c", START, *arguments(files, steps, "two", "--devices", "2", *more)]


def run(files: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(run_of_two(files, 4, *more), capture_output=True, text=True, timeout=240, check=False)


def write_plan_of_two(files: Path, policy: str = "zero-3") -> None:
    workload = trace_config("tiny", json.loads((files / "config.json").read_text()), CPU)
    save_schedule(lower(decide(policy, workload, several(2)), workload, several(2)), files / "plan.json")


@pytest.mark.nightly
def test_two_devices_train_as_one_with_two_micro_batches(files: Path) -> None:
    write_plan(files, replace(CPU, gradient_accumulation_steps=2))
    assert main(arguments(files, 4, "one")) == 0
    write_plan_of_two(files)
    done = run(files)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("4 steps done") == 1
    assert [line["loss"] for line in metrics(files, "one")] == [line["loss"] for line in metrics(files, "two")]
    assert same_weights_in(files)
    measured = {span.key.split("/", 1)[1] for span in Trace.load(files / "two" / "trace.json").spans}
    assert measured == {op.key for op in load_schedule(files / "plan.json").ops}


@pytest.mark.nightly
def test_what_is_told_is_of_all_ranks(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the trace has it; also where a tool has left its number of ranks in the environment."""
    write_plan_of_two(files, "zero-infinity")
    monkeypatch.setenv("WORLD_SIZE", "1")
    done = run(files, "--json", "--no-export")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)["this_session"]
    assert told["peak_bytes"] == Trace.load(files / "two" / "trace.json").peak_bytes
    assert told["peak_bytes"].keys() >= {"gpu0", "gpu1", "host", "nvme"}
    for stream, size in load_schedule(files / "plan.json").bytes_moved().items():
        assert size <= told["bytes"][stream] / 4 < 1.01 * size  # shards are rounded up


@pytest.mark.nightly
def test_ctrl_c_stops_all_ranks_and_the_run_goes_on(files: Path) -> None:
    write_plan_of_two(files)
    command = run_of_two(files, 60)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    path = files / "two" / "metrics.jsonl"
    while not path.exists() or len(path.read_text().splitlines()) < 3:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "resume with --resume" in said
    num_before = len(metrics(files, "two"))
    assert subprocess.run([*command, "--resume"], timeout=240, check=False).returncode == 0
    write_plan(files, replace(CPU, gradient_accumulation_steps=2))
    assert main(arguments(files, 60, "one")) == 0
    assert num_before < 60
    assert [line["loss"] for line in metrics(files, "one")] == [line["loss"] for line in metrics(files, "two")]


@pytest.mark.nightly
def test_a_plan_of_two_wants_two(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_plan_of_two(files)
    assert main(arguments(files, 4, "two")) == 1
    assert "is for 2 devices, and 1 rank was started; start 2: `tierplan run --devices 2`" in capsys.readouterr().err
    (files / "text.txt").write_text("too short")
    done = run(files)
    assert done.returncode == 1
    assert done.stderr.count("tierplan run:") == 1


LEAVES_LATE = """
import atexit, sys, time
from tierplan.runtime.ranks.launch import own_ranks
with own_ranks("rank") as ranks:
    print(f"rank {ranks.rank} has said all")
if ranks.rank == 0:
    atexit.register(time.sleep, 1.0)
sys.exit(130)
"""


def command_of_two(folder: Path, text: str) -> list[str]:
    """What starts two ranks that execute this text."""
    rank, script = folder / "rank.py", folder / "rank"
    rank.write_text(text)
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{rank}"\n')
    script.chmod(0o755)
    start = f"import sys; from tierplan.runtime.ranks.launch import start_ranks; sys.executable = {str(script)!r}; "
    return [sys.executable, "-c", f"{start}sys.exit(start_ranks(2, []))"]


@pytest.mark.nightly
def test_a_rank_that_leaves_behind_the_others_has_not_died(tmp_path: Path) -> None:
    """All have the status of a stop. What starts them ends the last ones when the first one leaves."""
    command = command_of_two(tmp_path, LEAVES_LATE)
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert "has died" not in done.stderr
    assert done.returncode == 130
    assert [done.stdout.count(f"rank {rank} has said all") for rank in (0, 1)] == [1, 1]


REFUSES = """
import os, time
if os.environ["RANK"] == "1":
    time.sleep(2.0)  # and is ended before it can listen
from tierplan.runtime.ranks.launch import own_ranks
if os.environ["RANK"] == "0":
    os._exit(1)  # it has said why
time.sleep(60.0)
"""


def test_a_rank_that_is_ended_for_the_failure_of_another_has_not_died(tmp_path: Path) -> None:
    done = subprocess.run(command_of_two(tmp_path, REFUSES), capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, "has died" in done.stderr) == (1, False)


GOES_ON = """
import os, time
from tierplan.runtime.ranks.launch import own_ranks
with own_ranks("rank") as ranks:
    os.write(1, f"{{os.getpid()}}\\n".encode())
    while True:
        {}
"""


@pytest.mark.parametrize("does", ["ranks.share([1.0], 'steps')", "time.sleep(0.1)"])
def test_ranks_end_when_what_started_them_is_killed(does: str, tmp_path: Path) -> None:
    """Whether or not they exchange something; and one of them says why."""
    command = command_of_two(tmp_path, GOES_ON.format(does))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pids = [int(process.stdout.readline()) for _ in range(2)]
    process.kill()
    begun_s = time.monotonic()
    try:
        while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < begun_s + 15:
            time.sleep(0.1)
        left = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    finally:
        for pid in pids:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    assert left == []
    assert said.count(f"the process that started the ranks (process {process.pid}) has died; all ranks end") == 1
    assert len(said.splitlines()) == 1, said
