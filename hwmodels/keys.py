"""The keys of a machine file: one table for reading, checking, `--set` and the documentation.

A key without a default is absent from the machine unless somebody gives it. A `required` key must be given.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tierplan.hwmodels.machine import MachineError
from tierplan.hwmodels.units import Unit

__all__ = ["KEYS", "PARTS", "Key", "find_key"]

PARTS: Mapping[str, str] = MappingProxyType({"gpu": "gpus", "nvme": "drives"})
"""Sections that can name a part, and the folder of the catalog where it is looked up."""


@dataclass(frozen=True, slots=True)
class Key:
    """One number (or word) of a machine's description."""

    name: str
    unit: Unit
    meaning: str
    default: float | str | None = None
    reason: str = ""
    """Where the default comes from."""
    required: bool = False
    curve: bool = False
    """May be a list of [amount, rate] points, by rising amount of one op."""
    choices: tuple[str, ...] = ()
    replaces: tuple[str, ...] = ()
    """Keys that a new value of this one makes void, because they stood for the same thing more directly."""
    whole: bool = False
    """Says something of the machine, not of the part: stays when another part is chosen."""

    @property
    def section(self) -> str:
        return self.name.split(".")[0]


_TRAFFIC = "each byte that a DMA engine moves passes DRAM once"

