"""Harmony (arXiv 2202.01306): packs of layers visit the GPUs in turn, with all micro-batches grouped behind each.

Input-batch grouping: every micro-batch goes through a pack before the next pack comes, so weights move once per pack
and pass. Forward and backward have their own packs; the last backward pack does its forward too. Updates run on the
host just in time, when a pack's gradients have arrived, or with clipping, when all have. In pipelines the packs go
round all GPUs ("wrap-around"), activations and their gradients from GPU to GPU; with data parallelism every GPU takes
every pack with its part of the micro-batches, and gradients are all-reduced over the peer links. Weights cost 3 W minus
the last pack, per pipeline or per data-parallel GPU, where no head is tied.

Packs of `pack` units, or (`pack=0`) those with the least time in simulation among packs of about equal compute that fit
by Harmony's memory estimate: first backward packs, then forward packs. `memory_bytes` lowers what packs may use.

Harmony's processes see one host memory. With `host_memory=own` each has its own, and the runtime executes the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice, pairwise

from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.names import DEVICE, HOST
from tierplan.planner.lowering.known import known_columns
from tierplan.planner.plan import PackPlan, Packs
from tierplan.planner.plan_rules import PackForm, PlanError, Runs
from tierplan.planner.policies.options import OptionError, Options, Policy
from tierplan.planner.several_devices.packs.by_turns import pack_columns
from tierplan.planner.several_devices.packs.estimate import PackEstimate, PackSizes
from tierplan.sim.analysis.completion import OutOfMemory
from tierplan.sim.analysis.ordering import refine_columns
from tierplan.sim.columns import collector_paused
from tierplan.sim.compiled.simulation import KnownRows, prices_on, simulate_columns
from tierplan.sim.workloads.workload import Unit, Workload

Seconds = Callable[[PackPlan], float]
SHARES_BATCHES = True
"""Its devices share the micro-batches of one step."""
ON_ONE_DEVICE = ("harmony",)
OPTIONS: dict[str, object] = {
    "pack": 0,
    "pack_forward": 0,
    "memory_bytes": 0,  # 0: what the device has
    "task_cleanup_s": None,  # in Harmony's processes what its authors measured, per task; nothing in ranks
    "host_copy_bytes_per_s": 16 * 2**30,  # of their estimator: what passes between processes in host memory
    "host_memory": "shared",  # own: each device's process has its own, as ranks have that execute the plan
}
HARMONYS_CLEANUP_S = 0.040
SEARCHED, SEARCHED_ALONE = 9, 4
"""Numbers of packs that are tried, from the fewest that fit: on several devices, where balance matters, and on one."""


def _policy(
    name: str,
    form: PackForm,
    workload: Workload,
    machine: Machine,
    given: Mapping[str, object],
    *,
    timed: Callable[[Workload, Machine], Seconds] | None = None,
) -> PackPlan:
    options = Options(name, OPTIONS, {"devices": 1, **given} if name == "harmony" else given)
    has_own_memory = options.choice("host_memory", "shared", "own") == "own"
    if options["task_cleanup_s"] is None:
        options["task_cleanup_s"] = 0.0 if has_own_memory else HARMONYS_CLEANUP_S
    asked, devices = options["devices"], options.num_devices(machine)
    batches = workload.training.gradient_accumulation_steps
    if form == "data" and asked and devices > batches:
        raise OptionError(
            f"policy {name!r} is asked for {asked} devices, but the step has {batches} micro-batches; "
            "each device needs one: accumulate more, or use fewer devices"
        )
    devices = min(devices, batches) if form == "data" else devices  # each has a micro-batch
    capacity = options.whole_number("memory_bytes", low=0) or machine.tier(DEVICE).capacity_bytes
    wanted = options.whole_number("pack", low=0)
    wanted_forward = options.whole_number("pack_forward", low=0) or wanted

    def with_packs(forward: Runs, backward: Runs) -> PackPlan:
        packs = Packs(
            form=form,
            devices=devices,
            forward=forward,
            backward=backward,
            cleanup_s=options.number("task_cleanup_s", low=0),
            host_copy_bytes_per_s=options.number("host_copy_bytes_per_s", low=0),
            hold_updates=workload.training.max_grad_norm is not None,
            own_memory=has_own_memory,
        )
        return PackPlan(policy=name, packs=packs, options={**options, "devices": devices})

    sizes, tried = PackSizes(workload), SEARCHED if devices > 1 else SEARCHED_ALONE
    if wanted:
        backwards = [_by_size(len(workload.units), wanted)]
    else:
        backwards = _equal_time(workload, sizes, capacity, "bwd", tried)
    if not backwards:
        least = min(max(backward_bytes(sizes, a, b) for a, b in r) for r in _splits(workload, "bwd"))
        raise PlanError(
            f"policy {name!r} needs {least:,} bytes or more on a device for the largest of its packs, which take equal "
            f"time, but may use {capacity:,}; "
            "use a smaller micro-batch or a larger device"
        )
    seconds = (timed or _simulated)(workload, machine)
    plan = _quickest([with_packs(runs[:-1], runs) for runs in backwards], workload, machine, seconds)
    backward = plan.packs.backward
    end = backward[-1][0]
    if wanted_forward and end and wanted_forward != wanted:
        return with_packs(_by_size(end, wanted_forward), backward)
    if wanted or not end:
        return plan
    forwards = _equal_time(replace(workload, units=workload.units[:end]), sizes, capacity, "fwd", tried)
    return _quickest([plan, *(with_packs(runs, backward) for runs in forwards)], workload, machine, seconds)


def _quickest(plans: list[PackPlan], workload: Workload, machine: Machine, seconds: Seconds) -> PackPlan:
    """The first where none can run: all keep parameters and states in host memory, whatever their packs."""
    homes_bytes = workload.params_bytes + workload.states_bytes
    if len(plans) == 1 or homes_bytes > machine.tier(HOST).capacity_bytes:
        return plans[0]
    return min(plans, key=seconds)


def _simulated(workload: Workload, machine: Machine) -> Seconds:
    known_s, known_rows = dict[Packs, float](), KnownRows()

    def seconds(plan: PackPlan) -> float:
        if plan.packs not in known_s:
            known_s[plan.packs] = _seconds(plan, workload, machine, known_rows)
        return known_s[plan.packs]

    return seconds


@collector_paused()  # nothing of it is kept, so none of it need be collected
def _seconds(plan: PackPlan, workload: Workload, machine: Machine, known_rows: KnownRows | None = None) -> float:
    columns = known_columns(pack_columns, plan, workload, machine)
    prices = prices_on(columns, machine, known_rows)
    columns = refine_columns(columns, machine, prices=prices)
    try:
        return float(simulate_columns(columns, machine, prices).end_ns.max()) / 1e9
    except OutOfMemory:
        return float("inf")


def _estimated(workload: Workload, machine: Machine) -> Seconds:
    estimate = PackEstimate(workload, machine)
    return lambda plan: estimate.step_s(plan.packs)


FORMS: Mapping[str, PackForm] = {"harmony": "data", "harmony-dp": "data", "harmony-pp": "pipeline"}
"""On one GPU; on all with data parallelism; on all as a wrap-around pipeline."""
VARIANTS: Mapping[str, Policy] = {name: partial(_policy, name, form) for name, form in FORMS.items()}
ESTIMATES: Mapping[str, Policy] = {name: partial(_policy, name, form, timed=_estimated) for name, form in FORMS.items()}


def _by_size(count: int, size: int) -> Runs:
    """Runs of `size` units; the first one is shorter where they do not go in evenly."""
    borders = [*range(count, 0, -size), 0][::-1]
    return tuple(pairwise(borders))


def _equal_time(workload: Workload, sizes: PackSizes, capacity: int, phase: str, tried: int) -> list[Runs]:
    """The fewest packs of about equal compute that fit, and a few with more; an empty list when none does."""
    held = backward_bytes if phase == "bwd" else _forward_bytes
    fitting = (runs for runs in _splits(workload, phase) if all(held(sizes, a, b) <= capacity for a, b in runs))
    return list(islice(fitting, tried))


def _splits(workload: Workload, phase: str) -> Iterator[Runs]:
    """Packs of about equal compute: one, two and so on, as far as there are so many."""
    seconds = [_weight(unit, phase) for unit in workload.units]
    every = (_split(seconds, count) for count in range(1, len(seconds) + 1))
    return (runs for count, runs in enumerate(every, 1) if len(runs) == count)


def _weight(unit: Unit, phase: str) -> float:
    work = unit.forward if phase == "fwd" else {k: unit.forward.get(k, 0.0) + v for k, v in unit.backward.items()}
    return sum(amount for kind, amount in work.items() if kind.endswith("flops") or kind == "s")


def _split(weights: list[float], count: int) -> Runs:
    """At most `count` runs whose sums are about equal: borders where the running sum passes each equal part."""
    total, borders, running = sum(weights), [0], 0.0
    for i, weight in enumerate(weights):
        if running >= total * len(borders) / count - 1e-12 and i > borders[-1] and len(borders) < count:
            borders.append(i)
        running += weight
    borders.append(len(weights))
    return tuple(pairwise(borders))


def backward_bytes(sizes: PackSizes, first: int, end: int) -> int:
    """Harmony's estimate for a backward task, which has its input twice more."""
    return sizes.held_bytes("bwd", first, end) + 2 * sizes.units[first].input_bytes


def _forward_bytes(sizes: PackSizes, first: int, end: int) -> int:
    """And for a forward task, with its input once more, and twice the largest output in place of the last."""
    units = sizes.units[first:end]
    more = max(u.output_bytes for u in units) - units[-1].output_bytes
    return sizes.held_bytes("fwd", first, end) + units[0].input_bytes + 2 * more
