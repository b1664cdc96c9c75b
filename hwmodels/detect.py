"""What this machine is, by what its system says: a machine of the catalog to start from, and what nobody told.

ask_system()  the texts of nvidia-smi, lspci, lsblk, lscpu and the kernel, of those that are there
propose(...)  values of a description from them, the nearest machine of the catalog, and what is not known
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tierplan.hwmodels.catalog import catalog_names, load_description
from tierplan.hwmodels.description import Quantity
from tierplan.hwmodels.importers.nvidia_smi import HOW, gpu_part, read_nvidia_smi
from tierplan.hwmodels.importers.nvidia_topo import read_nvidia_topo, switch_groups

COMMANDS: Mapping[str, str] = {
    "nvidia-smi": HOW,
    "nvidia-smi topo": "nvidia-smi topo -m",
    "lspci": "lspci",
    "lsblk": "lsblk -J -b -d -o NAME,MODEL,SIZE,TRAN",
    "lscpu": "lscpu",
}
DRIVES: Mapping[str, str] = {
    r"990 PRO": "990-pro", r"980 PRO": "980-pro", r"SSD 980\b": "samsung-980", r"T700": "t700", r"T500": "t500",
    r"SN850X": "sn850x-4tb", r"NM790": "nm790", r"NM800": "nm800-pro", r"S50 Lite": "gammix-s50-lite",
    r"M450": "spatium-m450", r"MZQL2|PM9A3": "pm9a3", r"MZWL6|PM9D3": "pm9d3a", r"9400": "micron-9400-pro",
    r"SSDPF2KX|P5510": "p5510", r"SSDPF21Q|P5800X": "p5800x",
}  # fmt: skip
"""Models as the system names them -> part of the catalog."""
RATES: Mapping[str, str] = {
    "link.h2d": "copies between host and GPU", "host.adam": "the optimizer on the host",
    "host.memory_bandwidth": "DRAM bandwidth", "nvme.write": "the drives' writes beyond their cache",
}  # fmt: skip
"""What no such command tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A machine of the catalog, what is different here, and what could not be found out."""

    base: str
    values: Mapping[str, Quantity]
    unknown: tuple[str, ...]


def ask_system() -> dict[str, str]:
    """What the commands that are there print, by their names."""
    said = {}
    for name, line in COMMANDS.items():
        words = line.split()
        if shutil.which(words[0]):
            done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
            if done.returncode == 0 and done.stdout.strip():
                said[name] = done.stdout
    if (meminfo := Path("/proc/meminfo")).exists():
        said["meminfo"] = meminfo.read_text(encoding="utf-8")
    return said


def propose(said: Mapping[str, str]) -> Proposal:
    """The proposal that these texts allow. Raises `ImportedFileError` where one is not what its command prints."""
    values: dict[str, Quantity] = {}
    unknown = [f"{name}: not installed, or it failed" for name in COMMANDS if name not in said]
    if "nvidia-smi" in said:
        values |= read_nvidia_smi(said["nvidia-smi"], where="this machine")
    elif names := re.findall(r"(?:VGA|3D|Display).*?NVIDIA.*?\[([^\]]+)\]", said.get("lspci", "")):
        values["gpu.count"] = Quantity(float(len(names)), "measured", "lspci")
        if part := gpu_part(names[0]):
            values["gpu.part"] = Quantity(part, "measured", f"lspci: {names[0]}")
    if "gpu.part" not in values:
        unknown.append("gpu.part: no GPU of the catalog was found")
    if "nvidia-smi topo" in said and values.get("gpu.count", Quantity(1.0)).value != 1.0:
        values |= read_nvidia_topo(said["nvidia-smi topo"], where="this machine")
        groups = switch_groups(said["nvidia-smi topo"], where="this machine")
        unknown += [f"limit of the [[switch]] with {', '.join(f'GPU {g}' for g in group)}" for group in groups]
    values |= _host(said) | _drives(said.get("lsblk", ""), unknown)
    base = min(catalog_names(), key=lambda name: _distance(name, values))
    unknown += [f"{key}: {what}; run: tierplan machine measure" for key, what in RATES.items() if key not in values]
    return Proposal(base=base, values=values, unknown=tuple(unknown))


def _host(said: Mapping[str, str]) -> dict[str, Quantity]:
    found = {}
    if match := re.search(r"MemTotal:\s*(\d+) kB", said.get("meminfo", "")):
        found["host.capacity"] = Quantity(float(match[1]) * 1024, "measured", "/proc/meminfo")
    each, sockets = (re.search(rf"{what}:\s*(\d+)", said.get("lscpu", "")) for what in (r"per socket", r"Socket\(s\)"))
    if each and sockets:
        found["host.cores"] = Quantity(float(each[1]) * float(sockets[1]), "measured", "lscpu")
        found["host.sockets"] = Quantity(float(sockets[1]), "measured", "lscpu")
    return found


def _drives(text: str, unknown: list[str]) -> dict[str, Quantity]:
    disks = json.loads(text).get("blockdevices", []) if text else []
    disks = [disk for disk in disks if disk.get("tran") == "nvme" or str(disk.get("name", "")).find("nvme") == 0]
    if not disks:
        return {"nvme.drives": Quantity(0.0, "measured", "lsblk: no NVMe drive")} if text else {}
    model, alike = (
        str(disks[0].get("model") or "").strip(),
        [d for d in disks if d.get("model") == disks[0].get("model")],
    )
    found = {
        "nvme.drives": Quantity(float(len(alike)), "measured", f"lsblk: {model}"),
        "nvme.capacity": Quantity(float(disks[0]["size"]), "measured", "lsblk"),
    }
    part = next((part for pattern, part in DRIVES.items() if re.search(pattern, model, re.IGNORECASE)), None)
    if part:
        found["nvme.part"] = Quantity(part, "measured", f"lsblk: {model}")
    else:
        unknown.append(f"nvme.part: {model or 'a drive without a name'} is not in the catalog")
    if len(alike) < len(disks):
        unknown.append(f"{len(disks) - len(alike)} drives of other models: a machine's drives are alike")
    return found


def _distance(name: str, values: Mapping[str, Quantity]) -> tuple[bool, bool, float, str]:
    """Machines with the same GPU come first, then the same number of them, then the nearest DRAM."""
    other = load_description(name)
    same = [(own := other.quantity(key)) is not None and key in values and own.value == values[key].value
            for key in ("gpu.part", "gpu.count")]  # fmt: skip
    here, there = values.get("host.capacity", Quantity(0.0)).value, other.number("host.capacity") or 0.0
    assert isinstance(here, float)
    return not same[0], not same[1], abs(here - there), name
