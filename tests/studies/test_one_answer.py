"""`plan`, `advise`, `sweep` and `compare-policies` say the same of the same question."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import one_answer
from tierplan.cli import main
from tierplan.hwmodels import load_machine
from tierplan.hwmodels.machine import Machine
from tierplan.planner.infeasible import InfeasiblePlan, base_note
from tierplan.planner.plan import UnitPlan, UnitwisePlan
from tierplan.planner.planning import plan
from tierplan.planner.prediction import predict
from tierplan.planner.questions.endurance import SECONDS_PER_YEAR
from tierplan.planner.results import PlanResult
from tierplan.planner.search import budget
from tierplan.planner.search.batches import Division, plan_sequences
from tierplan.runtime.tracing.trace import trace_workload
from tierplan.sim.workloads.models import load_workload
from tierplan.sim.workloads.workload import Training, Workload
from tierplan.studies import evaluate
from tierplan.studies.advise import QUICKER_FRAC, advise
from tierplan.studies.answer import answer_lines, answer_record, placements
from tierplan.studies.evaluate import BestPlan, best_plan, evaluate_point, machine_of, predict_point, workload_at
from tierplan.studies.purchases import purchases
from tierplan.studies.study import Point

SMALL = {"model_type": "gpt2", "n_embd": 64, "n_head": 2, "vocab_size": 500, "n_positions": 128}
FIGURES = ("step_s", "tokens_per_s", "micro_batch", "accumulation", "limited_by", "policy")


def question(rng: random.Random, folder: Path) -> Point:
    """A small model on a machine that is too small for it, in one way or several."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**SMALL, "n_layer": rng.randint(1, 3)}))
    overrides: dict[str, object] = {
        "gpu.reserve": 0,
        "host.reserve": 0,
        "gpu.capacity": f"{rng.choice((2, 4, 16))} MiB",
        "host.capacity": f"{rng.choice((1, 2, 8))} MiB",
        "nvme.drives": rng.choice((1, 2)),
    }
    return Point(
        model=str(folder),
        machine=rng.choice(("laptop", "desktop-4090")),
        sequences=rng.choice((0, 4)),
        batch=2,
        seq=rng.choice((64, 128)),
        semantics=rng.choice(("", "delayed-1")),
        planner_s=2.0,
        overrides=overrides,
    )


def answers_agree(point: Point) -> int:
    """Asks all, and returns how many purchases were compared."""
    advice = advise(point, num_workers=1, quick=False)
    if not advice.fits:
        assert "fits" in evaluate_point(point)
        assert not evaluate_point(point)["fits"]
        return 0
    planned = answer_record(best_plan(point))
    swept = evaluate_point(point)
    for name in FIGURES:
        assert advice.answer[name] == planned[name]
        assert name == "policy" or swept[name] == planned[name]
    for change in advice.changes:
        assert change.answer["tokens_per_s"] >= planned["tokens_per_s"] * (1 + QUICKER_FRAC)  # type: ignore[operator]
        bought = change.bought.applied(point)
        again = answer_record(best_plan(bought))
        assert {name: change.answer[name] for name in FIGURES} == {name: again[name] for name in FIGURES}
    return len(advice.changes)


