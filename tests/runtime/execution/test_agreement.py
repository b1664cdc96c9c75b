"""A schedule that somebody wrote by hand, and whose ops do not train what its step says, is refused by name before
anything is allocated. What lowering makes passes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.toys import toy_machine, toy_workload, uniform_plan
from tierplan.planner.lowering import lower
from tierplan.planner.plan import GradientsByLink, UnitPlan
from tierplan.runtime.execution.executable import executable_step
from tierplan.runtime.execution.placement import TrainingError
from tierplan.runtime.measure.units import profiling_schedule
from tierplan.sim.schedule import Schedule
from tierplan.sim.schedule_file import load_schedule, save_schedule

Record = dict[str, Any]
Change = Callable[[Record], object]

CHOICE = UnitPlan(
    params="nvme", grads="host", states="nvme", acts=("keep", "recompute", "host", "host"), input="host", state_shards=2
)


def made(choice: UnitPlan = CHOICE, semantics: str = "exact-clip", **settings: Any) -> Schedule:
    """Two micro-batches, with a tied head."""
    limit = settings.pop("max_grad_norm", 0.05 if semantics == "exact-clip" else None)
    training = {"gradient_accumulation_steps": 2, "max_grad_norm": limit, **settings.pop("training", {})}
    workload = toy_workload(2, **training)
    return lower(uniform_plan(workload, choice, semantics=semantics, **settings), workload, toy_machine())


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By name, files of schedules that are as lowering makes them."""
    folder, found = tmp_path_factory.mktemp("schedules"), {}
    late = replace(CHOICE, late_update=True)
    for name, schedule in {
        "clipped": made(),
        "plain": made(semantics="in-backward"),
        "late": made(late, "in-backward"),
        "late and clipped": made(late),
        "stateless": made(semantics="in-backward", training={"optimizer": "sgd", "dtype": "fp32"}),
        "coded": made(semantics="in-backward", training={"activation_format": "fp8"}),
        "by link": made(semantics="in-backward", by_link=GradientsByLink()),
        "on the device": made(UnitPlan(), "in-backward"),
    }.items():
        save_schedule(schedule, folder / "plan.json")
        found[name] = (folder / "plan.json").read_text()
    return found


def op(record: Record, key: str) -> Record:
    return next(o for o in record["ops"] if o["key"] == key)


def less(key: str, start: str) -> Change:
    """The op does not read what begins so."""

    def change(record: Record) -> None:
        changed = op(record, key)
        before = changed["reads"]
        changed["reads"] = [name for name in before if not name.startswith(start)]
        assert changed["reads"] != before

    return change


def without(start: str) -> Change:
    """Nobody writes or reads what begins so."""

    def change(record: Record) -> None:
        before = record["buffers"]
        record["buffers"] = [b for b in before if not b["name"].startswith(start)]
        assert record["buffers"] != before
        names = {b["name"] for b in record["buffers"]}
        for each in record["ops"]:
            for words in ("reads", "writes"):
                each[words] = [name for name in each[words] if name in names]
        for b in record["buffers"]:
            b["reuses"] = b["reuses"] if b["reuses"] in names else None

    return change


def no_op(key: str) -> Change:
    def change(record: Record) -> None:
        gone = op(record, key)
        record["ops"].remove(gone)
        for each in record["ops"]:
            each["after"] = [other for other in each["after"] if other != key]

    return change


def step(**settings: object) -> Change:
    return lambda record: record["step"].update(settings)


def training(**settings: object) -> Change:
    return lambda record: record["step"]["training"].update(settings)


def more(key: str, start: str) -> Change:
    """The op reads the first buffer that begins so, too."""

    def change(record: Record) -> None:
        name = next(b["name"] for b in record["buffers"] if b["name"].startswith(start))
        op(record, key)["reads"].append(name)

    return change


def instead(key: str, old: str, new: str) -> Change:
    """The op reads another buffer."""

    def change(record: Record) -> None:
        changed = op(record, key)
        before = changed["reads"]
        changed["reads"] = [new if name == old else name for name in before]
        assert changed["reads"] != before

    return change


def becomes(successors: dict[str, str | None]) -> Change:
    """Other buffers are these in the next step."""

    def change(record: Record) -> None:
        for b in record["buffers"]:
            b["becomes"] = successors.get(b["name"], b["becomes"])

    return change


def over(name: str, other: str | None) -> Change:
    """The buffer takes over the bytes of that one, or of none."""
    return lambda record: next(b for b in record["buffers"] if b["name"] == name).update(reuses=other)


def reversed_reads(key: str) -> Change:
    return lambda record: op(record, key)["reads"].reverse()


