"""Commits a run's state and finds it again: what outlives a step, from whatever tier and to whatever tier.

Contents are committed by name, so a run may be resumed on another schedule of the same training.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tierplan.hwmodels.names import NVME
from tierplan.runtime.checkpoint.commits import Commit, CommitError, CommitLog, Stored, check_settings
from tierplan.runtime.execution.executor import Instance
from tierplan.runtime.execution.ops import Bodies
from tierplan.runtime.execution.state_parts import cut, join, states_of
from tierplan.runtime.execution.values import Held, content_of, held_of
from tierplan.runtime.memory.arena import PAGE_BYTES, map_host
from tierplan.runtime.memory.store import Extent, Store
from tierplan.sim.contents import States

__all__ = ["Durability"]

Fill = Callable[[Instance, torch.Tensor], None]
"""Gives an instance these bytes, in its tier."""


class Durability:
    """The commits of one run, made and resumed."""

    def __init__(self, folder: str | os.PathLike[str], settings: Mapping[str, Any], *, resume: bool) -> None:
        """Raises `CommitError` if the folder holds a run that is not to be resumed, or of other settings."""
        self._log = CommitLog(folder)
        self.folder = Path(folder)
        self._settings = settings
        self.last = self._log.last()
        """The last commit."""
        self.run_id = os.urandom(8).hex()
        self._seal: Extent | None = None
        if self.last is not None:
            if not resume:
                raise CommitError(
                    f"{folder} holds a run that was committed after {self.last.num_steps} steps; resume it, or give "
                    "another folder"
                )
            check_settings(self.last, settings)
            self.run_id = self.last.run_id

    def commit(
        self,
        num_steps: int,
        carried: Mapping[str, Instance],
        bodies: Bodies,
        *,
        losses: tuple[float, ...],
        rng: tuple[torch.Tensor, ...],
    ) -> None:
        """Makes the state after so many steps the one to resume from. Nothing runs meanwhile."""
        contents: dict[str, Stored] = {}
        resident: dict[str, Callable[[], torch.Tensor]] = {}
        extents: set[Extent] = set()
        for instance in carried.values():
            held, content, size_bytes = held_of(instance), instance.buffer.content, instance.buffer.size_bytes
            if isinstance(held.place, Extent):
                extents.add(held.place)
                contents[content] = Stored(size_bytes=size_bytes, offset_bytes=held.place.offset_bytes, in_store=True)
            elif held.is_absent:
                contents[content] = Stored(size_bytes=size_bytes, offset_bytes=0, in_store=False, is_absent=True)
            else:
                resident[content] = functools.partial(bodies.read, instance)
        seal = self._write_seal(num_steps, bodies) if bodies.store is not None else None
        contents.update(self._log.write_resident(num_steps, resident))
        self.last = Commit(
            num_steps=num_steps,
            run_id=self.run_id,
            contents=contents,
            settings=self._settings,
            losses=losses,
            seal=seal,
            stripes=bodies.store.pattern if bodies.store is not None else (),
            rng=tuple(s.numpy().tobytes().hex() for s in rng),
        )
        self._log.write(self.last)
        if self._seal is not None:
            bodies.commit({*extents, self._seal})

    def _write_seal(self, num_steps: int, bodies: Bodies) -> Stored:
        """Everything in the store is on the drives when this returns, with a page that says of which run and step."""
        store = bodies.store
        assert store is not None
        self._seal = store.allocate(PAGE_BYTES)
        store.write(self._seal, _seal_page(self.run_id, num_steps))
        store.sync()
        return Stored(size_bytes=PAGE_BYTES, offset_bytes=self._seal.offset_bytes, in_store=True)

    def place(self, carried: Mapping[str, Instance], bodies: Bodies, fill: Fill) -> tuple[torch.Tensor, ...]:
        """Gives the initial buffers of a schedule the last commit's bytes; the states of PyTorch's generators, if any.

        What was and is to be on the NVMe tier stays where it lies.
        """
        commit, store = self.last, bodies.store
        assert commit is not None
        self._check_seal(commit, bodies)
        taken: dict[str, Extent] = {}
        for content, where in commit.contents.items():
            if where.in_store:
                if store is None:
                    raise CommitError(f"{content!r} was committed on the NVMe tier, which this schedule does not use")
                taken[content] = Extent(where.offset_bytes, where.size_bytes)
                store.allocate_at(taken[content])
        for instance in carried.values():
            content, size_bytes = instance.buffer.content, instance.buffer.size_bytes
            found = commit.contents.get(content)
            states = content_of(instance)
            if found is None and isinstance(states, States):
                fill(instance, self._cut_otherwise(states, bodies))
                continue
            if found is None or found.size_bytes != size_bytes:
                raise CommitError(f"the last commit has no {content!r} of {size_bytes:,} bytes; plan again")
            if found.is_absent:
                instance.value = Held(bodies.allocate(instance), is_absent=True)
            elif found.in_store and instance.buffer.tier == NVME:
                instance.value = Held(taken[content])
            else:
                fill(instance, self._committed(content, store))
        bodies.committed = {*taken.values(), *([self._seal] if self._seal else [])}
        return tuple(torch.frombuffer(bytearray.fromhex(s), dtype=torch.uint8) for s in commit.rng)

    def _committed(self, content: str, store: Store | None) -> torch.Tensor:
        """The bytes of one content of the last commit, in host memory."""
        assert self.last is not None
        where = self.last.contents[content]
        if not where.in_store:
            return self._log.read_resident(self.last, content)
        assert store is not None
        memory = map_host(where.size_bytes)[: where.size_bytes]
        store.read(Extent(where.offset_bytes, where.size_bytes), memory)
        return memory

    def _cut_otherwise(self, content: States, bodies: Bodies) -> torch.Tensor:
        """Optimizer states, or a part of them, from a commit in which the unit's states were cut otherwise."""
        assert self.last is not None
        committed = states_of(content.unit, self.last.contents)
        if not committed:
            raise CommitError(f"the last commit has no states of unit {content.unit!r}; plan again")
        num_parameters = next(u.num_parameters for u in bodies.units if u.name == content.unit)
        whole = join([self._committed(str(part), bodies.store) for part in committed], num_parameters)
        return cut(whole, content.parameters(num_parameters), num_parameters)

    def _check_seal(self, commit: Commit, bodies: Bodies) -> None:
        store = bodies.store
        if commit.seal is None or store is None:
            return
        self._seal = Extent(commit.seal.offset_bytes, commit.seal.size_bytes)
        store.allocate_at(self._seal)
        page = map_host(PAGE_BYTES)
        store.read(self._seal, page)
        if not torch.equal(page, _seal_page(commit.run_id, commit.num_steps)):
            raise CommitError(
                f"the files in the NVMe folder are not those of the last commit ({commit.num_steps} steps) in "
                f"{self.folder}; give the folder that the run was made with"
            )


def _seal_page(run_id: str, num_steps: int) -> torch.Tensor:
    text = f"tierplan run {run_id} after {num_steps} steps".encode()
    page = map_host(PAGE_BYTES)
    page[: len(text)].copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    return page
