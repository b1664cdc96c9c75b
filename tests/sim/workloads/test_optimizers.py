"""What optimizers keep: against what PyTorch's own and torchao's hold, published figures, and sums over parts."""

from dataclasses import replace

import pytest
import torch

from tierplan.sim.contents import shard
from tierplan.sim.workloads.models import load_workload
from tierplan.sim.workloads.optimizers import OPTIMIZERS, optimizer_of
from tierplan.sim.workloads.workload import Training, WorkloadError

SPECS = ("adamw", "sgd", "sgd:momentum=0.9", "lion", "lion:states=8bit", "adamw:states=bf16", "adamw:states=8bit")
SPECS += ("adamw:states=bf16-stochastic", "adamw:states=4bit", "muon", "adafactor", "galore:rank=64", "apollo:rank=64")


def bytes_per_parameter(spec: str) -> float:
    """Moments of the blocks of Llama 2 7B, without a master copy."""
    workload = load_workload("llama-2-7b", Training(optimizer=spec, master_weights=False))
    return workload.training.states_bytes(workload.blocks[0]) / workload.blocks[0].num_parameters


@pytest.mark.parametrize(
    ("spec", "wanted"),
    [
        ("adamw", 8.0),
        ("adamw:states=bf16", 4.0),
        ("adamw:states=bf16-stochastic", 4.0),
        ("adamw:states=8bit", 2.03),  # bitsandbytes, torchao
        ("adamw:states=4bit", 1.06),  # torchao
        ("adamw:states=4bit-256", 1.03),  # as `transformers` sets it
        ("sgd", 0.0),
        ("sgd:momentum=0.9", 4.0),
        ("lion", 4.0),
        ("muon", 4.0),
        ("adafactor", 4 * (1 / 4096 + 1 / 4096)),
    ],
)
def test_published_bytes_per_parameter(spec: str, wanted: float) -> None:
    assert bytes_per_parameter(spec) == pytest.approx(wanted, rel=3e-3, abs=1e-3)


def test_low_rank_states_by_hand() -> None:
    training = Training(optimizer="galore:rank=8")
    unit = load_workload("gpt2", training).blocks[0]
    matrices = [shape for shape in unit.shapes if len(shape) == 2]
    vectors = sum(shape[0] for shape in unit.shapes if len(shape) == 1)
    projected = sum(2 * 8 * max(shape) + 8 * min(shape) for shape in matrices)  # two moments and the projector
    assert training.states_bytes(unit) == 4 * (projected + 2 * vectors + unit.num_parameters)


@pytest.mark.parametrize(
    ("spec", "make"),
    [
        ("adamw", lambda p: torch.optim.AdamW(p, fused=True)),
        ("sgd:momentum=0.9", lambda p: torch.optim.SGD(p, momentum=0.9)),
        ("adafactor", lambda p: torch.optim.Adafactor(p)),
    ],
)
def test_bytes_are_those_that_pytorch_holds(spec: str, make: object) -> None:
    shapes = ((64, 48), (48,), (30, 7))
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer = make(parameters)  # type: ignore[operator]
    optimizer.step()
    tensors = (t for state in optimizer.state.values() for t in state.values() if t is not None)
    held = sum(t.nbytes for t in tensors if t.numel() > 1)
    training, unit = Training(dtype="fp32", optimizer=spec), load_workload("gpt2", Training()).blocks[0]
    unit = replace(unit, shapes=shapes, num_parameters=sum(p.numel() for p in parameters))
    assert training.states_bytes(unit) == held


@pytest.mark.parametrize("spec", SPECS)
def test_parts_add_up_and_are_cut_where_the_optimizer_allows_it(spec: str) -> None:
    training = Training(optimizer=spec)
    for unit in load_workload("llama-3.2-1b", training).units[:2]:
        parts = training.state_parts(unit, 8)
        assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
        assert parts[-1].stop == unit.num_parameters
        assert sum(training.states_bytes(unit, part) for part in parts) == training.states_bytes(unit)
        begins = [begin for begin, _, _ in unit.owned.tensors()]
        grain = optimizer_of(spec).grain
        for part in parts:
            inside = part.start - max(begin for begin in begins if begin <= part.start)
            assert inside == 0 if grain is None else inside % grain == 0


@pytest.mark.parametrize("spec", SPECS)
def test_a_part_without_parameters_costs_nothing(spec: str) -> None:
    """As the second of two shards of one parameter is: it counted as the whole unit."""
    training, block = Training(optimizer=spec), load_workload("gpt2", Training()).blocks[0]
    one = replace(block, shapes=((1,),), num_parameters=1)
    for unit, empty in ((one, shard(range(1), 1, 2)), (block, range(0)), (block, range(768, 768))):
        assert training.states_bytes(unit, empty) == 0
        assert not any(training.update_work(unit, empty).values())
        assert not any(training.host_work(unit, empty).values())
        assert training.states_bytes(unit, range(unit.num_trained)) == training.states_bytes(unit)


def test_specs_have_one_form_and_unknown_ones_are_refused_by_name() -> None:
    assert Training(optimizer="adamw:states=fp32").optimizer == "adamw"
    assert Training(optimizer="galore:rank=128").optimizer == "galore"
    for spec, message in (
        ("adamv", "did you mean 'adamw'"),
        ("adamw:bits=8", "those of adamw are .with defaults.: states=fp32"),
        ("adamw:states=3bit", "choose among fp32, bf16, 8bit, 4bit, 4bit-256"),
        ("galore:rank=many", "rank is 'many'; it must be a whole number"),
        ("galore:rank=0", "whole number of 1 or more"),
        ("sgd:momentum=1", "at least 0 and below 1"),
    ):
        with pytest.raises(WorkloadError, match=message):
            Training(optimizer=spec)
    with pytest.raises(WorkloadError, match="give dtype bf16"):
        Training(optimizer="adamw:states=bf16", dtype="fp32")


def test_moments_in_bf16_come_without_a_master_copy() -> None:
    assert not Training(optimizer="adamw:states=bf16").has_master


def test_an_optimizer_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """One moment in NF4, whatever that is good for."""
    from tierplan.sim.workloads import optimizers

    monkeypatch.setitem(OPTIMIZERS, "tiny", lambda: {"moments": optimizers._values("first", of="nf4"), "grain": 64})
    training = Training(optimizer="tiny")
    assert training.states_bytes(load_workload("gpt2", training).blocks[0]) < Training().states_bytes(
        load_workload("gpt2", Training()).blocks[0]
    )
