"""Machines made in code: what contradicts itself is refused, as it is in a description. And files of Windows."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.hwmodels.test_description import ANOTHER, PLAIN
from tests.toys import toy_machine
from tierplan.hwmodels import Quantity, load_machine
from tierplan.hwmodels.build import build_machine
from tierplan.hwmodels.description import KEYS, parse_description
from tierplan.hwmodels.machine import MachineError, PredictionBasis, Rate, SharedLimit

INF = float("inf")


@pytest.mark.parametrize(
    "points", [(), ((1.0, 0.0),), ((1.0, -5.0),), ((0.0, 1.0),), ((1.0, INF),), ((1000.0, 5.0), (10.0, 5.0)),
               ((10.0, 5.0), (10.0, 6.0))]
)  # fmt: skip
def test_a_rate_has_points_that_rise(points: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(MachineError, match="by rising amount, all finite and above 0"):
        Rate(points)


def test_all_that_a_short_file_lacks_is_said_at_once() -> None:
    """What the message lists is enough: with it the machine is built."""
    short = 'name = "mine"\n'
    with pytest.raises(MachineError, match="add these 9, name a drive of the catalog") as error:
        build_machine(parse_description(short, where="mine.toml"))
    lacks = re.findall(r"\b(?:gpu|link|host|nvme)\.\w+(?= \()", str(error.value))
    more = "".join(f"{name} = '{ANOTHER[KEYS[name].unit]}'\n" for name in lacks)
    assert len(lacks) == 9
    build_machine(parse_description(short + more, where="mine.toml"))


def test_no_two_parts_of_a_kind_have_one_name() -> None:
    toy = toy_machine()
    for what, parts in (("tiers", toy.tiers), ("streams", toy.streams)):
        with pytest.raises(MachineError, match=f"has two {what} called '{parts[0].name}'"):
            replace(toy, **{what: (*parts, parts[0])})  # type: ignore[arg-type]
    with pytest.raises(MachineError, match="two shared limits called 'x'"):
        replace(toy, shared_limits=(SharedLimit(name="x", limit=1.0), SharedLimit(name="x", limit=2.0)))


@pytest.mark.parametrize("half_width", [-1.0, 1e6, float("nan")])
def test_an_interval_has_two_ends(half_width: float) -> None:
    with pytest.raises(MachineError, match="half_width"):
        PredictionBasis("made up", half_width)


def test_a_file_of_windows_is_read(tmp_path: Path) -> None:
    """Its editors put a mark at the begin of text."""
    path = tmp_path / "plain.toml"
    path.write_text(PLAIN, encoding="utf-8")
    plain = load_machine(path)
    path.write_text(PLAIN, encoding="utf-8-sig")
    assert load_machine(path) == plain


def test_a_curve_of_one_point_is_shown_as_one() -> None:
    """An import of all_reduce_perf said "4 GB/s (at 8 GPUs) to 4 GB/s (at 8 GPUs)"."""
    assert Quantity(((8.0, 4e9),)).text(KEYS["link.collective"]) == "4 GB/s (at 8 GPUs)"


def test_another_gpu_takes_nothing_of_what_the_old_one_took(tmp_path: Path) -> None:
    """Where a CPU was measured as one, it computes on all cores. A card does not: it waited for every copy."""
    limit = '[[limit]]\nname = "{}"\nlimit = 1.0\ntakes = {{ "gpu0.compute" = 1.0 {} }}\n'
    path = tmp_path / "m.toml"
    path.write_text(PLAIN + limit.format("cores", ', "host.adam" = 0.9') + limit.format("heat", ""))
    own, card = load_machine(path), load_machine(path, ["gpu.part=rtx-3060"])
    assert {"cores", "heat"} <= own.stream("gpu0.compute").takes.keys()
    assert card.stream("gpu0.compute").takes == {}
    assert "cores" in card.stream("host.adam").takes
    assert {x.name for x in own.shared_limits} - {x.name for x in card.shared_limits} == {"heat"}
