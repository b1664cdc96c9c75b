"""Do the measured rates agree with other tools, and do fitted limits tell mixes that were not fitted?

    python -m benchmarks.machine --nvme-dir /mnt/nvme/scratch [--pairs 15] [--json FILE]

Everything is paired: the two things that are compared run right after one another, in turn, and the median of their
ratios counts, since a shared machine drifts by more than the differences sought.

    read, write     tierplan's store, ops of 512 MiB, against fio (psync, the same requests in flight), both O_DIRECT
    copy            what `gpu0.h2d` is measured with against one large plain copy
    mixes           time to read R and write W bytes side by side, against the prediction from the fitted limit;
                    fitted is only the case where both go on all the time with equal sizes of op
    twice           two measurements in a row: do they agree within the spreads they report?
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.models import MIB
from benchmarks.records import Record, about, arguments, in_turns, save
from tierplan.runtime.execution.device import Device
from tierplan.runtime.execution.threads import limit_this_thread
from tierplan.runtime.measure.limits import Fit, LimitPrior, Mix, fit_limits
from tierplan.runtime.measure.loads import Load, Sizes, loads
from tierplan.runtime.measure.machine import measure_description
from tierplan.runtime.measure.timing import StreamThreads
from tierplan.runtime.memory.arena import map_host

WINDOW_S = 1.0
DRIVE = ("nvme.read", "nvme.write")
MIXES = ((1, 1), (3, 1), (1, 3), (6, 1), (1, 6))
"""Read bytes : written bytes."""


def fio(
    path: Path, verb: str, size_bytes: int, request_bytes: int, num_threads: int, window_s: float = WINDOW_S
) -> float:
    """Bytes per second that fio moves with requests of that size, one in flight per thread.

    Its buffers lie in huge pages, as those of the store do: with 4 KiB pages a request is cut into so many pieces that
    fio reaches half of this.
    """
    done = subprocess.run(
        ["fio", "--output-format=json", "--name=x", f"--filename={path}", f"--rw={verb}", "--direct=1",
         "--ioengine=psync", f"--bs={request_bytes}", f"--size={size_bytes // num_threads}", f"--numjobs={num_threads}",
         f"--offset_increment={size_bytes // num_threads}", "--thread", "--time_based",
         f"--runtime={window_s * 1000:.0f}ms", "--group_reporting", "--invalidate=0", "--fallocate=none",
         "--iomem_align=2M", "--scramble_buffers=0"],
        env={**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    return float(json.loads(done.stdout)["jobs"][0][verb]["bw_bytes"])


def drives_against_fio(
    threads: StreamThreads, typical: dict[str, Load], folder: Path, size_bytes: int, pairs: int
) -> dict[str, list[float]]:
    path = folder / "fio.tmp"
    fio(path, "write", size_bytes, 8 * MIB, 2)  # lays the file out
    results = {}
    for stream in DRIVE:
        ours = partial(alone, threads, typical[stream], WINDOW_S)
        theirs = partial(fio, path, stream.split(".")[1], size_bytes, 8 * MIB, 2)
        results[stream] = [a / b for a, b in in_turns(ours, theirs, pairs)]
    return results


def alone(threads: StreamThreads, load: Load, window_s: float) -> float:
    return threads.rates([load], window_s)[0]


def copies_against_plain(threads: StreamThreads, typical: dict[str, Load], pairs: int) -> list[float]:
    """The measured copy against one copy of 512 MiB, both by one thread."""
    size = 512 * MIB
    source, target = map_host(size), map_host(size)
    source.fill_(1)
    target.fill_(1)
    plain = Load("gpu0.h2d", "bytes", float(size), lambda: target.copy_(source))
    ours, theirs = (partial(alone, threads, load, 0.3) for load in (typical["gpu0.h2d"], plain))
    return [a / b for a, b in in_turns(ours, theirs, pairs)]


def fitted_drive(threads: StreamThreads, typical: dict[str, Load], rounds: int) -> Fit:
    rows = []
    for _ in range(rounds):
        alone = [threads.rates([typical[s]], 0.5)[0] for s in DRIVE]
        both = threads.rates([typical[s] for s in DRIVE], 1.0)
        rows.append(tuple(b / a for a, b in zip(alone, both, strict=True)))
    prior = LimitPrior("nvme", dict.fromkeys(DRIVE, 1.0), 0.0, 1.2, 0.4)
    return fit_limits([Mix(DRIVE, tuple(rows))], (prior,), resamples=8)


def mix_time_s(amounts: Sequence[float], alone: Sequence[float], fit: Fit) -> float:
    """Predicted seconds until both are done: together as the fit says, then the one that is left alone."""
    speeds = fit.speeds(DRIVE)
    need = [amount / rate for amount, rate in zip(amounts, alone, strict=True)]
    first = min(n / s for n, s in zip(need, speeds, strict=True))
    return first + max(n - s * first for n, s in zip(need, speeds, strict=True))


def measured_mix_s(work: Sequence[tuple[Load, int]]) -> float:
    """Seconds until both threads have done their number of ops."""
    start = threading.Barrier(len(work) + 1)

    def repeat(load: Load, count: int) -> None:
        limit_this_thread(1)
        load.run()
        start.wait()
        for _ in range(count):
            load.run()

    threads = [threading.Thread(target=repeat, args=pair) for pair in work]
    for thread in threads:
        thread.start()
    start.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


def mixes(
    threads: StreamThreads, found: Sequence[Load], typical: dict[str, Load], fit: Fit, pairs: int
) -> dict[str, list[float]]:
    """predicted / measured time of each mix; the rates alone are measured right before each."""
    small = {s: next(x for x in found if x.stream == s and x.amount == 4 * MIB) for s in DRIVE}
    results: dict[str, list[float]] = {}
    for name, use in (("32 MiB ops", typical), ("4 MiB ops", small)):
        for read_part, write_part in MIXES:
            rows = []
            for _ in range(pairs):
                alone = [threads.rates([use[s]], 0.4)[0] for s in DRIVE]
                unit = 0.7 / (read_part / alone[0] + write_part / alone[1])  # about 0.7 s if they took turns
                counts = [
                    max(2, round(p * unit / use[s].amount)) for p, s in zip((read_part, write_part), DRIVE, strict=True)
                ]
                amounts = [c * use[s].amount for c, s in zip(counts, DRIVE, strict=True)]
                measured = measured_mix_s([(use[s], c) for s, c in zip(DRIVE, counts, strict=True)])
                after = [threads.rates([use[s]], 0.2)[0] for s in DRIVE]
                mean = [(a + b) / 2 for a, b in zip(alone, after, strict=True)]
                rows.append(mix_time_s(amounts, mean, fit) / measured)
            results[f"{name}, {read_part}:{write_part} read:written"] = rows
    return results


def twice(folder: Path, budget_s: float) -> Record:
    """Of two measurements in a row, the numbers that lie further apart than twice the larger of their spreads."""
    first, second = (measure_description(folder, budget_s=budget_s) for _ in range(2))
    outside, compared = [], 0
    for key, a in first.values.items():
        b = second.values[key]
        if a.spread is None or b.spread is None:
            continue
        x, y = (q.value[-1][1] if isinstance(q.value, tuple) else float(q.value) for q in (a, b))
        compared += 1
        if max(x, y) / min(x, y) - 1 > 2 * max(a.spread, b.spread):
            outside.append(f"{key}: {x:.4g} and {y:.4g}, spreads {a.spread:.2f} and {b.spread:.2f}")
    return {"compared": compared, "outside": outside}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--nvme-dir", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument(
        "--twice-s", type=float, default=60.0, help="budget of each of two whole measurements; 0 for none"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    report = {**about(), "pairs": args.pairs}
    sizes = Sizes(file_bytes=(4 * MIB, 32 * MIB, 512 * MIB), file_area_bytes=2048 * MIB)
    with loads((args.nvme_dir,), sizes, device=Device(), dtypes=("fp32",)) as (found, _):
        largest = {s: max((x for x in found if x.stream == s), key=lambda x: x.amount) for s in (*DRIVE, "gpu0.h2d")}
        typical = {s: next(x for x in found if x.stream == s and x.amount == 32 * MIB) for s in largest}
        threads = StreamThreads([*DRIVE, "gpu0.h2d"])
        if shutil.which("fio"):
            for stream, rows in drives_against_fio(
                threads, typical, args.nvme_dir, sizes.file_area_bytes, args.pairs
            ).items():
                show(report, f"{stream} / fio", rows)
            (args.nvme_dir / "fio.tmp").unlink()
        else:
            print("fio is not installed: drives are not compared (Debian: apt-get install fio)")
        show(report, "copy / plain large copy", copies_against_plain(threads, typical, 3 * args.pairs))
        fit = fitted_drive(threads, typical, 7)
        report["fitted"] = {"mixed": fit.limits["nvme"], "spread": fit.limit_spread["nvme"], "shares": dict(fit.shares)}
        print(f"fitted: room for both {fit.limits['nvme']:.2f} +- {fit.limit_spread['nvme']:.0%}, shares {fit.shares}")
        for name, rows in mixes(threads, found, typical, fit, max(5, args.pairs // 2)).items():
            show(report, f"predicted / measured time, {name}", rows)
        threads.close()
    if args.twice_s:
        report["twice"] = twice(args.nvme_dir, args.twice_s)
        print("twice:", report["twice"])
    save(args.json, report)


def show(report: Record, name: str, rows: Sequence[float]) -> None:
    low, high = min(rows), max(rows)
    print(f"{name}: median {statistics.median(rows):.3f} of {len(rows)}, from {low:.3f} to {high:.3f}", flush=True)
    report[name] = {"median": statistics.median(rows), "ratios": list(rows)}


if __name__ == "__main__":
    main()
