"""Each optimizer's step against its reference: PyTorch's own, torchao's and lion-pytorch's, wherever states are cut."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import pytest
import torch

from tierplan.runtime.optim.adam import OptimizerSettings, update_states
from tierplan.runtime.optim.codes import code_values, decoded, encode, round_by_chance
from tierplan.runtime.optim.kernels import KERNELS, MUON_LR, OptimizerStep
from tierplan.runtime.optim.states import LayoutError, StateLayout, layout_of
from tierplan.sim.contents import States
from tierplan.sim.workloads.optimizers import OPTIMIZERS, Moment

SHAPES = ((96, 64), (128,), (64, 96), (512, 32), (40, 13))
"""Also one that is no whole vectors, and some too small for codes."""
STEPS = 4
CHANCE = "adamw:states=bf16-stochastic"
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1}
Parameters = list[torch.nn.Parameter]


def gradients(dtype: torch.dtype) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(4)
    return [[torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES] for _ in range(STEPS)]


def start(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def layout(spec: str, dtype: str, has_master: bool = False) -> StateLayout:
    return layout_of(spec, SHAPES, dtype, is_block=True, has_master=has_master)


def trained(spec: str, dtype: str, num_parts: int, *, has_master: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Flat parameters and states after some steps with states in parts."""
    torch_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    of, settings = layout(spec, dtype, has_master), OptimizerSettings(name=spec, **SETTINGS)  # type: ignore[arg-type]
    flat = torch.cat([p.view(-1) for p in start(torch_dtype)])
    parts = [of.part(States("L0", k, num_parts)) for k in range(num_parts)]
    states = [torch.zeros(of.size_bytes(part), dtype=torch.uint8) for part in parts]
    for held, part in zip(states, parts, strict=True):
        for view in of.views(held, part) if has_master else ():
            view.tensors["master"].copy_(flat[view.begin :][: view.length])
    for number, grads in enumerate(gradients(torch_dtype), 1):
        grad = torch.cat([g.view(-1) for g in grads])
        for held, part in zip(states, parts, strict=True):
            here = slice(part.start, part.stop)
            views = list(of.views(held, part))
            update_states(flat[here], grad[here], views, of, settings, part=part, step=number, lr=settings.lr)
    return flat, of.join(states, parts)


def by_reference(dtype: torch.dtype, make: Callable[[Parameters], list[Any]]) -> torch.Tensor:
    parameters = [torch.nn.Parameter(p) for p in start(dtype)]
    optimizers = make(parameters)
    for grads in gradients(dtype):
        for p, grad in zip(parameters, grads, strict=True):
            p.grad = grad
        for optimizer in optimizers:
            optimizer.step()
    return torch.cat([p.detach().view(-1) for p in parameters])


def muon(parameters: Parameters) -> list[Any]:
    common = {"lr": SETTINGS["lr"], "weight_decay": SETTINGS["weight_decay"]}
    hidden = [p for p in parameters if p.ndim == 2]
    return [
        torch.optim.Muon(hidden, momentum=0.95, adjust_lr_fn=MUON_LR, **common),  # type: ignore[arg-type]
        torch.optim.AdamW([p for p in parameters if p.ndim != 2], betas=(0.9, 0.99), fused=True, **common),  # type: ignore[arg-type]
    ]


def lion(parameters: Parameters) -> list[Any]:
    return [pytest.importorskip("lion_pytorch").Lion(parameters, **SETTINGS)]


class Eager:
    """torchao's step of 8-bit or 4-bit Adam, which it compiles, as PyTorch executes it operation by operation."""

    def __init__(self, parameters: Parameters, bits: int) -> None:
        adam = pytest.importorskip("torchao.optim.adam")
        kind = {8: adam.AdamW8bit, 4: adam.AdamW4bit}[bits]
        self.step_one, self.optimizer, self.number = adam.single_param_adam, kind(parameters, **SETTINGS), 0
        self.moments = {
            p: [self.optimizer._new_buffer(p.detach(), is_signed) for is_signed in (True, False)] for p in parameters
        }

    @torch.no_grad()
    def step(self) -> None:
        self.number += 1
        for p, (first, second) in self.moments.items():
            self.step_one(
                p.detach(), p.grad, torch.tensor(float(self.number)), first, second, None, torch.tensor(1e-2),
                0.9, 0.99, 0.1, 1e-8, True, False,
            )  # fmt: skip


