"""Turns a description into the machine that the simulator and the planner use."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import cast

from tierplan.hwmodels.description import KEYS, STRENGTH, Description, Limit, Quantity, Switch
from tierplan.hwmodels.machine import (
    CATALOG,
    MEASURED,
    SECONDS,
    Machine,
    MachineError,
    PredictionBasis,
    Rate,
    SharedLimit,
    Stream,
    TierSpec,
)
from tierplan.hwmodels.names import (
    DRAM_LIMIT,
    HOPS,
    HOST,
    HOST_ADAM,
    NVME,
    NVME_LIMIT,
    NVME_READ,
    NVME_WRITE,
    collective,
    compute,
    d2h,
    device,
    device_index,
    h2d,
    kernels_limit,
    link_limit,
    p2p,
    parse_stream,
    ring,
)
from tierplan.hwmodels.scaling import scaled
from tierplan.hwmodels.values.units import format_amount

DTYPES = ("fp32", "bf16", "fp16")
CAUSAL_FRAC = 0.5
"""What a causal kernel computes of the full square of scores, which its rate counts; any other, all."""
Taker = tuple[str, str, float]
"""A stream, a kind of its work, and how much of a limit one unit of that work takes."""

OF_DRIVES = ("nvme.capacity", "nvme.read", "nvme.write")
"""Keys that a machine with drives has."""


@dataclass
class _Draft:
    """The machine so far."""

    description: Description
    streams: dict[str, Stream] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    takes: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    """What each stream takes of shared limits: limit -> kind of work -> per unit of work."""

    def stream(self, name: str, latency: str, rates: dict[str, Rate]) -> None:
        """Adds a stream whose latency is that of a key."""
        latency_s, beside_s = self.number(latency), 0.0
        loaded = latency.replace(".", ".loaded_")
        if loaded in KEYS and (loaded_s := self.description.number(loaded)) is not None:
            beside_s = max(0.0, loaded_s - latency_s)
        self.streams[name] = Stream(name=name, rates=rates, latency_s=latency_s, beside_s=beside_s)

    def share(self, limit: str, per_s: float, *takers: Taker) -> None:
        """Adds a limit that these load."""
        if limit in self.limits:
            raise MachineError(f"machine {self.name!r} has two shared limits {limit!r}; give one another name")
        if per_s <= 0:
            raise MachineError(f"shared limit {limit!r} of machine {self.name!r} is {per_s:g}; it must be above 0")
        self.limits[limit] = per_s
        for stream, kind, weight in takers:
            self.takes.setdefault(stream, {}).setdefault(limit, {})[kind] = weight

    def share_bytes(self, limit: str, per_s: float, *streams: str) -> None:
        """Adds a limit in bytes per second on all that these streams move."""
        self.share(limit, per_s, *((stream, "bytes", 1.0) for stream in streams))

    @property
    def name(self) -> str:
        return self.description.name

    def has(self, name: str) -> bool:
        return self.description.quantity(name) is not None

    def require(self, names: Collection[str]) -> None:
        """Raises `MachineError` that names all of these that are not given."""
        if missing := [name for name in names if not self.has(name)]:
            what = "; ".join(f"{name} ({KEYS[name].meaning})" for name in missing)
            add = "it" if len(missing) == 1 else f"these {len(missing)}"
            none = ", name a drive of the catalog (nvme.part), or say that it has none (nvme.drives = 0)"
            end = none if missing[-1].startswith("nvme.") else ""
            raise MachineError(f"machine {self.name!r} does not say {what}; add {add}{end}")

    def given(self, name: str) -> Quantity:
        """Raises `MachineError` where there is none."""
        self.require([name])
        return cast(Quantity, self.description.quantity(name))

    def is_of_no_drive(self, stream: str) -> bool:
        """Whether it would be the drives', where there are none: a file may have said more of a stream that is gone."""
        return stream in (NVME_READ, NVME_WRITE) and not self.description.number("nvme.drives")

    def number(self, name: str) -> float:
        self.given(name)
        return self.description.number(name) or 0.0

    def rate(self, name: str, scale: float = 1.0) -> Rate:
        """The rate of a key. With `scale` drives side by side, each does its fraction of an op."""
        quantity = self.given(name)
        if any(rate <= 0 for _, rate in quantity.points):
            raise MachineError(f"{name} of machine {self.name!r} is 0; a rate must be above 0")
        return Rate(tuple((amount * scale, rate * scale) for amount, rate in quantity.points))

    def fastest(self, stream: str, kind: str = "bytes") -> float:
        return max(rate for _, rate in self.streams[stream].rates[kind].points)


