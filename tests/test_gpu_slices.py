"""`make gpu`: slices that go on after a kill between or in any of them, and what they do on devices that are there."""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu import all_slices, beside_plain, install_missing, main, pack, report, rows, run_slices, unpack
from tests.conftest import pytest_collection_modifyitems
from tierplan.runtime import reference

DRIVER = """
import sys, pathlib
from benchmarks.gpu import run_slices
here = pathlib.Path(sys.argv[1])
work = 'echo x >> {0}.ran; if [ ! -e {0}.killed ]; then touch {0}.killed; kill -9 $PPID; sleep 60; fi'
slices = {f"s/{k}": ("bash", "-c", work.format(here / str(k))) for k in range(4)}
run_slices(slices, here / "out", tar=here / "out.tar.gz")
"""


@pytest.mark.parametrize("is_lent_anew", [False, True])
def test_it_goes_on_after_a_kill_in_any_slice(is_lent_anew: bool, tmp_path: Path) -> None:
    """In its folder; or from the packed file alone, on a machine that knows nothing of the one before."""
    out, tar, codes = tmp_path / "out", tmp_path / "out.tar.gz", []
    while not codes or codes[-1]:
        if is_lent_anew and codes:
            shutil.rmtree(out)
            if tar.exists():  # not so after a kill in the first
                unpack(tar, out)
        codes.append(subprocess.run([sys.executable, "-c", DRIVER, str(tmp_path)]).returncode)
        assert len(codes) < 9
    assert codes == [-9] * 4 + [0]
    assert {name: one["result"] for name, one in json.loads((out / "state.json").read_text()).items()} == {
        f"s/{k}": "done" for k in range(4)
    }
    with tarfile.open(tar) as packed:
        assert set(packed.getnames()) == {"state.json", *(f"logs/s-{k}.log" for k in range(4))}
    assert [(tmp_path / f"{k}.ran").read_text().count("x") for k in range(4)] == [2, 2, 2, 2]


HOLDER = """
import sys, pathlib
from benchmarks.gpu import run_slices
out = pathlib.Path(sys.argv[1])
work = 'exec 3> {0}/pipe; echo begun >&3; while kill -0 $PPID; do sleep 0.02; done; touch {0}/outlived'
run_slices({"long": ("bash", "-c", work.format(out))}, out)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_slice_ends_with_the_run_and_a_second_run_beside_it_is_refused(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(gpu, "install_missing", lambda wheels, out: pytest.fail("beside the other one"))
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)]) as holder, (tmp_path / "pipe").open() as pipe:
        assert pipe.readline() == "begun\n"
        try:
            with pytest.raises(SystemExit, match="in use by another run"):
                run_slices({"other": ("true",)}, tmp_path)
            with pytest.raises(SystemExit, match="in use by another run"):
                main(["--device", "cpu", "--tiny", "--out", str(tmp_path), "--wheels", str(tmp_path)])
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
    state = json.loads((tmp_path / "state.json").read_text())
    assert {name: one["result"] for name, one in state.items()} == {"good": "done", "long": "not run"}
    assert "| long | not run |" in report(tmp_path)


def test_a_full_disk_ends_it_in_one_line_and_what_was_done_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slices = {"good": ("true",), "full": ("touch", str(tmp_path / "full"))}
    monkeypatch.setattr("benchmarks.gpu.all_slices", lambda args: slices)
    write_text = Path.write_text

    def written(path: Path, text: str) -> int:
        if (tmp_path / "full").exists():
            path.touch()
            raise OSError(28, "No space left on device", str(path))
        return write_text(path, text)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", written)
        assert main(["--device", "cpu", "--tiny", "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert "No space left on device" in said
    assert said.endswith("; what was done is kept, and the same command goes on behind it\n")
    (tmp_path / "full").unlink()
    slices["full"] = ("true",)
    assert main(["--device", "cpu", "--tiny", "--out", str(tmp_path / "out")]) == 0
    assert "good ..." not in capsys.readouterr().out


def test_what_fails_or_takes_too_long_is_noted_and_repeated_by_the_next_run_behind_what_is_new(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    slices = {name: ("bash", "-c", f"echo {name} >> {ran}; {work}") for name, work in
              {"bad": "exit 1", "long": "exec sleep 60", "good": "true"}.items()}  # fmt: skip
    state = run_slices(slices, tmp_path, limit_s=3)
    assert [one["result"] for one in state.values()] == ["exit status 1", "over 3 s", "done"]
    assert "| long | over 3 s |" in report(tmp_path)
    slices |= {name: ("bash", "-c", f"echo {name} >> {ran}") for name in ("bad", "long", "new")}
    assert {one["result"] for one in run_slices(slices, tmp_path).values()} == {"done"}
    assert ran.read_text().split() == ["bad", "long", "good", "new", "bad", "long"]


def test_what_a_rehearsal_has_done_is_not_done_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of slices are the same; a test that was skipped on the CPU would never have run."""
    out, ran = tmp_path / "out", tmp_path / "ran"
    monkeypatch.setattr("benchmarks.gpu.all_slices", lambda args: {"tests": ("bash", "-c", f"echo >> {ran}")})
    assert main(["--out", str(out), "--device", "cpu", "--tiny"]) == 0
    for other in (["--device", "cpu"], ["--device", "fake", "--tiny"], ["--device", "cuda"]):
        with pytest.raises(SystemExit, match="has results of '--device cpu --tiny', and these are of '--device"):
            main(["--out", str(out), *other])
    shutil.rmtree(out)  # the packed file says it, too
    with pytest.raises(SystemExit, match="has results of '--device cpu --tiny'"):
        main(["--out", str(out), "--device", "cuda"])
    assert main(["--out", str(out), "--device", "cpu", "--tiny"]) == 0
    assert ran.read_text() == "\n"
    run_slices({"tests": ("true",)}, tmp_path / "there", tar=tmp_path / "gpu.tar.gz", asked="--device cuda")
    back = ["--out", str(out), "--tar", str(tmp_path / "gpu.tar.gz"), "--report"]
    with pytest.raises(SystemExit, match="has results of '--device cpu --tiny', and these are of '--device cuda'"):
        main(back)  # else its page had both
    (out / "state.json").write_text('{"tests": {"res')
    with pytest.raises(SystemExit, match=r"state\.json is damaged"):
        main(["--out", str(out), "--device", "cpu", "--tiny"])


