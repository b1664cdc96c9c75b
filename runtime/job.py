"""One training run from files to files: what `tierplan run` does.

JobError(ValueError)   a run that cannot begin; says what is wrong with which argument
"""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tierplan.runtime.autograd.units import refuse_frozen_encoder
from tierplan.runtime.checkpoint.weights import checkpoint_weights, export, has_weights, hollow_model, random_weights
from tierplan.runtime.data.text import TokenBatches, fingerprint, read_tokens
from tierplan.runtime.execution.device import device_named
from tierplan.runtime.execution.executable import check_tokens, executable_step
from tierplan.runtime.execution.executor import traced_steps
from tierplan.runtime.measure.reference_work import MOST_FRAC
from tierplan.runtime.memory import files
from tierplan.runtime.optim.adam import OptimizerSettings
from tierplan.runtime.optim.groups import without_decay
from tierplan.runtime.ranks.group import Ranks
from tierplan.runtime.run_result import RunResult
from tierplan.runtime.trainer import Trainer
from tierplan.sim.digest import PLAN_KEY, changed_text, is_as_written
from tierplan.sim.output.text import format_bytes, format_error, format_s, wrapped
from tierplan.sim.ranks import is_pipeline, joined_trace
from tierplan.sim.schedule import Schedule
from tierplan.sim.schedule_file import load_schedule
from tierplan.sim.trace import Trace, write_atomically
from tierplan.sim.workloads.models import read_config
from tierplan.sim.workloads.workload import Training

SCHEDULES = ("constant", "linear", "cosine")
"""Of learning rates."""
LOG_INTERVAL_S = 30.0
"""Between two states of the bar where nobody looks at it as it moves."""
SAME_SIGNAL_S = 0.2
"""Signals that come so close are one: `timeout` sends it to the process, and then to its group."""
NOT_OF_THE_NUMBERS = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache")
"""Of a config.json: names, and what the plan says."""
TOKENIZER_PREFIXES = ("tokenizer", "vocab", "merges", "special_tokens")


class JobError(ValueError):
    """A run that cannot begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to train, on what, where and how. Fields are the options of `tierplan run`."""

    plan: Path
    model: Path
    data: Path
    num_steps: int
    out_dir: Path
    resume: bool = False
    nvme_dirs: tuple[Path, ...] = ()
    nvme_weights: tuple[float, ...] = ()
    checkpoint_every: int | None = None
    read_back: bool = True
    export: bool = True
    lr: float = 1e-3
    lr_schedule: str = "constant"
    warmup_steps: int = 0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    no_decay_on_norms: bool = False
    seed: int = 0
    device: str = "auto"
    num_threads: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What a run did."""

    result: RunResult
    num_steps: int
    """Of the whole run, earlier parts included."""
    tokens_per_step: int
    predicted_step_s: float | None
    interval_s: tuple[float, float] | None
    """Of the predicted step: 9 in 10."""
    was_stopped: bool
    out_dir: Path

    def summary(self) -> str:
        """A few lines for people."""
        result = self.result
        resumed = f" in all, {len(result.step_ends_s)} of them now" if result.num_resumed_steps else ""
        lines = [f"{self.num_steps} steps done{resumed}, loss {result.losses[0]:.4f} -> {result.losses[-1]:.4f}"]
        if result.step_ends_s:
            step_s = result.step_s
            lines.append(f"step time {format_s(step_s)} on average, {self.tokens_per_step / step_s:,.0f} tokens/s")
            if self.predicted_step_s:
                error = self.predicted_step_s / step_s - 1
                lines[-1] += f"; predicted {format_s(self.predicted_step_s)} ({format_error(error)})"
                if self.interval_s:
                    lines[-1] += ", 9 in 10 between {} and {}".format(*map(format_s, self.interval_s))
            for what, sizes in (("peak", result.peak_bytes), ("moved", result.moved_bytes)):
                if named := ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items()):
                    lines.append(f"{what} {named}")
        lines += result.notes
        lines.append(f"written to {self.out_dir}" + ("; resume with --resume" if self.was_stopped else ""))
        return "\n".join(part for line in lines for part in wrapped(line))

    def record(self) -> dict[str, object]:
        """The same, and each step's loss, as JSON values: of the whole run, and of the steps since it was resumed."""
        result = self.result
        step_s = result.step_s if result.step_ends_s else None
        losses = [_as_json(loss) for loss in result.losses]
        return {
            "steps": self.num_steps,
            "losses": losses,
            "this_session": {
                "first_step": result.num_resumed_steps,
                "steps": len(result.step_ends_s),
                "losses": losses[result.num_resumed_steps :],
                "step_s": step_s,
                "tokens_per_s": self.tokens_per_step / step_s if step_s else None,
                "peak_bytes": dict(result.peak_bytes) if step_s else {},
                "bytes": dict(result.moved_bytes),
            },
            "predicted_step_s": self.predicted_step_s,
            "interval_s": self.interval_s,
            "notes": list(result.notes),
            "was_stopped": self.was_stopped,
            "out": str(self.out_dir),
        }


