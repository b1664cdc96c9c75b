"""Notebooks: each runs from an empty folder, states a question, and ends by asserting its answer."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.py"))
IN_A_KERNEL = "01_first_steps"
LONG = ("02_finetune_13b_on_my_desktop", "03_how_many_drives", "04_dram_or_drives", "11_four_ways_to_fine_tune")
"""They plan for minutes: `make nightly` runs them."""


def cells(path: Path) -> list[tuple[str, str]]:
    """(kind, text) of each cell of a py:percent file."""
    text = path.read_text(encoding="utf-8")
    parts = re.split(r"^# %%(.*)$", text, flags=re.MULTILINE)[1:]
    return [
        ("markdown" if "[markdown]" in head else "code", body)
        for head, body in zip(parts[::2], parts[1::2], strict=True)
    ]


def test_there_are_ten() -> None:
    assert len(NOTEBOOKS) >= 10


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_it_asks_and_answers(path: Path) -> None:
    found = cells(path)
    assert found[0][0] == "markdown"
    assert found[0][1].lstrip().startswith("# # "), "begins with a title"
    assert "?" in found[0][1] or "?" in found[1][1], "states its question"
    last_kind, last = found[-1]
    assert last_kind == "code"
    statements = ast.parse(last).body
    assert isinstance(statements[-1], ast.Assert), "ends by asserting its answer"
    assert any("plot" in text or "ax." in text for kind, text in found if kind == "code"), "has a picture"
    head, *_ = path.read_text(encoding="utf-8").partition("# %%")
    assert head.count("# ---\n") == 2, "or jupytext makes a cell of the header"
    assert "**Answer.**" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=pytest.mark.nightly if path.stem in LONG else ())
        for path in NOTEBOOKS
        if path.stem != IN_A_KERNEL
    ],
)
def test_it_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib").use("Agg")
    monkeypatch.setattr("tierplan.planner.search.budget.DEFAULT_OPS", 50_000)
    monkeypatch.chdir(tmp_path)
    import matplotlib.pyplot as plt

    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        plt.close("all")


def test_one_runs_in_a_kernel(tmp_path: Path) -> None:
    """The documented way: jupytext makes a notebook, a kernel runs it, and its pictures are in it."""
    jupytext = pytest.importorskip("jupytext")
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    notebook = jupytext.read(ROOT / "notebooks" / f"{IN_A_KERNEL}.py")
    short = "from tierplan.planner.search import budget\nbudget.DEFAULT_OPS = 50_000"
    notebook.cells.insert(0, nbformat.v4.new_code_cell(short))
    nbclient.NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    outputs = [o for cell in notebook.cells if cell.cell_type == "code" for o in cell.outputs]
    pictures = [o for o in outputs if "image/png" in o.get("data", {})]
    assert len(pictures) == 3
