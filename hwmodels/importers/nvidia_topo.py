"""nvidia-smi topo -m: how GPUs are connected to each other. `NV#` is NVLink, `PIX` and `PXB` are PCIe switches.

    nvidia-smi topo -m > topo.txt

NVLink's links are those of the standard, 25 GB/s each way, less a fifth; measure them with nvbandwidth or nccl-tests.
"""

from __future__ import annotations

import re

from tierplan.hwmodels.description import Quantity
from tierplan.hwmodels.importers.reading import ImportedFileError
from tierplan.hwmodels.units import LINK_FRAC

HOW = "nvidia-smi topo -m > FILE"
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
    pairs = _pairs(text, where)
    groups: list[set[int]] = []
    for (a, b), how in pairs.items():
        if how in SWITCHED:
            touched = [group for group in groups if group & {a, b}]
            groups = [group for group in groups if group not in touched] + [set().union({a, b}, *touched)]
    return sorted(tuple(sorted(group)) for group in groups)


def _pairs(text: str, where: str) -> dict[tuple[int, int], str]:
    """How each two GPUs are connected."""
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line).split() for line in text.splitlines()]
    rows = {int(words[0][3:]): words[1:] for words in lines if words and re.fullmatch(r"GPU\d+", words[0])}
    header = next((words for words in lines if words and words[0] == "GPU0" and "X" not in words), None)
    rows = {gpu: words for gpu, words in rows.items() if "X" in words}
    if header is None or not rows or any(len(words) < len(rows) for words in rows.values()):
        raise ImportedFileError(f"{where} has no matrix of GPUs; write it with: {HOW}")
    return {(a, b): rows[a][b] for a in rows for b in rows if a < b}
