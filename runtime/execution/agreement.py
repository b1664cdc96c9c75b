"""What the ops of a schedule must read and write, so that they train what its step says.

A schedule that somebody wrote by hand may leave out what an op computes with. Two looks find it, before anything is
allocated. The *agreement* says which contents an op of each kind reads and writes, from the step's units and settings
(docs/design.md, "Kinds of op"). The *way* of gradients, parameters and states through the step says what is in them:
the backwards whose gradients were added up, and the updates that were made. Lowering draws what both ask for.

Each look gives what is wrong, the rule, and what there is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tierplan.hwmodels.names import COMPUTE, DEVICE, HOST, HOST_ADAM
from tierplan.sim.contents import (
    CastGradients,
    Clip,
    CodedInput,
    Content,
    ContentError,
    Frozen,
    Gradients,
    Input,
    InputGradient,
    KeptActs,
    Norm,
    Params,
    RecomputedActs,
    SavedActs,
    Shared,
    States,
    TiedGradients,
    Transient,
    parse_content,
    part_ranges,
)
from tierplan.sim.ranks import COLLECTIVES, SEND
from tierplan.sim.schedule import Op, Schedule
from tierplan.sim.step import StepSpec, UnitSpec
from tierplan.sim.workloads.workload import CODED_SHARE, DTYPE_BYTES

GRADIENTS = (Gradients, CastGradients, TiedGradients)
FAMILIES = (GRADIENTS, (Params,), (States,))
"""What changes in a step, and is followed on its way."""
OUTLIVE = (Params, Frozen, States, Gradients, CastGradients, Clip)
"""What a run has to begin with."""
MEASURES = "measures"
"""In `meta` of a schedule that trains nothing, and times what it executes (`runtime.measure.units`)."""
OLD = ("", -1)
"""In gradients: those of the step before."""
COMPUTES = ("forward", "recompute", "backward")
IN_PLACE = ("backward", "accumulate", "update")
"""Kinds of op that change what they read and write."""
SUMS = ("reduce", "all_reduce")
"""Those that may add to what they read."""


@dataclass(frozen=True)
class Agreement:
    """What an op reads and writes: `must` whatever happens, and `may` besides."""

    must_read: Collection[Content] = ()
    must_write: Collection[Content] = ()
    may_read: Collection[Content | type[Content]] = ()
    may_write: Collection[Content | type[Content]] = ()


def wrong_settings(schedule: Schedule, step: StepSpec) -> Iterator[str]:
    """Settings of the step that its ops do not carry out."""
    limit, clips = step.training.max_grad_norm, any(op.kind == "clip" for op in schedule.ops)
    if limit is not None and step.semantics != "exact-clip":
        yield f"the step has max_grad_norm={limit}, but semantics {step.semantics!r}; 'exact-clip' clips gradients"
    if clips != (limit is not None):
        has = "an op" if clips else "no op"
        yield f"the step has max_grad_norm={limit}, but {has} of kind 'clip'; one clips where the step has such a norm"


class Agreements:
    """Those of the ops of a schedule, or of a rank's part of one."""

    def __init__(self, schedule: Schedule, step: StepSpec) -> None:
        self.schedule, self.step, self.training = schedule, step, step.training
        self.contents = {b.name: parse_content(b.content) for b in schedule.buffers}
        self.tiers = {b.name: b.tier for b in schedule.buffers}
        self.over = {b.name: b.reuses for b in schedule.buffers}
        self.index = {unit.name: i for i, unit in enumerate(step.units)}
        trained = (i for i, unit in enumerate(step.units) if unit.num_parameters or not unit.frozen_bytes)
        self.first_trained = next(trained, len(step.units))
        self.borrowed: dict[str, set[Params]] = {}
        """By unit, parameters of another one to whose gradient its backward adds: it computes with them."""
        for op in schedule.ops:
            if op.kind == "backward":
                tied = (c.unit for name in op.writes if isinstance(c := self.contents[name], TiedGradients))
                self.borrowed.setdefault(op.unit, set()).update(map(Params, tied))
        self.initial = [_as_one(self.contents[b.name]) for b in schedule.buffers if b.initial]

    def wrongs(self) -> Iterator[str]:
        """What ops read and write against the agreement."""
        for content, num in Counter(self.initial).items():
            if num > 1:
                yield f"{_text(content)} is there before the step in {num} buffers; a run begins with one of each"
        for op in self.schedule.ops:
            if op.kind in COMPUTES:
                yield from self._differs(op, self._of_compute(op))
            elif op.kind == "update":
                yield from self._differs(op, self._of_update(op))
                if not isinstance(self.contents[op.reads[0]], GRADIENTS):
                    yield f"op {op.key!r} reads {op.reads[0]!r} first; {_a(op)} reads its gradient first"
            else:
                yield from self._moved(op)
            yield from self._overwrites(op)
        yield from self._uncoded()

    def _overwrites(self, op: Op) -> Iterator[str]:
        """What an op changes in place is written over what it reads of it, the first of two; a sum over devices over
        the second. Nothing else is written over, but a tied head's share by the gradient that it is part of."""
        for name in op.writes:
            content, over = _as_one(self.contents[name]), self.over[name]
            tied = TiedGradients(content.unit, 0) if isinstance(content, Gradients) else content
            own, shares = ([n for n in op.reads if _as_one(self.contents[n]) == of] for of in (content, tied))
            must = own[:1] if op.kind in IN_PLACE else own[1:] if op.kind in SUMS else ()
            may = must or (None, *own, *shares)
            if over not in may:
                had, *can = ("no other" if n is None else repr(n) for n in dict.fromkeys([over, *may]))
                yield f"op {op.key!r} writes {name!r} over {had}; it must `reuse` {' or '.join(can)}"

    def _of_compute(self, op: Op) -> Agreement:
        i, m = self.index[op.unit], op.micro_batch
        unit, name = self.step.units[i], op.unit
        following = self.step.units[i + 1].name if i + 1 < len(self.step.units) else None
        params: list[Params | Frozen] = [
            c for c, n in ((Params(name), unit.num_parameters), (Frozen(name), unit.frozen_bytes)) if n
        ]
        params += self.borrowed.get(name, ())
        own_input = [Input(name, m)] if i else []
        kept = [KeptActs(name, m)] if unit.bytes_of("keep") else []
        moved = [SavedActs(name, m, (k,)) for k in unit.moved]
        remade = RecomputedActs(name, m)
        again = [remade] if unit.bytes_of("recompute") else []
        outputs = [Input(following, m)] if following is not None else []
        after = [InputGradient(following, m)] if following is not None else []
        beside: tuple[Content | type[Content], ...] = (Params, Frozen, Shared(m))  # such as a tied head's
        match op.kind:
            case "forward":
                return Agreement([*params, *own_input], [*outputs, *kept, *moved], beside, (Shared(m), Transient))
            case "recompute":
                may_read = (*beside, *kept, *moved, *after)
                return Agreement([*params, *own_input], again, may_read, (*outputs, remade, Shared(m), Transient))
        into = [InputGradient(name, m)] if i else []
        own = [Gradients(name)] if unit.num_parameters else []
        return Agreement(
            [*after, *kept, *moved, *again],
            [*(into if i > self.first_trained else ()), *own],
            (*beside, *own_input, *own, remade, TiedGradients),
            (*into, TiedGradients, Transient),
        )

    def _of_update(self, op: Op) -> Agreement:
        name, clip = op.unit, [Clip()] if self.training.max_grad_norm is not None else []
        of_unit = [c for c in self.initial if isinstance(c, States) and c.unit == name]
        written = [c for c in self._plain(op.writes) if isinstance(c, States)]
        states = [c for c in written if c in of_unit] or of_unit[:1]
        gradients = next((c for c in self._plain(op.reads[:1]) if c == CastGradients(name)), Gradients(name))
        params = [] if self.training.has_master else [Params(name)]
        return Agreement([gradients, *clip, *states, *params], [*states, Params(name)], [Params(name)])

    def _differs(self, op: Op, agreed: Agreement) -> Iterator[str]:
        each = (
            ("read", op.reads, agreed.must_read, agreed.may_read),
            ("write", op.writes, agreed.must_write, agreed.may_write),
        )
        for verb, names, must, may in each:
            used = self._plain(names)
            for content in must:
                if content not in used:
                    yield f"op {op.key!r} does not {verb} {_text(content)}, which {_a(op)} {verb}s"
            for content in used:
                if content not in must and content not in may and not isinstance(content, _kinds(may)):
                    yield f"op {op.key!r} {verb}s {_text(content)}, which {_a(op)} does not {verb}"
            twice = next((c for c, num in Counter(used).items() if num > 1), None)
            if twice is not None:
                yield f"op {op.key!r} {verb}s several buffers of {_text(twice)}; {_a(op)} {verb}s one of each content"
        yield from self._elsewhere(op)

    def _elsewhere(self, op: Op) -> Iterator[str]:
        """Ops compute with what lies where their stream works; what is small and of clipping lies in host memory."""
        place = {COMPUTE: DEVICE, HOST_ADAM: HOST}.get(op.stream, "")
        for name in (*op.reads, *op.writes) if place else ():
            wanted = HOST if isinstance(self.contents[name], Norm | Clip) else place
            if self.tiers[name] != wanted:
                yield f"op {op.key!r} on {op.stream} uses buffer {name!r} in {self.tiers[name]}; it must be in {wanted}"

    def _moved(self, op: Op) -> Iterator[str]:
        """What other ops make of what they read."""
        reads, writes = self._plain(op.reads), self._plain(op.writes)
        wanted: tuple[Sequence[Content], Sequence[Content]] | None = None
        match op.kind:
            case "copy" | "send" if op.reads and op.writes:  # a rank may have one end; other reads are waited for
                wanted = reads, self._plain(op.reads[:1])
            case "encode":
                wanted = reads[:1], [_in_codes(c) for c in reads[:1]]
            case "decode":
                wanted = [_in_codes(c) for c in writes[:1]], writes[:1]
            case "norm":
                wanted = [Gradients(op.unit)], [Norm(op.unit)]
            case "clip":
                wanted = reads, [Clip()]
            case "cast":
                wanted = [Gradients(op.unit)], [CastGradients(op.unit)]
            case "accumulate":
                new = next((c for c in reads[1:] if c == TiedGradients(op.unit, 0)), Gradients(op.unit))
                wanted = [Gradients(op.unit), new], [Gradients(op.unit)]
            case "wait" | "leave":
                wanted = reads, []
            case kind if kind in COLLECTIVES and {*reads, *writes} != {*writes[:1]}:
                wanted = writes[:1], writes[:1]
        writes = [c for c in writes if not isinstance(c, Transient)]
        if wanted is not None and (reads, writes) != tuple(map(list, wanted)):
            must = " and write ".join(_all(w) for w in wanted)
            yield f"op {op.key!r} reads {_all(reads)} and writes {_all(writes)}; {_a(op)} must read {must}"
        if op.kind in ("norm", "clip", "cast", "accumulate", "encode", "decode"):
            yield from self._elsewhere(op)

    def _uncoded(self) -> Iterator[str]:
        """Inputs of units that leave the device as they are, where the step has a format for that."""
        form, each_bytes = self.training.activation_format, DTYPE_BYTES[self.training.dtype]
        num: dict[str, int] = {}
        for b in self.schedule.buffers:
            if isinstance(content := self.contents[b.name], Input):
                num[content.unit] = b.size_bytes // each_bytes
        for op in self.schedule.ops if form else ():
            moved = self.contents[op.reads[0]] if op.kind == "copy" else None
            if isinstance(moved, Input) and self.tiers[op.reads[0]] == DEVICE:
                own, i = num[moved.unit], self.index[moved.unit] + 1
                # as `Training.coded`; how much the last unit makes, no buffer says
                if i < len(self.step.units) and own * CODED_SHARE > max(own, num.get(self.step.units[i].name, 0)):
                    yield (
                        f"the step has activation_format={form!r}, but op {op.key!r} takes {op.reads[0]!r} off the "
                        "device uncoded; an op of kind 'encode' must code it first"
                    )

    def _plain(self, names: Sequence[str]) -> list[Content]:
        """What is in these buffers, whichever of several gradients, of devices and of copies in one buffer it is."""
        contents: list[Content] = []
        for content in (self.contents[name] for name in names):
            if isinstance(content, SavedActs) and not content.is_coded:
                contents += [replace(content, indices=(k,)) for k in content.indices]
            else:
                contents.append(_as_one(content))
        return contents


