"""Which schedules the runtime executes: those whose ops are a unit's, on one device, and train the model as it is."""

from __future__ import annotations

from tierplan.hwmodels.names import parse_stream
from tierplan.runtime.execution.placement import TrainingError
from tierplan.runtime.execution.plausible import check_plausible
from tierplan.sim.contents import is_tile, parse_key
from tierplan.sim.schedule import Schedule
from tierplan.sim.step import StepSpec


def executable_step(schedule: Schedule) -> StepSpec:
    """What the schedule trains. Raises `TrainingError` for one that is only simulated, or that does not say it."""
    devices = {parse_stream(stream).device for stream in schedule.streams} - {None}
    if len(devices) > 1:
        raise TrainingError(
            f"schedule {schedule.name!r} is for {len(devices)} devices, which only the simulator executes; the runtime "
            "trains on one: plan with a machine that has one"
        )
    keys = (parse_key(op.key) for op in schedule.ops)
    if any((op.verb, op.moved) == ("offload", "params") and "fwd" in op.where for op in keys):
        raise TrainingError(
            f"schedule {schedule.name!r} pages weights out after every use, unchanged ones too; that is the baseline "
            "of memory virtualisation, which is simulated for comparison and which the runtime does not execute: "
            "choose another policy"
        )
    if schedule.step is None:
        raise TrainingError(f"schedule {schedule.name!r} does not say what it trains; make it with `tierplan plan`")
    if schedule.step.training.dtype == "fp16":
        raise TrainingError(
            f"schedule {schedule.name!r} trains in fp16, whose small gradients would become zero without a gradient "
            "scaler, which the runtime has not; plan with dtype bf16 or fp32"
        )
    tile = next((unit.name for unit in schedule.step.units if is_tile(unit.name)), None)
    if tile is not None:
        raise TrainingError(
            f"schedule {schedule.name!r} cuts operators into tiles ({tile!r}), which is simulated only: the gradient "
            "of a tiled operator's input is summed over tiles, which rounds it differently from plain training. Plan "
            "with operator_tiles=1"
        )
    wrong = check_plausible(schedule, schedule.step)
    if wrong is not None:
        raise TrainingError(f"schedule {schedule.name!r} is not one that this runtime can execute: {wrong}. Plan again")
    return schedule.step
