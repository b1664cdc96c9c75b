"""Several ranks train the numbers of one process that adds up in the same order, bit for bit."""

from __future__ import annotations

import copy
import os
import random
import re
import select
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.random_plans import random_plan, with_updates_here
from tests.runtime.models import make_batches, make_model, observed_workload
from tests.runtime.ranks.pair import run_ranks
from tests.runtime.test_coded_activations import RunAgain, with_blocks
from tests.runtime.test_trainer import CPU, machine
from tests.toys import side_by_side, uniform_plan
from tierplan.hwmodels.machine import Machine, Rate, Stream
from tierplan.hwmodels.names import HOST_ADAM
from tierplan.planner.lowering import lower
from tierplan.planner.plan import PackPlan, Plan, Sharing, UnitPlan, UnitwisePlan
from tierplan.planner.planning import plan
from tierplan.planner.policies import decide
from tierplan.runtime.autograd.units import split_model
from tierplan.runtime.execution.placement import TrainingError
from tierplan.runtime.optim.adam import OptimizerSettings
from tierplan.runtime.ranks import group
from tierplan.runtime.ranks.collectives import parameter_parts, shards_of
from tierplan.runtime.ranks.group import RankDeath, Ranks
from tierplan.runtime.reference import same_weights, train_plainly
from tierplan.runtime.trainer import Trainer
from tierplan.sim.analysis.steady import steady_state
from tierplan.sim.columns import unroll
from tierplan.sim.ranks import rank_schedule
from tierplan.sim.schedule import Schedule
from tierplan.sim.trace import Trace
from tierplan.sim.workloads.workload import Workload

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS = 3
ADAM = OptimizerSettings(lr=1e-2)


@dataclass(frozen=True)
class Case:
    policy: str
    options: dict[str, object] = field(default_factory=dict)
    family: str = "gpt2"
    dtype: str = "fp32"
    accumulation: int = 1
    clip: float | None = None
    acts: str = ""
    """The format in which activations leave, of a plan that makes blocks again from inputs which left."""

    @classmethod
    def random(cls, seed: int) -> Case:
        """A plan with every decision drawn at random, divided among the ranks as the planner divides its own."""
        rng = random.Random(seed)
        family, dtype = rng.choice([("gpt2", "fp32"), ("llama", "bf16")])
        return cls("random", {"seed": seed}, family, dtype, rng.choice([1, 2]), rng.choice([None, 0.5]))

    def plan(self, workload: Workload, num: int) -> Plan:
        if self.policy == "planned":  # in an order of which no micro-batch is cut
            asked: dict[str, Any] = {"batches": "each", "orders": ("horizontal",), "time_limit_s": 0.5}
            found = plan(workload, several(num, **self.options), **asked).plan  # type: ignore[arg-type]
            assert isinstance(found, UnitwisePlan)
            return found
        if self.policy == "parts":
            unit = UnitPlan(params="host", states="host", update="device", state_shards=3)
            return replace(uniform_plan(workload, unit), devices=num, sharing=Sharing(reduces="each"))
        if self.policy == "stages":
            found = decide("megatron-pp", workload, several(num))
            assert isinstance(found, PackPlan)
            given: dict[str, Any] = dict(self.options)
            runs = tuple(pairwise((0, *ends))) if (ends := given.pop("ends", ())) else found.packs.backward
            packs = replace(found.packs, sums_tied=False, forward=runs[:-1], backward=runs, **given)
            return replace(found, packs=packs)
        if self.policy == "packs":
            packed: Any = decide("harmony-pp", workload, several(num), {**OWN_MEMORY, "pack": 1, "pack_forward": 2})
            return replace(packed, packs=replace(packed.packs, **self.options))
        if self.policy != "random":
            return decide(self.policy, workload, several(num), self.options)
        rng = random.Random(str(self))
        drawn = with_updates_here(random_plan(workload, rng), rng)
        sharing = Sharing(keeps=rng.choice(("nothing", "ends", "all")), reduces=rng.choice(("last", "each")))
        sharing = replace(sharing, ahead=rng.random() < 0.5)
        return replace(drawn, devices=num, sharing=sharing)

    def __str__(self) -> str:
        words = [self.policy, *self.options.values(), self.family, self.dtype, self.accumulation, self.clip or ""]
        return "-".join(map(str, [*words, self.acts] if self.acts else words))

    @property
    def has_known_peak(self) -> bool:
        """Nothing but packs leaves the device, so its peak depends little on when host and drives are ready.

        Where parameters stay, nothing is awaited before the next block's gradients are made: they are there beside
        those that are being summed, where sums take longer than on the machine of the prediction. Where packs visit a
        pipeline, what one rank sends waits on the other for as long as that is busy with something else.
        """
        names = ("ddp", "zero-1", "zero-2", "zero-3", "fsdp", "megatron-pp", "stages", "harmony-dp")
        leaves = {"host", "off"} & {*self.options.values()} or "host_states" in self.options
        return self.policy in names and not leaves

    @property
    def is_pipeline(self) -> bool:
        return self.policy in ("megatron-pp", "stages", "harmony-pp", "packs")

    @property
    def sums_tied(self) -> bool:
        """Megatron adds up what a tied head makes before the embedding's: not in the order of plain training, but for
        one micro-batch."""
        return self.policy == "megatron-pp" and self.family == "gpt2" and self.accumulation > 1

    @property
    def divides(self) -> bool:
        return self.policy != "ddp" and not self.is_pipeline

    def num_batches(self, num: int) -> int:
        """Micro-batches of a step on so many ranks."""
        return self.accumulation * (1 if self.is_pipeline else num)


