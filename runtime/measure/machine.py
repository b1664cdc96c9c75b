"""Measures this machine: what every stream does alone, and how much those that run together slow each other down.

    description = measure_description("/mnt/nvme/scratch", budget_s=60)

Everything runs in rounds, so that drift of the machine shows as spread. Rates are medians over rounds; limits are
fitted to the speeds of every pair of streams (`tierplan.runtime.measure.limits`). Errors:

    MeasurementError(ValueError)     a request that cannot be measured; says why and what to do
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from tierplan.hwmodels.catalog import HERE
from tierplan.hwmodels.description import Description
from tierplan.hwmodels.names import COMPUTE, CORES_LIMIT, D2H, H2D, HOST_ADAM, NVME_LIMIT, NVME_READ, NVME_WRITE
from tierplan.runtime.execution.device import Device, device_named, open_device
from tierplan.runtime.measure.limits import LimitPrior, Mix, fit_limits
from tierplan.runtime.measure.loads import GIB, MIB, Load, Sizes, loads
from tierplan.runtime.measure.report import Alone, describe, free_bytes
from tierplan.runtime.measure.timing import OtherPrograms, StreamThreads, summary
from tierplan.runtime.memory.files import Folders, paths_of

Progress = Callable[[str, float], None]
"""Called with what is being measured and the part that is done, 0 to 1."""

LEAST_BUDGET_S = 5.0
LEAST_WINDOW_S = 0.03
FIT_S = 2.5
LEAST_ROUNDS = 2
CHECKS = (
    (COMPUTE, HOST_ADAM, NVME_READ),
    (COMPUTE, NVME_READ, NVME_WRITE),
    (COMPUTE, H2D, NVME_WRITE),
    (HOST_ADAM, NVME_READ, NVME_WRITE),
    (COMPUTE, D2H, H2D, HOST_ADAM, NVME_READ, NVME_WRITE),
)
"""Mixes of more than two streams: measured where there is time, never fitted, compared with what the limits predict."""
TYPICAL_OP_S = 0.03
NARROW = 0.025
"""A spread that is small enough: 95 % of measurements lie within twice that."""


class MeasurementError(ValueError):
    """A request that cannot be measured."""


def measure_description(
    nvme_dir: Folders | None,
    *,
    budget_s: float = 60.0,
    device: str = "auto",
    dtypes: Sequence[str] = (),
    name: str = HERE,
    progress: Progress = lambda what, part: None,
) -> Description:
    """This machine, measured in about `budget_s` seconds: every number with its spread.

    Parameters
    ----------
    nvme_dir
        Folder (or one per drive) on the drives that will be the NVMe tier; a file of about 1 GiB (4 GiB and more with
        a longer budget) is written there and removed. None leaves drives out.
    budget_s
        About 20 is the least that gives every number; above 60 more rounds and sizes are measured; from 600 on enough
        is written to leave the drives' write cache.
    device
        `auto`, `cuda`, or `cpu` (the device tier is then a budget of bytes in host memory).
    dtypes
        Of compute, the first also of the optimizer's gradients; default: what the machine is good at.
    """
    began = time.monotonic()
    if budget_s < LEAST_BUDGET_S:
        raise MeasurementError(
            f"budget_s is {budget_s}; every stream needs several windows: give {LEAST_BUDGET_S:.0f} seconds or more"
        )
    folders = () if nvme_dir is None else tuple(paths_of(nvme_dir))
    chosen = open_device(device_named(device).replace("cuda", "cuda:0"))
    kinds = tuple(dtypes) or (("bf16", "fp32") if chosen.is_cuda or _has_bf16() else ("fp32",))
    num_rounds, sizes = _plan(budget_s, folders, chosen)
    progress("preparing memory and files", 0.0)
    with chosen.planned_kernels(), loads(folders, sizes, device=chosen, dtypes=kinds) as (all_loads, notes):
        streams = tuple(dict.fromkeys(load.stream for load in all_loads))
        with StreamThreads(streams, is_beside_gpu=chosen.is_asynchronous) as threads:
            # twice: threads start, kernels are chosen, pages are touched
            op_s = {load: load.amount / threads.rates([load], 0.0)[0] for load in all_loads}
            left_s = budget_s - (time.monotonic() - began) - FIT_S
            others = OtherPrograms()
            alone, loaded, mixes = _rounds(threads, all_loads, op_s, num_rounds, left_s, progress)
    progress("fitting shared limits", 0.97)
    pairs = [mix for mix in mixes if len(mix.streams) == 2]
    fit = fit_limits(
        pairs, _priors(streams, alone, chosen), resamples=8 if budget_s < 40 else 20, until_s=began + budget_s
    )
    remarks = [*notes, others.text()]
    description = describe(name, alone, loaded, fit, mixes, folders, chosen, sizes, dtype=kinds[0], remarks=remarks)
    progress("done", 1.0)
    return description


# ---- what to measure ----


def _has_bf16() -> bool:
    """Whether the CPU multiplies bf16 in hardware; elsewhere it is an emulation, slower than fp32."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags or "bf16" in flags


