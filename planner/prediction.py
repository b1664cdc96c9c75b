"""What a plan gives on a machine, in the figures that people compare.

prediction = predict("fuyou", workload, machine)
prediction.step_s, prediction.fits, prediction.bound_by
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from math import isclose
from textwrap import shorten

from tierplan.hwmodels.machine import Machine, MachineError
from tierplan.hwmodels.names import NVME_READ, NVME_WRITE, parts_used
from tierplan.hwmodels.values.shown import Shown
from tierplan.planner.lowering import Lowering
from tierplan.planner.plan import PackPlan, PagedPlan, Plan, UnitwisePlan, other_numbers
from tierplan.planner.plan_rules import PlanError
from tierplan.planner.policies import decide
from tierplan.planner.policies.options import OptionError
from tierplan.planner.questions.endurance import lifetime_s, written_bytes
from tierplan.planner.several_devices.alike import do_the_same
from tierplan.sim.analysis.completion import OutOfMemory
from tierplan.sim.analysis.explain import (
    Sensitivity,
    busy_fracs,
    limited_by,
    path_of,
    sensitivities,
    time_on_path,
)
from tierplan.sim.analysis.ordering import refine_columns
from tierplan.sim.analysis.phases import Phases, phases
from tierplan.sim.analysis.steady import SteadyState, steady_state
from tierplan.sim.columns import ScheduleColumns
from tierplan.sim.output.text import in_short
from tierplan.sim.schedule import Schedule, ScheduleError
from tierplan.sim.workloads.executed import has_frozen_encoder, not_executed
from tierplan.sim.workloads.models import by_operator
from tierplan.sim.workloads.workload import Workload

BETWEEN = ("link.p2p", "link.collective")
"""What says how fast GPUs reach each other."""
SAME_FRAC = 1e-3
"""The first device stands for all where its steps differ by less from theirs: else grants come in another order."""


@dataclass(frozen=True, kw_only=True)
class Prediction(Shown):
    """The figures of one plan; `step_s` is None where it does not fit."""

    policy: str
    model: str
    machine: str
    plan: Plan | None
    """None where the policy has no plan for this workload and machine."""
    columns: ScheduleColumns | None = field(default=None, repr=False, compare=False)
    """One step of the schedule, as numbers: the plan says which."""
    steady: SteadyState | None = None
    shortage: OutOfMemory | None = None
    """What does not fit, and by how much."""
    reason: str = ""
    """Why there is no plan, or none that may run; empty where only memory is short."""
    tokens: int = 0
    """In one step, over all devices."""
    micro_batch: int = 0
    """Sequences in one micro-batch."""
    accumulation: int = 0
    num_parameters: int = 0
    num_active: int | None = None
    """Those that a token meets, where all are trained; None where some are frozen."""
    flops: float = 0.0
    """Of forward and backward in one step, recomputation left out, over all devices; 0 where a calibration says seconds
    in their place."""
    utilization: Mapping[str, float] = field(default_factory=dict)
    """Busy share of a step in steady state, by stream and by shared limit."""
    hardware: Machine | None = field(default=None, repr=False)
    """The machine that `machine` names."""
    workload: Workload | None = field(default=None, repr=False, compare=False)
    """The model that `model` names, with what limits it; None where nobody knows."""
    lifetime_s: float | None = None
    """Of the drives, at this rate of writing and their rated endurance; None where nothing is written or rated."""
    idle_why: str = ""
    """Why devices that were asked for are left idle, where that is the best that was found."""

    @property
    def fits(self) -> bool:
        return self.steady is not None

    @property
    def step_s(self) -> float | None:
        return None if self.steady is None else self.steady.period_s

    @cached_property
    def why_not(self) -> str:
        """What does not fit, or why there is no plan; empty when it fits. What would do is found when it is asked for,
        by executing the schedule some tens of times."""
        return self.reason if self.shortage is None else str(self.shortage)

    @cached_property
    def schedule(self) -> Schedule | None:
        """One step of the plan; None where there is no plan."""
        return None if self.columns is None else self.columns.schedule()

    @cached_property
    def critical_path_s(self) -> Mapping[str, float]:
        """Seconds of one steady step's critical path by stream, the longest first: they add up to the step time."""
        if self.steady is None:
            return {}
        path = time_on_path(path_of(self.steady.columns, self.steady.spans), self.steady.window_s)
        steps = sum(path.values()) / self.steady.period_s
        return {stream: seconds / steps for stream, seconds in path.items()}

    @cached_property
    def limits(self) -> tuple[Sensitivity, ...]:
        """What each stream, shared limit, part and memory would save if it were twice as good, most first.

        Ops are listed anew for each, as the plan's are where it is simulated on such a machine.
        """
        if self.hardware is None or self.workload is None or self.step_s is None or self.plan is None:
            return ()
        lowering = Lowering(self.workload, self.hardware)
        order = partial(refine_columns, overtakes=self.plan.overtaking)
        if do_the_same(self.plan):
            columns, machine = lowering.simulated(self.plan)
            if isclose(steady_state(order(columns, machine), machine).period_s, self.step_s, rel_tol=SAME_FRAC):
                return sensitivities(columns, machine, order=order)
        return sensitivities(lowering.columns(self.plan, refine=False), self.hardware, order=order)

    @cached_property
    def phases(self) -> Phases | None:
        """Seconds of forward, backward and update, which add up to the step."""
        return None if self.steady is None else phases(self.steady)

    def other_numbers(self, asked: str = "") -> str:
        """Why its numbers are not those of plain training, or of the semantics that were `asked` for; else empty.

        Ops are named for it only where activations may leave the device in a format of their own.
        """
        may_be_coded = self.workload is None or self.workload.training.activation_format
        return "" if self.plan is None else other_numbers(self.plan, self.columns if may_be_coded else None, asked)

    @property
    def devices(self) -> int:
        """On which the plan trains."""
        return 0 if self.plan is None else self.plan.devices

    @property
    def devices_of_machine(self) -> int:
        return 0 if self.hardware is None else self.hardware.own_devices

    @property
    def where(self) -> str:
        """The machine, how many of its GPUs where it has several, and whether its drives are only a data sheet's."""
        has, used = self.devices_of_machine, self.devices  # none without a plan
        num = f"{used} of its {has}" if 0 < used <= has else max(used, has)
        gpus = f", {num} GPUs" if max(used, has) > 1 else ""
        drives = self.columns is not None and {NVME_READ, NVME_WRITE} & {*self.nameplate} & self.utilization.keys()
        return self.machine + gpus + " (drives by data sheet: may be far slower)" * bool(drives)

    @property
    def devices_note(self) -> str:
        """That some of the machine's devices are not used, or that it has not so many, and what to do; else empty."""
        if self.hardware is None or self.plan is None:
            return ""
        has, asked, notes = self.devices_of_machine, self.hardware.num_devices, []
        if self.devices < asked:
            of = f"the machine's {has} GPUs" if asked == has else f"the {asked} GPUs that were asked for"
            take = "Ask for so many with --devices, or take another policy: tierplan compare-policies"
            notes.append(f"{self.plan.policy} trains on {self.devices} of {of}, and this is the answer for these")
            notes.append(self.idle_why or take)
        if (more := self.devices - has) > 0:
            described = self.hardware.description
            lanes = "on the same lanes" if "link.host_h2d" in described else "on lanes of their own"
            is_told = any("--set" in str(described.get(key)) for key in BETWEEN)
            note = f"{self.machine} has {has}; {more} more {'is' if more == 1 else 'are'} assumed, {lanes} to the host"
            asks = "; links between them are as its file has them: set link.p2p to what so many have"
            notes.append(note + asks * (not is_told))
        return ". ".join(notes)

    @property
    def simulated_only(self) -> str:
        """Why `tierplan run` does not execute such a plan; empty where it may."""
        if self.plan is None or self.workload is None:
            return ""
        if self.devices > 1 and self.workload.training.backend == "cuda":
            return "simulated only: `tierplan run` trains on one GPU, or on CPUs, not on several GPUs yet"
        if refused := not_executed(self.workload.training, num_devices=self.devices):
            what, advice = refused
            return f"simulated only: it {what}; {advice}"
        if has_frozen_encoder(self.workload):
            return "simulated only: of encoder-decoders, `tierplan run` trains all parameters"
        match self.plan:
            case PackPlan(packs=packs) if packs.is_executed and not packs.goes_on:
                return ""
            case PackPlan() | PagedPlan():
                return "simulated only: `tierplan run` executes no packs or pages in a host memory that devices share"
            case UnitwisePlan(sharing=sharing) if self.devices > 1 and sharing.divided == "tensors":
                return "simulated only: `tierplan run` executes no operators that devices divide"
        return ""

    @property
    def step_note(self) -> str:
        """That the step time is a mean of steps that differ a little; empty where they repeat."""
        if self.steady is None or self.steady.is_periodic:
            return ""
        return f"a mean of {self.steady.mean_steps} steps that do not repeat exactly"

    @property
    def limited_by(self) -> str:
        """What would save most if it were twice as good; empty where it does not fit."""
        return limited_by(self.limits) if self.fits else ""

    @property
    def interval_s(self) -> tuple[float, float] | None:
        """The 90 % interval of the step time, by what predictions for the machine rest on."""
        if self.step_s is None or self.hardware is None:
            return None
        return self.hardware.basis.interval_s(self.step_s)

    @property
    def _parts(self) -> set[str]:
        """Of the machine, those that the plan uses."""
        streams = () if self.hardware is None else (stream.name for stream in self.hardware.streams)
        return parts_used(name for name in streams if name in self.utilization)

    @property
    def basis(self) -> str | None:
        """What the prediction rests on: of the parts that the plan uses."""
        return None if self.hardware is None or not self.fits else self.hardware.basis.said(self._parts)

    @property
    def nameplate(self) -> tuple[str, ...]:
        """Numbers that come from a data sheet, of the parts that the plan uses; of all where none runs."""
        if self.hardware is None or not self.fits:
            return () if self.hardware is None else self.hardware.nameplate
        return tuple(name for name in self.hardware.nameplate if name.partition(".")[0] in self._parts)

    @property
    def tokens_per_s(self) -> float | None:
        return None if self.step_s is None else self.tokens / self.step_s

    @property
    def tflops_8nd(self) -> float | None:
        """8 FLOPs per parameter and token over the step time: the papers' count, whatever was really recomputed.

        Of experts, those that a token is sent to. None where parameters are frozen, whose backward is half as much.
        """
        if self.step_s is None or self.num_active is None:
            return None
        return 8 * self.num_active * self.tokens / self.step_s / 1e12

    def record(self) -> dict[str, object]:
        """The prediction as JSON values."""

        def figures(*names: str) -> dict[str, object]:
            return {name: getattr(self, name) for name in names}

        moved = {} if self.columns is None or not self.fits else self.columns.bytes_moved()
        record: dict[str, object] = {
            **figures(
                "policy", "model", "machine", "fits", "step_s", "interval_s", "basis", "tokens_per_s", "tflops_8nd"
            ),
            "step_note": self.step_note or None,
            "model_flops_per_s": self.flops / self.step_s if self.step_s and self.flops else None,
            "peak_bytes": {} if self.steady is None else dict(self.steady.peak_bytes),
            "capacity_bytes": {} if self.steady is None else dict(self.steady.capacity_bytes),
            "bytes": moved,
            **({} if self.phases is None else asdict(self.phases)),
            **figures("devices", "devices_of_machine", "where"),
            "devices_note": self.devices_note or None,
            "simulated_only": self.simulated_only or None,
            "limited_by": self.limited_by or None,
            "limits": self.rows(),
            "critical_path_s": dict(self.critical_path_s),
            "utilization": dict(self.utilization),
            "drive_lifetime_s": self.lifetime_s,
            **{name: None for name in ("micro_batch", "accumulation", "num_parameters", "tokens")},
        }
        if self.plan is not None:
            record |= figures("micro_batch", "accumulation", "num_parameters", "tokens")
            record["semantics"] = self.plan.semantics
            record["other_numbers"] = self.other_numbers() or None
            record["options"] = {name: value for name, value in self.plan.options.items() if value is not None}
        if not self.fits:
            record["why_not"] = self.why_not
            if self.shortage is not None:
                names = ("tier", "op", "capacity_bytes", "needed_bytes", "also_short", "short_bytes")
                record["shortage"] = {name: getattr(self.shortage, name) for name in names}
        return record

    def rows(self) -> list[dict[str, object]]:
        """What limits, most first."""
        return [asdict(limit) for limit in self.limits]

    def __repr__(self) -> str:
        """One line: the whole is what `tierplan simulate` prints."""
        head = f"<Prediction {self.policy}, {self.model} on {self.machine}: "
        if self.step_s is None:
            return f"{head}does not run: {shorten(in_short(self.why_not), 80, placeholder=' ...')}>"
        return f"{head}{self.step_s:.4g} s per step, {self.tokens_per_s:,.0f} tokens/s>"


