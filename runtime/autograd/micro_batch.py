"""Runs an unmodified model unit by unit: forward, recompute and backward of one micro-batch.

Each block's `forward` is replaced on the instance; at every boundary (embed | L0 | L1 | ... | head with loss) an op
ends. Where the next op of the compute stream is the next unit's forward, it begins there and then. Else the model's own
`forward` is a coroutine, in a thread for each micro-batch: it stops, and the thread that executes the compute stream
goes on. One of them runs at a time, so the order of the compute stream's ops is the order of execution, horizontal or
vertical.

Autograd's graph is cut at the boundaries: a unit's outputs are detached and become leaves, whose gradients start the
backward of the unit. A leaf that several units read (an encoder's states) takes their gradients one by one, in the
order in which autograd would have added them up without the cut; so the cut changes no bit. What a unit saves goes
through `saved.Recorder`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from tierplan.hwmodels.names import COMPUTE
from tierplan.runtime.autograd.absent import Absent, refuse_count, refuse_more, results_alone
from tierplan.runtime.autograd.containers import Lent
from tierplan.runtime.autograd.cuts import (
    Layouts,
    Leaves,
    Root,
    UnitRun,
    backward_from,
    check_cut,
    check_read,
    cut,
    handed_over,
)
from tierplan.runtime.autograd.flow import Flow
from tierplan.runtime.autograd.hooks import ModelHooks, chosen_around
from tierplan.runtime.autograd.nests import addresses, flatten, form_of, shapes_of, tensors_in
from tierplan.runtime.autograd.replay import OperationLog, Recipe, There, looks_of
from tierplan.runtime.autograd.saved import AllRecreated, Finder, Recorder, Recreator, SavedStorage, Treatment
from tierplan.runtime.autograd.units import FlatParameters, ModelError, ModelUnit, placeholder, without_checkpoints
from tierplan.runtime.execution.device import Device
from tierplan.runtime.execution.threads import Coroutine
from tierplan.sim.step import UnitSpec

_NO_LOSS = torch.tensor(torch.nan)


@dataclass(eq=False)
class MicroBatchRun:
    """One micro-batch on its way through the units."""

    hooks: ModelHooks
    units: Sequence[ModelUnit]
    specs: Sequence[UnitSpec]
    """What happens to the saved tensors of each unit."""
    forward: Callable[[], torch.Tensor]
    """Runs the model on the micro-batch; the loss, divided as backward needs it."""
    external: Mapping[int, object]
    """The storages of the batch's tensors and the model's buffers, by address: held, so that none has theirs."""
    device: Device
    own: range
    """Indices of the units that this process runs."""
    flow: Flow = field(default_factory=Flow)
    """How the schedule's ops follow each other."""
    seed: int | None = None
    """Of this micro-batch's random numbers; None leaves PyTorch's generators alone."""
    is_first_of_two: bool = False
    """A pack visits: its blocks run forward once more for backward, on this rank or on another one."""
    batch: Mapping[str, Any] = field(default_factory=dict)
    """What the model is given."""
    loss: torch.Tensor = _NO_LOSS
    """In host memory, when the device is done with the forward."""
    rng: tuple[torch.Tensor, ...] = ()
    """The random numbers with which the next unit goes on."""
    runs: list[UnitRun] = field(default_factory=list)
    _at: int = 0
    _leaf_of: Leaves = field(default_factory=dict)
    _recording: Any = None

    def __post_init__(self) -> None:
        self.runs = [UnitRun() for _ in self.units]
        self.shapes = shapes_of(tensors_in(self.batch))
        self._again = {*self.flow.again, *(i for i, spec in enumerate(self.specs) if spec.recomputed)}
        self._holds_results = any(i and self.units[i].block is None for i in self._again)
        self._goes_on: Callable[[], bool] | None = None
        self._coroutine: Coroutine | None = None
        """The model's forward, where it has a thread of its own."""
        self._layouts = Layouts(self.hooks.laid_alike)
        self._absent = Absent(draws_alike=self.seed is not None) if self.own.start else None

    # ---- called by the thread that executes the compute stream ----

    def skip_front(self, rng: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Leads the model up to the first unit of its own: the leaves that are its input, and have no numbers yet."""
        if self.seed is not None:  # for what the model draws in front of its blocks
            self.device.seed(self.seed)
        self._go_on()
        self._at, self.rng = self.own.start, tuple(rng)
        refuse_more(self.units[self._at].name, leaves := self.runs[self._at].leaves)
        return leaves

    def run_forward(self, index: int, goes_on: Callable[[], bool] | None = None, *, is_in_one: bool = False) -> None:
        """Runs the model up to the end of this unit, and of those with which it goes on.

        `goes_on` is called behind each but the model's last: it ends the unit's op, and begins that of the next unit,
        if this comes next. If it does behind each (`is_in_one`), the model needs no thread of its own.
        """
        self._goes_on = goes_on
        assert index == self._at, "the schedule runs a micro-batch's units out of order"
        if self.seed is not None and index == 0:
            self.device.seed(self.seed)
        elif self.seed is not None:
            self.device.set_rng_state(self.rng)
        if is_in_one:
            self._run_model()
        else:
            self._go_on()
        self._goes_on = None
        if self.seed is not None:
            self.rng = self.device.rng_state()
        self._at += 1

    def _go_on(self) -> None:
        self._coroutine = self._coroutine or Coroutine(self._run_model, "tierplan micro-batch")
        self._coroutine.go_on()

    def rest(self) -> None:
        """Another computes now: the model's thread keeps no helpers."""
        if self._coroutine is not None:
            self._coroutine.let_helpers_go()

    def run_backward(self, index: int) -> None:
        """Backward through one unit: gradients of its inputs are in the leaves then, those of parameters with hooks."""
        run = self.runs[index]
        edges, gradients = [], []
        for leaf in run.read:  # later units have read it too: their sum comes first, as without the cut
            if leaf.grad is not None:
                edges.append(get_gradient_edge(leaf))
                gradients.append(leaf.grad)
                leaf.grad = None
        for edge, leaf in run.roots:
            gradient = leaf.grad if index + 1 < len(self.units) else torch.ones_like(leaf)
            if gradient is not None:
                edges.append(edge)
                gradients.append(gradient)
                leaf.grad = None
        run.roots = []
        if edges:
            backward_from(edges, gradients)
            self._layouts.restore()
        del gradients
        glue = [(edge, leaf.grad) for edge, leaf in run.glue if leaf.grad is not None]
        if glue:
            backward_from([edge for edge, _ in glue], [gradient for _, gradient in glue])
            self._layouts.restore()
        self.runs[index] = UnitRun(leaves=run.leaves)  # drops the graph; `dx` is in the leaves

    def hand_over(self, index: int, size_bytes: int) -> list[torch.Tensor]:
        """The leaves that are `x/U` of this unit, by the bytes that the schedule declares for it.

        That is all that the unit before hands over, or the first of them, where the others are shared by later units.
        """
        run = self.runs[index]
        if len(run.leaves) > 1 and run.leaves[0].nbytes == size_bytes:
            run.leaves, run.shared = run.leaves[:1], run.leaves[1:]
        run.handed_over = [leaf._version for leaf in run.leaves]
        return run.leaves

    def run_again(self, index: int, *, makes_output: bool = False) -> int:
        """Makes the dropped saved tensors of a unit again, for the graph to hold; their bytes.

        With `makes_output` also what it hands over, which is the next unit's input.
        """
        run = self.runs[index]
        assert run.recorder is not None
        wanted, run.recorder.dropped = run.recorder.dropped, {}
        made_bytes = sum(saved.size_bytes for saved in wanted.values())
        if not wanted and not makes_output:
            return 0
        if run.call is None:
            self._rerun_outside(index, wanted, makes_output)
            return made_bytes
        _, given, nested = run.call
        tensors, (args, kwargs) = tensors_in(given), nested(given)
        if [t._version for t in tensors] != run.versions:
            raise ModelError(
                f"a tensor that {self.units[index].name!r} is given is changed in place, by the block or behind it, "
                "but the block is run again from what it was given; make a new tensor there, or plan without "
                "recomputation"
            )
        if (now := chosen_around()) != run.chosen:
            others = ", ".join(name for name in now if now[name] != run.chosen[name])
            raise ModelError(
                f"{self.units[index].name!r} runs within {others}, which the model chooses around it, but it is run "
                "again outside of that; choose it in the block's own forward, or plan without recomputation"
            )
        inputs = [*run.leaves, *(leaf for _, leaf in run.glue)]
        there: There = {"arg": tensors, "input": inputs, "param": [part.bound for part in self._params_of(index)]}
        recipes, key = self.hooks.recipes, (index, (*form_of(args, kwargs), *looks_of(there)))
        values, recipe = recipes.get(key, (None, None))
        is_moved = run.treatment is not None  # then others may be moved than the op was made to read
        cannot = recipe is None or values != run.values or not run.recorder.holds(recipe.saved, here=is_moved)
        if makes_output or (values is not None and cannot):
            self._rerun(index, wanted, inputs, makes_output=makes_output)
        elif recipe is not None:
            self._replay(index, recipe, wanted, there)
        else:
            assert run.values is not None
            recipes[key] = run.values, self._rerun(index, wanted, inputs, noted=there)
        return made_bytes

    def _replay(self, index: int, recipe: Recipe, wanted: Mapping[int, SavedStorage], there: There) -> None:
        """Makes the wanted saved tensors by the operations that lead to them."""
        recorder, name = self.runs[index].recorder, self.units[index].name
        assert recorder is not None
        params = [part.parameters[0][0] if part.parameters else "" for part in self._params_of(index)]
        record = (lambda: self.device.record(COMPUTE)) if self.hooks.are_replays_timed else None
        recipe.run(Finder(name, recorder.saved, there, params), wanted, record=record)

    def _rerun(
        self,
        index: int,
        wanted: dict[int, SavedStorage],
        inputs: Sequence[torch.Tensor],
        *,
        makes_output: bool = False,
        noted: There | None = None,
    ) -> Recipe | None:
        """Runs the block again as far as the last wanted saved tensor, or to its end for its output.

        The recipe for next time, from what is `noted` to be there.
        """
        run, block = self.runs[index], self.units[index].block
        assert run.call is not None
        assert run.recorder is not None
        assert block is not None
        call, given, nested = run.call
        args, kwargs = nested(given)
        lent = Lent(self.units[index].name, args, kwargs)
        log = None if noted is None else OperationLog(noted, block.buffers())
        targets = set(wanted)
        with self._rerunning(index, inputs, given, wanted, makes_output) as recreator:
            recreator.on_saved = log.saved if log else lambda k, t: None
            with log or nullcontext():
                out = call(*args, **kwargs)
            if makes_output:
                self._refill(index, lent.outcome(out)[0])
        available = [k for k in run.recorder.saved if k not in targets]
        return log.recipe(targets, available) if log else None

    def _rerun_outside(self, index: int, wanted: dict[int, SavedStorage], makes_output: bool) -> None:
        """Runs a unit outside of blocks again: the model's forward from its beginning, in which blocks give what they
        gave before, and leave random numbers where they left them."""
        if index:
            self.runs[index].rng, self.runs[index].values = self._begun

        def echo(i: int, original: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
            if i > index:
                if makes_output:
                    self._refill(index, flatten((args, kwargs))[0])
                raise AllRecreated
            result = self.runs[i].result
            assert result is not None
            flat, hand_back, rng = result
            self.device.set_rng_state(rng)
            recreator.is_on |= i + 1 == index
            return hand_back(flat, args, kwargs)

        inputs = [*self.runs[index].leaves, *self.runs[index].shared]
        with self._rerunning(index, inputs, (), wanted, makes_output) as recreator, self.hooks.of(echo):
            recreator.is_on = index == 0
            self.forward()

    @contextmanager
    def _rerunning(
        self,
        index: int,
        inputs: Sequence[torch.Tensor],
        given: Sequence[object],
        wanted: dict[int, SavedStorage],
        makes_output: bool,
    ) -> Iterator[Recreator]:
        """Inside, what the unit's forward did is done again, with its random numbers, until all wanted is made; `given`
        is what else it gets."""
        recreator = Recreator(
            self._params_of(index), inputs, self._outside(index, given), wanted=wanted, runs_to_end=makes_output
        )
        now = self.device.rng_state()
        self.device.set_rng_state(self.runs[index].rng or now)
        try:
            with (
                self.hooks.with_values(index, self.runs[index].values),
                torch.enable_grad(),
                saved_tensors_hooks(recreator.pack, recreator.unpack),
            ):
                yield recreator
        except AllRecreated:
            pass
        finally:
            self.device.set_rng_state(now)
            recreator.close()
        if recreator.wanted:
            raise ModelError(
                f"a rerun of {self.units[index].name!r} saved {recreator.num_saved} tensors and not number "
                f"{min(recreator.wanted)}, unlike its forward; it must do the same each time"
            )

    def _refill(self, index: int, flat: Sequence[object]) -> None:
        """Gives the unit's outputs, which it has made again, to the next unit."""
        outputs = {id(t): t for t in flat if isinstance(t, torch.Tensor) and t.grad_fn is not None}
        handed = {id(leaf) for leaf in self.runs[index + 1].leaves}
        for t, (_, leaf) in zip(outputs.values(), self.runs[index].roots, strict=True):
            if id(leaf) in handed:
                leaf.data = t.detach()

    def cancel(self) -> None:
        """Ends the thread, wherever it is."""
        if self._coroutine is not None:
            self._coroutine.cancel()

    # ---- called by the thread that runs the model ----

    def _run_model(self) -> None:
        try:
            with (
                self.hooks.of(self.block), self.device.on(COMPUTE), torch.enable_grad(), without_checkpoints(),
                self._absent or nullcontext(),
            ):  # fmt: skip
                if self._holds_results:
                    self._begun = self.device.rng_state(), self.hooks.values_of(0)
                self._open(0)
                loss = self.forward()
                self._close()
                if self._absent is not None:
                    self._absent.refuse("the loss is", loss)
                head = self.runs[-1]
                if len(self.runs) != self._at + 1:
                    raise ModelError(
                        f"the model's forward ran {self._at - 1} of its {len(self.runs) - 2} blocks; it must run all"
                    )
                head.roots = [(get_gradient_edge(loss), loss.detach())]
                self._check_cut(len(self.runs) - 1, head.roots)
                self.loss = self.device.to_host(loss.detach())
        finally:
            self._close()

    def _yield(self) -> None:
        if self._goes_on is not None and self._goes_on():
            self._at += 1
            return
        assert self._coroutine is not None
        self._coroutine.stop()

    def _open(self, index: int, leaves: Sequence[torch.Tensor] = (), flat: Sequence[object] = ()) -> None:
        """Records what the unit saves; of one of which nothing moves, once for all of these shapes.

        It saves as much then whatever the numbers are: the model has run on fake tensors, which have none.
        """
        run, recorders = self.runs[index], self.hooks.recorders
        key = (index, self.shapes, shapes_of(flat)) if index in self.flow.unmoved else None
        run.recorder = recorders.get(key)
        if run.recorder is not None:
            return
        run.recorder = self._recorder = Recorder(
            self._params_of(index),
            leaves,
            self._outside(index, flat),
            device=self.device.torch_device,
            treatment=run.treatment or Treatment.planned(self.specs[index]),
        )
        if key is not None:
            recorders[key] = run.recorder
        if index in self._again:
            run.rng, run.values, run.chosen = self.device.rng_state(), self.hooks.values_of(index), chosen_around()
        self._recording = saved_tensors_hooks(run.recorder.pack, run.recorder.unpack)
        self._recording.__enter__()

    def _close(self) -> None:
        if self._recording is not None:
            self._recording.__exit__(None, None, None)
            self._recording = None
            self._recorder.close()

    def _params_of(self, index: int) -> list[FlatParameters]:
        unit = self.units[index]
        return [part for u in (unit, *(u for u in self.units if u.name == unit.shares)) for part in u.parts]

    def _away_before(self, index: int) -> dict[str, Sequence[torch.Tensor]]:
        return {self.units[k].name: self.runs[k].leaves for k in self.flow.inputs_away if k < index}

    def _outside(self, index: int, given: Sequence[object]) -> set[int]:
        """Addresses of what the unit has not made: of the batch, of buffers, and of what it is given. Outside of
        blocks that is all that units before it were handed, as far as nobody takes it away."""
        there = self.flow.inputs_there if not given else ()
        return self.external.keys() | addresses((given, [self.runs[k].leaves for k in there if k < index]))

    def _check_cut(self, index: int, roots: Sequence[Root]) -> None:
        """Looks once where a unit's graph ends, since each step is alike."""
        self._layouts.watch((index, roots is self.runs[index].glue), [leaf for _, leaf in roots])
        if roots and (index, len(roots)) not in self.hooks.checked:
            check_cut(self.units[index].name, roots, self.runs, self._away_before(index))
            self.hooks.checked.add((index, len(roots)))

    def block(self, index: int, original: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Stands for a block's forward: a boundary before the first, the block itself, a boundary behind it."""
        run = self._pass if index < self.own.start else self._run_block
        with self._absent.paused() if self._absent is not None else nullcontext():
            return run(index, original, args, kwargs)

    def _run_block(self, index: int, original: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        is_behind_block = self.units[index - 1].block is not None
        if index != self._at + (not is_behind_block):
            raise ModelError(
                f"the model's forward called {self.units[index].name!r} out of order; the runtime runs each block "
                "once, in the order of the model's list"
            )
        run, (flat, nested) = self.runs[index], flatten((args, kwargs))
        if is_behind_block:
            flat = cut(flat, run.glue, self._leaf_of, is_passed_on=True)
            self._check_cut(index, run.glue)
        else:
            self._close()
            flat = cut(flat, roots := self.runs[index - 1].roots, self._leaf_of, is_passed_on=True)
            self._check_cut(index - 1, roots)
            run.leaves = handed_over(roots, flat)
            if index == self.own.start:  # another rank has run what is before
                self.runs[index - 1] = UnitRun()
            self._yield()
        if self._absent is not None:
            self._absent.refuse(f"{self.units[index].name!r} is given", flat)
        own_args, own_kwargs = nested(flat)
        leaves = [t for t in flat if isinstance(t, torch.Tensor) and t.requires_grad]
        if index in self._again:
            run.call, run.versions = (original, flat, nested), [t._version for t in tensors_in(flat)]
        run.read = list({id(t): t for t in (*leaves, *run.leaves)}.values())
        check_read(self.units[index].name, run.read, self._away_before(index))
        lent = Lent(self.units[index].name, own_args, own_kwargs)
        if (together := self.flow.apart.get(index)) is not None:
            key = (index, form_of(own_args, own_kwargs))
            if key not in self.hooks.treatments:
                sizes = self._sizes(index, original, flat, nested(flat))
                self.hooks.treatments[key] = Treatment.of(sizes, self.specs[index], together)
            run.treatment = self.hooks.treatments[key]
        self._open(index, run.read, flat)
        before = self.hooks.values_of(index) if self.is_first_of_two else None
        out = original(*own_args, **own_kwargs)
        self._close()
        if before is not None:
            refuse_count(repr(self.units[index].name), before, self.hooks.values_of(index))
        flat, hand_back = lent.outcome(out)
        del out, own_args, own_kwargs, lent
        flat = cut(flat, run.roots, self._leaf_of)
        self._check_cut(index, run.roots)
        self.runs[index + 1].leaves = handed_over(run.roots, flat)
        if self._holds_results:
            run.result = (flat, hand_back, self.device.rng_state())
        self._end_block(index)
        return hand_back(flat, args, kwargs)

    def _sizes(
        self, index: int, call: Callable[..., Any], flat: Sequence[object], nest: tuple[tuple, dict]
    ) -> list[int]:
        """Bytes of what a block saves when it is called so: it runs, and nothing is held."""
        sizes, (args, kwargs) = list[int](), nest
        with self._rerunning(index, self.runs[index].read, flat, {}, False) as recreator:
            recreator.on_saved = lambda k, t: sizes.append(t.untyped_storage().nbytes())
            call(*args, **kwargs)
        return sizes

    def _end_block(self, index: int) -> None:
        self._yield()
        if self.units[index + 1].block is None:
            following = self.runs[index + 1]
            following.read = [*following.leaves, *following.shared]
            self._open(index + 1, following.read)

    def _pass(self, index: int, original: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """What a block returns that another rank runs: tensors without numbers, which are leaves."""
        self._close()
        self.runs[index - 1] = UnitRun()
        key = (index, form_of(args, kwargs))
        if key not in self.hooks.results:
            with self.hooks.with_values(index, None):  # as it has not run
                self.hooks.results[key] = results_alone(self.units[index].name, original, args, kwargs)
        results, hand_back = self.hooks.results[key]
        leaves = {}
        for t in results:
            if isinstance(t, torch.Tensor) and id(t) not in leaves:
                leaves[id(t)] = placeholder(t.shape, t.dtype, self.device.torch_device).detach().requires_grad_()
        assert self._absent is not None
        self._absent.draws_alike = index + 1 == self.own.start
        if index + 1 == self.own.start:
            self.runs[index + 1].leaves = list(leaves.values())
            self._layouts.watch((index, False), leaves.values())
            self._end_block(index)
        return hand_back([leaves.get(id(t), t) for t in results], args, kwargs)
