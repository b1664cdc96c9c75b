"""A campaign runs for real, in miniature: predictions, runs, artifacts, resuming. Times are not judged here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.toys import toy_machine, toy_workload, uniform_plan
from tierplan.hwmodels.machine import Machine, Rate, SharedLimit
from tierplan.planner.lowering import lower
from tierplan.planner.plan import UnitPlan
from tierplan.sim.pricing import simulate_on
from tierplan.sim.schedule import unroll
from tierplan.validation import campaign_run
from tierplan.validation.block_times import TIMED, PartTimes, calibrated, with_times
from tierplan.validation.campaign import Campaign, Group, Run, load_artifacts, load_campaign
from tierplan.validation.steps import cut_predicted

GROUP = Group(
    name="gpt2-32",
    config={"model_type": "gpt2", "n_embd": 32, "n_head": 2, "n_positions": 32, "vocab_size": 64},
    depth_key="n_layer",
    batch=2,
    seq=32,
    runs=(
        Run(blocks=3, policy="in-memory"),
        Run(blocks=3, policy="zero-infinity", device="tight"),
        Run(blocks=3, policy="zero-offload", accumulation=2, max_grad_norm=1.0),
        Run(blocks=3, policy="planner", device="0.7", host="0.7", options={"time_limit_s": 1.0}),
        Run(blocks=3, policy="no-such-policy"),
    ),
)
CAMPAIGN = Campaign(name="tiny", steps=5, warmup_steps=2, groups=(GROUP,))


def guessed_machine() -> Machine:
    """What measuring would give, in rough numbers."""
    rates = {kind: Rate.constant(2e9) for kind in ("bytes", "parameters", "elementwise_bytes")}
    rates |= {f"{work}_fp32_flops": Rate.constant(2e10) for work in ("matmul", "attention")}
    plain = toy_machine(device_bytes=10**9, host_bytes=10**9, nvme_bytes=10**8)
    return replace(plain, streams=tuple(replace(s, rates=rates) for s in plain.streams))


@pytest.fixture
def without_measuring(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The machine is guessed; everything else is real."""
    monkeypatch.setattr(campaign_run, "measure_description", lambda *args, **kwargs: None)
    monkeypatch.setattr(campaign_run, "write_description", lambda description: "")
    monkeypatch.setattr(campaign_run, "build", lambda description: guessed_machine())
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.usefixtures("without_measuring")
def test_every_run_leaves_an_artifact_and_is_not_repeated(tmp_path: Path) -> None:
    said: list[str] = []
    found = campaign_run.run_campaign(CAMPAIGN, tmp_path / "out", tmp_path, report=said.append)
    assert [a.run for a in found] == [r.name for r in GROUP.runs]
    *answered, unanswered = found
    assert all(a.answered for a in answered), [a.why_not for a in answered]
    assert "no-such-policy" in unanswered.why_not
    for a in answered:
        assert a.bytes_exact
        assert len(a.measured_steps_s) == CAMPAIGN.steps
        assert a.predicted_step_s > 0
        assert a.interval_s is not None
        assert a.interval_s[0] < a.predicted_step_s < a.interval_s[1]
        for tier, peak in a.measured_peak_bytes.items():
            assert peak <= a.capacity_bytes[tier]
    assert answered[1].measured_bytes["nvme.read"] > 0
    assert sorted(a.run for a in load_artifacts(tmp_path / "out")) == sorted(a.run for a in found)
    assert not (tmp_path / "tierplan-campaign").exists(), "scratch files are removed"
    lines = len(said)
    again = campaign_run.run_campaign(CAMPAIGN, tmp_path / "out", tmp_path, report=said.append)
    assert again == found
    assert len(said) == lines, "nothing was measured or run again"


@pytest.mark.slow
@pytest.mark.usefixtures("without_measuring")
def test_only_what_is_asked_is_taken_up(tmp_path: Path) -> None:
    found = campaign_run.run_campaign(CAMPAIGN, tmp_path / "out", tmp_path, only="no-such")
    assert [a.run for a in found] == ["3-blocks-no-such-policy-roomy-roomy"]


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


