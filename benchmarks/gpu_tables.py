"""Measured tables of GPUs from public repositories, condensed to the curves of `hwmodels/catalog/curves`.

    python -m benchmarks.gpu_tables FOLDER -o CURVES

`gpu_tables.toml` lists the tables; FOLDER has the repositories, each as OWNER/NAME. Kinds of tables:

    products     seconds of y = x W for m, n, k (aiconfigurator), of which blocks are put together, both ways
    layers       seconds of a known model's products, forward, by tokens (LLMServingSim, Vidur)
    attention    seconds of causal attention, forward
    fp32, memory seconds of fp32 products and of memory-bound kernels (NeuSight)

A curve's amount is that of one op of a schedule, so of a block: rates are medians over blocks of GPT and Llama shapes.
"""

from __future__ import annotations

import csv
import json
import tomllib
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any, Literal

from benchmarks.records import arguments
from tierplan.hwmodels.curves import SHAPES, SMALL, BlockShape
from tierplan.hwmodels.description import Basis, Description, Points, Quantity
from tierplan.hwmodels.importers.reading import ImportedFileError
from tierplan.hwmodels.machine import Rate
from tierplan.hwmodels.values.records import decode
from tierplan.sim.trace import write_atomically

Row = Mapping[str, Any]


TABLES = Path(__file__).with_suffix(".toml")
TOKENS = (128, 512, 1024, 2048, 4096, 8192, 16384)
STEPS = ((1, 2048), (4, 2048), (2, 4096))
"""Sequences and their length in the steps that predictions are compared with."""
BACKWARD_ATTENTION = 0.8
"""Rate of attention backward over forward, FLOPs counted 2.5 times. No table has it; FlashAttention-3: 0.75 to 0.85."""
KERNELS = 10
"""Memory-bound kernels in a block's forward, about: an op's bytes over those of one kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicTable:
    """One file of a public repository."""

    gpu: str
    kind: Literal["products", "layers", "attention", "prefill", "fp32", "memory"]
    repository: str
    commit: str
    licence: str
    path: str
    device: str = ""
    """Of its rows, where it has several."""
    model: str = ""
    """Whose layers these are."""


def table_list() -> tuple[PublicTable, ...]:
    """The public tables that the curves are made from: what `gpu_tables.toml` lists."""
    record = tomllib.loads(TABLES.read_text(encoding="utf-8"))
    rows = ({**record["repository"][row["repository"]], **row} for row in record["table"])
    return tuple(decode(PublicTable, row, complete=False) for row in rows)


def read_curves(tables: Sequence[PublicTable], folder: Path) -> Description:
    """The curves of one GPU from its tables below `folder/OWNER/NAME`, and the steps that they measure.

    Raises `ImportedFileError` where a file is missing or is no such table.
    """
    samples: dict[str, list[Sample]] = defaultdict(list)
    sources: dict[str, list[str]] = defaultdict(list)
    seconds: dict[tuple[str, int, int], list[float]] = {}
    for table in tables:
        rows = _rows(table, folder / table.repository / table.path)
        source = f"{table.licence}, https://github.com/{table.repository}/blob/{table.commit}/{table.path}"
        try:
            key, found, steps = _READERS[table.kind](table, rows)
        except (KeyError, ValueError, ZeroDivisionError) as error:
            raise ImportedFileError(f"{table.path} is not a table of {table.kind}: {error!r}") from error
        samples[key] += found
        sources[key].append(source)
        for step, s in steps.items():
            seconds.setdefault(step, [0.0, 0.0])[table.kind in ("attention", "prefill")] = s
    note = {"gpu.attention_bf16": f"; backward at {BACKWARD_ATTENTION:g} of forward's rate, which no table has"}
    text = {key: "; ".join(of) + note.get(key, "") for key, of in sources.items()}
    basis: dict[str, Basis] = dict.fromkeys(note, "derived")
    values = {key: Quantity(_curve(of), basis.get(key, "published"), text[key]) for key, of in samples.items()}
    notes = {"steps": [[*step, *(float(f"{s:.4g}") for s in both)] for step, both in sorted(seconds.items())]}
    return Description(name=tables[0].gpu, values=values, notes=notes)


def curves_text(description: Description) -> str:
    """TOML that `parse_description` reads, one curve a line."""
    lines = [f'name = "{description.name}"', "", "[gpu]"]
    for name, quantity in description.values.items():
        assert isinstance(quantity.value, tuple)
        points = ", ".join(f"[{amount:.3g}, {rate:.3g}]" for amount, rate in quantity.value)
        source = f'basis = "{quantity.basis}", source = "{quantity.source}"'
        lines.append(f"{name.partition('.')[2]} = {{ value = [{points}], {source} }}")
    if steps := description.notes["steps"]:
        lines += ["", "[notes]", "# model, sequences, their length, seconds of matmuls and of attention in a step"]
        lines += ["steps = [", *(f"    {json.dumps(step)}," for step in steps), "]"]  # type: ignore[attr-defined]
    return "\n".join(lines) + "\n"


def _rows(table: PublicTable, path: Path) -> list[Row]:
    try:
        if path.suffix == ".csv":
            with path.open(newline="", encoding="utf-8") as file:
                rows: list[Row] = list(csv.DictReader(file))
        else:
            from pyarrow import parquet

            rows = parquet.read_table(path).to_pylist()
    except ImportError as error:
        raise ImportedFileError(f"{path.name} needs pyarrow; run: pip install 'tierplan[tables]'") from error
    except OSError as error:
        raise ImportedFileError(f"{path} cannot be read ({error}); clone {table.repository} there") from error
    return [row for row in rows if row.get("Device", table.device) == table.device]


Sample = tuple[float, float]
"""Amount of an op, and its rate."""
Read = tuple[str, list[Sample], Mapping[tuple[str, int, int], float]]
"""The key, samples of its curve, and seconds of steps by model, sequences and length."""


def _curve(samples: Iterable[Sample]) -> Points:
    """Medians over half decades of amounts."""
    bins: dict[int, list[Sample]] = defaultdict(list)
    for amount, rate in samples:
        bins[round(2 * log(amount, 10))].append((amount, rate))
    middle = (tuple(float(f"{median(column):.3g}") for column in zip(*bins[b], strict=True)) for b in sorted(bins))
    return tuple((amount, rate) for amount, rate in middle)


def _products(table: PublicTable, rows: Iterable[Row]) -> Read:
    found: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
    for r in rows:
        if r["gemm_dtype"] == "bfloat16" and min(r["m"], r["n"], r["k"]) >= 128:
            found[r["n"], r["k"]][r["m"]] = 2.0 * r["m"] * r["n"] * r["k"] / (r["latency"] * 1e-3)
    by = {nk: Rate(tuple(sorted((float(m), rate) for m, rate in of.items()))) for nk, of in found.items()}
    grid = sorted({n for n, _ in by})

    def seconds(m: int, n: int, k: int) -> float:
        weights = [
            (v * w, by[a, b].at(m)) for (a, v), (b, w) in product(_around(grid, n), _around(grid, k)) if (a, b) in by
        ]
        rate = exp(sum(w * log(r) for w, r in weights) / sum(w for w, _ in weights))
        return 2.0 * m * n * k / rate

    def both(shape: BlockShape, tokens: int) -> tuple[float, float]:
        forward = sum(seconds(tokens, n, k) for n, k in shape.products)
        return forward, sum(seconds(tokens, k, n) + seconds(n, k, tokens) for n, k in shape.products)

    samples = []
    for shape, tokens in product((*SHAPES.values(), *SMALL.values()), TOKENS):
        flops, (forward, backward) = shape.flops(tokens), both(shape, tokens)
        samples += [(flops, flops / forward), (2 * flops, 2 * flops / backward)]
    steps = {(m, b, s): SHAPES[m].layers * sum(both(SHAPES[m], b * s)) for m, (b, s) in product(SHAPES, STEPS)}
    return "gpu.matmul_bf16", samples, steps


def _around(grid: Sequence[int], size: int) -> Iterator[tuple[int, float]]:
    """The sizes of the grid beside this one, with their weights by its logarithm."""
    i = bisect_left(grid, size)
    low, high = grid[max(i - 1, 0)], grid[min(i, len(grid) - 1)]
    part = 1.0 if high == low or size >= high else 0.0 if size <= low else log(size / low) / log(high / low)
    yield from ((x, w) for x, w in ((low, 1 - part), (high, part)) if w > 0)


def _layers(table: PublicTable, rows: Iterable[Row]) -> Read:
    """Rows of LLMServingSim (layer, tokens, time_us) or of Vidur (a column for each layer, in ms)."""
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    for r in rows:
        if "layer" in r:
            if r["layer"].endswith("_proj"):
                found[table.model, int(r["tokens"])].append(1e-6 * float(r["time_us"]))
        elif r["num_tensor_parallel_workers"] == "1":
            products = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")
            found[table.model, int(r["num_tokens"])] = [1e-3 * float(r[f"time_stats.{p}.median"]) for p in products]
    forward = {at: sum(parts) for at, parts in found.items() if at[1] >= min(TOKENS)}
    flops = {(model, tokens): SHAPES[model].flops(tokens) for model, tokens in forward}
    samples = [(n * flops[at], flops[at] / s) for at, s in forward.items() for n in (1, 2)]
    steps = {(m, 1, t): 3 * SHAPES[m].layers * s for (m, t), s in forward.items() if t in (2048, 4096)}
    return "gpu.matmul_bf16", samples, steps


def _attention(table: PublicTable, rows: Iterable[Row]) -> Read:
    by_length: dict[int, list[Sample]] = defaultdict(list)
    for r in rows:
        if r["attn_dtype"] == r["kv_cache_dtype"] == "bfloat16" and not r.get("window_size") and r["isl"] >= 256:
            flops = 4.0 * r["batch_size"] * r["num_heads"] * r["isl"] ** 2 * r["head_dim"]
            if r["head_dim"] == 128 and r["num_heads"] >= 8:
                by_length[r["isl"]].append((flops, flops / (r["latency"] * 1e-3)))
    rates = {length: Rate(_curve(samples)) for length, samples in by_length.items()}
    samples, steps, slower = [], {}, 3.5 / (1 + 2.5 / BACKWARD_ATTENTION)
    for (name, shape), tokens, length in product(SHAPES.items(), (2048, 4096, 8192, 16384), sorted(rates)):
        if 512 <= length <= tokens:
            flops = 4.0 * tokens * length * shape.hidden
            samples += [(n * flops, slower * rates[length].at(flops)) for n in (1.0, 2.5)]
            if (tokens // length, length) in STEPS:
                steps[name, tokens // length, length] = shape.layers * 3.5 * flops / (slower * rates[length].at(flops))
    return "gpu.attention_bf16", samples, steps


def _prefill(table: PublicTable, rows: Iterable[Row]) -> Read:
    shape, slower = SHAPES[table.model], 3.5 / (1 + 2.5 / BACKWARD_ATTENTION)
    whole = [r for r in rows if r["kv_prefill"] == r["n_decode"] == "0" and int(r["prefill_chunk"]) >= 256]
    at = {int(r["prefill_chunk"]): 1e-6 * float(r["time_us"]) for r in whole}
    flops = {t: 4.0 * t * t * shape.hidden for t in at}
    samples = [(n * flops[t], slower * flops[t] / s) for t, s in at.items() for n in (1.0, 2.5)]
    steps = {(table.model, 1, t): shape.layers * 3.5 * s / slower for t, s in at.items() if t == 2048}
    return "gpu.attention_bf16", samples, steps


def _fp32(table: PublicTable, rows: Iterable[Row]) -> Read:
    flops = [(2.0 * int(r["B"]) * int(r["M"]) * int(r["N"]) * int(r["K"]), float(r["Latency"])) for r in rows]
    return "gpu.matmul_fp32", [(4 * amount, amount / (1e-3 * ms)) for amount, ms in flops], {}


def _memory(table: PublicTable, rows: Iterable[Row]) -> Read:
    """Kernels that read one or two tensors and write one."""
    passes = {"add": 3, "mul": 3, "addu": 2, "mulu": 2, "relu": 2, "gelu": 2, "tanh": 2}
    known = [(r, 4.0 * passes[r["OPName"]] * int(r["B"]) * int(r["H"])) for r in rows if r["OPName"] in passes]
    return "gpu.elementwise", [(KERNELS * moved, moved / (1e-3 * float(r["Latency"]))) for r, moved in known], {}


_READERS = {
    "products": _products, "layers": _layers, "attention": _attention, "prefill": _prefill, "fp32": _fp32,
    "memory": _memory,
}  # fmt: skip


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("folder", type=Path, help="with the repositories, each as OWNER/NAME")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder where the curves are written")
    args = parser.parse_args()
    tables = sorted(table_list(), key=lambda table: table.gpu)
    for gpu, own in groupby(tables, key=lambda table: table.gpu):
        write_atomically(args.output / f"{gpu}.toml", curves_text(read_curves(list(own), args.folder)))


if __name__ == "__main__":
    main()
