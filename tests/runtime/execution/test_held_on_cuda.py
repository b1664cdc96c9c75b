"""What a GPU's allocator holds for a schedule, by a model of it: the ledger's peak, and fragments and workspaces.

The runtime trains a small model on the CPU. All that it takes and frees on the device's streams, blocks of pools and
tensors of autograd, is written down in its order, and repeated on the model of the allocator in the sizes of a large
model, on a device that has room for the ledger's peak and little more.
"""

from __future__ import annotations

import os
import tempfile
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.runtime.execution.caching_allocator import CachingAllocator, OutOfMemoryError, Taken
from tests.runtime.execution.test_ledger import CONFIG, UNIFORM, Meter, Watch, nightly, training_of
from tests.runtime.execution.test_policies_run import RUN
from tests.runtime.models import make_batches, make_model, observed_workload, schedule_for
from tests.runtime.test_trainer import CPU, machine
from tests.toys import uniform_plan
from tierplan.hwmodels.names import COMPUTE
from tierplan.planner.lowering import lower
from tierplan.planner.plan import UnitPlan
from tierplan.planner.policies import decide
from tierplan.runtime.data.synthetic import random_batches
from tierplan.runtime.execution.device import CudaDevice, Device
from tierplan.runtime.execution.fake_device import FakeCuda
from tierplan.runtime.execution.rules import TierFullError
from tierplan.runtime.memory.arena import Pool
from tierplan.runtime.tracing.models import build_model
from tierplan.runtime.tracing.trace import trace_config
from tierplan.runtime.trainer import Trainer, train
from tierplan.sim.schedule import Schedule
from tierplan.sim.workloads.workload import Training

pytestmark = pytest.mark.usefixtures("one_thread")

SCALE = 500
"""So many times the sizes of the small model are those of one that fills a GPU."""
FRAGMENTS_BYTES = 256 << 20
WORKSPACES_BYTES = 128 << 20
"""Of cuBLAS, 32 MiB (8 MiB on a GPU before the H100 unless results are to be deterministic) for each thread and stream
that multiply matrices; here that is the compute stream, and the threads of forward and of autograd. As much again of
cuBLASLt, which adds a bias to a product: before PyTorch 2.13 it has one of its own."""
SMALL_CONFIG = {**CONFIG, "n_embd": 256, "vocab_size": 2048, "n_layer": 4}


@dataclass
class Log(Meter):
    """All that is taken and freed, in order: number, size (0 when it is freed) and stream."""

    events: list[tuple[int, int, str]] = field(default_factory=list)
    num_taken: int = 0
    here: threading.local = field(default_factory=threading.local)

    def take(self, size_bytes: int) -> int:
        with self.lock:
            self.num_taken += 1
            self.events.append((self.num_taken, size_bytes, getattr(self.here, "stream", "gpu0.compute")))
            return self.num_taken

    def adopt(self, storage: torch.UntypedStorage) -> None:
        with self.lock:
            if storage._cdata not in self.known and storage.nbytes():
                self.known.add(storage._cdata)
                number = self.take(storage.nbytes())
                weakref.finalize(storage, self.free, number, storage._cdata).atexit = False

    def free(self, number: int, address: int) -> None:
        with self.lock:
            self.known.discard(address)
            self.events.append((number, 0, ""))

    def watch(self, pool: Pool) -> Pool:
        allocate, release, numbers = pool.allocate, pool.release, dict[int, int]()

        def logged_allocate(size_bytes: int) -> torch.Tensor:
            pages = allocate(size_bytes)
            numbers[pages.data_ptr()] = self.take(size_bytes)
            return pages

        def logged_release(pages: torch.Tensor) -> None:
            self.free(numbers.pop(pages.data_ptr()), 0)
            release(pages)

        pool.allocate, pool.release = logged_allocate, logged_release
        return pool


def trained(schedule: Schedule, training: Training) -> tuple[Log, int]:
    """What three steps take and free, and the ledger's peak."""
    model, log, pool_of = build_model(SMALL_CONFIG, training), Log(), Device.pool
    batches = [next(random_batches(model.config, training))] * 6

    @contextmanager
    def on(device: Device, stream: str) -> Iterator[None]:
        log.here.stream = stream
        if stream.startswith("gpu0."):
            with Watch(log):
                yield
        else:
            yield

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(Device, "pool", lambda device, capacity: log.watch(pool_of(device, capacity))),
        mock.patch.object(Device, "on", on),
        Trainer(schedule, model, nvme_dir=folder) as trainer,
    ):
        trainer.run(batches, 3)
        return log, trainer.result().peak_bytes["gpu0"]


