"""Turns a description into the machine that the simulator and the planner use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tierplan.hwmodels.description import Description, Limit, Quantity
from tierplan.hwmodels.keys import KEYS
from tierplan.hwmodels.machine import SECONDS, Machine, MachineError, Rate, SharedLimit, Stream, TierSpec
from tierplan.hwmodels.names import (
    DRAM_LIMIT,
    HOST,
    HOST_ADAM,
    NVME,
    NVME_LIMIT,
    NVME_READ,
    NVME_WRITE,
    compute,
    d2h,
    device,
    device_index,
    h2d,
    link_limit,
    p2p,
    parse_stream,
)

__all__ = ["build"]

DTYPES = ("fp32", "bf16", "fp16")


@dataclass
class _Draft:
    """Shared limits collected so far, and what each stream takes of them per unit of work."""

    machine: str
    """Its name, for errors."""
    limits: dict[str, float] = field(default_factory=dict)
    takes: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)

    def share(self, limit: str, per_s: float, *streams: tuple[str, str, float]) -> None:
        """Adds a limit that (stream, work kind, units per unit of work) load."""
        if limit in self.limits:
            raise MachineError(f"machine {self.machine!r} has two shared limits {limit!r}; give one another name")
        if per_s <= 0:
            raise MachineError(f"shared limit {limit!r} of machine {self.machine!r} is {per_s:g}; it must be above 0")
        self.limits[limit] = per_s
        for stream, kind, weight in streams:
            self.takes.setdefault(stream, {}).setdefault(limit, {})[kind] = weight


def build(description: Description) -> Machine:
    """The machine that `description` describes.

    Raises `MachineError` naming the key that is missing or contradicts another.
    """
    for key in KEYS.values():
        if key.required and description.quantity(key.name) is None:
            raise MachineError(f"machine {description.name!r} does not say {key.name} ({key.meaning}); add it")
    num_gpus, num_drives = int(_need(description, "gpu.count")), int(_need(description, "nvme.drives"))
    if num_gpus < 1:
        raise MachineError(f"gpu.count of machine {description.name!r} is {num_gpus}; it must be 1 or more")
    draft = _Draft(description.name)
    rates: dict[str, dict[str, Rate]] = {}
    latency_s: dict[str, float] = {}
    tiers = _tiers(description, num_gpus, num_drives)
    for i in range(num_gpus):
        _gpu(description, i, rates, latency_s, draft)
    _peer_links(description, num_gpus, rates, latency_s, draft)
    if num_drives:
        _drives(description, num_drives, rates, latency_s, draft)
    rates[HOST_ADAM] = {"parameters": _rate(description, "host.adam")}
    # memory-bound work on the host (adding gradients, norms, widening) at the DRAM traffic that Adam reaches
    traffic = _fastest(rates, HOST_ADAM, "parameters") * _need(description, "host.adam_traffic")
    rates[HOST_ADAM]["elementwise_bytes"] = Rate.constant(traffic)
    latency_s[HOST_ADAM] = _need(description, "host.latency")
    _dram(description, rates, draft)
    _host_link(description, num_gpus, draft)
    _switches(description, num_gpus, rates, draft)
    _listed_limits(description, rates, draft)
    shares = {NVME_READ: _need(description, "nvme.read_share"), NVME_WRITE: _need(description, "nvme.write_share")}
    shares |= dict(description.shares)
    for stream, share in shares.items():
        if share <= 0:
            raise MachineError(f"the share of stream {stream!r} is {share}; it must be above 0")
    return Machine(
        name=description.name,
        tiers=tiers,
        streams=tuple(
            Stream(
                name=name,
                rates=by_kind,
                latency_s=latency_s[name],
                takes=draft.takes.get(name, {}),
                share=shares.get(name, 1.0),
            )
            for name, by_kind in rates.items()
        ),
        shared_limits=tuple(SharedLimit(name=name, limit=limit) for name, limit in draft.limits.items()),
        nameplate=tuple(
            name for name, q in description.used().items() if q.basis == "nameplate" and _matters(description, name)
        ),
        description=_record(description),
    )


FOR_THE_RECORD = (".price", ".power", ".endurance", ".cores", ".part")
"""Ends of keys that change no rate, capacity or limit."""


def _matters(description: Description, name: str) -> bool:
    """Whether tiers, streams or limits depend on this key's value."""
    if name.startswith("gpu.peak_"):
        return description.quantity(name.replace("peak", "matmul")) is None
    if name == "gpu.memory_bandwidth":
        return description.quantity("gpu.elementwise") is None or description.quantity("gpu.adam") is None
    if name.startswith("nvme.") and not description.number("nvme.drives"):
        return False
    return not name.endswith(FOR_THE_RECORD)


