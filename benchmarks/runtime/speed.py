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

import argparse
import itertools
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import fio
from benchmarks.models import gpt2
from benchmarks.records import arguments, save
from benchmarks.runtime.nvme_bound import busiest
from tierplan.hwmodels.machine import Machine, Rate, SharedLimit, Stream, TierSpec
from tierplan.planner.lowering import lower
from tierplan.planner.plan import UnitPlan, UnitwisePlan
from tierplan.runtime.checkpoint.weights import hollow_model, random_weights
from tierplan.runtime.memory.arena import map_host
from tierplan.runtime.memory.store import Extent, Store
from tierplan.runtime.memory.striping import REQUEST_BYTES
from tierplan.runtime.memory.tier_file import FILE_NAME
from tierplan.runtime.optim.adam import OptimizerSettings
from tierplan.runtime.tracing.trace import trace_config
from tierplan.runtime.trainer import Trainer
from tierplan.sim.schedule import Schedule
from tierplan.sim.workloads.workload import Training

MIB = 2**20
GIB = 2**30
SEQUENCE_LENGTH = 64
FIO_WINDOW_S = 0.5


def machine(device_bytes: int, host_bytes: int) -> Machine:
    """Rates as measured on a machine of 2 cores, for the order of ops; nothing else depends on them.

    The drive reads 1.3 GB/s or writes 3.4 GB/s, and hardly more of one beside the other.
    """
    kinds = ("matmul_bf16_flops", "matmul_fp32_flops", "attention_bf16_flops", "attention_fp32_flops")
    rates = {"bytes": Rate.constant(8e9), "parameters": Rate.constant(3e8), "elementwise_bytes": Rate.constant(5e9)}
    rates |= {kind: Rate.constant(1.2e11) for kind in kinds}
    drive = {"nvme.read": (1.3e9, 1.5), "nvme.write": (3.4e9, 0.65)}
    sizes: dict[str, tuple[Any, int]] = {
        "gpu0": ("device", device_bytes),
        "host": ("host", host_bytes),
        "nvme": ("nvme", 1 << 50),
    }
    streams = ("gpu0.compute", "gpu0.h2d", "gpu0.d2h", "nvme.read", "nvme.write", "host.adam")
    return Machine(
        name="here",
        tiers=tuple(TierSpec(name=n, kind=kind, capacity_bytes=size) for n, (kind, size) in sizes.items()),
        streams=tuple(
            Stream(
                name=n,
                rates=rates | {"bytes": Rate.constant(drive[n][0])},
                takes={"drive": {"bytes": 1 / drive[n][0]}},
                share=drive[n][1],
            )
            if n in drive
            else Stream(name=n, rates=rates)
            for n in streams
        ),
        shared_limits=(SharedLimit(name="drive", limit=1.05),),
    )


def config(width: int, num_blocks: int, *, length: int = SEQUENCE_LENGTH) -> dict[str, object]:
    """A GPT-2 for sequences of this length."""
    return gpt2(width, num_blocks, positions=max(length, 4 * SEQUENCE_LENGTH))


def batches(length: int = SEQUENCE_LENGTH) -> Iterator[dict[str, torch.Tensor]]:
    """The same text for ever."""
    ids = torch.randint(0, 512, (1, length), generator=torch.Generator().manual_seed(1))
    return itertools.repeat({"input_ids": ids, "labels": ids})


def make(
    raw: dict[str, object],
    choice: UnitPlan,
    place: Machine,
    *,
    dtype: str = "bf16",
    semantics: str = "in-backward",
    length: int = SEQUENCE_LENGTH,
) -> tuple[Schedule, Training, int]:
    """The schedule, its training settings, and the number of parameters."""
    training = Training(sequence_length=length, dtype=dtype, backend="cpu")  # type: ignore[arg-type]
    workload = trace_config("benchmark", raw, training)
    kept = UnitPlan(params=choice.params, grads=choice.grads, states=choice.states)
    units = tuple(choice if u.kind == "block" else kept for u in workload.units)
    plan = UnitwisePlan(
        policy="benchmark",
        units=units,
        semantics=semantics,  # type: ignore[arg-type]
    )
    return lower(plan, workload, place), training, workload.num_parameters


def against_fio(nvme_dir: Path, *, op_bytes: int = 144 * MIB, num_ops: int = 12, turns: int = 40) -> dict[str, object]:
    """The store's throughput over fio's, both on the store's own file, with as many requests of one size in flight.

    Turns are short, and each of the store's stands against the mean of fio's before and behind it, so that what a
    shared drive does meanwhile goes out of the ratio.
    """
    store = Store([nvme_dir])
    memory = map_host(op_bytes)
    memory.random_(0, 256)
    extents = [store.allocate(op_bytes) for _ in range(num_ops)]
    for extent in extents:
        store.write(extent, memory)
    found: dict[str, object] = {}
    for verb, move in (("read", store.read), ("write", store.write)):
        turn = itertools.cycle(extents)

        def ours(move: Callable[[Extent, torch.Tensor], None] = move, turn: Iterator[Extent] = turn) -> float:
            began, moved = time.perf_counter(), 0
            while time.perf_counter() - began < FIO_WINDOW_S:
                move(next(turn), memory)
                moved += op_bytes
            return moved / (time.perf_counter() - began)

        theirs = partial(fio, nvme_dir / FILE_NAME, verb, num_ops * op_bytes, REQUEST_BYTES, 2, FIO_WINDOW_S)
        ours()
        before, rows = theirs(), []
        for _ in range(turns):
            mine, behind = ours(), theirs()
            rows.append(2 * mine / (before + behind))
            before = behind
        low, middle, high = statistics.quantiles(rows, n=4)
        found[verb] = {"ratio": middle, "quartiles": [low, high], "ratios": rows}
        print(f"{verb} / fio: median {middle:.3f} of {turns} turns, half of them {low:.3f} to {high:.3f}", flush=True)
    store.close(remove=True)
    return found


