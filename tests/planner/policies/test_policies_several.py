"""Policies of several devices: what is divided among them, which packs they take, and what is made again."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.toys import toy_machine, toy_workload
from tierplan.cli import main
from tierplan.commands import compare_policies
from tierplan.hwmodels import load_machine
from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.scaling import with_capacity
from tierplan.planner.lowering import lower
from tierplan.planner.plan import PackPlan, Plan, UnitwisePlan
from tierplan.planner.plan_rules import PlanError
from tierplan.planner.planning import plan as best_plan
from tierplan.planner.policies import POLICIES, decide
from tierplan.planner.policies.options import OptionError
from tierplan.planner.policies.several import harmony
from tierplan.planner.prediction import Prediction, predict, predict_plan
from tierplan.sim.columns import ScheduleColumns
from tierplan.sim.schedule import Schedule
from tierplan.sim.workloads.models import load_workload, workload_of
from tierplan.sim.workloads.workload import Training, Workload


@pytest.mark.parametrize("devices", [2, 4])
def test_a_partitioned_step_does_all_devices_compute_and_one_models_io(devices: int) -> None:
    machine = load_machine("zero-infinity-4xh100")
    workload = load_workload("gpt-6.7b", Training(sequence_length=1024, dtype="fp16"))
    one, many = (
        lower(decide("zero-infinity", workload, machine, {"devices": n, "optimizer": "nvme"}), workload, machine)
        for n in (1, devices)
    )
    single, several = one.bytes_moved(), many.bytes_moved()
    for stream in ("nvme.read", "nvme.write"):
        assert several[stream] == pytest.approx(single[stream], rel=1e-6)
    for r in range(devices):
        compute = [op for op in many.ops if op.stream == f"gpu{r}.compute"]
        assert len(compute) == sum(op.stream == "gpu0.compute" for op in one.ops)
        assert fetched(many, r) == pytest.approx(fetched(one, 0) / devices)


def fetched(schedule: Schedule, device: int) -> float:
    """Bytes of parameters that come over a device's own link."""
    ops = (op for op in schedule.ops if op.stream == f"gpu{device}.h2d" and op.key.startswith("fetch_params/"))
    return sum(op.work["bytes"] for op in ops)


def test_more_devices_than_the_machine_has_are_refused() -> None:
    with pytest.raises(OptionError, match="is 3; give a number from 1 to 1"):
        decide("zero-infinity", toy_workload(), toy_machine(), {"devices": 3})
    plan = replace(decide("zero-infinity", toy_workload(), toy_machine()), devices=3)
    with pytest.raises(PlanError, match="wants 3 devices, but machine 'toy' has 1"):
        lower(plan, toy_workload(), toy_machine())


@pytest.mark.parametrize(("given", "cleanup_s"), [({}, 0.04), ({"host_memory": "own"}, 0.0),
                                                  ({"host_memory": "own", "task_cleanup_s": 0.02}, 0.02)])  # fmt: skip
def test_only_harmonys_own_processes_clean_up_after_each_task(given: dict[str, object], cleanup_s: float) -> None:
    plan = decide("harmony", toy_workload(4, tied=False), toy_machine(), given)
    assert isinstance(plan, PackPlan)
    assert plan.packs.cleanup_s == plan.options["task_cleanup_s"] == cleanup_s


def test_harmony_simulates_no_packs_where_host_memory_is_too_small_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    workload, machine, simulated = toy_workload(gradient_accumulation_steps=2), toy_machine(), []
    seconds, quickest = harmony._seconds, harmony._quickest

    def counted(plan: Any, workload: Workload, machine: Machine, *rest: Any) -> float:
        simulated.append(seconds(plan, workload, machine))
        return simulated[-1]

    monkeypatch.setattr(harmony, "_seconds", counted)
    for host in (2**20, 2**40):
        on = with_capacity(machine, {"host": host})
        simulated.clear()
        plan = decide("harmony", workload, on)
        assert bool(simulated) == (host == 2**40)
        monkeypatch.setattr(harmony, "_quickest", lambda plans, *rest: min(plans, key=lambda p: counted(p, *rest)))
        assert decide("harmony", workload, on) == plan, "by simulating all"
        assert (min(simulated) == float("inf")) == (host == 2**20)
        monkeypatch.setattr(harmony, "_quickest", quickest)


