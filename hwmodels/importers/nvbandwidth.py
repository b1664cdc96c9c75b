"""nvbandwidth: copies between host and GPU by the copy engines, and between GPUs.

    nvbandwidth --format json > nvbandwidth.json          (-j in some versions)

The GPUs of a machine are assumed to be alike, so the median over GPUs counts. nvbandwidth's GB is 1e9 bytes. Its
bidirectional tests report the rate of one direction while both run; both together carry twice that.
"""

from __future__ import annotations

import statistics

from tierplan.hwmodels.description import Quantity
from tierplan.hwmodels.importers.reading import ImportedFileError, json_object

HOW = "nvbandwidth --format json > FILE"
GB = 1e9

TESTS = {
    "link.h2d": ("host_to_device_memcpy_ce",),
    "link.d2h": ("device_to_host_memcpy_ce",),
    "link.p2p": ("device_to_device_memcpy_write_ce", "device_to_device_memcpy_read_ce"),
}
BOTH = ("host_to_device_bidirectional_memcpy_ce", "device_to_host_bidirectional_memcpy_ce")


def read_nvbandwidth(text: str, *, where: str) -> dict[str, Quantity]:
    """Values of the description from nvbandwidth's JSON. Raises `ImportedFileError`."""
    record = json_object(text, where=where, tool="nvbandwidth", how=HOW)
    body = record.get("nvbandwidth")
    if not isinstance(body, dict):
        raise ImportedFileError(f"{where} is not of nvbandwidth; write it with: {HOW}")
    if error := body.get("error"):
        raise ImportedFileError(f"nvbandwidth failed, as {where} says: {error}")
    cases = body.get("testcases")
    if not isinstance(cases, list):
        raise ImportedFileError(f"{where} has no testcases; write it with: {HOW}")
    rates = {str(c.get("name")): _cells(c, where) for c in cases if isinstance(c, dict) and c.get("status") == "Passed"}
    source = f"{where}: nvbandwidth {body.get('version', '')} {body.get('git_version', '')}".strip()
    values = {
        key: Quantity(GB * statistics.median(rates[test]), "measured", f"{source}, {test}", _spread(rates[test]))
        for key, tests in TESTS.items()
        if (test := next((t for t in tests if rates.get(t)), None)) is not None
    }
    if all(rates.get(test) for test in BOTH):
        total = GB * sum(statistics.median(rates[test]) for test in BOTH)
        values["link.both"] = Quantity(total, "measured", f"{source}, {' and '.join(BOTH)}")
    if not {"link.h2d", "link.d2h"} <= set(values):
        missing = ", ".join(TESTS[key][0] for key in ("link.h2d", "link.d2h") if key not in values)
        raise ImportedFileError(f"{where} has no passed result of {missing}; run nvbandwidth with these tests")
    return values


def _cells(case: dict[str, object], where: str) -> list[float]:
    """The rates of a test's matrix, in GB/s; pairs that were not measured are left out."""
    matrix = case.get("bandwidth_matrix")
    if not isinstance(matrix, list):
        raise ImportedFileError(f"test {case.get('name')!r} of {where} has no bandwidth_matrix; run nvbandwidth again")
    cells = [cell for row in matrix for cell in (row if isinstance(row, list) else [row])]
    try:
        return [float(cell) for cell in cells if cell != "N/A"]
    except (TypeError, ValueError) as error:
        raise ImportedFileError(
            f"test {case.get('name')!r} of {where} has a rate that is no number: {error}"
        ) from error


def _spread(cells: list[float]) -> float | None:
    """Half the range over the GPUs, relative; None for one GPU."""
    return (max(cells) - min(cells)) / 2 / statistics.median(cells) if len(cells) > 1 else None
