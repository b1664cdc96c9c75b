"""Any rank is killed at any moment: the others end soon and name it, and the run goes on bit for bit."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.runtime.ranks.test_run_devices import run_of_two, write_plan_of_two
from tests.runtime.test_job import arguments, files, metrics, same_weights_in, write_plan
from tests.runtime.test_trainer import CPU
from tierplan.cli import main

__all__ = ["files"]

MOST_S = 10.0
"""After a rank has died, all have ended."""
STEPS = 400
DIED = r"rank {} of 2 \(process \d+\) has died; all ranks end. Resume from the last commit"


def ranks_of(launcher: int) -> dict[int, int]:
    """The processes that it has started, by rank."""
    found = {}
    for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        environment = dict(x.partition("=")[::2] for x in Path(f"/proc/{pid}/environ").read_text().split("\0"))
        if "RANK" in environment:
            found[int(environment["RANK"])] = int(pid)
    return found


def wait_until(is_so: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    while not is_so() and process.poll() is None:
        time.sleep(0.02)


def run_and_kill(files: Path, rng: random.Random, log: Path) -> str:
    """What is wrong after a run of which one rank was killed: while it starts, or within a second of its first step."""
    path, victim, is_early = files / "two" / "metrics.jsonl", rng.randrange(2), rng.random() < 0.4
    before = path.stat().st_mtime_ns if path.exists() else 0
    with log.open("w") as said:
        command = run_of_two(files, STEPS, "--resume", "--no-export", "--checkpoint-every", "1")
        process = subprocess.Popen(command, stdout=said, stderr=said, text=True)
    wait_until(lambda: len(ranks_of(process.pid)) == 2, process)
    pids = ranks_of(process.pid)
    if not is_early:
        wait_until(lambda: path.exists() and path.stat().st_mtime_ns > before and path.stat().st_size > 0, process)
    time.sleep(rng.uniform(0, 6 if is_early else 1))
    if process.poll() is not None:
        return f"it has ended before it was killed, and said:\n{log.read_text()}"
    os.kill(pids[victim], signal.SIGKILL)
    begun_s = time.monotonic()
    try:
        code = process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        code = 0
    took_s, text = time.monotonic() - begun_s, log.read_text()
    left = [pid for pid in pids.values() if Path(f"/proc/{pid}").exists()]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    named = re.findall("rank . of 2.*", text)
    is_named = len(named) == 1 and re.fullmatch(DIED.format(victim), named[0])
    if took_s > MOST_S or left or code == 0 or not is_named:
        return f"rank {victim}, early {is_early}: {took_s:.1f} s, exit status {code}, left {left}, said:\n{text}"
    return ""


def kill_again_and_again(files: Path, seed: int, num: int) -> list[str]:
    training = replace(CPU, gradient_accumulation_steps=2)
    write_plan(files, training)
    assert main(arguments(files, STEPS, "one")) == 0
    wanted = [line["loss"] for line in metrics(files, "one")]
    write_plan_of_two(files, "zero-infinity")
    wrong = []
    rng = random.Random(seed)
    for k in range(num):
        if why := run_and_kill(files, rng, files / "log"):
            wrong.append(f"kill {k}: {why}")
        found = [line["loss"] for line in metrics(files, "two")] if (files / "two" / "metrics.jsonl").exists() else []
        assert found == wanted[: len(found)]
        assert len(found) < STEPS
    assert subprocess.run(run_of_two(files, STEPS, "--resume"), check=False, timeout=240).returncode == 0
    assert [line["loss"] for line in metrics(files, "two")] == wanted
    assert same_weights_in(files)
    return wrong


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(4))
def test_any_rank_killed_at_25_random_moments(seed: int, files: Path) -> None:
    assert kill_again_and_again(files, seed, 25) == []