def build_machine(description: Description) -> Machine:
    """The machine that `description` describes.

    Raises `MachineError` naming the keys that are missing, or that which contradicts another.
    """
    draft = _Draft(description)
    needed = [key.name for key in KEYS.values() if key.required]
    needed += [] if draft.has("gpu.elementwise") else ["gpu.memory_bandwidth"]
    draft.require(needed + list(OF_DRIVES if description.number("nvme.drives") else ()))
    num_gpus, num_drives = int(draft.number("gpu.count")), int(draft.number("nvme.drives"))
    if num_gpus < 1:
        raise MachineError(f"gpu.count of machine {description.name!r} is {num_gpus}; it must be 1 or more")
    tiers = _tiers(draft, num_gpus, num_drives)
    for i in range(num_gpus):
        _gpu(draft, i)
    _peer_links(draft, num_gpus)
    if num_drives:
        _drives(draft, num_drives)
    adam = draft.rate("host.adam")
    # memory-bound work on the host (adding gradients, norms, casts) at the DRAM traffic that Adam reaches
    traffic = Rate.constant(max(rate for _, rate in adam.points) * draft.number("host.adam_traffic"))
    draft.stream(HOST_ADAM, "host.latency", {"parameters": adam, "elementwise_bytes": traffic})
    _dram(draft)
    for direction, stream in (("h2d", h2d), ("d2h", d2h)):
        total = _host_total(draft, f"link.host_{direction}", stream(0))
        if total and num_gpus * draft.fastest(stream(0), "bytes") > total:  # else they never reach it
            draft.share_bytes(f"host_link.{direction}", total, *map(stream, range(num_gpus)))
    if both := description.number("link.host_both"):
        draft.share_bytes("host_link.both", both, *(link(g) for g in range(num_gpus) for link in (h2d, d2h)))
    if num_gpus > 1:
        _collectives(draft, num_gpus)
    _switches(draft, num_gpus)
    for limit in description.limits:
        _share_speed(draft, limit)
    shares = {NVME_READ: draft.number("nvme.read_share"), NVME_WRITE: draft.number("nvme.write_share")}
    shares |= {name: COLLECTIVES_FIRST for name in draft.streams if parse_stream(name).task == "collective"}
    shares |= dict(description.shares)
    for name, share in shares.items():
        if name not in draft.streams and name in description.shares and not draft.is_of_no_drive(name):
            raise MachineError(
                f"[shares] of machine {draft.name!r} name stream {name!r}; it has {', '.join(draft.streams)}"
            )
        if share <= 0:
            raise MachineError(f"the share of stream {name!r} is {share}; it must be above 0")
    used = description.used()
    matters = [name for name in used if _matters(description, name)]
    nameplate = tuple(name for name in matters if used[name].basis == "nameplate")
    is_measured = any(q.basis == "measured" for q in used.values())
    return Machine(
        name=description.name,
        tiers=tiers,
        streams=tuple(
            replace(stream, takes=draft.takes.get(name, {}), share=shares.get(name, 1.0))
            for name, stream in draft.streams.items()
        ),
        shared_limits=tuple(SharedLimit(name=name, limit=limit) for name, limit in draft.limits.items()),
        nameplate=nameplate,
        description=_record(description),
        basis=MEASURED if is_measured and not nameplate else _rests_on(description, matters),
    )


RATES: Mapping[str, tuple[str, ...]] = {
    "gpu": ("peak_", "matmul_", "attention_", "elementwise", "memory_bandwidth"), "link": ("h2d", "d2h"),
    "host": ("adam", "memory_bandwidth"), "nvme": ("read", "write"),
}  # fmt: skip
"""By section: numbers whose weakest basis an answer names."""


