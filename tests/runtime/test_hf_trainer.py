"""The Hugging Face Trainer on a schedule gives the weights of the plain Trainer, bit for bit."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers as hf

from tests.runtime.models import make_batches, make_model
from tests.runtime.models import schedule_for as planned_for
from tests.runtime.test_trainer import CPU
from tierplan.hwmodels.catalog import here_path, load_description
from tierplan.hwmodels.description import write_description
from tierplan.planner.plan import UnitPlan
from tierplan.runtime.execution.placement import TrainingError
from tierplan.runtime.hf_arguments import (
    HONOURED,
    HONOURED_SETTINGS,
    OF_THE_SCHEDULE,
    REFUSED,
    REFUSED_SETTINGS,
    check_arguments,
)
from tierplan.runtime.hf_trainer import ScheduleTrainer
from tierplan.runtime.optim.groups import without_decay
from tierplan.runtime.reference import same_weights
from tierplan.sim.schedule import Schedule

pytestmark = pytest.mark.usefixtures("one_thread", "past_set_aside")

pytest.importorskip("accelerate", reason="the Hugging Face Trainer needs accelerate")


KEYS = (("loss", "eval_loss", "learning_rate", "epoch"), ("loss", "eval_loss", "learning_rate", "epoch", "grad_norm"))
"""Of the log, what must be the same without clipping, and with it."""


def examples(count: int) -> list[dict[str, torch.Tensor]]:
    return [{k: v[0] for k, v in batch.items()} for batch in make_batches(count, batch=1)]


def arguments(folder: Path, accumulation: int, clip: float | None, **more: Any) -> hf.TrainingArguments:
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": accumulation,
        "max_grad_norm": clip or 0.0,
        "max_steps": 5,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 1,
        "optim": "adamw_torch_fused",
        "use_cpu": True,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": 3,
    }
    return hf.TrainingArguments(**{**settings, **more})


@cache
def schedule_for(accumulation: int, clip: float | None, *, late: bool = False) -> Schedule:
    training = replace(CPU, gradient_accumulation_steps=accumulation, max_grad_norm=clip)
    choice = UnitPlan(params="nvme", grads="host", states="nvme", acts="host", late_update=late)
    return planned_for(make_model("gpt2", dropout=0.1), choice, training)


def made(
    kind: type,
    folder: Path,
    accumulation: int = 1,
    clip: float | None = None,
    *,
    given: Mapping[str, Any] | None = None,
    **more: Any,
) -> Any:
    """One of the Trainers, about to train by the same random numbers. `given` are settings of it, of which `schedule`
    is the adapter's alone; `more` its arguments."""
    settings: dict[str, Any] = {"train_dataset": examples(40), **(given or {})}
    settings["model"] = settings.get("model") or make_model("gpt2", dropout=0.1)
    schedule = settings.pop("schedule", None)
    if issubclass(kind, ScheduleTrainer):
        settings |= {"schedule": schedule or schedule_for(accumulation, clip), "nvme_dir": folder / "nvme"}
    trainer = kind(args=arguments(folder / kind.__name__, accumulation, clip, **more), **settings)
    if clip and not issubclass(kind, ScheduleTrainer):
        trainer._clip_grad_norm = lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), clip, foreach=False)
    hf.set_seed(1)
    return trainer


@pytest.mark.parametrize(("accumulation", "clip", "decay"), [(1, None, 0.0), (2, 0.5, 0.3)])
def test_against_the_plain_trainer(accumulation: int, clip: float | None, decay: float, tmp_path: Path) -> None:
    plain = made(hf.Trainer, tmp_path, accumulation, clip, weight_decay=decay)
    plain.train()
    trainer = made(ScheduleTrainer, tmp_path, accumulation, clip, weight_decay=decay)
    trainer.train()
    assert same_weights(trainer.model, plain.model)
    trainer.save_model(str(tmp_path / "saved"))
    loaded = hf.GPT2LMHeadModel.from_pretrained(tmp_path / "saved")
    assert torch.equal(loaded.transformer.wte.weight, plain.model.transformer.wte.weight)  # type: ignore[union-attr]