@pytest.mark.filterwarnings("ignore:Module is None")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "zero-infinity" else nightly) for name in (*RUN, *UNIFORM)]
)
def test_a_gpu_holds_the_ledger_s_peak_and_a_little_more(name: str) -> None:
    training = training_of(
        dtype="bf16", per_device_train_batch_size=8, gradient_accumulation_steps=2 if name == "vertical" else 1
    )
    workload = trace_config("held", SMALL_CONFIG, training)
    plan: Any = uniform_plan(workload, UNIFORM[name]) if name in UNIFORM else decide(name, workload, machine())
    schedule = lower(plan, workload, machine())
    _, peak = trained(schedule, training)
    for _ in range(3):  # the peak depends on timing
        tiers = [replace(t, capacity_bytes=peak if t.name == "gpu0" else t.capacity_bytes) for t in schedule.tiers]
        try:
            log, _ = trained(replace(schedule, tiers=tuple(tiers)), training)
            break
        except TierFullError:
            peak = int(1.1 * peak)
    device, taken = CachingAllocator(1.01 * peak * SCALE + FRAGMENTS_BYTES), dict[int, Taken]()
    for number, size_bytes, stream in log.events:
        if size_bytes:
            taken[number] = device.take(size_bytes * SCALE, stream)
        elif number in taken:
            device.give(taken.pop(number))
    assert 0.9 * peak * SCALE < device.peak_bytes


def test_the_model_of_the_allocator() -> None:
    """By hand: rounding, gaps, pages that are unmapped for another stream, and a device that is full."""
    mib, page = 1 << 20, 20 << 20
    device = CachingAllocator(3 * page)
    first, second, third = (device.take(size * mib, "a") for size in (8, 12, 15))
    assert (first, second) == (("a", False, 0, 8 * mib), ("a", False, 8 * mib, page))
    assert device.mapped_bytes == 2 * page
    device.give(second)
    assert device.take(11 * mib, "a")[2] == 8 * mib  # the gap, and not what is left of the second page
    fourth = device.take(4 * mib, "a")
    assert fourth[2] == 35 * mib
    device.take(700, "b")
    assert device.mapped_bytes == 2 * page + (2 << 20)
    device.give(third)
    device.give(fourth)
    with pytest.raises(OutOfMemoryError):
        device.take(41 * mib, "b")
    assert device.take(18 * mib, "b")[2] == 0  # on the page that `a` does not use any more
    assert device.mapped_bytes == 2 * page + (2 << 20)
    assert device.take(1, "b")[2:] == (1024, 1536)


EXPANDS = "expandable_segments:True"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", EXPANDS),
        ("max_split_size_mb:64", f"max_split_size_mb:64,{EXPANDS}"),
        ("expandable_segments:False,max_split_size_mb:64", "expandable_segments:False,max_split_size_mb:64"),
    ],
)
@pytest.mark.parametrize("is_new", [True, False])
def test_segments_expand_unless_somebody_says_otherwise(before: str, after: str, is_new: bool) -> None:
    """What else somebody has set stays; by what PyTorch says, and where an older one cannot say, by the variable."""
    real: Any = torch._C
    says = getattr(real, "_accelerator_getAllocatorSettings", None)
    if is_new and says is None:
        pytest.skip("this PyTorch does not say what is set")
    at_first = says() if says else ""
    real._accelerator_setAllocatorSettings(before)
    try:
        with (
            mock.patch.dict(os.environ, {} if is_new else {"PYTORCH_CUDA_ALLOC_CONF": before}),
            mock.patch.object(real, "_accelerator_getAllocatorSettings", says if is_new else None, create=True),
            mock.patch.object(
                real, "_accelerator_setAllocatorSettings", wraps=real._accelerator_setAllocatorSettings
            ) as told,
        ):
            CudaDevice("cuda:0")
        assert (told.call_args.args[0] if told.called else before) == after
        assert says is None or says() == after
    finally:
        real._accelerator_setAllocatorSettings(at_first)


