"""One question, one answer: what is trained where, read from a point of a study, and the best plan for it.

Every command asks here, so that `plan`, `advise`, `sweep` and `compare-policies` say the same of the same question.
Columns of a row have the names of `tierplan simulate --json`. A nested table (`peak_bytes`, `bytes`, `utilization`)
becomes columns such as `peak_bytes.gpu0`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources.abc import Traversable
from math import inf
from pathlib import Path
from typing import Any

from tierplan.hwmodels import load_machine
from tierplan.hwmodels.catalog import description_path
from tierplan.hwmodels.machine import OWN_DEVICES, Machine, MachineError
from tierplan.planner.compared import options_of
from tierplan.planner.infeasible import InfeasiblePlan, short_bytes_of_all
from tierplan.planner.lowering import Lowering
from tierplan.planner.milp.amounts import problem
from tierplan.planner.milp.bounds import Bound, lower_bound
from tierplan.planner.milp.totals import bound_of_totals
from tierplan.planner.plan import UnitwisePlan, plain_semantics
from tierplan.planner.plan_rules import PLANNER, Order, undivided
from tierplan.planner.planning import plan
from tierplan.planner.prediction import Prediction, predict, predict_plan, predicted
from tierplan.planner.questions.endurance import SECONDS_PER_YEAR, allowed_bytes_per_s, years_text
from tierplan.planner.results import PlanResult
from tierplan.planner.search.batches import divisors, plan_sequences
from tierplan.planner.search.lesser import Known, lesser_of_catalog, needs_no_drives
from tierplan.planner.search.race import GOOD_FRAC
from tierplan.planner.several_devices.bounds import bound_of_several
from tierplan.planner.several_devices.tensors import MOST_EACH, may_cut, sequences_each
from tierplan.sim.analysis.steady import steady_state
from tierplan.sim.output.text import format_s
from tierplan.sim.workloads.models import config_path, read_config
from tierplan.sim.workloads.workload import Training, Workload
from tierplan.studies.defaults import default_backend, default_precision, load_or_trace, workload_or_traced
from tierplan.studies.study import OF_TRAINING, Point
from tierplan.validation.calibration.known import CalibratedPlace, calibration_config, eligible_paths, place_for

LEFT_OUT = ("policy", "model", "machine", "options", "semantics", "shortage", "limits", "interval_s", "basis")
"""Of a prediction's record: columns of the point, and what is no figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BestPlan:
    """The answer to a question, with the division into micro-batches that was chosen."""

    workload: Workload
    machine: Machine
    result: PlanResult

    @property
    def known(self) -> Known:
        """What a better machine needs of it."""
        return Known.of(self.machine, self.workload, self.result)


LOOK_S, SEARCH_S, NEAR_FRAC, ROOM_TIMES = 3.0, 0.5, 0.02, 1.25
"""Fewer GPUs are asked where a look at them, of so many seconds with plans like the best one on all, or with a short
search, comes so near what is known; it mostly takes less. Several are searched after a look where their bound is so
many times what is known."""
QUICK = "planner, for a moment"
"""In place of a policy: a quick answer."""


def machine_of(point: Point) -> Machine:
    """The machine of a point, with its changes."""
    machine = load_machine(point.machine, point.settings)
    if point.devices is None:
        return machine
    own = load_machine(point.machine, replace(point, devices=None).settings).num_devices
    return replace(machine, description={**machine.description, OWN_DEVICES: own})


def place_of(point: Point) -> CalibratedPlace:
    """The machine of a point, calibrated where there is a calibration that suits."""
    described = machine_of(point)
    return place_for(
        described,
        training_of(point, described),
        partial(workload_at, point, described),
        which=point.calibration,
        unchanged=load_machine(point.machine, ["gpu.count=1"]) if point.settings or described.num_devices > 1 else None,
    )


def files_of(model: str, machine: str, calibration: str) -> list[Path | Traversable]:
    """Those that answers of points with these depend on: of the machine, the model, calibrations that may be taken."""
    config = config_path(model)
    files: list[Path | Traversable] = [] if config is None else [config]
    with suppress(MachineError):  # which is the answer then
        files.append(description_path(machine))
        files += eligible_paths(load_machine(machine, ["gpu.count=1"]), calibration)
    return files


def calibration_workload(point: Point, machine: Machine) -> Workload:
    """What the calibration model of a point's model computes: the same with few blocks."""
    name, config = read_config(point.model, training := training_of(point, machine))
    return workload_or_traced(name, calibration_config(config), training, exact=point.exact)


