"""What outlives a step (parameters, optimizer states, late gradients) on its way into its tiers, and out of them again.

Shapes: `n` parameters of a unit.

TrainingError(ValueError)   schedule, model and settings do not fit together
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING

import torch
from torch import nn
from xxhash import xxh3_64_hexdigest

from tierplan.hwmodels.names import NVME
from tierplan.runtime.autograd.units import FlatParameters, ModelUnit
from tierplan.runtime.execution.executor import Executor
from tierplan.runtime.execution.instances import Instance
from tierplan.runtime.execution.ops import Bodies
from tierplan.runtime.execution.values import BufferValue, content_of, states_of, value_of
from tierplan.runtime.memory.arena import PAGE_BYTES, map_host
from tierplan.runtime.memory.files import Folders, paths_of
from tierplan.runtime.memory.store import Extent, Store, measure_weights
from tierplan.runtime.ranks.alike import check_alike
from tierplan.runtime.ranks.collectives import joined, own_part
from tierplan.sim.contents import CastGradients, Clip, Content, Frozen, Gradients, Params
from tierplan.sim.schedule import Schedule

if TYPE_CHECKING:
    from tierplan.runtime.checkpoint.durability import Durability

Weights = Callable[[ModelUnit], Sequence[torch.Tensor]]
"""A unit's parameters, in the order of `ModelUnit.all_parameters`."""


class TrainingError(ValueError):
    """Schedule, model and settings do not fit together."""


def check_count(name: str, num_steps: int | None, least: int) -> None:
    """Raises `TrainingError` unless this is a whole number of so many steps or more, or None."""
    if num_steps is not None and (not isinstance(num_steps, Integral) or num_steps < least):
        raise TrainingError(f"{name} is {num_steps!r}; give a whole number of {least} or more steps")


def check_begun(has_begun: bool) -> None:
    """Raises `TrainingError` before the first `run`."""
    if not has_begun:
        raise TrainingError("nothing has been trained yet, and the model is as it was; call run first")


def _bytes_sum(tensor: torch.Tensor) -> str:
    return xxh3_64_hexdigest(tensor.detach().to("cpu").reshape(-1).view(torch.uint8).numpy().data)


def _old_gradients(name: str, by_content: Mapping[Content, Instance]) -> Instance | None:
    """Those of the step before, of a unit whose update is late."""
    return by_content.get(Gradients(name, 0)) or by_content.get(CastGradients(name))


def open_store(
    schedule: Schedule,
    nvme_dir: Folders | None,
    weights: Sequence[float],
    *,
    durability: Durability | None,
    commits_beside_steps: bool,
) -> Store | None:
    """The files of the NVMe tier, with room for what the schedule and its commits need; None if it has no such tier."""
    stored = [b for b in schedule.buffers if b.tier == NVME and b.reuses is None]
    if not stored:
        return None
    if nvme_dir is None:
        raise TrainingError("the schedule uses the NVMe tier; name a folder for it (nvme_dir)")
    folders, resumed = paths_of(nvme_dir), durability.last if durability is not None else None
    pattern = resumed.stripes if resumed is not None else ()
    weights = weights or (measure_weights(folders) if len(folders) > 1 and not pattern else ())
    store = Store(folders, weights=weights, pattern=pattern, run_id=durability.run_id if durability is not None else "")
    capacity_bytes = next(t.capacity_bytes for t in schedule.tiers if t.name == NVME)
    needed = min(capacity_bytes, sum(b.size_bytes for b in stored))
    try:
        if durability is not None:  # regions for what is committed, and for what is being committed
            needed += (1 + commits_beside_steps) * sum(b.size_bytes for b in stored if b.initial) + 2 * PAGE_BYTES
            store.claim(durability.run_id, str(durability.folder.resolve()))
        if resumed is not None:
            store.expect(resumed.store_bytes)
        store.reserve(needed)
    except BaseException:
        store.close(remove=durability is None)
        raise
    return store


