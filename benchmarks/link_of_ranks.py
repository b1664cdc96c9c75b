"""What each of several ranks sends in a second, and how long an exchange takes at least, while all compute.

torchrun --standalone --nproc-per-node 2 -m benchmarks.link_of_ranks
"""

from __future__ import annotations

import json
import os
import threading
import time
from statistics import median

import torch

from tierplan.runtime.ranks.collectives import CHUNK_BYTES
from tierplan.runtime.ranks.group import Ranks

TIMES = 40


def main() -> None:
    """Prints bytes per second and seconds, from the first rank."""
    torch.set_num_threads(1)
    with Ranks() as ranks:
        stop = threading.Event()

        def compute() -> None:
            a = torch.randn(384, 384)
            while not stop.is_set():
                a @ a

        beside = threading.Thread(target=compute)
        beside.start()
        try:
            least_s, most_s = seconds(ranks, 1 << 10), seconds(ranks, CHUNK_BYTES)
        finally:
            stop.set()
            beside.join()
        sent = CHUNK_BYTES * (ranks.size - 1)
        if ranks.rank == 0:
            print(json.dumps([sent / max(most_s - least_s, 1e-9), least_s / (ranks.size - 1)]), flush=True)
    os._exit(0)


def seconds(ranks: Ranks, size_bytes: int) -> float:
    """Of an exchange of so many bytes with every other rank: the median, added up as a reduction does."""
    sent, received = torch.zeros(2, ranks.size, size_bytes, dtype=torch.uint8)
    total, taken = torch.zeros(size_bytes // 4), []
    for _ in range(TIMES):
        begin_s = time.perf_counter()
        ranks.all_to_all(received, sent)
        for row in received:
            total.add_(row.view(torch.float32))
        taken.append(time.perf_counter() - begin_s)
    return median(taken)


if __name__ == "__main__":
    main()
