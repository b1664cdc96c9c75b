"""`tierplan workload`: tables that a person can check, and one line for each error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.configs import config_of
from tierplan.cli import main
from tierplan.sim.workloads.models import load_workload
from tierplan.sim.workloads.workload import Training


def test_totals_of_the_table_are_the_workloads(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["workload", "show", "gpt-13b", "--batch", "2"]) == 0
    out = capsys.readouterr().out
    workload = load_workload("gpt-13b", Training(per_device_train_batch_size=2))
    total = next(line for line in out.splitlines() if line.split()[:1] == ["total"])
    assert f"{workload.num_parameters:,} parameters" in out
    assert float(total.split()[5]) == pytest.approx(sum(u.saved_bytes for u in workload.units) / 2**30, rel=0.005)
    assert any("L0..L39 x 40" in line for line in out.splitlines())
    assert all(len(line) <= 80 for line in out.splitlines())


def test_a_unit_lists_its_saved_tensors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["workload", "show", "gpt-13b", "--unit", "L0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    block = load_workload("gpt-13b", Training()).blocks[0]
    assert len(lines) == 3 + len(block.saved)
    assert f"{block.saved_bytes:,} bytes" in lines[0]


def test_json_of_a_unit_has_that_unit_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """It had all units, as without `--unit`."""
    assert main(["workload", "show", "gpt2", "--unit", "head", "--json"]) == 0
    assert [unit["name"] for unit in json.loads(capsys.readouterr().out)["units"]] == ["head"]


@pytest.mark.parametrize("argv", [["gpt-276b", "--lora", "r=8"], ["gpt-0.1b", "--seq", "200000"], ["gpt-175b"]])
def test_a_table_has_eighty_columns_whatever_is_large(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["workload", "show", *argv]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_what_is_said_of_attention_is_what_the_work_is_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """GPT-OSS's class has attention in matrix products alone, whose squares are kept."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 100}
    sizes |= {"intermediate_size": 64, "num_hidden_layers": 2, "num_local_experts": 2, "num_experts_per_tok": 1}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_oss", **sizes}))
    for argv, is_fused in (([str(tmp_path)], False), (["gpt2"], True)):
        assert main(["workload", "show", *argv, "--seq", "32"]) == 0
        told = " ".join(capsys.readouterr().out.split())
        assert ("flash attention" in told) == is_fused
        assert ("attention in matrix products (no fused one" in told) != is_fused
        assert main(["workload", "show", *argv, "--seq", "32", "--unit", "L0"]) == 0
        assert ("softmax" in capsys.readouterr().out) != is_fused


def test_flops_per_parameter_say_what_they_leave_out(capsys: pytest.CaptureFixture[str]) -> None:
    for chunks in ("1", "8"):
        assert main(["workload", "show", "gpt2", "--loss-chunks", chunks]) == 0
        told = " ".join(capsys.readouterr().out.split())
        assert ("FLOPs per parameter and token, without the logits that are made again" in told) == (chunks == "8")


def test_json_has_every_amount(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config_of("llama")))
    assert main(["workload", "show", str(path), "--seq", "16", "--json"]) == 0
    raw = json.loads(capsys.readouterr().out)
    expected = load_workload(path, Training(sequence_length=16))
    assert [u["saved"][0]["size_bytes"] for u in raw["units"] if u["saved"]] == [
        u.saved[0].size_bytes for u in expected.units if u.saved
    ]


def test_adapters_have_the_dtype_that_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """In fp32 they have two moments of 4 bytes, in bf16 a master copy besides."""
    states: dict[str, int] = {}
    for name in ("fp32", "bf16"):
        words = ["--lora", "r=8,targets=q_proj", "--trained-dtype", name, "--seq", "64", "--json"]
        assert main(["workload", "show", "llama-3.2-1b", *words]) == 0
        raw = json.loads(capsys.readouterr().out)
        expected = load_workload("llama-3.2-1b", Training(sequence_length=64, lora=words[1], trained_dtype=name))
        assert raw["units"][1]["forward"] == expected.units[1].forward
        states[name] = expected.states_bytes // expected.num_trained
    assert states == {"fp32": 8, "bf16": 12}


