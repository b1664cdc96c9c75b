"""How close the runtime comes to its busiest stream, what overlap is worth, and a model larger than memory.

    python -m benchmarks.runtime.speed --nvme-dir /mnt/nvme/scratch [--json FILE] [--only fio busiest overlap larger]

    fio         the store's reads and writes, in ops of the size of a block's states, against fio on the same file with
                requests of the same size and as many in flight; the medians of the ratios of turns
    busiest     plans that the drive limits, as `nvme_bound` makes them for this machine: step time in
                steady state over the busy time of the busiest stream, and over the time in which the drive was busy
    overlap     updates inside backward against the same plan with updates behind backward, steps one by one, in turn;
                the median of the ratios of pairs
    larger      a model in bf16 with Adam whose parameters and states (14 bytes per parameter) exceed this machine's
                memory, under a cap on the process's own memory; its loss on one text must fall

Ratios are taken within one run, since a shared machine drifts by more than the differences sought.
"""

from __future__ import annotations

import itertools
import os
import resource
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import fio
from benchmarks.models import GIB, MIB, gpt2
from benchmarks.records import Record, about, arguments, in_turns, save, spread
from benchmarks.runtime.nvme_bound import busiest
from benchmarks.trainings import batches, num_parameters, trainer_of
from tierplan.planner.plan import UnitPlan
from tierplan.runtime.memory.arena import map_host
from tierplan.runtime.memory.store import Extent, Store
from tierplan.runtime.memory.striping import REQUEST_BYTES
from tierplan.runtime.memory.tier_file import FILE_NAME
from tierplan.runtime.optim.adam import OptimizerSettings
from tierplan.runtime.trainer import Trainer
from tierplan.sim.step import Semantics

FIO_WINDOW_S = 0.5


def against_fio(nvme_dir: Path, *, op_bytes: int = 144 * MIB, num_ops: int = 12, turns: int = 40) -> Record:
    """The store's throughput over fio's, both on the store's own file, with as many requests of one size in flight."""
    store, memory = Store([nvme_dir]), map_host(op_bytes)
    memory.random_(0, 256)
    extents = [store.allocate(op_bytes) for _ in range(num_ops)]
    for extent in extents:
        store.write(extent, memory)
    turn = itertools.cycle(extents)

    def per_s(move: Callable[[Extent, torch.Tensor], None]) -> float:
        began, moved = time.perf_counter(), 0
        while time.perf_counter() - began < FIO_WINDOW_S:
            move(next(turn), memory)
            moved += op_bytes
        return moved / (time.perf_counter() - began)

    found = {}
    for verb, move in (("read", store.read), ("write", store.write)):
        theirs = partial(fio, nvme_dir / FILE_NAME, verb, num_ops * op_bytes, REQUEST_BYTES, 2, FIO_WINDOW_S)
        per_s(move)
        found[verb] = spread([mine / its for mine, its in in_turns(partial(per_s, move), theirs, turns)])
        print(
            "{} / fio: median {:.3f}, half of them {:.3f} to {:.3f}".format(
                verb, found[verb]["ratio"], *found[verb]["quartiles"]
            ),
            flush=True,
        )
    store.close(remove=True)
    return found


def overlap(nvme_dir: Path) -> Record:
    """Seconds of a step with the update inside backward, over those with the update behind it."""

    def begun(name: str, semantics: Semantics) -> Trainer:
        choice = UnitPlan(grads="host", states="nvme")
        trainer = trainer_of(gpt2(1024, 8), choice, nvme_dir / name, host_bytes=3 * GIB, semantics=semantics)
        stack.enter_context(trainer).run(batches(), 2)
        return trainer

    def step_s(trainer: Trainer) -> float:
        begin_s = time.perf_counter()
        trainer.run(batches(), 1)
        return time.perf_counter() - begin_s

    with ExitStack() as stack:
        inside, behind = begun("inside", "in-backward"), begun("behind", "exact-clip")
        found = spread([a / b for a, b in in_turns(partial(step_s, inside), partial(step_s, behind), 15)])
    print(f"inside / behind backward: {found['ratio']:.3f}")
    return found


def larger(nvme_dir: Path, cap_bytes: int, width: int, num_blocks: int, steps: int, threads: int) -> Record:
    """Trains a model larger than memory. To be run in a process of its own: the cap is the process's."""
    torch.set_num_threads(threads)
    resource.setrlimit(resource.RLIMIT_DATA, (cap_bytes, cap_bytes))
    peak = [0]

    def watch() -> None:
        while True:
            status = Path("/proc/self/status").read_text()
            anonymous = next(line for line in status.splitlines() if line.startswith("RssAnon"))
            peak[0] = max(peak[0], int(anonymous.split()[1]) * 1024)
            time.sleep(0.2)

    threading.Thread(target=watch, daemon=True).start()
    raw, places = gpt2(width, num_blocks), UnitPlan(params="nvme", grads="host", states="nvme")
    settings: dict[str, Any] = {
        "optimizer": OptimizerSettings(lr=1e-5),
        "on_step": lambda step, loss: print(f"step {step}: loss {loss:.4f}", flush=True),
    }
    with trainer_of(raw, places, nvme_dir, device_bytes=GIB, host_bytes=int(2.6 * GIB), **settings) as trainer:
        trainer.run(batches(), steps)
        result, num = trainer.result(), num_parameters(trainer)
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "num_parameters": num,
        "parameter_and_state_bytes": 14 * num,
        "machine_memory_bytes": memory_bytes,
        "cap_bytes": cap_bytes,
        "peak_anonymous_bytes": peak[0],
        "peak_bytes": dict(result.peak_bytes),
        "losses": result.losses,
        "step_s": result.step_s,
        "busy_s": {stream: s / steps for stream, s in result.trace.busy_s().items()},
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--nvme-dir", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="+", default=["fio", "busiest", "overlap", "larger"])
    parser.add_argument("--predict-only", action="store_true", help="of `busiest`: measure and plan, but do not train")
    parser.add_argument("--cap-gib", type=float, default=6.0)
    parser.add_argument("--width", type=int, default=2560)
    parser.add_argument("--blocks", type=int, default=25)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    record = {**about(), "torch": torch.__version__, "num_threads": args.threads}
    record["load_average_before"] = os.getloadavg()
    args.nvme_dir.mkdir(parents=True, exist_ok=True)
    if "fio" in args.only:
        if shutil.which("fio"):
            record["fio"] = against_fio(args.nvme_dir)
        else:
            print("fio is not installed: drives are not compared (Debian: apt-get install fio)")
    if "busiest" in args.only:
        record["busiest"] = busiest(args.nvme_dir, predict_only=args.predict_only)
    if "overlap" in args.only:
        record["overlap"] = overlap(args.nvme_dir)
    if "larger" in args.only:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            asked = (args.nvme_dir, int(args.cap_gib * GIB), args.width, args.blocks, args.steps, args.threads)
            record["larger"] = pool.submit(larger, *asked).result()
    record["load_average_after"] = os.getloadavg()
    save(args.json, record)


if __name__ == "__main__":
    main()
