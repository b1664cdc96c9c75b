"""Blocks of users' own: what they are told beside tensors, and what a run refuses where plain training goes on."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.runtime.models import (
    CPU,
    OwnModel,
    machine,
    make_batches,
    make_model,
    schedule_for,
    train_as_plainly,
)
from tests.toys import uniform_plan
from tierplan.planner.lowering import lower
from tierplan.planner.plan import UnitPlan
from tierplan.planner.policies import decide
from tierplan.runtime.autograd.units import ModelError, split_model
from tierplan.runtime.execution.placement import TrainingError
from tierplan.runtime.reference import same_weights, train_plainly
from tierplan.runtime.tracing.trace import trace_module
from tierplan.runtime.trainer import train
from tierplan.sim.step import Action
from tierplan.sim.workloads.workload import WorkloadError


class _Scaled(nn.Module):
    """A block that computes by a number beside its input: given, told by which of two names is given, or held."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.inner, self.way, self.num_calls, self.shape = nn.Linear(16, 16), way, 0, torch.tanh
        self.scale, self.scales, self.by_name = 1.0, [1.0], {"one": 1.0}
        self.config, self.act = SimpleNamespace(scales={"one": 1.0}), cast(nn.Module, nn.Tanh())

    def hold(self, t: float) -> None:
        match self.way:
            case "attribute":
                self.scale = t
            case "list":
                self.scales[0] = t
            case "dict":
                self.by_name = {"one": t}
            case "config":
                self.config.scales["one"] = t
            case "hook":
                self.inner._forward_hooks[0] = lambda module, given, out: out * t
            case "set forward":
                self.inner.forward = lambda x: nn.Linear.forward(self.inner, x) * t
            case "module":
                self.act = nn.Tanh() if t == 1 else nn.Sigmoid()
        self.shape = torch.sigmoid if self.way == "function" and t != 1 else torch.tanh

    def forward(self, x: torch.Tensor, t: float = 0.0, *, a: object = None, b: object = None) -> torch.Tensor:
        self.num_calls += self.way == "count"
        factor = {
            "number": t,
            "name": 1.5 if a is not None else 0.5,
            "attribute": self.scale,
            "list": self.scales[0],
            "dict": self.by_name["one"],
            "config": self.config.scales["one"],
            "count": 1.0 + 0.1 * self.num_calls,
            **dict.fromkeys(("twice", "slice"), a),
        }.get(self.way, 1.0)
        return x + self.shape(self.act(self.inner(x) * factor))


class OfScaled(OwnModel):
    def __init__(self, way: str) -> None:
        super().__init__(_Scaled(way) for _ in range(2))
        self.way = way

    def through(self, x: torch.Tensor, t: float) -> torch.Tensor:  # type: ignore[override]
        for layer in self.layers:
            layer.hold(t)  # type: ignore[operator]
            told = {"number": {"t": t}, "name": {"a" if int(t) % 2 else "b": x}}
            slices = torch.arange(99.0)[int(t) :: int(t)][:16]
            told |= {"twice": {"a": x if t == 1 else x.flip(0)}, "slice": {"a": slices}}
            x = x * t if self.way == "between" and t != 1 else x
            x = layer(x, **told.get(self.way, {}))
        return x


def told(num: int) -> list[dict[str, Any]]:
    """Batches that are all told the same."""
    return [{**batch, "t": 1.0} for batch in make_batches(num)]


OF_VALUES = ("number", "name", "attribute", "list", "dict", "config", "count")


@pytest.mark.parametrize("way", [*OF_VALUES, "between", "twice", "slice", "hook", "set forward", "module", "function"])
def test_what_a_block_is_told_beside_tensors_is_not_that_of_another_micro_batch(way: str, tmp_path: Path) -> None:
    """The first two are told alike, and as the block was made: what is known of one is used for the next."""
    batches = [{**batch, "t": t} for t, batch in zip((1.0, 1.0, 2.0, 3.0, 1.0), make_batches(5), strict=True)]
    model = OfScaled(way)
    workload = trace_module(copy.deepcopy(model), batches[0], CPU)
    schedule = lower(decide("full-recompute", workload, machine(), {}), workload, machine())
    train_as_plainly(schedule, model, batches, nvme_dir=tmp_path)


