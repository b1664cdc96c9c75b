"""Training on a schedule gives the numbers of plain in-memory training, bit for bit, and moves the schedule's bytes."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.runtime.models import (
    CPU,
    machine,
    make_batches,
    make_model,
    observed_workload,
    resume_as_plainly,
    schedule_for,
)
from tests.toys import uniform_plan
from tierplan.hwmodels.machine import Machine
from tierplan.planner.lowering import lower
from tierplan.planner.plan import UnitPlan, UnitwisePlan
from tierplan.planner.prediction import predict_plan
from tierplan.runtime.autograd.units import ModelError
from tierplan.runtime.execution.placement import TrainingError
from tierplan.runtime.execution.rules import TierFullError
from tierplan.runtime.execution.values import SizeError
from tierplan.runtime.memory.files import StoreError
from tierplan.runtime.optim.adam import NonFiniteGradientError, OptimizerSettings
from tierplan.runtime.reference import same_weights, train_plainly
from tierplan.runtime.run_result import RunResult
from tierplan.runtime.tracing.trace import trace_config, trace_module
from tierplan.runtime.trainer import Trainer, train
from tierplan.sim.pricing import simulate_on
from tierplan.sim.schedule import Schedule
from tierplan.sim.workloads.workload import Training, Workload, WorkloadError

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 4


def check(
    model: nn.Module,
    training: Training,
    plan: UnitwisePlan | UnitPlan | Callable[[Workload], UnitwisePlan],
    nvme_dir: Path,
    *,
    on: Machine | None = None,
    workload: Workload | None = None,
    optimizer: OptimizerSettings | None = None,
    **settings: Any,
) -> Schedule:
    """Trains both ways and compares everything that can be compared."""
    optimizer = optimizer or OptimizerSettings(name=training.optimizer, lr=1e-2)
    batches = make_batches(STEPS * training.gradient_accumulation_steps)
    workload = workload or observed_workload(model, batches[0], training)
    if isinstance(plan, UnitPlan):
        plan = uniform_plan(workload, plan, semantics="exact-clip" if training.max_grad_norm else "in-backward")
    elif not isinstance(plan, UnitwisePlan):
        plan = plan(workload)
    schedule = lower(plan, workload, on or machine())
    plain = copy.deepcopy(model)
    losses = train_plainly(
        plain,
        batches,
        steps=STEPS,
        optimizer=optimizer,
        gradient_accumulation_steps=training.gradient_accumulation_steps,
        max_grad_norm=training.max_grad_norm,
        delayed=plan.semantics == "delayed-1",
        **settings,
    )
    result = train(schedule, model, batches, steps=STEPS, nvme_dir=nvme_dir, optimizer=optimizer, **settings)
    assert result.losses == tuple(losses)
    for (name, trained), (_, expected) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(trained, expected), name
    assert dict(result.moved_bytes) == {stream: STEPS * size for stream, size in schedule.bytes_moved().items()}
    for tier in schedule.tiers:
        assert result.peak_bytes[tier.name] <= tier.capacity_bytes
    assert set(result.trace.by_key()) == {f"s{s}/{op.key}" for s in range(STEPS) for op in schedule.ops}
    assert len(result.step_ends_s) == STEPS
    assert not list(nvme_dir.iterdir())
    return schedule


MIXED = UnitPlan(params="nvme", grads="host", states="nvme", acts="host", input="nvme")


def test_a_step_may_ask_for_what_has_been_done() -> None:
    """Whole steps only: the losses are those of the run's end, as far as it has come."""
    model = make_model("gpt2")
    training = replace(CPU, gradient_accumulation_steps=2)
    schedule = schedule_for(model, UnitPlan(), training)
    seen: list[tuple[int, RunResult]] = []
    with Trainer(schedule, model, on_step=lambda step, loss: seen.append((step, trainer.result()))) as trainer:
        trainer.run(make_batches(2 * STEPS), STEPS)
        end = trainer.result()
    assert [step for step, _ in seen] == list(range(STEPS))
    for step, result in seen:
        assert len(result.losses) > step
        assert result.losses == end.losses[: len(result.losses)]
        assert result.step_ends_s == end.step_ends_s[: len(result.losses)]


