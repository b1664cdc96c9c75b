"""Each policy does what its paper says: when updates run, what waits where, how far it looks ahead."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest

from tests.toys import MIB, toy_machine, toy_workload
from tierplan.commands import compare_policies
from tierplan.commands.options.terminal import nameplate_lines
from tierplan.hwmodels import load_machine
from tierplan.hwmodels.machine import Machine
from tierplan.planner.lowering import lower
from tierplan.planner.lowering.tiling import cut_batches
from tierplan.planner.plan import Plan, UnitwisePlan
from tierplan.planner.plan_rules import PlanError
from tierplan.planner.policies import POLICIES, decide
from tierplan.planner.policies.options import OptionError
from tierplan.planner.policies.zero_infinity import startup_bytes
from tierplan.planner.prediction import predict, predict_plan
from tierplan.planner.questions.largest import family, largest_model
from tierplan.sim.columns import unroll
from tierplan.sim.pricing import simulate_on
from tierplan.sim.schedule import Schedule, validate
from tierplan.sim.trace import Trace
from tierplan.sim.workloads.models import load_workload
from tierplan.sim.workloads.workload import Training, Workload
from tierplan.studies.answer import prediction_text

ONE_DEVICE = tuple(name for name in POLICIES if name not in ("harmony-dp", "harmony-pp", "virtual-memory"))


def run(policy: str, workload: Workload, machine: Machine, **options: Any) -> tuple[Plan, Schedule, Trace]:
    plan = decide(policy, workload, machine, options)
    schedule = lower(plan, workload, machine)
    return plan, schedule, simulate_on(schedule, machine)


def batches(size: int, **training: Any) -> Workload:
    training = Training(per_device_train_batch_size=size, **training)
    return replace(toy_workload(6), training=training, computed_for=None)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_every_policy_runs_step_after_step(policy: str, micro_batches: int) -> None:
    workload = toy_workload(5, gradient_accumulation_steps=micro_batches)
    _, schedule, _ = run(policy, workload, toy_machine())
    steps = validate(unroll(schedule, 3))
    assert len(simulate_on(steps, toy_machine()).spans) == 3 * len(schedule.ops)


@pytest.mark.parametrize("policy", ONE_DEVICE)
def test_every_parameter_is_updated_once(policy: str) -> None:
    workload = toy_workload(5)
    _, schedule, _ = run(policy, workload, toy_machine())
    updated = sorted(op.unit for op in schedule.ops if op.kind == "update")
    assert updated == sorted(u.name for u in workload.units if u.num_parameters)


@pytest.mark.parametrize(
    "policy", [name for name in ONE_DEVICE if not name.startswith(("harmony", "roundpipe", "mobius", "megatron-pp"))]
)
def test_clipping_changes_the_semantics_of_every_policy(policy: str) -> None:
    assert decide(policy, toy_workload(max_grad_norm=1.0), toy_machine()).semantics == "exact-clip"


@pytest.mark.parametrize("semantics", ["exact-clip", "in-backward", "delayed-1"])
@pytest.mark.parametrize(
    "policy", [name for name in ONE_DEVICE if not name.startswith(("harmony", "roundpipe", "mobius", "megatron-pp"))]
)
def test_semantics_that_are_offered_are_planned_or_refused_with_what_to_do(policy: str, semantics: str) -> None:
    plan = decide(policy, toy_workload(), toy_machine(), {"semantics": semantics})
    if semantics == "delayed-1" and policy in WITH_STATES_ON_THE_DEVICE:
        with pytest.raises(PlanError, match="choose semantics 'exact-clip' or 'in-backward', or"):
            lower(plan, toy_workload(), toy_machine())
    else:
        assert lower(plan, toy_workload(), toy_machine())


WITH_STATES_ON_THE_DEVICE = {
    "in-memory", "full-recompute", "zero-infinity", "ssdtrain", "zero-1", "zero-2", "zero-3", "ddp", "fsdp",
    "megatron-tp",
}  # fmt: skip


def test_an_unknown_policy_or_option_names_those_that_exist() -> None:
    with pytest.raises(OptionError, match=r"no policy 'fuyo'; did you mean 'fuyou'\? choose among .*zero-offload"):
        decide("fuyo", toy_workload(), toy_machine())
    with pytest.raises(OptionError, match=r"no option 'swop'; it has .*swap"):
        decide("fuyou", toy_workload(), toy_machine(), {"swop": "all"})
    with pytest.raises(OptionError, match="is 'some'; choose among convex, all, none"):
        decide("fuyou", toy_workload(), toy_machine(), {"swap": "some"})
    with pytest.raises(OptionError, match="is 'x'; give a number from 0 to 1"):
        decide("zero-offload", toy_workload(), toy_machine(), {"device_frac": "x"})


def test_a_policy_that_needs_a_drive_does_not_fit_a_machine_without_one() -> None:
    machine = replace(toy_machine(), tiers=toy_machine().tiers[:2])
    found = predict("fuyou", toy_workload(), machine)
    assert not found.fits
    assert "has no drive" in found.why_not


# ---- what does not fit ----


def test_what_does_not_fit_says_what_and_by_how_much_to_the_byte() -> None:
    workload = toy_workload(4)
    found = predict("in-memory", workload, toy_machine(device_bytes=100 * MIB))
    assert not found.fits
    assert found.shortage is not None
    assert found.shortage.tier == "gpu0"
    needed = found.shortage.needed_bytes
    assert needed is not None
    assert found.shortage.short_bytes == needed - 100 * MIB
    assert found.shortage.op is None, "the states alone are too large"
    assert found.why_not.startswith("before its first op, the step holds ")
    assert found.plan is not None
    assert predict_plan(found.plan, workload, toy_machine(device_bytes=needed)).fits
    assert not predict_plan(found.plan, workload, toy_machine(device_bytes=needed - 1)).fits


def test_the_record_of_a_prediction_has_the_promised_keys() -> None:
    keys = {
        "step_s", "fits", "tokens_per_s", "tflops_8nd", "model_flops_per_s", "peak_bytes", "bytes", "limited_by",
    }  # fmt: skip
    fits = predict("fuyou", toy_workload(), toy_machine()).record()
    assert keys <= fits.keys()
    assert fits["step_s"] is not None
    short = predict("in-memory", toy_workload(), toy_machine(device_bytes=MIB)).record()
    assert keys <= short.keys()
    assert short["fits"] is False
    assert short["step_s"] is None


def test_throughput_figures_follow_from_the_step_time() -> None:
    workload = toy_workload(4)
    found = predict("in-memory", workload, toy_machine())
    assert found.step_s is not None
    assert found.tokens_per_s == pytest.approx(workload.training.tokens_per_step / found.step_s)
    assert found.tokens_per_s is not None
    assert found.tflops_8nd == pytest.approx(8 * workload.num_parameters * found.tokens_per_s / 1e12)
    assert found.flops == pytest.approx((4 + 1) * 3e9)


# ---- each system's own behaviour ----


def ends(trace: Trace, start: str) -> dict[str, int]:
    return {s.key: s.end_ns for s in trace.spans if s.key.startswith(start)}


def starts(trace: Trace, start: str) -> dict[str, int]:
    return {s.key: s.start_ns for s in trace.spans if s.key.startswith(start)}


@pytest.mark.parametrize("policy", ["zero-offload", "zero-infinity"])
def test_zero_updates_after_backward(policy: str) -> None:
    _, _, trace = run(policy, toy_workload(6), toy_machine())
    assert min(starts(trace, "update/").values()) >= max(ends(trace, "bwd/").values())


def test_zero_infinity_reads_states_while_it_updates_and_bounds_what_is_in_flight() -> None:
    _, _, trace = run("zero-infinity", toy_workload(6), toy_machine(), pipeline="on")
    spans = trace.by_key()
    order = [key.removeprefix("update/") for key in sorted(starts(trace, "update/"), key=lambda k: spans[k].start_ns)]
    assert order[-1] == "embed", "updates go from the last unit to the first"
    for before, after in zip(order, order[2:], strict=False):
        assert spans[f"read_states/{after}"].start_ns >= spans[f"update/{before}"].end_ns
    for before, after in zip(order, order[4:], strict=False):
        assert spans[f"read_states/{after}"].start_ns >= spans[f"write_params/{before}/update"].end_ns


def test_zero_infinity_reads_updates_and_writes_one_unit_after_the_other_unless_it_is_told_to_overlap() -> None:
    workload, machine = toy_workload(6), toy_machine()
    _, _, trace = run("zero-infinity", workload, machine)
    spans = trace.by_key()
    order = [key.removeprefix("update/") for key in sorted(starts(trace, "update/"), key=lambda k: spans[k].start_ns)]
    assert len(order) == 8
    for before, after in pairwise(order):
        read, write = spans[f"read_states/{after}"], spans[f"write_params/{before}/update"]
        assert read.start_ns >= write.end_ns
        assert spans[f"read_grads/{after}"].start_ns >= write.end_ns
    assert trace.duration_s > run("zero-infinity", workload, machine, pipeline="on")[2].duration_s


def test_zero_infinity_that_offloads_nothing_and_recomputes_nothing_is_plain_training() -> None:
    given = {"params": "device", "optimizer": "device", "checkpoints": "none"}
    plain, found = (predict(*asked) for asked in (
        ("in-memory", toy_workload(), toy_machine()), ("zero-infinity", toy_workload(), toy_machine(), given),
    ))  # fmt: skip
    assert plain.steady is not None
    assert found.steady is not None
    assert (found.step_s, found.steady.peak_bytes) == (plain.step_s, plain.steady.peak_bytes)


def test_zero_infinity_needs_host_memory_for_all_gradients_twice_while_it_starts() -> None:
    """By hand, for 22 Mi + 1024 parameters: 44 MiB of zeros and a pinned copy of 64 MiB; four pinned buffers of 128 MiB
    (22 Mi in fp32, rounded up); five parameter buffers in one pinned piece of 256 MiB; 64 MiB of parameters."""
    workload = toy_workload(4)
    need = 2 * workload.num_parameters + (64 + 4 * 128 + 256 + 64) * MIB
    assert startup_bytes(workload, params="nvme", optimizer="nvme", devices=1, pinned=True) == need
    without = startup_bytes(workload, params="nvme", optimizer="nvme", devices=1, pinned=False)
    assert without == need - 64 * MIB
    assert predict("zero-infinity", workload, toy_machine(host_bytes=need)).fits
    short = predict("zero-infinity", workload, toy_machine(host_bytes=need - 1))
    assert not short.fits
    assert f"needs {need:,} bytes of host memory while it starts" in short.why_not
    assert predict("zero-infinity", workload, toy_machine(host_bytes=need - 1), {"host_buffers": "none"}).fits
    assert predict("zero-infinity", workload, toy_machine(host_bytes=need - 1), {"pin_memory": "off"}).fits
    assert startup_bytes(workload, params="device", optimizer="device", devices=1, pinned=True) == 0


@pytest.mark.parametrize(
    ("host_gb", "largest"), [(128, "gpt-13b"), (256, "gpt-30b"), (512, "gpt-100b"), (768, "gpt-135b")]
)
def test_host_memory_bounds_the_models_of_zero_infinity(host_gb: int, largest: str) -> None:
    """175B fails on the 4090 with 768 GB, as published; with less host memory the bound falls."""
    found = largest_model(
        "zero-infinity", load_machine("fuyou-4090", [f"host.capacity={host_gb} GB"]), Training(dtype="fp16")
    )
    assert found.fits is not None
    assert found.fits.model == largest
    assert "host memory while it starts" in found.next_why_not


def test_zero_infinity_widens_gradients_before_they_go_to_nvme() -> None:
    _, schedule, _ = run("zero-infinity", toy_workload(3, tied=False), toy_machine())
    buffers = schedule.buffers_by_name()
    for op in schedule.ops:
        if op.key == "write_grads/L1":
            assert buffers[op.writes[0]].size_bytes == 4 * 3 * MIB


def test_fuyou_updates_inside_backward_and_keeps_gradients_off_nvme() -> None:
    _, schedule, trace = run("fuyou", toy_workload(6), toy_machine())
    assert min(starts(trace, "update/").values()) < max(ends(trace, "bwd/").values())
    assert not any(b.tier == "nvme" and b.kind == "grads" for b in schedule.buffers)


@pytest.mark.parametrize(("write_back", "overlaps"), [("awaited", False), ("delayed", True)])
def test_fuyous_write_back_is_awaited_or_runs_beside_the_next_update(write_back: str, overlaps: bool) -> None:
    _, _, trace = run("fuyou", toy_workload(6), toy_machine(), write_back=write_back)
    spans = trace.by_key()
    for before, after in (("L5", "L4"), ("L4", "L3"), ("L3", "L2")):
        write, update = spans[f"write_params/{before}/update"], spans[f"update/{after}"]
        assert (update.start_ns < write.end_ns) == overlaps
        assert (spans[f"read_states/{after}"].start_ns >= spans[f"update/{before}"].end_ns) == overlaps
        if overlaps:
            assert spans[f"write_states/{before}"].start_ns >= spans[f"read_states/{after}"].end_ns


def test_fuyou_swaps_more_when_links_are_quick_and_compute_is_slow() -> None:
    workload = load_workload("gpt-6.7b", Training(per_device_train_batch_size=32, dtype="fp16"))
    slow = decide("fuyou", workload, load_machine("fuyou-4090", ["link.h2d=2 GB/s", "link.d2h=2 GB/s"]))
    fast = decide("fuyou", workload, load_machine("fuyou-4090", ["gpu.matmul_fp16=40 TFLOP/s"]))
    assert int(str(slow.options["swapped"])) < int(str(fast.options["swapped"]))


def test_fuyou_cuts_a_batch_that_would_not_fit_and_moves_the_same_parameters() -> None:
    workload = load_workload("gpt-13b", Training(per_device_train_batch_size=64, dtype="fp16"))
    machine = load_machine("fuyou-4090")
    whole = predict("fuyou", workload, machine, {"sub_batches": 1, "swap": "none"})
    cut = predict("fuyou", workload, machine, {"swap": "none"})
    assert not whole.fits
    assert cut.fits
    assert whole.schedule is not None
    assert cut.schedule is not None
    for stream in ("nvme.read", "nvme.write"):
        assert whole.schedule.bytes_moved()[stream] == cut.schedule.bytes_moved()[stream]


@pytest.mark.parametrize("policy", ["sliding-window", "zero-infinity", "fuyou"])
def test_windows_bind_although_memory_has_room(policy: str) -> None:
    """Parameters of at most `ahead` units wait on the device beside those in use."""
    plan, schedule, trace = run(policy, toy_workload(10), toy_machine(device_bytes=10**12))
    spans = trace.by_key()
    turns = [op.key for op in schedule.ops if op.stream == "gpu0.compute" and op.kind in ("forward", "backward")]
    for op in schedule.ops:
        if op.key.startswith("fetch_params/"):
            position = turns.index(next(k for k in turns if _reads(schedule, k) & set(op.writes)))
            gate = position - plan.prefetch_params_units - 1
            if gate >= 0:
                assert spans[op.key].start_ns >= spans[turns[gate]].end_ns


def _reads(schedule: Schedule, key: str) -> set[str]:
    return next(set(op.reads) for op in schedule.ops if op.key == key)


def test_recomputing_in_longer_segments_keeps_fewer_inputs() -> None:
    workload = toy_workload(12, slots=1)
    peaks = []
    for every in (1, 3):
        _, schedule, trace = run("full-recompute", workload, toy_machine(), every=every)
        held = [e for e in trace.memory if e.tier == "gpu0" and e.kind == "acts"]
        peaks.append(max(accumulate(e.delta_bytes for e in held)))
        again = [op for op in schedule.ops if op.kind == "recompute"]
        assert [op.work for op in again] == [workload.blocks[0].forward] * 12
    assert peaks[1] < peaks[0]


def test_inputs_that_wait_in_host_memory_leave_the_device() -> None:
    workload, peaks = toy_workload(12, slots=1), []
    for inputs in ("device", "host"):
        _, schedule, trace = run("full-recompute", workload, toy_machine(), inputs=inputs)
        held = [e for e in trace.memory if e.tier == "gpu0" and e.kind == "acts"]
        peaks.append(max(accumulate(e.delta_bytes for e in held)))
    assert sum(op.key.startswith("offload_x/L") for op in schedule.ops) == 12
    assert peaks[0] - peaks[1] >= 8 * workload.blocks[0].input_bytes


def test_segments_do_not_mix_with_kept_tensors() -> None:
    kept = decide("in-memory", toy_workload(), toy_machine()).units
    plan = replace(decide("full-recompute", toy_workload(), toy_machine(), {"every": 2}), units=kept)
    with pytest.raises(PlanError, match="segments need acts='recompute' in every block"):
        plan.check(toy_workload())


def test_ssdtrain_keeps_the_tail_that_would_be_forwarded() -> None:
    workload = toy_workload(8, slots=16)
    plan, _, _ = run("ssdtrain", workload, toy_machine())
    actions = [set(u.acts) for u in plan.units[1:-1]]
    assert actions[0] == {"nvme"}
    assert actions[-1] == {"keep"}
    all_gone = decide("ssdtrain", workload, toy_machine(), {"tail": "none"})
    assert all(set(u.acts) == {"nvme"} for u in all_gone.units[1:-1])


def test_a_slower_drive_keeps_a_longer_tail() -> None:
    def kept(write: str) -> int:
        workload = load_workload("gpt-6.7b", Training(per_device_train_batch_size=16, dtype="fp16"))
        plan = decide("ssdtrain", workload, load_machine("fuyou-4090", [f"nvme.write={write}"]))
        return sum(unit.acts.count("keep") for unit in plan.units if not isinstance(unit.acts, str))

    assert kept("3 GB/s") < kept("1 GB/s") < kept("0.3 GB/s")


def test_the_drives_life_follows_from_what_is_written() -> None:
    machine = load_machine("fuyou-4090")
    workload = load_workload("gpt-6.7b", Training(dtype="fp16"))
    found = predict("fuyou", workload, machine)
    assert found.step_s is not None
    assert found.schedule is not None
    written = found.schedule.bytes_moved()["nvme.write"]
    assert found.lifetime_s == pytest.approx(12 * 7e15 * found.step_s / written)


def test_late_updates_of_vertical_order_overlap_the_next_forward() -> None:
    """Those of the last blocks, which the next forward needs last; nothing else is moved."""
    workload = toy_workload(8, gradient_accumulation_steps=4)
    moved = []
    for late in (0.0, 0.5):
        plan, schedule, trace = run("vertical", workload, toy_machine(), late=late)
        assert isinstance(plan, UnitwisePlan)
        names = [unit.name for unit, choice in zip(workload.units, plan.units, strict=True) if choice.late_update]
        assert names == [f"L{i}" for i in range(4, 8) if late]
        moved.append(schedule.bytes_moved())
        ends = {span.key: span.end_ns for span in trace.spans}
        last_forward = max(ns for key, ns in ends.items() if key.startswith("fwd/"))
        early = {op.unit for op in schedule.ops if op.kind == "update" and ends[op.key] < last_forward}
        assert early >= set(names)
        assert bool(early) == bool(late)
    assert moved[0] == moved[1]
    with pytest.raises(PlanError, match="updated late"):
        decide("vertical", workload, toy_machine(), {"late": 0.5, "semantics": "delayed-1"}).check(workload)


def test_vertical_order_fetches_parameters_twice_whatever_the_micro_batches() -> None:
    for micro_batches in (1, 4):
        workload = toy_workload(5, tied=False, gradient_accumulation_steps=micro_batches)
        _, schedule, _ = run("vertical", workload, toy_machine())
        fetches = [op for op in schedule.ops if op.key.startswith("fetch_params/L2")]
        assert len(fetches) == 2


def test_cutting_batches_leaves_all_work_and_what_grows_with_the_batch() -> None:
    workload = batches(8)
    cut = cut_batches(workload, 4)
    assert cut.training.tokens_per_step == workload.training.tokens_per_step
    for whole, part in zip(workload.units, cut.units, strict=True):
        assert {k: 4 * v for k, v in part.forward.items()} == dict(whole.forward)
        assert 4 * part.saved_bytes == whole.saved_bytes
        assert part.num_parameters == whole.num_parameters


def test_tiles_of_operators_need_less_of_the_device_and_move_the_same_model() -> None:
    workload = load_workload("gpt-175b", Training(dtype="fp16"))
    machine = load_machine("fuyou-4090", ["host.capacity=2 TB"])
    whole, cut = (predict("zero-infinity", workload, machine, {"operator_tiles": n}) for n in (1, 4))
    assert whole.steady is not None
    assert cut.steady is not None
    assert cut.steady.peak_bytes["gpu0"] < 0.6 * whole.steady.peak_bytes["gpu0"]
    assert whole.schedule is not None
    assert cut.schedule is not None
    for stream in ("nvme.read", "nvme.write"):
        assert cut.schedule.bytes_moved()[stream] == whole.schedule.bytes_moved()[stream]


# ---- the largest model ----


def test_the_largest_model_fits_and_the_next_does_not() -> None:
    training = Training(dtype="fp16")
    found = largest_model("zero-offload", load_machine("desktop-4090"), training)
    sizes = [w.name for w in family(training)]
    assert found.fits is not None
    assert found.fits.fits
    assert sizes.index(found.next_model) == sizes.index(found.fits.model) + 1
    assert found.next_why_not


# ---- side by side ----


def test_policies_are_compared_by_tokens_per_second_where_devices_have_batches_of_their_own() -> None:
    workload = load_workload("gpt-6.7b", Training(per_device_train_batch_size=4, dtype="fp16"))
    machine = load_machine("zero-infinity-4xh100")
    on_four = predict("zero-infinity", workload, machine, {"params": "device", "optimizer": "host"})
    on_one = predict("zero-offload", workload, machine, {"devices": 1})
    assert on_four.tokens == 4 * on_one.tokens
    assert on_four.step_s is not None
    assert on_one.step_s is not None
    assert on_four.step_s > on_one.step_s
    lines = compare_policies.policy_table([on_one, on_four]).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["zero-infinity", "zero-offload"]


def test_whose_numbers_are_others_is_marked_with_the_reason() -> None:
    workload = load_workload("gpt2", Training(per_device_train_batch_size=13))
    tied = predict("fuyou", workload, load_machine("laptop", ["gpu.capacity=2.1 GiB"]))
    late, plain = (predict(name, workload, load_machine("desktop-4090")) for name in ("zenflow", "vertical"))
    table = compare_policies.policy_table([tied, late, plain])
    marks = {line.split()[0] for line in table.splitlines()[1:4]}
    assert {"fuyou*", "zenflow**", "vertical"} == marks
    assert "\n* other numbers than plain training's: a tied head's gradients are" in table
    assert "\n** other numbers than plain training's: updates come a step late" in table
    assert "not of plain training: a tied head's gradients" in prediction_text(tied)
    assert "not of plain training: updates come a step late" in prediction_text(late)
    assert "numbers " not in prediction_text(plain)


@pytest.mark.parametrize("value", ["1.5", 2.5, "inf", "-1", "", None])
@pytest.mark.parametrize(("policy", "name"), [("fuyou", "window"), ("sliding-window", "window"), ("harmony", "pack")])
def test_a_number_of_things_is_whole(policy: str, name: str, value: object) -> None:
    with pytest.raises(OptionError, match=f"option '{name}' of policy '{policy}' is {value!r}; give a (whole )?number"):
        decide(policy, toy_workload(), toy_machine(), {name: value})


def test_an_answer_rests_on_the_parts_that_the_plan_uses() -> None:
    workload, machine = load_workload("gpt2", Training(per_device_train_batch_size=2)), load_machine("laptop")
    found = {name: predict(name, workload, machine) for name in ("in-memory", "zero-offload", "fuyou")}
    parts = {name: re.findall(r"(\w+) assumed", str(p.basis).partition(";")[0]) for name, p in found.items()}
    assert parts == {
        "in-memory": ["gpu"], "zero-offload": ["gpu", "link", "host"], "fuyou": ["gpu", "link", "host", "nvme"]
    }  # fmt: skip
    for name, p in found.items():
        assert any(key.startswith("nvme.") for key in p.nameplate) == ("drive" in str(p.basis)) == (name == "fuyou")
        assert {key.partition(".")[0] for key in p.nameplate} <= {*parts[name]}
    assert "nvme" not in " ".join(nameplate_lines(found["in-memory"], found["zero-offload"]))
    assert "nvme.read" in " ".join(nameplate_lines(*found.values()))


def test_zenflow_hides_its_update_behind_the_next_interval_as_far_as_its_cores_go() -> None:
    workload, machine = toy_workload(gradient_accumulation_steps=2), toy_machine()
    waits, hides, few = (
        predict(policy, workload, machine, options)
        for policy, options in (
            ("zero-offload", {"checkpointing": "off"}),
            ("zenflow", {"cores": 1.0}),
            ("zenflow", {"cores": 0.01}),
        )
    )
    assert waits.step_s
    assert hides.step_s
    assert few.step_s
    update_s = machine.cost("host.adam", {"parameters": float(workload.num_trained)}).work_s
    assert hides.step_s < waits.step_s
    assert few.step_s > 100 * update_s


@pytest.mark.parametrize("more", [{}, {"lora": "r=8"}], ids=str)
def test_a_loss_in_chunks_does_not_add_to_the_models_flops(more: dict[str, Any]) -> None:
    """Backward makes the logits again then, which is recomputation."""
    whole, chunked = (load_workload("llama-3.2-1b", Training(**more, loss_chunks=chunks)) for chunks in (1, 8))
    assert chunked.units[-1].backward != whole.units[-1].backward
    assert chunked.flops == whole.flops


def test_a_policy_that_two_tiers_are_too_small_for_names_both() -> None:
    """In a table there is no room for more; JSON has it too."""
    workload, machine = toy_workload(4), toy_machine(device_bytes=20 * MIB, host_bytes=20 * MIB)
    found = predict("zero-offload", workload, machine, {"host_buffers": "none"})
    assert compare_policies.short_reason(found) == "does not fit: gpu0 is too small, and host as well"
    assert found.record()["shortage"]["also_short"] == "host"