def run_job(job: Job, *, show_progress: bool = False, ranks: Ranks | None = None) -> Done:
    """Runs or resumes a job. Ctrl-C or SIGTERM lets the step under way end, commits it, and returns with
    `was_stopped`, unless that was the last one. With `ranks`, this process does one device's part, and the first one
    writes for all."""
    schedule = load_schedule(job.plan)
    rank, num_ranks = (ranks.rank, ranks.size) if ranks is not None else (0, 1)
    training = _training(schedule, job.plan, rank, num_ranks)
    if job.num_steps < 1:
        raise JobError(f"--steps is {job.num_steps}; give 1 or more")
    if training.base and not training.lora and job.export:
        raise JobError(f"{job.plan} leaves a model in {training.base}, which is not saved; add --no-export")
    if not job.model.exists():
        raise JobError(f"{job.model} does not exist; --model takes a folder that holds a config.json, or such a file")
    _, raw = read_config(job.model, training)
    model = hollow_model(raw, training)
    refuse_frozen_encoder(model)
    tokenizer_files = _tokenizer_files(job.model) if job.model.is_dir() else []
    loaded = job.model.is_dir() and has_weights(job.model)
    weights = checkpoint_weights(model, job.model, seed=job.seed) if loaded else random_weights(model, seed=job.seed)
    files.make_folder(job.out_dir)
    config: Any = model.config
    for turn in range(num_ranks):  # the first one leaves what it has read for the others
        if turn == rank:
            tokens = read_tokens(
                job.data,
                vocab_size=config.get_text_config().vocab_size,
                tokenizer=_tokenizer(job.model) if job.model.is_dir() else None,
                cache_dir=job.out_dir,
            )
        if ranks is not None:
            ranks.barrier()
    batches = TokenBatches(tokens, training.per_device_train_batch_size, training.sequence_length, job.seed)
    optimizer = OptimizerSettings(
        name=training.optimizer,
        lr=job.lr,
        betas=job.betas,
        eps=job.eps,
        weight_decay=job.weight_decay,
        groups=(without_decay(model),) if job.no_decay_on_norms else (),
    )
    rate = learning_rate(job.lr_schedule, job.lr, num_steps=job.num_steps, warmup_steps=job.warmup_steps)
    settings = json.loads(config.to_json_string(use_diff=False))
    fixed: dict[str, object] = {
        "data": fingerprint(tokens),
        "model": {key: value for key, value in settings.items() if key not in NOT_OF_THE_NUMBERS},
        "lr_schedule": job.lr_schedule,
        "warmup_steps": job.warmup_steps,
    }
    if job.lr_schedule != "constant":
        fixed["lr_schedule_steps"] = job.num_steps
    predicted, interval = predicted_step_s(schedule), _predicted("interval_s", schedule)
    tokens_per_step = training.tokens_per_step * (1 if is_pipeline(schedule) else num_ranks)
    own = "" if ranks is None else f"rank-{rank}"
    nvme_dirs = job.nvme_dirs or (job.out_dir / "nvme",)
    with _Metrics(job, tokens_per_step, rate, predicted, show_progress) as metrics:
        trainer = Trainer(
            schedule,
            model,
            nvme_dir=[path / own for path in nvme_dirs],
            nvme_weights=job.nvme_weights,
            optimizer=optimizer,
            learning_rate=rate,
            seed=job.seed,
            device=device_named(job.device),
            num_threads=job.num_threads,
            trace_steps=traced_steps(schedule),
            reference_frac=MOST_FRAC,
            on_step=metrics.on_step if rank == 0 else lambda step, loss: None,
            out_dir=job.out_dir,
            checkpoint_every=job.checkpoint_every,
            read_back=job.read_back,
            resume=job.resume,
            fixed=fixed,
            weights=weights,
            ranks=ranks,
        )
        with trainer, stop_on_interrupt(trainer.request_stop) as was_asked:
            if rank == 0:
                metrics.begin(trainer.num_steps_done)
            trainer.run(batches, max(0, job.num_steps - trainer.num_steps_done))
            result = trainer.result()
            if result.step_ends_s:  # else the run was done before, and its trace is there
                trace = result.trace
                if ranks is not None:
                    trace = joined_trace(ranks.collect((trace, trainer.placement.executor.begun_ns)))
                    result = _of_all(result, trace)
                if rank == 0:
                    trace.save(job.out_dir / "trace.json")
            if (extra := trainer.num_steps_done - job.num_steps) > 0:
                note = f"--steps asks for {job.num_steps} steps of the whole run, which had {extra} more before"
                result = replace(result, notes=(*result.notes, note))
            if wrong := [step for step, loss in enumerate(result.losses) if not math.isfinite(loss)]:
                of = f"{len(wrong)} step{'s' * (len(wrong) > 1)}, first of step {wrong[0]}"
                note = (
                    f"the loss of {of}, is not finite (null in metrics.jsonl); all gradients were, so training went on"
                )
                result = replace(result, notes=(*result.notes, note))
            was_stopped = was_asked() if ranks is None else trainer.was_stopped
            was_stopped = was_stopped and trainer.num_steps_done < job.num_steps
            if job.export and not was_stopped:
                with _saying_what_is_safe(trainer.num_steps_done):
                    export(trainer, job.out_dir / "model")
                    for path in tokenizer_files if rank == 0 else ():
                        write_atomically(job.out_dir / "model" / path.name, path.read_bytes())
            return Done(
                result=result,
                num_steps=trainer.num_steps_done,
                tokens_per_step=tokens_per_step,
                predicted_step_s=predicted,
                interval_s=(interval[0], interval[1]) if isinstance(interval, list | tuple) else None,
                was_stopped=was_stopped,
                out_dir=job.out_dir,
            )


