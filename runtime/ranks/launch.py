"""Starts the ranks of a run on this machine, by the machinery of `torchrun`."""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tierplan.runtime.ranks.group import LAUNCHED, RankDeath, Ranks


def is_rank() -> bool:
    """Whether this process was started as one of several: what a tool has left in the environment does not say so."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def start_ranks(num: int, arguments: Sequence[str]) -> int:
    """Runs `tierplan` with these arguments as so many ranks. Returns its exit status."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # ranks speak for themselves
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num)))
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=num, rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        max_restarts=0, run_id=os.urandom(8).hex(), monitor_interval=0.1, signals_to_handle="SIGHUP,SIGQUIT",
    )  # fmt: skip
    own, os.environ[LAUNCHED] = os.getpid(), "1"

    def forward(number: int, frame: object) -> None:
        for pid in Path(f"/proc/{own}/task/{own}/children").read_text().split():
            os.kill(int(pid), number)

    for number in (signal.SIGINT, signal.SIGTERM):  # ranks are in sessions of their own, and stop together
        signal.signal(number, forward)
    try:
        elastic_launch(config, sys.executable)("-m", "tierplan", *arguments)
    except ChildFailedError as error:
        # one that has said why ends the others, some of them before they can listen
        has_said = any(failure.exitcode > 0 for failure in error.failures.values())
        killed = [
            (rank, failure)
            for rank, failure in error.failures.items()
            if failure.exitcode < 0 and not (has_said and failure.exitcode == -signal.SIGTERM)
        ]
        for rank, failure in killed[:1]:
            print(f"tierplan run: {RankDeath.of(rank, num, failure.pid)}", file=sys.stderr, flush=True)
        return max(1, error.get_first_failure()[1].exitcode)
    return 0


@contextmanager
def own_ranks(name: str, *, num_threads: int | None = None) -> Iterator[Ranks | None]:
    """This process among the others that `torchrun` has started, if it has. An error ends it, and one rank says it,
    under this name. `num_threads` is as for `Ranks`."""
    if not is_rank():
        yield None
        return
    ranks = Ranks(num_threads)
    try:
        with ranks:
            yield ranks
            # Who starts them ends the others when the first has left with the status of a stop; they are done, too.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    except BaseException as error:
        try:
            if os.environ.get("TIERPLAN_DEBUG"):
                traceback.print_exception(error)
            elif ranks.is_first_to_say():
                print(f"{name}: {str(error) or type(error).__name__}", file=sys.stderr, flush=True)
        finally:  # also where nobody reads it; an exchange that was left may wait for its end
            os._exit(1)
