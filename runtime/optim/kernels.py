"""The step of each optimizer on one parameter, or on some values of it: one function each, by the optimizer's name.

To add an optimizer, enter it in `tierplan.sim.workloads.optimizers.OPTIMIZERS`, which says what it keeps, its step in
`KERNELS`, and its name in `tierplan.sim.workloads.executed`, by which plans say that it runs. What a step is given is
flat and in the same dtype, moments in 8 or 4 bits as the fp32 values that they stand for. Whether it sees whole
parameters is for the optimizer's `grain` to say.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tierplan.sim.workloads.optimizers import Shape, optimizer_of

if TYPE_CHECKING:
    from tierplan.runtime.optim.adam import OptimizerSettings


@dataclass(slots=True, kw_only=True)
class OptimizerStep:
    """One step: everything is changed in place but the gradient."""

    target: torch.Tensor
    """The master copy, or the parameter itself."""
    grad: torch.Tensor
    moments: Mapping[str, torch.Tensor]
    settings: OptimizerSettings
    number: int
    """1 in the first step of training."""
    lr: float
    weight_decay: float
    shape: Shape = ()
    """Of the parameter, where the step sees all of it."""
    is_coded: bool = False
    """Whether moments stay in 8 or 4 bits between steps."""

    def option(self, name: str) -> float:
        value = optimizer_of(self.settings.name).options[name]
        assert isinstance(value, float)
        return value

    def by(self, make: Callable[..., torch.optim.Optimizer], state: Mapping[str, torch.Tensor], **more: object) -> None:
        """One step of an optimizer of PyTorch's, with these states of the parameter."""
        whole = torch.nn.Parameter(self.target.view(self.shape))
        whole.grad = self.grad.view(self.shape)
        optimizer = make([whole], lr=self.lr, weight_decay=self.weight_decay, **more)
        optimizer.state[whole] = dict(state)
        optimizer.step()


def _adamw(s: OptimizerStep) -> None:
    """`torch.optim.AdamW(fused=True)`; with moments in 8 or 4 bits torchao's, whose operations are not fused."""
    first, second, (beta1, beta2) = s.moments["first"], s.moments["second"], s.settings.betas
    number = _as_tensor(s.number, s.target.device)
    if not s.is_coded:
        torch._fused_adamw_(
            [s.target], [s.grad], [first], [second], [], [number], lr=s.lr, beta1=beta1, beta2=beta2,
            weight_decay=s.weight_decay, eps=s.settings.eps, amsgrad=False, maximize=False,
        )  # fmt: skip
        return
    lr = torch.tensor(s.lr, dtype=torch.float32, device=s.target.device)
    exact, grad = s.target.float(), s.grad.float()
    exact = exact - lr * s.weight_decay * exact
    mean, square = first.float().lerp(grad, 1 - beta1), second.float().lerp(grad.square(), 1 - beta2)
    first.copy_(mean)
    second.copy_(square)
    denominator = (square.sqrt() / (1 - beta2**number).sqrt()) + s.settings.eps
    s.target.copy_(exact - lr * (mean / (1 - beta1**number)) / denominator)


@functools.lru_cache(maxsize=4)
def _as_tensor(number: int, device: torch.device) -> torch.Tensor:
    return torch.tensor(float(number), dtype=torch.float32, device=device)


def _sgd(s: OptimizerStep) -> None:
    """`torch.optim.SGD(foreach=False)`."""
    grad = s.grad.add(s.target, alpha=s.weight_decay) if s.weight_decay else s.grad
    if (momentum := s.moments.get("momentum")) is not None:
        if s.number == 1:
            momentum.copy_(grad)
        else:
            momentum.mul_(s.option("momentum")).add_(grad)
        grad = momentum
    s.target.add_(grad, alpha=-s.lr)


def _lion(s: OptimizerStep) -> None:
    """Chen et al. 2023, with the operations of lion-pytorch."""
    first, (beta1, beta2) = s.moments["first"], s.settings.betas
    grad = s.grad.to(first.dtype)
    s.target.mul_(1.0 - s.lr * s.weight_decay)
    s.target.add_(first.clone().mul_(beta1).add(grad, alpha=1.0 - beta1).sgn_(), alpha=-s.lr)
    first.mul_(beta2).add_(grad, alpha=1.0 - beta2)


def _muon(s: OptimizerStep) -> None:
    """`torch.optim.Muon` with steps as long as AdamW's, and AdamW where the parameter is no matrix of a block."""
    momentum = s.moments.get("momentum")
    if momentum is None:
        _adamw(s)
    else:
        more = {"momentum": s.option("momentum"), "adjust_lr_fn": MUON_LR}
        s.by(torch.optim.Muon, {"momentum_buffer": momentum.view(s.shape)}, **more)


def _adafactor(s: OptimizerStep) -> None:
    """`torch.optim.Adafactor`."""
    state = {"step": torch.tensor(float(s.number - 1))}
    if "row" in s.moments:
        state["row_var"] = s.moments["row"].view(*s.shape[:-1], 1)
        state["col_var"] = s.moments["column"].view(*s.shape[:-2], 1, s.shape[-1])
    else:
        state["variance"] = s.moments["second"].view(s.shape)
    s.by(torch.optim.Adafactor, state, foreach=False)


MUON_LR = "match_rms_adamw"
KERNELS: dict[str, Callable[[OptimizerStep], None]] = {
    "adamw": _adamw,
    "sgd": _sgd,
    "lion": _lion,
    **({"muon": _muon} if hasattr(torch.optim, "Muon") else {}),
    "adafactor": _adafactor,
}
"""By the optimizer's name without its options."""
