"""nvidia-smi: which GPUs there are, with memory, power limit and PCIe link, and how they are connected.

    nvidia-smi --query-gpu=name,memory.total,power.limit,pcie.link.gen.max,pcie.link.width.max --format=csv

Only `name` is required. For GPUs of the catalog, the catalog's numbers are used as well. For others, give
`gpu.memory_bandwidth` and a peak with --set. Link speeds are the standard's less a fifth; measure them.

    nvidia-smi topo -m > topo.txt

`NV#` is NVLink, `PIX` and `PXB` are PCIe switches. NVLink's links are those of the standard, 25 GB/s each way, less a
fifth; measure them with nvbandwidth or nccl-tests.
"""

from __future__ import annotations

import csv
import io
import re
import tomllib
from importlib.resources import files

from tierplan.hwmodels.description import Quantity
from tierplan.hwmodels.importers.reading import ImportedFileError
from tierplan.hwmodels.values.units import LINK_FRAC, parse_amount

HOW = "nvidia-smi --query-gpu=name,memory.total,power.limit,pcie.link.gen.max,pcie.link.width.max --format=csv"
UNITS = {"MiB": 2**20, "GiB": 2**30, "W": 1, "": 1}


def known_part(folder: str, name: str) -> str | None:
    """The part of the catalog that the system calls so; None where it has none: laptops' GPUs are other chips."""
    models = tomllib.loads(files("tierplan.hwmodels").joinpath("catalog/models.toml").read_text(encoding="utf-8"))
    found = ((re.search(pattern, name.strip(), re.IGNORECASE), part) for pattern, part in models[folder].items())
    return next((match.expand(part).lower() for match, part in found if match), None)


def read_nvidia_smi(text: str, *, where: str) -> dict[str, Quantity]:
    """Values of the description from nvidia-smi's CSV with its header. Raises `ImportedFileError`."""
    rows = [
        [cell.strip() for cell in row] for row in csv.reader(io.StringIO(text)) if any(cell.strip() for cell in row)
    ]
    if len(rows) < 2:
        raise ImportedFileError(f"{where} has {len(rows)} lines; it needs a header and one line per GPU: {HOW}")
    header, units = zip(*(cell.rstrip("]").partition(" [")[::2] for cell in rows[0]), strict=True)
    if "name" not in header:
        raise ImportedFileError(f"{where} has the columns {', '.join(header)}, but not name; write it with: {HOW}")
    gpus = []
    for line, row in enumerate(rows[1:], start=2):
        if len(row) != len(header):
            raise ImportedFileError(f"line {line} of {where} has {len(row)} cells, but the header {len(header)}")
        with_units = (f"{c} {unit}".strip() if c[-1:].isdigit() else c for c, unit in zip(row, units, strict=True))
        gpus.append(dict(zip(header, with_units, strict=True)))
    if any(gpu["name"] != gpus[0]["name"] for gpu in gpus):
        names = ", ".join(sorted({gpu["name"] for gpu in gpus}))
        raise ImportedFileError(
            f"{where} has different GPUs ({names}); a machine's GPUs are alike: keep lines of one kind"
        )
    gpu, source = gpus[0], f"{where}: nvidia-smi"
    values = {"gpu.count": Quantity(float(len(gpus)), "measured", source)}
    if (part := known_part("gpus", gpu["name"])) is not None:
        values["gpu.part"] = Quantity(part, "measured", f"{source}: {gpu['name']}")
    if (memory := _number(gpu.get("memory.total"), where)) is not None:
        values["gpu.capacity"] = Quantity(memory, "measured", source)
    if (power := _number(gpu.get("power.limit"), where)) is not None:
        values["gpu.power"] = Quantity(power, "measured", f"{source}: power limit")
    generation = _number(gpu.get("pcie.link.gen.max"), where)
    width = _number(gpu.get("pcie.link.width.max"), where)
    if generation and width:
        link = f"PCIe {generation:.0f}.0 x{width:.0f}"
        rate, note = parse_amount(link, "bytes/s", what=where), f"{source}: {100 * LINK_FRAC:.0f} % of {link}"
        values |= {key: Quantity(rate, "nameplate", note) for key in ("link.h2d", "link.d2h")}
    return values


def _number(cell: str | None, where: str) -> float | None:
    """A number with its unit; None where nvidia-smi does not know ([N/A], [Not Supported])."""
    if cell is None or cell.startswith("[") or cell in ("N/A", ""):
        return None
    match = re.fullmatch(r"([\d.]+)\s*(MiB|GiB|W|)", cell)
    if match is None:
        raise ImportedFileError(f"{where} has the value {cell!r}; expected a number with MiB, GiB, W or no unit")
    return float(match[1]) * UNITS[match[2]]


TOPO_HOW = "nvidia-smi topo -m > FILE"
NVLINK_BYTES_PER_S = 25e9
"""One link, one direction, from NVLink 2 to 4."""
SWITCHED = ("PIX", "PXB")


def read_nvidia_topo(text: str, *, where: str) -> dict[str, Quantity]:
    """Values of the description from the matrix. Raises `ImportedFileError`."""
    pairs = _pairs(text, where)
    if not pairs:
        return {}
    links = [int(match[1]) if (match := re.fullmatch(r"NV(\d+)", how)) else 0 for how in pairs.values()]
    source = f"{where}: nvidia-smi topo"
    if not all(links):
        return {"link.p2p_path": Quantity("pcie", "measured", f"{source}: {', '.join(sorted(set(pairs.values())))}")}
    rate = LINK_FRAC * NVLINK_BYTES_PER_S * min(links)
    note = f"{source}: {100 * LINK_FRAC:.0f} % of {min(links)} NVLinks"
    return {"link.p2p_path": Quantity("own", "measured", source), "link.p2p": Quantity(rate, "nameplate", note)}


def switch_groups(text: str, *, where: str) -> list[tuple[int, ...]]:
    """GPUs behind one PCIe switch, for the file's [[switch]] entries."""
    import networkx as nx  # which all that ask for a machine would import

    switched = nx.Graph(pair for pair, how in _pairs(text, where).items() if how in SWITCHED)
    return sorted(tuple(sorted(group)) for group in nx.connected_components(switched))


def _pairs(text: str, where: str) -> dict[tuple[int, int], str]:
    """How each two GPUs are connected."""
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line).split() for line in text.splitlines()]
    rows = {int(words[0][3:]): words[1:] for words in lines if words and re.fullmatch(r"GPU\d+", words[0])}
    header = next((words for words in lines if words and words[0] == "GPU0" and "X" not in words), None)
    rows = {gpu: words for gpu, words in rows.items() if "X" in words}
    if header is None or not rows or any(len(words) < len(rows) for words in rows.values()):
        raise ImportedFileError(f"{where} has no matrix of GPUs; write it with: {TOPO_HOW}")
    return {(a, b): rows[a][b] for a in rows for b in rows if a < b}
