"""Measuring: what comes out is complete, has a spread for every number, and is found again as `here`."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.runtime.models import make_model, schedule_for
from tierplan.cli import main
from tierplan.hwmodels import Machine, MachineError, load_description, load_machine
from tierplan.hwmodels.build import build_machine
from tierplan.hwmodels.catalog import here_path
from tierplan.hwmodels.description import Quantity, write_description
from tierplan.planner.plan import UnitPlan
from tierplan.runtime.execution.device import Device
from tierplan.runtime.execution.executable import executable_step
from tierplan.runtime.execution.fake_device import FakeCuda
from tierplan.runtime.execution.placement import TrainingError
from tierplan.runtime.measure import machine as module
from tierplan.runtime.measure import report
from tierplan.runtime.measure.loads import GIB, Load, Sizes, TransformerBlock, block_work, loads
from tierplan.runtime.measure.machine import MeasurementError, measure_description
from tierplan.runtime.measure.timing import LEAST_SPREAD, OtherPrograms, StreamThreads, summary
from tierplan.runtime.memory.arena import HOST_GIB, system_bytes
from tierplan.runtime.tracing.trace import trace_module
from tierplan.sim.contents import States, parse_content
from tierplan.sim.trace import write_atomically
from tierplan.sim.workloads.work import total_work
from tierplan.sim.workloads.workload import Training

TINY = Sizes(
    copy_bytes=(4096, 1 << 16, 1 << 18),
    file_bytes=(4096, 1 << 16, 1 << 18),
    adam_parameters=(256, 1 << 12, 1 << 14),
    hidden=(32, 64),
    block_hidden=64,
    tokens=64,
    head_dim=16,
    area_bytes=1 << 20,
    file_area_bytes=1 << 20,
)


def measure(nvme_dir: Path | None, *, save: bool = True, **settings: object) -> Machine:
    """As `tierplan machine measure` does it."""
    description = measure_description(nvme_dir, **settings)  # type: ignore[arg-type]
    if save:
        write_atomically(here_path(), write_description(description))
    return build_machine(description)


@pytest.fixture
def config_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config"


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `measure` on this machine, at sizes that take no time."""
    monkeypatch.setattr(module, "_plan", lambda budget_s, folders, device: (3, TINY))
    monkeypatch.setattr(module, "_window_s", lambda *settings: 0.01)


def test_the_measured_machine_is_complete_and_kept(config_folder: Path, tiny: None, tmp_path: Path) -> None:
    parts: list[float] = []
    threads = torch.get_num_threads()
    machine = measure(
        tmp_path, budget_s=5, device="cpu", dtypes=["fp32"], progress=lambda what, part: parts.append(part)
    )
    assert torch.get_num_threads() == threads
    assert parts == sorted(parts)
    assert parts[-1] == 1.0
    assert [s.name for s in machine.streams] == [
        "gpu0.compute", "gpu0.h2d", "gpu0.d2h", "nvme.read", "nvme.write", "host.adam",
    ]  # fmt: skip
    assert set(machine.limits) == {"nvme", "cores", "memory"}
    assert "cores" in machine.stream("gpu0.compute").takes
    assert not machine.nameplate
    assert load_machine("here") == machine
    loaded = {k: v for k, v in load_description("here").values.items() if k.endswith("loaded_latency")}
    assert set(loaded) == {"link.loaded_latency", "nvme.loaded_latency", "host.loaded_latency"}
    for stream in machine.streams[1:]:
        section = {"gpu0": "link"}.get(stream.name.split(".")[0], stream.name.split(".")[0])
        wanted_s = loaded[f"{section}.loaded_latency"].value - stream.latency_s  # type: ignore[operator]  # a number
        assert stream.beside_s == pytest.approx(max(0.0, wanted_s)), "paid where cores are busy"
    assert list(tmp_path.glob("tierplan*")) == []  # the file is gone
    description = load_description("here")  # every number has its spread
    rates = [k for k in description.values if k.split(".")[1] not in ("capacity", "reserve", "cores", "drives")]
    for key in rates:
        quantity = description.values[key]
        assert quantity.basis == "measured"
        assert quantity.spread is not None or key.endswith("_share"), key
    assert all(limit.spread is not None for limit in description.limits)


