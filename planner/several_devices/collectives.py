"""What several devices do together, as work of a ring: each device sends to the next and hears from the one before.

A gather, or a reduction whose result is scattered, takes n - 1 steps in which each of n devices sends an n-th of the
whole; an all-reduce is both, one after the other.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable

from tierplan.hwmodels.names import HOPS, collective, device, p2p, ring
from tierplan.sim.builder import Builder
from tierplan.sim.ranks import SEND
from tierplan.sim.workloads.workload import Amounts

PASSES = {"gather": 1, "reduce": 1, "all_reduce": 2}


def add_send(
    builder: Builder, links: Container[str], key: str, buffer: str, target: int, *, tier: str | None = None,
    over: str | None = None, m: int = 0, after: Iterable[str] = (),
) -> str:  # fmt: skip
    """Adds the send of a buffer to another device, or into the memory of its process (`tier`), over what that has of
    the same; the buffer there. By the link between the two, or through the host at the rate of a ring of two."""
    b, source = builder.buffers[buffer], builder.owner(buffer)
    assert source is not None
    if over is None:
        arrived = builder.like(buffer, tier or device(target), None if tier is None else target)
    else:
        arrived = builder.over(over)
    stream, work = p2p(source, target), {"bytes": float(b.size_bytes)}
    if stream not in links:
        stream, work = collective(source), {ring(2): float(b.size_bytes), HOPS: 1.0}
    reads = [buffer, *([over] if over else [])]
    builder.op(key, stream, SEND, work=work, reads=reads, writes=(arrived,), m=m, after=after)
    return arrived


def add_all_reduce(builder: Builder, key: str, own: str, every: Collection[str], *, unit: str = "") -> str:
    """Adds a device's part in summing what every device has, of which this is its own; its buffer with the sum."""
    target, size_bytes = builder.owner(own), builder.buffers[own].size_bytes
    assert target is not None
    total, work = builder.like(own, device(target)), collective_work("all_reduce", size_bytes, len(every))
    builder.op(key, collective(target), "all_reduce", work=work, reads=every, writes=(total,), unit=unit)
    return total


def collective_work(kind: str, size_bytes: float, num_devices: int, *, calls: int = 1) -> Amounts:
    """Work of each of so many devices in `calls` collectives of one kind, given the bytes of the whole in all calls."""
    steps = PASSES[kind] * (num_devices - 1)
    return {ring(num_devices): steps * size_bytes / num_devices, HOPS: float(steps * calls)}
