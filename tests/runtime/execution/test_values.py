"""Saved tensors of any type and look go away together and come back as they were."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch.autograd.graph import saved_tensors_hooks

from tierplan.runtime.autograd.saved import Recorder, Treatment
from tierplan.runtime.execution.ops import Bodies
from tierplan.runtime.execution.values import BufferValue, SavedTensorsHandle
from tierplan.runtime.memory.arena import Pool, map_host


def test_bytes_that_are_not_aligned_and_parts_of_a_storage_come_back() -> None:
    whole = torch.arange(24.0).view(2, 12)
    looks = [torch.tensor([True, False, True]), torch.arange(6.0).view(2, 3).t(), whole, whole[:, 4:8]]
    recorder = Recorder([], [], set(), treatment=Treatment(moved={0: 0, 1: 1, 2: 2}))
    packed = [recorder.pack(t) for t in looks]
    handle = SavedTensorsHandle([recorder.away.pop(k) for k in range(3)])
    begun = handle.begin()
    block = Pool(map_host, 1 << 20).take(handle.forms.size_bytes)
    torch._foreach_copy_(handle.parts_of(block), handle.parts())
    assert block.data[3:27].tolist() == list(looks[1].t().numpy().tobytes()), "parts lie behind each other, as stored"
    handle.leave(begun)
    handle.use(BufferValue(handle=handle, arrived=[part.clone() for part in handle.parts_of(block)]))
    for kept, t in zip(packed, looks, strict=True):
        found = Recorder.unpack(kept)
        assert found.stride() == t.stride()
        assert torch.equal(found, t)


def test_what_is_made_again_is_looked_at_as_before() -> None:
    """By an operation whose result has another type and shape than what was saved."""
    recorder = Recorder([], [], set(), treatment=Treatment({0}))
    with saved_tensors_hooks(recorder.pack, recorder.unpack):
        z = torch.view_as_complex(torch.arange(8.0).view(4, 2)).requires_grad_()
        z.abs().sum()
    packed = recorder.pack(z.detach())
    recorder.dropped.pop(0).take(torch.arange(8.0))
    assert torch.equal(Recorder.unpack(packed), z)


def test_what_is_saved_in_host_memory_stays_there() -> None:
    """As a GPU's attention saves the seed of its dropout, which its backward reads on the host. `meta` stands for the
    GPU."""
    device, seed = torch.device("meta"), torch.tensor(1234)
    recorder = Recorder([], [], set(), device=device, treatment=Treatment(moved={0: 0}))
    packed = recorder.pack(seed)
    handle = SavedTensorsHandle([recorder.away.pop(0)])
    begun = handle.begin()
    source = BufferValue(Pool(map_host, 1 << 20).take(handle.forms.size_bytes), handle=handle)
    torch._foreach_copy_(handle.parts_of(source.block), handle.parts())
    handle.leave(begun)
    before, target = SimpleNamespace(value=source), SimpleNamespace(value=None)
    bodies = SimpleNamespace(device=SimpleNamespace(torch_device=device, lend=lambda *_: None))
    Bodies._bring_back(bodies, handle, before, target)  # type: ignore[arg-type]
    handle.use(target.value)  # type: ignore[arg-type]
    assert torch.equal(Recorder.unpack(packed), seed)
