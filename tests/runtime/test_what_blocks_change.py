"""Blocks that change what they are given, as in plain training: lists and dictionaries, and tensors in place."""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._pytree import register_pytree_node

from tests.runtime.models import CPU, VOCABULARY, OwnModel, make_batches, schedule_for, train_as_plainly
from tierplan.planner.plan import Order, UnitPlan
from tierplan.runtime.autograd.saved import AbsentError
from tierplan.runtime.autograd.units import ModelError, split_model
from tierplan.runtime.execution.placement import TrainingError
from tierplan.runtime.reference import train_plainly
from tierplan.runtime.tracing.trace import trace_module
from tierplan.runtime.trainer import train
from tierplan.sim.step import Action
from tierplan.sim.workloads.workload import WorkloadError

OFF_DEVICE = UnitPlan(params="host", grads="host", states="host", acts="host")


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(16, 16), nn.Linear(16, 16)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(torch.tanh(self.inner(x)))


class _Model(OwnModel):
    """Its blocks get `x` and what `new` makes; where they return nothing, it is there."""

    def __init__(self, kind: type[_Block]) -> None:
        torch.manual_seed(4)
        super().__init__(kind() for _ in range(2))
        self.kind: Any = kind

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x = self.embed(input_ids)
        x, given = self.kind.lead(self.layers, x)
        loss = cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        return loss if given is None else loss + given


class _Appends(_Block):
    """To a list: a term of the loss, as mixtures of experts do."""

    def forward(self, x: torch.Tensor, given: Any) -> Any:
        x = self.body(x)
        given.append(0.1 * x.pow(2).mean())
        return x

    @staticmethod
    def lead(layers: Any, x: torch.Tensor) -> Any:
        terms: list[torch.Tensor] = []
        for layer in layers:
            x = layer(x, terms)
        assert len(terms) == len(layers)
        return x, sum(terms)


class _AppendsByName(_Appends):
    """To deques that lie in an ordered dictionary, in a tuple."""

    def forward(self, x: torch.Tensor, given: Any) -> Any:
        return super().forward(x, given[1]["deep"])

    @staticmethod
    def lead(layers: Any, x: torch.Tensor) -> Any:
        given = (3, OrderedDict(deep=deque([0.1 * x.mean()])))
        for layer in layers:
            x = layer(x, given=given)
        assert len(given[1]["deep"]) == 1 + len(layers)
        return x, sum(given[1]["deep"])


class _AddsUp(_Block):
    def forward(self, x: torch.Tensor, given: Any) -> Any:
        x = self.body(x)
        given["sum"] = given["sum"] + 0.1 * x.pow(2).mean()
        return x

    @staticmethod
    def lead(layers: Any, x: torch.Tensor) -> Any:
        given = {"sum": x.new_zeros(())}
        for layer in layers:
            x = layer(x, given)
        return x, given["sum"]


class _Counts(_Block):
    def forward(self, x: torch.Tensor, given: Any) -> Any:
        given["depth"] += 1
        return self.body(x) * (1 + 0.1 * given["depth"])

    @staticmethod
    def lead(layers: Any, x: torch.Tensor) -> Any:
        given = {"depth": 0}
        for layer in layers:
            x = layer(x, given)
        return x * given["depth"], None


class _CountsInList(_Block):
    def forward(self, x: torch.Tensor, given: Any) -> Any:
        given.append(len(given))
        return self.body(x) * (1 + 0.1 * len(given))

    @staticmethod
    def lead(layers: Any, x: torch.Tensor) -> Any:
        given: list[int] = []
        for layer in layers:
            x = layer(x, given)
        return x * len(given), None


class _Replaces(_Block):
    """In the dictionary that it returns, which is the one that it got."""

    def forward(self, x: Any, given: Any = None) -> Any:
        x["x"] = self.body(x["x"])
        return x

    @staticmethod
    def lead(layers: Any, x: torch.Tensor) -> Any:
        first = given = {"x": x, "k": [1, {"scale": 0.5}]}
        for layer in layers:
            given = layer(given)
        assert given is first
        return first["x"] * first["k"][1]["scale"], None


class _Pops(_Replaces):
    def forward(self, x: Any, given: Any = None) -> Any:
        hidden = x.pop("x")
        return super().forward({"x": hidden, **x})

    @staticmethod
    def lead(layers: Any, x: torch.Tensor) -> Any:
        given = {"x": x}
        for layer in layers:
            before, given = given, layer(given)
            assert not before
        return given["x"], None


class _ReturnsNothing(_Replaces):
    def forward(self, x: Any, given: Any = None) -> Any:
        super().forward(x)

    @staticmethod
    def lead(layers: Any, x: torch.Tensor) -> Any:
        given = {"x": x}
        for layer in layers:
            layer(given)
        return given["x"], None


def _train_both_ways(kind: type[_Block], choice: UnitPlan, folder: Path, *, order: Order = "horizontal") -> None:
    model, batches, training = _Model(kind), make_batches(6), replace(CPU, gradient_accumulation_steps=2)
    schedule = schedule_for(model, choice, training, traced=batches[0], order=order)
    train_as_plainly(schedule, model, batches, nvme_dir=folder)


