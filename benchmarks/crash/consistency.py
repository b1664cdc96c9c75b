"""Whether anything that was committed can be lost, and whether anything wrong can come back.

    python -m benchmarks.crash.consistency benchmarks/results/crash-consistency.jsonl      # runs what the file lacks
    python -m benchmarks.crash.consistency benchmarks/results/crash-consistency.jsonl --table docs/durability.md

    kills     runs of every policy are killed (SIGKILL) at random moments and resumed, again and again
    faults    one operation on a file fails, EIO or ENOSPC, before or after it has happened: the run must end with an
              error that names the operation and the file, and be resumed
    prefixes  all operations on files are recorded, and after every prefix of them everything that a crash may leave
              (`benchmarks.crash.states`) is looked at: it must be a whole commit, none older than the last that was
              acknowledged, with the contents of an uninterrupted run; and from there a run must end with its weights
    planted   the same with mistakes put in on purpose, each of which has to be found

A long run may be cut into many (`--seconds`).

Models are tiny, since what is tested is the order of operations. Bits are compared, never times.
"""

from __future__ import annotations

import argparse
import errno
import os
import platform
import random
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from xxhash import xxh3_64_hexdigest

from benchmarks.crash.mistakes import PLANTED
from benchmarks.crash.states import Crash, Disk, Recorder, crashes
from benchmarks.models import gpt2
from benchmarks.records import Question, Record, about, arguments, ask_or_write
from benchmarks.trainings import machine, schedule_of
from tierplan.planner.lowering import lower
from tierplan.planner.plan import UnitPlan
from tierplan.planner.policies import decide
from tierplan.runtime.checkpoint.commits import CommitError, CommitLog, verify_commit
from tierplan.runtime.checkpoint.weights import hollow_model, random_weights
from tierplan.runtime.execution.executable import executable_step
from tierplan.runtime.memory import files
from tierplan.runtime.memory.files import StoreError
from tierplan.runtime.optim.adam import OptimizerSettings
from tierplan.runtime.tracing.trace import trace_config
from tierplan.runtime.trainer import Trainer
from tierplan.sim.schedule import Schedule
from tierplan.sim.workloads.workload import Training

TRAINING = Training(sequence_length=8, dtype="fp32", backend="cpu")
RAW = gpt2(32, 2, positions=16, vocabulary=64, heads=2, dropout=0.1)
SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
LLAMA: dict[str, object] = {"model_type": "llama", "num_key_value_heads": 1, "max_position_embeddings": 16, **SIZES}
SHAPES: Mapping[str, tuple[dict[str, object], str]] = {
    "GPT-2": (RAW, "r=4,dropout=0.1"),
    "Llama": (LLAMA, "r=4,dropout=0.1,save=embed_tokens+lm_head"),
    "Mixtral": ({**LLAMA, "model_type": "mixtral", "num_local_experts": 2}, "r=4"),
}
ADAPTERS: Mapping[str, tuple[str, str]] = {
    f"adapters of {shape}, base {where}": (shape, tier)
    for shape in SHAPES
    for where, tier in (("in memory", "host"), ("on NVMe", "nvme"))
}
"""Shapes, and where the frozen base lies."""
EIGHT_BITS = "states in 8 bits"
POLICIES: Mapping[str, tuple[str, dict[str, object]]] = {
    "in-memory": ("in-memory", {}),
    "full-recompute": ("full-recompute", {}),
    "zero-offload": ("zero-offload", {}),
    "zero-offload, delayed": ("zero-offload", {"semantics": "delayed-1"}),
    "zero-infinity": ("zero-infinity", {}),
    "zero-infinity, all on NVMe": (
        "zero-infinity",
        {"params": "nvme", "optimizer": "nvme", "checkpoints": "nvme", "host_buffers": "none"},
    ),
    "fuyou": ("fuyou", {}),
    "fuyou, delayed": ("fuyou", {"swap": "all", "write_back": "delayed"}),
    "ssdtrain": ("ssdtrain", {}),
    "sliding-window": ("sliding-window", {}),
    "vertical": ("vertical", {}),
    "harmony": ("harmony", {}),
}
UNITWISE: Mapping[str, UnitPlan] = {
    "everything on NVMe": UnitPlan(params="nvme", grads="host", states="nvme", acts="nvme"),
    "states in parts": UnitPlan(params="host", grads="host", states="nvme", state_shards=3),
    "everything in memory": UnitPlan(params="device", states="host"),
    **{
        name: UnitPlan(params="host", frozen=tier, grads="host", states="nvme", acts="recompute")  # type: ignore[arg-type]
        for name, (_, tier) in ADAPTERS.items()
    },
    EIGHT_BITS: UnitPlan(params="host", grads="host", states="nvme"),
}
RECORDED = ("everything on NVMe", "states in parts", "everything in memory", "two drives", "fuyou, delayed")
STEPS = 4
PATIENCE_S = 120.0
"""For a step of a run that is to be killed. One that is forked beside other threads may wait for ever for a lock that
these held: once it is killed for that, too."""
RECORDED_STEPS = 3


