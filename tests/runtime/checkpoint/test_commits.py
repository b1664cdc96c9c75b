"""Nothing is lost: whatever ends a run, resuming it gives the weights of a run that was never interrupted."""

from __future__ import annotations

import copy
import errno
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.runtime.models import make_batches, make_model, observed_workload
from tests.runtime.models import schedule_for as planned_for
from tests.runtime.test_trainer import CPU, machine
from tests.toys import uniform_plan
from tierplan.planner.lowering import lower
from tierplan.planner.plan import UnitPlan
from tierplan.runtime.checkpoint.commits import Commit, CommitError, CommitLog, check_same_settings, verify_commit
from tierplan.runtime.memory.arena import PAGE_BYTES
from tierplan.runtime.memory.files import StoreError
from tierplan.runtime.memory.store import Store
from tierplan.runtime.optim.adam import OptimizerSettings
from tierplan.runtime.reference import train_plainly
from tierplan.runtime.trainer import Trainer
from tierplan.sim.schedule import Schedule
from tierplan.sim.step import Semantics
from tierplan.sim.workloads.workload import Training

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 8
CHOICES = {
    "nvme": UnitPlan(params="nvme", grads="host", states="nvme", acts="nvme"),
    "memory": UnitPlan(params="device", states="host"),
    "memory_and_nvme": UnitPlan(params="nvme", grads="host", states="host"),
}
LATE = {
    "late": UnitPlan(grads="host", states="host", late_update=True),
    "late on the device": UnitPlan(states="host", update="device", late_update=True),
}


def new_model() -> nn.Module:
    return make_model("gpt2", num_blocks=2, dropout=0.1)


@cache
def schedule_for(choice: str, training: Training = CPU, semantics: Semantics = "in-backward") -> Schedule:
    return planned_for(new_model(), {**CHOICES, **LATE}[choice], training, semantics=semantics)


@cache
def plain_weights(steps: int = STEPS, max_grad_norm: float | None = None) -> list[torch.Tensor]:
    model, batches = new_model(), make_batches(steps)
    optimizer = OptimizerSettings(lr=1e-2)
    train_plainly(model, batches, steps=steps, optimizer=optimizer, max_grad_norm=max_grad_norm)
    return [p.detach() for p in model.parameters()]


def train_on(
    folder: Path, schedule: Schedule, steps: int = STEPS, *, resume: bool = True, **settings: Any
) -> list[torch.Tensor]:
    """Trains up to `steps`, committing each step."""
    with new_trainer(folder, schedule, resume=resume, **settings) as trainer:
        trainer.run(make_batches(STEPS), steps - trainer.num_steps_done)
        trainer.restore_model()
        return [p.detach() for p in trainer.model.parameters()]


def new_trainer(folder: Path, schedule: Schedule, **settings: Any) -> Trainer:
    """One that commits each step."""
    settings = {
        "checkpoint_every": 1, "optimizer": OptimizerSettings(lr=1e-2), "nvme_dir": folder / "nvme", **settings
    }  # fmt: skip
    return Trainer(schedule, new_model(), out_dir=folder / "out", **settings)


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def last_commit(folder: Path) -> Commit:
    commit = CommitLog(folder / "out").last()
    assert commit is not None
    return commit


@pytest.mark.parametrize("choice", list(CHOICES))
@pytest.mark.parametrize("first", [1, 5])
def test_resumed_training_is_uninterrupted_training(choice: str, first: int, tmp_path: Path) -> None:
    schedule = schedule_for(choice)
    train_on(tmp_path, schedule, first)
    assert same(train_on(tmp_path, schedule), plain_weights())