@pytest.fixture(autouse=True)
def no_largest_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not the question here, and takes seconds."""
    monkeypatch.setattr("tierplan.studies.advise.largest_model_of", lambda point: {"largest_model": ""})


def test_the_answers_agree_on_small_scenarios(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierplan.studies.advise.purchases", lambda d, p: purchases(d, p)[:1])
    rng = random.Random(1)
    assert sum(answers_agree(question(rng, tmp_path / str(k))) for k in range(6)) > 1


@pytest.mark.nightly
def test_the_answers_agree_on_many_scenarios(tmp_path: Path) -> None:
    rng = random.Random(2)
    assert sum(answers_agree(question(rng, tmp_path / str(k))) for k in range(200)) > 100


def test_the_commands_print_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierplan.studies.advise.purchases", lambda d, p: [])
    monkeypatch.setattr("tierplan.planner.search.budget.DEFAULT_OPS", 100_000)
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "n_layer": 2}))
    asked = ["--model", str(tmp_path), "--machine", "laptop", "--seq", "128", "--batch", "2", "--json"]
    found: list[dict[str, Any]] = []
    for command in (["plan"], ["advise", "--workers", "1"], ["compare-policies", "--policies", "planner"]):
        assert main([*command, *asked]) == 0
        printed = json.loads(capsys.readouterr().out)
        found.append(printed.get("planner", printed))
    assert len({tuple(one[name] for name in FIGURES[:-1]) for one in found}) == 1
    limits = [[(limit["name"], limit["busy_frac"], limit["gain_frac"]) for limit in one["limits"]] for one in found]
    assert limits[0] == limits[1] == limits[2]


def test_the_clock_ends_only_searches_whose_time_somebody_has_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a computer so slow that a short search takes half as long again as it has: its work ends it."""
    asked = replace(question(random.Random(1), tmp_path / "0"), planner_s=0.5)
    monkeypatch.setattr("tierplan.planner.search.budget.Budget.computed_s", property(lambda budget: 0.75))
    assert best_plan(asked).result.status == "time-limit"
    for counted in (replace(asked, policy=evaluate.QUICK), replace(asked, planner_s=None)):
        assert best_plan(counted).result.status in ("searched", "within-gap")


def test_what_is_used_in_full_is_no_part_of_the_answer(tmp_path: Path) -> None:
    """A quotient of two rates may be a little below 1."""
    best = best_plan(question(random.Random(1), tmp_path / "0"))
    parts = (("gpu0", "capacity", 1 - 1e-9), ("nvme", "capacity", 0.5))
    plan = replace(best.result.plan, parts=parts)  # type: ignore[call-arg]
    result = replace(best.result, prediction=replace(best.result.prediction, plan=plan))
    told = [line.split(maxsplit=2)[-1] for line in answer_lines(replace(best, result=result)) if "uses only" in line]
    assert told == ["50 % of nvme (capacity)"]


def test_policies_are_shown_in_the_division_that_suits_each(tmp_path: Path) -> None:
    """What `plan` and `advise` say of a published system is what `compare-policies` says of it."""
    rng, others = random.Random(1), set[tuple[int, int]]()
    for k in range(2):
        point = replace(question(rng, tmp_path / str(k)), sequences=4, semantics="")
        point = replace(point, overrides={**point.overrides, "gpu.capacity": "4 MiB", "host.capacity": "16 MiB"})
        result = best_plan(point).result
        for name, policy in result.policies.items():
            assert (name, result.same_work_s(policy)) == (name, predict_point(replace(point, policy=name)).step_s)
            if policy.step_s is not None:
                others.add((policy.micro_batch, policy.accumulation))
    assert len(others) > 1


def test_a_policy_that_fits_in_between_fits() -> None:
    """`compare-policies` said that it does not, where `plan` gave its step time: many tied gradients need much room,
    and so does one large micro-batch."""
    overrides = {"gpu.reserve": "0 GiB", "gpu.capacity": "2.7 GiB"}
    point = Point(model="gpt2", machine="laptop", policy="vertical", sequences=32, overrides=overrides)
    for batch, accumulation, fits in ((1, 32, False), (2, 16, True), (32, 1, False)):
        alone = replace(point, sequences=0, batch=batch, accumulation=accumulation)
        assert predict_point(alone).fits == fits
    assert predict_point(point).micro_batch == 2


def test_on_two_gpus_no_policy_is_quicker_in_any_division(tmp_path: Path) -> None:
    """There one division is searched: gpt2 in 8 sequences took 88.2 ms where in-memory, in another one, takes 83."""
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "n_layer": 2}))
    overrides = {"gpu.count": 2}
    point = Point(model=str(tmp_path), machine="desktop-4090", overrides=overrides, sequences=8, seq=128)
    result = best_plan(point).result
    assert len({(p.micro_batch, p.accumulation) for p in result.policies.values()}) > 1
    for name, policy in result.policies.items():
        alone = predict_point(replace(point, policy=name))
        assert (name, result.same_work_s(policy)) == (name, alone.step_s)
        if alone.step_s is not None and policy.is_rival:
            assert (name, alone.step_s) >= (name, result.step_s)


