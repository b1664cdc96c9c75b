"""`tierplan run`: from files to files, resumable, and Ctrl-C commits."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch

from tests.runtime.autograd.test_coded import ADDED
from tests.runtime.checkpoint.test_weights import raw_config
from tests.runtime.models import make_batches, make_model, observed_workload
from tests.runtime.test_trainer import CPU, machine
from tests.toys import uniform_plan
from tierplan.cli import main
from tierplan.planner.lowering import lower
from tierplan.planner.plan import UnitPlan
from tierplan.runtime import job, reference
from tierplan.runtime.autograd.coded import code_base
from tierplan.runtime.checkpoint import weights
from tierplan.runtime.checkpoint.commits import CommitLog
from tierplan.runtime.data.text import TokenBatches
from tierplan.runtime.memory.arena import PAGE_BYTES
from tierplan.runtime.memory.tier_file import HEADER_BYTES
from tierplan.runtime.optim.adam import OptimizerSettings
from tierplan.runtime.optim.groups import without_decay
from tierplan.runtime.reference import train_plainly
from tierplan.runtime.tracing.models import build_model
from tierplan.runtime.tracing.trace import trace_config
from tierplan.sim.schedule_file import save_schedule
from tierplan.sim.trace import Trace
from tierplan.sim.workloads.formats import FORMATS
from tierplan.sim.workloads.workload import Training
from tierplan.validation.comparison.run_folder import load_run

pytestmark = pytest.mark.usefixtures("one_thread")

START = "import sys; from tierplan.cli import main; sys.exit(main())"
LINES = "the quick brown fox jumps over the lazy dog\n"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    model = make_model("gpt2", num_blocks=2, dropout=0.1)
    (tmp_path / "config.json").write_text(json.dumps({**raw_config(model), "vocab_size": 256}))
    (tmp_path / "text.txt").write_text(LINES * 200)
    write_plan(tmp_path)
    return tmp_path


MOVING = UnitPlan(params="nvme", grads="host", states="nvme", acts="host")


def write_plan(files: Path, training: Training = CPU, choice: UnitPlan = MOVING) -> None:
    workload = trace_config("tiny", json.loads((files / "config.json").read_text()), training)
    save_schedule(lower(uniform_plan(workload, choice), workload, machine()), files / "plan.json")


def arguments(files: Path, steps: int, out: str, *more: str) -> list[str]:
    paths = {"--model": "config.json", "--data": "text.txt", "--out": out}
    named = [x for option, name in paths.items() for x in (option, str(files / name))]
    return ["run", str(files / "plan.json"), *named, "--steps", str(steps), "--lr", "0.01", "--threads", "1", *more]


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {k: v for path in sorted(folder.glob("*.safetensors")) for k, v in load_file(path).items()}


def same_weights_in(files: Path, one: str = "one", two: str = "two") -> bool:
    """Whether two runs have exported the same model."""
    a, b = (weights_in(files / out / "model") for out in (one, two))
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def metrics(files: Path, out: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in (files / out / "metrics.jsonl").read_text().splitlines()]


def test_run_writes_everything_and_the_loss_falls(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(files, 30, "out", "--lr-schedule", "cosine", "--warmup-steps", "2")) == 0
    lines = metrics(files, "out")
    assert [line["step"] for line in lines] == list(range(30))
    assert lines[-1]["loss"] < lines[0]["loss"] - 1.0
    assert lines[1]["lr"] == pytest.approx(0.005)
    assert all(line["tokens_per_s"] > 0 for line in lines)
    trace = Trace.load(files / "out" / "trace.json")
    assert trace.by_key()["s0/fwd/L1/mb0"].duration_ns > 0
    assert "reference_s" in trace.meta, "how slow the machine was, where the run was long enough to tell"
    assert trace.meta["num_threads"] >= 1  # type: ignore[operator]
    assert "30 steps done" in capsys.readouterr().out
    from transformers import GPT2LMHeadModel

    GPT2LMHeadModel.from_pretrained(files / "out" / "model")


def test_where_the_model_cannot_be_exported_the_steps_are_safe(
    files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import GPT2LMHeadModel

    assert main(arguments(files, 1, "out")) == 0
    write, num_left = weights.write_flat, 1

    def full(path: Path, *args: Any) -> None:
        nonlocal num_left
        num_left -= 1
        if num_left < 0:
            raise OSError(errno.ENOSPC, "cannot be written: No space left on device", str(path))
        write(path, *args)

    with monkeypatch.context() as patched:
        patched.setattr(weights, "write_flat", full)
        assert main(arguments(files, 2, "out", "--resume")) == 1
    said = capsys.readouterr().err
    assert "model-00002-of-00004.safetensors: cannot be written: No space left on device. All 2 steps are comm" in said
    assert "the same command with --resume trains nothing more and exports it" in said
    with pytest.raises(OSError, match="no file named"):
        GPT2LMHeadModel.from_pretrained(files / "out" / "model")
    assert main(arguments(files, 2, "out", "--resume")) == 0
    assert "0 of them now" in capsys.readouterr().out
    assert main(arguments(files, 2, "whole")) == 0
    assert same_weights_in(files, "out", "whole")
    GPT2LMHeadModel.from_pretrained(files / "out" / "model")


@pytest.mark.parametrize(("choice", "is_said"), [(MOVING, True), (UnitPlan(), False)])
def test_what_was_moved_is_said_where_something_was(
    choice: UnitPlan, is_said: bool, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a plan that stays on the device it was a line with nothing behind it."""
    write_plan(files, choice=choice)
    assert main(arguments(files, 1, "out", "--no-export")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("peak gpu0") for line in lines)
    assert any(line.startswith("moved") for line in lines) == is_said