def test_a_block_that_is_run_again_behind_the_next_micro_batch_has_the_values_of_its_forward(tmp_path: Path) -> None:
    """With dropout, too, which leaves no other way than to run the block again; and a rerun counts as no call."""
    model = OfScaled("count")
    for layer in model.layers:
        layer.inner = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.2))
    batches, training = told(6), replace(CPU, gradient_accumulation_steps=2)
    schedule = schedule_for(model, UnitPlan(acts="recompute"), training, traced=batches[0], order="vertical")
    plain: Any = train_as_plainly(schedule, model, batches, nvme_dir=tmp_path)
    assert [layer.num_calls for layer in model.layers] == [layer.num_calls for layer in plain.layers] == [6, 6]


class _OfDecayed(OfScaled):
    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        of_first: Any = self.layers[0]
        return super().forward(input_ids, labels, 1.0) + of_first.inner.weight.pow(2).sum()


def test_a_loss_that_uses_a_parameter_of_a_block_is_refused_by_name() -> None:
    """Its size was said to be wrong, and that plans are made again for that."""
    why = r"'layers.0.inner.weight' of block 'layers.0' is also used outside of all"
    with pytest.raises(ModelError, match=why):
        split_model(_OfDecayed("list"), make_batches(1)[0])
    with pytest.raises(WorkloadError, match=why):
        trace_module(_OfDecayed("list"), make_batches(1)[0], CPU)


@pytest.mark.parametrize("params", ["device", "host"])
@pytest.mark.parametrize(
    ("family", "name", "unit"),
    [("gpt2", "transformer.h.1.mlp.c_fc.weight", "L1"), ("llama", "model.embed_tokens.weight", "embed")],
)
def test_a_loss_function_that_uses_a_parameter_of_another_unit_is_refused_by_name(
    params: Any, family: str, name: str, unit: str, tmp_path: Path
) -> None:
    """Its loss was nan, and training went on."""
    model, (batch,) = make_model(family, num_blocks=2), make_batches(1)
    schedule = schedule_for(model, UnitPlan(params=params, states="host"))

    def loss(output: Any, batch: object) -> torch.Tensor:
        return output.loss + 0.1 * model.get_parameter(name).sum()

    why = rf"the loss function uses parameter '{name}' of unit '{unit}'"
    with pytest.raises(WorkloadError, match=why):
        trace_module(model, batch, CPU, loss=loss)
    with pytest.raises(ModelError, match=why):
        train(schedule, model, [batch], steps=1, loss=loss)


@pytest.mark.parametrize(("family", "name"), [("llama", "lm_head.weight"), ("gpt2", "transformer.wte.weight")])
def test_a_loss_function_may_use_the_parameters_of_the_head(family: str, name: str) -> None:
    """And tracing leaves no gradient of no memory behind in them."""
    model, batches = make_model(family, num_blocks=2), make_batches(4)
    plain = copy.deepcopy(model)

    def loss_with(model: nn.Module) -> Any:
        return lambda output, batch: output.loss + 0.1 * model.get_parameter(name).pow(2).sum()

    training = replace(CPU, gradient_accumulation_steps=2)
    workload = trace_module(model, batches[0], training, loss=loss_with(model))
    assert model.get_parameter(name).grad is None
    choice = UnitPlan(params="host", grads="host", states="host", acts="recompute")
    result = train(
        lower(uniform_plan(workload, choice), workload, machine()), model, batches, steps=2, loss=loss_with(model)
    )
    assert list(result.losses) == train_plainly(
        plain, batches, steps=2, gradient_accumulation_steps=2, loss=loss_with(plain)
    )
    assert same_weights(model, plain)


