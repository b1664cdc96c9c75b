"""`explain-run`: what it proposes and suspects where these were wrong once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tierplan.planner.prediction import predict
from tierplan.planner.training_files.configured import Configured
from tierplan.sim.workloads.models import load_workload
from tierplan.sim.workloads.workload import Training
from tierplan.studies.evaluate import machine_of, training_of
from tierplan.studies.slow_step import explain
from tierplan.studies.slow_step.explain import explain_run
from tierplan.studies.slow_step.measured import MeasuredStep
from tierplan.studies.slow_step.setups import COMPUTE, CORES, LINKS, Setup, changes, setup_of, with_checkpoints
from tierplan.studies.slow_step.text import explanation_lines
from tierplan.studies.study import Point


@pytest.fixture(autouse=True)
def _no_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain, "_best", lambda *_: None)


def test_a_loss_in_chunks_that_costs_time_is_named_and_one_that_makes_room() -> None:
    """It was never said that it may be left out, nor that it could do."""
    point = Point(model="llama-3.2-1b", machine="desktop-4090")
    training = Training(per_device_train_batch_size=2, sequence_length=1024, dtype="bf16", loss_chunks=8)
    config = Configured(training=training, policy="in-memory", options={})
    said = explain_run(point, config, MeasuredStep(step_s=0.2))
    gain = next(g for g in said.gains if g.what.startswith("the loss in one piece (--loss-chunks 1)"))
    whole = replace(training, loss_chunks=1)
    assert gain.step_s == predict("in-memory", load_workload(point.model, whole), machine_of(point)).step_s
    small = replace(point, overrides={"gpu.capacity": "21.5 GiB"})
    said = explain_run(small, replace(config, training=whole), MeasuredStep(step_s=0.2))
    assert said.verdict == "does not fit"
    assert any("--loss-chunks 8" in gain.what for gain in said.gains)


def test_a_cpu_is_not_suspected_of_what_slows_gpus() -> None:
    """Attention that is not fused, tensor cores and the GPU's heat were the causes named."""
    point = Point(model="gpt2", machine="docs/campaign/2-cores-no-gpu/llama-384/machine.toml", seq=128)
    config = Configured(training=training_of(point, machine_of(point)), policy="in-memory", options={})
    said = explain_run(point, config, MeasuredStep(step_s=60.0))
    text = " ".join("\n".join(explanation_lines(said)).split())
    assert said.suspects[0].part == COMPUTE
    assert "what computes 1/" in text
    assert "OMP_NUM_THREADS=1" in text
    assert "GPU's limit" not in text + str(said.record())
    assert "not fused" not in text


def test_what_the_machine_could_do_names_what_a_change_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks it could do 213 ms, below a change that gives 210 ms: of the loss in one piece."""
    training = Training(per_device_train_batch_size=2, sequence_length=128, dtype="fp32", loss_chunks=8)
    best = predict(
        "in-memory", load_workload("gpt2", training), machine_of(point := Point(model="gpt2", machine="laptop"))
    )
    monkeypatch.setattr(explain, "_best", lambda *_: best)
    config = Configured(training=training, policy="in-memory", options={})
    text = " ".join("\n".join(explanation_lines(explain_run(point, config, MeasuredStep(step_s=0.2)))).split())
    assert "(micro-batch 2 x 1, in fp32, the loss in 8 chunks, by `tierplan plan`)" in text


@pytest.mark.parametrize(("policy", "num"), [("zero-infinity", 2), ("mobius", 1)])
def test_the_same_sequences_are_those_of_all_gpus_also_where_it_does_not_run(
    policy: str, num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without drives it had no plan, and what the machine could do was said of the sequences of one GPU."""
    asked: list[int] = []
    monkeypatch.setattr(explain, "_best", lambda point, setup, tokens: asked.append(tokens))
    training = Training(per_device_train_batch_size=2, gradient_accumulation_steps=3, sequence_length=128)
    options = {"optimizer": "nvme"} if policy == "zero-infinity" else {}
    point = Point(model="gpt2", machine="fsdp-qlora-2x3090")
    said = explain_run(point, Configured(training=training, policy=policy, options=options), MeasuredStep(step_s=0.2))
    assert said.expected.fits == (policy == "mobius")
    assert asked == [num * 2 * 3 * 128]


@pytest.mark.parametrize(
    ("lora", "says", "per_trained"), [(None, {}, 14), (None, {"save_only_model": True}, 2), ("r=8", {}, 12)]
)
def test_a_checkpoint_has_what_is_saved(lora: str | None, says: dict[str, object], per_trained: int) -> None:
    """Of adapters these alone, in fp32: it was the whole frozen base."""
    machine = machine_of(Point(model="llama-3.2-1b", machine="desktop-4090"))
    training = Training(lora=lora or "")
    workload = load_workload("llama-3.2-1b", training)
    setup = Setup(training=training, policy="in-memory", options={})
    found = with_checkpoints(setup, {"save_steps": 10, **says}, machine, workload)
    rate = max(rate for _, rate in machine.stream("nvme.write").rates["bytes"].points)
    assert found.extra_s * 10 * rate == pytest.approx(per_trained * workload.num_trained, rel=1e-6)


