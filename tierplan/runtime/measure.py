"""Measures this machine: what every stream does alone, and how much those that run together slow each other down.

    machine = measure("/mnt/nvme/scratch", budget_s=60)       # also kept as the machine named `here`

Everything runs in rounds, so that drift of the machine shows as spread. Rates are medians over rounds; limits are
fitted to the speeds of every pair of streams (`tierplan.runtime.measure_limits`). Errors:

    MeasurementError(ValueError)     a request that cannot be measured; says why and what to do
"""

from __future__ import annotations

import itertools
import os
import platform
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from tierplan.hwmodels.build import build
from tierplan.hwmodels.catalog import HERE, here_path
from tierplan.hwmodels.description import Description, Limit, Quantity, write_description
from tierplan.hwmodels.machine import Machine
from tierplan.runtime.measure_limits import Company, Fit, LimitPrior, fit_limits
from tierplan.runtime.measure_loads import MIB, Load, Sizes, loads
from tierplan.runtime.measure_timing import Crew, summary
from tierplan.sim.trace import write_atomically

__all__ = ["MeasurementError", "Progress", "measure", "measure_description"]

Progress = Callable[[str, float], None]
"""Called with what is being measured and the part that is done, 0 to 1."""

GIB = 1 << 30
LEAST_WINDOW_S = 0.03
FIT_S = 2.5
TYPICAL_OP_S = 0.03


class MeasurementError(ValueError):
    """A request that cannot be measured."""


@dataclass(frozen=True, slots=True)
class _Plan:
    rounds: int
    sizes: Sizes


def measure(
    nvme_dir: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None,
    *,
    budget_s: float = 60.0,
    device: str = "auto",
    dtypes: Sequence[str] = (),
    name: str = HERE,
    save: bool = True,
    progress: Progress | None = None,
) -> Machine:
    """This machine, measured in about `budget_s` seconds; `save` keeps it as the machine named `here`.

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
    description = measure_description(
        nvme_dir, budget_s=budget_s, device=device, dtypes=dtypes, name=name, progress=progress
    )
    if save:
        write_atomically(here_path(), write_description(description))
    return build(description)


def measure_description(
    nvme_dir: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None,
    *,
    budget_s: float = 60.0,
    device: str = "auto",
    dtypes: Sequence[str] = (),
    name: str = HERE,
    progress: Progress | None = None,
) -> Description:
    """As `measure`, but the description: every number with its spread. Saves nothing."""
    began = time.monotonic()
    if budget_s < 5:
        raise MeasurementError(f"budget_s is {budget_s}; every stream needs several windows: give 10 seconds or more")
    folders = _folders(nvme_dir)
    chosen = _device(device)
    kinds = tuple(dtypes) or (("bf16", "fp32") if chosen.type == "cuda" or _has_bf16() else ("fp32",))
    plan = _plan(budget_s, folders, chosen)
    report = progress or (lambda what, part: None)
    report("preparing memory and files", 0.0)
    with loads(folders, plan.sizes, device=chosen, dtypes=kinds) as (found, notes):
        crew = Crew(list(dict.fromkeys(load.stream for load in found)))
        try:
            seconds = _warm_up(crew, found)
            left_s = budget_s - (time.monotonic() - began) - FIT_S
            alone, companies = _rounds(crew, found, seconds, plan, left_s, report)
        finally:
            crew.close()
    report("fitting shared limits", 0.97)
    streams = tuple(dict.fromkeys(load.stream for load in found))
    fit = fit_limits(companies, _priors(streams, alone, chosen), resamples=8 if budget_s < 40 else 20)
    date = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    source = f"tierplan machine measure, {date}, {plan.rounds} rounds, torch {torch.__version__}"
    description = _describe(name, alone, fit, companies, folders, chosen, plan, source, notes)
    report("done", 1.0)
    return description


# ---- what to measure ----


def _folders(nvme_dir: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None) -> tuple[Path, ...]:
    if nvme_dir is None:
        return ()
    several = [nvme_dir] if isinstance(nvme_dir, (str, os.PathLike)) else list(nvme_dir)
    return tuple(Path(folder) for folder in several)


def _device(device: str) -> torch.device:
    if device not in ("auto", "cuda", "cpu"):
        raise MeasurementError(f"device is {device!r}; choose auto, cuda or cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise MeasurementError(
            "device is 'cuda', but PyTorch sees no GPU; check the driver, or measure with device cpu"
        )
    return torch.device("cuda:0" if device != "cpu" and torch.cuda.is_available() else "cpu")


def _has_bf16() -> bool:
    """Whether the CPU multiplies bf16 in hardware; elsewhere it is an emulation, slower than fp32."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags or "bf16" in flags


