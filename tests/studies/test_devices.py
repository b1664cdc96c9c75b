"""No command gives an answer for fewer devices than the machine has without saying so."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tierplan.cli import command_parser, main
from tierplan.commands.options.scenario import read_point
from tierplan.hwmodels import load_description, load_machine
from tierplan.planner.infeasible import InfeasiblePlan
from tierplan.planner.policies import POLICIES
from tierplan.planner.policies.options import OptionError
from tierplan.planner.prediction import predict
from tierplan.sim.columns import unroll
from tierplan.sim.pricing import simulate_on
from tierplan.sim.schedule_file import save_schedule
from tierplan.sim.workloads.models import load_workload, workload_of
from tierplan.sim.workloads.workload import Training, Workload
from tierplan.studies.advise import _like
from tierplan.studies.answer import batch_text, question_text, step_text
from tierplan.studies.evaluate import QUICK, best_plan, fewer_devices, machine_of, predict_point
from tierplan.studies.page import shown_row
from tierplan.studies.purchases import PriceList, purchases
from tierplan.studies.study import Point
from tierplan.validation.calibration.calibration import Calibration
from tierplan.validation.calibration.session import CalibrationSession

CONFIG = {"model_type": "gpt2", "n_embd": 64, "n_head": 2, "n_layer": 2, "vocab_size": 500, "n_positions": 64}
TWO = ["--machine", "desktop-4090", "--set", "gpu.count=2", "--seq", "64", "--batch", "2"]
CPU = ["--dtype", "fp32", "--backend", "cpu"]
ASKED = {
    "simulate": ["--policy", "zero-offload", *TWO],
    "compare-policies": ["--policies", "zero-offload", *TWO],
    "plan": TWO,
    "advise": ["--workers", "1", *TWO],
    "explain-run": ["--policy", "zero-offload", "--step-s", "1", *TWO],
    "calibrate": [*TWO, *CPU, "--device", "cpu", "--threads", "1", "--budget-s", "0.1"],
    "compare": ["one.json", "run", "--other-machine", *TWO[:4]],
    "page": [
        "--out", "page.html", "--seq", "64", "--method", "harmony", "--gpu", "rtx-4090", "--gpus", "2", "--dram", "64",
        "--drives", "1", "--sequences", "2", "--workers", "1",
    ],
}  # fmt: skip
"""A command line for each command that takes a machine, on which it has two GPUs."""
PREDICTS = [name for name in ASKED if name not in ("calibrate", "compare", "page")]
"""Those with the arguments of a scenario that train on all GPUs."""


def test_every_command_that_takes_a_machine_is_asked() -> None:
    (commands,) = (a for a in command_parser()._actions if isinstance(a, argparse._SubParsersAction))
    takes = {name for name, sub in commands.choices.items() if "--machine" in sub._option_string_actions}
    assert takes == ASKED.keys()


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("tierplan.studies.advise.purchases", lambda description, prices: [])
    monkeypatch.setattr("tierplan.studies.advise.largest_model_of", lambda point: {"largest_model": ""})
    monkeypatch.setattr("tierplan.studies.slow_step.explain._best", lambda *_: None)
    few = {name: POLICIES[name] for name in ("in-memory", "zero-offload")}
    monkeypatch.setattr("tierplan.planner.loop.POLICIES", few)
    monkeypatch.setattr("tierplan.planner.search.budget.DEFAULT_OPS", 50_000)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.setattr("tierplan.validation.calibration.session.LEAST_TURNS", 2)
    monkeypatch.setattr("tierplan.validation.calibration.session.PROFILE_STEPS", 2)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    return "config.json"


def test_a_refusal_says_for_how_many_devices(model: str) -> None:
    machine = load_machine("desktop-4090", ["gpu.count=2", "nvme.drives=0"])
    answer = predict("fuyou", load_workload(model, Training(sequence_length=64)), machine)
    assert answer.plan is None
    assert (answer.where, answer.devices_note) == ("desktop-4090, 2 GPUs", "")


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_has_all_devices_or_says_so(policy: str, model: str) -> None:
    machine = load_machine("desktop-4090", ["gpu.count=2"])
    workload = load_workload(model, Training(gradient_accumulation_steps=2, sequence_length=64))
    answer = predict(policy, workload, machine)
    assert answer.fits
    if policy == "harmony":  # has another name on several
        assert answer.devices == 1
        assert "trains on 1 of the machine's 2 GPUs" in answer.devices_note
    else:
        assert (answer.devices, answer.devices_note) == (2, "")
        with pytest.raises(OptionError, match="a number from 1 to 2"):
            predict(policy, workload, machine, {"devices": 3})
    assert f"{answer.devices} of its 2 GPUs" in answer.where
    assert bool(answer.simulated_only) == (policy != "harmony"), "said of all that several GPUs do"
    on_cpus = replace(workload, training=replace(workload.training, backend="cpu"), computed_for=None)
    no_packs = dict.fromkeys(
        ("harmony-dp", "harmony-pp", "mobius", "roundpipe", "roundpipe-sync", "virtual-memory"),
        "packs or pages in a host",
    )
    if policy != "harmony":
        why, said = predict(policy, on_cpus, machine).simulated_only, {**no_packs, "megatron-tp": "operators that"}
        assert why.startswith(f"simulated only: `tierplan run` executes no {said[policy]}" if policy in said else "")
        assert bool(why) == (policy in said)


def test_two_cards_of_a_desktop_share_its_lanes() -> None:
    second = next(p for p in purchases(load_description("desktop-4090"), PriceList()) if "second" in p.what)
    machine = machine_of(second.applied(Point(model="gpt2", machine="desktop-4090")))
    together = {link for link in machine.limits if link.startswith("host_link")}
    assert [machine.limits[link] for link in together] == [25e9, 25e9]
    for stream in ("gpu0.h2d", "gpu1.h2d", "gpu0.d2h", "gpu1.d2h"):
        assert together & set(machine.stream(stream).takes)


@pytest.mark.parametrize("devices", [1, 2])
def test_what_is_only_simulated_is_said_before_it_is_run(
    devices: int, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--model", model, "--machine", "desktop-4090", "--seq", "64", "--set", f"gpu.count={devices}"]
    said = "to run simulated only: `tierplan run` trains on one GPU, or on CPUs, not on several GPUs yet"
    for command in (["plan", *asked, "--batch", "64"], ["simulate", "--policy", "fsdp", *asked]):
        main(command)
        assert (said in " ".join(capsys.readouterr().out.split())) == (devices > 1)
        main([*command, "--json"])
        assert bool(json.loads(capsys.readouterr().out)["simulated_only"]) == (devices > 1)


def answer_of(command: str, model: str, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    if command == "compare":
        one = predict("zero-offload", load_workload(model, Training(sequence_length=64)), load_machine("desktop-4090"))
        assert one.schedule is not None
        save_schedule(one.schedule, "one.json")
        Path("run").mkdir(exist_ok=True)
        simulate_on(unroll(one.schedule, 4), load_machine("desktop-4090")).save("run/trace.json")
    asked = [*ASKED[command], *(() if command == "compare" else ("--model", model)), *more]
    assert main([command, *asked]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", [c for c in ASKED if c != "calibrate"])
def test_the_answer_says_how_many_devices(command: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Harmony and what is made for one device take one of the two; `plan` and others take both."""
    text = answer_of(command, model, capsys, "--json")
    record = json.loads(text)
    while "devices_of_machine" not in record:  # a page's rows are lists; answers lie in an answer
        record = next(
            v for v in (record.values() if isinstance(record, dict) else record) if isinstance(v, dict | list)
        )
    assert (record["devices"], record["devices_of_machine"]) == (2 if command in PREDICTS else 1, 2)
    if command == "page":
        assert "trains on 1 of the machine's 2 GPUs" in Path("page.html").read_text()