def test_a_machine_without_drives_is_measured(config_folder: Path, tiny: None) -> None:
    machine = measure(None, budget_s=5, device="cpu", dtypes=["fp32"], save=False)
    assert [t.name for t in machine.tiers] == ["gpu0", "host"]
    with pytest.raises(MachineError, match="tierplan machine measure"):
        load_machine("here")


def test_the_command_writes_a_machine_and_says_how_sure_it_is(
    config_folder: Path, tiny: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "box.toml"
    arguments = [
        "machine",
        "measure",
        "--nvme-dir",
        str(tmp_path),
        "--device",
        "cpu",
        "--budget-s",
        "5",
        "-o",
        str(target),
    ]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "turned over" in out
    assert "shared limit cores" in out
    assert "largest error of the shared limits" in out
    machine = load_machine(str(target), ["gpu.capacity=1 GiB"])
    assert machine.name == "box"
    assert machine.tier("gpu0").capacity_bytes == 2**30


def test_what_no_command_would_read_again_does_not_replace_the_machine(
    config_folder: Path, tiny: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Threads that are held back for tenths of a second, as by a limit of a control group, make absurd latencies."""
    write_atomically(here_path(), "as it was")
    slow = Quantity(0.2, "measured", "a busy machine", 0.1)
    monkeypatch.setattr(report, "_latency", lambda amount, rates, source: slow)
    assert main(["machine", "measure", "--no-nvme", "--device", "cpu", "--budget-s", "5"]) == 1
    assert here_path().read_text() == "as it was"
    err = " ".join(capsys.readouterr().err.split())
    assert "latency in what was measured is 0.2, 200 ms, which nothing reaches" in err


def test_terminated_it_ends_as_by_ctrl_c_and_leaves_no_file(
    config_folder: Path, tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def terminated(*_: object) -> None:
        assert list(tmp_path.glob("tierplan.tier"))
        signal.raise_signal(signal.SIGTERM)
        raise RuntimeError("it went on")

    monkeypatch.setattr(module, "_rounds", terminated)
    before = signal.signal(signal.SIGTERM, ignored := lambda number, frame: None)  # not these tests
    try:
        assert main(["machine", "measure", "--nvme", str(tmp_path), "--device", "cpu", "--budget-s", "5"]) == 130
        assert signal.getsignal(signal.SIGTERM) is ignored, "it is as it was"
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().err == "tierplan: interrupted\n"
    assert not list(tmp_path.glob("tierplan*"))


@pytest.mark.gpu
def test_a_gpu_is_measured(config_folder: Path, tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    machine = measure(tmp_path, budget_s=20, device="cuda", save=False)
    assert set(machine.limits) == {"nvme", "link", "memory"}
    assert "cores" not in machine.stream("gpu0.compute").takes
    assert machine.tier("gpu0").capacity_bytes > 2**30


def test_attention_is_measured_by_the_kernels_that_plans_know(monkeypatch: pytest.MonkeyPatch) -> None:
    def begun(*args: object, **settings: object) -> None:
        raise MeasurementError(f"cuDNN's is {'on' if torch.backends.cuda.cudnn_sdp_enabled() else 'off'}")

    monkeypatch.setattr(module, "open_device", lambda name: FakeCuda())
    monkeypatch.setattr(module, "loads", begun)
    with pytest.raises(MeasurementError, match="cuDNN's is off"):
        measure(None, budget_s=20, device="cpu", save=False)
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_requests_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MeasurementError, match="give 5 seconds or more"):
        measure(tmp_path, budget_s=1, save=False)
    with pytest.raises(ValueError, match="auto, cuda or cpu"):
        measure(tmp_path, device="tpu", save=False)
    with pytest.raises(ValueError, match=r"a folder of .* is given twice; give one for each drive"):
        measure_description([tmp_path, tmp_path / "x" / ".."], budget_s=5)


def test_loads_do_the_work_that_they_claim(tmp_path: Path) -> None:
    with loads((tmp_path,), TINY, device=Device(), dtypes=("fp32",)) as (found, _):
        from torch.utils.flop_counter import FlopCounterMode

        for load in found:
            if load.kind == "matmul_fp32_flops":
                with FlopCounterMode(display=False) as counter:
                    load.run()
                assert counter.get_total_flops() == load.amount
        blocks = next(load for load in found if load.kind == "blocks")
        with FlopCounterMode(display=False) as counter:
            blocks.run()
        work = block_work(TINY, "fp32", Device())
        assert counter.get_total_flops() == work["matmul_fp32_flops"]  # it does not count the CPU's attention


class Blocks(torch.nn.Module):
    """The blocks that are timed, between an embedding and a head."""

    def __init__(self, hidden: int, num_heads: int) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(16, hidden), torch.nn.Linear(hidden, 16)
        self.blocks = torch.nn.ModuleList(TransformerBlock(hidden, num_heads) for _ in range(3))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x_btd = self.embed(input_ids)
        for block in self.blocks:
            x_btd = block(x_btd)
        return self.head(x_btd)  # type: ignore[no-any-return]


def test_a_block_does_the_work_that_is_said_of_it() -> None:
    """What is left of its time beside products and attention is divided by its elementwise bytes, as traced."""
    hidden, tokens = TINY.block_hidden, TINY.tokens
    ids = torch.zeros(1, tokens, dtype=torch.int64)
    training = Training(sequence_length=tokens, dtype="fp32", backend="cpu")
    model = Blocks(hidden, hidden // TINY.head_dim)
    traced = trace_module(model, {"input_ids": ids}, training, loss=lambda logits, _: logits.sum())
    block = traced.blocks[1]
    assert block_work(TINY, "fp32", Device()) == total_work([block.forward, block.backward])


def test_rates_count_work_per_second_of_all_loads_together() -> None:
    """Two sleeping loads do not disturb each other; amounts are in proportion to how often each was done, which a busy
    machine changes."""
    threads, done = StreamThreads(["a", "b"]), Counter[str]()

    def sleep(stream: str) -> None:
        time.sleep(0.002)
        done[stream] += 1

    try:
        one = Load("a", "bytes", 1.0, partial(sleep, "a"))
        two = Load("b", "bytes", 10.0, partial(sleep, "b"))
        together = threads.rates([one, two], 0.1)
        assert together[1] / together[0] == pytest.approx(10.0 * done["b"] / done["a"], rel=0.5)
        assert 0 < together[0] <= 1 / 0.002
    finally:
        threads.close()


def test_a_load_that_begins_when_the_others_are_done_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where its thread got no core for that long: they had done nothing then, and a machine without a rate ended in
    a division by zero."""
    late = iter([0.05])

    class Barrier(threading.Barrier):
        def wait(self, timeout: float | None = None) -> int:
            super().wait(timeout)
            if threading.current_thread().name.startswith("measure-b"):
                time.sleep(next(late, 0.0))
            return 0

    monkeypatch.setattr(threading, "Barrier", Barrier)
    loads = [Load(stream, "bytes", 1.0, partial(time.sleep, 0.001)) for stream in ("a", "b")]
    with StreamThreads(["a", "b"]) as threads:
        assert min(threads.rates(loads, 0.01)) > 0


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("num_good", [0, 1])
def test_a_load_that_fails_ends_the_others(order: tuple[int, int], num_good: int) -> None:
    """As it warms up, or later: a drive that fails, a GPU that is full. The others waited for it for ever."""
    runs = iter([None] * num_good)

    def fail() -> None:
        if next(runs, "failed") is not None:
            raise OSError("the drive fails")

    both = (Load("a", "bytes", 1.0, fail), Load("b", "bytes", 1.0, partial(time.sleep, 0.001)))
    with StreamThreads(["a", "b"]) as threads, pytest.raises(OSError, match="the drive fails"):
        threads.rates([both[k] for k in order], 0.01)


def test_the_spread_grows_with_scatter_and_has_a_floor() -> None:
    assert summary([100.0] * 5) == (100.0, LEAST_SPREAD)
    middle, half = summary([90.0, 100.0, 110.0, 95.0, 105.0])
    assert middle == 100.0
    assert 0.05 < half < 0.5
    assert summary([50.0, 100.0, 200.0])[1] > half
    assert summary([1.0])[1] == 1.0


def test_other_programs_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two cores that were busy for 20 s in 10, this process had 5 s."""
    clock = iter([(100.0, 50.0, 7.0), (110.0, 70.0, 12.0), (100.0, 50.0, 7.0), (110.0, 55.0, 12.0)])
    monkeypatch.setattr(OtherPrograms, "_now", staticmethod(lambda: next(clock)))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert OtherPrograms().text() == "other programs took 1.5 of 2 cores meanwhile, which keeps spreads wide"
    assert OtherPrograms().text().startswith("no other program worked meanwhile")


def test_memory_that_is_added_as_it_is_used_is_said_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guest of a hypervisor that adds memory on demand has little at first; plans for all of it were refused."""
    monkeypatch.setattr(report, "MEMORY_LIMITS", ())
    monkeypatch.setenv(HOST_GIB, "4096")
    assert report._host_memory_bytes() == 4096 * GIB
    schedule = schedule_for(make_model("gpt2"), UnitPlan(states="host", grads="host"))
    states = (b.size_bytes if isinstance(parse_content(b.content), States) else 0 for b in schedule.buffers)
    executable_step(schedule)
    monkeypatch.setenv(HOST_GIB, f"{max(states) / GIB}")
    with pytest.raises(TrainingError, match=r"but this machine has .* or say in TIERPLAN_HOST_GIB"):
        executable_step(schedule)
    for wrong in ("much", "nan", "inf", "0", "-3", ""):
        monkeypatch.setenv(HOST_GIB, wrong)
        with pytest.raises(ValueError, match=f"TIERPLAN_HOST_GIB is '{wrong}'; give the memory"):
            system_bytes()


def test_a_container_has_the_cores_and_the_memory_that_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its control group, of either version, and not those of the computer that it runs on."""
    new, old = tmp_path / "memory.max", tmp_path / "memory.limit_in_bytes"
    monkeypatch.setattr(report, "MEMORY_LIMITS", (new, old))
    monkeypatch.setattr("os.cpu_count", lambda: 192)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {3, 4, 8})
    whole = report._host_memory_bytes()
    for path, text, limit in ((new, "max", whole), (old, f"{2**63 - 4096}", whole), (old, "12345678", 12345678)):
        path.write_text(f"{text}\n")
        assert report._host_memory_bytes() == limit
    values = report._capacities((), Device(), "a test")
    assert values["host.cores"].value == 3


def test_folders_of_one_drive_share_what_is_free_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drives = {"a": 1, "a2": 1, "b": 2}
    for name in drives:
        (tmp_path / name).mkdir()
    monkeypatch.setattr(report, "_drive_of", lambda folder: drives[folder.name])
    sizes = {1: 100, 2: 80}
    monkeypatch.setattr(report, "room_bytes", lambda folder: sizes[drives[folder.name]])

    def free(*names: str) -> int:
        return report.free_bytes([tmp_path / name for name in names])

    assert free("a") == free("a", "a2") == 100
    assert free("a", "b") == 160, "dealt out equally"
    assert free("a", "a2", "b") == 150
    assert free() == 0
