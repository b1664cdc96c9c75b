"""What each tier holds: bytes as they are granted and freed, whose they are, and the most that ever were.

TierFullError(ExecutionError)   no op can go on for want of memory in a tier; names op, tier and holders
"""

from __future__ import annotations

from tierplan.runtime.execution.instances import ExecutionError, Instance, OpRun
from tierplan.sim.schedule import Schedule
from tierplan.sim.trace import MemoryEvent


class TierFullError(ExecutionError):
    """No op can go on for want of memory in a tier. Nothing was allocated beyond its capacity."""


class Ledger:
    """The tiers of one execution. All times in nanoseconds."""

    def __init__(self, schedule: Schedule) -> None:
        tiers = {t.name: t for t in schedule.tiers}
        self.capacity_bytes = {name: tier.capacity_bytes for name, tier in tiers.items()}
        self.held_bytes = {b.name: tiers[b.tier].held_bytes(b.size_bytes) for b in schedule.buffers}
        """What buffers hold in their tiers, by name."""
        self.used_bytes = dict.fromkeys(tiers, 0)
        self.peak_bytes = dict.fromkeys(tiers, 0)
        self.held: dict[Instance, None] = {}
        self.events: list[MemoryEvent] = []
        self.is_noted = True
        """Events are kept."""
        self._private_bytes: dict[str, dict[str, int]] = {name: {} for name in tiers}
        """By tier and stream, bytes that are that stream's again, and nobody else's yet."""

    def hold(self, now_ns: int, instance: Instance) -> int:
        """The bytes that it holds from now on."""
        b = instance.buffer
        tier, held_bytes = b.tier, self.held_bytes[b.name]
        self.held[instance] = None
        used_bytes = self.used_bytes[tier] = self.used_bytes[tier] + held_bytes
        if used_bytes > self.peak_bytes[tier]:
            self.peak_bytes[tier] = used_bytes
        if self.is_noted:
            self._note(now_ns, instance, 1)
        return held_bytes

    def drop(self, now_ns: int, instance: Instance) -> None:
        self.held.pop(instance, None)  # an empty one was never granted
        self.used_bytes[instance.buffer.tier] -= self.held_bytes[instance.buffer.name]
        if self.is_noted:
            self._note(now_ns, instance, -1)

    def keep_private(self, instance: Instance, stream: str, sign: int) -> None:
        """What was dropped is free for this stream alone; with sign -1, for everybody."""
        private = self._private_bytes[instance.buffer.tier]
        private[stream] = private.get(stream, 0) + sign * self.held_bytes[instance.buffer.name]

    def take_over(self, now_ns: int, instance: Instance, old: Instance) -> None:
        """The bytes are another buffer's."""
        if self.is_noted and old.buffer.kind != instance.buffer.kind:
            self._note(now_ns, old, -1)
            self._note(now_ns, instance, 1)
        self.held.pop(old, None)
        self.held[instance] = None

    def has_room(self, tier: str, node: OpRun) -> bool:
        if self._private_bytes[tier]:
            return node.needs[tier] <= self._free_bytes(tier, node.op.stream)
        return node.needs[tier] + self.used_bytes[tier] <= self.capacity_bytes[tier]

    def _free_bytes(self, tier: str, stream: str) -> int:
        """For an op of this stream."""
        free_bytes = self.capacity_bytes[tier] - self.used_bytes[tier]
        if private := self._private_bytes[tier]:
            free_bytes -= sum(size for owner, size in private.items() if owner != stream)
        return free_bytes

    def full(self, tier: str, node: OpRun) -> TierFullError:
        """Nothing runs, and this op is next in the tier and does not fit."""
        held = [x.buffer for x in self.held if x.buffer.tier == tier]
        largest = sorted(((self.held_bytes[b.name], b.name) for b in held), reverse=True)[:5]
        return TierFullError(
            f"op {node.op.key!r} of step {node.step} wants {node.needs[tier]:,} bytes in tier {tier!r}, but "
            f"{self._free_bytes(tier, node.op.stream):,} of {self.capacity_bytes[tier]:,} are free and nothing that "
            f"still runs will free more; held by {', '.join(f'{n} {size:,} B' for size, n in largest) or 'nothing'}. "
            f"Raise the capacity of {tier!r}, or choose a plan that keeps less there"
        )

    def _note(self, now_ns: int, instance: Instance, sign: int) -> None:
        b = instance.buffer
        if b.size_bytes:
            self.events.append(MemoryEvent(now_ns, b.tier, b.kind, sign * self.held_bytes[b.name]))
