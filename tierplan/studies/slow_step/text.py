"""The explanation of a measured step for people, in 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from tierplan.hwmodels.names import HOST_ADAM, alike_name
from tierplan.hwmodels.values.units import format_amount
from tierplan.sim.output.text import columns, digits, format_count, format_frac, format_s, in_short, wrapped
from tierplan.sim.workloads.workload import Training
from tierplan.studies.answer import limited_text
from tierplan.studies.slow_step.explain import Explanation
from tierplan.studies.slow_step.setups import COMPUTE

MOST_CHANGES = 6
FAR = 100.0
"""A step that is so many times longer or shorter than expected may have another unit."""


def explanation_lines(e: Explanation) -> list[str]:
    """The answer, where the difference lies, what to change, what the machine could do, what was assumed."""
    t, options = e.setup.training, "".join(f", {k} {v}" for k, v in e.setup.options.items())
    others = "".join(f", {said}" for said in (t.optimizer, t.lora) if said not in ("", Training().optimizer))
    lines = [
        *wrapped(f"{e.model} on {e.expected.where}"),
        *wrapped(
            f"{e.setup.policy}{options}; {t.per_device_train_batch_size} x {t.gradient_accumulation_steps} sequences "
            f"of {t.sequence_length} tokens, {t.precision}{others}"
        ),
        "",
        *wrapped(_verdict(e)),
        *(line for note in e.notes for line in wrapped(f"Note: {note}")),
    ]
    if e.expected_s is not None:
        lines += ["", *columns(_phases(e))]
    if e.suspects:
        lines += ["", "Where the difference probably lies, the likeliest first", *columns(_suspects(e))]
        lines += [line for cause in e.suspects[0].causes for line in wrapped(f"  - {cause}")]
    if e.gains:
        lines += ["", "What to change first, each by itself", *columns(_gains(e))]
    lines += ["", *wrapped(_best(e)), ""]
    return lines + [line for text in e.assumptions for line in wrapped(f"Assumed: {text}.")]


def _verdict(e: Explanation) -> str:
    measured = format_s(e.measured.step_s)
    if e.expected_s is None or e.ratio is None:
        return (
            f"By simulation this does not run here, so {measured} cannot be judged: {in_short(e.expected.why_not)}. "
            "If it does run, the machine or the model is another one than was said."
        )
    limit = limited_text(e.expected.limits)
    head = f"A step takes {measured}; it should take {format_s(e.expected_s)}, limited by {limit}."
    unit = "" if 1 / FAR <= e.ratio <= FAR else "Is that in seconds? "
    match e.verdict:
        case "normal":
            return f"Normal. {head} Up to {format_frac(e.normal_frac)} more or less is what such figures are good for."
        case "slow":
            return f"Not normal: {digits(e.ratio)} times as long as it should be. {unit}{head}"
    return f"Quicker than it should be, so something assumed here is wrong. {unit}{head}"


def _phases(e: Explanation) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = [("one step", "measured", "expected")]
    timed = asdict(e.measured.phases) if e.measured.phases else {}
    simulated = asdict(e.expected.phases) if e.expected.phases else {}
    for name, seconds in simulated.items():
        there = format_s(timed[name]) if name in timed else "-"
        rows.append((name.removesuffix("_s"), there, format_s(seconds)))
    if e.setup.extra_s:
        rows.append(("checkpoints", "-", format_s(e.setup.extra_s)))
    assert e.expected_s is not None
    return [*rows, ("all", format_s(e.measured.step_s), format_s(e.expected_s))]


def _suspects(e: Explanation) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = [("part", "speed", "then a step takes", "that is")]
    for s in e.suspects:
        speed = f"1/{s.factor:.3g}" if s.factor >= 1 else f"{1 / s.factor:.3g} x"
        rates = dict.fromkeys(_rate(alike_name(stream, e.expected.devices), per_s) for stream, per_s in s.rates.items())
        part = "what computes" if s.part == COMPUTE and e.setup.training.backend == "cpu" else s.part
        rows.append((part, speed, format_s(s.step_s), ", ".join(rates)))
    return rows


def _rate(stream: str, per_s: float) -> str:
    if stream == HOST_ADAM:
        return f"{stream} {format_count(per_s)} parameters/s"
    return f"{stream} {format_amount(per_s, 'bytes/s')}"


def _gains(e: Explanation) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = [("step", "saves", "change")]
    for g in e.gains[:MOST_CHANGES]:
        saves = "makes it fit" if e.expected_s is None else format_frac(g.gain_frac)
        rows.append((format_s(g.step_s), saves, f"{g.what}: {g.why}" + (" (assumed)" if g.assumed else "")))
    return rows


def _best(e: Explanation) -> str:
    if e.best is None:
        return "The planner finds nothing that fits this machine."
    if e.best.step_s is None:
        return f"The planner has no answer here: {e.best.why_not}."
    than = "" if e.expected_s is None else f"{digits(e.expected_s / e.best.step_s)} times as fast"
    than = than and f", {'as fast' if than.startswith('1 ') else than} as this setup should be"
    t = e.setup.training
    how = "without autocast" if t.lora else f"the model in {t.autocast} with an fp32 copy"
    cast = f", {how}" if t.autocast else ""
    cast += ", in fp32" if t.dtype == "fp32" and not t.autocast else ""  # what changes above may do without is named
    cast += ", with plain attention" if t.attention == "plain" else ""
    cast += f", the loss in {t.loss_chunks} chunks" if t.loss_chunks > 1 and t.loss == "plain" else ""
    cast += ", without a fused loss and compiled blocks" if t.loss == "fused" or t.torch_compile else ""
    return (
        f"What this machine could do: {format_s(e.best.step_s)} for the same sequences{than} (micro-batch "
        f"{e.best.micro_batch} x {e.best.accumulation}{cast}, by `tierplan plan`)."
    )