REFERENCES: dict[str, Callable[[Parameters], list[Any]]] = {
    "adamw": lambda p: [torch.optim.AdamW(p, fused=True, **SETTINGS)],  # type: ignore[arg-type]
    "adamw:states=8bit": lambda p: [Eager(p, 8)],
    "adamw:states=4bit": lambda p: [Eager(p, 4)],
    "sgd:momentum=0.9": lambda p: [torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=0.1, foreach=False)],
    "lion": lion,
    "muon": muon,
    "adafactor": lambda p: [torch.optim.Adafactor(p, lr=1e-2, weight_decay=0.1, foreach=False)],
}


@pytest.mark.parametrize("spec", REFERENCES)
def test_fp32_has_the_bits_of_the_reference(spec: str) -> None:
    assert torch.equal(trained(spec, "fp32", 1)[0], by_reference(torch.float32, REFERENCES[spec]))


@pytest.mark.parametrize("spec", ["adamw:states=8bit", "lion:states=bf16", "adamw:states=bf16"])
def test_bf16_without_a_master_copy(spec: str) -> None:
    reference = REFERENCES.get(spec) or REFERENCES[spec.partition(":")[0]]
    assert torch.equal(trained(spec, "bf16", 1)[0], by_reference(torch.bfloat16, reference))


@pytest.mark.parametrize(("dtype", "has_master"), [("fp32", False), ("bf16", True)])
@pytest.mark.parametrize("spec", [*REFERENCES, "lion:states=8bit", "lion:states=4bit"])
def test_parts_have_the_bits_of_the_whole(spec: str, dtype: str, has_master: bool) -> None:
    whole = trained(spec, dtype, 1, has_master=has_master)
    for num_parts in (2, 3, 5):
        of = layout(spec, dtype, has_master)
        try:
            of.part(States("L0", num_parts - 1, num_parts))
        except LayoutError:  # fewer matrices than that
            continue
        parts = trained(spec, dtype, num_parts, has_master=has_master)
        assert torch.equal(whole[0], parts[0])
        assert torch.equal(whole[1], parts[1])
        ranges = [of.part(States("L0", k, num_parts)) for k in range(num_parts)]
        assert torch.equal(of.join([of.cut(whole[1], part) for part in ranges], ranges), whole[1])


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("is_signed", [True, False])
def test_codes_are_those_of_torchao(bits: int, is_signed: bool) -> None:
    subclass = pytest.importorskip(f"torchao.optim.subclass_{bits}bit")
    block = {8: 256, 4: 128}[bits]
    theirs = getattr(subclass, f"OptimState{bits}bit").zeros((4096,), is_signed, block)
    values = code_values(bits, is_signed, torch.device("cpu"))
    assert torch.equal(values, theirs.qmap)
    exact = torch.randn(4096, generator=torch.Generator().manual_seed(5)) * torch.logspace(-8, 2, 4096)
    exact = exact if is_signed else exact.abs()
    theirs.copy_(exact)
    codes, scales = torch.empty(4096 * bits // 8, dtype=torch.uint8), torch.empty(4096 // block)
    encode(exact, codes, scales, values)
    assert torch.equal(codes, theirs.codes)
    assert torch.equal(decoded(codes, scales, values), theirs.dequantize())


def by_chance(exact: torch.Tensor, step: int, salt: int) -> torch.Tensor:
    """The rule once more, in whole numbers of 64 bits."""
    bits = exact.numpy().view(np.uint32).astype(np.uint64).ravel()
    places, low = np.arange(len(bits), dtype=np.uint64), np.uint64(0xFFFFFFFF)
    h = (places * np.uint64(0x27D4EB2F) + np.uint64(step * 0x165667B1 + salt * 0x2545F491) & low) ^ bits
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ h >> np.uint64(shift)) * np.uint64(factor) & low
    h = h ^ h >> np.uint64(16)
    kept = (bits + (h & np.uint64(0xFFFF)) & np.uint64(0xFFFF0000)).astype(np.uint32)
    return torch.from_numpy(kept.view(np.float32)).view(exact.shape).bfloat16()