def several(num: int, device_bytes: int = 1 << 30) -> Machine:
    rates = dict.fromkeys((f"ring{num}_bytes", "ring2_bytes", "hops"), Rate.constant(1e9))
    ring = [Stream(name=f"gpu{k}.collective", rates=rates) for k in range(num)]
    return side_by_side(machine(device_bytes), num, ring)


def prepared(case: Case, num: int) -> tuple[nn.Module, Schedule]:
    count = case.num_batches(num) if case.policy.startswith("harmony") else case.accumulation  # of all together
    training = replace(CPU, dtype=case.dtype, gradient_accumulation_steps=count, max_grad_norm=case.clip)  # type: ignore[arg-type]
    training = replace(training, activation_format=case.acts)
    num_blocks = 4 if case.is_pipeline else 2
    model = make_model(case.family, num_blocks=num_blocks, dropout=0.1, dtype=case.dtype)
    workload = observed_workload(model, make_batches(1)[0], training)
    return model, lower(case.plan(workload, num), workload, several(num))


def order_of_sums(model: nn.Module, schedule: Schedule, num: int) -> Callable[[nn.Parameter], list[list[int]]]:
    """Which micro-batches are added up by themselves: those of a rank where gradients are reduced once, those of a turn
    on their way to host memory; all one after the other where each is added as it comes, which is plain training."""
    found: dict[int, list[list[int]]] = {}
    accumulation = schedule.step.training.gradient_accumulation_steps  # type: ignore[union-attr]
    for unit in split_model(model, make_batches(1)[0]):
        streams = ("gpu0.collective", "gpu0.compute", HOST_ADAM)
        own = [op.kind for op in schedule.ops if op.unit == unit.name and op.stream in streams]
        if any(op.kind == "send" for op in schedule.ops):
            groups = [list(range(accumulation))]
        elif own.count("reduce") + own.count("all_reduce") < accumulation:
            groups = [list(range(rank, num * accumulation, num)) for rank in range(num)]
        elif "accumulate" in own:
            groups = [list(range(num * m, num * (m + 1))) for m in range(accumulation)]
        else:
            groups = [list(range(num * accumulation))]
        found |= {id(p): groups for _, p in unit.parameters}
    return lambda p: found[id(p)]


def cut_of(model: nn.Module, num: int) -> Callable[[nn.Parameter, torch.Tensor], Sequence[torch.Tensor]]:
    """What each rank has of a parameter."""
    parts: dict[int, list[int]] = {}
    for unit in split_model(model, make_batches(1)[0]):
        begin = 0
        for k, (_, p) in enumerate(unit.parameters):
            parts[id(p)] = [len(parameter_parts(unit, own)[k]) for own in shards_of(unit, num)]
            begin += p.numel()
    return lambda p, gradient: [t for t in gradient.reshape(-1).split(parts[id(p)]) if t.numel()]


def plainly(case: Case, schedule: Schedule, model: nn.Module, batches: Any, steps: int, num: int) -> list[float]:
    """The losses of one process that adds up as the ranks do; the model is trained."""
    settings: dict[str, Any] = {"sums": order_of_sums(model, schedule, num)}
    if case.divides and case.clip is not None:
        settings["cut"] = cut_of(model, num)
    with with_blocks(model, RunAgain) if case.acts else nullcontext():
        return train_plainly(
            model, batches, steps=steps, optimizer=ADAM, gradient_accumulation_steps=case.num_batches(num),
            max_grad_norm=case.clip, delayed=schedule.step.semantics == "delayed-1", **settings,  # type: ignore[union-attr]
        )  # fmt: skip