def test_the_page_says_on_what_each_slice_ran_and_without_a_machine_none_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each loan may have another card, or another PyTorch; what was done before is kept, with where."""
    says = "echo torch 2.{0}; echo GPU 0: {0}"
    slices = {"environment": ("bash", "-c", says.format(6)), "a": ("true",), "b": ("false",), "c": ("true",)}
    run_slices({name: slices[name] for name in ("environment", "a", "b")}, tmp_path)
    slices |= {"environment": ("bash", "-c", f"{says.format(7)}; exit 1"), "b": ("true",)}
    assert run_slices(slices, tmp_path)["c"]["result"] == "not run"
    assert "no other slice is begun; " in (said := capsys.readouterr().err)
    assert said.endswith("environment.log ends: torch 2.7\nGPU 0: 7\n\n")
    assert "GPU 0: 7" not in report(tmp_path)
    slices |= {"environment": ("bash", "-c", says.format(8))}
    run_slices(slices, tmp_path)
    page = report(tmp_path)
    assert "\n1. torch 2.8; GPU 0: 8\n2. torch 2.6; GPU 0: 6\n" in page
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("|")]
    assert {row[0]: row[3] for row in rows[2:]} == {"environment": "1", "a": "2", "b": "1", "c": "1"}


def test_the_page_is_made_of_a_campaign_that_was_killed_in_its_first_run(tmp_path: Path) -> None:
    run_slices({"good": ("true",)}, tmp_path)
    (tmp_path / "campaign" / "gpt2-2560").mkdir(parents=True)
    (tmp_path / "campaign" / "gpt2-2560" / "machine.toml").touch()
    page = report(tmp_path)
    assert "| good | done |" in page
    assert "there is no run to summarise" in page


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_no_slice_of_one_is_done(tmp_path: Path) -> None:
    """Tests that need one are skipped, which pytest calls passed."""
    args = argparse.Namespace(
        out=tmp_path, device="cuda", size=("--tiny",), campaign="gpu-billions", nvme_dir=tmp_path / "nvme", wheels=None
    )
    slices = all_slices(args)
    for name in ("environment", "tests/test_gpu"):
        assert run_slices({name: slices[name]}, tmp_path)[name]["result"].startswith("exit status")
    assert "sees no GPU" in (tmp_path / "logs" / "environment.log").read_text()
    assert "sees no GPU" in (tmp_path / "logs" / "tests-test_gpu.log").read_text()


def test_results_are_packed_into_a_file_of_limited_size_that_the_page_is_made_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "TAR_BYTES", 40_000)
    out, tar = tmp_path / "out", tmp_path / "out.tar.gz"
    for path, size_bytes in {"nvme/a": 1, "packages/b": 1, "c": 30_000, "d/e": 20_000, "f": 50_000}.items():
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        (out / path).write_bytes(os.urandom(size_bytes))
    (out / "zeros").write_bytes(bytes(100_000))
    run_slices({"good": ("true",)}, out, tar=tar)
    assert tar.stat().st_size < 40_000
    with tarfile.open(tar) as packed:
        names = {"state.json", "logs/good.log", "d/e", "left-out.txt"}  # all of those below the first too many
        assert set(packed.getnames()) == names
    shutil.rmtree(out)
    assert main(["--out", str(out), "--report"]) == 0
    page = (out / "gpu.md").read_text()
    assert "| good | done |" in page
    assert "not there: zeros, f, c." in page
    run_slices({"later": ("true",)}, out, tar=tmp_path / "came-back.tar.gz")
    pack(out, tmp_path / "came-back.tar.gz")
    assert main(["--out", str(tmp_path / "other"), "--tar", str(tmp_path / "came-back.tar.gz"), "--report"]) == 0
    assert "| later | done |" in (tmp_path / "other" / "gpu.md").read_text()
    with pytest.raises(SystemExit, match="has results; give another folder"):
        main(["--out", str(tmp_path / "none"), "--report"])


def test_a_packed_file_that_is_cut_off_is_refused_and_one_half_unpacked_is_unpacked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the run goes on with slices that are done and have no results, and packs that over the file."""
    out, tar = tmp_path / "out", tmp_path / "out.tar.gz"
    out.mkdir()
    (out / "result").write_bytes(os.urandom(9_000))
    run_slices({"good": ("true",)}, out, tar=tar, asked="--device cpu --tiny")
    whole = tar.read_bytes()
    args = ["--out", str(out), "--device", "cpu", "--tiny"]
    monkeypatch.setattr("benchmarks.gpu.all_slices", lambda args: {"good": ("true",)})
    for damaged in (whole[:-20], whole[:4_000], b"", b"no such file", whole[:5_000] + bytes(99) + whole[5_099:]):
        shutil.rmtree(out, ignore_errors=True)
        tar.write_bytes(damaged)
        with pytest.raises(SystemExit, match=r"out\.tar\.gz is damaged: .*move it away"):
            main(args)
        assert not (out / "state.json").exists()
        assert tar.read_bytes() == damaged
    tar.write_bytes(whole)
    make, names = tarfile.TarFile.makefile, []

    def killed_at_the_last(self: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
        names.append(member.name)
        if len(names) == 3:
            raise KeyboardInterrupt
        make(self, member, path)

    with monkeypatch.context() as patched:
        patched.setattr(tarfile.TarFile, "makefile", killed_at_the_last)
        with pytest.raises(KeyboardInterrupt):
            unpack(tar, out)
    assert main(args) == 0
    assert (out / "result").stat().st_size == 9_000
    with tarfile.open(tar) as packed:
        assert set(packed.getnames()) == {"state.json", "logs/good.log", "result"}


def test_turns_beside_plain_training_end_in_time_and_are_kept_as_they_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    beside_plain("cpu", tmp_path, 64, 1, steps=4, turns=3, budget_s=0)
    assert capsys.readouterr().out.startswith("1 of 3 turns taken\n")
    found = json.loads((tmp_path / "beside-plain-64.json").read_text())
    assert (found["turns"], found["turns_asked"]) == (1, 3)
    assert {len(one_s) for one_s in found["step_s"].values()} == {1}
    train_plainly, num_calls = reference.train_plainly, 0

    def killed_in_the_third_turn(*args: object, **settings: object) -> object:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            raise KeyboardInterrupt
        return train_plainly(*args, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(reference, "train_plainly", killed_in_the_third_turn)
    with pytest.raises(KeyboardInterrupt):
        beside_plain("cpu", tmp_path, 64, 1, steps=4, turns=3)
    found = json.loads((tmp_path / "beside-plain-64.json").read_text())
    assert {len(one_s) for one_s in found["step_s"].values()} == {found["turns"]} == {2}


def test_all_that_is_imported_is_looked_for_and_what_a_machine_may_lack_can_be_carried() -> None:
    root = Path(__file__).parent.parent
    sources = [
        p for folder in ("hwmodels", "planner", "runtime", "sim", "validation") for p in root.glob(f"{folder}/**/*.py")
    ]
    sources += [root / "benchmarks" / f"{name}.py" for name in ("gpu", "models", "records", "trainings")]
    nodes = [node for path in sources for node in ast.walk(ast.parse(path.read_text()))]
    modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    modules += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    optional = {"pandas", "peft"}  # for what no slice does
    foreign = {module.partition(".")[0] for module in modules} - sys.stdlib_module_names - {"benchmarks", "tierplan"}
    assert foreign - optional <= {*gpu.NEEDED, "torch", "numpy"}
    packages = re.search(r"^GPU_PACKAGES := (.*)", (root / "Makefile").read_text(), flags=re.MULTILINE)
    assert packages is not None
    assert set(packages[1].split()) <= set(gpu.NEEDED)
    for name in packages[1].split():  # nor do they need what is not looked for
        needs = [text for text in metadata.requires(name) or () if ";" not in text]
        assert {re.split(r"\W", text)[0] for text in needs} <= {*gpu.NEEDED, "numpy"}


def test_only_what_is_missing_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what it needs, which is there: a second numpy would hide the first."""
    wheels, name, info = (
        tmp_path / "wheels",
        "package_that_a_machine_lacks",
        "package_that_a_machine_lacks-1.0.dist-info/",
    )
    wheels.mkdir()
    with zipfile.ZipFile(wheels / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "import numpy\n")
        wheel.writestr(f"{info}METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: numpy\n")
        wheel.writestr(f"{info}WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}RECORD", "")
    monkeypatch.setattr(gpu, "NEEDED", ("numpy", name))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    with pytest.raises(SystemExit, match=f"missing: {name}; .*make gpu-wheels"):
        install_missing(tmp_path / "no such folder", tmp_path / "out")

    def killed(command: list[str], *, check: bool) -> None:
        """As pip moves what it has installed."""
        (Path(command[command.index("--target") + 1]) / name).mkdir(parents=True)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "run", killed)
        with pytest.raises(KeyboardInterrupt):
            install_missing(wheels, tmp_path / "out")
    install_missing(wheels, tmp_path / "out")
    installed = {path.name for path in (tmp_path / "out" / "packages").iterdir()} - {"__pycache__"}
    assert installed == {f"{name}.py", info[:-1]}
    install_missing(None, tmp_path / "out")  # it is there now


class Case:
    """Of a test with one parameter."""

    def __init__(self, marker: str, family: str) -> None:
        self.marker, self.callspec = marker, argparse.Namespace(params={"family": family})
        self.reasons: list[str] = []

    def get_closest_marker(self, name: str) -> str | None:
        return self.marker if name == self.marker else None

    def add_marker(self, marker: pytest.MarkDecorator) -> None:
        assert marker.name == "skip"
        self.reasons.append(marker.kwargs["reason"])


def test_an_older_transformers_leaves_out_what_it_cannot_do_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "left out" not in gpu.about_versions()
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "5.17.0" if name == "transformers" else real(name))
    assert "transformers 5.17.0" in gpu.about_versions()
    assert "left out: tests and campaign rows of opt" in gpu.about_versions()
    assert {row.partition("/")[0] for row in rows("gpu-billions")} == {"gpt2-2560", "llama-4096"}
    items = [Case("gpu", "opt"), Case("gpu", "llama"), Case("nightly", "opt")]
    pytest_collection_modifyitems(items)  # type: ignore[arg-type]
    assert [item.reasons for item in items] == [["transformers is too old for opt"], [], []]


def test_the_campaign_begins_with_its_smallest_rows(tmp_path: Path) -> None:
    args = argparse.Namespace(
        out=tmp_path, device="cuda", size=(), campaign="gpu-billions", nvme_dir=tmp_path / "nvme", wheels=None
    )
    names = list(all_slices(args))
    assert len(names) == len(set(names))
    assert "CUBLAS_WORKSPACE_CONFIG=:4096:8" in all_slices(args)["tests/test_gpu"]
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
