"""Which calibration is taken for a question, what is said of it, and what it changes in every command's answer."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.configs import config_of
from tierplan.cli import main
from tierplan.hwmodels import load_machine
from tierplan.hwmodels.machine import CATALOG, Machine
from tierplan.hwmodels.scaling import with_ample_memory
from tierplan.planner.lowering import lower
from tierplan.runtime.data.synthetic import versions
from tierplan.sim.analysis.steady import steady_state
from tierplan.sim.workloads.models import workload_of
from tierplan.sim.workloads.workload import Training, Workload
from tierplan.validation.calibration.calibration import (
    Calibration,
    CalibrationError,
    StreamFit,
    UnitFit,
    machine_sha256,
)
from tierplan.validation.calibration.known import (
    FAMILY_HALF_WIDTH,
    NONE,
    OTHER_HALF_WIDTH,
    CalibratedPlace,
    calibration_config,
    calibrations_dir,
    eligible_paths,
    own_path,
    place_for,
)
from tierplan.validation.calibration.plans import calibration_plans
from tierplan.validation.calibration.transfer import FAMILY, learnt_half_width, transfer_lines, transfers

MACHINE = "desktop-4090"
TRAINING = Training(per_device_train_batch_size=2, sequence_length=32, dtype="fp32")
TWICE = UnitFit(forward=2.0, backward=2.0, recompute=2.0, saved=(), spread=0.0)


def calibration_of(family: str, machine: Machine, **changes: object) -> Calibration:
    """Computations take twice as long as described, copies to the device have half the rate."""
    half = StreamFit(latency_s=1e-4, beside_s=0.0, wake_s=0.0, rates={"bytes": 0.5}, demand=1.0)
    found = Calibration(
        model=family,
        config=calibration_config(config_of(family), 2),
        training=TRAINING,
        units=dict.fromkeys(("embed", "block", "head"), TWICE),
        streams={"gpu0.h2d": half},
        drive_contention=1.0,
        in_memory_step_s=1.0,
        measured_step_s={"a": 1.0, "b": 1.0},
        checks={"a": 1.05, "b": 0.95},
        slowdowns=(1.0, 1.0),
        machine=machine.name,
        machine_sha256=machine_sha256(machine),
        when="2026-01-01 00:00 UTC",
    )
    return replace(found, **changes)  # type: ignore[arg-type]


def workload(family: str = "gpt2", **training: int) -> Workload:
    return workload_of(family, config_of(family), replace(TRAINING, **training))


@pytest.fixture
def data_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr("tierplan.validation.calibration.known.version", lambda name: "1.0")
    return tmp_path


VERSIONS = {"torch": "1.0", "transformers": "1.0"}


def place(asked: Workload, machine: Machine, which: str = "auto") -> CalibratedPlace:
    return place_for(machine, asked.training, lambda: asked, which=which)


@pytest.mark.usefixtures("data_home")
def test_the_nearest_of_the_users_own_is_taken() -> None:
    """The same units first, then the same family, then any, each with a wider interval; the newest of several."""
    machine = load_machine(MACHINE)
    for family in ("llama", "gpt2"):
        calibration = calibration_of(family, machine, versions=VERSIONS)
        calibration.save(own_path(calibration))
    own = calibration.half_width
    exact, longer, other = (
        place(asked, machine) for asked in (workload(), workload(sequence_length=64), workload("opt"))
    )
    assert exact.calibration == calibration
    assert exact.machine.basis.half_width == own
    assert "calibrated here with gpt2, 2 x 32 tokens, 2026" in exact.machine.basis.text
    assert longer.calibration == calibration
    assert longer.machine.basis.half_width**2 == pytest.approx(own**2 + FAMILY_HALF_WIDTH**2)
    assert other.calibration is not None
    assert other.machine.basis.half_width**2 == pytest.approx(own**2 + OTHER_HALF_WIDTH**2)
    assert "carried over" in other.machine.basis.text
    slow, plain = exact.timed(workload()).blocks[0], machine.cost("gpu0.compute", workload().blocks[0].forward)
    assert slow.forward["s"] == pytest.approx(2 * plain.work_s)
    assert exact.machine.stream("gpu0.h2d").latency_s == 1e-4
    assert place(workload(), machine, NONE) == CalibratedPlace(described=machine, machine=machine)


@pytest.mark.usefixtures("data_home")
@pytest.mark.parametrize("other", [{"lora": "r=4"}, {"loss_chunks": 2}, {"padded": True}, {"freeze": "*wte*"}], ids=str)
def test_one_of_other_units_is_carried_over_and_is_not_replaced(other: dict[str, object]) -> None:
    """Of one model, batch and length, units differ by what is trained, and by how the loss is computed."""
    machine, asked = load_machine(MACHINE), workload("llama")
    full = calibration_of("llama", machine, versions=VERSIONS)
    full.save(own_path(full))
    tuned = replace(asked, training=replace(TRAINING, **other), computed_for=None)
    assert "carried over" in place(tuned, machine).machine.basis.text
    assert "carried over" not in place(asked, machine).machine.basis.text
    own = replace(full, training=tuned.training)
    own.save(own_path(own))
    for question, taken in ((asked, full), (tuned, own)):
        assert place(question, machine).calibration == taken
        assert "carried over" not in place(question, machine).machine.basis.text


@pytest.mark.usefixtures("data_home")
def test_calibrations_for_other_optimizers_stand_side_by_side() -> None:
    machine, asked = load_machine(MACHINE), workload()
    for optimizer in ("adamw", "sgd"):
        one = calibration_of("gpt2", machine, versions=VERSIONS, training=replace(TRAINING, optimizer=optimizer))
        one.save(own_path(one))
    assert len(eligible_paths(machine)) == 2
    found = place(asked, machine).calibration
    assert found is not None
    assert found.training.optimizer == "adamw"


@pytest.mark.parametrize("kind", ["dangling", "folder", "forbidden"])
def test_what_cannot_be_read_is_passed_over(kind: str, data_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link to nothing, a folder, a file of another user: the best of the others is taken, or none."""
    machine = replace(load_machine(MACHINE), basis=replace(CATALOG, text="measured here"))
    odd = calibrations_dir() / "odd.json"
    odd.parent.mkdir(parents=True)
    if kind == "dangling":
        odd.symlink_to(data_home / "nowhere")
    elif kind == "folder":
        odd.mkdir()
    else:
        odd.write_text("{}")
        read = Path.read_bytes

        def refuse(path: Path) -> bytes:
            if path == odd:
                raise PermissionError(13, "Permission denied", str(path))
            return read(path)

        monkeypatch.setattr(Path, "read_bytes", refuse)
    found = place(workload(), machine)
    assert found.calibration is None
    assert found.machine.basis.text == (
        "measured here; odd.json passed over: it cannot be read, is broken, or is of another version of tierplan"
    )
    calibration = calibration_of("gpt2", machine, versions=VERSIONS)
    calibration.save(own_path(calibration))
    assert eligible_paths(machine) == [own_path(calibration)]
    assert place(workload(), machine).calibration == calibration


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        ("units.block", None, r"units has \['embed', 'head'\]; it must have embed, block, head, and no others"),
        ("units.block.forward", 0, r"units\['block'\].forward is 0; it must be a number > 0.0"),
        ("units.block.forward", math.inf, "the number 1e999 is too large; amounts are finite"),
        ("units.block.backward", 0, r"units\['block'\].backward is 0; where all is trained, it must be above 0"),
        ("units.block.recompute", -1.0, r"units\['block'\].recompute is -1.0; it must be a number >= 0.0"),
        ("units.block.saved", [-1.0], r"units\['block'\].saved\[0\] is -1.0; it must be a number >= 0.0"),
        ("units.block.spread", -1, r"units\['block'\].spread is -1; it must be a number >= 0.0"),
        ("streams.gpu0.h2d", 3, r"streams\['gpu0.h2d'\] is 3; it must be an object"),
        ("rates", {"bytes": 0.0}, r"streams\['gpu0.h2d'\].rates\['bytes'\] is 0.0; it must be a number > 0.0"),
        ("demand", -1, r"streams\['gpu0.h2d'\].demand is -1; it must be a number >= 0.0"),
        ("latency_s", -1, r"streams\['gpu0.h2d'\].latency_s is -1; it must be a number >= 0.0"),
        ("drive_contention", 0, "drive_contention is 0; it must be a number > 0.0"),
        ("in_memory_step_s", -1.0, "in_memory_step_s is -1.0; it must be a number > 0.0"),
        ("checks", {"a": 0.0}, r"checks\['a'\] is 0.0; it must be a number > 0.0"),
        ("checks", {"c": 1.0}, r"checks has plan 'c'; it must be one of measured_step_s: \['a', 'b'\]"),
        ("slowdowns", [1.0, -1.0], r"slowdowns\[1\] is -1.0; it must be a number > 0.0"),
        ("slowdowns", [1.0], "measured_step_s has 2 plans and slowdowns 1 turns; there must be a plan, and a turn"),
        ("config", {"n_layer": "x"}, "config.n_layer is 'x'; it must be a whole number >= 1"),
        ("num_ranks", 0, "num_ranks is 0; it must be a whole number >= 1"),
    ],
)
def test_a_file_with_what_no_calibration_gives_is_refused(
    tmp_path: Path, where: str, value: object, message: str
) -> None:
    calibration_of("gpt2", load_machine(MACHINE)).save(tmp_path / "c.json")
    record = json.loads((tmp_path / "c.json").read_text())
    Calibration.load(tmp_path / "c.json")
    part = record["streams"]["gpu0.h2d"] if where in record["streams"]["gpu0.h2d"] else record
    names = ["streams", "gpu0.h2d"] if where == "streams.gpu0.h2d" else where.split(".")
    for name in names[:-1]:
        part = part[name]
    part[names[-1]] = value
    if value is None:
        del part[names[-1]]
    (tmp_path / "c.json").write_text(json.dumps(record).replace("Infinity", "1e999"))
    with pytest.raises(CalibrationError, match=rf"c\.json is not a calibration as .* writes it: {message}"):
        Calibration.load(tmp_path / "c.json")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"machine_sha256": "0"},
            "it is of another machine, or of this one as it was measured before 2026-01-01 00:00",
        ),
        ({"training": replace(TRAINING, dtype="bf16")}, "its dtype is bf16, not fp32"),
        ({"versions": {"torch": "0.9"}}, "it is of torch 0.9, and 1.0 is installed"),
    ],
)
def test_what_does_not_suit_is_passed_over_or_refused_by_name(
    data_home: Path, changes: dict[str, object], why: str
) -> None:
    machine = replace(load_machine(MACHINE), basis=replace(CATALOG, text="measured here"))
    calibration = calibration_of("gpt2", machine, **{"versions": VERSIONS, **changes})
    calibration.save(own_path(calibration))
    found = place(workload(), machine)
    assert found.calibration is None
    passed_over = f"measured here; {re.escape(own_path(calibration).name)} passed over: {why}"
    assert re.fullmatch(rf"{passed_over}( UTC)?", found.machine.basis.text)
    calibration.save(data_home / "mine.json")
    with pytest.raises(CalibrationError, match=rf"mine\.json does not suit: {why}.*run tierplan calibrate"):
        place(workload(), machine, str(data_home / "mine.json"))


