"""Plain in-memory training: the numbers that every schedule must give, bit for bit.

An ordinary loop with PyTorch's own optimizer (`fused=True`), clipping and gradient accumulation. bf16 training keeps
an fp32 master copy that the optimizer updates and the model's parameters are rounded from. The only departure from the
shortest possible loop is that each micro-batch's random numbers are seeded, so that dropout does not depend on the
order in which micro-batches are computed; and that batches go on with the random numbers that they had. On CUDA, bits
are equal where PyTorch's algorithms are deterministic (docs/runtime.md).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import nn

from tierplan.runtime.autograd.units import find_blocks
from tierplan.runtime.optim.adam import OptimizerSettings, update_states
from tierplan.runtime.optim.kernels import MUON_LR
from tierplan.runtime.optim.states import layout_of
from tierplan.sim.workloads.optimizers import optimizer_of


def micro_batch_seed(seed: int, step: int, micro_batch: int) -> int:
    """The seed of one micro-batch's random numbers."""
    return ((seed * 1_000_003 + step) * 1_000_003 + micro_batch) % 2**63


def loss_of(
    model: nn.Module, batch: Mapping[str, Any], loss: Callable[[Any, Mapping[str, Any]], torch.Tensor] | None
) -> torch.Tensor:
    """The loss of one micro-batch: by `loss`, else the one that the model's output is or has."""
    output = model(**batch)
    if loss is not None:
        return loss(output, batch)
    of_dict = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    loss_value = output if isinstance(output, torch.Tensor) else of_dict
    if loss_value is None or loss_value.numel() != 1:
        raise ValueError(
            f"the output of {type(model).__name__} is a {type(output).__name__}, which has no loss; a model gives its "
            "loss as one number, or as `loss` of its output. Put labels into the batches, or give a `loss` function"
        )
    return loss_value


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Switches off the cache of keys and values, which training has no use for, and on again at the end."""
    every = {id(c): c for c in (getattr(module, "config", None) for module in model.modules())}  # a decoder has its own
    changed: list[Any] = [config for config in every.values() if getattr(config, "use_cache", False)]
    for config in changed:
        config.use_cache = False
    try:
        yield
    finally:
        for config in changed:
            config.use_cache = True


def train_plainly(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    *,
    steps: int,
    optimizer: OptimizerSettings | None = None,
    gradient_accumulation_steps: int = 1,
    max_grad_norm: float | None = None,
    master_weights: bool = True,
    learning_rate: Callable[[int], float] | None = None,
    loss: Callable[[Any, Mapping[str, Any]], torch.Tensor] | None = None,
    seed: int | None = 0,
    delayed: bool = False,
    sums: Callable[[nn.Parameter], Sequence[Sequence[int]]] | None = None,
    cut: Callable[[nn.Parameter, torch.Tensor], Sequence[torch.Tensor]] = lambda p, gradient: [gradient],
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> list[float]:
    """The losses by step; the model is trained in place. Settings as in `trainer.Trainer`.

    `delayed` is ZeRO-Offload's delayed update: gradients are applied one step later. Several devices add gradients up
    in another order: `sums` says of a parameter which micro-batches of a step are added up by themselves; these sums
    are then added in order. Where devices divide gradients, the norm is that of what `cut` makes of each.
    """
    settings = optimizer or OptimizerSettings()
    parameters = [p for p in model.parameters() if p.requires_grad]
    may_have = master_weights and optimizer_of(settings.name).keeps_master
    has_master = may_have and any(p.dtype != torch.float32 for p in parameters)
    masters = [nn.Parameter(p.detach().float()) if has_master else p for p in parameters]
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    hidden: set[str] = set()
    if settings.name.startswith("muon"):
        inside = ((name, *named) for name, block in find_blocks(model) for named in block.named_parameters())
        hidden = {f"{name}.{key}" for name, key, p in inside if p.ndim == 2}
    optimizers = _optimizers(dict(zip(names, masters, strict=True)), settings, hidden)
    num_updates = 0
    waiting: list[torch.Tensor] | None = None
    source, losses, drawn = iter(batches), [], torch.get_rng_state()
    with without_cache(model):
        for step in range(steps):
            if seed is not None:
                torch.set_rng_state(drawn)
            total, batches_of_step = 0.0, [next(source) for _ in range(gradient_accumulation_steps)]
            drawn = torch.get_rng_state()
            apart: list[list[torch.Tensor | None]] = []
            for m, batch in enumerate(batches_of_step):
                if seed is not None:
                    torch.manual_seed(micro_batch_seed(seed, step, m))
                scaled = loss_of(model, batch, loss)
                if gradient_accumulation_steps > 1:
                    scaled = scaled / gradient_accumulation_steps
                scaled.backward()
                total += scaled.item()
                if sums is not None:
                    apart.append([p.grad for p in parameters])
                    model.zero_grad()
            if sums is not None:
                for p, own in zip(parameters, zip(*apart, strict=True), strict=True):
                    terms = [[g for m in group if (g := own[m]) is not None] for group in sums(p)]
                    totals = [reduce(torch.add, group) for group in terms if group]
                    p.grad = reduce(torch.add, totals) if totals else None
            if max_grad_norm is not None:
                parts = [part for p in parameters if p.grad is not None for part in cut(p, p.grad)]
                norm = torch.nn.utils.get_total_norm(parts, foreach=False)
                torch.nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, norm, foreach=False)
            gradients = [p.grad for p in parameters]
            if delayed:
                gradients, waiting = waiting or [], gradients  # type: ignore[assignment]
            if gradients:
                for group in (group for one in optimizers for group in one.param_groups):
                    rate = learning_rate(num_updates) if learning_rate else settings.lr
                    group["lr"] = rate * group["lr_factor"]
                for master, gradient in zip(masters, gradients, strict=True):
                    master.grad = None if gradient is None else gradient.to(master.dtype)
                for one in optimizers:
                    one.step()
                num_updates += 1
                if has_master:
                    with torch.no_grad():
                        for p, master in zip(parameters, masters, strict=True):
                            p.copy_(master)
            for p in (*parameters, *masters):
                p.grad = None
            gradients.clear()  # else they lie beside the next step's activations
            apart.clear()
            losses.append(total)
            on_step(step, total)
    return losses


def train_with_tracked_memory(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    *,
    num_threads: int,
    on_step: Callable[[int, float], None],
    **settings: Any,
) -> tuple[list[float], int]:
    """As `train_plainly` on so many cores: the losses, and the highest sum of live tensors in bytes.

    Parameters, gradients, states and activations count, by PyTorch's memory tracker.
    """
    from torch.distributed._tools.mem_tracker import MemTracker  # takes longer to import than the rest of the runtime

    tracker, threads = MemTracker(), torch.get_num_threads()
    tracker.track_external(model)

    def after_step(step: int, loss: float) -> None:
        tracker.reset_mod_stats()  # it takes one iteration at a time
        on_step(step, loss)

    torch.set_num_threads(num_threads)
    try:
        with tracker:
            losses = train_plainly(model, batches, on_step=after_step, **settings)
    finally:
        torch.set_num_threads(threads)
    return losses, sum(int(by_kind["Total"]) for by_kind in tracker.get_tracker_snapshot("peak").values())


def same_weights(a: nn.Module, b: nn.Module) -> bool:
    """Whether two models have the same parameters, bit for bit."""
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def _optimizers(
    parameters: dict[str, nn.Parameter], settings: OptimizerSettings, hidden: Collection[str]
) -> Sequence[torch.optim.Optimizer]:
    """PyTorch's own optimizers, where it has them; the runtime's kernels on whole parameters elsewhere."""
    rest = dict(parameters)
    groups: list[dict[str, Any]] = []
    for group in settings.groups:
        chosen = {name: rest.pop(name) for name in group.names if name in rest}  # frozen ones are not here
        decay = settings.weight_decay if group.weight_decay is None else group.weight_decay
        groups.append({"named": chosen, "weight_decay": decay, "lr_factor": group.lr_factor})
    groups.append({"named": rest, "weight_decay": settings.weight_decay, "lr_factor": 1.0})

    def some(*, wanted: Callable[[str], bool] = lambda name: True) -> list[dict[str, Any]]:
        chosen = [
            {**group, "params": [p for n, p in group.pop("named").items() if wanted(n)]} for group in map(dict, groups)
        ]
        return [group for group in chosen if group["params"]]

    adam: dict[str, Any] = {"lr": settings.lr, "betas": settings.betas, "eps": settings.eps, "fused": True}
    momentum: Any = optimizer_of(settings.name).options.get("momentum")
    match settings.name.partition(":")[0]:
        case "sgd":
            return [torch.optim.SGD(some(), lr=settings.lr, momentum=momentum, foreach=False)]
        case "adafactor":
            return [torch.optim.Adafactor(some(), lr=settings.lr, foreach=False)]
        case "muon":
            how: dict[str, Any] = {"lr": settings.lr, "momentum": momentum, "adjust_lr_fn": MUON_LR}
            blocks, others = some(wanted=lambda name: name in hidden), some(wanted=lambda name: name not in hidden)
            both = [torch.optim.Muon(blocks, **how)] if blocks else []  # adapters alone have no others
            return [*both, torch.optim.AdamW(others, **adam)] if others else both
        case _ if settings.name in ("adamw", "adamw:states=bf16"):
            return [torch.optim.AdamW(some(), **adam)]
    return [_Plain(some(), settings)]


class _Plain(torch.optim.Optimizer):
    """The runtime's kernel on each parameter, whole and by itself."""

    def __init__(self, groups: list[dict[str, Any]], settings: OptimizerSettings) -> None:
        super().__init__(groups, {"lr": settings.lr})
        self._settings, self._number = settings, 0

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self._number += 1
        for group in self.param_groups:
            settings = replace(self._settings, weight_decay=group["weight_decay"])
            for p in group["params"]:
                if p.grad is None:
                    continue
                dtype = "fp32" if p.dtype == torch.float32 else "bf16"
                layout = layout_of(settings.name, [p.shape], dtype, is_block=False, has_master=False)
                empty = torch.zeros(layout.size_bytes(layout.whole), dtype=torch.uint8, device=p.device)
                states = self.state[p].setdefault("states", empty)
                flat = p.reshape(-1)  # a copy, where p is not contiguous
                update_states(
                    flat, p.grad.reshape(-1), list(layout.views(states, layout.whole)), layout, settings,
                    part=layout.whole, step=self._number, lr=group["lr"],
                )  # fmt: skip
                p.copy_(flat.view(p.shape))
