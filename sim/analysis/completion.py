"""Whether a schedule completes, and where it gets stuck if it does not. No durations are needed.

By the four rules, the set of ops that end does not depend on durations (docs/design.md has the proof). So executing the
ops in any order that the rules allow answers the question, for the simulator and for the hardware.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from tierplan.sim.columns import ScheduleColumns, columns_of
from tierplan.sim.compiled.graph_columns import GraphColumns, graph_columns
from tierplan.sim.compiled.rules import Stuck, execute, no_time, stuck
from tierplan.sim.schedule import Schedule


class SimulationError(RuntimeError):
    """The schedule could not be simulated to its end."""


@dataclass(eq=False)
class OutOfMemory(SimulationError):
    """An op waits for memory that nothing will free: with this order, the tier is too small."""

    columns: ScheduleColumns = field(repr=False)
    """The schedule that does not complete."""
    stuck: Stuck

    @cached_property
    def op(self) -> str | None:
        """The op that waits in vain; None where already what is there before the step does not fit."""
        return self.columns.labels().ops[self.stuck.op].key if self.stuck.op >= 0 else None

    @property
    def tier(self) -> str:
        return self.columns.tiers[self.stuck.tier].name

    @property
    def wanted_bytes(self) -> int:
        """By the op, or by all that is there before the step."""
        return self.stuck.wanted_bytes

    @property
    def free_bytes(self) -> int:
        """For the op, or the whole capacity for what is there before the step."""
        return self.stuck.free_bytes

    @property
    def capacity_bytes(self) -> int:
        return self.columns.tiers[self.stuck.tier].capacity_bytes

    @cached_property
    def holders(self) -> tuple[tuple[str, int], ...]:
        """Buffers held in the tier, by name and bytes, largest first."""
        return _holders(self.columns, self.stuck.tier)

    @cached_property
    def needed_bytes(self) -> int | None:
        """Smallest capacity of the tier at which the schedule completes, the other tiers as they are; None if none is.

        Found when it is first asked for, by executing the schedule some tens of times.
        """
        return _smallest_capacity_bytes(graph_columns(self.columns), self.stuck.tier)

    @property
    def short_bytes(self) -> int | None:
        return None if self.needed_bytes is None else self.needed_bytes - self.capacity_bytes

    @cached_property
    def also_short(self) -> str:
        """The tier that is too small where this one has whatever the schedule asks of it; empty where none is."""
        graph = graph_columns(self.columns)
        where = _stuck(_with_capacity(graph, self.stuck.tier, _most_bytes(graph, self.stuck.tier)))
        return "" if where is None else self.columns.tiers[where.tier].name

    @property
    def what(self) -> str:
        """What does not fit where, without who holds the memory and what would do."""
        if self.op is None:
            return (
                f"before its first op, the step holds {self.wanted_bytes:,} bytes in tier {self.tier!r}, which has "
                f"{self.capacity_bytes:,}"
            )
        return (
            f"op {self.op!r} wants {self.wanted_bytes:,} bytes in tier {self.tier!r}, but {self.free_bytes:,} of "
            f"{self.capacity_bytes:,} are free and nothing that still runs will free more"
        )

    def __str__(self) -> str:
        held = ", ".join(f"{name} {size:,} B" for name, size in self.holders[:5])
        if len(self.holders) > 5:
            held += f" and {len(self.holders) - 5} more"
        if self.needed_bytes is None:
            remedy = f"No capacity of {self.tier!r} alone helps: {self.also_short!r} is too small as well"
        else:
            adds = self.op is None and self.needed_bytes > self.wanted_bytes
            this = "With what its ops add, this" if adds else "This"
            remedy = f"{this} schedule completes with {self.needed_bytes:,} bytes there or more"
        return f"{self.what}; held by {held or 'nothing'}. {remedy}; or choose a plan that keeps less there"

    def __reduce__(self) -> tuple[object, ...]:  # without what was derived
        return OutOfMemory, (self.columns, self.stuck)


def completes(schedule: Schedule) -> bool:
    """Whether the schedule completes, for whatever durations."""
    return _stuck(graph_columns(columns_of(schedule))) is None


def check_memory(columns: ScheduleColumns, graph: GraphColumns | None = None) -> None:
    """Raises `OutOfMemory` if the schedule does not complete, for whatever durations; `graph` is its, if at hand."""
    if where := _stuck(graph or graph_columns(columns)):
        raise OutOfMemory(columns, where)


def smallest_capacity_bytes(schedule: Schedule, tier: str) -> int | None:
    """Smallest capacity of `tier` at which the schedule completes, the other tiers as they are; None if none is.

    More memory in a tier never lets fewer ops end, so a binary search finds it to the byte.
    """
    return _smallest_capacity_bytes(graph_columns(columns_of(schedule)), [t.name for t in schedule.tiers].index(tier))


def _smallest_capacity_bytes(graph: GraphColumns, tier: int) -> int | None:
    def is_enough(size_bytes: int) -> bool:
        return _stuck(_with_capacity(graph, tier, size_bytes)) is None

    low, high = int(graph.initial_bytes[tier]), _most_bytes(graph, tier)
    if not is_enough(high):
        return None
    return low + bisect_left(range(low, high), True, key=is_enough)


def _most_bytes(graph: GraphColumns, tier: int) -> int:
    """All that the step holds in the tier and asks of it."""
    return int(graph.initial_bytes[tier]) + int(graph.request_bytes[graph.request_tier == tier].sum())


def _with_capacity(graph: GraphColumns, tier: int, size_bytes: int) -> GraphColumns:
    capacity_bytes = graph.capacity_bytes.copy()
    capacity_bytes[tier] = size_bytes
    return graph._replace(capacity_bytes=capacity_bytes)


def _stuck(graph: GraphColumns) -> Stuck | None:
    return stuck(graph, execute(graph, no_time(len(graph.stream))))


def _holders(columns: ScheduleColumns, tier: int) -> tuple[tuple[str, int], ...]:
    """Buffers held in a tier when all ops that can end have ended, by name and bytes, largest first."""
    graph = graph_columns(columns)
    execution = execute(graph, no_time(columns.num_ops))
    num_ops, num_buffers, takes_over = columns.num_ops, columns.num_buffers, columns.buffer_reuses >= 0
    has_ended = execution.end_ns >= 0
    writer, reader = (np.repeat(np.arange(num_ops), np.diff(lists.begins)) for lists in (columns.writes, columns.reads))
    is_written = np.zeros(num_buffers, np.bool_)
    is_written[columns.writes.items[has_ended[writer]]] = True
    readers_left = np.bincount(columns.reads.items[~has_ended[reader]], minlength=num_buffers)
    request = execution.next_request[tier]
    num_granted = graph.request_op[request] if request >= 0 else num_ops  # ops before this one have what they want here

    is_held = is_written & takes_over
    is_held[columns.writes.items[writer < num_granted]] |= ~takes_over[columns.writes.items[writer < num_granted]]
    is_held[columns.buffer_initial] = True
    is_held[columns.buffer_reuses[takes_over & is_written]] = False
    is_held[graph.is_freed & (is_written | columns.buffer_initial) & (readers_left == 0)] = False
    held = np.flatnonzero(is_held & (graph.buffer_tier == tier) & (graph.held_bytes > 0)).tolist()
    names = columns.labels().buffers
    return tuple(sorted(((names[b].name, int(graph.held_bytes[b])) for b in held), key=lambda h: (-h[1], h[0])))
