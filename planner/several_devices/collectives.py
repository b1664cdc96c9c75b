"""What several devices do together, as work of a ring: each device sends to the next and hears from the one before.

A gather, or a reduction whose result is scattered, takes n - 1 steps in which each of n devices sends an n-th of the
whole; an all-reduce is both, one after the other.
"""

from __future__ import annotations

from collections.abc import Collection
from math import inf

from tierplan.hwmodels.machine import KERNELS, SECONDS
from tierplan.hwmodels.names import HOPS, collective, device, ring
from tierplan.sim.builder import Builder, Said
from tierplan.sim.workloads.work import Amounts

PASSES = {"gather": 1, "reduce": 1, "all_reduce": 2}


def add_all_reduce(builder: Builder, key: Said, own: int, every: Collection[int], *, unit: str = "") -> int:
    """Adds a device's part in summing what every device has, of which this is its own; its buffer with the sum."""
    target, size_bytes = builder.owner(own), builder.sizes_bytes[own]
    assert target is not None
    total, work = builder.like(own, device(target)), collective_work("all_reduce", size_bytes, len(every))
    builder.op(key, collective(target), "all_reduce", work=work, reads=every, writes=(total,), unit=unit)
    return total


def collective_work(kind: str, size_bytes: float, num_devices: int, *, calls: int = 1) -> Amounts:
    """Work of each of so many devices in `calls` collectives of one kind, given the bytes of the whole in all calls."""
    steps = PASSES[kind] * (num_devices - 1)
    return {ring(num_devices): steps * size_bytes / num_devices, HOPS: float(steps * calls)}


def work_of_part(work: Amounts, num_devices: int) -> Amounts:
    """Work of each of so many devices that cut an op: each launches all its kernels, on parts of what they are for."""
    whole = (KERNELS, SECONDS) if KERNELS in work else ()
    return {kind: amount if kind in whole else amount / num_devices for kind, amount in work.items()}


def product_flops(work: Amounts) -> float:
    """Of matrix products, whose parts devices that cut operators sum; infinite where work is measured in seconds."""
    is_measured = SECONDS in work and KERNELS not in work
    return inf if is_measured else sum(amount for kind, amount in work.items() if kind.startswith("matmul_"))
