"""Parameters that are treated differently, or not trained at all: with the bits of PyTorch's parameter groups."""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from tests.runtime.models import make_batches, make_model
from tests.runtime.test_trainer import CPU, check
from tierplan.planner.plan import UnitPlan
from tierplan.runtime.autograd.units import ModelError, split_model
from tierplan.runtime.optim.adam import OptimizerSettings, ParameterGroup
from tierplan.runtime.optim.groups import GroupError, check_groups, segments, without_decay
from tierplan.runtime.tracing.models import matching
from tierplan.sim.workloads.workload import WorkloadError

pytestmark = pytest.mark.usefixtures("one_thread")

AWAY = UnitPlan(params="nvme", grads="host", states="nvme", acts="recompute", input="host")
HERE = UnitPlan()


@pytest.mark.sampled
@pytest.mark.parametrize("family", ["gpt2", "opt", "llama", "bert", "t5"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("choice", "clip"), [(AWAY, None), (HERE, 0.5)])
def test_no_decay_for_biases_and_norms(
    family: str, dtype: str, choice: UnitPlan, clip: float | None, tmp_path: Path
) -> None:
    model = make_model(family, num_blocks=2, dropout=0.1, dtype=dtype)
    settings = OptimizerSettings(lr=1e-2, weight_decay=0.3, groups=(without_decay(model),))
    training = replace(CPU, dtype=dtype, gradient_accumulation_steps=2, max_grad_norm=clip)  # type: ignore[arg-type]
    check(model, training, choice, tmp_path, optimizer=settings)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_rates_of_their_own(optimizer: str, tmp_path: Path) -> None:
    model = make_model("gpt2")
    names = [name for name, _ in model.named_parameters()]
    groups = (
        ParameterGroup(names=tuple(n for n in names if ".h.1." in n), lr_factor=0.3),
        ParameterGroup(names=("transformer.wte.weight", "transformer.h.0.ln_1.bias"), weight_decay=0.5, lr_factor=3.0),
    )
    settings = OptimizerSettings(name=optimizer, lr=1e-2, weight_decay=0.1, groups=groups)  # type: ignore[arg-type]
    training = replace(CPU, optimizer=optimizer)  # type: ignore[arg-type]
    choice = replace(AWAY, states="host")
    check(model, training, choice, tmp_path, optimizer=settings, learning_rate=lambda step: 0.01 / (step + 1))


FROZEN: dict[str, Callable[[str], bool]] = {
    "embedding": lambda name: ".wte." in name or ".wpe." in name,
    "first blocks": lambda name: ".h.0." in name or ".h.1." in name,
    "all but biases": lambda name: not name.endswith("bias"),
    "all but the last norm": lambda name: ".ln_f." not in name,
    "some of each": lambda name: "mlp" in name,
}


@pytest.mark.sampled
@pytest.mark.parametrize("which", list(FROZEN))
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("choice", "accumulation", "clip"), [(AWAY, 2, None), (HERE, 1, 0.5)])
def test_frozen_parameters(
    which: str, dtype: str, choice: UnitPlan, accumulation: int, clip: float | None, tmp_path: Path
) -> None:
    model = make_model("gpt2", dropout=0.1, dtype=dtype)
    for name, p in model.named_parameters():
        p.requires_grad_(not FROZEN[which](name))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    training = replace(CPU, dtype=dtype, gradient_accumulation_steps=accumulation, max_grad_norm=clip)  # type: ignore[arg-type]
    check(model, training, choice, tmp_path, optimizer=OptimizerSettings(lr=1e-2, weight_decay=0.3))
    changed = {name for name, p in model.named_parameters() if not p.equal(before[name])}
    assert changed == {name for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.sampled
@pytest.mark.parametrize("family", ["gpt2", "opt", "llama", "bert"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("choice", "accumulation", "clip"), [(AWAY, 2, None), (HERE, 1, 0.5)])
def test_frozen_by_patterns(
    family: str, dtype: str, choice: UnitPlan, accumulation: int, clip: float | None, tmp_path: Path
) -> None:
    """Parts of units, and whole ones below the first that is trained."""
    model = make_model(family, dropout=0.1, dtype=dtype)
    patterns = ["*embed*", "*wte*", "*layers.0.*", "*.layer.0.*", "*.h.0.*", "*bias"]
    names = [name for name, _ in model.named_parameters()]
    frozen = matching(model, [p for p in patterns if fnmatch.filter(names, p)])
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    settings = OptimizerSettings(lr=1e-2, weight_decay=0.3, groups=(without_decay(model),))
    training = replace(CPU, dtype=dtype, gradient_accumulation_steps=accumulation, max_grad_norm=clip)  # type: ignore[arg-type]
    check(model, training, choice, tmp_path, optimizer=settings)
    assert {name for name, p in model.named_parameters() if p.equal(before[name])} == set(frozen)


def test_segments_are_as_few_as_can_be() -> None:
    model = make_model("gpt2", num_blocks=1)
    units = split_model(model, make_batches(1)[0])
    assert [s.length for s in segments(units[0], OptimizerSettings())] == [units[0].num_trained]
    found = segments(units[1], OptimizerSettings(weight_decay=0.1, groups=(without_decay(model),)))
    assert sum(s.length for s in found) == units[1].num_trained
    assert {s.weight_decay for s in found} == {0.0, 0.1}
    assert all(a.weight_decay != b.weight_decay for a, b in itertools.pairwise(found))


def test_groups_that_do_not_fit_say_so() -> None:
    names = [name for name, _ in make_model("gpt2").named_parameters()]
    wrong = OptimizerSettings(groups=(ParameterGroup(names=("lm_head.weight",)),))
    with pytest.raises(GroupError, match=r"'lm_head.weight', but the model has no such parameter"):
        check_groups(wrong, names)
    twice = OptimizerSettings(groups=(ParameterGroup(names=(names[0],)), ParameterGroup(names=(names[0],))))
    with pytest.raises(GroupError, match="is in two groups"):
        check_groups(twice, names)


def test_patterns_match_names_and_each_matches_one() -> None:
    model = make_model("gpt2", num_blocks=2)
    assert matching(model, ["*.ln_f.*", "*wte*"]) == (
        "transformer.wte.weight",
        "transformer.ln_f.weight",
        "transformer.ln_f.bias",
    )
    with pytest.raises(WorkloadError, match=r"no parameter of GPT2LMHeadModel matches 'lm_head\*'; its names"):
        matching(model, ["*wte*", "lm_head*"])


def test_a_model_that_is_frozen_altogether_is_refused() -> None:
    model: nn.Module = make_model("gpt2").requires_grad_(False)
    with pytest.raises(ModelError, match="there is nothing to train"):
        split_model(model, make_batches(1)[0])
