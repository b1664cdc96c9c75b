"""The optimizer step of one flat buffer, in chunks, with the bits of PyTorch's own optimizers.

AdamW is `torch._fused_adamw_`, the kernel behind `torch.optim.AdamW(fused=True)`, applied to pieces that fit a cache,
so that a bf16 gradient is cast where it is needed (2.3 times as fast as casting a whole buffer first). The kernel
rounds differently in the last, partial vector of a tensor, so pieces end on whole vectors, except at the end of a
parameter that is not whole vectors (a `Segment`). Then every chunk size and thread count gives the same bits.

Other optimizers go the same way, each by its own kernel (`kernels`); those whose states are not alike for all
parameters (`states`) parameter by parameter.

    NonFiniteGradientError(RuntimeError)   a gradient holds inf or nan; raised before anything is changed
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import get_num_threads
from torch.nn import functional

from tierplan.runtime.optim.codes import round_by_chance
from tierplan.runtime.optim.kernels import KERNELS, OptimizerStep
from tierplan.runtime.optim.states import StateLayout, View
from tierplan.sim.workloads.optimizers import VECTOR_ELEMENTS

CHUNK_ELEMENTS = 1 << 20
MIXED_ELEMENTS = 1 << 19
"""For each thread, where there is a master copy: what one pass leaves in the cache, the next one uses. On a core beside
others 7 to 26 % more parameters a second than `CHUNK_ELEMENTS`; half of it gains less on a quiet machine."""
CODED_ELEMENTS = 1 << 16
"""Of moments that are decoded at once: few enough to stay in a core's cache."""


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


def update_states(
    params: torch.Tensor,
    grads: torch.Tensor | Sequence[torch.Tensor],
    views: Sequence[View],
    layout: StateLayout,
    settings: OptimizerSettings,
    *,
    part: range,
    step: int,
    lr: float,
    clip: torch.Tensor | None = None,
    segments: Sequence[Segment] = (),
    label: str = "",
) -> None:
    """One optimizer step of a part of a unit, as `update_flat`, with its states as they lie in memory."""
    if layout.optimizer.is_flat:
        update_flat(
            params, grads, views[0].tensors if views else {}, settings,
            step=step, lr=lr, clip=clip, segments=segments, begin=part.start, label=label,
        )  # fmt: skip
        return
    grads = [grads] if isinstance(grads, torch.Tensor) else grads
    _check_finite(grads, label, CHUNK_ELEMENTS)
    by_chance = layout.optimizer.is_stochastic
    is_coded = layout.optimizer.grain is not None and not by_chance
    starts = list(itertools.accumulate((grad.numel() for grad in grads), initial=part.start))
    segments = segments or [Segment(length=part.stop, weight_decay=settings.weight_decay)]
    ends = list(itertools.accumulate(segment.length for segment in segments))
    for view in views:
        segment = segments[bisect_right(ends, view.begin)]
        own = params[view.begin - part.start :][: view.length]
        target = view.tensors.get("master", own)
        size = CODED_ELEMENTS if by_chance or (view.formats and layout.optimizer.grain) else view.length
        for begin in range(0, view.length, size):
            end = min(begin + size, view.length)
            k = bisect_right(starts, view.begin + begin) - 1
            grad = grads[k][view.begin + begin - starts[k] :][: end - begin]
            if clip is not None:
                grad = grad * clip.to(grad.device)
            moments = view.moments(begin, end)
            stored = {"target": target[begin:end], **moments}
            exact = {name: tensor.float() for name, tensor in stored.items()} if by_chance else stored
            grad = grad.to(exact["target"].dtype)
            _step(exact, grad, segment, settings, step=step, lr=lr, shape=view.shape, is_coded=is_coded)
            view.keep(moments, begin, end)
            for salt, (name, rounded) in enumerate(stored.items() if by_chance else ()):
                round_by_chance(exact[name], rounded, step=step, salt=salt, begin=view.offset + begin)
        if target is not own:
            own.copy_(target)


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
    chunk_elements: int | None = None,
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
    master = regions.get("master")
    if params.is_cuda:  # chunks are for caches of the host
        chunk_elements = max(1, params.numel())
    elif len(grads) > 1 and params.numel() <= CHUNK_ELEMENTS:
        grads = [torch.cat(list(grads))]  # one call of the kernel is worth more than this copy
    _check_finite(grads, label, chunk_elements or CHUNK_ELEMENTS)
    if chunk_elements is None:
        chunk_elements = CHUNK_ELEMENTS if master is None else min(CHUNK_ELEMENTS, MIXED_ELEMENTS * get_num_threads())
    target = params if master is None else master
    tensors = {"target": target, **{name: region for name, region in regions.items() if name != "master"}}
    segments = segments or [Segment(length=begin + params.numel(), weight_decay=settings.weight_decay)]
    clip = clip if clip is None else clip.to(params.device)
    lengths = tuple(grad.numel() for grad in grads)
    for k, segment, here, of_grad, in_vector in _cuts(tuple(segments), chunk_elements, begin, lengths):
        own = _some(grads[k], of_grad)
        if clip is not None:
            own = own * clip
        of_piece = {name: _some(tensor, here) for name, tensor in tensors.items()}
        _step(of_piece, own.to(target.dtype), segment, settings, step=step, lr=lr, in_vector=in_vector)
        if master is not None:
            _some(params, here).copy_(of_piece["target"])


