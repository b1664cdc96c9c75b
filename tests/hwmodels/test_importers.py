"""Importers: real tools' output becomes a machine; damaged or partial files say what is wrong."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tierplan.cli import main
from tierplan.hwmodels import MachineError, load_description, load_machine
from tierplan.hwmodels.importers.ds_io import read_ds_io
from tierplan.hwmodels.importers.fio import read_fio
from tierplan.hwmodels.importers.nccl_tests import read_nccl_tests
from tierplan.hwmodels.importers.nvbandwidth import read_nvbandwidth
from tierplan.hwmodels.importers.nvidia_smi import read_nvidia_smi
from tierplan.hwmodels.importers.reading import ImportedFileError

SAMPLES = Path(__file__).parent / "samples"


def sample(name: str) -> str:
    return (SAMPLES / name).read_text(encoding="utf-8")


# ---- fio


def test_fio_gives_reads_writes_and_the_room_for_both() -> None:
    values = read_fio(sample("fio.json"), where="fio.json")
    jobs = {job["jobname"]: job for job in json.loads(sample("fio.json"))["jobs"]}
    assert values["nvme.read"].value == jobs["read"]["read"]["bw_bytes"]
    assert values["nvme.write"].value == jobs["write"]["write"]["bw_bytes"]
    mixed = jobs["mixed"]["read"]["bw_bytes"] / jobs["read"]["read"]["bw_bytes"]
    mixed += jobs["mixed"]["write"]["bw_bytes"] / jobs["write"]["write"]["bw_bytes"]
    assert values["nvme.mixed"].value == pytest.approx(mixed)
    assert all(v.basis == "measured" and "fio-3.33" in v.source for v in values.values())


def test_fio_adds_up_jobs_that_ran_together() -> None:
    record = json.loads(sample("fio.json"))
    record["jobs"] = [record["jobs"][0], record["jobs"][0], record["jobs"][1]]
    values = read_fio(json.dumps(record), where="x")
    assert values["nvme.read"].value == 2 * record["jobs"][0]["read"]["bw_bytes"]


def test_fio_gives_no_more_room_than_reads_and_writes_take_that_do_not_meet() -> None:
    record = json.loads(sample("fio.json"))
    for job in record["jobs"]:
        if job["jobname"] == "mixed":
            job["read"]["bw_bytes"] *= 10
    assert read_fio(json.dumps(record), where="x")["nvme.mixed"].value == 2.0


def test_fio_really_run(tmp_path: Path) -> None:
    """fio's own words today, not only those of the sample; without fio the sample has to do."""
    if shutil.which("fio") is None:
        pytest.skip("fio is not installed (Debian: apt-get install fio); the sample of fio 3.33 was read instead")
    jobs = "[global]\ndirectory={0}\nsize=4M\nbs=1M\nioengine=psync\n[r]\nrw=read\n[w]\nstonewall\nrw=write\n"
    (tmp_path / "job.fio").write_text(jobs.format(tmp_path))
    done = subprocess.run(
        ["fio", "--output-format=json", "job.fio"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    values = read_fio(done.stdout, where="fio")
    assert {"nvme.read", "nvme.write"} <= set(values)
    assert "page cache" in values["nvme.read"].source  # direct=1 was not asked for
    (tmp_path / "fio.json").write_text(done.stdout)
    machine_file = tmp_path / "mine.toml"
    arguments = [
        "machine",
        "import",
        "--fio",
        str(tmp_path / "fio.json"),
        "--base",
        "desktop-4090",
        "-o",
        str(machine_file),
    ]
    assert main(arguments) == 0
    machine = load_machine(str(machine_file))
    assert machine.name == "mine"
    assert machine.stream("nvme.read").rates["bytes"].at(1e9) == values["nvme.read"].value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.pop("jobs"), "no jobs"),
        (lambda r: r["jobs"][0].update(error=5), "failed with error 5"),
        (lambda r: r["jobs"][0]["read"].update(bw_bytes="fast"), "bw_bytes of job 'read'"),
        (lambda r: r["jobs"][0].pop("write"), "without read and write results"),
    ],
)
def test_damaged_fio_results_say_what_is_wrong(change, message: str) -> None:  # type: ignore[no-untyped-def]
    record = json.loads(sample("fio.json"))
    change(record)
    with pytest.raises(ImportedFileError, match=message):
        read_fio(json.dumps(record), where="fio.json")


def test_a_file_that_was_cut_off_says_so() -> None:
    with pytest.raises(ImportedFileError, match="not the whole JSON output of fio"):
        read_fio(sample("fio.json")[:2000], where="fio.json")
    with pytest.raises(ImportedFileError, match="holds no JSON"):
        read_fio("fio: command not found", where="fio.json")


