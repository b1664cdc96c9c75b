"""What kernels reach that nobody measured on this machine: GPUs' by tables or by a relative's, the host's by its cores.

A part has its own curves in `catalog/curves/` (`benchmarks.gpu_tables` makes them), or names a relative that has.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from statistics import median

from tierplan.hwmodels.description import STRENGTH, Description, Quantity
from tierplan.hwmodels.machine import Rate


@dataclass(frozen=True, slots=True)
class BlockShape:
    """What a block of a transformer multiplies, heads of 128."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    layers: int
    is_gated: bool

    @property
    def products(self) -> tuple[tuple[int, int], ...]:
        """Outputs and inputs of its matrices."""
        kv = 2 * self.kv_heads * self.hidden // self.heads
        up = (1 + self.is_gated) * self.inner
        return (self.hidden + kv, self.hidden), (self.hidden, self.hidden), (up, self.hidden), (self.hidden, self.inner)

    def flops(self, tokens: int) -> float:
        """Of its matmuls forward."""
        return sum(2.0 * tokens * n * k for n, k in self.products)


SHAPES, SMALL = (
    {model: BlockShape(*of) for model, of in shapes.items()}
    for shapes in tomllib.loads(
        (files("tierplan.hwmodels") / "catalog/shapes.toml").read_text(encoding="utf-8")
    ).values()
)
"""Models whose steps are compared, and those whose blocks count in curves only."""
Values = Mapping[str, Quantity]
CLOCK = 1 / 3
"""Where power is short, a chip's clock goes with this power of it: watts grow with the cube of clock and voltage."""


def with_derived(values: Values, relative: Values, name: str) -> dict[str, Quantity]:
    """The part's values, with curves that it lacks: its own in the other 16-bit type, else its relative's, scaled."""
    found = dict(values := continued(values, relative, name))
    for work in ("matmul", "attention"):
        for dtype, other in (("bf16", "fp16"), ("fp16", "bf16")):
            key, peak = f"gpu.{work}_{dtype}", f"gpu.peak_{dtype}"
            if key in found or f"gpu.matmul_{dtype}" in values or peak not in values:
                continue
            own = f"gpu.{work}_{other}"
            if own in values and f"gpu.peak_{other}" in values:
                scale = _number(values, peak) / _number(values, f"gpu.peak_{other}")
                found[key] = _scaled(values[own], scale, scale, f"as {own}")
            elif f"gpu.{work}_bf16" in relative:
                scale = _number(values, peak) / _number(relative, "gpu.peak_bf16")
                watts = _number(values, "gpu.power") / _number(relative, "gpu.power")
                slower = min(1.0, watts / scale) ** CLOCK
                why = f"{name}'s table by peak ({scale:.3g}) and watts per peak ({slower:.3g})"
                found[key] = _scaled(relative[f"gpu.{work}_bf16"], scale, scale * slower, why)
    if "gpu.elementwise" not in found and "gpu.elementwise" in relative:
        scale = _number(values, "gpu.memory_bandwidth") / _number(relative, "gpu.memory_bandwidth")
        found["gpu.elementwise"] = _scaled(relative["gpu.elementwise"], scale, scale, f"{name}'s by bandwidth")
    return found


ATTENTION = "gpu.attention_bf16"


def continued(values: Values, relative: Values, name: str) -> dict[str, Quantity]:
    """The values, with attention beyond the longest sequences of the part's table as on its relative from there on.

    A rate that still rises where its table ends is not the most that it reaches; the relative's is scaled to meet it.
    """
    if ATTENTION not in values.keys() & relative.keys():
        return dict(values)
    own, other = values[ATTENTION], Rate(relative[ATTENTION].points)
    last, reached = own.points[-1]
    more = tuple((amount, rate * reached / other.at(last)) for amount, rate in other.points if amount > last)
    if not more or len(own.points) == 1:
        return dict(values)
    source = f"{own.source}; beyond it as {name}'s table"
    return {**values, ATTENTION: Quantity((*own.points, *more), "derived", source)}


SUSTAINED = {f"gpu.{work}_{dtype}" for work in ("matmul", "attention") for dtype in ("bf16", "fp16")}
"""What `gpu.sustained_frac` limits. Products in fp32 run on other units, of which nobody published the like."""