def test_names_of_transformers_are_taken(capsys: pytest.CaptureFixture[str]) -> None:
    short = ["--batch", "2", "--accumulation", "3", "--max-grad-norm", "1"]
    long = ["--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "3", "--max_grad_norm", "1"]
    outs = []
    for options in (short, long):
        assert main(["workload", "show", "gpt-13b", "--json", *options]) == 0
        outs.append(capsys.readouterr().out)
    assert outs[0] == outs[1]
    assert json.loads(outs[0])["training"]["gradient_accumulation_steps"] == 3


def test_deepspeed_prints_a_command_that_is_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ds.json"
    zero = {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "nvme"}}
    content = {"train_micro_batch_size_per_gpu": 2, "fp16": {"enabled": True}, "optimizer": {"type": "Lion"}}
    path.write_text(json.dumps({**content, "gradient_clipping": 1.0, "zero_optimization": zero}))
    more = ["--loss-chunks", "2", "--exact", "--backend", "cpu"]
    assert main(["workload", "deepspeed", str(path), "--model", "gpt-6.7b", *more]) == 0
    command = capsys.readouterr().out.splitlines()[-1].partition("tierplan ")[2].split()
    assert "--batch 2" in " ".join(command)
    assert "--dtype fp16 --optimizer lion --loss-chunks 2 --max-grad-norm 1.0" in " ".join(command)
    assert "--backend cpu --exact" in " ".join(command)
    assert main([*command[:-1], "fuyou-4090"]) == 0
    assert "step" in capsys.readouterr().out


