"""Steps of a schedule, each joined to the one before as an execution opens it: as `columns.unroll` does beforehand."""

from __future__ import annotations

from collections.abc import Container, Mapping

from tierplan.runtime.execution.instances import Instance, OpRun
from tierplan.sim.schedule import Op, Schedule


class Unrolling:
    """The buffers that outlive steps, by the names that the last opened step knows them by."""

    def __init__(self, schedule: Schedule, held_bytes: Mapping[str, int], streams_ahead: Container[str]) -> None:
        self._schedule, self._held_bytes, self._streams_ahead = schedule, held_bytes, streams_ahead
        self._buffers = schedule.buffers_by_name()
        self._reused = {b.reuses for b in schedule.buffers if b.reuses is not None}
        self._successor = {b.becomes: b.name for b in schedule.buffers if b.becomes is not None}
        self._needs = [self._needed(op) for op in schedule.ops]
        self._names: dict[str, Instance] = {}
        self.carried: dict[str, Instance] = {b.name: Instance(b) for b in schedule.buffers if b.initial}
        """The initial buffers as they stand between runs."""

    @property
    def lost(self) -> list[str]:
        """Initial buffers that a second step would lack."""
        return sorted(b.name for b in self._schedule.buffers if b.initial and b.name not in self._successor)

    def _needed(self, op: Op) -> dict[str, int]:
        needs: dict[str, int] = {}
        for b in (self._buffers[name] for name in op.writes):
            if b.reuses is None and b.size_bytes > 0:
                needs[b.tier] = needs.get(b.tier, 0) + self._held_bytes[b.name]
        return needs

    def open(self, step: int) -> list[OpRun]:
        """The ops of the next step, in order, knowing what they wait for."""
        names = self._names = self._initial_names()
        for name, instance in names.items():
            self._set_lifetime(instance, name)
        nodes: dict[str, OpRun] = {}
        for op, needs in zip(self._schedule.ops, self._needs, strict=True):
            is_ahead = op.stream in self._streams_ahead
            inputs = {nodes[key] for key in op.after}
            reads = tuple(names[name] for name in op.reads)
            for instance in reads:
                instance.num_unissued += 1
                if instance.private_to != op.stream:
                    instance.private_to = None
                if instance.writer is not None:
                    inputs.add(instance.writer)
            writes = []
            for name in op.writes:
                b = self._buffers[name]
                instance = names[name] = Instance(b, private_to=op.stream if is_ahead else None)
                self._set_lifetime(instance, name)
                writes.append(instance)
                if b.reuses is not None:
                    instance.over = names[b.reuses]
                    inputs.update(instance.over.readers)
            node = nodes[op.key] = OpRun(op, step, reads, tuple(writes), needs=needs, grants_left=len(needs))
            for instance in reads:
                instance.readers.append(node)
            for instance in writes:
                instance.writer = node
            for earlier in inputs:
                if earlier.is_issued and is_ahead:
                    node.behind.append(earlier)
                elif not earlier.has_ended:
                    earlier.followers.append(node)
                    node.waiting_for += 1
        return list(nodes.values())

    def _initial_names(self) -> dict[str, Instance]:
        """The initial buffers of the step to open: what outlives the step before it, or what was carried."""
        if not self._names:
            return dict(self.carried)
        return {name: self._names[self._successor[name]] for name in self.carried if name in self._successor}

    def _set_lifetime(self, instance: Instance, name: str) -> None:
        instance.is_reused = instance.is_reused or name in self._reused
        instance.outlives = self._buffers[name].becomes is not None

    def carry_over(self, *, is_last_run: bool) -> None:
        """What outlives the last step takes its place among the initial buffers; that step may not have run."""
        self.carried = (
            self._initial_names()
            if is_last_run
            else {name: self._names[name] for name in self.carried if name in self._names}
        )
        for name, instance in self.carried.items():
            instance.buffer = self._buffers[name]
            instance.readers, instance.writer, instance.is_reused = [], None, False
            instance.num_unissued, instance.private_to = 0, None
        self._names = {}