def kept_up(values: Values) -> dict[str, Quantity]:
    """The values, with 16-bit matmuls and attention at most at `gpu.sustained_frac` of the fastest that a table has.

    A table times kernels for moments; in training, which goes on for minutes, the power limit takes some of the clock.
    Ops too small to fill the chip draw less and keep it: so this is a limit, not a scale for all sizes.
    """
    found = dict(values)
    if (share := values.get("gpu.sustained_frac")) is None:
        return found
    for name in SUSTAINED & values.keys():
        quantity = values[name]
        if not isinstance(quantity.value, tuple):  # one rate, from no table
            continue
        most = max(rate for _, rate in quantity.points) * _number(values, "gpu.sustained_frac")
        limited = tuple((amount, min(rate, most)) for amount, rate in quantity.points)
        basis = max(quantity.basis, share.basis, key=STRENGTH.index)
        found[name] = Quantity(limited, basis, f"at most gpu.sustained_frac of the fastest: {quantity.source}")
    return found


ADAM_CORE = 1.1e9
"""Parameters per second and core: 1.13 on one and 2.14 G/s on two of an EPYC, 1 M parameters at a time, of 400 updates
the quickest twentieth (November 2026). PyTorch's kernel alone there: 3.06 with AVX2, 3.03 with AVX-512, else 0.61."""
ADAM_DRAM_FRAC = {1: 0.745, 2: 0.457}
"""Of the sheet's DRAM bandwidth, by sockets. One: PyTorch's fused Adagrad, 134 M parameters at 20 bytes in 17.59 ms on
32 cores of Ice Lake, 205 GB/s (pytorch/pytorch pull 124905; its time taken as 100 updates). Two, pages anywhere:
DeepSpeed's Adam, 3.9 G/s at 30 bytes on 2 x Xeon Platinum 8168, 256 GB/s (arXiv 2101.06840, row of 10 G parameters)."""


def host_adam(values: Values, traffic: float, sockets: float = 1) -> Quantity | None:
    """The optimizer on all cores: they or the DRAM are the limit. None where either is not known."""
    if not {"host.cores", "host.memory_bandwidth"} <= values.keys():
        return None
    by_cores = ADAM_CORE * _number(values, "host.cores")
    frac = ADAM_DRAM_FRAC[1 if sockets < 2 else 2]
    by_dram = frac * _number(values, "host.memory_bandwidth") / traffic
    why = f"the lesser of {ADAM_CORE / 1e9:g} G/s a core and {frac:g} of DRAM at {traffic:g} B each"
    return Quantity(min(by_cores, by_dram), "derived", why)


def _number(values: Values, name: str) -> float:
    return values[name].points[0][1]


def _scaled(quantity: Quantity, amount: float, rate: float, why: str) -> Quantity:
    points = tuple((x * amount, y * rate) for x, y in quantity.points)
    return Quantity(points if len(points) > 1 else points[0][1], "derived", f"{why}: {quantity.source}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveErrors:
    """How far off one GPU's steps are, matmuls and attention, that its table measured: medians over models."""

    gpu: str
    steps: int
    own: float
    """By its own curve."""
    relative: str
    by_relative: float | None
    """By its relative's, its own table left out; None without a relative."""


def curve_errors(parts: Mapping[str, Description], curves: Mapping[str, Description]) -> Iterator[CurveErrors]:
    """Leave-one-out over all GPUs whose tables measured steps. `parts` are as their files say, without curves."""
    for name, curve in curves.items():
        steps = [step for step in curve.notes.get("steps", ()) if isinstance(step, list)]  # type: ignore[attr-defined]
        if not steps:
            continue
        own = parts[name].values
        relative = str(own["gpu.relative"].value) if "gpu.relative" in own else ""
        error = None
        if relative:
            derived = with_derived(own, {**parts[relative].values, **curves[relative].values}, relative)
            error = _median_error(derived, steps)
        yield CurveErrors(
            gpu=name,
            steps=len(steps),
            own=_median_error({**own, **curve.values}, steps),
            relative=relative,
            by_relative=error,
        )


def _median_error(values: Values, steps: list[list[object]]) -> float:
    matmul = Rate(values["gpu.matmul_bf16"].points)
    attention = Rate(values.get("gpu.attention_bf16", values["gpu.matmul_bf16"]).points)
    errors = []
    for model, sequences, length, matmul_s, attention_s in steps:
        shape, tokens = SHAPES[str(model)], int(str(sequences)) * int(str(length))
        seconds = shape.layers * _op_s(matmul, shape.flops(tokens), 2.0)
        measured_s = float(str(matmul_s)) + float(str(attention_s))
        if float(str(attention_s)):
            seconds += shape.layers * _op_s(attention, 4.0 * tokens * int(str(length)) * shape.hidden, 2.5)
        errors.append(abs(seconds / measured_s - 1))
    return median(errors)


def _op_s(rate: Rate, forward: float, backward: float) -> float:
    """Of one block's op forward, and of the one backward, which is so many times the work."""
    return forward / rate.at(forward) + backward * forward / rate.at(backward * forward)
