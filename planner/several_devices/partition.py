"""One device's schedule on several: each trains on micro-batches of its own and holds a shard of the model (ZeRO-3).

Parameters, gradients and optimizer states are cut into as many shards as there are devices. A device keeps or fetches
its shard of a unit's parameters over its own link and gathers the others' from its peers before it computes; after
backward, gradients are reduced and scattered, and each device sends its shard away. Host cores and drives work for
all devices: what they read and write is the whole. Activations belong to each device alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tierplan.hwmodels.names import DEVICE, collective, device, parse_stream
from tierplan.planner.several_devices.collectives import collective_work
from tierplan.sim.contents import (
    Gradients,
    Params,
    buffer_name,
    copy_key,
    device_name,
    micro_batch_name,
    op_key,
    parse_content,
)
from tierplan.sim.schedule import Buffer, Op, Schedule
from tierplan.sim.workloads.workload import Amounts

SHARDED = ("params", "grads", "states")
"""Kinds of buffers that are cut into shards."""
COMPUTE_KINDS = ("forward", "recompute", "backward")


def partition(schedule: Schedule, devices: int) -> Schedule:
    """The schedule of `devices` devices, given that of one. Their tiers and the links between them must exist."""
    return _Partition(schedule, devices).schedule()


class _Partition:
    def __init__(self, schedule: Schedule, devices: int) -> None:
        self.source, self.n = schedule, devices
        self.old = schedule.buffers_by_name()
        self.buffers: dict[str, Buffer] = {}
        self.ops: list[Op] = []
        self.gathered: dict[tuple[str, str, str, int, int], str] = {}
        self.scattered: dict[tuple[str, int], str] = {}
        self.computes: list[list[str]] = [[] for _ in range(devices)]  # keys per device, in order
        self.keys: dict[str, list[str]] = {}

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
        return b.kind in SHARDED and not (b.tier == DEVICE and b.kind == "grads")

    def _ranks(self, name: str) -> Iterable[int]:
        b = self.old[name]
        is_shared = b.tier != DEVICE and b.kind not in (*SHARDED, "acts")
        return (0,) if is_shared else range(self.n)

    def _name(self, name: str, r: int) -> str:
        return name if len(tuple(self._ranks(name))) == 1 else device_name(name, r)

    def _declare(self, name: str, r: int) -> None:
        b = self.old[name]
        self.buffers[self._name(name, r)] = replace(
            b,
            name=self._name(name, r),
            tier=device(r) if b.tier == DEVICE else b.tier,
            size_bytes=-(-b.size_bytes // self.n) if self._is_sharded(b) else b.size_bytes,
            reuses=self._name(b.reuses, r) if b.reuses else None,
            becomes=self._name(b.becomes, r) if b.becomes else None,
        )

    def _all(self, names: Iterable[str]) -> list[str]:
        return [self._name(name, r) for name in names for r in self._ranks(name)]

    # ---- ops ----

    def _place(self, op: Op) -> None:
        touched = [self.old[name] for name in (*op.reads, *op.writes)]
        on_device = parse_stream(op.stream).device is not None
        if not on_device and not any(b.kind == "acts" for b in touched):
            self._emit(op, op.key, op.stream, op.work, self._all(op.reads), self._all(op.writes), None)
            return
        for r in range(self.n):
            reads = [self._input(op, name, r) for name in op.reads]
            writes = [self._name(name, r) for name in op.writes]
            work = op.work
            if op.kind == "update" or (op.kind == "copy" and op.reads and self.old[op.reads[0]].kind in SHARDED):
                work = {kind: amount / self.n for kind, amount in op.work.items()}
            stream = parse_stream(op.stream).on(r) if on_device else op.stream
            key = self._emit(op, device_name(op.key, r), stream, work, reads, writes, r)
            if op.kind in COMPUTE_KINDS:
                self.computes[r].append(key)

    def _input(self, op: Op, name: str, r: int) -> str:
        b = self.old[name]
        if b.tier != DEVICE:
            return self._name(name, r)
        if b.kind == "params" and op.kind in COMPUTE_KINDS:
            return self._gather(op, name, r)
        if b.kind == "grads" and op.kind not in COMPUTE_KINDS:
            return self._scatter(name, r)
        return self._name(name, r)

    def _emit(
        self, op: Op, key: str, stream: str, work: Amounts, reads: list[str], writes: list[str], r: int | None
    ) -> str:
        after = []
        for old in op.after:
            new = self.keys[old]
            after += [new[r]] if r is not None and len(new) == self.n else new
        read, ended = tuple(dict.fromkeys(reads)), tuple(dict.fromkeys(after))
        self.ops.append(replace(op, key=key, stream=stream, work=work, reads=read, writes=tuple(writes), after=ended))
        self.keys.setdefault(op.key, []).append(key)
        return key

    def _gather(self, op: Op, name: str, r: int) -> str:
        """The whole parameters on device r for one pass of one unit, a turn ahead of compute."""
        turn = "fwd" if op.kind == "forward" else "bwd"
        known = (name, op.unit, turn, op.micro_batch, r)
        if known not in self.gathered:
            b = self.old[name]
            key = op_key(copy_key("gather", b.content), op.unit, turn, micro_batch_name(op.micro_batch), device(r))
            self.gathered[known] = self._collective(
                key, "gather", b, r, [self._name(name, k) for k in range(self.n)], b.size_bytes, self.computes[r][-2:-1]
            )
        return self.gathered[known]

    def _scatter(self, name: str, r: int) -> str:
        """Device r's shard of the sum of all devices' gradients."""
        if (name, r) not in self.scattered:
            b = self.old[name]
            key = device_name(copy_key("reduce", b.content), r)
            whole = [self._name(name, k) for k in range(self.n)]
            self.scattered[name, r] = self._collective(key, "reduce", b, r, whole, -(-b.size_bytes // self.n), [])
        return self.scattered[name, r]

    def _collective(
        self, key: str, kind: str, b: Buffer, r: int, reads: list[str], size_bytes: int, after: list[str]
    ) -> str:
        content = parse_content(b.content)
        assert isinstance(content, Params | Gradients)
        name, tier = buffer_name(key, device(r)), device(r)
        self.buffers[name] = Buffer(name=name, tier=tier, size_bytes=size_bytes, content=b.content, kind=b.kind)
        work = collective_work(kind, b.size_bytes, self.n)
        op = Op(key=key, stream=collective(r), kind=kind, unit=content.unit, work=work)
        self.ops.append(replace(op, reads=tuple(reads), writes=(name,), after=tuple(after)))
        return name
