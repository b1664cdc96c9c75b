"""The figures in the runtime's page, from what its benchmarks have written.

    python -m benchmarks.runtime_page RUNTIME.json DEEPSPEED.json [--page docs/runtime.md]

RUNTIME.json is of `benchmarks.runtime --only busiest fio overlap`, DEEPSPEED.json of `benchmarks/deepspeed_zero3.py`.
Parts that were not run are left out. Give the files' paths from the root of the repository, which is how the page names
them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.planner_grid import replace_part

PART = "speed of the runtime"
GIB = 2**30


def lines(runtime: Mapping[str, Any], deepspeed: Mapping[str, Any], *, names: Sequence[str]) -> Iterator[str]:
    """The part of the page; `names` are those of the files that the records are from."""
    before, after = (round(runtime[f"load_average_{when}"][0], 1) for when in ("before", "after"))
    yield f"From `{names[0]}` and `{names[1]}`: {runtime['machine']}, {runtime['date'][:10]},"
    yield f"load average {before} before and {after} after the runs."
    yield ""
    if "busiest" in runtime:
        yield from _busiest({k: v for k, v in runtime["busiest"].items() if k != "machine"})
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
    yield _deepspeed(deepspeed)


def _busiest(found: Mapping[str, Any]) -> Iterator[str]:
    yield (
        "| on the drive | drive / next stream, alone | step over busiest, predicted | measured | whole run | over the "
        "drive, predicted | measured | the runtime adds |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for name, one in found.items():
        predicted, measured = one["predicted"], one["measured"]
        cells = (
            name if one["is_nvme_bound"] else f"{name} (not NVMe-bound then)",
            f"{one['drive_margin']:.1f}",
            f"{predicted['over_busiest']:.2f} ({predicted['busiest_stream']})",
            f"{measured['over_busiest']:.2f} ({measured['busiest_stream']})",
            f"{measured['over_busiest_whole']:.2f}",
            f"{predicted['over_drive']:.2f}",
            f"{measured['over_drive']:.2f}",
            f"{one['runtime_adds_frac']:.1%}",
        )
        yield f"| {' | '.join(cells)} |"
    yield ""


def _deepspeed(found: Mapping[str, Any]) -> str:
    peaks, rows, settings = found["peak_rss_bytes"], sorted(found["ratios"]), found["settings"]
    about, num_parameters = found["about"]["deepspeed"], found["about"]["tierplan"]["num_parameters"]
    return (
        f"- **Against DeepSpeed** {about['deepspeed']}'s ZeRO-3 with parameters and optimizer states on NVMe, on its "
        f"CPU accelerator: GPT-2 of {num_parameters / 1e6:.0f} M parameters in {settings['dtype']}, load average "
        f"{found['load_average'][0]:.0f}: steps {found['ratio']:.1f} times as fast, the median of {len(rows)} turns "
        f"({rows[0]:.1f} to {rows[-1]:.1f}), at most {peaks['tierplan'] / GIB:.2f} GiB of memory where DeepSpeed needs "
        f"{peaks['deepspeed'] / GIB:.2f}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runtime", type=Path)
    parser.add_argument("deepspeed", type=Path)
    parser.add_argument("--page", type=Path, help="write them into this page")
    args = parser.parse_args()
    records: list[Any] = [json.loads(path.read_text(encoding="utf-8")) for path in (args.runtime, args.deepspeed)]
    names = [path.as_posix() for path in (args.runtime, args.deepspeed)]
    text = "\n".join(lines(*records, names=names))
    if args.page:
        replace_part(args.page, PART, text)
    print(text)


if __name__ == "__main__":
    main()