def test_a_resumed_run_finds_its_stripes(tmp_path: Path) -> None:
    """Weights may be measured or given anew; what is on the drives counts."""
    schedule = schedule_for("nvme")
    drives = [tmp_path / "a", tmp_path / "b"]
    with mock.patch("tierplan.runtime.memory.striping.STRIPE_BYTES", PAGE_BYTES):  # the model is small
        train_on(tmp_path, schedule, 3, nvme_dir=drives, nvme_weights=(3.0, 1.0))
        with pytest.raises(StoreError, match="the same folders in the same order"):
            train_on(tmp_path, schedule, nvme_dir=drives[:1])
        with pytest.raises(StoreError, match="is not that of the last commit, or was cut short"):
            train_on(tmp_path, schedule, nvme_dir=drives[::-1])
        with pytest.raises(StoreError, match=r"c/tierplan\.tier, which the last commit needs, is missing; give"):
            train_on(tmp_path, schedule, nvme_dir=[drives[0], tmp_path / "c"])
        assert not (tmp_path / "c").exists(), "what is looked for is not made"
        assert same(train_on(tmp_path, schedule, nvme_dir=drives, nvme_weights=(1.0, 2.0)), plain_weights())


def test_losses_of_the_whole_run_are_kept(tmp_path: Path) -> None:
    schedule = schedule_for("nvme")
    train_on(tmp_path, schedule, 3)
    model = new_model()
    settings: dict[str, Any] = {"optimizer": OptimizerSettings(lr=1e-2)}
    with Trainer(
        schedule, model, nvme_dir=tmp_path / "nvme", out_dir=tmp_path / "out", resume=True, **settings
    ) as trainer:
        trainer.run(make_batches(STEPS), 2)
        losses = trainer.result().losses
    assert list(losses) == train_plainly(new_model(), make_batches(5), steps=5, **settings)


def test_a_run_resumes_on_another_plan(tmp_path: Path) -> None:
    """Contents are committed by name, so what was in memory may go to the drive and back."""
    train_on(tmp_path, schedule_for("memory"), 3)
    train_on(tmp_path, schedule_for("nvme"), 6)
    assert same(train_on(tmp_path, schedule_for("nvme")), plain_weights())


def test_a_run_resumes_whenever_its_updates_come(tmp_path: Path) -> None:
    """In backward, or when all gradients are there: what outlives a step is the same where none is clipped."""
    waits, at_once = schedule_for("nvme", semantics="exact-clip"), schedule_for("memory")
    train_on(tmp_path, at_once, 2)
    train_on(tmp_path, waits, 5)
    with pytest.raises(CommitError, match="resume with a plan that keeps something on NVMe"):
        train_on(tmp_path, at_once)
    assert same(train_on(tmp_path, schedule_for("memory_and_nvme")), plain_weights())


def test_what_a_resumed_run_may_not_change_is_named_with_the_reason(tmp_path: Path) -> None:
    train_on(tmp_path, schedule_for("memory_and_nvme"), 2)
    clipping = schedule_for("memory", replace(CPU, max_grad_norm=0.5), semantics="exact-clip")
    with pytest.raises(CommitError, match=r"training\.max_grad_norm = None, .* resumed with 0\.5; that would"):
        train_on(tmp_path, clipping)
    delayed = schedule_for("memory_and_nvme", semantics="delayed-1")
    with pytest.raises(CommitError, match=r"with semantics = 'in-backward', .* with 'delayed-1'; that would change"):
        train_on(tmp_path, delayed)


def test_a_resumed_run_divides_losses_as_before(tmp_path: Path) -> None:
    """A commit that does not say so is of a version in which a resume could not know."""
    twice = schedule_for("memory", replace(CPU, gradient_accumulation_steps=2))
    train_on(tmp_path, twice, 1, divides_loss=False)
    with pytest.raises(CommitError, match=r"made with divides_loss = False, .* with True; that would change"):
        train_on(tmp_path, twice, 2)
    older = Commit(num_steps=1, run_id="", contents={}, settings={})
    check_same_settings(older, {"divides_loss": True})
    with pytest.raises(CommitError, match=r"made with divides_loss = True, .* with False"):
        check_same_settings(older, {"divides_loss": False})