def _some(flat: torch.Tensor, part: slice) -> torch.Tensor:
    return flat if part.stop - part.start == flat.numel() else flat[part]


@functools.lru_cache(maxsize=4096)
def _cuts(
    segments: tuple[Segment, ...], chunk_elements: int, begin: int, lengths: tuple[int, ...]
) -> list[tuple[int, Segment, slice, slice, tuple[int, int] | None]]:
    """What the kernel is called for, where a part of a buffer begins there and its gradients have these lengths:
    the gradient, how it is updated, its place in the part and in the gradient, and in a vector."""
    cuts = []
    starts = list(itertools.accumulate(lengths, initial=begin))
    for piece, segment in _pieces(segments, chunk_elements):
        for k, (start, end) in enumerate(itertools.pairwise(starts)):
            for place, in_vector in _overlaps(piece, slice(start, end)):
                here, of_grad = (slice(place.start - x, place.stop - x) for x in (begin, start))
                cuts.append((k, segment, here, of_grad, in_vector))
    return cuts


def _step(
    tensors: Mapping[str, torch.Tensor],
    grad: torch.Tensor,
    segment: Segment,
    settings: OptimizerSettings,
    *,
    step: int,
    lr: float,
    in_vector: tuple[int, int] | None = None,
    **more: Any,
) -> None:
    """The optimizer's kernel on what is updated (`target`) and its moments.

    For some elements of a vector, on them where they stand in it: `in_vector` is (offset, length of the vector).
    """
    if in_vector is not None:
        offset, length = in_vector
        around = (offset, length - offset - grad.numel())
        padded = {name: functional.pad(own, around) for name, own in tensors.items()}
        _step(padded, functional.pad(grad, around), segment, settings, step=step, lr=lr)
        for name, own in tensors.items():
            own.copy_(padded[name][offset : offset + grad.numel()])
        return
    moments = dict(tensors)
    KERNELS[settings.name.partition(":")[0]](
        OptimizerStep(
            target=moments.pop("target"), grad=grad, moments=moments, settings=settings, number=step,
            lr=lr if segment.lr_factor == 1.0 else lr * segment.lr_factor, weight_decay=segment.weight_decay, **more,
        )
    )  # fmt: skip


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
    is_in_one = len(grads) == 1 and 0 < grads[0].numel() <= chunk_elements
    chunks = grads if is_in_one else [chunk for grad in grads for chunk in grad.split(chunk_elements) if len(chunk)]
    extremes = [extreme for chunk in chunks for extreme in torch.aminmax(chunk)]
    if grads and grads[0].is_cuda:
        extremes = torch.stack(extremes).tolist()
    wrong = next((x for extreme in extremes if not isfinite(x := float(extreme))), None)
    if wrong is not None:
        raise NonFiniteGradientError(
            f"the gradient of {label or 'a unit'} holds {wrong}; the update was not made and the last "
            "committed step is intact. Lower the learning rate, clip gradients, or look at the data of this step"
        )