@pytest.mark.parametrize(
    ("asked", "clip", "runs"),
    [("exact-clip", 1.0, 4), ("exact-clip", None, 5), ("in-backward", None, 5), ("delayed-1", None, 0)],
)
def test_systems_that_update_in_one_way_run_where_that_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], asked: str, clip: float | None, runs: int
) -> None:
    """`plan` said that they have no option 'semantics', and searched without them."""
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "n_layer": 2}))
    overrides = {"gpu.count": 2}
    point = Point(model=str(tmp_path), machine="desktop-4090", overrides=overrides, batch=2, accumulation=2, seq=64)
    point = replace(point, semantics=asked, max_grad_norm=clip, planner_s=0.5)
    names = ("harmony", "virtual-memory", "megatron-pp", "mobius", "roundpipe-sync")
    planned, ran = best_plan(point).result.policies, 0
    words = ["--model", str(tmp_path), "--machine", "desktop-4090", "--devices", "2", "--seq", "64", "--batch", "2"]
    words += ["--accumulation", "2", "--semantics", asked, *(["--max-grad-norm", "1"] if clip else [])]
    assert main(["compare-policies", *words, "--json", "--policies", *names]) == (0 if runs else 3)
    compared = json.loads(capsys.readouterr().out)
    for name in names:
        own = predict(name, workload_at(point, machine_of(point)), machine_of(point))
        swept = evaluate_point(replace(point, policy=name))
        if own.plan is None or (asked == "delayed-1") != (own.plan.semantics == "delayed-1"):
            assert planned[name].step_s is compared[name]["step_s"] is swept.get("step_s") is None
            assert planned[name].reason == compared[name]["why_not"]
            assert "option" not in planned[name].reason
        else:
            assert (name, planned[name].step_s) == (name, own.step_s)
            assert compared[name]["step_s"] == swept.get("step_s") == own.step_s
            ran += own.step_s is not None
    assert ran == runs


@pytest.mark.parametrize(("sequences", "others"), [(1, "2"), (3, "2 or 4")])
def test_what_gpus_cannot_divide_is_refused_by_name_and_not_trained_twice(
    sequences: int, others: str, tmp_path: Path
) -> None:
    """On 2 GPUs in-memory was shown in steps of 2 for one sequence, and thus looked quicker than the best plan."""
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "n_layer": 2}))
    overrides = {"gpu.count": 2}
    point = Point(model=str(tmp_path), machine="desktop-4090", overrides=overrides, sequences=sequences, seq=128)
    refused = (
        f"{sequences} sequence{'s' * (sequences > 1)} cannot be divided among 2 GPUs that have micro-batches of their "
        f"own; ask for {others}, or for another number of GPUs (--devices)"
    )
    result, num_refused = best_plan(point).result, 0
    assert result.prediction.tokens == sequences * 128
    for name, policy in result.policies.items():
        alone = predict_point(replace(point, policy=name))
        assert (name, result.same_work_s(policy)) == (name, alone.step_s)
        assert not alone.fits or alone.tokens == policy.num_sequences * 128 == sequences * 128, name
        with_each = predict(name, workload_at(replace(point, accumulation=1), machine_of(point)), machine_of(point))
        if with_each.plan is not None and with_each.plan.num_batches == 2:
            assert (alone.why_not, policy.reason) == (refused, refused)
            num_refused += 1
    assert num_refused > 10


def test_the_card_that_is_in_the_machine_changes_nothing() -> None:
    machine = Point(model="gpt-6.7b", machine="desktop-4090", policy="fuyou", batch=4)
    chosen = replace(machine, overrides={"gpu.part": "rtx-4090"})
    assert evaluate_point(machine)["step_s"] == evaluate_point(chosen)["step_s"]


def test_two_gpus_are_never_slower_than_one(tmp_path: Path) -> None:
    """The answer for one is among those for two, whatever the search for two finds."""
    rng, num_idle = random.Random(14), 0
    for k in range(2):
        one = replace(question(rng, tmp_path / str(k)), machine="desktop-4090", planner_s=None, semantics="")
        two = replace(one, overrides={**one.overrides, "gpu.count": 2, "link.p2p": "1 MB/s"})
        alone_s, result = best_plan(one).result.step_s, best_plan(two).result
        assert result.step_s <= alone_s * (1 + 1e-9)
        given = replace(two, sequences=0, batch=one.sequences, accumulation=1)  # each GPU has that much: twice the work
        shown = best_plan(given).result
        for r in (result, shown):
            assert r.lower_bound_s <= r.step_s * (1 + 1e-6), "a bound for the work that is shown"
        num_idle += "leaves the others idle" in result.prediction.devices_note
    assert num_idle == 2, "two are quicker wherever this looks, so nothing is shown"


