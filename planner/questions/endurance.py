"""Drive endurance: how fast a plan may write to NVMe, if the drives are to last for a given time.

A drive is rated for the bytes that may be written to it in its life. Spread over the wanted years of training without
pause, that is a rate in bytes per second, which what a step writes over the step's time must not exceed.
"""

from __future__ import annotations

from collections.abc import Mapping

from tierplan.hwmodels.machine import Machine, MachineError
from tierplan.hwmodels.names import NVME_WRITE
from tierplan.sim.columns import ScheduleColumns
from tierplan.sim.output.text import format_s
from tierplan.sim.schedule import Schedule

UNKNOWN_LIFE = "not known (nvme.endurance)"
"""Of drives that are written to."""
SECONDS_PER_YEAR = 365.25 * 24 * 3600


def endurance_bytes(machine: Machine) -> float | None:
    """Bytes that may be written to all drives together in their life; None where the machine does not say."""
    rated, drives = (machine.description.get(name) for name in ("nvme.endurance", "nvme.drives"))
    if not isinstance(rated, Mapping) or not isinstance(drives, Mapping):
        return None
    return float(rated["value"]) * float(drives["value"])


def allowed_bytes_per_s(machine: Machine, lifetime_years: float | None) -> float:
    """The rate of writing at which the drives last for `lifetime_years` of training; infinite without drives, or where
    nobody asks for a lifetime.

    Raises `ValueError` for a lifetime that is none, `MachineError` where the machine does not say what drives take.
    """
    if lifetime_years is None:
        return float("inf")
    if not 0 < lifetime_years < float("inf"):
        raise ValueError(f"a drive lifetime of {lifetime_years} years makes no sense; it must be finite and above 0")
    if all(tier.kind != "nvme" for tier in machine.tiers):
        return float("inf")
    total = endurance_bytes(machine)
    if total is None:
        raise MachineError(
            f"machine {machine.name!r} does not say how much may be written to its drives; give it, for one drive, "
            "as nvme.endurance (for example --set 'nvme.endurance=1200 TB'), or ask for no drive lifetime"
        )
    if total == 0:
        raise MachineError(f"the drives of machine {machine.name!r} are rated for 0 bytes; set nvme.endurance above 0")
    return total / (lifetime_years * SECONDS_PER_YEAR)


def written_bytes(schedule: Schedule | ScheduleColumns) -> int:
    """Bytes that one step writes to NVMe."""
    return schedule.bytes_moved().get(NVME_WRITE, 0)


def lifetime_s(machine: Machine, written: int, step_s: float) -> float | None:
    """Seconds until the drives have taken all that they are rated for (SSDTrain's projection).

    None where nothing is written, or the machine does not say what the drives are rated for.
    """
    total = endurance_bytes(machine)
    return total * step_s / written if written and total is not None else None


def years_text(years: float) -> str:
    """A lifetime as it was asked for: `1 year`, `2.5 years`."""
    return f"{years:g} year{'s' * (years != 1)}"


def life_text(life_s: float | None, written: int) -> str:
    """How long drives last to which a step writes so many bytes; empty where it writes none."""
    if not written:
        return ""
    return UNKNOWN_LIFE if life_s is None else f"{format_s(life_s)} of writing like this, by their rated endurance"
