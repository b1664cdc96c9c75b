"""What launching costs the host: units with the kernels that they launch, on machines that say what one costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tierplan.hwmodels.machine import KERNELS, SECONDS, Machine
from tierplan.hwmodels.names import COMPUTE
from tierplan.planner.plan import Sharing
from tierplan.sim.workloads.workload import Unit, Workload


def with_launches(workload: Workload, machine: Machine, sharing: Sharing | None = None) -> Workload:
    """The workload whose units say how many kernels each pass launches; itself where the machine has no such cost.

    Backward launches more kernels, but from C++: its host time is taken to be forward's. Units of measured seconds have
    their launches in these. Hooks of `sharing` take as long as so many launches more.
    """
    if not machine.stream(COMPUTE).launch_s:
        return workload
    return replace(workload, units=tuple(_launching(unit, sharing or Sharing()) for unit in workload.units))


def _launching(unit: Unit, sharing: Sharing) -> Unit:
    launches = {KERNELS: unit.num_kernels + sharing.hooks + sharing.module_hooks * unit.num_modules}

    def work(known: Mapping[str, float]) -> Mapping[str, float]:
        return known if SECONDS in known or not known else {**known, **launches}

    again = None if unit.recompute is None else work(unit.recompute)
    return replace(unit, forward=work(unit.forward), backward=work(unit.backward), recompute=again)
