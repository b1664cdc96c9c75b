"""Published figures are met as far as docs/validation.md says, and none of them leaks into its own prediction."""

from __future__ import annotations

import json
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from tierplan.cli import main
from tierplan.hwmodels import load_machine
from tierplan.planner.policies import NEED_SEVERAL_DEVICES
from tierplan.validation.published import reproduce as reproduction
from tierplan.validation.published.page import BEGIN, END, markdown, plot, update_page
from tierplan.validation.published.reproduce import (
    Report,
    Row,
    constants_of,
    is_step_time,
    label_of,
    published,
    reproduce,
    systems,
)
from tierplan.validation.published.workloads import tensor_parallel_workload

QUICK = ("fuyou", "ssdtrain", "zero")
MEAN_LIMIT, ROW_LIMIT, TAU_LIMIT = 0.12, 0.20, 0.9


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    return {system: reproduce(system) for system in QUICK}


@pytest.mark.parametrize("system", QUICK)
def test_every_row_is_answered(reports: dict[str, Report], system: str) -> None:
    asked = sum(len(result["rows"]) for result in published(system)["result"])
    assert len(reports[system].rows) == asked
    assert all(row.predicted is not None for row in reports[system].rows)


@pytest.mark.parametrize("system", ["fuyou", "zero"])
def test_step_times_that_were_never_fitted_are_met(reports: dict[str, Report], system: str) -> None:
    report = reports[system]
    assert report.figures["mean_abs_error"] <= MEAN_LIMIT
    assert report.figures["max_abs_error"] <= ROW_LIMIT
    assert report.kendall_tau is not None
    assert report.kendall_tau >= TAU_LIMIT


@pytest.mark.parametrize("system", ["fuyou", "zero"])
def test_what_is_published_to_fit_fits_and_what_is_published_to_fail_does_not(
    reports: dict[str, Report], system: str
) -> None:
    rows = [row for row in reports[system].checked if row.quantity == "fits"]
    assert {row.value for row in rows} == {0.0, 1.0}
    assert all(row.error == 0 for row in rows), [row.label for row in rows if row.error]


def test_calibrated_rows_are_met_by_the_constants_that_they_fixed(reports: dict[str, Report]) -> None:
    rows = [row for row in reports["fuyou"].rows if row.role == "calibrate"]
    assert len(rows) == 3
    assert all(abs(row.error or 0.0) <= 0.02 for row in rows)


def test_constants_are_named_and_come_from_calibration_rows_only() -> None:
    """No constant of a machine says that it is calibrated on a row that is to be checked."""
    for result in published("fuyou")["result"]:
        for row in result["rows"]:
            if result["role"] in ("calibrate", "check") and result["quantity"] == "step_s":
                plural = "s" if row["drives"] > 1 else ""
                text = f"{result['model']}, {row['drives']} drive{plural}, batch {row['batch']} ("
                described = json.dumps(dict(load_machine("fuyou-4090").description))
                assert (text in described) == (result["role"] == "calibrate"), text


def saved_units(head: str, decoder_layers: int) -> tuple[list[float], float]:
    """What each block keeps (its input with it) and the head's softmax, in units of seq * batch * hidden bytes."""
    table = published("ssdtrain")
    settings = {**table["system"], "hidden": 8192, "layers": 4, "decoder_layers": decoder_layers}
    workload = tensor_parallel_workload(settings, table["chunk"], table["head"][head]["saves"])
    unit = 16 * 1024 * 8192
    blocks = [(u.input_bytes + sum(t.size_bytes for t in u.saved)) / unit for u in workload.blocks]
    return blocks, workload.units[-1].saved[-1].size_bytes / unit


def test_a_tensor_parallel_layer_saves_what_the_paper_counts() -> None:
    """10 + 24 / 2 units a layer, by its formula; the softmax in fp16 is 2 bytes per logit of this GPU's half."""
    blocks, softmax = saved_units("BERT", 0)
    assert blocks == [9, 13] * 4
    assert sum(blocks) == 4 * (10 + 24 / 2)
    assert softmax == 2 * (30720 / 2) / 8192


def test_t5_saves_cross_attention_in_its_decoder_and_the_encoders_output_once() -> None:
    blocks, _ = saved_units("T5", 2)
    assert blocks == [9, 13, 9, 13, 9, 9 + 4, 13, 9, 9, 13]


def test_ssdtrains_claims_hold_at_the_locked_clock(reports: dict[str, Report]) -> None:
    by_quantity: dict[str, list[Row]] = {}
    for row in reports["ssdtrain"].checked:
        by_quantity.setdefault(row.quantity, []).append(row)
    assert all((row.predicted or 0.0) >= 0.28 for row in by_quantity["activation_peak_reduction"])
    assert all(row.error == 0 for row in by_quantity["step_overhead"])
    assert all((row.predicted or 0.0) > 0 for row in by_quantity["peak_below_recompute"])


