"""Packs and paged weights on two devices, op by op: what each transfer waits for, and what passes between devices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.toys import MIB, toy_machine, toy_workload
from tierplan.hwmodels.machine import Machine, Rate, Stream
from tierplan.planner.lowering import lower
from tierplan.planner.plan import PackPlan, Packs, PagedPlan
from tierplan.sim.schedule import Op

BLOCK = 3 * MIB
"""Parameters of a block of the toy workload."""
WORKLOAD = toy_workload(4, tied=False, gradient_accumulation_steps=4)
"""embed, L0, L1, L2, L3, head."""
FIVE = Rate.constant(5e9)


def two_gpus() -> Machine:
    one = toy_machine()
    streams = [replace(s, name=s.name.replace("gpu0", "gpu1")) for s in one.streams if s.name.startswith("gpu0")]
    peers = [Stream(name=f"gpu{i}.p2p.gpu{1 - i}", rates={"bytes": Rate.constant(5e9)}) for i in range(2)]
    peers += [Stream(name=f"gpu{i}.collective", rates=dict.fromkeys(("ring2_bytes", "hops"), FIVE)) for i in range(2)]
    return replace(
        one, tiers=(*one.tiers, replace(one.tier("gpu0"), name="gpu1")), streams=(*one.streams, *streams, *peers)
    )


def packed(form: str, forward: Any, backward: Any, **more: Any) -> dict[str, Op]:
    packs = Packs(form=form, devices=2, forward=forward, backward=backward, **more)  # type: ignore[arg-type]
    schedule = lower(PackPlan(policy="test", packs=packs), WORKLOAD, two_gpus())
    return {op.key: op for op in schedule.ops}


def test_inputs_come_one_micro_batch_ahead_of_compute() -> None:
    """Two buffers: one is in use, and the other is filled when the micro-batch before the last has left it."""
    ops = packed("pipeline", ((0, 2), (2, 4)), ((0, 2), (2, 4), (4, 6)))
    assert ops["send_y/L1/mb2"].after == ("fwd/L1-L2/mb0",)
    assert ops["send_y/L1/mb3"].after == ("fwd/L1-L2/mb1",)
    assert ops["send_y/L1/mb3"].stream == "gpu0.p2p.gpu1"


def test_a_stash_that_another_device_will_use_passes_through_host_memory_for_all_devices_at_once() -> None:
    """L0 goes forward on the second device and backward on the first: read and written, at the shared rate."""
    forward, backward = ((0, 1), (1, 3)), ((0, 1), (1, 2), (2, 3), (3, 6))
    ops = packed("pipeline", forward, backward, host_copy_bytes_per_s=1e9)
    assert ops["offload_stash/L0/mb0"].stream == "gpu1.d2h"
    assert ops["fetch_stash/L0/mb0"].stream == "gpu0.h2d"
    assert ops["pass_stash/L0/mb0"].work == {"s": 2 * MIB * 2 / 1e9}
    assert "pass_stash/L1/mb0" not in ops, "the same device takes it both ways"
    assert not any(key.startswith("pass_stash/") for key in packed("pipeline", forward, backward))


def test_gradients_of_data_parallel_packs_are_all_reduced_in_a_ring() -> None:
    """Each device sends 2 (N - 1) / N of the gradients, which is all of them for N = 2."""
    ops = packed("data", ((0, 2), (2, 4)), ((0, 2), (2, 4), (4, 6)))
    for gpu in range(2):
        reduced = ops[f"all_reduce/L1-L2/gpu{gpu}"]
        assert reduced.work == {"ring2_bytes": 2 * BLOCK * 2, "hops": 2}
        assert reduced.stream == f"gpu{gpu}.collective"
    assert ops["update/L1"].work == {"parameters": BLOCK}


def test_paged_weights_are_all_reduced_and_updated_on_every_device() -> None:
    plan = PagedPlan(policy="test", devices=2)
    ops = {op.key: op for op in lower(plan, WORKLOAD, two_gpus()).ops}
    for gpu in range(2):
        assert ops[f"all_reduce/L1/gpu{gpu}"].work == {"ring2_bytes": BLOCK * 2, "hops": 2}
        assert ops[f"update/L1/gpu{gpu}"].work == {"elementwise_bytes": 30 * BLOCK}
    used = [key for key in ops if key.startswith("fetch_params/L1/")]
    assert len(used) == 4 * 2 + 2, "once forward and once backward per micro-batch, and once per device to be updated"
