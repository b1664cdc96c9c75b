"""Own blocks: what is traced is what runs, and what cannot be so is refused while it is traced."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.runtime.models import CPU, VOCABULARY, OwnModel, make_batches, make_model, schedule_for, train_as_plainly
from tierplan.planner.plan import UnitPlan
from tierplan.runtime.autograd.units import ModelError, split_model
from tierplan.runtime.execution.values import SizeError
from tierplan.runtime.reference import same_weights, train_plainly
from tierplan.runtime.tracing.trace import trace_module
from tierplan.runtime.trainer import train
from tierplan.sim.workloads.workload import WorkloadError

pytestmark = pytest.mark.usefixtures("one_thread")


class _Block(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.inner, self.out, self.way = nn.Linear(16, 16), nn.Linear(16, 16), way
        self.recurrent = nn.LSTM(16, 16, batch_first=True) if way == "LSTM" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recurrent is not None:
            return x + self.recurrent(x)[0]  # type: ignore[no-any-return]
        hidden = torch.tanh(self.inner(x))
        if self.way == "hook":
            hidden.register_hook(lambda gradient: 0.5 * gradient)
        x = x + self.out(hidden)
        match self.way:
            case "transposed":
                return x.transpose(0, 1)
            case "expanded":
                return x.mean(1, keepdim=True).expand(x.shape)
            case "view":
                return torch.cat((x, x), -1)[..., :16]
        return x


class _Model(OwnModel):
    def __init__(self, way: str) -> None:
        torch.manual_seed(4)
        super().__init__(_Block(way) for _ in range(4))
        self.way = way
        if way == "no embedding":
            del self.embed
            self.embed = lambda input_ids: torch.ones(2, 16, 16)

    def through(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        for k, layer in enumerate(self.layers):
            x = layer(x.detach() if k == 2 and self.way == "detached" else x)
        return x

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:  # type: ignore[override]
        loss = super().forward(input_ids, labels)
        return {"loss": loss} if self.way == "dictionary" else loss


@pytest.mark.parametrize("way", ["hook", "dictionary", "transposed"])
@pytest.mark.parametrize("acts", ["host", "recompute"])
def test_what_runs_is_what_was_traced(way: str, acts: Any) -> None:
    model, batches = _Model(way), make_batches(4)
    choice = UnitPlan(params="host", grads="host", states="host", acts=acts)
    schedule = schedule_for(model, choice, replace(CPU, gradient_accumulation_steps=2), traced=batches[0])
    plain = train_as_plainly(schedule, model, batches)
    if way == "dictionary":  # the loss is the tensor that other models give
        other = _Model("")
        train_plainly(other, batches, steps=2, gradient_accumulation_steps=2)
        assert same_weights(plain, other)


@pytest.mark.parametrize("outer", [torch.no_grad, torch.inference_mode])
def test_a_model_is_traced_without_gradients_around_it(outer: Any) -> None:
    (batch,) = make_batches(1)
    with outer():
        traced = trace_module(make_model("gpt2"), batch, CPU)
    assert traced == trace_module(make_model("gpt2"), batch, CPU)


@pytest.mark.parametrize(
    ("way", "says"),
    [
        ("view", r"'L0' hands over a tensor of 2,048 bytes that lies in one of 4,096; .* \(clone\(\)\)"),
        ("expanded", r"'L0' hands over a tensor of 2,048 bytes that lies in one of 128.* \(clone\(\)\)"),
        ("detached", r"nothing that block 2 gets has a gradient, but 'embed' in front of it is trained"),
        ("no embedding", r"'embed' has no parameters, and what it hands to the first block has no gradient"),
    ],
)
def test_what_cannot_run_is_refused_while_it_is_traced(way: str, says: str) -> None:
    with pytest.raises(WorkloadError, match=says):
        trace_module(_Model(way), make_batches(1)[0], CPU)


@pytest.mark.parametrize("whole", [False, True], ids=["a layer", "a block"])
def test_blocks_that_share_parameters_are_refused_while_they_are_traced(whole: bool) -> None:
    """They would be counted once for each."""
    model = _Model("")
    if whole:
        model.layers[2] = model.layers[0]
    else:
        model.layers[2].inner.weight = model.layers[0].inner.weight  # type: ignore[union-attr, assignment]
    says = r"parameter 'layers\.2\.inner\.weight' is also one of 'layers\.0'; blocks must not share parameters"
    with pytest.raises(WorkloadError, match=says):
        trace_module(model, make_batches(1)[0], CPU)


def test_a_parameter_that_is_not_contiguous_is_refused_until_it_is() -> None:
    model, (batch,) = _Model(""), make_batches(1)
    weight = model.layers[1].out.weight
    assert isinstance(weight, nn.Parameter)
    weight.data = weight.detach().t()
    for look, error in ((partial(trace_module, training=CPU), WorkloadError), (split_model, ModelError)):
        with pytest.raises(error, match=r"parameter 'layers\.1\.out\.weight' is not contiguous"):
            look(model, batch)
    weight.data = weight.data.contiguous()
    assert split_model(model, batch)


def test_another_kernel_than_on_fake_tensors_is_an_error_that_says_so() -> None:
    model, batches = _Model("LSTM"), make_batches(1)
    schedule = schedule_for(model, traced=batches[0])
    with pytest.raises(SizeError, match=r"Where all is so, the model keeps other tensors .*: such as .*LSTMs"):
        train(schedule, model, batches, steps=1)


def test_a_model_whose_output_has_no_loss_is_told_what_is_taken() -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    with pytest.raises(ValueError, match=r"is a Tensor, which has no loss; .* labels .* give a `loss` function"):
        train_plainly(model, [{"input": torch.ones(2, 16)}], steps=1)


class _Routed(_Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, columns = (x.sum(-1) > 0).nonzero(as_tuple=True)
        return x.index_add(0, rows, x[rows] * self.inner(x[rows, columns]).unsqueeze(1))


def test_a_block_that_makes_as_many_values_as_its_input_says_is_refused_by_name() -> None:
    """As experts do that compute with their tokens alone. PyTorch said `aten.nonzero.default`, and no more."""
    model = _Model("")
    model.layers = nn.ModuleList(_Routed("") for _ in range(2))
    with pytest.raises(WorkloadError, match=r"_Model: it looks at the values of its inputs \(aten\.nonzero"):
        trace_module(model, make_batches(1)[0], CPU)
    with pytest.raises(ModelError, match="it looks at the values of its inputs"):
        split_model(model, make_batches(1)[0])


@pytest.mark.parametrize("way", ["whole", "part", "buffer"])
def test_parameters_that_share_memory_and_are_not_one_are_refused_by_name(way: str) -> None:
    """Each was trained by itself, where plain training changes both at once, twice, without a word."""
    model = _Model("")
    match way:
        case "whole":
            model.head.weight.data = model.embed.weight.data
        case "part":
            both = torch.cat([model.embed.weight.data.flatten(), torch.zeros(16)])
            model.embed.weight.data = both[:-16].view(VOCABULARY, 16)
            model.head.bias.data = both[-VOCABULARY:]
        case "buffer":
            model.register_buffer("seen", model.head.weight.data[0])
    why = f"'{'seen' if way == 'buffer' else 'embed.weight'}'.* share memory"
    with pytest.raises(ModelError, match=why):
        split_model(model, make_batches(1)[0])
    with pytest.raises(WorkloadError, match=why):
        trace_module(model, make_batches(1)[0], CPU)


def test_neighbours_in_one_memory_are_trained_as_any_others() -> None:
    model, batches = _Model(""), make_batches(2)
    plain, both = copy.deepcopy(model), torch.cat([model.head.weight.data.flatten(), model.head.bias.data])
    model.head.weight.data, model.head.bias.data = both[:-VOCABULARY].view(VOCABULARY, 16), both[-VOCABULARY:]
    schedule = schedule_for(model, UnitPlan(params="host", grads="host", states="host"), traced=batches[0])
    assert list(train(schedule, model, batches, steps=2).losses) == train_plainly(plain, batches, steps=2)
    assert same_weights(model, plain)
