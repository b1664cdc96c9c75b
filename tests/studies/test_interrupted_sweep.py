"""Ctrl-C and kills of a sweep: it ends, keeps what is whole, and goes on in the next run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from tests.studies.test_sweep import grid
from tierplan.studies.study import Point
from tierplan.studies.sweep import asking, sweep


def test_interrupted_as_its_processes_begin_it_says_nothing_of_them(tmp_path: Path) -> None:
    """They import for a second or two before they could say that Ctrl-C is not for them."""
    script = tmp_path / "early.py"
    script.write_text(
        textwrap.dedent("""
        import signal, sys
        if __name__ != "__main__":
            sys.stderr.write(f"{signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())}\\n")  # at once
        from tierplan.studies.study import Point
        from tierplan.studies.sweep import sweep

        def nothing(point):
            return {}

        if __name__ == "__main__":
            sweep([Point(model="m", machine="x", batch=i) for i in (1, 2)], nothing, num_workers=2)
            assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
        """)
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=True)
    assert set(done.stderr.split()) == {"True"}, "a process that begins may be interrupted"


@pytest.mark.parametrize(("killed_by", "status"), [("int", 130), ("int int", 130), ("kill", -signal.SIGKILL)])
def test_interrupted_it_ends_and_continues(killed_by: str, status: int, tmp_path: Path) -> None:
    """In the middle of a run with processes: all of them end soon, and the second run does only what is missing."""
    script = tmp_path / "slow.py"
    script.write_text(
        textwrap.dedent("""
        import os, sys, time
        from pathlib import Path
        from tierplan.studies.study import Point
        from tierplan.studies.sweep import asking, sweep

        def slow(point):
            time.sleep(0.05)
            with open(sys.argv[2], "a") as log:
                log.write(f"{os.getpid()}\\n")
            return {"step_s": float(point.batch)}

        if __name__ == "__main__":
            points = [Point(model="m", machine="x", batch=i) for i in range(1, 101)]
            try:
                sweep(points, slow, out_dir=sys.argv[1], num_workers=2)
            except KeyboardInterrupt:
                sys.exit(130)
        """)
    )
    log = tmp_path / "log"
    command = [sys.executable, str(script), str(tmp_path / "out"), str(log)]
    process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE)
    results = tmp_path / "out" / "results.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and (not results.exists() or len(results.read_bytes().splitlines()) < 10):
        time.sleep(0.05)
    if killed_by == "kill":
        process.kill()
    for _ in range(killed_by.count("int")):
        os.killpg(process.pid, signal.SIGINT)
    said = process.communicate(timeout=120)[1].decode()
    assert process.returncode == status or killed_by == "int int"
    assert process.returncode != 0
    assert said == "" or killed_by != "int", "nobody sees the threads that end"
    deadline = time.monotonic() + 120
    while any(Path(f"/proc/{pid}").exists() for pid in set(log.read_text().split())):
        assert time.monotonic() < deadline, "a process goes on without the one that began it"
        time.sleep(0.05)
    kept = len(results.read_bytes().splitlines())
    assert 10 <= kept < 100
    evaluated_before = len(log.read_text().splitlines())
    subprocess.run(command, check=True, timeout=300)
    assert len(results.read_bytes().splitlines()) == 100
    assert len(log.read_text().splitlines()) - evaluated_before == 100 - kept


def swallowing(point: Point) -> Mapping[str, object]:
    """Ctrl-C comes, as if in a search, which would have a plan already."""
    with suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    return {"step_s": 1.0}


def test_interrupted_in_a_search_one_process_keeps_no_row_of_it(tmp_path: Path) -> None:
    """`plan` answers with the best until then; as the row of a study it would be there for good."""
    with pytest.raises(KeyboardInterrupt):
        sweep(grid(1), swallowing, out_dir=tmp_path)
    assert not (tmp_path / "results.jsonl").read_text()
    with pytest.raises(KeyboardInterrupt), asking(1) as ask:
        ask(grid(1), swallowing)[0]()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
