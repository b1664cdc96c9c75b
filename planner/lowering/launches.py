"""What kernels cost beside their work: units with those that they launch, on machines that say what one costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tierplan.hwmodels.machine import KERNELS, SECONDS, Machine
from tierplan.hwmodels.names import COMPUTE
from tierplan.planner.plan import Sharing
from tierplan.sim.workloads.workload import Unit, Workload

BACKWARD = 1.5
"""Kernels between products in backward for each one in forward: blocks that are traced have 1.45 to 1.87."""


def with_launches(workload: Workload, machine: Machine, sharing: Sharing | None = None) -> Workload:
    """The workload whose units say how many kernels each pass launches; itself where the machine has no such cost.

    Backward launches more kernels, but from C++: its host time is taken to be forward's. Units of measured seconds have
    their kernels in these. Hooks of `sharing` take as long as so many launches more.
    """
    stream = machine.stream(COMPUTE)
    if not (stream.launch_s or stream.kernel_s):
        return workload
    units = (_launching(unit, sharing or Sharing(), stream.kernel_s) for unit in workload.units)
    return replace(workload, units=tuple(units))


def _launching(unit: Unit, sharing: Sharing, kernel_s: float) -> Unit:
    launches = {KERNELS: unit.num_kernels + sharing.hooks + sharing.module_hooks * unit.num_modules}

    def work(known: Mapping[str, float], passes: float = 1.0) -> Mapping[str, float]:
        beside = {SECONDS: kernel_s * passes * unit.num_elementwise} if kernel_s else {}
        return known if SECONDS in known or not known else {**known, **launches, **beside}

    again = None if unit.recompute is None else work(unit.recompute)
    return replace(unit, forward=work(unit.forward), backward=work(unit.backward, BACKWARD), recompute=again)