def test_an_optimizer_that_is_not_the_usual_one_is_said() -> None:
    point = Point(model="gpt2", machine="desktop-4090", optimizer="adamw:states=8bit")
    configured = Configured(training=training_of(point, machine_of(point)), policy="in-memory", options={})
    said = explanation_lines(explain_run(point, configured, MeasuredStep(step_s=1.0)))
    assert "in-memory; 1 x 1 sequences of 1024 tokens, bf16, adamw:states=8bit" in said


@pytest.mark.parametrize(
    ("policy", "options", "says", "slower"),
    [
        (
            "zero-infinity",
            {"params": "device", "optimizer": "host"},
            "zero_optimization.offload_param.pin_memory",
            None,
        ),
        ("zero-infinity", {"params": "host", "optimizer": "host"}, "zero_optimization.offload_param.pin_memory", LINKS),
        ("zero-2", {}, "zero_force_ds_cpu_optimizer", None),
        ("zero-offload", {}, "zero_force_ds_cpu_optimizer", CORES),
        ("zero-infinity", {"params": "host", "optimizer": "device"}, "zero_force_ds_cpu_optimizer", None),
    ],
)
def test_a_setting_of_what_stays_on_the_gpu_costs_nothing(
    policy: str, options: dict[str, str], says: str, slower: str | None
) -> None:
    """An offload_param that is none, and not pinned, halved the rate of the links for all others."""
    configured = Configured(training=Training(), policy=policy, options=options, says={says: False})
    setup, _ = setup_of(configured, machine_of(Point(model="gpt2", machine="desktop-4090")))
    assert [*setup.slower] == ([slower] if slower else [])


@pytest.mark.parametrize("policy", ["zero-offload", "zero-infinity"])
def test_an_optimizer_whose_memory_nothing_is_said_of_is_pinned_as_the_answer_says(policy: str) -> None:
    """With parameters on the GPU, ZeRO-3's was not, at 1.6 times the step, while it was said to be."""
    options = {"params": "device", "optimizer": "host"} if policy == "zero-infinity" else {}
    says = {"zero_optimization.offload_optimizer.device": "cpu"}
    configured = Configured(training=Training(), policy=policy, options=options, says=says)
    setup, assumed = setup_of(configured, machine_of(Point(model="gpt2", machine="desktop-4090")))
    assert setup.options["pin_memory"] == "on"
    assert any("offload_optimizer.pin_memory is not given" in text and "true here" in text for text in assumed)


@pytest.mark.parametrize(
    ("policy", "options", "change"),
    [
        ("fsdp-offload", {"checkpointing": "on"}, "fsdp_offload_params: false"),
        ("zero-offload", {"checkpointing": "on"}, "no offload_optimizer"),
        ("zero-infinity", {"params": "host", "optimizer": "host"}, "no offload_optimizer, no offload_param"),
        ("in-memory", {}, "FSDP with FULL_SHARD"),
    ],
)
def test_on_several_gpus_what_is_divided_among_them_need_not_be_offloaded(
    policy: str, options: dict[str, str], change: str
) -> None:
    """3 B parameters fit on four cards in shards, and on none alone: then nothing was proposed."""
    point = Point(model="llama-3.2-3b", machine="roundpipe-8x4090", devices=4, overrides={"host.capacity": "256 GiB"})
    configured = Configured(training=training_of(point, machine_of(point)), policy=policy, options=options)
    said = explain_run(point, configured, MeasuredStep(step_s=30.0))
    gain = said.gains[0]
    assert gain.what == change
    assert gain.step_s < 0.5 * (said.expected_s or 30.0)
    alone = Setup(training=configured.training, policy=policy, options=options)
    assert change not in {one.what for one in changes(alone, {})}, "one GPU has all of it"


def test_where_shards_do_not_fit_fsdp_has_an_offload_of_its_own() -> None:
    """It was told to change to DeepSpeed."""
    point = Point(model="llama-3.1-8b", machine="roundpipe-8x4090", devices=4, overrides={"host.capacity": "512 GiB"})
    configured = Configured(training=training_of(point, machine_of(point)), policy="fsdp", options={"reduces": "last"})
    said = explain_run(point, configured, MeasuredStep(step_s=30.0))
    assert said.verdict == "does not fit"
    assert any(gain.what == "fsdp_offload_params: true" for gain in said.gains)
