"""What somebody measured of a step: seconds, DeepSpeed's wall clock breakdown, or a trace of PyTorch's profiler."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from tierplan.sim.analysis.phases import Phases
from tierplan.sim.output.text import format_s


class MeasuredStepError(ValueError):
    """A log or trace that holds no step; says what to record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """One optimizer step."""

    step_s: float
    phases: Phases | None = None
    busy_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds at work, by `compute`, `h2d`, `d2h`, and `p2p` for collectives."""
    pageable_frac: float = 0.0
    """Of the bytes copied between host and GPU, those in memory that is not pinned."""


def read_log(path: str, accumulation: int, step_s: float | None = None) -> MeasuredStep:
    """The median step of a DeepSpeed log with `wall_clock_breakdown`, without the first; `step_s` where it is known.

    Lines on whole steps are taken, or those on `accumulation` micro-batches summed where only they are there.
    """
    whole: list[dict[str, float]] = []
    micro: list[dict[str, float]] = []
    for line in Path(path).read_text(encoding="utf-8", errors="replace").splitlines():
        if "time (ms)" in line:
            ms = {name: float(value) for name, value in re.findall(r"(\w+): (\d+\.?\d*)", line.split("time (ms)")[1])}
            for suffix, found in (("", whole), ("_microstep", micro)):
                parts = [ms.get(f"{long}{suffix}", ms.get(f"{short}{suffix}")) for long, short in TIMERS]
                if None not in parts:
                    found.append(dict(zip(("forward_s", "backward_s", "update_s"), parts, strict=True)))  # type: ignore[arg-type]
    if not whole:
        groups = [micro[k : k + accumulation] for k in range(0, len(micro) - accumulation + 1, accumulation)]
        whole = [{name: sum(part[name] for part in group) for name in group[0]} for group in groups]
    if not whole:
        raise MeasuredStepError(
            f"{path} has {len(micro)} of the {accumulation} micro-batches of a step; give the log of a few steps"
            if micro
            else f'{path} has no line of forward, backward and step times; set "wall_clock_breakdown": true in '
            "DeepSpeed's configuration, and give the log of a few steps"
        )
    steady = whole[1:] if len(whole) > 2 else whole
    phases = Phases(**{name: median(step[name] for step in steady) / 1e3 for name in steady[0]})
    whole_s = step_s or phases.forward_s + phases.backward_s + phases.update_s
    if not whole_s:
        raise MeasuredStepError(f"{path} has steps of 0 ms; give the log of a run, or --step-s")
    return MeasuredStep(step_s=whole_s, phases=phases)


MOST_OF_ONE = 1.5
"""Times as long as a step that a trace of one may last: the profiler slows the host."""
DAMAGED = (ValueError, KeyError, TypeError, AttributeError, RecursionError, EOFError, gzip.BadGzipFile, zlib.error)
"""What reading a file raises that is no trace."""
TIMERS = (("forward", "fwd"), ("backward", "bwd"), ("step", "step"))


def read_kineto(path: str, step_s: float | None = None) -> MeasuredStep:
    """The mean step of a trace of `torch.profiler`, as `export_chrome_trace` writes it, perhaps gzipped.

    Where it marks no steps it is of one, which takes `step_s`; refused where it lasts much longer.
    """
    try:
        opened = gzip.open if path.endswith(".gz") else open
        with opened(path, "rt", encoding="utf-8") as file:
            record = json.load(file)
        events = [
            {
                **e,
                "ts": float(e["ts"]),
                "dur": float(e["dur"]),
                "bytes": float((e.get("args") or {}).get("bytes") or 0),
            }
            for e in record["traceEvents"]
            if e.get("ph") == "X" and "dur" in e
        ]
    except DAMAGED as error:
        raise MeasuredStepError(f"{path} is no trace of torch.profiler, as export_chrome_trace writes it") from error
    steps = sorted({(e["ts"], e["ts"] + e["dur"]) for e in events if _is_step(e)})
    steps = steps[1:] if len(steps) > 2 else steps
    device = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not device or not (steps or step_s):
        lacks = "events of a GPU" if not device else "steps (call profiler.step(), or give --step-s)"
        raise MeasuredStepError(f"{path} has no {lacks}; record a few steps with ProfilerActivity.CUDA")
    if not steps:
        lasts_s = _length([*device, *(e for e in events if e.get("cat") in ("cpu_op", "user_annotation"))]) / 1e6
        if step_s and lasts_s > MOST_OF_ONE * step_s:
            raise MeasuredStepError(
                f"{path} marks no steps and lasts {format_s(lasts_s)}, {lasts_s / step_s:.1f} times --step-s: it is of "
                "several steps, or of one that was slower; call profiler.step() after each, or record one alone"
            )
        begin = min(e["ts"] for e in device)
        steps = [(begin, begin + _length(device))]
    window = (steps[0][0], steps[-1][1])
    inside = [e for e in events if window[0] <= e["ts"] < window[1]]
    by_kind: dict[str, list[tuple[float, float]]] = {}
    copied_bytes, pageable_bytes = 0.0, 0.0
    for e in inside:
        if kind := _kind(e):
            by_kind.setdefault(kind, []).append((e["ts"], e["ts"] + e["dur"]))
            if kind in ("h2d", "d2h"):
                copied_bytes += e["bytes"]
                pageable_bytes += e["bytes"] if "Pageable" in e["name"] else 0.0
    busy_s = {kind: _union(spans) / len(steps) / 1e6 for kind, spans in by_kind.items()}
    whole_s = step_s or (window[1] - window[0]) / len(steps) / 1e6
    return MeasuredStep(
        step_s=whole_s, busy_s=busy_s, pageable_frac=pageable_bytes / copied_bytes if copied_bytes else 0.0
    )


def _length(events: Iterable[Mapping[str, Any]]) -> float:
    """From the begin of the first to the end of the last."""
    begins, ends = zip(*((e["ts"], e["ts"] + e["dur"]) for e in events), strict=True)
    return float(max(ends) - min(begins))


def _is_step(event: Mapping[str, Any]) -> bool:
    return str(event.get("name")).startswith("ProfilerStep#") and event.get("cat") != "gpu_user_annotation"


def _kind(event: Mapping[str, Any]) -> str | None:
    name, category = str(event.get("name")), event.get("cat")
    if category == "kernel":
        return "p2p" if "nccl" in name.lower() else "compute"
    if category == "gpu_memcpy":
        return next((kind for text, kind in (("HtoD", "h2d"), ("DtoH", "d2h"), ("PtoP", "p2p")) if text in name), None)
    is_update = name.startswith("Optimizer.step#") and category in ("user_annotation", "cpu_op")
    return "update" if is_update else None


def _union(spans: Iterable[tuple[float, float]]) -> float:
    """How long at least one of the spans lasts."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
