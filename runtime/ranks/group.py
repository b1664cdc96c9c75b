"""The ranks of a run on one machine: what they exchange, and how all end when one does.

All bytes go through PyTorch's distributed engine (gloo), each kind of exchange in a group of its own, in which one
thread of each rank calls in the same order. A watcher in each rank sees at once when another's process has ended, and
hears from the store when one has failed; whoever waits for it is told.

RankFailure(RuntimeError)   another rank has failed; names it
RankDeath(RankFailure)      its process has ended before it could say why
StarterDeath(RankFailure)   the process that has started the ranks has died
"""

from __future__ import annotations

import json
import os
import pickle
import select
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tierplan.runtime.memory.freed_memory import share_an_arena

CHANNELS = ("collectives", "norms", "steps", "commits", "ends")
"""What exchanges something at its own pace, in a thread of its own; last, that a rank has ended."""
TIMEOUT = timedelta(minutes=10)
"""In which ranks find each other."""
PATIENCE = timedelta(days=7)
"""With one that works: it may read a large text alone, or write to a slow drive. Of one that ends the watcher knows."""
STEPS_TO_STOP = 10
"""At most; then ranks tell each other who was asked to stop."""
WATCH_S = 0.1
GRACE_S = 5.0
"""Between the failure of another rank and the end of this process, whatever it is in."""


LAUNCHED = "TIERPLAN_LAUNCHED"
"""Set in the environment by what starts ranks and tells the user of one that dies, also before the others know it."""


class RankFailure(RuntimeError):
    """Another rank has failed; says which one."""


class RankDeath(RankFailure):
    """Its process has ended before it could say why."""

    @classmethod
    def of(cls, rank: int, size: int, pid: int) -> RankDeath:
        """What all are told."""
        return cls(f"rank {rank} of {size} (process {pid}) has died; all ranks end. Resume from the last commit")


class StarterDeath(RankFailure):
    """The process that has started the ranks has died: nobody hears them, and no Ctrl-C reaches them any more."""


