"""The published systems beside the search for one division of the batch: what each decides, and what it reaches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial

from tierplan.hwmodels.machine import Machine, MachineError
from tierplan.planner.lowering import Lowering
from tierplan.planner.plan import Plan, UnitwisePlan, is_same, other_numbers, plain_semantics
from tierplan.planner.plan_rules import PLANNER, PlanError, undivided
from tierplan.planner.policies import ESTIMATES, NEED_SEVERAL_DEVICES, POLICIES, SHARED, decide
from tierplan.planner.results import PolicyResult
from tierplan.planner.search.candidates import PlanSimulator
from tierplan.planner.search.incumbents import Batches
from tierplan.planner.search.local.moves import untied
from tierplan.sim.step import Semantics
from tierplan.sim.workloads.workload import Workload, WorkloadError

NEAR = 1.2
"""A policy whose decision takes simulations is left out where a plan near its own takes so many times the best step;
and of several divisions, one where it takes so many times the best of them."""


def options_of(asked: str | None) -> dict[str, object]:
    """What is asked of a policy, with these semantics or its own."""
    return {"semantics": asked} if asked else {}


class Compared:
    """Each policy decides, and its plan is simulated, when somebody asks for it first."""

    def __init__(
        self,
        workload: Workload,
        machine: Machine,
        asked: Semantics | None,
        batches: Batches | None,
        simulate_plan: PlanSimulator,
    ) -> None:
        self.workload, self.machine, self.batches, self.simulate_plan = workload, machine, batches, simulate_plan
        self.semantics: Semantics = asked or plain_semantics(workload.training)
        self.asked = asked
        self._decided: dict[tuple[str, bool], Plan | str] = {}

    @property
    def _is_on_several(self) -> bool:
        return self.machine.num_devices > 1

    def decided(self, name: str, *, nearly: bool = False) -> Plan | str:
        """A policy's plan, or why it has none; `nearly` one that takes no simulation to decide, where there is one."""
        if name in NEED_SEVERAL_DEVICES and not self._is_on_several:
            return "needs several devices; this machine has one"
        nearly = nearly and self._is_on_several and name in ESTIMATES
        if (name, nearly) not in self._decided:
            try:
                plan: Plan | str = decide(name, self.workload, self.machine, options_of(self.asked), nearly=nearly)
            except (PlanError, MachineError, WorkloadError) as error:
                plan = str(error)
            self._decided[name, nearly] = plan
        return self._decided[name, nearly]

    def start(self, name: str) -> Plan | None:
        """As a policy decides. Where it lacks room for buffers that only DeepSpeed has, as it would without, which then
        is a plan of the planner's: what a search begins with is no worse for less room. None where it has no plan.
        """
        if not isinstance(plan := self.decided(name), str):
            return plan
        with suppress(PlanError, MachineError, WorkloadError):
            plan = decide(name, self.workload, self.machine, {**options_of(self.asked), "host_buffers": "none"})
            return replace(plan, policy=PLANNER, options={})
        return None

    def near(self) -> dict[str, Plan]:
        """Plans near those of the policies whose decision takes simulations, on several devices."""
        names = (name for name in ESTIMATES if self._is_on_several and not self._is_no_start(name))
        found = {name: self.decided(name, nearly=True) for name in names}
        return {name: plan for name, plan in found.items() if not isinstance(plan, str)}

    def _is_no_start(self, name: str) -> bool:
        return self.batches == "each" and name in SHARED

    def plans(self, names: Iterable[str]) -> Iterator[tuple[str, Plan, bool]]:
        """Plans of these policies, of plain training's bits where those fit; and whether they are for other work than
        was asked for, as plans of one device are for devices that share micro-batches."""
        for name in names:
            plan = None if self._is_no_start(name) else self.start(name)
            if plan is None or not is_same(plan, self.semantics):
                continue
            is_other_work = self.batches == "shared" and plan.num_batches > 1
            if is_other_work and name in NEED_SEVERAL_DEVICES:
                continue
            devices = 1 if is_other_work else plan.devices
            tries = [
                replace(one, devices=devices) if isinstance(one, UnitwisePlan) else one
                for one in untied(plan, self.workload)
            ]
            fitting = (one for one in tries if len(tries) == 1 or self.simulate_plan(one).fits)
            yield name, next(fitting, tries[0]), is_other_work

    def results(self, names: Collection[str]) -> dict[str, Callable[..., PolicyResult]]:
        """What these reach, for whoever asks."""
        return {name: partial(self.result, name) for name in POLICIES if name in names}

    def result(self, name: str, *, is_best: bool = True) -> PolicyResult:
        """What a policy reaches; to say why one does not fit takes a while. Where that is not the `is_best` of several
        divisions, it is roughly what it reaches, for the same work alone."""
        training = self.workload.training
        of_work = PolicyResult(
            step_s=None,
            micro_batch=training.per_device_train_batch_size,
            accumulation=training.gradient_accumulation_steps,
        )
        if isinstance(plan := self.decided(name, nearly=not is_best), str):
            return replace(of_work, reason=plan)
        sequences = of_work.micro_batch * of_work.accumulation
        if self.batches == "shared" and sequences % plan.num_batches:
            return replace(of_work, reason=undivided(sequences, plan.num_batches))
        if not is_best and self.batches is not None and (plan.num_batches == 1) != (self.batches == "shared"):
            return of_work  # other work than was asked for; another search has it
        found = (self.simulate_plan.in_full if is_best else self.simulate_plan)(plan)
        is_rival = is_same(plan, self.semantics)
        if plan.sums_tied and found.fits:  # where only this makes room it is none
            is_rival = is_rival and self.simulate_plan(next(untied(plan, self.workload))).fits
        is_coded = training.activation_format and found.fits
        columns = Lowering(self.workload, self.machine).simulated(plan)[0] if is_coded else None
        return replace(
            of_work,
            step_s=found.step_s,
            reason=found.reason if is_best else "",
            lacks_memory=bool(found.short_tier),
            same_numbers=is_same(plan, self.semantics) and not other_numbers(plan, columns, self.semantics),
            is_rival=is_rival,
            num_batches=plan.num_batches,
        )