def _plan(budget_s: float, folders: tuple[Path, ...], device: torch.device) -> _Plan:
    rounds = 3 if budget_s < 40 else 5 if budget_s < 300 else 9
    sizes = Sizes()
    if device.type == "cuda":
        sizes = replace(sizes, hidden=(1024, 4096, 8192), head_dim=128, copy_bytes=(256 << 10, 4 * MIB, 64 * MIB),
                        adam_parameters=(1 << 20, 1 << 25), area_bytes=2 * GIB)  # fmt: skip
    free = min((shutil.disk_usage(_existing(f)).free for f in folders), default=0) * len(folders)
    area = GIB if budget_s < 40 else 4 * GIB if budget_s < 600 else max(4 * GIB, min(64 * GIB, free // 4))
    if folders and free < 2 * area:
        area = max(GIB // 4, free // 4 // MIB * MIB)
        if free < GIB:
            raise MeasurementError(
                f"{folders[0]} has {free:,} bytes free, but measuring needs 1 GiB; free space, or give another folder"
            )
    return _Plan(rounds, replace(sizes, file_area_bytes=area))


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    folder = folder.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def _warm_up(crew: Crew, found: Sequence[Load]) -> dict[str, float]:
    """Every load twice: threads start, kernels are chosen, pages are touched. Seconds of one op, by load."""
    return {load.name: load.amount / crew.rates([load], 0.0)[0] for load in found}


def _rounds(
    crew: Crew, found: Sequence[Load], seconds: dict[str, float], plan: _Plan, budget_s: float, report: Progress
) -> tuple[dict[tuple[str, str, float], list[float]], list[Company]]:
    """Rates alone by (stream, kind, amount), and the speeds of each pair of streams, by round."""
    typical = _typical(found, seconds)
    pairs = list(itertools.combinations(sorted(typical), 2))
    window_s = _window_s(found, typical, len(pairs), seconds, budget_s / plan.rounds)
    alone: dict[tuple[str, str, float], list[float]] = {(x.stream, x.kind, x.amount): [] for x in found}
    speeds: dict[tuple[str, ...], list[tuple[float, ...]]] = {pair: [] for pair in pairs}
    total, done = plan.rounds * (len(found) + len(pairs)), 0
    for _ in range(plan.rounds):
        for load in found:
            report(f"{load.stream} alone", 0.05 + 0.9 * done / total)
            alone[load.stream, load.kind, load.amount].append(crew.rates([load], window_s)[0])
            done += 1
        for pair in pairs:
            report(f"{pair[0]} with {pair[1]}", 0.05 + 0.9 * done / total)
            both = [typical[stream] for stream in pair]
            single = [crew.rates([load], window_s)[0] for load in both]
            together = crew.rates(both, 2 * window_s)
            speeds[pair].append(tuple(t / s for t, s in zip(together, single, strict=True)))
            done += 1
    return alone, [Company(pair, tuple(rows)) for pair, rows in speeds.items()]


def _window_s(
    found: Sequence[Load], typical: dict[str, Load], num_pairs: int, seconds: dict[str, float], round_s: float
) -> float:
    """How long each thing is timed: a round has each load once, and each pair with both of its streams alone.

    Every timing also runs an op to warm up, and ends with a whole op, so it takes about two ops more than its window.
    """
    ops_s = sum(2 * seconds[load.name] for load in found)
    ops_s += sum(6 * seconds[load.name] for load in typical.values()) * (len(typical) - 1)
    return max(LEAST_WINDOW_S, (round_s - ops_s) / (len(found) + 4 * num_pairs))


def _typical(found: Sequence[Load], seconds: dict[str, float]) -> dict[str, Load]:
    """The load of each stream that stands for it in company: the largest that a window holds several of."""
    typical: dict[str, Load] = {}
    for load in found:
        if load.stream.endswith(".compute") and not load.kind.startswith("matmul"):
            continue
        known = typical.get(load.stream)
        if known is None or (
            load.kind == known.kind and known.amount < load.amount and seconds[load.name] < TYPICAL_OP_S
        ):
            typical[load.stream] = load
    return typical


# ---- what may be shared ----


def _priors(
    streams: Sequence[str], alone: dict[tuple[str, str, float], list[float]], device: torch.device
) -> list[LimitPrior]:
    have = set(streams)
    cores = os.cpu_count() or 1
    one = 1.0 / cores
    priors = []
    if {"nvme.read", "nvme.write"} <= have:
        priors.append(LimitPrior("nvme", {"nvme.read": 1.0, "nvme.write": 1.0}, 0.0, 1.2, 0.4))
    if device.type == "cuda":
        priors.append(LimitPrior("link", {"gpu0.h2d": 1.0, "gpu0.d2h": 1.0}, 0.0, 1.8, 0.3))
    else:
        takes = {"gpu0.compute": 1.0, "gpu0.h2d": one, "gpu0.d2h": one, "host.adam": one}
        takes |= {s: 0.3 * one for s in ("nvme.read", "nvme.write") if s in have}
        priors.append(LimitPrior("cores", takes, 0.5))
    # DRAM traffic at full speed: copies read and write, I/O moves each byte once, Adam about 30 bytes per parameter
    top = {
        s: max(statistics.median(v) for (t, _, _), v in alone.items() if t == s) for s in have if s != "gpu0.compute"
    }
    weight = {"gpu0.h2d": 2.0, "gpu0.d2h": 2.0, "nvme.read": 1.0, "nvme.write": 1.0, "host.adam": 30.0}
    if device.type == "cuda":
        weight |= {"gpu0.h2d": 1.0, "gpu0.d2h": 1.0}
    traffic = {s: top[s] * weight[s] for s in top}
    busiest = max(traffic.values(), default=1.0)
    takes = {s: t / busiest for s, t in traffic.items()}
    if device.type != "cuda":
        takes["gpu0.compute"] = 0.3
    priors.append(LimitPrior("memory", takes, 0.3, 1.5, 0.4))
    return priors


# ---- what was found ----


def _describe(
    name: str,
    alone: dict[tuple[str, str, float], list[float]],
    fit: Fit,
    companies: Sequence[Company],
    folders: tuple[Path, ...],
    device: torch.device,
    plan: _Plan,
    source: str,
    notes: tuple[str, ...],
) -> Description:
    values = _capacities(folders, device, plan, source)
    keys = {"gpu0.h2d": "link.h2d", "gpu0.d2h": "link.d2h", "nvme.read": "nvme.read", "nvme.write": "nvme.write",
            "host.adam": "host.adam"}  # fmt: skip
    for stream, kind in dict.fromkeys((s, k) for s, k, _ in alone):
        rows = {a: rates for (s, k, a), rates in alone.items() if (s, k) == (stream, kind)}
        if kind == "ops":
            per_s, half = summary(rows[1.0])
            values["gpu.latency"] = Quantity(1 / per_s, "measured", f"{source}: forward of a tiny block", half)
        elif stream.endswith(".compute"):
            key = {"elementwise_bytes": "gpu.elementwise", "parameters": "gpu.adam"}.get(
                kind, f"gpu.{kind.removesuffix('_flops')}"
            )
            values[key] = _curve(rows, source)
        else:
            latency, values[keys[stream]] = _latency_and_curve(rows, source)
            section = keys[stream].split(".")[0]
            known = values.get(f"{section}.latency")
            if known is None or float(known.value) < float(latency.value):  # type: ignore[arg-type]  # numbers
                values[f"{section}.latency"] = latency
    if "nvme" in fit.limits:
        values["nvme.mixed"] = Quantity(fit.limits["nvme"], "measured", source, fit.limit_spread["nvme"])
        values["nvme.read_share"] = Quantity(fit.shares["nvme.read"], "measured", source)
        values["nvme.write_share"] = Quantity(fit.shares["nvme.write"], "measured", source)
    limits = tuple(
        Limit(name, fit.limits[name], takes, source, "measured", fit.limit_spread[name])
        for name, takes in fit.takes.items()
        if name != "nvme"
    )
    pairs = {
        " + ".join(c.streams): [
            [round(p, 3), round(m, 3)] for p, m in zip(fit.speeds(c.streams), c.medians(), strict=True)
        ]
        for c in companies
    }
    written = plan.sizes.file_area_bytes
    drive_note = f"reads and writes turned over {written / GIB:.3g} GiB of one file with O_DIRECT"
    if folders and written < 16 * GIB:
        drive_note += "; a drive with a larger write cache writes slower in the long run: measure with --thorough"
    return Description(
        name=name,
        summary=f"{platform.node() or 'this machine'}, measured {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        values=values,
        limits=limits,
        shares={s: v for s, v in fit.shares.items() if not s.startswith("nvme.")},
        notes={
            "pairs_predicted_and_measured_speed": pairs,
            "worst_error_of_a_pair": round(fit.worst_error, 3),
            "drives": drive_note if folders else "not measured",
            "remarks": list(notes),
        },
    )


def _latency_and_curve(rows: dict[float, list[float]], source: str) -> tuple[Quantity, Quantity]:
    """The time of the smallest op, and the rates of the others beyond it."""
    (least, rates), *others = sorted(rows.items())
    per_s, half = summary(rates)
    latency_s = least / per_s
    # an op is never taken to be more than half overhead, so that noise in the smallest cannot blow up the next
    net = {a: [a / max(a / r - latency_s, 0.5 * a / r) for r in rates] for a, rates in others}
    return Quantity(latency_s, "measured", f"{source}: {least:,.0f} units of work", half), _curve(net, source)


def _curve(rows: dict[float, list[float]], source: str) -> Quantity:
    """One number, or a curve over the amount, with the spread of its largest amount."""
    summaries = {amount: summary(rates) for amount, rates in sorted(rows.items())}
    spread = max(half for _, half in summaries.values())
    if len(summaries) == 1:
        return Quantity(next(iter(summaries.values()))[0], "measured", source, spread)
    return Quantity(tuple((amount, rate) for amount, (rate, _) in summaries.items()), "measured", source, spread)


def _capacities(folders: tuple[Path, ...], device: torch.device, plan: _Plan, source: str) -> dict[str, Quantity]:
    memory = _host_memory_bytes()
    values: dict[str, Quantity] = {}
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        values["gpu.capacity"] = Quantity(float(total), "measured", f"{source}: {torch.cuda.get_device_name(device)}")
        values["host.capacity"] = Quantity(float(memory), "measured", source)
    else:
        budget = memory // 4 // MIB * MIB
        values["gpu.capacity"] = Quantity(
            float(budget), "assumed", "no GPU: the device tier is a budget in host memory, a quarter of it"
        )
        values["gpu.reserve"] = Quantity(0.0, "assumed", "a budget has no context")
        values["host.capacity"] = Quantity(
            float(memory - budget), "measured", f"{source}: memory of the system less the device tier's budget"
        )
    values["host.reserve"] = Quantity(
        float(min(8 * GIB, memory // 8)),
        "assumed",
        "for the system, Python and the framework: an eighth, at most 8 GiB",
    )
    values["host.cores"] = Quantity(float(os.cpu_count() or 1), "measured", source)
    values["nvme.drives"] = Quantity(
        float(1 if folders else 0), "measured", f"{source}; all folders together count as one"
    )
    if folders:
        free = min(shutil.disk_usage(_existing(f)).free for f in folders) * len(folders)
        values["nvme.capacity"] = Quantity(
            float(free // 10 * 9),
            "measured",
            f"{source}: nine tenths of what is free in {', '.join(map(str, folders))}",
        )
    return values


def _host_memory_bytes() -> int:
    """Memory of the system, or of the control group that this process lives in, whichever is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8").strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdecimal() else total