def _rests_on(description: Description, matters: Collection[str]) -> PredictionBasis:
    """What predictions rest on: the weakest basis of each part's rates, and which rate its drives write at."""
    found, notes = {}, {"gpu": _unfit(description), "nvme": _drives_note(description)}
    for section, starts in RATES.items():
        begins = tuple(f"{section}.{start}" for start in starts)
        rates = [n for n in matters if n.startswith(begins) and not n.endswith(("_frac", "_scale", "_traffic", "fp32"))]
        if bases := [q.basis for name in rates if (q := description.quantity(name))]:
            found[section] = max(bases, key=STRENGTH.index)
    return replace(CATALOG, weakest=found, notes={part: note for part, note in notes.items() if note})


def _drives_note(description: Description) -> str:
    """Which rate the drives write at, and what is assumed of reads beside writes."""
    if not description.number("nvme.drives"):
        return ""
    mixed, write, cached = (description.quantity(f"nvme.{name}") for name in ("mixed", "write", "cached_write"))
    if "nvme.write" not in description.values:  # it is the part's, whose own cached_write says of which kind
        cached = description.part_values.get("nvme.cached_write")
    said = ["reads and writes of a drive assumed to take turns"] if mixed and mixed.basis == "assumed" else []
    if not write or not cached:
        return "; ".join(said)
    if write.value == cached.value:
        return "; ".join([*said, "drives write as within their cache: set nvme.write to what yours do beyond it"])
    cache, recovery = (description.number(f"nvme.{name}") for name in ("cache", "recovery"))
    size = f" of {cache / 1e9:,.0f} GB each" if cache else ""
    drains = f", which drains at {cache / recovery / 1e9:.1f} GB/s" if cache and recovery else ""
    return "; ".join([*said, f"drives write as beyond their cache{size}{drains}"])


GPU_FORMS: Mapping[str, tuple[str, ...]] = {"laptop": (), "desktop": ("card",), "server": ("card", "module")}
"""By `host.form`: values of `gpu.form` that the case has room for. A laptop's GPU cannot be changed."""


def _unfit(description: Description) -> str:
    """That the case cannot have this GPU, if it cannot: the answer is for another machine than can be built."""
    part, form, case = (description.quantity(name) for name in ("gpu.part", "gpu.form", "host.form"))
    if part is None or form is None or case is None or form.value in GPU_FORMS[str(case.value)]:
        return ""
    what, place = {"card": ("a card", "slot"), "module": ("a module of servers", "socket")}[str(form.value)]
    return f"no {case.value} has a {place} for {part.value}, {what}"


FOR_THE_RECORD = (
    ".price", ".power", ".endurance", ".cores", ".sockets", ".part", ".relative", ".form", ".cache", ".cached_write",
    ".recovery",
)  # fmt: skip
"""Ends of keys that change no rate, capacity or limit."""


def _matters(description: Description, name: str) -> bool:
    """Whether tiers, streams or limits depend on this key's value."""
    if name.startswith("gpu.peak_"):
        return description.quantity(name.replace("peak", "matmul")) is None
    if name == "gpu.memory_bandwidth":
        return description.quantity("gpu.elementwise") is None
    if name.startswith("nvme.") and not description.number("nvme.drives"):
        return False
    return not name.endswith(FOR_THE_RECORD)


def _tiers(draft: _Draft, num_gpus: int, num_drives: int) -> tuple[TierSpec, ...]:
    def usable(section: str) -> int:
        total, reserve = draft.number(f"{section}.capacity"), draft.description.number(f"{section}.reserve") or 0.0
        if reserve >= total:
            raise MachineError(
                f"{section}.reserve of machine {draft.name!r} is {format_amount(reserve, 'bytes')}, not less than "
                f"{section}.capacity, {format_amount(total, 'bytes')}; nothing would be left for a plan"
            )
        return int(total - reserve)

    tiers = [TierSpec(name=device(i), kind="device", capacity_bytes=usable("gpu")) for i in range(num_gpus)]
    rounding = str(draft.given("host.rounding").value)
    tiers.append(TierSpec(name=HOST, kind="host", capacity_bytes=usable("host"), rounding=rounding))  # type: ignore[arg-type]
    if num_drives:
        capacity_bytes = int(draft.number("nvme.capacity")) * num_drives
        tiers.append(TierSpec(name=NVME, kind="nvme", capacity_bytes=capacity_bytes))
    return tuple(tiers)