class _Branches(nn.Module):
    """A block, one branch of which is taken in every other micro-batch, or never."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.second, self.never = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor, t: int) -> torch.Tensor:
        x = x + torch.tanh(self.always(x))
        return x + self.second(x) if t % 2 else x


@pytest.mark.parametrize(("accumulation", "freezes"), [(1, True), (2, True), (2, False)])
def test_a_parameter_without_a_gradient_in_a_step_is_refused(accumulation: int, freezes: bool, tmp_path: Path) -> None:
    """Plain training leaves it as it is. One that a micro-batch of the step gives one is trained."""
    batches = [{**batch, "t": 1 + k} for k, batch in enumerate(make_batches(4))]
    model = OwnModel(_Branches() for _ in range(2))
    for layer in model.layers if freezes else ():
        layer.never.requires_grad_(False)  # type: ignore[union-attr]
    schedule = schedule_for(model, None, replace(CPU, gradient_accumulation_steps=accumulation), traced=batches[0])
    if accumulation == 1 or not freezes:
        names = "'layers.0.never.bias'.*" if not freezes else "second.*in step 1"
        with pytest.raises(ModelError, match=rf"{names}: plain training leaves such parameters"):
            train(schedule, model, batches, steps=4 // accumulation, nvme_dir=tmp_path)
        return
    train_as_plainly(schedule, model, batches, nvme_dir=tmp_path)


class _Logging(_Scaled):
    """A block that computes something for its log, of which no gradient is wanted."""

    def forward(self, x: torch.Tensor, t: float = 0.0, *, a: object = None, b: object = None) -> torch.Tensor:
        self.log = torch.exp(x).mean().detach()
        return super().forward(x, 1.0)


@pytest.mark.parametrize("acts", ["host", "nvme", "recompute", "keep"])
def test_what_is_saved_on_a_branch_that_leads_nowhere_is_not_missed(acts: Action, tmp_path: Path) -> None:
    model = OfScaled("number")
    model.layers = nn.ModuleList(_Logging("number") for _ in range(2))
    schedule = schedule_for(model, UnitPlan(acts=acts), traced=told(1)[0])
    train_as_plainly(schedule, model, told(3), nvme_dir=tmp_path)


class _Normed(_Scaled):
    """A block with running means, which are buffers that forward changes, or puts others in place of."""

    mean: torch.Tensor

    def __init__(self, assigns: bool) -> None:
        super().__init__("number")
        self.norm = nn.BatchNorm1d(16, track_running_stats=not assigns)
        self.assigns = assigns
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: torch.Tensor, t: float = 0.0, *, a: object = None, b: object = None) -> torch.Tensor:
        if self.assigns:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
            x = x - self.mean
        return super().forward(self.norm(x.flatten(0, 1)).view_as(x), t)


@pytest.mark.parametrize("assigns", [False, True])
@pytest.mark.parametrize(
    ("acts", "out", "says"),
    [("keep", "", ""), ("recompute", "", "run again"), ("keep", "out", "are com"), ("host padded", "", "run again")],
)
def test_buffers_that_forward_changes_are_refused_where_they_matter(
    acts: str, out: str, says: str, assigns: bool, tmp_path: Path
) -> None:
    model = OfScaled("number")
    model.layers = nn.ModuleList(_Normed(assigns) for _ in range(2))
    batches = told(3)
    action: Any = acts.partition(" ")[0]
    schedule = schedule_for(model, UnitPlan(acts=action), traced=batches[0])
    assert schedule.step is not None
    training = replace(schedule.step.training, padded=acts != action)
    schedule = replace(schedule, step=replace(schedule.step, training=training))
    more: dict[str, Any] = {"out_dir": tmp_path / "out"} if out else {}
    if says:
        changed = "mean" if assigns else "norm"
        with pytest.raises(TrainingError, match=rf"forward changes 'layers\.0\.{changed}.*, but .* {says}"):
            train(schedule, model, batches, steps=3, nvme_dir=tmp_path, **more)
        return
    plain = train_as_plainly(schedule, model, batches, nvme_dir=tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), plain.buffers(), strict=True))


class _Anew(_Scaled):
    """A block that makes its table anew in each forward, with the same values."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__("number")
        self.register_buffer("table", torch.linspace(0, 1, 16))

    def forward(self, x: torch.Tensor, t: float = 0.0, *, a: object = None, b: object = None) -> torch.Tensor:
        self.table = torch.linspace(0, 1, 16)
        return super().forward(x * self.table, t)


def test_a_buffer_with_the_same_values_in_place_of_another_changes_nothing(tmp_path: Path) -> None:
    model = OfScaled("number")
    model.layers = nn.ModuleList(_Anew() for _ in range(2))
    schedule = schedule_for(model, UnitPlan(acts="recompute"), traced=told(1)[0])
    train_as_plainly(schedule, model, told(3), nvme_dir=tmp_path, out_dir=tmp_path / "out")


