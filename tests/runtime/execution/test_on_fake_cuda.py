"""The runtime on a device that is as late as CUDA allows: tests of other files again, the same bits, and no race.

More of them are in `test_more_on_fake_cuda`.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu import not_planned
from tests.runtime import test_trainer
from tests.runtime.checkpoint.test_commits import (  # noqa: F401
    test_a_run_resumes_on_another_plan,
    test_resumed_training_is_uninterrupted_training,
)
from tests.runtime.execution.test_fake_device import made
from tests.runtime.execution.test_policies_run import test_a_policy_trains_bit_for_bit  # noqa: F401
from tests.runtime.test_coded_activations import (  # noqa: F401
    test_bits_are_those_of_plain_training_with_coded_tensors,
)
from tests.runtime.test_trainer import (  # noqa: F401
    test_a_gradient_that_is_not_finite_ends_the_run,
    test_a_resumed_run_makes_the_updates_that_still_waited,
    test_delayed_updates,
    test_gpt2_with_every_action,
    test_in_a_device_too_small_for_plain_training,
    test_over_budget_is_an_error_before_the_allocation,
    test_running_on_continues,
    test_sgd_and_a_learning_rate_schedule,
)
from tierplan.runtime import trainer
from tierplan.runtime.execution.device import Device
from tierplan.runtime.execution.fake_device import FakeCuda, RaceError

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.sampled]


class Outside(TorchDispatchMode):
    """What a thread does where it has named no stream is the host's doing, and has to wait for the device."""

    def __init__(self, devices: list[FakeCuda]) -> None:
        super().__init__()
        self._devices = devices

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device = self._devices[-1] if self._devices else None
        if device is None or getattr(device._here, "launches", None) is not None:
            return func(*args, **(kwargs or {}))
        return device.launch(None, func, args, kwargs or {})


@pytest.fixture(autouse=True)
def on_fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    devices: list[FakeCuda] = []

    def opened(name: str) -> Device:
        devices.append(FakeCuda(seed=len(devices)))
        return devices[-1]

    def run(thread: threading.Thread) -> None:
        with Outside(devices):
            run_plainly(thread)

    run_plainly = threading.Thread.run
    monkeypatch.setattr(threading.Thread, "run", run)
    monkeypatch.setattr(trainer, "open_device", opened)
    with Outside(devices):
        yield
    assert devices or not_planned()
    assert list(itertools.chain(*(device.races for device in devices))) == []
    assert sum(device.pinned_bytes for device in devices) == 0


@pytest.mark.parametrize(
    "seed", [0, 1, 2, 5, *(pytest.param(n, marks=pytest.mark.nightly) for n in (3, 4, *range(6, 20)))]
)
def test_random_plans(seed: int, tmp_path: Path) -> None:
    """Those of each day have each family, and each dtype, accumulation and clipping."""
    test_trainer.test_random_plans(seed, tmp_path)


@pytest.mark.parametrize("is_in_thread", [False, True])
def test_what_is_done_on_no_stream_is_seen(is_in_thread: bool) -> None:
    device = trainer.open_device("cuda")
    assert isinstance(device, FakeCuda)
    x = made(device)
    with ThreadPoolExecutor() as pool, pytest.raises(RaceError, match=r"add on the host reads .* write of mul on"):
        pool.submit(x.add, 1).result() if is_in_thread else x.add(1)
    device.races.clear()
