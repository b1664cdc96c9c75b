"""A model that somebody has changed, data that comes slowly: honoured, or refused by name, and left as it was found."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.runtime.models import OwnModel, make_batches, make_model, observed_workload, schedule_for
from tests.runtime.test_trainer import CPU, machine
from tests.toys import uniform_plan
from tierplan.planner.lowering import lower
from tierplan.planner.plan import UnitPlan
from tierplan.runtime.autograd.units import ModelError
from tierplan.runtime.execution.placement import TrainingError
from tierplan.runtime.execution.values import SizeError
from tierplan.runtime.reference import same_weights, train_plainly
from tierplan.runtime.trainer import Trainer, train
from tierplan.sim.schedule import Schedule

pytestmark = pytest.mark.usefixtures("one_thread")


def schedule_of(model: nn.Module | None = None, **changes: Any) -> Schedule:
    training = replace(CPU, **changes)
    return schedule_for(model or make_model("gpt2"), UnitPlan(acts="host"), training)


def test_fp16_is_refused_for_want_of_a_gradient_scaler() -> None:
    with pytest.raises(TrainingError, match=r"trains in fp16, whose .* without a gradient scaler.*bf16"):
        Trainer(schedule_of(dtype="fp16"), make_model("gpt2").half())


@pytest.mark.parametrize(
    ("asked", "named"), [({"loss": "fused"}, "with a fused loss"), ({"torch_compile": True}, "with compiled blocks")]
)
def test_a_schedule_for_kernels_that_are_not_the_models_is_refused(asked: dict[str, Any], named: str) -> None:
    schedule = schedule_of()
    assert schedule.step is not None
    step = replace(schedule.step, training=replace(schedule.step.training, **asked))
    with pytest.raises(TrainingError, match=f"{named}, which is simulated only"):
        Trainer(replace(schedule, step=step), make_model("gpt2"))


def test_a_schedule_under_autocast_is_refused() -> None:
    schedule = schedule_of(dtype="fp32")
    assert schedule.step is not None
    step = replace(schedule.step, training=replace(schedule.step.training, autocast="bf16"))
    with pytest.raises(TrainingError, match="trains under autocast to bf16, which is simulated only"):
        Trainer(replace(schedule, step=step), make_model("gpt2"))


class _Factor(nn.Module):
    """A block with a tensor of its own that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.factor = nn.Linear(16, 16), torch.full((16,), 2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x) * self.factor


def test_a_tensor_that_is_no_buffer_is_told_to_be_one() -> None:
    schedule = schedule_for(OwnModel([_Factor()]), UnitPlan(), CPU, traced=make_batches(1)[0])
    with pytest.raises(SizeError, match="a block's tensors that are no buffers"):
        train(schedule, OwnModel([_Factor()]), make_batches(1), steps=1)


