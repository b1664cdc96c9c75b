"""What is only simulated is said when it is planned, and refused before anything is loaded: by whoever plans as by the
runtime."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.models import make_batches, make_model
from tierplan.hwmodels.build import build_machine
from tierplan.hwmodels.catalog import load_description
from tierplan.planner.prediction import predict
from tierplan.runtime.autograd.coded import TYPES
from tierplan.runtime.execution.executable import executable_step
from tierplan.runtime.execution.placement import TrainingError
from tierplan.runtime.job import Job, run_job
from tierplan.runtime.optim.kernels import KERNELS
from tierplan.runtime.tracing.trace import trace_config, trace_module
from tierplan.sim.schedule_file import save_schedule
from tierplan.sim.workloads.executed import OPTIMIZERS
from tierplan.sim.workloads.formats import FORMATS, executed_bases
from tierplan.sim.workloads.optimizers import OPTIMIZERS as PLANNED
from tierplan.sim.workloads.workload import Training, Workload, WorkloadError

CPU = Training(per_device_train_batch_size=2, sequence_length=16, dtype="bf16", backend="cpu")
LORA = {"lora": "r=4,targets=all-linear"}


def config_of(family: str) -> dict[str, Any]:
    model: Any = make_model(family, num_blocks=2)
    return json.loads(model.config.to_json_string(use_diff=False))  # type: ignore[no-any-return]


def predicted(workload: Workload) -> Any:
    return predict("in-memory", workload, build_machine(load_description("desktop-4090")))


ASKED: list[dict[str, Any]] = [
    {},
    {"dtype": "fp32"},
    {"dtype": "fp16"},
    {"dtype": "fp32", "autocast": "bf16"},
    {"loss": "fused"},
    *({"optimizer": name} for name in PLANNED),
    {"optimizer": "adamw:states=bf16", "master_weights": False},
    {"master_weights": False},
    LORA,
    *({**LORA, "base": base} for base in ("nf4", "nf4-double", "int4", "df11", "int8", "fp8")),
    {"freeze": "transformer.wte.weight"},
]


@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: ",".join(map(str, asked.values())) or "plain")
def test_who_plans_says_what_the_runtime_refuses(asked: dict[str, Any]) -> None:
    answer = predicted(trace_config("gpt2", config_of("gpt2"), replace(CPU, **asked)))
    assert answer.fits, answer.why_not
    if not answer.simulated_only:
        assert asked.get("base") in (None, *executed_bases())
        executable_step(answer.schedule)
        return
    what = answer.simulated_only.removeprefix("simulated only: it ").partition(";")[0]
    with pytest.raises(TrainingError, match=f"{re.escape(what)}, which is simulated only"):
        executable_step(answer.schedule)


def test_what_is_said_to_be_executed_is() -> None:
    assert {*OPTIMIZERS} == {*KERNELS}
    coded = [name for name, form in FORMATS.items() if form.codebook or name in TYPES]
    assert executed_bases() == [name for name in FORMATS if name in coded]


@pytest.mark.parametrize("asked", [LORA, {"freeze": "shared.weight"}], ids=["adapters", "frozen"])
def test_an_encoder_decoder_with_frozen_parameters(asked: dict[str, Any], tmp_path: Path) -> None:
    """Said with the plan, and refused before the run has a folder."""
    raw = config_of("t5")
    answer = predicted(trace_config("t5", raw, replace(CPU, **asked)))
    assert answer.simulated_only == "simulated only: of encoder-decoders, `tierplan run` trains all parameters"
    save_schedule(answer.schedule, tmp_path / "plan.json")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "data.txt").write_text("some words " * 100)
    out = tmp_path / "out"
    job = Job(plan=tmp_path / "plan.json", model=tmp_path, data=tmp_path / "data.txt", num_steps=1, out_dir=out)
    with pytest.raises(ValueError, match="of encoder-decoders the runtime trains all parameters"):
        run_job(job)
    assert not out.exists()


def test_an_encoder_decoder_that_is_trained_whole_is_executed() -> None:
    assert not predicted(trace_config("t5", config_of("t5"), CPU)).simulated_only


def test_a_module_that_is_an_encoder_decoder_with_frozen_parameters_is_not_described() -> None:
    model = make_model("t5", num_blocks=2)
    model.get_parameter("shared.weight").requires_grad_(False)
    with pytest.raises(WorkloadError, match=r"'shared\.weight' is frozen, but of encoder-decoders"):
        trace_module(model, make_batches(1)[0], replace(CPU, dtype="fp32"))