def test_the_python_function_says_where_the_command_has_more_to_say() -> None:
    """`plan` has one machine and plans for all of it; whoever asks it for one GPU has what the command gives."""
    overrides = {"gpu.count": 2, "link.p2p": "1 MB/s"}
    point = Point(model="gpt2", machine="server-8xh100", seq=128, accumulation=2, overrides=overrides)
    best = best_plan(point)
    assert best.result.tried_fewer
    assert "were not tried" not in repr(best.result)
    one, of_all = (plan(best.workload, machine_of(replace(point, devices=n))) for n in (1, 2))
    assert not of_all.tried_fewer
    assert repr(of_all).split(":")[0].endswith("(for all 2 GPUs; fewer were not tried)")
    assert "were not tried" not in repr(one)
    per_s = [result.prediction.tokens_per_s or 0.0 for result in (of_all, one, best.result)]
    assert per_s[0] < per_s[1] == pytest.approx(per_s[2])


def test_three_gpus_are_never_slower_than_two() -> None:
    """Two sequences go to two GPUs evenly, and to three not at all, which 16 heads do not either: one is left idle."""
    two = Point(model="gpt2-medium", machine="laptop", sequences=2, devices=2)
    two_s, three = best_plan(two).result.step_s, best_plan(replace(two, devices=3)).result
    assert three.step_s <= two_s * (1 + 1e-9)
    assert "leaves the others idle" in three.prediction.devices_note, "three are quicker, so nothing is shown"
    assert three.prediction.devices_note.startswith("planner trains on 2 of the 3 GPUs that were asked for, and this ")
    assert three.prediction.devices == 2


