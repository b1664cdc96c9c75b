"""The chunked update has the bits of PyTorch's own optimizers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence

import pytest
import torch

from tierplan.runtime.execution.threads import threads_here
from tierplan.runtime.optim.adam import NonFiniteGradientError, OptimizerSettings, Segment, update_flat
from tierplan.runtime.optim.states import MASTER_BYTES, layout_of
from tierplan.sim.workloads.optimizers import optimizer_of

N = 10_007


def gradients(dtype: torch.dtype, steps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(N, generator=generator).to(dtype) for _ in range(steps)]


def state_regions(states: torch.Tensor, *, optimizer: str, has_master: bool) -> Mapping[str, torch.Tensor]:
    """Views of a unit's flat states (uint8) by region: `master`, `first`, `second`."""
    each_bytes = optimizer_of(optimizer).flat_bytes + MASTER_BYTES * has_master
    num_parameters = states.numel() // max(1, each_bytes)
    layout = layout_of(optimizer, [(num_parameters,)], "fp32", is_block=False, has_master=has_master)
    return next(iter(layout.views(states, layout.whole))).tensors


@pytest.mark.parametrize("chunk", [1 << 20, 1000, 777])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw_against_torch(chunk: int, weight_decay: float) -> None:
    settings = OptimizerSettings(lr=3e-3, weight_decay=weight_decay)
    start = torch.randn(N, generator=torch.Generator().manual_seed(1))
    reference = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([reference], lr=3e-3, weight_decay=weight_decay, fused=True)
    params, states = start.clone(), torch.zeros(8 * N, dtype=torch.uint8)
    regions = state_regions(states, optimizer="adamw", has_master=False)
    for step, grad in enumerate(gradients(torch.float32, 5), 1):
        reference.grad = grad.clone()
        optimizer.step()
        update_flat(params, grad, regions, settings, step=step, lr=settings.lr, chunk_elements=chunk)
    assert torch.equal(params, reference.detach())
    assert torch.equal(regions["second"], optimizer.state[reference]["exp_avg_sq"])


@pytest.mark.parametrize("has_master", [False, True])
def test_threads_change_no_bit(has_master: bool) -> None:
    """Beside a GPU all cores share the update of a unit."""
    dtype, length = (torch.bfloat16 if has_master else torch.float32), (1 << 20) + N
    found = []
    for num_threads in (1, 2, 3):
        generator = torch.Generator().manual_seed(1)
        params, grad = (torch.randn(length, generator=generator).to(dtype) for _ in range(2))
        states = torch.zeros((12 if has_master else 8) * length, dtype=torch.uint8)
        regions = state_regions(states, optimizer="adamw", has_master=has_master)
        if has_master:
            regions["master"].copy_(params)
        with threads_here(num_threads):
            for step in (1, 2):
                update_flat(params, grad, regions, OptimizerSettings(), step=step, lr=1e-2)
        found.append((params, states))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_bf16_with_master_and_clipping_against_torch() -> None:
    settings = OptimizerSettings(lr=1e-2)
    start = torch.randn(N, generator=torch.Generator().manual_seed(1)).bfloat16()
    master = torch.nn.Parameter(start.float())
    optimizer = torch.optim.AdamW([master], lr=1e-2, fused=True)
    params, states = start.clone(), torch.zeros(12 * N, dtype=torch.uint8)
    regions = state_regions(states, optimizer="adamw", has_master=True)
    regions["master"].copy_(start)
    for step, grad in enumerate(gradients(torch.bfloat16, 5), 1):
        working = torch.nn.Parameter(params.clone())
        working.grad = grad.clone()
        norm = torch.nn.utils.clip_grad_norm_([working], 10.0, foreach=False)
        clip = torch.clamp(10.0 / (norm + 1e-6), max=1.0)
        master.grad = working.grad.float()
        optimizer.step()
        update_flat(params, grad, regions, settings, step=step, lr=settings.lr, clip=clip, chunk_elements=1000)
    assert torch.equal(regions["master"], master.detach())
    assert torch.equal(params, master.detach().bfloat16())


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_sgd_against_torch(weight_decay: float) -> None:
    start = torch.randn(N, generator=torch.Generator().manual_seed(1))
    reference = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.SGD([reference], lr=0.1, weight_decay=weight_decay, foreach=False)
    params = start.clone()
    settings = OptimizerSettings(name="sgd", lr=0.1, weight_decay=weight_decay)
    for step, grad in enumerate(gradients(torch.float32, 3), 1):
        reference.grad = grad.clone()
        optimizer.step()
        update_flat(params, grad, {}, settings, step=step, lr=0.1)
    assert torch.equal(params, reference.detach())


