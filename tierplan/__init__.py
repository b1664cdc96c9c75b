"""tierplan: plan, simulate and run the training of transformers that do not fit into memory.

    import tierplan as tp

    machine = tp.load_machine("desktop-4090")
    workload = tp.load_workload("gpt-13b", tp.Training(per_device_train_batch_size=8))
    planned = tp.plan(workload, machine)
    print(planned.step_s, planned.gap)

Names are imported when they are first used: torch is loaded only by what runs it, HiGHS only by the planner.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_EXPORTS: dict[str, str] = {
    # machines and models
    "Machine": "tierplan.hwmodels.machine",
    "load_machine": "tierplan.hwmodels",
    "Training": "tierplan.sim.workloads.workload",
    "Workload": "tierplan.sim.workloads.workload",
    "load_workload": "tierplan.sim.workloads.models",
    "trace_module": "tierplan.runtime.tracing.trace",
    "trace_workload": "tierplan.runtime.tracing.trace",
    # the language
    "Buffer": "tierplan.sim.schedule",
    "Op": "tierplan.sim.schedule",
    "Schedule": "tierplan.sim.schedule",
    "Tier": "tierplan.sim.schedule",
    "validate": "tierplan.sim.schedule",
    "unroll": "tierplan.sim.columns",
    "load_schedule": "tierplan.sim.schedule_file",
    "save_schedule": "tierplan.sim.schedule_file",
    "Trace": "tierplan.sim.trace",
    # deciding
    "PackPlan": "tierplan.planner.plan",
    "Packs": "tierplan.planner.plan",
    "PagedPlan": "tierplan.planner.plan",
    "Plan": "tierplan.planner.plan",
    "UnitPlan": "tierplan.planner.plan",
    "UnitwisePlan": "tierplan.planner.plan",
    "POLICIES": "tierplan.planner.policies",
    "lower": "tierplan.planner.lowering",
    "plan": "tierplan.planner.planning",
    # predicting
    "OutOfMemory": "tierplan.sim.analysis.completion",
    "simulate": "tierplan.sim.pricing:simulate_on",
    "steady_state": "tierplan.sim.analysis.steady",
    "write_perfetto": "tierplan.sim.output.perfetto",
    "vary": "tierplan.sim.analysis.variation",
    # understanding
    "cause_graph": "tierplan.sim.analysis.explain",
    "critical_path": "tierplan.sim.analysis.explain",
    "sensitivities": "tierplan.sim.analysis.explain",
    "stream_times": "tierplan.sim.analysis.explain",
    "plot_memory": "tierplan.sim.output.plots",
    "plot_step_time": "tierplan.sim.output.plots",
    "plot_timeline": "tierplan.sim.output.plots",
    "explore": "tierplan.studies.explore",
    # running and comparing
    "train": "tierplan.runtime.trainer",
    "compare": "tierplan.validation.comparison.compare",
    "write_report": "tierplan.validation.report.report",
}
"""Public name -> module that defines it, or module:name where it is called otherwise there."""

__all__ = [*sorted(_EXPORTS), "__version__"]

if TYPE_CHECKING:
    from tierplan.hwmodels import load_machine as load_machine
    from tierplan.hwmodels.machine import Machine as Machine
    from tierplan.planner.lowering import lower as lower
    from tierplan.planner.plan import PackPlan as PackPlan
    from tierplan.planner.plan import Packs as Packs
    from tierplan.planner.plan import PagedPlan as PagedPlan
    from tierplan.planner.plan import Plan as Plan
    from tierplan.planner.plan import UnitPlan as UnitPlan
    from tierplan.planner.plan import UnitwisePlan as UnitwisePlan
    from tierplan.sim.columns import unroll as unroll
    from tierplan.sim.pricing import simulate_on
    from tierplan.sim.schedule import Buffer as Buffer
    from tierplan.sim.schedule import Op as Op
    from tierplan.sim.schedule import Schedule as Schedule
    from tierplan.sim.schedule import Tier as Tier
    from tierplan.sim.schedule import validate as validate
    from tierplan.sim.trace import Trace as Trace
    from tierplan.sim.workloads.workload import Training as Training
    from tierplan.sim.workloads.workload import Workload as Workload

    simulate = simulate_on


def __getattr__(name: str) -> object:
    where = _EXPORTS.get(name)
    if where is None:
        raise AttributeError(f"module 'tierplan' has no attribute {name!r}; it has {', '.join(sorted(_EXPORTS))}")
    module, _, other = where.partition(":")
    value = getattr(importlib.import_module(module), other or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
