"""A campaign runs for real, in miniature: predictions, runs, artifacts, resuming. Times are not judged here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.toys import toy_machine
from tierplan.hwmodels import load_machine
from tierplan.hwmodels.machine import Machine, Rate
from tierplan.runtime.tracing.trace import trace_config
from tierplan.sim.analysis.steady import SteadyState
from tierplan.sim.schedule import Schedule
from tierplan.sim.workloads.workload import Training
from tierplan.validation.calibration import session
from tierplan.validation.calibration.dispatch import steady_at
from tierplan.validation.calibration.session import TurnwiseTraining
from tierplan.validation.campaign import run as campaign_run
from tierplan.validation.campaign.artifact import Artifact, load_artifacts
from tierplan.validation.campaign.run import CampaignExecution
from tierplan.validation.campaign.spec import Campaign, CampaignError, Group, Run, load_campaign

GROUP = Group(
    name="gpt2-32",
    config={"model_type": "gpt2", "n_embd": 32, "n_head": 2, "n_positions": 32, "vocab_size": 64},
    depth_key="n_layer",
    batch=2,
    seq=32,
    calibration_blocks=2,
    runs=(
        Run(blocks=3, policy="in-memory"),
        Run(blocks=3, policy="zero-infinity", device="tight"),
        Run(blocks=3, policy="zero-offload", accumulation=2, max_grad_norm=1.0),
        Run(blocks=3, policy="planner", device="0.7", host="0.7", options={"time_limit_s": 1.0}),
        Run(blocks=3, policy="planner", device="0.01", host="0.01"),
    ),
)
CAMPAIGN = Campaign(name="tiny", steps=8, warmup_steps=2, turns=3, groups=(GROUP,))


def guessed_machine() -> Machine:
    """What measuring would give, in rough numbers."""
    rates = {kind: Rate.constant(2e9) for kind in ("bytes", "parameters", "elementwise_bytes")}
    rates |= {f"{work}_fp32_flops": Rate.constant(2e10) for work in ("matmul", "attention")}
    plain = toy_machine(device_bytes=10**9, host_bytes=10**9, nvme_bytes=10**8)
    return replace(plain, streams=tuple(replace(s, rates=rates) for s in plain.streams))


def executed(campaign: Campaign, folder: Path, **settings: Any) -> list[Artifact]:
    return CampaignExecution(campaign=campaign, out_dir=folder / "out", nvme_dir=folder, **settings).run()


@pytest.fixture
def without_measuring(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The machine is guessed, and the calibration run is short; everything else is real."""
    monkeypatch.setattr(session, "MOST_TURNS", 4)
    monkeypatch.setattr(campaign_run, "measure_description", lambda *args, **kwargs: None)
    monkeypatch.setattr(campaign_run, "write_description", lambda description: "")
    monkeypatch.setattr(campaign_run, "build_machine", lambda description: guessed_machine())
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("without_measuring")
@pytest.mark.parametrize(
    "interleaved",
    [pytest.param(False, marks=pytest.mark.nightly, id="one by one"), pytest.param(True, id="interleaved")],
)
def test_every_run_leaves_an_artifact_and_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interleaved: bool
) -> None:
    said: list[str] = []
    simulated: list[float] = []

    def noted(schedule: Schedule, machine: Machine, slowdown: float) -> SteadyState:
        simulated.append(slowdown)
        return steady_at(schedule, machine, slowdown)

    monkeypatch.setattr(campaign_run, "steady_at", noted)
    campaign = replace(CAMPAIGN, interleaved=interleaved)
    found = executed(campaign, tmp_path, report=said.append)
    assert [a.run for a in found] == [r.name for r in GROUP.runs]
    *answered, unanswered = found
    assert all(a.answered for a in answered), [a.why_not for a in answered]
    assert "no plan fits" in unanswered.why_not
    for a in answered:
        assert a.bytes_exact
        assert len(a.measured_steps_s) == CAMPAIGN.steps
        assert a.predicted_step_s > 0
        assert a.interval_s is not None
        assert a.interval_s[0] < a.predicted_step_s < a.interval_s[1]
        assert a.skipped_steps == (4, 6), "the first steps of later turns; of the first turn, two are warm-up"
        assert len(a.slowdowns) == len(a.turn_predictions_s) == CAMPAIGN.turns
        assert a.campaign_runs == CAMPAIGN.run_names
        for tier, peak in a.measured_peak_bytes.items():
            assert peak <= a.capacity_bytes[tier]
    everyone = [slowdown for a in answered for slowdown in a.slowdowns]
    wanted = [median(everyone if interleaved else a.slowdowns) for a in answered]
    assert simulated[-len(answered) :] == wanted if interleaved else set(wanted) <= set(simulated)
    assert answered[1].measured_bytes["nvme.read"] > 0
    assert sorted(a.run for a in load_artifacts(tmp_path / "out")) == sorted(a.run for a in found)
    assert not (tmp_path / "tierplan-campaign").exists(), "scratch files are removed"
    lines = len(said)
    again = executed(campaign, tmp_path, report=said.append)
    assert again == found
    assert len(said) == lines, "nothing was measured or run again"