def peaks_by_the_rules(schedule: Schedule, trace: Trace) -> dict[str, int]:
    """By tier, what it holds at most if ops are granted and end when they did: a buffer, and those that take its bytes
    over, from the grant of its writer until all that use one of them have ended."""
    spans, repeated = trace.by_key(), unroll(schedule, STEPS)
    reuses, first = {b.name: b.reuses for b in repeated.buffers}, {}
    for name in reuses:
        root = name
        while earlier := reuses[root]:
            root = earlier
        first[name] = root
    begins: dict[str, int] = {}
    ends = {first[b.name]: trace.duration_ns + 1 for b in repeated.buffers if b.becomes}
    for op in repeated.ops:
        span = spans[op.key]
        for name in (*op.reads, *op.writes):
            ends[first[name]] = max(ends.get(first[name], 0), span.end_ns)
        for name in op.writes:
            begins.setdefault(name, span.start_ns if span.granted_ns < 0 else span.granted_ns)
    events = []
    for b in repeated.buffers:
        if first[b.name] == b.name:
            begin = 0 if b.initial else begins[b.name]
            events += [(begin, b.size_bytes, b.tier), (max(begin, ends.get(b.name, begin)), -b.size_bytes, b.tier)]
    held, peaks = Counter[str](), Counter[str]()
    for _, size, tier in sorted(events):  # at one moment what leaves comes first
        held[tier] += size
        peaks[tier] = max(peaks[tier], held[tier])
    return dict(+peaks)


def train_ranks(ranks: Ranks, cases: Sequence[Case], folder: Path) -> list[str]:
    """What is wrong, by case."""
    found = []
    for case in cases:
        model, schedule = prepared(case, ranks.size)
        plain, count = copy.deepcopy(model), case.num_batches(ranks.size)
        batches = make_batches(STEPS * count)
        with Trainer(schedule, model, optimizer=ADAM, ranks=ranks, nvme_dir=folder / f"nvme-{ranks.rank}") as trainer:
            trainer.run(batches, STEPS)
            trainer.restore_model()
            result = trainer.result()
        losses = plainly(case, schedule, plain, batches, STEPS, ranks.size)
        near = {"rel": 1e-6 if case.dtype == "fp32" else 1e-2} if case.sums_tied else {"rel": 0.0, "abs": 0.0}
        if list(result.losses) != pytest.approx(losses, **near):
            found.append(f"{case}: losses {result.losses} are {losses} plainly")
        if same_weights(model, plain) == case.sums_tied:
            found.append(f"{case}: weights differ, or do not where others are added up first")
        waits = case.is_pipeline and case.accumulation < ranks.size  # for others, and begins the next step meanwhile
        if case.has_known_peak and ranks.size == 2 and not waits:  # where each has a core
            predicted = steady_state(schedule, several(ranks.size)).peak_bytes[f"gpu{ranks.rank}"]
            if abs(predicted / result.peak_bytes["gpu0"] - 1) > 0.03:
                found.append(f"{case}: the device held {result.peak_bytes['gpu0']} bytes, not {predicted} as predicted")
        local = rank_schedule(schedule, ranks.rank)
        for tier, held in peaks_by_the_rules(local, result.trace).items():
            if abs(held - result.peak_bytes[tier]) > 0.03 * held:
                found.append(f"{case}: {tier} held {result.peak_bytes[tier]} bytes, not {held}")
        work, streams = ranks.size, [s for s in local.streams if s.endswith(".collective")]
        work = 2 if case.is_pipeline else work
        size = sum(op.work.get(f"ring{work}_bytes", 0) for op in local.ops)
        moved, planned = (
            sum(row[0] for row in ranks.share([own], "steps"))
            for own in (sum(result.moved_bytes.get(stream, 0) for stream in streams), size)
        )
        if moved != round(STEPS * planned):
            found.append(f"{case}: collectives moved {moved} bytes, not {STEPS * planned}")
        for stream, planned in local.bytes_moved().items():
            if result.moved_bytes.get(stream, 0) != STEPS * planned:
                found.append(f"{case}: {stream} moved {result.moved_bytes.get(stream)} bytes, not {STEPS * planned}")
    return found


