"""The planning problem's amounts against sums by hand: seconds, gigabytes, rates, and what is decided together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planner.instances import MB, chain, small_machine
from tests.toys import toy_machine, toy_workload
from tierplan.hwmodels.machine import Rate
from tierplan.planner.milp.amounts import MAX_RUNS, NUM_ALONE, problem, runs_of
from tierplan.planner.milp.modes import MODES
from tierplan.planner.milp.rates import GB

MACHINE = small_machine(link_mb_per_s=100, read_mb_per_s=50, write_mb_per_s=40, adam_m_per_s=20)


def test_the_chain_from_gradients_to_usable_parameters() -> None:
    """Gradient down, update, parameters up; through the drive and back in between, where they live there."""
    workload = chain(forward_s=[1.0, 1.0], parameters=[4 * MB, 0], saved_mb=[[1], [1]])
    t = workload.training
    found = problem(workload, MACHINE, semantics="in-backward").rates.chain_s
    down_s, update_s, up_s = 4 * t.grad_bytes / 100, 4 / 20, 4 * t.param_bytes / 100
    through_s = 4 * t.param_bytes / 40 + 4 * t.param_bytes / 50
    assert found["host"] == pytest.approx([down_s + update_s + up_s, 0.0])
    assert found["nvme"] == pytest.approx([down_s + update_s + through_s + up_s, 0.0])


def test_the_chain_updates_in_as_many_parts_as_are_quickest() -> None:
    """With a latency per update that is one part; with cores that are slow at large updates, sixteen."""
    workload = chain(forward_s=[1.0], parameters=[16 * MB], saved_mb=[[1]])
    copies_s = 16 * (workload.training.grad_bytes + workload.training.param_bytes) / 100

    def update_s(**cores: object) -> float:
        streams = tuple(replace(s, **cores) if s.name == "host.adam" else s for s in MACHINE.streams)  # type: ignore[arg-type]
        p = problem(workload, replace(MACHINE, streams=streams), semantics="in-backward")
        return p.rates.chain_s["host"][0] - copies_s

    assert update_s(latency_s=0.01) == pytest.approx(16 / 20 + 0.01)
    by_size = {
        "parameters": Rate(((1.0 * MB, 20.0 * MB), (16.0 * MB, 10.0 * MB))),
        "elementwise_bytes": Rate.constant(1e9),
    }
    assert update_s(rates=by_size) == pytest.approx(16 / 20)


def test_rates_are_the_best_that_any_transfer_reaches_with_its_latency() -> None:
    """1 MB/ms and 5 ms of latency: 10 MB take 15 ms, 5 MB take 10 ms."""
    fast = small_machine(link_mb_per_s=1000)
    slow = tuple(replace(s, latency_s=0.005) if s.name == "gpu0.d2h" else s for s in fast.streams)
    workload = chain(forward_s=[1.0], parameters=[0], saved_mb=[[5, 10]], border_mb=1)
    found = problem(workload, replace(fast, streams=slow), semantics="in-backward").rates
    assert found.down["acts"] == pytest.approx(10 * MB / 0.015 / GB)
    assert found.up["acts"] == pytest.approx(1000 * MB / GB)


def test_a_tied_gradient_is_on_the_device_from_the_heads_backward_on() -> None:
    p = problem(toy_workload(3), toy_machine(), semantics="in-backward")
    embed, head = p.units[0], p.units[-1]
    assert (embed.tied_gb, head.tied_gb) == (0.0, embed.grads_gb)
    assert (head.fetched_from, embed.fetched_from) == (0, 0)
    assert (embed.fwd_reads_params, embed.bwd_reads_params) == (True, False)
    assert problem(toy_workload(3, tied=False), toy_machine(), semantics="in-backward").units[-1].tied_gb == 0.0


def test_what_an_op_has_on_the_device_whatever_is_decided() -> None:
    workload = toy_workload(3)
    block, unit = workload.units[1], problem(workload, toy_machine(), semantics="in-backward").units[1]
    assert unit.fwd_fixed_gb * GB == pytest.approx(block.forward_work_bytes + block.output_bytes)
    gradients = block.output_bytes + block.input_bytes
    assert unit.bwd_fixed_gb * GB == pytest.approx(block.backward_work_bytes + gradients)


def test_small_tensors_are_planned_together_and_large_ones_alone() -> None:
    """100 MB: the slots of 1 MB are below one fiftieth of it, those of 2 MB are not. One that takes long to make again
    is alone too, but where it is tiny."""
    saved_mb, again_s = [93.92, 1, 2, 1, 2, 0.04, 0.04], [0.9, 0.001, 0.001, 0.03, 0.001, 0.06, 0.001]
    workload = chain(forward_s=[1.0] * 3, parameters=[0] * 3, saved_mb=[saved_mb] * 3, recompute_s=[again_s] * 3)
    groups = problem(workload, MACHINE, semantics="in-backward").units[1].groups
    assert [g.slots for g in groups] == [(), (0,), (2,), (3,), (4,), (1,), (5, 6)]
    assert [g.movable for g in groups] == [True, True, True, True, True, False, False]
    assert sum(g.gb for g in groups if g.slots) == pytest.approx(0.1)


@pytest.mark.parametrize("semantics", ["in-backward", "exact-clip", "delayed-1"])
def test_placements_are_those_that_the_lowering_takes(semantics: str) -> None:
    """Gradients on NVMe only wait there for a norm; a delayed update is never on the device; no drive, no NVMe."""
    workload = toy_workload(3)
    p = problem(workload, toy_machine(), semantics=semantics)  # type: ignore[arg-type]
    modes = [MODES[k] for k in p.modes(1)]
    assert any(m.grads == "nvme" for m in modes) == (semantics == "exact-clip")
    assert any(m.states == "device" for m in modes) == (semantics != "delayed-1")
    no_drive = replace(toy_machine(), tiers=toy_machine().tiers[:2])
    bare = problem(workload, no_drive, semantics=semantics)  # type: ignore[arg-type]
    assert not any("nvme" in (m.params, m.states, m.grads) for m in (MODES[k] for k in bare.modes(1)))


@pytest.mark.parametrize("num_units", [1, 2, 6, 7, 54, 102, 103, 500])
@pytest.mark.parametrize("most", [MAX_RUNS, 48])
def test_runs_cover_the_chain_with_the_ends_alone(num_units: int, most: int) -> None:
    runs = runs_of(num_units, most)
    assert [u for run in runs for u in run] == list(range(num_units))
    assert all(len(run) == 1 for run in (*runs[:3], *runs[-3:]))
    assert len(runs) <= most + 2 * NUM_ALONE
