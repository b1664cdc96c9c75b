"""The test double itself: what it must do late, and what it must call a race."""

from __future__ import annotations

import pytest
import torch

from tierplan.hwmodels.names import COMPUTE, D2H, H2D, HOST_ADAM
from tierplan.runtime.execution.device import open_device
from tierplan.runtime.execution.fake_device import FakeCuda, PlaceError, RaceError

STREAMS = (COMPUTE, D2H)


def made(device: FakeCuda) -> torch.Tensor:
    """Ones, as a kernel on the compute stream makes them."""
    with device.on(COMPUTE):
        return torch.ones(4) * torch.ones(4)


def test_kernels_are_late_and_an_event_makes_them_happen() -> None:
    device = FakeCuda(seed=1)
    x = made(device)
    with device.on(COMPUTE):
        x.add_(1)
    assert x.isnan().all()
    event = device.record(COMPUTE)
    assert event is not None
    event.wait()
    assert x.tolist() == [2, 2, 2, 2]
    assert event.time_ns() > 0


def test_a_result_that_the_host_needs_is_waited_for() -> None:
    device = FakeCuda()
    with device.on(COMPUTE):
        assert (torch.ones(4) * 3).sum().item() == 12


def test_random_numbers_are_those_of_the_launch() -> None:
    device = FakeCuda()
    torch.manual_seed(3)
    expected = [torch.nn.functional.dropout(torch.ones(50), 0.5), torch.rand(3)]
    torch.manual_seed(3)
    with device.on(COMPUTE):
        found = [torch.nn.functional.dropout(torch.ones(50), 0.5), torch.rand(3)]
        torch.rand(1)
    device.settle()
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("outer", STREAMS)
def test_inside_of_another_stream_an_operation_is_put_on_the_inner_one_once(outer: str) -> None:
    plain, device = FakeCuda(), FakeCuda()
    made(plain)
    with device.on(outer):
        x = made(device)
    assert x.isnan().all()
    assert [s.num_put for s in device._streams.values()] == [s.num_put for s in plain._streams.values()]


def test_a_full_queue_makes_room() -> None:
    device = FakeCuda(queue_length=3)
    x = torch.zeros(1)
    with device.on(COMPUTE):
        for _ in range(10):
            x.add_(1)
    assert 7 <= x.item() <= 10


@pytest.mark.parametrize("is_ordered", [True, False])
@pytest.mark.parametrize("writes", [True, False])
def test_streams_need_an_event_between_them(writes: bool, is_ordered: bool) -> None:
    device = FakeCuda()
    x, host = made(device), torch.zeros(4)
    with device.on(COMPUTE):
        x.mul(2)  # also a reader
    event = device.record(COMPUTE)
    assert event is not None
    if is_ordered:
        device.wait_for(D2H, event)

    def go_on() -> None:
        with device.on(D2H):
            _ = x.copy_(torch.zeros(4)) if writes else host.copy_(x, non_blocking=True)
        device.settle()

    if is_ordered:
        go_on()
        assert writes or host.tolist() == [1, 1, 1, 1]
    else:
        with pytest.raises(
            RaceError, match=rf"copy_ on {D2H} {'writes' if writes else 'reads'} 16 bytes, with no order"
        ):
            go_on()


def test_the_host_waits_for_what_it_reads() -> None:
    device = FakeCuda()
    x = made(device)
    with device.on(HOST_ADAM), pytest.raises(RaceError, match=f"add on the host reads .* write of mul on {COMPUTE}"):
        x.add(1)


def test_what_the_host_has_waited_for_orders_streams() -> None:
    device = FakeCuda()
    x = made(device)
    event = device.record(COMPUTE)
    assert event is not None
    event.wait()
    with device.on(H2D):
        x.mul_(3)
    device.settle()
    assert x.tolist() == [3, 3, 3, 3]


@pytest.mark.parametrize("is_lent", [True, False])
def test_memory_is_lent_before_another_stream_may_outlast_it(is_lent: bool) -> None:
    device = FakeCuda()
    x, host = made(device), torch.zeros(4)
    event = device.record(COMPUTE)
    assert event is not None
    device.wait_for(D2H, event)
    with device.on(D2H):
        host.copy_(x)
    if is_lent:
        device.lend([x], D2H)
    del x
    if is_lent:
        device.settle()
        assert host.tolist() == [1, 1, 1, 1]
    else:
        with pytest.raises(
            RaceError, match=f"memory of {COMPUTE} is freed, with no order to the use by copy_ on {D2H}"
        ):
            device.settle()


def test_tensors_of_both_sides_are_copied_and_no_more() -> None:
    device, host = FakeCuda(), torch.ones(4)
    of_pool = device.pool(1 << 20).take(4096).pages[:16].view(torch.float32)
    with device.on(COMPUTE):
        for x in (made(device), of_pool):
            with pytest.raises(PlaceError, match=r"add_ is given tensors of the device and of the host"):
                x.add_(host)
            x.copy_(host)
            x.mul_(torch.tensor(2.0)).add_(device.to_device(host))
    device.settle()
    assert of_pool.tolist() == [3, 3, 3, 3]


@pytest.mark.parametrize("taken_by", ["index of a mask", "mask as index", "nonzero"])
def test_what_is_taken_out_is_of_the_device(taken_by: str) -> None:
    """As the masks that models make of padded batches, with which they go on."""
    device = FakeCuda()
    with device.on(COMPUTE):
        x, of_mask = made(device).view(4), device.to_device(torch.tensor([True, False, True, True]))
        mask = of_mask.clone()
        match taken_by:
            case "index of a mask":
                found = mask[torch.arange(4)] & mask
            case "mask as index":
                found = x[mask] + made(device)[:3]
            case _:
                found = torch.nonzero(mask).flatten() + torch.arange(3)
    device.settle()
    expected = {"index of a mask": [1, 0, 1, 1], "mask as index": [2, 2, 2], "nonzero": [0, 3, 5]}
    assert found.int().tolist() == expected[taken_by]


def test_memory_is_pinned_once() -> None:
    device = FakeCuda()
    pool = device.host_pool(1 << 20)
    block = pool.take(4096)
    with pytest.raises(MemoryError, match="error 712"):
        device.pin(block.pages[1:])
    pool.close()
    assert device.pinned_bytes == 0


@pytest.mark.parametrize("name", ["cpuu", "gpu0", "cuda:first", ""])
def test_a_device_that_is_none_is_refused_and_not_the_cpu(name: str) -> None:
    with pytest.raises(ValueError, match=rf"device is '{name}'; choose cpu, cuda or one of several"):
        open_device(name)


def test_memory_that_is_gone_is_forgotten() -> None:
    device = FakeCuda(queue_length=3)
    for _ in range(1500):
        made(device)
    device.settle()
    assert len(device._memory) < 2500