@pytest.mark.parametrize(("accumulation", "clip"), [(1, None), (2, 0.5)])
def test_a_model_in_bf16_against_the_plain_trainer(accumulation: int, clip: float | None, tmp_path: Path) -> None:
    """With states in bf16 and no master copy of the weights: losses, norms and weights are the plain Trainer's."""
    training = replace(
        CPU, dtype="bf16", optimizer="adamw:states=bf16", gradient_accumulation_steps=accumulation, max_grad_norm=clip
    )
    choice = UnitPlan(params="host", grads="host", states="nvme", acts="recompute")
    schedule = planned_for(make_model("gpt2", dtype="bf16"), choice, training)
    models, logs = [], []
    for build in (hf.Trainer, ScheduleTrainer):
        given = {"schedule": schedule, "model": make_model("gpt2", dtype="bf16")}
        trainer = made(build, tmp_path, accumulation, clip, given=given, weight_decay=0.1, logging_steps=1)
        trainer.train()
        models.append(trainer.model)
        logs.append([{k: v for k, v in entry.items() if k in KEYS[bool(clip)]} for entry in trainer.state.log_history])
    assert logs[1] == logs[0]
    assert same_weights(*models)


@pytest.mark.parametrize(
    ("optimizer", "optim", "says"),
    [
        (
            "adamw:states=bf16",
            "sgd",
            "set optim='adamw_torch', or set optim='adamw_torch_fused', or plan with --optimizer sgd, or",
        ),
        ("muon", "adamw_torch", "updates with muon; plan with --optimizer adamw, or use the plain Trainer"),
        ("muon", "adafactor", "updates with muon; use the plain Trainer"),
    ],
)
def test_what_is_to_be_done_about_another_optimizer(optimizer: str, optim: str, says: str, tmp_path: Path) -> None:
    training = replace(CPU, dtype="bf16", optimizer=optimizer)
    with pytest.raises(TrainingError, match=says):
        check_arguments(arguments(tmp_path, 1, None, optim=optim), training)


