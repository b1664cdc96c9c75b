"""The frontier is what `plan` says of machines with other device memory, for the same sequences."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tierplan.cli import main
from tierplan.hwmodels.names import DEVICE
from tierplan.hwmodels.scaling import with_capacity
from tierplan.planner.infeasible import InfeasiblePlan
from tierplan.studies import frontier as study
from tierplan.studies.evaluate import BestPlan, best_plan
from tierplan.studies.frontier import FrontierPoint, frontier, plot_frontier, quicker_with_less
from tierplan.studies.study import Point

CONFIG = {"model_type": "gpt2", "n_embd": 64, "n_head": 2, "n_layer": 3, "vocab_size": 500, "n_positions": 128}
MIB = 2**20


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Point:
    """Four sequences on two GPUs that have little memory and a reserve."""
    monkeypatch.setattr("tierplan.planner.search.budget.DEFAULT_OPS", 20_000)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    memory = {"gpu.capacity": "12 MiB", "gpu.reserve": "4 MiB", "gpu.count": 2}
    return Point(model=str(tmp_path), machine="desktop-4090", sequences=4, seq=64, overrides=memory, calibration="none")


def planned(point: Point, capacity_bytes: int) -> BestPlan:
    return best_plan(replace(point, overrides={**point.overrides, "gpu.capacity": f"{capacity_bytes} B"}))


@pytest.mark.parametrize("division", [{}, {"sequences": 0, "batch": 2}])
def test_on_two_gpus_all_points_are_plans_for_the_same_work(
    two: Point, division: dict[str, int], tmp_path: Path
) -> None:
    """The division and the number of GPUs of the best plan need not be the best with less memory: where micro-batches
    are given, a plan may train on twice as many tokens."""
    point = replace(two, **division)
    best = best_plan(point)
    points = frontier(point, best, fracs=(2.0, 0.01, 0.25, 1.0))
    assert [p.device_bytes for p in points] == [int(8 * MIB * frac) for frac in (0.01, 0.25, 1.0, 2.0)]
    nothing_fits, little, here, roomy = points
    assert nothing_fits.step_s is None
    with pytest.raises(InfeasiblePlan):
        planned(point, nothing_fits.device_bytes + 4 * MIB)
    assert here.step_s == best.result.step_s
    tokens = best.result.prediction.tokens
    assert tokens == 4 * 64
    for found in (little, roomy):
        alone = planned(point, found.device_bytes + 4 * MIB).result
        assert (alone.prediction.tokens == tokens) or not point.sequences
        assert found.step_s == pytest.approx(alone.step_s * tokens / alone.prediction.tokens)
        assert found.lower_bound_s is not None
        assert found.lower_bound_s <= found.step_s
    assert little.step_s is not None
    assert roomy.step_s is not None
    assert little.step_s >= here.step_s >= roomy.step_s
    plot_frontier(points, tmp_path / "frontier.svg", best)
    assert "does not fit" in (tmp_path / "frontier.svg").read_text()


def test_a_plan_for_less_memory_runs_with_more(two: Point, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a search with more memory finds none as quick."""
    slow, quick = planned(two, 6 * MIB), best_plan(two)
    assert quick.result.step_s < slow.result.step_s
    monkeypatch.setattr(study, "bounded_plan", lambda point, known: slow)
    points = frontier(two, quick, fracs=(1.0, 2.0))
    assert [p.step_s for p in points] == [quick.result.step_s] * 2
    assert quicker_with_less(points, quick) == ""
    monkeypatch.setattr(study, "bounded_plan", lambda point, known: quick)
    points = frontier(two, slow, fracs=(0.5, 1.0))
    assert [p.step_s for p in points] == [quick.result.step_s] * 2
    assert "was too short (--time-limit)" in quicker_with_less(points, slow)


def test_memory_that_no_gpu_has_is_left_out(two: Point) -> None:
    best = best_plan(two)
    best = replace(best, machine=with_capacity(best.machine, {DEVICE: 10**12}))
    assert [p.device_bytes for p in frontier(two, best, fracs=(1.0, 4.0))] == [10**12]


def test_the_command_draws_the_answer_that_it_prints(
    two: Point, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[FrontierPoint] = []
    monkeypatch.setattr(study, "frontier", partial(frontier, fracs=(0.5, 1.0)))
    monkeypatch.setattr(study, "plot_frontier", lambda points, path, best: drawn.extend(points))
    settings = [word for setting in two.settings for word in ("--set", setting)]
    asked = ["plan", "--model", two.model, "--machine", two.machine, "--sequences", "4", "--seq", "64", *settings]
    assert main([*asked, "--calibration", "none", "--frontier", str(tmp_path / "x.svg"), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    (here,) = (p for p in drawn if p.device_bytes == 8 * MIB)
    assert (here.step_s, printed["tokens"]) == (printed["step_s"], 4 * 64)


def test_what_is_written_at_points_stays_within_the_frame(two: Point, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    figures: list[Any] = []
    monkeypatch.setattr("tierplan.sim.output.plots.save_figure", lambda figure, path, dpi: figures.append(figure))
    steps = {gib: 100 / (4 + gib) for gib in (9, 23, 46, 92)}
    points = [FrontierPoint(device_bytes=gib * 2**30, step_s=s, lower_bound_s=0.9) for gib, s in steps.items()]
    plot_frontier(points, "x.png", best_plan(two))
    (figure,) = figures
    figure.canvas.draw()
    (axes,) = figure.axes
    frame = axes.get_window_extent()
    for text in axes.texts:
        box = text.get_window_extent()
        assert frame.x0 <= box.x0 <= box.x1 <= frame.x1, text.get_text()
        assert frame.y0 <= box.y0 <= box.y1 <= frame.y1, text.get_text()