EDITS: dict[str, tuple[str, Change, str]] = {
    "an update without gradients": (
        "plain", less("update/L0/0of2", "grads"), "op 'update/L0/0of2' does not read 'grads/L0', which an op of kind"
    ),
    "a clipped update without gradients": ("clipped", less("update/head", "grads"), "does not read 'grads/head'"),
    "an update that does not clip": ("clipped", less("update/embed", "clip"), "does not read 'clip'"),
    "an update that clips with what is of the step before": (
        "late and clipped", instead("update/head", "clip@host#1", "clip@host#0"),
        "op 'update/head' reads 'clip@host#0' of the step before; its gradients are of this step",
    ),
    "late updates that clip with what was made once": (
        "late and clipped", becomes({"clip@host#0": "clip@host#0", "clip@host#1": None}),
        "buffer 'clip@host#0' outlives the step, but is of the step before; an op of kind 'clip' must make it",
    ),
    "a norm that is not clipped with": ("clipped", less("clip", "norm/embed"), "does not read norm/embed; clipping"),
    "a norm of nothing": ("clipped", less("norm/head", "grads"), "op 'norm/head' reads nothing and writes"),
    "a norm that nobody writes": ("clipped", without("norm/head"), "op 'norm/head' reads 'grads/head' and writes noth"),
    "a coefficient that nobody writes": ("clipped", without("clip"), "and writes nothing; an op of kind 'clip'"),
    "clipping where a GPU runs ahead": (
        "clipped", lambda r: op(r, "clip").update(stream="gpu0.compute"), "ops of kind clip run on host.adam"
    ),
    "clipping in-backward": (
        "plain", training(max_grad_norm=0.01), "has max_grad_norm=0.01, but semantics 'in-backward'; 'exact-clip' clips"
    ),
    "clipping without its op": (
        "plain",
        lambda r: (training(max_grad_norm=0.01)(r), step(semantics="exact-clip")(r)),
        "has max_grad_norm=0.01, but no op of kind 'clip'",
    ),
    "an op that clips without a norm": ("clipped", training(max_grad_norm=None), "but an op of kind 'clip'"),
    "delayed updates that are made at once": (
        "plain", step(semantics="delayed-1"), "which lacks the gradients of the step before"
    ),
    "a late update that is made at once": (
        "plain",
        lambda r: r["step"]["units"][1].update(late_update=True),
        "op 'fwd/L0/mb0' computes with 'params/L0@gpu0#0', which has 0 of L0's 2 updates; by the step it runs after",
    ),
    "an update at once that is made late": (
        "late",
        lambda r: r["step"]["units"][1].update(late_update=False),
        "op 'update/L0/0of2' reads 'grads/L0/mb0@host#0', which lacks what the backward of 'L0' makes of micro-batch 0",
    ),
    "activations that leave uncoded": (
        "plain", training(activation_format="fp8"), "takes 'x/L0/mb0@gpu0#0' off the device uncoded"
    ),
    "codes that are of something else": (
        "coded",
        lambda r: op(r, "decode_x/L0/mb0").update(reads=op(r, "decode_x/L1/mb0")["reads"]),
        "op 'decode_x/L0/mb0' reads 'x/L1/mb0/coded' and writes 'x/L0/mb0'",
    ),
    "a tied gradient that is lost": (
        "clipped",
        without("tied/embed/mb0"),
        "which lacks what the backward of 'head' makes of micro-batch 0; gradients are used when all are added up",
    ),
    "a micro-batch that is not added": (
        "plain",
        lambda r: (
            no_op("accumulate/L1/mb1")(r),
            set_to(r, "grads/L1/mb0@host#1", "grads/L1/mb0@host#0"),
        ),
        "which lacks what the backward of 'L1' makes of micro-batch 1",
    ),
    "a micro-batch that is added twice": (
        "plain",
        lambda r: op(r, "offload_grads/L1/mb1").update(reads=op(r, "offload_grads/L1/mb0")["reads"]),
        "adds what the backward of 'L1' makes of micro-batch 0 to 'grads/L1/mb0@host#1', which has it already",
    ),
    "recomputed tensors that are nowhere": (
        "clipped", without("acts/L1/mb0/re"), "op 'recompute/L1/mb0' does not write 'acts/L1/mb0/re'"
    ),
    "kept tensors that are nowhere": ("clipped", without("acts/L1/mb0/keep"), "does not write 'acts/L1/mb0/keep'"),
    "kept tensors that backward does not read": (
        "clipped", less("bwd/L1/mb0", "acts/L1/mb0/keep"), "op 'bwd/L1/mb0' does not read 'acts/L1/mb0/keep'"
    ),
    "a gradient of its input that nobody gets": (
        "clipped", less("bwd/L1/mb0", "dx/head"), "op 'bwd/L1/mb0' does not read 'dx/head/mb0'"
    ),
    "an embedding without parameters": (
        "clipped", less("fwd/embed/mb0", "params"), "op 'fwd/embed/mb0' does not read 'params/embed'"
    ),
    "a tied head without what it shares": (
        "clipped", less("fwd/head/mb0", "params/embed"), "op 'fwd/head/mb0' does not read 'params/embed'"
    ),
    "a block without its input": ("clipped", less("fwd/L0/mb0", "x/L0"), "op 'fwd/L0/mb0' does not read 'x/L0/mb0'"),
    "recomputation without parameters": (
        "clipped", less("recompute/L1/mb0", "params"), "op 'recompute/L1/mb0' does not read 'params/L1'"
    ),
    "recomputation without its input": ("clipped", less("recompute/L1/mb0", "x/"), "does not read 'x/L1/mb0'"),
    "a forward of another unit": (
        "plain", lambda r: op(r, "fwd/L0/mb0").update(unit="L1"), "op 'fwd/L0/mb0' does not read 'params/L1'"
    ),
    "a forward with something else": (
        "plain", more("fwd/L1/mb0", "acts/L0/mb0/keep"), "op 'fwd/L1/mb0' reads 'acts/L0/mb0/keep', which an op of kind"
    ),
    "a forward with parameters on a drive": (
        "plain",
        more("fwd/L0/mb0", "params/embed@nvme"),
        "uses buffer 'params/embed@nvme#0' in nvme; it must be in gpu0"
    ),
    "a copy of something else": (
        "plain",
        lambda r: [b.update(content="x/L1/mb0") for b in r["buffers"] if b["name"].startswith("x/L0/mb0@host")],
        "reads 'x/L0/mb0' and writes 'x/L1/mb0'; an op of kind 'copy' of unit 'L0' must read",
    ),
    "a part that is not updated": (
        "stateless", lambda r: skip_part(r), "unit 'L0' is updated in parts 0 of 2; each of its parts must be updated"
    ),
    "states that are not written over": (
        "plain",
        over("states/L0/0of2@host#1", None),
        "op 'update/L0/0of2' writes 'states/L0/0of2@host#1' over no other; it must `reuse` 'states/L0/0of2@host#0'",
    ),
    "parameters that are not written over": (
        "plain", over("params/L0@host#5", None), "it must `reuse` 'params/L0@host#4'"
    ),
    "a sum that is not written over": (
        "plain", over("grads/L0/mb0@host#1", None), "op 'accumulate/L0/mb1' writes 'grads/L0/mb0@host#1' over no other"
    ),
    "a backward's sum that is not written over": (
        "on the device", over("grads/L0/mb0@gpu0#1", None), "op 'bwd/L0/mb1' writes 'grads/L0/mb0@gpu0#1' over no other"
    ),
    "parameters over a gradient": (
        "plain",
        over("params/embed@host#4", "grads/embed/mb0@host#1"),
        "op 'update/embed' writes 'params/embed@host#4' over 'grads/embed/mb0@host#1'; it must `reuse` no other",
    ),
    "a sum in another order": (
        "plain", reversed_reads("accumulate/L0/mb1"), "it must `reuse` 'grads/L0/mb1@host#0'"
    ),
    "an update with something else for its gradient": (
        "plain", reversed_reads("update/L0/1of2"), "op 'update/L0/1of2' reads 'params/L0@host#4' first; an op of kind"
    ),
    "something that nobody has written": (
        "plain",
        lambda r: [b.update(initial=True) for b in r["buffers"] if b["name"] == "x/L0/mb0@gpu0#0"]
        and op(r, "fwd/embed/mb0")["writes"].remove("x/L0/mb0@gpu0#0"),
        "op 'fwd/embed/mb0' does not write 'x/L0/mb0'",
    ),
}  # fmt: skip


