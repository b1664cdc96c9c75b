"""`make gpu`: slices that go on after a kill between or in any of them, and what they do on devices that are there."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.gpu import all_slices, main, report, rows, run_slices

DRIVER = """
import sys, pathlib
from benchmarks.gpu import run_slices
out = pathlib.Path(sys.argv[1])
work = 'echo x >> {0}.ran; if [ ! -e {0}.killed ]; then touch {0}.killed; kill -9 $PPID; sleep 60; fi'
run_slices({f"s/{k}": ("bash", "-c", work.format(out / str(k))) for k in range(4)}, out)
"""


def test_it_goes_on_after_a_kill_in_any_slice(tmp_path: Path) -> None:
    codes = []
    while not codes or codes[-1]:
        codes.append(subprocess.run([sys.executable, "-c", DRIVER, str(tmp_path)]).returncode)
        assert len(codes) < 9
    assert codes == [-9] * 4 + [0]
    assert {name: one["result"] for name, one in json.loads((tmp_path / "state.json").read_text()).items()} == {
        f"s/{k}": "done" for k in range(4)
    }
    assert [(tmp_path / f"{k}.ran").read_text().count("x") for k in range(4)] == [2, 2, 2, 2]


HOLDER = """
import sys, pathlib
from benchmarks.gpu import run_slices
out = pathlib.Path(sys.argv[1])
work = 'exec 3> {0}/pipe; echo begun >&3; while kill -0 $PPID; do sleep 0.02; done; touch {0}/outlived'
run_slices({"long": ("bash", "-c", work.format(out))}, out)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_slice_ends_with_the_run_and_a_second_run_beside_it_is_refused(tmp_path: Path, number: int) -> None:
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)]) as holder, (tmp_path / "pipe").open() as pipe:
        assert pipe.readline() == "begun\n"
        try:
            with pytest.raises(SystemExit, match="in use by another run"):
                run_slices({"other": ("true",)}, tmp_path)
        finally:
            holder.send_signal(number)
            holder.wait()
        assert pipe.read() == ""  # until the slice has ended
    assert not (tmp_path / "outlived").exists()
    assert run_slices({"other": ("true",)}, tmp_path)["other"]["result"] == "done"


def test_ctrl_c_ends_it_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    work = f"touch {tmp_path}/begun; kill -INT $PPID; sleep 60"
    slices = {"good": ("true",), "long": ("bash", "-c", work)}
    monkeypatch.setattr("benchmarks.gpu.all_slices", lambda args: slices)
    assert main(["--device", "cpu", "--tiny", "--out", str(tmp_path)]) == 130
    assert (tmp_path / "begun").exists()
    assert capsys.readouterr().err == "interrupted; the same command goes on behind the slices that are done\n"
    assert list(json.loads((tmp_path / "state.json").read_text())) == ["good"]


def test_what_fails_or_takes_too_long_is_noted_and_not_repeated(tmp_path: Path) -> None:
    slices = {"bad": ("false",), "long": ("sleep", "60"), "good": ("true",)}
    state = run_slices(slices, tmp_path, limit_s=3)
    assert [one["result"] for one in state.values()] == ["exit status 1", "over 3 s", "done"]
    assert run_slices(slices, tmp_path) == state
    assert "| long | over 3 s |" in report(tmp_path)


def test_the_campaign_begins_with_its_smallest_rows(tmp_path: Path) -> None:
    args = argparse.Namespace(
        out=tmp_path, device="cuda", size=(), campaign="gpu-billions", nvme_dir=tmp_path / "nvme", wheels=None
    )
    names = list(all_slices(args))
    assert len(names) == len(set(names))
    assert "tests/test_gpu" in names
    assert names.index("machine") < names.index("campaign/" + rows("gpu-billions")[0])
    sizes = {"opt-2048": 2048**2, "gpt2-2560": 2560**2, "llama-4096": 4096**2}
    works = [sizes[row.split("/")[0]] * int(row.split("/")[1].split("-")[0]) for row in rows("gpu-billions")]
    assert len(works) == 24
    assert all(a <= b for a, b in pairwise(works))


@pytest.mark.nightly
@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_all_of_it_on_devices_that_are_there(device: str, tmp_path: Path) -> None:
    args = ["--out", str(tmp_path), "--device", device, "--tiny"]
    assert main(args) == 0
    state = json.loads((tmp_path / "state.json").read_text())
    assert {one["result"] for one in state.values()} == {"done"}
    assert main([*args, "--report"]) == 0
    page = (tmp_path / "gpu.md").read_text()
    assert "| all kept |" in page
    assert device == "fake" or "zero-offload" in page
