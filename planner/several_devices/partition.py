"""One device's schedule on several, which divide what `Sharing` says.

As ZeRO-3 does, parameters, gradients and optimizer states are cut into as many shards as there are devices. A device
keeps or fetches its shard of a unit's parameters over its own link and gathers the others' from its peers before it
computes; after backward, gradients are reduced and scattered, and each device sends its shard away. Where parameters
are whole on every device, what each one updated is gathered after the update. Where operators are cut (tensor
parallelism), activations are summed after each half of a block instead. Host cores and drives work for all devices:
what they read and write is the whole. Activations belong to each device alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import product

from tierplan.hwmodels.names import DEVICE, collective, device, parse_stream
from tierplan.planner.plan import Sharing
from tierplan.planner.several_devices.collectives import collective_work
from tierplan.sim.contents import (
    Frozen,
    Gradients,
    Input,
    InputGradient,
    Params,
    Shared,
    TiedGradients,
    buffer_name,
    copy_key,
    device_name,
    micro_batch_name,
    op_key,
    parse_content,
    shard,
)
from tierplan.sim.schedule import Buffer, Op, Schedule
from tierplan.sim.workloads.workload import Amounts

SHARDED = ("params", "grads", "states")
"""Kinds of buffers that are cut into shards."""
ENDS = ("embed", "head")
COMPUTE_KINDS = ("forward", "recompute", "backward")


def partition(schedule: Schedule, devices: int, sharing: Sharing) -> Schedule:
    """The schedule of `devices` devices, given that of one. Their tiers and the links between them must exist."""
    return _Partition(schedule, devices, sharing).schedule()


class _Partition:
    def __init__(self, schedule: Schedule, devices: int, sharing: Sharing) -> None:
        self.source, self.n, self.sharing = schedule, devices, sharing
        self.cuts_tensors = sharing.divided == "tensors"
        self.stays = schedule.meta.get("order") == "vertical"  # a unit's parameters, for all its micro-batches
        self.old = schedule.buffers_by_name()
        self.buffers: dict[str, Buffer] = {}
        self.ops: list[Op] = []
        self.gathered: dict[tuple[str, str, str, int, int], str] = {}
        self.scattered: dict[tuple[str, int], str] = {}
        self.computes: list[list[str]] = [[] for _ in range(devices)]  # keys per device, in order
        self.awaited: list[list[str]] = [[] for _ in range(devices)]  # collectives that the next compute comes after
        self.keys: dict[str, list[str]] = {}
        self.lengths = {} if schedule.step is None else {u.name: u.num_parameters for u in schedule.step.units}
        self.home = {b.content: b.tier for b in schedule.buffers if b.initial and b.kind == "params"}
        self.made_on_device = {
            name for op in schedule.ops if parse_stream(op.stream).device is not None for name in op.writes
        }

    def schedule(self) -> Schedule:
        for name in self.old:
            for r in self._ranks(name):
                self._declare(name, r)
        for op in self.source.ops:
            self._place(op)
        return replace(
            self.source,
            name=f"{self.source.name} on {self.n} devices",
            buffers=tuple(self.buffers.values()),
            ops=tuple(self.ops),
            meta={**self.source.meta, "devices": self.n},
        )

    # ---- buffers ----

    def _is_sharded(self, b: Buffer) -> bool:
        """Whether a device's or the host's buffer is 1/n of it; a gradient is whole on the device that made it."""
        if self.cuts_tensors:
            return b.kind in (*SHARDED, "work") or (b.kind == "acts" and not self._is_border(b))
        if b.kind not in SHARDED or isinstance(parse_content(b.content), TiedGradients):
            return False
        if b.kind == "params" and self.sharing.divided != "all":
            return b.tier != DEVICE and self.home.get(b.content) == DEVICE  # on the way home
        if b.tier != DEVICE or b.kind == "params":
            return True
        if b.kind == "states":
            return self.sharing.divided != "nothing"
        return self._is_summed_at_once(b) and self.sharing.divided in ("all", "gradients")

    def _is_border(self, b: Buffer) -> bool:
        """Whether it passes from unit to unit, or belongs to all of them."""
        return isinstance(parse_content(b.content), Input | InputGradient | Shared)

    def _is_summed_at_once(self, b: Buffer) -> bool:
        """Whether these gradients stay on the device, and are summed over devices after each micro-batch."""
        on_device = self.sharing.reduces == "each" and b.kind == "grads" and b.tier == DEVICE and not self.cuts_tensors
        return on_device and isinstance(parse_content(b.content), Gradients)

    def _has_tied_share(self, b: Buffer) -> bool:
        """Whether this sum over devices begins where one device's share of a tied gradient is."""
        return self._is_summed_at_once(b) and b.reuses is not None and not self._is_summed_at_once(self.old[b.reuses])

    def _ranks(self, name: str) -> Iterable[int]:
        b = self.old[name]
        is_shared = b.tier != DEVICE and b.kind not in (*SHARDED, "acts") and name not in self.made_on_device
        return (0,) if is_shared else range(self.n)

    def _name(self, name: str, r: int) -> str:
        return name if len(tuple(self._ranks(name))) == 1 else device_name(name, r)

    def _declare(self, name: str, r: int) -> None:
        b = self.old[name]
        self.buffers[self._name(name, r)] = replace(
            b,
            name=self._name(name, r),
            tier=device(r) if b.tier == DEVICE else b.tier,
            size_bytes=self._shard_bytes(b, r) if self._is_sharded(b) else b.size_bytes,
            reuses=self._name(b.reuses, r) if b.reuses and not self._has_tied_share(b) else None,
            becomes=self._name(b.becomes, r) if b.becomes else None,
        )

    def _shard_bytes(self, b: Buffer, r: int) -> int:
        """A device's share, of whole values where there is one for each parameter, as the runtime cuts them."""
        length = self.lengths.get(getattr(parse_content(b.content), "unit", ""), 0)
        if length and b.size_bytes % length == 0 and not self.cuts_tensors:
            return len(shard(range(length), r, self.n)) * (b.size_bytes // length)
        return -(-b.size_bytes // self.n)

    def _all(self, names: Iterable[str]) -> list[str]:
        return [self._name(name, r) for name in names for r in self._ranks(name)]

    # ---- ops ----

    def _place(self, op: Op) -> None:
        touched = [self.old[name] for name in (*op.reads, *op.writes)]
        on_device = parse_stream(op.stream).device is not None
        computes = op.kind in COMPUTE_KINDS
        sums = [name for name in op.writes if computes and self._is_summed_at_once(self.old[name])]
        updated = [name for name in op.writes if not computes and self._is_gathered_again(name)]
        if not on_device and not any(b.kind == "acts" for b in touched):
            parts = [(name, r) for name in op.writes for r in self._ranks(name)]
            writes = [self._own_part(op, name, r) if name in updated else self._name(name, r) for name, r in parts]
            self._emit(op, op.key, op.stream, op.work, self._all(op.reads), writes, None)
            for name, r in product(updated, range(self.n)):
                self._complete(op, name, r, is_sum=False)
            return
        is_shard = op.kind == "copy" and any(map(self._is_sharded, touched))
        is_shared_update = op.kind == "update" and self.sharing.divided != "nothing"
        share = self.n if is_shard or is_shared_update or (computes and self.cuts_tensors) else 1
        work = op.work if share == 1 else {kind: amount / share for kind, amount in op.work.items()}
        for r in range(self.n):
            reads = [
                self._input(op, name, r) for name in op.reads if not (sums and self._is_summed_at_once(self.old[name]))
            ]
            writes = [
                self._own_part(op, name, r) if name in (*sums, *updated) else self._name(name, r) for name in op.writes
            ]
            stream = parse_stream(op.stream).on(r) if on_device else op.stream
            key = self._emit(op, device_name(op.key, r), stream, work, reads, writes, r)
            if computes:
                self.computes[r].append(key)
        for name in (*sums, *updated):
            for r in range(self.n):
                self._complete(op, name, r, is_sum=name in sums)
        if self.cuts_tensors and computes:
            self._sum_activations(op, touched)

    def _input(self, op: Op, name: str, r: int) -> str:
        b = self.old[name]
        if b.tier != DEVICE or self.cuts_tensors:
            return self._name(name, r)
        if b.kind == "params" and op.kind in COMPUTE_KINDS and self.sharing.divided == "all":
            return self._gather(op, name, r)
        is_own = isinstance(parse_content(b.content), Gradients)
        if is_own and op.kind not in COMPUTE_KINDS and not self._is_summed_at_once(b):
            return self._scatter(name, r)
        return self._name(name, r)

    def _emit(
        self, op: Op, key: str, stream: str, work: Amounts, reads: list[str], writes: list[str], r: int | None
    ) -> str:
        after = []
        for old in op.after:
            new = self.keys[old]
            after += [new[r]] if r is not None and len(new) == self.n else new
        if r is not None and op.kind in COMPUTE_KINDS:
            after += self.awaited[r]
            self.awaited[r] = []
        read, ended = tuple(dict.fromkeys(reads)), tuple(dict.fromkeys(after))
        self.ops.append(replace(op, key=key, stream=stream, work=work, reads=read, writes=tuple(writes), after=ended))
        self.keys.setdefault(op.key, []).append(key)
        return key

    # ---- collectives ----

    def _gather(self, op: Op, name: str, r: int) -> str:
        """The whole parameters on device r for one pass of one unit, a turn ahead of compute."""
        turn = "fwd" if op.kind == "forward" else "bwd"
        use = (name, op.unit, turn)
        if self.sharing.keeps == "all" or (self.sharing.keeps == "ends" and op.unit in ENDS):
            use = (self.old[name].content, "", "")
        known = (*use, 0 if self.stays else op.micro_batch, r)
        if known not in self.gathered:
            b = self.old[name]
            key = op_key(copy_key("gather", b.content), op.unit, turn, micro_batch_name(op.micro_batch), device(r))
            after = self.computes[r][-1:] if self.sharing.waits else self.computes[r][-2:-1]
            self.gathered[known] = self._exchanged(key, "gather", name, r, b.size_bytes, after)
        return self.gathered[known]

    def _scatter(self, name: str, r: int) -> str:
        """Device r's shard of the sum of all devices' gradients, or the whole where nothing is divided."""
        if (name, r) not in self.scattered:
            b, whole = self.old[name], self.sharing.divided == "nothing"
            kind = "all_reduce" if whole else self.sharing.by
            key = device_name(copy_key("reduce", b.content), r)
            size_bytes = b.size_bytes if whole else self._shard_bytes(b, r)
            self.scattered[name, r] = self._exchanged(key, kind, name, r, size_bytes, [])
        return self.scattered[name, r]

    def _is_gathered_again(self, name: str) -> bool:
        """Whether these are parameters that every device has whole, and of which each has just made a shard."""
        b = self.old[name]
        is_home = b.kind == "params" and b.tier == self.home.get(b.content)
        return is_home and self.sharing.divided in ("gradients", "states")

    def _own_part(self, op: Op, name: str, r: int) -> str:
        """What a device has made by itself, before the others' shares are added: a gradient, or updated parameters."""
        b, own = self.buffers[self._name(name, r)], self._own_name(op, name, r)
        is_sum = op.kind in COMPUTE_KINDS
        size_bytes = self.old[name].size_bytes if is_sum else b.size_bytes
        old = self.old[name].reuses if self._has_tied_share(self.old[name]) else None
        reuses = (self._name(old, r) if old else None) if is_sum else b.reuses
        self.buffers[own] = replace(b, name=own, size_bytes=size_bytes, reuses=reuses, becomes=None)
        if not is_sum:
            self.buffers[b.name] = replace(b, reuses=own)
        return own

    def _own_name(self, op: Op, name: str, r: int) -> str:
        own, tier = op_key("own", op.key), self.old[name].tier
        return buffer_name(own, device(r)) if tier == DEVICE else device_name(buffer_name(own, tier), r)

    def _complete(self, op: Op, name: str, r: int, *, is_sum: bool) -> None:
        """Adds all devices' shares: sums gradients onto those of earlier micro-batches, or gathers new parameters."""
        b = self.old[name]
        own = [self._own_name(op, name, k) for k in range(self.n)]
        if is_sum:
            kind = "all_reduce" if self.sharing.divided == "nothing" else self.sharing.by
            reads = [*own, *([self._name(b.reuses, r)] if b.reuses and not self._has_tied_share(b) else [])]
            self._collective(op_key("reduce", op.key, device(r)), kind, b, r, reads, self._name(name, r), [])
        else:
            key = op_key("gather", op.key, device(r))
            self._collective(key, "gather", b, r, [own[r]], self._name(name, r), self.keys[op.key])

    def _sum_activations(self, op: Op, touched: list[Buffer]) -> None:
        """Megatron's all-reduces: after each half of a block, and where the vocabulary is cut."""
        borders = [
            b for b in touched if b.kind == "acts" and isinstance(parse_content(b.content), Input | InputGradient)
        ]
        once = (("embed", "forward"), ("head", "backward"))
        calls = 2 if op.unit not in ENDS else int((op.unit, op.kind) in once)
        if not borders or not calls:
            return
        b = max(borders, key=lambda b: b.size_bytes)
        for r in range(self.n):
            work = collective_work("all_reduce", calls * b.size_bytes, self.n, calls=calls)
            key = op_key("all_reduce", op.key, device(r))
            ended = tuple(self.keys[op.key])
            self.ops.append(Op(key=key, stream=collective(r), kind="all_reduce", unit=op.unit, work=work, after=ended))
            self.awaited[r].append(key)

    def _exchanged(self, key: str, kind: str, name: str, r: int, size_bytes: int, after: list[str]) -> str:
        """A new buffer on device r, of what all devices have."""
        b, out = self.old[name], buffer_name(key, device(r))
        self.buffers[out] = Buffer(name=out, tier=device(r), size_bytes=size_bytes, content=b.content, kind=b.kind)
        self._collective(key, kind, b, r, [self._name(name, k) for k in range(self.n)], out, after)
        return out

    def _collective(self, key: str, kind: str, b: Buffer, r: int, reads: list[str], out: str, after: list[str]) -> None:
        content = parse_content(b.content)
        assert isinstance(content, Params | Frozen | Gradients)
        work = collective_work(kind, b.size_bytes, self.n)
        op = Op(key=key, stream=collective(r), kind=kind, unit=content.unit, work=work)
        self.ops.append(replace(op, reads=tuple(reads), writes=(out,), after=tuple(after)))
        if self.sharing.waits:
            self.awaited[r].append(key)
