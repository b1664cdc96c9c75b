"""Executors of several ranks that meet in joint ops end the ops that the simulator's ranks end, whatever the delays."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sim.random_schedules import schedules
from tests.sim.test_ranks import execute_together, shards_of_ranks
from tierplan.runtime.execution.executor import Executor
from tierplan.runtime.execution.instances import Call
from tierplan.runtime.execution.rules import TierFullError
from tierplan.sim.columns import unroll
from tierplan.sim.contents import step_prefix
from tierplan.sim.schedule import Schedule


class NobodyGoesOn(Exception):
    """Every rank has ended, or waits in joint ops for others."""


class Meetings:
    """Where the parts of a joint op wait for each other, until nothing moves any more on any rank."""

    def __init__(self, own: Sequence[Schedule], joint: set[str], seed: int) -> None:
        self._joint, self._rng, self._is_over = joint, random.Random(seed), False
        self._change = threading.Condition()
        self._there: dict[str, set[int]] = {}
        self._executors = [Executor(schedule, self._body(rank)) for rank, schedule in enumerate(own)]
        self._ended: set[int] = set()

    def run(self, num_steps: int) -> list[set[str]]:
        """By rank, what has ended."""
        threads = [threading.Thread(target=self._run, args=(r, num_steps)) for r in range(len(self._executors))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for executor in self._executors:
            executor.close()
        return [set(executor.trace().by_key()) for executor in self._executors]

    def _run(self, rank: int, num_steps: int) -> None:
        with suppress(TierFullError, NobodyGoesOn):
            self._executors[rank].run(num_steps)
        with self._change:
            self._ended.add(rank)
            self._change.notify_all()

    def _body(self, rank: int) -> Callable[[Call], None]:
        def body(call: Call) -> None:
            time.sleep(self._rng.choice((0.0, 0.0, 0.0, 1e-4, 3e-4)))
            if call.op.key in self._joint:
                self._meet(rank, step_prefix(call.step) + call.op.key)
                time.sleep(self._rng.choice((0.0, 0.0, 2e-4)))  # the news is late

        return body

    def _meet(self, rank: int, key: str) -> None:
        with self._change:
            there = self._there.setdefault(key, set())
            there.add(rank)
            self._change.notify_all()
            while len(there) < len(self._executors):
                self._is_over = self._is_over or self._nobody_goes_on()
                if self._is_over:
                    self._change.notify_all()
                    raise NobodyGoesOn
                self._change.wait(2e-3)  # a worker that comes to rest on its rank says so to nobody

    def _nobody_goes_on(self) -> bool:
        """Whether all that runs on any rank are parts that wait: none of them can be let go meanwhile."""
        waiting = [there for there in self._there.values() if len(there) < len(self._executors)]
        for rank, executor in enumerate(self._executors):
            if rank not in self._ended:
                with executor._lock:
                    num_running = executor._rules.num_running
                if not executor.begun_ns or num_running > sum(rank in there for there in waiting):
                    return False
        return True


def check(schedule: Schedule, num: int, num_steps: int, joint: set[int], seed: int) -> None:
    own = shards_of_ranks(schedule, num)
    keys = {op.key for k, op in enumerate(schedule.ops) if k in joint}
    found = Meetings(own, keys, seed).run(num_steps)
    prefixed = {step_prefix(step) + key for step in range(num_steps) for key in keys}
    assert found == execute_together([unroll(s, num_steps) for s in own], prefixed, seed)


cases = given(
    schedules(), st.integers(2, 4), st.integers(1, 2), st.sets(st.integers(0, 13)), st.integers(0, 10**6)
)  # fmt: skip


@settings(max_examples=15, deadline=None)
@cases
def test_executors_end_what_the_simulator_ends(
    schedule: Schedule, num: int, num_steps: int, joint: set[int], seed: int
) -> None:
    check(schedule, num, num_steps, joint, seed)


@pytest.mark.nightly
@settings(max_examples=10_000, deadline=None)
@cases
def test_ten_thousand(schedule: Schedule, num: int, num_steps: int, joint: set[int], seed: int) -> None:
    check(schedule, num, num_steps, joint, seed)
