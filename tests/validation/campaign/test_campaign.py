"""Campaign files, artifacts and their summary, without running anything."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tierplan.validation.campaign.artifact import Artifact, load_artifacts
from tierplan.validation.campaign.spec import CampaignError, load_campaign
from tierplan.validation.campaign.summary import campaign_markdown, summarise

CAMPAIGN = """
name = "small"
steps = 5
turns = 1
[[group]]
name = "gpt2-64"
depth_key = "n_layer"
batch = 2
seq = 64
[group.config]
model_type = "gpt2"
n_embd = 64
[[group.run]]
blocks = 4
policy = "in-memory"
[[group.run]]
blocks = 4
policy = "planner"
device = "0.5"
"""


def artifact(predicted_s: float, measured_s: float, **changes: object) -> Artifact:
    plain = Artifact(
        campaign="small",
        group="gpt2-64",
        run="4-blocks-in-memory-roomy-roomy",
        model="gpt2, 4 blocks",
        settings={"blocks": 4},
        machine="toy",
        when="2026-01-01",
        versions={"tierplan": "0"},
        answered=True,
        predicted_step_s=predicted_s,
        measured_steps_s=(9.0, measured_s * 0.9, measured_s, measured_s * 1.1),
        warmup_steps=1,
        predicted_peak_bytes={"gpu0": 103, "host": 100},
        measured_peak_bytes={"gpu0": 100, "host": 102},
        predicted_bytes={"nvme.read": 5},
        measured_bytes={"nvme.read": 5.0},
        interval_s=(0.9 * predicted_s, 1.1 * predicted_s),
        causes=(("copy on nvme.read", 0.1),),
        busy_s={"nvme.read": (0.5, 0.6)},
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def test_campaign_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(CAMPAIGN)
    campaign = load_campaign(path)
    assert len(campaign.run_names) == 2
    group = campaign.groups[0]
    assert [r.name for r in group.runs] == ["4-blocks-in-memory-roomy-roomy", "4-blocks-planner-0.5-roomy"]
    assert group.model_config(7) == {"model_type": "gpt2", "n_embd": 64, "n_layer": 7}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("blocks = 4", "blocks = 3"), "as many as the calibration model"),
        (('policy = "planner"\ndevice = "0.5"', 'policy = "in-memory"'), "lists run .* twice"),
        (('policy = "planner"', 'policy = "fuyou"'), "device and host are one of tight, middle, roomy"),
        (("batch = 2", "batch = 0"), r"groups\[0\].*batch is 0; it must be a whole number >= 1"),
        (("blocks = 4", "blocks = -1"), r"runs\[0\].*blocks is -1; it must be a whole number >= 1"),
        (('policy = "in-memory"', 'policy = "in-memory"\nmax_grad_norm = inf'), "max_grad_norm is inf; it must be"),
        (('device = "0.5"', 'device = "tight"'), "device and host of the planner are 'roomy', or a fraction"),
        (('device = "0.5"', 'device = "nan"'), "device and host of the planner are 'roomy', or a fraction"),
        (('name = "gpt2-64"', 'name = "../x"'), "group name '../x' is to be that of a folder"),
        (("steps = 5", "steps = 5\nwarmup_steps = -1"), "warmup_steps is -1"),
        (("steps = 5", "stpes = 5"), "unknown field 'stpes'"),
        (("name =", "name"), "is not TOML"),
        (("turns = 1", "turns = 3"), "5 steps in 3 turns leave no step to count"),
    ],
)
def test_a_campaign_with_a_mistake_names_it(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text(CAMPAIGN.replace(*change, 1))
    with pytest.raises(CampaignError, match=message):
        load_campaign(path)


def test_two_groups_of_one_name_are_refused(tmp_path: Path) -> None:
    """Their runs go by the group's name: one would have the other's model."""
    path = tmp_path / "c.toml"
    path.write_text(CAMPAIGN + CAMPAIGN[CAMPAIGN.index("[[group]]") :].replace("blocks = 4", "blocks = 5"))
    with pytest.raises(CampaignError, match="lists group 'gpt2-64' twice"):
        load_campaign(path)


def test_an_empty_campaign_says_what_it_lacks(tmp_path: Path) -> None:
    path = tmp_path / "empty.toml"
    path.write_text("name = 'empty'")
    with pytest.raises(CampaignError, match=r"empty.toml has no run; give it a \[\[group\]\]"):
        load_campaign(path)


def test_a_campaign_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "old.toml"
    path.write_bytes(b'name = "\xe9t\xe9"')
    with pytest.raises(CampaignError, match=r"old\.toml is not text in UTF-8"):
        load_campaign(path)


def test_unknown_campaign_lists_the_known() -> None:
    with pytest.raises(CampaignError, match="no campaign 'nope'"):
        load_campaign("nope")


def test_artifact_round_trips(tmp_path: Path) -> None:
    one = artifact(1.0, 1.1)
    one.save(tmp_path / "a" / "one.json")
    assert load_artifacts(tmp_path) == [one]
    (tmp_path / "a" / "two.json").write_text("{}")
    with pytest.raises(CampaignError, match=r"two\.json is not an artifact"):
        load_artifacts(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"measured_steps_s": ()}, "none of its 0 measured_steps_s counts"),
        ({"warmup_steps": 4}, "none of its 4 measured_steps_s counts, with warmup_steps 4"),
        ({"measured_steps_s": (1.0, 0.0)}, r"measured_steps_s\[1\] is 0.0; it must be a number > 0"),
        ({"warmup_steps": -1}, "warmup_steps is -1; it must be a whole number >= 0"),
        ({"skipped_steps": (7,)}, "skipped_steps has 7, but there are 4 steps"),
        ({"predicted_step_s": 0.0}, "predicted_step_s is 0 or not there"),
        ({"interval_s": (2.0, 1.0)}, r"interval_s is \[2.0, 1.0\]; it must be its lower end"),
        ({"predicted_peak_bytes": {"host": 1}}, "measured_peak_bytes has tier 'gpu0', which predicted_peak_bytes"),
        ({"why_not": "no drive"}, "answered is true, but why_not is 'no drive'"),
        ({"answered": False}, "answered is false, and why_not is empty"),
    ],
)
def test_an_artifact_that_no_run_leaves_is_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    artifact(1.0, 1.1, **changes).save(tmp_path / "one.json")
    with pytest.raises(CampaignError, match=rf"one\.json is not an artifact .*: {message}"):
        load_artifacts(tmp_path)


def test_a_run_does_not_count_twice(tmp_path: Path) -> None:
    for path, when in (("one.json", "2026-01-01"), ("again/one.json", "2026-01-02")):
        artifact(1.0, 1.1, when=when).save(tmp_path / path)
    assert len(load_artifacts(tmp_path)) == 2
    artifact(1.0, 1.1).save(tmp_path / "copy" / "one.json")
    with pytest.raises(CampaignError, match=r"one\.json and .*copy/one\.json are one run, which would count twice"):
        load_artifacts(tmp_path)


def test_figures_of_one_run() -> None:
    one = artifact(1.0, 1.25)
    assert one.measured_step_s == 1.25
    assert one.error_frac == pytest.approx(-0.2)
    assert one.in_interval is False
    assert one.bytes_exact
    assert one.worst_peak_error_frac == pytest.approx(0.03)
    assert not artifact(1, 1, measured_bytes={"nvme.read": 6.0}).bytes_exact
    assert artifact(1, 1, interval_s=None).in_interval is None


def test_summary_counts_everything_that_was_asked() -> None:
    """Ten runs with errors of 1 % to 10 %, slower than predicted, and two without an answer."""
    runs = [artifact(1.0 - i / 100, 1.0) for i in range(1, 11)]
    runs += [artifact(0.0, 1.0, answered=False, why_not="no drive")] * 2
    found = summarise(runs)
    assert (found.num_runs, found.num_answered) == (12, 10)
    assert found.median_error_frac == pytest.approx(0.055)
    assert found.p90_error_frac == pytest.approx(0.09)
    assert found.mean_signed_error_frac == pytest.approx(-0.055)
    assert found.within_10_frac == pytest.approx(10 / 12)
    assert found.num_bytes_exact == 10
    assert found.worst_peak_error_frac == pytest.approx(0.03)
    assert found.interval_coverage_frac == pytest.approx(0.9)
    with pytest.raises(CampaignError, match="none of 2 runs has an answer: no drive"):
        summarise(runs[10:])


def test_ranking_is_judged_per_model() -> None:
    good = [artifact(p, m) for p, m in ((1, 1.2), (2, 1.9), (3, 3.5))]
    swapped = [artifact(p, m, model="gpt2, 8 blocks") for p, m in ((1, 2.0), (2, 1.5), (3, 3.5))]
    few = [artifact(1, 1, model="opt"), artifact(2, 2, model="opt")]
    tau = summarise([*good, *swapped, *few]).tau
    assert sorted(tau.values()) == pytest.approx([1 / 3, 1.0])


def test_plans_that_are_as_quick_as_each_other_are_told_from_those_that_are_not() -> None:
    """Steps scatter by 10 % of 1 s over three steps: plans 2 and 3 differ by less than that, plan 1 by much more."""
    runs = [artifact(p, m) for p, m in ((1.0, 1.0), (3.01, 3.0), (3.0, 3.02))]
    found = summarise(runs)
    (tau,), (apart,) = found.tau.values(), found.tau_distinct.values()
    assert tau == pytest.approx(1 / 3)
    assert apart == 1.0
    alike = [artifact(p, m) for p, m in ((1.0, 1.0), (1.01, 1.01), (1.02, 1.0))]
    assert summarise(alike).tau_distinct == {}


def test_plans_that_are_predicted_to_be_as_quick_as_each_other_have_no_order() -> None:
    found = summarise([artifact(1.0, m) for m in (1.0, 3.0, 9.0)])
    assert found.tau == {}
    assert list(found.tau_distinct.values()) == [0.0]


def test_runs_that_nobody_made_count_as_asked() -> None:
    wanted = ("gpt2-64/4-blocks-in-memory-roomy-roomy", "gpt2-64/4-blocks-fuyou-roomy-roomy")
    found = summarise([artifact(1.0, 1.0, campaign_runs=wanted)])
    assert (found.num_runs, found.num_answered) == (2, 1)
    assert found.missing_runs == ("toy: gpt2-64/4-blocks-fuyou-roomy-roomy",)
    assert found.within_10_frac == 0.5
    page = campaign_markdown([artifact(1.0, 1.0, campaign_runs=wanted)])
    assert "1 of 2 runs answered" in page
    assert "not run: 1 (toy: gpt2-64/4-blocks-fuyou-roomy-roomy)" in page


def test_first_steps_after_a_pause_do_not_count() -> None:
    one = artifact(
        1.0, 1.0, measured_steps_s=(9.0, 1.0, 5.0, 1.2, 1.1), skipped_steps=(2,), turn_predictions_s=(1.1, 0.9)
    )
    assert one.counted_steps_s == (1.0, 1.2, 1.1)
    assert one.measured_step_s == 1.1
    assert one.first_error_frac == pytest.approx(0.0)


def test_page_has_a_row_for_every_run_and_says_what_failed() -> None:
    runs = [
        artifact(1.0, 1.1),
        artifact(2.0, 2.2, settings={"policy": "fuyou", "accumulation": 4, "max_grad_norm": 1.0}),
    ]
    runs.append(artifact(0.0, 1.0, answered=False, why_not="host memory is short | by 3 GiB"))
    page = campaign_markdown(runs)
    rows = [line for line in page.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 3
    assert all(row.count("|") == 11 for row in rows)
    assert "| 1 s | 900 ms to 1.1 s | 1.1 s | -9.1 % | +3.0 % | exact | copy on nvme.read +100 ms |" in rows[0]
    assert "fuyou, 4 micro-batches, clipping" in rows[1]
    assert "no answer: host memory is short / by 3 GiB" in rows[2]
    assert "2 of 3 runs answered" in page
