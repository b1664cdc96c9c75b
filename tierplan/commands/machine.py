"""Describe machines: list and show the catalog, measure this machine, import other tools' results.

tierplan machine list                              what the catalog has
tierplan machine show desktop-4090                 every number with its source
tierplan machine measure --nvme-dir /mnt/nvme/tmp  measures this machine, about 1 minute; then --machine here
tierplan machine curves                            errors of predictions by measured tables, and by a relative's
tierplan machine detect                            what this system says, and the nearest machine of the catalog
tierplan machine share -o shared.toml              what was measured here, without names
tierplan machine import --fio fio.json --base desktop-4090 -o mine.toml
"""

from __future__ import annotations

import argparse
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from tierplan.commands.options.arguments import (
    actions,
    add_device,
    add_set,
    check_writable,
    existing_file,
    finite,
    new_file,
    new_folder,
    option,
)
from tierplan.commands.options.terminal import progress_bar, tell
from tierplan.hwmodels.build import build_machine
from tierplan.hwmodels.catalog import (
    HERE,
    catalog_names,
    here_path,
    load_curves,
    load_description,
    load_part,
    part_values,
    with_part_values,
)
from tierplan.hwmodels.community import share, step_of
from tierplan.hwmodels.curves import curve_errors
from tierplan.hwmodels.description import (
    KEYS,
    PARTS,
    Description,
    Quantity,
    override,
    parse_description,
    read_utf8,
    within,
    write_description,
)
from tierplan.hwmodels.detect import ask_system, propose
from tierplan.hwmodels.importers import ds_io, fio, nccl_tests, nvbandwidth, nvidia_smi
from tierplan.hwmodels.machine import Machine, MachineError
from tierplan.hwmodels.names import DEVICE_PREFIX
from tierplan.hwmodels.values.units import format_amount
from tierplan.sim.output.text import columns, wrapped
from tierplan.sim.trace import write_atomically

