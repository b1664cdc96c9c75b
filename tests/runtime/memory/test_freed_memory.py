"""What the CPU's tensors free is there for the next ones, page by page: counted as page faults by the system."""

from __future__ import annotations

import resource
import subprocess
import sys
import threading

import pytest
import torch

from tierplan.runtime.execution.device import Device
from tierplan.runtime.memory.freed_memory import keep_freed_memory

SIZE_BYTES = 48 << 20
PAGES = SIZE_BYTES // 4096


def faults_of_a_round() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        torch.full((SIZE_BYTES // 4,), 1.0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def faults_once_settled() -> int:
    for _ in range(3):
        faults_of_a_round()
    return faults_of_a_round()


def test_pages_of_freed_tensors_are_not_faulted_in_again() -> None:
    Device()
    if not keep_freed_memory():
        pytest.skip("the C library is not glibc, or memory is capped")
    assert faults_once_settled() < PAGES // 10


def test_nor_in_threads_that_come_later() -> None:
    if not keep_freed_memory():
        pytest.skip("the C library is not glibc")
    found: list[int] = []

    def work() -> None:
        found.append(faults_once_settled())

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert max(found) < PAGES // 10


def test_a_process_whose_memory_is_capped_gives_it_back() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_DATA, (1 << 33, 1 << 33));"
        "from tierplan.runtime.memory.freed_memory import keep_freed_memory; print(keep_freed_memory())"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_threads_that_compute_at_once_do_not_wait_for_each_others_memory() -> None:
    """Each has an arena of its own, by the C library's account, in a process that has opened a device."""
    if not keep_freed_memory():
        pytest.skip("the C library is not glibc, or memory is capped")
    code = (
        "import threading, torch\n"
        "from tests.runtime.ranks.test_memory_of_ranks import num_arenas\n"
        "from tierplan.runtime.execution.device import Device\n"
        "Device()\n"
        "before, all_here = num_arenas(), threading.Barrier(4)\n"
        "def work():\n"
        "    torch.ones(625_000)\n"
        "    all_here.wait()\n"
        "threads = [threading.Thread(target=work) for _ in range(3)]\n"
        "[t.start() for t in threads]\n"
        "all_here.wait()\n"
        "print(num_arenas() - before)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(run.stdout.split()[-1]) == 3
