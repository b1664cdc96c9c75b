"""Can I train this model on this machine, how fast, what limits it, and what should I buy?

The best plan for the machine as it is, and for the machine with one thing bought at a time: each is what `tierplan
plan` says of that machine, by the same function. Only what makes training quicker is listed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import inf
from typing import Any

from tierplan.hwmodels import Description, load_description
from tierplan.hwmodels.catalog import load_part
from tierplan.hwmodels.description import PARTS
from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.names import NVME_WRITE
from tierplan.planner.infeasible import InfeasiblePlan, found_shortly, has_room
from tierplan.planner.plan import UnitwisePlan, plain_semantics
from tierplan.planner.plan_rules import PLANNER
from tierplan.planner.questions.endurance import UNKNOWN_LIFE, allowed_bytes_per_s, life_text
from tierplan.planner.questions.largest import family
from tierplan.planner.search.lesser import Known
from tierplan.sim.workloads.workload import Workload
from tierplan.studies.answer import answer_record, impossible_record
from tierplan.studies.evaluate import (
    QUICK,
    BestPlan,
    best_plan,
    bounded_plan,
    machine_of,
    most_tokens_per_s,
    or_known,
    place_of,
    reached,
    training_of,
    workload_in,
)
from tierplan.studies.purchases import (
    MOST_OF_A_KIND,
    TOKENS,
    Costs,
    PriceList,
    Purchase,
    costs_of,
    energy_assumptions,
    job_s,
    price_assumptions,
    priced,
    purchases,
    worth_planning,
)
from tierplan.studies.study import Point
from tierplan.studies.sweep import Row, asking

RENTED = "cloud-h100"
"""The machine of the catalog that is compared with, paid by the hour."""
FIGURES = ("fits", "step_s", "tokens_per_s", "micro_batch", "accumulation", "policy", "limited_by")
SPEED = ("fits", "step_s", "tokens_per_s")
QUICKER_FRAC = 0.01
"""What a purchase has to gain to be listed."""
QUICK_S, QUICK_TODAY_S, QUICK_SEVERAL_S = 1.5, 2.0, 0.5
"""Time limits of the planner for a quick answer: with something bought, for the machine as it is, and with something
bought where it has several GPUs."""
SHORT_SEARCH = (
    "the search was short. The whole one, without --quick, mostly finds a plan for this machine that is at least as "
    "quick; what a purchase gains and renting costs is rough: purchases have plans of the same kind and in about the "
    "same micro-batches as the machine as it is, and further GPUs are not planned"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One thing bought, and what it does: the answer is that of `tierplan plan` for that machine and that division."""

    bought: Purchase
    answer: Mapping[str, Any]
    gain_frac: float | None = None
    """Of tokens per second, relative to the machine as it is; None where that cannot train the model at all."""

    @property
    def gain_per_1000_usd(self) -> float | None:
        """Percentage points of speed per 1000 USD."""
        price_usd = self.bought.price_usd
        return None if self.gain_frac is None or not price_usd else self.gain_frac * 100 / price_usd * 1000

    def record(self) -> dict[str, object]:
        """The change as JSON values."""
        return {
            **asdict(self.bought),
            **{name: self.answer.get(name) for name in FIGURES},
            "gain_frac": self.gain_frac,
            "gain_per_1000_usd": self.gain_per_1000_usd,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Rental:
    """The job on a machine that is paid by the hour."""

    machine: str
    usd_per_hour: float
    source: str
    tokens: float
    seconds: float
    usd: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The answers."""

    point: Point
    machine: str
    answer: Mapping[str, Any]
    """What `tierplan plan --json` says of the same question."""
    changes: tuple[Change, ...] = ()
    """Those that make training quicker, or possible; most gain per price first."""
    num_tried: int = 0
    """Purchases that were planned."""
    no_gain: tuple[str, ...] = ()
    """Those of them that do not make training quicker, or possible, by what they are."""
    left_out: Mapping[str, float] = field(default_factory=dict)
    """Others, by what they are: tokens per second that their bounds promise, of which plans reach a part."""
    no_answer: Mapping[str, str] = field(default_factory=dict)
    """Others that do not go with what is trained, by what they are: why."""
    largest_model: str = ""
    """The largest of the GPT-3 family that a plan is found for with one sequence."""
    larger_model_may_fit: bool = False
    """A larger one may fit: none was found, and no bound excludes it."""
    costs: Costs | None = None
    """Of the job; None where nothing fits."""
    rented: Rental | None = None
    """The same job on `RENTED`; None where it does not fit there, or where that is the machine."""
    assumptions: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return bool(self.answer["fits"])

    def record(self) -> dict[str, object]:
        """The advice as JSON values."""
        return {
            "model": self.point.model,
            "machine": self.machine,
            **self.answer,
            "costs": None if self.costs is None else asdict(self.costs),
            "rented": None if self.rented is None else asdict(self.rented),
            "largest_model": self.largest_model or None,
            "larger_model_may_fit": self.larger_model_may_fit if self.largest_model else None,
            "changes": [change.record() for change in self.changes],
            "purchases_tried": self.num_tried,
            "purchases_without_gain": list(self.no_gain),
            "purchases_left_out": dict(self.left_out),
            "purchases_without_answer": dict(self.no_answer),
            "assumptions": list(self.assumptions),
        }


def advise(
    point: Point,
    *,
    prices: PriceList | None = None,
    tokens: float = TOKENS,
    quick: bool = False,
    num_workers: int | None = None,
    progress: bool = False,
) -> Advice:
    """The advice for what a point trains, `tokens` in all.

    Where it is to be `quick`, the planner searches for a moment only, with something bought among plans of the same
    kind as that for the machine as it is; no second card is planned, and no largest model is looked for.
    """
    prices = prices or PriceList()
    description = priced(point, prices)
    no_more = quick or (description.number("gpu.count") or 1) > 1  # who leaves one idle does not buy a second
    here = load_description(point.machine, point.settings)
    bought = [b for b in purchases(here, prices) if not no_more or "gpu.count" not in b.overrides]
    with asking(num_workers, progress=progress) as ask:
        like = point
        if quick:
            most_s = point.planner_s or QUICK_TODAY_S
            point, like = (replace(point, planner_s=s, policy=QUICK) for s in (most_s, min(most_s, QUICK_S)))
        today = ask([point], partial(answer_point, like=like) if quick else answer_point)
        elsewhere = [] if description.name == RENTED else [like.on_machine(RENTED)]
        rented = ask(elsewhere, partial(figures_of, names=SPEED))
        largest = [] if quick else ask([point], largest_model_of)
        kinds = Counter(b.kind for b in bought if not b.machine)
        # what a further drive brings no bound knows so well
        some = [b for b in bought if kinds[b.kind] > MOST_OF_A_KIND or b.kind == "host.capacity"]
        bounds = [row() for row in ask([b.applied(like) for b in some], promise_of)]
        no_answer = _errors(some, bounds)
        promised = [float(row.get("promised") or 0.0) for row in bounds]
        answer = today[0]()
        now = float(answer.get("tokens_per_s") or 0.0)
        left_out = {
            b.what: most
            for b, most, is_worth in zip(some, promised, worth_planning(some, promised, now), strict=True)
            if not is_worth and b.what not in no_answer
        }
        bought = [b for b in bought if b.what not in left_out and b.what not in no_answer]
        known: Known | None = answer.get("known")
        anew = partial(figures_of, than=now, here=point)
        changed, only = _like(like, known) if quick and known else (like, {} if quick else {"known": known})

        def rank(b: Purchase) -> tuple[float, ...]:
            """What is asked last should not take long: many GPUs do, second cards, what has no answer for a start."""
            machine, count = load_description(b.machine) if b.machine else description, b.overrides.get("gpu.count")
            num_gpus = count if isinstance(count, int) else machine.number("gpu.count") or 1
            return (-num_gpus, *(b.kind != kind for kind in ("gpu.count", "gpu.part", "machine")), -b.price_usd)

        def asked_of(b: Purchase) -> Callable[[], Row]:
            return ask([b.applied(like if b.machine else changed)], anew if b.machine else partial(anew, **only))[0]

        row_of = {b.what: asked_of(b) for b in sorted(bought, key=rank)}
        # where nothing runs yet, the cheapest that does is wanted, and bounds of speed say little of room
        able = [b for b in some if left_out.get(b.what)] if answer.get("fits") is False else []
        for b in sorted(able, key=lambda b: (b.price_usd, -left_out[b.what])):
            no_dearer = [row_of[o.what] for o in bought if o.kind == b.kind and o.price_usd <= b.price_usd]
            if not any(row().get("fits") for row in no_dearer):
                del left_out[b.what]
                bought.append(b)
                row_of[b.what] = asked_of(b)
        answers = [row_of[b.what]() for b in bought]
        if quick and (of_today := [row["here"] for row in answers if row.get("here")]):
            answer = ask([point], partial(answer_point, like=like, found=of_today))[0]()
        rental = rental_of(rented[0](), tokens) if rented else None
        largest_row = largest[0]() if largest else {}
    answer.pop("known", None)
    if "error" in answer:
        raise ValueError(answer["error"])
    no_answer |= (errors := _errors(bought, answers))
    tried = [b for b in bought if b.what not in errors]
    changes = worthwhile(answer, bought, answers)
    written = answer.get("bytes", {}).get(NVME_WRITE, 0)
    without = tuple(b.what for b in tried if b not in [change.bought for change in changes])
    rough = "; it found no gain for some, where the whole one may find one" if without else ""
    return Advice(
        point=point,
        machine=description.name,
        answer=answer,
        changes=changes,
        num_tried=len(tried),
        no_gain=without,
        left_out=left_out,
        no_answer=no_answer,
        rented=rental,
        largest_model=worth_telling(largest_row, answer),
        larger_model_may_fit=bool(largest_row.get("larger_model_may_fit")),
        costs=costs_of(answer, description, prices, tokens) if answer["fits"] else None,
        assumptions=(
            *([SHORT_SEARCH + rough] if quick else []),
            *_assumptions(
                point,
                description,
                prices,
                [c.bought for c in changes],
                is_life_unknown=life_text(answer.get("drive_lifetime_s"), written) == UNKNOWN_LIFE,
            ),
        ),
    )


def _errors(bought: Sequence[Purchase], rows: Sequence[Row]) -> dict[str, str]:
    """Why purchases have no answer, by what they are."""
    return {b.what: str(row["error"]) for b, row in zip(bought, rows, strict=True) if "error" in row}


def _like(point: Point, known: Known) -> tuple[Point, dict[str, Any]]:
    """What to ask in a moment, and how, where a plan of this machine says what kind is worth a look: its order, its
    micro-batches and those of twice the size."""
    plan, is_on_several, same = known.plan, known.machine.num_devices > 1, dict[str, Any]()
    if is_on_several:
        if point.sequences:  # of all devices, whether they share them or not
            same = {"batches": "each" if plan.num_batches > 1 else "shared"}
        point = replace(point, sequences=0, batch=known.batch, accumulation=known.accumulation)
        point = replace(point, planner_s=QUICK_SEVERAL_S)
    elif not isinstance(plan, UnitwisePlan):
        return point, {}
    elif point.sequences:
        batch = each = known.batch // plan.sub_batches
        if plan.order == "vertical" and point.sequences % (2 * batch) == 0:
            batch *= 2
        point = replace(point, sequences=0, batch=batch, accumulation=point.sequences // batch)
        known = known.divided(point.batch, point.accumulation, point.batch // each)
    return point, {"policies": (), "like": known.plan, "known": known, **same}


def answer_point(point: Point, *, like: Point | None = None, found: Sequence[Known] = ()) -> dict[str, object]:
    """The JSON of `tierplan plan` for a point. Where it is to be quick, `like` is how purchases are asked: this machine
    is asked so, too, and has the plans that were `found` for them where it has room."""
    try:
        best = best_plan(point) if point.policy == QUICK else bounded_plan(point)
    except InfeasiblePlan as error:
        training = training_of(point, machine_of(point))
        said = {"dtype": training.dtype, "semantics": point.semantics or plain_semantics(training)}
        return {**impossible_record(error), "policy": PLANNER, **said}
    for known in found:
        best = or_known(best, point, known)
    if like is not None and point.sequences:
        best = _as_purchases(best, point, like)
    return {**answer_record(best), "known": best.known}


def _as_purchases(best: BestPlan, point: Point, like: Point) -> BestPlan:
    """The best plan, or a quicker one in micro-batches in which purchases will be planned."""
    while True:
        asked, only = _like(like, best.known)
        if not asked.batch > best.known.batch:
            return best
        try:
            better = or_known(best, point, best_plan(asked, beat_s=best.result.step_s, **only).known)
        except InfeasiblePlan:
            return best
        if better is best:
            return best
        best = better


def figures_of(
    point: Point,
    *,
    names: Sequence[str] = FIGURES,
    than: float | None = None,
    here: Point | None = None,
    **only: Any,
) -> dict[str, object]:
    """What is kept of the answer for a machine with something bought, where it is quicker than today's tokens/s, and
    its bound does not say that it cannot be; `only` is as for `best_plan`. A plan that the machine of `here` executes
    as quickly is named, and no answer: nothing has to be bought for it."""
    if than and most_tokens_per_s(point) < than * (1 + QUICKER_FRAC):
        return {"fits": False}
    try:
        best = best_plan(point, **only)
    except InfeasiblePlan:
        return {"fits": False}
    per_s = best.result.prediction.tokens_per_s or inf
    if than and per_s / than - 1.0 < QUICKER_FRAC:
        return {"fits": False}  # nobody asks what limits it, which takes a simulation for each part
    if than and here and per_s < reached(here, best.known) * (1 + QUICKER_FRAC):
        return {"fits": False, "here": best.known}
    return {name: getattr(best.result.prediction, name) for name in names}


def promise_of(point: Point) -> dict[str, object]:
    """What the bound for a machine promises."""
    return {"promised": most_tokens_per_s(point)}


def worthwhile(answer: Row, bought: Sequence[Purchase], answers: Sequence[Row]) -> tuple[Change, ...]:
    """What makes training quicker than `answer`, or possible, most gain per price first.

    What does not go with this machine (a dtype that another card does not know) has an error and is left out.
    """
    changes = []
    for purchase, row in zip(bought, answers, strict=True):
        if not row.get("fits"):
            continue
        gain = float(row["tokens_per_s"]) / float(answer["tokens_per_s"]) - 1.0 if answer["fits"] else None
        if gain is None or gain >= QUICKER_FRAC:
            changes.append(Change(bought=purchase, answer=row, gain_frac=gain))
    return tuple(
        sorted(changes, key=lambda c: (bool(c.bought.price_usd), -(c.gain_per_1000_usd or 0.0), c.bought.price_usd))
    )


def rental_of(answer: Row, tokens: float) -> Rental | None:
    """What the job takes on `RENTED`, by the answer for it."""
    rent = load_description(RENTED).quantity("host.rent")
    if rent is None or not answer.get("fits"):
        return None
    seconds, usd_per_hour = job_s(answer, tokens), float(rent.value)  # type: ignore[arg-type]
    usd = seconds / 3600 * usd_per_hour
    return Rental(
        machine=RENTED, usd_per_hour=usd_per_hour, source=rent.source, tokens=tokens, seconds=seconds, usd=usd
    )


def worth_telling(largest: Row, answer: Row) -> str:
    """The largest model, unless the one that was asked for fits and is larger, of whose family there is none."""
    is_less = answer.get("fits") and largest.get("num_parameters", 0) < answer["num_parameters"]
    return "" if is_less else str(largest.get("largest_model", ""))


def largest_model_of(point: Point) -> dict[str, object]:
    """The largest of a family that a policy or a short search has a plan for with one sequence, by bisection: a larger
    one never needs less memory. And whether a larger one may fit: no bound excludes the next, or none is named."""
    one = replace(point, sequences=0, batch=1, accumulation=1)
    models = family(training_of(one, machine_of(one)))

    def asked(model: Workload) -> tuple[Workload, Machine, Any, float]:
        of_model = replace(one, model=model.name)
        place = place_of(of_model)
        most_per_s = allowed_bytes_per_s(place.machine, point.drive_lifetime_years)
        return workload_in(place, of_model), place.machine, point.semantics or None, most_per_s

    def is_not_found(model: Workload) -> bool:
        return not found_shortly(*asked(model))

    if not (num := bisect_left(models, True, key=is_not_found)):
        return {"largest_model": ""}
    may_fit = num == len(models)
    if not may_fit:
        workload, machine, *limits = asked(models[num])
        may_fit = has_room(workload, machine, *limits) or (
            machine.num_devices > 1 and most_tokens_per_s(replace(one, model=workload.name)) > 0
        )
    largest = models[num - 1]
    return {
        "largest_model": largest.name,
        "num_parameters": largest.num_parameters,
        "larger_model_may_fit": may_fit,
    }


def _assumptions(
    point: Point, description: Description, prices: PriceList, bought: Sequence[Purchase], *, is_life_unknown: bool
) -> tuple[str, ...]:
    """What was assumed for want of a number in the description."""
    rents = [
        f"{name} costs {rent.value:g} USD an hour ({rent.source})"
        for name, rent in {d.name: d.quantity("host.rent") for d in (load_description(RENTED), description)}.items()
        if rent and rent.value
    ]
    energy = energy_assumptions(description, prices)
    if description.number("host.rent"):
        all_paid = "the rent is all that the job costs: its owner pays for electricity, parts and worn drives"
        return (*energy, *rents, all_paid)
    assumptions = [
        *energy,
        f"electricity costs {prices.electricity_usd_per_kwh:g} USD per kWh; the machine's price is written off over "
        f"{prices.years:g} years of continuous training",
    ]
    is_priced = "host.capacity" in point.overrides and description.number("host.price") is not None
    if is_priced or any("host.capacity" in purchase.overrides for purchase in bought):
        assumptions.append(f"DRAM costs {prices.dram_usd_per_gib:g} USD per GiB (64 GB of DDR5, June 2026)")
    has_drives = description.number("nvme.drives") or any("nvme.drives" in purchase.overrides for purchase in bought)
    named = {
        section: [str(b.overrides[f"{section}.part"]) for b in bought if f"{section}.part" in b.overrides]
        for section in PARTS
    }
    if has_drives and not named["nvme"] and description.number("nvme.price") is None:
        assumptions.append(f"a drive costs {prices.drive_usd:g} USD (2 TB, February 2026)")
    assumptions += price_assumptions(description)
    if is_life_unknown:
        assumptions.append(f"worn drives cost nothing beyond what is written off: how long they last is {UNKNOWN_LIFE}")
    for section, names in named.items():
        prices_of = {name: load_part(section, name).quantity(f"{section}.price") for name in names}
        assumptions += [f"{name} costs {q.value:g} USD ({q.source})" for name, q in prices_of.items() if q]
    return (*assumptions, *rents)