# ---- nvbandwidth


def test_nvbandwidth_gives_links_in_both_directions() -> None:
    values = read_nvbandwidth(sample("nvbandwidth.json"), where="n")
    assert values["link.h2d"].value == pytest.approx(25.0e9)
    assert values["link.d2h"].value == pytest.approx(26.3e9)
    assert values["link.both"].value == pytest.approx((18.3 + 19.1) * 1e9)
    assert values["link.p2p"].value == pytest.approx(22.1e9)
    assert values["link.h2d"].spread == pytest.approx(0.1 / 25.0)


def test_nvbandwidth_without_the_needed_tests_names_them() -> None:
    record = json.loads(sample("nvbandwidth.json"))
    record["nvbandwidth"]["testcases"] = record["nvbandwidth"]["testcases"][1:]
    with pytest.raises(ImportedFileError, match="host_to_device_memcpy_ce"):
        read_nvbandwidth(json.dumps(record), where="n")
    record["nvbandwidth"]["error"] = "no CUDA device"
    with pytest.raises(ImportedFileError, match="no CUDA device"):
        read_nvbandwidth(json.dumps(record), where="n")
    with pytest.raises(ImportedFileError, match="not of nvbandwidth"):
        read_nvbandwidth(sample("fio.json"), where="n")


# ---- nvidia-smi


def test_nvidia_smi_finds_the_part() -> None:
    values = read_nvidia_smi(sample("nvidia_smi.csv"), where="s")
    assert values["gpu.part"].value == "h200-sxm-141gb"
    assert values["gpu.count"].value == 1
    assert values["gpu.capacity"].value == 143771 * 2**20


def test_nvidia_smi_has_its_units_in_the_header_alone_with_nounits() -> None:
    text = sample("nvidia_smi.csv")
    without = text.replace(" MiB,", ",").replace(" W,", ",")
    assert without != text
    assert read_nvidia_smi(without, where="s") == read_nvidia_smi(text, where="s")


def test_nvidia_smi_counts_gpus_and_marks_link_speeds_as_nameplate() -> None:
    text = "name, memory.total [MiB], pcie.link.gen.max, pcie.link.width.max\n" + 2 * "NVIDIA A10, 23028 MiB, 4, 16\n"
    values = read_nvidia_smi(text, where="s")
    assert values["gpu.count"].value == 2
    assert "gpu.part" not in values
    assert values["link.h2d"].value == pytest.approx(0.8 * 16 * 1.969e9)
    assert values["link.h2d"].basis == "nameplate"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name\n", "needs a header and one line per GPU"),
        ("memory.total [MiB]\n81559 MiB\n", "not name"),
        ("name, power.limit [W]\nNVIDIA L4\n", "1 cells, but the header 2"),
        ("name\nNVIDIA L4\nNVIDIA A10\n", "different GPUs"),
        ("name, memory.total [MiB]\nNVIDIA L4, plenty\n", "'plenty'"),
    ],
)
def test_damaged_nvidia_smi_says_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(ImportedFileError, match=message):
        read_nvidia_smi(text, where="s")


# ---- nccl-tests


def test_nccl_tests_gives_the_rate_of_each_number_of_gpus_and_the_latency_of_a_step() -> None:
    """On 8 GPUs an all-reduce has 14 steps; the sample's smallest message takes 28 us. Two GPUs have 2 steps."""
    two = "# Rank 0\n# Rank 1\n 8 2 float sum -1 30.0 0.0 0.0 0 1 1 1 0\n 1000 250 float sum -1 9 14.5 14.5 0 1 1 1 0\n"
    values = read_nccl_tests(sample("nccl_all_reduce.txt"), two, where="n")
    assert values["link.collective"].value == ((2.0, 14.5e9), (8.0, pytest.approx(4.27e9)))
    assert values["link.collective_latency"].value == pytest.approx(2e-6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "0 measurements on 0 GPUs"),
        ("# Rank 0\n# Rank 1\n a b c d e f g h i\n", "no measurement"),
        ("# Rank 0\n# Rank 1\n 8 2 float sum -1 30.0 0.0 0.0 0\n", "no bandwidth above 0"),
    ],
)
def test_damaged_output_of_nccl_tests_says_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(ImportedFileError, match=message):
        read_nccl_tests(text, where="n")


# ---- DeepSpeed