@pytest.mark.parametrize("acts", ["keep", "host", "recompute"])
@pytest.mark.parametrize(
    "kind", [_Appends, _AppendsByName, _AddsUp, _Counts, _CountsInList, _Replaces, _Pops, _ReturnsNothing]
)
def test_what_a_block_puts_into_lists_and_dictionaries_is_there(
    kind: type[_Block], acts: Action, tmp_path: Path
) -> None:
    """They were copies, whose changes were lost, and a block was made again with changed ones."""
    order: Order = "vertical" if acts == "host" else "horizontal"
    _train_both_ways(kind, replace(OFF_DEVICE, acts=acts), tmp_path, order=order)


class _GivenTwice(_Appends):
    def forward(self, x: torch.Tensor, given: Any, again: Any = None) -> Any:
        return super().forward(x, given)

    @staticmethod
    def lead(layers: Any, x: torch.Tensor) -> Any:
        terms: list[torch.Tensor] = []
        for layer in layers:
            x = layer(x, terms, again=terms)
        return x, sum(terms)


class _Record:
    def __init__(self, terms: list[Any]) -> None:
        self.terms = terms


class _AppendsToRecord(_Appends):
    """To an object that PyTorch has been told to look into."""

    def forward(self, x: torch.Tensor, given: Any) -> Any:
        x = self.body(x)
        given.terms = [*given.terms, x.mean()]
        return x

    @staticmethod
    def lead(layers: Any, x: torch.Tensor) -> Any:
        record = _Record([])
        for layer in layers:
            x = layer(x, record)
        return x, sum(record.terms)


register_pytree_node(_Record, lambda record: (record.terms, None), lambda terms, context: _Record([*terms]))


@pytest.mark.parametrize(
    ("kind", "like", "why"),
    [
        (_GivenTwice, _Appends, "'L0' is given the same list twice, and changes it"),
        (_AppendsToRecord, _Counts, "'L0' changes a _Record that it is given"),
    ],
)
def test_what_cannot_be_changed_as_in_plain_training_is_refused(
    kind: type[_Block], like: type[_Block], why: str
) -> None:
    batches = make_batches(1)
    with pytest.raises(WorkloadError, match=why.replace("L0", "layers.0")):
        trace_module(_Model(kind), batches[0], CPU)
    with pytest.raises(ModelError, match=why):
        train(schedule_for(_Model(like), traced=batches[0]), _Model(kind), batches, steps=1)


class _InPlace(_Block):
    """A mask that the block changes when it has used it, or else the model behind it."""

    changes = True

    def forward(self, x: torch.Tensor, given: Any) -> Any:
        x = self.body(x * given.clone())
        if self.changes:
            given.mul_(0.9)
        return x

    @staticmethod
    def lead(layers: Any, x: torch.Tensor) -> Any:
        mask = torch.ones(1, x.shape[1], 1)
        for layer in layers:
            x = layer(x, mask)
            if not layer.changes:
                mask.mul_(0.9)
        return x, None


class _InPlaceBehind(_InPlace):
    changes = False


@pytest.mark.parametrize("acts", ["keep", "recompute"])
@pytest.mark.parametrize("kind", [_InPlace, _InPlaceBehind])
def test_a_tensor_that_is_changed_in_place_is_refused_where_its_block_is_run_again(
    kind: type[_Block], acts: Action, tmp_path: Path
) -> None:
    choice = replace(OFF_DEVICE, acts=acts)
    if acts == "recompute":
        with pytest.raises(ModelError, match="a tensor that 'L1' is given is changed in place"):
            _train_both_ways(kind, choice, tmp_path)
        return
    _train_both_ways(kind, choice, tmp_path)