@pytest.mark.filterwarnings("ignore::Warning:peft")
def test_adapters_of_peft_against_the_plain_trainer(tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    settings: dict[str, Any] = {"r": 4, "target_modules": "all-linear", "lora_dropout": 0.1, "task_type": "CAUSAL_LM"}
    plain, model = (make_model("gpt2", dropout=0.1) for _ in range(2))
    start = copy.deepcopy(model)
    hf.set_seed(2)
    plain = get_peft_model(plain, LoraConfig(**settings))  # type: ignore[arg-type]
    hf.set_seed(2)
    model = get_peft_model(model, LoraConfig(**settings))  # type: ignore[arg-type]
    training = replace(CPU, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    choice = UnitPlan(frozen="nvme", params="host", grads="host", states="nvme", acts="recompute")
    args, data = arguments(tmp_path, 2, None, weight_decay=0.1), {"train_dataset": examples(40)}
    schedule = planned_for(model, choice, training, traced=make_batches(1)[0])
    own = {"schedule": schedule, "nvme_dir": tmp_path / "nvme"}
    hf.set_seed(1)
    hf.Trainer(model=plain, args=args, **data).train()
    hf.set_seed(1)
    trainer = ScheduleTrainer(model=model, args=args, **own, **data)
    trainer.train()
    for (name, a), (_, b) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    trainer.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "adapter_config.json").exists()
    loaded = PeftModel.from_pretrained(start, str(tmp_path / "saved"))
    for (name, a), (_, b) in zip(loaded.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize(("accumulation", "clip", "late"), [(1, None, True), (3, 0.5, False), (2, 0.5, True)])
def test_evaluation_and_saving_in_the_middle_of_training(
    accumulation: int, clip: float | None, late: bool, tmp_path: Path
) -> None:
    """Losses of training and evaluation, checkpoints and final weights are the plain Trainer's, also where updates
    are made in the next step, when the learning rate is another one."""
    models, logs, is_training = [], [], []
    for build in (hf.Trainer, ScheduleTrainer):
        given = {"schedule": schedule_for(accumulation, clip, late=late), "train_dataset": examples(30)}
        given["eval_dataset"] = examples(6)
        often = {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True, "logging_steps": 2}
        saving = {"save_strategy": "steps", "save_steps": 3, "save_only_model": True}
        trainer = made(build, tmp_path, accumulation, clip, given=given, **often, **saving)
        trainer.train()
        logs.append([{k: v for k, v in entry.items() if k in KEYS[bool(clip)]} for entry in trainer.state.log_history])
        saved = hf.GPT2LMHeadModel.from_pretrained(Path(trainer.args.output_dir) / "checkpoint-3")
        models.append((trainer.model, saved))
        is_training.append(trainer.model.training)
    expected, found = logs
    assert [set(entry) for entry in found] == [set(entry) for entry in expected]
    assert sum("eval_loss" in entry for entry in expected) == 4  # before the first step, and after 2, 4 and 5
    assert found == expected
    assert is_training[1] == is_training[0]
    for expected_model, model in zip(*models, strict=True):
        for (name, a), (_, b) in zip(model.named_parameters(), expected_model.named_parameters(), strict=True):
            assert torch.equal(a, b), name


@pytest.mark.parametrize("family", ["gpt2", "opt", "llama", "bert", "t5"])
def test_what_the_trainer_spares_weight_decay(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    decayed = set(hf.Trainer(model=model, args=arguments(tmp_path, 1, None)).get_decay_parameter_names(model))
    assert set(without_decay(model).names) == {name for name, _ in model.named_parameters()} - decayed


@pytest.mark.parametrize(("setting", "value"), [("per_device_train_batch_size", 4), ("max_grad_norm", 1.0)])
def test_arguments_that_are_not_the_schedule_s_are_refused(setting: str, value: float, tmp_path: Path) -> None:
    assert CPU.max_grad_norm is None
    args = arguments(tmp_path, 1, None, **{setting: value})
    with pytest.raises(TrainingError, match=f"have {setting}={value}"):
        ScheduleTrainer(schedule=schedule_for(1, None), model=make_model("gpt2"), args=args)


def refusal(tmp_path: Path, build: Callable[..., ScheduleTrainer] = ScheduleTrainer, **settings: Any) -> str:
    """Why an adapter is not made with these settings of the Trainer, or arguments of `TrainingArguments`."""
    own = {name: settings.pop(name) for name in list(settings) if name not in vars(ARGUMENTS)}
    with pytest.raises(TrainingError) as caught:
        build(schedule=SCHEDULE, model=make_model("gpt2"), args=arguments(tmp_path, 1, None, **settings), **own)
    return str(caught.value)


SCHEDULE = schedule_for(1, None)
ARGUMENTS = hf.TrainingArguments(output_dir="unused", use_cpu=True, report_to=[])
OF_5_23 = "activation_checkpointing", "activation_checkpointing_kwargs"
NOT_THERE = set() if hasattr(ARGUMENTS, OF_5_23[0]) else set(OF_5_23)
"""Fields that an older version of transformers does not have."""


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("optim", "adafactor"),
        ("optim", "sgd"),
        ("optim", "adamw_8bit"),
        ("optim_args", "amsgrad=True"),
        ("label_smoothing_factor", 0.1),
        ("neftune_noise_alpha", 5.0),
        ("bf16", True),
        ("fp16", True),
        ("bf16_full_eval", True),
        ("gradient_checkpointing" if NOT_THERE else "activation_checkpointing", True),
        ("torch_compile", True),
        ("torch_empty_cache_steps", 2),
        ("auto_find_batch_size", True),
    ],
)
def test_an_argument_that_is_not_honoured_is_refused(setting: str, value: object, tmp_path: Path) -> None:
    assert f"have {setting}={value!r}" in refusal(tmp_path, **{setting: value})


def test_a_field_of_a_subclass_that_is_not_known_keeps_its_default(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class Arguments(hf.TrainingArguments):
        noise: float = 0.0

    plain = dataclasses.asdict(arguments(tmp_path, 1, None)).items()
    known = {f.name: value for f, (_, value) in zip(dataclasses.fields(hf.TrainingArguments), plain, strict=True)}
    known = {k: v for k, v in known.items() if k not in ("accelerator_config", "gradient_checkpointing")}
    ScheduleTrainer(schedule=SCHEDULE, model=make_model("gpt2"), args=Arguments(**known))
    with pytest.raises(TrainingError, match=r"have noise=0\.5"):
        ScheduleTrainer(schedule=SCHEDULE, model=make_model("gpt2"), args=Arguments(**known, noise=0.5))


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("compute_loss_func", lambda outputs, labels, **more: outputs["logits"].mean()),
        ("optimizers", (torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]), None)),
        ("optimizer_cls_and_kwargs", (torch.optim.SGD, {"lr": 1.0})),
        ("model_init", lambda: make_model("gpt2")),
    ],
)
def test_a_setting_that_is_not_honoured_is_refused(setting: str, value: object, tmp_path: Path) -> None:
    assert f"given {setting}=" in refusal(tmp_path, **{setting: value})


