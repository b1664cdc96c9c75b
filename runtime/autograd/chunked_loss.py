"""Cross entropy over a part of the tokens at a time, so that the logits of all of them are never there at once.

Forward adds up the losses of the parts. Backward makes each part's logits again, and their gradients. Loss and
gradients are those of the whole but for rounding: the loss is summed part by part in fp32, and the gradient of the
output matrix part by part in its own dtype, as over micro-batches.

Shapes: `n` tokens of a micro-batch, `c` tokens of a part, `d` width, `v` vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tierplan.runtime.autograd.units import ModelError

IGNORED = -100


class _Sum(torch.autograd.Function):
    """The sum of the tokens' losses."""

    @staticmethod
    def forward(ctx: Any, x_nd: torch.Tensor, weight_vd: torch.Tensor, labels_n: torch.Tensor, num_chunks: int) -> Any:
        total = torch.zeros((), device=x_nd.device)
        for x_cd, labels_c in zip(x_nd.chunk(num_chunks), labels_n.chunk(num_chunks), strict=True):
            wide_cv = torch.mm(x_cd, weight_vd.t()).float()
            total += functional.cross_entropy(wide_cv, labels_c, ignore_index=IGNORED, reduction="sum")
            del wide_cv
        ctx.save_for_backward(x_nd, weight_vd, labels_n)
        ctx.num_chunks = num_chunks
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x_nd, weight_vd, labels_n = ctx.saved_tensors
        x_grad_nd = torch.empty(x_nd.shape, dtype=x_nd.dtype, device=x_nd.device)
        weight_grad_vd = None
        parts = (t.chunk(ctx.num_chunks) for t in (x_nd, x_grad_nd, labels_n))
        for x_cd, x_grad_cd, labels_c in zip(*parts, strict=True):
            grad_cv = torch.mm(x_cd, weight_vd.t()).float()
            grad_cv = torch.softmax(grad_cv, -1)
            counts_c1 = (labels_c != IGNORED).unsqueeze(1)
            minus_c1 = torch.full(counts_c1.shape, -1.0, device=x_nd.device)
            grad_cv.scatter_add_(1, labels_c.clamp(min=0).unsqueeze(1), minus_c1)
            grad_cv.mul_(counts_c1 * grads[0])
            grad_cv = grad_cv.to(x_nd.dtype)
            torch.mm(grad_cv, weight_vd, out=x_grad_cd)
            if weight_grad_vd is not None:
                torch.addmm(weight_grad_vd, grad_cv.t(), x_cd, out=weight_grad_vd)
            elif ctx.needs_input_grad[1]:
                weight_grad_vd = torch.mm(grad_cv.t(), x_cd)
            del grad_cv
        return x_grad_nd, weight_grad_vd, None, None


class _LogitsInChunks:
    """What stands for the logits, which are never there all at once: only the loss in chunks can use it."""

    def __init__(self, head: _Head, x: torch.Tensor) -> None:
        self.of, self.device = (head, x), x.device

    def contiguous(self) -> _LogitsInChunks:
        """The same, as after `float`: what some models do before they call the loss, which takes fp32 itself."""
        return self

    float = contiguous

    @classmethod
    def _refuse(cls, *unused: Any, **ignored: Any) -> Any:
        raise ModelError(
            "the loss is computed in chunks, so that the logits are never there all at once, but the model changes its "
            "logits behind its output matrix, or a loss function uses them; leave out --loss-chunks (loss_chunks=1), "
            "and plan again"
        )

    __torch_function__ = _refuse

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python asks whether it is there
            raise AttributeError(name)
        self._refuse()


_OPERATORS = """
    add radd sub rsub mul rmul truediv rtruediv floordiv mod pow rpow matmul rmatmul neg abs lt le gt ge eq ne getitem
    setitem len iter bool float int"""
for _name in _OPERATORS.split():
    setattr(_LogitsInChunks, f"__{_name}__", _LogitsInChunks._refuse)


class _Head(nn.Linear):
    """An output matrix that leaves its product to the loss, while training."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _LogitsInChunks(self, x) if self.training else super().forward(x)  # type: ignore[return-value]


@dataclass(eq=False)
class _Loss:
    """What a model of `transformers` calls for the loss of the next token."""

    head: _Head
    num_chunks: int
    of_whole: Any

    def __call__(
        self,
        logits: Any,
        labels: torch.Tensor,
        *args: Any,
        num_items_in_batch: Any = None,
        ignore_index: int = IGNORED,
        shift_labels: torch.Tensor | None = None,
        **given: Any,
    ) -> torch.Tensor:
        if not self.head.training:
            given |= {"num_items_in_batch": num_items_in_batch, "ignore_index": ignore_index}
            return self.of_whole(logits, labels, *args, shift_labels=shift_labels, **given)  # type: ignore[no-any-return]
        if not isinstance(logits, _LogitsInChunks):
            _LogitsInChunks._refuse()
        head, x = logits.of
        if shift_labels is None:
            labels_n = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous().view(-1)
        else:
            labels_n = shift_labels.reshape(-1).clone()
        if ignore_index != IGNORED:
            labels_n[labels_n == ignore_index] = IGNORED
        count = (labels_n != IGNORED).sum()
        if num_items_in_batch is not None:  # in as many bytes of its own as what is counted: so much is saved
            count = torch.zeros(2, device=x.device).copy_(torch.as_tensor(num_items_in_batch))[0]
        total: torch.Tensor = _Sum.apply(x.view(-1, x.shape[-1]), head.weight, labels_n, self.num_chunks)
        return total / count


@contextmanager
def loss_in_chunks(model: nn.Module, num_chunks: int) -> Iterator[None]:
    """Inside, the model computes its loss over so many parts of its tokens, or (1) over all of them at once.

    Raises `ModelError` for a model whose loss is not the cross entropy of the next token behind an output matrix.
    """
    old = vars(getattr(model, "get_base_model", lambda: model)()).get("_loss_function")
    set_loss_chunks(model, num_chunks)
    try:
        yield
    finally:
        set_loss_chunks(model, old.num_chunks if isinstance(old, _Loss) else 1)


def set_loss_chunks(model: Any, num_chunks: int) -> None:
    """The same from now on."""
    model = getattr(model, "get_base_model", lambda: model)()  # inside of PEFT's
    old = vars(model).get("_loss_function")
    if isinstance(old, _Loss):
        old.head.__class__ = nn.Linear  # type: ignore[assignment]
        model.loss_function = old.of_whole
    if num_chunks == 1:
        return
    from transformers.loss.loss_utils import ForCausalLMLoss

    head: Any = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if hasattr(head, "modules_to_save"):  # PEFT trains a copy of it
        head = head.modules_to_save["default"]
    of_whole = getattr(model, "loss_function", None)
    has_encoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if type(head) is not nn.Linear or head.bias is not None or of_whole is not ForCausalLMLoss or has_encoder:
        raise ModelError(
            f"the loss of {type(model).__name__} is not the cross entropy of the next token behind an output matrix "
            "without a bias, as that of a causal model of `transformers`; leave out --loss-chunks"
        )
    head.__class__ = _Head
    model.loss_function = _Loss(head, num_chunks, of_whole)
