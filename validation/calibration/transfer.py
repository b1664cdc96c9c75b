"""What a calibration of one model says of others: plans of each are predicted from the calibrations of all others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from statistics import fmean, median

from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.scaling import with_ample_memory
from tierplan.planner.lowering import lower
from tierplan.sim.output.text import format_error, markdown_table
from tierplan.sim.workloads.workload import Workload
from tierplan.validation.calibration.calibration import Calibration, machine_sha256
from tierplan.validation.calibration.dispatch import slowdown_between, steady_at
from tierplan.validation.calibration.plans import calibration_plans

SELF, FAMILY, OTHER = "itself", "its family", "another family"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One plan's step, predicted from a calibration of another model (or its own)."""

    source: str
    target: str
    relation: str
    plan: str
    ratio: float
    """Predicted over measured seconds, for the slowdown between the two calibrations."""


def transfers(
    calibrations: Sequence[Calibration], machine: Machine, modelled: Callable[[Calibration], Workload]
) -> list[Transfer]:
    """Every plan of every calibration of this machine as it is described, predicted from every one of the same dtype.

    `modelled` has the untimed workload of a calibration's model.
    """
    here = [c for c in calibrations if c.machine_sha256 == machine_sha256(machine)]
    ample, found = with_ample_memory(machine), []
    for target in here:
        workload = modelled(target)
        for source in here:
            if source.training.dtype != target.training.dtype or source.training.backend != target.training.backend:
                continue
            family = source.config.get("model_type") == target.config.get("model_type")
            relation = SELF if source is target else FAMILY if family else OTHER
            timed, inside = source.timed(workload, ample), source.on(ample)
            for name, plan in calibration_plans(timed, inside).items():
                if name not in target.measured_step_s:
                    continue
                schedule = lower(plan, timed, inside)
                several = len(schedule.streams) > 1
                its_s, known_s = (c.reference_s[several] or 1.0 for c in (target, source))
                slowdown = slowdown_between(its_s / known_s, source.stretch[several], target.stretch[several])
                predicted_s = steady_at(schedule, inside, slowdown).period_s
                names = {"source": source.model, "target": target.model, "relation": relation, "plan": name}
                found.append(Transfer(**names, ratio=predicted_s / target.measured_step_s[name]))
    return found


def learnt_half_width(found: Iterable[Transfer], relation: str) -> float | None:
    """What such transfers are off by beyond a model's own calibration, as a logarithm: 90 %; None without any."""
    squares: Mapping[str, list[float]] = {SELF: [], relation: []}
    for transfer in found:
        if transfer.relation in squares:
            squares[transfer.relation].append(log(transfer.ratio) ** 2)
    if not squares[relation]:
        return None
    return 1.645 * sqrt(max(0.0, fmean(squares[relation]) - fmean(squares[SELF] or [0.0])))


def transfer_lines(found: Sequence[Transfer]) -> list[str]:
    """The table in Markdown, and what it teaches."""
    rows = []
    for source, target, relation in dict.fromkeys((t.source, t.target, t.relation) for t in found):
        ratios = [t.ratio for t in found if (t.source, t.target, t.relation) == (source, target, relation)]
        worst = max(ratios, key=lambda x: abs(log(x)))
        off = median(abs(x - 1.0) for x in ratios)
        rows.append((target, source, relation, f"{100 * off:.1f} %", format_error(worst - 1.0)))
    head = ("predicted", "from the calibration of", "which is", "median error", "worst plan")
    lines = markdown_table(head, rows, right=(3, 4))
    for relation in (FAMILY, OTHER):
        if (width := learnt_half_width(found, relation)) is not None:
            lines += ["", f"From {relation}: 9 in 10 are off by a factor of {exp(width):.2f} more."]
    return lines
