"""What a schedule trains: all that the runtime has to know of the step beside its ops and buffers.

A lowering writes it down, the runtime reads it, and the simulator does not look at it. What happens to a saved tensor
is said here and nowhere else: which buffers there are for it follows, for whoever makes and whoever executes them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tierplan.hwmodels.values.records import Whole
from tierplan.sim.workloads.workload import Training, Unit

Action = Literal["keep", "recompute", "host", "nvme"]
"""What happens to a saved tensor between forward and backward."""
Semantics = Literal["in-backward", "exact-clip", "delayed-1"]
"""When updates happen, hence which numbers training gives: see docs/design.md."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensorSpec:
    """A saved tensor of a unit, and what happens to it."""

    size_bytes: Whole
    action: Action


@dataclass(frozen=True, kw_only=True)
class UnitSpec:
    """A unit as the schedule takes it to be: a model whose units are others is refused."""

    name: str
    num_parameters: Whole
    """Those that it owns and trains."""
    frozen_bytes: Whole = 0
    """Of those that it owns and does not train."""
    saved: tuple[SavedTensorSpec, ...] = ()
    """In the order of `Unit.saved`."""
    late_update: bool = False
    """Its update in a step is that of the step before, in time for its forward."""

    @functools.cached_property
    def moved(self) -> tuple[int, ...]:
        """Indices of the saved tensors that go their own way to the host or NVMe, in buffers of their own
        (`contents.SavedActs`). An empty one has nowhere to go."""
        return tuple(k for k, t in enumerate(self.saved) if t.action in ("host", "nvme") and t.size_bytes > 0)

    @functools.cached_property
    def recomputed(self) -> tuple[int, ...]:
        """Indices of those that are dropped, and made again before backward (`contents.RecomputedActs`)."""
        return tuple(k for k, tensor in enumerate(self.saved) if tensor.action == "recompute")

    def all(self, action: Action) -> UnitSpec:
        """The same unit, to all of whose saved tensors this happens."""
        return replace(self, saved=tuple(replace(tensor, action=action) for tensor in self.saved))

    def bytes_of(self, action: Action) -> int:
        """Bytes of the saved tensors with this action."""
        return sum(tensor.size_bytes for tensor in self.saved if tensor.action == action)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpec:
    """One training step."""

    training: Training
    semantics: Semantics
    units: tuple[UnitSpec, ...]

    @property
    def late_updates(self) -> frozenset[str]:
        """Units whose update is made in the next step, with the numbers of one that is made at once."""
        return frozenset(unit.name for unit in self.units if unit.late_update)

    @property
    def updates_of_step_before(self) -> frozenset[str]:
        """Units whose update in a step takes the gradients of the step before."""
        return frozenset(unit.name for unit in self.units if self.semantics == "delayed-1" or unit.late_update)


def unit_spec(unit: Unit, actions: Iterable[Action] | Action, *, late_update: bool = False) -> UnitSpec:
    """The unit with what happens to what it saves: one action for all, or one for each."""
    each: Sequence[Action] = [actions] * len(unit.saved) if isinstance(actions, str) else tuple(actions)  # type: ignore[list-item]
    return UnitSpec(
        name=unit.name,
        num_parameters=unit.num_trained,
        frozen_bytes=unit.frozen_bytes,
        saved=tuple(
            SavedTensorSpec(size_bytes=tensor.size_bytes, action=action)
            for tensor, action in zip(unit.saved, each, strict=True)
        ),
        late_update=late_update,
    )
