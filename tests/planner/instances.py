"""Small machines and chains for tests of the planner, built from round numbers or drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal, get_args

from tierplan.hwmodels.machine import Machine, Rate, SharedLimit, Stream, TierSpec
from tierplan.planner.milp.amounts import Problem, problem
from tierplan.planner.milp.bounds import lower_bound
from tierplan.planner.milp.modes import MODES
from tierplan.planner.plan import Plan, UnitPlan, UnitwisePlan
from tierplan.planner.plan_rules import Order
from tierplan.planner.search.budget import Budget
from tierplan.planner.search.candidates import PlanSimulator
from tierplan.sim.step import Semantics
from tierplan.sim.workloads.workload import SavedTensor, Training, Unit, Workload

MB = 1_000_000


def small_machine(
    *,
    device_mb: float = 100,
    host_mb: float = 10_000,
    nvme_mb: float = 100_000,
    link_mb_per_s: float = 100,
    read_mb_per_s: float = 50,
    write_mb_per_s: float = 40,
    adam_m_per_s: float = 20,
    ssd_bonus: float | None = None,
) -> Machine:
    """One device, a host, and drives unless `nvme_mb` is 0; compute is given in seconds."""
    constant = Rate.constant
    tiers = [
        TierSpec(name="gpu0", kind="device", capacity_bytes=int(device_mb * MB)),
        TierSpec(name="host", kind="host", capacity_bytes=int(host_mb * MB)),
    ]
    streams = [
        Stream(name="gpu0.compute", rates={"elementwise_bytes": constant(1e12)}),
        Stream(name="gpu0.h2d", rates={"bytes": constant(link_mb_per_s * MB)}),
        Stream(name="gpu0.d2h", rates={"bytes": constant(link_mb_per_s * MB)}),
        Stream(
            name="host.adam",
            rates={"parameters": constant(adam_m_per_s * MB), "elementwise_bytes": constant(1e9)},
        ),
    ]
    limits: tuple[SharedLimit, ...] = ()
    if nvme_mb:
        tiers.append(TierSpec(name="nvme", kind="nvme", capacity_bytes=int(nvme_mb * MB)))
        takes: list[dict[str, dict[str, float]]] = [{}, {}]
        if ssd_bonus is not None:
            limits = (SharedLimit(name="ssd", limit=1 + ssd_bonus),)
            takes = [
                {"ssd": {"bytes": 1 / (read_mb_per_s * MB)}},
                {"ssd": {"bytes": 1 / (write_mb_per_s * MB)}},
            ]
        streams += [
            Stream(name="nvme.read", rates={"bytes": constant(read_mb_per_s * MB)}, takes=takes[0]),
            Stream(name="nvme.write", rates={"bytes": constant(write_mb_per_s * MB)}, takes=takes[1]),
        ]
    return Machine(name="small", tiers=tuple(tiers), streams=tuple(streams), shared_limits=limits)


def chain(
    *,
    forward_s: Sequence[float],
    parameters: Sequence[int],
    saved_mb: Sequence[Sequence[float]],
    recompute_s: Sequence[Sequence[float]] | None = None,
    border_mb: float = 1.0,
    accumulation: int = 1,
    batch: int = 1,
    max_grad_norm: float | None = None,
) -> Workload:
    """Blocks with these forward seconds (backward takes twice as long), parameters and saved tensors."""
    num = len(forward_s)
    units = []
    for u in range(num):
        costs = (
            recompute_s[u]
            if recompute_s is not None
            else [forward_s[u] / (2 * len(saved_mb[u]) or 1)] * len(saved_mb[u])
        )
        units.append(
            Unit(
                name=f"L{u}",
                kind="block",
                num_parameters=parameters[u],
                forward={"s": forward_s[u]},
                backward={"s": 2 * forward_s[u]},
                saved=tuple(
                    SavedTensor(index=k, name=f"t{k}", size_bytes=int(mb * MB), dtype="bf16", recompute={"s": c})
                    for k, (mb, c) in enumerate(zip(saved_mb[u], costs, strict=True))
                ),
                input_bytes=int(border_mb * MB) if u else 0,
                output_bytes=int(border_mb * MB) if u + 1 < num else 0,
            )
        )
    training = Training(
        gradient_accumulation_steps=accumulation, per_device_train_batch_size=batch, max_grad_norm=max_grad_norm
    )
    return Workload(name=f"chain of {num}", model_type="test", training=training, units=tuple(units))


def random_chain(rng: random.Random, num: int, *, slots: int = 2, accumulation: int = 1) -> Workload:
    """A chain with unequal blocks."""
    return chain(
        forward_s=[rng.choice((0.1, 0.2, 0.4, 0.8)) for _ in range(num)],
        parameters=[rng.choice((1, 2, 4)) * MB for _ in range(num)],
        saved_mb=[[rng.choice((2, 5, 10, 20)) for _ in range(slots)] for _ in range(num)],
        border_mb=rng.choice((0.5, 1, 4)),
        accumulation=accumulation,
    )


def random_machine(rng: random.Random, workload: Workload) -> Machine:
    """A machine on which the chain more or less fits, with rates of the same order as its compute."""
    states_mb = workload.num_parameters * 16 / MB
    saved_mb = sum(u.saved_bytes for u in workload.units) / MB
    return small_machine(
        device_mb=rng.uniform(0.5, 1.1) * (states_mb / 2 + saved_mb),
        host_mb=rng.uniform(0.6, 3.0) * (states_mb + saved_mb),
        link_mb_per_s=rng.choice((50, 100, 200, 400)),
        read_mb_per_s=rng.choice((20, 50, 100)),
        write_mb_per_s=rng.choice((20, 40, 80)),
        adam_m_per_s=rng.choice((5, 20, 100)),
        ssd_bonus=rng.choice((None, 0.0, 0.3)),
    )


def random_plan(rng: random.Random, problem: Problem) -> UnitwisePlan:
    """Any plan, sensible or not."""
    units = []
    for u, (unit, amounts) in enumerate(zip(problem.workload.units, problem.units, strict=True)):
        mode = MODES[rng.choice(problem.modes(u))]
        can_be_late = problem.semantics != "delayed-1" and mode.updated != "device" and mode.grads != "nvme"
        units.append(
            UnitPlan(
                params=mode.params,
                states=mode.states,
                update=mode.update,
                grads=mode.grads,
                input=rng.choice(("keep", "keep", "host", "nvme"))
                if amounts.groups and not amounts.groups[0].slots
                else "keep",
                acts=tuple(rng.choice(("keep", "recompute", "host", "nvme")) for _ in unit.saved),
                late_update=rng.random() < 0.3 and can_be_late,
            )
        )
    also = random.Random(str(units))  # of `rng`, others draw what they always have
    units = [
        replace(u, state_shards=also.choice((1, 2, 4))) if u.updates_here and u.states_travel else u for u in units
    ]
    units = [
        replace(choice, tied_grads=also.choice(("device", "host"))) if amounts.tied_gb else choice
        for choice, amounts in zip(units, problem.units, strict=True)
    ]
    return UnitwisePlan(
        policy="random",
        units=tuple(units),
        semantics=problem.semantics,
        order=problem.order,
        prefetch_params_units=rng.choice((0, 1, 2)),
        prefetch_acts_units=rng.choice((0, 1, 2)),
        prefetch_states_units=rng.choice((0, 1, 2)),
        update_over_units=also.choice((1, 2, 3)),
    )


def num_above_bound(
    workload: Workload,
    machine: Machine,
    semantics: Semantics,
    draw: Callable[[Problem], Iterable[Plan]],
    *,
    runs: Sequence[range] | None = None,
) -> int:
    """How many plans that are drawn for both orders run; each that does takes at least the bound of its order."""
    simulate_plan, num_ran = PlanSimulator(workload, machine, Budget(1e9)), 0
    for order in get_args(Order):
        bound = lower_bound(p := problem(workload, machine, semantics=semantics, order=order, runs=runs))
        for tried in map(simulate_plan, draw(p)):
            if tried.step_s is not None:
                num_ran += 1
                assert bound.feasible
                assert bound.step_s <= tried.step_s * (1 + 1e-6), (order, tried.plan)
    return num_ran


def random_plans(rng: random.Random, num: int) -> Callable[[Problem], Iterator[Plan]]:
    """So many, sensible or not, for `num_above_bound`."""
    return lambda p: (random_plan(rng, p) for _ in range(num))


BruteForceKind = Literal["placement", "placement with drives", "three blocks", "activations", "activations with drives"]
BRUTE_FORCE_KINDS: tuple[BruteForceKind, ...] = (
    "placement",
    "activations",
    "placement",
    "placement with drives",
    "activations with drives",
    "placement",
    "activations",
    "three blocks",
    "placement",
    "activations",
)
"""By the last digit of an instance's number."""