def test_a_calibration_made_here_suits_where_torch_says_more_of_itself_than_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that for CUDA: "it is of torch 2.11.0+cu130, and 2.11.0 is installed"."""
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    machine = load_machine(MACHINE)
    calibration_of("gpt2", machine, versions=versions()).save(tmp_path / "mine.json")
    assert place(workload(), machine, str(tmp_path / "mine.json")).calibration is not None


def test_parts_that_are_no_longer_there_have_no_calibration(data_home: Path) -> None:
    """A CPU's calibration was carried over to a card that `--set gpu.part` named: `advise` ranked cards by it."""
    machine = load_machine(MACHINE)
    half = StreamFit(latency_s=1e-4, beside_s=0.0, wake_s=0.0, rates={"bytes": 0.5}, demand=1.0)
    streams = dict.fromkeys(("gpu0.h2d", "nvme.read"), half)
    calibration_of("gpt2", machine, streams=streams, versions=VERSIONS).save(data_home / "mine.json")

    def found(setting: str) -> CalibratedPlace:
        changed, which = load_machine(MACHINE, [setting]), str(data_home / "mine.json")
        return place_for(changed, TRAINING, workload, which=which, unchanged=machine)

    card, drive = found("gpu.part=rtx-3060"), found("nvme.part=t700")
    assert card.calibration is None
    assert card.machine.streams == card.described.streams
    assert "; mine.json passed over: it is of another GPU" in card.machine.basis.text
    assert drive.machine.stream("nvme.read") == drive.described.stream("nvme.read")
    assert drive.machine.stream("gpu0.h2d").latency_s == 1e-4
    assert found("gpu.part=rtx-4090").calibration is not None, "the same part again"


