"""All that a borrowed GPU is asked, in slices that each end within eight minutes, and that can be continued.

    make gpu-wheels    here: fills the folder WHEELS with the few packages that a borrowed machine lacks (5 MB)
    make gpu           there: runs what is not done yet: tests, a measurement, comparisons, the campaign from its
                       smallest rows; and then once more what has failed
    make gpu-report    the page of it, elsewhere

`OUT/state.json` says which slices have ended, and how; each has its log in `OUT/logs`. After each, all results are
packed into one file below 16 MiB, `--tar` (OUT.tar.gz). Where OUT is empty, a run goes on from that file. Nothing is
fetched: packages that are missing, and no others, are installed from the folder `--wheels`.
"""

from __future__ import annotations

import argparse
import copy
import fcntl
import gzip
import importlib.util
import io
import itertools
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from benchmarks.records import arguments

SLICE_S = 480.0
TURNS_S = 420.0
"""Within a slice no further turn is begun that would end later."""
TAR_BYTES = 16 << 20
FIRST = "environment"
"""The slice that says what the machine is: it begins each run, and without it no other does."""
LEFT_OUT = "left-out.txt"
"""Names of what the packed file had no room for."""
STATE, NOT_RUN = "state.json", "not run"
NEEDS_GPU = "TIERPLAN_NEEDS_GPU"
"""Where this is set, tests fail without a GPU: all that need one would be skipped, and that counts as passed."""
ENDS_WITH_PARENT = (
    "import ctypes, os, signal, sys; PR_SET_PDEATHSIG = 1\n"
    "ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)\n"
    "os.getppid() == int(sys.argv[1]) and os.execvp(sys.argv[2], sys.argv[2:])"
)
"""Starts a command that is killed when this process ends, unless it has ended by then. Not in a `preexec_fn`: with one,
starting a process needs as much memory as this one has."""
ROOT = Path(__file__).parent.parent
NEEDED = ("simpy", "scipy", "numba", "highspy", "networkx", "matplotlib", "tqdm", "tomli_w", "msgspec", "yaml", "rich",
          "shtab", "transformers", "safetensors", "xxhash", "pytest", "hypothesis")  # fmt: skip
NEWER = {"opt": (5, 23)}
"""By type of model, the first version of transformers in which it can be planned: before, it draws a number for each
layer, to leave it out or not, even with layerdrop=0."""
FAKE_TESTS = ("tests/runtime/execution/test_fake_device.py", "tests/runtime/execution/test_planted_races.py")
WIDTHS = {"tiny": ((64, 2),), "full": ((768, 12), (1536, 12), (4096, 4))}
"""Of the models that are compared with plain PyTorch: width, and number of blocks."""


Slices = Mapping[str, Sequence[str]]
"""Commands by name: each is one thing to do, in a process of its own."""
State = dict[str, dict[str, Any]]
"""By slice, how it ended."""


def run_slices(
    slices: Slices, out: Path, *, limit_s: float = SLICE_S, tar: Path | None = None, asked: str = ""
) -> State:
    """Runs those that are not done by the state file, the ones that failed last, and notes and packs each as it ends.
    One at a time: none outlives this process, and a second one in the same folder is refused; so is one that asks for
    something else, since a slice of a rehearsal is not done on a GPU."""
    with _held(out):
        return _run_slices(slices, out, limit_s, tar, asked)


