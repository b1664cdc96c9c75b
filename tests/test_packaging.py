"""What is built from the tree installs and works: a wheel, an sdist, and an archive in which links became text files.

Each is installed into an empty folder, without its dependencies, which are those of this environment.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.test_imports import MODULES, ROOMS, ROOT, module_name

pytest.importorskip("setuptools", minversion="77", reason="builds without a network: setuptools must be installed")

USE = """
import importlib, json, pathlib, sys
import tierplan
for name in json.loads(sys.stdin.read()):
    importlib.import_module(name)
from tierplan.hwmodels import load_machine
from tierplan.sim.workloads.models import named_models
from tierplan.sim.schedule_file import json_schema
from tierplan.validation.campaign.spec import load_campaign
from tierplan.validation.demo.demo import demo_config
from tierplan.validation.published.reproduce import systems
assert load_machine("desktop-4090").tiers and named_models() and demo_config().is_file()
assert load_campaign("cpu-small").run_names and systems()
assert json_schema()["$defs"]
package = pathlib.Path(tierplan.__file__).parent
assert (package / "py.typed").is_file()
print(package)
"""


def files_of_tree() -> list[Path]:
    """All files that git knows or would add, links as links."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [Path(name) for name in listed if (ROOT / name).is_symlink() or (ROOT / name).is_file()]


def copy_tree(target: Path, *, keep_links: bool) -> Path:
    """A copy of the tree. Without links, each of them is a text file that says where it led, as an archive has it."""
    for name in files_of_tree():
        copy = target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink() and not keep_links:
            copy.write_text(str((ROOT / name).readlink()))
        else:
            shutil.copy2(ROOT / name, copy, follow_symlinks=False)
    return target


def build(kind: str, tree: Path, out: Path) -> Path:
    """Builds a `wheel` or an `sdist` with the setuptools of this environment."""
    out.mkdir(exist_ok=True)
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(out)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return out / done.stdout.strip().splitlines()[-1]


def assert_works(wheel: Path, target: Path) -> None:
    """Installs the wheel, imports the modules that need no torch, and uses data files and the command."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([*pip, str(wheel)], check=True)
    env = {**os.environ, "PYTHONPATH": str(target)}
    modules = [
        module_name(path) for path in MODULES if path.relative_to(ROOT).parts[0] in ("hwmodels", "sim", "planner")
    ]
    used = subprocess.run(
        [sys.executable, "-c", USE], input=json.dumps(modules), cwd=target.parent, env=env, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert used.returncode == 0, used.stderr[-2000:]
    assert used.stdout.strip() == str(target / "tierplan")
    command = subprocess.run(
        [str(target / "bin" / "tierplan"), "simulate", "--help"], cwd=target.parent, env=env, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert command.returncode == 0, command.stderr
    assert "--policy" in command.stdout
    claimed = {path.name for path in target.iterdir() if path.suffix != ".dist-info"}
    assert claimed == {"tierplan", "bin"}, "an install claims one name"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_tree(tmp_path_factory.mktemp("tree"), keep_links=True)


@pytest.fixture(scope="module")
def wheel(tree: Path) -> Path:
    return build("wheel", tree, tree / "dist")


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("RECORD")}


def test_a_wheel_from_the_tree_works(wheel: Path, tmp_path: Path) -> None:
    assert_works(wheel, tmp_path / "site")


def test_a_wheel_has_all_that_lies_in_the_rooms(wheel: Path) -> None:
    lie_there = {
        path.as_posix() if path.parts[0] == "tierplan" else f"tierplan/{path.as_posix()}"
        for path in files_of_tree()
        if path.parts[0] in (*ROOMS, "tierplan") and not (ROOT / path).is_symlink()
    }
    assert {name for name in contents(wheel) if name.startswith("tierplan/")} == lie_there


def test_an_sdist_gives_the_same_wheel(tree: Path, wheel: Path, tmp_path: Path) -> None:
    sdist = build("sdist", tree, tmp_path)
    shutil.unpack_archive(sdist, tmp_path, filter="data")
    again = build("wheel", tmp_path / sdist.name.removesuffix(".tar.gz"), tmp_path / "dist")
    assert contents(again) == contents(wheel)


def test_an_archive_without_links_gives_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    plain = copy_tree(tmp_path / "tree", keep_links=False)
    assert (plain / "tierplan" / "sim").read_text() == "../sim"
    assert contents(build("wheel", plain, tmp_path / "dist")) == contents(wheel)
