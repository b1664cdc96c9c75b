"""Sizes of formats: against figures that were published."""

import math

import pytest

from tierplan.sim.workloads.formats import FORMATS, format_of
from tierplan.sim.workloads.workload import Training, WorkloadError


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("nf4", 4.5),  # QLoRA, section 3: 32/64 bits for scales
        ("nf4-double", 4.127),  # QLoRA, section 3: 8/64 + 32/(64 x 256)
        ("dynamic8", 8.125),  # 8-bit optimizers: blocks of 256 with an fp32 scale (torchao: 2.03 bytes of two moments)
        ("dynamic4", 4.25),  # torchao's 4-bit Adam: blocks of 128
        ("dynamic4-256", 4.125),  # the Trainer's: blocks of 256
    ],
)
def test_published_bits_per_value(name: str, bits: float) -> None:
    assert 8 * format_of(name).size_bytes(2**24) / 2**24 == pytest.approx(bits, abs=1e-3)


def test_lossless_codes_have_about_the_published_share_of_bf16() -> None:
    """DFloat11: 67.6 % (Llama 3.3 70B) to 69.5 % (Stable Diffusion 3.5 Large); none of values in fp32."""
    share = format_of("df11").size_bytes(2**24) / format_of("bf16").size_bytes(2**24)
    assert 0.676 <= share <= 0.695
    assert Training(base="df11", lora="r=4").base == "df11"
    with pytest.raises(WorkloadError, match="without loss, but the model is in 'fp32'; give dtype bf16"):
        Training(base="df11", lora="r=4", dtype="fp32")


def test_a_scale_per_row_and_partly_filled_blocks() -> None:
    assert format_of("int8").size_bytes(300 * 20, 20) == 300 * 20 + 20 * 4
    assert format_of("nf4").size_bytes(65) == math.ceil(65 / 2) + 2 * 4
    assert [format_of(name).size_bytes(3) for name in ("fp32", "bf16", "fp16")] == [12, 6, 6]
    assert all(f.size_bytes(0) == 0 for f in FORMATS.values())


def test_only_formats_with_scales_cost_an_op() -> None:
    assert format_of("nf4").coding_bytes(128, 2) == 64 + 8 + 256
    assert format_of("bf16").coding_bytes(128, 4) == 0
    kernels = 4.5 + 5 + 2 + 2 + 3  # auto-gptq's, all at half the memory's rate; codes and result are counted once
    assert format_of("int4").coding_bytes(16, 2) == 8 + 3 + 16 * (2 * kernels - 0.5 - 2) + 32


def test_an_unknown_format_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'nf5'; did you mean 'nf4'"):
        format_of("nf5")
