"""What it costs that every byte on a drive is checked: steps with checksums over steps without.

    python -m benchmarks.runtime.checksums --nvme-dir DIR [--turns 30] [--json FILE [--page docs/durability.md]]

One training takes turns with itself, step by step: in every other step a checksum is a function that does nothing and
agrees with all. The median of the ratios of neighbouring turns, and its quartiles.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from unittest import mock

from xxhash import xxh3_64

from benchmarks.models import GIB, gpt2
from benchmarks.records import Record, about, arguments, in_turns, replace_part, save, spread
from benchmarks.trainings import batches, num_parameters, trainer_of
from tierplan.planner.plan import UnitPlan
from tierplan.runtime.trainer import Trainer
from tierplan.sim.output.text import markdown_table

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


def step_s(trainer: Trainer, digest: Callable[[], object]) -> tuple[float, float]:
    """Seconds of a step with this for a checksum, by the clock and of processors."""
    with mock.patch("tierplan.runtime.memory.store.xxh3_64", digest):
        began = time.perf_counter(), time.process_time()
        trainer.run(batches(), 1)
        return time.perf_counter() - began[0], time.process_time() - began[1]


def cost(choice: UnitPlan, folder: Path, *, turns: int, width: int, num_blocks: int) -> Record:
    """Ratios of step times and of processor times, by turns."""
    with trainer_of(gpt2(width, num_blocks), choice, folder, host_bytes=3 * GIB) as trainer:
        trainer.run(batches(), 3)
        with_, without = (partial(step_s, trainer, digest) for digest in (xxh3_64, NoDigest))
        rows = list(in_turns(with_, without, turns))
        moved = trainer.schedule.bytes_moved()
        found: Record = {
            "num_parameters": num_parameters(trainer),
            "bytes_per_step": sum(size for stream, size in moved.items() if stream.startswith("nvme.")),
            "step_s": statistics.median(a[0] for a, _ in rows),
        }
    for k, name in enumerate(("step", "processor")):
        found |= {f"{name}_{what}": value for what, value in spread([a[k] / b[k] for a, b in rows]).items()}
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
    keep(args, found, PART, HEAD, cells)


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


def keep(
    args: argparse.Namespace, plans: Record, part: str, head: Sequence[str], cells: Callable[[Record], tuple[str, ...]]
) -> None:
    """Writes what each plan costs, and a part of the page, where somebody named files for them."""
    record = {**about(), "plans": plans}
    save(args.json, record)
    if args.page:
        replace_part(args.page, part, table(record, args.json, head, cells))


def table(record: Record, source: Path, head: Sequence[str], cells: Callable[[Record], tuple[str, ...]]) -> str:
    """The part of the page."""
    load = f"load average {record['load_average'][0]:.1f} on {record['cores']} cores"
    rows = [(name, *cells(one)) for name, one in record["plans"].items()]
    lines = markdown_table(head, rows, right=range(1, len(head)))
    return "\n".join([f"From `{source.as_posix()}`, {record['date'][:10]}, {load}:", "", *lines])


PART = "cost of checksums"
HEAD = ("on the drive", "bytes in a step", "step with over without: median (middle half)", "processor time")


def cells(one: Record) -> tuple[str, ...]:
    low, high = one["step_quartiles"]
    ratio = f"{one['step_ratio']:.3f} ({low:.3f} to {high:.3f}) of {len(one['step_ratios'])}"
    return f"{one['bytes_per_step'] / 1e9:.2f} GB", ratio, f"{one['processor_ratio']:.3f}"


if __name__ == "__main__":
    main()
