"""The language: what `validate` refuses, with the op or buffer named, and what `unroll` makes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, fields, replace

import pytest

from tierplan.sim.columns import unroll
from tierplan.sim.schedule import Buffer, Op, Schedule, ScheduleError, Tier, validate


def buffer(name: str, **more: object) -> Buffer:
    return Buffer(**{"name": name, "tier": "host", "size_bytes": 4, "content": name, "kind": "work", **more})  # type: ignore[arg-type]


def op(key: str, reads: str = "", writes: str = "", **more: object) -> Op:
    """Buffer names separated by spaces."""
    fields = {"key": key, "stream": "s", "kind": "x", "reads": tuple(reads.split()), "writes": tuple(writes.split())}
    return Op(**{**fields, **more})  # type: ignore[arg-type]


def schedule(buffers: Iterable[Buffer], ops: Iterable[Op], *tiers: Tier, **more: object) -> Schedule:
    tiers = tiers or (Tier(name="host", capacity_bytes=99),)
    return Schedule(**{"name": "x", "tiers": tiers, "buffers": tuple(buffers), "ops": tuple(ops), **more})  # type: ignore[arg-type]


W = buffer("w", initial=True)
W2 = buffer("w2", content="w", reuses="w", becomes="w")

REFUSED = {
    "no such tier": (schedule([buffer("a", tier="disk")], [op("o", writes="a")]), "'a' is in tier 'disk'"),
    "twice an op": (schedule([], [op("o"), op("o")]), "op 'o' is declared twice"),
    "twice a buffer": (schedule([W, W], []), "buffer 'w' is declared twice"),
    "twice a tier": (schedule([], [], *[Tier(name="t", capacity_bytes=1)] * 2), "tier 't' is declared twice"),
    "no name": (schedule([], [op("")]), "an op has an empty name"),
    "no stream": (schedule([], [op("o", stream="")]), "op 'o' has no stream"),
    "negative capacity": (schedule([], [], Tier(name="t", capacity_bytes=-1)), r"\('t'\): capacity_bytes is -1"),
    "negative size": (schedule([buffer("a", size_bytes=-1)], [op("o", writes="a")]), r"\('a'\): size_bytes is -1"),
    "negative work": (schedule([], [op("o", work={"bytes": -1.0})]), r"ops\[0\] \('o'\): work\['bytes'\] is -1.0"),
    "work that is no number": (schedule([], [op("o", work={"s": float("nan")})]), r"work\['s'\] is nan"),
    "endless work": (schedule([], [op("o", work={"s": float("inf")})]), r"is inf; it must be a number that is finite"),
    "unknown buffer": (schedule([], [op("o", reads="a")]), "'o' uses buffer 'a', which is not declared"),
    "after one op twice": (schedule([], [op("o"), op("p", after=("o", "o"))]), "'p' comes after one op twice"),
    "read twice": (schedule([W], [op("o", reads="w w")]), "'o' names a buffer twice"),
    "read before written": (
        schedule([buffer("a")], [op("r", reads="a"), op("o", writes="a")]),
        "'r' reads 'a', but no op before it",
    ),
    "reads what it writes": (schedule([buffer("a")], [op("o", "a", "a")]), "'o' reads 'a', but no op before it"),
    "after a later op": (schedule([], [op("o", after=("p",)), op("p")]), "'o' comes after 'p', which is not before"),
    "after itself": (schedule([], [op("o", after=("o",))]), "'o' comes after 'o'"),
    "writes an initial buffer": (schedule([W], [op("o", writes="w")]), "'o' writes 'w', which exists before"),
    "two writers": (
        schedule([buffer("a")], [op("o", writes="a"), op("p", writes="a")]),
        "'p' writes 'a', which 'o' has written",
    ),
    "never written": (schedule([buffer("a")], []), "'a' is neither initial nor written"),
    "reuses nothing": (schedule([buffer("a", reuses="b")], [op("o", writes="a")]), "'a' reuses 'b', which is not"),
    "initial reuses": (
        schedule([W, buffer("a", initial=True, reuses="w")], []),
        "'a' exists before the step, so it cannot reuse 'w'",
    ),
    "reuses unread": (schedule([W, W2], [op("o", writes="w2")]), "'o' writes 'w2' over 'w', so it must also read"),
    "reuses other size": (
        schedule([W, buffer("a", reuses="w", size_bytes=5)], [op("o", "w", "a")]),
        "'a' .5 bytes in host. reuses 'w' .4 bytes in host.",
    ),
    "read after it was written over": (
        schedule([W, W2], [op("o", "w", "w2"), op("late", reads="w")]),
        "'late' reads 'w' after 'o' has written 'w2' over it",
    ),
    "reused twice": (
        schedule([W, W2, buffer("w3", reuses="w")], [op("o", "w", "w2 w3")]),
        "'w2' and 'w3' both reuse 'w'",
    ),
    "becomes nothing": (schedule([buffer("a", becomes="b")], [op("o", writes="a")]), "becomes 'b', which is not"),
    "becomes what is not initial": (
        schedule([buffer("a", becomes="b"), buffer("b")], [op("o", writes="a b")]),
        "'a' becomes 'b', which is not an initial buffer",
    ),
    "becomes other content": (
        schedule([W, buffer("a", becomes="w")], [op("o", writes="a")]),
        "'a' becomes 'w': tier, size and content must be equal",
    ),
    "two become one": (
        schedule([W, W2, buffer("w3", content="w", becomes="w")], [op("o", "w", "w2 w3")]),
        "'w2' and 'w3' both become 'w'",
    ),
    "turned and not all": (
        replace(schedule([], []), next_devices=(1, 2)),
        r"next_devices are \(1, 2\); each device from 0 on must",
    ),
    "turned to nowhere": (
        replace(schedule([], [], Tier(name="gpu0", capacity_bytes=9)), next_devices=(1, 0)),
        "next_devices put 'gpu1' in the place of tier 'gpu0', but it is not declared",
    ),
    "turned and stays": (
        replace(
            schedule(
                [buffer("a", tier="gpu0", initial=True, becomes="a")],
                [],
                *(Tier(name=f"gpu{d}", capacity_bytes=9) for d in range(2)),
            ),
            next_devices=(1, 0),
        ),
        "'a' outlives the step in 'gpu0', whose part another device does",
    ),
    "initial, unread and not kept": (
        schedule([W, buffer("a", initial=True)], [op("o", "w")]),
        "'a' exists before the step, but no op reads it and it does not outlive the step",
    ),
    "larger than any number of bytes": (
        schedule([buffer("a", size_bytes=1 << 63)], [op("o", writes="a")]),
        "'a' has 9,223,372,036,854,775,808 bytes; more than 1,152,921,504,606,846,976 are not counted",
    ),
    "outlives and is written over": (
        schedule([replace(W, becomes="w"), replace(W2, becomes=None)], [op("o", "w", "w2")]),
        "'w' is to outlive the step, but 'w2' reuses its bytes",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_breaks_the_language_is_named(case: str) -> None:
    wrong, message = REFUSED[case]
    with pytest.raises(ScheduleError, match=message):
        validate(wrong)


def test_a_valid_schedule_is_returned_itself() -> None:
    right = schedule([W, W2, buffer("a")], [op("f", "w", "a"), op("u", "w a", "w2", after=("f",))])
    assert validate(right) is right
    assert right.streams == ("s",)


def test_bytes_moved_counts_bytes_only() -> None:
    work = schedule(
        [], [op("a", work={"bytes": 3.0}), op("b", work={"bytes": 4.0, "s": 1.0}), op("c", stream="t", work={"s": 1})]
    )
    assert work.bytes_moved() == {"s": 7}


def test_unrolled_steps_hand_over_what_outlives_them() -> None:
    step = schedule(
        [W, W2, buffer("still", initial=True, becomes="still")],
        [op("f", reads="w still"), op("u", "w", "w2", after=("f",))],
    )
    three = validate(unroll(validate(step), 3))
    assert [o.key for o in three.ops] == ["s0/f", "s0/u", "s1/f", "s1/u", "s2/f", "s2/u"]
    by_key = {o.key: o for o in three.ops}
    assert by_key["s1/f"].reads == ("s0/w2", "s0/still"), "an initial buffer that nothing rewrites stays the same one"
    assert by_key["s2/u"].reads == ("s1/w2",)
    assert by_key["s2/u"].after == ("s2/f",)
    buffers = three.buffers_by_name()
    assert [b.name for b in three.buffers if b.initial] == ["s0/w", "s0/still"]
    assert buffers["s1/w2"].reuses == "s0/w2"
    assert {b.name: b.becomes for b in three.buffers if b.becomes} == {"s2/w2": "s0/w", "s0/still": "s0/still"}
    assert three.meta["num_steps"] == 3


def test_unrolling_renames_and_keeps_all_else() -> None:
    full_op = Op(key="o", stream="t", kind="copy", unit="L3", micro_batch=2, work={"bytes": 7.0}, after=("f",))
    full_buffer = buffer("a", size_bytes=9, content="acts/L3/mb2", kind="acts", initial=True, becomes="a")
    step = schedule([full_buffer], [op("f", "a"), full_op], Tier(name="host", capacity_bytes=9, rounding="page"))
    one = unroll(validate(step), 1)
    assert one.ops[1] == replace(full_op, key="s0/o", after=("s0/f",))
    assert one.buffers == (replace(full_buffer, name="s0/a", becomes="s0/a"),)
    assert one.tiers == step.tiers
    for made in (full_op, full_buffer):  # a new field needs a value here that is not its default
        ours = {f.name for f in fields(made) if f.default is not MISSING and getattr(made, f.name) == f.default}
        assert ours <= {"reads", "writes", "reuses"}


def test_unrolled_twice_is_unrolled_at_once() -> None:
    step = schedule([W, W2], [op("f", reads="w"), op("u", "w", "w2")])
    twice, once = unroll(unroll(step, 2), 3), unroll(step, 6)
    assert len(twice.ops) == len(once.ops)
    number = {f"s{i // 2}/s{i % 2}/": f"s{i}/" for i in range(6)}

    def flat(name: str) -> str:
        return number[name[: len("s0/s0/")]] + name[len("s0/s0/") :]

    assert [tuple(map(flat, o.reads)) for o in twice.ops] == [o.reads for o in once.ops]
    assert {(flat(b.name), flat(b.becomes)) for b in twice.buffers if b.becomes} == {("s5/w2", "s0/w")}


@pytest.mark.parametrize("num_steps", [0, -1])
def test_no_steps_are_refused(num_steps: int) -> None:
    with pytest.raises(ScheduleError, match=f"cannot unroll {num_steps} steps"):
        unroll(schedule([], []), num_steps)