def test_ds_io_counts_gib() -> None:
    text = sample("ds_io_read.txt") + sample("ds_io_write.txt")
    values = read_ds_io(text, where="d")
    speed = float(next(line for line in text.splitlines() if line.startswith("E2E Read Speed")).split()[-2])
    assert values["nvme.read"].value == pytest.approx(speed * 2**30)
    assert set(values) == {"nvme.read", "nvme.write"}


def test_ds_nvme_tune_gives_both_directions() -> None:
    values = read_ds_io(sample("ds_nvme_tune.txt"), where="d")
    assert values["nvme.read"].value == pytest.approx(1.60 * 2**30)
    assert values["nvme.write"].value == pytest.approx(4.24 * 2**30)


def test_damaged_deepspeed_output_says_what_is_wrong() -> None:
    with pytest.raises(ImportedFileError, match="save all that"):
        read_ds_io("Testing DeepNVMe python frontend\n", where="d")
    with pytest.raises(ImportedFileError, match="speed of 0"):
        read_ds_io("E2E Read Speed = 0 GB/sec\n", where="d")


# ---- all together


def test_tools_together_make_a_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "box.toml"
    arguments = ["machine", "import", "--name", "box", "-o", str(target), "--set", "host.capacity=128 GiB",
                 "--set", "host.adam=1 G/s", "--set", "nvme.capacity=1 TB"]  # fmt: skip
    for flag, name in (
        ("nvidia-smi", "nvidia_smi.csv"),
        ("nvbandwidth", "nvbandwidth.json"),
        ("ds-io", "ds_nvme_tune.txt"),
    ):
        arguments += [f"--{flag}", str(SAMPLES / name)]
    assert main(arguments) == 0
    machine = load_machine(str(target))
    assert machine.tier("gpu0").capacity_bytes > 130 * 2**30
    assert machine.limits["gpu0.link"] == pytest.approx(37.4e9)
    assert "gpu.memory_bandwidth" in machine.nameplate
    assert "box.toml" in (said := capsys.readouterr().out)
    assert re.search(r"^gpu.capacity = [\d.]+ GiB$", said, re.MULTILINE), "as `machine show` has it"


def test_an_import_that_leaves_gaps_names_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["machine", "import", "--fio", str(SAMPLES / "fio.json"), "-o", str(tmp_path / "x.toml")]) == 1
    assert "gpu.capacity" in capsys.readouterr().err
    assert main(["machine", "import", "-o", str(tmp_path / "x.toml")]) == 1
    assert "--fio" in capsys.readouterr().err


def test_errors_of_imports_are_errors_of_machines() -> None:
    assert issubclass(ImportedFileError, MachineError)


@pytest.mark.parametrize(
    ("base", "part", "summary"),
    [
        ("fuyou-4090", "NVIDIA GeForce RTX 3090", "imported from smi.csv on fuyou-4090"),
        ("desktop-4090", "NVIDIA GeForce RTX 4090", "A desktop: RTX 4090, 64 GB of DDR5, one PCIe 4.0 drive"),
    ],
)
def test_another_part_leaves_nothing_of_what_the_base_says_of_its_own(
    base: str, part: str, summary: str, tmp_path: Path
) -> None:
    (tmp_path / "smi.csv").write_text(f"name, memory.total [MiB]\n{part}, 24576 MiB\n", encoding="utf-8")
    target = str(tmp_path / "mine.toml")
    given = ["--base", base, "--nvidia-smi", str(tmp_path / "smi.csv"), "--output", target]
    assert main(["machine", "import", *given]) == 0
    description = load_description(target)
    assert description.summary == summary
    assert "gpu.matmul_fp16" not in description.values  # fuyou-4090's calibration of its own card


def test_a_gpu_that_the_catalog_does_not_have_is_not_taken_for_the_bases(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "smi.csv").write_text("name, memory.total [MiB]\nRTX 9090, 65536 MiB\n", encoding="utf-8")
    target = str(tmp_path / "mine.toml")
    given = ["machine", "import", "--base", "fuyou-4090", "--nvidia-smi", str(tmp_path / "smi.csv"), "-o", target]
    assert main(given) == 1
    said = capsys.readouterr().err
    assert "add it; the catalog has no GPU of this name: give gpu.memory_bandwidth and a peak, such as" in said
    assert not Path(target).exists(), "no machine"
    sheet = ["--set", "gpu.memory_bandwidth=2 TB/s", "--set", "gpu.peak_fp16=400 TFLOP/s"]
    assert main([*given, *sheet]) == 0
    description = load_description(target)
    assert "gpu.part" not in description.values
    assert description.summary == "imported from smi.csv on fuyou-4090"
