"""What this machine is, by what its system says: a machine of the catalog to start from, and what nobody told."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierplan.hwmodels.catalog import catalog_names, load_description
from tierplan.hwmodels.description import Quantity, Switch
from tierplan.hwmodels.importers.nvidia_smi import HOW, known_part, read_nvidia_smi, read_nvidia_topo, switch_groups
from tierplan.hwmodels.importers.reading import ImportedFileError
from tierplan.hwmodels.values.units import parse_amount

COMMANDS: Mapping[str, str] = {
    "nvidia-smi": HOW,
    "nvidia-smi topo": "nvidia-smi topo -m",
    "lspci": "lspci",
    "lsblk": "lsblk -J -b -d -o NAME,MODEL,SIZE,TRAN",
    "lscpu": "lscpu",
}
MOST_S = 30.0
"""For one of them."""
MEMORY_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Of the control group that this process lives in, such as a container's."""
MEASURED: Mapping[str, str] = {
    "host.cores": "cores of the CPUs", "link.h2d": "copies between host and GPU",
    "host.adam": "the optimizer on the host", "host.memory_bandwidth": "DRAM bandwidth",
    "nvme.write": "the drives' writes beyond their cache",
}  # fmt: skip
"""What no such command tells, or none on some systems."""
GENERATIONS: Mapping[str, int] = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}
"""Of PCIe, by GT/s."""
MOST_LANES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A machine of the catalog, what is different here, and what could not be found out."""

    base: str
    values: Mapping[str, Quantity]
    unknown: tuple[str, ...]
    switches: tuple[Switch, ...]
    """Links that several devices share."""


def ask_system() -> dict[str, str]:
    """What the commands that are there print, by their names, and the kernel's texts of memory and PCIe devices."""
    said = {}
    for name, line in COMMANDS.items():
        words = line.split()
        if shutil.which(words[0]):
            with suppress(OSError, subprocess.TimeoutExpired):  # `nvidia-smi` hangs where a GPU does
                env = {**os.environ, "LC_ALL": "C"}  # `lscpu` speaks the user's language
                done = subprocess.run(words, capture_output=True, timeout=MOST_S, check=False, env=env)
                if done.returncode == 0 and done.stdout.strip():
                    said[name] = done.stdout.decode(errors="replace")
    if (meminfo := Path("/proc/meminfo")).exists():
        said["meminfo"] = meminfo.read_text(encoding="utf-8")
    said |= {str(path): path.read_text(encoding="utf-8") for path in MEMORY_LIMITS if path.exists()}
    if (devices := Path("/sys/bus/pci/devices")).exists():
        said["pci"] = pci_devices(devices)
    return said


def pci_devices(devices: Path) -> str:
    """Drives and GPUs as JSON: kind, NUMA node, links upwards, each as its device's name, GT/s and lanes at most."""
    found = []
    for device in sorted(devices.iterdir()):
        kind = {"0x0108": "nvme", "0x0300": "gpu", "0x0302": "gpu"}.get((device / "class").read_text()[:6])
        if kind == "nvme" or (kind and (device / "vendor").read_text().strip() == "0x10de"):
            path = device.resolve()
            ends = [at for at in (path, *path.parents) if (at / "max_link_speed").exists()]
            most = [[(at / f"max_link_{what}").read_text().split()[0] for what in ("speed", "width")] for at in ends]
            links = [(at.name, *of) for at, of in zip(ends, most, strict=True)]
            node = at.read_text().strip() if (at := device / "numa_node").exists() else "-1"  # a kernel without NUMA
            found.append({"kind": kind, "node": node, "links": links})
    return json.dumps(found)


def propose(said: Mapping[str, str]) -> Proposal:
    """The proposal that these texts allow. What a text is not, or says of GPUs that are not alike, is unknown."""
    values: dict[str, Quantity] = {}
    unknown = [f"{name}: not installed, or it failed" for name in COMMANDS if name not in said]
    try:
        if "nvidia-smi" in said:
            values |= read_nvidia_smi(said["nvidia-smi"], where="nvidia-smi")
        elif names := re.findall(r"(?:VGA|3D|Display).*?NVIDIA.*?\[([^\]]+)\]", said.get("lspci", "")):
            values["gpu.count"] = Quantity(float(len(names)), "measured", "lspci")
            if part := known_part("gpus", names[0]):
                values["gpu.part"] = Quantity(part, "measured", f"lspci: {names[0]}")
        if "nvidia-smi topo" in said and values.get("gpu.count", Quantity(1.0)).value != 1.0:
            values |= read_nvidia_topo(said["nvidia-smi topo"], where="nvidia-smi topo")
            groups = switch_groups(said["nvidia-smi topo"], where="nvidia-smi topo")
            unknown += [f"limit of the [[switch]] with {', '.join(f'GPU {g}' for g in group)}" for group in groups]
    except ImportedFileError as error:
        unknown.append(f"GPUs: {error}")
    if "gpu.part" not in values:
        unknown.append("gpu.part: no GPU of the catalog was found")
    values |= _host(said) | _drives(said.get("lsblk", ""), unknown)
    switches = _links(json.loads(said["pci"]), values, unknown) if "pci" in said else ()
    base = min(catalog_names(), key=lambda name: _distance(name, values))
    has_none = "nvme.drives" in values and not values["nvme.drives"].value
    asked = [key for key in MEASURED if key not in values and not (has_none and key.startswith("nvme."))]
    unknown += [f"{key}: {MEASURED[key]}; run: tierplan machine measure" for key in asked]
    return Proposal(base=base, values=values, unknown=tuple(unknown), switches=switches)