def _gpu(draft: _Draft, index: int) -> None:
    rates: dict[str, Rate] = {}
    for dtype in DTYPES:
        matmul, attention = f"matmul_{dtype}_flops", f"attention_{dtype}_flops"
        if draft.has(f"gpu.matmul_{dtype}"):
            rates[matmul] = draft.rate(f"gpu.matmul_{dtype}")
        elif peak := draft.description.number(f"gpu.peak_{dtype}"):
            rates[matmul] = Rate.constant(peak * draft.number("gpu.matmul_frac"))
        if draft.has(f"gpu.attention_{dtype}"):
            rates[attention] = draft.rate(f"gpu.attention_{dtype}")
        elif matmul in rates:
            fastest = max(rate for _, rate in rates[matmul].points)
            rates[attention] = Rate.constant(fastest * draft.number("gpu.attention_frac"))
        if attention in rates:
            rates[attention] = scaled(rates[attention], draft.number("gpu.attention_scale"))
            rates[f"noncausal_{attention}"] = scaled(rates[attention], CAUSAL_FRAC)
    if draft.has("gpu.elementwise"):
        rates["elementwise_bytes"] = draft.rate("gpu.elementwise")
    else:
        bandwidth = draft.number("gpu.memory_bandwidth")
        rates["elementwise_bytes"] = Rate.constant(bandwidth * draft.number("gpu.memory_frac"))
    draft.stream(compute(index), "gpu.latency", rates)
    launch_s, kernel_s = (draft.description.number(f"gpu.{name}") or 0.0 for name in ("launch", "kernel"))
    computes = draft.streams[compute(index)]
    draft.streams[compute(index)] = replace(computes, launch_s=launch_s, kernel_s=kernel_s)
    for stream, key in ((h2d(index), "link.h2d"), (d2h(index), "link.d2h")):
        draft.stream(stream, "link.latency", {"bytes": draft.rate(key)})
    if both := draft.description.number("link.both"):
        draft.share_bytes(link_limit(index), both, h2d(index), d2h(index))


def _peer_links(draft: _Draft, num_gpus: int) -> None:
    """Copies between GPUs. Over PCIe they share each GPU's link with copies to and from the host, by direction."""
    if not draft.has("link.p2p"):
        return
    pairs = [(i, j) for i in range(num_gpus) for j in range(num_gpus) if i != j]
    for i, j in pairs:
        draft.stream(p2p(i, j), "link.latency", {"bytes": draft.rate("link.p2p")})
    if not _uses_pcie(draft) or num_gpus == 1:
        return
    for g in range(num_gpus):
        into, out_of = ([p2p(*pair) for pair in pairs if pair[end] == g] for end in (1, 0))
        draft.share_bytes(f"{link_limit(g)}.in", draft.fastest(h2d(g)), h2d(g), *into)
        draft.share_bytes(f"{link_limit(g)}.out", draft.fastest(d2h(g)), d2h(g), *out_of)


def _host_total(draft: _Draft, key: str, stream: str) -> float | None:
    """What all links to the host carry together. One that is assumed is at least what a single link carries, so that a
    quicker link has an effect."""
    total = draft.description.quantity(key)
    if total is None:
        return None
    own = draft.fastest(stream) if total.basis == "assumed" else 0.0
    return max(float(draft.number(key)), own)


def _uses_pcie(draft: _Draft) -> bool:
    path = draft.description.quantity("link.p2p_path")
    return path is not None and path.value == "pcie"


COLLECTIVES_FIRST = 10.0
"""Weight of collectives where they contend: they have their multiprocessors, and compute has the rest."""


