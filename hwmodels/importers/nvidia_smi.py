"""nvidia-smi: which GPUs there are, with memory, power limit and PCIe link.

    nvidia-smi --query-gpu=name,memory.total,power.limit,pcie.link.gen.max,pcie.link.width.max --format=csv

Only `name` is required. For GPUs of the catalog, the catalog's numbers are used as well. For others, give
`gpu.memory_bandwidth` and a peak with --set. Link speeds are the standard's less a fifth; measure them.
"""

from __future__ import annotations

import csv
import io
import re

from tierplan.hwmodels.description import Quantity
from tierplan.hwmodels.importers.reading import ImportedFileError

HOW = "nvidia-smi --query-gpu=name,memory.total,power.limit,pcie.link.gen.max,pcie.link.width.max --format=csv"

PARTS = (
    (r"RTX (3060|3070|3080|3090|4060|4070|4080|4090|5070|5080|5090)$", r"rtx-\1"),
    (r"RTX (3060|3090|5070) Ti$", r"rtx-\1-ti"),
    (r"RTX (4060|5060) Ti$", r"rtx-\1-ti-16gb"),
    (r"RTX 4070 Ti SUPER$", "rtx-4070-ti-super"),
    (r"RTX 4080 SUPER$", "rtx-4080-super"),
    (r"GTX 1080 Ti$", "gtx-1080-ti"),
    (r"RTX (A5000|A6000)$", r"rtx-\1"),
    (r"RTX 6000 Ada Generation$", "rtx-6000-ada"),
    (r"RTX PRO 6000 Blackwell Server", "rtx-pro-6000-server"),
    (r"RTX PRO 6000 Blackwell Workstation", "rtx-pro-6000"),
    (r"(?<![\w-])(L4|L40S|A10G|A40|T4|GB200|GB300)$", r"\1"),
    (r"A100.*PCI.*(40|80)GB", r"a100-pcie-\1gb"),
    (r"A100.*SXM.*(40|80)GB", r"a100-sxm-\1gb"),
    (r"A800.*SXM.*80GB", "a800-sxm-80gb"),
    (r"V100-SXM[23]-32GB", "v100-sxm2-32gb"),
    (r"V100-PCIE-32GB", "v100-pcie-32gb"),
    (r"H100 80GB HBM3", "h100-sxm-80gb"),
    (r"H100 PCIe", "h100-pcie-80gb"),
    (r"H200(?! NVL)", "h200-sxm-141gb"),
    (r"(?<!G)B200$", "b200-sxm-180gb"),
    (r"(?<!G)B300", "b300-sxm-270gb"),
)
"""Names as the driver reports them -> part of the catalog."""
LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""One PCIe lane, one direction, by generation, after line coding."""
LINK_FRAC = 0.8
"""Share of the link's rate that large copies of pinned memory reach."""
UNITS = {"MiB": 2**20, "GiB": 2**30, "W": 1, "": 1}


def gpu_part(name: str) -> str | None:
    """The part of the catalog that the driver calls so; None where it has none: laptops' GPUs are other chips."""
    found = ((re.search(pattern, name.strip()), part) for pattern, part in PARTS)
    return next((match.expand(part).lower() for match, part in found if match), None)


def read_nvidia_smi(text: str, *, where: str) -> dict[str, Quantity]:
    """Values of the description from nvidia-smi's CSV with its header. Raises `ImportedFileError`."""
    rows = [
        [cell.strip() for cell in row] for row in csv.reader(io.StringIO(text)) if any(cell.strip() for cell in row)
    ]
    if len(rows) < 2:
        raise ImportedFileError(f"{where} has {len(rows)} lines; it needs a header and one line per GPU: {HOW}")
    header = [re.sub(r"\s*\[.*\]$", "", cell) for cell in rows[0]]
    if "name" not in header:
        raise ImportedFileError(f"{where} has the columns {', '.join(header)}, but not name; write it with: {HOW}")
    gpus = []
    for line, row in enumerate(rows[1:], start=2):
        if len(row) != len(header):
            raise ImportedFileError(f"line {line} of {where} has {len(row)} cells, but the header {len(header)}")
        gpus.append(dict(zip(header, row, strict=True)))
    if any(gpu["name"] != gpus[0]["name"] for gpu in gpus):
        names = ", ".join(sorted({gpu["name"] for gpu in gpus}))
        raise ImportedFileError(
            f"{where} has different GPUs ({names}); a machine's GPUs are alike: keep lines of one kind"
        )
    gpu, source = gpus[0], f"{where}: nvidia-smi"
    values = {"gpu.count": Quantity(float(len(gpus)), "measured", source)}
    if (part := gpu_part(gpu["name"])) is not None:
        values["gpu.part"] = Quantity(part, "measured", f"{source}: {gpu['name']}")
    if (memory := _number(gpu.get("memory.total"), where)) is not None:
        values["gpu.capacity"] = Quantity(memory, "measured", source)
    if (power := _number(gpu.get("power.limit"), where)) is not None:
        values["gpu.power"] = Quantity(power, "measured", f"{source}: power limit")
    generation = _number(gpu.get("pcie.link.gen.max"), where)
    width = _number(gpu.get("pcie.link.width.max"), where)
    if generation in LANE_BYTES_PER_S and width:
        rate = LINK_FRAC * LANE_BYTES_PER_S[int(generation)] * width
        note = f"{source}: {100 * LINK_FRAC:.0f} % of PCIe {generation:.0f}.0 x{width:.0f}"
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
