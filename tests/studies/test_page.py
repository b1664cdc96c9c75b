"""The what-if page: its figures are those of `plan` and `simulate`, and it works in a real browser, by keyboard too."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.browser import browser
from tests.studies.test_one_answer import SMALL
from tierplan.cli import main
from tierplan.hwmodels import load_description
from tierplan.hwmodels.machine import MachineError
from tierplan.studies import advise as advising
from tierplan.studies.evaluate import evaluate_point
from tierplan.studies.page import grid_of, shown_row, write_what_if
from tierplan.studies.purchases import PriceList, Purchase, purchases
from tierplan.studies.study import Point, Study
from tierplan.studies.sweep import sweep

SMALLER = {"gpu.capacity": "2 MiB", "gpu.reserve": 0, "host.reserve": 0}


HOST_USD = load_description("desktop-4090").number("host.price")


def small_grid(folder: Path) -> Study:
    (folder / "config.json").write_text(json.dumps({**SMALL, "n_layer": 2}))
    named = {
        "model": [str(folder)], "policy": ["planner", "zero-offload", "in-memory"], "sequences": [4],
        "gpu.part": ["rtx-3090", "rtx-4090"], "host.capacity": ["64 GiB", "128 GiB"], "nvme.drives": [1, 2],
    }  # fmt: skip
    return grid_of(named=named, settings={"seq": 64}, planner_s=10.0, overrides=SMALLER)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> tuple[Study, Path]:
    folder = tmp_path_factory.mktemp("page")
    study = small_grid(folder)
    write_what_if(folder / "what-if.html", study, keep_in=folder / "answers", num_workers=1)
    return study, folder / "what-if.html"


def embedded(path: Path) -> dict[str, Any]:
    found = re.search(r'id="grid">(.*?)</script>', path.read_text(encoding="utf-8"), re.DOTALL)
    assert found
    return json.loads(found[1])  # type: ignore[no-any-return]


def test_how_is_trained_is_said_once_and_in_every_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the page says of adapters is what the commands say that it names."""
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "n_layer": 2}))
    asked = ["page", "-o", str(tmp_path / "lora.html"), "--model", str(tmp_path), "--seq", "64", "--lora", "r=4"]
    asked += [
        "--gpu",
        "rtx-4090",
        "--dram",
        "64",
        "--drives",
        "1",
        "--method",
        "planner",
        "in-memory",
        "--workers",
        "1",
    ]
    assert main([*asked, "--sequences", "4"]) == 0
    capsys.readouterr()
    assert "64 tokens a sequence, --lora r=4. 2 answers" in (tmp_path / "lora.html").read_text()
    for row in embedded(tmp_path / "lora.html")["rows"]:
        assert main([*shlex.split(row["command"])[1:], "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["step_s"], told["tokens_per_s"]) == (row["step_s"], row["tokens_per_s"])


def test_every_figure_is_what_a_sweep_says(page: tuple[Study, Path]) -> None:
    study, path = page
    grid = embedded(path)
    points = list(study.points())
    assert len(grid["rows"]) == len(points) == 3 * 2 * 2 * 2
    for place, point in enumerate(points):
        row = grid["rows"][place]
        for axis in grid["axes"]:
            field = {**point.columns(), "gpu.count": 1}[axis["key"]]
            assert axis["texts"][place // axis["stride"] % len(axis["texts"])] == str(field)
        if place % 3:
            continue
        figures = evaluate_point(point)
        assert row["fits"] == figures["fits"]
        if row["fits"]:
            for name in ("step_s", "tokens_per_s", "limited_by"):
                assert row[name] == figures[name]
            for tier, peak, capacity, _ in row["memory"]:
                assert (peak, capacity) == (figures[f"peak_bytes.{tier}"], figures[f"capacity_bytes.{tier}"])
    assert {row["fits"] for row in grid["rows"]} == {True, False}


def test_a_search_that_was_cut_short_is_no_secret(page: tuple[Study, Path], tmp_path: Path) -> None:
    study, path = page
    short = replace(study, scenario={**study.scenario, "policy": ["in-memory"], "planner_s": [1.5]})
    write_what_if(tmp_path / "short.html", short, keep_in=tmp_path / "answers", num_workers=1)
    said = "The planner had at most 1.5 s for each: with more it finds quicker plans."
    assert said in (tmp_path / "short.html").read_text(encoding="utf-8")
    assert "The planner had at most" not in (told := path.read_text(encoding="utf-8"))
    assert "energy is at nameplate power" in told
    assert "drives&#x27; power: not known, and counted as 0 W" in told


def test_a_page_and_a_sweep_say_who_trains_other_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid = small_grid(tmp_path)
    study = replace(grid, scenario={**grid.scenario, "policy": ["zenflow", "zero-offload"]}, overrides={})
    write_what_if(tmp_path / "p.html", study, num_workers=1)
    late = "not the numbers of plain training: updates come a step late"
    assert [row["note"] for row in embedded(tmp_path / "p.html")["rows"]] == [late, ""]
    scenario = 'machine = "desktop-4090"\npolicy = ["zenflow", "zero-offload"]\nseq = 64\n'
    (tmp_path / "study.toml").write_text(f'[scenario]\nmodel = "{tmp_path}"\n{scenario}')
    capsys.readouterr()
    assert main(["sweep", str(tmp_path / "study.toml"), "--workers", "1", "-o", str(tmp_path / "out")]) == 0
    said = "1 of 2 rows do not train the numbers of plain training: updates come a step late\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("page_first", [True, False])
def test_a_sweep_and_a_page_may_share_a_folder(page_first: bool, tmp_path: Path) -> None:
    """They keep other columns of the same points."""
    grid = small_grid(tmp_path)
    study = replace(grid, scenario={**grid.scenario, "policy": ["zero-offload"]})
    points = list(study.points())

    def write(folder: Path) -> Path:
        write_what_if(tmp_path / "p.html", study, keep_in=folder, num_workers=1)
        return tmp_path / "p.html"

    shown = embedded(write(tmp_path / "alone"))
    both = tmp_path / "both"
    if page_first:
        write(both)
    assert sweep(points, out_dir=both, num_workers=1) == sweep(points, num_workers=1)
    assert embedded(write(both)) == shown


@pytest.mark.parametrize("place", [0, 9])
def test_the_command_that_is_named_says_the_same(
    page: tuple[Study, Path], place: int, capsys: pytest.CaptureFixture[str]
) -> None:
    row = embedded(page[1])["rows"][place]
    assert main([*shlex.split(row["command"])[1:], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_s"] == row["step_s"]


def test_the_price_counts_every_part(page: tuple[Study, Path]) -> None:
    study, path = page
    by_point = dict(zip((p.key for p in study.points()), embedded(path)["rows"], strict=True))
    for point in study.points():
        row = by_point[point.key]
        if row["fits"]:
            gpu = {"rtx-3090": 700, "rtx-4090": 1599}[str(point.overrides["gpu.part"])]
            more_gib = int(str(point.overrides["host.capacity"]).split()[0]) - 64
            drive_usd = load_description(point.machine).number("nvme.price") or PriceList().drive_usd
            drives = int(str(point.overrides["nvme.drives"])) * drive_usd
            assert row["price_usd"] == pytest.approx(
                gpu + HOST_USD + PriceList().dram_usd_per_gib * more_gib + drives, abs=1e-6
            )


def test_page_and_advise_have_one_price_for_a_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of its modules, and 64 GB are sold as 2 x 32 GiB. What is bought for it costs what that price rises by,
    unless modules go."""
    found: list[Purchase] = []
    monkeypatch.setattr(advising, "purchases", lambda d, p: found.extend(purchases(d, p)) or [])
    monkeypatch.setattr(advising, "largest_model_of", lambda point: {"largest_model": ""})
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "n_layer": 2}))
    model, sizes = ["--model", str(tmp_path), "--seq", "64", "--sequences", "4"], (64, 96, 128, 192)
    asked = [
        "page",
        *model,
        "--gpu",
        "rtx-4090",
        "--drives",
        "1",
        "--gpus",
        "1",
        "--method",
        "zero-offload",
        "--workers",
    ]
    asked += ["1", "--dram", *map(str, sizes)]
    assert main([*asked, "-o", str(tmp_path / "p.html")]) == 0
    little = ["host.capacity=128 MiB", "host.reserve=0"]
    words = [word for setting in little for word in ("--set", setting)]
    assert main([*asked[: asked.index("--dram")], "-o", str(tmp_path / "little.html"), *words]) == 0
    capsys.readouterr()
    shown, (shown_little,) = (
        [row["price_usd"] for row in embedded(tmp_path / name)["rows"]] for name in ("p.html", "little.html")
    )

    def advised(*settings: str) -> float:
        words = [word for setting in settings for word in ("--set", setting)]
        assert main(["advise", *model, "--machine", "desktop-4090", "--workers", "1", *words, "--json"]) == 0
        record = json.loads(capsys.readouterr().out)
        assert any("DRAM costs 10.6 USD per GiB" in text for text in record["assumptions"]) == bool(settings)
        return float(record["costs"]["machine_price_usd"])

    here = advised()
    bought = {b.overrides.get("host.capacity"): b.price_usd for b in found}
    assert shown == pytest.approx([advised(f"host.capacity={gib} GiB") for gib in sizes])
    assert shown == pytest.approx([here + (gib - 64) * PriceList().dram_usd_per_gib for gib in sizes])
    assert advised(*little) == shown_little == here, "nobody sells less than 2 x 32"
    assert bought["128 GiB"] == pytest.approx(shown[2] - here)
    assert bought["192 GiB"] == pytest.approx(192 * PriceList().dram_usd_per_gib), "modules of 32 GiB go"


def test_a_small_job_wears_and_takes_more_than_nothing() -> None:
    """It was said to take 0.0 kWh and 0.0 % of the drives' endurance."""
    figures = {"fits": True, "step_s": 1.0, "tokens_per_s": 1e3, "devices": 1, "micro_batch": 1, "accumulation": 1}
    figures |= {
        "num_batches": 1,
        "tokens": 1024,
        "limits": [],
        "limited_by": "",
        "devices_note": None,
        "other_numbers": None,
    }
    figures |= {"peak_bytes": {}, "capacity_bytes": {}, "bytes": {"nvme.write": 1}, "drive_lifetime_s": 1e6}
    point = Point(model="gpt2", machine="desktop-4090", policy="fuyou", batch=1, accumulation=1)
    costs = dict(shown_row(point, figures, PriceList(), 1e4)["costs"])
    assert costs["wear"].startswith("0.001 % ")
    watts = 450 + 150 + (load_description("desktop-4090").number("nvme.power") or 0)
    assert float(costs["energy"].removesuffix(" kWh")) == pytest.approx(watts / 1000 * 10 / 3600, rel=0.005)


def test_a_machine_without_drives_can_be_chosen(tmp_path: Path) -> None:
    small_grid(tmp_path)
    asked = ["--model", str(tmp_path), "--gpu", "rtx-4090", "--gpus", "1", "--dram", "64", "--sequences", "4"]
    asked += ["--seq", "64", "--drives", "0", "1", "--method", "zero-offload", "--workers", "1"]
    assert main(["page", "-o", str(tmp_path / "p.html"), *asked]) == 0
    without, with_one = embedded(tmp_path / "p.html")["rows"]
    assert without["step_s"] == with_one["step_s"]
    assert [tier for tier, *_ in without["memory"]] == ["gpu0", "host"]
    assert with_one["price_usd"] - without["price_usd"] > 0


def test_a_price_that_nobody_knows_is_no_secret(tmp_path: Path) -> None:
    """The page counts it as nothing, as `advise` does, and says so in the same words."""
    small_grid(tmp_path)
    asked = ["--model", str(tmp_path), "--gpu", "gtx-1080-ti", "--gpus", "1", "--sequences", "4", "--dram", "64"]
    asked += ["--seq", "64", "--machine", "harmony-4x1080ti", "--method", "zero-offload", "--workers", "1"]
    assert main(["page", "-o", str(tmp_path / "p.html"), *asked]) == 0
    (row,) = embedded(tmp_path / "p.html")["rows"]
    assert row["price_usd"] is None
    assert re.fullmatch(
        r"[\d.]+ USD; the host's price: not known, and counted as 0 USD", dict(map(tuple, row["costs"]))["machine"]
    )


def test_methods_are_shown_for_the_same_sequences_or_not_at_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two GPUs with micro-batches of their own trained 2 sequences where 1 was asked for."""
    small_grid(tmp_path)
    methods = ["in-memory", "megatron-tp"]
    asked = [
        "--model",
        str(tmp_path),
        "--gpu",
        "rtx-4090",
        "--gpus",
        "2",
        "--dram",
        "64",
        "--drives",
        "1",
        "--seq",
        "64",
    ]
    asked += ["--sequences", "1", "--method", *methods, "--workers", "1"]
    assert main(["page", "-o", str(tmp_path / "p.html"), *asked]) == 0
    capsys.readouterr()
    for method, row in zip(methods, embedded(tmp_path / "p.html")["rows"], strict=True):
        status = main([*shlex.split(row["command"])[1:], "--json"])
        told = json.loads(capsys.readouterr().out)
        told = told.get(method, told)
        assert (status == 0, told["step_s"]) == (row["fits"], row.get("step_s"))
        assert told["tokens"] == 64 if row["fits"] else "1 sequence cannot be divided among 2 GPUs" in row["why"]


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        (dict(machine="laptop", named={"gpu.part": ["rtx-4090"]}), "the GPU of 'laptop' is no card"),
        (dict(named={"gpu.part": ["rtx-4091"]}), "rtx-4091"),
        (dict(named={"policy": ["fuyuo"]}), "fuyuo"),
        (dict(named={"model": ["no-such-model"]}), "no-such-model"),
        (
            dict(machine="cloud-h100", named={"host.capacity": ["512 GiB"]}),
            "'cloud-h100' is rented as it is, at 2.95 USD an hour",
        ),
        (
            dict(machine="cloud-h100", overrides={"gpu.count": 2}),
            "is rented as it is, .*: gpu.count is 2, and its own is 1",
        ),
        (
            dict(machine="cloud-h100", named={"gpu.count": [1, 2]}, overrides={"host.rent": 5}),
            "is rented as it is, at 5 USD an hour: gpu.count is 2",
        ),
        (dict(named={"nvme.drives": [1]}, overrides={"nvme.drives": 0}), "nvme.drives is set for all points"),
    ],
)
def test_what_no_machine_can_be_is_refused_before_anything_is_planned(choices: dict[str, Any], message: str) -> None:
    with pytest.raises((MachineError, ValueError), match=message):
        grid_of(**choices)


def test_what_is_not_named_is_what_shops_sell() -> None:
    study = grid_of()
    assert study.overrides["host.capacity"] == [64 * 10**9, "96 GiB", "128 GiB"]
    assert study.overrides["gpu.part"][0] == "rtx-4090"
    assert "rtx-5090" in study.overrides["gpu.part"]
    assert study.overrides["gpu.count"] == [1]
    assert 400 <= len(list(study.points())) <= 3000
    assert len(list(grid_of(most=2).points())) <= 32
    through_the_host = grid_of("laptop", {"gpu.count": [1, 2]})
    assert through_the_host.overrides["gpu.count"] == [1, 2]
    assert "gpu.part" not in grid_of(machine="laptop").overrides
    assert grid_of("laptop", {"sequences": [4, 16, 4]}).scenario["sequences"] == [4, 16]


def test_nothing_is_bought_for_a_machine_that_is_rented() -> None:
    study = grid_of(machine="cloud-h100")
    assert {key: len(values) for key, values in study.overrides.items()} == dict.fromkeys(study.overrides, 1)
    assert study.overrides["gpu.part"] == ["h100-sxm-80gb"]
    bought = grid_of("cloud-h100", {"nvme.drives": [2, 4]}, overrides={"host.rent": 0})
    assert len(bought.overrides["nvme.drives"]) == 2


def test_in_a_browser(page: tuple[Study, Path], tmp_path: Path) -> None:
    """Nothing scrolls sideways, no network is asked, and the keyboard alone chooses every control."""
    grid = embedded(page[1])
    axes = [axis["key"] for axis in grid["axes"]]
    with browser(tmp_path) as tab:
        for width in (1280, 400):
            tab.open(page[1], width)
            assert tab.run("document.documentElement.scrollWidth") <= width
            assert tab.run("performance.getEntriesByType('resource').length") == 0
            assert f"{grid['rows'][0]['tokens_per_s']:,.0f} tokens/s" in tab.run("headline.textContent")
            assert tab.run("document.querySelectorAll('#chosen').length") == 1
            assert tab.run("document.querySelectorAll('#memory .tier').length") == len(grid["rows"][0]["memory"])
        cards, drams, drives = (axes.index(key) for key in ("gpu.part", "host.capacity", "nvme.drives"))
        for number in range(8):  # what the picture says of the chosen machine is not cut off, wherever that is
            place = {cards: number // 4, drams: number // 2 % 2, drives: number % 2}
            tab.run(f"go({[place.get(k, 0) for k in range(len(axes))]})")
            left, right = tab.run(
                "(([a, b]) => [b.left - a.left, a.right - b.right])(['svg.frontier', '.frontier [font-weight]'].map("
                "(at) => document.querySelector(at).getBoundingClientRect()))"
            )
            assert min(left, right) >= 0
        tab.run(f"go({[0] * len(axes)})")
        lines = """(() => {
            const words = document.createTreeWalker(command, NodeFilter.SHOW_TEXT), found = [], range = new Range();
            for (let wide = 250; wide < 400; wide += 10) {
                command.parentNode.style.width = `${wide}px`;
                for (words.currentNode = command; words.nextNode(); ) {
                    for (const option of words.currentNode.data.matchAll(/--[a-z-]+/g)) {
                        range.setStart(words.currentNode, option.index);
                        range.setEnd(words.currentNode, option.index + option[0].length);
                        found.push(new Set([...range.getClientRects()].map((box) => box.top)).size);
                    }
                }
            }
            return found;
        })()"""
        assert set(tab.run(lines)) == {1}, "no option is broken behind its dashes"
        values = {axis["key"]: 0 for axis in grid["axes"]}
        for axis in grid["axes"]:
            tab.press("Tab", 9)
            for _ in axis["texts"][1:]:
                tab.press("ArrowDown", 40)
            values[axis["key"]] = len(axis["texts"]) - 1
            row = grid["rows"][sum(values[a["key"]] * a["stride"] for a in grid["axes"])]
            assert tab.run("document.getElementById('command').textContent") == row["command"]
        tab.run("document.querySelector('td button').focus()")  # methods: the planner
        tab.press("Enter", 13, "\r")
        row = grid["rows"][sum(values[a["key"]] * a["stride"] for a in grid["axes"] if a["key"] != "policy")]
        assert tab.run("document.getElementById('command').textContent") == row["command"]
        assert tab.run("document.getElementById('headline').textContent").startswith(f"{row['tokens_per_s']:,.0f} tok")
        assert tab.run("document.activeElement.textContent") == "planner"  # and goes on from there