def training_of(point: Point, machine: Machine | None) -> Training:
    """The training settings of a point; `auto` is what the machine has, and without one bf16 and CUDA's kernels."""
    dtype = "fp32" if point.autocast and not point.lora else "bf16" if machine is None else default_precision(machine)
    backend = "cuda" if machine is None else default_backend(machine)
    known: dict[str, Any] = {"dtype": dtype, "backend": backend}
    asked = {its: getattr(point, name) for name, its in OF_TRAINING.items()}
    return Training(**{name: known.get(name, value) if value == "auto" else value for name, value in asked.items()})


def workload_at(point: Point, machine: Machine) -> Workload:
    """What one step of a point computes, keeps and owns."""
    return load_or_trace(point.model, training_of(point, machine), exact=point.exact)


def workload_in(place: CalibratedPlace, point: Point, batch: int = 0, accumulation: int = 0) -> Workload:
    """As `workload_at`, timed where there is a calibration, perhaps with other micro-batches."""
    if batch:
        point = replace(point, batch=batch, accumulation=accumulation)
    return place.timed(workload_at(point, place.described))


def best_plan(point: Point, *, known: Known | None = None, beat_s: float = inf, **only: Any) -> BestPlan:
    """The best plan for what the point trains, whatever its policy; raises `InfeasiblePlan` when nothing fits.

    `known` is the answer for a lesser machine, where it is at hand. Where the micro-batches are given, `only` restricts
    what `plan` tries: `orders`, `policies`. Nobody wants a plan that takes `beat_s` or more; where the
    answer is to be quick, none is looked for that leaves devices idle.
    """
    place = place_of(point)
    may_idle = place.machine.num_devices > 1 and point.policy != QUICK
    try:
        best = _on_all(point, place, known, beat_s, only)
    except InfeasiblePlan:
        one = replace(point, devices=1)
        # each has its own activations in host memory, where those of one may have room
        if may_idle and short_bytes_of_all(workload_at(one, place.described), machine_of(one)) <= 0:
            with suppress(InfeasiblePlan):
                return _leaving_idle(best_plan(one, beat_s=beat_s, **only), point, place)
        raise
    if not may_idle:
        return best
    best = _or_on_fewer(best, point, place, known, beat_s, only)
    return replace(best, result=replace(best.result, tried_fewer=True))


def _on_all(
    point: Point, place: CalibratedPlace, known: Known | None, beat_s: float, only: Mapping[str, Any]
) -> BestPlan:
    """The best plan for all devices."""
    machine = place.machine
    settings: dict[str, Any] = {
        "seed": point.seed,
        "drive_lifetime_years": point.drive_lifetime_years,
        "semantics": point.semantics or None,
        "time_limit_s": point.planner_s or None,
        "by_clock": point.policy != QUICK,
        "known": known,
        "beat_s": beat_s,
    }
    if not point.sequences:
        workload = workload_in(place, point)
        result = plan(workload, machine, **settings, **only)
    else:
        divided = partial(workload_in, place, point)
        found = plan_sequences(divided, machine, sequences=point.sequences, **settings)
        workload, result = found.workload, found.result
    return BestPlan(workload=workload, machine=machine, result=result)


