"""Small workloads and machines with round numbers, for tests that need no real model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tierplan.hwmodels.machine import Machine, Rate, SharedLimit, Stream, TierSpec
from tierplan.planner.plan import UnitPlan, UnitwisePlan
from tierplan.sim.workloads.workload import SavedTensor, Training, Unit, Workload

MIB = 2**20


def toy_workload(num_blocks: int = 4, *, tied: bool = True, slots: int = 4, **training: object) -> Workload:
    """Embed (10 Mi parameters), blocks of 3 Mi parameters that save `slots` tensors of 1 MiB, a head."""
    settings = Training(**{"dtype": "bf16", **training})  # type: ignore[arg-type]
    saved = tuple(
        SavedTensor(
            index=i, name=f"t{i}", size_bytes=MIB, dtype=settings.dtype, recompute={"matmul_bf16_flops": 1e8 * (i + 1)}
        )
        for i in range(slots)
    )
    embed = Unit(
        name="embed",
        kind="embed",
        num_parameters=10 * MIB,
        forward={"elementwise_bytes": 1e6},
        backward={"elementwise_bytes": 1e6},
        output_bytes=MIB,
        saves_input=False,
        saves_parameters=False,
    )
    blocks = [
        Unit(
            name=f"L{i}",
            kind="block",
            num_parameters=3 * MIB,
            forward={"matmul_bf16_flops": 1e9},
            backward={"matmul_bf16_flops": 2e9},
            saved=saved,
            input_bytes=MIB,
            output_bytes=MIB,
            forward_work_bytes=MIB // 2,
            backward_work_bytes=MIB,
        )
        for i in range(num_blocks)
    ]
    head = Unit(
        name="head",
        kind="head",
        num_parameters=1024,
        shares="embed" if tied else None,
        forward={"matmul_bf16_flops": 1e9},
        backward={"matmul_bf16_flops": 2e9},
        saved=saved[:1],
        input_bytes=MIB,
    )
    return Workload(
        name="toy",
        model_type="toy",
        training=settings,
        units=(embed, *blocks, head),
        shared_bytes=1000,
    )


def with_large_embedding(num_blocks: int) -> Workload:
    """A toy whose embedding is as large as thirteen blocks."""
    workload = toy_workload(num_blocks, tied=False)
    embed, *others = workload.units
    return replace(workload, units=(replace(embed, num_parameters=40 * MIB), *others))


def toy_machine(
    *, device_bytes: int = 2000 * MIB, host_bytes: int = 4000 * MIB, nvme_bytes: int = 10**11, shared: bool = False
) -> Machine:
    """100 GFLOP/s, links of 5 GB/s, a drive of 2 and 1 GB/s, an updater of 500 M parameters/s."""
    rate = Rate.constant
    drive = {"drive": {"bytes": 1 / 2e9}} if shared else {}
    return Machine(
        name="toy",
        tiers=(
            TierSpec(name="gpu0", kind="device", capacity_bytes=device_bytes),
            TierSpec(name="host", kind="host", capacity_bytes=host_bytes),
            TierSpec(name="nvme", kind="nvme", capacity_bytes=nvme_bytes),
        ),
        streams=(
            Stream(name="gpu0.compute", rates={"matmul_bf16_flops": rate(1e11), "elementwise_bytes": rate(1e10)}),
            Stream(name="gpu0.h2d", rates={"bytes": rate(5e9)}),
            Stream(name="gpu0.d2h", rates={"bytes": rate(5e9)}),
            Stream(name="nvme.read", rates={"bytes": rate(2e9)}, takes=drive),
            Stream(
                name="nvme.write", rates={"bytes": rate(1e9)}, takes={"drive": {"bytes": 1 / 1e9}} if shared else {}
            ),
            Stream(name="host.adam", rates={"parameters": rate(5e8), "elementwise_bytes": rate(1e10)}),
        ),
        shared_limits=(SharedLimit(name="drive", limit=1.2),) if shared else (),
    )


def with_blocks(workload: Workload, **changes: Any) -> Workload:
    """The workload with other values in every block."""
    units = (replace(unit, **changes) if unit.kind == "block" else unit for unit in workload.units)
    return replace(workload, units=tuple(units))


def side_by_side(one: Machine, num: int, between: Sequence[Stream] = ()) -> Machine:
    """So many devices like the machine's one in its host, and streams between them."""
    own = [s for s in one.streams if s.name.startswith("gpu0")]
    others = [replace(s, name=s.name.replace("gpu0", f"gpu{k}")) for k in range(1, num) for s in own]
    tiers = [replace(one.tier("gpu0"), name=f"gpu{k}") for k in range(1, num)]
    return replace(one, tiers=(*one.tiers, *tiers), streams=(*one.streams, *others, *between))


def uniform_plan(workload: Workload, choice: UnitPlan, **settings: object) -> UnitwisePlan:
    """The same choice for every unit; embed and head keep their activations."""
    other = UnitPlan(params=choice.params, grads=choice.grads, states=choice.states, update=choice.update)
    units = tuple(choice if u.kind == "block" else other for u in workload.units)
    return UnitwisePlan(policy="uniform", units=units, **settings)  # type: ignore[arg-type]