def test_fewer_gpus_are_asked_only_for_what_all_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter is not asked because it may beat a half, which is slower than all."""
    point = Point(model="gpt2", machine="server-8xh100", sequences=4, devices=4)
    all_per_s = best_plan(point).result.prediction.tokens_per_s
    assert all_per_s is not None
    promised = {4: 4 * all_per_s, 2: 2 * all_per_s, 1: 0.9 * all_per_s}
    asked: list[int] = []

    def noted(make: Any, machine: Machine, **more: Any) -> Division:
        asked.append(machine.num_devices)
        return plan_sequences(make, machine, **more)

    monkeypatch.setattr(evaluate, "most_tokens_per_s", lambda p: promised[p.devices])
    monkeypatch.setattr(evaluate, "plan_sequences", noted)
    # how near a look with the plan of all comes, then a short search, and what the bound promises
    for look, searched, most, devices in (
        (1.0, 0.0, 2.0, [4, 2]),
        (0.99, 0.0, 2.0, [4, 2]),
        (0.9, 0.9, 2.0, [4]),
        (0.9, 0.99, 2.0, [4, 2]),
        (0.9, 0.99, 1.2, [4]),
        (0.99, 0.99, 1.0, [4]),
    ):
        promised[2] = most * all_per_s
        monkeypatch.setattr(evaluate, "_look_at_fewer", lambda *_, found=look * all_per_s: found)
        monkeypatch.setattr(evaluate, "_look_by_search", lambda *_, found=searched * all_per_s, **__: found)
        assert best_plan(point).result.prediction.tokens_per_s == all_per_s
        assert asked == devices
        asked.clear()


def test_where_nothing_fits_on_all_gpus_one_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    two = Point(model="gpt2", machine="laptop", sequences=2, devices=2)
    one = best_plan(replace(two, devices=1)).result
    on_all = evaluate._on_all

    def none_on_two(point: Point, place: Any, *more: Any) -> BestPlan:
        if place.machine.num_devices == 2:
            raise InfeasiblePlan(evaluate.workload_in(place, point), place.machine, ())
        return on_all(point, place, *more)

    monkeypatch.setattr(evaluate, "_on_all", none_on_two)
    found = best_plan(two).result
    assert (found.step_s, found.prediction.devices) == (pytest.approx(one.step_s), 1)
    assert "No plan for all GPUs fits" in found.prediction.devices_note


def test_a_look_at_fewer_gpus_is_a_plan_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the same work, no quicker than the best that is known of them by more than a search for a moment is worth."""
    point = Point(model="gpt2", machine="server-8xh100", sequences=8, devices=4)
    best = best_plan(point)
    assert isinstance(best.result.plan, UnitwisePlan)
    found = evaluate._look_at_fewer(replace(point, devices=2), best, 1.0)
    searched = best_plan(replace(point, devices=2)).result.prediction.tokens_per_s
    assert searched is not None
    known, looked = best.known, list[tuple[int, int]]()
    in_turns = replace(best.result.plan, order="vertical")

    def noted(workload: Workload, *asked: Any, **settings: Any) -> PlanResult:
        training = workload.training
        looked.append((training.per_device_train_batch_size, training.gradient_accumulation_steps))
        return plan(workload, *asked, **settings)

    monkeypatch.setattr(evaluate, "plan", noted)
    assert evaluate._look_at_fewer(replace(point, devices=2), best, 1.0) == found
    assert looked == [(2 * known.batch, known.accumulation)], "in horizontal order, more micro-batches only fetch more"
    vertical = replace(best, result=replace(best.result, prediction=replace(best.result.prediction, plan=in_turns)))
    looked.clear()
    assert evaluate._look_at_fewer(replace(point, devices=2), vertical, 1.0) > 0
    assert looked == [(2 * known.batch, known.accumulation), (known.batch, 2 * known.accumulation)]
    assert 0.5 * searched < found < 1.1 * searched
    assert evaluate._look_at_fewer(replace(point, devices=3), best, 1.0) == inf, (
        "8 sequences of 4 devices are none of 3"
    )

    for is_slower, num_looks in ((False, 2), (True, 1)):
        looked.clear()

        def nothing(workload: Workload, *_: Any, is_slower: bool = is_slower, **__: Any) -> PlanResult:
            looked.append((workload.training.per_device_train_batch_size, 0))
            raise InfeasiblePlan(best.workload, best.machine, (), is_slower=is_slower)

        monkeypatch.setattr(evaluate, "plan", nothing)
        assert evaluate._look_at_fewer(replace(point, devices=2), best, 1.0) == inf
        assert len(looked) == num_looks, "with room, and too slow, they are no quicker where they fetch more"
    more = replace(best, machine=machine_of(replace(point, overrides={"host.capacity": "4096 GiB"})))
    assert evaluate._look_at_fewer(replace(point, devices=2), more, 1.0) == 0.0


def test_where_frozen_parameters_are_is_told() -> None:
    """Of LoRA on a model that lies on the drive, adapters in host memory were all that was told."""
    point = Point(model="gpt2", machine="desktop-4090", batch=1, lora="r=8,targets=c_attn", planner_s=0.1)
    result: Any = best_plan(point).result
    units = [replace(u, params="host", frozen="nvme" if k < 5 else "host") for k, u in enumerate(result.plan.units)]
    shown = SimpleNamespace(plan=replace(result.plan, units=tuple(units)), schedule=result.schedule)
    texts = [text for _, text in placements(shown)]  # type: ignore[arg-type]
    assert any(text.startswith("5 x params host, frozen nvme, states") for text in texts)
    assert sum("frozen" in text for text in texts) == 1, "what lies with the adapters is not told apart"


def test_where_units_are_updated_is_told() -> None:
    """Units whose states come to the device for the update were counted among those that the host updates."""
    result: Any = best_plan(Point(model="gpt2", machine="desktop-4090", batch=1, planner_s=0.1)).result
    of_host = UnitPlan(params="host", grads="host", states="nvme")
    brought = replace(of_host, states="host", update="device", grads="device")
    units = [of_host, replace(of_host, update="device"), replace(brought, late_update=True), *[brought] * 11]
    shown = SimpleNamespace(plan=replace(result.plan, units=tuple(units)), schedule=result.schedule)
    assert [text for _, text in placements(shown)][:4] == [  # type: ignore[arg-type]
        "11 x params host, states host, updated on the device",
        "1 x params host, states nvme",
        "1 x params host, states nvme, updated on the device",
        "1 x params host, states host, updated on the device (late)",
    ]


