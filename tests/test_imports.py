"""The arrows of docs/design.md, read from the imports of every module. Lazy imports inside functions count as well."""

from __future__ import annotations

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import tierplan

ROOT = Path(tierplan.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))

MAY_IMPORT = {
    "hwmodels": {"hwmodels"},
    "sim": {"hwmodels", "sim"},
    "planner": {"hwmodels", "sim", "planner"},
    "runtime": {"hwmodels", "sim", "runtime"},
    "validation": {"hwmodels", "sim", "planner", "runtime", "validation"},
    "commands": {"hwmodels", "sim", "planner", "runtime", "validation", "commands"},
}
"""`planner` and `runtime` never import each other: the schedule file is their only contact."""

ONLY_IN = {"torch": "runtime/", "transformers": "runtime/", "pulp": "planner/", "simpy": "sim/engine.py"}


def imports(path: Path) -> set[str]:
    """Full names of the modules that a file imports, relative ones resolved."""
    found = set()
    package = ["tierplan", *path.relative_to(ROOT).parent.parts]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{module}.{alias.name}" for alias in node.names} | {module}
    return found


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_imports_follow_the_arrows(path: Path) -> None:
    folder = path.relative_to(ROOT).parts[0]
    for module in imports(path):
        parts = module.split(".")
        if parts[0] == "tierplan" and folder in MAY_IMPORT and len(parts) > 1 and (ROOT / parts[1]).is_dir():
            assert parts[1] in MAY_IMPORT[folder], f"{relative(path)} imports {module}: against docs/design.md"
        home = ONLY_IN.get(parts[0])
        if home is not None:
            assert relative(path).startswith(home), f"{relative(path)} imports {module}, which only {home} may"


def test_every_folder_has_its_arrows() -> None:
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert folders == set(MAY_IMPORT)


def test_the_parser_sees_imports() -> None:
    """The test above would pass if `imports` found nothing; it also resolves what is imported from a package."""
    assert {"simpy", "tierplan.sim.graph", "tierplan.sim.graph.graph_of"} <= imports(ROOT / "sim" / "engine.py")
    assert "tierplan.sim.engine" in imports(ROOT / "sim" / "pricing.py")


@pytest.mark.parametrize("folder", ["sim", "planner"])
def test_the_contents_of_a_folder_name_every_module(folder: str) -> None:
    text = (ROOT / folder / "__init__.py").read_text(encoding="utf-8")
    named = set(re.findall(r"\w+", text))
    there = {path.stem for path in (ROOT / folder).iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert sorted(there - named - {"__init__"}) == []
    entries = re.findall(r"^ {4}(\w+(?:, \w+)*) {2}", text, flags=re.MULTILINE)
    assert sorted({name for entry in entries for name in entry.split(", ")} - there) == []


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Of imports at the top of modules; those inside functions come later and may go in circles."""
    graph: dict[str, set[str]] = {}
    for path in MODULES:
        name = ".".join(["tierplan", *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__")
        tree = ast.parse(path.read_text(encoding="utf-8"))
        top = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module]
        graph[name] = {str(node.module) for node in top} | {
            f"{node.module}.{a.name}" for node in top for a in node.names
        }
    TopologicalSorter({name: found & graph.keys() - {name} for name, found in graph.items()}).prepare()
