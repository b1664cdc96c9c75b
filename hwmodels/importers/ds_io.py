"""DeepSpeed's ds_io and ds_nvme_tune: drive reads and writes. What they call GB is GiB (2**30 bytes).

    ds_io --folder /mnt/nvme --io_size 4G --read | tee read.txt          reads; without --read, writes
    ds_nvme_tune --nvme_dir /mnt/nvme | tee tune.txt                     both, for the best of many settings

Where both are printed, the end-to-end speed counts. A file may hold the lines of several runs; the best counts.
"""

from __future__ import annotations

import re

from tierplan.hwmodels.description import Quantity
from tierplan.hwmodels.importers.reading import ImportedFileError

GIB = 2**30
_NUMBER = r"([\d.]+(?:[eE][-+]?\d+)?)"
_RUN = re.compile(rf"^\s*(E2E|Task) (Read|Write) Speed = {_NUMBER} GB/sec\s*$", re.MULTILINE)
_TUNED = re.compile(rf"Best performance \(GB/sec\): read =\s*{_NUMBER}, write =\s*{_NUMBER}")


def read_ds_io(text: str, *, where: str) -> dict[str, Quantity]:
    """Values of the description from what the tools printed. Raises `ImportedFileError`."""
    source = f"{where}: DeepSpeed (its GB are GiB)"
    tuned = [(d, cell) for pair in _TUNED.findall(text) for d, cell in zip(("read", "write"), pair, strict=True)]
    runs = _RUN.findall(text)
    by_scope = [[(d.lower(), cell) for its, d, cell in runs if its == scope] for scope in ("Task", "E2E")]
    found: dict[str, float] = {}
    for measured in [tuned] if tuned else by_scope:  # the end-to-end speed replaces the other where it is there
        found |= {d: max(float(cell) for its, cell in measured if its == d) for d, _ in measured}
    if not found:
        raise ImportedFileError(
            f"{where} has no line such as 'E2E Read Speed = 3.2 GB/sec' or 'Best performance (GB/sec): ...'; "
            "save all that ds_io or ds_nvme_tune prints"
        )
    for direction, speed in found.items():
        if speed <= 0:
            raise ImportedFileError(f"{where} reports a {direction} speed of 0: that run failed; run it again")
    return {f"nvme.{d}": Quantity(speed * GIB, "measured", source) for d, speed in sorted(found.items())}
