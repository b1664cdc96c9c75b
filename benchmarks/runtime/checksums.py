"""What it costs that every byte on a drive is checked: steps with checksums over steps without.

    python -m benchmarks.runtime.checksums --nvme-dir DIR [--turns 30] [--json FILE [--page docs/durability.md]]

One training takes turns with itself, step by step: in every other step a checksum is a function that does nothing and
agrees with all. The median of the ratios of neighbouring turns, and its quartiles.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock

from xxhash import xxh3_64

from benchmarks.records import Record, arguments, replace_part, save
from benchmarks.runtime.speed import GIB, batches, config, machine, make
from tierplan.planner.plan import UnitPlan
from tierplan.runtime.checkpoint.weights import hollow_model, random_weights
from tierplan.runtime.trainer import Trainer

CHOICES = {
    "states": UnitPlan(grads="host", states="nvme"),
    "parameters and states": UnitPlan(params="nvme", grads="host", states="nvme"),
    "parameters, activations and states": UnitPlan(params="nvme", grads="host", states="nvme", acts="nvme"),
}


class Agreeing(str):
    """Equal to every checksum."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False


class NoDigest:
    """In place of a checksum."""

    def update(self, data: object) -> None: ...

    def hexdigest(self) -> str:
        return Agreeing()


def cost(choice: UnitPlan, folder: Path, *, turns: int, width: int, num_blocks: int) -> dict[str, object]:
    """Ratios of step times and of processor times, by turns."""
    raw = config(width, num_blocks)
    schedule, training, num_parameters = make(raw, choice, machine(4 * GIB, 3 * GIB))
    model = hollow_model(raw, training)
    digests = {"with": xxh3_64, "without": NoDigest}
    rows: dict[str, list[tuple[float, float]]] = {name: [] for name in digests}
    with Trainer(schedule, model, nvme_dir=folder, weights=random_weights(model, seed=0)) as trainer:
        trainer.run(batches(), 3)
        for turn in range(turns):
            for name in sorted(digests, reverse=bool(turn % 2)):
                with mock.patch("tierplan.runtime.memory.store.xxh3_64", digests[name]):
                    began = time.perf_counter(), time.process_time()
                    trainer.run(batches(), 1)
                    rows[name].append((time.perf_counter() - began[0], time.process_time() - began[1]))
    found: dict[str, object] = {
        "num_parameters": num_parameters,
        "bytes_per_step": sum(size for stream, size in schedule.bytes_moved().items() if stream.startswith("nvme.")),
        "step_s": statistics.median(step_s for step_s, _ in rows["with"]),
    }
    for k, name in enumerate(("step", "processor")):
        ratios = [a[k] / b[k] for a, b in zip(rows["with"], rows["without"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        found |= {f"{name}_ratio": middle, f"{name}_quartiles": [low, high], f"{name}_ratios": ratios}
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--only", nargs="+", choices=list(CHOICES), default=list(CHOICES))
    args = parsed(parser)
    found = {}
    for name in args.only:
        found[name] = cost(CHOICES[name], args.nvme_dir, turns=args.turns, width=args.width, num_blocks=args.blocks)
        print(name, {k: v for k, v in found[name].items() if not k.endswith("ratios")}, flush=True)
    keep(args, found, PART, lines)


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments, with those of both benchmarks of the durability page."""
    parser.add_argument("--nvme-dir", type=Path, required=True)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--page", type=Path, help="write them into this page, too")
    args = parser.parse_args()
    if args.page and not args.json:
        parser.error("--page needs --json, which the page names")
    return args


def keep(args: argparse.Namespace, plans: Record, part: str, lines: Callable[[Record, Path], Iterable[str]]) -> None:
    """Writes what each plan costs, and a part of the page, where somebody named files for them."""
    about = {"machine": platform.machine(), "cores": os.cpu_count(), "load_average": os.getloadavg()}
    record = {**about, "date": datetime.now(UTC).isoformat(timespec="seconds"), "plans": plans}
    save(args.json, record)
    if args.page:
        replace_part(args.page, part, "\n".join(lines(record, args.json)))


def source_line(record: Mapping[str, Any], source: Path) -> str:
    load = f"load average {record['load_average'][0]:.1f} on {record['cores']} cores"
    return f"From `{source.as_posix()}`, {record['date'][:10]}, {load}:"


PART = "cost of checksums"


def lines(record: Mapping[str, Any], source: Path) -> Iterator[str]:
    """The part of the page."""
    yield source_line(record, source)
    yield ""
    yield "| on the drive | bytes in a step | step with over without: median (middle half) | processor time |"
    yield "|---|--:|--:|--:|"
    for name, one in record["plans"].items():
        low, high = one["step_quartiles"]
        yield (
            f"| {name} | {one['bytes_per_step'] / 1e9:.2f} GB | {one['step_ratio']:.3f} ({low:.3f} to {high:.3f}) of "
            f"{len(one['step_ratios'])} | {one['processor_ratio']:.3f} |"
        )


if __name__ == "__main__":
    main()