def brute_force_instance(number: int) -> tuple[BruteForceKind, Workload, Machine]:
    """An instance small enough for all of its plans to be simulated.

    Placement: two or three blocks, each with any tier for parameters, states and gradients, any action, late or not.
    Activations: four to six blocks without parameters, each with any action.
    """
    rng = random.Random(number)
    kind = BRUTE_FORCE_KINDS[number % len(BRUTE_FORCE_KINDS)]
    if kind.startswith("activations"):
        num = 4 if "drives" in kind else rng.choice((4, 5, 6))
        workload = _without_parameters(random_chain(rng, num, slots=1))
        machine = _for_activations(rng, workload)
    else:
        workload = random_chain(rng, 3 if kind == "three blocks" else 2, slots=1)
        machine = random_machine(rng, workload)
    if "drives" in kind:
        return kind, workload, machine
    # the memory that stands for the drives would make everything fit where there is little to place
    machine = without_drives(machine)
    if kind == "activations":
        halved = tuple(replace(t, capacity_bytes=t.capacity_bytes // 2) for t in machine.tiers)
        machine = replace(machine, tiers=halved)
    return kind, workload, machine


def _without_parameters(workload: Workload) -> Workload:
    return replace(workload, units=tuple(replace(unit, num_parameters=0) for unit in workload.units))


def _for_activations(rng: random.Random, workload: Workload) -> Machine:
    """Room for some of what is saved on the device, and for some more on the host."""
    saved_mb = sum(u.saved_bytes + u.output_bytes for u in workload.units) / MB
    largest_mb = max(u.saved_bytes + 3 * u.output_bytes for u in workload.units) / MB
    return small_machine(
        device_mb=max(largest_mb, rng.uniform(0.4, 0.9) * saved_mb),
        host_mb=rng.uniform(0.1, 0.8) * saved_mb,
        link_mb_per_s=rng.choice((20, 50, 100)),
        read_mb_per_s=rng.choice((20, 50, 100)),
        write_mb_per_s=rng.choice((20, 40, 80)),
        ssd_bonus=rng.choice((None, 0.0, 0.3)),
    )


def without_drives(machine: Machine) -> Machine:
    """The machine with device and host only, with twice the memory to make up for it."""
    return replace(
        machine,
        tiers=tuple(replace(t, capacity_bytes=2 * t.capacity_bytes) for t in machine.tiers if t.kind != "nvme"),
        streams=tuple(s for s in machine.streams if not s.name.startswith("nvme")),
        shared_limits=(),
    )
