"""What the executor's own work takes: a model of blocks with next to nothing to compute, on schedules and plainly.

    python -m benchmarks.runtime.overhead [--turns 30] [--blocks 12] [--width 64] [--only NAME ...]

All train the same model from the same weights, in turns of a few steps, on one thread. Printed by schedule: its number
of ops, and the median and the quartiles, over turns, of its step over plain training's beside it, by the clock and by
the process's time on its cores.
"""

from __future__ import annotations

import copy
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.models import gpt2
from benchmarks.records import arguments, in_turns, spread
from benchmarks.trainings import batches, trainer_of
from tierplan.planner.plan import UnitPlan
from tierplan.runtime.trainer import Trainer

CHOICES = {
    "all kept": UnitPlan(),
    "all recomputed": UnitPlan(acts="recompute"),
    "states in host memory": UnitPlan(params="host", grads="host", states="host"),
    "activations in host memory": UnitPlan(acts="host", input="host"),
    "both in host memory": UnitPlan(params="host", grads="host", states="host", acts="host", input="host"),
}
"""By name, where what belongs to each unit is."""
LENGTH, STEPS = 16, 4
"""Tokens of a step, and steps of a turn."""
Turn = Callable[[], tuple[float, float]]
"""Trains a few steps: seconds by the clock, and on cores."""


def timed(work: Callable[[], None]) -> tuple[float, float]:
    begin_s, begin_core_s = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - begin_s, time.process_time() - begin_core_s


def plainly(model: torch.nn.Module) -> Turn:
    """Turns of plain training: a loop of PyTorch's own, as users write it."""
    optimizer, source = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), batches(LENGTH)

    def train() -> None:
        for batch in itertools.islice(source, STEPS):
            loss = model(**batch, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss.item()

    return lambda: timed(train)


def on_schedule(trainer: Trainer, source: Iterator[dict[str, torch.Tensor]]) -> Turn:
    """Turns of a trainer, between the first and the last end of a step: a run's beginning is not a step's work."""

    def turn() -> tuple[float, float]:
        times: list[tuple[float, float]] = []
        trainer.on_step = lambda step, loss: times.append((time.perf_counter(), time.process_time()))
        trainer.run(source, STEPS + 1)
        (first_s, first_core_s), (last_s, last_core_s) = times[0], times[-1]
        return last_s - first_s, last_core_s - first_core_s

    return turn


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--only", nargs="+", default=[*CHOICES], choices=[*CHOICES], metavar="NAME")
    args = parser.parse_args()
    torch.set_num_threads(1)
    raw = gpt2(args.width, args.blocks)
    with ExitStack() as stack:
        trainers = {}
        for name in args.only:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            settings: dict[str, Any] = {"length": LENGTH, "dtype": "fp32", "num_threads": 1, "trace_steps": 20}
            trainers[name] = stack.enter_context(trainer_of(raw, CHOICES[name], folder, **settings))
        turns = {name: on_schedule(trainer, batches(LENGTH)) for name, trainer in trainers.items()}
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        plain = plainly(AutoModelForCausalLM.from_config(AutoConfig.for_model(**copy.deepcopy(raw))).train())
        for turn in (plain, *turns.values()):
            turn()
            turn()
        for name, turn in turns.items():
            pairs = list(in_turns(turn, plain, args.turns))
            wall, cores = (spread([a[k] / b[k] for a, b in pairs]) for k in range(2))
            plain_ms = 1000 * statistics.median(b[0] for _, b in pairs) / STEPS
            print(
                f"{name}: {len(trainers[name].schedule.ops)} ops, {wall['ratio']:.2f} times plain training's step of "
                f"{plain_ms:.1f} ms ({wall['quartiles'][0]:.2f} to {wall['quartiles'][1]:.2f}); "
                f"on cores {cores['ratio']:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