class Broken(AssertionError):
    """Something was lost or is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A schedule and where its files go."""

    name: str
    schedule: Schedule
    raw: Mapping[str, object]
    num_drives: int = 1

    @property
    def training(self) -> Training:
        return executable_step(self.schedule).training

    def drives(self, folder: Path) -> list[Path]:
        return [folder / f"nvme{k}" for k in range(self.num_drives)]


@cache
def case(name: str) -> Case:
    raw, lora = SHAPES[ADAPTERS[name][0]] if name in ADAPTERS else (RAW, "")
    training = replace(TRAINING, lora=lora, optimizer="adamw:states=8bit" if name == EIGHT_BITS else "adamw")
    place = machine(1 << 30, 1 << 30)
    if name in POLICIES:
        workload = trace_config("tiny", raw, training)
        plan = decide(POLICIES[name][0], workload, place, POLICIES[name][1])
        return Case(name=name, schedule=lower(plan, workload, place), raw=raw)
    choice = UNITWISE.get(name, UNITWISE["everything on NVMe"])
    schedule = schedule_of(raw, choice, training, place)
    return Case(name=name, schedule=schedule, raw=raw, num_drives=2 if name == "two drives" else 1)


def batches(steps: int = STEPS) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    rows = (torch.randint(0, 64, (1, TRAINING.sequence_length), generator=generator) for _ in range(steps))
    return [{"input_ids": ids, "labels": ids} for ids in rows]


def trainer_for(one: Case, folder: Path, **settings: Any) -> Trainer:
    """Commits every step."""
    model = hollow_model(one.raw, one.training)
    settings = {"out_dir": folder / "out", "resume": True, "checkpoint_every": 1, **settings}
    return Trainer(
        one.schedule,
        model,
        nvme_dir=one.drives(folder),
        nvme_weights=(2.0, 1.0)[: one.num_drives],
        optimizer=OptimizerSettings(name=one.training.optimizer, lr=1e-2),
        weights=random_weights(model, seed=0),
        num_threads=1,
        **settings,
    )


def train(one: Case, folder: Path, steps: int = STEPS, **settings: Any) -> dict[str, str]:
    """Trains until so many steps are done; checksums of all that outlives a step."""
    with trainer_for(one, folder, **settings) as trainer:
        trainer.run(batches(steps), steps - trainer.num_steps_done)
        if not trainer.is_placed:  # it was done before
            return state_of(one, folder)
        return contents_of(one, trainer)


def contents_of(one: Case, trainer: Trainer) -> dict[str, str]:
    carried, places = trainer.placement.executor.carried, trainer.placement.bodies.places
    return {x.buffer.content: xxh3_64_hexdigest(places.read(x).numpy().data) for x in carried.values()}


def state_of(one: Case, folder: Path) -> dict[str, str]:
    """What the last commit says of its contents, after it was verified to the last byte."""
    verify_commit(folder / "out", one.drives(folder))
    commit = CommitLog(folder / "out").last()
    assert commit is not None
    return {name: where.xxh3 for name, where in commit.contents.items() if not where.is_absent}