@pytest.mark.parametrize("fails", [False, True])
def test_a_forward_that_was_set_on_a_block_is_called_and_kept(fails: bool) -> None:
    """As tools do that wrap a module without its knowledge."""
    models = make_model("gpt2"), make_model("gpt2")
    own: list[Callable[..., Any]] = []
    for model in models:
        for block in model.transformer.h:  # type: ignore[union-attr]
            before = block.forward

            def forward(*args: Any, before: Callable[..., Any] = before, **kwargs: Any) -> Any:
                return before(args[0] * 2, *args[1:], **kwargs)

            block.forward = forward
            own.append(forward)
    schedule = schedule_of(models[0])
    if fails:
        with pytest.raises(ZeroDivisionError):
            train(schedule, models[0], make_batches(2), steps=2, loss=lambda out, batch: out.loss / (1 // 0))
    else:
        expected = train_plainly(models[1], make_batches(2), steps=2)
        assert train(schedule, models[0], make_batches(2), steps=2).losses == tuple(expected)
    assert [vars(block)["forward"] for model in models for block in model.transformer.h] == own  # type: ignore[union-attr]


@pytest.mark.parametrize("what", ["the model", "its compile", "block.compile", "forward", "block"])
def test_compiled_blocks_are_refused(what: str) -> None:
    model: nn.Module = make_model("gpt2")
    blocks: Any = model.transformer.h  # type: ignore[union-attr]
    if what == "the model":
        model = torch.compile(model, backend="eager")  # type: ignore[assignment]
    elif what == "its compile":
        model.compile(backend="eager")
    for k, block in enumerate(blocks):
        if what == "block.compile":
            block.compile(backend="eager")
        elif what == "forward":
            block.forward = torch.compile(block.forward, backend="eager")
        elif what == "block":
            blocks[k] = torch.compile(block, backend="eager")
    with pytest.raises(ModelError, match=r"(the model|h\.0) is compiled, but .* compile modules inside of the blocks"):
        train(schedule_of(), model, make_batches(1), steps=1)
    if what not in ("forward", "block"):
        assert all("forward" not in vars(block) for block in blocks)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_compiled_modules_inside_of_blocks_work() -> None:
    models = make_model("gpt2"), make_model("gpt2")
    for model in models:
        for block in model.transformer.h:  # type: ignore[union-attr]
            block.mlp.compile(backend="aot_eager")
    expected = train_plainly(models[1], make_batches(3), steps=3)
    assert train(schedule_of(models[0]), models[0], make_batches(3), steps=3).losses == tuple(expected)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_gradient_that_is_there_already_is_refused_by_name(family: str) -> None:
    """The first step was made with it, too; that of a tied matrix counted twice."""
    model, batches = make_model(family), make_batches(2)
    schedule = schedule_of(model)
    with Trainer(schedule, model) as trainer:
        trainer.run(batches, 1)
        trainer.restore_model()
        model(**batches[0]).loss.backward()
        with pytest.raises(TrainingError, match=r"parameter '.*' has a gradient already.*zero_grad"):
            trainer.run(batches, 1)
    model(**batches[0]).loss.backward()
    with pytest.raises(TrainingError, match=r"parameter '.*' has a gradient already.*zero_grad"):
        train(schedule, model, batches, steps=1)


def test_a_run_that_failed_leaves_no_gradients() -> None:
    """Else the next one of the same model would be refused, for what nobody has made."""
    model, batches = make_model("gpt2"), make_batches(1)
    schedule = schedule_of(model)

    def fail(gradient: torch.Tensor) -> None:
        raise ValueError("in backward")

    block: Any = model.transformer.h[0]  # type: ignore[union-attr]
    block.ln_1.weight.register_hook(fail)
    with pytest.raises(ValueError, match="in backward"):
        train(schedule, model, batches, steps=1)
    assert all(p.grad is None for p in model.parameters())


def _halve(p: torch.Tensor) -> None:
    assert p.grad is not None
    p.grad.mul_(0.5)


def _hang(model: nn.Module, way: str) -> None:
    weight: Any = model.get_input_embeddings().weight  # type: ignore[operator]
    if way == "its gradient":
        weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    else:
        weight.register_post_accumulate_grad_hook(_halve)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("way", ["its gradient", "its accumulated gradient"])
def test_hooks_of_parameters_run_as_in_plain_training_or_are_refused(way: str, family: str) -> None:
    """That of a matrix which GPT-2's embedding and head use would run in both, and not on their sum."""
    model, plain, batches = make_model(family), make_model(family), make_batches(4)
    schedule = schedule_of(model, gradient_accumulation_steps=2)
    _hang(model, way)
    _hang(plain, way)
    if way == "its accumulated gradient" or family == "gpt2":
        with pytest.raises(TrainingError, match=rf"parameter '.*weight' has a hook for {way} \("):
            train(schedule, model, batches, steps=2)
        assert same_weights(model, plain)
        return
    expected = train_plainly(plain, batches, steps=2, gradient_accumulation_steps=2)
    assert train(schedule, model, batches, steps=2).losses == tuple(expected)


def test_a_hook_that_a_parameter_gets_between_two_runs_is_refused() -> None:
    model = make_model("gpt2")
    with Trainer(schedule_of(model), model) as trainer:
        trainer.run(make_batches(1), 1)
        _hang(model, "its gradient")
        with pytest.raises(TrainingError, match=r"wte.weight' has a hook for its gradient \(register_hook\)"):
            trainer.run(make_batches(1), 1)


@pytest.mark.parametrize("choice", [UnitPlan(params="host", grads="host", states="host", acts="host"), UnitPlan()])
@pytest.mark.parametrize("way", ["data", "parameter"])
def test_other_memory_that_a_parameter_gets_between_two_runs_is_refused(way: str, choice: UnitPlan) -> None:
    """Off the device it was not looked at, and on the device it was for one forward."""
    model, batches = make_model("llama"), make_batches(2)
    workload = observed_workload(model, batches[0], CPU)
    norm: Any = model.get_submodule("model.layers.1.input_layernorm")
    with Trainer(lower(uniform_plan(workload, choice), workload, machine()), model) as trainer:
        trainer.run(batches, 1)
        if way == "data":
            norm.weight.data = torch.full((32,), 0.5)
        else:
            norm.weight = nn.Parameter(torch.full((32,), 0.5))
        with pytest.raises(TrainingError, match=r"'model.layers.1.input_layernorm.weight' was given other memory"):
            trainer.run(batches[1:], 1)


class Source:
    """Batches, and when each was taken: after how many of them had begun their backward."""

    def __init__(self, batches: list[Any], fails_at: int | None = None) -> None:
        self.batches, self.fails_at = batches, fails_at
        self.taken: list[int] = []
        self.num_used = 0

    def __iter__(self) -> Iterator[Any]:
        for k, batch in enumerate(self.batches):
            if k == self.fails_at:
                raise OSError("the data is gone")
            self.taken.append(self.num_used)
            yield batch

    def loss(self, output: Any, batch: Any) -> Any:
        output.loss.register_hook(self.use)
        return output.loss

    def use(self, gradient: Any) -> None:
        self.num_used += 1


@pytest.mark.parametrize("seed", [0, None])
def test_batches_are_fetched_while_the_device_computes(seed: int | None) -> None:
    """Each is there when the one before is still used, and no more are taken than trained on. With generators that
    fetching and forward share, each is fetched in its turn."""
    batches = make_batches(9)
    source = Source(batches)
    with Trainer(
        schedule_of(gradient_accumulation_steps=2), make_model("gpt2"), loss=source.loss, seed=seed
    ) as trainer:
        taking = iter(source)
        trainer.run(taking, 3)
        assert source.taken == ([0, *range(5)] if seed is not None else list(range(6)))
        trainer.run(taking, 1)  # goes on where it ended
        assert len(source.taken) == 8
        found = trainer.result().losses
    plain = make_model("gpt2")
    expected = train_plainly(plain, batches, steps=4, gradient_accumulation_steps=2, seed=seed)
    assert found == tuple(expected)


def test_data_that_fails_ends_the_run_when_it_is_needed() -> None:
    """What came before is trained: an error of the third batch is one of the third step."""
    source = Source(make_batches(5), fails_at=2)
    losses = []
    with (
        Trainer(
            schedule_of(), make_model("gpt2"), loss=source.loss, on_step=lambda step, loss: losses.append(loss)
        ) as trainer,
        pytest.raises(OSError, match="the data is gone") as caught,
    ):
        trainer.run(source, 5)
    assert caught.value.__notes__ == ["in op 'fwd/embed/mb0' of step 2"]
    assert len(losses) == 2


def test_a_batch_that_was_fetched_ahead_of_a_stop_is_used_next() -> None:
    batches = make_batches(6)
    with Trainer(schedule_of(), make_model("gpt2"), on_step=lambda step, loss: trainer.request_stop()) as trainer:
        taking = iter(batches)
        while trainer.num_steps_done < 5:
            trainer.run(taking, 5 - trainer.num_steps_done)
        assert trainer.result().losses == tuple(train_plainly(make_model("gpt2"), batches, steps=5))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_batches_that_share_memory_are_those_that_they_were(accumulation: int) -> None:
    """A source that fills one tensor, or one dictionary, again and again."""

    def of_one_memory(batches: list[Any]) -> Iterator[Any]:
        memory: dict[str, Any] = {name: torch.empty_like(t) for name, t in batches[0].items()}
        for k, batch in enumerate(batches):
            for name, t in batch.items():
                memory[name].copy_(t) if k % 3 else memory.update({name: t.clone()})
            yield memory

    schedule = schedule_of(gradient_accumulation_steps=accumulation)
    expected = train_plainly(
        make_model("gpt2"), make_batches(8), steps=8 // accumulation, gradient_accumulation_steps=accumulation
    )
    source = of_one_memory(make_batches(8))
    assert train(schedule, make_model("gpt2"), source, steps=8 // accumulation).losses == tuple(expected)


@pytest.mark.parametrize("is_own", [False, True])
def test_what_on_step_draws_beside_training_is_refused_unless_it_has_a_generator(is_own: bool) -> None:
    """Else dropout would have other numbers, and others in each run."""
    model, batches, generator = make_model("gpt2", dropout=0.1), make_batches(4), torch.Generator()
    plain = copy.deepcopy(model)
    draw = partial(torch.rand, 9, generator=generator if is_own else None)
    with Trainer(schedule_of(model), model, on_step=lambda step, loss: [draw() for _ in range(99)].clear()) as trainer:
        if is_own:
            trainer.run(batches, 4)
            trainer.restore_model()
            train_plainly(plain, batches, steps=4)
            assert same_weights(model, plain)
            return
        with pytest.raises(TrainingError, match=r"on_step draws random numbers .* torch\.Generator of its own"):
            trainer.run(batches, 4)