@pytest.mark.parametrize(
    "option",
    [
        "--batch 4", "--accumulation 1", "--dtype bf16", "--optimizer sgd", "--optimizer adamw", "--max-grad-norm 2",
        "--no-master-weights",
    ],
)  # fmt: skip
@pytest.mark.parametrize("command", ["workload deepspeed", "explain-run --step-s 1 --machine fuyou-4090 --config"])
def test_options_that_a_configuration_contradicts_are_refused(
    command: str, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds.json"
    content = {"train_micro_batch_size_per_gpu": 2, "fp16": {"enabled": True}, "optimizer": {"type": "Lion"}}
    path.write_text(json.dumps({**content, "gradient_accumulation_steps": 4, "gradient_clipping": 0.5}))
    assert main([*command.split(), str(path), "--model", "gpt2", *option.split()]) == 1
    assert f"{option.split()[0]} is " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "option", "error"),
    [
        ({"output_dir": "x", "bf16": False}, "--autocast bf16", "--autocast is bf16, but {} says none; leave one"),
        ({"output_dir": "x", "fp16": True}, "--autocast bf16", "--autocast is bf16, but {} says fp16; leave one"),
        ({"distributed_type": "MULTI_GPU", "mixed_precision": "no"}, "--autocast bf16", "but {} says none; leave one"),
        ({"output_dir": "x", "torch_compile": False}, "--torch-compile", "is given, but {} says not to"),
        ({"distributed_type": "MULTI_GPU", "dynamo_backend": "NO"}, "--torch-compile", "but {} says not to"),
    ],
)
@pytest.mark.parametrize("command", ["workload deepspeed", "explain-run --step-s 1 --machine fuyou-4090 --config"])
def test_options_that_turn_on_what_a_configuration_turns_off_are_refused(
    command: str, content: dict[str, Any], option: str, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path := tmp_path / "args.json").write_text(json.dumps(content))
    assert main([*command.split(), str(path), "--model", "gpt2", *option.split()]) == 1
    assert error.format(path) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "option"),
    [
        ({"output_dir": "x"}, "--torch-compile"),
        ({"output_dir": "x", "torch_compile": True}, "--torch-compile"),
        ({"output_dir": "x", "bf16": True}, "--autocast bf16"),
        ({"output_dir": "x"}, "--autocast bf16"),
        ({"distributed_type": "MULTI_GPU"}, "--autocast bf16"),
        ({"train_micro_batch_size_per_gpu": 1}, "--autocast bf16"),
    ],
)
def test_options_for_what_a_configuration_says_too_or_leaves_open_are_taken(
    content: dict[str, object], option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path := tmp_path / "args.json").write_text(json.dumps(content))
    assert main(["workload", "deepspeed", str(path), "--model", "gpt2", *option.split(), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    training = record["training"]
    compiles = option == "--torch-compile"
    assert (training["autocast"], training["torch_compile"]) == ("" if compiles else "bf16", compiles)
    assert compiles or not any("no mixed precision" in note for note in record["notes"])


OF_TRAINER = "--batch 4 --accumulation 2 --optimizer sgd --max-grad-norm 2"


@pytest.mark.parametrize(
    "content",
    [
        {"output_dir": "x"},
        {"output_dir": "x", "deepspeed": {"zero_optimization": {"stage": 2}, "gradient_clipping": "auto"}},
        {"output_dir": "x", "use_liger_kernel": True, "deepspeed": {"gradient_clipping": "auto"}},
    ],
)
def test_an_option_stands_before_a_default_of_the_trainer(
    content: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path := tmp_path / "args.json").write_text(json.dumps(content))
    asked = ["workload", "deepspeed", str(path), "--model", "llama-3.2-1b", "--json"]

    def settings(*options: str) -> tuple[object, ...]:
        assert main([*asked, *options]) == 0
        record = json.loads(capsys.readouterr().out)
        ways = [record["training"], *([record["plain"]["training"]] if record["plain"] else [])]
        names = ("per_device_train_batch_size", "gradient_accumulation_steps", "optimizer", "max_grad_norm")
        (found,) = {tuple(training[name] for name in names) for training in ways}
        return found

    assert settings() == (8, 1, "adamw", 1.0)
    assert settings(*OF_TRAINER.split()) == (4, 2, "sgd", 2.0)


@pytest.mark.parametrize(
    ("content", "option", "error"),
    [
        ({"optim": "adamw_torch"}, "--optimizer sgd", "--optimizer is sgd, but {} says adamw; leave one of them out"),
        ({"deepspeed": {"optimizer": {"type": "Lion"}}}, "--optimizer sgd", "--optimizer is sgd, but {} says lion"),
        ({"max_grad_norm": None}, "--max-grad-norm 2", "--max-grad-norm is 2.0, but {} says none"),
        ({"deepspeed": {"gradient_clipping": 1.0}}, "--max-grad-norm 2", "--max-grad-norm is 2.0, but {} says 1.0"),
        ({"per_device_train_batch_size": 8}, "--batch 4", "--batch is 4, but {} says 8"),
        ({"deepspeed": {"train_micro_batch_size_per_gpu": 2}}, "--batch 4", "--batch is 4, but {} says 2"),
        ({"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 8}}}, "--accumulation 2", "{} says 8"),
    ],
)
def test_an_option_does_not_stand_before_what_a_file_of_the_trainer_says(
    content: dict[str, Any], option: str, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path := tmp_path / "args.json").write_text(json.dumps({"output_dir": "x", **content}))
    assert main(["workload", "deepspeed", str(path), "--model", "gpt2", *option.split()]) == 1
    assert error.format(path) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "options", "taken"),
    [
        ({"train_micro_batch_size_per_gpu": "auto"}, "", "--batch 1, --accumulation 1, --seq 1024"),
        ({"train_micro_batch_size_per_gpu": 2}, "--seq 64", "--accumulation 1"),
        ({"train_micro_batch_size_per_gpu": "auto"}, "--seq 64 --batch 1 --accumulation 1", None),
        ({"distributed_type": "MULTI_GPU"}, "--seq 64", "--batch 1, --accumulation 1"),
        ({"output_dir": "x"}, "", "--seq 1024"),  # the Trainer has defaults of its own
        ({"output_dir": "x", "deepspeed": {"train_micro_batch_size_per_gpu": "auto"}}, "--seq 64", None),
    ],
)
def test_defaults_that_stand_for_what_nobody_says_are_named(
    content: dict[str, object], options: str, taken: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(content))
    assert main(["workload", "deepspeed", str(path), "--model", "gpt2", *options.split()]) == 0
    said = " ".join(capsys.readouterr().out.split())  # of lines of 80 columns
    assert ("the default is taken" in said) == (taken is not None)
    assert taken is None or f"the default is taken: {taken} " in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "nope"], "`tierplan workload list` has the known names"),
        (["show", "gpt-13b", "--unit", "L40"], "there is no unit 'L40'"),
    ],
)
def test_errors_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["workload", *arguments]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