@cache
def truth(name: str, steps: int) -> dict[int, dict[str, str]]:
    """Checksums of all that outlives a step, by steps done, of a run that commits nothing and is not interrupted."""
    one, found = case(name), {}
    with tempfile.TemporaryDirectory() as folder, trainer_for(one, Path(folder), out_dir=None, resume=False) as trainer:
        every = iter(batches(steps))
        for done in range(1, steps + 1):
            trainer.run([next(every)], 1)
            found[done] = contents_of(one, trainer)
    return found


def compare(one: Case, found: Mapping[str, str], done: int, steps: int, where: str) -> None:
    """Raises `Broken` unless these are the contents after so many steps."""
    wanted = truth(one.name, steps)[done]
    if wrong := sorted(name for name, checksum in found.items() if wanted[name] != checksum):
        raise Broken(f"{where}: {', '.join(wrong[:3])} after {done} steps are not those of an uninterrupted run")


# ---- kills ----


def kills(name: str, count: int, folder: Path, seed: int) -> dict[str, int]:
    """Kills so many runs, each of which goes on where the one before was killed."""
    one, rng, done, attempt = case(name), random.Random(seed), 0, 0
    found, stuck = {"kills": 0, "runs": 0, "kills_before_a_commit": 0}, 0
    times_s = [time.monotonic()]
    train(one, folder / "first", on_step=lambda step, loss: times_s.append(time.monotonic()))
    begin_s, stepping_s = times_s[1] - times_s[0], time.monotonic() - times_s[1]
    while found["kills"] < count:
        path = folder / str(attempt)
        has_stepped, steps = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.close(has_stepped)
                trained = train(one, path, on_step=lambda step, loss, pipe=steps: os.write(pipe, b"."))
                compare(one, trained, STEPS, STEPS, f"{name}, run {attempt}")
                os._exit(0)
            except BaseException as error:
                print(f"{name}, run {attempt}: {error!r}", file=sys.stderr, flush=True)
                os._exit(1)
        os.close(steps)
        if rng.random() < 0.2:
            time.sleep(rng.uniform(0.0, begin_s))
        else:
            for _ in range(rng.randint(1, STEPS - done)):  # whole steps, however fast this machine is today
                if not select.select([has_stepped], [], [], PATIENCE_S)[0]:
                    stuck += 1
                    print(f"{name}, run {attempt}: no step in {PATIENCE_S:g} s", file=sys.stderr, flush=True)
                    break
                os.read(has_stepped, 1)
            time.sleep(rng.uniform(0.0, stepping_s / STEPS))
        os.close(has_stepped)
        os.kill(child, signal.SIGKILL)
        if stuck > 1:
            raise Broken(f"{name}, run {attempt}: for the second time no step in {PATIENCE_S:g} s")
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) not in (0, -signal.SIGKILL):
            raise Broken(f"{name}, run {attempt}: it ended by itself after {found['kills']} kills, status {status}")
        found["kills"] += os.WIFSIGNALED(status)
        commit = CommitLog(path / "out").last()
        now = 0 if commit is None else commit.num_steps
        if now < done:
            raise Broken(f"{name}, run {attempt}: {done} steps were committed, and {now} are after a kill")
        if commit is not None:
            compare(one, state_of(one, path), now, STEPS, f"{name}, run {attempt}")
        found["kills_before_a_commit"] += os.WIFSIGNALED(status) and commit is None
        done = now
        if os.WIFEXITED(status) or now == STEPS:
            compare(one, train(one, path), STEPS, STEPS, f"{name}, run {attempt}")
            shutil.rmtree(path)
            attempt, done = attempt + 1, 0
    found["runs"] = attempt + 1
    return found


# ---- faults ----


@contextmanager
def failing(at: int, code: int, is_done: bool, seen: list[str]) -> Iterator[None]:
    """The operation of this number fails, before or after it has happened. `seen` gets all that were tried."""
    real, lock = files.naming, threading.Lock()

    @contextmanager
    def naming(operation: str, path: os.PathLike[str] | str) -> Iterator[None]:
        with real(operation, path):
            with lock:
                seen.append(f"{operation} {path}")
                is_it = len(seen) == at
            if is_it and not is_done:
                raise OSError(code, os.strerror(code))
            yield
            if is_it:
                raise OSError(code, os.strerror(code))

    with mock.patch("tierplan.runtime.memory.files.naming", naming):
        yield


