"""A picture of policies side by side: step time, and how busy each stream is."""

from __future__ import annotations

import os
from collections.abc import Sequence

from tierplan.hwmodels.names import COMPUTE, D2H, H2D, HOST_ADAM, NVME_READ, NVME_WRITE, parse_stream
from tierplan.planner.prediction import Prediction

COLOURS = {
    COMPUTE: "#0072B2",
    H2D: "#56B4E9",
    D2H: "#009E73",
    NVME_READ: "#F0E442",
    NVME_WRITE: "#E69F00",
    HOST_ADAM: "#D55E00",
}
"""Okabe and Ito's colours, which colour-blind readers can tell apart."""


def plot_policies(predictions: Sequence[Prediction], path: str | os.PathLike[str]) -> None:
    """Writes bars of step time and, on the same scale, of each stream's work per step; most tokens per second first.

    Of several devices' streams of a kind, the busiest is shown. What does not fit is named.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from tierplan.sim.output.plots import round_ticks, save_figure

    fitting = sorted((p for p in predictions if p.step_s is not None), key=lambda p: p.tokens_per_s or 0.0)
    missing = [p.policy for p in predictions if p.step_s is None]
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(11, 1.6 + 0.45 * max(len(fitting), 1)), sharex=True, sharey=True, layout="constrained"
    )
    rows = list(range(len(fitting)))
    steps = [p.step_s or 0.0 for p in fitting]
    left.barh(rows, steps, color="#59636e", height=0.6)
    for row, p in zip(rows, fitting, strict=True):
        long = (p.step_s or 0.0) > 0.6 * max(steps)
        at, colour = (0.0, "white") if long else (p.step_s or 0.0, "black")
        text = f" {p.step_s:.3g} s, {p.tokens_per_s:,.0f} tokens/s"
        left.text(at, row, text, va="center", fontsize=8, color=colour)
    left.set_yticks(rows, [p.policy for p in fitting])
    left.set(xlim=(0, 1.02 * max(steps, default=1.0)), xlabel="step time (s)")
    round_ticks(left)
    streams = [name for name in COLOURS if any(_busiest(p, name) for p in fitting)]
    height = 0.8 / max(len(streams), 1)
    for k, stream in enumerate(streams):
        busy = [_busiest(p, stream) * (p.step_s or 0.0) for p in fitting]
        offsets = [row + 0.4 - (k + 0.5) * height for row in rows]
        right.barh(offsets, busy, height=height, color=COLOURS[stream], label=stream, edgecolor="black", linewidth=0.3)
    right.set_xlabel("work of each stream in one step (s, alone)")
    if fitting:
        figure.legend(fontsize=8, loc="outside lower center", ncols=len(COLOURS))
    title = f"{predictions[0].model} on {predictions[0].machine}"
    figure.suptitle(title + (f"\ndoes not run: {', '.join(missing)}" if missing else ""), fontsize=10)
    save_figure(figure, path)
    plt.close(figure)


def _busiest(prediction: Prediction, stream: str) -> float:
    """The part of the step that the stream of this kind works, on the device where that is most."""
    alike = {stream} | {name for name in prediction.utilization if parse_stream(name).on(0) == stream}
    return max(prediction.utilization.get(name, 0.0) for name in alike)