@contextmanager
def _saying_what_is_safe(num_steps: int) -> Iterator[None]:
    """Inside, where the exported model cannot be written, the error says that nothing but that is missing."""
    try:
        yield
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        raise files.StoreError(
            error.errno or errno.EIO,
            f"the trained model was not exported: {what}. All {num_steps} steps are committed: when that is mended, "
            "the same command with --resume trains nothing more and exports it",
        ) from error


def _of_all(result: RunResult, trace: Trace) -> RunResult:
    """With what all ranks held and moved, by their joined trace."""
    per_step: Any = trace.meta["bytes_per_step"]
    moved_bytes = {stream: round(size * len(result.step_ends_s)) for stream, size in per_step.items()}
    return replace(result, peak_bytes=trace.peak_bytes, moved_bytes=moved_bytes)


def learning_rate(name: str, lr: float, *, num_steps: int, warmup_steps: int = 0) -> Callable[[int], float]:
    """The rate of each step, from 0, with the formulas of `transformers.optimization`: rises linearly over the warm-up,
    then stays, or falls to 0 at `num_steps`."""
    if name not in SCHEDULES:
        raise ValueError(f"learning-rate schedule {name!r} is unknown; choose one of {', '.join(SCHEDULES)}")
    if not 0 <= warmup_steps <= num_steps:
        raise ValueError(f"a warm-up of {warmup_steps} steps does not fit into {num_steps}; give 0 to {num_steps}")

    def rate(step: int) -> float:
        if step < warmup_steps:
            return lr * step / max(1, warmup_steps)
        if name == "constant":
            return lr
        done = (step - warmup_steps) / max(1, num_steps - warmup_steps)
        if name == "linear":
            return lr * max(0.0, 1.0 - done)
        return lr * max(0.0, 0.5 * (1.0 + math.cos(math.pi * done)))

    return rate


def predicted_step_s(schedule: Schedule) -> float | None:
    """The step time that the file's writer expected: `tierplan plan` and `tierplan simulate` note it."""
    step_s = schedule.meta.get("predicted_step_s", _predicted("step_s", schedule))
    return float(step_s) if isinstance(step_s, int | float) else None


def _predicted(name: str, schedule: Schedule) -> Any:
    planned: Any = schedule.meta.get(PLAN_KEY)
    if isinstance(planned, Mapping) and isinstance(planned.get("prediction"), Mapping):
        return planned["prediction"].get(name)
    return schedule.meta.get(name)


