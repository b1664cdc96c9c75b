"""Where the packages lie: the rooms stand at the top of the repository and are installed as `tierplan.sim` and so on.

The links `tierplan/sim -> ../sim` let every tool that reads the tree find them. Where links are not kept (a zip
archive, Windows without `core.symlinks`) they are small text files; then each room is mapped to its folder instead.
"""

from pathlib import Path

from setuptools import find_packages, setup

ROOMS = ("hwmodels", "sim", "planner", "runtime", "validation")
ROOT = Path(__file__).parent


def packages() -> tuple[list[str], dict[str, str]]:
    """All packages by their names, and the folders of those that no link leads to."""
    lost = [room for room in ROOMS if not (ROOT / "tierplan" / room).is_dir()]
    names = find_packages(str(ROOT), include=["tierplan", "tierplan.*"])
    for room in lost:
        names += [f"tierplan.{room}", *(f"tierplan.{room}.{name}" for name in find_packages(str(ROOT / room)))]
    return names, {f"tierplan.{room}": room for room in lost}


if __name__ == "__main__":
    names, folders = packages()
    setup(packages=names, package_dir=folders)