def _host(said: Mapping[str, str]) -> dict[str, Quantity]:
    found = {}
    if match := re.search(r"MemTotal:\s*(\d+) kB", said.get("meminfo", "")):
        most = [(float(match[1]) * 1024, "/proc/meminfo")]
        most += [(float(said[at]), at) for at in map(str, MEMORY_LIMITS) if said.get(at, "").strip().isdigit()]
        found["host.capacity"] = Quantity(min(most)[0], "measured", min(most)[1])
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
    commonest = Counter(disk.get("model") for disk in disks).most_common(1)[0][0]
    model = str(commonest or "").strip()
    alike = [disk for disk in disks if disk.get("model") == commonest]
    found = {
        "nvme.drives": Quantity(float(len(alike)), "measured", f"lsblk: {model}"),
        "nvme.capacity": Quantity(min(float(disk["size"]) for disk in alike), "measured", "lsblk"),
    }
    if part := known_part("drives", model):
        found["nvme.part"] = Quantity(part, "measured", f"lsblk: {model}")
    else:
        unknown.append(f"nvme.part: {model or 'a drive without a name'} is not in the catalog")
    if len(alike) < len(disks):
        unknown.append(f"{len(disks) - len(alike)} drives of other models: a machine's drives are alike")
    return found


def _links(devices: list[dict[str, Any]], values: dict[str, Quantity], unknown: list[str]) -> tuple[Switch, ...]:
    """The drives' slots, where these are less than the drives, and the links above that several devices share."""
    shared: dict[str, tuple[str, list[str]]] = {}
    counts = Counter(device["kind"] for device in devices)
    devices = sorted(devices, key=lambda device: device["kind"])  # GPUs first
    for index, device in enumerate(devices):
        links, is_drive = device["links"], device["kind"] == "nvme"
        if is_drive and len(links) > 1 and (slot := _pcie(links[:2])) not in ("", _pcie(links[:1])):
            rate = parse_amount(slot, "bytes/s", what="a slot")
            values["nvme.slot"] = Quantity(rate, "nameplate", f"the kernel: {slot} of a drive's {_pcie(links[:1])}")
        above, link = (links[2][0], _pcie(links[2:4])) if len(links) > 2 else ("", "")
        if is_drive and links and re.match(r"0000:00:1[a-d]\.", links[-1][0]):
            above = "chipset"
        if above:
            shared.setdefault(above, (link, []))[1].append("nvme" if is_drive else f"gpu{index}")
    switches = []
    for above, (link, members) in shared.items():
        of = tuple(m for m in dict.fromkeys(members) if m != "nvme" or members.count(m) == counts["nvme"])
        if not link or (members.count("nvme") not in (0, counts["nvme"])):
            unknown.append(f"limit of the [[switch]] {above} with {', '.join(members)}")
        elif len(members) > 1:
            rate = parse_amount(link, "bytes/s", what="a link")
            switches.append(Switch(f"pci-{above}", rate, of, f"the kernel: 80 % of {link}", "nameplate"))
    if len(nodes := sorted({device["node"] for device in devices} - {"-1"})) > 1:
        named = [f"gpu{i}" if d["kind"] == "gpu" else "nvme" for i, d in enumerate(devices)]
        on = {node: sorted({m for m, d in zip(named, devices, strict=True) if d["node"] == node}) for node in nodes}
        where = "; ".join(f"{', '.join(members)} on {node}" for node, members in on.items())
        unknown.append(f"limit of a [[switch]] for devices that use another socket's memory: NUMA nodes have {where}")
    return tuple(switches)


def _pcie(links: list[list[str]]) -> str:
    """The link that the least of these ends can be; empty where one does not say, as those of virtual machines."""
    if not all(speed in GENERATIONS and 0 < int(lanes) <= MOST_LANES for _, speed, lanes in links):
        return ""
    generation = min(GENERATIONS[speed] for _, speed, _ in links)
    return f"PCIe {generation}.0 x{min(int(lanes) for _, _, lanes in links)}"


def _distance(name: str, values: Mapping[str, Quantity]) -> tuple[bool, bool, float, str]:
    """Machines with the same GPU come first, then the same number of them, then the nearest DRAM."""
    other = load_description(name)
    same = [(own := other.quantity(key)) is not None and key in values and own.value == values[key].value
            for key in ("gpu.part", "gpu.count")]  # fmt: skip
    here, there = values.get("host.capacity", Quantity(0.0)).value, other.number("host.capacity") or 0.0
    assert isinstance(here, float)
    return not same[0], not same[1], abs(here - there), name
