"""Training adapters of PEFT's on a schedule is training them plainly, wherever the frozen base lives."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.runtime.checkpoint.test_commits import kill_often
from tests.runtime.models import make_batches, make_model, schedule_for
from tests.runtime.test_trainer import CPU, check, machine
from tests.toys import uniform_plan
from tierplan.planner.lowering import lower
from tierplan.planner.plan import UnitPlan
from tierplan.runtime.autograd.chunked_loss import loss_in_chunks
from tierplan.runtime.checkpoint.commits import CommitError
from tierplan.runtime.optim.adam import OptimizerSettings
from tierplan.runtime.reference import train_plainly
from tierplan.runtime.tracing.models import tuned
from tierplan.runtime.tracing.trace import trace_module
from tierplan.runtime.trainer import Trainer

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore::Warning:peft")]
PLANS = {
    "base in host": UnitPlan(frozen="host"),
    "base on NVMe": UnitPlan(frozen="nvme", acts="recompute"),
    "all away": UnitPlan(params="host", frozen="nvme", grads="host", states="nvme", acts="host", input="nvme"),
}


def adapted(family: str, dtype: str = "bf16", **settings: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False, **settings)
    return get_peft_model(make_model(family, dtype=dtype), config)


@pytest.mark.sampled
@pytest.mark.parametrize("which", PLANS)
@pytest.mark.parametrize("family", ["gpt2", "llama", "mixtral"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_lora_is_trained_as_plainly(family: str, dtype: str, which: str, tmp_path: Path) -> None:
    model = adapted(family, dtype, lora_dropout=0.0 if family == "mixtral" else 0.1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    training = replace(CPU, dtype=dtype, gradient_accumulation_steps=2, max_grad_norm=1.0)  # type: ignore[arg-type]
    workload = trace_module(model, make_batches(1)[0], training)
    schedule = check(model, workload.training, PLANS[which], tmp_path, workload=workload)
    assert {n for n, p in model.named_parameters() if not p.equal(before[n])} == {n for n in before if "lora" in n}
    assert {op.stream for op in schedule.ops if "frozen" in op.key} <= {"gpu0.h2d", "nvme.read"}


def test_adapters_alone_are_trained_by_muon(tmp_path: Path) -> None:
    """All of them are matrices of blocks, so that nothing is left for the AdamW beside it."""
    model, training = adapted("gpt2"), replace(CPU, dtype="bf16", optimizer="muon")
    workload = trace_module(model, make_batches(1)[0], training)
    check(model, workload.training, PLANS["all away"], tmp_path, workload=workload)


@pytest.mark.sampled
@pytest.mark.parametrize("which", PLANS)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("base", ["nf4", "int8", "fp8"])
def test_a_base_in_codes_is_trained_upon_as_plainly(base: str, family: str, which: str, tmp_path: Path) -> None:
    training = replace(CPU, dtype="bf16", base=base, lora="r=4", gradient_accumulation_steps=2)
    model = tuned(make_model(family, dtype="bf16"), training)
    assert {p.dtype for n, p in model.named_parameters() if "codes" in n} == {torch.uint8}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    workload = trace_module(model, make_batches(1)[0], training)
    check(model, workload.training, PLANS[which], tmp_path, workload=workload)
    changed = {n for n, p in model.named_parameters() if not p.equal(before[n])}
    assert changed
    assert all("lora" in name for name in changed)


@pytest.mark.sampled
@pytest.mark.parametrize("which", PLANS)
@pytest.mark.parametrize(
    ("family", "dtype", "chunks"), [("gpt2", "bf16", 1), ("llama", "bf16", 3), ("mixtral", "fp32", 1)]
)
def test_words_and_output_are_trained_in_full_beside_adapters(
    family: str, dtype: str, chunks: int, which: str, tmp_path: Path
) -> None:
    words = "wte" if family == "gpt2" else "embed_tokens"
    lora = f"r=4,save={words}+lm_head"
    training = replace(CPU, dtype=dtype, lora=lora, gradient_accumulation_steps=2, loss_chunks=chunks)  # type: ignore[arg-type]
    model = tuned(make_model(family, dtype=dtype), training)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    workload = trace_module(model, make_batches(1)[0], training)
    with loss_in_chunks(model, chunks):
        check(model, workload.training, PLANS[which], tmp_path, workload=workload)
    changed = {n for n, p in model.named_parameters() if not p.equal(before[n])}
    assert {n.partition(".modules_to_save.")[0].rpartition(".")[2] for n in changed if "lora" not in n} == {
        words,
        "lm_head",
    }
    assert not any("original_module" in n for n in changed)


def test_a_resumed_run_takes_the_base_from_the_model(tmp_path: Path) -> None:
    model, batches = adapted("llama"), make_batches(4)
    training = replace(CPU, dtype="bf16")
    workload = trace_module(model, batches[0], training)
    schedule = lower(uniform_plan(workload, PLANS["all away"]), workload, machine())
    plain, other = copy.deepcopy(model), copy.deepcopy(model)
    again = copy.deepcopy(model)
    settings: dict[str, Any] = {"optimizer": OptimizerSettings(lr=1e-2)}
    losses = train_plainly(plain, batches, steps=4, **settings)
    settings |= {"nvme_dir": tmp_path / "nvme", "out_dir": tmp_path / "out"}
    with Trainer(schedule, model, **settings) as trainer:
        trainer.run(batches, 2)
    committed = sum(path.stat().st_size for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert committed < 100_000 + sum(12 * u.num_trained for u in workload.units), "the base is in the commit"
    with Trainer(schedule, again, resume=True, **settings) as trainer:
        trainer.run(batches, 2)
        assert trainer.result().losses == tuple(losses)
        trainer.restore_model()
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), plain.parameters(), strict=True))
    with torch.no_grad():
        next(p for p in other.parameters() if not p.requires_grad).zero_()
    with (
        pytest.raises(CommitError, match="frozen/embed is not what it was in the run"),
        Trainer(schedule, other, resume=True, **settings) as trainer,
    ):
        trainer.run(batches, 1)


STEPS = 6


@pytest.mark.nightly  # with each `make test`, test_crash_consistency kills runs of adapters of GPT-2
@pytest.mark.parametrize("which", ["base in host", "all away"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "mixtral"])
def test_a_run_killed_at_random_moments_ends_as_plain_training(family: str, which: str, tmp_path: Path) -> None:
    script = f"from {__name__} import die_often; die_often({family!r}, {which!r}, 6, {str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", script], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300)
    model = adapted(family)
    losses = train_plainly(model, make_batches(STEPS), steps=STEPS, optimizer=OptimizerSettings(lr=1e-2))
    found = torch.load(tmp_path / "found.pt")
    assert found["losses"] == tuple(losses)
    assert all(torch.equal(a, b) for a, b in zip(found["weights"], model.parameters(), strict=True))


def die_often(family: str, which: str, num_kills: int, folder: str) -> None:
    """In a process of its own; one run at least goes on from a commit that is there."""
    torch.set_num_threads(1)
    batches, resumed = make_batches(STEPS), Path(folder) / "resumed"
    schedule = schedule_for(adapted(family), PLANS[which], replace(CPU, dtype="bf16"), traced=batches[0])
    settings: dict[str, Any] = {"optimizer": OptimizerSettings(lr=1e-2), "checkpoint_every": 1, "resume": True}

    def train(path: Path) -> None:
        with Trainer(schedule, adapted(family), nvme_dir=path / "nvme", out_dir=path / "out", **settings) as trainer:
            if trainer.num_steps_done:
                resumed.touch()
            trainer.run(batches, STEPS - trainer.num_steps_done)
            trainer.restore_model()
            weights = [p.detach() for p in trainer.model.parameters()]
            torch.save({"losses": trainer.result().losses, "weights": weights}, Path(folder) / "found.pt")

    train(kill_often(num_kills, train, Path(folder), most_s=lambda kills: 0.5 + 0.1 * kills, is_enough=resumed.exists))
