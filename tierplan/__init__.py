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
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_NAMES: dict[str, str] = {
    # machines and models
    "hwmodels": "load_machine",
    "hwmodels.machine": "Machine",
    "sim.workloads.workload": "Training Workload",
    "sim.workloads.models": "load_workload",
    "runtime.tracing.trace": "trace_module trace_workload",
    # the language
    "sim.schedule": "Buffer Op Schedule Tier validate",
    "sim.columns": "unroll",
    "sim.schedule_file": "load_schedule save_schedule",
    "sim.trace": "Trace",
    # deciding
    "planner.plan": "PackPlan Packs PagedPlan Plan UnitPlan UnitwisePlan",
    "planner.policies": "POLICIES",
    "planner.lowering": "lower",
    "planner.planning": "plan",
    # predicting
    "sim.analysis.completion": "OutOfMemory",
    "sim.analysis.steady": "steady_state",
    "sim.analysis.variation": "vary",
    "sim.output.perfetto": "write_perfetto",
    # understanding
    "sim.analysis.explain": "cause_graph critical_path sensitivities stream_times",
    "sim.output.plots": "plot_memory plot_step_time plot_timeline",
    "studies.explore": "explore",
    # running and comparing
    "runtime.trainer": "train",
    "validation.comparison.compare": "compare",
    "validation.report.report": "write_report",
}
"""Public names by the module that defines them."""
_EXPORTS = {name: (module, name) for module, names in _NAMES.items() for name in names.split()}
_EXPORTS["simulate"] = ("sim.pricing", "simulate_on")

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


def _checks() -> Mapping[type, Callable[[Any], object]]:
    """What public functions look at in their arguments: a schedule that somebody has made obeys the language."""
    from tierplan.sim.schedule import Schedule, validate

    return {Schedule: validate}


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'tierplan' has no attribute {name!r}; it has {', '.join(sorted(_EXPORTS))}")
    module, attribute = _EXPORTS[name]
    value = getattr(importlib.import_module(f"tierplan.{module}"), attribute)
    if inspect.isfunction(value):  # the package itself calls it as it is
        from tierplan.hwmodels.values.arguments import checked

        value = checked(value, f"tierplan.{name}", dict if name == "validate" else _checks)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