def test_a_prediction_does_not_depend_on_the_published_value(monkeypatch: pytest.MonkeyPatch) -> None:
    original = published("fuyou")
    result = original["result"][0]
    row = {**result["rows"][0], "value": 2 * result["rows"][0]["value"]}

    def doubled(system: str) -> dict[str, Any]:
        return {**original, "result": [{**result, "rows": [row]}]}

    monkeypatch.setattr(reproduction, "published", doubled)
    (found,) = reproduce("fuyou").rows
    assert found.value == 2 * result["rows"][0]["value"]
    assert found.error == pytest.approx(-0.5, abs=0.02)


@pytest.mark.parametrize(
    ("policy", "devices", "quantity"),
    [("harmony-dp", 4, "iteration_s"), ("harmony-pp", 4, "iteration_s"), ("harmony-dp", 4, "weight_swap_gib")],
)
def test_harmonys_own_inputs_give_its_own_estimates(policy: str, devices: int, quantity: str) -> None:
    table = published("harmony")
    result = next(r for r in table["result"] if r["quantity"] == quantity and r["role"] == "check")
    row = next(r for r in result["rows"] if (r["policy"], r["devices"]) == (policy, devices))
    settings = {**table["system"], **result, **row}
    found = reproduction.QUANTITIES[quantity](table, settings)
    assert isinstance(found, float)
    assert found == pytest.approx(row["value"], rel=0.05)


def test_rows_held_out_on_one_gpu_are_met() -> None:
    table = published("ratel")
    rows = [{**table["system"], **result, **row} for result in table["result"][:1] for row in result["rows"]]
    found = [reproduction.QUANTITIES["tflops_8nd"](table, row) for row in rows]
    errors = [value / row["value"] - 1 for value, row in zip(found, rows, strict=True) if isinstance(value, float)]
    assert len(errors) == 10
    assert sorted(map(abs, errors))[5] <= 0.04
    assert max(map(abs, errors)) <= 0.14


@pytest.mark.nightly
def test_all_of_harmonys_rows() -> None:
    report = reproduce("harmony")
    assert report.coverage == (10, 10)
    own = [row for row in report.checked if is_step_time(row) and "gpt2-10b" in row.label]
    assert len(own) == 5
    assert all(abs(row.error or 0.0) <= 0.05 for row in own)
    assert report.kendall_tau == pytest.approx(1.0)


def test_an_error_is_taken_to_the_nearest_end_of_a_published_range() -> None:
    def row(predicted: float) -> Row:
        return Row("x", "check", "step_s", "a", 10.0, 12.0, predicted)

    assert row(11.0).error == 0
    assert row(9.0).error == pytest.approx(-0.1)
    assert row(15.0).error == pytest.approx(0.25)
    assert Row("x", "check", "step_s", "a", 10.0, 12.0, None).error is None


def test_kendalls_tau_is_that_of_hand_counted_pairs() -> None:
    rows = [Row("x", "check", "step_s", "a", v, v, p) for v, p in ((1.0, 1.0), (2.0, 3.0), (3.0, 2.0), (4.0, 4.0))]
    assert Report("x", "", tuple(rows), ()).kendall_tau == pytest.approx((5 - 1) / 6)


def test_writing_the_page_leaves_the_rest_of_it_alone(tmp_path: Path, reports: dict[str, Report]) -> None:
    page = tmp_path / "validation.md"
    page.write_text(f"# Validation\n\nBefore.\n\n{BEGIN}\nold\n{END}\n\nAfter.\n", encoding="utf-8")
    update_page([without_paths(reports["zero"])], page)
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# Validation\n\nBefore.\n")
    assert text.endswith("\n\nAfter.\n")
    assert "old" not in text
    assert (tmp_path / "figures" / "reproduce-zero.png").stat().st_size > 1000
    update_page([without_paths(reports["zero"])], page)
    assert page.read_text(encoding="utf-8") == text
    page.write_text("# no markers\n", encoding="utf-8")
    with pytest.raises(ValueError, match="has no lines"):
        update_page([reports["zero"]], page)


def without_paths(report: Report) -> Report:
    """What does not wait for critical paths, which SimPy makes."""
    return replace(report, rows=tuple(replace(row, prediction=None) for row in report.rows))


