"""Runs a study: many simulations on any `concurrent.futures.Executor`. Each result is kept as soon as it is there.

Results are lines of JSON in `results.jsonl`, appended and flushed one by one. So an interrupted run continues
where it stopped. `table.csv` holds the same results as a table, in the order of the grid. What another version of
tierplan has answered is answered anew, and so is what was answered before a machine, a model or a calibration changed.
A row is of the function that made it: a sweep and a page have rows of their own in one folder.
"""

from __future__ import annotations

import atexit
import csv
import functools
import gc
import hashlib
import io
import json
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tqdm import tqdm

import tierplan
from tierplan.hwmodels.values.extras import words_of_missing
from tierplan.sim.compiled.compiler import is_kept
from tierplan.sim.compiled.rules import execute
from tierplan.sim.trace import name_in_errors, write_atomically
from tierplan.studies.evaluate import best_plan, evaluate_point, files_of
from tierplan.studies.study import Point, Study

Row = dict[str, Any]
"""Columns by name: JSON values."""
Evaluate = Callable[[Point], Mapping[str, object]]
Asking = Callable[[Sequence[Point], Evaluate], list[Callable[[], Row]]]
"""Asks, and has a way to each row."""


@functools.cache
def code_version() -> str:
    """Of the code and the catalog of this package, and of those whose model classes are traced."""
    root, found = Path(tierplan.__file__).parent, hashlib.blake2b(digest_size=8)
    for name in ("torch", "transformers", "peft"):
        with suppress(PackageNotFoundError):
            found.update(version(name).encode())
    for folder, _, names in sorted(os.walk(root, followlinks=True)):
        for name in sorted(names):
            if name.endswith((".py", ".toml", ".json")):
                found.update((Path(folder) / name).read_bytes())
    return found.hexdigest()


def key_of(evaluate: Evaluate) -> str:
    """The same for the same function, by its module and name, with the same arguments (`functools.partial`)."""
    try:
        pickled = pickle.dumps(evaluate, protocol=4)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"evaluate is {evaluate!r}, which cannot be pickled ({error}), and rows are kept under the name of what "
            "made them: define it at the top of a module, not within a function nor as a lambda, or leave out out_dir"
        ) from None
    if b"__main__" in pickled:  # of one script or another
        pickled += str(getattr(sys.modules["__main__"], "__file__", "")).encode()
    return hashlib.blake2b(pickled, digest_size=4).hexdigest()


def versions_of(points: Mapping[str, Point]) -> dict[str, str]:
    """Of everything that the answer depends on beside the question, the code and what files say now."""

    @functools.cache
    def version_at(*names: str) -> str:
        contents = [path.read_bytes() if path.is_file() else b"" for path in files_of(*names)]
        record = [code_version(), *(hashlib.sha256(content).hexdigest() for content in contents)]
        return hashlib.blake2b(json.dumps(record).encode(), digest_size=8).hexdigest()

    return {key: version_at(p.model, p.machine, p.calibration) for key, p in points.items()}


