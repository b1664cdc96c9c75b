"""Contents and keys are read back as they were made; states in parts have every parameter in one part."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierplan.sim import contents
from tierplan.sim.contents import (
    GRAIN,
    CastGradients,
    Clip,
    Content,
    ContentError,
    Gradients,
    Input,
    InputGradient,
    KeptActs,
    Norm,
    OpKey,
    PackActs,
    Params,
    RecomputedActs,
    SavedActs,
    Shared,
    States,
    StepKey,
    TiedGradients,
    Transient,
    parse_content,
    parse_key,
    part_ranges,
    split_step,
)

UNITS = st.sampled_from(["embed", "L0", "L11", "L3.2", "between3", "head"])
BATCHES = st.integers(0, 1000)
DEVICES = st.none() | st.integers(0, 12)
CONTENTS: st.SearchStrategy[Content] = st.one_of(
    st.builds(Params, UNITS, DEVICES),
    st.builds(States, UNITS, device=DEVICES),
    st.builds(lambda unit, part, more: States(unit, part, part + more), UNITS, st.integers(0, 9), st.integers(2, 9)),
    st.builds(Gradients, UNITS, st.none() | BATCHES, DEVICES),
    st.builds(CastGradients, UNITS),
    st.builds(TiedGradients, UNITS, BATCHES),
    st.builds(Input, UNITS, BATCHES),
    st.builds(InputGradient, UNITS, BATCHES),
    st.builds(SavedActs, UNITS, BATCHES, st.lists(st.integers(0, 99), min_size=1).map(tuple), st.booleans()),
    st.builds(KeptActs, UNITS, BATCHES),
    st.builds(RecomputedActs, UNITS, BATCHES),
    st.builds(PackActs, st.just("L0-L3"), BATCHES),
    st.builds(Shared, BATCHES),
    st.builds(Norm, UNITS),
    st.builds(Clip),
    st.builds(Transient, st.sampled_from(["fwd/L3/mb0", "bwd/L0-L3/mb1"])),
)


@given(CONTENTS)
def test_a_content_is_read_back_as_it_was_made(content: Content) -> None:
    assert parse_content(str(content)) == content


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (Params("L3"), "params/L3"),
        (Params("L3", 1), "params/L3/gpu1"),
        (States("L3"), "states/L3"),
        (States("L3", 1, 4), "states/L3/1of4"),
        (Gradients("L3", 0), "grads/L3/mb0"),
        (Gradients("L0-L3", device=2), "grads/L0-L3/gpu2"),
        (CastGradients("L3"), "grads/L3/fp32"),
        (TiedGradients("embed", 2), "tied/embed/mb2"),
        (Input("L3", 0), "x/L3/mb0"),
        (InputGradient("L3", 0), "dx/L3/mb0"),
        (SavedActs("L3", 0, (7,)), "acts/L3/mb0/7"),
        (SavedActs("L3", 0, (1, 4, 15)), "acts/L3/mb0/1+4+15"),
        (SavedActs("L3", 0, (7,), is_coded=True), "acts/L3/mb0/7/coded"),
        (KeptActs("L3", 0), "acts/L3/mb0/keep"),
        (RecomputedActs("L3", 0), "acts/L3/mb0/re"),
        (PackActs("L0-L3", 1), "acts/L0-L3/mb1"),
        (Shared(1), "shared/mb1"),
        (Norm("L3"), "norm/L3"),
        (Clip(), "clip"),
        (Transient("fwd/L3/mb0"), "work/fwd/L3/mb0"),
    ],
)
def test_the_texts_of_contents(content: Content, text: str) -> None:
    """As docs/design.md has them, and committed steps of earlier versions."""
    assert str(content) == text


@pytest.mark.parametrize(
    "text",
    ["", "x", "params", "params/", "params/L3/mb0", "x/L3", "x/L3/mb", "x/L3/mb01", "acts/L3/mb0/kept", "clip/L3",
     "acts/L3/mb0/1+", "acts/L3/mb0/01",
     "work/", "shared/0", "weights/L3", "states/L3/1of", "params/L3/gpu1/gpu2"],
)  # fmt: skip
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ContentError, match="is no content"):
        parse_content(text)


@pytest.mark.parametrize(
    ("key", "parts"),
    [
        (contents.forward_key("L3", 0), OpKey("fwd", "", ("L3", "mb0"))),
        (contents.backward_key("L0-L3", 12), OpKey("bwd", "", ("L0-L3", "mb12"))),
        (contents.recompute_key("L3", 0), OpKey("recompute", "", ("L3", "mb0"))),
        (contents.copy_key("fetch", Input("L3", 0)), OpKey("fetch", "x", ("L3", "mb0"))),
        (contents.op_key("all_reduce", "L3", "gpu1"), OpKey("all_reduce", "", ("L3", "gpu1"))),
        (States("L3", 1, 4).update_key, OpKey("update", "", ("L3", "1of4"))),
        (contents.step_prefix(2) + contents.op_key("clip"), OpKey("clip")),
    ],
)
def test_a_key_comes_apart_as_it_was_made(key: str, parts: OpKey) -> None:
    assert parse_key(key) == parts


@pytest.mark.parametrize(
    ("key", "parts"),
    [
        ("s12/fwd/L0", StepKey(12, "fwd/L0")),
        ("shared/L0", StepKey(None, "shared/L0")),
        ("clip", StepKey(None, "clip")),
        ("s1", StepKey(None, "s1")),
    ],
)
def test_the_step_of_a_key(key: str, parts: StepKey) -> None:
    assert split_step(key) == parts


@given(st.integers(0, 20 * GRAIN), st.integers(1, 30))
def test_parts_cover_every_parameter_once_in_whole_grains(num_parameters: int, num_parts: int) -> None:
    parts = part_ranges(num_parameters, num_parts)
    assert [i for part in parts for i in part] == list(range(num_parameters))
    assert len(parts) <= num_parts
    assert len({len(part) for part in parts[:-1]}) <= 1
    assert all(part.start % GRAIN == 0 for part in parts)


def test_parts_begin_on_pages_of_any_state() -> None:
    """fp32 states are read and written in pages of 4 KiB, one region of so many values each."""
    assert [part.start * 4 % 4096 for part in part_ranges(10_000, 3)] == [0, 0, 0]


@pytest.mark.parametrize(
    ("num_parameters", "num_parts", "sizes"),
    [
        (10_000, 3, [4096, 4096, 1808]),
        (4096, 4, [1024, 1024, 1024, 1024]),
        (4097, 4, [2048, 2048, 1]),
        (1000, 4, [1000]),
        (5000, 1, [5000]),
        (0, 4, []),
    ],
)
def test_sizes_of_parts(num_parameters: int, num_parts: int, sizes: list[int]) -> None:
    assert [len(part) for part in part_ranges(num_parameters, num_parts)] == sizes