def test_what_a_subclass_overrides_in_vain_is_refused(tmp_path: Path) -> None:
    class OwnLoss(ScheduleTrainer):
        def compute_loss(self, *args: Any, **settings: Any) -> Any:
            raise AssertionError

    assert "OwnLoss overrides compute_loss" in refusal(tmp_path, OwnLoss)


def test_a_callback_that_wants_gradients_is_refused(tmp_path: Path) -> None:
    class Gradients(hf.TrainerCallback):
        def on_pre_optimizer_step(self, *args: Any, **settings: Any) -> None:
            raise AssertionError

    args = arguments(tmp_path, 1, None)
    trainer = ScheduleTrainer(schedule=SCHEDULE, model=make_model("gpt2"), args=args, callbacks=[Gradients()])
    with pytest.raises(TrainingError, match="Gradients has on_pre_optimizer_step"):
        trainer.train()


def test_training_begins_anew_where_there_is_no_checkpoint_yet(tmp_path: Path) -> None:
    """As scripts do that are started again and again: nothing has been trained when `train` finds none."""
    trainers = []
    for build in (hf.Trainer, ScheduleTrainer):
        trainer = made(build, tmp_path)
        with pytest.raises(ValueError, match="No valid checkpoint found"):
            trainer.train(resume_from_checkpoint=True)
        trainer.train()
        trainers.append(trainer)
    assert same_weights(trainers[0].model, trainers[1].model)