def test_training_within_autocast_is_refused(tmp_path: Path) -> None:
    model = make_model("gpt2")
    schedule = schedule_for(model)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TrainingError, match="within torch"):
        train(schedule, model, make_batches(1), steps=1, nvme_dir=tmp_path)


class _Looking(nn.Module):
    """A block that looks at what the first one has as its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x) + first)


class _OfLooking(OwnModel):
    copies = True

    def through(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().through(x, x.clone() if self.copies else x)


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("place", ["keep", "host", "nvme"])
def test_an_input_that_later_blocks_read_does_not_leave_the_device(place: Action, copies: bool, tmp_path: Path) -> None:
    """Refused by name, where its bytes would be gone. A copy is shared by all, and stays."""
    batches, model = make_batches(3), _OfLooking(_Looking() for _ in range(3))
    model.copies = copies
    schedule = schedule_for(model, UnitPlan(input=place), traced=batches[0])
    if place != "keep" and not copies:
        with pytest.raises(ModelError, match="'L1' reads what 'L0' has as its input, which the plan takes off"):
            train(schedule, model, batches, steps=3, nvme_dir=tmp_path)
        return
    train_as_plainly(schedule, model, batches, nvme_dir=tmp_path)


class _Peeking(OfScaled):
    """A model that looks at a weight without a gradient, in front of its blocks or behind them."""

    def __init__(self, looks_at: str, way: str, *, behind: bool = False) -> None:
        super().__init__("number")
        self.looks_at, self.way_to_look, self.behind, self.norms = looks_at, way, behind, list[float]()

    def _look(self) -> None:
        weight = self.get_submodule(self.looks_at).weight
        with torch.set_grad_enabled(self.way_to_look != "no_grad"):
            self.norm = (weight.detach() if self.way_to_look == "detach" else weight).norm().detach()

    def through(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if not self.behind:
            self._look()
        x = super().through(x, 1.0)
        if self.behind:
            self._look()
        return x


@pytest.mark.parametrize("way", ["no_grad", "detach"])
def test_a_weight_that_is_looked_at_in_front_of_where_it_is_trained_is_refused_by_name(way: str) -> None:
    """It was said to have no gradient, which it has behind the blocks."""
    why = r"'head\.weight' is trained behind block 1, but .* in front of block 0"
    with pytest.raises(ModelError, match=why):
        split_model(_Peeking("head", way), make_batches(1)[0])
    with pytest.raises(WorkloadError, match=why):
        trace_module(_Peeking("head", way), make_batches(1)[0], CPU)


@pytest.mark.parametrize(("looks_at", "behind"), [("embed", False), ("embed", True), ("head", True)])
def test_a_weight_may_be_looked_at_where_it_is_trained_and_behind_it(
    looks_at: str, behind: bool, tmp_path: Path
) -> None:
    model, batches = _Peeking(looks_at, "no_grad", behind=behind), make_batches(3)
    choice = UnitPlan(params="host", grads="host", states="host", acts="host")
    plain: Any = train_as_plainly(schedule_for(model, choice, traced=batches[0]), model, batches, nvme_dir=tmp_path)
    assert torch.equal(model.norm, plain.norm)


class _Product(torch.autograd.Function):
    """A product that keeps what its backward needs as PyTorch wants it, or some of it as an attribute."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, keeps: str) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.held = {"nothing": (), "weight": (weight.detach(),), "input": (x,)}[keeps]
        ctx.name = keeps
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (gradient,), (x, weight) = grads, ctx.saved_tensors
        x, weight = (*ctx.held, weight) if ctx.name == "input" else (x, *(ctx.held or (weight,)))
        return gradient @ weight, gradient.flatten(0, 1).t() @ x.flatten(0, 1), None


class _Keeping(nn.Module):
    def __init__(self, keeps: str) -> None:
        super().__init__()
        self.inner, self.keeps = nn.Linear(16, 16, bias=False), keeps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(_Product.apply(x, self.inner.weight, self.keeps))  # type: ignore[no-untyped-call]


def _of_keeping(keeps: str) -> OwnModel:
    return OwnModel(_Keeping(keeps) for _ in range(5))