@pytest.mark.parametrize("choice", list(LATE))
@pytest.mark.parametrize("clip", [None, 0.5])
def test_gradients_of_late_updates_are_committed(choice: str, clip: float | None, tmp_path: Path) -> None:
    """Those that wait on the device lie in tensors of autograd's, and come back in a block; and what clips them."""
    semantics = "exact-clip" if clip else "in-backward"
    schedule = schedule_for(choice, replace(CPU, max_grad_norm=clip), semantics=semantics)
    assert not same(train_on(tmp_path, schedule, 2), plain_weights(2, None if clip else 0.5))
    assert same(train_on(tmp_path, schedule), plain_weights(STEPS, clip))


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_run_resumes_on_a_plan_that_makes_other_updates_late(clip: float | None, dtype: str, tmp_path: Path) -> None:
    """What was still to come is made then; what is made at once in the commit is not made again."""
    training = replace(CPU, max_grad_norm=clip, dtype=dtype)  # type: ignore[arg-type]
    model = make_model("gpt2", num_blocks=3, dtype=dtype)
    workload = observed_workload(model, make_batches(1)[0], training)
    semantics = "exact-clip" if clip else "in-backward"
    plan = uniform_plan(
        workload, UnitPlan(params="nvme", grads="host", states="nvme", state_shards=2), semantics=semantics
    )
    names = [unit.name for unit in workload.units]
    plain, batches, optimizer = copy.deepcopy(model), make_batches(STEPS), OptimizerSettings(lr=1e-2)
    rate = partial(pow, 0.5)
    train_plainly(plain, batches, steps=STEPS, optimizer=optimizer, max_grad_norm=clip, learning_rate=rate)
    for steps, late in [(2, "L0 L1"), (4, "L1 L2 embed"), (5, ""), (6, "L0 L1 L2"), (STEPS, "head")]:
        units = [replace(u, late_update=n in late.split()) for n, u in zip(names, plan.units, strict=True)]
        schedule = lower(replace(plan, units=tuple(units)), workload, machine())
        settings = {"checkpoint_every": 1, "optimizer": optimizer, "nvme_dir": tmp_path / "nvme", "learning_rate": rate}
        with Trainer(schedule, copy.deepcopy(model), out_dir=tmp_path / "out", resume=True, **settings) as trainer:
            trainer.run(batches, steps - trainer.num_steps_done)
            trainer.restore_model()
            weights = [p.detach() for p in trainer.model.parameters()]
    assert same(weights, [p.detach() for p in plain.parameters()])


def test_without_a_seed_the_generators_are_committed(tmp_path: Path) -> None:
    """The model is made with a seed of its own, so the generators stand at the same place when training begins."""
    schedule = schedule_for("memory")
    train_on(tmp_path, schedule, 4, seed=None)
    torch.manual_seed(12345)
    resumed = train_on(tmp_path, schedule, seed=None)
    model = new_model()
    train_plainly(model, make_batches(STEPS), steps=STEPS, optimizer=OptimizerSettings(lr=1e-2), seed=None)
    assert same(resumed, [p.detach() for p in model.parameters()])


def test_without_a_seed_the_order_of_micro_batches_is_kept(tmp_path: Path) -> None:
    """Another one drew other numbers in silence; with a seed, both orders draw the same."""
    workload = observed_workload(new_model(), make_batches(1)[0], replace(CPU, gradient_accumulation_steps=2))
    plan = uniform_plan(workload, CHOICES["nvme"], semantics="in-backward")
    across, down = (lower(replace(plan, order=order), workload, machine()) for order in ("horizontal", "vertical"))  # type: ignore[arg-type]
    held = lower(uniform_plan(workload, CHOICES["memory_and_nvme"], semantics="in-backward"), workload, machine())
    for seed, others in [(None, [held]), (0, [held, down])]:
        run = tmp_path / str(seed)
        train_on(run, across, 1, seed=seed)
        for num_steps, other in enumerate(others, 2):
            train_on(run, other, num_steps, seed=seed)
    with pytest.raises(CommitError, match=r"drawing_order = .*; without a seed, random numbers are drawn in the order"):
        new_trainer(tmp_path / "None", down, resume=True, seed=None)


FAULTS: dict[str, Callable[[int], bool]] = {"EIO": lambda n: n == 90, "ENOSPC": lambda n: n == 105}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_failing_drive_leaves_the_last_commit(fault: str, tmp_path: Path) -> None:
    schedule, real, count = schedule_for("nvme"), os.pwritev, [0]

    def failing(fd: int, views: list[memoryview], at: int) -> int:
        count[0] += 1
        if FAULTS[fault](count[0]):
            raise OSError(getattr(errno, fault), os.strerror(getattr(errno, fault)))
        return real(fd, views, at)

    with (
        mock.patch("tierplan.runtime.memory.files.os.pwritev", failing),
        pytest.raises(StoreError, match="could not write"),
    ):
        train_on(tmp_path, schedule)
    assert 0 < last_commit(tmp_path).num_steps < STEPS
    assert same(train_on(tmp_path, schedule), plain_weights())