def _training(schedule: Schedule, path: Path, rank: int, num_ranks: int) -> Training:
    """What the file's schedule trains, when it is the one that was written and one that can be run."""
    if not is_as_written(schedule):
        raise JobError(changed_text(path))
    try:
        step = executable_step(schedule, rank, num_ranks)
    except ValueError as error:
        raise JobError(f"{path}: {error}") from error
    if (wrong := check_tokens(schedule, step)) is not None:
        raise JobError(f"{path}: {wrong}. Plan again")
    return step.training


def _tokenizer(folder: Path) -> Any:
    """The tokenizer in the model's folder; None, for bytes, if there is none."""
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json")):
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _tokenizer_files(folder: Path) -> list[Path]:
    """The files of the model's folder that its tokenizer needs. In a download cache they are links to its `blobs`; one
    to anywhere else would put what lies there into the exported model."""
    paths = [p for p in sorted(folder.iterdir()) if p.name.startswith(TOKENIZER_PREFIXES) and p.is_file()]
    homes = (folder.resolve(), (folder.parent.parent / "blobs").resolve())
    for path in paths:
        if path.resolve().parent not in homes:
            raise JobError(f"{path} is a link to {path.resolve()}; put a copy of the file there")
    return paths


@contextmanager
def stop_on_interrupt(
    request_stop: Callable[[], None] = lambda: None,
    numbers: Iterable[signal.Signals] = (signal.SIGINT, signal.SIGTERM),
) -> Iterator[Callable[[], bool]]:
    """The first of these signals (Ctrl-C, SIGTERM) asks for a stop, as after the step under way; a second one, later
    than `SAME_SIGNAL_S`, ends it at once."""
    asked_s = list[float]()

    def handle(number: int, frame: object) -> None:
        now_s = time.monotonic()
        if asked_s and now_s > asked_s[0] + SAME_SIGNAL_S:
            raise KeyboardInterrupt
        if not asked_s:
            asked_s.append(now_s)
            request_stop()

    try:
        before = {number: signal.signal(number, handle) for number in numbers}
    except ValueError:  # not in the main thread
        yield lambda: False
        return
    try:
        yield lambda: bool(asked_s)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def sigterm_interrupts() -> AbstractContextManager[object]:
    """SIGTERM is Ctrl-C: what is left on the way out removes its files."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    return stop_on_interrupt(interrupt, [signal.SIGTERM])


class _Metrics(ExitStack):
    """Writes one line per step, and shows a bar."""

    def __init__(
        self, job: Job, tokens_per_step: int, rate: Callable[[int], float], predicted_s: float | None, show: bool
    ) -> None:
        super().__init__()
        self._path = job.out_dir / "metrics.jsonl"
        self._job, self._rate, self._predicted_s, self._show = job, rate, predicted_s, show
        self._tokens = tokens_per_step

    def begin(self, num_steps_done: int) -> None:
        """Drops the lines of steps that were not committed, which are run again."""
        kept = []
        if num_steps_done:
            lines = (files.read_content(self._path) or b"").decode(errors="replace").splitlines()
            kept = [line for line in lines if _step_of(line) < num_steps_done]
        files.replace_content(self._path, "".join(f"{line}\n" for line in kept).encode())
        fd = files.open_file(self._path, os.O_WRONLY | os.O_APPEND)
        self._file = self.enter_context(os.fdopen(fd, "a", encoding="utf-8", buffering=1))
        self._last_s = time.perf_counter()
        if self._show:
            from tqdm import tqdm

            interval_s = 0.1 if sys.stderr.isatty() else LOG_INTERVAL_S
            settings = {"unit": "step", "dynamic_ncols": True, "mininterval": interval_s}
            self._bar = self.enter_context(tqdm(total=self._job.num_steps, initial=num_steps_done, **settings))

    def on_step(self, step: int, loss: float) -> None:
        now_s = time.perf_counter()
        step_s, self._last_s = now_s - self._last_s, now_s
        record = {
            "step": step,
            "loss": _as_json(loss),
            "lr": self._rate(step),
            "step_s": step_s,
            "predicted_step_s": self._predicted_s,
            "tokens_per_s": self._tokens / step_s,
        }
        with files.naming("write a line to", self._path):
            self._file.write(json.dumps(record) + "\n")
        if self._show:
            self._bar.set_postfix_str(f"loss {loss:.4f}, {self._tokens / step_s:,.0f} tokens/s", refresh=False)
            self._bar.update()


def _as_json(loss: float) -> float | None:
    """JSON has no inf and no nan."""
    return loss if math.isfinite(loss) else None


def _step_of(line: str) -> float:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")  # cut off by a crash
