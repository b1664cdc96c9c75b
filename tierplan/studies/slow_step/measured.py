"""What somebody measured of a step: seconds, DeepSpeed's wall clock breakdown, or a trace of PyTorch's profiler."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf, isfinite
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

    Lines on whole steps are taken, or those on `accumulation` micro-batches summed where only they are there. Refused
    where it has another number of them in a step.
    """
    whole, micro, shown = _timed(path)
    if shown not in (None, accumulation):
        batches = "1 micro-batch" if shown == 1 else f"{shown} micro-batches"
        raise MeasuredStepError(
            f"{path} has {batches} in a step, but the training that is asked about has {accumulation}; leave "
            "--accumulation out, or give the log and the configuration of one run"
        )
    if not whole:
        updates = _updates(micro)
        if accumulation == 1 and len(updates) < len(micro):
            raise MeasuredStepError(
                f"{path} has micro-batches that update nothing, so a step has several; say how many (--accumulation), "
                "or give the log of a few steps"
            )
        micro = micro[(updates[0] + 1) % accumulation :] if shown else micro
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
    sum_s = phases.forward_s + phases.backward_s + phases.update_s
    if step_s and sum_s > OF_PARTS * step_s:
        raise MeasuredStepError(
            f"{path} has steps whose forward, backward and update take {format_s(sum_s)}, but --step-s is "
            f"{format_s(step_s)}; leave --step-s out, or give both of one run"
        )
    whole_s = step_s or sum_s
    if not whole_s:
        raise MeasuredStepError(f"{path} has steps of 0 ms; give the log of a run, or --step-s")
    return MeasuredStep(step_s=whole_s, phases=phases)


OF_PARTS = 1.1
"""Times as long as a step that its parts may be: they are medians of their own."""


def micro_batches_of(path: str) -> int | None:
    """How many micro-batches a step of a DeepSpeed log has; None where it does not show several steps of one size."""
    return _timed(path)[2]


def _timed(path: str) -> tuple[list[dict[str, float]], list[dict[str, float]], int | None]:
    """Milliseconds of whole steps, and of micro-batches, by the first rank that writes, and how many a step has."""
    whole: list[dict[str, float]] = []
    micro: list[dict[str, float]] = []
    first, since, sizes = "", 0, set[int]()
    for line in Path(path).read_text(encoding="utf-8", errors="replace").splitlines():
        head, _, times = line.partition("time (ms)")
        rank = re.search(r"rank[ =](\d+)", head, re.IGNORECASE)
        if times and rank and (first := first or rank[1]) != rank[1]:
            continue
        ms = {name: float(value) for name, value in re.findall(r"(\w+): (\d+\.?\d*)", times)}
        for suffix, found in (("_microstep", micro), ("", whole)):
            parts = [ms.get(f"{long}{suffix}", ms.get(f"{short}{suffix}")) for long, short in TIMERS]
            if None in parts:
                continue
            found.append(dict(zip(("forward_s", "backward_s", "update_s"), parts, strict=True)))  # type: ignore[arg-type]
            if found is whole:  # those of a step that is cut, or that two processes write, do not add up to it
                forward_ms = sum(part["forward_s"] for part in micro[since:])
                if 0.9 * forward_ms <= whole[-1]["forward_s"] <= 1.1 * forward_ms and since < len(micro):
                    sizes.add(len(micro) - since)
                since = len(micro)
    if not whole:
        sizes = {after - before for before, after in pairwise(_updates(micro))}
    return whole, micro, sizes.pop() if len(sizes) == 1 else None


EMPTY_MS, EMPTY_FRAC = 1.0, 0.1
"""What a step takes at most after a micro-batch that updates nothing: DeepSpeed's logs have 0.03 to 0.08 ms there."""


def _updates(micro: Sequence[Mapping[str, float]]) -> list[int]:
    """Those of the micro-batches after which there is an update."""
    least = min(EMPTY_MS, EMPTY_FRAC * max((part["update_s"] for part in micro), default=0.0))
    return [k for k, part in enumerate(micro) if part["update_s"] >= least]


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
        if not all(isfinite(e["ts"]) and 0 <= e["dur"] < inf for e in events):
            raise ValueError
    except DAMAGED as error:
        raise MeasuredStepError(f"{path} is no trace of torch.profiler, as export_chrome_trace writes it") from error
    named = [e for e in events if str(e.get("name")).startswith("ProfilerStep#")]
    marks = [e for e in named if e.get("cat") != "gpu_user_annotation"]
    if len({e.get("pid") for e in marks}) > 1:
        raise MeasuredStepError(f"{path} marks steps of several processes; give the trace of one of them")
    steps = sorted({(e["ts"], e["ts"] + e["dur"]) for e in marks})
    steps = steps[1:] if len(steps) > 2 else steps
    marked_s = sum(end - begin for begin, end in steps) / len(steps) / 1e6 if steps else 0.0
    if step_s and marked_s and not 1 / MOST_OF_ONE <= marked_s / step_s <= MOST_OF_ONE:
        raise MeasuredStepError(
            f"{path} marks steps of {format_s(marked_s)}, but --step-s is {format_s(step_s)}; call profiler.step() "
            "after each optimizer step alone (not after each micro-batch), or leave --step-s out"
        )
    device = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not device or not (steps or step_s):
        lacks = "events of a GPU" if not device else "steps (call profiler.step(), or give --step-s)"
        raise MeasuredStepError(f"{path} has no {lacks}; record a few steps on a GPU, with ProfilerActivity.CUDA")
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
    whole_s = step_s or marked_s
    return MeasuredStep(
        step_s=whole_s, busy_s=busy_s, pageable_frac=pageable_bytes / copied_bytes if copied_bytes else 0.0
    )


def _length(events: Iterable[Mapping[str, Any]]) -> float:
    """From the begin of the first to the end of the last."""
    begins, ends = zip(*((e["ts"], e["ts"] + e["dur"]) for e in events), strict=True)
    return float(max(ends) - min(begins))


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
