"""The command line, one module per command.

A command module has a docstring (its `--help`; the first line is the summary), `add_arguments(parser)` and
`run(args) -> int`. What takes long to import (numpy, torch, the planner) it imports inside `run`, so that `tierplan
--help` stays quick; descriptions of machines, formats of text and settings of training are there anyway.
"""

MODULES = (
    "evidence.demo",
    "machine",
    "calibrate",
    "workload",
    "simulate",
    "compare_policies",
    "evidence.reproduce",
    "plan",
    "run",
    "compare",
    "sweep",
    "advise",
    "page",
    "explain_run",
    "evidence.validate",
)
"""In the order of `tierplan --help`."""
COMMANDS = {module.rpartition(".")[2].replace("_", "-"): module for module in MODULES}
"""Their modules, by name."""
