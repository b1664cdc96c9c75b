"""Lowering of unit-wise plans: along the order of the compute stream, turn by turn, and the schedule as columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np

from tierplan.hwmodels.machine import Machine
from tierplan.planner.lowering.compute_order import compute_order
from tierplan.planner.lowering.sketch import (
    ACTS,
    ACTS_EARLY,
    EMPTY,
    NO_REF,
    PARAMS,
    PARAMS_EARLY,
    STATES,
    TIERS,
    Sketch,
)
from tierplan.planner.lowering.templates import (
    ARRIVE,
    BACKWARD,
    CLIP,
    DECLARE,
    FETCH,
    FORWARD,
    GO_HOME,
    REMAKE,
    UPDATE,
    UPDATE_AND_GO,
    UPDATE_HERE,
    Chain,
    Frame,
    Placed,
    TurnKind,
)
from tierplan.planner.lowering.tiling import cut_batches, cut_operators
from tierplan.planner.plan import UnitwisePlan
from tierplan.sim.builder import tiers_of
from tierplan.sim.columns import BufferLabel, Int32, Int64, Labels, Lists, OpLabel, ScheduleColumns
from tierplan.sim.compiled.positions import consistent_order
from tierplan.sim.contents import buffer_name
from tierplan.sim.schedule import ScheduleError
from tierplan.sim.step import StepSpec
from tierplan.sim.workloads.workload import Workload

__all__ = ["UnitwiseLowering", "UnitwiseStep"]

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
    """The turns of one step, and what each cell holds meanwhile."""

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
        self.templates, self.frames = chain.templates(plan), chain.frames(plan)
        self.ids: list[int] = []
        self.forms: list[int] = []
        self._make_room()
        self.placed: list[Placed] = []
        self.held: list[int] = []
        """What the cells of each turn hold and the ops that it comes after, turn by turn."""
        self.num_ops = self.num_buffers = 0
        self.turn_ops: list[int] = []
        self.update_ops: list[int] = []
        self.home_ops: list[int] = []  # of the op that ended each update's way home
        self.waiting_home: tuple[int, int, float, int] | None = None
        self._declare()
        self._late()
        for step, (phase, u, m) in enumerate(compute_order(plan, self.workload)):
            (self._forward if phase == "fwd" else self._backward)(step, u, m)
        self._after(float(len(self.turn_ops)))

    def _place(
        self,
        turn: TurnKind,
        u: int,
        at: float,
        *,
        m: int = 0,
        flag: int = 0,
        ops: Sequence[int] = (),
        frame: Frame | None = None,
    ) -> dict[str, int]:
        """Places a turn with the ops that it comes after; the ops of its own that others come after."""
        facts = self.facts[u]
        if frame is None:
            at_home = (turn, u, m, flag, facts.number)
            frame = self.frames.get(at_home)
            if frame is None:
                is_vertical = self.plan.order == "vertical"
                frame = self.chain.frame(turn, u, m, flag, facts, is_vertical=is_vertical)
                self.frames[at_home] = frame
                self._make_room()
        ids, forms = self.ids, self.forms
        form = [forms[cell] for cell in frame.cells]
        form += [EMPTY if op < 0 else 0 for op in ops]
        key = (turn, facts.number, flag, *form)
        template = self.templates.get(key)
        if template is None:
            template = self.chain.sketch(self.plan, turn, u, m, flag, frame.names, form).template(self.chain.works)
            self.templates[key] = template
        held = [ids[cell] for cell in frame.cells]
        held += ops
        self.held += held
        for i, buffer, form_of in template.puts:
            cell = frame.cells[i]
            ids[cell] = self.num_buffers + buffer if buffer >= 0 else held[-1 - buffer]
            forms[cell] = form_of
        self.placed.append(Placed(turn, u, m, flag, frame.names, form, at, template))
        marks = {mark: self.num_ops + i for mark, i in template.marks.items()}
        self.num_buffers += template.num_buffers
        self.num_ops += template.num_ops
        return marks

    def sketch(self, placed: Placed, held: Sequence[BufferLabel] = ()) -> Sketch:
        """The turn drawn once more, for its unit and micro-batch."""
        return self.chain.sketch(self.plan, *placed[:6], held)

    def _make_room(self) -> None:
        """For cells that the chain has only now."""
        missing = self.chain.num_cells - len(self.ids)
        self.ids += [EMPTY] * missing
        self.forms += [EMPTY] * missing

    # ---- turns in compute order ----

    def _declare(self) -> None:
        for u in self.owners:
            self._place(DECLARE, u, 0.0)
        self.homes = [(cell, buffer) for cell, buffer in enumerate(self.ids) if buffer != EMPTY]

    def _turn_before(self, step: int, ahead: int) -> list[int]:
        """The compute ops that have to end before a fetch for `step`, and an early one, start in strict windows."""
        turns = (step - ahead - 1, step - ahead - max(ahead, 1) - 1)
        return [self.turn_ops[turn] if turn >= 0 else EMPTY for turn in turns]

    def _before(self, step: int) -> list[int]:
        """What a turn's fetches of parameters come after, and those of activations."""
        if not self.plan.strict_windows:
            return NOTHING[:4]
        params = self.plan.prefetch_params_units * self.turns_per_unit
        return self._turn_before(step, params) + self._turn_before(step, self.plan.prefetch_acts_units)

    def _forward(self, step: int, u: int, m: int) -> None:
        may_leave = u == self._segment(u)[0]
        made = self._place(FORWARD, u, step, m=m, flag=may_leave, ops=self._before(step)[:2])
        self.turn_ops.append(made["compute"])

    def _backward(self, step: int, u: int, m: int) -> None:
        before = self._before(step)
        if len(segment := self._segment(u)) > 1 and u == segment[-1]:
            self._place(FETCH, u, step, m=m, ops=before[:2])
            for v in segment:
                self._place(REMAKE, v, step, m=m, flag=v != u, ops=before)
        is_complete = m == self.num_batches - 1
        made = self._place(BACKWARD, u, step, m=m, flag=is_complete, ops=before)
        self.turn_ops.append(made["compute"])
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
        owners = self.owners[::-1] if self.plan.update_order == "backward" else self.owners
        if self.training.max_grad_norm is not None:
            cells = [(f"norm{i}", self.chain.cells["norm"][u]) for i, u in enumerate(owners)]
            frame = self.chain.frame_of([*cells, ("clip", self.chain.cells["clip"][0])], CLIP)
            self._place(CLIP, 0, end, flag=len(owners), frame=frame)
        for i, u in enumerate(owners):
            if self.plan.semantics == "exact-clip":
                self._update(u, end + i, "grads", apart=1.0)
            elif self.plan.semantics == "delayed-1":
                apart = end / len(owners)
                self._update(u, end * i / len(owners), "old grads", apart=apart, upload_at=end + i)
        self._go_home()

    def _update(
        self, u: int, step: float, grads: str, *, apart: float | None = None, upload_at: float | None = None
    ) -> None:
        """The optimizer step of one unit, with what it reads brought to it and what it writes taken home.

        `apart` is the distance to the next unit's update, over which the parts are spread.
        """
        due, source = self.chain.cells["due"][u], self.chain.cells[grads][u]
        self.ids[due], self.forms[due] = self.ids[source], self.forms[source]
        if self.plan.units[u].states == "device":
            self._place(UPDATE_HERE, u, step)
            return
        parts = self.facts[u].num_parts
        apart = self.turns_per_unit if apart is None else apart
        for k in range(parts):
            at, index, read_after = step + k * apart / parts, len(self.update_ops), self._read_after()
            if upload_at is None and self.plan.write_back != "delayed":
                ops = [*read_after, *self._update_after(), EMPTY]
                made = self._place(UPDATE_AND_GO, u, at, flag=k, ops=ops)
            else:
                made = self._place(ARRIVE, u, at, flag=k, ops=[*read_after, *NOTHING[3:]])
                self._go_home(made.get("read", EMPTY))
                made = self._place(UPDATE, u, at, flag=k, ops=[*NOTHING[:3], *self._update_after()])
                self.waiting_home = (u, k, at if upload_at is None else upload_at + at - step, index)
            self.update_ops.append(made["compute"])
            self.home_ops.append(made.get("home", made["compute"]))
            if self.plan.write_back != "delayed":
                self._go_home()

    def _go_home(self, after: int = EMPTY) -> None:
        """Sends what an update has written to where it lives, if that waits."""
        if self.waiting_home is not None:
            u, k, at, index = self.waiting_home
            made = self._place(GO_HOME, u, at, flag=k, ops=[after])
            self.home_ops[index] = made.get("home", self.home_ops[index])
            self.waiting_home = None

    def _held(self) -> list[int]:
        """What an update and its reads wait for where no update may come before the end of backward."""
        return self.turn_ops[-1:] if self.plan.hold_updates else []

    def _read_after(self) -> list[int]:
        """What has to end before the next update's states may be read, by the windows of the plan."""
        found, plan = self._held(), self.plan
        if plan.strict_windows and len(self.update_ops) > plan.prefetch_states_units:
            found.append(self.update_ops[-1 - plan.prefetch_states_units])
        if 0 < plan.updates_in_flight <= len(self.home_ops):
            found.append(self.home_ops[-plan.updates_in_flight])
        return [*dict.fromkeys(found), *NOTHING][:3]

    def _update_after(self) -> list[int]:
        found = self._held() + (self.home_ops[-1:] if self.plan.write_back == "awaited" else [])
        return [*dict.fromkeys(found), *NOTHING][:2]

    # ---- the schedule ----

    def columns(self, machine: Machine) -> ScheduleColumns:
        """All turns in list order."""
        made = [placed.template for placed in self.placed]
        ops = np.concatenate([t.ops for t in made], axis=1)
        buffers = np.concatenate([t.buffers for t in made], axis=1)
        first_buffer = np.array([0, *accumulate(t.num_buffers for t in made)])
        first_held = np.array([0, *accumulate(len(placed.forms) for placed in self.placed)])
        held = np.array(self.held, np.int64)

        def resolved(parts: Sequence[Int64]) -> Int64:
            """Numbers in the whole schedule of what turns refer to."""
            refs, lengths = np.concatenate(parts), [len(part) for part in parts]
            found = refs + np.repeat(first_buffer[:-1], lengths)
            is_held = refs < 0
            found[is_held] = held[(np.repeat(first_held[:-1], lengths) - 1 - refs)[is_held]]
            return found  # type: ignore[no-any-return]

        reuses = resolved([t.buffers[3] for t in made]).astype(np.int32)
        reuses[buffers[3] == NO_REF] = EMPTY
        becomes = np.full(len(reuses), EMPTY, np.int32)
        later = dict(zip(self.chain.cells["old grads"], self.chain.cells["grads"], strict=True))
        for cell, buffer in self.homes:
            becomes[self.ids[later.get(cell, cell)]] = buffer
        is_used = np.zeros(len(self.chain.works.listed), np.bool_)
        is_used[ops[0]] = True
        columns = ScheduleColumns(
            tiers=tiers_of(machine),
            works=tuple(self.chain.works.listed[w] for w in np.flatnonzero(is_used).tolist()),
            op_work=(np.cumsum(is_used, dtype=np.int32) - 1)[ops[0]],
            reads=_lists(ops[3], resolved([t.reads for t in made])),
            writes=_lists(ops[4], resolved([t.writes for t in made])),
            after=_lists(ops[5], resolved([t.after for t in made])),
            buffer_tier=self._tiers(machine, buffers[0]),
            buffer_bytes=buffers[1],
            buffer_initial=buffers[2] > 0,
            buffer_reuses=reuses,
            buffer_becomes=becomes,
            labels=lambda: self._labels(machine),
        )
        at = np.repeat([placed.at for placed in self.placed], [t.num_ops for t in made]) - self._leads()[ops[1]]
        order = consistent_order(
            np.lexsort((ops[2], at)), *columns.reads, *columns.writes, *columns.after, columns.buffer_reuses
        )
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
        nothing, first_held = BufferLabel("", "", ""), 0
        for placed in self.placed:
            num_cells = len(placed.forms) - len(placed.turn.ops)
            ids = self.held[first_held : first_held + num_cells]
            sketch = self.sketch(placed, [nothing if b == EMPTY else buffers[b] for b in ids])
            ops += sketch.op_labels()
            for made in sketch.made_buffers():
                version = versions[made.content, made.tier] = versions.get((made.content, made.tier), -1) + 1
                name = buffer_name(made.content, made.tier, version)
                buffers.append(BufferLabel(name, made.content, made.kind))
            first_held += len(placed.forms)
        meta = {
            "policy": plan.policy,
            "semantics": plan.semantics,
            "order": plan.order,
            "model": workload.name,
            "machine": machine.name,
            "config": dict(workload.config),
        }
        specs = [
            replace(facts.spec, name=unit.name, late_update=choice.late_update)
            for unit, choice, facts in zip(workload.units, plan.units, self.facts, strict=True)
        ]
        step = StepSpec(training=workload.training, semantics=plan.semantics, units=tuple(specs))
        return Labels(name=f"{plan.policy} {workload.name}", ops=ops, buffers=buffers, step=step, meta=meta)


def _lists(lengths: Int64, items: Int64) -> Lists:
    begins = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=begins[1:])
    return Lists(begins, items.astype(np.int32))
