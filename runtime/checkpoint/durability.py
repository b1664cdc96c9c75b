"""Commits a run's state and finds it again: what outlives a step, from whatever tier and to whatever tier.

Contents are committed by name, so a run may be resumed on another schedule of the same training.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from tierplan.hwmodels.names import HOST, NVME
from tierplan.runtime.checkpoint.commits import (
    Commit,
    CommitError,
    CommitLog,
    CommitLogOfRank,
    Stored,
    check_same_settings,
    stamp,
)
from tierplan.runtime.checkpoint.snapshot import Snapshot
from tierplan.runtime.execution.instances import Instance
from tierplan.runtime.execution.ops import Bodies
from tierplan.runtime.execution.placement import Placement
from tierplan.runtime.execution.threads import limit_this_thread
from tierplan.runtime.execution.values import BufferValue, content_of, states_of, value_of
from tierplan.runtime.memory import files
from tierplan.runtime.memory.arena import PAGE_BYTES, Block, Pool, map_host, padded
from tierplan.runtime.memory.files import Folder
from tierplan.runtime.memory.store import DamageError, Extent, Store
from tierplan.runtime.ranks.alike import check_alike
from tierplan.runtime.ranks.collectives import own_part, shard_part
from tierplan.runtime.ranks.group import Ranks
from tierplan.sim.contents import NORM_BYTES, CastGradients, Clip, Content, Frozen, Gradients, Params, States
from tierplan.sim.schedule import Buffer, Schedule

OF_LATE_UPDATES = (Gradients, CastGradients, Clip)
"""What such an update has to wait for in the next step."""


class Durability:
    """The commits of one run, made and resumed."""

    def __init__(
        self, folder: Folder, settings: Mapping[str, Any], *, resume: bool, ranks: Ranks | None = None
    ) -> None:
        """Holds the folder until `close`. Raises `CommitError` if it holds a run that is not to be resumed, or of other
        settings, and `StoreError` if another run holds the folder."""
        self._log = _log_in(folder, ranks)
        self.folder = self._log.folder
        self._settings = settings
        self._lock = self._log.lock()
        self.close = weakref.finalize(self, os.close, self._lock)
        """Lets another run have the folder."""
        try:
            self.last = self._log.last()
            """The last commit."""
            if self.last is not None and not resume:
                raise CommitError(
                    f"{self.folder} holds a run that was committed after {self.last.num_steps} steps; resume it, or "
                    "give another folder"
                )
            if self.last is not None:
                check_same_settings(self.last, settings, num_ranks=1 if ranks is None else ranks.size)
        except BaseException:
            self.close()
            raise
        self.run_id = os.urandom(8).hex() if self.last is None else self.last.run_id
        self._seal: Extent | None = None
        self._copies = Pool(map_host, 0)
        """Of what changed while a commit was made."""
        self._has_failed = False
        self._thread = ThreadPoolExecutor(1, "tierplan commit", initializer=limit_this_thread, initargs=(1,))
        self._begun: Future[None] | None = None
        """A commit that is being made."""

    def check_room(self, placement: Placement, *, num_commits: int, num_ranks: int) -> None:
        """Raises `StoreError` unless the folder has room for what commits write: all that steps carry on in memory, of
        each rank. The commit before stays until the next one counts."""
        frozen = placement.bodies.frozen_sums
        buffers = [x.buffer for x in placement.executor.carried.values() if x.buffer.content not in frozen]
        one_file = PAGE_BYTES + sum(padded(b.size_bytes) for b in buffers if b.tier != NVME)
        num_files = 1 if self.last is not None or num_commits == 1 else 2
        files.check_room(self.folder, num_ranks * num_files * one_file, "the commits need", "or give another folder")

    def begin_commit(
        self, placement: Placement, *, losses: tuple[float, ...], rng: tuple[torch.Tensor, ...], read_back: bool
    ) -> None:
        """Takes note of the state, while nothing runs and when the commit before is done. Makes that the state to
        resume from beside the steps that follow; what changes meanwhile is copied where host memory has room.

        With `read_back`, what lies on the NVMe tier is read and compared before it counts.
        """
        self.end_commit()
        bodies, num_steps, carried = placement.bodies, placement.executor.num_steps_done, placement.executor.carried
        if self._has_failed:
            raise CommitError(f"a commit in {self.folder} has failed; resume from the last one that did not")
        if self.last is not None and self.last.num_steps == num_steps:
            return  # its files stand under this number
        self._has_failed = True
        contents, blocks, places = _held(_by_last_use(carried, bodies.schedule), bodies)
        ledger = placement.executor.ledger
        spare_bytes = ledger.capacity_bytes.get(HOST, 0) - ledger.peak_bytes.get(HOST, 0)
        spare_bytes -= sum(x.buffer.size_bytes for x in carried.values() if value_of(x).gradients is not None)
        self._copies.capacity_bytes = spare_bytes = max(spare_bytes, 0)
        snapshot = Snapshot(blocks, spare_bytes, self._copies)
        store = bodies.places.store
        bodies.places.keep(set(places.values()), snapshot)

        def finish() -> None:
            try:
                contents.update(self._log.write_resident(self.run_id, num_steps, snapshot.read()))
            finally:
                snapshot.end()
            seal = None
            if store is not None:
                seal = self._seal_store(num_steps, store, places.values(), read_back=read_back)
                contents.update({content: _stored(place, store) for content, place in places.items()})
            self._log.check(self._lock)
            self.last = Commit(
                num_steps=num_steps,
                run_id=self.run_id,
                contents=contents,
                settings=self._settings,
                losses=losses,
                seal=seal,
                frozen=dict(bodies.frozen_sums),
                folders=tuple(self._log.noted(path.parent) for path in store.paths) if store else (),
                stripes=store.pattern if store else (),
                store_bytes=store.size_bytes if store else 0,
                rng=tuple(s.numpy().tobytes().hex() for s in rng),
            )
            self._log.write(self.last)
            if self._seal is not None:
                bodies.places.commit({*places.values(), self._seal})
            self._has_failed = False
            snapshot.prepare_next()

        self._begun = self._thread.submit(finish)

    def end_commit(self, *, waits: bool = True) -> None:
        """Returns when what was begun is committed; raises what went wrong, once. Unless it `waits`, at once."""
        if self._begun is not None and (waits or self._begun.done()):
            begun, self._begun = self._begun, None
            begun.result()

    def add_failure(self, error: BaseException) -> None:
        """Notes in the error that ends a run what went wrong with a commit meanwhile."""
        if self._begun is not None and (other := self._begun.exception()) is not None:
            error.add_note(f"the commit that was being made meanwhile failed, too: {other}")

    def shut_down(self) -> None:
        """Returns when what was begun has ended. No more is committed."""
        self._thread.shutdown()

    def _seal_store(self, num_steps: int, store: Store, extents: Iterable[Extent], *, read_back: bool) -> Stored:
        """When this returns, all that was written to the store is on the drives, in the files that are at their paths,
        with a page that says of which run and step; and these extents have checksums."""
        before, self._seal = self._seal, store.allocate(PAGE_BYTES)
        page = map_host(PAGE_BYTES)
        page.copy_(torch.frombuffer(bytearray(stamp("tier", self.run_id, num_steps)), dtype=torch.uint8))
        store.write(self._seal, page, will_be_committed=True)
        store.sync()
        store.check()
        for extent in (*([before] if before else []), self._seal):
            store.verify(extent)
        for extent in extents:
            if read_back or store.checksum(extent) is None:  # nobody knew that this step would be the last
                store.verify(extent)
        return _stored(self._seal, store)

    def place(self, placement: Placement) -> tuple[torch.Tensor, ...]:
        """Gives the initial buffers of a schedule the last commit's bytes; the states of PyTorch's generators, if any.

        What was and is to be on the NVMe tier stays where it lies.
        """
        commit, bodies, store = self.last, placement.bodies, placement.bodies.places.store
        assert commit is not None
        self._check_seal(commit, bodies)
        taken: dict[str, Extent] = {}
        for content, where in commit.contents.items():
            if where.in_store:
                if store is None:
                    raise CommitError(
                        f"{content!r} was committed on the NVMe tier, which this schedule does not use; resume with a "
                        "plan that keeps something on NVMe"
                    )
                taken[content] = Extent(where.offset_bytes, where.size_bytes)
                store.allocate_at(taken[content], where.xxh3)
        carried = placement.executor.carried.values()
        sizes_bytes = {x.buffer.content: x.buffer.size_bytes for x in carried}
        for instance in carried:
            content = instance.buffer.content
            committed = commit.contents.get(content)
            if isinstance(content_of(instance), Frozen):  # what was not trained: the model has it
                continue
            is_due = isinstance(content_of(instance), OF_LATE_UPDATES) and placement.late_updates
            if (committed is not None and committed.is_absent) or (is_due and not self._has(content)):
                instance.value = BufferValue(bodies.places.allocate(instance), is_absent=True)
            elif committed is None or self._log.is_of_others or not self._is_cut_so(instance, sizes_bytes):
                placement.fill(instance, self._cut_otherwise(instance, bodies))
            elif committed.in_store and instance.buffer.tier == NVME:
                with self._intact(f"{content!r} of the last commit in {self.folder} is damaged"):
                    bodies.places.drives.verify(taken[content])
                instance.value = BufferValue(taken[content])
            else:
                placement.fill(instance, self._committed(content, bodies, self._log, commit))
        bodies.places.committed = {*taken.values(), *([self._seal] if self._seal else [])}
        if bodies.ranks is None:
            self._make_due(placement)
        return tuple(torch.frombuffer(bytearray.fromhex(s), dtype=torch.uint8) for s in commit.rng)

    def _has(self, content: str) -> bool:
        """Whether it was committed, by any rank."""
        return any(content in commit.contents for _, commit in self._parts())

    def _make_due(self, placement: Placement) -> None:
        """Makes the updates for which gradients were committed that are none of this schedule's late ones."""
        bodies, carried = placement.bodies, {x.buffer.content for x in placement.executor.carried.values()}

        def whole(content: Content, num: int, dtype: torch.dtype) -> torch.Tensor:
            buffer = Buffer(name="due", tier=HOST, size_bytes=num * dtype.itemsize, content=str(content), kind="grads")
            return self._cut_otherwise(Instance(buffer), bodies).view(dtype)

        for unit in bodies.units:
            for content in (Gradients(unit.name, 0), CastGradients(unit.name)):
                name, is_cast = str(content), isinstance(content, CastGradients)
                absent = (commit.contents[name].is_absent for _, commit in self._parts() if name in commit.contents)
                if name in carried or not self._has(name) or any(absent):
                    continue
                clip = None
                if self._has(str(Clip())):
                    clip = whole(Clip(), NORM_BYTES // bodies.dtype.itemsize, bodies.dtype)[0]
                gradient = whole(content, unit.num_trained, torch.float32 if is_cast else bodies.dtype)
                placement.make_update(unit.name, gradient, clip)

    def check_frozen(self, sums: Mapping[str, str]) -> None:
        """Raises `CommitError` unless what the model does not train is what it was in the last commit."""
        assert self.last is not None
        if other := sorted(content for content, xxh3 in sums.items() if self.last.frozen.get(content) != xxh3):
            raise CommitError(
                f"{other[0]} is not what it was in the run that was committed in {self.folder}: the weights that are "
                "not trained are no part of a commit; load those that the run began with"
            )

    def _committed(self, content: str, bodies: Bodies, log: CommitLog, commit: Commit) -> torch.Tensor:
        """The bytes of one content of the last commit, or of another rank's, in host memory."""
        where = commit.contents[content]
        if not where.in_store:
            return log.read_resident(commit, content)
        memory = map_host(where.size_bytes)[: where.size_bytes]
        extent = Extent(where.offset_bytes, where.size_bytes)
        with self._intact(f"{content!r} of the last commit in {self.folder} is damaged"):
            bodies.places.drives.verify(extent)
            bodies.places.drives.read(extent, memory)
        return memory

    @contextmanager
    def _intact(self, otherwise: str, remedy: str = "the run cannot be resumed from it") -> Iterator[None]:
        try:
            yield
        except DamageError as error:
            raise CommitError(f"{otherwise}; {remedy}: {error}") from error

    def _is_cut_so(self, instance: Instance, sizes_bytes: Mapping[str, int]) -> bool:
        """Whether this rank has committed what is to be here, with as many bytes; of states, in the same parts."""
        assert self.last is not None
        content = content_of(instance)
        all_of = states_of(content.unit, sizes_bytes) if isinstance(content, States) else [content]
        there = {str(each): self.last.contents.get(str(each)) for each in all_of}
        return all(where is not None and where.size_bytes == sizes_bytes[each] for each, where in there.items())

    def _cut_otherwise(self, instance: Instance, bodies: Bodies) -> torch.Tensor:
        """What one rank is to have of a unit, from a commit in which states travelled in other parts, or in which the
        work was divided otherwise among ranks."""
        content, lacking_bytes = content_of(instance), instance.buffer.size_bytes
        lacking = CommitError(
            f"the last commit has no {str(content)!r} of {lacking_bytes:,} bytes, or a part of it; plan again"
        )
        if isinstance(content, Clip | CastGradients):  # all ranks have the same, or one has it
            for part in self._parts():
                if str(content) in part[1].contents:
                    return self._committed(str(content), bodies, *part)
        if not isinstance(content, Params | States | Gradients):
            raise lacking
        unit, layout = bodies.unit_of(content), bodies.layouts[content.unit]
        each = unit.dtype.itemsize
        size_bytes = layout.size_bytes(layout.whole) if isinstance(content, States) else unit.num_trained * each

        def names_in(commit: Commit) -> Sequence[Params | States | Gradients]:
            """Empty where another rank has the unit, in a pipeline."""
            there = states_of(unit.name, commit.contents) if isinstance(content, States) else []
            return there or ([content] if str(content) in commit.contents else [])

        def is_whole(commit: Commit) -> bool:
            return sum(commit.contents[str(name)].size_bytes for name in names_in(commit)) == size_bytes

        whole = next((part for part in self._parts() if is_whole(part[1])), None)
        shares = [whole] if whole is not None else [part for part in self._log.parts if names_in(part[1])]
        parts = [self._committed(str(name), bodies, *share) for share in shares for name in names_in(share[1])]
        if sum(map(len, parts)) != size_bytes:
            raise lacking
        if not isinstance(content, States):
            own = own_part(instance, unit, bodies.ranks)
            return torch.cat(parts)[own.start * each : own.stop * each]
        ranges = [
            layout.part(name) if whole is not None else shard_part(name, unit, rank, len(shares))
            for rank, (_, commit) in enumerate(shares)
            for name in states_of(unit.name, commit.contents)
        ]
        return layout.cut(layout.join(parts, ranges), bodies.states_part(content))

    def _parts(self) -> Iterator[tuple[CommitLog, Commit]]:
        """Where the last commit is: this rank's own first, then those of all."""
        if not self._log.is_of_others:
            assert self.last is not None
            yield self._log, self.last
        yield from self._log.parts

    def _check_seal(self, commit: Commit, bodies: Bodies) -> None:
        store = bodies.places.store
        if commit.seal is None or store is None:
            return
        self._seal = Extent(commit.seal.offset_bytes, commit.seal.size_bytes)
        store.allocate_at(self._seal, commit.seal.xxh3)
        wrong = f"the files in the NVMe folder are not those of the last commit ({commit.num_steps} steps)"
        with self._intact(f"{wrong} in {self.folder}", "give the folder that the run was made with"):
            store.verify(self._seal)


def _log_in(folder: Folder, ranks: Ranks | None) -> CommitLog:
    return CommitLog(folder) if ranks is None else CommitLogOfRank(folder, ranks)


def save_copy(folder: Folder, settings: Mapping[str, Any], placement: Placement, losses: tuple[float, ...]) -> None:
    """Makes a folder that holds all of the state after its last step, and nothing elsewhere. Nothing runs meanwhile.
    Ranks, which call this together, each have a part there."""
    bodies, num_steps, carried = placement.bodies, placement.executor.num_steps_done, placement.executor.carried
    bodies.places.check_whole(num_steps)
    check_alike(bodies.ranks, {"the folder of a copy": os.path.realpath(folder)})
    log, run_id = _log_in(folder, bodies.ranks), os.urandom(8).hex()
    with files.held_open(log.lock()):
        contents, blocks, places = _held(carried.values(), bodies)
        stored = (
            (x.buffer.content, [Block(read := bodies.places.read(x), read)])
            for x in carried.values()
            if x.buffer.content in places
        )
        contents.update(log.write_resident(run_id, num_steps, itertools.chain(Snapshot(blocks).read(), stored)))
        log.write(
            Commit(
                num_steps=num_steps,
                run_id=run_id,
                contents=contents,
                settings=settings,
                losses=losses,
                frozen=dict(bodies.frozen_sums),
            )
        )


def _by_last_use(carried: Mapping[str, Instance], schedule: Schedule) -> list[Instance]:
    """What the next step changes or frees first comes first."""
    over = {b.name: b.reuses for b in schedule.buffers}
    used = {name: k for k, op in enumerate(schedule.ops) for name in (*op.reads, *(over[x] for x in op.writes))}
    return [carried[name] for name in sorted(carried, key=lambda name: used.get(name, len(schedule.ops)))]


def _held(
    instances: Iterable[Instance], bodies: Bodies
) -> tuple[dict[str, Stored], dict[str, Block], dict[str, Extent]]:
    """By content of what is trained: what there is not yet, and where the others are, in memory (copies of gradients
    on the device) and on drives."""
    absent: dict[str, Stored] = {}
    blocks: dict[str, Block] = {}
    places: dict[str, Extent] = {}
    for instance in instances:
        content, value = instance.buffer.content, value_of(instance)
        if content in bodies.frozen_sums:
            continue
        if isinstance(value.place, Extent):
            places[content] = value.place
        elif value.is_absent:
            size_bytes = instance.buffer.size_bytes
            absent[content] = Stored(size_bytes=size_bytes, offset_bytes=0, in_store=False, is_absent=True)
        elif value.gradients is not None:
            blocks[content] = Block(copied := bodies.places.read(instance), copied)
        else:
            blocks[content] = value.block
    return absent, blocks, places


def _stored(extent: Extent, store: Store) -> Stored:
    checksum = store.checksum(extent)
    assert checksum is not None
    return Stored(size_bytes=extent.size_bytes, offset_bytes=extent.offset_bytes, in_store=True, xxh3=checksum)