def test_all_threads_use_the_gpu_that_was_current_where_the_device_was_opened() -> None:
    """Workers, for whom the first GPU is current, put their streams there, and memory was on another one."""
    with (
        mock.patch("torch._C._accelerator_setAllocatorSettings", create=True),
        mock.patch("torch.cuda.current_device", return_value=1),
        mock.patch("torch.cuda.Event") as event,
        mock.patch("torch.cuda.current_stream") as current,
    ):
        device = CudaDevice("cuda")
        device.finish()
    assert device.torch_device == torch.device("cuda:1")
    current.assert_called_once_with(device.torch_device)
    event().record.assert_called_once_with(current())


def test_memory_that_cannot_be_pinned_leaves_no_error_to_the_next_kernel() -> None:
    """CUDA keeps it for this thread, and PyTorch raises it at the next launch, whosever that is."""
    cudart, latched = mock.Mock(), [2]
    cudart.cudaHostRegister.return_value = 2

    def launch(*args: object, **settings: object) -> None:
        if latched:
            raise RuntimeError(f"CUDA error: {latched.pop()}")

    with (
        mock.patch("torch._C._accelerator_setAllocatorSettings", create=True),
        mock.patch("torch.cuda.cudart", return_value=cudart),
        mock.patch("torch.cuda.device") as current,
        mock.patch("torch.ones", launch),
    ):
        with pytest.raises(MemoryError, match=r"CUDA could not pin 8,192 bytes of host memory \(error 2\)"):
            CudaDevice("cuda:1").host_pool(1 << 20).take(5000)
        torch.ones(1, device="cuda:1")
    current.assert_called_once_with(torch.device("cuda:1"))  # or the first GPU would get a context, too


def test_threads_that_ask_for_a_new_stream_at_once_get_the_same_one() -> None:
    """One has its own by then: on another, no event would be behind its work, and no wait in front of it."""
    both_make, has_first = threading.Barrier(2), threading.Event()

    def made(device: torch.device) -> object:
        if both_make.wait(5):
            has_first.wait(5)
        return object()

    def asked(name: str) -> object:
        stream = device._stream(name)
        has_first.set()
        return stream

    with (
        mock.patch("torch._C._accelerator_setAllocatorSettings", create=True),
        mock.patch("torch.cuda.Stream", made),
        ThreadPoolExecutor(2) as threads,
    ):
        device = CudaDevice("cuda:0")
        first, second = threads.map(asked, ["gpu0.h2d", "gpu0.h2d"])
    assert first is second


def test_times_count_from_before_the_first_event() -> None:
    """It was waited for when the first op had ended, on a stream of PyTorch's 32 that another may have: behind all that
    had been put there by then, while nothing else went on."""
    done, events = list[str](), iter(("zero", "first", "second"))

    class Event:
        def __init__(self, **settings: object) -> None:
            self.name = next(events)

        def record(self, stream: str) -> None:
            done.append(f"{self.name} on the stream {stream}")

        def synchronize(self) -> None:
            done.append(f"{self.name} waited for")

        def elapsed_time(self, other: Event) -> float:
            assert self.name == "zero"
            return {"first": 2.0, "second": 3.5}[other.name]

    with (
        mock.patch("torch._C._accelerator_setAllocatorSettings", create=True),
        mock.patch("torch.cuda.Event", Event),
        mock.patch("torch.cuda.Stream", side_effect=["of the clock", "compute"]),
    ):
        device = CudaDevice("cuda:0")
        first, second = device.record(COMPUTE), device.record(COMPUTE)
        assert first is not None
        assert second is not None
        assert second.time_ns() - first.time_ns() == 1_500_000
    on = "on the stream"
    assert done == [f"zero {on} of the clock", "zero waited for", f"first {on} compute", f"second {on} compute"]


@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_a_run_may_be_resumed_on_another_gpu(name: str) -> None:
    with Trainer(schedule_for(model := make_model("gpt2")), model, device=name) as trainer:
        assert trainer._settings["device"] == "cuda"


