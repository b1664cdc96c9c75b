"""Which schedules the runtime executes: those whose ops are a unit's, on one device, and train the model as it is.

check_executable(schedule)   raises TrainingError for others, with the reason
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tierplan.hwmodels.names import parse_stream
from tierplan.runtime.execution.placement import TrainingError
from tierplan.sim.contents import OpKey, parse_key
from tierplan.sim.schedule import Schedule

__all__ = ["check_executable"]


def check_executable(schedule: Schedule) -> None:
    """Raises `TrainingError` for a schedule that only the simulator executes, and for one that says too little."""
    meta = schedule.meta
    devices = {parse_stream(stream).device for stream in schedule.streams} - {None}
    if len(devices) > 1:
        raise TrainingError(
            f"schedule {schedule.name!r} is for {len(devices)} devices, which only the simulator executes; the runtime "
            "trains on one: plan with a machine that has one"
        )
    if any(_pages_out_after_forward(parse_key(op.key)) for op in schedule.ops):
        raise TrainingError(
            f"schedule {schedule.name!r} pages weights out after every use, unchanged ones too; that is the baseline "
            "of memory virtualisation, which is simulated for comparison and which the runtime does not execute: "
            "choose another policy"
        )
    units: Any = meta.get("units")
    if not isinstance(meta.get("training"), Mapping) or not units:
        raise TrainingError(
            f"schedule {schedule.name!r} does not say what it trains: its meta lacks 'training' or 'units'; "
            "make it with `tierplan plan`"
        )
    tile = next((u["name"] for u in units if "." in u["name"]), None)
    if tile is not None:
        raise TrainingError(
            f"schedule {schedule.name!r} cuts operators into tiles ({tile!r}), which is simulated only: the gradient "
            "of a tiled operator's input is summed over tiles, which rounds it differently from plain training. Plan "
            "with operator_tiles=1"
        )


def _pages_out_after_forward(op: OpKey) -> bool:
    return (op.verb, op.moved) == ("offload", "params") and "fwd" in op.where