def changed(machine: Machine, factors: dict[str, float], pressure: float = 1.0) -> Machine:
    """The machine with other rates by stream; streams beside compute take `pressure` times as much of the cores."""
    streams = []
    for s in machine.streams:
        factor = factors.get(s.name, 1.0)
        rates = {
            kind: Rate(tuple((x, y * (factor if kind in ("bytes", "parameters") else 1.0)) for x, y in rate.points))
            for kind, rate in s.rates.items()
        }
        beside = pressure if s.name != "gpu0.compute" else 1.0
        takes = {
            limit: {k: w * (beside if limit == "cores" else 1.0) / (factor if k in ("bytes", "parameters") else 1.0)
                    for k, w in weights.items()}
            for limit, weights in s.takes.items()
        }  # fmt: skip
        streams.append(replace(s, rates=rates, takes=takes))
    return replace(machine, streams=tuple(streams))


def machine_with_cores() -> Machine:
    """Computation, updates and copies share two cores, in fractions of full speed."""
    machine = toy_machine()
    weights = {"gpu0.compute": 0.9, "host.adam": 0.9, "gpu0.h2d": 0.3, "gpu0.d2h": 0.3}
    streams = []
    for s in machine.streams:
        weight = weights.get(s.name, 0.0)
        by_kind = {kind: weight / max(y for _, y in rate.points) for kind, rate in s.rates.items()} | {"s": weight}
        streams.append(replace(s, takes={"cores": by_kind} if weight else {}))
    return replace(machine, streams=tuple(streams), shared_limits=(SharedLimit(name="cores", limit=1.0),))


@pytest.mark.parametrize("pressure", [0.7, 1.0, 1.3])
def test_calibration_finds_the_rates_and_the_contention_that_were_put_in(pressure: float) -> None:
    machine = machine_with_cores()
    workload = toy_workload(4)
    plan = uniform_plan(workload, UnitPlan(params="host", grads="host", states="nvme", acts="host"))
    schedule = lower(plan, workload, machine)
    alone_s = {op.key: machine.cost(op.stream, op.work).alone_s for op in schedule.ops if op.kind in TIMED}
    factors = {"gpu0.h2d": 0.5, "nvme.read": 0.8, "host.adam": 1.5}
    measured = cut_predicted(simulate_on(unroll(schedule, 4), changed(machine, factors, pressure)))
    found = calibrated(machine, schedule, measured, alone_s)
    for name in ("gpu0.h2d", "nvme.read", "host.adam"):
        kind = "parameters" if name == "host.adam" else "bytes"
        ratio = found.stream(name).rates[kind].at(1e6) / machine.stream(name).rates[kind].at(1e6)
        assert ratio == pytest.approx(factors[name], rel=0.15), name
    again = cut_predicted(simulate_on(unroll(schedule, 4), found))
    before = cut_predicted(simulate_on(unroll(schedule, 4), machine))
    assert again.step_s == pytest.approx(measured.step_s, rel=0.03)
    assert abs(before.step_s - measured.step_s) > 3 * abs(again.step_s - measured.step_s)


def test_measured_times_replace_modelled_ones_and_keep_sizes() -> None:
    workload, machine = toy_workload(2), toy_machine()
    times = {
        "embed": PartTimes(forward_s=0.1, backward_s=0.2, recompute_s=0.0, spread=0.0),
        "block": PartTimes(forward_s=1.0, backward_s=2.0, recompute_s=0.8, spread=0.03),
        "head": PartTimes(forward_s=0.5, backward_s=0.6, recompute_s=0.1, spread=0.01),
    }
    timed = with_times(workload, times, machine)
    block = timed.blocks[0]
    assert block.forward == {"s": 1.0}
    assert sum(t.recompute["s"] for t in block.saved) == pytest.approx(0.8)
    assert block.saved[3].recompute["s"] == pytest.approx(4 * block.saved[0].recompute["s"]), "in the modelled shares"
    assert block.saved_bytes == workload.blocks[0].saved_bytes
    assert block.spread == 0.03