def test_batches_that_are_on_the_gpu_are_waited_for_and_not_pinned() -> None:
    """The Hugging Face Trainer gives such. `meta` stands for the GPU: no memory of it can be pinned."""
    with mock.patch("torch._C._accelerator_setAllocatorSettings", create=True):
        device = CudaDevice("meta")
    did, t = mock.Mock(), torch.zeros(3, device="meta")
    did.current_stream.return_value = did.here
    with (
        mock.patch("torch.cuda.current_stream", did.current_stream),
        mock.patch("torch.cuda.default_stream", did.default_stream),
        mock.patch("torch.Tensor.record_stream", did.record_stream),
        mock.patch("torch.Tensor.clone", did.clone),
    ):
        taken = device.take(t)
    assert did.mock_calls[-4:] == [
        mock.call.default_stream(t.device),
        mock.call.here.wait_stream(did.default_stream()),
        mock.call.record_stream(did.here),
        mock.call.clone(),
    ]
    assert taken is did.clone()
    assert device.to_device(t) is t


def test_buffers_come_back_from_the_device_as_forward_has_left_them() -> None:
    """Running means were those of before training again. Modules that share a buffer share it on the device, too."""
    model = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    first, second, third = model
    second.running_mean = first.running_mean
    before = dict(model.named_buffers(remove_duplicate=False))
    restore = FakeCuda().take_buffers(model)
    assert not {*map(id, model.buffers())} & {*map(id, before.values())}
    assert second.running_mean is first.running_mean
    first(torch.arange(8.0).view(2, 4))
    third.running_var = torch.full((4,), 7.0)
    changed = {name: b.clone() for name, b in model.named_buffers(remove_duplicate=False)}
    restore()
    after = dict(model.named_buffers(remove_duplicate=False))
    assert all(torch.equal(b, after[name]) for name, b in changed.items())
    assert [name for name, b in after.items() if b is not before[name]] == ["2.running_var"]
    assert after["0.running_mean"].sum() > 0


def test_batches_are_taken_where_the_device_computes() -> None:
    class Taking(FakeCuda):
        streams: ClassVar[list[str]] = []

        def take(self, t: torch.Tensor) -> torch.Tensor:
            stream = getattr(self._here, "stream", None)
            self.streams.append("" if stream is None else stream.name)
            return super().take(t)

    model, batches, training = make_model("gpt2"), make_batches(4), replace(CPU, gradient_accumulation_steps=2)
    train(schedule_for(model, UnitPlan(), training), model, batches, steps=2, device=Taking())
    assert Taking.streams == [COMPUTE] * 2 * len(batches)


def test_tensors_inside_of_a_batch_s_values_are_brought_to_the_device() -> None:
    """Those in a dictionary, say, were left on the host, where no kernel of a GPU finds them."""

    class Sending(FakeCuda):
        shapes: ClassVar[list[torch.Size]] = []

        def to_device(self, t: torch.Tensor) -> torch.Tensor:
            self.shapes.append(t.shape)
            return super().to_device(t)

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model("gpt2")

        def forward(self, inputs: dict[str, Any], rest: list[torch.Tensor]) -> Any:
            return self.model(input_ids=inputs["ids"], labels=rest[0])

    batches: Any = [{"inputs": {"ids": b["input_ids"], "of": "text"}, "rest": [b["labels"]]} for b in make_batches(2)]
    workload = observed_workload(model := Nested(), batches[0], CPU)
    train(lower(uniform_plan(workload, UnitPlan()), workload, machine()), model, batches, steps=2, device=Sending())
    assert Sending.shapes == 4 * [batches[0]["rest"][0].shape]


def test_attention_is_that_of_plans_while_the_device_computes() -> None:
    """And what it was before and behind: PyTorch takes cuDNN's first on an H100, which saves other tensors."""
    model, batches = make_model("gpt2"), make_batches(2)
    workload, seen = observed_workload(model, batches[0], CPU), set[bool]()

    def attend(*args: Any, **settings: Any) -> torch.Tensor:
        seen.add(torch.backends.cuda.cudnn_sdp_enabled())
        return attention(*args, **settings)

    attention = F.scaled_dot_product_attention
    schedule = lower(uniform_plan(workload, UnitPlan(acts="recompute")), workload, machine())
    with (
        mock.patch.object(F, "scaled_dot_product_attention", attend),
        Trainer(schedule, model, device="fake") as trainer,
    ):
        for batch in batches:
            trainer.run([batch], 1)
            assert torch.backends.cuda.cudnn_sdp_enabled()
    assert seen == {False}