@pytest.fixture
def without_running(without_measuring: None, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Groups are not executed; the content of the scratch folder is noted where one would be."""
    there: list[Path] = []

    def noted(self: CampaignExecution, group: Group, life: Any) -> Any:
        there.extend(sorted(self.scratch.rglob("*")))

    monkeypatch.setattr(CampaignExecution, "_calibrate", noted)
    monkeypatch.setattr(CampaignExecution, "_execute", lambda *args: [])
    return there


def test_two_campaigns_on_one_drive_do_not_meet(tmp_path: Path, without_running: list[Path]) -> None:
    """The second would find files of the first in use, and note that its runs have no answer; and take the folder of
    the first away when it ends."""
    with CampaignExecution(campaign=CAMPAIGN, out_dir=tmp_path / "one", nvme_dir=tmp_path).own_scratch() as scratch:
        (scratch / "file").touch()
        second = CampaignExecution(campaign=CAMPAIGN, out_dir=tmp_path / "two", nvme_dir=tmp_path)
        with pytest.raises(OSError, match=r"tierplan-campaign is in use by another campaign, .*; wait for it, or give"):
            second.run()
        assert (scratch / "file").exists()
    assert not without_running
    assert not scratch.exists()
    executed(CAMPAIGN, tmp_path)
    assert len(without_running) == 1, "the lock alone"
    assert not scratch.exists()


def test_what_a_killed_campaign_has_left_is_removed(tmp_path: Path, without_running: list[Path]) -> None:
    scratch = CampaignExecution(campaign=CAMPAIGN, out_dir=tmp_path / "one", nvme_dir=tmp_path).scratch
    (scratch / "in-memory").mkdir(parents=True)
    (scratch / "in-memory" / "tierplan.tier").write_bytes(b"x" * 1000)
    (scratch / campaign_run.LOCK_NAME).touch()
    executed(CAMPAIGN, tmp_path)
    assert len(without_running) == 1
    assert not scratch.exists()


def test_a_folder_of_that_name_that_no_campaign_has_made_is_left_alone(
    tmp_path: Path, without_running: list[Path]
) -> None:
    (tmp_path / "tierplan-campaign").mkdir()
    (tmp_path / "tierplan-campaign" / "results.csv").touch()
    with pytest.raises(CampaignError, match=r"tierplan-campaign holds 'results.csv', which no campaign has made"):
        executed(CAMPAIGN, tmp_path)
    assert (tmp_path / "tierplan-campaign" / "results.csv").exists()
    assert not without_running


@pytest.mark.usefixtures("without_measuring")
def test_a_run_that_fails_takes_no_other_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full drive, and an error without a text, in runs that take turns with one that does well."""

    class Failing(TurnwiseTraining):
        def take_turn(self, *args: Any, **kwargs: Any) -> Any:
            if "nvme.read" in self.trainer.schedule.streams:
                raise OSError(28, "No space left on device")
            if "host.adam" in self.trainer.schedule.streams:
                raise RuntimeError
            return super().take_turn(*args, **kwargs)

    monkeypatch.setattr(campaign_run, "TurnwiseTraining", Failing)
    runs = (GROUP.runs[1], GROUP.runs[2], GROUP.runs[0])
    campaign = replace(CAMPAIGN, interleaved=True, groups=(replace(GROUP, runs=runs),))
    full, silent, well = executed(campaign, tmp_path)
    assert "No space left" in full.why_not
    assert silent.why_not == "RuntimeError()"
    assert well.answered


def test_a_gpu_that_fails_is_no_answer_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would never be repeated; nor would all that came after it in this process, which fail alike."""

    class Failing(TurnwiseTraining):
        def take_turn(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(campaign_run, "TurnwiseTraining", Failing)
    with pytest.raises(RuntimeError, match="CUDA error: unspecified launch failure"):
        executed(CAMPAIGN, tmp_path)
    assert list(tmp_path.rglob("*.json")) == []


def test_only_what_is_asked_is_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calibration = SimpleNamespace(timed=lambda workload, machine: workload, on=lambda machine: machine)
    session = SimpleNamespace(machine=guessed_machine(), calibration=calibration)
    monkeypatch.setattr(campaign_run.CampaignExecution, "_calibrate", lambda *of: session)
    found = executed(CAMPAIGN, tmp_path, only="0.01")
    assert [a.run for a in found] == ["3-blocks-planner-0.01-0.01"]


@pytest.mark.parametrize(
    ("group", "run", "message"),
    [
        ({}, {"policy": "zero-ofload"}, "there is no policy 'zero-ofload'; did you mean 'zero-offload'?"),
        ({}, {"policy": ""}, "there is no policy ''"),
        ({}, {"options": {"checkpoint": "on"}}, "policy 'zero-offload' has no option 'checkpoint'"),
        ({}, {"options": {"checkpointing": "maybe"}}, "option 'checkpointing' of policy 'zero-offload' is 'maybe'"),
        ({}, {"policy": "planner", "options": {"time_limit": 1}}, "unexpected keyword argument 'time_limit'"),
        ({}, {"policy": "planner", "options": {"time_limit_s": "1"}}, "time_limit_s is '1'; it must be a number"),
        ({}, {"policy": "planner", "options": {"time_limit_s": -1.0}}, "time_limit_s is -1.0; give a finite number"),
        ({}, {"policy": "planner", "options": {"policies": ["fuyo"]}}, "there is no policy 'fuyo'"),
        ({"seq": 33}, {}, "33"),
        ({"dtype": "int8"}, {}, "dtype is 'int8'"),
        ({"depth_key": "layers"}, {}, "depth_key 'layers' does not change the model's depth"),
        ({"config": {"model_type": "gpt3"}}, {}, "gpt3"),
    ],
)
def test_a_mistake_of_the_last_run_is_told_before_the_first_starts(
    tmp_path: Path, group: dict[str, Any], run: dict[str, Any], message: str
) -> None:
    last = replace(GROUP, name="last", **group, runs=(replace(Run(blocks=3, policy="zero-offload"), **run),))
    campaign = replace(CAMPAIGN, groups=(replace(GROUP, runs=GROUP.runs[:1]), last))
    with pytest.raises(CampaignError, match=rf"run '3-blocks-.*' of group 'last': .*{message}"):
        executed(campaign, tmp_path)
    assert not list(tmp_path.iterdir())


def test_asking_for_no_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CampaignError, match="no run of campaign 'tiny' has 'typo' in its group/name"):
        executed(CAMPAIGN, tmp_path, only="typo")


def test_the_campaign_that_comes_with_tierplan_is_what_the_documentation_says() -> None:
    campaign = load_campaign("cpu-small")
    runs = [(g, r) for g in campaign.groups for r in g.runs]
    assert len(runs) >= 24
    assert {str(g.config["model_type"]) for g in campaign.groups} == {"gpt2", "llama", "opt"}
    depths = {r.blocks for _, r in runs}
    assert min(depths) == 4
    assert max(depths) == 24
    assert len({(g.batch, g.seq) for g in campaign.groups}) >= 4
    assert sum(r.policy == "planner" for _, r in runs) >= 5
    assert {r.device for _, r in runs} >= {"roomy", "middle", "tight"}


def test_the_campaign_for_a_gpu_is_not_tried_without_one(tmp_path: Path) -> None:
    with pytest.raises(CampaignError, match="for a CUDA GPU, and the device is 'cpu'"):
        executed(load_campaign("gpu-billions"), tmp_path)
    assert not (tmp_path / "out").exists()


def test_the_campaign_for_a_gpu_fits_the_machine_that_it_asks_for() -> None:
    """Its file's first lines: 80 GB on the device, 128 GB in the host, 60 GB on the drive. Here its largest runs."""
    campaign = load_campaign("gpu-billions")
    assert len(campaign.run_names) >= 24
    has = {"gpu0": 80e9, "host": 128e9, "nvme": 60e9}
    machine = load_machine("desktop-4090", ["gpu.part=h100-sxm-80gb"])
    largest = {"gpt2-2560": ("in-memory", "zero-infinity"), "llama-4096": ("sliding-window",)}
    most = dict.fromkeys(has, 0.0)
    for group in campaign.groups:
        for run in group.runs:
            if run.policy in largest.get(group.name, ()):
                training = Training(
                    per_device_train_batch_size=group.batch,
                    gradient_accumulation_steps=run.accumulation,
                    sequence_length=group.seq,
                    dtype="bf16",
                    master_weights=True,
                )
                workload = trace_config(group.name, group.model_config(run.blocks), training)
                assert workload.num_parameters > 2.5e9
                _, _, steady = campaign_run.predict_run(run, workload, machine)
                most = {tier: max(size, steady.peak_bytes[tier]) for tier, size in most.items()}
    assert all(0.5 * has[tier] < size <= has[tier] for tier, size in most.items()), most
