"""The ledger is what memory really holds: compared with PyTorch's own tracker, and over many steps."""

from __future__ import annotations

import gc
import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.runtime.models import make_batches, make_model, observed_workload, schedule_for
from tests.runtime.test_trainer import CPU, machine
from tests.sim.naive import initial_bytes
from tests.toys import uniform_plan
from tierplan.planner.lowering import lower
from tierplan.planner.plan import UnitPlan
from tierplan.runtime.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread", "past_set_aside")


def tensor_bytes(trainer: Trainer) -> int:
    """Bytes of all tensors that Python knows, each storage once, without memory that pools keep for later."""
    assert trainer._bodies is not None
    for pool in (trainer._bodies.places.host_pool, trainer._bodies.places.device_pool):
        for size_bytes in (pool.capacity_bytes, -pool.capacity_bytes):
            pool.make_room(size_bytes)  # spare memory goes back to the system
    gc.collect()
    found = {}
    for x in gc.get_objects():
        if type(x) in (torch.Tensor, torch.nn.Parameter):
            found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
    return sum(found.values())


@pytest.mark.parametrize("acts", [pytest.param("recompute", marks=pytest.mark.nightly), "nvme"])
def test_nothing_grows_over_many_steps(acts: str, tmp_path: Path) -> None:
    model = make_model("gpt2", num_blocks=2, dropout=0.1)
    choice = UnitPlan(params="nvme", grads="host", states="nvme", acts=acts, input="host")  # type: ignore[arg-type]
    schedule = schedule_for(model, choice)
    batches = make_batches(60)
    with Trainer(schedule, model, nvme_dir=tmp_path, trace_steps=1) as trainer:
        trainer.run(batches[:15], 15)
        before, file_bytes = tensor_bytes(trainer), (tmp_path / "tierplan.tier").stat().st_size
        objects, resident_kib = len(gc.get_objects()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        trainer.run(batches[15:], 45)
        assert tensor_bytes(trainer) <= before
        assert (tmp_path / "tierplan.tier").stat().st_size == file_bytes
        assert len(gc.get_objects()) < objects + 2000
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < resident_kib + 20_000
        held = {tier.name: 0 for tier in schedule.tiers}
        for instance in tuple(trainer._executor.ledger.held):
            held[instance.buffer.tier] += instance.buffer.size_bytes
        assert held == initial_bytes(schedule)
    assert trainer.result().peak_bytes.keys() == held.keys()


def test_with_page_rounding_the_ledger_is_what_the_pool_has_lent(tmp_path: Path) -> None:
    """To the byte: the predicted peak of host memory is what is really held there, rounding included."""
    model = make_model("gpt2")
    workload = observed_workload(model, make_batches(1)[0], CPU)
    choice = UnitPlan(params="host", grads="host", states="host", acts="host", input="host")
    exact = machine()
    tiers = tuple(replace(t, rounding="page") if t.name == "host" else t for t in exact.tiers)
    on_pages = replace(exact, tiers=tiers)
    schedule = lower(uniform_plan(workload, choice), workload, on_pages)
    with Trainer(schedule, model, nvme_dir=tmp_path) as trainer:
        trainer.run(make_batches(3), 3)
        bodies = trainer._bodies
        assert bodies is not None
        assert (
            bodies.places.host_pool.lent_bytes
            == trainer._executor.ledger.used_bytes["host"]
            == initial_bytes(schedule)["host"]
        )
    whole = lower(uniform_plan(workload, choice), workload, exact)
    assert initial_bytes(schedule)["host"] > initial_bytes(whole)["host"]
    assert schedule.bytes_moved() == whole.bytes_moved()


def test_pools_hold_what_the_ledger_says(tmp_path: Path) -> None:
    """Memory that is lent is the ledger's, but for rounding to whole pages and what autograd holds by itself."""
    model = make_model("gpt2")
    choice = UnitPlan(params="host", grads="host", states="host", acts="host", input="host")
    schedule = schedule_for(model, choice)
    with Trainer(schedule, model, nvme_dir=tmp_path) as trainer:
        trainer.run(make_batches(3), 3)
        bodies = trainer._bodies
        assert bodies is not None
        initial = initial_bytes(schedule)
        num_buffers = len(schedule.buffers)
        assert initial["host"] <= bodies.places.host_pool.lent_bytes <= initial["host"] + num_buffers * 4096
        assert bodies.places.device_pool.lent_bytes == initial["gpu0"] == 0
        assert bodies.places.host_pool.mapped_bytes <= trainer.result().peak_bytes["host"] + num_buffers * 4096