def _need(description: Description, name: str) -> float:
    number = description.number(name)
    if number is None:
        raise MachineError(f"machine {description.name!r} does not say {name} ({KEYS[name].meaning}); add it")
    return number


def _rate(description: Description, name: str, scale: float = 1.0) -> Rate:
    """The rate of a key. With `scale` drives side by side, each does its fraction of an op."""
    quantity = description.quantity(name)
    if quantity is None:
        raise MachineError(f"machine {description.name!r} does not say {name} ({KEYS[name].meaning}); add it")
    points = quantity.value if isinstance(quantity.value, tuple) else ((1.0, float(quantity.value)),)
    if any(rate <= 0 for _, rate in points):
        raise MachineError(f"{name} of machine {description.name!r} is 0; a rate must be above 0")
    return Rate(tuple((amount * scale, rate * scale) for amount, rate in points))


def _tiers(description: Description, num_gpus: int, num_drives: int) -> tuple[TierSpec, ...]:
    def usable(section: str, count: int = 1) -> int:
        total, reserve = _need(description, f"{section}.capacity"), description.number(f"{section}.reserve") or 0.0
        if reserve >= total:
            raise MachineError(
                f"{section}.reserve of machine {description.name!r} is {reserve:.0f} bytes, not less than "
                f"{section}.capacity, {total:.0f}; nothing would be left for a plan"
            )
        return int(total - reserve) * count

    tiers = [TierSpec(name=device(i), kind="device", capacity_bytes=usable("gpu")) for i in range(num_gpus)]
    rounding = str(description.quantity("host.rounding").value)  # type: ignore[union-attr]  # it has a default
    tiers.append(TierSpec(name=HOST, kind="host", capacity_bytes=usable("host"), rounding=rounding))  # type: ignore[arg-type]
    if num_drives:
        capacity = int(_need(description, "nvme.capacity")) * num_drives
        tiers.append(TierSpec(name=NVME, kind="nvme", capacity_bytes=capacity))
    return tuple(tiers)


