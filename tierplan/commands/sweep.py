"""Run a what-if study: many scenarios, one tidy table.

STUDY.toml says what to vary:

    name = "drives"
    question = "How many drives pay off?"
    [scenario]
    model = "gpt-13b"
    machine = "desktop-4090"
    policy = ["zero-infinity", "fuyou"]
    batch = [8, 32]
    [set]
    nvme.drives = [1, 2, 4]

All combinations are planned and simulated. Results are kept one by one in OUT/results.jsonl; a second run continues
where the first one stopped. OUT/table.csv has one row per scenario. Where a study has neither batch nor accumulation
nor sequences, a step has 16 sequences, divided as is quickest, as for `tierplan plan`.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from tierplan.commands.options.arguments import existing_file, new_folder, option, whole
from tierplan.commands.options.terminal import tell
from tierplan.hwmodels.values.extras import words_of_missing
from tierplan.sim.output.text import columns, digits, format_s, in_short, wrapped
from tierplan.studies.study import Study, load_study

SHOWN = {"fits": "fits", "step_s": "step", "tokens_per_s": "tokens/s", "limited_by": "limited by", "error": "error"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("study", type=existing_file, metavar="STUDY.toml", help="what to vary, as above")
    option(parser, "-o --out DIR", "folder for the results (default: the study's name)", new_folder)
    option(parser, "--workers N", "processes (default: one per core)", whole(1))
    option(parser, "--dask ADDRESS", "run on the dask scheduler at this address, tcp://host:port")


def run(args: argparse.Namespace) -> int:
    from tierplan.studies.sweep import sweep

    study = load_study(args.study)
    study.check_names()
    out = Path(args.out or study.name)
    points = list(study.points())
    progress = sys.stderr.isatty()
    if args.dask:
        try:
            from distributed import Client
        except ImportError as error:
            raise RuntimeError(words_of_missing(error, "--dask")) from error
        with Client(args.dask) as client:
            rows = sweep(points, out_dir=out, executor=client.get_executor(), progress=progress)
    else:
        rows = sweep(points, out_dir=out, num_workers=args.workers, progress=progress)
    where = f"{len(rows)} scenario{'s' * (len(rows) != 1)} in {out / 'table.csv'}"
    tell(args, rows, [*_table_lines(study, rows), "", where])
    notes = {"devices_note": "use all GPUs", "other_numbers": "train the numbers of plain training"}
    for name, what in notes.items():
        if said := [row[name] for row in rows if row.get(name)]:
            print(f"{len(said)} of {len(rows)} rows do not {what}: {said[0]}", file=sys.stderr)
    cut = sum(row.get("status") == "time-limit" for row in rows)
    if cut:
        print(
            f"{cut} of {len(rows)} searches ended at their time limit: a quicker computer, or one less busy, may find "
            "better plans (`status` and `gap` in the table)",
            file=sys.stderr,
        )
    failed = [str(row["error"]) for row in rows if "error" in row]
    if failed:
        print(
            f"tierplan sweep: {len(failed)} of {len(rows)} scenarios have an error instead of an answer; the first: "
            f"{failed[0]}",
            file=sys.stderr,
        )
    return 1 if failed else 0


def _table_lines(study: Study, rows: list[dict[str, object]]) -> list[str]:
    """The question, the columns that vary, and the main figures."""
    varied = [name for name, values in {**study.scenario, **study.overrides}.items() if len(values) > 1]
    told = {"fits": not all(row.get("fits") for row in rows), "error": any("error" in row for row in rows)}
    shown = [name for name in SHOWN if told.get(name, True)]
    heads = [*varied, *(SHOWN[name] for name in shown)]
    table = columns([heads, *([_text(name, row.get(name, "")) for name in (*varied, *shown)] for row in rows)])
    reasons = Counter(in_short(str(row["why_not"])) for row in rows if row.get("why_not"))
    why = [line for reason, num in reasons.items() for line in wrapped(f"{num} of {len(rows)} do not run: {reason}")]
    return [*([study.question, ""] if study.question else []), *table, *why]


def _text(name: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return format_s(value) if name.endswith("_s") and not name.endswith("_per_s") else digits(value)
    return str(value)