def test_commands_take_it_and_say_so(data_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step takes about twice as long, its interval is the calibration's, and more memory does not void it."""
    (data_home / "gpt2.json").write_text(json.dumps(config_of("gpt2")))
    calibration = calibration_of("gpt2", load_machine(MACHINE), versions=VERSIONS)
    calibration.save(data_home / "mine.json")
    asked = ["simulate", "--policy", "in-memory", "--model", str(data_home / "gpt2.json"), "--machine", MACHINE]
    asked += ["--batch", "2", "--seq", "32", "--dtype", "fp32", "--json"]
    answers = []
    for more in (
        ["--calibration", "none"],
        ["--calibration", str(data_home / "mine.json")],
        ["--calibration", str(data_home / "mine.json"), "--set", "host.capacity=512 GiB"],
    ):
        assert main([*asked, *more]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    plain, calibrated, roomy = answers
    assert plain["basis"].startswith("catalog")
    assert calibrated["basis"].startswith("calibrated here with gpt2")
    assert calibrated["model_flops_per_s"] is None, "it was 0: a calibration gives seconds"
    low_s, high_s = calibrated["interval_s"]
    assert low_s < calibrated["step_s"] < high_s
    assert high_s / low_s < plain["interval_s"][1] / plain["interval_s"][0]
    assert (roomy["step_s"], roomy["basis"]) == (calibrated["step_s"], calibrated["basis"])


def test_models_are_predicted_from_the_calibrations_of_others() -> None:
    """Two families on one machine: what was measured is what the first's calibration says, so the second's, whose
    computations take 1.5 times as long, is off by as much, and so is its family's interval."""
    machine = with_ample_memory(load_machine(MACHINE))
    steps = {}
    for family in ("gpt2", "opt"):
        c = calibration_of(family, machine)
        modelled = workload_of(family, dict(c.config), c.training)
        timed, inside = c.timed(modelled, machine), c.on(machine)
        plan = calibration_plans(timed, inside)["in-memory"]
        steps[family] = {"in-memory": steady_state(lower(plan, timed, inside), inside).period_s}
    slower = replace(TWICE, forward=3.0, backward=3.0, recompute=3.0)
    first = calibration_of("gpt2", machine, measured_step_s=steps["gpt2"])
    second = calibration_of("opt", machine, measured_step_s=steps["opt"], units=dict.fromkeys(first.units, slower))
    elsewhere = replace(first, machine_sha256="0")
    found = transfers([first, second, elsewhere], machine, lambda c: workload_of(c.model, dict(c.config), c.training))
    ratios = {(t.source, t.target): t.ratio for t in found}
    assert len(found) == 4
    assert ratios["gpt2", "gpt2"] == ratios["gpt2", "opt"] == pytest.approx(1.0)
    assert 1.3 < ratios["opt", "gpt2"] < 1.51
    assert learnt_half_width(found, FAMILY) is None
    lines = transfer_lines(found)
    assert any(f"{100 * (ratios['opt', 'gpt2'] - 1):.1f} %" in line for line in lines)
    assert "another family: 9 in 10 are off" in lines[-1]


def test_a_shallow_model_has_fewer_blocks_and_what_lists_them() -> None:
    config = {"model_type": "x", "num_hidden_layers": 6, "layer_types": list("abcdef"), "sizes": [1, 2]}
    assert calibration_config(config) == {**config, "num_hidden_layers": 3, "layer_types": ["a", "b", "c"]}
    assert calibration_config({"n_layer": 2}) == {"n_layer": 2}


def test_predictions_from_a_calibration_need_no_torch() -> None:
    code = "import sys, tierplan.studies.evaluate; raise SystemExit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