def _collectives(draft: _Draft, num_gpus: int) -> None:
    """Rings of 2, 3, ... GPUs. They take a share of compute, and of each GPU's link where they use it, both ways."""
    kinds = {ring(n): Rate.constant(_bus_rate(draft, n)) for n in range(2, num_gpus + 1)}
    hops = Rate.constant(1 / draft.number("link.collective_latency"))
    share = draft.number("gpu.collective_share")
    told = draft.description.quantity("link.collective")
    if _uses_pcie(draft) and told is not None and told.basis == "given":
        each, own = draft.fastest(h2d(0)), draft.rate("link.collective").at(2)
        if own > each * (1 + 1e-9):
            raise MachineError(
                f"machine {draft.name!r}: link.collective is {format_amount(own, 'bytes/s')}, but collectives take the "
                f"PCIe links (link.p2p_path), of {format_amount(each, 'bytes/s')} each; give link.p2p_path=own for "
                "links of their own, such as NVLink"
            )
    for g in range(num_gpus):
        draft.stream(collective(g), "gpu.latency", {**kinds, HOPS: hops})
        if share:
            _share_speed(draft, Limit(kernels_limit(g), 1.0, {compute(g): 1.0, collective(g): share}))
        if _uses_pcie(draft):
            for limit, link in ((f"{link_limit(g)}.in", h2d(g)), (f"{link_limit(g)}.out", d2h(g))):
                if limit not in draft.limits:
                    draft.share_bytes(limit, draft.fastest(link), link)
            loads = {f"{link_limit(g)}.in": 1.0, f"{link_limit(g)}.out": 1.0, link_limit(g): 2.0}
            if not draft.has("link.p2p"):  # through the host: what one GPU writes there, the next one reads
                loads[DRAM_LIMIT] = 2.0 * draft.number("host.copy_traffic")
            for limit in [name for name in loads if name in draft.limits]:
                draft.takes.setdefault(collective(g), {})[limit] = dict.fromkeys(kinds, loads[limit])


def _bus_rate(draft: _Draft, num_gpus: int) -> float:
    """Bytes per second that each GPU of a ring sends: measured; else its link to the next; else through the host."""
    number = draft.description.number
    if draft.has("link.collective"):
        return draft.rate("link.collective").at(num_gpus)
    if draft.has("link.p2p"):
        return draft.fastest(p2p(0, 1))
    totals = [
        (_host_total(draft, "link.host_h2d", h2d(0)), num_gpus),
        (_host_total(draft, "link.host_d2h", d2h(0)), num_gpus),
        (number("link.host_both"), 2 * num_gpus),
    ]
    own = [draft.fastest(h2d(0)), draft.fastest(d2h(0)), (number("link.both") or float("inf")) / 2]
    return min(*own, *(total / takers for total, takers in totals if total))


def _drives(draft: _Draft, num_drives: int) -> None:
    """RAID-0: an op is spread over all drives. Reads and writes share them: r/read + w/write <= mixed.

    Drives take turns, but slots and what is above them pass both ways at once: so that limit is on the drives' own
    rates, which an op may be below.
    """
    takers: list[Taker] = []
    slots = num_drives * (draft.description.number("nvme.slot") or 0.0)
    for stream, direction in ((NVME_READ, "read"), (NVME_WRITE, "write")):
        rate = draft.rate(f"nvme.{direction}", num_drives)
        takers.append((stream, "bytes", 1 / max(per_s for _, per_s in rate.points)))
        if most := min(filter(None, (slots, draft.description.number(f"nvme.array_{direction}"))), default=None):
            rate = Rate(tuple((amount, min(per_s, most)) for amount, per_s in rate.points))
        draft.stream(stream, "nvme.latency", {"bytes": rate})
    mixed = draft.number("nvme.mixed")
    if mixed < 2:
        draft.share(NVME_LIMIT, mixed, *takers)


def _dram(draft: _Draft) -> None:
    bandwidth = draft.description.number("host.memory_bandwidth")
    if not bandwidth:
        return
    copy, io, adam = (draft.number(f"host.{what}_traffic") for what in ("copy", "io", "adam"))
    takers = [(s, "bytes", copy) for s in draft.streams if parse_stream(s).is_host_link]
    takers += [(s, "bytes", io) for s in draft.streams if parse_stream(s).is_drive]
    takers += [(HOST_ADAM, "parameters", adam), (HOST_ADAM, "elementwise_bytes", 1.0)]
    draft.share(DRAM_LIMIT, bandwidth, *(taker for taker in takers if taker[2] > 0))


