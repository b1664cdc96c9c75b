"""The command line, one module per command.

A command module has a docstring (its `--help`; the first line is the summary), `add_arguments(parser)` and
`run(args) -> int`. What takes long to import (numpy, torch, the planner) it imports inside `run`, so that `tierplan
--help` stays quick; descriptions of machines, formats of text and settings of training are there anyway.
"""

COMMANDS: tuple[str, ...] = (
    "demo",
    "machine",
    "calibrate",
    "workload",
    "simulate",
    "compare-policies",
    "reproduce",
    "plan",
    "run",
    "compare",
    "sweep",
    "advise",
    "page",
    "explain-run",
    "validate",
)
"""Names in the order of `tierplan --help`; `compare-policies` lives in `compare_policies.py`, `explain-run` in
`explain_run.py`."""