def test_selective_checkpointing_keeps_attention_and_every_other_product() -> None:
    workload = load_workload("llama-3.2-1b", Training(sequence_length=64))
    plan = decide("fsdp", workload, load_machine("server-8xh100"), {"checkpointing": "selective"})
    assert isinstance(plan, UnitwisePlan)
    block, acts = workload.blocks[0], plan.units[1].acts
    kept = [tensor.name for tensor, action in zip(block.saved, acts, strict=True) if action == "keep"]
    products = [name for name in kept if "attention" not in name]
    assert len(kept) - len(products) == sum("attention" in tensor.name for tensor in block.saved)
    assert len(products) == 3, "of queries, keys, values, output, gate and up"
    assert plan.units[0].acts == plan.units[-1].acts == "keep"


@pytest.mark.parametrize("policy", ["fsdp-offload", "zero-3", "zero-infinity"])
@pytest.mark.parametrize(
    ("given", "rule"),
    [("inf", "a whole number"), ("1.5", "a whole number"), ("nan", "a number of 0 or more"), (-1, "a number of 0 or")],
)
def test_units_that_come_ahead_are_a_whole_number(policy: str, given: object, rule: str) -> None:
    """`inf` ended in a traceback, and 1.5 was taken as 1 without a word."""
    machine = load_machine("roundpipe-8x4090", ["gpu.count=2"])
    with pytest.raises(OptionError, match=f"option 'prefetch' of policy {policy!r} is {given!r}; give {rule}"):
        decide(
            policy,
            toy_workload(),
            machine,
            {"optimizer": "host", "params": "host", "prefetch": given} if policy == "zero-3" else {"prefetch": given},
        )


@pytest.mark.parametrize(
    ("policy", "given", "why"),
    [
        *((policy, {"prefetch": 9}, "has no option 'prefetch'") for policy in ("ddp", "fsdp", "zero-1", "zero-2")),
        ("zero-3", {"prefetch": 9}, "option 'prefetch' .* is '9', but does nothing while parameters stay on the dev"),
        ("zero-3", {"optimizer": "host", "round_robin": "on"}, "has no option 'round_robin'"),
        ("zero-2", {"pin_memory": "off"}, "option 'pin_memory' .* nothing while the optimizer is on the device"),
        ("zero-1", {"round_robin": "on"}, "option 'round_robin' .* nothing while the optimizer is on the device"),
        (
            "zero-offload",
            {"gradients": "streamed", "pin_memory": "off"},
            "'pin_memory' .* where gradients are streamed",
        ),
        ("zero-offload", {"gradients": "streamed", "devices": 1, "overlap": "on"}, "'overlap' .* are streamed"),
        ("zero-offload", {"update": "device", "gradients": "streamed"}, "'gradients' .* where states come to the dev"),
        ("in-memory", {"devices": 1, "sharing": "fsdp"}, "option 'sharing' .* is 'fsdp', but does nothing on one dev"),
    ],
)
def test_an_option_that_does_nothing_is_refused_by_name(policy: str, given: dict[str, object], why: str) -> None:
    """Each gave the same step to the nanosecond, and was recorded as if it had been heeded."""
    with pytest.raises(OptionError, match=why):
        decide(policy, toy_workload(), load_machine("roundpipe-8x4090"), given)


@pytest.mark.parametrize(
    ("policy", "given"),
    [
        ("zero-2", {"optimizer": "host", "pin_memory": "off", "round_robin": "on"}),
        ("zero-3", {"optimizer": "host", "params": "host", "prefetch": 0, "pin_memory": "off"}),
        ("zero-offload", {"gradients": "streamed", "overlap": "on"}),
        ("zero-offload", {"pin_memory": "on", "round_robin": "off", "overlap": "on", "devices": 1}),
        ("in-memory", {"sharing": "fsdp"}),
    ],
)
def test_an_option_that_does_something_is_taken(policy: str, given: dict[str, object]) -> None:
    workload, machine = toy_workload(4), load_machine("roundpipe-8x4090")
    plan = decide(policy, workload, machine, given)
    assert {**plan.options, **given} == plan.options