def fewer_devices(num: int, sequences: int, *, cuts: Callable[[int], bool] = lambda devices: False) -> list[int]:
    """Numbers of devices below `num` that may be quicker, the largest first: half of them, the most that have equal
    parts of the sequences of a step where these are given, the most of which one says that it cuts operators where not
    all do, and one."""
    even = max((n for n in range(1, num) if sequences and sequences % n == 0), default=1)
    cut = 1 if cuts(num) else max(filter(cuts, range(2, num)), default=1)
    return sorted({-(-num // 2), even, cut, 1} - {num}, reverse=True)


def _or_on_fewer(
    best: BestPlan, point: Point, place: CalibratedPlace, known: Known | None, beat_s: float, only: Mapping[str, Any]
) -> BestPlan:
    """The answer for several devices, or where one for fewer is quicker, that one. Fewer may ask still fewer."""
    answer, asked_in_turn = best, set[int]()
    cuts = partial(_cuts_few, best)
    for num in fewer_devices(best.machine.num_devices, point.sequences, cuts=cuts):
        fewer = replace(point, devices=num)
        wanted_per_s = max(answer.result.prediction.tokens_per_s or 0.0, point.sequences * point.seq / beat_s)
        if num in asked_in_turn or most_tokens_per_s(fewer) <= wanted_per_s:
            continue
        own = known if known is not None and known.is_of(place_of(fewer).machine) else None
        if own is None and not _comes_near(fewer, best, wanted_per_s):
            continue
        asked_in_turn.update(fewer_devices(num, point.sequences, cuts=cuts))
        # one step is the same work for all and for fewer where its sequences are given
        step_s = min(beat_s, answer.result.step_s) if point.sequences else inf
        try:
            found = own or best_plan(fewer, beat_s=step_s, **only).known
        except InfeasiblePlan:
            continue
        idling = _leaving_idle(best, point, place, found)
        answer = max(answer, idling, key=lambda one: one.result.prediction.tokens_per_s or 0.0)
    return answer


def _comes_near(fewer: Point, best: BestPlan, wanted_per_s: float) -> bool:
    """Whether a look at fewer GPUs comes near what is wanted: with plans like the best one on all, then with any, by a
    short search, where their bound leaves much room. One of more than two is searched at once; and those are near that
    can cut operators, as all of them cannot."""
    num, near_per_s = fewer.devices or 1, wanted_per_s / (1 + NEAR_FRAC)
    num_all = best.machine.num_devices
    if num > 1 and _cuts_few(best, num) and not _cuts_few(best, num_all):
        return True  # which a short search does not find out
    if num > 1 or num_all == 2:
        if _look_at_fewer(fewer, best, wanted_per_s) >= near_per_s:
            return True
        is_searched = not isinstance(best.result.plan, UnitwisePlan)
        if is_searched or (num > 1 and most_tokens_per_s(fewer) < wanted_per_s * ROOM_TIMES):
            return False
    near_s = fewer.sequences * fewer.seq / near_per_s if fewer.sequences else inf
    return _look_by_search(fewer, beat_s=near_s) >= near_per_s


def _cuts_few(best: BestPlan, devices: int) -> bool:
    """Whether so many GPUs can cut operators, and have few of the step's sequences each."""
    each = sequences_each(best.workload, devices) * best.result.plan.num_batches
    return each < MOST_EACH and may_cut(best.workload, devices)


def _leaving_idle(best: BestPlan, point: Point, place: CalibratedPlace, known: Known | None = None) -> BestPlan:
    """An answer with the plan that is known, or the answer's own, on a machine that has more devices than it takes."""
    why = "No plan for all GPUs that was found is as quick as this one, which leaves the others idle"
    if known is None:
        known, why = best.known, "No plan for all GPUs fits, and this one leaves the others idle"
    idling = _with_plan(best, point, place, known)
    one = replace(idling.result.prediction, idle_why=why)
    return replace(idling, result=replace(idling.result, prediction=one, tried_fewer=True))


def _with_plan(best: BestPlan, point: Point, place: CalibratedPlace, known: Known) -> BestPlan:
    """An answer with a plan that is known to fit, in micro-batches of its own, and the bound of any such."""
    workload = workload_in(place, point, known.batch, known.accumulation)
    columns = Lowering(workload, place.machine).columns(known.plan)
    one = predicted(known.plan, columns, steady_state(columns, place.machine), workload, place.machine)
    most_per_s, bound = _bounded(point)
    bound_s = one.step_s * one.tokens_per_s / most_per_s  # type: ignore[operator]  # it fits
    changed: dict[str, Any] = {"lower_bound_s": bound_s, "bound_shares": bound.shares, "s_per_gb": bound.s_per_gb}
    result = replace(best.result, prediction=one, **changed)
    return BestPlan(workload=workload, machine=place.machine, result=result)


def or_known(best: BestPlan, point: Point, known: Known) -> BestPlan:
    """The best plan for the point, or one that was found elsewhere where that is quicker here."""
    is_quicker = reached(point, known) > (best.result.prediction.tokens_per_s or 0.0)
    return _with_plan(best, point, place_of(point), known) if is_quicker else best


def reached(point: Point, known: Known) -> float:
    """Tokens/s of a plan that was found elsewhere, on the machine of the point; 0 where it does not fit."""
    place = place_of(point)
    if known.plan.devices > place.machine.num_devices:
        return 0.0
    found = predict_plan(known.plan, workload_in(place, point, known.batch, known.accumulation), place.machine)
    years = point.drive_lifetime_years
    return (found if years is None else _lasting(found, place.machine, years)).tokens_per_s or 0.0


def _look_at_fewer(fewer: Point, best: BestPlan, wanted_per_s: float) -> float:
    """Tokens/s of fewer GPUs with plans of the kind that is best on all, in micro-batches as large or twice as large;
    or where that is one of packs, which say nothing of fewer, by a short search. Infinite where nobody knows. What is
    not near `wanted_per_s` nobody looks for.

    Where none has room on fewer, nobody looks further for a machine with more than the catalog's: what fewer of that
    one's reach is known.
    """
    known, num_all = best.known, best.machine.num_devices
    if known.plan.devices < num_all:
        return inf
    unknown = inf if lesser_of_catalog(best.machine) is None else 0.0
    if not isinstance(known.plan, UnitwisePlan):
        return _look_by_search(fewer, unknown)
    place = place_of(fewer)
    num, of_all = place.machine.num_devices, known.plan.num_batches
    micro_batches = known.accumulation * (of_all if fewer.sequences else min(of_all, num))
    if micro_batches % num:
        return inf
    only: dict[str, Any] = {
        "semantics": fewer.semantics or None,
        "drive_lifetime_years": fewer.drive_lifetime_years,
        "seed": fewer.seed,
        "batches": "each" if num > 1 else None,
        "policies": (),
        "like": replace(known.plan, devices=num),
    }
    found: list[float] = []
    # micro-batches twice as large, or as many more: in horizontal order these fetch more, and only need less room
    for times in (2, 1):
        accumulation, rest = divmod(micro_batches // num, times)
        if not rest:
            workload = workload_in(place, fewer, times * known.batch, accumulation)
            near_s = workload.training.tokens_per_step * num * (1 + NEAR_FRAC) / max([wanted_per_s, *found])
            try:
                result = plan(workload, place.machine, time_limit_s=LOOK_S, by_clock=False, beat_s=near_s, **only)
                found.append(result.prediction.tokens_per_s or 0.0)
                has_room = True
            except InfeasiblePlan as error:
                has_room = error.is_slower
            if has_room and known.plan.order == "horizontal":
                break
    return max(found, default=unknown)


def _look_by_search(fewer: Point, unknown: float = 0.0, beat_s: float = inf) -> float:
    """Tokens/s of fewer GPUs in any micro-batches, by a short search for a step below `beat_s`; `unknown` where it
    finds none."""
    try:
        found = best_plan(replace(fewer, planner_s=SEARCH_S, policy=QUICK), beat_s=beat_s)
    except InfeasiblePlan:
        return unknown
    return found.result.prediction.tokens_per_s or 0.0


def most_tokens_per_s(point: Point) -> float:
    """What no plan exceeds, of any kind and with any division of the step, on all devices."""
    return _bounded(point)[0]


def _bounded(point: Point) -> tuple[float, Bound]:
    """Tokens/s that no plan exceeds, and the bound of the division that allows most."""
    place, training = place_of(point), training_of(point, None)
    each = training.per_device_train_batch_size * training.gradient_accumulation_steps
    divisions = [(b, point.sequences // b) for b in divisors(point.sequences)] if point.sequences else [(0, 0)]
    num = place.machine.num_devices
    asked: dict[str, Any] = {
        "semantics": point.semantics or plain_semantics(training),
        "write_limit_bytes_per_s": allowed_bytes_per_s(place.machine, point.drive_lifetime_years),
    }
    problems = (problem(workload_in(place, point, *one), place.machine, **asked) for one in divisions)
    least = min((bound_of_totals(p, 1 if point.sequences else num) for p in problems), key=lambda bound: bound.step_s)
    return (point.sequences or each * num) * point.seq / least.step_s, least


def bounded_plan(point: Point, *, known: Known | None = None) -> BestPlan:
    """As `best_plan`, with the bound of all that the point leaves open: where that is the division of a step, no
    schedule in any is quicker. The search's own is of the micro-batches, and mostly the order, of its plan."""
    best = best_plan(point, known=known)
    result, least = best.result, min(_bounds_of_divisions(point, best.result.lower_bound_s), key=_step_s, default=None)
    if least is None or least.step_s >= result.lower_bound_s:
        return best
    changed: dict[str, Any] = {"lower_bound_s": least.step_s, "bound_shares": least.shares, "s_per_gb": least.s_per_gb}
    if result.status == "within-gap" and result.step_s > least.step_s * (1 + GOOD_FRAC):
        changed["status"] = "searched"
    return replace(best, result=replace(result, **changed))


def _step_s(bound: Bound) -> float:
    return bound.step_s


def _bounds_of_divisions(point: Point, beat_s: float) -> Iterator[Bound]:
    """Of each division of a step's sequences that is open; those that are no lower than `beat_s` as far as they had to
    be looked at."""
    if not point.sequences:
        return
    place, training = place_of(point), training_of(point, None)
    num = place.machine.num_devices
    asked: dict[str, Any] = {
        "semantics": point.semantics or plain_semantics(training),
        "write_limit_bytes_per_s": allowed_bytes_per_s(place.machine, point.drive_lifetime_years),
    }
    for batch in divisors(point.sequences):
        micro_batches = point.sequences // batch
        for num_batches in (1, num) if num > 1 and micro_batches % num == 0 else (1,):
            workload = workload_in(place, point, batch, micro_batches // num_batches)
            orders: tuple[Order, ...] = ("horizontal", "vertical") if micro_batches > num_batches else ("horizontal",)
            posed = [problem(workload, place.machine, order=order, **asked) for order in orders]
            if needs_no_drives(place.machine, workload):
                posed = [replace(p, has_nvme=False) for p in posed]
            found = (lower_bound(p, beat_s=beat_s) for p in posed)
            for bound in found if num == 1 else [bound_of_several(posed, num, num_batches, ())]:
                if bound.feasible:
                    yield bound


def _planned(point: Point, ask: Callable[[Point], BestPlan] = best_plan) -> PlanResult | Prediction:
    """The planner's answer, or that nothing fits."""
    try:
        return ask(point).result
    except InfeasiblePlan as error:
        machine = machine_of(point)
        return Prediction(policy=PLANNER, model=point.model, machine=machine.name, plan=None, reason=error.what)


def predict_point(point: Point) -> Prediction:
    """What the point's policy, or the planner, reaches. That something does not fit is an answer.

    A policy is asked with the division into micro-batches that suits it best; where devices have micro-batches of their
    own and cannot divide the sequences among them, that is the answer. Raises what reading the model or the
    machine raises, and `PlanError` for an unknown policy or option.
    """
    if point.policy == PLANNER:
        answer = _planned(point)
        return answer if isinstance(answer, Prediction) else answer.prediction
    place = place_of(point)
    machine = place.machine
    options = options_of(point.semantics)

    def at(batch: int, accumulation: int) -> Prediction:
        found = predict(point.policy, workload_in(place, point, batch, accumulation), machine, options)
        return found if (years := point.drive_lifetime_years) is None else _lasting(found, machine, years)

    if not point.sequences:
        return at(point.batch, point.accumulation)
    one_by_one, of_each = at(1, point.sequences), point.sequences
    if (plan := one_by_one.plan) and (num := plan.num_batches) > 1:
        of_each, rest = divmod(point.sequences, num)
        if rest:
            return Prediction(
                policy=point.policy,
                model=one_by_one.model,
                machine=machine.name,
                hardware=machine,
                plan=None,
                reason=undivided(point.sequences, num),
            )
        one_by_one = at(1, of_each)
    found = [*(at(batch, of_each // batch) for batch in reversed(divisors(of_each)[1:])), one_by_one]
    best = max(found, key=lambda p: p.tokens_per_s or 0.0)  # of equal ones the largest micro-batch, as `plan` says
    return best if best.fits else one_by_one


def _lasting(prediction: Prediction, machine: Machine, years: float) -> Prediction:
    """The prediction, unless drives wear out sooner: that is no answer then, as for the planner's own plans."""
    most_per_s, life_s = allowed_bytes_per_s(machine, years), prediction.lifetime_s
    if not prediction.fits or life_s is None or most_per_s == inf or life_s >= years * SECONDS_PER_YEAR:
        return prediction
    asked = f"{years_text(years)} that {'was' if years == 1 else 'were'} asked for"
    why = f"its drives last {format_s(life_s)} of the {asked}"
    return replace(prediction, steady=None, reason=why)


def evaluate_point(point: Point) -> dict[str, object]:
    """The figures of one point of a study, as columns; of the planner's also how its search ended, and its gap."""
    row: dict[str, object] = {}
    found = _planned(point, bounded_plan) if point.policy == PLANNER else predict_point(point)
    if isinstance(found, PlanResult):
        row |= {"status": found.status, "gap": found.gap}
        found = found.prediction
    for name, value in found.record().items():
        if name in LEFT_OUT:
            continue
        if isinstance(value, Mapping):
            row |= {f"{name}.{key}": figure for key, figure in value.items()}
        elif value is not None:
            row[name] = value
    return row
