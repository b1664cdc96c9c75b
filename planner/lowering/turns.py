"""What every kind of turn adds to a schedule: one function each, which draws it on a sketch.

Every op has a *position*, the moment in the order of the compute stream at which it is wanted: that of its turn or so
much before (`lead`), and a rank within it. Names, contents and kinds are those of docs/design.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from tierplan.hwmodels.names import COMPUTE, DEVICE, HOST, HOST_ADAM, NVME
from tierplan.planner.lowering.sketch import (
    ACTS,
    ACTS_EARLY,
    COMPUTES,
    FETCHES,
    FP32_BYTES,
    OFFLOADS,
    PARAMS,
    PARAMS_EARLY,
    UPDATES,
    Sketch,
)
from tierplan.planner.plan import GradientsByLink
from tierplan.sim.contents import (
    NORM_BYTES,
    CastGradients,
    Clip,
    CodedInput,
    Content,
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
    backward_key,
    copy_key,
    forward_key,
    micro_batch_name,
    op_key,
    recompute_key,
)
from tierplan.sim.workloads.formats import CODED_AT_ONCE, CODING_WORK_BYTES
from tierplan.sim.workloads.work import Amounts

TIER_OF = {"device": DEVICE, "host": HOST, "nvme": NVME}
USES = (
    ("params", Params, False),
    ("owner's params", Params, True),
    ("frozen", Frozen, False),
    ("owner's frozen", Frozen, True),
)
"""Parameters that a turn may compute with: the cell, its content, and whether they are those of the unit it shares."""


def declare(s: Sketch) -> None:
    """Buffers that exist before the step: parameters, states, the old gradients of delayed or late updates, and what
    clipping multiplies those with."""
    name, n, t = s.unit.name, s.unit.num_trained, s.workload.training
    if n:
        s.put("params", s.home(Params(name), TIER_OF[s.choice.params], n * t.param_bytes, "params"))
    if size_bytes := s.unit.frozen_bytes:
        place = s.choice.frozen or s.choice.params
        s.put("frozen", s.home(Frozen(name), TIER_OF[place], size_bytes, "params"))
    if n and t.states_bytes(s.unit):
        for k, part in enumerate(t.state_parts(s.unit, s.choice.state_shards)):
            content, size_bytes = States(name, k, s.num_parts), t.states_bytes(s.unit, part)
            tier = HOST if k < s.choice.host_shards else TIER_OF[s.choice.states]
            s.put(f"states{k}", s.home(content, tier, size_bytes, "states"))
    is_clipped = s.plan.semantics == "exact-clip" and t.max_grad_norm is not None
    if n and is_clipped and s.choice.late_update and s.get("clip") is None:
        s.put("clip", s.home(Clip(), HOST, NORM_BYTES, "work"))
    if n and (s.plan.semantics == "delayed-1" or s.choice.late_update):
        is_cast = s.goes_by_link and t.grad_bytes < FP32_BYTES
        old = CastGradients(name) if is_cast else Gradients(name, 0)
        each_bytes = FP32_BYTES if is_cast else t.grad_bytes
        s.put("old grads", s.home(old, TIER_OF[s.choice.late_grads], n * each_bytes, "grads"))


# ---- copies ----


def _to_device(s: Sketch, what: Content | str, source: int, kind: str, lead: int, early: int, held: float = 0) -> int:
    """Brings a buffer to the device ahead of its turn, and from NVMe into host memory as much earlier."""
    if s.tiers[source] == NVME:
        source = s.move(what, source, HOST, rank=FETCHES, lead=early, m=s.m, after=[s.get(f"before early {kind}")])
    after = [s.get(f"before {kind}")]
    return s.move(what, source, DEVICE, rank=FETCHES, lead=lead, m=s.m, after=after, held_bytes=held)


def _off_device(s: Sketch, what: SavedActs | Input, source: int, place: str) -> int:
    """Takes activations from the device to host memory, in codes if they leave so, and on to NVMe if that is their
    place."""
    if (coded := _coded(s, what))[0]:
        content = CodedInput(what.unit, what.micro_batch) if isinstance(what, Input) else replace(what, is_coded=True)
        source = _code(s, "encode", what, source, s.buffer(content, DEVICE, coded[0], "acts"), OFFLOADS)
    source = s.move(what, source, HOST, rank=OFFLOADS, m=s.m)
    return s.move(what, source, NVME, rank=OFFLOADS, m=s.m) if place == "nvme" else source


def _acts_to_device(s: Sketch, what: SavedActs | Input, source: int) -> int:
    """Brings activations back, and decodes them if they left in codes."""
    source = _to_device(s, what, source, "acts", ACTS, ACTS_EARLY)
    if not _coded(s, what)[0]:
        return source
    size_bytes = s.unit.input_bytes if isinstance(what, Input) else s.unit.saved[what.indices[0]].size_bytes
    return _code(s, "decode", what, source, s.buffer(what, DEVICE, size_bytes, "acts"), FETCHES)


def _coded(s: Sketch, what: SavedActs | Input) -> tuple[int, int]:
    if isinstance(what, SavedActs) and len(what.indices) > 1:
        return 0, 0
    return s.workload.training.coded(s.unit, None if isinstance(what, Input) else s.unit.saved[what.indices[0]])


def _code(s: Sketch, verb: str, what: SavedActs | Input, source: int, target: int, rank: int) -> int:
    """An op that codes or decodes activations; its transient is that of a part of them."""
    key, work = copy_key(verb, what), {"elementwise_bytes": _coded(s, what)[1]}
    num = min(CODED_AT_ONCE, s.sizes_bytes[source], s.sizes_bytes[target])
    writes = [target, *s.work(key, num * CODING_WORK_BYTES)]
    s.op(key, COMPUTE, verb, work=work, reads=[source], writes=writes, m=s.m, rank=rank)
    return target


def _params(s: Sketch, phase: str) -> list[int | None]:
    """Device buffers with the parameters that a turn computes with, fetched once per pass over the unit."""
    turn = "turn" if s.unit.kind == "head" else phase
    batch = "" if s.plan.order == "vertical" else micro_batch_name(s.m)
    found = []
    for cell, kind, is_shared in USES:
        owner, home = s.unit.shares if is_shared else s.unit.name, s.get(cell)
        if home is not None and s.tiers[home] != DEVICE:
            fetched = f"{cell} in {turn}"
            home = s.get(fetched)
            if home is None:
                of = () if owner == s.unit.name else (s.unit.name,)
                for_turn = "" if of and turn == "turn" else turn
                what = op_key(kind(str(owner)), *of, for_turn, batch)
                held = s.held_in_fp32(s.made(cell)) if kind is Params else 0.0
                home = s.put(fetched, _to_device(s, what, s.made(cell), "params", PARAMS, PARAMS_EARLY, held))
        found.append(home)
    return found


def _input(s: Sketch) -> int | None:
    """The unit's input, on the device."""
    x = s.get("x")
    if x is not None and s.tiers[x] != DEVICE:
        return s.put("x", _acts_to_device(s, Input(s.unit.name, s.m), x))
    return x


