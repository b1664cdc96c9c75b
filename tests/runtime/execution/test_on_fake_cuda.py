"""The runtime on a device that is as late as CUDA allows: tests of other files again, the same bits, and no race.

More of them are in `test_more_on_fake_cuda`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtime import test_trainer
from tests.runtime.checkpoint.test_commits import (  # noqa: F401
    test_a_run_resumes_on_another_plan,
    test_resumed_training_is_uninterrupted_training,
)
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
from tierplan.runtime.execution.fake_device import FakeCuda

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.sampled]


@pytest.fixture(autouse=True)
def on_fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    devices: list[FakeCuda] = []

    def opened(name: str) -> Device:
        devices.append(FakeCuda(seed=len(devices)))
        return devices[-1]

    monkeypatch.setattr(trainer, "open_device", opened)
    yield
    assert devices
    assert list(itertools.chain(*(device.races for device in devices))) == []
    assert sum(device.pinned_bytes for device in devices) == 0


@pytest.mark.parametrize(
    "seed", [0, 1, 2, 5, *(pytest.param(n, marks=pytest.mark.nightly) for n in (3, 4, *range(6, 20)))]
)
def test_random_plans(seed: int, tmp_path: Path) -> None:
    """Those of each day have each family, and each dtype, accumulation and clipping."""
    test_trainer.test_random_plans(seed, tmp_path)
