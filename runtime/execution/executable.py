"""Which schedules the runtime executes: those whose ops are a unit's, on devices that do alike or have a stage each,
and train the model as it is.

A schedule in a file may be anybody's: what no lowering makes is refused before anything is allocated. The reader of the
file has checked its form, and `schedule.validate` the language. What remains is whether its ops are those that the
runtime knows, on streams and in tiers that it has, about units of the step, and of sizes that can be; and whether they
train what the step says (`agreement`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from tierplan.hwmodels import names
from tierplan.hwmodels.names import COMPUTE, D2H, DEVICE, H2D, HOST, HOST_ADAM, NVME, NVME_READ, NVME_WRITE
from tierplan.runtime.autograd.coded import FLOATING
from tierplan.runtime.autograd.flow import treated_apart
from tierplan.runtime.autograd.units import ModelUnit
from tierplan.runtime.execution.agreement import Agreements, Way, wrong_settings
from tierplan.runtime.execution.placement import TrainingError
from tierplan.runtime.memory.arena import HOST_GIB, system_bytes
from tierplan.runtime.optim.kernels import KERNELS
from tierplan.sim.contents import (
    ContentError,
    Frozen,
    Input,
    Params,
    States,
    is_tile,
    parse_content,
    parse_key,
    part_of_shard,
    part_ranges,
    shard,
)
from tierplan.sim.ranks import COLLECTIVES, SEND, RankError, is_pipeline, num_ranks, rank_schedule
from tierplan.sim.schedule import Buffer, Op, Schedule
from tierplan.sim.step import StepSpec, UnitSpec
from tierplan.sim.workloads.executed import not_executed
from tierplan.sim.workloads.workload import DTYPE_BYTES

COPIES = {H2D: (HOST, DEVICE), D2H: (DEVICE, HOST), NVME_READ: (NVME, HOST), NVME_WRITE: (HOST, NVME)}
"""From where to where each stream copies."""
ON_GRADIENTS = (COMPUTE, HOST_ADAM)
STREAMS_BY_KIND = {
    **dict.fromkeys(("forward", "recompute", "backward", "encode", "decode", "leave"), (COMPUTE,)),
    **dict.fromkeys(("accumulate", "cast", "norm", "update"), ON_GRADIENTS),
    "clip": (HOST_ADAM,),  # the host reads norms: on a GPU's stream it would before they have come
    "copy": tuple(COPIES),
    "wait": (COMPUTE,),
    **dict.fromkeys(COLLECTIVES, (names.collective(0),)),
    SEND: (),  # only where there are several
}
"""The kinds of op that the runtime executes, and where."""


def executable_step(schedule: Schedule, rank: int = 0, num_there: int = 1) -> StepSpec:
    """What the schedule trains. Raises `TrainingError` for one that is only simulated, or that does not say it.

    This is to execute the part of `rank`, of so many that there are: one for each device.
    """
    if (num := num_ranks(schedule)) != num_there:
        there = "1 rank was" if num_there == 1 else f"{num_there} ranks were"
        raise TrainingError(
            f"schedule {schedule.name!r} is for {num} device{'s' * (num != 1)}, and {there} started; start "
            f"{num}: `tierplan run --devices {num}`, or torchrun --nproc-per-node {num}"
        )
    whole = schedule
    if num > 1:
        if is_pipeline(schedule) and any(unit.frozen_bytes for unit in (schedule.step.units if schedule.step else ())):
            raise TrainingError(f"schedule {schedule.name!r} is a pipeline, which is executed where all is trained")
        try:
            schedule = rank_schedule(schedule, rank)
        except RankError as error:
            raise TrainingError(str(error)) from error
    keys = (parse_key(op.key) for op in schedule.ops)
    if any((op.verb, op.moved) == ("offload", "params") and "fwd" in op.where for op in keys):
        raise TrainingError(
            f"schedule {schedule.name!r} pages weights out after every use, unchanged ones too; that is the baseline "
            "of memory virtualisation, which is simulated for comparison and which the runtime does not execute: "
            "choose another policy"
        )
    if schedule.step is None:
        raise TrainingError(f"schedule {schedule.name!r} does not say what it trains; make it with `tierplan plan`")
    if simulated := not_executed(schedule.step.training, num_devices=num, optimizers=KERNELS):
        what, advice = simulated
        raise TrainingError(f"schedule {schedule.name!r} {what}, which is simulated only; {advice}")
    tile = next((unit.name for unit in schedule.step.units if is_tile(unit.name)), None)
    if tile is not None:
        raise TrainingError(
            f"schedule {schedule.name!r} cuts operators into tiles ({tile!r}), which is simulated only: the gradient "
            "of a tiled operator's input is summed over tiles, which rounds it differently from plain training. Plan "
            "with operator_tiles=1"
        )
    if (wrong := next(_wrongs(schedule, schedule.step, rank, num, whole), None)) is not None:
        raise TrainingError(f"schedule {schedule.name!r} is not one that this runtime can execute: {wrong}. Plan again")
    return schedule.step


Wrongs = Iterator[str]
"""What is wrong, the rule, and what there is. What comes behind the first may rest on it."""


def _wrongs(schedule: Schedule, step: StepSpec, rank: int, num: int, whole: Schedule) -> Wrongs:
    small = next((u for u in step.units if 0 < u.num_parameters < num), None)
    if small is not None:
        yield f"unit {small.name!r} has {small.num_parameters} parameters, fewer than the {num} devices"
    for tier in schedule.tiers:
        if tier.name not in (DEVICE, HOST, NVME) and any(b.tier == tier.name for b in schedule.buffers):
            yield f"it has buffers in tier {tier.name!r}; the tiers of the runtime are {DEVICE}, {HOST}, {NVME}"
    units, tiers = {unit.name: unit for unit in step.units}, {b.name: b.tier for b in schedule.buffers}
    if len(units) < len(step.units):
        yield "two units of the step have one name; names are unique"
    for b in schedule.buffers:
        yield from _check_content(b, step, units, rank, num)
    for op in schedule.ops:
        if op.kind != SEND or num == 1:  # `ends_of_sends` has looked at them
            yield from _check_op(op, tiers, step, units)
    yield from wrong_settings(schedule, step)
    yield from Agreements(schedule, step).wrongs()
    yield from Way(whole if is_pipeline(whole) else schedule, step).wrongs()
    yield from _check_memory(schedule)


def check_units(units: Sequence[ModelUnit], step: StepSpec, dtype: torch.dtype, first: Mapping[str, object]) -> None:
    """Raises `TrainingError` unless these are the units that the step was made for. Says so where batches like the
    first one may be padded, and the step is not for such."""
    if first.get("attention_mask") is not None and not step.training.padded:
        logging.getLogger(__name__).warning(
            "batches have an attention_mask, and the schedule is for those in which nothing is padded: a padded one "
            "may end the run. If there are any, plan with --padded (in Python, Training(padded=True))"
        )
    for unit, spec in zip(units, step.units, strict=False):
        own, planned = (unit.num_trained, unit.frozen.forms.size_bytes), (spec.num_parameters, spec.frozen_bytes)
        if (unit.name, *own) != (spec.name, *planned):
            raise TrainingError(
                f"the model has unit {unit.name!r} with {own[0]:,} parameters that are trained and {own[1]:,} "
                f"bytes of others, where the schedule has {spec.name!r} with {planned[0]:,} and {planned[1]:,}; "
                "make the schedule from this model"
            )
    if len(units) != len(step.units):
        raise TrainingError(
            f"the model has {len(units)} units, the schedule {len(step.units)}; make it from this model"
        )
    for unit in units:
        if unit.num_trained and unit.dtype != dtype:
            raise TrainingError(
                f"unit {unit.name!r} trains parameters in {unit.dtype}, but the schedule trains in {dtype}; "
                "convert the model or plan again"
            )
    refuse_interference(units)


def refuse_interference(units: Sequence[ModelUnit]) -> None:
    """Raises `TrainingError` within `torch.autocast`, which is of a thread, and a schedule's ops have their own;
    where other parameters are trained than at the beginning; where one has a gradient already; and where a hook of a
    parameter would get another gradient than in plain training."""
    if torch._C._is_any_autocast_enabled():
        raise TrainingError(
            "training within torch.autocast is not what a schedule does: its types are those that it was planned with; "
            "leave autocast out, and plan with the dtype that you want"
        )
    shared = {unit.shares for unit in units}
    for unit in units:
        changed = [name for name, p in unit.parameters if not p.requires_grad]
        thawed = [name for name, p in unit.frozen.parameters if p.requires_grad]
        if changed or thawed:
            now = "frozen (requires_grad=False)" if changed else "to be trained (requires_grad=True)"
            raise TrainingError(
                f"parameter {[*changed, *thawed][0]!r} is {now} now, which it was not when the run began, but what is "
                "trained is planned; set it back, or end this run and make a plan of the model as it is now"
            )
        for name, p in unit.parameters:
            if p.grad is not None:
                raise TrainingError(
                    f"parameter {name!r} has a gradient already, of a backward outside of the schedule, to which the "
                    "next step would add; call model.zero_grad() first"
                )
            if p._post_accumulate_grad_hooks:  # type: ignore[attr-defined]
                raise TrainingError(
                    f"parameter {name!r} has a hook for its accumulated gradient (register_post_accumulate_grad_hook), "
                    "but a schedule moves and adds up gradients itself; take the hook off (clipping, rates and weight "
                    "decay are settings of the plan and of the optimizer)"
                )
            if p._backward_hooks and unit.name in shared:
                raise TrainingError(
                    f"parameter {name!r} has a hook for its gradient (register_hook), which would run once for each "
                    "unit that uses it and not on their sum, since the embedding's parameters are used again behind "
                    "the blocks; take the hook off, or untie the parameters"
                )


def check_tokens(schedule: Schedule, step: StepSpec) -> str | None:
    """What is wrong with the shape of the batches of a language model, if anything is."""
    training = step.training
    num_tokens = training.per_device_train_batch_size * training.sequence_length
    most = max((b.size_bytes for b in schedule.buffers if isinstance(parse_content(b.content), Input)), default=0)
    if most and num_tokens * DTYPE_BYTES[training.dtype] > most:
        return (
            f"a micro-batch has {num_tokens:,} tokens, but no more than {most:,} bytes go from unit to unit; a token "
            "takes one value at least"
        )
    return None


def _check_content(b: Buffer, step: StepSpec, units: Mapping[str, UnitSpec], rank: int, num: int) -> Wrongs:
    try:
        content = parse_content(b.content)
    except ContentError as error:
        yield f"buffer {b.name!r}: {error}"
        return
    batch, unit = getattr(content, "micro_batch", 0) or 0, getattr(content, "unit", None)
    if not 0 <= batch < step.training.gradient_accumulation_steps:
        yield f"buffer {b.name!r} is of micro-batch {batch}; the step has {step.training.gradient_accumulation_steps}"
    owner = None if unit is None else units.get(unit)
    if unit is not None and owner is None:
        yield f"buffer {b.name!r} is of unit {unit!r}, which the step has not"
    if owner is None:
        return
    training, num_parameters = step.training, owner.num_parameters
    share = len(shard(range(num_parameters), rank, num))
    if isinstance(content, States) and training.optim.is_flat:  # others are known with the model's shapes
        ranges = part_ranges(num_parameters, content.num_parts)
        if content.part >= len(ranges):
            yield f"buffer {b.name!r} is part {content.part} of states that have {len(ranges)} parts"
            return
        wanted = len(ranges[content.part]) * training.flat_state_bytes
        of_share = len(part_of_shard(share, content.part, content.num_parts)) * training.flat_state_bytes
    elif isinstance(content, Params):
        wanted, of_share = num_parameters * training.param_bytes, share * training.param_bytes
    elif isinstance(content, Frozen):
        wanted = of_share = owner.frozen_bytes
        if num > 1 and 0 < b.size_bytes < wanted:
            yield (
                f"buffer {b.name!r} is a device's share of frozen parameters, which is simulated only: ranks have them "
                "whole. Take policy ddp or zero-2, or one device"
            )
            return
    else:
        return
    if b.size_bytes not in (wanted, of_share):
        yield f"buffer {b.name!r} has {b.size_bytes:,} bytes; those of {num_parameters:,} parameters have {wanted:,}"


def _check_op(op: Op, tiers: Mapping[str, str], step: StepSpec, units: Mapping[str, UnitSpec]) -> Wrongs:
    streams = STREAMS_BY_KIND.get(op.kind, ())
    if not streams:
        yield f"op {op.key!r} is of kind {op.kind!r}; the runtime knows {', '.join(STREAMS_BY_KIND)}"
    if op.stream not in streams:
        yield f"op {op.key!r} is on stream {op.stream!r}; ops of kind {op.kind} run on {', '.join(streams)}"
    if op.kind == "copy":
        if not op.reads or len(op.writes) != 1:
            yield f"op {op.key!r} copies {len(op.reads)} buffers to {len(op.writes)}; a copy has one of each"
        way = tiers[op.reads[0]], tiers[op.writes[0]]
        if way != COPIES[op.stream]:
            source, target = COPIES[op.stream]
            yield f"op {op.key!r} copies from {way[0]} to {way[1]}; stream {op.stream} does from {source} to {target}"
    elif op.kind in ("encode", "decode"):
        if len(op.reads) != 1 or not op.writes or step.training.activation_format not in FLOATING:
            form = step.training.activation_format
            yield f"op {op.key!r} codes {len(op.reads)} buffers in format {form!r}; executed are {', '.join(FLOATING)}"
    elif op.kind in ("forward", "recompute", "backward", "update", *COLLECTIVES) and op.unit not in units:
        yield f"op {op.key!r} is of unit {op.unit!r}, which the step has not"
    if not 0 <= op.micro_batch < (count := step.training.gradient_accumulation_steps):
        yield f"op {op.key!r} is of micro-batch {op.micro_batch}; they count from 0 to one less than {count}"


def _check_memory(schedule: Schedule) -> Wrongs:
    """What the host is to hold at the least must be there, whatever capacity the schedule claims."""
    there = system_bytes()
    held = sum(b.size_bytes for b in schedule.buffers if b.initial and b.tier == HOST)
    largest = max((b.size_bytes for b in schedule.buffers if b.tier == HOST), default=0)
    if max(held, largest) > there:
        yield (
            f"it holds {max(held, largest):,} bytes in host memory at once, but this machine has {there:,}; plan for a "
            f"machine with so much, or say in {HOST_GIB} how much this one gets where more is added as it is used"
        )


class FixedTensors:
    """The model's buffers and parameters, which a schedule takes to stay as they are in forward: this may run again,
    parameters come anew from their tiers, and commits have no buffers."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[ModelUnit],
        schedule: Schedule,
        *,
        are_committed: bool,
        is_alone: bool,
    ) -> None:
        """Raises `TrainingError` where forward is known to change what must stay; `is_alone` without other ranks."""
        again = {op.unit for op in schedule.ops if op.kind == "recompute"} | treated_apart(schedule).keys()
        self._why = ""
        if not is_alone:
            self._why = "several devices train, and each would change its own; plan for one device"
        elif again or are_committed:
            self._why = (
                f"{'blocks are run again' if again else 'steps are committed'}, which this runtime does with "
                "parameters alone; plan without recomputation and run without out_dir"
            )
        self._looks = [
            (module._buffers, key, buffer, 0 if buffer is None else buffer._version, f"{name}.{key}".lstrip("."))
            for name, module in model.named_modules()
            for key, buffer in module._buffers.items()
        ]
        self._parameters: list[tuple[str, nn.Parameter, str]] = []
        staying = {b.content for b in schedule.buffers if b.initial and b.tier == DEVICE}
        are_outside_again = any(unit.block is None and unit.name in again for unit in units)
        for unit in units:
            for part, content in zip(unit.parts, (Params(unit.name), Frozen(unit.name)), strict=True):
                why = ""
                if unit.name in again or (unit.block is None and are_outside_again):
                    why = "it is run again, and would change them twice"
                elif not is_alone:
                    why = "every device would change its own"
                elif str(content) not in staying:
                    why = "they do not stay on the device, and the change would be lost"
                elif part is unit.frozen and are_committed:
                    why = "commits have no frozen parameters"
                if why:
                    self._parameters += [(name, p, why) for name, p in part.parameters]
        known = {name: is_changed for unit in units for name, is_changed in unit.changed.items()}
        self._refuse([(name, why) for name, _, why in self._parameters if known.get(name)])
        self._parameters = [of for of in self._parameters if of[0] not in known]  # others' versions always grow
        self.begin()

    def begin(self) -> None:
        """Parameters are taken as they are now."""
        self._versions = [p._version for _, p, _ in self._parameters]

    def check(self) -> None:
        """Raises `TrainingError` where forward has changed some, or put other buffers in their place, and that
        matters."""
        self.check_buffers()
        then = zip(self._parameters, self._versions, strict=True)
        self._refuse([(name, why) for (name, p, why), version in then if p._version != version])

    def check_buffers(self) -> None:
        """Of buffers alone."""
        changed = [name for buffers, key, *then, name in self._looks if not _is_as_then(buffers.get(key), *then)]
        if changed and self._why:
            raise TrainingError(
                f"forward changes {changed[0]!r} ({len(changed)} of the model's buffers), but {self._why}, or keep "
                "such modules (batch norm) from changing theirs: eval() for these"
            )

    def _refuse(self, changed: Sequence[tuple[str, str]]) -> None:
        if changed:
            name, why = changed[0]
            raise TrainingError(
                f"forward changes parameter {name!r} in place ({len(changed)} of the model's parameters), but {why}; "
                "have forward compute with a changed copy (torch.nn.utils.parametrize), or plan with these parameters "
                "on the device and without recomputation"
            )


def _is_as_then(buffer: torch.Tensor | None, then: torch.Tensor | None, version: int) -> bool:
    """Whether this is that buffer, which nobody has written to, or one of the same values in its place."""
    if then is None or buffer is None:
        return buffer is then
    if then._version != version or (buffer.dtype, buffer.device) != (then.dtype, then.device):
        return False
    return buffer is then or torch.equal(buffer, then)