def test_systems_are_asked_for_the_same_drive_lifetime_as_the_planner() -> None:
    """A sweep said that they fit, beside drives that last four days of five years."""
    point = Point(model="gpt-6.7b", machine="desktop-4090", policy="fuyou", batch=8, accumulation=1, planner_s=0.5)
    free = predict_point(point)
    assert free.fits
    assert free.lifetime_s
    life_years = free.lifetime_s / SECONDS_PER_YEAR
    for years, lasts in ((0.99 * life_years, True), (1.01 * life_years, False)):
        asked = replace(point, drive_lifetime_years=years)
        found = predict_point(asked)
        planned = plan(
            workload_at(asked, machine := machine_of(asked)), machine, drive_lifetime_years=years, time_limit_s=0.5
        )
        assert found.fits == (planned.policies["fuyou"].step_s is not None) == lasts
        assert lasts or f"of the {years:g} years" in found.why_not


def test_policies_without_a_rate_leave_the_others_their_rows(capsys: pytest.CaptureFixture[str]) -> None:
    """Muon's products on a GPU are bf16: on a V100, the first policy that updates there was the end of the table."""
    asked = ["--model", "gpt-0.1b", "--machine", "zero-offload-v100", "--seq", "64", "--optimizer", "muon"]
    policies = ["in-memory", "zero-offload", "full-recompute"]
    assert main(["compare-policies", *asked, "--json", "--policies", *policies]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {name: found[name]["fits"] for name in policies} == {
        "in-memory": False,
        "zero-offload": True,
        "full-recompute": False,
    }
    for name in ("in-memory", "full-recompute"):
        why = found[name]["why_not"]
        assert "no rate for 'matmul_bf16_flops'" in why
        assert "take another optimizer or a policy that updates on the host" in why
    assert main(["simulate", *asked, "--policy", "in-memory", "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["why_not"] == found["in-memory"]["why_not"]


@pytest.mark.parametrize(
    ("asked", "refused"),
    [
        ("--policy zero-1 --machine laptop --max-grad-norm 1 --semantics delayed-1", "are not clipped"),
        ("--policy zero-offload --machine laptop --max-grad-norm 1 --semantics delayed-1", "are not clipped"),
        ("--policy zero-1 --machine harmony-4x1080ti --dtype bf16 --semantics delayed-1", "has no rate for"),
    ],
)
def test_what_the_planner_refuses_leaves_the_verdict(
    asked: str, refused: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`explain-run` has that of `simulate`, with its status."""
    words = [*asked.split(), "--model", "gpt2", "--seq", "100"]
    assert main(["simulate", *words, "--json"]) == 3
    simulated = json.loads(capsys.readouterr().out)
    assert main(["explain-run", "--step-s", "5", *words, "--json"]) == 3
    explained = json.loads(capsys.readouterr().out)
    assert (explained["expected_s"], explained["why_not"]) == (simulated["step_s"], simulated["why_not"])
    assert explained["verdict"] == "does not fit"
    assert refused in explained["best"]["why_not"]
    assert main(["explain-run", "--step-s", "5", *words]) == 3
    said = " ".join(capsys.readouterr().out.split())
    assert "The planner has no answer here: " in said
    assert refused in said


def test_the_check_of_many_scenarios_asks_the_commands_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """It read `sweep`'s rows as if they were one, and nobody ran it."""
    monkeypatch.setattr(budget, "DEFAULT_OPS", 10_000)
    found = one_answer.scenario(2)
    assert found["wrong"] == []
    assert found["purchases"]


def test_a_base_most_of_which_stays_as_it_is_is_named(tmp_path: Path) -> None:
    """Experts whose matrices lie in one parameter are not in codes, and nothing said so."""
    mixture = {
        "model_type": "mixtral",
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_local_experts": 8,
        "vocab_size": 64,
    }
    training = Training(lora="r=2", base="nf4", sequence_length=16)
    (tmp_path / "config.json").write_text(json.dumps(mixture))
    note = base_note(workload := trace_workload(tmp_path, training))
    assert "parameters stay in bf16: only linear layers are in nf4" in note
    assert note in InfeasiblePlan(workload, load_machine("laptop"), ()).what  # where it is often why
    for dense in (training, Training(lora="r=2")):
        assert not base_note(load_workload("llama-3.1-8b", dense))
