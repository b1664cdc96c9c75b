"""What to say when no plan fits: which capacity is short and by how much, and the micro-batch that would do.

InfeasiblePlan(PlanError)   no plan fits into memory, or none spares the drives as was asked
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import inf
from typing import TYPE_CHECKING, Any

from tierplan.hwmodels.machine import Machine
from tierplan.planner.lowering.tiling import with_batch
from tierplan.planner.milp.amounts import Problem, problem
from tierplan.planner.milp.bounds import Bound, Shortage, lower_bound, shortages
from tierplan.planner.milp.totals import bound_of_totals
from tierplan.planner.plan import plain_semantics
from tierplan.planner.plan_rules import Order, PlanError
from tierplan.planner.search.budget import Budget
from tierplan.planner.several_devices.sharded import sharded, tensor_parallel
from tierplan.planner.several_devices.tensors import may_cut
from tierplan.sim.output.text import format_bytes, format_count, format_s
from tierplan.sim.step import Semantics
from tierplan.sim.workloads.formats import format_of
from tierplan.sim.workloads.workload import DTYPE_BYTES, Workload

if TYPE_CHECKING:
    from tierplan.planner.loop import Search

SUB_BATCHES = (2, 4, 8, 16)
"""Parts of a micro-batch with which the largest batch is looked for, beside as many as it has sequences."""
MOST_TIMES = 10
"""All memory of one device's machine, beyond which what is missing is said by this sum alone."""
SOME = 2**20
"""Parameters of a large layer: what one takes in a format."""
MANY = 256
"""Larger ones are not looked for."""
TRIED = ("fuyou", "zero-infinity", "sliding-window")
"""Policies that make room, which each is looked for with."""
TRY_OPS, TRY_S = 80_000, 2.0
"""What the planner may spend then, and by when it ends: only on large models or busy computers by the clock."""


@dataclass(frozen=True, slots=True)
class LargestBatch:
    """Sequences per micro-batch that fit."""

    num_sequences: int
    """0 where not even one fits, or was found to."""
    is_least: bool = False
    """More may fit: no more were looked for, or the clock ended the search of one."""
    is_bound: bool = False
    """By a bound no more fit."""

    def __str__(self) -> str:
        if not self.num_sequences:
            return "none, not even one" if self.is_bound else "none was found, not even for one"
        if self.is_least:
            return f"{self.num_sequences} or more"
        return f"up to {self.num_sequences}"


def least_lacking(problems: Iterable[Problem]) -> tuple[Shortage, ...]:
    """Of each tier that none of these has enough of, the least that would do."""
    found = [shortage for p in problems for shortage in shortages(p)]
    least = {s.tier: s for s in sorted(found, key=lambda s: -s.needed_bytes)}
    return tuple(least[tier] for tier in ("device", "host", "nvme") if tier in least)


def short_bytes_of_all(workload: Workload, machine: Machine) -> int:
    """By how much all tiers together lack room for parameters and optimizer states; 0 or less where they have it."""
    held_bytes = workload.params_bytes + workload.states_bytes
    return held_bytes - sum(tier.capacity_bytes for tier in machine.tiers)