def sweep(
    points: Iterable[Point] | Study,
    evaluate: Evaluate = evaluate_point,
    *,
    out_dir: str | os.PathLike[str] | None = None,
    executor: Executor | None = None,
    num_workers: int | None = None,
    progress: bool = False,
) -> list[Row]:
    """One row per point (of a study: of all), in their order: the point's columns and what `evaluate` says of it.

    Parameters
    ----------
    evaluate
        From a point to named figures; a function that can be pickled. By default `tierplan.studies.evaluate`:
        plan, lower, simulate. What it raises as `ValueError` or `RuntimeError` becomes the row's `error`.
    out_dir
        Where results are kept (`results.jsonl`, `table.csv`). Points that it already holds are not evaluated again,
        unless another version of tierplan has evaluated them, or files have changed that they depend on. They are held
        for the function that evaluated them, known by its module and name, and its arguments in a `partial`: use
        another folder after you have changed what it says.
    executor
        Runs the points: threads, processes, a `dask.distributed` client's `get_executor()`. It is not shut down.
        By default a pool of `num_workers` processes, one per core.
    """
    points = list(points.points() if isinstance(points, Study) else points)
    by = "" if out_dir is None else f"-{key_of(evaluate)}"
    keys = [p.key + by for p in points]
    asked = dict(zip(keys, points, strict=True))
    results_file = _ResultsFile(Path(out_dir), versions_of(asked)) if out_dir is not None else None
    rows: dict[str, Row] = dict(results_file.rows) if results_file else {}
    missing = {key: point for key, point in asked.items() if key not in rows}
    if results_file and progress and (num_old := len(results_file.old & missing.keys())):
        since = "of another version of tierplan, or of files that have changed,"
        tqdm.write(f"{results_file.path}: {num_old} points {since} are computed anew", sys.stderr)
    with ExitStack() as stack:
        if results_file:
            stack.callback(results_file.close)
        bar = stack.enter_context(
            tqdm(total=len(points), initial=len(points) - len(missing), unit="point", disable=not progress)
        )
        for key, row in _results(missing, evaluate, executor, num_workers, stack):
            rows[key] = row
            if results_file:
                results_file.add(key, row)
            bar.update()
    ordered = [rows[key] for key in keys]
    if out_dir is not None:
        write_table(ordered, Path(out_dir) / "table.csv")
    return ordered


def _results(
    points: Mapping[str, Point],
    evaluate: Evaluate,
    executor: Executor | None,
    num_workers: int | None,
    stack: ExitStack,
) -> Iterator[tuple[str, Row]]:
    """Rows as they are done. On the way out, points that have not begun are cancelled."""
    if not points:
        return
    num_workers, is_own = num_workers or len(os.sched_getaffinity(0)), False
    if executor is None:
        if num_workers == 1 or len(points) == 1:
            for key, point in points.items():
                yield key, _row(evaluate, point)
            return
        executor, is_own = processes(min(num_workers, len(points)), stack), True
    futures = {executor.submit(_row, evaluate, point): key for key, point in points.items()}
    if not is_own:  # which cancels by itself: once more beside that, and a thread of it dies of what was cancelled
        stack.callback(lambda: [future.cancel() for future in futures])
    for future in as_completed(futures):
        yield futures[future], future.result()


@contextmanager
def asking(num_workers: int | None = None, *, progress: bool = False) -> Iterator[Asking]:
    """For questions that follow from answers: what is asked begins at once, in the order in which it is asked, and each
    row is waited for when it is called for. One process has each computed only then."""
    num_workers = num_workers or len(os.sched_getaffinity(0))
    with ExitStack() as stack:
        executor = processes(num_workers, stack) if num_workers > 1 else None
        bar = stack.enter_context(tqdm(total=0, unit="point", disable=not progress))

        def ask(points: Sequence[Point], evaluate: Evaluate) -> list[Callable[[], Row]]:
            bar.total += len(points)
            bar.refresh()

            def row(point: Point) -> Row:
                found = _row(evaluate, point)
                bar.update()
                return found

            if executor is None:
                return [functools.cache(partial(row, point)) for point in points]
            futures = [executor.submit(_row, evaluate, point) for point in points]
            for future in futures:
                future.add_done_callback(lambda _: bar.update())
            return [future.result for future in futures]

        yield ask


def processes(num: int, stack: ExitStack) -> Executor:
    """So many, which end with the stack."""
    if not is_kept(execute):
        best_plan(Point(model="gpt2", machine="laptop", planner_s=0.01))  # compiles it, once for all of them
    end = partial(_end_workers, frozenset(multiprocessing.active_children()))
    atexit.register(end)
    # a fork has all imports at once; where there are threads, it might have the locks that they hold
    can_fork = sys.platform == "linux" and threading.active_count() == 1 and "torch" not in sys.modules
    context = multiprocessing.get_context("fork" if can_fork else "spawn")
    pool = _Pool(num, context, _begin_worker, (gc.get_threshold(), _levels()))
    stack.push(partial(_end_pool, pool, end))
    pool.submit(int)  # begins them now, before there are threads
    return pool


