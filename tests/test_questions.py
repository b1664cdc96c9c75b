"""What a new user asks, as it is typed: a right answer, or what cannot be answered and what is nearest."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import pytest

from tierplan.cli import main
from tierplan.planner.search import budget

SMALL = ["--model", "gpt2", "--machine", "desktop-4090", "--batch", "4", "--seq", "256"]
LARGE = ["--model", "llama-3.1-8b", "--machine", "desktop-4090"]
DIVIDED = [*LARGE, "--batch", "8"]
heavy = pytest.mark.nightly


@pytest.fixture(autouse=True)
def short_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "OPS_PER_S", 300)
    monkeypatch.setattr(budget, "DEFAULT_OPS", 3_000)


def planned(capsys: pytest.CaptureFixture[str], *asked: str) -> dict[str, Any]:
    status = main(["plan", *asked, "--json"])
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (status == 0) == answer.get("fits", True)
    return answer


def speeds(capsys: pytest.CaptureFixture[str], asked: list[str], settings: list[list[str]]) -> list[float]:
    """Tokens per second with each of the settings; 0 where nothing fits."""
    return [float(planned(capsys, *asked, *more).get("tokens_per_s") or 0.0) for more in settings]


def rising(found: list[float]) -> bool:
    """Within what a search may miss: of machines with one limit, the better one came out 3 % slower."""
    return all(after >= 0.95 * before for before, after in pairwise(found))


@pytest.mark.parametrize("asked", [SMALL, pytest.param(DIVIDED, marks=heavy)], ids=("small", "8b"))
def test_3090_or_4090_or_5090_or_h100(asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    cards = ("rtx-3090", "rtx-4090", "rtx-5090", "h100-sxm-80gb")
    found = speeds(capsys, asked, [["--set", f"gpu.part={card}"] for card in cards])
    assert rising(found)
    assert found[0] > 0
    assert asked is DIVIDED or found[3] > 2 * found[0]


@heavy
def test_more_memory_or_drives_is_never_slower(capsys: pytest.CaptureFixture[str]) -> None:
    memory = speeds(capsys, DIVIDED, [["--set", f"host.capacity={size} GiB"] for size in (64, 128)])
    assert memory[1] > 1.5 * memory[0]
    drives = speeds(capsys, DIVIDED, [["--set", f"nvme.drives={number}"] for number in (1, 2, 3, 4)])
    assert rising(drives)


def test_no_master_copy_takes_less_memory_and_no_more_time(capsys: pytest.CaptureFixture[str]) -> None:
    with_it, without = planned(capsys, *SMALL), planned(capsys, *SMALL, "--no-master-weights")
    assert without["step_s"] <= 1.02 * with_it["step_s"]
    assert sum(without["peak_bytes"].values()) < sum(with_it["peak_bytes"].values())


def test_accumulation_is_more_work_in_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    one, four = (planned(capsys, *SMALL, "--accumulation", str(number)) for number in (1, 4))
    assert one["step_s"] < four["step_s"] <= 4.1 * one["step_s"]


def test_two_gpus_are_quicker_than_one(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [*SMALL[:4], "--sequences", "8", "--seq", "512"]
    one, by_count, by_devices = speeds(capsys, asked, [[], ["--set", "gpu.count=2"], ["--devices", "2"]])
    assert one < by_count == by_devices


@heavy
def test_mixtral_says_what_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    answer = planned(capsys, "--model", "mixtral-8x7b", "--machine", "desktop-4090", "--batch", "4")
    assert answer.get("step_s") or "short by at least" in answer["reason"]


def test_long_sequences_say_that_logits_are_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    reason = planned(capsys, *LARGE, "--seq", "32768", "--sequences", "1")["reason"]
    assert "are logits and loss: fewer tokens in a micro-batch need less" in reason
    assert "a loss in chunks (--loss-chunks 8)" in reason
    assert planned(capsys, *LARGE, "--seq", "32768", "--sequences", "1", "--loss-chunks", "16")["step_s"]
    assert "short by" in planned(capsys, "--model", "gpt-175b", "--machine", "laptop", "--sequences", "1")["reason"]


def test_no_device_is_said_to_hold_more_logits_than_its_peak(capsys: pytest.CaptureFixture[str]) -> None:
    """Eight GPUs divide the last unit, too; and sub-batches do."""
    asked = ["plan", "--time-limit", "1", "--model"]
    eight = [*asked, "llama-3.1-8b", "--machine", "server-8xh100", "--seq", "131072", "--sequences", "8"]
    parts = [*asked, "gpt2", "--machine", "desktop-4090", "--batch", "256", "--set", "gpu.capacity=12 GiB"]
    for words, how in ((eight, "which divide every operator"), (parts, "sub-batches")):
        assert main(words) == 0
        told = " ".join(capsys.readouterr().out.split())
        assert how in told
        peak = re.search(r"peak gpu\S* ([\d.]+) GiB", told)
        assert peak
        for loss in re.findall(r"([\d.]+) GiB are logits and loss", told):
            assert float(loss) <= float(peak[1])


def test_a_card_without_bf16_says_so_in_the_first_lines(capsys: pytest.CaptureFixture[str]) -> None:
    for card, dtype in (("v100-sxm2-32gb", "fp16"), ("gtx-1080-ti", "fp32")):
        assert main(["plan", *SMALL, "--set", f"gpu.part={card}"]) == 0
        first = capsys.readouterr().out.splitlines()[:3]
        assert f"in {dtype} since this machine has no bf16" in " ".join(" ".join(first).split())
        assert max(map(len, first)) <= 80
    assert main(["plan", *SMALL]) == 0
    assert "since this machine" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--peft"], "adapters: --lora r=16,targets=all-linear"),
        (["--optimizer", "adamw8bit"], "did you mean 'adamw:states=8bit'? choose among adamw, sgd, lion"),
        (["--dtype", "fp8"], "a quantised base: --base nf4"),
        (["--load-in-4bit"], "a quantised base: --base nf4"),
        (["--gradient-checkpointing"], "is the plan's to choose"),
        (["--gpus", "2"], "--devices N"),
        (["--gpu", "rtx-4090"], "--set gpu.part=NAME"),
        (["--ram", "128"], "--set host.capacity="),
        (["--dpo"], "only supervised training is planned: DPO"),
        (["--tp", "2"], "how GPUs share the work is the plan's to choose"),
        (["--nodes", "2"], "one machine is planned"),
        (["--context-length", "4096"], "--seq"),
        (["--batch-size", "4"], "nearest: --batch"),
        (["--set", "gpu.part=4090"], "did you mean rtx-4090?"),
        (["--set", "gpu.part=RTX 4090"], "did you mean rtx-4090?"),
        (["--set", "gpu.part=NVIDIA GeForce RTX 4090"], "did you mean rtx-4090?"),
        (["--set", "gpu.part=mi250x"], "of AMD's GPUs the catalog has the mi300x"),
        (
            ["--machine", "rtx-3090"],
            "that is a GPU: give a machine to put it into, such as desktop-4090, and --set gpu.",
        ),
        (["--machine", "NVIDIA A100"], "--set gpu.part=a100-pcie-40gb or --set gpu.part=a100-pcie-80gb"),
        (["--machine", "RTX 4090"], "and --set gpu.part=rtx-4090; the catalog has"),
        (["--machine", "h100"], "--set gpu.part=h100-pcie-80gb or --set gpu.part=h100-sxm-80gb"),
        (["--machine", "m2-ultra"], "Apple's memory, which CPU and GPU share, is not planned yet"),
        (["--machine", "macbook-pro"], "Apple's memory"),
        (["--model", "mixtral"], "did you mean 'mixtral-8x7b'?"),
        (["--model", "llama3"], "'llama-3.2-1b' or 'llama-3.2-3b' or 'llama-3.1-8b' or 'llama-3.3-70b'"),
        (["--model", "Llama-3.1"], "did you mean 'llama-3.1-8b' or 'llama-3.1-405b'?"),
        (["--model", "folder/config.json"], "there is no file 'folder/config.json'"),
        (["--set", "gpu.capacity=24"], 'did you mean "24 GiB"?'),
        (["--set", "gpu.capacity=24 TB"], "which nothing reaches; check its unit"),
        (["--set", "nvme.read=7000"], 'did you mean "7 GB/s"?'),
        (["--set", "nvme.write=5"], 'did you mean "5 GB/s"?'),
        (["--set", "nvme.read=7000 GB/s"], "which nothing reaches; check its unit"),
        (["--batch", "1e8"], "'1e8' is no whole number"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_asked_yet_says_what_is_nearest(
    asked: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["plan", *LARGE, *asked])
    except SystemExit as stopped:
        status = int(stopped.code or 0)
    printed = capsys.readouterr()
    assert status in (1, 2)
    assert said in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_the_words_of_our_own_options_are_no_hints() -> None:
    from tierplan.commands.options.not_yet import nearest

    assert nearest("no machine 'mymachine'") == nearest("no option --bacth") == nearest("no part 'rtx-6090'") == ""


def test_an_amd_card_by_its_data_sheet_is_quicker_than_a_4090(capsys: pytest.CaptureFixture[str]) -> None:
    sheet = ("gpu.capacity=192 GB", "gpu.memory_bandwidth=5.3 TB/s", "gpu.peak_bf16=1307 TFLOP/s")
    mi300x = [word for setting in sheet for word in ("--set", setting)]
    now, then = speeds(capsys, SMALL, [[], mi300x])
    assert then > 2 * now


@pytest.mark.parametrize(("policy", "is_coded"), [("ssdtrain", True), ("full-recompute", False)])
def test_numbers_are_others_where_activations_are_coded(
    policy: str, is_coded: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the ops of the schedule, and the same for every command: what stays or is made again is not coded."""
    simulated = ["simulate", "--policy", policy, *SMALL]
    assert main([*simulated, "--acts", "fp8"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert ("not of plain training: activations leave the device in fp8" in said) == is_coded
    assert ("no activation leaves the device in fp8, so --acts changes nothing" in said) != is_coded
    assert main([*simulated, "--acts", "fp8", "--json"]) == 0
    why = "activations leave the device in fp8" if is_coded else None
    assert json.loads(capsys.readouterr().out)["other_numbers"] == why
    assert main(simulated) == 0
    assert "numbers" not in capsys.readouterr().out
    assert main(["compare-policies", "--policies", policy, *SMALL, "--acts", "fp8"]) == 0
    table = capsys.readouterr().out
    assert (f"{policy}* " in table) == ("* other numbers than plain training's: activations leave" in table) == is_coded


def test_a_plan_says_of_each_published_system_whose_numbers_it_trains(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, *SMALL, "--acts", "fp8")["policies"]
    assert not found["ssdtrain"]["same_numbers"]
    assert found["full-recompute"]["same_numbers"]