def cut(lengths: Sequence[int], weight_decay: float) -> list[Segment]:
    return [Segment(length=length, weight_decay=weight_decay) for length in lengths]


def test_parameters_of_odd_lengths_keep_their_bits() -> None:
    """Each parameter's last, partial vector is rounded as when it is updated alone."""
    lengths = (64, 48, 7, 19, 3)
    generator = torch.Generator().manual_seed(2)
    alone = [torch.nn.Parameter(torch.randn(n, generator=generator)) for n in lengths]
    flat, states = torch.cat([p.detach() for p in alone]), torch.zeros(8 * sum(lengths), dtype=torch.uint8)
    regions = state_regions(states, optimizer="adamw", has_master=False)
    optimizer = torch.optim.AdamW(alone, lr=1e-2, fused=True)
    for step in range(1, 30):
        for p in alone:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()
        grads = torch.cat([p.grad for p in alone if p.grad is not None])
        settings, segments = OptimizerSettings(lr=1e-2), cut((112, *lengths[2:]), OptimizerSettings().weight_decay)
        update_flat(flat, grads, regions, settings, step=step, lr=1e-2, segments=segments)
    assert torch.equal(flat, torch.cat([p.detach() for p in alone]))
    assert torch.equal(regions["second"], torch.cat([optimizer.state[p]["exp_avg_sq"] for p in alone]))


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_have_the_bits_of_the_whole_wherever_they_are_cut(name: str, dtype: torch.dtype) -> None:
    """Also within a vector, and within the last, partial one of a parameter."""
    lengths = (640, 333, 7, 19, 3)
    n = sum(lengths)
    settings = OptimizerSettings(name=name, lr=1e-2, weight_decay=0.1)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(3)
    has_master = dtype != torch.float32
    num_regions = has_master + (2 if name == "adamw" else 0)
    start = torch.randn(n, generator=generator).to(dtype)
    clip = torch.tensor(0.7)

    def trained(borders: list[int], *, one_by_one: bool = True) -> list[torch.Tensor]:
        params = start.clone()
        pieces = [slice(a, b) for a, b in itertools.pairwise(borders)]
        states = [torch.zeros(4 * num_regions * (p.stop - p.start), dtype=torch.uint8) for p in pieces]
        regions = [state_regions(x, optimizer=name, has_master=has_master) for x in states]
        for found, piece in zip(regions, pieces, strict=True):
            if has_master:
                found["master"].copy_(params[piece])
        draws = torch.Generator().manual_seed(4)
        for step in range(1, 30):
            grads = torch.randn(n, generator=draws).to(dtype)
            for found, piece in zip(regions, pieces, strict=True):
                here = grads[piece] if one_by_one else [grads[a:b] for a, b in itertools.pairwise(gradient_borders)]
                update_flat(
                    params[piece], here, found, settings, step=step, lr=1e-2, clip=clip,
                    segments=cut(lengths, 0.1), begin=piece.start, chunk_elements=100,
                )  # fmt: skip
        return [params, *(torch.cat([found[key] for found in regions]) for key in regions[0])]

    whole = trained([0, n])
    rng = random.Random(6)
    for _ in range(20):
        cuts = sorted(rng.sample(range(1, n), rng.randint(1, 6)))
        for one, other in zip(whole, trained([0, *cuts, n]), strict=True):
            assert torch.equal(one, other), cuts
    gradient_borders = list(itertools.accumulate(lengths, initial=0))
    for one, other in zip(whole, trained([0, n], one_by_one=False), strict=True):
        assert torch.equal(one, other), "gradients in a tensor per parameter"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nothing_changes_when_a_gradient_is_not_finite(bad: float) -> None:
    params, states = torch.ones(N), torch.zeros(8 * N, dtype=torch.uint8)
    regions = state_regions(states, optimizer="adamw", has_master=False)
    grad = torch.ones(N)
    grad[N - 1] = bad
    with pytest.raises(NonFiniteGradientError, match="gradient of L3 holds"):
        update_flat(params, grad, regions, OptimizerSettings(), step=1, lr=1.0, label="L3", chunk_elements=100)
    assert torch.equal(params, torch.ones(N))
    assert not states.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_numbers_of_both_signs_are_finite(dtype: torch.dtype) -> None:
    params, largest = torch.ones(N, dtype=dtype), torch.finfo(dtype).max
    grad = torch.full((N,), largest, dtype=dtype)
    grad[::2] = -largest
    update_flat(params, grad, {}, OptimizerSettings(name="sgd", weight_decay=0.0), step=1, lr=0.0)
    assert torch.equal(params, torch.ones(N, dtype=dtype))