def faults(name: str, count: int, folder: Path, seed: int) -> dict[str, int]:
    """Lets one operation fail in each of so many runs."""
    one, rng, seen = case(name), random.Random(seed), list[str]()
    with failing(0, 0, False, seen):
        train(one, folder / "first")
    num_operations, found = len(seen), {"faults": 0, "after_a_commit": 0, "operations": len(seen)}
    while found["faults"] < count:
        path, code = folder / str(found["faults"]), rng.choice([errno.EIO, errno.ENOSPC])
        at, is_done, seen = rng.randint(1, num_operations), rng.random() < 0.5, []
        try:
            with failing(at, code, is_done, seen):
                train(one, path)
        except (StoreError, CommitError) as error:
            operation = seen[at - 1]
            if operation not in str(error) or os.strerror(code) not in str(error):
                raise Broken(f"{name}: {operation!r} failed, and the error says {error}") from error
        else:
            if len(seen) >= at:
                raise Broken(f"{name}: {seen[at - 1]!r} failed, and no error said so")
        found["faults"] += 1
        found["after_a_commit"] += CommitLog(path / "out").last() is not None
        failed = seen[at - 1] if len(seen) >= at else "operation that this run had not"  # drives take turns as it goes
        compare(one, train(one, path), STEPS, STEPS, f"{name} after a failed {failed}")
        shutil.rmtree(path)
    return found


# ---- every prefix ----


def record(one: Case, folder: Path, planted: Callable[[], AbstractContextManager[Any]]) -> Recorder:
    """All operations on files of a run that commits each step, and that makes a mistake."""
    recorder = Recorder(folder)
    with recorder.recording(), planted(), trainer_for(one, folder) as trainer:
        todo = batches(RECORDED_STEPS)
        while trainer.num_steps_done < RECORDED_STEPS:
            trainer.run(todo, 1)
            recorder.acknowledge(trainer.num_steps_done)
            todo = batches(RECORDED_STEPS)[trainer.num_steps_done :]
    return recorder


def look_at(one: Case, crash: Crash, folder: Path, *, to_the_end: bool) -> None:
    """Raises `Broken` unless the state is as promised."""
    where = f"{one.name}, crash after {crash.num_events} operations, unsynced kept: {crash.kept}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    crash.disk.write_out(folder)
    try:
        commit = CommitLog(folder / "out").last()
        done = 0 if commit is None else commit.num_steps
        if done not in crash.committed:
            raise Broken(f"{where}: {crash.committed[0]} steps were acknowledged, and {done} are there")
        if commit is not None:
            compare(one, state_of(one, folder), done, RECORDED_STEPS, where)
        if to_the_end:
            compare(one, train(one, folder, RECORDED_STEPS), RECORDED_STEPS, RECORDED_STEPS, where)
    except (StoreError, CommitError) as error:
        raise Broken(f"{where}: {error}") from error


def prefixes(
    name: str,
    folder: Path,
    *,
    planted: Callable[[], AbstractContextManager[Any]] = nullcontext,
    every: int = 1,
    generations: int = 2,
    resume_every: int = 1,
    stop_at_first: bool = False,
    seed: int = 0,
) -> dict[str, Any]:
    """Records a run, and looks at all that crashes in it may leave; then the same of runs that resume from such states.

    From the state in which nothing unsynced has happened, and from that in which all has, of every `resume_every`-th
    prefix, training goes on to the end.
    """
    one, rng = case(name), random.Random(seed)
    found: dict[str, Any] = {"operations": 0, "states": 0, "resumed": 0, "broken": []}
    before, committed = Disk(), 0
    with mock.patch("tierplan.runtime.memory.striping.STRIPE_BYTES", 4096):  # the model is small
        for _ in range(generations):
            run = folder / "run"  # crashes are looked at in the same place: an owner's record names it
            run.mkdir(parents=True)
            before.write_out(run)
            before = Disk.of(run)
            recorder = record(one, run, planted)
            found["operations"] += len(recorder.events)
            shutil.rmtree(run)
            chosen: list[Crash] = []
            for crash in crashes(before, recorder.events, committed=committed, every=every, seed=seed):
                to_the_end = crash.kept in ("none", "all") and crash.num_events // every % resume_every == 0
                try:
                    look_at(one, crash, run, to_the_end=to_the_end)
                except Broken as error:
                    found["broken"].append(str(error).replace(str(folder), "FOLDER"))
                    if stop_at_first:
                        return found
                found["states"] += 1
                found["resumed"] += to_the_end
                if crash.kept == "some pages" and crash.committed[0] and crash.committed[1] < RECORDED_STEPS:
                    chosen.append(crash)
            if not chosen or found["broken"]:
                break
            before = rng.choice(chosen).disk
            shutil.rmtree(run)
            run.mkdir()
            before.write_out(run)
            commit = CommitLog(run / "out").last()
            committed = 0 if commit is None else commit.num_steps
            shutil.rmtree(run)
    return found