class _Limited(_Block):
    """Activations that the block, or else the model behind it, keeps small, as autograd does not see it."""

    is_behind = False

    def limit(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x.clamp_(-0.5, 0.5)
        return x

    def forward(self, x: torch.Tensor, given: Any = None) -> Any:
        return self.body(x if self.is_behind else self.limit(x))

    @classmethod
    def lead(cls, layers: Any, x: torch.Tensor) -> Any:
        for layer in layers:
            x = layer.limit(layer(x)) if cls.is_behind else layer(x)
        return x, None


class _LimitedBehind(_Limited):
    is_behind = True


@pytest.mark.parametrize("place", ["keep", "host", "nvme"])
@pytest.mark.parametrize("kind", [_Limited, _LimitedBehind])
def test_an_input_that_is_changed_in_place_is_refused_where_it_leaves_the_device(
    kind: type[_Block], place: Action, tmp_path: Path
) -> None:
    """It left as it was before or as it was then, and backward took what came back, without a word."""
    choice = UnitPlan(input=place)
    if place != "keep":
        with pytest.raises(ModelError, match=r"input of '(L\d|head)', which .* is changed in place"):
            _train_both_ways(kind, choice, tmp_path)
        return
    _train_both_ways(kind, choice, tmp_path)


class _Plain(_Block):
    def forward(self, x: torch.Tensor, given: Any = None) -> Any:
        return self.body(x)

    @staticmethod
    def lead(layers: Any, x: torch.Tensor) -> Any:
        for layer in layers:
            x = layer(x)
        return x, None


class _Adds(_Plain):
    """In place, what autograd sees."""

    def forward(self, x: torch.Tensor, given: Any = None) -> Any:
        x += 0.5
        return self.body(x)


class _AddsBehind(_Plain):
    @staticmethod
    def lead(layers: Any, x: torch.Tensor) -> Any:
        for layer in layers:
            x = layer(x)
        x[:, 0] += 0.5
        return x, None


@pytest.mark.parametrize("kind", [_Adds, _AddsBehind])
def test_a_unit_that_changes_its_input_in_place_is_refused_by_name(kind: type[_Block]) -> None:
    """PyTorch said in the first step that a leaf is, which no plain training has there; a plan was made before."""
    model, batch = _Model(kind), make_batches(1)[0]
    train_plainly(copy.deepcopy(model), [batch], steps=1)
    why = "an input of block 'layers.0'" if kind is _Adds else "an output of block 'layers.1'"
    why += r" is changed in place.* x = x \+ y"
    with pytest.raises(ModelError, match=why):
        split_model(model, batch)
    with pytest.raises(WorkloadError, match=why):
        trace_module(model, batch, CPU)


class _Differentiates(_Plain):
    """In its forward, as a penalty on gradients does."""

    def forward(self, x: torch.Tensor, given: Any = None) -> Any:
        hidden = torch.tanh(self.inner(x))
        (slope,) = torch.autograd.grad(hidden.sum(), x, create_graph=True)
        return x + self.out(hidden) * slope


@pytest.mark.parametrize("acts", ["keep", "host", "recompute", ("keep", "recompute", "keep", "keep", "keep")])
def test_a_block_that_runs_backward_in_its_forward_is_not_made_again(acts: Any, tmp_path: Path) -> None:
    """An assertion failed, or the schedule was told to bring what nobody had made yet."""
    if "recompute" in acts:
        with pytest.raises(AbsentError, match=r"runs backward in its forward .* plan without recomputation"):
            _train_both_ways(_Differentiates, UnitPlan(acts=acts), tmp_path)
        return
    _train_both_ways(_Differentiates, UnitPlan(acts=acts), tmp_path)


class _Clamped(_Plain):
    """Weights are kept small by forward: as an attribute of theirs, or not in the first steps."""

    way = "at once"

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def forward(self, x: torch.Tensor, given: Any = None) -> Any:
        self.num_calls += 1
        with torch.no_grad():
            if self.way == "data":
                self.inner.weight.data.clamp_(-0.05, 0.05)
            elif self.way == "at once" or self.num_calls > 2:
                self.inner.weight.clamp_(-0.05, 0.05)
        return self.body(x)


class _ClampedData(_Clamped):
    way = "data"


class _ClampedLate(_Clamped):
    way = "late"


class _Followed(_Clamped):
    """A frozen copy that follows what is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.inner.requires_grad_(False)


@pytest.mark.parametrize(
    ("choice", "out", "says"),
    [
        (UnitPlan(), "", ""),
        (UnitPlan(), "out", ""),
        (OFF_DEVICE, "", "stay on the device"),
        (UnitPlan(acts="recompute"), "", "is run again"),
    ],
)
@pytest.mark.parametrize("kind", [_Clamped, _ClampedData, _ClampedLate, _Followed])
def test_parameters_that_forward_changes_are_refused_where_they_do_not_stay(
    kind: type[_Block], choice: UnitPlan, out: str, says: str, tmp_path: Path
) -> None:
    """The change was lost with the memory, as if it had never been there."""
    model, batches = _Model(kind), make_batches(4)
    choice = replace(choice, frozen="host") if kind is _Followed and says.startswith("stay") else choice
    schedule = schedule_for(model, choice, traced=batches[0])
    more: dict[str, Any] = {"out_dir": tmp_path / "out"} if out else {}
    says = "commits" if kind is _Followed and out else says
    if says:
        with pytest.raises(
            TrainingError, match=rf"forward changes parameter 'layers\.0\.inner\.weight'.*, but .*{says}"
        ):
            train(schedule, model, batches, steps=4, nvme_dir=tmp_path, **more)
        return
    train_as_plainly(schedule, model, batches, nvme_dir=tmp_path, **more)


@pytest.mark.parametrize("choice", [UnitPlan(), OFF_DEVICE])
def test_an_embedding_with_bounded_norms_is_one_that_forward_changes(choice: UnitPlan, tmp_path: Path) -> None:
    model, batches = _Model(_Plain), make_batches(3)
    model.embed = nn.Embedding(VOCABULARY, 16, max_norm=0.5)
    schedule = schedule_for(model, choice, traced=batches[0])
    if choice is OFF_DEVICE:
        with pytest.raises(TrainingError, match=r"changes parameter 'embed\.weight' in place.* stay on the device"):
            train(schedule, model, batches, steps=3, nvme_dir=tmp_path)
        return
    train_as_plainly(schedule, model, batches, nvme_dir=tmp_path)
