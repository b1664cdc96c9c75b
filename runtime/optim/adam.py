"""The optimizer step of one flat buffer, in chunks, with the bits of PyTorch's own fused optimizers.

AdamW is `torch._fused_adamw_`, the kernel behind `torch.optim.AdamW(fused=True)`, applied to pieces of 1 Mi elements,
so that a bf16 gradient is cast where it is needed (2.3 times as fast as casting a whole buffer first). The kernel
rounds differently in the last, partial vector of a tensor, so pieces end on whole vectors, except at the end of a
parameter that is not whole vectors (a `Segment`). Then every chunk size and thread count gives the same bits.

The states of a unit are one flat fp32 buffer of regions, each one element per parameter:
`[master copy, if any | first moment | second moment]`.

    NonFiniteGradientError(RuntimeError)   a gradient holds inf or nan; raised before anything is changed
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from tierplan.sim.workloads.optimizers import VECTOR_ELEMENTS

CHUNK_ELEMENTS = 1 << 20
REGIONS: Mapping[str, tuple[str, ...]] = {"adamw": ("first", "second"), "sgd": ()}


class NonFiniteGradientError(RuntimeError):
    """A gradient holds inf or nan. Parameters and states are as before the update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterGroup:
    """Parameters that are treated differently from the rest, by their names in the model."""

    names: tuple[str, ...]
    weight_decay: float | None = None
    """None for that of the rest."""
    lr_factor: float = 1.0
    """Of the learning rate that the rest have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Neighbours in a flat buffer that are updated alike."""

    length: int
    weight_decay: float
    lr_factor: float = 1.0
    is_frozen: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """Hyper-parameters, under PyTorch's names."""

    name: str = "adamw"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    groups: tuple[ParameterGroup, ...] = ()
    """See `tierplan.runtime.optim.groups`."""
    frozen: tuple[str, ...] = ()
    """Names of parameters that are not updated, and whose gradients count for no norm. Gradients are made for them all
    the same, so that a plan of the whole model fits; the numbers are those of `requires_grad=False`."""


def state_regions(states: torch.Tensor, *, optimizer: str, has_master: bool) -> dict[str, torch.Tensor]:
    """Views of a unit's flat states (uint8) by region: `master`, `first`, `second`, each fp32."""
    names = (("master",) if has_master else ()) + REGIONS[optimizer]
    if not names:
        return {}
    return dict(zip(names, states.view(torch.float32).view(len(names), -1), strict=True))


def update_flat(
    params: torch.Tensor,
    grads: torch.Tensor | Sequence[torch.Tensor],
    regions: Mapping[str, torch.Tensor],
    settings: OptimizerSettings,
    *,
    step: int,
    lr: float,
    clip: torch.Tensor | None = None,
    segments: Sequence[Segment] = (),
    begin: int = 0,
    label: str = "",
    chunk_elements: int = CHUNK_ELEMENTS,
) -> None:
    """One optimizer step, in place on `params` and `regions`; all tensors flat, one element per parameter.

    Tensors may be a part of the buffer's; the bits are those of the whole, wherever it is cut.

    Parameters
    ----------
    params
        Working copy. With a master copy among the regions it is only written (`master` is what is updated).
    grads
        In the working copy's dtype; one tensor, or several that follow each other. Not changed.
    step
        1 in the first step of training.
    clip
        Coefficient of global-norm clipping, a scalar tensor of the dtype that `clip_grad_norm_` has made it.
    segments
        Of the whole buffer. By default all of it is updated alike, and is whole vectors but at its end.
    begin
        Of a part: where it begins in the buffer.
    label
        What is updated, for messages.

    Raises `NonFiniteGradientError` before anything has changed.
    """
    grads = [grads] if isinstance(grads, torch.Tensor) else grads
    if params.is_cuda:  # chunks are for caches of the host
        chunk_elements = max(1, params.numel())
    _check_finite(grads, label, chunk_elements)
    master = regions.get("master")
    target = params if master is None else master
    step_tensor = torch.tensor(float(step), dtype=torch.float32, device=params.device)
    tensors = [target, *(regions[name] for name in REGIONS[settings.name])]
    segments = segments or [Segment(length=begin + params.numel(), weight_decay=settings.weight_decay)]
    clip = clip if clip is None else clip.to(params.device)
    starts = list(itertools.accumulate((grad.numel() for grad in grads), initial=begin))
    for piece, segment in _pieces(segments, chunk_elements):
        rate = lr if segment.lr_factor == 1.0 else lr * segment.lr_factor
        for grad, start in zip(grads, starts, strict=False):
            for here, in_vector in _overlaps(piece, slice(start, start + grad.numel())):
                part = slice(here.start - begin, here.stop - begin)
                if segment.is_frozen:
                    if master is not None:
                        params[part].copy_(master[part])  # the working copy may be in new memory
                    continue
                own = grad[here.start - start : here.stop - start]
                if clip is not None:
                    own = own * clip
                own = own.to(target.dtype)
                tensors_here = [tensor[part] for tensor in tensors]
                _step(tensors_here, own, settings, step_tensor, rate, segment.weight_decay, in_vector)
                if master is not None:
                    params[part].copy_(master[part])


