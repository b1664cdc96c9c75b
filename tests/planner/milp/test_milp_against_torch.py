"""Keep or recompute on a chain, against the MILP that PyTorch ships (`torch.distributed._tools.sac_ilp`).

Both programs get the same chain: PyTorch's as a tree of one root and its blocks, with the share of each block's
activations that is discarded as the decision, and the convex curve of what discarding costs. PyTorch's shares are
continuous, so what agrees with it is the program without whole counts; the program with them cannot be below.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

import pytest
from torch.distributed._tools import sac_ilp
from torch.distributed._tools.ilp_utils import Graph

from tests.planner.instances import MB, chain, small_machine
from tierplan.planner.milp.amounts import Problem, problem
from tierplan.planner.milp.model import Fractions, build, fractions
from tierplan.planner.milp.program import Solver
from tierplan.sim.workloads.workload import Workload

UNIT_BYTES = 2**30
"""Of PyTorch's program for one MB of ours: its solver counts in GiB, to a tolerance that should not matter."""
BORDER_MB, GRADS_MB, RESIDENT_MB = 1, 2, 14
"""Gradients of one block, and its parameters (2 bytes each) and states (12 bytes)."""


def curve(sizes_mb: Sequence[int], costs_s: Sequence[float]) -> tuple[list[float], list[float]]:
    """Slopes and intercepts of the least share of the cost at which a share of the bytes is discarded."""
    total_mb, total_s = sum(sizes_mb), sum(costs_s)
    share = cost = 0.0
    slopes, intercepts = [], []
    for size, seconds in sorted(zip(sizes_mb, costs_s, strict=True), key=lambda item: item[1] / item[0]):
        slope = (seconds / total_s) / (size / total_mb)
        slopes.append(slope)
        intercepts.append(cost - slope * share)
        share, cost = share + size / total_mb, cost + seconds / total_s
    return slopes, intercepts


def torch_graph(saved_mb: Sequence[Sequence[int]], costs_s: Sequence[Sequence[float]]) -> Graph:
    """The chain as PyTorch's tree of modules, with what each holds when its backward begins."""
    num = len(saved_mb)
    names = [f"chain.{u}" for u in range(num)]
    graph = Graph(num + 1)
    graph.fw_post_order = [*names, "chain"]

    def add(index: int, fqn: str, **stats: object) -> None:
        node = {
            "fqn": fqn, "index": index, "pos_fw_post_order": graph.fw_post_order.index(fqn), "is_leaf": False,
            "param_per_module": 0, "grad_per_module": 0, "grad_total": 0, "act_fw_per_module": 0,
            "act_bw_per_module": 0, "act_grad_per_module": 0, "act_total": 0, "input_per_module": 0,
            "output_per_module": 0, "fw_runtime_per_module": 0.0, "bw_runtime_per_module": 0.0, "sac_runtime": 0.0,
            "sac_memory": 0, "n_segments": 0, "slopes": [], "intercepts": [], "breakpoints": [], "tradeoff_curve": {},
        }  # fmt: skip
        graph.add_node({**node, **stats})  # type: ignore[typeddict-item]

    all_mb = sum(map(sum, saved_mb)) + (num - 1) * BORDER_MB
    add(0, "chain", param_per_module=num * RESIDENT_MB * UNIT_BYTES, act_total=all_mb * UNIT_BYTES, is_leaf=True)
    graph.ad_matrix[0, :] = 1
    held_mb = 0
    for u, name in enumerate(names):
        held_mb += sum(saved_mb[u]) + (BORDER_MB if u else 0)
        gradients_mb = (BORDER_MB if u + 1 < num else 0) + (BORDER_MB if u else 0)
        slopes, intercepts = curve(saved_mb[u], costs_s[u])
        graph.ad_matrix[u + 1, u + 1] = 1
        add(
            u + 1, name,
            act_total=held_mb * UNIT_BYTES, act_grad_per_module=gradients_mb * UNIT_BYTES,
            grad_total=GRADS_MB * UNIT_BYTES, act_fw_per_module=sum(saved_mb[u]) * UNIT_BYTES,
            sac_memory=sum(saved_mb[u]) * UNIT_BYTES, sac_runtime=1000 * sum(costs_s[u]),
            n_segments=len(slopes), slopes=slopes, intercepts=intercepts,
        )  # fmt: skip
    return graph


def recompute_s(p: Problem, shares: Fractions) -> float:
    """What the step takes beyond forward, backward and updates."""
    return shares.step_s - sum(unit.fwd_s + unit.bwd_s + unit.update_s for unit in p.units)


def instance(seed: int) -> tuple[list[list[int]], list[list[float]], Workload, int]:
    rng = random.Random(seed)
    num, slots = rng.choice((3, 4, 6)), rng.choice((1, 2, 3))
    saved = [[rng.randint(1, 12) for _ in range(slots)] for _ in range(num)]
    costs = [[rng.randint(1, 20) / 100 for _ in range(slots)] for _ in range(num)]
    workload = chain(
        forward_s=[sum(c) for c in costs],
        parameters=[MB] * num,
        saved_mb=saved,
        recompute_s=costs,
        border_mb=BORDER_MB,
    )
    least_mb = num * RESIDENT_MB + max(map(sum, saved)) + num + 3
    all_mb = num * RESIDENT_MB + sum(map(sum, saved)) + num + 3
    return saved, costs, workload, rng.randint(least_mb, all_mb)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:pulp.*")  # PyTorch's calls of PuLP
@pytest.mark.parametrize("seed", range(24))
def test_recompute_choices_against_pytorchs_own_program(seed, monkeypatch):
    saved, costs, workload, capacity_mb = instance(seed)
    exact = functools.partial(sac_ilp.PULP_CBC_CMD, threads=1)
    monkeypatch.setattr(sac_ilp, "PULP_CBC_CMD", lambda **options: exact(**{**options, "gapRel": 0.0}))
    _, theirs_ms, peak_bytes = sac_ilp.sac_milp(
        torch_graph(saved, costs), float(capacity_mb), ac_units=[f"chain.{u}" for u in range(len(saved))]
    )
    machine = small_machine(device_mb=capacity_mb, host_mb=0, nvme_mb=0)
    p = problem(workload, machine, semantics="in-backward")
    model = build(p)
    found = Solver().solve(model.program)
    if not found.usable:
        assert peak_bytes == -1, "PyTorch's program found what ours says cannot fit"
        return
    assert peak_bytes != -1, "ours found what PyTorch's program says cannot fit"
    ours_s = recompute_s(p, fractions(model, found))
    assert ours_s == pytest.approx(theirs_ms / 1000, abs=2e-4)  # PyTorch rounds to 0.01 ms, its solver less finely
    whole = build(p, integral=True)
    counted = Solver().solve(whole.program, integral=True, gap=0.0)
    if counted.usable:
        assert recompute_s(p, fractions(whole, counted)) >= theirs_ms / 1000 - 2e-4


def test_the_instances_are_not_all_trivial():
    """Some need to drop something and some drop much, or the comparison would show nothing."""
    shares = []
    for seed in range(24):
        _, _, workload, capacity_mb = instance(seed)
        p = problem(workload, small_machine(device_mb=capacity_mb, host_mb=0, nvme_mb=0), semantics="in-backward")
        model = build(p)
        found = Solver().solve(model.program)
        if found.usable:
            shares.append(recompute_s(p, fractions(model, found)) / sum(u.fwd_s for u in p.units))
    assert sum(share > 0.05 for share in shares) >= 12
    assert max(shares) > 0.4