def set_to(record: Record, old: str, new: str) -> None:
    """Who reads one buffer reads another one, and the first is gone."""
    record["buffers"] = [b for b in record["buffers"] if b["name"] != old]
    for each in record["ops"]:
        each["reads"] = [new if name == old else name for name in each["reads"]]


def skip_part(record: Record) -> None:
    """The first part's parameters are the last one's."""
    last = op(record, "update/L0/1of2")
    (old,), new = last["writes"], op(record, "update/L0/0of2")["writes"][0]
    no_op(last["key"])(record)
    set_to(record, old, new)


def refused(text: str, folder: Path) -> str:
    (folder / "plan.json").write_text(text)
    schedule = load_schedule(folder / "plan.json")
    with pytest.raises(TrainingError) as error:
        executable_step(schedule)
    return str(error.value)


@pytest.mark.parametrize("case", list(EDITS))
def test_what_trains_other_numbers_is_refused_by_name(case: str, records: dict[str, str], tmp_path: Path) -> None:
    of, change, message = EDITS[case]
    record = json.loads(records[of])
    change(record)
    said = refused(json.dumps(record), tmp_path)
    assert "is not one that this runtime can execute" in said
    assert message in said


def test_what_lowering_makes_passes(records: dict[str, str], tmp_path: Path) -> None:
    for text in records.values():
        (tmp_path / "plan.json").write_text(text)
        assert executable_step(load_schedule(tmp_path / "plan.json")) is not None


def test_only_a_schedule_that_says_so_measures_without_updates() -> None:
    """Nothing is trained by either; who writes one by hand and forgets the updates does not want that."""
    measures = profiling_schedule(toy_workload(2))
    assert executable_step(measures) is not None
    with pytest.raises(TrainingError, match="unit 'embed' is trained, but no op updates it"):
        executable_step(replace(measures, meta={}))