def test_a_step_by_chance_is_an_fp32_step_of_which_all_is_rounded() -> None:
    parameters = [[p, torch.zeros_like(p), torch.zeros_like(p)] for p in start(torch.bfloat16)]
    for step, grads in enumerate(gradients(torch.bfloat16), 1):
        for held, grad in zip(parameters, grads, strict=True):
            p, first, second = (t.float() for t in held)
            p = torch.nn.Parameter(p)
            p.grad = grad.float()
            optimizer = torch.optim.AdamW([p], fused=True, **SETTINGS)  # type: ignore[arg-type]
            optimizer.state[p] = {"step": torch.tensor(step - 1.0), "exp_avg": first, "exp_avg_sq": second}
            optimizer.step()
            held[:] = [by_chance(t, step, salt) for salt, t in enumerate((p.detach(), first, second))]
    flat, states = trained(CHANCE, "bf16", 1)
    assert torch.equal(flat, torch.cat([p.view(-1) for p, *_ in parameters]))
    assert torch.equal(
        states.view(torch.bfloat16), torch.cat([m.view(-1) for _, *moments in parameters for m in moments])
    )


def test_parts_by_chance_have_the_bits_of_the_whole() -> None:
    whole = trained(CHANCE, "bf16", 1)
    for num_parts in (2, 3, 5):
        parts = trained(CHANCE, "bf16", num_parts)
        assert torch.equal(whole[0], parts[0])
        assert torch.equal(whole[1], parts[1])


@pytest.mark.parametrize("value", [1.0 + 1 / 1024, -3e-5, 7.3e20, 1.0])
def test_what_is_rounded_by_chance_is_right_on_average(value: float) -> None:
    """Over places, and over steps at one place: within five standard deviations of the mean of a fair draw."""
    exact = torch.full((1 << 16,), value)
    over_places, over_steps = torch.empty_like(exact, dtype=torch.bfloat16), []
    round_by_chance(exact, over_places, step=3, salt=1, begin=0)
    for step in range(4096):
        one = torch.empty(1, dtype=torch.bfloat16)
        round_by_chance(exact[:1], one, step=step, salt=0, begin=17)
        over_steps.append(one.item())
    for rounded in (over_places.double(), torch.tensor(over_steps, dtype=torch.float64)):
        near = rounded.unique()
        assert len(near) == (1 if value == 1.0 else 2)
        bound = 5 * float(near[-1] - near[0]) / 2 / len(rounded) ** 0.5
        assert abs(float(rounded.mean()) - float(exact[0])) <= bound


def test_by_chance_no_two_steps_tensors_or_parameters_round_alike() -> None:
    """Of values that lie half way, about half round otherwise."""
    half = torch.full((1 << 14,), 1.0 + 1 / 256)
    drawn = []
    for step, salt, exact in ((1, 0, half), (2, 0, half), (1, 1, half), (1, 0, half + 1 / 65536)):
        rounded = torch.empty_like(exact, dtype=torch.bfloat16)
        round_by_chance(exact, rounded, step=step, salt=salt, begin=0)
        drawn.append(rounded)
    for k, one in enumerate(drawn):
        for other in drawn[:k]:
            assert 0.4 < float((one != other).float().mean()) < 0.6


def test_an_optimizer_is_added_in_one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a file of one's own does: the entry says what is kept, the kernel what is done. Here, SignSGD."""

    def step(s: OptimizerStep) -> None:
        s.moments["sign"].mul_(s.option("decay")).add_(s.grad.sign())
        s.target.add_(s.moments["sign"], alpha=-s.lr)

    def kept(decay: float = 0.5) -> dict[str, object]:
        return {"moments": lambda shape, is_hidden, updated: (Moment(name="sign", num_values=prod(shape)),)}

    monkeypatch.setitem(OPTIMIZERS, "signsgd", kept)
    monkeypatch.setitem(KERNELS, "signsgd", step)
    flat, states = trained("signsgd", "fp32", 2)
    wanted, sign = torch.cat([p.view(-1) for p in start(torch.float32)]), torch.zeros(len(flat))
    for grads in gradients(torch.float32):
        sign.mul_(0.5).add_(torch.cat([g.view(-1) for g in grads]).sign())
        wanted.add_(sign, alpha=-1e-2)
    assert torch.equal(flat, wanted)
    assert torch.equal(states.view(torch.float32), sign)
