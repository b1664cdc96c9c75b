"""Runs a function in two processes or more, each a rank: many cases share them.

They are forked from a process that has loaded PyTorch and transformers, which takes each rank four seconds by itself.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tierplan.runtime.ranks.group import Ranks

Case = Callable[[Ranks], Any]
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.runtime.ranks.loaded"])


def run_ranks(
    function: Callable[..., Any], num: int, *arguments: Any, timeout_s: float = 240, num_threads: int = 1
) -> list[Any]:
    """What `function(ranks, *arguments)` returns on each rank, which computes with so many threads; an exception where
    a rank has raised one, or the exit status where it has said nothing. `function` is one that a module has at its
    top."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        alike = {"WORLD_SIZE": str(num), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(s.getsockname()[1])}
        s.close()
        results = [Path(folder) / str(rank) for rank in range(num)]
        processes = []
        for rank, result in enumerate(results):
            env = {**alike, "OMP_NUM_THREADS": str(num_threads), "RANK": str(rank)}
            processes.append(PROCESSES.Process(target=run_rank, args=(env, result, function, arguments)))
            processes[-1].start()
        try:
            for p in processes:
                p.join(timeout_s)
                assert p.exitcode is not None, f"a rank has not ended in {timeout_s} s"
        finally:
            for p in processes:
                p.kill()
                p.join()
        return [
            pickle.loads(r.read_bytes()) if r.exists() else p.exitcode for r, p in zip(results, processes, strict=True)
        ]


def run_rank(env: dict[str, str], result: Path, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """What one rank does."""
    import torch

    os.environ.update(env)
    torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    found: Any
    try:
        with Ranks() as ranks:
            found = function(ranks, *arguments)
    except Exception as error:
        found = error
    result.write_bytes(pickle.dumps(found))
    os._exit(0)  # an exchange that a failed rank has left may wait for its end