@pytest.mark.parametrize("keeps", ["weight", "input"])
def test_a_function_that_keeps_a_weight_or_an_input_as_an_attribute_is_refused_by_name(keeps: str) -> None:
    """Its backward computed with whatever lay there by then, such as another block's weight, without a word."""
    what = r"parameter 'layers\.\d\.inner\.weight'" if keeps == "weight" else r"an input of block 'layers\.\d'"
    why = rf"_ProductBackward keeps {what} as an attribute of its ctx, .* ctx\.save_for_backward"
    with pytest.raises(ModelError, match=why):
        split_model(_of_keeping(keeps), make_batches(1)[0])
    with pytest.raises(WorkloadError, match=why):
        trace_module(_of_keeping(keeps), make_batches(1)[0], CPU)


def test_a_function_that_saves_a_weight_and_an_input_is_like_any_other(tmp_path: Path) -> None:
    model, batches = _of_keeping("nothing"), make_batches(3)
    choice = UnitPlan(params="nvme", grads="host", states="host", input="host")
    train_as_plainly(schedule_for(model, choice, traced=batches[0]), model, batches, nvme_dir=tmp_path)


def _choice(kind: str) -> Any:
    match kind:
        case "autocast":
            return torch.autocast("cpu", torch.bfloat16)
        case "sdpa_kernel":
            return sdpa_kernel(SDPBackend.MATH)
    return nullcontext()


class _Attending(_Scaled):
    """A block that chooses how it attends."""

    def forward(self, x: torch.Tensor, t: float = 0.0, *, a: object = None, b: object = None) -> torch.Tensor:
        with _choice(self.way):
            y = torch.tanh(self.inner(x)).view(*x.shape[:2], 2, 8).transpose(1, 2)
            y = nn.functional.scaled_dot_product_attention(y, y, y, is_causal=True)
            return x + y.transpose(1, 2).reshape(x.shape)


class _Around(OwnModel):
    """A model that chooses it around its blocks, or lets them."""

    def __init__(self, kind: str, inside: bool) -> None:
        super().__init__(_Attending(kind if inside else "") for _ in range(2))
        self.around = "" if inside else kind

    def through(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        with _choice(self.around):
            return super().through(x).float()


@pytest.mark.parametrize("acts", ["keep", "recompute"])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("kind", ["autocast", "sdpa_kernel"])
def test_a_block_is_not_run_again_outside_of_what_the_model_chose_around_it(
    kind: str, inside: bool, acts: Action, tmp_path: Path
) -> None:
    """It was said to save other tensors then, or ended within PyTorch."""
    model, batches = _Around(kind, inside), make_batches(3)
    schedule = schedule_for(model, UnitPlan(acts=acts), traced=batches[0])
    if acts == "recompute" and not inside:
        with pytest.raises(ModelError, match=rf"'L1' runs within .*{kind}.*, but it is run again outside of that"):
            train(schedule, model, batches, steps=3, nvme_dir=tmp_path)
        return
    train_as_plainly(schedule, model, batches, nvme_dir=tmp_path)


class _InTwo(OwnModel):
    """Two lists of blocks, and something trained between them, which takes what was drawn and counted in front of the
    first one."""

    calls = 0

    def __init__(self, way: str) -> None:
        super().__init__(_Scaled("number") for _ in range(2))
        self.later, self.middle, self.way = nn.ModuleList(_Scaled("number") for _ in range(2)), nn.Linear(16, 16), way

    def through(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        self.calls += self.way == "counted"
        order = torch.rand(x.shape[1]).argsort() if self.way == "drawn" else torch.arange(x.shape[1])
        x = torch.tanh(self.middle(super().through(x))[:, order]) * (1 + self.calls)
        for layer in self.later:
            x = layer(x)
        return x


@pytest.mark.parametrize("seed", [0, None])
@pytest.mark.parametrize("way", ["drawn", "counted"])
def test_what_is_made_again_between_blocks_is_of_what_was_drawn_in_front_of_them(
    way: str, seed: int | None, tmp_path: Path
) -> None:
    """As ViTMAE's order of patches, by which it looks for them behind its encoder."""
    model, batches = _InTwo(way), make_batches(3)
    schedule = schedule_for(model, UnitPlan(acts="recompute"), traced=batches[0])
    plain = copy.deepcopy(model)
    torch.manual_seed(1)
    losses = train_plainly(plain, batches, steps=3, seed=seed)
    torch.manual_seed(1)
    assert list(train(schedule, model, batches, steps=3, nvme_dir=tmp_path, seed=seed).losses) == losses
    assert same_weights(model, plain)
