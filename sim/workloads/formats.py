"""Formats: how the values of a buffer lie in a tier, and what an op must do to use them.

A quantised format has whole blocks of values that share a scale, and its scales have a format of their own: NF4 with
double quantisation is 4 bits in blocks of 64, whose scales are 8 bits in blocks of 256, whose scales are fp32. To add
a format, add an entry to `FORMATS`; with a codebook it also runs. What is not counted: constants per tensor, such as a
table of 16 codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """Bits of a value, and the scales that go with them."""

    bits: int
    """Of one value."""
    block: int = 0
    """Values that share a scale; 0: those of a row."""
    scales: Format | None = None
    """How scales lie there; None: values are used as they are, and no op decodes them."""
    pass_bytes: float = 0.0
    """What decoding reads and writes of a value between its kernels, where it is no single one."""
    num_kernels: int = 1
    """That decode a tensor."""
    is_base: bool = False
    """Whether the linear layers of a frozen base may have it."""
    is_acts: bool = False
    """Whether activations may leave the device in it."""
    exact_of: str = ""
    """The format whose values it has without loss, and no other's."""
    codebook: tuple[float, ...] = ()
    """What codes of 4 or 8 bits stand for, ascending, times the scale of a block: these are executed too."""

    @property
    def is_coded(self) -> bool:
        """Whether an op has to decode the values before it computes with them."""
        return self.scales is not None

    def part_bytes(self, num_values: int, num_rows: int = 1) -> tuple[int, ...]:
        """Of a tensor's values, of their scales, of the scales of these. The last block may be partly filled."""
        values = -(-num_values * self.bits // 8)
        if self.scales is None or not num_values:
            return (values,)
        return values, *self.scales.part_bytes(-(-num_values // self.block) if self.block else num_rows)

    def size_bytes(self, num_values: int, num_rows: int = 1) -> int:
        """Of all of these."""
        return sum(self.part_bytes(num_values, num_rows))

    def coding_bytes(self, num_values: int, value_bytes: int, num_rows: int = 1) -> int:
        """Bytes that decoding or encoding a tensor reads and writes, with values of `value_bytes` on the other side."""
        between = round(num_values * self.pass_bytes)
        return self.size_bytes(num_values, num_rows) + between + num_values * value_bytes if self.is_coded else 0


CODED_AT_ONCE = 2**20
"""Values of an activation, so that what coding takes beside its result is small."""
CODING_WORK_BYTES = 5
"""Of each of them: the value in fp32, and its code."""
NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""What the codes of NF4 stand for (Dettmers 2023)."""
FP32 = Format(bits=32)
FORMATS: dict[str, Format] = {
    "fp32": FP32,
    "bf16": Format(bits=16),
    "fp16": Format(bits=16),
    "fp8": Format(bits=8, scales=FP32, is_base=True, is_acts=True),
    "int8": Format(bits=8, scales=FP32, is_base=True),
    "nf4": Format(bits=4, block=64, scales=FP32, is_base=True, codebook=NF4_VALUES),
    "nf4-double": Format(bits=4, block=64, scales=Format(bits=8, block=256, scales=FP32), is_base=True),
    "int4": Format(bits=4, block=128, scales=Format(bits=20), pass_bytes=30.5, num_kernels=9, is_base=True),
    "df11": Format(bits=11, block=4096, scales=FP32, is_base=True, exact_of="bf16"),
    "dynamic8": Format(bits=8, block=256, scales=FP32),
    "dynamic4": Format(bits=4, block=128, scales=FP32),
    "dynamic4-256": Format(bits=4, block=256, scales=FP32),
}
"""fp8 and int8 as weights have them (torchao, LLM.int8: a scale per row; an activation in fp8 is one row), NF4 as
QLoRA has it, without and with double quantisation; int4 is GPTQ's, groups of 128 with a scale in 16 bits and a zero in
4, as auto-gptq 0.4 decodes them to train: codes are shifted as 32-bit integers, cast to 8 bits, masked, less their
zeros, times their scales, in a kernel each, which together move 16.5 bytes at half the memory's rate: PyTorch's kernels
with single bytes do (pytorch pull 174553: add 88 us where a copy of as much takes 45), and the shift, which spreads a
value over several, is taken to do so too;
df11 is DFloat11, whose exponents have Huffman's codes: how many bits depends on the weights, so 11 is an assumption
(models published with it have 67.6 to 69.5 % of their bytes; arXiv 2504.11651), and so is that one kernel decodes them
at the memory's rate; a position in 32 bits says where each 4,096 values begin;
dynamic8 and dynamic4 are moments of 8-bit (bitsandbytes, torchao) and 4-bit optimizers (torchao; in blocks of
256 as `transformers` sets it)."""


def bases() -> list[str]:
    """Formats that the linear layers of a frozen base may have."""
    return [name for name, form in FORMATS.items() if form.is_base]


def executed_bases() -> list[str]:
    """Of these, those that the runtime codes and decodes: with a scale per row, or with a codebook."""
    return [name for name in bases() if FORMATS[name].codebook or not FORMATS[name].block]


def act_formats() -> list[str]:
    """Formats in which activations may leave the device."""
    return [name for name, form in FORMATS.items() if form.is_acts]


def format_of(name: str) -> Format:
    """The format of this name; `ValueError` for one that is unknown, with those that are known."""
    if name not in FORMATS:
        meant = "".join(f"did you mean {close!r}? " for close in get_close_matches(name, FORMATS, n=1))
        raise ValueError(f"there is no format {name!r}; {meant}there are {', '.join(FORMATS)}")
    return FORMATS[name]