def _gpu(
    description: Description, index: int, rates: dict[str, dict[str, Rate]], latency_s: dict[str, float], draft: _Draft
) -> None:
    by_kind: dict[str, Rate] = {}
    for dtype in DTYPES:
        matmul, attention = (description.quantity(f"gpu.{work}_{dtype}") for work in ("matmul", "attention"))
        peak = description.number(f"gpu.peak_{dtype}")
        if matmul is not None:
            by_kind[f"matmul_{dtype}_flops"] = _rate(description, f"gpu.matmul_{dtype}")
        elif peak:
            by_kind[f"matmul_{dtype}_flops"] = Rate.constant(peak * _need(description, "gpu.matmul_frac"))
        if attention is not None:
            by_kind[f"attention_{dtype}_flops"] = _rate(description, f"gpu.attention_{dtype}")
        elif f"matmul_{dtype}_flops" in by_kind:
            fastest = max(rate for _, rate in by_kind[f"matmul_{dtype}_flops"].points)
            by_kind[f"attention_{dtype}_flops"] = Rate.constant(fastest * _need(description, "gpu.attention_frac"))
    bandwidth = description.number("gpu.memory_bandwidth")
    achieved = None if bandwidth is None else bandwidth * _need(description, "gpu.memory_frac")
    for kind, name, traffic in (
        ("elementwise_bytes", "gpu.elementwise", 1.0),
        ("parameters", "gpu.adam", _need(description, "gpu.adam_traffic")),
    ):
        if description.quantity(name) is not None:
            by_kind[kind] = _rate(description, name)
        elif achieved:
            by_kind[kind] = Rate.constant(achieved / traffic)
        else:
            raise MachineError(f"machine {description.name!r} says neither {name} nor gpu.memory_bandwidth; give one")
    rates[compute(index)] = by_kind
    latency_s[compute(index)] = _need(description, "gpu.latency")
    for stream, key in ((h2d(index), "link.h2d"), (d2h(index), "link.d2h")):
        rates[stream] = {"bytes": _rate(description, key)}
        latency_s[stream] = _need(description, "link.latency")
    if both := description.number("link.both"):
        draft.share(link_limit(index), both, (h2d(index), "bytes", 1.0), (d2h(index), "bytes", 1.0))


def _fastest(rates: Mapping[str, Mapping[str, Rate]], stream: str, kind: str = "bytes") -> float:
    return max(rate for _, rate in rates[stream][kind].points)


def _peer_links(
    description: Description,
    num_gpus: int,
    rates: dict[str, dict[str, Rate]],
    latency_s: dict[str, float],
    draft: _Draft,
) -> None:
    """Copies between GPUs. Over PCIe they share each GPU's link with copies to and from the host, by direction."""
    if description.quantity("link.p2p") is None:
        return
    pairs = [(i, j) for i in range(num_gpus) for j in range(num_gpus) if i != j]
    for i, j in pairs:
        rates[p2p(i, j)] = {"bytes": _rate(description, "link.p2p")}
        latency_s[p2p(i, j)] = _need(description, "link.latency")
    path = description.quantity("link.p2p_path")
    if path is None or path.value != "pcie" or num_gpus == 1:
        return
    for g in range(num_gpus):
        into = [(p2p(i, j), "bytes", 1.0) for i, j in pairs if j == g]
        out_of = [(p2p(i, j), "bytes", 1.0) for i, j in pairs if i == g]
        draft.share(f"{link_limit(g)}.in", _fastest(rates, h2d(g)), (h2d(g), "bytes", 1.0), *into)
        draft.share(f"{link_limit(g)}.out", _fastest(rates, d2h(g)), (d2h(g), "bytes", 1.0), *out_of)


def _drives(
    description: Description,
    num_drives: int,
    rates: dict[str, dict[str, Rate]],
    latency_s: dict[str, float],
    draft: _Draft,
) -> None:
    """RAID-0: an op is spread over all drives. Reads and writes share them: r/read + w/write <= mixed."""
    for stream, direction in ((NVME_READ, "read"), (NVME_WRITE, "write")):
        rate = _rate(description, f"nvme.{direction}", num_drives)
        if most := description.number(f"nvme.array_{direction}"):
            rate = Rate(tuple((amount, min(per_s, most)) for amount, per_s in rate.points))
        rates[stream] = {"bytes": rate}
        latency_s[stream] = _need(description, "nvme.latency")
    mixed = _need(description, "nvme.mixed")
    if mixed <= 0:
        raise MachineError(f"nvme.mixed of machine {description.name!r} is {mixed}; it must be above 0")
    if mixed < 2:
        draft.share(NVME_LIMIT, mixed, *((s, "bytes", 1 / _fastest(rates, s)) for s in (NVME_READ, NVME_WRITE)))


