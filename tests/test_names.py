"""Names are made and taken apart in one place: tiers and streams in `hwmodels/names.py`, the rest in `sim/contents.py`.

Elsewhere no such name is spelled out, split, or tested for its beginning or end.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_imports import MODULES, relative

HOME = ("hwmodels/names.py", "sim/contents.py")

TIERS = r"gpu(\d+|\{\})(?![-\w])"
STREAMS = r"(?<!link)\.(compute|h2d|d2h|p2p|collective)(?!\w)|^nvme\.(read|write)$|^host\.adam$"
CONTENTS = r"^(params|states|grads|tied|x|dx|acts|shared|norm|work)/|/mb\{\}|/mb\d|^mb\{\}|@\{\}#"
KEYS = (
    r"^(s\{\}|s\d+|fwd|bwd|recompute|accumulate|cast|update|leave|all_reduce|gather\w*|reduce\w*)/"
    r"|^(fetch|offload|read|write|send|pass)_(params|states|grads|tied|x|dx|y|acts|stash|\{\})/"
)
NAME = re.compile("|".join((TIERS, STREAMS, CONTENTS, KEYS)))
SPLITS = ("split", "rsplit", "partition", "rpartition", "startswith", "endswith", "removeprefix", "removesuffix")
OF_NAMES = re.compile(r"(^|\W|_)(content|key|stream|tier|(buffer|b|instance)\.name)$")

ALLOWED = (
    "hwmodels/build.py",
    "hwmodels/catalog.py",
    "hwmodels/description.py",
    "hwmodels/detect.py",
    "hwmodels/importers/fio.py",
    "runtime/measure/report.py",
    "sim/analysis/variation.py",
    "studies/purchases.py",
)
"""Modules that know keys of machine files: there `nvme.read` is a rate that is stated, not the stream that has it."""


def literals(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every text of the code but docstrings, with `{}` for what is put into it."""
    passed = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    passed |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(str(p.value) if isinstance(p, ast.Constant) else "{}" for p in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in passed:
            yield node.lineno, node.value


def offences(code: str) -> list[str]:
    """What code does with names that is not its business."""
    tree = ast.parse(code)
    found = [f"line {line} spells {text!r}" for line, text in literals(tree) if NAME.search(text)]
    for node in ast.walk(tree):
        is_split = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SPLITS
        if is_split and OF_NAMES.search(ast.unparse(node.func.value)):
            found.append(f"line {node.lineno} takes a name apart: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("path", [m for m in MODULES if relative(m) not in (*HOME, *ALLOWED)], ids=relative)
def test_names_are_made_and_taken_apart_in_one_place(path: Path) -> None:
    assert offences(path.read_text(encoding="utf-8")) == [], "see hwmodels/names.py and sim/contents.py"


MEANINGLESS = {"found", "made", "said", "it"}
"""Of data, these words say only that there are some."""


@pytest.mark.parametrize("path", [m for m in MODULES if relative(m).startswith(("sim/", "runtime/"))], ids=relative)
def test_data_is_named_for_what_it_is(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assigned = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    assert not MEANINGLESS & (assigned | {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)})


def test_the_runtime_defines_no_name_twice() -> None:
    """Of classes, functions and constants, private ones included; `aten` is torch's, in each module that needs it."""
    defined: dict[str, list[str]] = {}
    for path in (m for m in MODULES if relative(m).startswith("runtime/")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            named = [node.name] if isinstance(node, ast.ClassDef | ast.FunctionDef) else []
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                named = [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]
            for name in named:
                defined.setdefault(name, []).append(relative(path))
    twice = {name: places for name, places in defined.items() if len(places) > 1}
    assert twice.keys() == {"aten"}


@pytest.mark.parametrize("name", [*HOME, *ALLOWED])
def test_exceptions_are_needed(name: str) -> None:
    """And the search sees what it looks for."""
    [path] = [m for m in MODULES if relative(m) == name]
    assert offences(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "code",
    [
        'stream = f"gpu{r}.h2d"', 'x = machine.tier("gpu0")', 'f"fwd/{unit}/mb{m}"', 'f"acts/{unit}/{k}"',
        '"s0/" + key', 'f"s{k}/{op.key}"', "op.key.startswith(what)", "b.content.split(sep)", "stream.endswith(end)",
        'f"{verb}/mb{m}"', 'f"fetch_{kind}/{unit}"', 's = "nvme.read"', 'f"{content}@{tier}#0"',
    ],
)  # fmt: skip
def test_what_the_search_sees(code: str) -> None:
    assert offences(code)


@pytest.mark.parametrize(
    "code", ['"""Of `gpu0.compute`."""', "name.split(sep)", 's = "gpu.capacity"', 'f"{link}/{unit}"', 'x = "s"']
)
def test_what_the_search_leaves_alone(code: str) -> None:
    assert not offences(code)