def overlap(nvme_dir: Path) -> dict[str, object]:
    """Seconds of a step with the update inside backward, and behind it."""
    raw = config(1024, 8)
    place = machine(4 * GIB, 3 * GIB)
    trainers = {}
    for name, semantics in (("inside", "in-backward"), ("behind", "exact-clip")):
        schedule, training, _ = make(raw, UnitPlan(grads="host", states="nvme"), place, semantics=semantics)
        model = hollow_model(raw, training)
        folder = nvme_dir / name
        trainers[name] = Trainer(schedule, model, nvme_dir=folder, weights=random_weights(model, seed=0))
        trainers[name].run(batches(), 2)
    ratios: list[float] = []
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    for turn in range(15):
        for name in sorted(trainers, reverse=bool(turn % 2)):
            begin_s = time.perf_counter()
            trainers[name].run(batches(), 1)
            seconds[name].append(time.perf_counter() - begin_s)
        ratios.append(seconds["inside"][-1] / seconds["behind"][-1])
    for trainer in trainers.values():
        trainer.close()
    ratio = statistics.median(ratios)
    print(f"inside / behind backward: {ratio:.3f}, median of {len(ratios)} pairs")
    return {"ratio": ratio, "ratios": ratios, **{f"{name}_s": statistics.median(s) for name, s in seconds.items()}}


def larger(nvme_dir: Path, cap_bytes: int, width: int, num_blocks: int, steps: int) -> dict[str, object]:
    """Trains a model larger than memory. To be run in a process of its own: the cap is the process's."""
    raw = config(width, num_blocks)
    schedule, training, num_parameters = make(
        raw, UnitPlan(params="nvme", grads="host", states="nvme"), machine(GIB, int(2.6 * GIB))
    )
    resource.setrlimit(resource.RLIMIT_DATA, (cap_bytes, cap_bytes))
    peak = [0]

    def watch() -> None:
        while True:
            status = Path("/proc/self/status").read_text()
            anonymous = next(line for line in status.splitlines() if line.startswith("RssAnon"))
            peak[0] = max(peak[0], int(anonymous.split()[1]) * 1024)
            time.sleep(0.2)

    threading.Thread(target=watch, daemon=True).start()
    model = hollow_model(raw, training)
    with Trainer(
        schedule,
        model,
        nvme_dir=nvme_dir,
        weights=random_weights(model, seed=0),
        optimizer=OptimizerSettings(lr=1e-5),
        on_step=lambda step, loss: print(f"step {step}: loss {loss:.4f}", flush=True),
    ) as trainer:
        trainer.run(batches(), steps)
        result = trainer.result()
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "num_parameters": num_parameters,
        "parameter_and_state_bytes": 14 * num_parameters,
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
    parser.add_argument("--cap-gib", type=float, default=6.0)
    parser.add_argument("--width", type=int, default=2560)
    parser.add_argument("--blocks", type=int, default=25)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.inner:
        found = larger(args.nvme_dir, int(args.cap_gib * GIB), args.width, args.blocks, args.steps)
        args.json.write_text(json.dumps(found))
        return
    record: dict[str, object] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "torch": torch.__version__,
        "num_threads": args.threads,
        "load_average_before": os.getloadavg(),
    }
    args.nvme_dir.mkdir(parents=True, exist_ok=True)
    if "fio" in args.only:
        if shutil.which("fio"):
            record["fio"] = against_fio(args.nvme_dir)
        else:
            print("fio is not installed: drives are not compared (Debian: apt-get install fio)")
    if "busiest" in args.only:
        record["busiest"] = busiest(args.nvme_dir)
    if "overlap" in args.only:
        record["overlap"] = overlap(args.nvme_dir)
    if "larger" in args.only:
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            command = [
                sys.executable,
                "-m",
                "benchmarks.runtime.speed",
                "--inner",
                "--json",
                file.name,
                "--nvme-dir",
                str(args.nvme_dir),
            ]
            for name in ("cap_gib", "width", "blocks", "steps", "threads"):
                command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
            subprocess.run(command, check=True)
            record["larger"] = json.loads(Path(file.name).read_text())
    record["load_average_after"] = os.getloadavg()
    save(args.json, record)


if __name__ == "__main__":
    main()
