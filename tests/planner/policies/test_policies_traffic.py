"""Bytes per parameter on every stream equal the published tables exactly; swap volumes equal their closed forms."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tierplan.hwmodels import load_machine
from tierplan.planner.lowering import lower
from tierplan.planner.plan import PackPlan, UnitwisePlan
from tierplan.planner.policies import decide
from tierplan.planner.prediction import predict
from tierplan.planner.search.local.moves import loosened
from tierplan.sim.schedule import Schedule
from tierplan.sim.workloads.models import load_workload
from tierplan.sim.workloads.workload import Training, Unit, Workload
from tierplan.validation.published.reproduce import peak_of, published

MACHINE = "fuyou-4090"


def bytes_per_parameter(schedule: Schedule, workload: Workload) -> dict[str, float]:
    """Of parameters, gradients and states of the blocks, by stream: activations and tied matrices left out."""
    kinds = {b.name: b.kind for b in schedule.buffers}
    blocks = {u.name: u.num_parameters for u in workload.blocks}
    moved: dict[str, float] = {}
    for op in schedule.ops:
        if op.kind == "copy" and op.unit in blocks and kinds[op.reads[0]] in ("params", "grads", "states"):
            moved[op.stream] = moved.get(op.stream, 0.0) + op.work["bytes"]
    return {stream: total / sum(blocks.values()) for stream, total in moved.items()}


def traffic_rows() -> list[tuple[str, Mapping[str, object]]]:
    return [(row["policy"], row) for name in ("fuyou", "zero") for row in published(name)["traffic"]]


@pytest.mark.parametrize(("policy", "row"), traffic_rows(), ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.parametrize("batch", [1, 8])
def test_bytes_per_parameter_equal_the_published_table(policy: str, row: Mapping[str, object], batch: int) -> None:
    workload = load_workload("gpt-6.7b", Training(per_device_train_batch_size=batch, dtype="fp16"))
    machine = load_machine(MACHINE)
    schedule = lower(decide(policy, workload, machine, row.get("options")), workload, machine)  # type: ignore[arg-type]
    found = bytes_per_parameter(schedule, workload)
    streams = {"h2d": "gpu0.h2d", "d2h": "gpu0.d2h", "read": "nvme.read", "write": "nvme.write"}
    asked = {stream: row[name] for name, stream in streams.items() if name in row}
    assert {stream: found.get(stream, 0) for stream in asked} == asked


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("in-memory", {}),
        ("full-recompute", {}),
        ("ssdtrain", {}),
        ("sliding-window", {"gpu0.h2d": 4, "gpu0.d2h": 2}),
        ("vertical", {"gpu0.h2d": 4, "gpu0.d2h": 2, "nvme.read": 16, "nvme.write": 14}),
    ],
)
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_bytes_per_parameter_of_the_other_policies(
    policy: str, expected: Mapping[str, float], micro_batches: int
) -> None:
    """Vertical order moves parameters twice and gradients once a step; horizontal order does so per micro-batch."""
    workload = load_workload("gpt-6.7b", Training(gradient_accumulation_steps=micro_batches, dtype="fp16"))
    machine = load_machine(MACHINE)
    found = bytes_per_parameter(lower(decide(policy, workload, machine), workload, machine), workload)
    per_batch = micro_batches if policy == "sliding-window" else 1
    assert found == {stream: per_batch * size for stream, size in expected.items()}


def test_twin_flow_leaves_a_share_of_the_optimizer_on_the_device() -> None:
    workload = load_workload("gpt-6.7b", Training(dtype="fp16"))
    machine = load_machine(MACHINE, ["gpu.capacity=200 GB"])
    schedule = lower(decide("zero-offload", workload, machine, {"device_frac": 0.5}), workload, machine)
    found = bytes_per_parameter(schedule, workload)
    on_host = sum(b.num_parameters for b in workload.blocks if f"offload_grads/{b.name}" in _keys(schedule))
    assert 0.4 < on_host / sum(b.num_parameters for b in workload.blocks) < 0.6
    share = on_host / sum(b.num_parameters for b in workload.blocks)
    assert found["gpu0.h2d"] == pytest.approx(2 * share)
    assert found["gpu0.d2h"] == pytest.approx(4 * share)


def _keys(schedule: Schedule) -> set[str]:
    """Keys without the micro-batch at the end."""
    return {op.key.rsplit("/mb", 1)[0] for op in schedule.ops}


# ---- Harmony ----


def packed_workload(num_blocks: int, micro_batches: int) -> Workload:
    """Units of different sizes, so that no two terms of a closed form can stand in for each other."""
    units = [
        Unit(
            name="embed" if i == 0 else "head" if i == num_blocks + 1 else f"L{i - 1}",
            kind="embed" if i == 0 else "head" if i == num_blocks + 1 else "block",
            num_parameters=1000 + 37 * i * i,
            forward={"s": 0.01},
            backward={"s": 0.02},
            input_bytes=64 if i else 0,
            output_bytes=64,
        )
        for i in range(num_blocks + 2)
    ]
    training = Training(gradient_accumulation_steps=micro_batches, dtype="fp32")
    return Workload(name="packed", model_type="toy", training=training, units=tuple(units))


def weight_swap_bytes(schedule: Schedule, counted: tuple[str, ...] = ("params", "grads")) -> float:
    kinds = {b.name: b.kind for b in schedule.buffers}
    links = (".h2d", ".d2h")
    return sum(
        op.work.get("bytes", 0.0) for op in schedule.ops if op.stream.endswith(links) and kinds[op.reads[0]] in counted
    )


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("pack", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batches", [4, 8])
def test_harmony_swaps_three_times_the_weights_but_for_the_last_pack(
    devices: int, pack: int, micro_batches: int
) -> None:
    workload = packed_workload(9, micro_batches)
    machine = load_machine("harmony-4x1080ti")
    whole = sum(u.num_parameters for u in workload.units) * 4
    last_pack = sum(u.num_parameters for u in workload.units[-pack:]) * 4
    for policy, copies in (("harmony-pp", 1), ("harmony-dp", devices)):
        options = {"devices": devices, "pack": pack}
        schedule = lower(decide(policy, workload, machine, options), workload, machine)
        assert weight_swap_bytes(schedule) == copies * (3 * whole - last_pack)


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("per_device", [1, 2, 5])
def test_virtual_memory_swaps_weights_for_every_use(devices: int, per_device: int) -> None:
    workload = packed_workload(6, devices * per_device)
    machine = load_machine("harmony-4x1080ti")
    whole = sum(u.num_parameters for u in workload.units) * 4
    schedule = lower(decide("virtual-memory", workload, machine, {"devices": devices}), workload, machine)
    assert weight_swap_bytes(schedule, ("params",)) == (4 * per_device + 2) * devices * whole
    assert weight_swap_bytes(schedule, ("grads",)) == 2 * per_device * devices * whole  # out; in to add, and to update
    assert weight_swap_bytes(schedule, ("states",)) == 2 * devices * 2 * whole  # two moments, in and out


def test_harmonys_own_packs_need_not_be_the_same_forward_and_backward() -> None:
    workload = packed_workload(9, 4)
    machine = load_machine("harmony-4x1080ti")
    options = {"devices": 2, "pack": 2, "pack_forward": 3}
    plan = decide("harmony-pp", workload, machine, options)
    assert isinstance(plan, PackPlan)
    assert plan.packs.forward == ((0, 3), (3, 6), (6, 9))
    schedule = lower(plan, workload, machine)
    whole, last = (sum(u.num_parameters for u in units) * 4 for units in (workload.units, workload.units[-2:]))
    assert weight_swap_bytes(schedule) == 3 * whole - last


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("fsdp-offload", {}),
        ("fsdp-offload", {"reduces": "last"}),
        ("zero-3", {"params": "host", "optimizer": "host"}),
    ],
)
def test_parameters_on_the_device_do_not_grow_with_accumulation(policy: str, options: Mapping[str, object]) -> None:
    """A device that computes for long does not collect what the host can bring meanwhile."""
    peaks = []
    for accumulation in (1, 8):
        training = Training(gradient_accumulation_steps=accumulation)
        workload, machine = load_workload("llama-3.2-1b", training), load_machine("fsdp-qlora-2x4090")
        steady = predict(policy, workload, machine, options).steady
        assert steady is not None
        peaks.append(peak_of(steady, ["params"]))
    assert peaks[0] == peaks[1]


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("semantics", ["exact-clip", "delayed-1"])
def test_zero_1_sends_gradients_to_the_host_once_a_step(micro_batches: int, semantics: str) -> None:
    """By hand: of P parameters each of N devices sends its share in fp32 and gets the new ones in 16 bits. They were
    reduced, sent and brought back after every micro-batch."""
    num, training = 4, Training(gradient_accumulation_steps=micro_batches, max_grad_norm=None)
    workload, machine = load_workload("gpt2", training), load_machine("roundpipe-8x4090")
    options = {"devices": num, "optimizer": "host", "semantics": semantics}
    schedule = lower(decide("zero-1", workload, machine, options), workload, machine)
    moved, whole = schedule.bytes_moved(), workload.num_parameters
    assert moved["gpu1.d2h"] == pytest.approx(4 * whole / num, rel=1e-4)
    assert moved["gpu1.h2d"] == pytest.approx(2 * whole / num, rel=1e-4)
    sent = sum(op.work[f"ring{num}_bytes"] for op in schedule.ops if op.stream == "gpu1.collective")
    assert sent == pytest.approx((2 + 1) * 2 * whole * (num - 1) / num, rel=1e-9), "all-reduced, and gathered again"
    gradients = [b.size_bytes for b in schedule.buffers if b.content.startswith("grads/") and b.tier == "gpu1"]
    assert max(gradients) == 2 * max(unit.num_parameters for unit in workload.units), "they wait whole on the device"


@pytest.mark.parametrize("reduces", ["each", "last"])
@pytest.mark.parametrize("has_master", [True, False])
def test_fsdp_in_host_memory_crosses_the_link_in_the_dtype_of_its_shards(reduces: str, has_master: bool) -> None:
    """By hand: with a master copy the shard is that copy, 4 bytes per parameter up for each gather and 4 down for each
    sum of gradients; without one 2 and 2. They gather and hold 2 either way."""
    num, micro_batches, rate = 4, 3, 25e9
    training = Training(gradient_accumulation_steps=micro_batches, dtype="bf16", master_weights=has_master)
    workload = load_workload("gpt2", training)
    machine = load_machine("roundpipe-8x4090", [f"link.h2d={rate} B/s", f"link.d2h={rate} B/s", "link.latency=0 s"])
    options = {"devices": num, "reduces": reduces}
    plan = decide("fsdp-offload", workload, machine, options)
    assert isinstance(plan, UnitwisePlan)
    assert not loosened(plan).fp32_by_link, "the planner's own plans do not pay for it"
    schedule = lower(plan, workload, machine)
    crossed = dict.fromkeys(("gpu1.h2d", "gpu1.d2h"), 0.0)
    for op in schedule.ops:
        if op.stream in crossed:
            crossed[op.stream] += op.work["bytes"] + op.work.get("s", 0.0) * rate
    embed, *blocks, head = (unit.num_parameters for unit in workload.units)
    gathered = micro_batches * (2 * sum(blocks) + embed + head)  # the ends are the root's, which stay
    brought = gathered + micro_batches * embed  # again as the head's matrix
    sums = workload.num_parameters * (micro_batches if reduces == "each" else 1)
    each = 4 if has_master else 2
    assert crossed["gpu1.h2d"] == pytest.approx(each * brought / num, rel=1e-4)
    assert crossed["gpu1.d2h"] == pytest.approx(each * sums / num, rel=1e-4)
    sent = sum(op.work[f"ring{num}_bytes"] for op in schedule.ops if op.kind == "gather" and ".collective" in op.stream)
    assert sent == pytest.approx(num * 2 * gathered * (num - 1) / num, rel=1e-9)