HOST: dict[str, object] = {"optimizer": "host"}
STATES_IN_HOST = Case("zero-2", HOST, dtype="bf16", clip=0.5)
ALL_HOST: dict[str, object] = {"optimizer": "host", "params": "host"}
OWN_MEMORY: dict[str, object] = {"host_memory": "own"}
BROUGHT = {"host_states": (0, 1, 4, 5), "updates_here": (1, 4), "state_shards": 3, "ends": (2, 3, 4, 6)}
PAIR = [
    Case("harmony-dp", OWN_MEMORY, dtype="bf16", accumulation=2, clip=0.5),
    Case("harmony-pp", {**OWN_MEMORY, "pack": 1, "pack_forward": 2}, family="llama", dtype="bf16", accumulation=3),
    Case("harmony-pp", {**OWN_MEMORY, "pack": 2}, accumulation=2, clip=0.5),
    Case("ddp", family="llama", dtype="bf16", accumulation=2, clip=0.5),
    Case("zero-1", accumulation=2, clip=0.5),
    Case("zero-1", HOST, dtype="bf16", accumulation=2, clip=0.5),
    Case("zero-2", HOST, accumulation=2, clip=0.5),
    Case("zero-3", family="llama", accumulation=2),
    Case("zero-infinity", dtype="bf16", accumulation=2, acts="fp8"),
    Case("megatron-pp", accumulation=3, clip=0.5),
    Case("stages", {"kept": (1, 4), "ends": (2, 3, 4, 6)}, accumulation=4, clip=0.5),
    Case("stages", {"kept": (2, 4), "ends": (1, 2, 4, 5, 6)}, dtype="bf16", accumulation=4),
    Case("stages", {"kept": (1,), "host_states": (0, 2, 4, 5)}, accumulation=3, clip=0.5),
    Case("stages", BROUGHT, family="llama", dtype="bf16", accumulation=4),
    Case("stages", {"kept": (1,), "host_states": (0, 2, 4), "updates_here": (2,), "state_shards": 2}, clip=0.5),
    Case("packs", {"updates_here": (1, 3, 4), "state_shards": 3}, dtype="bf16", accumulation=3),
    Case("packs", {"updates_here": (0, 2, 5), "state_shards": 2}, "llama", "bf16", accumulation=2, clip=0.5),
    Case.random(0),
    Case("planned", {"device_bytes": 240_000}, family="llama", dtype="bf16", accumulation=2, clip=0.5),
]
EVERY = [
    Case(policy, options, family, dtype, accumulation, clip)
    for policy, options in [("ddp", {}), ("zero-1", {}), ("zero-1", HOST), ("zero-2", {}), ("zero-2", HOST),
                            ("zero-3", {}), ("zero-3", HOST), ("zero-3", ALL_HOST), ("fsdp", {}),
                            ("fsdp", {"reduces": "last"}), ("fsdp", {"reshard": "off"}), ("fsdp-offload", {}),
                            ("zero-infinity", {})]
    for family, dtype in [("gpt2", "fp32"), ("llama", "bf16")]
    for accumulation, clip in [(1, None), (2, 0.5)]
] + [Case.random(seed) for seed in range(40)] + [
    Case("harmony-dp", {**OWN_MEMORY, "pack": pack}, family, dtype, accumulation, clip)
    for pack in (1, 2) for family, dtype in [("gpt2", "fp32"), ("gpt2", "bf16"), ("llama", "bf16")]
    for accumulation, clip in [(1, None), (1, 0.5), (3, None), (3, 0.5)]
] + [
    Case("harmony-pp", {**OWN_MEMORY, "pack": pack, "pack_forward": forward}, family, dtype, accumulation, clip)
    for pack, forward in [(1, 1), (2, 1), (1, 2), (2, 3)]
    for family, dtype in [("gpt2", "fp32"), ("gpt2", "bf16"), ("llama", "bf16")]
    for accumulation, clip in [(1, None), (1, 0.5), (3, None), (3, 0.5)]
] + [
    Case("packs", {"updates_here": here, "state_shards": 2}, "llama", dtype, accumulation, clip)
    for here in [(2,), tuple(range(6))] for dtype in ("fp32", "bf16") for accumulation, clip in [(4, None), (3, 0.5)]
] + [
    Case(policy, options, family, dtype, accumulation, clip)
    for policy, options in [("megatron-pp", {}), ("stages", {"kept": (1, 2, 4)})]
    for family, dtype in [("gpt2", "fp32"), ("gpt2", "bf16"), ("llama", "bf16")]
    for accumulation, clip in [(1, None), (4, None), (5, 0.5)]
] + [
    Case("stages", {"kept": (1, 3)}, accumulation=3, clip=0.5),
    Case("stages", {"kept": (2, 3, 4)}, family="llama", dtype="bf16", accumulation=3),
    Case("stages", {"kept": (3,), "ends": (1, 2, 4, 6)}, family="llama", dtype="bf16", accumulation=4),
    Case("stages", {"kept": (1, 3), "ends": (2, 5, 6)}, accumulation=3, clip=0.5),
    Case("stages", {"host_states": tuple(range(6)), "ends": (1, 2, 4, 5, 6)}, accumulation=4, clip=0.5),
    Case("stages", {"host_states": tuple(range(6)), "updates_here": tuple(range(6))}, dtype="bf16", accumulation=4),
    Case("planned", {"device_bytes": 400_000}, accumulation=2),
]  # fmt: skip