def predict(
    policy: str, workload: Workload, machine: Machine, options: Mapping[str, object] | None = None
) -> Prediction:
    """The prediction for a policy. One without a plan here (no drive, no rate for its work) does not fit, with the
    reason.

    An unknown policy or option raises `PlanError`.
    """
    if (options or {}).get("checkpointing") == "selective":
        workload = by_operator(workload)
    try:
        plan = decide(policy, workload, machine, options)
    except OptionError:
        raise
    except (PlanError, MachineError) as error:
        facts = {"model": workload.name, "machine": machine.name, "hardware": machine, "reason": str(error)}
        return Prediction(policy=policy, plan=None, **facts)  # type: ignore[arg-type]
    return predict_plan(plan, workload, machine)


def predict_plan(plan: Plan, workload: Workload, machine: Machine) -> Prediction:
    """The prediction for a plan, in steady state. That it does not fit is an answer, not an error."""
    base = _facts(plan, workload, machine)
    columns: ScheduleColumns | None = None
    try:
        columns = Lowering(workload, machine).columns(plan)
        steady = steady_state(columns, machine)
    except OutOfMemory as error:
        shortage = error.with_traceback(None)  # which would keep all that was simulated
        return Prediction(**base, columns=columns, shortage=shortage)  # type: ignore[arg-type]
    except (ScheduleError, PlanError, MachineError) as error:
        return Prediction(**base, reason=str(error))  # type: ignore[arg-type]
    return predicted(plan, columns, steady, workload, machine)


def predicted(
    plan: Plan, columns: ScheduleColumns, steady: SteadyState, workload: Workload, machine: Machine
) -> Prediction:
    """The prediction for a plan whose schedule has been simulated already, as the planner's has."""
    return Prediction(
        **_facts(plan, workload, machine),  # type: ignore[arg-type]
        columns=columns,
        steady=steady,
        utilization=busy_fracs(columns, machine, steady.period_s),
        lifetime_s=lifetime_s(machine, written_bytes(columns), steady.period_s),
    )


def _facts(plan: Plan, workload: Workload, machine: Machine) -> dict[str, object]:
    return {
        "policy": plan.policy,
        "model": workload.name,
        "machine": machine.name,
        "plan": plan,
        "hardware": machine,
        "workload": workload,
        "tokens": workload.training.tokens_per_step * plan.num_batches,
        "micro_batch": workload.training.per_device_train_batch_size,
        "accumulation": workload.training.gradient_accumulation_steps,
        "num_parameters": workload.num_parameters,
        "num_active": workload.num_active if workload.num_trained == workload.num_parameters else None,
        "flops": workload.flops * workload.training.gradient_accumulation_steps * plan.num_batches,
    }
