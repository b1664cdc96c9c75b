"""Linear layers of a frozen base whose weights lie in codes, as QLoRA has them: decoded where they are used.

Forward and backward decode the weight each for itself, so that no wide copy of it lives longer than one product. Codes
and scales are frozen parameters like others, which lie and travel as others do.

Shapes: `o` outputs, `i` inputs. Codes are bytes; of 4 bits each holds two values, the first in its upper half.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from tierplan.sim.workloads.formats import CODED_AT_ONCE, executed_bases, format_of
from tierplan.sim.workloads.workload import WorkloadError

TYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
FLOATING = [name for name, dtype in TYPES.items() if dtype.is_floating_point]
"""Of these, what activations may be coded in."""
SCALE_BYTES = 4
DECODED_AT_ONCE = 2**18
"""Values, so that what decoding takes beside its result is small."""


class CodedLinear(nn.Linear):
    """A linear layer with a weight in codes, which is not trained."""

    def __init__(self, layer: nn.Module, base: str) -> None:
        nn.Module.__init__(self)
        weight: torch.Tensor = layer.weight  # type: ignore[assignment]
        self.shape, self.is_turned = weight.shape, not isinstance(layer, nn.Linear)  # as `Conv1D` has it
        weight_oi = weight.detach().t().contiguous() if self.is_turned else weight.detach()
        self.base, self.dtype = base, weight_oi.dtype
        self.out_features, self.in_features = weight_oi.shape
        for level, part in enumerate(_coded(weight_oi, base)):
            name = f"codes{level or ''}" if part.dtype == torch.uint8 else "scales"
            self.register_parameter(name, nn.Parameter(part, requires_grad=False))
        self.register_parameter("bias", layer.bias)  # type: ignore[arg-type]

    @property
    def coded(self) -> list[torch.Tensor]:
        """Codes, and their scales."""
        return [p for name, p in self._parameters.items() if name != "bias" and p is not None]

    def take(self, weight: torch.Tensor) -> None:
        """Has this weight from now on, which lies as that of the layer did in whose place it is."""
        weight_oi = weight.t().contiguous() if self.is_turned else weight
        for p, part in zip(self.coded, coded_weight(weight_oi, self.base), strict=True):
            p.data = part

    @property
    def num_values(self) -> int:
        return self.out_features * self.in_features

    @property
    def settings(self) -> tuple[str, torch.dtype, int, int]:
        return self.base, self.dtype, self.out_features, self.in_features

    def __getattr__(self, name: str) -> Any:
        """`weight`, decoded, for whoever looks at it."""
        return decoded_weight(self.coded, *self.settings) if name == "weight" else super().__getattr__(name)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.base == "int4":  # decoded once for forward and backward, bias beside it, and a copy, as below
            wide = functional.linear(input, self.weight)
            wide = wide if self.bias is None else wide + self.bias
            return wide.clone()
        out: torch.Tensor = _Product.apply(input, self.bias, self.settings, *self.coded)  # type: ignore[no-untyped-call]
        return out


class _Product(torch.autograd.Function):
    """`x @ weight.T + bias`, with a weight that is decoded for it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, settings: Any, *coded: torch.Tensor) -> Any:
        ctx.settings = settings
        ctx.save_for_backward(*coded)
        return functional.linear(x, decoded_weight(coded, *settings), bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        needs_x, needs_bias, *_ = ctx.needs_input_grad
        x_grad = torch.matmul(grads[0], decoded_weight(ctx.saved_tensors, *ctx.settings)) if needs_x else None
        bias_grad = grads[0].flatten(0, -2).sum(0) if needs_bias else None
        return x_grad, bias_grad, None, *(None for _ in ctx.saved_tensors)


@torch.library.custom_op("tierplan::decoded_weight", mutates_args=())
def decoded_weight(
    coded: Sequence[torch.Tensor], base: str, dtype: torch.dtype, num_out: int, num_in: int
) -> torch.Tensor:
    """The weight (o, i) of codes and scales: the bits of bitsandbytes for nf4, and of torchao for int8 and fp8."""
    refuse_unknown(base)
    codes, scales = coded
    weight = torch.empty(num_out * num_in, dtype=dtype, device=codes.device)
    block = format_of(base).block or num_in
    for k in range(0, len(scales), each := max(DECODED_AT_ONCE // block, 1)):
        part = weight[k * block : (k + each) * block]
        begin, end = (format_of(base).bits * at // 8 for at in (k * block, k * block + len(part) + len(part) % 2))
        wide = _values(codes[begin:end], base)[: len(part)]
        part.copy_(wide.mul_(scales[k : k + each].repeat_interleave(block)[: len(part)]))
    return weight.view(num_out, num_in)


def _values(codes: torch.Tensor, base: str) -> torch.Tensor:
    """fp32, without scales."""
    if base in TYPES:
        return codes.view(TYPES[base]).float()
    form = format_of(base)
    each = torch.stack([codes >> 4, codes & 15], -1).view(-1) if form.bits == 4 else codes
    return torch.tensor(form.codebook, device=codes.device)[each.int()]


def coded_weight(weight_oi: torch.Tensor, base: str) -> list[torch.Tensor]:
    """Codes and scales of a weight, by the rules of the same libraries."""
    refuse_unknown(base)
    if codebook := (form := format_of(base)).codebook:
        flat, values = weight_oi.flatten().float(), torch.tensor(codebook)
        blocks = functional.pad(flat, (0, -len(flat) % form.block)).view(-1, form.block)
        scales = blocks.abs().amax(-1) / values.abs().max()
        scaled = (blocks * (1.0 / scales.clamp(min=1e-38))[:, None]).clamp_(codebook[0], codebook[-1])
        scaled = scaled.view(-1)[: len(flat)]
        codes = torch.bucketize(scaled, (values[1:] + values[:-1]) / 2, out_int32=True).to(torch.uint8)
        codes = functional.pad(codes, (0, len(codes) % 2))
        return [codes[::2] << 4 | codes[1::2] if form.bits == 4 else codes[: len(flat)], scales]
    most = weight_oi.abs().amax(-1, keepdim=True)
    if base == "int8":
        scales = (most / 127.5).float().clamp(min=torch.finfo(torch.float32).eps)
        codes = torch.round(weight_oi * (1.0 / scales)).clamp(-128, 127).to(torch.int8).view(torch.uint8)
    else:
        scales = (most / 448).float()
        codes = _rounded(weight_oi, scales, base)
    return [codes.flatten(), scales.flatten()]


def _rounded(values: torch.Tensor, scales: torch.Tensor, form: str) -> torch.Tensor:
    """Codes of 8 bits; of what is divided by 0, zero."""
    most = torch.finfo(TYPES[form]).max
    return torch.div(values, scales).clamp_(-most, most).nan_to_num_().to(TYPES[form]).view(torch.uint8)


def encode_acts(values: torch.Tensor, memory: torch.Tensor, form: str) -> None:
    """Writes a scale and the codes of activations, any number of floating values, into so many bytes."""
    parts, scale = values.split(CODED_AT_ONCE), memory[:SCALE_BYTES].view(torch.float32)
    most = torch.stack([part.abs().amax() for part in parts]).amax().float()
    scale.copy_(most / torch.finfo(TYPES[form]).max)
    for part, codes in zip(parts, memory[SCALE_BYTES:].split(CODED_AT_ONCE), strict=True):
        codes.copy_(_rounded(part, scale, form))


def decode_acts(memory: torch.Tensor, values: torch.Tensor, form: str) -> None:
    """What `encode_acts` has written."""
    scale, parts = memory[:SCALE_BYTES].view(torch.float32), memory[SCALE_BYTES:].split(CODED_AT_ONCE)
    for part, codes in zip(values.split(CODED_AT_ONCE), parts, strict=True):
        part.copy_(_values(codes, form).mul_(scale))


def _coded(weight_oi: torch.Tensor, base: str) -> list[torch.Tensor]:
    """The same; of a weight that has no memory, what has none either."""
    if weight_oi.device.type != "meta" and not isinstance(weight_oi, FakeTensor):
        return coded_weight(weight_oi, base)
    *codes, scales = format_of(base).part_bytes(weight_oi.numel(), weight_oi.shape[0])
    if base not in executed_bases():  # the scales are no fp32 numbers alone
        return [weight_oi.new_empty(num, dtype=torch.uint8) for num in (*codes, scales)]
    return [weight_oi.new_empty(codes[0], dtype=torch.uint8), weight_oi.new_empty(scales // 4, dtype=torch.float32)]


def refuse_unknown(base: str) -> None:
    """Raises `WorkloadError` for formats that are planned and not executed."""
    if base not in executed_bases():
        raise WorkloadError(f"base {base!r} is planned, and not executed; run one of {', '.join(executed_bases())}")


@decoded_weight.register_fake
def _(coded: Sequence[torch.Tensor], base: str, dtype: torch.dtype, num_out: int, num_in: int) -> torch.Tensor:
    return coded[0].new_empty(num_out, num_in, dtype=dtype)


def code_base(model: nn.Module, base: str, *, whole: bool) -> None:
    """Puts coded layers in place of linear ones but the output matrix: of the `whole` model, or of what is frozen."""
    from transformers.pytorch_utils import Conv1D

    output = getattr(model, "get_output_embeddings", lambda: None)()
    frozen_layers = [
        (parent, name, layer)
        for parent in model.modules()
        for name, layer in parent.named_children()
        if isinstance(layer, (nn.Linear, Conv1D)) and layer is not output and (whole or not layer.weight.requires_grad)
    ]
    if not frozen_layers:
        raise WorkloadError(
            f"base is {base!r}, but {type(model).__name__} has no frozen linear layer that could be in it; freeze some"
        )
    for parent, name, layer in frozen_layers:
        setattr(parent, name, CodedLinear(layer, base))