@pytest.mark.parametrize("acts", ["keep", "recompute", "host", "nvme"])
@pytest.mark.parametrize(("params", "states"), [("device", "device"), ("device", "nvme"), ("host", "host")])
def test_gpt2_with_every_action(params: str, states: str, acts: str, tmp_path: Path) -> None:
    choice = UnitPlan(params=params, states=states, acts=acts)  # type: ignore[arg-type]
    check(make_model("gpt2", dropout=0.1), CPU, choice, tmp_path)


@pytest.mark.sampled
@pytest.mark.parametrize("family", ["gpt2", "opt", "llama", "bert"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("accumulation", "clip"), [(1, None), (1, 0.5), (2, None), (2, 0.5)])
def test_every_family(family: str, dtype: str, accumulation: int, clip: float | None, tmp_path: Path) -> None:
    training = replace(CPU, dtype=dtype, gradient_accumulation_steps=accumulation, max_grad_norm=clip)  # type: ignore[arg-type]
    model = make_model(family, num_blocks=2, dropout=0.1, dtype=dtype)
    check(model, training, random_choices(model, training, seed=f"{family}{dtype}{accumulation}{clip}"), tmp_path)


def random_choices(model: nn.Module, training: Training, seed: str) -> UnitwisePlan:
    """A plan with everything different for each unit."""
    rng = random.Random(seed)
    workload = observed_workload(model, make_batches(1)[0], training)
    units = []
    for unit in workload.units:
        params, grads, states = (rng.choice(["device", "host", "nvme"]) for _ in range(3))
        if rng.random() < 0.2:
            params = grads = states = "device"
        elif states == "device":
            states = "host"
        actions = ["keep", "host", "nvme", "recompute"] if unit.kind == "block" else ["keep", "host", "nvme"]
        acts = tuple(rng.choice(actions) for _ in unit.saved)
        units.append(
            UnitPlan(params=params, grads=grads, states=states, acts=acts, input=rng.choice(["keep", "host", "nvme"]))
        )  # type: ignore[arg-type]
    return UnitwisePlan(
        policy="random",
        units=tuple(units),
        semantics="exact-clip" if training.max_grad_norm else "in-backward",
        order=rng.choice(["horizontal", "vertical"]),  # type: ignore[arg-type]
        prefetch_params_units=rng.randint(0, 2),
        prefetch_acts_units=rng.randint(0, 2),
        prefetch_states_units=rng.randint(0, 2),
    )


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(n, marks=pytest.mark.nightly) for n in range(6, 20))])
def test_random_plans(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    family = rng.choice(["gpt2", "opt", "llama", "bert"])
    training = replace(
        CPU,
        dtype=rng.choice(["fp32", "bf16"]),  # type: ignore[arg-type]
        gradient_accumulation_steps=rng.choice([1, 2, 3]),
        max_grad_norm=rng.choice([None, 0.5]),
    )
    model = make_model(family, num_blocks=3, dropout=0.1, dtype=training.dtype)
    check(model, training, random_choices(model, training, str(seed)), tmp_path)


def test_with_two_threads(tmp_path: Path) -> None:
    """Compute, norms and the reference use two threads, the other streams one: no stream changes another's bits."""
    torch.set_num_threads(2)
    training = replace(CPU, max_grad_norm=0.5)
    check(make_model("gpt2", dropout=0.1), training, UnitPlan(grads="host", states="nvme", acts="host"), tmp_path)
    assert torch.get_num_threads() == 2


def test_delayed_updates(tmp_path: Path) -> None:
    choice = UnitPlan(grads="host", states="host")
    check(make_model("gpt2"), CPU, partial(uniform_plan, choice=choice, semantics="delayed-1"), tmp_path)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("place", ["host", "nvme"])
@pytest.mark.parametrize(("accumulation", "clip"), [(1, None), (2, None), (2, 0.5)])
def test_updates_that_wait_for_the_next_step(
    dtype: str, place: str, accumulation: int, clip: float | None, tmp_path: Path
) -> None:
    """Half of the units are updated late; the numbers are those of plain training all the same, to the last step."""
    model = make_model("gpt2", dtype=dtype)
    training = replace(CPU, dtype=dtype, gradient_accumulation_steps=accumulation, max_grad_norm=clip)  # type: ignore[arg-type]
    workload = observed_workload(model, make_batches(1)[0], training)
    semantics = "exact-clip" if clip else "in-backward"
    choice = UnitPlan(params=place, grads="host", states=place)  # type: ignore[arg-type]
    plan = uniform_plan(workload, choice, semantics=semantics)
    units = tuple(replace(choice, late_update=i % 2 == 0) for i, choice in enumerate(plan.units))
    schedule = check(
        model, training, replace(plan, units=units), tmp_path, workload=workload, learning_rate=lambda k: 0.01 / (k + 1)
    )
    assert schedule.step is not None
    assert len(schedule.step.late_updates) > 1


def test_a_resumed_run_makes_the_updates_that_still_waited(tmp_path: Path) -> None:
    model = make_model("gpt2")
    workload = observed_workload(model, make_batches(1)[0], CPU)
    plan = uniform_plan(workload, UnitPlan(params="nvme", grads="host", states="nvme"))
    units = tuple(replace(choice, late_update=i % 2 == 0) for i, choice in enumerate(plan.units))
    schedule = lower(replace(plan, units=units), workload, machine())
    resume_as_plainly(schedule, schedule, model, make_batches(6), tmp_path, optimizer=OptimizerSettings(lr=1e-2))


def test_sgd_and_a_learning_rate_schedule(tmp_path: Path) -> None:
    training = replace(CPU, optimizer="sgd")
    choice = UnitPlan(params="host", grads="host", states="host")
    check(make_model("gpt2"), training, choice, tmp_path, learning_rate=lambda step: 0.1 / (step + 1))


def test_global_random_numbers(tmp_path: Path) -> None:
    """Without a seed, dropout draws from PyTorch's generator as plain training does."""
    model = make_model("gpt2", dropout=0.1)
    batches = make_batches(STEPS)
    schedule = schedule_for(model, UnitPlan(acts="recompute"))
    plain = copy.deepcopy(model)
    torch.manual_seed(5)
    expected = train_plainly(plain, batches, steps=STEPS, seed=None)
    torch.manual_seed(5)
    result = train(schedule, model, batches, steps=STEPS, seed=None, nvme_dir=tmp_path)
    assert result.losses == tuple(expected)


class Masked:
    """Micro-batches whose tokens are masked by PyTorch's own random numbers, as they are asked for."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for batch in make_batches(12):
            ids = batch["input_ids"]
            yield {**batch, "input_ids": torch.where(torch.rand(ids.shape) < 0.3, 5, ids)}


@pytest.mark.parametrize("acts", ["keep", "host"])
@pytest.mark.parametrize(("accumulation", "seed"), [(1, 0), (2, 0), (1, None)])
def test_batches_that_draw_random_numbers(accumulation: int, seed: int | None, acts: Any, tmp_path: Path) -> None:
    """They are those of plain training in any plan, and in a run that is resumed, which passes over some."""
    training = replace(CPU, gradient_accumulation_steps=accumulation)
    schedule = schedule_for(make_model("gpt2", dropout=0.1), UnitPlan(acts=acts), training)
    torch.manual_seed(9)
    plain = make_model("gpt2", dropout=0.1)
    torch.manual_seed(9)
    expected = train_plainly(plain, Masked(), steps=6, gradient_accumulation_steps=accumulation, seed=seed)
    for resume, end in ((False, 4), (True, 6)):
        model = make_model("gpt2", dropout=0.1)
        torch.manual_seed(9)
        with Trainer(schedule, model, seed=seed, out_dir=tmp_path / "out", resume=resume) as trainer:
            trainer.run(Masked(), end - trainer.num_steps_done)
            trainer.restore_model()
            assert trainer.result().losses == tuple(expected[:end])
    assert same_weights(model, plain)


def test_in_a_device_too_small_for_plain_training(tmp_path: Path) -> None:
    model = make_model("gpt2", num_blocks=6)
    workload = observed_workload(model, make_batches(1)[0], CPU)
    plan = uniform_plan(workload, MIXED, prefetch_params_units=1, prefetch_acts_units=1)
    plain_bytes = workload.num_parameters * 16
    tight = machine(device_bytes=plain_bytes // 2)
    check(model, CPU, plan, tmp_path, on=tight, workload=workload)


def test_over_budget_is_an_error_before_the_allocation(tmp_path: Path) -> None:
    model = make_model("gpt2")
    workload = observed_workload(model, make_batches(1)[0], CPU)
    small = machine(device_bytes=workload.num_parameters * 4 + 50_000)
    schedule = lower(uniform_plan(workload, UnitPlan(grads="host", states="host")), workload, small, refine=False)
    with pytest.raises(TierFullError, match="Raise the capacity of 'gpu0'"):
        train(schedule, model, make_batches(2), steps=2, nvme_dir=tmp_path)


@pytest.mark.parametrize(
    ("shape", "what"),
    [({"length": 32}, "^a batch .* of 32 .* 16: .*: "), ({"batch": 4}, "^a batch of 4 .* of 2, .* of 2, as .*: ")],
)
def test_other_shapes_than_planned_are_refused(shape: dict[str, int], what: str, tmp_path: Path) -> None:
    model = make_model("gpt2")
    schedule = schedule_for(model, UnitPlan(acts="host"))
    with pytest.raises(SizeError, match=what + r"buffer .* is declared with .* bytes, but holds"):
        train(schedule, model, make_batches(2, **shape), steps=2, nvme_dir=tmp_path)


def test_a_model_in_evaluation_mode_that_keeps_less_is_told_to_train(tmp_path: Path) -> None:
    """As `from_pretrained` leaves it."""
    schedule = schedule_for(make_model("gpt2", dropout=0.1), UnitPlan(acts="recompute"))
    with pytest.raises(SizeError, match=r"call model\.train\(\)"):
        train(schedule, make_model("gpt2", dropout=0.1).eval(), make_batches(2), steps=2, nvme_dir=tmp_path)


def test_another_model_than_planned_is_refused(tmp_path: Path) -> None:
    schedule = schedule_for(make_model("gpt2"), UnitPlan())
    with pytest.raises(TrainingError, match="make the schedule from this model"):
        train(schedule, make_model("opt"), make_batches(2), steps=2, nvme_dir=tmp_path)
    with pytest.raises(TrainingError, match=r"unit 'L3' .* where the schedule has 'head'"):
        train(schedule, make_model("gpt2", num_blocks=4), make_batches(2), steps=2, nvme_dir=tmp_path)
    with pytest.raises(TrainingError, match=r"in torch.bfloat16, but the schedule trains in torch.float32"):
        train(schedule, make_model("gpt2", dtype="bf16"), make_batches(2), steps=2, nvme_dir=tmp_path)


def test_bad_settings_say_what_to_do(tmp_path: Path) -> None:
    model = make_model("gpt2")
    schedule = schedule_for(model, UnitPlan(states="nvme"))
    with pytest.raises(TrainingError, match="name a folder for it"):
        train(schedule, model, make_batches(2), steps=2)
    with pytest.raises(StoreError, match="give a folder that you may write to"):
        train(schedule, model, make_batches(2), steps=2, nvme_dir="/proc/nowhere")
    with pytest.raises(ValueError, match="is given twice; give one for each drive"):
        train(schedule, model, make_batches(2), steps=2, nvme_dir=[tmp_path, tmp_path / "x" / ".."])
    with pytest.raises(TrainingError, match="batches ended before micro-batch 0 of step 2"):
        train(schedule, make_model("gpt2"), make_batches(2), steps=3, nvme_dir=tmp_path)
    with pytest.raises(TrainingError, match="optimizer 'adamw', not 'sgd'"):
        train(schedule, model, make_batches(2), steps=2, optimizer=OptimizerSettings(name="sgd"))


@pytest.mark.parametrize("every", [0, -1, 1.5])
def test_a_number_of_steps_is_a_whole_one(every: Any, tmp_path: Path) -> None:
    """With others a run would never end."""
    model = make_model("gpt2")
    schedule = schedule_for(model, UnitPlan())
    with pytest.raises(TrainingError, match=rf"checkpoint_every is {every}; give a whole number of 1 or more steps"):
        Trainer(schedule, model, out_dir=tmp_path, checkpoint_every=every)
    if every:
        with pytest.raises(TrainingError, match=rf"steps is {every}; give a whole number of 0 or more steps"):
            train(schedule, model, make_batches(2), steps=every)


def test_a_trainer_that_has_not_run_has_no_result() -> None:
    model = make_model("gpt2")
    with Trainer(schedule_for(model, UnitPlan()), model) as trainer:
        for ask in (trainer.result, trainer.restore_model, lambda: trainer.save_copy("nowhere")):
            with pytest.raises(TrainingError, match=r"nothing has been trained yet, .* call run first"):
                ask()


def test_a_gradient_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    model = make_model("gpt2")
    schedule = schedule_for(model, UnitPlan(states="nvme"))
    bad = iter([1.0, 1.0, float("nan")])
    with pytest.raises(NonFiniteGradientError, match="gradient of head"):
        train(
            schedule, model, make_batches(3), steps=3, nvme_dir=tmp_path, loss=lambda out, batch: out.loss * next(bad)
        )


def test_the_model_is_itself_again_after_a_failure(tmp_path: Path) -> None:
    model = make_model("gpt2")
    schedule = schedule_for(model, UnitPlan(states="nvme"))
    with pytest.raises(ZeroDivisionError):
        train(schedule, model, make_batches(3), steps=3, nvme_dir=tmp_path, loss=lambda out, batch: out.loss / (1 // 0))
    assert all("forward" not in vars(m) for m in model.modules())
    assert model.config.use_cache
    train(schedule, make_model("gpt2"), make_batches(3), steps=3, nvme_dir=tmp_path)


@pytest.mark.parametrize(
    ("family", "sub_batches", "acts", "order"),
    [("gpt2", 4, "host", "vertical"), ("gpt2", 2, "keep", "horizontal"), ("llama", 4, "nvme", "vertical")],
)
def test_sub_batches_give_the_numbers_of_as_many_micro_batches(
    family: str, sub_batches: int, acts: str, order: str, tmp_path: Path
) -> None:
    """Gradients are summed one by one: plain training does so with smaller micro-batches, to the bit. Sizes are those
    of the smaller ones, also where they are not a share (positions; the labels of one sequence)."""
    model = make_model(family, dropout=0.1)
    raw = {**model.config.to_dict(), "architectures": [type(model).__name__]}  # type: ignore[union-attr, operator]
    workload = trace_config(family, raw, replace(CPU, per_device_train_batch_size=4))
    choice = UnitPlan(acts=acts)  # type: ignore[arg-type]
    schedule = lower(uniform_plan(workload, choice, order=order, sub_batches=sub_batches), workload, machine())
    assert schedule.step is not None
    declared = schedule.step.training
    sequences, accumulation = declared.per_device_train_batch_size, declared.gradient_accumulation_steps
    assert (sequences, accumulation) == (4 // sub_batches, sub_batches)
    batches, plain = make_batches(STEPS * accumulation, batch=sequences), copy.deepcopy(model)
    expected = train_plainly(plain, batches, steps=STEPS, gradient_accumulation_steps=accumulation)
    assert train(schedule, model, batches, steps=STEPS, nvme_dir=tmp_path).losses == tuple(expected)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_tied_gradients_of_sub_batches_are_held_once(tmp_path: Path) -> None:
    """Where they are summed before the embedding's, a device trains on which each sub-batch's own would not fit."""
    model = make_model("gpt2")
    raw = {**model.config.to_dict(), "architectures": [type(model).__name__]}  # type: ignore[union-attr, operator]
    workload = trace_config("gpt2", raw, replace(CPU, per_device_train_batch_size=4))
    once = uniform_plan(workload, UnitPlan(acts="recompute"), order="vertical", sub_batches=4, sums_tied=True)
    each = replace(once, sums_tied=False)
    peaks = [simulate_on(lower(plan, workload, machine()), machine()).peak_bytes["gpu0"] for plan in (once, each)]
    (tied,) = (u.num_trained * CPU.grad_bytes for u in workload.units if u.kind == "embed")
    assert peaks[0] + 2 * tied <= peaks[1]
    between = machine(device_bytes=sum(peaks) // 2)
    assert not predict_plan(each, workload, between).fits
    assert predict_plan(once, workload, between).fits
    plain, batches = copy.deepcopy(model), make_batches(STEPS * 4, batch=1)
    expected = train_plainly(plain, batches, steps=STEPS, gradient_accumulation_steps=4)
    result = train(lower(once, workload, between), model, batches, steps=STEPS, nvme_dir=tmp_path)
    assert result.losses == pytest.approx(tuple(expected), rel=1e-6)
    assert result.peak_bytes["gpu0"] <= sum(peaks) // 2


def test_a_trainer_that_could_not_begin_leaves_the_model_alone(tmp_path: Path) -> None:
    model = make_model("gpt2")
    schedule = schedule_for(model, UnitPlan())
    (tmp_path / "out").write_text("no folder\n")
    with pytest.raises(OSError, match="out"):
        Trainer(schedule, model, out_dir=tmp_path / "out")
    assert model.config.use_cache
    with pytest.raises(ZeroDivisionError):
        train_plainly(model, make_batches(1), steps=1, loss=lambda out, batch: out.loss / (1 // 0))
    assert model.config.use_cache


def test_a_model_that_an_open_trainer_holds_is_not_taken_by_another(tmp_path: Path) -> None:
    """Nor traced nor copied; closed, the Trainer lets it go."""
    model, batches = make_model("gpt2"), make_batches(4)
    plain = copy.deepcopy(model)
    schedule = schedule_for(model, UnitPlan())
    with Trainer(schedule, model) as first:
        first.run(batches[:2], 2)
        first.restore_model()
        for take in (
            lambda: trace_module(model, batches[0], CPU),
            lambda: copy.deepcopy(model),
            lambda: train(schedule, model, batches, steps=1),
        ):
            with pytest.raises((ModelError, WorkloadError), match="held by a Trainer that is open"):
                take()
    trace_module(model, batches[0], CPU)
    train_plainly(plain, batches, steps=2)
    assert same_weights(model, plain)


def test_running_on_continues(tmp_path: Path) -> None:
    model, plain = make_model("gpt2", dropout=0.1), make_model("gpt2", dropout=0.1)
    schedule = schedule_for(model, MIXED)
    batches = make_batches(5)
    expected = train_plainly(plain, batches, steps=5)
    with Trainer(schedule, model, nvme_dir=tmp_path) as trainer:
        trainer.run(batches[:2], 2)
        trainer.run(batches[2:], 3)
        trainer.restore_model()
        assert trainer.result().losses == tuple(expected)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def _scaled(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: 0.5 * value for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.transformer.wpe.weight.data.mul_(0.5),
        lambda model: model.load_state_dict(_scaled(model)),
        lambda model: model.load_state_dict(_scaled(model), assign=True),
    ],
)
def test_weights_that_are_changed_between_two_runs_are_refused(
    change: Callable[[nn.Module], object], tmp_path: Path
) -> None:
    """And they stay changed; restored again, training goes on as if nothing had been."""
    model = make_model("gpt2")
    batches, plain = make_batches(4), copy.deepcopy(model)
    with Trainer(schedule_for(model, MIXED), model, nvme_dir=tmp_path) as trainer:
        trainer.run(batches[:2], 2)
        trainer.restore_model()
        before, parameters = model.transformer.wpe.weight.clone(), model.transformer.wpe.weight
        change(model)
        with pytest.raises(TrainingError, match=r"changed after restore_model, .* new Trainer of the changed model"):
            trainer.run(batches[2:], 2)
        assert torch.equal(model.transformer.wpe.weight, before / 2)
        if model.transformer.wpe.weight is not parameters:  # there is no way back from others
            return
        trainer.restore_model()
        trainer.run(batches[2:], 2)
        trainer.restore_model()
        losses = trainer.result().losses
    assert losses == tuple(train_plainly(plain, batches, steps=4))
    assert same_weights(model, plain)
