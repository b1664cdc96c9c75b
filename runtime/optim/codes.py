"""Moments in 8 and 4 bits: blocks of values that share a scale, each value the nearest of 256 or 16 (Dettmers 2021).

The bits are those of torchao's optimizer states for the same fp32 values. Shapes: `b` blocks of `k` values.

Values in bf16 may be rounded by chance, so that what is cut off is not lost on average.
"""

from __future__ import annotations

from functools import lru_cache

import torch

LEAST_SCALE = 1e-12
PLACE, STEP, SALT = 0x27D4EB2F, 0x165667B1, 0x2545F491
"""Odd, so that no two places, steps or tensors that are near have the same random bits."""


@lru_cache(maxsize=8)
def code_values(bits: int, is_signed: bool, device: torch.device) -> torch.Tensor:
    """What the codes stand for, ascending: dynamic exponents and fractions; 4 bits without a sign are linear."""
    if bits == 4 and not is_signed:
        return torch.linspace(0, 1, 17)[1:].to(device)
    exponents = {8: 7, 4: 3}[bits]
    values = [0.0, 1.0]
    for i in range(exponents):
        num = 2 ** (i + bits - 1 - exponents + (not is_signed))
        ends = torch.linspace(0.1, 1, num + 1)
        middles = (10 ** (i + 1 - exponents) * ((ends[:-1] + ends[1:]) / 2.0)).tolist()
        values += middles + [-middle for middle in middles] * is_signed
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)


def decoded(codes: torch.Tensor, scales_b: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """fp32 values, flat."""
    if len(values) == 16:
        codes = torch.stack([codes >> 4, codes & 15], dim=-1)
    return (values[codes.int()].view(len(scales_b), -1) * scales_b[:, None]).view(-1)


def encode(exact: torch.Tensor, codes: torch.Tensor, scales_b: torch.Tensor, values: torch.Tensor) -> None:
    """Writes fp32 values as codes and scales."""
    exact_bk = exact.view(len(scales_b), -1)
    scales_b.copy_(exact_bk.abs().amax(-1).clip(LEAST_SCALE))
    scaled = (exact_bk / scales_b[:, None]).view(-1)
    below = (torch.bucketize(scaled, values, out_int32=True, right=True) - 1).clip_(min=0)
    above = (below + 1).clip_(max=len(values) - 1)
    down = values[below]
    nearest = torch.where(scaled - down >= (values[above] - down) * 0.5, above, below).to(torch.uint8)
    if len(values) == 16:
        nearest = nearest[::2] << 4 | nearest[1::2]
    codes.copy_(nearest)


def round_by_chance(exact: torch.Tensor, rounded: torch.Tensor, *, step: int, salt: int, begin: int) -> None:
    """Writes fp32 values (flat) as bf16: 16 random bits are added to each one's bits, of which the low 16 are cut off.

    The random bits are a hash (MurmurHash3's finalizer) of the step, of a `salt` for each tensor of a parameter, of the
    place in the parameter, which begins with `begin`, and of the value: the same wherever a parameter is cut and after
    a resume, and others in each parameter.
    """
    bits = exact.contiguous().view(torch.int32)
    seed = (begin * PLACE + step * STEP + salt * SALT + (1 << 31)) % (1 << 32) - (1 << 31)
    hashed = torch.arange(len(bits), dtype=torch.int32, device=bits.device).mul_(PLACE).add_(seed).bitwise_xor_(bits)
    hashed.bitwise_xor_(hashed.bitwise_right_shift(16).bitwise_and_(0xFFFF)).mul_(0x85EBCA6B - (1 << 32))
    hashed.bitwise_xor_(hashed.bitwise_right_shift(13).bitwise_and_(0x7FFFF)).mul_(0xC2B2AE35 - (1 << 32))
    hashed.bitwise_xor_(hashed.bitwise_right_shift(16)).bitwise_and_(0xFFFF)
    rounded.copy_(hashed.add_(bits).bitwise_and_(-0x10000).view(torch.float32))