# ---- compute ----


def _compute(
    s: Sketch, key: str, kind: str, work: Amounts, reads: Iterable[int | None], writes: list[int], size_bytes: int
) -> None:
    """An op on the compute stream with its transient: written by it and read by nobody, so it is freed at its end."""
    writes = [*writes, *s.work(key, size_bytes)]
    mark = "" if kind == "recompute" else "compute"
    s.op(key, COMPUTE, kind, work=work, reads=reads, writes=writes, m=s.m, rank=COMPUTES, mark=mark)


def _needs_input(s: Sketch) -> bool:
    """Whether backward reads the unit's input: autograd saved it, or something is recomputed from it."""
    return s.unit.saves_input or bool(s.spec.recomputed)


def _next_input(s: Sketch) -> list[int]:
    return [
        s.put("next x", s.buffer(Input(following.name, s.m), DEVICE, s.unit.output_bytes, "acts"))
        for following in s.workload.units[s.u + 1 : s.u + 2]
    ]


def forward(s: Sketch) -> None:
    """`flag`: the input may leave the device afterwards."""
    unit, choice = s.unit, s.choice
    reads, writes = [*_params(s, "fwd"), s.get("x")], []
    if unit.kind == "embed" and s.workload.shared_bytes:
        writes.append(s.put("shared", s.buffer(Shared(s.m), DEVICE, s.workload.shared_bytes, "acts")))
    elif unit.kind == "block":
        reads.append(s.get("shared"))
    writes += _next_input(s)
    if kept_bytes := s.spec.bytes_of("keep"):
        writes.append(s.put("kept", s.buffer(KeptActs(unit.name, s.m), DEVICE, kept_bytes, "acts")))
    left = []
    for indices in s.moved:
        size_bytes = sum(s.spec.saved[k].size_bytes for k in indices)
        left.append(s.buffer(SavedActs(unit.name, s.m, indices), DEVICE, size_bytes, "acts"))
    work_bytes = unit.forward_work_bytes + s.spec.bytes_of("recompute")
    _compute(s, forward_key(unit.name, s.m), "forward", unit.forward, reads, writes + left, work_bytes)
    for j, indices in enumerate(s.moved):
        place = s.spec.saved[indices[0]].action
        s.put(f"left{j}", _off_device(s, SavedActs(unit.name, s.m, indices), left[j], place))
    x = s.get("x")
    if x is not None and choice.input != "keep" and _needs_input(s) and s.flag:
        s.put("x", _off_device(s, Input(unit.name, s.m), x, choice.input))