def _plan(budget_s: float, folders: tuple[Path, ...], device: Device) -> tuple[int, Sizes]:
    """The number of rounds, and how much is measured in each."""
    num_rounds = 3 if budget_s < 40 else 5 if budget_s < 300 else 9
    sizes = Sizes()
    if budget_s < 40:
        sizes = replace(sizes, hidden=sizes.hidden[:-1], file_bytes=sizes.file_bytes[:-1])
    if device.is_cuda:
        sizes = replace(
            sizes,
            hidden=(1024, 4096, 8192),
            block_hidden=4096,
            tokens=2048,
            head_dim=128,
            copy_bytes=(4 << 10, 256 << 10, 4 * MIB, 64 * MIB),
            adam_parameters=(1 << 10, 1 << 20, 1 << 25),
            area_bytes=2 * GIB,
        )
    free = free_bytes(folders)
    area = GIB if budget_s < 40 else 4 * GIB if budget_s < 600 else max(4 * GIB, min(64 * GIB, free // 4))
    if folders and free < 2 * area:
        area = max(GIB // 4, free // 4 // MIB * MIB)
        if free < GIB:
            raise MeasurementError(
                f"{folders[0]} has {free:,} bytes free, but measuring needs 1 GiB; free space, or give another folder"
            )
    return num_rounds, replace(sizes, file_area_bytes=area)


def _rounds(
    threads: StreamThreads,
    all_loads: Sequence[Load],
    op_s: dict[Load, float],
    num_rounds: int,
    budget_s: float,
    progress: Progress,
) -> tuple[Alone, Alone, list[Mix]]:
    """Rates of each load alone, of the least load of each stream beside busy cores, and the speeds of each pair of
    streams (and of `CHECKS`), by round. Once all rates are known as well as is claimed, no more rounds are taken."""
    typical = _typical(all_loads, op_s)
    pairs: list[tuple[str, ...]] = list(itertools.combinations(sorted(typical), 2))
    if num_rounds > LEAST_ROUNDS + 1:
        pairs += [mix for mix in CHECKS if set(mix) <= set(typical)]
    window_s = _window_s(all_loads, typical, len(pairs), op_s, budget_s / num_rounds)
    alone: Alone = {load: [] for load in all_loads}
    speeds: dict[tuple[str, ...], list[tuple[float, ...]]] = {pair: [] for pair in pairs}
    least = {x.stream: x for x in sorted(all_loads, key=lambda x: -x.amount) if x.stream != COMPUTE}
    loaded: Alone = {load: [] for load in least.values()}
    total, done = num_rounds * (len(all_loads) + len(pairs)), 0
    began = time.monotonic()
    for turn in range(num_rounds):
        if turn >= LEAST_ROUNDS and (time.monotonic() - began) * (turn + 1) / turn > 1.05 * budget_s:
            break  # others use the machine, so that one more would end late
        if turn > LEAST_ROUNDS and all(summary(rates)[1] <= NARROW for rates in alone.values()):
            break
        for load in all_loads:
            progress(f"{load.stream} alone", 0.05 + 0.9 * done / total)
            alone[load].append(threads.rates([load], window_s)[0])
            done += 1
        for load in loaded:
            progress(f"{load.stream} beside busy cores", 0.05 + 0.9 * done / total)
            loaded[load].append(threads.rates([load, typical[COMPUTE]], window_s)[0])
        for pair in pairs:
            progress(" with ".join(pair), 0.05 + 0.9 * done / total)
            both = [typical[stream] for stream in pair]
            single = [threads.rates([load], window_s)[0] for load in both]
            together = threads.rates(both, 2 * window_s)
            speeds[pair].append(tuple(t / s for t, s in zip(together, single, strict=True)))
            done += 1
    return alone, loaded, [Mix(pair, tuple(rows)) for pair, rows in speeds.items()]


def _window_s(
    all_loads: Sequence[Load], typical: dict[str, Load], num_pairs: int, op_s: dict[Load, float], round_s: float
) -> float:
    """How long each thing is timed: a round has each load once, and each pair with both of its streams alone.

    Every timing also runs an op to warm up, and ends with a whole op, so it takes about two ops more than its window.
    """
    ops_s = sum(2 * op_s[load] for load in all_loads)
    ops_s += sum(6 * op_s[load] for load in typical.values()) * (len(typical) - 1)
    ops_s += 2 * len(typical) * op_s[typical[COMPUTE]]
    return max(LEAST_WINDOW_S, (round_s - ops_s) / (len(all_loads) + len(typical) + 4 * num_pairs))


def _typical(all_loads: Sequence[Load], op_s: dict[Load, float]) -> dict[str, Load]:
    """The load of each stream that stands for it in mix: the largest that a window holds several of."""
    typical: dict[str, Load] = {}
    for load in all_loads:
        if load.stream == COMPUTE and not load.kind.startswith("matmul"):
            continue
        known = typical.get(load.stream)
        if known is None or (load.kind == known.kind and known.amount < load.amount and op_s[load] < TYPICAL_OP_S):
            typical[load.stream] = load
    return typical


# ---- what may be shared ----


def _priors(streams: Sequence[str], alone: Alone, device: Device) -> list[LimitPrior]:
    have, one = set(streams), 1.0 / len(os.sched_getaffinity(0))
    priors = []
    if {NVME_READ, NVME_WRITE} <= have:
        priors.append(LimitPrior(NVME_LIMIT, {NVME_READ: 1.0, NVME_WRITE: 1.0}, 0.0, 1.2, 0.4))
    if device.is_cuda:
        priors.append(LimitPrior("link", {H2D: 1.0, D2H: 1.0}, 0.0, 1.8, 0.3))
    else:
        takes = {COMPUTE: 1.0, H2D: one, D2H: one, HOST_ADAM: one}
        takes |= {s: 0.3 * one for s in (NVME_READ, NVME_WRITE) if s in have}
        priors.append(LimitPrior(CORES_LIMIT, takes, 0.5))
    # DRAM traffic at full speed: copies read and write, I/O moves each byte once, Adam about 30 bytes per parameter
    top = {s: max(statistics.median(v) for x, v in alone.items() if x.stream == s) for s in have if s != COMPUTE}
    weight = {H2D: 2.0, D2H: 2.0, NVME_READ: 1.0, NVME_WRITE: 1.0, HOST_ADAM: 30.0}
    if device.is_cuda:
        weight |= {H2D: 1.0, D2H: 1.0}
    traffic = {s: top[s] * weight[s] for s in top}
    busiest = max(traffic.values(), default=1.0)
    takes = {s: t / busiest for s, t in traffic.items()}
    if not device.is_cuda:
        takes[COMPUTE] = 0.3
    priors.append(LimitPrior("memory", takes, 0.3, 1.5, 0.4))
    return priors