@contextmanager
def _held(out: Path) -> Iterator[None]:
    out.mkdir(parents=True, exist_ok=True)
    with (out / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(f"{out} is in use by another run; wait for it, or give another folder") from None
        yield


def _run_slices(slices: Slices, out: Path, limit_s: float, tar: Path | None, asked: str) -> State:
    ending_with_this = (sys.executable, "-I", "-c", ENDS_WITH_PARENT, str(os.getpid()))
    state = read_state(out)
    _check_asked(out, state, {asked})
    (out / "logs").mkdir(parents=True, exist_ok=True)
    state |= {name: {"result": NOT_RUN, "asked": asked} for name in slices if name not in state}
    _write_state(out, state)
    to_do = [name for name in slices if name == FIRST or state[name]["result"] != "done"]
    here = ""
    for name in sorted(to_do, key=lambda name: name != FIRST and state[name]["result"] != NOT_RUN):
        print(f"{name} ...", end=" ", flush=True)
        began_s = time.monotonic()
        log_path = out / "logs" / f"{name.replace('/', '-')}.log"
        with log_path.open("w") as log:
            ending = (*ending_with_this, *slices[name])
            process = subprocess.Popen(ending, stdout=log, stderr=log, cwd=ROOT, start_new_session=True)
            try:
                code = process.wait(limit_s)
                result = "done" if code == 0 else f"exit status {code}"
            except BaseException as error:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                result = f"over {limit_s:.0f} s"
        if name == FIRST:
            here = "; ".join(log_path.read_text().splitlines()) if result == "done" else ""
        seconds = round(time.monotonic() - began_s, 1)
        state[name] = {"result": result, "seconds": seconds, "asked": asked, "on": here}
        _write_state(out, state)
        pack(out, tar)
        print(result, flush=True)
        if name == FIRST and result != "done":
            print(f"no other slice is begun; {log_path} ends: {log_path.read_text()[-500:]}", file=sys.stderr)
            break
    pack(out, tar)
    return state


def read_state(out: Path) -> State:
    """What has ended, and how; nothing where no slice has."""
    path = out / STATE
    try:
        state: State = json.loads(path.read_text()) if path.exists() else {}
        _ = [one["result"] for one in state.values()]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise SystemExit(f"{path} is damaged: {error!r}; move it away, to go on from the packed file if any") from None
    return state


def _write_state(out: Path, state: State) -> None:
    waiting = out / f"{STATE}.tmp"
    waiting.write_text(json.dumps(state, indent=1))
    waiting.replace(out / STATE)


def _check_asked(out: Path, state: State, asked: set[str]) -> None:
    if others := {one.get("asked", "") for one in state.values()} - asked:
        raise SystemExit(
            f"{out} has results of {others.pop()!r}, and these are of {asked.pop()!r}; give another folder and file "
            "(--out, --tar), or move its own away"
        )


def pack(out: Path, tar: Path | None) -> None:
    """Into one file, but for what slices work on; without the largest files where it would become too large, and with
    their names."""
    if tar is None:
        return
    waiting = tar.with_name(tar.name + ".tmp")
    work = {out / name for name in ("lock", "packages", "packages.tmp", "nvme", "text.txt", LEFT_OUT)} | {tar, waiting}
    files = [p for p in out.rglob("*") if p.is_file() and not work.intersection((p, *p.parents))]
    files.sort(key=lambda p: p.stat().st_size)
    left_out: list[str] = []
    (out / LEFT_OUT).unlink(missing_ok=True)
    is_too_large = True
    while is_too_large:
        while files and files[-1].stat().st_size >= 4 * TAR_BYTES:
            left_out.append(str(files.pop().relative_to(out)))
        with tarfile.open(waiting, "w:gz", compresslevel=3) as packed:
            if left_out:
                (out / LEFT_OUT).write_text("\n".join(left_out))
                packed.add(out / LEFT_OUT, LEFT_OUT)
            for path in files:
                packed.add(path, path.relative_to(out))
        if is_too_large := waiting.stat().st_size >= TAR_BYTES:
            left_out.append(str(files.pop().relative_to(out)))
    waiting.replace(tar)


def not_planned() -> frozenset[str]:
    """Types of models that the installed transformers is too old for."""
    has = tuple(int(part) for part in metadata.version("transformers").split(".")[:2])
    return frozenset(kind for kind, needed in NEWER.items() if has < needed)


def about_versions() -> str:
    """What is installed, and what is left out for that."""
    text = f"Python {platform.python_version()}"
    for name in ("torch", "transformers", "numpy"):
        text += f", {name} {metadata.version(name)}"
    for kind in sorted(not_planned()):
        least = ".".join(map(str, NEWER[kind]))
        text += f"\nleft out: tests and campaign rows of {kind}, whose models need transformers {least}"
    return text


def all_slices(args: argparse.Namespace) -> Slices:
    """In the order in which they are worth most."""
    python = sys.executable
    inner = (python, "-m", "benchmarks.gpu", "--out", str(args.out), "--device", args.device, *args.size)
    tests = [str(p.relative_to(ROOT)) for p in sorted(ROOT.glob("tests/**/test_*.py")) if "mark.gpu" in p.read_text()]
    # what newer or older packages only warn of is no failure there; cuBLAS is deterministic with a fixed workspace only
    pytest = (
        *("env", "CUBLAS_WORKSPACE_CONFIG=:4096:8"),
        *(python, "-m", "pytest", "-q", "-W", "default", "-rs", "-p", "no:cacheprovider"),
    )
    slices: dict[str, Sequence[str]] = {FIRST: (*inner, "--inner", FIRST)}
    if args.device == "fake":
        slices |= {f"tests/{Path(t).stem}": (*pytest, t) for t in FAKE_TESTS}
    else:
        needs = ("env", f"{NEEDS_GPU}=1") if args.device == "cuda" else ()
        slices |= {f"tests/{Path(t).stem}": (*needs, *pytest, "-m", "gpu", t) for t in tests}
    sizes = WIDTHS["tiny" if args.size else "full"]
    slices |= {f"beside-plain/{w}": (*inner, "--inner", "beside-plain", f"{w}", f"{n}") for w, n in sizes}
    if args.device == "fake":
        return slices  # its times mean nothing
    tierplan, nvme = (python, "-m", "tierplan"), ("--nvme-dir", str(args.nvme_dir))
    short = ("--budget-s", "5") if args.size else ()
    device = ("--device", args.device)
    toml = str(args.out / "machine.toml")
    slices["machine"] = (*tierplan, "machine", "measure", *nvme, *device, *short, "-o", toml)
    slices["calibrate"] = (*inner, "--inner", "calibrate", "1", "32" if args.size else "256")
    short = ("--measure-s", "5") if args.size else ()
    validate = (*tierplan, "validate", args.campaign, "--out", str(args.out / "campaign"), *nvme, *device, *short)
    return slices | {f"campaign/{row}": (*validate, "--only", row) for row in rows(args.campaign)}


def rows(campaign: str) -> list[str]:
    """The runs of a campaign that the installed transformers can plan, smallest first."""
    from tierplan.validation.campaign.spec import load_campaign

    found = []
    for group in load_campaign(campaign).groups:
        if group.config["model_type"] in not_planned():
            continue
        width: Any = group.config.get("hidden_size", group.config.get("n_embd"))
        found += [(width**2 * run.blocks, f"{group.name}/{run.name}") for run in group.runs]
    return [name for _, name in sorted(found)]


def environment(device: str) -> None:
    """What is there; and that the GPU computes: PyTorch has no kernels for cards of other generations."""
    import torch

    from tierplan.runtime.execution.device import device_named
    from tierplan.runtime.memory.arena import system_bytes

    print(about_versions())
    print(f"{len(os.sched_getaffinity(0))} cores, {system_bytes() >> 20:,} MiB of host memory")
    print("CUDA", torch.version.cuda)
    for k in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(k)
        memory = f"{p.total_memory >> 20:,} MiB, {p.multi_processor_count} multiprocessors"
        print(f"GPU {k}: {p.name}, compute capability {p.major}.{p.minor}, {memory}", flush=True)
    if device == "cuda":
        ones = torch.ones(16, 16, device=device_named(device), dtype=torch.bfloat16)
        assert (ones @ ones).sum().item() == 16**3


def beside_plain(
    device: str, out: Path, width: int, blocks: int, *, steps: int = 12, turns: int = 5, budget_s: float = TURNS_S
) -> None:
    """Steps of plain PyTorch over those of schedules of the same model, in turns; and a timeline of each schedule.

    The model is built and placed once for each. The result is written after each turn; no turn is begun that would end
    later than the budget, by the turn before.
    """
    began_s = time.monotonic()
    from benchmarks.models import gpt2
    from benchmarks.trainings import machine, schedule_of
    from tierplan.planner.plan import UnitPlan
    from tierplan.runtime.data.synthetic import random_batches
    from tierplan.runtime.execution.device import open_device
    from tierplan.runtime.reference import train_plainly
    from tierplan.runtime.tracing.models import build_model
    from tierplan.runtime.trainer import Trainer
    from tierplan.sim.output.perfetto import write_perfetto
    from tierplan.sim.trace import write_atomically
    from tierplan.sim.workloads.workload import Training

    where: Literal["cpu", "cuda"] = "cuda" if device == "cuda" else "cpu"
    training = Training(
        sequence_length=64 if width < 512 else 256, per_device_train_batch_size=1 if width < 512 else 8,
        dtype="fp32" if where == "cpu" else "bf16", backend=where,
    )  # fmt: skip
    raw = gpt2(width, blocks)
    plans = {
        "all kept": UnitPlan(),
        "all recomputed": UnitPlan(acts="recompute"),
        "states in host memory": UnitPlan(states="host", grads="host"),
        "all but activations in host memory": UnitPlan(params="host", grads="host", states="host"),
        "all in host memory": UnitPlan(params="host", grads="host", states="host", acts="host", input="host"),
    }
    model = build_model(raw, training)
    batches = itertools.repeat(next(random_batches(model.config, training)))
    moved = itertools.repeat({k: v.to(where) for k, v in next(batches).items()})
    plain = copy.deepcopy(model).to(where)
    steps_s: dict[str, list[float]] = {"plain": [], **{name: [] for name in plans}}
    shape = {"width": width, "blocks": blocks, "dtype": training.dtype, "device": device, "turns_asked": turns}

    def median_s(ends_s: Sequence[float]) -> float:
        return statistics.median(b - a for a, b in itertools.pairwise(ends_s[2 - steps :]))

    with ExitStack() as opened:
        trainers: dict[str, Trainer] = {}
        for name, choice in plans.items():
            schedule = schedule_of(raw, choice, training, machine(1 << 36, 1 << 37))
            trainer = Trainer(schedule, copy.deepcopy(model), device=open_device(device), trace_steps=steps)
            trainers[name] = opened.enter_context(trainer)
            trainer.run(batches, 0)
        del model
        turn_s = 0.0
        for turn in range(turns):
            if turn and time.monotonic() + turn_s > began_s + budget_s:
                break
            turn_began_s, ends_s = time.monotonic(), list[float]()
            note = lambda step, loss, ends_s=ends_s: ends_s.append(time.perf_counter())  # noqa: E731
            train_plainly(plain, moved, steps=steps, on_step=note)
            steps_s["plain"].append(median_s(ends_s))
            for name, trainer in trainers.items():
                trainer.run(batches, steps)
                result = trainer.result()
                steps_s[name].append(median_s(result.step_ends_s))
                if turn == 0:
                    write_perfetto({name: result.trace}, out / f"timeline-{width}-{name.replace(' ', '-')}.json")
            ratios = {
                name: statistics.median(a / b for a, b in zip(steps_s["plain"], one, strict=True))
                for name, one in steps_s.items()
            }
            found = {**shape, "turns": turn + 1, "plain_over_schedule": ratios, "step_s": steps_s}
            write_atomically(out / f"beside-plain-{width}.json", json.dumps(found, indent=1))
            turn_s = time.monotonic() - turn_began_s
    print(f"{found['turns']} of {turns} turns taken")
    print(json.dumps(found))


def calibrate(device: str, out: Path, batch: int, seq: int, *, is_tiny: bool) -> None:
    """By commands: a calibration on the machine as it was measured, a plan's prediction from it, a run, and what
    `compare` says of them."""
    from benchmarks.models import gpt2
    from tierplan.cli import main as tierplan

    model, text, machine = out / "model.json", out / "text.txt", str(out / "machine.toml")
    model.write_text(json.dumps(gpt2(64, 2) if is_tiny else gpt2(1024, 16)))
    text.write_text(Path(__file__).read_text() * 20)
    dtype = ("--dtype", "fp32", "--backend", "cpu") if device == "cpu" else ("--dtype", "bf16", "--backend", "cuda")
    asked = ["--model", str(model), "--machine", machine, "--batch", str(batch), "--seq", str(seq), *dtype]
    calibration, plan, run = str(out / "calibration.json"), str(out / "plan.json"), str(out / "run")
    where, budget = ["--device", device, "--nvme", str(out / "nvme")], ["--budget-s", "1" if is_tiny else "120"]
    train = ["--data", str(text), "--steps", "6" if is_tiny else "60", "--out", run, "--no-export"]
    compared = str(out / "compare.html")
    shutil.rmtree(run, ignore_errors=True)  # of a slice that was killed
    for words in (
        ["calibrate", *asked, *where, *budget, "-o", calibration],
        ["simulate", "--policy", "zero-offload", *asked, "--calibration", calibration, "-o", plan],
        ["run", plan, "--model", str(model), *train, *where],
        ["compare", plan, run, "-o", compared],
    ):
        if code := tierplan(words):
            raise SystemExit(code)


def report(out: Path) -> str:
    """What was found, as a page."""
    from tierplan.sim.output.text import markdown_table

    state = read_state(out)
    machines = [*dict.fromkeys(one["on"] for one in state.values() if one.get("on"))]
    rows = [
        (name, one["result"], str(one.get("seconds", "")), f"{machines.index(one['on']) + 1}" if one.get("on") else "")
        for name, one in state.items()
    ]
    lines = ["# On a borrowed GPU", "", *markdown_table(("slice", "result", "s", "on"), rows), ""]
    lines += [f"{k}. {machine}" for k, machine in enumerate(machines, 1)]
    if (left_out := out / LEFT_OUT).exists():
        lines += ["", f"Too large for the packed file, and not there: {', '.join(left_out.read_text().splitlines())}."]
    for path in sorted(out.glob("beside-plain-*.json")):
        found = json.loads(path.read_text())
        shape = f"{found['blocks']} blocks of width {found['width']}, {found['dtype']}, on {found['device']}"
        ratios = [(name, f"{ratio:.2f}") for name, ratio in found["plain_over_schedule"].items()]
        shape += f"; {found['turns']} of {found['turns_asked']} turns"
        lines += ["", f"## Steps of plain PyTorch over the schedule's: {shape}", ""]
        lines += markdown_table(("plan", "ratio"), ratios)
    if (log := out / "logs" / "calibrate.log").exists():
        lines += ["", "## Calibrated, planned, run and compared", "", "```", log.read_text().strip(), "```"]
    if (out / "campaign").is_dir():
        from tierplan.validation.campaign.artifact import load_artifacts
        from tierplan.validation.campaign.spec import CampaignError
        from tierplan.validation.campaign.summary import campaign_markdown

        try:
            lines += ["", campaign_markdown(load_artifacts(out / "campaign"))]
        except CampaignError as error:
            lines += ["", "## The campaign", "", f"{error}"]
    return "\n".join(lines) + "\n"


def install_missing(wheels: Path | None, out: Path) -> None:
    """Into a folder of its own beside the results, which is on the path of all slices, and is there when all of it is.
    Nothing that is there already is installed beside it, so their own needs must be there, too."""
    packages = out / "packages"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(packages), os.environ.get("PYTHONPATH", "")])
    sys.path.append(str(packages))
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing and not (wheels and wheels.is_dir()):
        raise SystemExit(
            f"these packages are missing: {', '.join(missing)}; give their wheels in a folder (WHEELS=...), which "
            "`make gpu-wheels` fills where there is a network"
        )
    if missing:
        names = [{"yaml": "pyyaml"}.get(name, name) for name in missing]
        pip = (sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--find-links", str(wheels))
        waiting = packages.with_suffix(".tmp")
        shutil.rmtree(waiting, ignore_errors=True)  # of one that was killed
        subprocess.run([*pip, "--target", str(waiting), *names], check=True)
        if packages.exists():
            shutil.copytree(packages, waiting, dirs_exist_ok=True)
            shutil.rmtree(packages)
        waiting.rename(packages)
        importlib.invalidate_caches()


def unpack(tar: Path, out: Path) -> None:
    """The state last: a run that is killed before it is there unpacks all again."""
    try:
        whole = io.BytesIO(gzip.decompress(tar.read_bytes()))  # to its checksum
        with tarfile.open(fileobj=whole, mode="r:") as packed:
            members = sorted(packed, key=lambda member: member.name == STATE)
            if (out / STATE).exists() and (inside := packed.extractfile(members[-1])):
                _check_asked(out, read_state(out), {one.get("asked", "") for one in json.load(inside).values()})
            packed.extractall(out, members, filter="data")
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise SystemExit(f"{tar} is damaged: {error}; give another with --tar, or move it away to begin anew") from None


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--tar", type=Path, help="what results are packed into, and read from (default: OUT.tar.gz)")
    parser.add_argument("--nvme-dir", type=Path, default=None, help="folder on the drive (default: in OUT)")
    parser.add_argument("--device", choices=("cuda", "cpu", "fake"), default="cuda")
    parser.add_argument("--campaign", help="(default: gpu-billions; with --tiny, two rows that any device runs)")
    parser.add_argument("--wheels", type=Path)
    parser.add_argument("--tiny", dest="size", action="store_const", const=("--tiny",), default=())
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--inner", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.out = args.out.resolve()
    args.campaign = args.campaign or (str(ROOT / "benchmarks" / "gpu-tiny.toml") if args.size else "gpu-billions")
    tar = (args.tar or args.out.with_name(args.out.name + ".tar.gz")).resolve()
    if args.report:
        if tar.exists() and (args.tar or not (args.out / STATE).exists()):
            unpack(tar, args.out)
        if not (args.out / STATE).exists():
            raise SystemExit(
                f"neither {args.out} nor {tar} has results; give another folder or file, or run `make gpu`"
            )
        (args.out / "gpu.md").write_text(report(args.out))
        print(args.out / "gpu.md")
        return 0
    if args.inner is not None:
        what, *numbers = args.inner
        if what == FIRST:
            environment(args.device)
        elif what == "calibrate":
            calibrate(args.device, args.out, *map(int, numbers), is_tiny=bool(args.size))
        else:
            few = {"steps": 6, "turns": 1} if args.size else {}
            beside_plain(args.device, args.out, int(numbers[0]), int(numbers[1]), **few)
        return 0
    args.nvme_dir = (args.nvme_dir or args.out / "nvme").resolve()
    asked = " ".join(("--device", args.device, *args.size))
    try:
        with _held(args.out):
            if tar.exists() and not (args.out / STATE).exists():
                unpack(tar, args.out)
            args.nvme_dir.mkdir(parents=True, exist_ok=True)
            install_missing(args.wheels, args.out)
            print(about_versions(), flush=True)
            state = _run_slices(all_slices(args), args.out, SLICE_S, tar, asked)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on behind the slices that are done", file=sys.stderr)
        return 130
    except OSError as error:  # a full disk
        print(f"{error}; what was done is kept, and the same command goes on behind it", file=sys.stderr)
        return 1
    return 0 if all(one["result"] == "done" for one in state.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