def test_short_writes_and_a_slow_drive_change_nothing(tmp_path: Path) -> None:
    rng, real = random.Random(1), os.pwritev

    def slow_and_short(fd: int, views: list[memoryview], at: int) -> int:
        time.sleep(rng.random() / 1000)
        return real(fd, [views[0][: max(4096, len(views[0]) // 2 // 4096 * 4096)]], at)

    with mock.patch("tierplan.runtime.memory.files.os.pwritev", slow_and_short):
        weights = train_on(tmp_path, schedule_for("nvme"))
    assert same(weights, plain_weights())


def test_a_full_disk_at_the_record_leaves_the_last_commit(tmp_path: Path) -> None:
    schedule = schedule_for("memory")
    train_on(tmp_path, schedule, 3)
    full = mock.patch(
        "tierplan.runtime.memory.files.os.fdatasync", side_effect=OSError(errno.ENOSPC, "No space left on device")
    )
    with full, pytest.raises(OSError, match="No space left"):
        train_on(tmp_path, schedule)
    assert last_commit(tmp_path).num_steps == 3
    assert same(train_on(tmp_path, schedule), plain_weights())


@pytest.mark.parametrize(("steps", "files"), [(1, 1), (2, 2)])
def test_a_run_begins_only_where_its_commits_have_room(steps: int, files: int, tmp_path: Path) -> None:
    """What lies in memory is written by each commit, and the one before stays until the next one counts."""
    schedule = schedule_for("memory")
    train_on(tmp_path / "whole", schedule, 1)
    needed = files * (tmp_path / "whole" / "out" / "resident-1.bin").stat().st_size
    with mock.patch("tierplan.runtime.memory.files.room_bytes", return_value=needed):
        train_on(tmp_path / "fits", schedule, steps)
    full = mock.patch("tierplan.runtime.memory.files.room_bytes", return_value=needed - 1)
    with full, pytest.raises(StoreError, match=r"out has .* free, but the commits need .* there") as caught:
        train_on(tmp_path / "full", schedule, steps)
    assert caught.value.errno == errno.ENOSPC
    assert not (tmp_path / "full" / "out" / f"resident-{steps}.bin").exists()


def test_a_resumed_run_needs_room_for_one_commit_more(tmp_path: Path) -> None:
    schedule = schedule_for("memory")
    train_on(tmp_path, schedule, 1)
    needed = (tmp_path / "out" / "resident-1.bin").stat().st_size
    with mock.patch("tierplan.runtime.memory.files.room_bytes", return_value=needed):
        train_on(tmp_path, schedule, 3)


@pytest.mark.nightly  # with each `make test`, test_crash_consistency kills runs of two other plans
@pytest.mark.parametrize("choice", list(CHOICES))
def test_killed_at_many_random_moments(choice: str, tmp_path: Path) -> None:
    script = f"from {__name__} import die_often; die_often({choice!r}, 30, {str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", script], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300)
    assert same(torch.load(tmp_path / "weights.pt"), plain_weights())


def die_often(choice: str, num_kills: int, folder: str) -> None:
    """In a process of its own."""
    torch.set_num_threads(1)
    schedule, path = schedule_for(choice), Path(folder)
    left = kill_often(num_kills, lambda run: train_on(run, schedule), path)
    torch.save(train_on(left, schedule), path / "weights.pt")


def kill_often(
    num_kills: int,
    train: Callable[[Path], object],
    folder: Path,
    *,
    most_s: Callable[[int], float] = lambda kills: 0.35,
    is_enough: Callable[[], bool] = lambda: True,
) -> Path:
    """Forks runs, and kills each within so many seconds: the folder of the one that is left to run to its end.

    Each run starts with what the last one has committed; when one ends too early, it is begun anew.
    """
    rng, kills, attempt = random.Random(num_kills), 0, 0
    while kills < num_kills or not is_enough():
        child = os.fork()
        if child == 0:
            train(folder / str(attempt))
            os._exit(0)
        time.sleep(rng.uniform(0.0, most_s(kills)))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            kills += 1
        else:
            attempt += 1
    return folder / str(attempt)


def test_a_run_is_not_overwritten_by_accident(tmp_path: Path) -> None:
    schedule = schedule_for("nvme")
    train_on(tmp_path, schedule, 2)
    with pytest.raises(CommitError, match="committed after 2 steps; resume it"):
        train_on(tmp_path, schedule, resume=False)
    with pytest.raises(StoreError, match=r"holds committed states of the run in .*out"):
        Store([tmp_path / "nvme"])
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "nvme").rename(tmp_path / "gone")
    with pytest.raises(StoreError, match=r"nvme/tierplan\.tier, which the last commit needs, is missing"):
        train_on(tmp_path, schedule)


def test_a_stop_before_the_first_step_or_during_a_commit_is_heeded(tmp_path: Path) -> None:
    schedule = schedule_for("memory")
    with new_trainer(tmp_path, schedule) as trainer:
        trainer.request_stop()
        trainer.run(make_batches(STEPS), STEPS)
        assert trainer.num_steps_done == 1
    with new_trainer(tmp_path, schedule, resume=True) as trainer:
        assert trainer._durability is not None
        real = trainer._durability.begin_commit

        def begin_commit(*args: Any, **settings: Any) -> None:
            trainer.request_stop()
            real(*args, **settings)

        with mock.patch.object(trainer._durability, "begin_commit", begin_commit):
            trainer.run(make_batches(STEPS), STEPS - 1)
        assert trainer.num_steps_done == 2
    assert same(train_on(tmp_path, schedule), plain_weights())


def test_settings_that_change_the_numbers_are_refused(tmp_path: Path) -> None:
    schedule = schedule_for("memory")
    train_on(tmp_path, schedule, 2)
    with pytest.raises(CommitError, match="seed = 0, and is to be resumed with 5"):
        train_on(tmp_path, schedule, seed=5)
    with pytest.raises(CommitError, match=r"optimizer\.lr = 0\.01, and is to be resumed with 0\.5"):
        train_on(tmp_path, schedule, optimizer=OptimizerSettings(lr=0.5))


def test_damage_is_found(tmp_path: Path) -> None:
    schedule = schedule_for("memory")
    train_on(tmp_path, schedule, 2)
    resident = tmp_path / "out" / "resident-2.bin"
    data = bytearray(resident.read_bytes())
    data[PAGE_BYTES + 100] ^= 1
    resident.write_bytes(data)
    with pytest.raises(CommitError, match="is damaged"):
        train_on(tmp_path, schedule)
    resident.unlink()
    with pytest.raises(CommitError, match="is missing"):
        train_on(tmp_path, schedule)
    (tmp_path / "out" / "commit.json").write_text("{")
    with pytest.raises(CommitError, match="is not a commit record"):
        train_on(tmp_path, schedule)


def test_a_record_that_was_removed_is_an_error(tmp_path: Path) -> None:
    """A run began anew, and wrote over what was committed."""
    train_on(tmp_path, schedule_for("memory"), 2)
    (tmp_path / "out" / "commit.json").unlink()
    missing = r"commit\.json of the last commit is missing, and that there was one is said by .*tierplan\.lock; put"
    for resume in (True, False):
        with pytest.raises(CommitError, match=missing):
            new_trainer(tmp_path, schedule_for("memory"), resume=resume)
    with pytest.raises(CommitError, match=missing):
        verify_commit(tmp_path / "out")


def test_the_files_do_not_grow(tmp_path: Path) -> None:
    schedule = schedule_for("nvme")
    train_on(tmp_path, schedule, 2)
    before = (tmp_path / "nvme" / "tierplan.tier").stat().st_size
    train_on(tmp_path, schedule)
    assert (tmp_path / "nvme" / "tierplan.tier").stat().st_size == before
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"commit.json", f"resident-{STEPS}.bin", "tierplan.lock"}