def _step(
    tensors: Sequence[torch.Tensor],
    grad: torch.Tensor,
    settings: OptimizerSettings,
    step: torch.Tensor,
    lr: float,
    weight_decay: float,
    in_vector: tuple[int, int] | None = None,
) -> None:
    """The optimizer's kernel on what is updated and its moments.

    For some elements of a vector, on them where they stand in it: `in_vector` is (offset, length of the vector).
    """
    if in_vector is not None:
        offset, length = in_vector
        here = slice(offset, offset + grad.numel())
        padded = [torch.zeros(length, dtype=grad.dtype, device=grad.device) for _ in (grad, *tensors)]
        for whole, own in zip(padded, (grad, *tensors), strict=True):
            whole[here].copy_(own)
        _step(padded[1:], padded[0], settings, step, lr, weight_decay)
        for whole, own in zip(padded[1:], tensors, strict=True):
            own.copy_(whole[here])
        return
    target, *moments = tensors
    if settings.name == "adamw":
        first, second = moments
        torch._fused_adamw_(
            [target], [grad], [first], [second], [], [step], lr=lr, beta1=settings.betas[0], beta2=settings.betas[1],
            weight_decay=weight_decay, eps=settings.eps, amsgrad=False, maximize=False,
        )  # fmt: skip
    else:
        if weight_decay:
            grad = grad.add(target, alpha=weight_decay)
        target.add_(grad, alpha=-lr)


def _pieces(segments: Sequence[Segment], chunk_elements: int) -> Iterator[tuple[slice, Segment]]:
    """Chunks of what is updated, none across two segments."""
    step = max(VECTOR_ELEMENTS, chunk_elements // VECTOR_ELEMENTS * VECTOR_ELEMENTS)
    begin = 0
    for segment in segments:
        end = begin + segment.length
        for at in range(begin, end, step):
            yield slice(at, min(at + step, end)), segment
        begin = end


def _overlaps(piece: slice, part: slice) -> Iterator[tuple[slice, tuple[int, int] | None]]:
    """What a part has of a piece: whole vectors, and ends that are cut out of one, with their place in it.

    The kernel counts vectors from a tensor's start and rounds what is left at its end differently; so elements at a
    cut within a vector have to stand where they stand in the whole.
    """
    begin, end = max(piece.start, part.start), min(piece.stop, part.stop)
    while begin < end:
        offset = (begin - piece.start) % VECTOR_ELEMENTS
        whole = end if end == piece.stop else end - (end - piece.start) % VECTOR_ELEMENTS
        if offset == 0 and whole > begin:
            yield slice(begin, whole), None
            begin = whole
            continue
        start = begin - offset
        length = min(VECTOR_ELEMENTS, piece.stop - start)
        stop = min(end, start + length)
        yield slice(begin, stop), (offset, length)
        begin = stop


def _check_finite(grads: Sequence[torch.Tensor], label: str, chunk_elements: int) -> None:
    """By the extremes, which are nan where an element is: over ten times as quick as a norm or an `isfinite` of all.

    On a device the host waits for it once.
    """
    chunks = (grad[k : k + chunk_elements] for grad in grads for k in range(0, grad.numel(), chunk_elements))
    extremes = [extreme for chunk in chunks for extreme in torch.aminmax(chunk)]
    if extremes and not torch.isfinite(all_ := torch.stack(extremes)).all():
        wrong = all_[~torch.isfinite(all_)][0].item()
        raise NonFiniteGradientError(
            f"the gradient of {label or 'a unit'} holds {wrong}; the update was not made and the last "
            "committed step is intact. Lower the learning rate, clip gradients, or look at the data of this step"
        )
