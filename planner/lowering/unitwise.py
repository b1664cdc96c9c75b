"""Lowering of unit-wise plans: along the order of the compute stream, turn by turn, and the schedule as columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

import tierplan.planner.lowering.templates as templates
from tierplan.hwmodels.machine import Machine
from tierplan.planner.lowering.compute_order import compute_order
from tierplan.planner.lowering.placing import COMPUTE, HOME, NUM_MARKS, READ, Rows, Step, walk, written
from tierplan.planner.lowering.sketch import (
    ACTS,
    ACTS_EARLY,
    EMPTY,
    PARAMS,
    PARAMS_EARLY,
    STATES,
    TIERS,
    Sketch,
    Template,
)
from tierplan.planner.lowering.templates import Chain, Place, TurnKind
from tierplan.planner.lowering.tiling import cut_batches, cut_operators
from tierplan.planner.plan import UnitwisePlan, facts_of
from tierplan.sim.builder import tiers_of
from tierplan.sim.columns import BufferLabel, Int32, Int64, Labels, OpLabel, ScheduleColumns
from tierplan.sim.compiled.positions import consistent_order
from tierplan.sim.contents import buffer_name
from tierplan.sim.schedule import ScheduleError
from tierplan.sim.step import StepSpec
from tierplan.sim.workloads.workload import Workload

NOTHING = [EMPTY] * 5


class UnitwiseLowering:
    """Lowers unit-wise plans of one workload for one machine; the next one has the templates of those before."""

    def __init__(self, workload: Workload, machine: Machine) -> None:
        self.workload, self.machine = workload, machine
        self._chains: dict[tuple[int, int], Chain] = {}

    def columns(self, plan: UnitwisePlan) -> ScheduleColumns:
        """One step of a plan that has been checked, on one device, in the list order of positions."""
        tiles = (plan.sub_batches, plan.operator_tiles)
        if tiles not in self._chains:
            workload = cut_batches(self.workload, plan.sub_batches) if plan.sub_batches > 1 else self.workload
            self._chains[tiles] = Chain(
                cut_operators(workload, plan.operator_tiles) if plan.operator_tiles > 1 else workload
            )
        if plan.operator_tiles > 1:  # a block's tiles are units of their own, which share its choices
            units = [
                choice
                for unit, choice in zip(self.workload.units, plan.units, strict=True)
                for _ in range(plan.operator_tiles if unit.kind == "block" else 1)
            ]
            plan = replace(plan, units=tuple(units))
        return UnitwiseStep(self._chains[tiles], plan).columns(self.machine)


class UnitwiseStep:
    """The turns of one step in order, each with its template."""

    def __init__(self, chain: Chain, plan: UnitwisePlan) -> None:
        self.chain, self.plan, self.workload = chain, plan, chain.workload
        self.training = self.workload.training
        self.num_batches = self.training.gradient_accumulation_steps
        self.turns_per_unit = self.num_batches if plan.order == "vertical" else 1
        self.facts = [chain.facts(u, choice) for u, choice in enumerate(plan.units)]
        self.owners = [u for u, unit in enumerate(self.workload.units) if unit.num_parameters]
        self.late = [u for u in self.owners if plan.units[u].late_update]
        self.at_once = set(self.owners).difference(self.late) if plan.semantics == "in-backward" else set()
        self.blocks = [u for u, unit in enumerate(self.workload.units) if unit.kind == "block"]
        self.drawn = chain.drawn(plan)
        self.places: list[int] = []
        self.at: list[float] = []
        self.refs: list[int] = []
        self.num_refs: list[int] = []
        """Of each turn in order: its place, when it is wanted, and the ops that it comes after (`placing.Step`)."""
        self.computed_in: dict[int, int] = {}
        self.turns: list[int] = []
        self.updates: list[int] = []
        self.homes: list[int] = []  # the turns that end each update's way home
        self.waiting_home: tuple[int, int, float, int] | None = None
        for u in self.owners:
            self._place(templates.DECLARE, u, 0.0)
        num_declared = len(self.places)
        self._late()
        for step, (phase, u, m) in enumerate(compute_order(plan, self.workload)):
            (self._forward if phase == "fwd" else self._backward)(step, u, m)
        self._after(float(len(self.turns)))
        self.step = self._walk(num_declared)

    def _place(self, turn: TurnKind, u: int, at: float, *, m: int = 0, flag: int = 0, ops: Sequence[int] = ()) -> int:
        """Places a turn with the ops that it comes after; its number in order."""
        facts = self.facts[u]
        place = self.drawn.numbers.get((turn, u, m, flag, facts.number))
        if place is None:
            place = self._new_place(turn, u, m, flag)
        self.places.append(place)
        self.at.append(at)
        self.refs += ops
        self.num_refs.append(len(ops))
        return len(self.places) - 1

    def _new_place(self, turn: TurnKind, u: int, m: int, flag: int) -> int:
        facts, known = self.facts[u], self.chain.cells
        if turn is templates.CLIP:
            owners = self._updated()
            names: Mapping[str, int] = {**{f"norm{i}": i for i in range(len(owners))}, "clip": len(owners)}
            cells = [*(known["norm"][u] for u in owners), known["clip"][0]]
        else:
            names, cells = self.chain.cells_of(turn, u, m, flag, facts, is_vertical=self.plan.order == "vertical")
        place = Place(turn, u, m, flag, names)
        return self.drawn.add_place((*place[:4], facts.number), place, cells, facts)

    def _walk(self, num_declared: int) -> Step:
        """All templates, drawn where they are new."""
        drawn, num = self.drawn, len(self.places)
        places, num_refs = np.array(self.places, np.int64), np.array(self.num_refs, np.int64)
        lengths = np.diff(drawn.table.places.begins)[places]
        refs = Rows(np.concatenate([[0], np.cumsum(num_refs)]), np.array(self.refs, np.int64))
        computed_in = np.arange(num)
        computed_in[list(self.computed_in)] = list(self.computed_in.values())
        numbers = np.zeros((4, num + 1), np.int64)
        held = np.empty(int(lengths.sum()) + len(self.refs), np.int64)
        cells = np.full((2, self.chain.num_cells), EMPTY, np.int64)
        template, first_op, first_buffer, first_held = numbers
        ids, forms = cells
        step = Step(places, refs, computed_in, template, first_op, first_buffer, first_held, held, ids, forms)
        key, start = np.empty(drawn.longest + 3, np.int64), 0
        for end in (num_declared, num):
            part = step._replace(places=places[:end])
            while (start := walk(start, part, drawn.table, key)) < end:
                place = drawn.places[self.places[start]]
                found = key[: key[-1]].copy()
                drawn.add_template(found, self._sketch(place, found[1:].tolist()).template(self.chain.works))
            if end == num_declared:
                self.initial = [(cell, buffer) for cell, buffer in enumerate(step.ids.tolist()) if buffer != EMPTY]
        return step

    def _sketch(self, place: Place, forms: list[int], held: Sequence[BufferLabel] = ()) -> Sketch:
        """A turn drawn for its unit and micro-batch; `held` says what is in its cells, for those who want names."""
        _, u, m, flag, cells = place
        _, spec, _, num_parts = self.facts[u]
        sketch = Sketch(self.plan, self.workload, u, m, flag, spec, num_parts, cells, forms, held)
        for draw in place.turn.draws:
            draw(sketch)
        return sketch

    def sketches(self) -> Iterator[tuple[Template, Callable[[Sequence[BufferLabel]], Sketch], list[int]]]:
        """In order: each template, the turn drawn once more with what its cells hold, and the numbers of that."""
        for number, place in enumerate(self.places):
            turn = self.drawn.places[place]
            if turn.turn is not templates.ALIAS:
                template = int(self.step.template[number])
                forms = self.drawn.forms(template)
                first = int(self.step.first_held[number])
                held = self.step.held[first : first + len(forms) - len(turn.turn.ops)].tolist()
                yield self.drawn.templates[template], partial(self._sketch, turn, forms), held

    # ---- turns in compute order ----

    def _turn_before(self, step: int, ahead: int) -> list[int]:
        """The compute ops that have to end before a fetch for `step`, and an early one, start in strict windows."""
        turns = (step - ahead - 1, step - ahead - max(ahead, 1) - 1)
        return [_op(self.turns[turn], COMPUTE) if turn >= 0 else EMPTY for turn in turns]

    def _before(self, step: int) -> list[int]:
        """What a turn's fetches of parameters come after, and those of activations."""
        if not self.plan.strict_windows:
            return NOTHING[:4]
        params = self.plan.prefetch_params_units * self.turns_per_unit
        return self._turn_before(step, params) + self._turn_before(step, self.plan.prefetch_acts_units)

    def _forward(self, step: int, u: int, m: int) -> None:
        may_leave = u == self._segment(u)[0]
        self.turns.append(self._place(templates.FORWARD, u, step, m=m, flag=may_leave, ops=self._before(step)[:2]))

    def _backward(self, step: int, u: int, m: int) -> None:
        before = self._before(step)
        if self.plan.segment_units > 1 and len(segment := self._segment(u)) > 1 and u == segment[-1]:
            self._place(templates.FETCH, u, step, m=m, ops=before[:2])
            for v in segment:
                self._place(templates.REMAKE, v, step, m=m, flag=v != u, ops=before)
        is_complete = m == self.num_batches - 1
        self.turns.append(self._place(templates.BACKWARD, u, step, m=m, flag=is_complete, ops=before))
        if is_complete and u in self.at_once:
            self._update(u, float(step), "grads")

    def _segment(self, u: int) -> range:
        """The units that are recomputed together with `u` from the first one's input; itself alone without segments."""
        size = self.plan.segment_units
        if size == 1 or self.workload.units[u].kind != "block":
            return range(u, u + 1)
        start = u - (u - self.blocks[0]) % size
        return range(start, min(start + size, self.blocks[-1] + 1))

    # ---- updates ----

    def _late(self) -> None:
        """Late updates of the step before, with its gradients: each in time for the unit's parameters to be fetched.

        Listed in the step that they overlap rather than behind the step whose gradients they use, so that their grants
        do not hold back those of this step's forward.
        """
        ahead = self.plan.prefetch_params_units + 1
        for u in self.late:
            self._update(u, float((u - ahead) * self.turns_per_unit), "old grads")
        self._go_home()  # forward is to use what the last of them has made

    def _after(self, end: float) -> None:
        """Updates that wait for all gradients (exact clipping), or that use those of the step before (delayed)."""
        owners = self._updated()
        if self.training.max_grad_norm is not None:
            self._place(templates.CLIP, owners[0], end, flag=len(owners))
        for i, u in enumerate(owners):
            if self.plan.semantics == "exact-clip":
                self._update(u, end + i, "grads", apart=1.0)
            elif self.plan.semantics == "delayed-1":
                apart = end / len(owners)
                self._update(u, end * i / len(owners), "old grads", apart=apart, upload_at=end + i)
        self._go_home()

    def _updated(self) -> list[int]:
        """Units in the order of updates behind backward."""
        return self.owners[::-1] if self.plan.update_order == "backward" else self.owners

    def _update(
        self, u: int, step: float, grads: str, *, apart: float | None = None, upload_at: float | None = None
    ) -> None:
        """The optimizer step of one unit, with what it reads brought to it and what it writes taken home.

        `apart` is the distance to the next unit's update, over which the parts are spread.
        """
        self._alias("due", grads, u)
        if self.plan.units[u].states == "device":
            self._place(templates.UPDATE_HERE, u, step)
            return
        parts = self.facts[u].num_parts
        apart = self.turns_per_unit if apart is None else apart
        for k in range(parts):
            at, index, read_after = step + k * apart / parts, len(self.updates), self._read_after()
            if upload_at is None and self.plan.write_back != "delayed":
                ops = [*read_after, *self._update_after(), EMPTY]
                made = self._place(templates.UPDATE_AND_GO, u, at, flag=k, ops=ops)
            else:
                made = self._place(templates.ARRIVE, u, at, flag=k, ops=[*read_after, *NOTHING[3:]])
                self._go_home(_op(made, READ))
                made = self._place(templates.UPDATE, u, at, flag=k, ops=[*NOTHING[:3], *self._update_after()])
                self.waiting_home = (u, k, at if upload_at is None else upload_at + at - step, index)
            self.updates.append(made)
            self.homes.append(made)
            if self.plan.write_back != "delayed":
                self._go_home()

    def _alias(self, name: str, of: str, u: int) -> None:
        """From here on one of the unit's cells holds what another does."""
        place = self.drawn.numbers.get((name, of, u))
        if place is None:
            place = self.drawn.add_alias((name, of, u), self.chain.cells[name][u], self.chain.cells[of][u])
        self.places.append(place)
        self.at.append(0.0)
        self.num_refs.append(0)

    def _go_home(self, after: int = EMPTY) -> None:
        """Sends what an update has written to where it lives, if that waits."""
        if self.waiting_home is not None:
            u, k, at, index = self.waiting_home
            self.homes[index] = self._place(templates.GO_HOME, u, at, flag=k, ops=[after])
            self.computed_in[self.homes[index]] = self.updates[index]
            self.waiting_home = None

    def _held(self) -> list[int]:
        """What an update and its reads wait for where no update may come before the end of backward."""
        return [_op(turn, COMPUTE) for turn in self.turns[-1:]] if self.plan.hold_updates else []

    def _read_after(self) -> list[int]:
        """What has to end before the next update's states may be read, by the windows of the plan."""
        found, plan = self._held(), self.plan
        if plan.strict_windows and len(self.updates) > plan.prefetch_states_units:
            found.append(_op(self.updates[-1 - plan.prefetch_states_units], COMPUTE))
        if 0 < plan.updates_in_flight <= len(self.homes):
            found.append(_op(self.homes[-plan.updates_in_flight], HOME))
        return [*dict.fromkeys(found), *NOTHING][:3]

    def _update_after(self) -> list[int]:
        last = [_op(turn, HOME) for turn in self.homes[-1:]]
        found = self._held() + (last if self.plan.write_back == "awaited" else [])
        return [*dict.fromkeys(found), *NOTHING][:2]

    # ---- the schedule ----

    def columns(self, machine: Machine) -> ScheduleColumns:
        """All turns in list order."""
        made = written(self.step, np.array(self.at, np.float64), self._leads(), *self.drawn.parts)
        ids = self.step.ids.tolist()
        becomes = np.full(len(made.reuses), EMPTY, np.int32)
        later = dict(zip(self.chain.cells["old grads"], self.chain.cells["grads"], strict=True))
        for cell, buffer in self.initial:
            becomes[ids[later.get(cell, cell)]] = buffer
        is_used = np.zeros(len(self.chain.works.listed), np.bool_)
        is_used[made.work] = True
        columns = ScheduleColumns(
            tiers=tiers_of(machine),
            works=tuple(self.chain.works.listed[w] for w in np.flatnonzero(is_used).tolist()),
            op_work=(np.cumsum(is_used, dtype=np.int32) - 1)[made.work],
            reads=made.reads,
            writes=made.writes,
            after=made.after,
            buffer_tier=self._tiers(machine, made.tier),
            buffer_bytes=made.size_bytes,
            buffer_initial=made.initial > 0,
            buffer_reuses=made.reuses.astype(np.int32),
            buffer_becomes=becomes,
            labels=lambda: self._labels(machine),
        )
        wanted = np.lexsort((made.rank, made.wanted_at))
        order = consistent_order(wanted, columns.reads, columns.writes, columns.after, columns.buffer_reuses)
        assert len(order) == columns.num_ops, "the lowering made a cycle"
        return columns.reordered(order.astype(np.int32))

    def _leads(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """How much before its turn an op is wanted, by the number of its lead."""
        params, acts = self.plan.prefetch_params_units * self.turns_per_unit, self.plan.prefetch_acts_units
        states = self.plan.prefetch_states_units * self.turns_per_unit
        leads = np.zeros(STATES + max(facts.num_parts for facts in self.facts))
        leads[[PARAMS, PARAMS_EARLY, ACTS, ACTS_EARLY]] = params, params + max(params, 1), acts, acts + max(acts, 1)
        leads[STATES:] = [states / (k + 1) for k in range(len(leads) - STATES)]
        return leads

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
        buffers: list[BufferLabel] = []
        versions: dict[tuple[str, str], int] = {}
        nothing = BufferLabel("", "", "")
        for _, draw, held in self.sketches():
            sketch = draw([nothing if b == EMPTY else buffers[b] for b in held])
            ops += sketch.op_labels()
            for made in sketch.made_buffers():
                version = versions[made.content, made.tier] = versions.get((made.content, made.tier), -1) + 1
                name = buffer_name(made.content, made.tier, version)
                buffers.append(BufferLabel(name, made.content, made.kind))
        meta = facts_of(plan, workload, machine, order=plan.order, config=dict(workload.config))
        specs = [
            replace(facts.spec, name=unit.name, late_update=choice.late_update)
            for unit, choice, facts in zip(workload.units, plan.units, self.facts, strict=True)
        ]
        step = StepSpec(training=workload.training, semantics=plan.semantics, units=tuple(specs))
        return Labels(name=f"{plan.policy} {workload.name}", ops=ops, buffers=buffers, step=step, meta=meta)


def _op(turn: int, mark: int) -> int:
    """A marked op of the turn of this number, as turns say what they come after."""
    return NUM_MARKS * turn + mark
