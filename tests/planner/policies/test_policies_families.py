"""Every policy answers for every family of models: a step time, or a clear reason why not. Nothing raises."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.configs import CONFIGS, config_of
from tests.toys import toy_machine, toy_workload
from tierplan.cli import main
from tierplan.hwmodels import load_machine
from tierplan.planner.plan_rules import PlanError
from tierplan.planner.policies import POLICIES, decide
from tierplan.planner.policies.options import OptionError
from tierplan.planner.prediction import predict
from tierplan.runtime.tracing.trace import trace_config, trace_workload
from tierplan.sim.workloads.models import load_workload, read_config
from tierplan.sim.workloads.workload import Training, Workload
from tierplan.studies.answer import prediction_text

MACHINES = ("fuyou-4090", "harmony-4x1080ti")
TIGHT = ["gpu.capacity=1100 MB", "gpu.reserve=1099 MB"]
"""Hardly a megabyte: what offloads must, what cannot says so."""


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Workload]:
    """A tiny model of each family."""
    found = {}
    for family in CONFIGS:
        folder = tmp_path_factory.mktemp(family)
        (folder / "config.json").write_text(json.dumps(config_of(family)), encoding="utf-8")
        training = Training(
            per_device_train_batch_size=2, gradient_accumulation_steps=2, sequence_length=32, dtype="fp32"
        )
        found[family] = trace_workload(folder, training)
    return found


@pytest.mark.sampled
@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("machine", MACHINES)
def test_every_policy_answers_for_every_family(traced: dict[str, Workload], family: str, machine: str) -> None:
    for policy in POLICIES:
        for changes in ([], TIGHT):
            found = predict(policy, traced[family], load_machine(machine, changes))
            assert found.fits != bool(found.why_not), (policy, changes)
            if found.fits:
                assert found.step_s is not None
                assert found.step_s > 0


@pytest.mark.parametrize("family", ["t5", "mixtral", "gemma2"])
@pytest.mark.parametrize("swap", ["convex", "all", "none"])
def test_fuyou_ranks_the_tensors_of_unlike_blocks_apart(traced: dict[str, Workload], family: str, swap: str) -> None:
    workload = traced[family]
    plan = decide("fuyou", workload, load_machine("fuyou-4090"), {"swap": swap})
    for unit, choice in zip(workload.units, plan.units, strict=True):
        if unit.kind != "block":
            continue
        assert not isinstance(choice.acts, str)
        assert len(choice.acts) == len(unit.saved)
        large = [a for t, a in zip(unit.saved, choice.acts, strict=True) if t.size_bytes >= 0.02 * unit.saved_bytes]
        assert set(large) <= {"all": {"host"}, "none": {"recompute"}}.get(swap, {"host", "recompute"})
    assert predict("fuyou", workload, load_machine("fuyou-4090"), {"swap": swap}).fits


@pytest.mark.parametrize("name", ["gpt-6.7b", "ssdtrain-gpt-8192", "ssdtrain-bert-16384", "gpt-175b"])
def test_every_policy_answers_for_the_named_models(name: str) -> None:
    workload = load_workload(name, Training(sequence_length=1024, dtype="fp16"))
    machine = load_machine("fuyou-4090")
    for policy in POLICIES:
        found = predict(policy, workload, machine)
        assert found.fits != bool(found.why_not), policy


@pytest.mark.parametrize("family", ["t5", "mixtral"])
def test_a_family_without_closed_forms_is_traced_unasked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of(family)), encoding="utf-8")
    arguments = ["simulate", "--policy", "fuyou", "--model", str(tmp_path), "--machine", "fuyou-4090", "--seq", "32"]
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"] is True


def test_the_named_t5_runs_as_it_is_published() -> None:
    name = "ssdtrain-t5-8192"
    workload = trace_workload(name, Training(sequence_length=64, dtype="fp16", optimizer="sgd", master_weights=False))
    assert [unit.kind for unit in workload.units].count("block") >= 4
    assert predict("ssdtrain", workload, load_machine("ssdtrain-a100")).fits


def test_more_devices_than_micro_batches_are_refused_and_not_the_default() -> None:
    workload = load_workload("gpt-6.7b", Training(gradient_accumulation_steps=2, dtype="fp32"))
    machine = load_machine("harmony-4x1080ti")
    assert decide("harmony-dp", workload, machine).options["devices"] == 2
    with pytest.raises(OptionError, match="is asked for 3 devices, but the step has 2 micro-batches"):
        decide("harmony-dp", workload, machine, {"devices": 3})


@pytest.mark.parametrize("policy", ["harmony-pp", "zero-infinity", "virtual-memory"])
def test_devices_without_links_between_them_exchange_data_through_the_host(policy: str) -> None:
    workload = load_workload("gpt-6.7b", Training(gradient_accumulation_steps=2, dtype="fp16"))
    given = ["gpu.count=2", "host.capacity=1 TB"]
    slow = predict(policy, workload, load_machine("laptop", given))
    quick = predict(policy, workload, load_machine("laptop", [*given, "link.p2p=100 GB/s", "link.p2p_path=own"]))
    assert slow.step_s is not None
    assert quick.step_s is not None
    assert quick.step_s < slow.step_s


def test_harmony_says_no_less_than_what_it_lacks() -> None:
    """Packs take equal time, so the largest holds more than the largest unit: an embedding costs none."""
    training = Training(per_device_train_batch_size=1, sequence_length=32768)
    with pytest.raises(PlanError, match="for the largest of its packs") as caught:
        decide("harmony", load_workload("qwen3-14b", training), load_machine("desktop-4090"))
    needed, capacity = (int(text.replace(",", "")) for text in re.findall(r"\d+(?:,\d{3})+", str(caught.value)))
    assert needed > capacity


@pytest.mark.parametrize(
    ("name", "published"), [("mixtral-8x7b", 12.9e9), ("qwen3-30b-a3b", 3.3e9), ("gpt-oss-20b", 3.61e9 + 201088 * 2880)]
)
def test_papers_count_the_experts_that_a_token_is_sent_to(name: str, published: float, tmp_path: Path) -> None:
    """Counted from one and two blocks, for whole models take tens of GiB. OpenAI's figure is without embeddings."""
    training, active = Training(sequence_length=64), []
    _, config = read_config(name, training)
    for num in (1, 2):
        changed = {**config, "num_hidden_layers": num}
        changed |= {"layer_types": config["layer_types"][:num]} if "layer_types" in config else {}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        workload = trace_workload(str(tmp_path / "config.json"), training)
        active.append(workload.num_active or 0)
    whole = active[0] + (config["num_hidden_layers"] - 1) * (active[1] - active[0])
    assert whole == pytest.approx(published, rel=0.02)
    found = predict("fsdp", workload, load_machine("server-8xh100"))
    assert found.tflops_8nd == pytest.approx(8 * active[1] * (found.tokens_per_s or 0.0) / 1e12)