_ALL = (
    # ---- GPU
    Key("gpu.part", "text", "a GPU of the catalog, whose numbers hold unless given here", whole=True),
    Key("gpu.count", "count", "GPUs in the machine, all alike", 1, "one GPU", whole=True),
    Key("gpu.capacity", "bytes", "memory of one GPU, as the driver reports it", required=True),
    Key(
        "gpu.reserve",
        "bytes",
        "of that, not usable: CUDA context, library workspaces, fragmentation",
        2**30,
        "assumed: about 0.5 GiB of context and library workspaces, and as much for fragmentation",
    ),
    *(
        Key(
            f"gpu.peak_{d}",
            "flops/s",
            f"the vendor's dense {d} peak with fp32 accumulation",
            replaces=(f"gpu.matmul_{d}", f"gpu.attention_{d}"),
        )
        for d in ("fp32", "bf16", "fp16")
    ),
    Key(
        "gpu.matmul_frac",
        "number",
        "share of the peak that a transformer block's matmuls reach",
        0.6,
        "assumed: large matmuls reach 0.5 to 0.9 of the peak",
    ),
    *(
        Key(
            f"gpu.matmul_{d}",
            "flops/s",
            f"achieved rate of a block's {d} matmuls, over the FLOPs of one op",
            curve=True,
        )
        for d in ("fp32", "bf16", "fp16")
    ),
    Key(
        "gpu.attention_frac",
        "number",
        "attention's rate over matmul's rate, FLOPs counted on the full square",
        1.0,
        "assumed: flash kernels run at two thirds of matmul's rate (arXiv 2307.08691), skip half of a causal square",
    ),
    *(
        Key(f"gpu.attention_{d}", "flops/s", f"achieved rate of {d} attention", curve=True)
        for d in ("fp32", "bf16", "fp16")
    ),
    Key("gpu.memory_bandwidth", "bytes/s", "bandwidth of the GPU's memory", replaces=("gpu.elementwise", "gpu.adam")),
    Key(
        "gpu.memory_frac",
        "number",
        "share of that bandwidth that elementwise kernels reach",
        0.8,
        "assumed: streaming kernels reach 0.75 to 0.92 of the data sheet's bandwidth",
    ),
    Key("gpu.elementwise", "bytes/s", "achieved rate of memory-bound kernels", curve=True),
    Key("gpu.adam", "parameters/s", "optimizer updates on the GPU", curve=True),
    Key(
        "gpu.adam_traffic",
        "number",
        "bytes of GPU memory traffic per parameter updated on the GPU",
        30,
        "12 B of states and 2 B of gradient read, 12 B of states and 2 B of parameter written, rounded up",
    ),
    Key("gpu.latency", "s", "fixed cost of one op on the GPU", 20e-6, "assumed: a few kernel launches"),
    Key("gpu.price", "USD", "of one GPU"),
    Key("gpu.power", "W", "of one GPU at full load"),
    # ---- links
    Key(
        "link.h2d",
        "bytes/s",
        "host to GPU, pinned memory, one GPU alone (over the bytes of one copy)",
        required=True,
        curve=True,
    ),
    Key("link.d2h", "bytes/s", "GPU to host, likewise", required=True, curve=True),
    Key("link.both", "bytes/s", "both directions of one GPU's link together; independent when left out"),
    Key("link.latency", "s", "fixed cost of one copy", 15e-6, "assumed: driver call and DMA set-up"),
    Key("link.host_h2d", "bytes/s", "host to all GPUs together; no limit when left out", whole=True),
    Key("link.host_d2h", "bytes/s", "all GPUs together to host", whole=True),
    Key("link.p2p", "bytes/s", "from one GPU to another; no such stream when left out", whole=True),
    Key(
        "link.p2p_path",
        "text",
        "pcie: shares each GPU's link with its host copies; own: a fabric of its own (NVLink)",
        "pcie",
        "the usual case without NVLink",
        choices=("pcie", "own"),
        whole=True,
    ),
    # ---- host
    Key("host.capacity", "bytes", "DRAM", required=True),
    Key(
        "host.reserve",
        "bytes",
        "of that, not usable by a plan: system, Python, framework",
        8 * 2**30,
        "assumed: 8 GiB for system, Python and framework",
    ),
    Key(
        "host.memory_bandwidth",
        "bytes/s",
        "DRAM bandwidth, shared by copies, file I/O and Adam; no limit when left out",
    ),
    Key("host.cores", "count", "physical cores, for the record"),
    Key("host.adam", "parameters/s", "Adam on all cores with nothing beside it", required=True, curve=True),
    Key(
        "host.adam_traffic",
        "number",
        "bytes of DRAM traffic per parameter updated on the host",
        30,
        "16 B read and 14 B written per parameter (fp16 gradient and parameter, fp32 states)",
    ),
    Key("host.copy_traffic", "number", "bytes of DRAM traffic per byte copied to or from a GPU", 1, _TRAFFIC),
    Key("host.io_traffic", "number", "bytes of DRAM traffic per byte of file I/O with O_DIRECT", 1, _TRAFFIC),
    Key("host.latency", "s", "fixed cost of one update", 20e-6, "assumed: hand-over to the worker threads"),
    Key(
        "host.rounding",
        "text",
        "how host buffers are rounded up: exact (arenas), page, or power-of-two (pinned caching allocator)",
        "exact",
        "tierplan's runtime carves buffers out of arenas",
        choices=("exact", "page", "power-of-two"),
    ),
    Key("host.price", "USD", "of the machine without GPUs and drives"),
    Key("host.power", "W", "of the machine without GPUs and drives, at full load"),
    # ---- drives
    Key("nvme.part", "text", "a drive of the catalog, whose numbers hold unless given here", whole=True),
    Key("nvme.drives", "count", "drives in RAID-0, all alike; 0 for none", 1, "one drive", whole=True),
    Key("nvme.capacity", "bytes", "of one drive"),
    Key("nvme.read", "bytes/s", "sequential O_DIRECT reads of one drive (over the bytes of one op)", curve=True),
    Key("nvme.write", "bytes/s", "sequential writes of one drive in steady state, beyond its cache", curve=True),
    Key(
        "nvme.mixed",
        "number",
        "room for reads and writes together: r/read + w/write <= mixed; 1 = they take turns, 2 = independent",
        1.0,
        "assumed: mixed traffic of one drive sits near the serial sum of reads and writes",
    ),
    Key("nvme.latency", "s", "fixed cost of one read or write", 100e-6, "typical of NAND flash"),
    Key(
        "nvme.array_read",
        "bytes/s",
        "most that all drives together read; no limit beyond the drives' own when left out",
        whole=True,
    ),
    Key("nvme.array_write", "bytes/s", "most that all drives together write", whole=True),
    Key("nvme.read_share", "number", "weight of reads where they contend", 1.0, "equal treatment", whole=True),
    Key("nvme.write_share", "number", "weight of writes where they contend", 1.0, "equal treatment", whole=True),
    Key("nvme.endurance", "bytes", "that may be written to one drive in its life (TBW)"),
    Key("nvme.price", "USD", "of one drive"),
    Key("nvme.power", "W", "of one drive when active"),
)

KEYS: Mapping[str, Key] = MappingProxyType({key.name: key for key in _ALL})


def find_key(name: str) -> Key:
    """The key of that name. Raises `MachineError` that lists the keys that exist, the likely ones first."""
    if name in KEYS:
        return KEYS[name]
    section = name.split(".")[0]
    close = difflib.get_close_matches(name, KEYS, n=3, cutoff=0.6)
    siblings = [key for key in KEYS if KEYS[key].section == section] or list(KEYS)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    raise MachineError(f"no key {name!r} in a machine's description; {hint}the keys are {', '.join(siblings)}")