def test_the_model_is_whole_when_training_ends_and_is_not_trained_again(tmp_path: Path) -> None:
    class SavesAtTheEnd(hf.TrainerCallback):
        def on_train_end(self, *args: Any, **settings: Any) -> None:
            trainer.save_model(str(tmp_path / "saved"))

    model = make_model("gpt2", dropout=0.1)
    settings = {"args": arguments(tmp_path, 1, None, max_steps=1), "callbacks": [SavesAtTheEnd()]}
    trainer = ScheduleTrainer(
        schedule=SCHEDULE, nvme_dir=tmp_path / "nvme", model=model, train_dataset=examples(8), **settings
    )
    trainer.train()
    saved = hf.GPT2LMHeadModel.from_pretrained(tmp_path / "saved")
    for (name, a), (_, b) in zip(model.named_parameters(), saved.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    with pytest.raises(TrainingError, match="train is called again"):
        trainer.train()


class Interrupted(hf.TrainerCallback):
    """Ends training after a step, as a crash after its checkpoint would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **settings: Any) -> None:
        control.should_save = control.should_training_stop = state.global_step == self.step


@pytest.mark.parametrize(
    ("accumulation", "clip", "late", "stop"),
    [(1, None, True, 2), (2, 0.5, False, 3), pytest.param(2, None, False, 4, marks=pytest.mark.nightly)],
)
def test_training_is_resumed_from_a_checkpoint(
    accumulation: int, clip: float | None, late: bool, stop: int, tmp_path: Path
) -> None:
    """In the middle of an epoch and at its end: losses and weights are those of the plain Trainer without a stop."""

    def build(kind: type, seed: int, **more: Any) -> Any:
        often: dict[str, Any] = {"logging_steps": 1, "max_steps": -1, "num_train_epochs": 2, "save_steps": 100}
        model = make_model("gpt2", dropout=0.1)
        torch.nn.init.constant_(model.transformer.wpe.weight, seed)
        given = {"model": model, "train_dataset": examples(6 * accumulation), **more}
        given["schedule"] = schedule_for(accumulation, clip, late=late)
        return made(kind, tmp_path, accumulation, clip, given=given, **often, save_strategy="steps")

    plain = build(hf.Trainer, 0)
    plain.train()
    build(ScheduleTrainer, 0, callbacks=[Interrupted(stop)]).train()
    resumed = build(ScheduleTrainer, 7)  # from other weights and random numbers, which do not count
    resumed.train(resume_from_checkpoint=stop == 3 or str(tmp_path / "ScheduleTrainer" / f"checkpoint-{stop}"))
    expected, found = (
        [{k: entry.get(k) for k in KEYS[bool(clip)]} for entry in t.state.log_history if "loss" in entry]
        for t in (plain, resumed)
    )
    assert found == expected
    assert len(found) == 6
    for (name, a), (_, b) in zip(resumed.model.named_parameters(), plain.model.named_parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("is_greater_better", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_the_best_model_is_loaded_and_old_checkpoints_are_removed(is_greater_better: bool, tmp_path: Path) -> None:
    models, kept = [], []
    for build in (hf.Trainer, ScheduleTrainer):
        given = {"train_dataset": examples(8), "eval_dataset": examples(4)}
        best = {"load_best_model_at_end": True, "greater_is_better": is_greater_better, "save_total_limit": 2}
        often = {"save_strategy": "steps", "eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "max_steps": 4}
        trainer = made(build, tmp_path, given=given, **best, **often)
        trainer.train()
        models.append(trainer.model)
        kept.append(sorted(path.name for path in Path(trainer.args.output_dir).iterdir()))
    assert kept[0] == kept[1]
    assert len(kept[0]) == 2
    assert same_weights(*models)


@pytest.mark.parametrize("what", ["only the model", "the plain Trainer's", "other settings", "damage"])
def test_a_checkpoint_that_cannot_be_resumed_is_refused(what: str, tmp_path: Path) -> None:
    kind = hf.Trainer if what == "the plain Trainer's" else ScheduleTrainer
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1, "save_only_model": what == "only the model"}
    made(kind, tmp_path, **settings).train()
    checkpoint, more = tmp_path / kind.__name__ / "checkpoint-1", dict[str, Any]()
    (written,) = checkpoint.glob("tierplan/resident-1.bin") if what in ("other settings", "damage") else [0]
    match = "has no tierplan, which holds the optimizer states"
    if what == "other settings":
        more, match = {"adam_beta1": 0.5}, r"made with optimizer.betas\[?"
    elif what == "damage":
        with written.open("r+b") as file:
            file.seek(9000)
            file.write(b"x")
        match = "is damaged"
    trainer = made(ScheduleTrainer, tmp_path, max_steps=2, **more)
    with pytest.raises(ValueError, match=match):
        trainer.train(resume_from_checkpoint=str(checkpoint))


def test_a_checkpoint_in_which_a_file_is_missing_is_refused(tmp_path: Path) -> None:
    first = made(ScheduleTrainer, tmp_path, save_strategy="steps", save_steps=1, max_steps=1)
    first.train()
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        folder = shutil.copytree(Path(first.args.output_dir) / "checkpoint-1", tmp_path / name / "checkpoint-1")
        (folder / name).unlink()
        trainer = made(ScheduleTrainer, tmp_path, max_steps=2)
        with pytest.raises(TrainingError, match=f"checkpoint-1 has no {name}, without which"):
            trainer.train(resume_from_checkpoint=str(folder))


def test_the_model_is_not_moved_to_the_device(tmp_path: Path) -> None:
    """Not when the Trainer is made, and not when training begins: it need not fit there."""
    model = make_model("gpt2", dropout=0.1)
    with mock.patch.object(type(model), "to", side_effect=AssertionError("moved")):
        made(ScheduleTrainer, tmp_path, given={"model": model}, max_steps=1).train()


def test_the_table_knows_every_argument_and_setting() -> None:
    """A release of transformers with another field fails here, until someone has looked at it."""
    fields = {field.name for field in dataclasses.fields(hf.TrainingArguments)}
    tables = [*HONOURED, *OF_THE_SCHEDULE, *REFUSED]
    assert len(tables) == len(set(tables))
    assert set(tables) == fields | NOT_THERE
    settings = set(inspect.signature(hf.Trainer.__init__).parameters) - {"self"}
    assert settings == HONOURED_SETTINGS | set(REFUSED_SETTINGS)


def test_plain_arguments_are_taken() -> None:
    """What is refused is refused for its value: the default of every field is taken."""
    for name in REFUSED.keys() - NOT_THERE:
        assert getattr(ARGUMENTS, name) in REFUSED[name][0], name


@pytest.mark.filterwarnings("ignore:'pin_memory' argument:UserWarning")
def test_the_example_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierplan.planner.search.budget.DEFAULT_OPS", 20_000)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    here_path().parent.mkdir(parents=True)
    here_path().write_text(write_description(load_description("laptop")), encoding="utf-8")
    make_model("gpt2", dropout=0.0).config.save_pretrained("my-model")
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    example = example.replace("sequence_length=128", "sequence_length=16").replace("max_steps=100", "max_steps=2")
    namespace: dict[str, Any] = {"data": examples(8)}
    exec(compile(example, "README.md", "exec"), namespace)
    assert namespace["args"].max_steps == 2
    assert (tmp_path / "out").exists()
