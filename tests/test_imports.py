"""The rooms, their arrows (docs/design.md) and their maps. Lazy imports inside functions count as well.

Rooms are listed by their folders at the top, not by a walk through `tierplan/`: a walk follows no links, and would
check a handful of modules and pass.
"""

from __future__ import annotations

import ast
import re
import subprocess
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("hwmodels", "sim", "planner", "runtime", "validation")
FRONT = ("studies", "commands")
"""Rooms of the front door: they lie under `tierplan/` itself."""

MODULES = sorted(
    [*(ROOT / "tierplan").rglob("*.py"), *(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))]
)
FOLDERS = sorted({path.parent for path in MODULES})

MAY_IMPORT = {
    "hwmodels": {"hwmodels"},
    "sim": {"hwmodels", "sim"},
    "planner": {"hwmodels", "sim", "planner"},
    "runtime": {"hwmodels", "sim", "runtime"},
    "validation": {*ROOMS},
    "studies": {*ROOMS, "studies"},
    "commands": {*ROOMS, "studies", "commands"},
}
"""`planner` and `runtime` never import each other: the schedule file is their only contact."""

ONLY_IN = {
    "torch": "runtime/",
    "transformers": "runtime/",
    "highspy": "planner/milp/",
    "pulp": "nowhere: the tests have it",
    "simpy": "sim/engine.py",
    "numba": "sim/compiled/compiler.py",
}
MOST_MODULES = 14
"""In one folder: about what a reader takes in at a glance."""


def relative(path: Path) -> str:
    """The file's path below `tierplan`, as an installed package has it: `sim/engine.py`, `commands/plan.py`."""
    return path.relative_to(ROOT).as_posix().removeprefix("tierplan/")


def module_name(path: Path) -> str:
    return ".".join(["tierplan", *Path(relative(path)).with_suffix("").parts]).removesuffix(".__init__")


def imports(path: Path) -> set[str]:
    """Full names of the modules that a file imports, relative ones resolved."""
    found = set()
    package = ["tierplan", *Path(relative(path)).parent.parts]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{module}.{alias.name}" for alias in node.names} | {module}
    return found


def test_every_module_is_looked_at() -> None:
    """As many as git knows, so that a walk which loses a room fails here."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "tierplan/**.py", *(f"{room}/**.py" for room in ROOMS)],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    present = [name for name in listed if (ROOT / name).is_file()]
    assert len(present) > 180
    assert sorted(path.relative_to(ROOT).as_posix() for path in MODULES) == sorted(present)


def test_every_room_is_linked_from_the_package() -> None:
    for room in ROOMS:
        assert (ROOT / "tierplan" / room).resolve() == ROOT / room
    front = {path.name for path in (ROOT / "tierplan").iterdir() if (path / "__init__.py").exists()}
    assert front == {*ROOMS, *FRONT} == set(MAY_IMPORT)


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_imports_follow_the_arrows(path: Path) -> None:
    folder = relative(path).split("/")[0]
    for module in imports(path):
        parts = module.split(".")
        assert parts[0] not in ROOMS, f"{relative(path)} imports {module}; write tierplan.{module}"
        if parts[0] == "tierplan" and folder in MAY_IMPORT and len(parts) > 1 and parts[1] in MAY_IMPORT:
            assert parts[1] in MAY_IMPORT[folder], f"{relative(path)} imports {module}: against docs/design.md"
        home = ONLY_IN.get(parts[0])
        if home is not None:
            assert relative(path).startswith(home), f"{relative(path)} imports {module}, which only {home} may"


def test_the_parser_sees_imports() -> None:
    """The test above would pass if `imports` found nothing; it also resolves what is imported from a package."""
    assert {"simpy", "tierplan.sim.sharing", "tierplan.sim.sharing.max_min_speeds"} <= imports(
        ROOT / "sim" / "engine.py"
    )
    assert "tierplan.sim.engine" in imports(ROOT / "sim" / "pricing.py")


LISTED_ELSEWHERE = ("tierplan", "commands")
"""Folders whose modules a table in `__init__.py` lists by other names."""


@pytest.mark.parametrize("folder", FOLDERS, ids=relative)
def test_the_map_of_a_folder_names_every_module(folder: Path) -> None:
    """The docstring of `__init__.py` is the map: lines of `name  what it is`, in reading order."""
    text = (folder / "__init__.py").read_text(encoding="utf-8")
    present = {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    present -= {"__init__", "__main__"}
    if folder.name in LISTED_ELSEWHERE:
        assert present - set(re.findall(r"\w+", text)) <= {"cli", *ROOMS, *FRONT, "options"}
    else:
        entries = re.findall(r"^(?: {4})?(\w+) {2,}\S", ast.get_docstring(ast.parse(text)) or "", flags=re.MULTILINE)
        assert set(entries) == present, (
            f"write a line for each module into the docstring of {relative(folder)}/__init__.py"
        )
        assert len(entries) == len(present)


@pytest.mark.parametrize("folder", FOLDERS, ids=relative)
def test_no_folder_is_crowded(folder: Path) -> None:
    modules = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
    assert len(modules) <= MOST_MODULES or relative(folder) == "planner/policies", "one for each system"


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Of imports at the top of modules; those inside functions come later and may go in circles."""
    graph: dict[str, set[str]] = {}
    for path in MODULES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        top = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module]
        graph[module_name(path)] = {str(node.module) for node in top} | {
            f"{node.module}.{a.name}" for node in top for a in node.names
        }
    TopologicalSorter({name: found & graph.keys() - {name} for name, found in graph.items()}).prepare()


DEFINED_IN_EACH = {"run", "add_arguments", "policy", "embed", "block", "head", "check", "projection"}
"""What commands, policies and families of models each define under one name, since others look for that name."""


def test_no_public_name_means_two_things() -> None:
    defined: dict[str, list[str]] = {}
    for path in MODULES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                defined.setdefault(node.name, []).append(relative(path))
    twice = {name: places for name, places in defined.items() if len(places) > 1}
    unexpected = {name: places for name, places in twice.items() if name not in DEFINED_IN_EACH}
    assert unexpected == {}, "one name, one meaning: rename all but one of them (docs/glossary.md)"