def fetch(s: Sketch) -> None:
    """Brings the parameters that a backward needs."""
    _params(s, "bwd")


def remake(s: Sketch) -> None:
    """One unit of a segment runs forward once more: saved tensors and, with `flag`, the next one's input."""
    x = _input(s)
    reads = [*_params(s, "bwd"), x, s.get("shared")]
    _recompute(s, reads, [], _next_input(s) if s.flag else [])


def _recompute(s: Sketch, inputs: list[int | None], acts: list[int | None], outputs: list[int]) -> None:
    unit = s.unit
    dropped = s.spec.recomputed
    # What needs random numbers drawn again is made by running the whole unit again.
    whole = len(dropped) == len(unit.saved) or not all(unit.saved[k].replayable for k in dropped)
    work = (unit.recompute or unit.forward) if whole else unit.work_again(dropped)
    made = s.put("remade", s.buffer(RecomputedActs(unit.name, s.m), DEVICE, s.spec.bytes_of("recompute"), "acts"))
    reads, key = inputs if whole else inputs + acts, recompute_key(unit.name, s.m)
    _compute(s, key, "recompute", work, reads, [made, *outputs], unit.forward_work_bytes)


def backward(s: Sketch) -> None:
    """`flag`: it is the last micro-batch, so that gradients are complete afterwards."""
    unit = s.unit
    is_made_again = s.get("remade") is not None or bool(s.spec.recomputed)
    params = _params(s, "bwd") if unit.saves_parameters or is_made_again else []
    inputs = [_input(s) if _needs_input(s) else None, s.get("shared") if unit.kind == "block" else None]
    acts = [s.get("kept")]
    for j, indices in enumerate(s.moved):
        acts.append(_acts_to_device(s, SavedActs(unit.name, s.m, indices), s.made(f"left{j}")))
    if s.get("remade") is None and is_made_again:
        _recompute(s, params + inputs, acts, [])
    reads = [*params, *inputs, *acts, s.get("remade"), before := s.get("dx")]
    writes = []
    if s.u > s.workload.first_trained:
        writes.append(s.put("dx", s.buffer(InputGradient(unit.name, s.m), DEVICE, unit.input_bytes, "acts")))
    gradients, work_bytes = _gradients(s, reads, writes)
    _compute(s, backward_key(unit.name, s.m), "backward", unit.backward, reads, writes, work_bytes)
    if unit.shares and unit.adds_to_shared and s.choice.tied_grads != "device":
        made = s.made("owner's tied")
        s.put("owner's tied", s.move(_tied(s, unit.shares), made, HOST, m=s.m, rank=OFFLOADS))
    if gradients is not None:
        _leave(s, gradients, before)
        if s.flag:
            _complete(s)