@dataclass(eq=False)
class Placement:
    """The initial buffers of an execution and the bytes in them. Nothing may run meanwhile."""

    executor: Executor
    bodies: Bodies
    model: nn.Module
    late_updates: frozenset[str] = frozenset()
    """Units whose last update is still to come when a step has ended."""
    _restored: dict[str, str] = field(default_factory=dict, repr=False)
    """By name of a parameter that was put back into the model, the checksum of its bytes."""

    def __post_init__(self) -> None:
        self._owners = [
            (module._parameters, key, p, f"{name}.{key}".lstrip("."))
            for name, module in self.model.named_modules()
            for key, p in module._parameters.items()
        ]

    def run(self, num_steps: int) -> None:
        """Runs so many steps more."""
        self.take_back()
        self.executor.run(num_steps)

    # ---- in ----

    def begin(self, weights: Weights | None, *, is_resumed: bool) -> None:
        """Moves the model's parameters into their tiers and makes the optimizer states, unit by unit; of a run that
        is resumed, what is not trained, which no commit holds: the rest comes from one.

        `weights` gives all of a unit's parameters where the model has none in memory. It has none afterwards. Raises
        `UnlikeRanksError` unless all ranks begin with the same bytes.
        """
        by_content, ranks = self._by_content(), self.bodies.ranks
        sums = {name: _bytes_sum(t) for name, t in self.model.named_buffers() if ranks is not None and not t.is_meta}
        for unit in self.bodies.units:
            both: Sequence[torch.Tensor] = ()
            if unit.frozen.parameters or not is_resumed:
                both = weights(unit) if weights is not None else [p.detach() for _, p in unit.all_parameters]
            trained, frozen = () if is_resumed else both[: len(unit.parameters)], both[len(unit.parameters) :]
            if ranks is not None:
                names = [name for name, _ in (unit.frozen.parameters if is_resumed else unit.all_parameters)]
                sums |= dict(zip(names, map(_bytes_sum, (*trained, *frozen)), strict=True))
            flat_n = torch.cat([t.reshape(-1).to("cpu", self.bodies.dtype) for t in trained or [torch.empty(0)]])
            memory = torch.cat([t.to("cpu").reshape(-1).view(torch.uint8) for t in frozen or [torch.empty(0)]])
            del both, trained, frozen
            for flat in unit.parts:
                flat.unbind()
            if unit.frozen.parameters:
                self.bodies.frozen_sums[str(Frozen(unit.name))] = xxh3_64_hexdigest(memory.numpy().data)
                self.fill(by_content[Frozen(unit.name)], memory)
            del memory
            home = by_content.get(Params(unit.name))
            if is_resumed or not unit.num_trained or home is None:  # or another rank has it
                continue
            own = own_part(home, unit, ranks)
            self.fill(home, flat_n[own.start : own.stop].view(torch.uint8))
            for content in states_of(unit.name, by_content):
                layout = self.bodies.layouts[unit.name]
                part = self.bodies.states_part(content)
                start = map_host(size_bytes := layout.size_bytes(part))[:size_bytes]
                for view in layout.views(start, part) if layout.has_master else ():
                    view.tensors["master"].copy_(flat_n[view.begin :][: view.length])
                self.fill(by_content[content], start)
            if (grads := _old_gradients(unit.name, by_content)) is not None:
                grads.value = BufferValue(self.bodies.places.allocate(grads), is_absent=True)
        if (clip := by_content.get(Clip())) is not None and not is_resumed:
            clip.value = BufferValue(self.bodies.places.allocate(clip), is_absent=True)
        sums = {f"the checksum of {name!r} in the model": xxh3 for name, xxh3 in sums.items()}
        check_alike(ranks, sums, "call torch.manual_seed before the model is made, or load the same weights on all")

    def fill(self, instance: Instance, memory: torch.Tensor) -> None:
        """Gives an initial buffer these bytes, in its tier."""
        if memory.numel() != instance.buffer.size_bytes:
            raise TrainingError(
                f"buffer {instance.buffer.name!r} is declared with {instance.buffer.size_bytes:,} bytes, but the model "
                f"needs {memory.numel():,} there; make the schedule from this model"
            )
        place = self.bodies.places.allocate(instance)
        instance.value = BufferValue(place)
        if isinstance(place, Extent):
            self.bodies.places.drives.write(place, memory, will_be_committed=True)
        else:
            place.data.copy_(memory)

    # ---- out ----

    def restore_model(self) -> None:
        """Every parameter is in ordinary memory again."""
        for unit in self.bodies.units:
            for part, kind in zip(unit.parts, (Params, Frozen), strict=True):
                if part.forms.size_bytes:
                    flat = self.content(kind(unit.name))
                    part.unbind()
                    for (name, p), view in zip(part.parameters, part.forms.split(flat), strict=True):
                        p.data = view.clone()
                        self._restored[name] = _bytes_sum(p)

    def take_back(self) -> None:
        """Parameters are in the schedule's tiers alone again, where they were restored. Raises `TrainingError` where
        somebody has changed them meanwhile, and leaves them so."""
        if not self._restored:
            self._check_memory()
        named = dict(self.model.named_parameters()) if self._restored else {}
        for name, restored in self._restored.items():
            if name not in named or _bytes_sum(named[name]) != restored:
                raise TrainingError(
                    f"parameter {name!r} was changed after restore_model, but training goes on from the schedule's own "
                    "weights; call restore_model again to drop the change, or make a new Trainer of the changed model"
                )
        for part in (part for unit in self.bodies.units if self._restored for part in unit.parts):
            part.unbind()
        self._restored.clear()

    def _check_memory(self) -> None:
        """Raises `TrainingError` where a parameter is another, or has other memory, than the schedule gave it."""
        changed = next((name for owner, key, p, name in self._owners if owner.get(key) is not p), None)
        parts = (part for unit in self.bodies.units for part in unit.parts)
        if changed := changed or next(filter(None, map(FlatParameters.with_other_memory, parts)), None):
            raise TrainingError(
                f"parameter {changed!r} was given other memory while its weights are in the schedule's tiers, from "
                "which training goes on; call restore_model first, and make a new Trainer of the changed model"
            )

    def content(self, content: Params | Frozen) -> torch.Tensor:
        """A copy of a unit's parameters, trained or frozen, in host memory; uint8.

        A unit whose last update is still to come is given as it is after that. Raises `ExecutionError` where a step
        was half updated.
        """
        self.bodies.places.check_whole(self.executor.num_steps_done)
        is_to_come = isinstance(content, Params) and content.unit in self.late_updates
        return self._after_late_update(content.unit) if is_to_come else self._as_it_is(content)

    def _by_content(self) -> dict[Content, Instance]:
        return {content_of(x): x for x in self.executor.carried.values()}

    def _as_it_is(self, content: Content) -> torch.Tensor:
        by_content, ranks = self._by_content(), self.bodies.ranks
        if ranks is not None and isinstance(content, Params) and content.unit in self.bodies.stages:
            unit, source = self.bodies.unit_of(content), self.bodies.stages[content.unit]
            memory = torch.empty(unit.num_trained * unit.dtype.itemsize, dtype=torch.uint8)
            if source == ranks.rank:
                memory = self.bodies.places.read(by_content[content])
            ranks.broadcast(memory, source)
            return memory
        instance = by_content[content]
        memory = self.bodies.places.read(instance)
        if not isinstance(content, Params) or ranks is None:
            return memory
        unit = self.bodies.unit_of(content)
        is_whole = len(own_part(instance, unit, ranks)) == unit.num_trained
        return memory if is_whole else joined(memory.view(unit.dtype), unit, ranks).view(torch.uint8)

    def _after_late_update(self, name: str) -> torch.Tensor:
        """A copy of a unit's parameters with the update that the next step would begin with."""
        bodies, by_content = self.bodies, self._by_content()
        unit, grads = bodies.unit_of(Params(name)), _old_gradients(name, by_content)
        assert grads is not None, f"a late update of {name} has gradients"
        params = bodies.places.read(by_content[Params(name)]).view(bodies.dtype)
        part = own_part(grads, unit, bodies.ranks)
        own = params if len(params) == len(part) else params[part.start : part.stop]
        if not value_of(grads).is_absent:
            is_cast, clip = isinstance(content_of(grads), CastGradients), by_content.get(Clip())
            gradient = bodies.places.read(grads).view(torch.float32 if is_cast else bodies.dtype)
            self._update(name, own, gradient, part, None if clip is None else bodies.clip_of(clip))
        if bodies.ranks is not None and len(own) < unit.num_trained:
            params = joined(own, unit, bodies.ranks)
        return params.view(torch.uint8)

    def _update(
        self, name: str, own: torch.Tensor, gradient: torch.Tensor, part: range, clip: torch.Tensor | None
    ) -> torch.Tensor:
        """Updates parameters of a unit by the gradients of the last step; the states that they have then."""
        bodies, by_content = self.bodies, self._by_content()
        layout = bodies.layouts[name]
        parts = {bodies.states_part(content): self._as_it_is(content) for content in states_of(name, by_content)}
        states = layout.join([*parts.values()], [*parts]) if parts else torch.empty(0, dtype=torch.uint8)
        views = list(layout.views(states, part)) if parts else []
        bodies.update(name, own, gradient.to(bodies.dtype), views, part, self.executor.num_steps_done - 1, clip)
        return states

    def make_update(self, name: str, gradient: torch.Tensor, clip: torch.Tensor | None) -> None:
        """The update of a unit that a run of another plan had still to make, by the gradients of its last step; on one
        device."""
        bodies, by_content = self.bodies, self._by_content()
        unit, layout, home = bodies.unit_of(Params(name)), bodies.layouts[name], by_content[Params(name)]
        params = bodies.places.read(home).view(bodies.dtype)
        states = self._update(name, params, gradient, range(unit.num_trained), clip)
        updated = {home: params.view(torch.uint8)}
        updated |= {by_content[c]: layout.cut(states, bodies.states_part(c)) for c in states_of(name, by_content)}
        for instance, memory in updated.items():
            bodies.places.release(instance)
            self.fill(instance, memory)
