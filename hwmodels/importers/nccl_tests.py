"""nccl-tests: how quickly GPUs exchange data in collectives, by the number of GPUs.

    all_reduce_perf -b 8 -e 4G -f 2 -g 8 > all_reduce_8.txt        (or all_gather_perf, reduce_scatter_perf)

Its bus bandwidth is what each GPU of a ring sends, in units of 1e9 bytes. The best of all sizes counts as the rate, and
the smallest message's time as the latency of its steps.
"""

from __future__ import annotations

from tierplan.hwmodels.description import Quantity
from tierplan.hwmodels.importers.reading import ImportedFileError

HOW = "all_reduce_perf -b 8 -e 4G -f 2 -g GPUS > FILE"
SIZE, TIME_US, ALGBW, BUSBW = 0, 5, 6, 7
"""Columns, out of place."""


def read_nccl_tests(*texts: str, where: str) -> dict[str, Quantity]:
    """Values of the description from what was printed, one text per number of GPUs. Raises `ImportedFileError`."""
    rates: dict[int, float] = {}
    hops_s = []
    for text in texts:
        num, rate, hop_s = _read(text, where)
        rates[num] = max(rate, rates.get(num, 0.0))
        hops_s.append(hop_s)
    source = f"{where}: nccl-tests, busbw"
    return {
        "link.collective": Quantity(tuple((float(num), rates[num]) for num in sorted(rates)), "measured", source),
        "link.collective_latency": Quantity(min(hops_s), "measured", f"{where}: nccl-tests, smallest message"),
    }


def _read(text: str, where: str) -> tuple[int, float, float]:
    """GPUs, bytes per second that each sends, and seconds of a step."""
    lines = [line.split() for line in text.splitlines()]
    num = sum(words[:2] == ["#", "Rank"] for words in lines)
    try:
        rows = [
            [float(words[k]) for k in (SIZE, TIME_US, ALGBW, BUSBW)]
            for words in lines
            if words[:1] != ["#"] and len(words) > BUSBW
        ]
    except ValueError as error:
        raise ImportedFileError(f"{where} has a line that is no measurement ({error}); write it with: {HOW}") from error
    if num < 2 or not rows:
        raise ImportedFileError(f"{where} has {len(rows)} measurements on {num} GPUs; write it with: {HOW}")
    _, _, algbw, busbw = best = max(rows, key=lambda row: row[3])
    if algbw <= 0 or busbw <= 0:
        raise ImportedFileError(f"{where} has no bandwidth above 0, but {best}; measure larger messages: {HOW}")
    steps = max(round(busbw / algbw * num), 1)  # n - 1 of a gather or a reduction, 2 (n - 1) of an all-reduce
    return num, busbw * 1e9, min(rows)[1] / 1e6 / steps