def lacking_in_all(workload: Workload, machine: Machine) -> tuple[Shortage, ...]:
    """What several devices lack for parameters and optimizer states alone, each of them once: by tier, what it would
    need if all others stayed as they are. Nothing where all tiers together have room, or on one device, of which the
    planning program says more (`least_lacking`): but not where they have room for a small part alone, for programs and
    policies take long for a model that no machine is made for."""
    short_bytes = short_bytes_of_all(workload, machine)
    has_bytes = sum(tier.capacity_bytes for tier in machine.tiers)
    if short_bytes <= (MOST_TIMES * has_bytes if machine.num_devices == 1 else 0):
        return ()
    found: dict[str, Shortage] = {}
    for tier in machine.tiers:
        num = machine.num_devices if tier.kind == "device" else 1
        needed_bytes = tier.capacity_bytes + -(-short_bytes // num)
        found.setdefault(
            tier.kind, Shortage(tier=tier.kind, needed_bytes=needed_bytes, capacity_bytes=tier.capacity_bytes)
        )
    return tuple(found.values())


def spares_no_drives(num_plans: int, gentlest: str, least_s: float) -> str:
    """Why none of so many plans lets the drives live as long as was asked, where this is what the gentlest of them does
    and no plan's step could be shorter than `least_s`, in seconds."""
    none = f"no plan that spares them has a step of less than {format_s(least_s)}"
    none = none if least_s < inf else "no plan in such micro-batches spares them"
    return (
        f"the gentlest of {num_plans} plans {gentlest}. By the bound, {none}; micro-batches that are accumulated make "
        "steps longer without writing more (--accumulation). Or use more drives, or ones rated for more (--set "
        "nvme.drives=, nvme.endurance=), or ask for a shorter lifetime"
    )


@dataclass(eq=False)
class InfeasiblePlan(PlanError):
    """No plan fits into memory, or none spares the drives as was asked."""

    workload: Workload = field(repr=False)
    machine: Machine = field(repr=False)
    shortages: tuple[Shortage, ...]
    """Each of them alone would make a plan possible in the fluid relaxation, so the truth is this or somewhat more;
    for micro-batches that are cut where that takes less."""
    reason: str = ""
    endurance: str = ""
    """Why none spares the drives, where memory is not what is short."""
    not_found: str = ""
    """How long was searched, where the clock ended that and a plan may fit."""
    may_fit: bool = False
    """No bound excludes a plan: none was found, and `reason` is why the nearest to it does not fit."""
    others: tuple[str, ...] = ()
    """Policies that fit, and train other numbers."""
    is_slower: bool = False
    """Whether memory may do for some that was left out, since its bound is above the step that is known."""
    semantics: Semantics | None = None
    """That were asked for."""
    write_limit_bytes_per_s: float = inf

    @cached_property
    def largest_batch(self) -> LargestBatch:
        """Sequences per micro-batch that would fit. Found when first asked for, which takes a while."""
        training = self.workload.training  # where a step has one micro-batch, all sequences of a step may be in it
        below = training.per_device_train_batch_size * training.gradient_accumulation_steps
        make = partial(with_batch, self.workload)
        return largest_batch(make, self.machine, self.semantics, self.write_limit_bytes_per_s, below=below)

    @property
    def what(self) -> str:
        """What is short, without the micro-batch that would do."""
        if self.endurance:
            return f"no plan for {self.workload.name!r} spares the drives of {self.machine.name!r}: {self.endurance}"
        of_what = f"{self.workload.name!r} into the memory of {self.machine.name!r}"
        of_what += " and spares its drives as was asked" * (self.write_limit_bytes_per_s < inf)
        if self.not_found:
            return f"no plan that fits {of_what} was found {self.not_found}"
        lines = [f"no plan fits {of_what}"]
        if self.may_fit:
            lines = [f"no plan that fits {of_what} was found, and no bound says that there is none"]
        for s in self.shortages:
            lines.append(
                f"{'or ' * (len(lines) > 1)}{s.tier} memory is short by at least {format_bytes(s.short_bytes)}: it has "
                f"{format_bytes(s.capacity_bytes)} and needs {format_bytes(s.needed_bytes)} or more"
            )
            if s.tier == "device" and (note := logits_note(self.workload, s.needed_bytes)):
                lines[-1] += f"; of a whole micro-batch {note}"
        if not self.shortages:
            nearest = "of those that were tried, the nearest does not: " if self.may_fit and self.reason else ""
            lines.append(nearest + (self.reason or "no single tier alone would make it possible"))
            if (devices := self.machine.num_devices) > 1 and (note := self._note_of_one()):
                cuts = f", which {devices} GPUs cut," * may_cut(self.workload, devices)
                lines.append(f"of one sequence{cuts} {note}")
        if note := base_note(self.workload):
            lines.append(f"this is training {note}")
        if self.others:
            lines.append(f"with other numbers than plain training's, policies fit: {', '.join(self.others)}")
        return "; ".join(lines)

    def _note_of_one(self) -> str:
        """What to do about logits and loss of one sequence on several devices, where these take much of each."""
        num, training = self.machine.num_devices, self.workload.training
        parts = training.per_device_train_batch_size * (num if may_cut(self.workload, num) else 1)
        return logits_note(self.workload, self.machine.tiers[0].capacity_bytes, parts=parts)

    def __str__(self) -> str:
        if self.endurance or self.not_found:
            return self.what
        steps = (
            " where a step has one (--accumulation 1)" if self.workload.training.gradient_accumulation_steps > 1 else ""
        )
        return f"{self.what}; sequences per micro-batch that fit{steps}: {self.largest_batch}"


def why_none(search: Search, problems: list[Problem], bounds: list[Bound]) -> InfeasiblePlan:
    """The error of a search that has found nothing, with the problems that it posed and their bounds."""
    workload, machine, beat_s = search.workload, search.machine, search.beat_s
    if beat_s < inf:
        why = f"none that was tried does, and no other is quicker than the {beat_s:.3g} s of one that is known"
        is_slower = any(beat_s <= bound.searched_s < inf for bound in bounds)
        return InfeasiblePlan(workload, machine, (), why, is_slower=is_slower)
    seen = search.simulate_plan.seen.values()
    if is_on_several := machine.num_devices > 1:  # where bounds are of units alone
        bounds = [bound_of_totals(search.of_one_device("horizontal", 1, None), 1)]
    if worn := [c for c in seen if c.wear > 1.0]:
        gentlest = min(worn, key=lambda c: c.wear)
        why = spares_no_drives(len(worn), gentlest.reason, min(bound.step_s for bound in bounds))
        return InfeasiblePlan(workload, machine, (), "", why)
    if any(bound.feasible for bound in bounds) and search.budget.is_out_of_time:
        why = f"in {search.budget.time_limit_s:g} s, though memory may do; search for longer (--time-limit)"
        return InfeasiblePlan(workload, machine, (), not_found=why)
    finest = search.posed("vertical", workload.training.per_device_train_batch_size)
    may_fit = any(bound.feasible for bound in bounds)
    lacking = () if may_fit or is_on_several else least_lacking([*problems, finest])
    # the nearest to fitting says why
    nearest = max((c for c in seen if not c.fits), key=lambda c: min(c.room_gb.values(), default=-inf), default=None)
    reason = "" if lacking or nearest is None else nearest.reason
    others = tuple(name for name, result in search.compared.items() if result(is_best=False).step_s is not None)
    asked: Any = {"semantics": search.asked_semantics, "write_limit_bytes_per_s": search.write_limit_bytes_per_s}
    return InfeasiblePlan(workload, machine, lacking, reason, may_fit=may_fit, others=others, **asked)


def logits_note(workload: Workload, of_bytes: int, *, parts: int = 1) -> str:
    """What to do about logits and loss, where they take more than half of so many bytes on the device; else nothing.

    `parts` are those that sub-batches and devices cut the last unit of one micro-batch into.
    """
    head, chunks = workload.units[-1], workload.training.loss_chunks
    loss_bytes = (head.saved_bytes + max(head.forward_work_bytes, head.backward_work_bytes)) // parts
    if head.kind != "head" or 2 * loss_bytes <= of_bytes:
        return ""
    note = f"{format_bytes(loss_bytes)} are logits and loss: fewer tokens in a micro-batch need less (--seq, --batch)"
    return f"{note}, and so does a loss in chunks (--loss-chunks {8 * chunks})" if chunks < 64 else note


def base_note(workload: Workload) -> str:
    """That most of a frozen base is not in the format that was asked for; empty where it is."""
    training, num = workload.training, sum(u.num_frozen for u in workload.units)
    if not training.base:
        return ""
    coded_bytes = format_of(training.base).size_bytes(SOME) / SOME
    saved_bytes = num * DTYPE_BYTES[training.dtype] - sum(u.frozen_bytes for u in workload.units)
    num_coded = saved_bytes / (DTYPE_BYTES[training.dtype] - coded_bytes)
    if num_coded >= num / 2:
        return ""
    stay = f"{format_count(num - num_coded)} of {format_count(num)} parameters stay in {training.dtype}"
    return (
        f"of a base of which {stay}: only linear layers are in {training.base}, no embeddings, and no experts whose "
        "matrices lie in one parameter"
    )


def has_room(
    workload: Workload,
    machine: Machine,
    semantics: Semantics | None = None,
    write_limit_bytes_per_s: float = inf,
) -> bool:
    """Whether a plan may fit, by the bounds: where not, there is none; of several devices, none of units."""
    if lacking_in_all(workload, machine):
        return False
    training = workload.training
    batch = training.per_device_train_batch_size
    parts: set[tuple[Order, int]] = {("vertical", t) for t in (*SUB_BATCHES, batch) if batch % t == 0}
    updates, limit = semantics or plain_semantics(training), write_limit_bytes_per_s
    posed = partial(problem, workload, machine, semantics=updates, write_limit_bytes_per_s=limit)
    whole = [posed(order=order, sub_batches=t) for order, t in (("horizontal", 1), *parts)]
    num = machine.num_devices
    in_shards = [sharded(p, num, "nothing") for p in whole if num > 1]
    in_tensors = [tensor_parallel(p, num) for p in whole if num > 1 and may_cut(workload, num)]
    return any(lower_bound(p, beat_s=0.0).feasible for p in (*in_shards, *whole, *in_tensors))


def found_shortly(
    workload: Workload,
    machine: Machine,
    semantics: Semantics | None = None,
    write_limit_bytes_per_s: float = inf,
) -> bool | None:
    """Whether a plan is found that fits, of a policy or by a short search: `plan`, which tries more, finds one then.
    None where the clock ended that search."""
    from tierplan.planner.compared import Compared
    from tierplan.planner.loop import Search  # whose error this module has
    from tierplan.planner.search.candidates import PlanSimulator

    budget = Budget(TRY_S, TRY_OPS)
    simulate_plan = PlanSimulator(workload, machine, budget, write_limit_bytes_per_s=write_limit_bytes_per_s)
    starts = Compared(workload, machine, semantics, None, simulate_plan).plans(TRIED)
    if any(simulate_plan(start).fits for _, start, _ in starts):
        return True
    if not has_room(workload, machine, semantics, write_limit_bytes_per_s):
        return False
    budget = Budget(TRY_S, TRY_OPS)
    search = Search(workload, machine, semantics, budget, seed=0, write_limit_bytes_per_s=write_limit_bytes_per_s)
    search.begin(policies=())
    search.go_on()
    return True if search.best_s < inf else None if budget.is_out_of_time else False


def largest_batch(
    make: Callable[[int], Workload],
    machine: Machine,
    semantics: Semantics | None = None,
    write_limit_bytes_per_s: float = inf,
    *,
    below: int,
) -> LargestBatch:
    """The largest micro-batch, up to `below` and `MANY`, that a plan was found for.

    Bit by bit from the highest: what fits does not always with one sequence less, which cannot be cut as evenly.
    """
    if not has_room(make(1), machine, semantics, write_limit_bytes_per_s):
        return LargestBatch(0, is_bound=True)  # nor have more sequences, however they are cut
    largest, is_cut = 0, False
    below = min(below, MANY)
    for bit in reversed(range(below.bit_length())):
        batch = largest + 2**bit
        fits = batch <= below and found_shortly(make(batch), machine, semantics, write_limit_bytes_per_s)
        is_cut = is_cut or fits is None
        if fits:
            largest = batch
    return LargestBatch(largest, is_least=is_cut or largest == below)