@pytest.mark.parametrize("command", [*PREDICTS, "compare"])
def test_the_first_line_says_how_many_devices(command: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    def first_line(*more: str) -> str:
        return answer_of(command, model, capsys, *more).split("\n", 1)[0]

    assert "2 GPUs" in first_line()
    if command in PREDICTS:
        assert "1 of its 2 GPUs" in first_line("--devices", "1")
    if command in ("simulate", "compare-policies", "explain-run"):
        flag = ASKED[command][0]
        said = first_line(flag, "harmony")
        assert "1 of its 2 GPUs" in said or "harmony on 1" in said


@pytest.mark.parametrize(
    ("machine", "devices", "of", "where", "note"),
    [
        ("server-8xh100", 3, 8, "server-8xh100, 3 of its 8 GPUs", ""),
        ("desktop-4090", 8, 1, "desktop-4090, 8 GPUs", "has 1; 7 more are assumed, on the same lanes to the host"),
        ("laptop", 2, 1, "laptop, 2 GPUs", "has 1; 1 more is assumed, on lanes of their own to the host"),
        ("desktop-4090", 1, 1, "desktop-4090", ""),
    ],
)
def test_devices_are_of_those_that_the_machine_has(
    machine: str, devices: int, of: int, where: str, note: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [
        "simulate",
        "--policy",
        "zero-2",
        "--model",
        model,
        "--machine",
        machine,
        "--devices",
        str(devices),
        "--seq",
        "64",
    ]
    assert main([*asked, *CPU, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["devices"], record["devices_of_machine"], record["where"]) == (devices, of, where)
    assert note in (record["devices_note"] or "")
    assert bool(record["devices_note"]) == bool(note)
    assert main([*asked, *CPU]) == 0
    assert note[:20] in capsys.readouterr().out


@pytest.mark.parametrize("given", ["link.p2p=20 GB/s", "link.collective=4 GB/s", ""])
def test_links_that_are_given_are_not_asked_for(given: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["simulate", "--policy", "zero-2", "--model", model, "--machine", "desktop-4090", "--devices", "2"]
    assert main([*asked, "--seq", "64", *CPU, *(["--set", given] if given else []), "--json"]) == 0
    note = json.loads(capsys.readouterr().out)["devices_note"]
    assert ("set link.p2p" in note) == (not given)
    assert ("as its file has them" in note) == (not given)


def test_the_comparison_has_eighty_columns(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["compare-policies", "--policies", "ddp", "megatron-pp", "--model", model, "--machine", "desktop-4090"]
    assert main([*asked, *CPU, "--devices", "3", "--batch", "4", "--seq", "64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("2 more are assumed" in line for line in lines)
    assert lines.count("micro-batches of each GPU's own, 768 tokens per step: ddp") == 1
    assert max(map(len, lines)) <= 80


def test_a_policy_that_does_not_run_is_on_no_gpu(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The first line said "harmony on 1" where it cannot train adapters."""
    asked = ["compare-policies", "--policies", "ddp", "harmony", "--model", model, "--machine", "desktop-4090"]
    assert main([*asked, *CPU, "--devices", "2", "--batch", "2", "--seq", "64", "--lora", "r=2"]) == 0
    out = capsys.readouterr().out
    assert "harmony  does not run" in out
    assert "harmony on 1" not in out


def test_one_of_two_gpus_is_calibrated(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(session: CalibrationSession) -> Calibration:
        raise RuntimeError(f"a machine of {session.machine.num_devices}")

    monkeypatch.setattr(CalibrationSession, "run", run)
    assert main(["calibrate", "--model", model, *ASKED["calibrate"]]) == 1
    assert capsys.readouterr().err.endswith("a machine of 1\n")


@pytest.mark.nightly
def test_what_was_calibrated_beside_another_rank_is_taken_for_two(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a CPU, ranks share its cores: what one does there while another trains says nothing of one alone."""
    said = answer_of("calibrate", model, capsys)
    assert said.startswith("desktop-4090, 1 of its 2 GPUs beside 1 more on the same cores: use it with --devices 2")
    for policy, devices, is_taken in (("ddp", "2", True), ("in-memory", "1", False)):
        asked = ["simulate", "--policy", policy, "--model", model, *TWO, *CPU, "--devices", devices, "--json"]
        assert main(asked) == 0
        assert json.loads(capsys.readouterr().out)["basis"].startswith("calibrated here") == is_taken


def test_a_sweep_says_it_too(model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    study = f'[scenario]\nmodel = "{model}"\nmachine = "desktop-4090"\npolicy = "harmony"\nseq = 64\n'
    (tmp_path / "study.toml").write_text(study + "[set]\ngpu.count = [1, 2]\n")
    assert main(["sweep", str(tmp_path / "study.toml"), "--workers", "1", "-o", str(tmp_path / "out")]) == 0
    assert "1 of 2 rows do not use all GPUs: harmony trains on 1 of the machine's 2" in capsys.readouterr().err


def test_plan_and_compare_policies_name_the_same_system(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a published system is best on fewer GPUs, the planner's row is of that system."""
    asked = ["--model", model, *TWO, *CPU]
    point = read_point(command_parser().parse_args(["plan", *asked]))
    best = predict_point(replace(point, policy="harmony"))
    assert best.devices_note.startswith("harmony trains on 1 of the machine's 2 GPUs")
    monkeypatch.setattr("tierplan.studies.evaluate.predict_point", lambda point: best)
    assert main(["compare-policies", "--policies", "planner", *asked, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["planner"]["devices_note"] == best.devices_note


@pytest.mark.parametrize(
    ("num", "sequences", "fewer"),
    [
        (8, 12, [6, 4, 1]),
        (6, 16, [4, 3, 1]),
        (4, 9, [3, 2, 1]),
        (8, 16, [4, 1]),  # half of them is the most that divides the sequences
        (8, 11, [4, 1]),
        (8, 3, [4, 3, 1]),
        (8, 0, [4, 1]),  # each has the micro-batches that are asked for, however many there are
        (5, 0, [3, 1]),
        (2, 16, [1]),
        (1, 16, []),
    ],
)
def test_which_numbers_of_gpus_are_asked(num: int, sequences: int, fewer: list[int]) -> None:
    assert fewer_devices(num, sequences) == fewer


@pytest.mark.parametrize(("num", "fewer"), [(3, [2, 1]), (6, [4, 3, 1]), (7, [4, 1]), (8, [4, 1])])
def test_those_are_asked_that_can_cut_operators_where_all_cannot(num: int, fewer: list[int]) -> None:
    assert fewer_devices(num, 1, cuts=lambda devices: 32 % devices == 0) == fewer


def test_three_gpus_are_not_slower_than_the_two_of_them_that_can_cut_operators() -> None:
    """Of 16 heads. What all found was stages, and two were looked at by a short search, which found none as quick."""
    few = {"gpu.count": 3, "gpu.capacity": "2 GiB", "host.capacity": "40 GiB"}
    point = Point(model="gpt2-medium", machine="desktop-4090", sequences=1, seq=1024, overrides=few)
    of_three, of_two = (best_plan(replace(point, devices=devices)).result for devices in (3, 2))
    assert of_three.step_s <= of_two.step_s
    assert of_three.plan.devices == 2


@pytest.mark.parametrize(
    ("num", "sequences", "fewer"), [(8, 12, 6), pytest.param(6, 16, 4, marks=pytest.mark.nightly), (4, 9, 3)]
)
def test_more_gpus_are_not_slower_where_fewer_divide_the_sequences(
    model: str, num: int, sequences: int, fewer: int
) -> None:
    """8 GPUs got 28 % fewer tokens/s of 12 sequences than 6 of them: only half of them was asked."""
    point = Point(model="gpt2", machine="dgx-8xa100-80gb", seq=1024, sequences=sequences, devices=num)
    answer = predict_point(point)
    plain = predict_point(replace(point, devices=fewer, policy="ddp"))
    assert answer.tokens_per_s is not None
    assert plain.tokens_per_s is not None
    assert answer.tokens_per_s >= plain.tokens_per_s
    assert (answer.devices, plain.devices) == (fewer, fewer)


def test_more_gpus_are_not_slower_where_fewer_do_better_with_another_kind_of_plan(model: str) -> None:
    """Four exchange gradients, since two micro-batches do not fill a pipeline of four stages. Two are stages that send
    activations alone. A look at two with the plan of four said that they are slower."""
    point = Point(
        model="gpt-1.3b",
        machine="ssdtrain-a100",
        seq=512,
        batch=2,
        accumulation=2,
        overrides={"gpu.part": "h100-sxm-80gb", "host.capacity": "256GiB", "gpu.count": 4},
    )
    two, four = (predict_point(replace(point, devices=num)).tokens_per_s for num in (2, 4))
    assert two is not None
    assert four is not None
    assert four >= two * (1 - 1e-9)


@pytest.mark.parametrize(("gib", "found"), [(64, "2 layers with 38 blocks"), (0.0088, "2 layers with 12 blocks")])
def test_beyond_the_largest_of_a_family_depth_grows(
    gib: float, found: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def two(training: Training) -> list[Workload]:
        return [workload_of(f"{n} layers", CONFIG | {"n_layer": n}, training) for n in (1, 2)]

    monkeypatch.setattr("tierplan.planner.questions.largest.family", two)
    host = ["--set", f"host.capacity={gib} GiB", "--set", "host.reserve=0", "--option", "gradients=streamed"]
    assert main(["simulate", "--policy", "zero-offload", "--max-model", *TWO, *host]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"zero-offload: {found} on desktop-4090, 2 of its 2 GPUs")
    assert ("the next size, 2 layers with 15 blocks, does not fit" in out) == (gib < 1)
    assert ("this is the deepest that was looked at: larger models may fit too" in out) == (gib == 64)


@pytest.mark.parametrize(
    ("policy", "has", "batch"),
    [
        ("ddp", "one micro-batch of 2 sequences on each of 2 GPUs, 64 tokens each", "2 x 1 per GPU"),
        ("megatron-tp", "one micro-batch of 2 sequences, which 2 GPUs share, 64 tokens each", "2 x 1"),
        ("harmony", "one micro-batch of 2 sequences, 64 tokens each", "2 x 1"),
    ],
)
def test_what_a_step_has_is_said_in_the_same_words(
    model: str, capsys: pytest.CaptureFixture[str], policy: str, has: str, batch: str
) -> None:
    """A step of 16,384 tokens was said to have one micro-batch of 2 sequences of 1024, which each of 8 GPUs has."""
    asked = ["simulate", "--policy", policy, "--model", model, *TWO]
    assert main([*asked, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["tokens"] == (256 if "on each" in has else 128)
    assert main(asked) == 0
    assert f"a step has {has}" in " ".join(capsys.readouterr().out.split())
    point = Point(model=model, machine="desktop-4090", policy=policy, batch=2, seq=64, overrides={"gpu.count": 2})
    assert question_text(point, record, "bf16") == has
    limits = {"limits": [], "limited_by": "", "devices_note": None}
    assert shown_row(point, {**record, **limits}, PriceList(), 1e6)["how"] == has
    assert batch_text(2, 1, record["tokens"] // 128) == batch


def test_plan_and_advise_say_how_many_gpus_have_the_micro_batches(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("plan", "advise"):
        assert main([command, "--model", model, *ASKED[command], "--json"]) == 0
        record = json.loads(capsys.readouterr().out)
        assert main([command, "--model", model, *ASKED[command]]) == 0
        text = " ".join(capsys.readouterr().out.split())
        num = record["tokens"] // (64 * record["micro_batch"] * record["accumulation"])
        assert num == record["devices"] == 2, "each has micro-batches of its own"
        assert "on each of 2 GPUs, 64 tokens each" in text
        assert command == "plan" or re.search(r"this plan +\d+ x \d+ per GPU", text)


def test_one_token_is_one() -> None:
    assert step_text(1, 1, 1, 1, 1) == "one micro-batch of 1 sequence, 1 token each"


@pytest.mark.parametrize(
    ("model", "lora", "num"), [("llama-3.1-8b", "r=16,alpha=32,targets=all-linear", 2), ("gpt2-xl", "", 1)]
)
def test_a_moment_s_look_at_several_gpus_is_of_the_sequences_asked(model: str, lora: str, num: int) -> None:
    """Operators that are cut, and stages: plans were looked for in as many micro-batches for each GPU, and 16 sequences
    a step were the answer for 2."""
    asked = Point(model=model, machine="server-8xh100", sequences=num, lora=lora, overrides={"gpu.capacity": "10 GiB"})
    asked = replace(asked, planner_s=0.5, policy=QUICK)
    best = best_plan(asked)
    assert best.result.plan.num_batches == 1
    look, only = _like(asked, best.known)
    again = best_plan(look, **only)
    assert again.result.prediction.tokens == best.result.prediction.tokens == num * asked.seq
    assert again.result.step_s <= best.result.step_s * (1 + 1e-6)


def test_a_step_is_of_the_sequences_asked_where_none_that_was_searched_fits() -> None:
    """The last thing tried was a sequence for each GPU: 3 a step were the answer for 1."""
    overrides = {"gpu.count": 3, "link.p2p": "300 GB/s"}
    asked = Point(model="llama-3.1-8b", machine="desktop-4090", sequences=1, overrides=overrides, planner_s=0.4)
    try:
        found = best_plan(replace(asked, drive_lifetime_years=1.0))
    except InfeasiblePlan:
        return
    assert found.result.prediction.tokens == asked.seq
