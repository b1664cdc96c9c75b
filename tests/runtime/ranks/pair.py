"""Runs a function in two processes or more, each a rank: starting them takes seconds, so many cases share them."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tierplan.runtime.ranks.group import Ranks

Case = Callable[[Ranks], Any]


def run_ranks(
    function: Callable[..., Any], num: int, *arguments: Any, timeout_s: float = 240, num_threads: int = 1
) -> list[Any]:
    """What `function(ranks, *arguments)` returns on each rank, which computes with so many threads; an exception where
    a rank has raised one, or the exit status where it has said nothing. `function` is one that a module has at its
    top."""
    with tempfile.TemporaryDirectory() as folder:
        call = Path(folder) / "call"
        call.write_bytes(pickle.dumps((function, arguments)))
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        processes = []
        for rank in range(num):
            alike = {"WORLD_SIZE": str(num), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            env = {**os.environ, "OMP_NUM_THREADS": str(num_threads), "RANK": str(rank), **alike}
            command = [sys.executable, "-m", "tests.runtime.ranks.pair", str(call)]
            processes.append(subprocess.Popen(command, env=env))
        try:
            codes = [p.wait(timeout_s) for p in processes]
        finally:
            for p in processes:
                p.kill()
                p.wait()
        results = [Path(f"{call}.{rank}") for rank in range(num)]
        return [pickle.loads(r.read_bytes()) if r.exists() else c for r, c in zip(results, codes, strict=True)]


def main(call: str) -> None:
    import torch

    sys.modules["torchao"] = None  # type: ignore[assignment]  # transformers would load it where it is: two seconds
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    function, arguments = pickle.loads(Path(call).read_bytes())
    result: Any
    try:
        with Ranks() as ranks:
            result = function(ranks, *arguments)
    except Exception as error:
        result = error
    Path(f"{call}.{os.environ['RANK']}").write_bytes(pickle.dumps(result))
    os._exit(0)  # an exchange that a failed rank has left may wait for its end


if __name__ == "__main__":
    main(sys.argv[1])
