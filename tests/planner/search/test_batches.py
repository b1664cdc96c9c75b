"""The outer search over divisions of a step's sequences: never worse than one of them alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import islice
from operator import length_hint
from types import SimpleNamespace
from typing import Any

import pytest

from tests.planner.instances import MB, chain, random_machine
from tierplan.hwmodels import load_machine
from tierplan.planner import compared
from tierplan.planner.infeasible import InfeasiblePlan
from tierplan.planner.planning import plan
from tierplan.planner.results import PolicyResult
from tierplan.planner.search import batches, budget
from tierplan.planner.search.batches import _in_their_best, divisors, plan_sequences
from tierplan.planner.search.lesser import Known
from tierplan.planner.search.local.moves import untied
from tierplan.planner.search.race import Racer, race
from tierplan.sim.workloads.models import load_workload, workload_of
from tierplan.sim.workloads.workload import Training, Workload


def test_why_a_system_does_not_run_is_of_a_division_that_it_has_a_plan_for() -> None:
    """Not that it needs more micro-batches, where it was tried with more and these do not fit."""

    def compared(**said: str) -> dict[str, Callable[..., PolicyResult]]:
        """By system: what it lacks, or why it has no plan. What is short is put in words only when asked for."""
        return {
            name: lambda *, is_best=True, why=why: PolicyResult(
                step_s=None, reason=why if is_best else "", lacks_memory="short" in why
            )
            for name, why in said.items()
        }

    best = compared(pipeline="1 micro-batch", offload="short by 2", none="no drive")
    other = compared(pipeline="short by 1", offload="short by 3", none="no drive")
    searches: Any = [SimpleNamespace(compared=best), SimpleNamespace(compared=other)]
    found = _in_their_best(best, searches, 8)
    assert {name: f().reason for name, f in found.items()} == {
        "pipeline": "short by 1",
        "offload": "short by 2",
        "none": "no drive",
    }


def test_a_system_is_shown_in_the_division_that_is_best_when_all_is_simulated() -> None:
    """And not in the one that is best by a plan near its own: `compare-policies` simulates what each decides."""

    def search(nearly_s: float, step_s: float) -> Any:
        def result(*, is_best: bool = True) -> PolicyResult:
            return PolicyResult(step_s=step_s if is_best else nearly_s, micro_batch=1, accumulation=2)

        return SimpleNamespace(compared={"packs": result})

    searches = [search(1.0, 1.1), search(1.05, 1.05), search(9.0, 0.1)]
    assert _in_their_best(searches[0].compared, searches, 2)["packs"]().step_s == 1.05


FEW_OPS = 60_000
"""A budget with which searches end before they have found the best plan."""


def question(rng: random.Random) -> Callable[[int, int], Workload]:
    """A chain of blocks by its micro-batches."""
    num, saved_mb = rng.choice((4, 10)), rng.choice((2, 4, 8))
    seconds, parameters = rng.choice((0.01, 0.02, 0.05)), rng.choice((1, 2, 4)) * MB

    def make(batch: int, accumulation: int) -> Workload:
        return chain(
            forward_s=[0.0005 + seconds * batch] * num,
            parameters=[parameters] * num,
            saved_mb=[[saved_mb * batch, saved_mb * batch / 2]] * num,
            border_mb=batch,
            accumulation=accumulation,
            batch=batch,
        )

    return make


@pytest.mark.parametrize("seed", [3, 6, 11, *(pytest.param(n, marks=pytest.mark.nightly) for n in (1, 9))])
def test_no_division_alone_is_planned_better(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where bounds are alike, the best of them does not say which search ends best."""
    monkeypatch.setattr(budget, "DEFAULT_OPS", FEW_OPS)
    make = question(rng := random.Random(seed))
    machine = random_machine(rng, make(4, 1))
    found = plan_sequences(make, machine, sequences=4)
    alone = {}
    for batch in (1, 2, 4):
        try:
            alone[batch] = plan(make(batch, 4 // batch), machine).step_s
        except InfeasiblePlan:
            continue
    assert found.result.step_s == min(alone.values())
    searched = {batch: step_s for batch, step_s in found.planned_s.items() if step_s == alone[batch]}
    assert all(alone[batch] >= found.result.step_s for batch in found.planned_s.keys() - searched.keys())


@pytest.mark.parametrize("seed", [pytest.param(9, marks=pytest.mark.nightly), 11, 13])  # chains of 10
def test_divisions_that_race_leave_little(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They share one budget; and no published policy is quicker in any division."""
    monkeypatch.setattr(budget, "DEFAULT_OPS", 150_000)
    monkeypatch.setattr("tierplan.planner.search.batches.SEARCHED_TO_THE_END", 0)
    make = question(rng := random.Random(seed))
    machine = random_machine(rng, make(4, 1))
    found = plan_sequences(make, machine, sequences=4)
    alone = {batch: plan(make(batch, 4 // batch), machine) for batch in (1, 2, 4)}
    assert found.planned_s.keys() == alone.keys()
    assert found.result.step_s <= 1.01 * min(result.step_s for result in alone.values())
    policies_s = [p.step_s for result in alone.values() for p in result.policies.values() if p.is_rival]
    assert found.result.step_s <= min(step_s for step_s in policies_s if step_s is not None)


@pytest.mark.parametrize(
    ("model", "capacity", "sequences"),
    [("llama-3.2-3b", 24, 16), pytest.param("llama-3.1-8b", 15, 4, marks=pytest.mark.nightly)],
)
def test_divisions_race_where_no_plan_with_micro_batches_together_fits(
    model: str, capacity: int, sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The race had nobody to begin with and ended with the best policy, up to twice as long as one division alone."""
    monkeypatch.setattr(budget, "DEFAULT_OPS", 300_000)
    machine = load_machine("desktop-4090", [f"gpu.capacity={capacity} GiB"])

    def make(batch: int, accumulation: int) -> Workload:
        training = Training(
            per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation, sequence_length=8192
        )
        return load_workload(model, training)

    alone_s = plan(make(1, sequences), machine, orders=["horizontal"]).step_s
    assert plan_sequences(make, machine, sequences=sequences).result.step_s <= 1.1 * alone_s


@pytest.mark.nightly
def test_13b_in_all_divisions_is_planned_about_as_well_as_in_the_best_alone() -> None:
    """The race chose 2 sequences for each micro-batch, with 33.4 s, where 8 alone take 32.4: bounds said so at once."""
    machine = load_machine("desktop-4090")

    def make(batch: int, accumulation: int) -> Workload:
        training = Training(
            per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation, sequence_length=1024
        )
        return load_workload("gpt-13b", training)

    alone_s = [plan(make(batch, 16 // batch), machine).step_s for batch in divisors(16)]
    assert plan_sequences(make, machine, sequences=16).result.step_s <= 1.01 * min(alone_s)


@pytest.mark.parametrize("seed", [pytest.param(9, marks=pytest.mark.nightly), 11])
def test_far_from_the_bound_the_race_goes_on(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all that it has found: more work is never worse. With a lesser machine's answer it does not, nor where long
    nothing was found."""
    monkeypatch.setattr(budget, "DEFAULT_OPS", 50_000)
    monkeypatch.setattr(budget, "WAIT_TIMES", 1e9)
    monkeypatch.setattr(budget, "OPS_PER_S", 500)
    monkeypatch.setattr(batches, "SEARCHED_TO_THE_END", 0)
    make = question(rng := random.Random(seed))
    machine = random_machine(rng, make(4, 1))

    def found(more_times: float, **asked: Any) -> tuple[float, int]:
        monkeypatch.setattr(budget, "MORE_TIMES_OF_DIVISIONS", more_times)
        division = plan_sequences(make, machine, sequences=4, **asked)
        answers.append(Known.of(machine, division.workload, division.result))
        return division.result.step_s, division.result.num_simulated

    answers: list[Known] = []
    monkeypatch.setattr(batches, "FAR", 0.0)
    (more_s, num_more), (step_s, num) = found(6.0), found(0.0)
    assert more_s <= step_s
    assert num_more > num
    with monkeypatch.context() as patched:
        patched.setattr(budget, "WAIT_TIMES", 0.0)
        assert found(6.0) == (step_s, num)
    assert found(2.0, time_limit_s=100) == found(0.0, time_limit_s=100)
    monkeypatch.setattr(batches, "FAR", float("inf"))
    assert found(2.0) == (step_s, num)
    monkeypatch.setattr(batches, "FAR", 0.0)
    monkeypatch.setattr(batches, "known_of_lesser", lambda *asked: answers[0])
    assert found(2.0) == found(0.0)


@pytest.mark.parametrize("seed", [9, 11])
def test_the_only_division_is_asked_as_by_itself(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a long chain, too, which has more to spend alone than in a race."""
    monkeypatch.setattr(budget, "DEFAULT_OPS", 20_000)
    monkeypatch.setattr(budget, "WAIT_TIMES", 1e9)
    monkeypatch.setattr(batches, "SEARCHED_TO_THE_END", 0)
    make = question(rng := random.Random(seed))
    machine = random_machine(rng, make(1, 1))
    alone, result = plan(make(1, 1), machine), plan_sequences(make, machine, sequences=1).result
    assert (result.step_s, result.num_simulated) == (alone.step_s, alone.num_simulated)


class Counting:
    """A budget from which each look takes one op."""

    num = 0.0

    @property
    def ops_left(self) -> float:
        self.num -= 1.0
        return self.num


def racer(best_s: float, bound_s: float) -> Racer:
    return Racer(iter([best_s] * 100), bound_s)


def test_who_joins_a_race_has_a_turn() -> None:
    """Searches of another order joined behind all others, which left them nothing."""
    first, joining = [racer(10.0, 1.0), racer(11.0, 1.0)], [racer(12.0, 1.0)]

    def meet() -> list[Racer]:
        return joining if joining[0].best_s == float("inf") else []

    spent: Any = Counting()
    for _ in islice(race(first, spent, first_ops=10, kept_frac=0.5, meet=meet), 60):
        pass
    assert [length_hint(r.tried) for r in (*first, *joining)] == [70, 90, 80]


def test_after_the_first_round_bounds_count_more_than_steps() -> None:
    for weight, spent_by in ((0.0, [30, 10]), (6.0, [10, 30])):
        racers = [racer(10.0, 6.0), racer(12.0, 5.0)]
        spent: Any = Counting()
        for _ in islice(race(racers, spent, first_ops=10, kept_frac=0.5, bound_weight=weight), 40):
            pass
        assert [100 - length_hint(r.tried) for r in racers] == spent_by


def test_policies_are_compared_in_all_divisions_where_the_race_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batches of one sequence each fit in the other order alone; Fuyou runs with all sequences in one, with other
    numbers than the search is of, which here tries nothing else in its place."""
    monkeypatch.setattr(compared, "untied", lambda *of: islice(untied(*of), 1))
    monkeypatch.setattr(budget, "OPS_PER_S", 1000)  # little work, and time enough on any computer
    config = {"model_type": "gpt2", "n_embd": 32, "n_layer": 60, "n_head": 2, "n_positions": 8, "vocab_size": 50_000}
    config |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)

    def make(batch: int, accumulation: int) -> Workload:
        training = Training(
            per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation, sequence_length=8
        )
        return workload_of("tied", config, training)

    sizes = {"gpu.capacity": "14 MiB", "gpu.reserve": "0 B", "host.capacity": "26 MiB", "host.reserve": "0 B"}
    machine = load_machine("laptop", [f"{key}={value}" for key, value in sizes.items()])
    found = plan_sequences(make, machine, sequences=13, time_limit_s=100)
    assert found.planned_s[1] == found.result.step_s
    fuyou = found.result.policies["fuyou"]
    assert fuyou.step_s is not None
    assert (fuyou.micro_batch, fuyou.accumulation) == (13, 1)