def test_experts_that_are_frozen_are_not_taken_for_ones_that_every_token_meets() -> None:
    """Their shapes are not known, and all of them were counted."""
    training, mixtral = Training(sequence_length=16), {**config_of("mixtral"), "num_experts_per_tok": 2}
    whole = trace_config("mixtral", mixtral, training)
    assert (whole.num_active or 0) < whole.num_parameters
    frozen = trace_config("mixtral", mixtral, replace(training, lora="r=4,targets=q_proj+v_proj"))
    assert frozen.num_active is None
    words_frozen = trace_config("mixtral", mixtral, replace(training, freeze="model.embed_tokens*"))
    assert words_frozen.num_active == whole.num_active
    dense = trace_config("llama", config_of("llama"), replace(training, lora="r=4"))
    assert dense.num_active == dense.num_parameters


def test_papers_count_is_left_out_where_parameters_are_frozen(capsys: pytest.CaptureFixture[str]) -> None:
    """Their backward is half as much, so 8 FLOPs for each would be more than is computed."""
    words = ["simulate", "--policy", "in-memory", "--model", "gpt-1.3b", "--machine", "desktop-4090", "--lora", "r=8"]
    assert main([*words, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["tflops_8nd"] is None
    assert record["model_flops_per_s"] > 0
    assert main(words) == 0
    assert "as papers count" not in capsys.readouterr().out


def test_what_a_small_model_reaches_has_digits() -> None:
    found = predict("in-memory", toy_workload(), toy_machine())
    (line,) = (line for line in prediction_text(found).splitlines() if "of the model" in line)
    assert float(line.split()[3]) == pytest.approx(found.flops / (found.step_s or 0.0) / 1e12, rel=0.01)