def _switches(draft: _Draft, num_gpus: int) -> None:
    """Each switch's link to the host, by direction. Copies between GPUs use it only when they leave the switch."""
    switches = {switch.name: switch for switch in draft.description.switches}
    home: dict[str, str] = {}
    for switch in draft.description.switches:
        for member in switch.members:
            if member in home:
                raise MachineError(f"{member!r} is in switch {home[member]!r} and in {switch.name!r}; a device has one")
            if member not in (NVME, *switches) and device_index(member) is None:
                raise MachineError(f"switch {switch.name!r} has member {member!r}; use gpu0, gpu1, ..., nvme, a switch")
            if (device_index(member) or 0) >= num_gpus:
                raise MachineError(
                    f"switch {switch.name!r} of machine {draft.name!r} has member {member!r}, but gpu.count is "
                    f"{num_gpus}: its GPUs are gpu0 to gpu{num_gpus - 1}; take it out of members, or set gpu.count"
                )
            home[member] = switch.name
    peers = range(num_gpus if _uses_pcie(draft) else 0)
    pairs = [(i, j) for i in peers for j in peers if p2p(i, j) in draft.streams]
    for switch in draft.description.switches:
        name, members = switch.name, _devices_behind(switch.name, switches)
        gpus = [g for m in members if (g := device_index(m)) is not None]
        ways = [(h2d(g), d2h(g)) for g in gpus] + [(NVME_WRITE, NVME_READ)] * (NVME in members)
        down, up = ([way[end] for way in ways if way[end] in draft.streams] for end in (0, 1))  # from, to the host
        up += [p2p(i, j) for i, j in pairs if device(i) in members and device(j) not in members]
        down += [p2p(i, j) for i, j in pairs if device(j) in members and device(i) not in members]
        if down:
            draft.share_bytes(f"switch.{name}.down", switch.limit, *down)
            draft.share_bytes(f"switch.{name}.up", switch.limit, *up)
        rings = [c for g in gpus if (c := collective(g)) in draft.streams]
        once = draft.has("link.p2p")  # a ring leaves the switch once; through the host every GPU does
        for stream in rings if _uses_pcie(draft) and down else ():
            weights = {kind: 1 / len(rings) if once else 1.0 for kind in draft.streams[stream].rates if kind != HOPS}
            draft.takes.setdefault(stream, {}).update({f"switch.{name}.{way}": weights for way in ("down", "up")})


def _devices_behind(name: str, switches: Mapping[str, Switch], above: tuple[str, ...] = ()) -> list[str]:
    """Of a switch, and of those behind it."""
    if name in above:
        raise MachineError(f"switch {name!r} is behind itself: {' behind '.join((*above, name))}; take one out")
    behind = [
        [m] if m not in switches else _devices_behind(m, switches, (*above, name)) for m in switches[name].members
    ]
    return [device for group in behind for device in group]


def _share_speed(draft: _Draft, limit: Limit) -> None:
    """A limit in fractions of full speed: a stream at full speed takes its weight, whatever kind of work it does."""
    takers: list[Taker] = []
    for stream, weight in limit.takes.items():
        if draft.is_of_no_drive(stream):
            continue
        if stream not in draft.streams:
            raise MachineError(
                f"limit {limit.name!r} of machine {draft.name!r} names stream {stream!r}; "
                f"it has {', '.join(draft.streams)}"
            )
        takers += [(stream, kind, weight / draft.fastest(stream, kind)) for kind in draft.streams[stream].rates]
        takers.append((stream, SECONDS, weight))
    draft.share(limit.name, limit.limit, *takers)


def _record(description: Description) -> dict[str, object]:
    """The description as plain data, for reports: entries by key, and the listed limits by name under `limits`."""

    def plain(given: Quantity | Limit, value: object) -> dict[str, object]:
        record = {"value": value, "basis": given.basis, "source": given.source}
        return record if given.spread is None else record | {"spread": given.spread}

    record: dict[str, object] = {"summary": description.summary}
    for name, quantity in description.used().items():
        value = quantity.value
        record[name] = plain(quantity, [list(p) for p in value] if isinstance(value, tuple) else value)
    if description.limits:
        record["limits"] = {limit.name: plain(limit, limit.limit) for limit in description.limits}
    return record