@dataclass
class Way:
    """What is in gradients, parameters and states on their way through a step: of all ranks of a pipeline together, or
    of one of several that do alike."""

    schedule: Schedule
    step: StepSpec
    parts: dict[str, tuple[object, ...]] = field(default_factory=dict)
    """By buffer: of gradients, units and micro-batches whose backward is in them; of others, updates that they have."""

    def __post_init__(self) -> None:
        self.contents = {b.name: parse_content(b.content) for b in self.schedule.buffers}
        self.units: Mapping[str, UnitSpec] = {unit.name: unit for unit in self.step.units}
        self.updates = {name: [op.key for op in self._ops("update") if op.unit == name] for name in self.units}
        self.tied: dict[str, set[str]] = {}
        """By unit, others whose backward adds to its gradient."""
        for op in self.schedule.ops:
            names = {"backward": op.writes, "forward": op.reads}.get(op.kind, ())
            for content in (self.contents[name] for name in names):
                is_tied = isinstance(content, TiedGradients)
                if isinstance(content, Params) and content.unit != op.unit:  # of those that train no more than it lends
                    owner = self.units.get(content.unit)
                    is_tied = owner is not None and owner.num_parameters > 0 == owner.frozen_bytes
                if is_tied:
                    self.tied.setdefault(content.unit, set()).add(op.unit)  # type: ignore[union-attr]

    def _ops(self, kind: str) -> Iterator[Op]:
        return (op for op in self.schedule.ops if op.kind == kind)

    def wrongs(self) -> Iterator[str]:
        """What is missing in them, or there too often, where they are used and at the end."""
        yield from self._counts()
        yield from self._beginnings()
        for op in self.schedule.ops:
            yield from self._uses(op)
            for name in op.writes:
                self.parts[name] = self._made(op, name)
                if twice := [of for of, num in Counter(self.parts[name]).items() if num > 1]:
                    yield f"op {op.key!r} adds {_said(twice[0])} to {name!r}, which has it already"
        for b in self.schedule.buffers:
            if b.becomes is not None:
                yield from self._ends(b.name)

    def _counts(self) -> Iterator[str]:
        units, num_batches = self.step.units, self.step.training.gradient_accumulation_steps
        num = Counter((op.kind, op.unit, op.micro_batch) for op in self.schedule.ops)
        first = next((i for i, unit in enumerate(units) if unit.num_parameters or not unit.frozen_bytes), len(units))
        for i, unit in enumerate(units):
            for kind in ("forward", "backward") if i >= first else ("forward",):
                for m in range(num_batches):
                    if (times := num[kind, unit.name, m]) != 1:
                        yield (
                            f"unit {unit.name!r} runs {kind} {times} times with micro-batch {m} of {num_batches:,}; it "
                            "must run it once"
                        )
            if unit.num_parameters and not self.updates[unit.name] and MEASURES not in self.schedule.meta:
                yield f"unit {unit.name!r} is trained, but no op updates it; each unit that is trained needs an update"
            yield from self._parts_of(unit)
        trained = {Norm(unit.name) for unit in units if unit.num_parameters}
        for op in self._ops("clip"):
            if missing := trained - {self.contents[name] for name in op.reads}:
                yield f"op {op.key!r} does not read {min(map(str, missing))}; clipping takes the norms of all units"

    def _parts_of(self, unit: UnitSpec) -> Iterator[str]:
        """Whether each part of a unit is updated, by the states that an update writes; without states, by its key."""
        parts = []
        for op in self._ops("update"):
            if op.unit == unit.name:
                states = [c for name in op.writes if isinstance(c := self.contents[name], States)]
                try:
                    of = states[0] if states else States.updated_by(op.key)
                except (ContentError, AssertionError):
                    of = States("")
                if of.unit != unit.name:
                    key = States(unit.name).update_key
                    yield f"op {op.key!r} updates unit {unit.name!r} without states; its key must be {key!r}"
                parts.append((of.part, of.num_parts))
        num = {num_parts for _, num_parts in parts}
        wanted = range(len(parts))
        if self.step.training.optim.is_flat and len(num) == 1:
            wanted = range(len(part_ranges(unit.num_parameters, *num)))
        if sorted(part for part, _ in parts) != [*wanted] or len(num) > 1:
            listed = ", ".join(f"{part} of {num_parts}" for part, num_parts in sorted(parts))
            yield f"unit {unit.name!r} is updated in parts {listed}; each of its parts must be updated once"

    def _beginnings(self) -> Iterator[str]:
        left = {b.becomes for b in self.schedule.buffers}
        for b in self.schedule.buffers:
            content = self.contents[b.name]
            if b.initial and not isinstance(content, OUTLIVE):
                yield f"buffer {b.name!r} is there before the step, but nobody has written it; an op must write it"
            elif b.initial and b.name not in left and not isinstance(content, Frozen):
                yield f"buffer {b.name!r} is there before the step, but no buffer becomes it in the next; one must"
            is_of_step = isinstance(content, (*GRADIENTS, Clip))
            self.parts[b.name] = (OLD,) if b.initial and is_of_step else ()

    def _made(self, op: Op, name: str) -> tuple[object, ...]:
        """What is in a buffer that the op writes."""
        content = self.contents[name]
        family = next((kinds for kinds in FAMILIES if isinstance(content, kinds)), ())
        if not family:
            return ()
        reads = op.reads[:1] if op.kind in ("copy", "gather", SEND) else op.reads
        sources = [self.contents[n] for n in reads]
        own = zip(reads, sources, strict=True)
        before = [part for n, c in own if isinstance(c, family) and c.unit == content.unit for part in self.parts[n]]  # type: ignore[union-attr]
        if op.kind == "backward":
            before.append((op.unit, op.micro_batch))
        elif op.kind == "update":
            before.append(op.key)
        return tuple(before)

    def _uses(self, op: Op) -> Iterator[str]:
        """Whether gradients are complete where they are used, and parameters as old as the step says."""
        for name in op.reads:
            content, parts = self.contents[name], self.parts[name]
            is_old = op.kind == "update" and op.unit in self.step.updates_of_step_before
            if op.kind in ("update", "norm") and isinstance(content, GRADIENTS):
                yield from self._incomplete(f"op {op.key!r} reads", name, is_old=is_old)
            elif op.kind == "update" and isinstance(content, Clip) and is_old != (OLD in parts):
                ages = ("this step", "the step before")
                yield f"op {op.key!r} reads {name!r} of {ages[not is_old]}; its gradients are of {ages[is_old]}"
            elif op.kind in COMPUTES and isinstance(content, Params):
                every = self.updates.get(content.unit, [])
                updates = every if content.unit in self.step.late_updates else []
                if {*parts} != {*updates}:
                    after = "after" if updates else "before"
                    yield (
                        f"op {op.key!r} computes with {name!r}, which has {len(parts)} of {content.unit}'s "
                        f"{len(every)} updates; by the step it runs {after} them"
                    )

    def _ends(self, name: str) -> Iterator[str]:
        """Whether what outlives the step is complete."""
        content, parts = self.contents[name], self.parts[name]
        if isinstance(content, GRADIENTS):
            yield from self._incomplete("the next step reads", name, is_old=False)
        elif isinstance(content, Clip) and OLD in parts:
            yield f"buffer {name!r} outlives the step, but is of the step before; an op of kind 'clip' must make it"
        elif isinstance(content, Params) and {*parts} != {*self.updates.get(content.unit, ())}:
            num = len(self.updates.get(content.unit, ()))
            yield f"buffer {name!r} outlives the step with {len(parts)} of its unit's {num} updates; it must have all"
        elif isinstance(content, States) and len(parts) != 1:
            yield f"buffer {name!r} outlives the step with {len(parts)} updates; states are updated once a step"

    def _incomplete(self, who: str, name: str, *, is_old: bool) -> Iterator[str]:
        unit = self.contents[name].unit  # type: ignore[union-attr]
        every = [unit, *sorted(self.tied.get(unit, ()))]
        wanted: set[object] = {(of, m) for of in every for m in range(self.step.training.gradient_accumulation_steps)}
        wanted, there = {OLD} if is_old else wanted, {*self.parts[name]}
        if missing := sorted(map(_said, wanted - there)):
            yield f"{who} {name!r}, which lacks {missing[0]}; gradients are used when all are added up"
        elif there - wanted:
            yield f"{who} {name!r}, which has {min(map(_said, there - wanted))}; by the step it does not belong to them"


def _as_one(content: Content) -> Content:
    match content:
        case Gradients():
            return Gradients(content.unit)
        case TiedGradients():
            return TiedGradients(content.unit, 0)
        case Params() | States():
            return replace(content, device=None)
    return content


def _in_codes(content: Content) -> Content:
    match content:
        case Input():
            return CodedInput(content.unit, content.micro_batch)
        case SavedActs():
            return replace(content, is_coded=True)
    return content


def _kinds(may: Collection[Content | type[Content]]) -> tuple[type[Content], ...]:
    return tuple(kind for kind in may if isinstance(kind, type))


def _text(content: Content) -> str:
    return repr(str(content))


def _all(contents: Sequence[Content]) -> str:
    return ", ".join(map(_text, contents)) or "nothing"


def _a(op: Op) -> str:
    """What the rule is about."""
    return f"an op of kind {op.kind!r} of unit {op.unit!r}" if op.unit else f"an op of kind {op.kind!r}"


def _said(part: object) -> str:
    if part == OLD:
        return "the gradients of the step before"
    if isinstance(part, tuple):
        return f"what the backward of {part[0]!r} makes of micro-batch {part[1]}"
    return f"the update {part!r}"
