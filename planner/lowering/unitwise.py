"""Lowering of unit-wise plans: the turns of a step in order, each with its template, and the schedule as columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import get_args

import numpy as np

from tierplan.hwmodels.machine import Machine
from tierplan.planner.lowering.known import chains_of
from tierplan.planner.lowering.listing import ALIAS, EMPTY, NUM_KINDS, Asked, listed
from tierplan.planner.lowering.placing import Step, walk, written
from tierplan.planner.lowering.sketch import TIERS, Sketch, Terms, leads
from tierplan.planner.lowering.templates import TURNS, Chain, Made
from tierplan.planner.lowering.tiling import cut_batches, cut_operators
from tierplan.planner.plan import UnitwisePlan, facts_of
from tierplan.planner.plan_rules import WriteBack
from tierplan.planner.several_devices.kinds import ENDS, OTHER, Kinds
from tierplan.sim.builder import buffer_labels, tiers_of
from tierplan.sim.columns import Bool, Int32, Int64, Labels, OpLabel, ScheduleColumns
from tierplan.sim.compiled.graph_columns import graph_columns
from tierplan.sim.compiled.readiness import consistent_order
from tierplan.sim.schedule import ScheduleError
from tierplan.sim.step import Semantics, StepSpec, unit_spec
from tierplan.sim.workloads.workload import Workload

OF_PLAN = Asked._fields[Asked._fields.index("strict_windows") :]
"""What a plan says by the same names."""
MOST_LABELS = 10_000
"""Turns of a chain whose names are at hand."""


def unitwise_step(plan: UnitwisePlan, whole: Workload) -> UnitwiseStep:
    """The turns of one step, on one device, of a plan that has been checked."""
    chains = chains_of(whole)
    terms = Terms(**{name: getattr(plan, name) for name in Terms._fields})
    key = (plan.sub_batches, plan.operator_tiles, terms)
    if key not in chains:
        workload = cut_batches(whole, plan.sub_batches) if plan.sub_batches > 1 else whole
        workload = cut_operators(workload, plan.operator_tiles) if plan.operator_tiles > 1 else workload
        chains[key] = Chain(workload, terms)
    if plan.operator_tiles > 1:  # a block's tiles are units of their own, which share its choices
        units = [
            choice
            for unit, choice in zip(whole.units, plan.units, strict=True)
            for _ in range(plan.operator_tiles if unit.kind == "block" else 1)
        ]
        plan = replace(plan, units=tuple(units))
    return UnitwiseStep(chains[key], plan)


class UnitwiseStep:
    """The turns of one step in order, each with its template."""

    def __init__(self, chain: Chain, plan: UnitwisePlan) -> None:
        self.chain, self.plan, self.workload = chain, plan, chain.workload
        rows = chain.rows(plan.units)
        self.num_parts, updates_here, is_late, reads = rows[NUM_KINDS:]
        training = self.workload.training
        self.num_batches = training.gradient_accumulation_steps
        asked = Asked(
            is_vertical=plan.order == "vertical",
            num_batches=self.num_batches,
            is_block=chain.is_block,
            is_owner=chain.is_owner,
            has_any=chain.has_any,
            first_trained=chain.first_trained,
            is_late=is_late,
            updates_here=updates_here,
            num_parts=self.num_parts,
            reads=reads > 0,
            writes_late=self._written_late(reads > 0, is_late > 0),
            semantics=get_args(Semantics).index(plan.semantics),
            clips=training.max_grad_norm is not None,
            write_back=get_args(WriteBack).index(plan.write_back),
            updates_backward=plan.update_order == "backward",
            sums_first=plan.devices > 1 and plan.sharing.ahead,
            **{name: getattr(plan, name) for name in OF_PLAN},
        )
        self.turns = listed(asked)
        self.step = self._walk(rows)

    def _written_late(self, reads: Bool, is_late: Bool) -> Bool:
        """By unit, whether its update is one of the last that read states, of a step's and then of the late ones."""
        found, num, is_owner = np.zeros(len(reads), np.bool_), self.plan.late_writes, self.chain.is_owner
        if num:
            at_once, late = np.flatnonzero(is_owner & reads & ~is_late), np.flatnonzero(is_owner & reads & is_late)
            comes_first = self.plan.semantics == "in-backward" or self.plan.update_order == "backward"
            found[np.concatenate([at_once[:: -1 if comes_first else 1], late])[-num:]] = True
        return found

    def _walk(self, rows: Int64) -> Step:
        """All templates, drawn where they are new."""
        chain, turns = self.chain, self.turns
        num = len(turns.kind)
        turn = rows[turns.kind, turns.unit]
        pattern, num_cells = chain.patterns(turn, turns.flag)
        turn[turns.kind == ALIAS] = EMPTY
        numbers = np.zeros((4, num + 1), np.int64)
        held = np.empty(num_cells + len(turns.refs), np.int64)
        cells = np.full((2, chain.num_cells), EMPTY, np.int64)
        template, first_op, first_buffer, first_held = numbers
        ids, forms = cells
        where = (turns, turn, pattern, chain.owner_of)
        step = Step(*where, template[:num], first_op, first_buffer, first_held, held, ids, forms)
        (key, room), start = np.empty((2, chain.longest_key + 1), np.int64), 0
        for end in (int(chain.has_any.sum()), num):  # what exists before the step comes first
            while (start := walk(start, end, step, chain.table, key, room)) < end:
                found = key[: key[-1]].copy()
                chain.add_template(found, self._sketch(start, pattern[start], found.tolist()).rows())
            if start < num:
                self.initial = np.flatnonzero(ids != EMPTY)
                self.initial_ids = ids[self.initial]
        return step

    def _sketch(self, number: int, pattern: int, key: Sequence[int], held: Sequence[Made] = ()) -> Sketch:
        """A turn drawn for its unit and micro-batch; `held` says what is in its cells, for those who want names."""
        chain, (facts, flag, *forms) = self.chain, key
        u, m = int(self.turns.unit[number]), int(self.turns.batch[number])
        names = chain.names[pattern]
        sketch = Sketch(chain.terms, self.workload, chain.facts[facts], u, m, flag, names, forms, held, chain.works)
        draw = TURNS[chain.facts[facts].kind].draw
        assert draw is not None, "nothing is drawn for an alias"
        draw(sketch)
        return sketch

    def sketches(self) -> Iterator[tuple[int, Callable[[Sequence[Made]], Sketch], list[int]]]:
        """In order: each template, the turn drawn once more with what its cells hold, and the numbers of that."""
        step = self.step
        for number in np.flatnonzero(step.turn >= 0).tolist():
            template, first = int(step.template[number]), int(step.first_held[number])
            key = self.chain.rows_by_name["keys"].row(template)
            num_cells = len(key) - 2 - int(self.turns.begins[number + 1] - self.turns.begins[number])
            draw = partial(self._sketch, number, int(step.pattern[number]), key)
            yield template, draw, step.held[first : first + num_cells].tolist()

    # ---- the schedule ----

    def columns(self, machine: Machine) -> ScheduleColumns:
        """All turns, in the list order of positions."""
        turns = self.num_batches if self.plan.order == "vertical" else 1  # of compute, of one unit
        leads_of = leads(self.plan, turns, int(self.num_parts.max()))
        made = self.made = written(self.step, self.turns.at, leads_of, self.chain.table)
        becomes = np.full(len(made.reuses), EMPTY, np.int32)
        old, new = self.chain.cell("old grads"), self.chain.cell("grads")
        is_old = (self.initial >= old) & (self.initial < old + len(self.workload.units))
        becomes[self.step.ids[np.where(is_old, self.initial - old + new, self.initial)]] = self.initial_ids
        columns = ScheduleColumns(
            tiers=tiers_of(machine),
            works=tuple(self.chain.works.listed[w] for w in made.works.tolist()),
            op_work=made.work,
            reads=made.reads,
            writes=made.writes,
            after=made.after,
            buffer_tier=self._tiers(machine, made.tier),
            buffer_bytes=made.size_bytes,
            buffer_initial=made.initial,
            buffer_reuses=made.reuses,
            buffer_becomes=becomes,
            labels=cache(partial(self._labels, machine)),
        )
        wanted = np.lexsort((made.rank, made.wanted_at))
        self.order = consistent_order(wanted, graph_columns(columns))
        return columns.reordered(self.order)

    def kinds(self) -> Kinds:
        """What the ops and buffers of its `columns` are, which have been made."""
        made, units, order = self.made, self.workload.units, self.order
        return Kinds(
            op_kind=made.op_kind[order],
            op_unit=made.op_unit[order],
            op_batch=made.op_batch[order],
            kind=made.kind,
            content=made.content,
            unit=made.unit,
            lengths=np.array([unit.num_trained for unit in units], np.int64),
            ends=np.array([ENDS.get(unit.name, OTHER) for unit in units], np.int32),
        )

    def _tiers(self, machine: Machine, tiers: Int64) -> Int32:
        """Each buffer's place among the machine's tiers."""
        names = [t.name for t in machine.tiers]
        found = np.array([names.index(tier) if tier in names else EMPTY for tier in TIERS], np.int32)[tiers]
        if (lost := np.flatnonzero(found == EMPTY)).size:
            raise ScheduleError(
                f"buffer {self._labels(machine).buffers[lost[0]].name!r} is in tier {TIERS[tiers[lost[0]]]!r}, which "
                f"is not declared; have {sorted(names)}"
            )
        return found

    def _labels(self, machine: Machine) -> Labels:
        """The names of everything: each turn is drawn once more, for its unit and micro-batch."""
        plan, workload = self.plan, self.workload
        ops: list[OpLabel] = []
        buffers: list[Made] = []
        nothing, known = ("", "", ""), self.chain.labels
        turns = np.stack([self.step.template, self.turns.unit, self.turns.batch], axis=1)[self.step.turn >= 0]
        for turn, (_, draw, numbers) in zip(turns.tolist(), self.sketches(), strict=True):
            held = [nothing if b == EMPTY else buffers[b] for b in numbers]
            key = (*turn, *(content for content, *_ in held))
            if key not in known:
                sketch = draw(held)
                known[key] = sketch.op_labels(), sketch.made_buffers()
            of_ops, made = known[key]
            ops += of_ops
            buffers += made
        while len(known) > MOST_LABELS:
            known.pop(next(iter(known)))
        meta = facts_of(plan, workload, machine, order=plan.order, config=dict(workload.config))
        specs = [
            unit_spec(unit, choice.acts, late_update=choice.late_update and not unit.is_frozen)
            for unit, choice in zip(workload.units, plan.units, strict=True)
        ]
        step = StepSpec(training=workload.training, semantics=plan.semantics, units=tuple(specs))
        return Labels(
            name=f"{plan.policy} {workload.name}", ops=ops, buffers=buffer_labels(buffers), step=step, meta=meta
        )