class Ranks(AbstractContextManager["Ranks"]):
    """This process among others, as `torchrun` started it, which computes with so many threads (else as many as PyTorch
    has). A context manager that ends it in order."""

    def __init__(self, num_threads: int | None = None) -> None:
        if os.environ["WORLD_SIZE"] != os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]):
            raise RankFailure(
                f"{os.environ['WORLD_SIZE']} ranks were started, {os.environ['LOCAL_WORLD_SIZE']} of them on this "
                "machine; ranks on several machines are not executed yet: start all on one"
            )
        if (num_threads or torch.get_num_threads()) == 1:
            share_an_arena()  # before exchanges have threads; several that compute would wait for each other there
        dist.init_process_group("gloo", timeout=TIMEOUT)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        c10d: Any = dist  # which does not say that it exports its stores
        store = c10d.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=TIMEOUT)
        self._store = c10d.PrefixStore("tierplan", store)
        self.failure: BaseException | None = None
        self._is_closed = threading.Event()
        self._counts = Counter[str]()
        """By channel or way, exchanges that were begun here."""
        self._store.set(f"pid/{self.rank}", str(os.getpid()))
        others = [r for r in range(self.size) if r != self.rank]
        pids = {r: int(self._store.get(f"pid/{r}")) for r in others}
        self._watched = {os.pidfd_open(pid): (r, pid) for r, pid in pids.items()}
        self._starter = os.getppid()
        self._starter_fd = os.pidfd_open(self._starter) if dist.is_torchelastic_launched() else -1
        self._watcher = threading.Thread(target=self._watch, name="tierplan ranks", daemon=True)
        self._watcher.start()
        self._groups: dict[str, Any] = {
            name: dist.new_group(backend="gloo", timeout=PATIENCE, group_desc=name) for name in CHANNELS
        }
        self._store.set(f"connected/{self.rank}", "")
        # one that left now, with an error of its own, would be a lost connection to who still connects
        for r in others:
            self._store.get(f"connected/{r}")

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Row k of what is sent goes to rank k, whose row is received there; of equal length."""
        self._exchange("collectives", dist.all_to_all_single, _bytes(received), _bytes(sent))

    def all_gather(self, received: torch.Tensor, sent: torch.Tensor, channel: str = "collectives") -> None:
        """What rank k has sent is row k of what all receive."""
        self._exchange(channel, dist.all_gather, list(received.view(torch.uint8)), _bytes(sent))

    def connect(self, ways: Iterable[tuple[int, int]]) -> None:
        """Opens ways on which one rank sends to another; all call this, with the same ones."""
        for way in sorted(set(ways)):
            if str(way) not in self._groups:
                self._groups[str(way)] = dist.new_group(sorted(way), timeout=PATIENCE, backend="gloo")

    def send(self, t: torch.Tensor, way: tuple[int, int]) -> None:
        """What the first of the two has there is what the second has afterwards; contiguous."""
        self._exchange(str(way), dist.broadcast, _bytes(t), way[0])

    def broadcast(self, t: torch.Tensor, source: int) -> None:
        """What one rank has there is what all have afterwards; contiguous."""
        self._exchange("steps", dist.broadcast, _bytes(t), source)

    def share(self, values: Sequence[float], channel: str) -> list[list[float]]:
        """By rank, its values; every rank gives as many."""
        received = torch.empty(self.size, len(values), dtype=torch.float64)
        self.all_gather(received, torch.tensor(values, dtype=torch.float64), channel)
        rows: list[list[float]] = received.tolist()
        return rows

    def collect(self, own: Any, channel: str = "steps") -> list[Any]:
        """By rank, what each has, of any size."""
        sent = torch.frombuffer(bytearray(pickle.dumps(own)), dtype=torch.uint8)
        sizes = [int(size) for (size,) in self.share([len(sent)], channel)]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        received = padded.new_empty(self.size, max(sizes))
        padded[: len(sent)] = sent
        self.all_gather(received, padded, channel)
        return [pickle.loads(row[:size].numpy().tobytes()) for row, size in zip(received, sizes, strict=True)]

    def barrier(self, channel: str = "steps") -> None:
        """Returns when every rank is here."""
        self.share([0.0], channel)

    def fail(self, error: BaseException) -> None:
        """This rank cannot go on: all others are told why, and no thread of it waits for them any more."""
        if self.failure is None:
            self.failure = error
            if not isinstance(error, RankFailure):
                what = f"rank {self.rank} of {self.size} has failed: {type(error).__name__}: {error}"
                with suppress(RuntimeError):  # the store went with the rank that had it, and all end for that
                    self._store.compare_set("failed", "", what)

    def is_first_to_say(self) -> bool:
        """Whether nobody else has told the user of the failure yet, or does."""
        if isinstance(self.failure, RankDeath) and LAUNCHED in os.environ:
            return False
        if isinstance(self.failure, StarterDeath):  # which had the store
            return self.rank == 0
        try:
            return bool(self._store.add("said", 1) == 1)
        except RuntimeError:  # the store is gone
            return True

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.fail(error)
        self.close()

    def close(self) -> None:
        """Leaves the others, who may go on; after a failure, without waiting for anything but that they hear of it."""
        try:
            if self.failure is None:
                self._store.set(f"done/{self.rank}", json.dumps(self._counts))
                self._store.set("done", "1")
                self.barrier("ends")
        finally:
            self._is_closed.set()
            self._watcher.join()
            if self.failure is not None and self.rank == 0 and self._starter_fd < 0:  # the store goes with this process
                time.sleep(5 * WATCH_S)
        if self.failure is None:
            dist.destroy_process_group()

    def _exchange(self, channel: str, begin: Callable[..., Any], *what: object) -> None:
        """Begins an exchange and waits for it, or for the news that it will not come to its end."""
        if self.failure is not None:
            raise self.failure
        pause_s = 2e-5
        self._counts[channel] += 1
        try:
            work = begin(*what, group=self._groups[channel], async_op=True)
            while not work.is_completed():
                if self.failure is not None:
                    raise self.failure
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 1e-3)
            work.wait()
        except RuntimeError as error:
            deadline_s = time.monotonic() + GRACE_S  # the watcher knows in a moment whose connection was lost
            while self.failure is None and time.monotonic() < deadline_s:
                time.sleep(0.01)
            if self.failure is None:
                raise RankFailure(f"rank {self.rank}: an exchange with the other ranks failed: {error}") from error
            raise self.failure from None

    def _watch(self) -> None:
        ended = select.poll()
        for fd in self._watched:
            ended.register(fd, select.POLLIN)
        if self._starter_fd >= 0:
            ended.register(self._starter_fd, select.POLLIN)
        while not self._is_closed.wait(WATCH_S):
            over = [fd for fd, _ in ended.poll(0)]
            why = self._failure_of_others(over)
            if why is not None:
                self.failure = self.failure or why
                if not self._is_closed.wait(GRACE_S):
                    try:
                        if self.is_first_to_say():
                            os.write(2, f"error: {why}\n".encode())
                    finally:  # also where nobody reads what it says
                        os._exit(1)
                return
            for fd in over:
                ended.unregister(fd)

    def _failure_of_others(self, over: Sequence[int]) -> RankFailure | None:
        """What has gone wrong elsewhere, given whose processes are over."""
        if self._starter_fd in over:
            return StarterDeath(
                f"the process that started the ranks (process {self._starter}) has died; all ranks end. Resume from "
                "the last commit"
            )
        died = (RankDeath.of(rank, self.size, pid) for rank, pid in (self._watched[fd] for fd in over))
        try:
            if self._store.check(["failed"]):
                return RankFailure(self._store.get("failed").decode())
            if self._store.check(["done"]) and (text := self._in_vain()):
                self._store.compare_set("failed", "", text)
                return RankFailure(text)
            done = [self._store.check([f"done/{self._watched[fd][0]}"]) for fd in over]
            return next((death for death, is_done in zip(died, done, strict=True) if not is_done), None)
        except RuntimeError:  # the store went with the rank that had it
            return next(died, None)

    def _in_vain(self) -> str:
        """Which rank has ended without an exchange that this one has begun, if any."""
        for rank, _ in self._watched.values():
            if self._store.check([f"done/{rank}"]):
                counts = json.loads(self._store.get(f"done/{rank}"))
                for name, num in list(self._counts.items()):
                    of = dist.get_process_group_ranks(self._groups[name])
                    if name != "ends" and rank in of and num > counts.get(name, 0):
                        return (
                            f"rank {rank} of {self.size} has ended, and rank {self.rank} waits for it; let all ranks "
                            "do the same: as many runs, steps, copies and restored models"
                        )
        return ""


def _bytes(t: torch.Tensor) -> torch.Tensor:
    """What gloo takes of every type."""
    return t.view(-1).view(torch.uint8)