def test_a_step_time_has_its_critical_path_beside_it(reports: dict[str, Report]) -> None:
    row = next(row for row in reports["zero"].rows if row.path)
    assert row.label.endswith("step")
    assert row.path == "gpu0.compute 19.2, host.adam 6.6, gpu0.d2h 3.4"
    assert row.record()["path"] == row.path
    assert f"| {row.path} |" in markdown([replace(reports["zero"], rows=(row,))])


def test_a_table_without_critical_paths_has_no_heading_for_them(reports: dict[str, Report]) -> None:
    assert "critical path" not in markdown([without_paths(reports["zero"])])


def test_a_curve_among_the_constants_is_short() -> None:
    (curve,) = (text for text in constants_of("roundpipe-8x4090") if "link.collective" in text)
    assert " = 2: 1.45e+10, 4: 1.64e+10, 8: 2.5e+09 (" in curve


def test_every_row_is_on_the_page(reports: dict[str, Report]) -> None:
    text = markdown([without_paths(report) for report in reports.values()])
    for report in reports.values():
        for row in report.rows:
            assert f"| {row.role} | {row.quantity} | {row.label} |" in text


def test_an_unknown_system_names_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "fuyo"]) == 1
    assert (
        "no published figures of 'fuyo'; did you mean 'fuyou'? choose among fuyou, harmony" in capsys.readouterr().err
    )
    assert set(QUICK) < set(systems())


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "ssdtrain", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)["ssdtrain"]
    assert record["answered"] == record["asked"]
    assert len(record["rows"]) > record["asked"]


def test_simulate_prints_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["simulate", "--policy", "fuyou", "--model", "gpt-13b", "--machine", "fuyou-4090"]
    assert main([*arguments, "--batch", "8", "--seq", "1024", "--set", "nvme.drives=12", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["fits"] is True
    assert record["step_s"] == pytest.approx(19.7, rel=0.02)
    assert record["bytes"]["nvme.read"] == pytest.approx(16 * record["num_parameters"], rel=1e-5)


def test_simulate_says_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--policy", "in-memory", "--model", "gpt-13b", "--machine", "fuyou-4090", "--json"]) == 3
    shortage = json.loads(capsys.readouterr().out)["shortage"]
    assert shortage["tier"] == "gpu0"
    assert shortage["short_bytes"] == shortage["needed_bytes"] - shortage["capacity_bytes"] > 0


def test_simulate_says_in_a_few_lines_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--policy", "in-memory", "--model", "gpt-13b", "--machine", "fuyou-4090"]) == 3
    out = capsys.readouterr().out
    assert "GiB in tier 'gpu0'" in out
    assert all(len(line) <= 80 for line in out.splitlines())


def test_compare_policies_lists_all_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "policies.png"
    config = {
        "model_type": "gpt2",
        "n_layer": 6,
        "n_embd": 4096,
        "n_head": 32,
        "n_positions": 1024,
        "vocab_size": 50257,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ["compare-policies", "--model", str(tmp_path), "--machine", "fuyou-4090", "--plot", str(picture)]
    assert main([*arguments, "--set", "gpu.capacity=10 GB", "--semantics", "exact-clip", "--batch", "8"]) == 0
    text = capsys.readouterr().out
    rows = {line.split()[0].rstrip("*") for line in text.splitlines() if line.strip()}
    assert rows >= {"fuyou", "zero-infinity", "harmony", "sliding-window"}
    assert not rows & NEED_SEVERAL_DEVICES  # on one GPU
    assert "does not fit: needs" in text
    assert picture.stat().st_size > 10_000


def test_a_picture_has_every_point_and_the_numbers_of_neighbours_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many rows two that are too slow, side by side, and the quickest one predicted at half of its time."""
    steps = [(1.0, 0.5), *((2.0 * 1.1**k, 2.0 * 1.1**k) for k in range(40)), (30.0, 42.0), (31.0, 38.0)]
    rows = tuple(Row("x", "check", "step_s", f"row {a}", a, a, b) for a, b in steps)
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    plot(Report("x", "nobody", rows, ()), tmp_path / "x.png")
    axes, listed = drawn[0].axes
    (low, high), (lowest, highest) = axes.get_xlim(), axes.get_ylim()
    assert all(low < a < high and lowest < b < highest for a, b in steps)
    assert [line.split()[0] for line in listed.texts[0].get_text().splitlines()] == ["1", "2", "3"]
    places = {text.get_text(): log(text.xy[0]) + text.xyann[0] / 100 for text in axes.texts}
    assert places["1"] < places["2"] < places["3"]


def test_parameters_of_a_row_are_told_as_people_say_them() -> None:
    assert label_of({"policy": "fuyou", "parameters": 64.8e9, "hidden": 8192}) == (
        "fuyou, 64.8 B parameters, hidden 8192"
    )