def train_and_resume(
    ranks: Ranks, folder: Path, dies: tuple[int, int] | None, case: Case = STATES_IN_HOST
) -> list[str]:
    """Trains with a commit after every step. Rank `dies[0]` dies soon after that step, if it is to; else what is
    wrong."""
    model, schedule = prepared(case, ranks.size)
    plain, batches = copy.deepcopy(model), make_batches(6 * case.num_batches(ranks.size))

    def on_step(step: int, loss: float) -> None:
        if (ranks.rank, step) == dies:
            time.sleep(random.uniform(0, 0.05))
            os.kill(os.getpid(), signal.SIGKILL)

    places: dict[str, Any] = {
        "out_dir": folder,
        "checkpoint_every": 1,
        "resume": True,
        "nvme_dir": folder / f"nvme-{ranks.rank}",
    }
    with Trainer(schedule, model, optimizer=ADAM, ranks=ranks, on_step=on_step, **places) as trainer:
        begun = trainer.num_steps_done
        trainer.run(batches, 6 - begun)
        trainer.restore_model()
        losses = trainer.result().losses
    wanted = plainly(case, schedule, plain, batches, 6, ranks.size)
    every = {begun for (begun,) in ranks.share([begun], "steps")}
    wrong = [f"ranks went on after {every} steps"] if len(every) > 1 or not 2 <= begun <= 5 else []
    return wrong + ([] if list(losses) == wanted and same_weights(model, plain) else ["losses or weights differ"])


def train_on(ranks: Ranks | None, folder: Path, case: Case, wanted: int) -> tuple[list[float], list[torch.Tensor]]:
    """Goes on from the last commit, whoever made it, until so many steps are done: the losses and the weights."""
    num = ranks.size if ranks is not None else 1
    policy = case.policy if num > 1 or case.is_pipeline else "in-memory"
    accumulation = case.accumulation // (case.num_batches(num) // case.accumulation)
    model, schedule = prepared(replace(case, policy=policy, accumulation=accumulation), num)
    settings: dict[str, Any] = {"out_dir": folder / str(case), "resume": True, "ranks": ranks, "num_threads": 1}
    with Trainer(schedule, model, optimizer=ADAM, **settings) as trainer:
        trainer.run(make_batches(wanted * case.accumulation), wanted - trainer.num_steps_done)
        trainer.restore_model()
        return list(trainer.result().losses), [p.detach() for p in model.parameters()]


def train_every(ranks: Ranks, folder: Path, cases: Sequence[Case], wanted: int) -> None:
    for case in cases:
        train_on(ranks, folder, case, wanted)


MOVED = [
    Case("zero-3", family="llama", dtype="bf16", accumulation=4),
    Case("stages", {"host_states": (0, 2, 3, 5), "updates_here": (0, 3), "state_shards": 2}, accumulation=4),
    Case("parts", accumulation=4),
]
MOVED_TOO = [*MOVED, Case("zero-2", accumulation=4), Case("harmony-pp", {**OWN_MEMORY, "pack": 1}, accumulation=4)]
"""Trained by 1, 2 and 4 ranks with 4, 2 and 1 micro-batches, or by as many stages: plain training on all of them."""


def train_plainly_on_all(case: Case, steps: int) -> tuple[list[float], list[torch.Tensor]]:
    model, _ = prepared(case, 1)
    losses = train_plainly(
        model, make_batches(steps * case.accumulation), steps=steps, optimizer=ADAM,
        gradient_accumulation_steps=case.accumulation,
    )  # fmt: skip
    return losses, [p.detach() for p in model.parameters()]