def _dram(description: Description, rates: Mapping[str, object], draft: _Draft) -> None:
    bandwidth = description.number("host.memory_bandwidth")
    if not bandwidth:
        return
    copy, io, adam = (_need(description, f"host.{what}_traffic") for what in ("copy", "io", "adam"))
    takers = [(s, "bytes", copy) for s in rates if parse_stream(s).is_host_link]
    takers += [(s, "bytes", io) for s in rates if parse_stream(s).is_drive]
    takers += [(HOST_ADAM, "parameters", adam), (HOST_ADAM, "elementwise_bytes", 1.0)]
    draft.share(DRAM_LIMIT, bandwidth, *((s, k, w) for s, k, w in takers if w > 0))


def _host_link(description: Description, num_gpus: int, draft: _Draft) -> None:
    for direction, stream in (("h2d", h2d), ("d2h", d2h)):
        if total := description.number(f"link.host_{direction}"):
            draft.share(f"host_link.{direction}", total, *((stream(i), "bytes", 1.0) for i in range(num_gpus)))


def _switches(description: Description, num_gpus: int, rates: Mapping[str, object], draft: _Draft) -> None:
    """Each switch's link to the host, by direction. Copies between GPUs use it only when they leave the switch."""
    home: dict[str, str] = {}
    for switch in description.switches:
        for member in switch.members:
            if member in home:
                raise MachineError(f"{member!r} is in switch {home[member]!r} and in {switch.name!r}; a device has one")
            if member != NVME and device_index(member) is None:
                raise MachineError(f"switch {switch.name!r} has member {member!r}; use gpu0, gpu1, ..., nvme")
            home[member] = switch.name
    path = description.quantity("link.p2p_path")
    over_pcie = path is not None and path.value == "pcie"
    for switch in description.switches:
        down, up = [], []  # from the host, to the host
        for member in switch.members:
            index = device_index(member)
            streams = (NVME_WRITE, NVME_READ) if index is None else (h2d(index), d2h(index))
            if streams[0] in rates:
                down.append((streams[0], "bytes", 1.0))
                up.append((streams[1], "bytes", 1.0))
        for i in range(num_gpus if over_pcie else 0):
            for j in range(num_gpus):
                stream, here, there = p2p(i, j), home.get(device(i)), home.get(device(j))
                if stream in rates and here != there:
                    up += [(stream, "bytes", 1.0)] if here == switch.name else []
                    down += [(stream, "bytes", 1.0)] if there == switch.name else []
        if down:
            draft.share(f"switch.{switch.name}.down", switch.limit_bytes_per_s, *down)
            draft.share(f"switch.{switch.name}.up", switch.limit_bytes_per_s, *up)


def _listed_limits(description: Description, rates: Mapping[str, Mapping[str, Rate]], draft: _Draft) -> None:
    """Limits in fractions of full speed: a stream at full speed takes its weight, whatever kind of work it does."""
    for limit in description.limits:
        takers: list[tuple[str, str, float]] = []
        for stream, weight in limit.takes.items():
            if stream not in rates:
                raise MachineError(
                    f"limit {limit.name!r} of machine {description.name!r} names stream {stream!r}; "
                    f"it has {', '.join(rates)}"
                )
            takers += [(stream, kind, weight / _fastest(rates, stream, kind)) for kind in rates[stream]]
            takers.append((stream, SECONDS, weight))
        draft.share(limit.name, limit.limit, *takers)


def _record(description: Description) -> dict[str, object]:
    """The description as plain data, for reports: entries by key, and the listed limits by name under `limits`."""

    def plain(given: Quantity | Limit, value: object) -> dict[str, object]:
        record = {"value": value, "basis": given.basis, "source": given.source}
        return record if given.spread is None else record | {"spread": given.spread}

    found: dict[str, object] = {"summary": description.summary}
    for name, quantity in description.used().items():
        value = quantity.value
        found[name] = plain(quantity, [list(p) for p in value] if isinstance(value, tuple) else value)
    if description.limits:
        found["limits"] = {limit.name: plain(limit, limit.limit) for limit in description.limits}
    return found
