"""What the golden file holds, recomputed: a schedule's hash, its step time and peaks; a training's losses and weights.

compute(name, folder)       the JSON value of one scenario or training
canonical_lines(schedule)   what a schedule's hash is taken over
differences(...)            what changed, for people
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch

import tierplan as tp
from tests.golden import scenarios, trainings

GOLDEN_FILE = Path(__file__).parent / "golden.json"

RENAMED: Mapping[str, str] = {"cast": "widen", "fp32": "wide"}
"""Today's word: the word when the golden file was written. For words that were renamed and nothing else. Holds for
kinds and work kinds, for tiers and streams, and for each part of the names of ops, buffers and contents."""

LIBRARIES = ("torch", "transformers", "numpy", "scipy", "highspy", "pulp", "simpy")

Result = Mapping[str, object]


def names() -> list[str]:
    """Of all scenarios and trainings."""
    return [*scenarios.SCENARIOS, *trainings.TRAININGS]


def compute(name: str, folder: Path) -> Result:
    """The result of one scenario or training. `folder` is an empty one for its files."""
    if name in trainings.TRAININGS:
        return trainings.run(trainings.TRAININGS[name], folder)
    outcome = scenarios.run(scenarios.SCENARIOS[name], folder)
    return {
        "schedule": digest(outcome.schedule),
        "step_ns": round(outcome.steady.period_s * 1e9),
        "peaks": {_old(tier): size for tier, size in sorted(outcome.steady.trace.peak_bytes.items())},
    }


@cache
def environment() -> dict[str, str]:
    """What else results depend on: sizes on torch and transformers, plans on the solver, losses on torch and the CPU.

    The first three numbers are not to depend on the CPU; losses do, by how torch computes there.
    """
    return {
        "cpu": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {trainings.plain_gradients()[:16]}",
        "python": platform.python_version(),
        **{library: version(library) for library in LIBRARIES},
    }


# ---- a schedule's canonical form ----


def digest(schedule: tp.Schedule, renamed: Mapping[str, str] = RENAMED) -> str:
    """The counts of ops and buffers, and a hash of all that an executor does."""
    text = "\n".join(canonical_lines(schedule, renamed))
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    return f"{len(schedule.ops)} ops, {len(schedule.buffers)} buffers, sha256 {sha256}"


def canonical_lines(schedule: tp.Schedule, renamed: Mapping[str, str] = RENAMED) -> Iterator[str]:
    """A line for each tier, buffer and op, in order; amounts in hexadecimal, so exact and of one type."""

    def old(name: str) -> str:
        return _old(name, renamed)

    def maybe(name: str | None) -> str | None:
        return None if name is None else old(name)

    for tier in schedule.tiers:
        yield json.dumps(["tier", old(tier.name), tier.capacity_bytes])
    for b in schedule.buffers:
        places = [old(b.name), old(b.content), old(b.tier), b.size_bytes]
        yield json.dumps(["buffer", *places, b.initial, maybe(b.becomes), maybe(b.reuses)])
    for op in schedule.ops:
        work = sorted((old(kind), float(amount).hex()) for kind, amount in op.work.items())
        uses = [[old(name) for name in several] for several in (op.reads, op.writes, op.after)]
        yield json.dumps(["op", old(op.key), old(op.kind), old(op.stream), work, *uses])


def _old(name: str, renamed: Mapping[str, str] = RENAMED) -> str:
    return "".join(renamed.get(part, part) for part in re.split("([/@#])", name))


# ---- comparing ----


def differences(name: str, old: Result, new: Result) -> list[str]:
    """A line for each value of a scenario that is another one now; empty where all are equal."""
    return [
        f"{name}: {key} changed\n    old {json.dumps(old.get(key))}\n    new {json.dumps(new.get(key))}"
        for key in dict.fromkeys([*old, *new])
        if old.get(key) != new.get(key)
    ]
