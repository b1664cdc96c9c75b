"""Buffers and ops in one step of an execution, as bodies and the executor see them.

ExecutionError(RuntimeError)   the schedule was not executed to its end
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tierplan.runtime.execution.device import Event
from tierplan.sim.schedule import Buffer, Op


class ExecutionError(RuntimeError):
    """The schedule was not executed to its end."""


@dataclass(eq=False, slots=True)
class Instance:
    """One buffer in one step, or one that was there before: what is granted, filled, read and freed."""

    buffer: Buffer
    """Under the name of the step that wrote it."""
    value: object = None
    """What the bodies keep in it."""
    num_unissued: int = 0
    """Readers that have not been put on their stream yet."""
    private_to: str | None = None
    """The one stream of the device that writes and reads it, if there is one."""
    is_reused: bool = False
    outside_bytes: int = 0
    """Of it, in its tier, outside the memory that the bodies have there for such buffers."""
    outlives: bool = False
    """It is an initial buffer of the step that follows the last opened one, so it is not freed yet."""
    over: Instance | None = field(default=None, repr=False)
    """The instance whose bytes this one takes over, until its writer has ended."""
    writer: OpRun | None = field(default=None, repr=False)
    readers: list[OpRun] = field(default_factory=list, repr=False)
    """Ops that have not ended yet; who writes over it waits for them."""

    is_free: bool = False

    @property
    def is_dead(self) -> bool:
        return not self.readers and not self.is_reused and not self.outlives and not self.is_free

    @property
    def is_dead_to_its_stream(self) -> bool:
        """What comes behind on the one stream that has used it may have its memory."""
        is_unused = self.num_unissued == 0 and not self.is_reused and not self.outlives and not self.is_free
        return is_unused and self.private_to is not None and self.outside_bytes > 0


@dataclass(eq=False, slots=True)
class Call:
    """One op in one step, as its body sees it."""

    op: Op
    step: int
    reads: tuple[Instance, ...]
    writes: tuple[Instance, ...]
    at_end: list[Callable[[], None]] = field(default_factory=list, repr=False)
    """Called when what the body has put on a stream is done. Must be quick."""


@dataclass(eq=False, slots=True)
class OpRun(Call):
    """As the executor sees it."""

    waiting_for: int = 0
    followers: list[OpRun] = field(default_factory=list, repr=False)
    needs: Mapping[str, int] = field(default_factory=dict)
    grants_left: int = 0
    is_reached: bool = False
    is_eligible: bool = False
    is_started: bool = False
    has_ended: bool = False
    free_ns: int = 0
    ready_ns: int = 0
    granted_ns: int = 0
    start_ns: int = 0
    is_issued: bool = False
    """Its body has put it on a stream of the device, where it may not be done yet."""
    behind: list[OpRun] = field(default_factory=list, repr=False)
    """Ops that were issued, and that its stream has to wait for."""
    begun: Event | None = None
    ended: Event | None = None
    freed: list[Instance] = field(default_factory=list, repr=False)
    """What its stream has back already, and others when it has ended."""
    end_ns: int = 0
    coreless_ns: int = 0
    late_ns: int = 0

    def take_times(self, zero_ns: int, last_end_ns: int) -> None:
        """Of an op that was issued and has ended, by its events; times count from the first one."""
        assert self.begun is not None
        assert self.ended is not None
        self.free_ns = max(self.free_ns, last_end_ns)
        self.ready_ns = max(self.ready_ns, *(earlier.end_ns for earlier in self.behind), 0)
        self.start_ns = max(self.begun.time_ns() - zero_ns, self.free_ns, self.ready_ns)
        self.end_ns = max(self.ended.time_ns() - zero_ns, self.start_ns)
        self.granted_ns = min(max(self.granted_ns, self.free_ns, self.ready_ns), self.start_ns)
        self.behind = []
