"""The figures in the runtime's page, from what its benchmarks have written.

    python -m benchmarks.runtime.page RUNTIME.json PEERS.jsonl [--page docs/runtime.md]

RUNTIME.json is of `benchmarks.runtime.speed --only busiest fio overlap`, PEERS.jsonl of `benchmarks.runtime.peers`.
Parts that were not run are left out. Give the files' paths from the root of the repository, which is how the page names
them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.models import GIB
from benchmarks.records import arguments, read, replace_part
from tierplan.sim.output.text import markdown_table

PART = "speed of the runtime"


def lines(runtime: Mapping[str, Any], peers: Sequence[Mapping[str, Any]], *, names: Sequence[str]) -> Iterator[str]:
    """The part of the page; `names` are those of the files that the records are from."""
    before, after = (round(runtime[f"load_average_{when}"][0], 1) for when in ("before", "after"))
    yield f"From `{names[0]}` and `{names[1]}`: {runtime['machine']}, {runtime['date'][:10]},"
    yield f"load average {before} before and {after} after the runs."
    yield ""
    if "busiest" in runtime:
        yield from _busiest({k: v for k, v in runtime["busiest"].items() if k != "machine"})
        yield ""
    if "fio" in runtime:
        parts = [
            f"{verb}s {found['ratio']:.2f} (half of {len(found['ratios'])} turns from {found['quartiles'][0]:.2f} to "
            f"{found['quartiles'][1]:.2f})"
            for verb, found in runtime["fio"].items()
        ]
        yield f"- **Store over fio**, same file, size and number of requests: {', '.join(parts)}."
    if "overlap" in runtime:
        found = runtime["overlap"]
        yield (
            f"- **Updates inside backward** over the same plan with updates behind it: {found['ratio']:.2f} of the "
            f"step time, the median of {len(found['ratios'])} pairs of steps in turn."
        )
    yield ""
    yield from _peers(peers)


def _busiest(found: Mapping[str, Any]) -> list[str]:
    head = ("on the drive", "drive / next stream, alone", "step over busiest, predicted", "measured", "whole run",
            "over the drive, predicted", "measured", "the runtime adds")  # fmt: skip
    rows = []
    for name, one in found.items():
        predicted, measured = one["predicted"], one["measured"]
        rows.append(
            (
                name if one["is_nvme_bound"] else f"{name} (not NVMe-bound then)",
                f"{one['drive_margin']:.1f}",
                *(f"{times['over_busiest']:.2f} ({times['busiest_stream']})" for times in (predicted, measured)),
                f"{measured['over_busiest_whole']:.2f}",
                *(f"{times['over_drive']:.2f}" for times in (predicted, measured)),
                f"{one['runtime_adds_frac'] * 100:.1f} %",
            )
        )
    return markdown_table(head, rows, right=range(1, 8))


def _peers(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A row a pair: how often tierplan's steps are as fast, and as what they would be were nothing waited for."""
    head = ("the other system", "parameters, tokens", "cap", "its step over tierplan's",
            "at most, by tierplan's busiest stream", "peak memory, tierplan beside it")  # fmt: skip
    cells = []
    for row in sorted(rows, key=lambda row: (row["about"]["tierplan"]["num_parameters"], row["settings"]["cap_gib"])):
        ratios, peaks, settings = sorted(row["ratios"]), row["peak_rss_bytes"], row["settings"]
        ours, theirs = row["about"]["tierplan"], row["about"][row["worker"]]
        busiest, busy_s = max(ours["busy_s"].items(), key=lambda item: item[1])
        cells.append(
            (
                f"{row['pair']}{' (' + theirs['deepspeed'] + ')' if 'deepspeed' in theirs else ''}",
                "{:.0f} M, {dtype}, {batch} x {length}".format(ours["num_parameters"] / 1e6, **settings),
                f"{settings['cap_gib']:g} GiB" if settings["cap_gib"] else "none",
                f"{row['ratio']:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}, {len(ratios)} turns)",
                f"{row['ratio'] * row['median_step_s']['tierplan'] / busy_s:.2f} ({busiest})",
                f"{peaks['tierplan'] / GIB:.2f} beside {peaks[row['worker']] / GIB:.2f} GiB",
            )
        )
    return markdown_table(head, cells)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("runtime", type=Path)
    parser.add_argument("peers", type=Path)
    parser.add_argument("--page", type=Path, help="write them into this page")
    args = parser.parse_args()
    runtime = json.loads(args.runtime.read_text(encoding="utf-8"))
    names = [path.as_posix() for path in (args.runtime, args.peers)]
    text = "\n".join(lines(runtime, read(args.peers), names=names))
    if args.page:
        replace_part(args.page, PART, text)
    print(text)


if __name__ == "__main__":
    main()