@pytest.mark.parametrize(
    ("policy", "places", "each"),
    [
        ("zero-offload", {}, {1: 12 + 4 + 2, 4: 12 + 4 + 2 + 2}),
        ("zero-1", {"optimizer": "host"}, {1: 18, 4: 20}),
        ("zero-2", {"optimizer": "host"}, {1: 18, 4: 20}),
        ("zero-3", {"optimizer": "host"}, {1: 12 + 4 + 2, 4: 18}),
        ("zero-3", {"optimizer": "host", "params": "host"}, {1: 20, 4: 20}),
        ("zero-infinity", {"optimizer": "host", "params": "host", "pin_memory": "off"}, {1: 20, 4: 20}),
    ],
)
@pytest.mark.parametrize("accumulation", [1, 4])
def test_host_memory_holds_deepspeeds_buffers_too(
    policy: str, places: dict[str, object], each: dict[int, int], accumulation: int
) -> None:
    """By hand, in bytes per parameter: 12 of states, 4 of gradients in fp32, 2 of parameters on their way back (or at
    home), 2 of gradients in 16 bits, with accumulation or in stage 3. Plans were said to fit that do not."""
    workload = load_workload("gpt2", Training(gradient_accumulation_steps=accumulation, sequence_length=64))
    need = each[accumulation] * workload.num_parameters
    least, less = (with_capacity(load_machine("roundpipe-8x4090"), {"host": need - k}) for k in (0, 1))
    assert decide(policy, workload, least, places)
    with pytest.raises(PlanError, match=f"needs {need:,} bytes of host memory .* {need - 1:,}, 1 too few; .*=none"):
        decide(policy, workload, less, places)
    alone = decide(policy, workload, less, {**places, "host_buffers": "none"})
    assert predict_plan(alone, workload, less).fits, "the step"
    with pytest.raises(PlanError, match=f"needs {need:,} bytes"):  # else less memory would be better than more
        decide(policy, workload, with_capacity(less, {"host": need // 2}), places)
    if policy == "zero-offload":
        assert decide(policy, workload, less, {"gradients": "streamed"}), "no buffers of DeepSpeed's"


@pytest.mark.parametrize(
    ("model", "num", "why"),
    [
        ("qwen2.5-0.5b", 2, ""),
        ("qwen2.5-0.5b", 3, "14 attention heads, which 3 does not divide; .* take 2 or 1 of them"),
        ("qwen2.5-0.5b", 7, "2 heads of keys and values, which 7 neither divides nor is a multiple of; .* 2 or 1 of"),
        ("qwen2.5-0.5b", 8, "14 attention heads, which 8 does not divide; .* take 2 or 1 of them"),
        ("qwen2.5-1.5b", 4, ""),
        ("qwen2.5-1.5b", 6, "a feed-forward width of 8960, which 6 does not divide; .* take 4, 2 or 1 of them"),
        ("llama-3.2-1b", 8, ""),
        ("llama-3.2-1b", 6, "32 attention heads, which 6 does not divide; .* take 4, 2 or 1 of them"),
        ("gpt2-xl", 5, ""),
        ("gpt2-xl", 2, "25 attention heads, which 2 does not divide; .* take 1 of them"),
    ],
)
def test_operators_are_cut_where_megatron_can_cut_them(model: str, num: int, why: str) -> None:
    """Its rule, by its words: `num_attention_heads must be a multiple of tensor_model_parallel_size`,
    `num_query_groups must be a multiple or divisor of` it, and `ensure_divisibility` of the width. 14 heads were cut
    over 8 devices, and that was the answer."""
    workload = load_workload(model, Training(sequence_length=512))
    machine = load_machine("dgx-8xa100-80gb", [f"gpu.count={num}"])
    if not why:
        assert predict("megatron-tp", workload, machine).fits
        return
    with pytest.raises(PlanError, match=f"'megatron-tp' cuts operators over {num} devices, but '{model}' has {why}"):
        decide("megatron-tp", workload, machine)
    assert f"over {num} devices, but '{model}' has" in predict("megatron-tp", workload, machine).why_not
    on_one = decide("megatron-tp", workload, machine, {"devices": 1})
    with pytest.raises(PlanError, match=f"cuts operators over {num} devices, but '{model}' has {why}"):
        lower(replace(on_one, devices=num), workload, machine)  # as a plan file may have it, or the planner


def test_operators_of_a_model_that_says_nothing_of_its_heads_are_cut_as_asked() -> None:
    """And of one with a text model inside, its own heads count."""
    machine = load_machine("dgx-8xa100-80gb", ["gpu.count=3"])
    assert predict("megatron-tp", toy_workload(), machine).fits
    inside = {**load_workload("gpt2", Training()).config, "n_head": 4}
    workload = replace(workload_of("gpt2", inside, Training()), config={"text_config": inside})
    with pytest.raises(PlanError, match="'gpt2' has 4 attention heads, which 3 does not divide"):
        decide("megatron-tp", workload, machine)


def test_plan_and_compare_policies_say_of_the_same_systems_that_their_numbers_are_others() -> None:
    """Megatron's stages with a tied head were marked by one and not by the other."""
    training = Training(per_device_train_batch_size=2, gradient_accumulation_steps=2, sequence_length=512)
    machine = load_machine("server-8xh100", ["gpu.count=2"])
    names = ["megatron-pp", "megatron-tp", "roundpipe", "ddp"]
    for model, others in (("gpt2", {"megatron-pp", "roundpipe"}), ("llama-3.1-8b", {"roundpipe"})):
        workload = load_workload(model, training)
        table = compare_policies.policy_table([predict(name, workload, machine) for name in names])
        assert {name for name in names if f"{name}*" in table} == others
        found = best_plan(workload, machine, batches="shared", policies=names, time_limit_s=0.2)
        assert {name for name, reached in found.policies.items() if not reached.same_numbers} == others
    late = predict("roundpipe", workload, machine)
    assert "*" not in compare_policies.policy_table([late], "delayed-1"), "as it was asked for"


def test_the_picture_of_a_comparison_says_what_its_table_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """How many GPUs train, who trains other numbers, and that a bar is of the busiest of them."""
    asked = ["--model", "gpt2", "--machine", "dgx-8xa100-80gb", "--devices", "2", "--plot", str(tmp_path / "p.svg")]
    assert main(["compare-policies", "--policies", "ddp", "roundpipe", "zero-offload", *asked]) == 0
    table = capsys.readouterr().out
    words = re.findall(r"<!-- (.*) -->", (tmp_path / "p.svg").read_text("utf-8"))
    assert "gpt2 on dgx-8xa100-80gb, 2 of its 8 GPUs" in words
    named = [word for word in words if word.rstrip("*") in ("ddp", "roundpipe", "zero-offload")]
    assert named[::-1] == [line.split()[0] for line in table.splitlines()[2:5]]
    assert {"gpu*.compute", "* other numbers than plain training's: updates come a step late"} <= {*words}


def test_a_table_names_no_op_for_what_it_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model of 10,000 layers, names, records of JSON and tied heads that were looked for took two minutes."""
    monkeypatch.setattr(Prediction, "record", lambda self: pytest.fail("the record of --json"))

    def other_numbers(plan: Plan, columns: ScheduleColumns | None, asked: str = "") -> str:
        return "" if columns is None else pytest.fail("the names of all ops")

    monkeypatch.setattr("tierplan.planner.prediction.other_numbers", other_numbers)
    monkeypatch.setattr("tierplan.planner.plan.other_numbers", other_numbers)
    asked = ["--model", "gpt2", "--machine", "laptop", "--batch", "1"]
    assert main(["compare-policies", "--policies", "in-memory", "fuyou", "virtual-memory", *asked]) == 0


def test_a_policy_that_is_called_by_itself_does_not_pass_over_semantics() -> None:
    """As `tierplan.POLICIES` has them."""
    with pytest.raises(PlanError, match="it updates by 'in-backward' alone, not by 'delayed-1'"):
        POLICIES["harmony"](toy_workload(4), toy_machine(), {"semantics": "delayed-1"})
    assert POLICIES["harmony"](toy_workload(4), toy_machine(), {"semantics": "in-backward"}).semantics == "in-backward"