# ---- gradients ----


def _gradients(s: Sketch, reads: list[int | None], writes: list[int]) -> tuple[int | None, int]:
    """Adds to a backward what it does to gradients; the buffer of the unit's own, and the bytes of its transient.

    Where gradients are added to earlier ones, these are there throughout, and each new one is made beside them.
    """
    unit, grad_bytes = s.unit, s.workload.training.grad_bytes
    made, work_bytes = None, unit.backward_work_bytes
    shared = "tied sum" if s.plan.sums_tied else "tied"
    grads = s.get("grads")
    # the sum is the first one's
    tied = None if s.plan.sums_tied and grads is not None else _waited(s, shared, unit.name)
    accumulated = grads if _adds_up_here(s) else None
    if tied is not None or accumulated is not None:
        work_bytes = max(work_bytes, unit.accumulating_work_bytes)
    if unit.shares and unit.adds_to_shared:
        earlier = _waited(s, f"owner's {shared}", unit.shares)  # of another unit that shares them, or micro-batch
        if earlier is None:
            owner = next(other for other in s.workload.units if other.name == unit.shares)
            size_bytes = owner.num_trained * grad_bytes
            total = s.buffer(TiedGradients(unit.shares, s.m), DEVICE, size_bytes, "grads")
        else:
            reads.append(earlier)
            total = s.over(earlier)
            work_bytes += s.sizes_bytes[earlier]
        writes.append(s.put(f"owner's {shared}", total))
    if unit.num_trained:
        reads += [tied, accumulated]
        if accumulated is not None:
            made = s.over(accumulated)
        else:
            size_bytes = unit.num_trained * grad_bytes
            made = s.buffer(Gradients(unit.name, s.m), DEVICE, size_bytes, "grads", reuses=tied)
        writes.append(made)
    return made, work_bytes


def _waited(s: Sketch, cell: str, owner: str) -> int | None:
    """The gradient that others have made of the owner's parameters, if they have: on the device again."""
    tied = s.get(cell)
    if tied is None or s.tiers[tied] == DEVICE:
        return tied
    return _to_device(s, _tied(s, owner), tied, "acts", ACTS, ACTS_EARLY)


def _tied(s: Sketch, owner: str) -> str:
    """What is said of a copy of tied gradients, of which several units may make one."""
    return op_key(TiedGradients(owner, s.m), *([s.unit.name] if s.unit.name != owner else []))


def _adds_up_here(s: Sketch) -> bool:
    """Whether gradients add up on the device: they stay, or are to come back and one turn has all micro-batches'."""
    is_one_turn = s.plan.order == "vertical" or s.workload.training.gradient_accumulation_steps == 1
    return s.choice.grads == "device" or (s.choice.update == "device" and is_one_turn)


def _leave(s: Sketch, made: int, before: int | None) -> None:
    """After one micro-batch: gradients stay on the device, or join those that wait in host memory (`before`: what the
    backward before has made)."""
    if not _adds_up_here(s) and s.plan.by_link is not None:
        made = _added_by_link(s, made, before, s.plan.by_link)
    elif not _adds_up_here(s):
        made = s.move(Gradients(s.unit.name, s.m), made, HOST, m=s.m, rank=OFFLOADS, held_bytes=s.held_in_fp32(made))
        accumulated = s.get("grads")
        if accumulated is not None:
            made = _accumulated(s, HOST_ADAM, accumulated, made)
    s.put("grads", made)


