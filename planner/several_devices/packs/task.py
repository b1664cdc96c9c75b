"""One pack's turn on one device, as what is lowered turn by turn knows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tierplan.sim.builder import Said
from tierplan.sim.contents import pack_name
from tierplan.sim.workloads.workload import Unit


@dataclass
class Task:
    """One pack's forward or backward on one device."""

    phase: str
    """`fwd` or `bwd`; the last backward pack's turn does its forward too."""
    first: int
    units: tuple[Unit, ...]
    device: int
    is_last: bool = False
    """The pack with the loss."""
    batches: Sequence[int] = ()
    is_final: bool = False
    """Backward in the last round: the pack is updated when its gradients have arrived."""
    computes: list[int] = field(default_factory=list)
    """The last compute op of each micro-batch."""
    again: list[int] = field(default_factory=list)
    """The recomputation of each micro-batch, in backward."""
    params: list[int] = field(default_factory=list)
    """Buffers of its parameters on the device."""
    grads: dict[str, int] = field(default_factory=dict)
    """Buffers with gradients on the device, in backward: the pack's own (`""`), and by unit what it adds to others'."""
    sent: list[int] = field(default_factory=list)
    """The ops that take those to host memory."""
    gone: int = -1
    """The op that ends the turn, when it has been added."""
    left: Task | None = None
    """The one that the device had before."""

    @property
    def end(self) -> int:
        return self.first + len(self.units)

    @property
    def pack(self) -> Said:
        return pack_name, self.units[0].name, self.units[-1].name
