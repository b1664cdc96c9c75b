"""A comparison in words: how slow the machine was in the run, the largest causes of the difference, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain

from tierplan.hwmodels.machine import Machine, PredictionBasis
from tierplan.hwmodels.names import COMPUTE
from tierplan.sim.contents import split_step
from tierplan.sim.output.text import columns, format_error, format_s
from tierplan.sim.schedule import Schedule
from tierplan.sim.trace import Trace
from tierplan.validation.calibration.dispatch import core_slowdown, slowdown_in, slowdown_of, steady_at
from tierplan.validation.comparison.causes import Contribution
from tierplan.validation.comparison.compare import Comparison, Pair
from tierplan.validation.comparison.steps import cut_steps

NUM_CAUSES = 3
GOOD_FRAC = 0.05
"""An error that asks for nothing to be done."""
REASONS = {
    "rate_s": "the ops themselves were {}",
    "overhead_s": "each of them took {} beyond its work",
    "contention_s": "they lost {} to ops that ran at the same time",
}
HOW = {"rate_s": ("slower", "faster"), "overhead_s": ("longer", "less"), "contention_s": ("more", "less")}


def at_slowdown(comparison: Comparison, schedule: Schedule, machine: Machine, measured: Trace) -> Comparison:
    """The comparison with the run's slowdown, and the prediction for it, where both timed the reference work.

    Of each stream: how long its threads waited for a core in the run, over what they waited in the calibration; and how
    long the reference work took with a core, where work is not the drives'. Neither looks at what the step was
    predicted to take.
    """
    times, several = measured.meta.get("reference_s"), len(schedule.streams) > 1
    known_s = machine.basis.reference_s[several]
    if not isinstance(times, Mapping) or not known_s:
        return comparison
    core = core_slowdown(list(chain(*times.values())), known_s)
    waited = cut_steps(measured, comparison.warmup_steps).stretch
    slowdown = slowdown_in(core, machine.basis.stretch, waited, {s.stream: s.predicted for s in comparison.streams})
    step_s = steady_at(schedule, machine, slowdown).period_s
    return replace(comparison, slowdown=slowdown_of(COMPUTE, slowdown), step_s_at_slowdown=step_s)


def figure_lines(comparison: Comparison, *more: tuple[str, Pair, Callable[[float], str]]) -> list[str]:
    """A table for a terminal of predicted, measured and error: the step, how busy streams were, and more figures."""
    step = comparison.step_s
    pairs = [("step", step, format_s)]
    if comparison.slowdown is not None and comparison.step_s_at_slowdown is not None:
        at_slowdown = Pair(comparison.step_s_at_slowdown, step.measured)
        pairs.append((f"at the run's slowdown, {comparison.slowdown:.2f}", at_slowdown, format_s))
    pairs += [(f"busy {s.stream}", s.busy_s, format_s) for s in comparison.streams]
    rows = [("", "predicted", "measured", "error")]
    for name, pair, show in (*pairs, *more):
        measured = "-" if pair.measured is None else show(pair.measured)
        rows.append((name, show(pair.predicted), measured, format_error(pair.error_frac)))
    return columns(rows, right=(1, 2, 3))


def causes_in_words(comparison: Comparison) -> list[str]:
    """The largest contributions to the difference, one sentence each."""
    found = sorted(comparison.attribution, key=lambda c: -abs(c.seconds))[:NUM_CAUSES]
    return [_in_words(c, comparison) for c in found if c.seconds]


def _in_words(cause: Contribution, comparison: Comparison) -> str:
    assert comparison.step_s.measured is not None
    seconds = f"{format_s(cause.seconds, signed=True)} ({format_error(cause.seconds / comparison.step_s.measured)})"
    kinds = [k for k in comparison.kinds if (k.stream, k.kind) == (cause.stream, cause.kind)]
    if not kinds:
        return f"{seconds}: {cause.kind}"
    parts = {name: getattr(kinds[0], name) for name in REASONS}
    largest = max(parts, key=lambda name: parts[name] if cause.seconds > 0 else -parts[name])
    reason = REASONS[largest].format(HOW[largest][cause.seconds < 0])
    return f"{seconds}: {cause.kind} on {cause.stream}; {reason}"


def what_to_do(comparison: Comparison, basis: PredictionBasis, meta: Mapping[str, object]) -> str:
    """What to do next. `meta` is that of the measured trace."""
    num_threads = meta.get("num_threads")
    error, normalised, slowdown = comparison.step_error_frac, comparison.normalised_error_frac, comparison.slowdown
    if basis.num_threads and isinstance(num_threads, int) and num_threads != basis.num_threads:
        return (
            f"The run computed in {num_threads} threads and the calibration in {basis.num_threads}: calibrate with "
            f"--threads {num_threads}, and plan again."
        )
    if abs(error) <= GOOD_FRAC:
        return "There is nothing to do: the prediction held."
    if slowdown is not None and normalised is not None and abs(normalised) <= max(GOOD_FRAC, abs(error) / 2):
        how = "slower" if slowdown > 1 else "faster"
        return (
            f"The machine was {how} in the run than in the calibration ({slowdown:.2f} times as long, by waits for "
            f"a core and the reference work), and for that the error is {format_error(normalised)}. Run again when it "
            "is as quiet as it was, "
            "or calibrate again if it stays so."
        )
    if not basis.num_threads:
        planned_for = meta.get("machine", "here")
        elsewhere = f"The plan is for {planned_for}: for a run on another machine, plan with --machine here. "
        return ("" if planned_for == "here" else elsewhere) + (
            "The prediction rests on no calibration: run tierplan calibrate with this model, batch, length and dtype, "
            "and plan again."
        )
    if comparison.in_interval:
        return "The measured step lies in the predicted interval; a longer calibration (--budget-s) narrows it."
    busiest = max(comparison.kinds, key=lambda k: abs(k.measured_s - k.predicted_s))
    if abs(busiest.contention_s) > max(abs(busiest.rate_s), abs(busiest.overhead_s)):
        return (
            f"Contention that is not modelled: {busiest.kind} on {busiest.stream} met other ops at the same time in "
            "another way than in the calibration. Calibrate with the batch and length of this run."
        )
    return (
        "The machine works otherwise than in its calibration, which waits for a core and its reference work do not "
        "show: calibrate again."
    )


NOT_JUDGED = {
    "before_resumed": "before the run was last resumed",
    "warmup": "to warm up",
    "after_trace": "after the trace",
}


def judged_steps(comparison: Comparison, measured: Trace, num_steps: int) -> dict[str, int]:
    """How many steps of the run are judged, and how many are not, by why."""
    numbers = sorted({split_step(span.key).step or 0 for span in measured.spans})
    left_out = (numbers[0], comparison.warmup_steps, max(0, num_steps - 1 - numbers[-1]))
    return {
        "judged": len(numbers) - comparison.warmup_steps,
        **dict(zip(NOT_JUDGED, left_out, strict=True)),
    }


def steps_in_words(steps: Mapping[str, int]) -> str:
    out = ", ".join(f"{steps[name]:,} {why}" for name, why in NOT_JUDGED.items() if steps[name])
    judged = f"median of {steps['judged']:,} steps" if steps["judged"] > 1 else "one step"
    return f"measured: {judged}" + (f"; not judged: {out}" if out else "")
