"""The words of plans, and the rules that plans keep.

PlanError(ValueError)   a plan that contradicts itself, its workload or its machine
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, get_args

from tierplan.hwmodels.values.records import check_record
from tierplan.sim.step import Action
from tierplan.sim.workloads.models import sizes_of
from tierplan.sim.workloads.workload import Training, Unit, Workload

if TYPE_CHECKING:
    from tierplan.planner.plan import PackPlan, UnitPlan, UnitwisePlan

Place = Literal["device", "host", "nvme"]
InputAction = Literal["keep", "host", "nvme"]
Order = Literal["horizontal", "vertical"]
WriteBack = Literal["at once", "delayed", "awaited"]
UpdateOrder = Literal["forward", "backward"]
PackForm = Literal["data", "pipeline", "resident"]
TiedPlace = Literal["device", "host"]
UpdatePlace = Literal["home", "device"]
Runs = tuple[tuple[int, int], ...]
"""Of units: the first one and the one after the last, of each run."""
PLACES: tuple[Place, ...] = get_args(Place)
PLANNER = "planner"
"""The name under which the planner's own plans stand among policies."""
MAX_TURNS = 200_000
"""Forwards and backwards of units in one step, at most: a schedule of them takes a few hundred MB."""
ACTIONS: tuple[Action, ...] = get_args(Action)

Divided = Literal["all", "gradients", "states", "nothing", "tensors"]


class PlanError(ValueError):
    """A plan that contradicts itself, its workload or its machine."""


