"""Another `unroll`, object by object: the witness of the one that joins columns."""

from __future__ import annotations

from dataclasses import replace

from tierplan.sim.contents import step_prefix
from tierplan.sim.schedule import Buffer, Op, Schedule, ScheduleError

__all__ = ["unrolled_by_objects"]


def unrolled_by_objects(schedule: Schedule, num_steps: int) -> Schedule:
    if num_steps < 1:
        raise ScheduleError(f"cannot unroll {num_steps} steps; it must be 1 or more")
    initial = {b.name for b in schedule.buffers if b.initial}
    successor = {b.becomes: b.name for b in schedule.buffers if b.becomes is not None}
    if num_steps > 1 and (lost := initial - successor.keys()):
        raise ScheduleError(
            f"initial buffer {min(lost)!r} has no buffer that becomes it, so a second step would lack it; "
            "declare `becomes` on the buffer that outlives the step"
        )

    prefix = [step_prefix(step) for step in range(num_steps + 1)]

    def instance(step: int, name: str) -> str:
        while step > 0 and name in initial:
            step, name = step - 1, successor[name]
        return prefix[step] + name

    def place(step: int, name: str) -> str:
        """The stream or tier of a step, whose devices have been turned so many times."""
        for _ in range(step):
            turned = {f"gpu{d}": f"gpu{new}" for d, new in enumerate(schedule.next_devices)}
            name = ".".join(turned.get(part, part) for part in name.split("."))
        return name

    outlives = {instance(num_steps, name): prefix[0] + name for name in successor}
    buffers: list[Buffer] = []
    ops: list[Op] = []
    for step, this in enumerate(prefix[:num_steps]):
        for b in schedule.buffers:
            if b.initial and step > 0:
                continue
            name, reuses = this + b.name, instance(step, b.reuses) if b.reuses else None
            buffers.append(replace(b, name=name, tier=place(step, b.tier), reuses=reuses, becomes=outlives.get(name)))
        for op in schedule.ops:
            ops.append(
                replace(
                    op,
                    key=this + op.key,
                    stream=place(step, op.stream),
                    reads=tuple(instance(step, name) for name in op.reads),
                    writes=tuple(this + name for name in op.writes),
                    after=tuple(this + key for key in op.after),
                )
            )
    return replace(
        schedule,
        name=f"{schedule.name} x{num_steps}",
        buffers=tuple(buffers),
        ops=tuple(ops),
        next_devices=tuple(
            int(place(num_steps, f"gpu{d}").removeprefix("gpu")) for d in range(len(schedule.next_devices))
        ),
        meta={**schedule.meta, "num_steps": num_steps},
    )