def tried(part: str, name: str, k: int, args: argparse.Namespace) -> Record:
    """What is found by one part of the benchmark, of the plan or mistake of this name, which is the k-th."""
    with tempfile.TemporaryDirectory(dir=args.folder) as made:
        folder = Path(made)
        if part == "prefixes":
            found = prefixes(name, folder, every=args.every, seed=k)
        elif part == "planted":
            shown_by, mistake = PLANTED[name]
            found = prefixes(shown_by, folder, planted=mistake, generations=1, resume_every=20, stop_at_first=True)
        else:
            count, num = getattr(args, part), len(POLICIES) + len(UNITWISE)
            count = count * (k + 1) // num - count * k // num
            found = {"kills": kills, "faults": faults}[part](name, count, folder, k)
    return {**found, **about(), "python": platform.python_version(), "torch": torch.__version__}


def questions(args: argparse.Namespace) -> Iterator[Question]:
    torch.set_num_threads(1)
    names = {"prefixes": RECORDED, "planted": PLANTED}
    for part in args.only:
        for k, name in enumerate(names.get(part, (*POLICIES, *UNITWISE))):
            yield {"part": part, "name": name}, partial(tried, part, name, k, args)


def main() -> None:
    parser = arguments(__doc__)
    parts = ("planted", "faults", "kills", "prefixes")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--every", type=int, default=1, help="look at every so many prefixes only")
    parser.add_argument("--folder", type=Path, help="where runs write (default: the system's folder for such files)")
    found = ask_or_write(parser, "crashes that were tried", questions, str, table)
    if bad := [r["name"] for r in found if bool(r.get("broken")) != (r["part"] == "planted")]:
        sys.exit(f"not as promised: {', '.join(bad)}")


def table(records: list[Record]) -> str:
    """The part of the page."""
    parts = {part: [r for r in records if r["part"] == part] for part in ("kills", "faults", "prefixes", "planted")}

    def total(part: str, name: str) -> str:
        return f"{sum(r[name] for r in parts[part]):,}"

    states = parts["prefixes"]
    return (
        f"On {max(r['date'] for r in records)[:10]}:\n\n"
        f"- **{total('kills', 'kills')} kills** over {len(parts['kills'])} plans, "
        f"{total('kills', 'kills_before_a_commit')} of them before the first commit: nothing that was committed was "
        "lost, nothing was wrong.\n"
        f"- **{total('faults', 'faults')} failed operations** over {len(parts['faults'])} plans, "
        f"{total('faults', 'after_a_commit')} of them after the first commit: each was an error that named the "
        "operation and the file, and each run was resumed to the bits of an uninterrupted one.\n"
        f"- **{total('prefixes', 'operations')} operations** of runs of {len(states)} plans recorded, "
        f"{total('prefixes', 'states')} states after all prefixes of them looked at, training resumed from "
        f"{total('prefixes', 'resumed')}: {sum(len(r['broken']) for r in states)} not as promised.\n"
        f"- **{sum(bool(r['broken']) for r in parts['planted'])} of {len(parts['planted'])} planted mistakes found**: "
        f"{'; '.join(r['name'] for r in parts['planted'])}."
    )


if __name__ == "__main__":
    main()