def undivided(sequences: int, num: int) -> str:
    """Why devices that have micro-batches of their own do not train a step of so many sequences in all."""
    others = " or ".join(str(n * num) for n in (sequences // num, sequences // num + 1) if n)
    return (
        f"{sequences} sequence{'s' * (sequences > 1)} cannot be divided among {num} GPUs that have micro-batches of "
        f"their own; ask for {others}, or for another number of GPUs (--devices)"
    )


def refuse_frozen(whose: str, workload: Workload) -> None:
    """For plans that move all parameters alike."""
    if any(unit.num_frozen for unit in workload.units):
        raise PlanError(
            f"{whose}, which moves all parameters, their gradients and states, but some of {workload.name!r} are "
            "frozen; use a unit-wise plan, which keeps frozen ones apart"
        )


def refuse_codes(whose: str, training: Training) -> None:
    """For plans whose activations leave the device as they are."""
    if training.activation_format:
        raise PlanError(
            f"{whose}, where activations leave the device as they are, but training asks for them in "
            f"{training.activation_format!r}; use a unit-wise plan, or leave out activation_format"
        )


def refuse_clipping(whose: str, training: Training) -> None:
    """For plans that update each unit as its gradients arrive."""
    if training.max_grad_norm is not None:
        raise PlanError(
            f"{whose}, which updates each unit in backward, before the norm of all gradients is known, but training "
            f"asks for clipping at norm {training.max_grad_norm}; use a unit-wise plan with semantics 'exact-clip', or "
            "packs that hold updates, or drop max_grad_norm"
        )


def refuse_uneven(whose: str, workload: Workload, devices: int) -> None:
    """For plans that cut operators, by Megatron-LM's rule: whole heads on each device, and as many columns."""
    if why := _uneven(workload, devices):
        *able, last = (str(num) for num in range(devices - 1, 0, -1) if not _uneven(workload, num))
        raise PlanError(
            f"{whose} cuts operators over {devices} devices, but {workload.name!r} has {why}; Megatron-LM refuses to "
            f"train so: take {', '.join(able)}{' or ' * bool(able)}{last} of them (option 'devices'), or another policy"
        )


def _uneven(workload: Workload, num: int) -> str:
    """Why operators cannot be cut into so many shares, as far as the config says; empty where they can."""
    heads, groups, width = sizes_of(workload.config)
    if heads % num:
        return f"{heads} attention heads, which {num} does not divide"
    if groups % num and num % groups:
        return f"{groups} heads of keys and values, which {num} neither divides nor is a multiple of"
    return f"a feed-forward width of {width}, which {num} does not divide" if width % num else ""


def shared_micro_batches(workload: Workload, devices: int) -> list[range]:
    """The micro-batches of each device where all share those of one step: as many each, or one more."""
    total = workload.training.gradient_accumulation_steps
    return [range(d * total // devices, (d + 1) * total // devices) for d in range(devices)]


def lent_units(workload: Workload) -> list[tuple[int, int]]:
    """Units whose parameters others use too, each with the number of such another."""
    number = {unit.name: u for u, unit in enumerate(workload.units)}
    return [(number[unit.shares], u) for u, unit in enumerate(workload.units) if unit.shares]


def updatable_packs(backward: Runs, lent: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Backward packs that go round and that their device may update: those whose parameters no other pack uses."""
    return [(a, b) for a, b in backward if not lent or not any(a <= owner < b <= user for owner, user in lent)]


def check_packs(plan: PackPlan, workload: Workload) -> None:
    packs = plan.packs
    check_record(packs, PlanError, f"plan {plan.policy!r}: ")
    if (total := workload.training.gradient_accumulation_steps) % packs.rounds:
        raise PlanError(
            f"plan {plan.policy!r} takes its micro-batches in {packs.rounds} rounds, which do not divide the "
            f"step's {total}; give a number that does"
        )
    if packs.late_updates and packs.form != "pipeline":
        raise PlanError(f"plan {plan.policy!r} updates late in form {packs.form!r}; late updates need 'pipeline'")
    if packs.goes_on and (packs.form != "pipeline" or packs.own_memory):
        raise PlanError(
            f"plan {plan.policy!r} goes on where a step ended, but has form {packs.form!r} and own_memory="
            f"{packs.own_memory}; this is simulated in form 'pipeline' on one host memory only: leave out goes_on"
        )
    for name in ("cleanup_s", "host_copy_bytes_per_s"):
        if not 0 <= (value := getattr(packs, name)) < float("inf"):
            raise PlanError(f"plan {plan.policy!r}: {name} is {value!r}; it must be a number of 0 or more")
    if packs.sums_tied and not packs.stays:
        raise PlanError(
            f"plan {plan.policy!r} says how tied gradients of stages are summed, but has form {packs.form!r}; use "
            "form='resident' or leave out sums_tied"
        )
    blocks = {u for u, unit in enumerate(workload.units) if unit.kind == "block"}
    if packs.kept and not (packs.stays and blocks.issuperset(packs.kept)):
        raise PlanError(
            f"plan {plan.policy!r} keeps the activations of units {packs.kept} in packs of form "
            f"{packs.form!r}; only blocks, in form 'resident', can keep theirs ({len(blocks)} of "
            f"{len(workload.units)} units are blocks)"
        )
    here, are_gone = set(packs.updates_here), packs.form == "pipeline" and not packs.late_updates
    able = updatable_packs(packs.backward if are_gone else (), lent_units(workload))
    whole = {u for a, b in able if here.issuperset(range(a, b)) for u in range(a, b)}
    of_host = range(len(workload.units) if packs.stays else 0)
    is_able = here <= (set(packs.host_states) if packs.stays else whole)
    if not is_able or not set(of_host) >= set(packs.host_states) or (packs.state_shards > 1 and not here):
        raise PlanError(
            f"plan {plan.policy!r} has the states of units {packs.host_states} in host memory and updates units "
            f"{packs.updates_here} on devices, in {packs.state_shards} parts, in packs of form {packs.form!r}; name "
            f"some of the {len(workload.units)} units, in form 'resident'; or in form 'pipeline', whose states are all "
            "in host memory, units of whole backward packs whose parameters no other pack uses, without late updates"
        )
    if packs.stays:
        each, at_home = divmod(len(packs.backward), packs.devices)
        if at_home > 1 or not each or (each > 1 and total % packs.devices):
            raise PlanError(
                f"plan {plan.policy!r} has {len(packs.backward)} stages for {packs.devices} devices and "
                f"{total} micro-batch{'es' * (total != 1)}; give each device one stage, or each as many, and the step "
                "a multiple of the devices; and at most one stage more"
            )
    else:
        refuse_codes(f"plan {plan.policy!r} runs in packs", workload.training)
        if not packs.hold_updates:
            refuse_clipping(f"plan {plan.policy!r} runs in packs", workload.training)
        elif packs.late_updates or workload.training.max_grad_norm is None:
            raise PlanError(
                f"plan {plan.policy!r} holds updates until the norm of all gradients is known, but has "
                f"late_updates={packs.late_updates} and max_grad_norm {workload.training.max_grad_norm}; hold "
                "updates where training clips, and never late ones"
            )
        if packs.is_executed:
            refuse_frozen(f"plan {plan.policy!r} runs in packs, unit by unit", workload)
    if packs.own_memory and not packs.is_executed:
        raise PlanError(
            f"plan {plan.policy!r} has processes with host memory of their own, but {packs.rounds} rounds, "
            f"streams={packs.streams} and late_updates={packs.late_updates}; these are simulated on one host "
            "memory only: leave out own_memory"
        )
    if packs.form == "data" and packs.rounds > 1 < packs.devices:
        raise PlanError(
            f"plan {plan.policy!r} has {packs.rounds} rounds of data-parallel packs on {packs.devices} devices, "
            "but rounds add up the gradients of one device; use 1 round, 1 device, or form 'pipeline'"
        )
    if packs.form == "data" and not all(shared_micro_batches(workload, packs.devices)):
        raise PlanError(
            f"plan {plan.policy!r} has data-parallel packs on {packs.devices} devices, but the step has "
            f"{workload.training.gradient_accumulation_steps} micro-batches; each device needs one: accumulate "
            "more, use fewer devices, or form 'pipeline'"
        )
    if packs.form == "data" and packs.own_memory and total % packs.devices:
        raise PlanError(
            f"plan {plan.policy!r} has {total} micro-batches for {packs.devices} devices with host memory of their "
            "own, each of which trains on as many; accumulate a multiple of the devices"
        )
    for name, runs, end in (
        ("backward", packs.backward, len(workload.units)),
        ("forward", packs.forward, packs.backward[-1][0] if packs.backward else 0),
    ):
        borders = [0, *(b for _, b in runs)]
        if [a for a, _ in runs] != borders[:-1] or borders[-1] != end or any(a >= b for a, b in runs):
            raise PlanError(f"{name} packs {runs} do not cover units 0 to {end} one after the other")
    if (packs.devices == 1 or packs.is_executed) and any(unit.shares for unit in workload.units[:-1]):
        raise PlanError(
            f"{workload.name} has units between its blocks that share parameters, as encoder-decoders do; packs "
            "are for chains of blocks: choose another policy"
        )
    if packs.devices > 1 and packs.is_executed and packs.form != "data" and workload.first_with_more is not None:
        raise PlanError(
            f"plan {plan.policy!r} is a pipeline, whose devices send each other one tensor of activations, but at "
            f"unit {workload.first_with_more!r} of {workload.name} others go from unit to unit, such as in tuples, "
            "or in lists and dictionaries that blocks fill; have each block take and return one tensor, or choose "
            "a policy without stages (ddp, zero-3, harmony-dp)"
        )


def check_unitwise(plan: UnitwisePlan, workload: Workload) -> None:
    """Raises `PlanError` if the plan contradicts itself, or does not fit the workload or what training asks for."""
    for decided in (plan, plan.sharing):
        check_record(decided, PlanError, f"plan {plan.policy!r}: ")
    if any(not 0 < part <= 1 for *_, part in plan.parts):
        raise PlanError(f"plan {plan.policy!r} uses parts {plan.parts}; each must be above 0 and at most 1")
    if plan.devices > 1 and plan.sharing.divided == "nothing" and {u.states for u in plan.units} != {"device"}:
        raise PlanError(
            f"plan {plan.policy!r} divides nothing among {plan.devices} devices, each with its own states, but "
            "some are off the device; divide the states, or keep them on the device"
        )
    away = any({u.params, u.frozen or u.params} - {"device"} for u in plan.units)
    if plan.devices > 1 and away and plan.sharing.divided not in ("all", "tensors"):
        raise PlanError(
            f"plan {plan.policy!r} divides {plan.sharing.divided} among {plan.devices} devices, but some "
            "parameters are off it, from where each fetches its share alone; divide all, or keep them there"
        )
    if len(plan.units) != len(workload.units):
        raise PlanError(
            f"plan {plan.policy!r} has {len(plan.units)} units, but workload {workload.name!r} has "
            f"{len(workload.units)}; make the plan from this workload"
        )
    seen = set()
    for unit, choice in zip(workload.units, plan.units, strict=True):
        alike = (unit.kind, unit.shares, unit.adds_to_shared, len(unit.saved), unit.is_frozen, choice)
        if alike not in seen:
            seen.add(alike)
            _check_unit(unit, choice)
            _check_update(plan, unit, choice)
    if plan.devices > 1 and plan.sharing.divided == "tensors":
        if plan.sharing.ahead:
            raise PlanError(f"plan {plan.policy!r} cuts operators, which gather nothing ahead; leave out sharing.ahead")
        refuse_codes(f"plan {plan.policy!r} cuts operators over devices", workload.training)
        refuse_uneven(f"plan {plan.policy!r}", workload, plan.devices)
    _check_semantics(plan, workload.training)
    _check_pieces(plan, workload)
    _check_turns(plan, workload)


def _check_unit(unit: Unit, choice: UnitPlan) -> None:
    check_record(choice, PlanError, f"unit {unit.name!r}: ")
    if choice.tied_grads != "device" and not (unit.shares and unit.adds_to_shared):
        raise PlanError(
            f"unit {unit.name!r} has tied_grads={choice.tied_grads!r}, but makes no gradient of another unit's "
            "parameters; leave it out"
        )
    if not isinstance(choice.acts, str) and len(choice.acts) != len(unit.saved):
        raise PlanError(
            f"unit {unit.name!r} saves {len(unit.saved)} tensors, but the plan has {len(choice.acts)} actions "
            "for it; give one action for all, or one per tensor"
        )
    if choice.state_shards < 1 or (choice.state_shards > 1 and not choice.states_travel):
        raise PlanError(
            f"unit {unit.name!r} has optimizer states in {choice.states!r} in {choice.state_shards} shards; the number "
            "must be 1 or more, and only states on 'nvme' travel in shards, or those that come to the device for their "
            "update"
        )
    if not 0 <= choice.host_shards < choice.state_shards or (choice.host_shards and choice.states != "nvme"):
        raise PlanError(
            f"unit {unit.name!r} has optimizer states in {choice.states!r} in {choice.state_shards} shards and keeps "
            f"{choice.host_shards} of these in host memory; the number must be at least 0 and below that of all shards "
            "on 'nvme'. Use states 'host' for all of them"
        )
    if choice.host_shards and choice.grads == "nvme":
        raise PlanError(
            f"unit {unit.name!r} keeps {choice.host_shards} shards of optimizer states in host memory, but its "
            "gradients wait on 'nvme'; keep gradients on 'device' or 'host', or all states on 'nvme'"
        )
    actions = {choice.acts} if isinstance(choice.acts, str) else set(choice.acts)
    if unit.kind != "block" and "recompute" in actions and unit.saved:
        raise PlanError(
            f"unit {unit.name!r} is no block, so what it saves cannot be made again; "
            "keep it, or move it to host or nvme"
        )


def _check_update(plan: UnitwisePlan, unit: Unit, choice: UnitPlan) -> None:
    """Whether what the unit's update reads can be where the update runs."""
    if unit.is_frozen:
        return
    if plan.semantics == "delayed-1" and (choice.grads == "nvme" or choice.states == "device"):
        raise PlanError(
            f"unit {unit.name!r} has gradients in {choice.grads!r} and states in {choice.states!r}; a delayed "
            "update runs on the host with gradients that waited in host memory: choose semantics 'exact-clip' or "
            "'in-backward', or a policy or option that keeps gradients in host memory and states off the device"
        )
    if choice.late_update and plan.semantics == "delayed-1":
        raise PlanError(
            f"unit {unit.name!r} is updated late, but the plan's semantics are {plan.semantics!r}, whose updates all "
            "wait for the next step: use semantics 'in-backward' or 'exact-clip', or no late_update"
        )
    if choice.late_update and (choice.grads == "nvme" or choice.states == "device"):
        raise PlanError(
            f"unit {unit.name!r} is updated late with gradients in {choice.grads!r} and states in {choice.states!r}; "
            "a late update has gradients that waited in memory, and states that are not on the device: use 'host', or "
            "no late_update"
        )
    if choice.update == "device" and plan.semantics == "delayed-1":
        raise PlanError(
            f"unit {unit.name!r} has its states brought to the device, but a delayed update runs on the host with "
            "gradients that waited in host memory: choose semantics 'exact-clip' or 'in-backward', or update 'home'"
        )
    if choice.states == "device" and (choice.params, choice.grads) != ("device", "device"):
        raise PlanError(
            f"unit {unit.name!r} keeps optimizer states on the device, but parameters in {choice.params!r} and "
            f"gradients in {choice.grads!r}; an update on the device needs all three there"
        )


def _check_semantics(plan: UnitwisePlan, training: Training) -> None:
    """Whether updates come when the plan says, and give the numbers that training asks for."""
    if plan.hold_updates and plan.semantics != "exact-clip":
        raise PlanError(
            f"plan {plan.policy!r} holds updates until backward ends, but its semantics are {plan.semantics!r}; choose "
            "semantics 'exact-clip', or do not hold them"
        )
    if plan.late_writes and (plan.updates_in_flight or plan.write_back != "at once"):
        raise PlanError(
            f"plan {plan.policy!r} has late_writes={plan.late_writes}, updates_in_flight={plan.updates_in_flight} and "
            f"write_back={plan.write_back!r}; states that are written late are in flight until then: leave out "
            "late_writes, or the other two"
        )
    check_clipping(plan.semantics, training.max_grad_norm)


def check_clipping(semantics: str, max_grad_norm: float | None) -> None:
    """Raises `PlanError` where gradients are to be clipped by updates that do not know their norm."""
    whys = {
        "in-backward": "updates in backward (semantics 'in-backward') come before the norm is known",
        "delayed-1": "updates that are delayed by a step (semantics 'delayed-1') are not clipped",
    }
    if max_grad_norm is not None and semantics in whys:
        raise PlanError(
            f"training asks for clipping at norm {max_grad_norm}, but {whys[semantics]}; use semantics 'exact-clip' or "
            "drop max_grad_norm"
        )


def _check_turns(plan: UnitwisePlan, workload: Workload) -> None:
    """Whether the step is short enough to be written down: by arithmetic, before anything is built."""
    micro_batches = workload.training.gradient_accumulation_steps * plan.sub_batches
    turns = 2 * len(workload.units) * plan.operator_tiles * micro_batches
    if turns > MAX_TURNS:
        raise PlanError(
            f"plan {plan.policy!r} works through {micro_batches:,} micro-batches and sub-batches of "
            f"{len(workload.units)} units, {turns:,} forwards and backwards in one step; at most {MAX_TURNS:,} are "
            "planned: use fewer and larger micro-batches"
        )


def _check_pieces(plan: UnitwisePlan, workload: Workload) -> None:
    """Whether segments are recomputed as a whole, and sub-batches divide the micro-batch."""
    if plan.segment_units > 1 and any(
        unit.kind == "block" and choice.acts != "recompute"
        for unit, choice in zip(workload.units, plan.units, strict=True)
    ):
        raise PlanError(
            f"plan {plan.policy!r} recomputes segments of {plan.segment_units} blocks, but keeps or moves saved "
            "tensors of some; segments need acts='recompute' in every block"
        )
    if plan.sums_tied and plan.order != "vertical":
        raise PlanError(
            f"plan {plan.policy!r} sums tied gradients in {plan.order} order, where none waits for the next "
            "micro-batch's; use order='vertical' or leave out sums_tied"
        )
    if plan.sums_tied and any(choice.tied_grads != "device" for choice in plan.units):
        raise PlanError(
            f"plan {plan.policy!r} sums tied gradients, which the next micro-batch adds to, but has them wait off the "
            "device; leave out sums_tied or tied_grads"
        )
    if workload.training.per_device_train_batch_size % plan.sub_batches:
        raise PlanError(
            f"plan {plan.policy!r} cuts micro-batches of {workload.training.per_device_train_batch_size} sequences "
            f"into {plan.sub_batches} sub-batches; their number must divide the number of sequences"
        )