def test_a_resumed_run_is_an_uninterrupted_one(files: Path) -> None:
    assert main(arguments(files, 9, "whole")) == 0
    assert main(arguments(files, 4, "parts")) == 0
    assert main(arguments(files, 9, "parts")) == 1  # without --resume
    assert main(arguments(files, 9, "parts", "--resume", "--checkpoint-every", "2")) == 0
    assert same_weights_in(files, "whole", "parts")
    assert [m["loss"] for m in metrics(files, "whole")] == [m["loss"] for m in metrics(files, "parts")]


def test_figures_say_whether_they_are_of_the_whole_run_or_of_what_was_resumed(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--no-export", "--resume"]
    assert main(arguments(files, 3, "out", *options)) == 0
    assert "3 steps done, loss" in capsys.readouterr().out
    assert main(arguments(files, 5, "out", *options, "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    losses = [row["loss"] for row in metrics(files, "out")]
    assert (found["steps"], found["losses"]) == (5, losses)
    now = found["this_session"]
    assert (now["first_step"], now["steps"], now["losses"]) == (3, 2, losses[3:])
    assert now["step_s"] * now["tokens_per_s"] == pytest.approx(CPU.tokens_per_step)
    assert all(now["bytes"].values())
    assert main(arguments(files, 7, "out", *options)) == 0
    assert "7 steps done in all, 2 of them now, loss" in capsys.readouterr().out
    assert main(arguments(files, 7, "out", *options, "--json")) == 0
    now = json.loads(capsys.readouterr().out)["this_session"]
    assert (now["first_step"], now["steps"], now["losses"], now["step_s"]) == (7, 0, [], None)
    assert main(arguments(files, 4, "out", *options)) == 0
    assert "7 steps done in all, 0 of them now" in capsys.readouterr().out


def test_frozen_parameters_and_norms_without_decay(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--weight-decay", "0.3", "--no-decay-on-norms"]
    assert main(arguments(files, 1, "start", "--lr", "0")) == 0
    write_plan(files, replace(CPU, freeze="*.wte.*,*.h.0.*"))
    assert main(arguments(files, 4, "out", *options)) == 0

    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(files / "start" / "model").train()
    frozen = tuple(name for name, _ in model.named_parameters() if ".wte." in name or ".h.0." in name)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    settings = OptimizerSettings(lr=0.01, weight_decay=0.3, groups=(without_decay(model),))
    (kept,) = (files / "out").glob("tokens-*.npy")
    tokens = np.load(kept)
    batches = TokenBatches(tokens, CPU.per_device_train_batch_size, CPU.sequence_length)
    losses = train_plainly(model, batches, steps=4, optimizer=settings)
    assert [row["loss"] for row in metrics(files, "out")] == losses
    start, found = weights_in(files / "start" / "model"), weights_in(files / "out" / "model")
    for name, p in model.named_parameters():
        assert torch.equal(found[name], p)
        assert torch.equal(found[name], start[name]) == (name in frozen)

    capsys.readouterr()
    assert main(arguments(files, 5, "out", *options[:2], "--resume")) == 1
    assert "the run was made with optimizer.groups = [" in capsys.readouterr().err.splitlines()[-1]
    assert main(arguments(files, 5, "out", *options, "--resume", "--seed", "1")) == 1
    assert main(arguments(files, 5, "out", *options, "--resume")) == 0
    write_plan(files, replace(CPU, freeze="*.wte.*"))
    assert main(arguments(files, 6, "out", *options, "--resume")) == 1
    assert "the run was made with training.freeze = " in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.filterwarnings("ignore::Warning:peft")
@pytest.mark.parametrize(
    ("base_format", "saved"), [("", ""), ("nf4", ""), ("added", ""), ("", ",save=wte+lm_head"), ("nf4", ",save=ln_f")]
)
def test_adapters_are_trained_and_saved_as_peft_does(
    files: Path, base_format: str, saved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a base in a format that is one entry more, and with modules that are trained in full beside them."""
    monkeypatch.setitem(FORMATS, "added", ADDED)
    from peft import PeftModel
    from transformers import GPT2LMHeadModel

    make = GPT2LMHeadModel(GPT2LMHeadModel.config_class(**json.loads((files / "config.json").read_text())))
    make.save_pretrained(files / "base")
    write_plan(files, replace(CPU, lora=f"r=4{saved}", base=base_format))
    base = ["--model", str(files / "base")]
    assert main(arguments(files, 1, "start", *base, "--lr", "0", "--weight-decay", "0")) == 0
    assert main(arguments(files, 2, "out", *base, "--weight-decay", "0")) == 0
    assert main(arguments(files, 4, "out", *base, "--weight-decay", "0", "--resume")) == 0
    model = GPT2LMHeadModel.from_pretrained(files / "base").train()
    if base_format:
        code_base(model, base_format, whole=True)
    model = PeftModel.from_pretrained(model, str(files / "start" / "model"), is_trainable=True).train()
    (kept,) = (files / "out").glob("tokens-*.npy")
    batches = TokenBatches(np.load(kept), CPU.per_device_train_batch_size, CPU.sequence_length)
    losses = train_plainly(model, batches, steps=4, optimizer=OptimizerSettings(lr=0.01, weight_decay=0.0))
    assert [row["loss"] for row in metrics(files, "out")] == losses
    model.save_pretrained(files / "plain")
    ours, theirs = weights_in(files / "out" / "model"), weights_in(files / "plain")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert sum("lora" not in key for key in ours) == (0 if not saved else 2)


def test_a_model_with_codes_is_not_exported_whole(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_plan(files, replace(CPU, freeze="*.h.*", base="int8"))
    assert main(arguments(files, 1, "out")) == 1
    assert "add --no-export" in capsys.readouterr().err
    assert main(arguments(files, 1, "out", "--no-export")) == 0


def test_a_resume_with_other_data_is_refused(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(files, 2, "out")) == 0
    for option, value in (("--lr-schedule", "cosine"), ("--data", "other.txt")):
        (files / "other.txt").write_text("Something else. " * 200)
        given = arguments(files, 4, "out", "--resume")
        if option in given:
            given[given.index(option) + 1] = str(files / value)
        else:
            given += [option, value]
        capsys.readouterr()
        assert main(given) == 1
        wanted = option.removeprefix("--").replace("-", "_")
        assert f"the run was made with {wanted} = " in capsys.readouterr().err.splitlines()[-1]
    assert main(arguments(files, 4, "out", "--resume")) == 0


def test_a_resume_with_another_model_of_the_same_shapes_is_refused(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(files, 2, "out")) == 0
    raw = json.loads((files / "config.json").read_text())
    (files / "config.json").write_text(json.dumps({**raw, "layer_norm_epsilon": 0.1, "transformers_version": "0.1"}))
    capsys.readouterr()
    assert main(arguments(files, 4, "out", "--resume")) == 1
    assert "the run was made with model.layer_norm_epsilon = 1e-05, and is to be" in capsys.readouterr().err
    (files / "config.json").write_text(json.dumps({**raw, "transformers_version": "0.1"}))
    assert main(arguments(files, 4, "out", "--resume")) == 0
    exported = arguments(files, 5, "out", "--resume")
    exported[exported.index("--model") + 1] = str(files / "out" / "model")
    assert main(exported) == 0


def test_a_rate_that_falls_until_the_last_step_keeps_its_last_step(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With another one, the steps before the resume would be of one rate schedule and those after it of another."""
    falling = ["--lr-schedule", "linear", "--no-export"]
    assert main(arguments(files, 3, "out", *falling)) == 0
    capsys.readouterr()
    assert main(arguments(files, 5, "out", *falling, "--resume")) == 1
    assert "the run was made with lr_schedule_steps = 3, and is to be resumed with 5" in capsys.readouterr().err
    assert main(arguments(files, 3, "out", *falling, "--resume")) == 0


def test_faster_drives_get_more(files: Path) -> None:
    drives = [str(files / name) for name in ("fast", "slow")]
    options = ["--nvme", drives[0], "--nvme", drives[1], "--nvme-weights", "3", "1"]
    with mock.patch("tierplan.runtime.memory.striping.STRIPE_BYTES", PAGE_BYTES):  # the model is small
        assert main(arguments(files, 2, "striped", *options)) == 0
    fast, slow = ((Path(drive) / "tierplan.tier").stat().st_size - HEADER_BYTES for drive in drives)
    assert fast / slow == pytest.approx(3.0, rel=0.05)
    assert main(arguments(files, 2, "single")) == 0
    assert same_weights_in(files, "striped", "single")


def test_speeds_of_several_drives_are_measured(files: Path) -> None:
    options = ["--nvme", str(files / "a"), "--nvme", str(files / "b"), "--no-export"]
    with mock.patch("tierplan.runtime.execution.placement.measure_weights", return_value=[1.0, 2.0]) as measure:
        assert main(arguments(files, 2, "measured", *options)) == 0
        assert main(arguments(files, 3, "measured", *options, "--resume")) == 0
    assert len(measure.mock_calls) == 1
    assert json.loads((files / "measured" / "commit.json").read_text())["stripes"].count(1) == 2


def test_a_trained_model_is_a_start(files: Path) -> None:
    assert main(arguments(files, 5, "first")) == 0
    more = arguments(files, 1, "second")
    more[more.index("--model") + 1] = str(files / "first" / "model")
    assert main(more) == 0
    assert metrics(files, "second")[0]["loss"] < metrics(files, "first")[0]["loss"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_commits_and_resume_goes_on(
    number: signal.Signals, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on_step = job._Metrics.on_step

    def with_a_signal(metrics: job._Metrics, step: int, loss: float) -> None:
        on_step(metrics, step, loss)
        if step == 2:
            signal.raise_signal(number)
            signal.raise_signal(number)  # as `timeout` does

    with mock.patch.object(job._Metrics, "on_step", with_a_signal):
        assert main(arguments(files, 100_000, "out")) == 130
    assert "resume with --resume" in capsys.readouterr().out
    done = len(metrics(files, "out"))
    assert 3 <= done < 100
    assert json.loads((files / "out" / "commit.json").read_text())["num_steps"] == done
    assert main(arguments(files, done + 2, "out", "--resume", "--no-export")) == 0
    assert len(metrics(files, "out")) == done + 2


def test_a_second_signal_ends_it_at_once_where_it_is_not_the_same() -> None:
    asked = list[bool]()
    with job.stop_on_interrupt(lambda: asked.append(True)):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        time.sleep(1.1 * job.SAME_SIGNAL_S)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert asked == [True]


@pytest.mark.parametrize("moment", ["step", "commit", "export"])
def test_a_signal_in_the_last_step_or_behind_it_lets_the_run_end(
    moment: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All steps are done, so nothing was stopped: the model is exported, which takes no other way to have it."""
    target, name = {
        "step": (job._Metrics, "on_step"), "commit": (CommitLog, "write"), "export": (job, "export"),
    }[moment]  # fmt: skip
    real: Any = getattr(target, name)

    def with_a_signal(*given: Any, **settings: Any) -> None:
        real(*given, **settings)
        if moment != "step" or given[1] == 2:
            signal.raise_signal(signal.SIGTERM)

    with mock.patch.object(target, name, with_a_signal):
        assert main(arguments(files, 3, "out")) == 0
    assert "resume with --resume" not in capsys.readouterr().out
    assert main(arguments(files, 3, "plain")) == 0
    assert same_weights_in(files, "out", "plain")


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_from_outside_commits(number: signal.Signals, files: Path) -> None:
    command = [sys.executable, "-c", START, *arguments(files, 100_000, "out")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    path = files / "out" / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and (not path.exists() or len(path.read_text().splitlines()) < 3):
        time.sleep(0.1)
    process.send_signal(number)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert "resume with --resume" in out
    assert "Traceback" not in err
    assert json.loads((files / "out" / "commit.json").read_text())["num_steps"] == len(metrics(files, "out"))


def test_a_run_that_could_not_begin_leaves_no_tokens_of_its_data(files: Path) -> None:
    (files / "wrong.txt").write_text("x")
    wrong = arguments(files, 2, "out", "--no-export")
    wrong[wrong.index("--data") + 1] = str(files / "wrong.txt")
    assert main(wrong) == 1
    assert main(arguments(files, 2, "out", "--no-export")) == 0
    assert main(arguments(files, 2, "fresh", "--no-export")) == 0
    assert [row["loss"] for row in metrics(files, "out")] == [row["loss"] for row in metrics(files, "fresh")]


def test_a_loss_that_is_no_number_is_null_and_is_said(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its gradients are finite, so training goes on, as plain training does. JSON has no NaN."""
    plain, num = reference.loss_of, 0

    def loss_of(*args: Any) -> torch.Tensor:
        nonlocal num
        num += 1
        return plain(*args) + (torch.nan if num == 2 else 0.0)

    with mock.patch("tierplan.runtime.trainer.loss_of", loss_of):
        assert main(arguments(files, 3, "out", "--no-export")) == 0
    lines = (files / "out" / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert [row["loss"] is None for row in found] == [False, True, False]
    said = " ".join(capsys.readouterr().out.split())
    assert "the loss of 1 step, first of step 1, is not finite (null in metrics.jsonl)" in said
    losses = load_run(files / "out")[1]
    assert [math.isnan(loss) for loss in losses] == [False, True, False]
    assert main(arguments(files, 3, "plain", "--no-export")) == 0
    assert losses[2] == metrics(files, "plain")[2]["loss"]
    assert main([*arguments(files, 3, "out", "--no-export", "--resume"), "--json"]) == 0
    told = capsys.readouterr().out
    assert json.loads(told[told.index("{") :], parse_constant=pytest.fail)["losses"][1] is None


def test_a_plan_for_sequences_of_one_token_is_refused_before_an_update(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its loss is nan, in plain training, too: a causal model has no next token there."""
    one = replace(CPU, sequence_length=1)
    batch = {name: tokens[:, :1] for name, tokens in make_batches(1)[0].items()}
    model = build_model(json.loads((files / "config.json").read_text()), CPU)
    workload = observed_workload(model, batch, one)
    save_schedule(lower(uniform_plan(workload, MOVING), workload, machine()), files / "plan.json")
    assert main(arguments(files, 1, "out")) == 1
    assert "sequence_length is 1, but the loss of a causal model is that of the next token" in capsys.readouterr().err
    assert not (files / "out" / "commit.json").exists()


def test_resuming_a_run_that_is_done_keeps_its_trace(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(files, 3, "out", "--no-export")) == 0
    before = Trace.load(files / "out" / "trace.json")
    assert main(arguments(files, 3, "out", "--no-export", "--resume")) == 0
    assert Trace.load(files / "out" / "trace.json") == before
    assert "--steps" not in capsys.readouterr().out
    assert main(arguments(files, 2, "out", "--no-export", "--resume")) == 0
    assert "--steps asks for 2 steps of the whole run, which had 1 more before" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--model", "nothing.json", "does not exist; --model takes"),
        ("--data", "nothing.txt", "does not exist; give a text file"),
    ],
)
def test_errors_are_one_line(
    files: Path, option: str, value: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = arguments(files, 3, "out")
    command[command.index(option) + 1] = str(files / value)
    assert main(command) == 1
    error = capsys.readouterr().err.strip()
    assert message in error.splitlines()[-1]


def test_short_steps_are_told_in_their_own_unit() -> None:
    """A step of a millisecond was predicted between 0.000 s and 0.001 s."""
    result = SimpleNamespace(
        losses=[2.0, 1.0],
        step_s=0.00123,
        step_ends_s=[1.0],
        num_resumed_steps=0,
        peak_bytes={},
        moved_bytes={},
        notes=[],
    )
    done = job.Done(
        result=cast(Any, result), num_steps=2, tokens_per_step=10, predicted_step_s=0.000718, was_stopped=False,
        interval_s=(0.000481, 0.00107), out_dir=Path("run"),
    )  # fmt: skip
    said = " ".join(done.summary().split())
    assert "step time 1.23 ms on average, 8,130 tokens/s; predicted 718 µs (-41.6 %)" in said
    assert "9 in 10 between 481 µs and 1.07 ms" in said
