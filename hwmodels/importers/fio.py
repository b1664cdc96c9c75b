"""fio: sequential reads, writes, and both at the same time, as `nvme.read`, `nvme.write` and `nvme.mixed`.

    fio --output-format=json --output=fio.json job.fio

Jobs of one group (until the next `stonewall`) run at the same time, so their rates are added. Of several groups of the
same kind, the one with the largest block counts. A group that reads and writes gives `nvme.mixed`, the limit of
`r/read + w/write`. It needs a group that only reads and one that only writes beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import sqrt

from tierplan.hwmodels.description import KEYS, Quantity
from tierplan.hwmodels.importers.reading import ImportedFileError, json_number, json_object
from tierplan.hwmodels.values.units import parse_amount

HOW = "fio --output-format=json --output=FILE job.fio"
DEFAULT_BLOCK_BYTES = 4096.0


@dataclass
class _Group:
    read: float = 0.0
    write: float = 0.0
    variance: dict[str, float] = field(default_factory=lambda: {"read": 0.0, "write": 0.0})
    block_bytes: float = 0.0
    direct: bool = True


def read_fio(text: str, *, where: str) -> dict[str, Quantity]:
    """Values of the description from fio's JSON. Raises `ImportedFileError`."""
    record = json_object(text, where=where, tool="fio", how=HOW)
    jobs = record.get("jobs")
    if not isinstance(jobs, list) or not jobs or "fio version" not in record:
        raise ImportedFileError(f"{where} has no fio version or no jobs; write it with: {HOW}")
    common = record.get("global options")
    groups: dict[int, _Group] = {}
    for job in jobs:
        _add(groups, job, common if isinstance(common, dict) else {}, where)
    source = f"{where}: {record['fio version']}"
    values: dict[str, Quantity] = {}
    for direction, other in (("read", "write"), ("write", "read")):
        only = [g for g in groups.values() if getattr(g, direction) > 0 and getattr(g, other) == 0]
        if only:
            best = max(only, key=lambda g: (g.block_bytes, getattr(g, direction)))
            rate = getattr(best, direction)
            spread = 2 * sqrt(best.variance[direction]) / rate
            note = "" if best.direct else "; without direct=1, so partly the page cache"
            values[f"nvme.{direction}"] = Quantity(rate, "measured", source + note, round(spread, 4) or None)
    mixed = [g for g in groups.values() if g.read > 0 and g.write > 0]
    if mixed and "nvme.read" in values and "nvme.write" in values:
        best = max(mixed, key=lambda g: g.block_bytes)
        alone = {d: parse_amount(values[f"nvme.{d}"].value, "bytes/s", what=d) for d in ("read", "write")}
        both = best.read / alone["read"] + best.write / alone["write"]
        values["nvme.mixed"] = Quantity(min(both, KEYS["nvme.mixed"].most), "measured", source)
    if not values:
        raise ImportedFileError(
            f"{where} has neither a group of only reads nor one of only writes; add `stonewall` between jobs"
        )
    return values


def _add(groups: dict[int, _Group], job: object, common: Mapping[str, object], where: str) -> None:
    if not isinstance(job, dict) or not all(isinstance(job.get(d), dict) for d in ("read", "write")):
        raise ImportedFileError(f"{where} has a job without read and write results; write it with: {HOW}")
    name = job.get("jobname", "?")
    if error := job.get("error", 0):
        raise ImportedFileError(f"job {name!r} of {where} failed with error {error}; run fio again")
    own = job.get("job options")
    options = {**common, **(own if isinstance(own, dict) else {})}
    group = groups.setdefault(int(json_number(job.get("groupid", 0), f"groupid of job {name!r} in {where}")), _Group())
    for direction in ("read", "write"):
        result = job[direction]
        place = f"of job {name!r} in {where}"
        rate = json_number(result.get("bw_bytes"), f"{direction}.bw_bytes {place}")
        deviation = 1024 * json_number(result.get("bw_dev", 0.0), f"{direction}.bw_dev {place}")  # KiB/s
        samples = max(1.0, json_number(result.get("bw_samples", 1), f"{direction}.bw_samples {place}"))
        setattr(group, direction, getattr(group, direction) + rate)
        group.variance[direction] += deviation**2 / samples
    block = str(options.get("bs", options.get("blocksize", DEFAULT_BLOCK_BYTES))).split(",")[0]
    if block[-1:] in "kKmMgG" and block[-1:]:
        block = block[:-1] + block[-1].upper() + "i"  # fio's suffixes are powers of 1024
    group.block_bytes = max(group.block_bytes, parse_amount(block, "bytes", what=f"bs of job {name!r} in {where}"))
    group.direct = group.direct and str(options.get("direct", "0")) == "1"
