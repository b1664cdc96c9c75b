"""The loss in chunks: that of the whole but for rounding, and on a schedule equal to plain training bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.configs import config_of
from tests.runtime.models import make_batches, make_model, schedule_for
from tests.runtime.test_trainer import CPU, machine
from tests.toys import uniform_plan
from tierplan.planner.lowering import lower
from tierplan.planner.plan import UnitPlan
from tierplan.runtime.autograd.chunked_loss import loss_in_chunks
from tierplan.runtime.autograd.units import ModelError
from tierplan.runtime.reference import same_weights, train_plainly
from tierplan.runtime.tracing.models import build_model
from tierplan.runtime.tracing.trace import trace_module
from tierplan.runtime.trainer import train
from tierplan.sim.workloads.workload import Training, WorkloadError

pytestmark = pytest.mark.usefixtures("one_thread")


def gradients(
    model: torch.nn.Module, batch: dict[str, torch.Tensor], chunks: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    with loss_in_chunks(model, chunks):
        loss = model(**batch).loss
        loss.backward()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return loss.detach(), found


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize(("dtype", "rounding"), [("fp32", 1e-5), ("bf16", 2e-2)])
@pytest.mark.parametrize("chunks", [2, 7])
def test_loss_and_gradients_are_those_of_the_whole_but_for_rounding(
    family: str, dtype: str, rounding: float, chunks: int
) -> None:
    model = make_model(family, num_blocks=2, dtype=dtype)
    (batch,) = make_batches(1, batch=3)
    batch["labels"] = batch["labels"].clone()
    batch["labels"][0, 5:] = -100
    loss, grads = gradients(model, batch, chunks)
    whole, of_whole = gradients(model, batch, 1)
    assert loss.item() == pytest.approx(whole.item(), rel=1e-6)
    for mine, theirs in zip(grads, of_whole, strict=True):
        assert (mine - theirs).norm() <= rounding * theirs.norm()
    other, _ = gradients(model, {**batch, "labels": batch["labels"].roll(1)}, chunks)
    assert other != loss


def test_a_frozen_output_matrix_has_no_gradient_made_for_it() -> None:
    model, (batch,) = make_model("llama", num_blocks=1), make_batches(1)
    counted = []
    for trained in (True, False):
        head = model.get_output_embeddings().requires_grad_(trained)  # type: ignore[operator]
        with FlopCounterMode(display=False) as counter:
            _, (first, *_) = gradients(model, batch, 2)
        counted.append((counter.get_total_flops(), first))
    (all_flops, grad), (flops, same) = counted
    assert all_flops - flops == 2 * batch["input_ids"].numel() * head.weight.numel()
    assert torch.equal(grad, same)


@pytest.mark.parametrize("family", ["gpt2", "llama", "opt"])
@pytest.mark.parametrize("acts", ["recompute", "nvme"])
def test_a_schedule_gives_the_numbers_of_plain_training_in_chunks(family: str, acts: str, tmp_path: Path) -> None:
    batches = make_batches(3)
    model, plain = (make_model(family, num_blocks=2, dropout=0.1) for _ in range(2))
    choice = UnitPlan(params="nvme", grads="host", states="nvme", acts=acts, input="host")  # type: ignore[arg-type]
    with loss_in_chunks(model, 3):
        schedule = schedule_for(model, choice, replace(CPU, loss_chunks=3))
    with loss_in_chunks(plain, 3):
        losses = train_plainly(plain, batches, steps=3)
    assert train(schedule, model, batches, steps=3, nvme_dir=tmp_path).losses == tuple(losses)
    assert same_weights(model, plain)
    assert model.eval()(**batches[0]).logits.shape[-1] == model.config.vocab_size, "whole again behind the run"


@pytest.mark.parametrize("family", ["bert", "t5", "phi"])
def test_other_losses_are_refused(family: str) -> None:
    with pytest.raises(ModelError, match=r"not the cross entropy .* leave out --loss-chunks"):
        build_model({**config_of(family), "model_type": family}, Training(dtype="fp32", loss_chunks=2))


def test_logits_that_are_changed_behind_their_matrix_are_refused() -> None:
    config = {**config_of("gemma2"), "model_type": "gemma2"}
    model = build_model(config, Training(dtype="fp32", loss_chunks=2))
    with pytest.raises(ModelError, match="changes its logits"):
        model(**make_batches(1)[0])


@pytest.mark.parametrize(
    "of_logits",
    [
        lambda logits: logits.logsumexp(-1).pow(2).mean(),
        lambda logits: 0.1 * logits[:, -1].mean(),
        lambda logits: torch.nn.functional.cross_entropy(logits, torch.zeros(2, 16, dtype=torch.int64)),
        lambda logits: 0.1 * logits,
        lambda logits: torch.zeros(1) + logits,
        lambda logits: logits.float().shape[-1],
    ],
    ids=["z-loss", "slice", "cross entropy", "product", "sum", "shape"],
)
def test_a_loss_function_that_uses_the_logits_is_refused(of_logits: Callable[[Any], Any], tmp_path: Path) -> None:
    model, batches = make_model("llama", num_blocks=1), make_batches(1)
    training = replace(CPU, loss_chunks=3)

    def loss(output: Any, batch: object) -> Any:
        return output.loss + of_logits(output.logits)

    schedule = schedule_for(model, training=training, traced=batches[0])
    with pytest.raises(ModelError, match=r"a loss function uses them; leave out --loss-chunks"):
        train(schedule, model, batches, steps=1, nvme_dir=tmp_path, loss=loss)
    with pytest.raises(WorkloadError, match=r"a loss function uses them"):
        trace_module(model, batches[0], training, loss=loss)


def test_a_loss_function_may_add_to_the_loss_in_chunks(tmp_path: Path) -> None:
    batches = make_batches(3)
    model, plain = (make_model("llama", num_blocks=1) for _ in range(2))

    def loss(output: Any, batch: Any) -> torch.Tensor:
        return output.loss * (batch["labels"] > 40).float().mean()

    workload = trace_module(model, batches[0], replace(CPU, loss_chunks=3), loss=loss)
    schedule = lower(uniform_plan(workload, UnitPlan(acts="recompute")), workload, machine())
    with loss_in_chunks(plain, 3):
        losses = train_plainly(plain, batches, steps=3, loss=loss)
    assert train(schedule, model, batches, steps=3, nvme_dir=tmp_path, loss=loss).losses == tuple(losses)
    assert same_weights(model, plain)


@pytest.mark.parametrize(
    "more",
    [{"num_items_in_batch": torch.tensor(11)}, {"num_items_in_batch": 7}, {"ignore_index": 3}, {"shift_labels": 1}],
)
def test_what_the_loss_is_told_counts_as_for_the_whole(more: dict[str, Any]) -> None:
    model, (batch,) = make_model("llama", num_blocks=1), make_batches(1)
    if "shift_labels" in more:
        more = {"shift_labels": batch["labels"].roll(-2, 1)}
    loss, _ = gradients(model, {**batch, **more}, 3)
    whole, _ = gradients(model, {**batch, **more}, 1)
    assert loss.item() == pytest.approx(whole.item(), rel=1e-6)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_trainer_of_transformers_gives_the_number_of_tokens(accumulation: int, tmp_path: Path) -> None:
    """Plans with the loss in chunks were refused in the first step, since they count the tokens themselves."""
    pytest.importorskip("accelerate", reason="the Hugging Face Trainer needs accelerate")
    import transformers as hf

    from tests.runtime.test_hf_trainer import examples, made
    from tierplan.runtime.hf_trainer import ScheduleTrainer

    training = replace(CPU, loss_chunks=3, gradient_accumulation_steps=accumulation)
    choice = UnitPlan(params="host", grads="host", states="host", acts="recompute")
    schedule = schedule_for(make_model("llama", num_blocks=2), choice, training, traced=make_batches(1)[0])
    data, models, losses = examples(10 * accumulation), [], []
    for k, example in enumerate(data):
        example["labels"] = example["labels"].clone()
        example["labels"][: k % 5] = -100
    for kind in (hf.Trainer, ScheduleTrainer):
        model = make_model("llama", num_blocks=2)
        given = {"schedule": schedule, "model": model, "train_dataset": data}
        trainer = made(kind, tmp_path, accumulation, given=given, logging_steps=1)
        with loss_in_chunks(model, 3 if kind is hf.Trainer else 1):
            trainer.train()
        models.append(model)
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert losses[0] == losses[1]
    assert same_weights(*models)
