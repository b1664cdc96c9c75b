"""One device for several that all do the same at once: of a search's many plans, its steps take as long.

What the first device takes of a shared limit, every other one takes of it too at that moment, or of one like it. So the
first takes as much more. Times are those of all devices up to the rounding of shards: the first has the largest.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeGuard

from tierplan.hwmodels.machine import Machine, Stream
from tierplan.hwmodels.names import parse_stream
from tierplan.hwmodels.scaling import with_demand
from tierplan.planner.plan import Plan, UnitwisePlan


def do_the_same(plan: Plan) -> TypeGuard[UnitwisePlan]:
    """Whether several devices do the same at once. Not where activations go to drives, which serve one by one."""
    if not isinstance(plan, UnitwisePlan):
        return False
    actions = (action for u in plan.units for action in (u.input, *((u.acts,) if isinstance(u.acts, str) else u.acts)))
    return plan.devices > 1 and not plan.parts and "nvme" not in actions


def first_for_all(machine: Machine, devices: int) -> Machine | None:
    """The machine on which the first device takes what so many take; None where one of them has other streams."""
    own: list[dict[str, Stream]] = [{} for _ in range(devices)]
    for stream in machine.streams:
        name = parse_stream(stream.name)
        if name.device is not None and name.device < devices and name.task != "p2p":
            own[name.device][name.task] = stream
    limits, users = machine.limits, dict[tuple[str, str], int]()
    for streams in own:
        for task, stream in streams.items():
            for limit in stream.takes:
                users[task, limit] = users.get((task, limit), 0) + 1

    def as_all(task: str, stream: Stream) -> Stream:
        for limit in stream.takes:
            stream = with_demand(stream, (limit,), users[task, limit])
        return stream

    def shape(task: str, stream: Stream) -> Stream:
        """What has to be alike: its rates, and what it takes of limits, whatever their names."""
        takes = as_all(task, stream).takes
        named = sorted((limits[limit], sorted(weights.items())) for limit, weights in takes.items())
        return replace(stream, name="", takes={str(k): dict(w) for k, (_, w) in enumerate(named)})

    shapes = [{task: shape(task, stream) for task, stream in streams.items()} for streams in own]
    if any(other != shapes[0] for other in shapes):
        return None
    first = {stream.name: as_all(task, stream) for task, stream in own[0].items()}
    return replace(machine, streams=tuple(first.get(s.name, s) for s in machine.streams))
