"""What holds for all tests: long ones are thinned out (`make nightly` runs all), and Ctrl-C works as on a terminal."""

from __future__ import annotations

import gc
import os
import signal
from collections import defaultdict
from collections.abc import Iterator

import pytest
import torch

from benchmarks.gpu import NEEDS_GPU, not_planned
from tierplan.planner.search import budget


def pytest_configure() -> None:
    """A shell starts background jobs with Ctrl-C ignored, and processes that tests start would inherit that.

    Python's searches for rings of objects, else with every 700 new ones, took 5 to 10 % of the time.
    """
    gc.set_threshold(50_000, 10, 10)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic products, read as CUDA begins
    # tests run side by side, one thread each; so do the processes that they start
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if os.environ.get(NEEDS_GPU) and not torch.cuda.is_available():
        raise pytest.UsageError("PyTorch sees no GPU: its tests would all be skipped")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test marked `sampled`, few cases that show each value of each parameter; all others are nightly."""
    tests: defaultdict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("gpu") and hasattr(item, "callspec"):
            old = not_planned() & {str(value) for value in item.callspec.params.values()}
            if old:  # on a borrowed machine, whose packages are what they are
                item.add_marker(pytest.mark.skip(reason=f"transformers is too old for {', '.join(old)}"))
        if isinstance(item, pytest.Function) and item.get_closest_marker("sampled") and hasattr(item, "callspec"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        values = {case: {(name, repr(value)) for name, value in case.callspec.params.items()} for case in cases}
        shown: set[tuple[str, str]] = set()
        while cases:
            case = max(cases, key=lambda case: len(values[case] - shown))
            if values[case] <= shown:
                break
            shown |= values[case]
            cases.remove(case)
        for case in cases:
            case.add_marker("nightly")


@pytest.fixture(scope="module")
def past_set_aside() -> Iterator[None]:
    """Python's searches for rings pass over what tests before have left, millions of objects: the Trainer of
    transformers asks for several in a test, and each took seconds. Not for all: a run of ours that finds things set
    aside sets none aside itself."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _searches_end_by_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a test no clock ends a search, but what it has to spend: a busy or cold computer finds the same. Where a
    test says nothing of that, it is a ninth of what users have."""
    monkeypatch.setattr(budget, "computing_s", lambda: 0.0)
    monkeypatch.setattr(budget, "wall_s", lambda: 0.0)
    monkeypatch.setattr(budget, "DEFAULT_OPS", min(budget.DEFAULT_OPS, 200_000))