def _added_by_link(s: Sketch, made: int, before: int | None, by_link: GradientsByLink) -> int:
    """Adds what waits in host memory to new gradients on the device, from where the sum goes back; that one, or after
    the last micro-batch the one on the device."""
    what, earlier, waits = Gradients(s.unit.name, s.m), s.get("grads"), _waits(s)
    held_bytes = (by_link.slowdown - 1) * s.sizes_bytes[made]
    if earlier is not None:
        behind = made if waits else before
        brought = s.move(what, earlier, DEVICE, m=s.m, rank=FETCHES, behind=behind, held_bytes=held_bytes)
        made = _accumulated(s, COMPUTE, brought, made)
    if s.workload.training.gradient_accumulation_steps == 1 and not by_link.returns_first:
        return made
    gone = s.move(what, made, HOST, over=earlier, m=s.m, rank=OFFLOADS, held_bytes=held_bytes)
    if earlier is None and by_link.returns_first:
        made = s.move(what, gone, DEVICE, m=s.m, rank=OFFLOADS, held_bytes=held_bytes)
    if s.flag:
        return made
    if waits:
        _wait(s, [gone, made])
    return gone


def _accumulated(s: Sketch, stream: str, total: int, new: int) -> int:
    """The sum, in the place of the total."""
    key, over = op_key("accumulate", s.unit.name, micro_batch_name(s.m)), s.over(total)
    work = {"elementwise_bytes": 3 * s.unit.num_trained * s.workload.training.grad_bytes}
    rank = UPDATES if stream == HOST_ADAM else OFFLOADS
    s.op(key, stream, "accumulate", work=work, reads=[total, new], writes=[over], m=s.m, rank=rank)
    return over


def _waits(s: Sketch) -> bool:
    """Whether compute waits for this backward's copies of gradients."""
    if (by_link := s.plan.by_link) is None:
        return False
    waits = {"always", "in the last"} if s.flag else {"always"}
    return s.u == s.workload.first_trained or by_link.waits in waits


def _wait(s: Sketch, copied: Sequence[int]) -> None:
    """What computes next comes after the copies."""
    what = op_key("wait", s.unit.name, micro_batch_name(s.m))
    s.op(what, COMPUTE, "wait", work={}, reads=copied, m=s.m, rank=UPDATES, mark="compute")


def _complete(s: Sketch) -> None:
    """After the last micro-batch: the norm if one is wanted, and the way to where the update finds them."""
    name, n, t, choice, by_link = s.unit.name, s.unit.num_trained, s.workload.training, s.choice, s.plan.by_link
    grads = s.made("grads")
    if choice.leaves and choice.grads == "device" and not s.goes_by_link:
        grads = s.move(Gradients(name), grads, HOST, rank=OFFLOADS, held_bytes=s.held_in_fp32(grads))
    if t.max_grad_norm is not None:
        norm = s.put("norm", s.buffer(Norm(name), HOST, NORM_BYTES, "work"))
        stream, work = COMPUTE if s.tiers[grads] == DEVICE else HOST_ADAM, {"elementwise_bytes": n * t.grad_bytes}
        s.op(op_key("norm", name), stream, "norm", work=work, reads=[grads], writes=[norm], rank=UPDATES)
    if choice.leaves and s.tiers[grads] == DEVICE:
        grads = _in_fp32(s, grads) if by_link else grads
        held_bytes = (by_link.slowdown - 1) * s.sizes_bytes[grads] if by_link else 0.0
        grads = s.move(Gradients(name), grads, HOST, rank=OFFLOADS, held_bytes=held_bytes)
        if _waits(s):
            _wait(s, [grads])
    if choice.grads == "nvme":
        grads = s.move(Gradients(name), grads, NVME, rank=OFFLOADS)
    s.put("grads", grads)


def _in_fp32(s: Sketch, grads: int) -> int:
    """A copy of gradients on the device in fp32, or they themselves if they are."""
    n, grad_bytes = s.unit.num_trained, s.workload.training.grad_bytes
    if grad_bytes == FP32_BYTES:
        return grads
    cast = s.buffer(CastGradients(s.unit.name), DEVICE, n * FP32_BYTES, "grads")
    work = {"elementwise_bytes": n * (grad_bytes + FP32_BYTES)}
    s.op(op_key("cast", s.unit.name), COMPUTE, "cast", work=work, reads=[grads], writes=[cast], rank=OFFLOADS)
    return cast