QUICK_S, THOROUGH_S = 50.0, 900.0
LISTED = {
    "gpu": (
        "GPUs (--set gpu.part=NAME; peak and real: bf16 TFLOP/s; basis: of real, else of peak)",
        (("GiB", "capacity", 2**30), ("GB/s", "memory_bandwidth", 1e9), ("peak", "peak_bf16", 1e12),
         ("real", "matmul_bf16", 1e12), ("USD", "price", 1)),
        ("matmul_bf16", "matmul_fp16", "peak_bf16", "peak_fp32"),
    ),
    "nvme": (
        "Drives (--set nvme.part=NAME; rates in GB/s, cached: writes within a cache of so many GB; PB may be written; "
        "basis: of write)",
        (("read", "read", 1e9), ("write", "write", 1e9), ("cached", "cached_write", 1e9), ("GB", "cache", 1e9),
         ("PB", "endurance", 1e15), ("USD", "price", 1)),
        ("write",),
    ),
}  # fmt: skip
"""Of a GPU and of a drive: the list's heading, what it shows in which unit, and the numbers whose basis it shows: the
first of these that a part has."""
NOISY = 0.125
"""A spread from which on a number deserves a warning: 95 % of measurements lie within twice that."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    action = actions(parser)
    listing = action("list", _list, "machines and parts of the catalog")
    option(listing, "--sources", "the parts' sources instead, and how many numbers rest on each")

    show = action("show", _show, "one machine: every number with its source, tiers, streams, shared limits")
    show.add_argument("machine", help="a catalog name, a TOML file, or `here`")
    add_set(show)
    option(show, "--keys", "list every key that --set takes, with its meaning")

    measure = action("measure", _measure, "measure this machine and keep the result as `here`")
    drives = measure.add_mutually_exclusive_group()
    where = "folder on the drive that will be the NVMe tier, once per drive (default: this folder)"
    option(drives, "--nvme-dir --nvme DIR", where, new_folder, repeat=True)
    option(drives, "--no-nvme", "leave drives out")
    thorough = f"about {THOROUGH_S / 60:.0f} minutes; writes enough to leave the drive's write cache"
    option(measure, "--thorough", thorough)
    option(measure, "--budget-s S", f"seconds, about (default {QUICK_S:.0f}, least 5)", finite(least=5))
    add_device(measure)
    option(measure, "-o --output FILE", "write the machine to this TOML file instead", new_file(".toml"))

    action("curves", _curves, "GPUs with measured tables: errors of predictions, leave-one-out")

    detect = action("detect", _detect, "a machine from what this system says, and what it does not say")
    option(detect, "-o --output FILE", "write the machine to this TOML file", new_file(".toml"))

    shares = action("share", _share, "a small anonymous file of what was measured, for a pull request")
    shares.add_argument("machine", nargs="?", default="here", help="a TOML file, or `here`")
    option(shares, "-o --output FILE", "TOML file to write", new_file(".toml"), required=True)
    option(shares, "--step MODEL,POLICY,BATCH,SEQ,SECONDS", "one measured step, too")

    imports = action("import", _import, "a machine from the output of other tools")
    option(imports, "--base X", "machine whose numbers hold where the tools say nothing (default: none)")
    add_set(imports)
    option(imports, "--fio FILE", "fio --output-format=json", existing_file, repeat=True)
    option(imports, "--nvbandwidth FILE", "nvbandwidth --format json", existing_file, repeat=True)
    option(imports, "--nccl-tests FILE", "what all_reduce_perf printed, per number of GPUs", existing_file, repeat=True)
    option(imports, "--nvidia-smi FILE", "nvidia-smi --query-gpu=... --format=csv", existing_file, repeat=True)
    option(imports, "--nvidia-topo FILE", "nvidia-smi topo -m", existing_file, repeat=True)
    option(imports, "--ds-io FILE", "what DeepSpeed's ds_io or ds_nvme_tune printed", existing_file, repeat=True)
    option(imports, "--name NAME", "of the machine (default: the file's name)")
    option(imports, "-o --output FILE", "TOML file to write", new_file(".toml"), required=True)


def _list(args: argparse.Namespace) -> int:
    machines = {name: load_description(name).summary for name in catalog_names()}
    if here_path().exists():
        try:
            machines[HERE] = load_description(HERE).summary
        except (MachineError, OSError) as error:
            machines[HERE] = f"cannot be read: {error}"
    lines = ["Machines", *columns(list(machines.items()))]
    sources: Counter[str] = Counter()
    parts: dict[str, dict[str, dict[str, object]]] = {}
    for section, (heading, shown, deciding) in LISTED.items():
        rows = [("name", *(word for word, _, _ in shown), "basis", "date")]
        entries = parts[PARTS[section]] = {}
        for name in catalog_names(PARTS[section]):
            part, values = load_part(section, name), part_values(section, name)
            sources.update(q.source for q in part.values.values() if q.basis != "assumed")
            entry = {q: {"value": v.value, "basis": v.basis, "source": v.source} for q, v in values.items()}
            rate = next(key for number in deciding if (key := f"{section}.{number}") in values)
            entries[name] = {"name": part.name, "basis": values[rate].basis, "date": part.date, **entry}
            cells = [_cell(values.get(f"{section}.{key}"), unit) for _, key, unit in shown]
            rows.append((name, *cells, values[rate].basis, part.date))
        lines += ["", *wrapped(heading), *columns(rows, right=range(1, 1 + len(shown)))]
    if args.sources:
        lines = columns([(str(count), source) for source, count in sources.most_common()])
    tell(args, {"machines": machines, **parts}, lines)
    return 0


def _cell(quantity: Quantity | None, unit: float) -> str:
    if quantity is None or isinstance(quantity.value, str):
        return "-"
    most = max(rate for _, rate in quantity.points)
    return f"{most / unit:,.4g}" if most < 1e4 * unit else f"{most / unit:,.0f}"


def _curves(args: argparse.Namespace) -> int:
    curves = {name: load_curves(name) for name in catalog_names("curves")}
    errors = list(curve_errors({name: load_part("gpu", name) for name in catalog_names("gpus")}, curves))
    own = median(e.own for e in errors)
    by_relative = median(e.by_relative for e in errors if e.by_relative is not None)
    rows = [("GPU", "steps", "own table", "relative's", "relative")]
    for e in errors:
        other = "-" if e.by_relative is None else f"{e.by_relative * 100:.1f} %"
        rows.append((e.gpu, str(e.steps), f"{e.own * 100:.1f} %", other, e.relative or "-"))
    lines = [
        *wrapped("Matmuls and attention in steps of GPT and Llama, 1 to 70B: median error"),
        "",
        *columns(rows, right=(1, 2, 3)),
        "",
        *wrapped(
            f"median over GPUs: {own * 100:.1f} % with the own table, {by_relative * 100:.1f} % from a relative's"
        ),
    ]
    tell(args, {"median_own": own, "median_by_relative": by_relative, "gpus": [asdict(e) for e in errors]}, lines)
    return 0


def _show(args: argparse.Namespace) -> int:
    description = load_description(args.machine, args.overrides)
    machine = build_machine(description)
    record, lines = _record(machine), [*numbers(description), "", *structure(machine)]
    if args.keys:
        record = {key.name: {"unit": key.unit, "meaning": key.meaning} for key in KEYS.values()}
        lines = columns([(key.name, key.unit, key.meaning) for key in KEYS.values()])
    tell(args, record, [*wrapped(f"{description.name}: {description.summary}"), "", *lines])
    return 0


def _record(machine: Machine) -> dict[str, object]:
    return {"name": machine.name, **machine.description}


def numbers(description: Description) -> list[str]:
    """A table of every number: value, the range of 95 % of repeated measurements, and where it comes from.

    Sources with an address, or of many numbers, stand below the table, each once.
    """
    rows = [("key", "value", "95 %", "basis", "source")]
    below: dict[str, str] = {}
    used = description.used()
    sources = {name: quantity.source.removeprefix("assumed: ") for name, quantity in used.items()}
    common = Counter(source.partition(": ")[0] for source in sources.values())
    for name, quantity in used.items():
        spread = "" if quantity.spread is None else f"±{200 * quantity.spread:.0f} %"
        source, head = sources[name], sources[name].partition(": ")[0]
        whole = source if "://" in source else head if common[head] > COMMON else ""
        if whole:
            source = below.setdefault(whole, f"[{len(below) + 1}]") + source.removeprefix(whole)
        rows.append((name, quantity.text(KEYS[name]), spread, quantity.basis, source))
    sources_below = ["", *columns([(number, source) for source, number in below.items()])] if below else []
    return [*columns(rows), *sources_below]


def structure(machine: Machine) -> list[str]:
    """Tiers, and the shared limits with the streams that load them."""
    rows = [("tiers", ", ".join(f"{t.name} {format_amount(t.capacity_bytes, 'bytes')}" for t in machine.tiers))]
    for limit in machine.shared_limits:
        takers = [s.name for s in machine.streams if limit.name in s.takes]
        shares = f"{limit.limit:.4g} stream{'s' * (limit.limit != 1)} at full speed"
        size = format_amount(limit.limit, "bytes/s") if limit.limit > MOST_SHARES else shares
        rows.append((f"shared limit {limit.name}", f"{size}, loaded by {', '.join(takers)}"))
    if machine.nameplate:
        rows.append(("not measured", f"from data sheets: {', '.join(machine.nameplate)}"))
    return columns(rows)


COMMON = 3
"""A source of more numbers than these is written once."""
MOST_SHARES = 1e4
"""Limits up to this are shares of full speed; those above are bytes per second."""


def _measure(args: argparse.Namespace) -> int:
    from tierplan.runtime.job import sigterm_interrupts
    from tierplan.runtime.measure.machine import measure_description

    target = args.output or here_path()
    if args.output is None:
        check_writable(here_path().parent, f"{target}, where it is kept without -o")
    budget_s = args.budget_s or (THOROUGH_S if args.thorough else QUICK_S)
    folders = None if args.no_nvme else args.nvme_dir or ["."]
    with sigterm_interrupts(), progress_bar() as progress:
        description = measure_description(
            folders,
            budget_s=budget_s,
            device=args.device,
            progress=progress,
            name=HERE if args.output is None else Path(args.output).stem,
        )
    text = write_description(description)
    try:
        machine = build_machine(parse_description(text, where="what was measured"))
    except MachineError as error:
        raise MachineError(f"{error} ({target} is as it was; measure again when it is quiet)") from None
    write_atomically(target, text)
    noted = description.notes
    remarks = [
        f"drives: {noted['drives']}",
        *noted["remarks"],  # type: ignore[misc]  # a list
        f"largest error of the shared limits on a pair of streams: {noted['worst_error_of_a_pair']}",
        f"median error on mixes that were not fitted: {noted['median_error_of_mixes_not_fitted']}",
    ]
    noisy = [name for name, quantity in description.values.items() if (quantity.spread or 0.0) > NOISY]
    if noisy:
        remarks.append(f"{len(noisy)} numbers vary by more than a quarter: {', '.join(noisy)}")
        remarks.append("measure again when it is quiet, or with --thorough")
    written = f"written to {target}" + ("" if args.output else "; use it with --machine here")
    lines = [*numbers(description), "", *structure(machine), *(line for text in remarks for line in wrapped(text))]
    tell(args, {**_record(machine), "notes": description.notes, "file": str(target)}, [*lines, written])
    return 0


def _detect(args: argparse.Namespace) -> int:
    found = propose(ask_system())
    if args.output:
        base = _with_parts(load_description(found.base), found.values, f"detected, on {found.base}")
        values = {**base.values, **found.values}
        count = replace(base, values=values).number("gpu.count")
        switches = within(found.switches or base.switches, int(count or 1))
        whole = replace(base, name=Path(args.output).stem, values=values, switches=switches, part_values={})
        write_atomically(args.output, write_description(whole))
    lines = [
        *wrapped(f"nearest machine of the catalog: {found.base}; what this system says:"),
        *columns([(name, q.text(KEYS[name]), q.source) for name, q in found.values.items()]),
        *(
            line
            for s in found.switches
            for line in wrapped(f"[[switch]] {s.name}: {', '.join(s.members)}: {s.limit / 1e9:.3g} GB/s, {s.source}")
        ),
        "",
        "could not be found out:",
        *(f"  {line}" for text in found.unknown for line in wrapped(text, 78)),
    ]
    if args.output:
        lines.append(f"written to {args.output}: what is not listed above is {found.base}'s")
    tell(args, {**asdict(found), "file": args.output}, lines)
    return 0


def _with_parts(base: Description, values: Mapping[str, Quantity], summary: str) -> Description:
    """The base with the parts among the values: what its file says of others, its summary too, goes. So does its GPU
    where there is another one that the catalog does not have.
    """
    if _is_new_gpu(values):
        kept = {k: q for k, q in base.values.items() if KEYS[k].section != DEVICE_PREFIX or KEYS[k].whole}
        kept.pop("gpu.part", None)
        base = replace(base, values=kept, summary=summary)
    parts = {name: values[name].value for name in ("gpu.part", "nvme.part") if name in values}
    changed = [name for name, part in parts.items() if name not in base.values or base.values[name].value != part]
    found = override(base, [f"{name}={parts[name]}" for name in changed])
    return replace(found, summary=summary) if changed else found


def _share(args: argparse.Namespace) -> int:
    text = share(load_description(args.machine), f"{datetime.now(UTC):%Y-%m}", args.step and step_of(args.step))
    write_atomically(args.output, text)
    request = "for everybody: a pull request that adds it to hwmodels/catalog/community/"
    tell(args, {**tomllib.loads(text), "file": args.output}, [text, f"written to {args.output}; {request}"])
    return 0


def _import(args: argparse.Namespace) -> int:
    values: dict[str, Quantity] = {}
    names: list[str] = []
    for paths, read in (
        (args.nvidia_smi, nvidia_smi.read_nvidia_smi), (args.nvidia_topo, nvidia_smi.read_nvidia_topo),
        (args.nvbandwidth, nvbandwidth.read_nvbandwidth), (args.fio, fio.read_fio), (args.ds_io, ds_io.read_ds_io),
    ):  # fmt: skip
        for path in paths:
            values |= read(read_utf8(Path(path)), where=Path(path).name)
            names.append(Path(path).name)
    if rings := [Path(path) for path in args.nccl_tests]:
        values |= nccl_tests.read_nccl_tests(*map(read_utf8, rings), where=", ".join(path.name for path in rings))
    if not values:
        raise MachineError(
            "nothing to import; give at least one of --fio, --nvbandwidth, --nccl-tests, --nvidia-smi, --nvidia-topo, "
            "--ds-io"
        )
    base = Description(name="")
    if args.base:
        base = _with_parts(load_description(args.base), values, f"imported from {', '.join(names)} on {args.base}")
    description = replace(base, name=args.name or Path(args.output).stem, values={**base.values, **values})
    text = write_description(override(description, args.overrides))
    try:
        machine = build_machine(with_part_values(parse_description(text, where=args.output)))
    except MachineError as error:
        new = "the catalog has no GPU of this name: give gpu.memory_bandwidth and a peak, such as gpu.peak_bf16, of its"
        raise MachineError(f"{error}; {new} data sheet with --set" if _is_new_gpu(values) else str(error)) from None
    write_atomically(args.output, text)
    shown = [f"{name} = {quantity.text(KEYS[name])}" for name, quantity in values.items()]
    record = {**_record(machine), "imported": list(values), "file": args.output}
    tell(args, record, [*shown, *structure(machine), f"written to {args.output}"])
    return 0


def _is_new_gpu(values: Mapping[str, Quantity]) -> bool:
    """Whether there is a GPU that the catalog does not have."""
    return "gpu.count" in values and "gpu.part" not in values
