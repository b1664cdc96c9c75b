"""`tierplan plan`: text, JSON, the file, and what it says when nothing fits."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.toys import toy_machine, toy_workload, uniform_plan
from tierplan import Training, load_machine, load_workload
from tierplan.cli import main
from tierplan.commands.plan import EXIT_INFEASIBLE
from tierplan.hwmodels.scaling import with_capacity
from tierplan.planner.plan import PackPlan, Packs, Sharing, UnitPlan, UnitwisePlan
from tierplan.planner.plan_file import load_plan
from tierplan.planner.planning import plan
from tierplan.planner.prediction import predict, predict_plan
from tierplan.sim.output.text import format_s
from tierplan.studies.answer import (
    answer_lines,
    answer_record,
    devices_rows,
    numbers_texts,
    policy_rows,
    write_timeline,
)
from tierplan.studies.evaluate import BestPlan

CONFIG = {"model_type": "gpt2", "n_embd": 256, "n_layer": 4, "n_head": 4, "n_positions": 512, "vocab_size": 1000}


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


def test_json_has_what_scripts_need(model, tmp_path, capsys):
    output = tmp_path / "plan.json"
    arguments = ["plan", "--model", model, "--machine", "laptop", "--seq", "512", "--batch", "4", "--json"]
    assert main([*arguments, "--time-limit", "1", "-o", str(output)]) == 0
    found = json.loads(capsys.readouterr().out)
    wanted = {"step_s", "lower_bound_s", "gap", "solve_s", "total_s", "policies", "limited_by", "status"}
    assert wanted <= found.keys()
    assert found["fits"] is True
    assert found["lower_bound_s"] <= found["step_s"]
    assert all({"step_s", "reason"} <= policy.keys() for policy in found["policies"].values())
    assert load_plan(output).prediction["step_s"] == found["step_s"]


def test_text_names_the_gap_and_the_policies(model, capsys):
    assert main(["plan", "--model", model, "--machine", "laptop", "--seq", "512", "--time-limit", "1"]) == 0
    out = capsys.readouterr().out
    assert "no schedule is quicker than" in out
    assert "zero-offload" in out


def test_sub_batches_say_whose_numbers_they_give():
    workload = toy_workload(2, per_device_train_batch_size=4)
    whole = plan(workload, toy_machine(), time_limit_s=1, policies=["in-memory"], orders=["horizontal"])
    tiled_plan = uniform_plan(workload, UnitPlan(), order="vertical", sub_batches=2)
    tiled = replace(whole, prediction=predict_plan(tiled_plan, workload, toy_machine()))
    assert whole.plan.sub_batches == 1
    of_whole, of_tiled = (BestPlan(workload=workload, machine=toy_machine(), result=r) for r in (whole, tiled))
    assert answer_record(of_whole)["numbers_of"] == {"micro_batch": 4, "accumulation": 1}
    assert answer_record(of_tiled)["numbers_of"] == {"micro_batch": 2, "accumulation": 2}
    assert answer_record(of_whole)["numbers"] == []
    assert answer_record(of_tiled)["numbers"] == ["of training in 2 micro-batches of 2 sequences"]
    text = "\n".join(answer_lines(of_tiled))
    assert "2 sub-batches" in text
    assert re.search("numbers  +of training in 2 micro-batches of 2 sequences", text)
    assert "numbers  " not in "\n".join(answer_lines(of_whole))


def test_operators_that_gpus_cut_say_that_last_bits_differ():
    workload, machine = toy_workload(2), load_machine("desktop-4090", ["gpu.count=2", "link.p2p=9 GB/s"])
    divided = {name: numbers_texts(predict(name, workload, machine)) for name in ("megatron-tp", "fsdp", "megatron-pp")}
    assert divided["fsdp"] == divided["megatron-pp"] == []
    assert any("last bits" in text for text in divided["megatron-tp"])


def test_every_field_of_a_plan_is_in_the_page_of_formats():
    workload, machine = toy_workload(2), toy_machine()
    result = plan(workload, machine, time_limit_s=1, policies=["in-memory"], orders=["horizontal"])
    page = (Path(__file__).parents[2] / "docs" / "file-formats.md").read_text(encoding="utf-8")
    section = page.split("## Prediction and plan (JSON)")[1].split("\n## ")[0]
    said = {name for line in section.splitlines() for name in re.findall(r"`(\w+)`", line)}
    small = predict("in-memory", workload, with_capacity(machine, {"gpu0": 2**20}))
    assert small.shortage is not None
    for record in (answer_record(BestPlan(workload=workload, machine=machine, result=result)), small.record()):
        assert set(record) - said == set()


def test_a_system_that_takes_other_steps_says_so():
    """Two devices with a micro-batch each do twice the work of one that they share."""
    of = {"num_batches": 1, "micro_batch": 3, "accumulation": 1, "same_numbers": True}
    policies = {
        "ddp": {**of, "num_batches": 2, "step_s": 5.0, "same_work_s": 2.5},
        "megatron-tp": {**of, "step_s": 3.0, "same_work_s": 3.0},
    }
    assert policy_rows(policies, 3.0) == [
        ("ddp", "3 x 1 per GPU", "2.5 s", "0.83 x (steps of 6 sequences)"),
        ("megatron-tp", "3 x 1", "3 s", "1.00 x"),
    ]


@pytest.mark.parametrize(
    ("divided", "said"),
    [
        ("tensors", "2, which divide every operator and work on the same micro-batches"),
        ("nothing", "2, each with micro-batches of its own and all of the model"),
        ("states", "2, each with micro-batches of its own and a part of the states"),
        ("gradients", "2, each with micro-batches of its own and a part of gradients and states"),
        ("all", "2, each with micro-batches of its own and a part of parameters, gradients and states"),
    ],
)
def test_what_devices_divide_is_said(divided, said):
    plan = UnitwisePlan(policy="x", units=(UnitPlan(),), devices=2, sharing=Sharing(divided=divided))
    assert devices_rows(plan) == [("devices", said)]


@pytest.mark.parametrize(
    ("states", "here", "said"),
    [
        ((0, 1, 3), (0, 1), [("  states", "of 3 units in host memory: 2 updated on a device, 1 updated on the host")]),
        ((3,), (), [("  states", "of 1 unit in host memory: 1 updated on the host")]),
        ((), (), []),
    ],
)
def test_where_states_of_stages_are_is_said(states, here, said):
    packs = Packs(form="resident", devices=2, forward=((0, 2),), backward=((0, 2), (2, 4)), host_states=states)
    rows = devices_rows(PackPlan(policy="x", packs=replace(packs, updates_here=here)))
    assert [row for row in rows if row[0] == "  states"] == said


def test_units_of_packs_that_devices_update_are_counted() -> None:
    packs = Packs(form="pipeline", devices=2, forward=((0, 2),), backward=((0, 2), (2, 4)))
    rows = devices_rows(PackPlan(policy="x", packs=packs))
    assert rows[1:] == [
        ("  forward", "1 of 2 units"),
        ("  backward", "2 of 2 units"),
        ("  states", "of 4 units in host memory: 4 updated on the host"),
    ]
    rows = devices_rows(PackPlan(policy="x", packs=replace(packs, updates_here=(0, 1))))
    assert rows[-1] == ("  states", "of 4 units in host memory: 2 updated on a device, 2 updated on the host")


def test_packs_of_a_size_are_counted() -> None:
    """A large model has more than a hundred of them."""
    backward = (*((k, k + 1) for k in range(70)), (70, 72), (72, 74), (74, 75))
    packs = Packs(form="pipeline", devices=2, forward=(), backward=backward)
    _, forward, way_back, _ = devices_rows(PackPlan(policy="x", packs=packs))
    assert forward == ("  forward", "in the first backward pack")
    assert way_back == ("  backward", "70 of 1 unit, 2 of 2, 1 of 1")


def test_nothing_fits_is_an_answer(tmp_path, capsys):
    """With a head of its own: a tied one's gradients may be added up in the other order. As many sequences are not cut
    into single ones, and no other number divides them."""
    (model := tmp_path / "config.json").write_text(json.dumps({**CONFIG, "tie_word_embeddings": False}))
    arguments = ["plan", "--model", str(model), "--machine", "laptop", "--seq", "512", "--batch", "97"]
    arguments += ["--time-limit", "1", "--set", "gpu.reserve=7.95 GiB", "-o", str(tmp_path / "plan.json")]
    assert main([*arguments, "--json"]) == EXIT_INFEASIBLE
    found = json.loads(capsys.readouterr().out)
    assert main(arguments) == EXIT_INFEASIBLE
    told = capsys.readouterr()
    said = " ".join(told.out.split())
    assert said == f"No{found['reason'][2:]}. {tmp_path / 'plan.json'} was not written", "the same answer, for people"
    assert max(map(len, told.out.splitlines()[:-1])) <= 80
    assert told.err == ""
    assert found["fits"] is False
    short = found["shortages"][0]
    assert short["tier"] == "device"
    assert short["short_bytes"] == short["needed_bytes"] - short["capacity_bytes"] > 0
    assert "sequences per micro-batch that fit: up to " in found["reason"]


@pytest.mark.parametrize(
    ("name", "begins"), [("step.svg", "<?xml"), ("step.json", "{"), ("step.html", "<!doctype html>")]
)
def test_the_timeline_is_written(model, tmp_path, capsys, name, begins):
    arguments = ["--model", model, "--machine", "laptop", "--seq", "512", "--timeline", str(tmp_path / name)]
    assert main(["simulate", "--policy", "in-memory", *arguments]) == 0
    assert (tmp_path / name).read_text().startswith(begins)


def test_the_title_of_a_timeline_has_the_gpus_and_all_of_a_long_name(tmp_path: Path) -> None:
    name = "-".join(["a-model-with-a-name-that-is-longer-than-a-picture-is-wide"] * 3)
    workload = replace(load_workload("gpt2", Training()), name=name)
    prediction = predict("ddp", workload, load_machine("roundpipe-8x4090", ["gpu.count=2"]))
    write_timeline(prediction, str(tmp_path / "t.html"))
    title = f"{name} on roundpipe-8x4090, 2 of its 2 GPUs: one step, {format_s(prediction.step_s)}, by ddp"
    assert f"<h1>{title}</h1>" in (tmp_path / "t.html").read_text("utf-8")
    write_timeline(prediction, str(tmp_path / "t.svg"))
    drawn = re.findall(r"<!-- (.*) -->", (tmp_path / "t.svg").read_text("utf-8"))
    assert max(map(len, drawn)) <= 100 < len(title)


def test_lines_that_go_on_below_are_broken_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Beside names as long as those of links between many GPUs: a second break loses what indents the first."""
    asked = ["--model", "gpt2-xl", "--machine", "harmony-4x1080ti", "--seq", "512", "--accumulation", "8"]
    assert main(["simulate", "--policy", "harmony-pp", *asked]) == 0
    said, _, rates = capsys.readouterr().out.partition("rates: ")
    indent = len(said.splitlines()[-1])
    goes_on = [
        line for line in rates.split("limited by")[0].splitlines()[1:-1] if not line.strip().startswith("forward ")
    ]
    assert goes_on
    assert all(line.startswith(" " * (indent + 2)) for line in goes_on), goes_on
