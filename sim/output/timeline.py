"""A timeline to zoom into: every op of a step, and what the tiers held, as a part of a page that asks no network.

`timeline.js` draws on a canvas what stands in the page as JSON, with the colours and words of the other pictures.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import Any

import numpy as np

from tierplan.sim.analysis.explain import stream_times
from tierplan.sim.contents import split_step
from tierplan.sim.output.drawn import (
    COLOURS,
    TRACE_COLOURS,
    WAITS,
    Excerpt,
    capacity_line,
    levels_of,
    paleness,
    step_ends,
    streams_of,
    what_of,
)
from tierplan.sim.output.text import format_frac
from tierplan.sim.schedule import Schedule
from tierplan.sim.trace import Span

HOW = (
    "Zoom: wheel (after a click on the picture, or with Ctrl), + and −. Move: drag, ← and →. The whole step: 0. "
    "Op by op: N and P; next lane: L. Busy: the time in which an op runs, with what sharing adds; what tables "
    "call used is without it. Ops of one unit of the model are in full colour, those of the next one pale."
)


def timeline(
    excerpts: Mapping[str, Excerpt], label: str, *, schedule: Schedule | None = None, focus: bool = False
) -> str:
    """HTML with the ops of each trace that lie in its excerpt, each trace on a lane of its own below a stream's name.

    All begin at zero. `label` says what it shows to those who cannot see it; `schedule`, one step, how many bytes an
    op moves or writes; with `focus`, the wheel zooms before any click.
    """
    embedded = json.dumps(timeline_record(excerpts, schedule), separators=(",", ":")).replace("<", "\\u003c")
    room = files("tierplan.sim.output")
    style, script = (room.joinpath(f"timeline.{end}").read_text("utf-8") for end in ("css", "js"))
    tools = "".join(
        f'<button type="button" data-key="{key}" aria-label="{name}">{text}</button>'
        for key, name, text in (("+", "zoom in", "+"), ("-", "zoom out", "−"), ("0", "the whole step", "whole step"))
    )
    return (
        f'<div class="timeline"{" data-focus=1" * focus}><style>{style}</style>\n'
        "<noscript><p>The timeline needs JavaScript.</p></noscript>"
        f'<div class="tools">{tools}<div class="legend"></div></div>'
        f'<canvas tabindex="0" role="img" aria-label="{escape(label)}"></canvas>'
        f'<div class="tip" aria-live="polite"></div><p class="soft">{HOW}</p>'
        f'<script type="application/json">{embedded}</script>\n<script>\n{script}</script></div>'
    )


def timeline_record(excerpts: Mapping[str, Excerpt], schedule: Schedule | None = None) -> dict[str, Any]:
    """What the script draws; times are nanoseconds since the excerpt began."""
    sizes = {} if schedule is None else _bytes_of(schedule)
    keys: dict[str, int] = {}
    ops: list[tuple[str, str, float, int, str]] = []  # key, what, paleness, bytes, how

    def number_of(span: Span) -> int:
        key = split_step(span.key).key
        if key not in keys:
            keys[key] = len(ops)
            ops.append((key, what_of(span), paleness(span), *sizes.get(key, (-1, ""))))
        return keys[key]

    lanes = []
    for stream in streams_of([excerpt.trace for excerpt in excerpts.values()]):
        rows = []
        for name, (trace, begin_s, end_s) in excerpts.items():
            begin_ns, end_ns = round(begin_s * 1e9), round(end_s * 1e9)
            spans = [s for s in trace.spans if s.stream == stream and s.free_ns < end_ns and s.end_ns >= begin_ns]
            times = stream_times(trace, (begin_s, end_s)).get(stream)
            busy_frac = times.busy_s / (end_s - begin_s) if times and end_s > begin_s else 0.0
            columns = [
                [number_of(s) for s in spans],
                [s.start_ns - begin_ns for s in spans],
                [s.duration_ns for s in spans],
                [s.start_ns - max(s.free_ns, s.ready_ns) for s in spans],
                [s.waited_input_ns for s in spans],
                [s.waited_memory_ns for s in spans],
                [max(0, s.duration_ns - s.alone_ns) if s.alone_ns >= 0 else 0 for s in spans],
            ]
            rows.append({"name": name, "busy": f"{name} busy {format_frac(busy_frac)}".strip(), "columns": columns})
        lanes.append({"stream": stream, "rows": rows})
    return {
        "ops": ops,
        "lanes": lanes,
        "tiers": _tiers(excerpts),
        "length_ns": [round(1e9 * e.end_s) - round(1e9 * e.begin_s) for e in excerpts.values()],
        "ends_ns": [
            [round(1e9 * (end_s - e.begin_s)) for end_s in step_ends(e.trace) if e.begin_s < end_s <= e.end_s]
            for e in excerpts.values()
        ],
        "colours": COLOURS,
        "waits": WAITS,
        "lines": TRACE_COLOURS,
    }


def _bytes_of(schedule: Schedule) -> dict[str, tuple[int, str]]:
    """By op: the bytes that it moves, or else those of the buffers that it writes."""
    size = {b.name: b.size_bytes for b in schedule.buffers}
    return {
        op.key: (int(op.work["bytes"]), "moved")
        if "bytes" in op.work
        else (sum(size[name] for name in op.writes), "written")
        for op in schedule.ops
    }


def _tiers(excerpts: Mapping[str, Excerpt]) -> list[dict[str, Any]]:
    """What each tier that is used holds over time, by kind, as changes from moment to moment."""
    tiers: dict[str, dict[str, Any]] = {}
    for name, (trace, begin_s, end_s) in excerpts.items():
        for tier, peak_bytes in trace.peak_bytes.items():
            if peak_bytes <= 0:
                continue
            times_s, levels = levels_of(trace, tier)
            first, end = np.searchsorted(times_s, (begin_s, end_s), side="right")
            inside = slice(max(int(first) - 1, 0), int(end))
            times_ns = np.rint((np.append(times_s[inside], end_s) - begin_s) * 1e9).astype(np.int64)
            held = {kind: np.append(h[inside], h[inside][-1:]).astype(np.int64) for kind, h in levels.items()}
            changes = {kind: np.diff(h, prepend=0).tolist() for kind, h in held.items()}
            row = {"name": name, "times": times_ns.tolist(), "kinds": changes}
            drawn = tiers.setdefault(tier, {"name": tier, "peak": 0, "capacity": 0, "rows": []})
            drawn["rows"].append(row)
            drawn["peak"] = max(drawn["peak"], peak_bytes)
            drawn["capacity"] = max(drawn["capacity"], trace.capacity_bytes[tier])
    for drawn in tiers.values():
        drawn["line"], _ = capacity_line(drawn["capacity"], drawn["peak"])
    return list(tiers.values())