def train_and_fail(ranks: Ranks) -> None:
    """The batches of rank 1 end too early."""
    model, schedule = prepared(Case("ddp"), ranks.size)
    with Trainer(schedule, model, optimizer=ADAM, ranks=ranks) as trainer:
        trainer.run(make_batches(4 - ranks.rank), 2)


def fail_alone(ranks: Ranks) -> None:
    """Rank 0 ends, and the store with it; rank 1 fails of its own before it has seen that."""
    group.WATCH_S = 1e3
    time.sleep(0.3)  # the watcher waits as long from now on
    if ranks.rank == 0:
        os._exit(0)
    for fd in ranks._watched:
        select.select([fd], [], [])
    raise ValueError("the reason of rank 1")


def resume_and_train_all(ranks: Ranks, folder: Path) -> list[str]:
    train_every(ranks, folder, MOVED, 4)
    return [*train_and_resume(ranks, folder, None), *train_ranks(ranks, PAIR, folder)]


def test_a_killed_rank_is_named_and_the_run_goes_on_from_the_last_commit_of_all(tmp_path: Path) -> None:
    """And ranks train the numbers of one process, move the schedule's bytes, go on where another number has stopped,
    and leave in order."""
    for case in MOVED:
        train_on(None, tmp_path, case, 2)
    for rank, step in [(1, 1), (0, 3)]:
        found = run_ranks(train_and_resume, 2, tmp_path, (rank, step))
        assert found[rank] == -signal.SIGKILL
        assert isinstance(found[1 - rank], RankDeath)
        assert re.match(rf"rank {rank} of 2 \(process \d+\) has died", str(found[1 - rank]))
    for wrong in run_ranks(resume_and_train_all, 2, tmp_path):
        assert wrong == []
    check_moved(tmp_path, MOVED, 6)
    assert [len(list((tmp_path / str(case)).rglob("resident-*.bin"))) for case in MOVED] == [1] * len(MOVED)


@pytest.mark.nightly
def test_ranks_train_the_numbers_of_pytorchs_data_parallelism(tmp_path: Path) -> None:
    from tests.runtime.ranks.torch_witness import unlike_torch  # which is of these cases

    for wrong in run_ranks(unlike_torch, 2, tmp_path):
        assert wrong == []


def check_moved(folder: Path, cases: Sequence[Case], steps: int) -> None:
    """One rank goes on with what others have trained, and has plain training in the end."""
    for case in cases:
        losses, weights = train_on(None, folder, case, steps)
        wanted, plain = train_plainly_on_all(case, steps)
        assert losses == wanted
        assert all(map(torch.equal, weights, plain))


@pytest.mark.nightly
def test_a_run_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    for num, steps in [(4, 1), (2, 2), (4, 3)]:
        assert run_ranks(train_every, num, tmp_path, MOVED_TOO, steps) == [None] * num
    check_moved(tmp_path, MOVED_TOO, 4)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "case",
    [
        *map(Case.random, [0, 5, 32]),
        Case("stages", {"kept": ()}, dtype="bf16", accumulation=3, clip=0.5),
        Case("harmony-dp", OWN_MEMORY, family="llama", dtype="bf16", accumulation=2),
        Case("harmony-pp", {**OWN_MEMORY, "pack": 1}, dtype="bf16", accumulation=3),
    ],
    ids=str,
)
def test_updates_that_are_late_and_pipelines_are_resumed(case: Case, tmp_path: Path) -> None:
    run_ranks(train_and_resume, 2, tmp_path, (1, 3), case)
    for found in run_ranks(train_and_resume, 2, tmp_path, None, case):
        assert found == []


def test_the_reason_of_a_rank_outlives_the_store() -> None:
    found = run_ranks(fail_alone, 2)
    assert found[0] == 0
    assert repr(found[1]) == repr(ValueError("the reason of rank 1"))


@pytest.mark.nightly
def test_a_rank_that_fails_is_named() -> None:
    first, second = run_ranks(train_and_fail, 2)
    assert str(first).startswith("rank 1 of 2 has failed: TrainingError: batches ended before micro-batch 0 of step 1;")
    assert isinstance(second, TrainingError)


@pytest.mark.nightly
@pytest.mark.parametrize(("num", "part"), [(num, part) for num in (2, 4) for part in range(2 * num)])
def test_every_policy(num: int, part: int, tmp_path: Path) -> None:
    cases = [case for case in EVERY[part :: 2 * num] if num == 2 or "ends" not in case.options]
    for found in run_ranks(train_ranks, num, cases, tmp_path):
        assert found == []
