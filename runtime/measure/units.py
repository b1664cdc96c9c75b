"""How long this machine takes for each unit of a model: real forwards and backwards, executed by the runtime itself.

    measured = profile_workload(workload, model, batches)      or measure_workload("config.json", training)

The units run on a schedule of their own that holds everything on the device and updates nothing, so what is timed is
what a training step's compute stream does, with the runtime's own overheads. A second run drops what blocks save and
times how each tensor is made again. Blocks that are described alike share the median over all of them and over steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from torch import nn

from tierplan.hwmodels.names import COMPUTE, DEVICE, HOST
from tierplan.runtime.data.synthetic import random_batches
from tierplan.runtime.execution.agreement import MEASURES
from tierplan.runtime.optim.adam import OptimizerSettings
from tierplan.runtime.tracing.models import build_model
from tierplan.runtime.tracing.trace import trace_config
from tierplan.runtime.trainer import Trainer
from tierplan.sim.builder import Builder
from tierplan.sim.contents import (
    Content,
    Frozen,
    Gradients,
    Input,
    InputGradient,
    KeptActs,
    Params,
    RecomputedActs,
    Shared,
    TiedGradients,
    backward_key,
    forward_key,
    recompute_key,
    split_step,
)
from tierplan.sim.schedule import Schedule, Tier, validate
from tierplan.sim.step import StepSpec, unit_spec
from tierplan.sim.trace import Trace
from tierplan.sim.workloads.models import read_config
from tierplan.sim.workloads.workload import SavedTensor, Training, Unit, Workload, WorkloadError

HUGE_BYTES = 1 << 50
Drops = Literal["nothing", "all", "replayable"]


def measure_workload(model: str | Path, training: Training) -> Workload:
    """What one training step of `model`, which must fit into memory, computes: in seconds here, with their spread.

    Random weights and tokens: times of dense models do not depend on them. Raises `WorkloadError` if the training is
    for a backend that is not here.
    """
    if training.backend == "cuda" and not torch.cuda.is_available():
        raise WorkloadError(
            "times for backend 'cuda' cannot be measured here: PyTorch sees no GPU; use backend 'cpu', or leave times "
            "to the machine's rates"
        )
    name, raw = read_config(model, training)
    workload = trace_config(name, raw, training)
    real = build_model(raw, training)
    batches = random_batches(real.config, training)
    return profile_workload(workload, real, batches, device="cuda" if training.backend == "cuda" else "cpu")


def profile_workload(
    workload: Workload,
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    *,
    num_steps: int = 6,
    device: str = "cpu",
    num_threads: int | None = None,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> Workload:
    """The workload with measured seconds (`s`) in place of modelled amounts, and their spread.

    Runs `num_steps` micro-batches (of at least 2; the first is warm-up) through forward and backward, and half as many
    with recomputation; the model's parameters are as before afterwards. Needs memory for the whole model and its
    activations, without optimizer states.
    """
    if num_steps < 2:
        raise ValueError(f"num_steps is {num_steps}; the first is warm-up, so give 2 or more")
    source = iter(batches)

    def run(
        drops: Drops, count: int, on_step: Callable[[int, float], None]
    ) -> tuple[Trace, dict[str, dict[int, list[float]]]]:
        schedule = profiling_schedule(workload, drops=drops)
        optimizer = OptimizerSettings(name=workload.training.optimizer)
        how: dict[str, Any] = {"device": device, "num_threads": num_threads, "time_replays": drops != "nothing"}
        with Trainer(schedule, model, optimizer=optimizer, on_step=on_step, **how) as trainer:
            trainer.run(itertools.islice(source, count), count)
            trainer.restore_model()
            return trainer.result().trace, trainer.replay_seconds()

    num_again = max(2, num_steps // 2)
    kept, _ = run("nothing", num_steps, on_step)
    again, replays = run("all", num_again, lambda k, x: on_step(k + num_steps, x))
    if not all(t.replayable for unit in workload.blocks for t in unit.saved):
        _, replays = run("replayable", num_again, lambda k, x: None)
    return with_times(workload, kept, again, replays)


def profiling_schedule(workload: Workload, *, drops: Drops = "nothing") -> Schedule:
    """Forward and backward of one micro-batch, everything on the device; gradients are dropped as they are made.

    With `drops` blocks do not keep what they save, or what of it no random numbers are needed for, and make it again
    before their backward.
    """

    def is_dropped(unit: Unit, t: SavedTensor) -> bool:
        return unit.kind == "block" and (drops == "all" or (drops == "replayable" and t.replayable))

    training = replace(workload.training, gradient_accumulation_steps=1, max_grad_norm=None)
    builder = Builder()
    units = workload.units
    specs = [unit_spec(u, ["recompute" if is_dropped(u, t) else "keep" for t in u.saved]) for u in units]
    params: dict[str, list[int]] = {u.name: [] for u in units}
    for u in units:
        for content, size_bytes in ((Params, u.num_trained * training.param_bytes), (Frozen, u.frozen_bytes)):
            if size_bytes:
                params[u.name].append(builder.home(content(u.name), DEVICE, size_bytes, "params"))

    def acts_of(content: Content, size_bytes: int) -> list[int]:
        return [builder.buffer(content, DEVICE, size_bytes, "acts")] if size_bytes else []

    def compute(key: str, kind: str, unit: Unit, reads: list[int], writes: list[int]) -> None:
        builder.op(key, COMPUTE, kind, work={}, reads=reads, writes=writes, unit=unit.name)

    shared = acts_of(Shared(0), workload.shared_bytes)
    used = [[*params[unit.name], *params.get(unit.shares or "", ())] for unit in units]
    inputs: list[list[int]] = [[]]
    acts: list[list[int]] = []
    for i, unit in enumerate(units):
        is_last = i + 1 == len(units)
        following = [] if is_last else [builder.buffer(Input(units[i + 1].name, 0), DEVICE, unit.output_bytes, "acts")]
        acts.append(acts_of(KeptActs(unit.name, 0), specs[i].bytes_of("keep")))
        reads = [*used[i], *inputs[i], *(shared if i else [])]
        compute(forward_key(unit.name, 0), "forward", unit, reads, [*([] if i else shared), *following, *acts[i]])
        inputs.append(following)
    dx: list[int] = []
    tied: dict[str, int] = {}
    below = workload.first_trained
    for i, unit in reversed(list(enumerate(units))[below:]):
        reads = [*(used[i] if i else []), *inputs[i]]
        if dropped := specs[i].bytes_of("recompute"):
            recomputed = acts_of(RecomputedActs(unit.name, 0), dropped)
            compute(recompute_key(unit.name, 0), "recompute", unit, [*reads, *acts[i], *shared], recomputed)
            acts[i] += recomputed
        reads += [*acts[i], *dx, *(shared if i else [])]
        dx = [builder.buffer(InputGradient(unit.name, 0), DEVICE, unit.input_bytes, "acts")] if i > below else []
        writes = [*dx]
        if unit.shares and unit.adds_to_shared:
            owner = next(u for u in units if u.name == unit.shares)
            size_bytes = owner.num_trained * training.grad_bytes
            earlier = tied.get(owner.name)  # of another unit that shares them: added to
            reads += [] if earlier is None else [earlier]
            tied[owner.name] = builder.buffer(TiedGradients(owner.name, 0), DEVICE, size_bytes, "grads", reuses=earlier)
            writes.append(tied[owner.name])
        if unit.num_trained:
            reads += [tied[unit.name]] if unit.name in tied else []
            size_bytes = unit.num_trained * training.grad_bytes
            writes.append(builder.buffer(Gradients(unit.name, 0), DEVICE, size_bytes, "grads"))
        compute(backward_key(unit.name, 0), "backward", unit, reads, writes)
    step = StepSpec(training=training, semantics="in-backward", units=tuple(specs))
    tiers = (Tier(name=DEVICE, capacity_bytes=HUGE_BYTES), Tier(name=HOST, capacity_bytes=HUGE_BYTES))
    return validate(builder.schedule(f"profile {workload.name}", tiers, step=step, meta={MEASURES: "units"}))


def with_times(
    workload: Workload, kept: Trace, again: Trace, replays: Mapping[str, Mapping[int, Sequence[float]]]
) -> Workload:
    """The workload with the times of traces of its two profiling schedules; first steps are left out as warm-up.

    What one saved tensor takes to be made again is what its own operations took in `replays`. Where there are none,
    it is the tensor's modelled share of the recomputation. The machine may have become slower or quicker between the
    two runs, so recomputation is taken relative to forward in its own.
    """
    alike: dict[object, list[str]] = {}
    for unit in workload.units:
        alike.setdefault(_unit_likeness(unit), []).append(unit.name)
    units = []
    for u, before in enumerate(workload.units):
        names = alike[_unit_likeness(before)]
        times_of = {"forward": _seconds(kept, forward_key, names)}
        if u >= workload.first_trained:
            times_of["backward"] = _seconds(kept, backward_key, names)
        spread = max(_relative_spread(each) for each in times_of.values())
        seconds: dict[str, Any] = {phase: {"s": median(each)} for phase, each in times_of.items()}
        unit = replace(before, spread=spread, **seconds)
        if unit.kind == "block" and unit.saved_bytes:
            drift = median(_seconds(again, forward_key, names)) / median(times_of["forward"])
            total_s = median(_seconds(again, recompute_key, names)) / drift
            times = {t.index: [x for name in names for x in replays.get(name, {}).get(t.index, ())] for t in unit.saved}
            unit = replace(unit, recompute={"s": total_s}, common=(), saved=_times_of_slots(before, times, total_s))
        units.append(unit)
    return replace(workload, units=tuple(units))


def _seconds(trace: Trace, key_of: Callable[[str, int], str], names: Sequence[str]) -> list[float]:
    """What the units' ops took after the first step, by the key of one from its unit's name and a micro-batch."""
    keys = {key_of(name, 0) for name in names}
    split = ((split_step(span.key), span) for span in trace.spans)
    return [span.duration_ns / 1e9 for at, span in split if at.step and at.key in keys]


def _times_of_slots(unit: Unit, times: Mapping[int, list[float]], total_s: float) -> tuple[SavedTensor, ...]:
    """Saved tensors with what each takes to be made again; together they take `total_s`.

    Those that one operation makes (an output and its statistics) share its time by their sizes: whoever drops the large
    one runs the operation, whichever of them its time was noted for. Tensors that draw random numbers have no time of
    their own, since the whole block is run again for them: they get the rest.
    """
    weights: dict[int, float] = {}
    if all(times[t.index] for t in unit.saved if t.replayable) and any(times.values()):
        for indices in unit.made_together:
            together = [unit.saved[k] for k in indices if all(times.values()) or unit.saved[k].replayable]
            seconds = sum(median(times[t.index]) for t in together)
            size_bytes = sum(t.size_bytes for t in together)
            weights |= {
                t.index: seconds * (t.size_bytes / size_bytes if size_bytes else 1 / len(together)) for t in together
            }
    else:
        weights = {t.index: _share(t.recompute, unit.forward) for t in unit.saved}
    random = [t for t in unit.saved if t.index not in weights]
    known, size_bytes = sum(weights.values()), sum(t.size_bytes for t in random)
    weights |= {t.index: max(total_s - known, 0.0) * t.size_bytes / size_bytes for t in random}
    whole = sum(weights.values())
    scale = total_s / whole if whole else 0.0
    return tuple(replace(t, recompute={"s": weights[t.index] * scale}) for t in unit.saved)


def _unit_likeness(unit: Unit) -> object:
    sizes = tuple(t.size_bytes for t in unit.saved)
    return unit.kind, unit.num_parameters, tuple(unit.forward.items()), tuple(unit.backward.items()), sizes


def _share(part: Mapping[str, float], whole: Mapping[str, float]) -> float:
    for unit in ("flops", "bytes"):
        total = sum(amount for kind, amount in whole.items() if kind.endswith(unit))
        if total > 0:
            return min(1.0, sum(amount for kind, amount in part.items() if kind.endswith(unit)) / total)
    return 0.0


def _relative_spread(values: list[float]) -> float:
    """Standard deviation from the median absolute deviation, relative to the median: a stray value does not count."""
    middle = median(values)
    return 1.4826 * median(abs(v - middle) for v in values) / middle if middle else 0.0
