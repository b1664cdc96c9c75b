"""What a measurement becomes: a description of the machine, every number with its spread and where it is from."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import torch

from tierplan.hwmodels.description import Basis, Description, Limit, Quantity, find_key
from tierplan.hwmodels.detect import MEMORY_LIMITS
from tierplan.hwmodels.names import COMPUTE, D2H, H2D, HOST_ADAM, NVME_LIMIT, NVME_READ, NVME_WRITE, parse_stream
from tierplan.runtime.execution.device import Device
from tierplan.runtime.measure.limits import Fit, Mix
from tierplan.runtime.measure.loads import BLOCK, GIB, MIB, Load, Sizes, block_work
from tierplan.runtime.measure.timing import summary
from tierplan.runtime.memory.arena import system_bytes
from tierplan.runtime.memory.files import room_bytes

Alone = dict[Load, list[float]]
"""Work per second of each load with nothing beside it, by round."""

THOROUGH_BYTES = 16 * GIB
KEYS = {
    H2D: "link.h2d",
    D2H: "link.d2h",
    NVME_READ: "nvme.read",
    NVME_WRITE: "nvme.write",
    HOST_ADAM: "host.adam",
}


def describe(
    name: str,
    alone: Alone,
    loaded: Alone,
    fit: Fit,
    mixes: Sequence[Mix],
    folders: tuple[Path, ...],
    device: Device,
    sizes: Sizes,
    *,
    dtype: str,
    remarks: list[str],
) -> Description:
    """The machine that these rates and this fit describe. `dtype` is that of the block that was run as a whole."""
    date, taken = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", len(next(iter(alone.values())))
    source = f"tierplan machine measure, {date}, {taken} rounds, torch {torch.__version__}"
    values = _capacities(folders, device, source) | _compute_values(alone, sizes, device, dtype, source)
    for stream, key in KEYS.items():
        rows = {load.amount: rates for load, rates in alone.items() if load.stream == stream}
        if rows:
            latency, values[key] = _latency_and_curve(rows, source)
            beside = [_latency(load.amount, rates, source) for load, rates in loaded.items() if load.stream == stream]
            for when, latencies in (("latency", [latency]), ("loaded_latency", beside)):
                known = values.get(full := f"{key.split('.')[0]}.{when}")
                for one in latencies:
                    if known is None or float(known.value) < float(one.value):  # type: ignore[arg-type]  # numbers
                        values[full] = one
    if NVME_LIMIT in fit.limits:
        values["nvme.mixed"] = Quantity(
            min(fit.limits[NVME_LIMIT], find_key("nvme.mixed").most), "measured", source, fit.limit_spread[NVME_LIMIT]
        )
        values["nvme.read_share"] = Quantity(fit.shares[NVME_READ], "measured", source)
        values["nvme.write_share"] = Quantity(fit.shares[NVME_WRITE], "measured", source)
    limits = tuple(
        Limit(limit, fit.limits[limit], takes, source, "measured", fit.limit_spread[limit])
        for limit, takes in fit.takes.items()
        if limit != NVME_LIMIT
    )
    speeds = {
        " + ".join(c.streams): [
            [round(x, 3) for x in both] for both in zip(fit.speeds(c.streams), c.medians(), strict=True)
        ]
        for c in mixes
    }
    unfitted = [c for c in mixes if len(c.streams) > 2]
    errors = list(map(abs, fit.errors(unfitted, [c.medians() for c in unfitted])))
    return Description(
        name=name,
        summary=f"{platform.node() or 'this machine'}, measured {date}",
        values=values,
        limits=limits,
        shares={s: v for s, v in fit.shares.items() if not parse_stream(s).is_drive},
        notes={
            "mixes_predicted_and_measured_speed": speeds,
            "worst_error_of_a_pair": round(fit.worst_error, 3),
            "median_error_of_mixes_not_fitted": round(median(errors), 3) if errors else "not measured",
            "drives": _drive_note(sizes) if folders else "not measured",
            "remarks": remarks,
        },
    )


def _drive_note(sizes: Sizes) -> str:
    return (
        f"reads and writes turned over {sizes.file_area_bytes / GIB:.3g} GiB of one file per folder with O_DIRECT; "
        "a drive whose write cache holds more than that writes slower in the long run"
        + ("" if sizes.file_area_bytes >= THOROUGH_BYTES else ": measure with --thorough")
    )


def _compute_values(alone: Alone, sizes: Sizes, device: Device, dtype: str, source: str) -> dict[str, Quantity]:
    values: dict[str, Quantity] = {}
    compute = {load: rates for load, rates in alone.items() if load.stream == COMPUTE}
    for kind in dict.fromkeys(load.kind for load in compute):
        rows = {load.op_amount or load.amount: rates for load, rates in compute.items() if load.kind == kind}
        if kind == "ops":
            per_s, half = summary(next(iter(rows.values())))
            values["gpu.latency"] = Quantity(1 / per_s, "measured", f"{source}: forward of a tiny block", half)
        elif kind != BLOCK:
            values[f"gpu.{kind.removesuffix('_flops')}"] = _curve(rows, source)
    values["gpu.elementwise"] = _elementwise(compute, block_work(sizes, dtype, device), source)
    return values


LEAST_REST = 0.05


def _elementwise(compute: Alone, work: dict[str, float], source: str) -> Quantity:
    """The rate that makes up, with matmuls and attention of the same width, the time of the whole block.

    It is never taken to be less than a twentieth of the block's time, whatever the noise.
    """
    block = next(rates for load, rates in compute.items() if load.kind == BLOCK)
    start_s = [1 / r for load, rates in compute.items() if load.kind == "ops" for r in rates]
    parts = {}
    for kind in work:
        alike = [(load, rates) for load, rates in compute.items() if load.kind == kind]
        if alike:
            parts[kind] = min(alike, key=lambda pair: abs(pair[0].amount - work[kind]))[1]
    rates = []
    for turn, per_s in enumerate(block):
        block_s = 1 / per_s
        rest_s = block_s - 2 * median(start_s) - sum(work[kind] / parts[kind][turn] for kind in parts)
        rates.append(work["elementwise_bytes"] / max(rest_s, LEAST_REST * block_s))
    rate, half = summary(rates)
    return Quantity(rate, "measured", f"{source}: what a block takes beyond its matmuls and attention", half)


def free_bytes(folders: Sequence[Path]) -> int:
    """For data that is dealt out equally to these folders, which need not be there yet; a drive may have several."""
    existing = [next(f for f in (folder, *folder.parents) if f.exists()) for folder in map(Path.absolute, folders)]
    shares = Counter(map(_drive_of, existing))
    return min((room_bytes(f) * len(existing) // shares[_drive_of(f)] for f in existing), default=0)


def _drive_of(folder: Path) -> int:
    return folder.stat().st_dev


def _latency_and_curve(rows: dict[float, list[float]], source: str) -> tuple[Quantity, Quantity]:
    """The time of the smallest op, and the rates of the others beyond it."""
    (least, rates), *others = sorted(rows.items())
    latency = _latency(least, rates, source)
    latency_s = float(latency.value)  # type: ignore[arg-type]  # a number
    # an op is never taken to be more than half overhead, so that noise in the smallest cannot blow up the next
    net = {a: [a / max(a / r - latency_s, 0.5 * a / r) for r in rates] for a, rates in others}
    return latency, _curve(net, source)


def _latency(amount: float, rates: list[float], source: str) -> Quantity:
    per_s, half = summary(rates)
    return Quantity(amount / per_s, "measured", f"{source}: {amount:,.0f} units of work", half)


def _curve(rows: dict[float, list[float]], source: str) -> Quantity:
    """One number, or a curve over the amount, with the spread of its largest amount."""
    summaries = {amount: summary(rates) for amount, rates in sorted(rows.items())}
    spread = list(summaries.values())[-1][1]
    if len(summaries) == 1:
        return Quantity(next(iter(summaries.values()))[0], "measured", source, spread)
    return Quantity(tuple((amount, rate) for amount, (rate, _) in summaries.items()), "measured", source, spread)


def _capacities(folders: tuple[Path, ...], device: Device, source: str) -> dict[str, Quantity]:
    memory = _host_memory_bytes()
    rows: list[tuple[str, int, Basis, str]] = []
    if device.is_cuda:
        total = torch.cuda.get_device_properties(device.torch_device).total_memory
        rows.append(("gpu.capacity", total, "measured", f"{source}: {torch.cuda.get_device_name(device.torch_device)}"))
        rows.append(("host.capacity", memory, "measured", source))
    else:
        budget = memory // 4 // MIB * MIB
        rest = f"{source}: memory of the system less the device tier's budget"
        rows += [
            ("gpu.capacity", budget, "assumed", "no GPU: the device tier is a budget in host memory, a quarter of it"),
            ("gpu.reserve", 0, "assumed", "a budget has no context"),
            ("host.capacity", memory - budget, "measured", rest),
        ]
    eighth = "for the system, Python and the framework: an eighth, at most 8 GiB"
    rows += [
        ("host.reserve", min(8 * GIB, memory // 8), "assumed", eighth),
        ("host.cores", len(os.sched_getaffinity(0)), "measured", source),
        ("nvme.drives", 1 if folders else 0, "measured", f"{source}; all folders together count as one"),
    ]
    if folders:
        nine_tenths = f"{source}: nine tenths of what is free where the NVMe tier is"
        rows.append(("nvme.capacity", free_bytes(folders) // 10 * 9, "measured", nine_tenths))
    return {key: Quantity(float(value), basis, why) for key, value, basis, why in rows}


def _host_memory_bytes() -> int:
    """Memory of the system, or of the control group that this process lives in, whichever is less."""
    total = system_bytes()
    for path in MEMORY_LIMITS:
        with suppress(OSError, ValueError):  # not there, or `max`
            total = min(total, int(path.read_text(encoding="utf-8")))
    return total
