"""Trains a model on a schedule.

    from tierplan.runtime.trainer import train
    result = train(schedule, model, batches, steps=12, nvme_dir="/mnt/nvme")

`train` places parameters and optimizer states where the schedule says, executes its steps, and puts the trained
parameters back into the model. The numbers are those of `tierplan.runtime.reference.train_plainly`, bit for bit (on
CUDA where PyTorch's algorithms are deterministic: docs/runtime.md).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any, get_type_hints

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from tierplan.hwmodels.names import COMPUTE, DEVICE, HOST
from tierplan.hwmodels.values.arguments import check_annotated
from tierplan.runtime.autograd.chunked_loss import loss_in_chunks
from tierplan.runtime.autograd.cuts import absent_at_loss, check_loss
from tierplan.runtime.autograd.hooks import ModelHooks
from tierplan.runtime.autograd.micro_batch import MicroBatchRun
from tierplan.runtime.autograd.nests import outside_storages
from tierplan.runtime.autograd.units import ModelUnit, split_model
from tierplan.runtime.checkpoint.commits import DRAWING_ORDER, drawing_order
from tierplan.runtime.checkpoint.durability import Durability, save_copy
from tierplan.runtime.data.ahead import AheadBatches, Batch, passed_over, with_own_draws, without_draws
from tierplan.runtime.execution.computing import Computing
from tierplan.runtime.execution.device import TORCH_DTYPES, Device, open_device
from tierplan.runtime.execution.executable import FixedTensors, check_units, executable_step, refuse_interference
from tierplan.runtime.execution.executor import Executor
from tierplan.runtime.execution.ops import Bodies
from tierplan.runtime.execution.placement import Placement, TrainingError, check_begun, check_count, open_store
from tierplan.runtime.execution.threads import begin_stream, let_helpers_go
from tierplan.runtime.execution.values import Places
from tierplan.runtime.measure.reference_work import ReferenceWork
from tierplan.runtime.memory.files import Folder, Folders
from tierplan.runtime.optim.adam import OptimizerSettings
from tierplan.runtime.optim.groups import check_groups
from tierplan.runtime.ranks.alike import check_alike
from tierplan.runtime.ranks.group import STEPS_TO_STOP, Ranks
from tierplan.runtime.reference import loss_of, micro_batch_seed, without_cache
from tierplan.runtime.run_result import RunResult
from tierplan.sim.ranks import Turn, ends_of_sends, rank_schedule, stages
from tierplan.sim.schedule import Schedule


def train(
    schedule: Schedule,
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    steps: int,
    nvme_dir: Folders | None = None,
    **settings: Any,
) -> RunResult:
    """Trains `model` for `steps` optimizer steps as the schedule says; its parameters are the trained ones afterwards.

    Parameters
    ----------
    batches
        One micro-batch at a time, as the keyword arguments of the model's forward, in the order of training.
    nvme_dir
        The folder of the NVMe tier, or several to stripe over; needed if the schedule uses it.
    settings
        See `Trainer`.
    """
    with Trainer(schedule, model, nvme_dir=nvme_dir, **settings) as trainer:
        trainer.run(batches, steps)
        trainer.restore_model()
        return trainer.result()


@dataclass(eq=False)
class Trainer(AbstractContextManager["Trainer"]):
    """A model placed into the tiers of a schedule; a context manager that gives everything back.

    `run` may be called several times. `restore_model` makes the model whole again, to be read and not to be changed.
    """

    schedule: Schedule
    model: nn.Module
    nvme_dir: Folders | None = None
    nvme_weights: Sequence[float] = ()
    """Relative speeds of several folders, which get stripes in proportion; measured before the run if not given."""
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    learning_rate: Callable[[int], float] | None = None
    """By step, from 0; the optimizer's `lr` if not given."""
    loss: Callable[[Any, Batch], torch.Tensor] | None = None
    """Of the model's output and the batch; the output's own `loss` if not given."""
    seed: int | None = 0
    """Each micro-batch's random numbers (dropout) follow from it; None leaves PyTorch's generators alone."""
    device: str | Device = "cpu"
    """`cpu`, where the device tier is a budget in this machine's memory, or `cuda`; or one that is open."""
    num_threads: int | None = None
    """Threads for kernels on the CPU; PyTorch's setting if not given."""
    reference_frac: float | None = None
    """Times the reference work (`tierplan.runtime.measure.reference_work`) for at most this part of the time; 0: only
    when asked to; None: not at all. The trace's `meta["reference_s"]` has its seconds by step."""
    time_replays: bool = False
    """Time each operation of recomputations (see `replay_seconds`)."""
    trace_steps: int | None = None
    """Steps of which the trace is kept; None for all."""
    on_step: Callable[[int, float], None] = lambda step, loss: None
    """Called with each finished step, from 0, and its loss, in the thread of `run` while training goes on: it must not
    seed PyTorch's generators, nor draw from them. An error that it raises ends the run."""
    out_dir: Folder | None = None
    """Where steps are committed; nothing is, and nothing outlives a crash, if not given."""
    checkpoint_every: int | None = None
    """Commits after so many steps, and at the end of each `run`; only at the end if not given."""
    read_back: bool = True
    """Every commit is read from the drives and compared before it counts; only the last one of a `run` if not."""
    resume: bool = False
    """Goes on from the last commit in `out_dir`, or begins if there is none."""
    start: Folder | None = None
    """A folder that `save_copy` wrote: goes on from there, with the batches that follow."""
    fixed: Mapping[str, object] = field(default_factory=dict)
    """What else the numbers depend on, as JSON values, by name: a resume with another one is refused. Of batches,
    `loss` and `learning_rate` nothing else is compared."""
    divides_loss: bool = True
    """Each micro-batch's loss is divided by their number; not so where the model does that."""
    weights: Callable[[ModelUnit], Sequence[torch.Tensor]] | None = None
    """A unit's parameters, for a model that has none in memory (`tierplan.runtime.checkpoint.weights`)."""
    ranks: Ranks | None = None
    """The processes that execute a schedule of several devices, of which this is one. All are given the same model,
    settings and batches, of which only batches and functions are not compared, and take turns: rank r of n trains on
    micro-batches r, r + n, ... of a step."""

    def __post_init__(self) -> None:
        check_count("checkpoint_every", self.checkpoint_every, least=1)
        check_annotated("Trainer", get_type_hints(Trainer), vars(self))
        self._rank, self._num_ranks = (self.ranks.rank, self.ranks.size) if self.ranks is not None else (0, 1)
        check_alike(self.ranks, {"the checksum of the schedule": self.schedule})
        self._step = executable_step(self.schedule, self._rank, self._num_ranks)
        self._stages, self._sends = stages(self.schedule), ends_of_sends(self.schedule)
        self._device_name = self.device if isinstance(self.device, str) else self.device.torch_device.type
        self._turn, self._num_turns = (0, 1) if self._stages else (self._rank, self._num_ranks)
        """This rank's among those that share micro-batches."""
        self.schedule = rank_schedule(self.schedule, self._rank)
        if self._num_ranks > 1 and self._device_name != "cpu":
            raise TrainingError(
                f"{self._num_ranks} ranks are to run on device {self._device_name!r}; several are executed on CPUs "
                "only yet: choose device cpu"
            )
        training = self._step.training
        self._num_micro_batches = training.gradient_accumulation_steps * self._num_turns
        """Of a step, on all ranks."""
        self._dtype = TORCH_DTYPES[training.dtype_of_trained]
        if self.optimizer.name != training.optimizer:
            raise TrainingError(
                f"the schedule was made for optimizer {training.optimizer!r}, not {self.optimizer.name!r}; plan "
                "again, or change the optimizer settings"
            )
        self._threads_before = torch.get_num_threads()
        self._threads = self.num_threads or self._threads_before
        self._losses: dict[int, list[float]] = {}
        self._had: dict[tuple[int, int], Batch] = {}
        self.units: Sequence[ModelUnit] = ()
        """The model's; none before the first `run`."""
        self.reference_work: ReferenceWork | None = None
        """From the first `run` on, if there is a `reference_frac`."""
        self.placement: Placement
        """What outlives a step, in the schedule's tiers; from the first `run` on."""
        self._is_set_up = self._is_closed = self._is_stop_wanted = self._is_loss_checked = False
        self.was_stopped = False
        """The last `run` ended because that was asked for."""
        self._batches = AheadBatches(iter(()), 0, torch.clone)
        self._source: Iterator[Batch] | None = None
        self._set_back = ExitStack()
        """What `close` ends, and changes back in the model."""
        self._set_back.callback(torch.set_num_threads, self._threads_before)
        if self.out_dir is not None and self.start is not None:
            raise TrainingError("both start and out_dir are given; a run is resumed from one folder")
        folder, resume = (self.out_dir, self.resume) if self.start is None else (self.start, True)
        self._settings = self._settings_now()
        """Those of the beginning: whether losses are divided, the Hugging Face Trainer says with each step."""
        place = None if folder is None else os.path.realpath(folder)
        commits = {"folder": place, "resume": resume, "checkpoint_every": self.checkpoint_every}
        check_alike(self.ranks, {**self._settings, **commits})
        self._origin = None if folder is None else Durability(folder, self._settings, resume=resume, ranks=self.ranks)
        """Where the state to begin with is."""
        if self._origin is not None:
            self._set_back.callback(self._origin.close)
        self._durability = self._origin if self.start is None else None
        self._resumed = self._origin.last if self._origin is not None else None
        if self.start is not None and self._resumed is None:
            self.close()  # whoever keeps the error keeps this trainer, too: another may have the folder
            raise TrainingError(f"{self.start} holds no state to begin with; give a folder that was saved by a run")

    # ---- life ----

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def num_steps_done(self) -> int:
        """Steps done so far, those before the commit that was resumed included."""
        if self._is_set_up:
            return self._executor.num_steps_done
        return self._resumed.num_steps if self._resumed else 0

    def run(self, batches: Iterable[Batch], steps: int) -> None:
        """Runs so many optimizer steps more, on the next micro-batches of `batches`.

        A resumed run takes `batches` from the beginning of training and passes over those that were used.
        """
        check_count("steps", steps, least=0)
        if self._is_closed:
            raise TrainingError("this trainer is closed, and trains no more; make a new one")
        refuse_interference(self.units)
        before, self._source = self._source, iter(batches)
        source = self._batches.rest() if self._source is before else self._of_rank(self._source)
        if not self._is_set_up:
            used = 0 if self.start is not None else self.num_steps_done * self._num_micro_batches
            if used and hasattr(batches, "starting_at"):
                source, used = self._of_rank(iter(batches.starting_at(used))), 0
            first = next(source, None)
            if first is None:
                raise TrainingError("there are no batches to train on; give at least one micro-batch")
            source = passed_over(itertools.chain([first], source), used // self._num_turns)
            self._set_up(first)
        num_wanted = steps * self._num_micro_batches // self._num_turns
        self._batches = AheadBatches(source, num_wanted, self._device.take)
        self._fixed.begin()
        torch.set_num_threads(self._threads)
        let_helpers_go()
        if self.ranks is not None:
            rate = float(self._bodies.learning_rate(self.num_steps_done)) if steps else None
            check_alike(self.ranks, {"the number of steps to run": steps, "the learning rate of the next": rate})
        wanted = self.num_steps_done + steps
        if self._durability is not None and steps:
            num_commits = -(-steps // (self.checkpoint_every or steps))
            self._durability.check_room(self.placement, num_commits=num_commits, num_ranks=self._num_ranks)
        try:
            due = self.num_steps_done
            if self.reference_work is not None:
                self.reference_work.at_rest(due)
            while self.num_steps_done < wanted:
                due = min(wanted, due + (self.checkpoint_every or steps)) if self.num_steps_done == due else due
                part = due - self.num_steps_done
                if self.ranks is not None:  # all alike: they hear together of a wish to stop that has come meanwhile
                    part = min(part, STEPS_TO_STOP)
                elif self._is_stop_wanted:
                    part = 1
                self._bodies.commits_after = self.num_steps_done + part if self._durability is not None else None
                with self._device.planned_kernels():
                    self.placement.run(part)
                if self.ranks is not None:
                    self._is_stop_wanted = any(x for (x,) in self.ranks.share([self._is_stop_wanted], "steps"))
                is_last = self._is_stop_wanted or self.num_steps_done == wanted
                if self._durability is not None and (is_last or self.num_steps_done == due):
                    self._durability.begin_commit(
                        self.placement,
                        losses=self.result().losses,
                        rng=self._device.rng_state() if self.seed is None else (),
                        read_back=self.read_back or is_last,
                    )
                if is_last or (self._is_stop_wanted and self.ranks is None):
                    break
            if self._durability is not None:
                self._durability.end_commit()
            if self.reference_work is not None:
                self.reference_work.at_rest(self.num_steps_done - 1)
        except BaseException as error:
            if self._durability is not None:
                self._durability.add_failure(error)
            raise
        finally:
            self.was_stopped, self._is_stop_wanted = self._is_stop_wanted, False
            torch.set_num_threads(self._threads_before)

    def save_copy(self, folder: Folder) -> None:
        """Writes the state so far into a folder of its own, for `start`; all ranks together. Nothing runs meanwhile."""
        losses = self.result().losses  # which says that nothing has been trained yet
        save_copy(folder, self._settings, self.placement, losses)

    def _settings_now(self) -> dict[str, Any]:
        """What the numbers of training depend on, as JSON values."""
        whole = {**asdict(self._step.training), "gradient_accumulation_steps": self._num_micro_batches}
        return {
            "training": {k: v for k, v in whole.items() if k != "backend"},
            "semantics": self._step.semantics,
            "units": [[unit.name, unit.num_parameters] for unit in self._step.units],
            "late_updates": sorted(self._step.late_updates),
            "optimizer": asdict(self.optimizer),
            "seed": self.seed,
            DRAWING_ORDER: None if self.seed is not None or self._stages else drawing_order(self.schedule),
            "divides_loss": self.divides_loss or self._num_micro_batches == 1,
            "num_threads": self._threads,
            "device": self._device_name.partition(":")[0],  # whichever GPU
            **self.fixed,
        }

    @property
    def last_losses(self) -> Sequence[float]:
        """The losses of the last step's micro-batches; its loss is their sum."""
        return tuple(self._losses[self.num_steps_done - 1])

    @property
    def last_grad_norm(self) -> torch.Tensor | None:
        """The global norm of the last step's gradients before clipping; None where the schedule does not clip."""
        return self._bodies.grad_norm if self._is_set_up else None

    def request_stop(self) -> None:
        """Lets the steps under way run to their end, or one if there is none; `run` returns then.

        Several ranks stop together, as soon as they have heard of it.
        """
        self._is_stop_wanted = True
        if self._is_set_up and self.ranks is None:
            self._executor.request_stop()

    def result(self) -> RunResult:
        """What has been done so far."""
        check_begun(self._is_set_up)
        ends_ns, num_done = self._executor.step_ends_ns, self.num_steps_done
        before = self._resumed.losses if self._resumed else ()
        per_step = {name: moved / max(1, len(ends_ns)) for name, moved in self._bodies.moved_bytes.items()}
        counted: dict[str, object] = {"num_steps": num_done, "bytes_per_step": per_step, "num_threads": self._threads}
        if self.reference_work is not None:
            end = num_done - len(ends_ns) + (self.trace_steps or len(ends_ns))
            counted["reference_s"] = {str(k): seconds for k, seconds in self.reference_work.seconds.items() if k < end}
        trace = self._executor.trace(meta={**self.schedule.meta, **counted})
        return RunResult(
            losses=(*before, *(sum(self._losses[s]) for s in sorted(self._losses) if s < num_done)),
            trace=trace,
            moved_bytes=dict(self._bodies.moved_bytes),
            peak_bytes=trace.peak_bytes,
            step_ends_s=tuple(end_ns / 1e9 for end_ns in ends_ns),
            notes=self._store.notes if self._store else (),
        )

    def replay_seconds(self) -> dict[str, dict[int, list[float]]]:
        """By unit and saved tensor, what making it again took each time; of what was replayed with `time_replays`."""
        recipes = self._hooks.recipes if self._is_set_up else {}
        return {self.units[index].name: r.seconds() for (index, _), (_, r) in recipes.items() if r}

    def restore_model(self) -> None:
        """Makes the model whole: every parameter is in ordinary memory again. For export and evaluation."""
        check_begun(self._is_set_up)
        self.placement.restore_model()

    @property
    def is_placed(self) -> bool:
        """Whether the model's parameters are in the schedule's tiers now."""
        return self._is_set_up and not self._is_closed

    def close(self) -> None:
        """Gives back memory, files and the model's own forward. A model that was not restored has no parameters."""
        self._is_closed = True
        if self._durability is not None:
            self._durability.shut_down()
        self._set_back.close()

    # ---- setting up ----

    def _of_rank(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        batches = batches if self.seed is None else with_own_draws(batches)
        return itertools.islice(batches, self._turn, None, self._num_turns) if self._num_turns > 1 else batches

    def _set_up(self, first: Batch) -> None:
        self._set_back.enter_context(without_cache(self.model))
        self._set_back.enter_context(loss_in_chunks(self.model, self._step.training.loss_chunks))
        self._device = open_device(self.device) if isinstance(self.device, str) else self.device
        self.units = split_model(self.model, first)
        if self.reference_frac is not None:
            self.reference_work = ReferenceWork(
                self._device, self._dtype, self.reference_frac, lambda: self._bodies.working <= {COMPUTE}
            )
        check_groups(self.optimizer, [name for unit in self.units for name, _ in unit.all_parameters])
        check_units(self.units, self._step, self._dtype, first)
        capacity = {t.name: t.capacity_bytes for t in self.schedule.tiers}
        is_beside = self.checkpoint_every is not None
        self._store = open_store(
            self.schedule, self.nvme_dir, self.nvme_weights, durability=self._durability, commits_beside_steps=is_beside
        )
        if self._store is not None:
            self._set_back.callback(self._store.close, remove=self._durability is None)
        self._hooks, self._modules = ModelHooks(self.model, self.units, self.time_replays), [*self.model.modules()]
        self._set_back.callback(self._hooks.remove)
        self._set_back.callback(self._device.take_buffers(self.model))
        self._fixed = FixedTensors(
            self.model, self.units, self.schedule, are_committed=self.out_dir is not None, is_alone=self.ranks is None
        )
        self._hooks.before_rerun = self._fixed.check_buffers
        places = Places(
            device_pool=self._device.pool(capacity.get(DEVICE, 0)),
            host_pool=self._device.host_pool(capacity.get(HOST, 0)),
            store=self._store,
        )
        computing = Computing(
            units=self.units,
            schedule=self.schedule,
            begin_micro_batch=self._begin_micro_batch,
            before_computing=self.reference_work.on_op if self.reference_work is not None else lambda step: None,
            go_on=lambda stream: self._executor.go_on(stream),
            on_loss=lambda step, m, loss: self._losses.setdefault(step, []).append(loss),
            num_threads=self._threads,
        )
        self._bodies = Bodies(
            units=self.units,
            device=self._device,
            places=places,
            optimizer=self.optimizer,
            learning_rate=self.learning_rate or (lambda step: self.optimizer.lr),
            computing=computing,
            # without a seed, fetching and forward draw from the same generators, in turns
            while_computing=lambda: None if self.seed is None else self._batches.fetch(),
            num_threads=self._threads,
            parameters=list(self.model.parameters()),
            schedule=self.schedule,
            ranks=self.ranks,
            stages=self._stages,
            sends=self._sends,
        )
        if self.ranks is not None:
            self.ranks.connect(self._sends.values())
        self._set_back.callback(self._bodies.close)
        self._executor = Executor(
            self.schedule,
            self._bodies,
            on_grant=places.on_grant,
            release=places.release,
            on_free=places.on_free,
            device=self._device,
            is_quick=self._bodies.is_quick,
            on_thread_start=lambda stream: begin_stream(
                stream, self._threads, is_beside_gpu=self._device.is_asynchronous
            ),
            on_step_end=self._on_step_end,
            await_others=self._bodies.await_others if self._sends else None,
            on_failure=self.ranks.fail if self.ranks is not None else lambda error: None,
            trace_steps=self.trace_steps,
            first_step=self._resumed.num_steps if self._resumed else 0,
        )
        self._set_back.callback(self._executor.close)
        self.placement = Placement(self._executor, self._bodies, self.model, self._step.late_updates)
        self._is_set_up = True
        if self._origin is not None and self._resumed is not None:  # its bytes go into their tiers, or are found there
            if rng := self._origin.place(self.placement):
                self._device.set_rng_state(rng)
            self.placement.begin(self.weights, is_resumed=True)
            self._origin.check_frozen(self._bodies.frozen_sums)
        else:
            self.placement.begin(self.weights, is_resumed=False)
        self._device.settle()

    # ---- during the run ----

    def _on_step_end(self, step: int, time_ns: int) -> None:
        self._fixed.check()
        self._bodies.computing.without.end_step(step, self.units, self.ranks if self._num_turns > 1 else None)
        if self.ranks is not None:  # in the order of micro-batches, which is that of plain training
            count = self._step.training.gradient_accumulation_steps
            rows = self.ranks.share(self._losses.get(step, [0.0] * count), "steps")
            rows = [[sum(row) for row in zip(*rows, strict=True)]] if self._stages else rows  # one of them has the loss
            self._losses[step] = [loss for row in zip(*rows, strict=True) for loss in row]
        without_draws(self.on_step, step, sum(self._losses[step]))
        if self._durability is not None:
            self._durability.end_commit(waits=False)

    def _begin_micro_batch(self, step: int, m: int, turn: Turn) -> MicroBatchRun:
        if (batch := self._had.get((step, m)) or self._batches.next()) is None:
            raise TrainingError(f"batches ended before micro-batch {m} of step {step}; give more, or run fewer steps")
        if turn.is_visit or turn.is_one_of:  # other packs or stages of the device take it in this step, too
            self._had = {key: one for key, one in self._had.items() if key[0] == step} | {(step, m): batch}
        specs = self._step.units
        if turn.is_visit:
            specs = tuple(spec.all("keep" if turn.goes_back else "recompute") for spec in specs)
        moved = tree_map_only(torch.Tensor, self._device.to_device, dict(batch))

        def forward() -> torch.Tensor:
            loss = loss_of(self.model, moved, self.loss)
            if self.loss is not None and not self._is_loss_checked:
                check_loss(loss, absent_at_loss(self.units))
                self._is_loss_checked = True
            return loss / self._num_micro_batches if self.divides_loss and self._num_micro_batches > 1 else loss

        return MicroBatchRun(
            hooks=self._hooks,
            units=self.units,
            specs=specs,
            forward=forward,
            external=outside_storages(moved, self._modules),
            device=self._device,
            own=turn.units,
            is_first_of_two=turn.is_visit and not turn.goes_back,
            flow=self._bodies.computing.flow,
            batch=moved,
            seed=None if self.seed is None else micro_batch_seed(self.seed, step, m * self._num_turns + self._turn),
        )
