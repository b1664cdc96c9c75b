"""Names of tiers and streams. They are made and parsed here, and nowhere else.

Tiers are `gpu0`, `gpu1`, ... (devices), `host` and `nvme`. A stream is named after the tier whose hardware works, and
what it does: `gpu0.compute`, `gpu0.h2d`, `gpu0.d2h`, `gpu0.p2p.gpu1`, `gpu0.collective`, `nvme.read`, `nvme.write`,
`host.adam`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

DEVICE_PREFIX = "gpu"
HOST = "host"
NVME = "nvme"
NUMBER = re.compile(r"(?<=[a-z])\d+\b")
"""At the end of a name's part."""
LINK = "link"
"""Of a description, the section of what is between a device and the host."""


@cache
def device(index: int) -> str:
    """The tier of one device: `gpu1`."""
    return f"{DEVICE_PREFIX}{index}"


def device_index(tier: str) -> int | None:
    """The number of a device, from the name of its tier; None for the tiers of host and NVMe."""
    index = tier.removeprefix(DEVICE_PREFIX)
    return int(index) if tier.startswith(DEVICE_PREFIX) and index.isdecimal() else None


@cache
def compute(index: int) -> str:
    """The stream of a device's computations."""
    return f"{device(index)}.compute"


@cache
def h2d(index: int) -> str:
    """Copies from the host to a device."""
    return f"{device(index)}.h2d"


@cache
def d2h(index: int) -> str:
    """Copies from a device to the host."""
    return f"{device(index)}.d2h"


@cache
def p2p(source: int, target: int) -> str:
    """Copies from one device to another."""
    return f"{device(source)}.p2p.{device(target)}"


def collective(index: int) -> str:
    """A device's part in what several devices do together: gather, reduce, all-reduce."""
    return f"{device(index)}.collective"


HOPS = "hops"
"""Work of a collective: steps of a ring, each of which waits for the one before."""


def ring(num_devices: int) -> str:
    """Work of a collective of so many devices: the bytes that each of them sends."""
    return f"ring{num_devices}_bytes"


def link_limit(index: int) -> str:
    """The shared limit of a device's link, both ways together."""
    return f"{device(index)}.link"


def kernels_limit(index: int) -> str:
    """The shared limit of a device's compute and collectives, in fractions of full speed."""
    return f"{device(index)}.kernels"


DEVICE, COMPUTE, H2D, D2H = device(0), compute(0), h2d(0), d2h(0)
"""Tier and streams of the first device, which is the only one unless a plan says otherwise."""
NVME_READ, NVME_WRITE = f"{NVME}.read", f"{NVME}.write"
HOST_ADAM = f"{HOST}.adam"
"""The host's cores: optimizer updates and other work on gradients."""

DRAM_LIMIT, NVME_LIMIT, CORES_LIMIT = "dram", "nvme", "cores"
"""Shared limits that several modules know: bandwidth of host memory, reads with writes, cores that also compute."""


@dataclass(frozen=True, slots=True)
class StreamName:
    """The parts of a stream's name."""

    tier: str
    """Whose hardware works: `gpu0`, `nvme`, `host`."""
    task: str = ""
    """`compute`, `h2d`, `d2h`, `p2p`, `collective`, `read`, `write`, `adam`; empty where it names a tier alone."""

    @property
    def device(self) -> int | None:
        """The number of the device whose stream it is."""
        return device_index(self.tier)

    @property
    def is_compute(self) -> bool:
        return self.task == "compute"

    @property
    def is_host_link(self) -> bool:
        """Whether it copies between a device and the host."""
        return self.task in ("h2d", "d2h")

    @property
    def is_drive(self) -> bool:
        return self.tier == NVME

    def on(self, index: int) -> str:
        """The stream that does the same on another device."""
        return f"{device(index)}.{self.task}"


def parse_stream(name: str) -> StreamName:
    """The parts of a stream's name. Any name has some: a schedule may have streams of its own."""
    tier, _, rest = name.partition(".")
    return StreamName(tier, rest.partition(".")[0])


def parts_used(streams: Iterable[str]) -> set[str]:
    """The sections of a machine's description whose rates these streams go by; the host's DRAM is in every copy."""
    used = set[str]()
    for stream in map(parse_stream, streams):
        if stream.device is None:
            used |= {HOST, NVME} if stream.is_drive else {HOST}
        else:
            used |= {DEVICE_PREFIX} if stream.is_compute else {LINK, HOST} if stream.is_host_link else {LINK}
    return used


def on_first_device(name: str) -> str:
    """The first device's stream that does the same; a stream that is no device's is itself."""
    stream = parse_stream(name)
    return name if stream.device is None else stream.on(0)


def alike_name(name: str, num_devices: int) -> str:
    """One name for streams, limits and tiers of which each device, or each group of them, has its own: `gpu*.compute`,
    `switch.plx*.down`; on one device their own."""
    if num_devices == 1:
        return name
    first, *rest = name.split(".")
    if device_index(first) is None:
        return NUMBER.sub("*", name)
    return ".".join([f"{DEVICE_PREFIX}*", *(part for part in rest if device_index(part) is None)])


def on_devices(name: str, devices: Sequence[int]) -> str:
    """The tier or stream that is to `devices[d]` what this one is to device d, for all d together."""
    parts = [(part, device_index(part)) for part in name.split(".")]
    return ".".join(part if d is None or d >= len(devices) else device(devices[d]) for part, d in parts)


TASKS = ("compute", "h2d", "d2h", "p2p", "collective", "read", "write")


def display_order(name: str) -> tuple[int, list[str | int]]:
    """A key to sort streams by: computing first, then links, drives and the host; by number among equals."""
    stream = parse_stream(name)
    by_name = [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
    if stream.task in TASKS:
        return TASKS.index(stream.task), by_name
    return len(TASKS) + (stream.tier != HOST), by_name