class _Pool(ProcessPoolExecutor):
    """Its processes cannot be interrupted, from before they begin: they have the mask of what begins them."""

    def submit(self, *args: Any, **kwargs: Any) -> Any:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return super().submit(*args, **kwargs)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Interrupted(BaseException):
    """Ctrl-C, which no search answers with its best plan so far."""


@contextmanager
def _interrupts_end() -> Iterator[None]:
    """Ctrl-C ends what is done within this, in the main thread, whatever that makes of `KeyboardInterrupt`."""

    def end(*_: object) -> None:
        raise _Interrupted

    handler = signal.getsignal(signal.SIGINT)
    if handler is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    try:
        signal.signal(signal.SIGINT, end)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, handler)
    except _Interrupted:
        signal.signal(signal.SIGINT, handler)
        raise KeyboardInterrupt from None


def _row(evaluate: Evaluate, point: Point) -> Row:
    row = point.columns()
    try:
        with _interrupts_end():
            row |= evaluate(point)
    except (ValueError, RuntimeError) as error:
        row["error"] = str(error)
    except ModuleNotFoundError as error:
        row["error"] = words_of_missing(error)
    return row


def _end_pool(pool: ProcessPoolExecutor, end: Callable[[], None], kind: type[BaseException] | None, *_: object) -> None:
    """Ends the processes: after the work, or at once where something went wrong, since what they do would be lost.

    Waiting for them then would let a second Ctrl-C, or one that met a process before it began, hang the first. Where a
    second Ctrl-C comes in between, `end` is called once more when Python exits, before it waits for its children.
    """
    if kind is not None:
        end()
    pool.shutdown(wait=kind is None, cancel_futures=True)
    atexit.unregister(end)


def _end_workers(others: frozenset[BaseProcess]) -> None:
    """All children but those that were there before, also one that the pool had begun and not yet noted."""
    for process in multiprocessing.active_children():
        if process not in others:
            process.kill()


def _levels() -> dict[str, int]:
    """Of loggers, as they are set here."""
    return {name: of.level for name, of in logging.root.manager.loggerDict.items() if isinstance(of, logging.Logger)}


def _begin_worker(gc_threshold: tuple[int, int, int], levels: Mapping[str, int]) -> None:
    """Ctrl-C is for the parent alone, which decides what it means. Without a parent there is nothing to do."""
    gc.set_threshold(*gc_threshold)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


class _ResultsFile:
    """The results of a folder, read when it is opened and appended to line by line."""

    def __init__(self, folder: Path, versions: Mapping[str, str]) -> None:
        self.path = folder / "results.jsonl"
        self.rows: dict[str, Row] = {}
        self.old: set[str] = set()
        """Points that were evaluated with another version of what they depend on."""
        self.versions = versions
        folder.mkdir(parents=True, exist_ok=True)
        said = self.path.read_bytes() if self.path.exists() else b""
        whole = said[: said.rfind(b"\n") + 1]  # the last line may have been cut off by an interruption
        for line in whole.splitlines():
            try:
                record = json.loads(line)
                key, row = record["key"], {**record["row"]}
            except (ValueError, KeyError, TypeError):
                raise ValueError(
                    f"{self.path} has a line that is no result: {line[:60]!r}; remove it, or use another folder"
                ) from None
            if record.get("version") == versions.get(key, ""):
                self.rows[key] = row
            else:
                self.old.add(key)
        self.file = self.path.open("a", encoding="utf-8")
        self.file.truncate(len(whole))

    def add(self, key: str, row: Row) -> None:
        record = {"key": key, "version": self.versions[key], "row": row}
        with name_in_errors(self.path):
            self.file.write(json.dumps(record, separators=(",", ":")) + "\n")
            self.file.flush()

    def close(self) -> None:
        with name_in_errors(self.path):
            self.file.close()


def write_table(rows: Sequence[Mapping[str, object]], path: str | os.PathLike[str]) -> None:
    """Writes rows as CSV, one column per name that any row has, in order of first appearance."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, text.getvalue())
