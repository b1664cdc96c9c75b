"""On a device as late as CUDA allows: more models, padded batches, frozen parameters, packs, segments."""

from __future__ import annotations

import pytest

from tests.runtime.execution.test_on_fake_cuda import on_fake_cuda  # noqa: F401
from tests.runtime.execution.test_policies_run import (  # noqa: F401
    test_packs_visit_the_device,
    test_segments_are_made_again_from_their_first_input,
)
from tests.runtime.optim.test_groups import test_frozen_parameters  # noqa: F401
from tests.runtime.test_models import test_a_mixture_of_experts, test_padded_batches, test_t5  # noqa: F401
from tests.runtime.test_trainer import (  # noqa: F401
    test_every_family,
    test_sub_batches_give_the_numbers_of_as_many_micro_batches,
    test_updates_that_wait_for_the_next_step,
)

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.nightly]
