"""Weights go in and out unit by unit: what is exported is what `from_pretrained` loads, and no model is ever whole."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from tests.runtime.models import make_batches, make_model, observed_workload, schedule_for
from tests.runtime.test_trainer import CPU, machine
from tests.toys import uniform_plan
from tierplan.planner.lowering import lower
from tierplan.planner.plan import UnitPlan
from tierplan.runtime.autograd.units import split_model
from tierplan.runtime.checkpoint import weights as weights_module
from tierplan.runtime.checkpoint.weights import (
    WeightsError,
    checkpoint_weights,
    export,
    has_weights,
    hollow_model,
    random_weights,
)
from tierplan.runtime.execution.placement import Weights
from tierplan.runtime.trainer import Trainer

FAMILIES = ("gpt2", "opt", "llama", "bert")
NVME = UnitPlan(params="nvme", grads="host", states="nvme")


def raw_config(model: nn.Module) -> dict[str, object]:
    config: Any = model.config
    return {**config.to_dict(), "architectures": [type(model).__name__]}


def bytes_with_memory(model: nn.Module) -> int:
    return sum(p.untyped_storage().nbytes() for p in model.parameters())


def all_of(weights: Weights, model: nn.Module) -> dict[str, torch.Tensor]:
    """By parameter, what comes unit by unit."""
    units = split_model(model, make_batches(1)[0])
    return {name: t.clone() for unit in units for (name, _), t in zip(unit.parameters, weights(unit), strict=True)}


def read_whole(model: nn.Module, folder: Path) -> dict[str, torch.Tensor]:
    """As `tierplan run --model folder` reads it."""
    return all_of(checkpoint_weights(model, folder), model)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_hollow_model_has_everything_but_parameters(family: str) -> None:
    whole = make_model(family)
    hollow = hollow_model(raw_config(whole), CPU)
    assert [(n, p.shape) for n, p in hollow.named_parameters()] == [(n, p.shape) for n, p in whole.named_parameters()]
    assert bytes_with_memory(hollow) < 1000
    for (name, a), (_, b) in zip(hollow.named_buffers(), whole.named_buffers(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_follow_the_model_s_own_rule(family: str) -> None:
    whole = make_model(family)
    hollow = hollow_model(raw_config(whole), CPU)
    reference = dict(whole.named_parameters())
    for name, made in all_of(random_weights(hollow, seed=1), hollow).items():
        expected = reference[name]
        assert made.shape == expected.shape
        assert float(made.detach().std()) == pytest.approx(float(expected.detach().std()), rel=0.25, abs=1e-6), name
        assert float(made.detach().mean()) == pytest.approx(float(expected.detach().mean()), abs=0.01), name


def test_random_weights_depend_on_the_seed_and_nothing_else() -> None:
    def made(seed: int, noise: int) -> list[torch.Tensor]:
        torch.manual_seed(noise)
        hollow = hollow_model(raw_config(make_model("gpt2")), CPU)
        return [*all_of(random_weights(hollow, seed=seed), hollow).values()]

    assert all(torch.equal(a, b) for a, b in zip(made(1, 5), made(1, 6), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(made(1, 5), made(2, 5), strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_exported_models_load_with_from_pretrained_and_come_back(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    schedule = schedule_for(model, NVME)
    with Trainer(schedule, model, nvme_dir=tmp_path / "nvme") as trainer:
        trainer.run(make_batches(2), 2)
        export(trainer, tmp_path / "model")
        trainer.restore_model()
    cls: Any = type(model)
    loaded = cls.from_pretrained(tmp_path / "model")
    for (name, a), (_, b) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    model.eval()
    batch = make_batches(1)[0]
    assert torch.equal(model(**batch).loss, loaded(**batch).loss)
    trained = dict(model.named_parameters())
    for name, tensor in read_whole(hollow_model(raw_config(model), CPU), tmp_path / "model").items():
        assert torch.equal(tensor, trained[name]), name


def test_an_export_that_is_cut_off_leaves_nothing_that_loads_or_all_of_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over an earlier export it left weights of two steps, which loaded in silence."""
    model = make_model("gpt2")
    schedule = schedule_for(model)
    left = -1

    def counted(operation: Any) -> Any:
        def work(*args: Any) -> None:
            nonlocal left
            if left == 0:
                raise OSError(errno.ENOSPC, "full")
            left -= 1
            operation(*args)

        return work

    def exported(trainer: Trainer, most: int) -> bool:
        nonlocal left
        left = most
        try:
            export(trainer, folder)
        except OSError:
            return False
        return True

    def found() -> dict[str, torch.Tensor]:
        return {name: p.detach() for name, p in model.from_pretrained(folder).named_parameters()}  # type: ignore[operator]

    for name in ("write_atomically", "remove_file"):
        monkeypatch.setattr(weights_module, name, counted(getattr(weights_module, name)))
    folder, hollow = tmp_path / "model", hollow_model(raw_config(model), CPU)
    with Trainer(schedule, model, nvme_dir=tmp_path / "nvme") as trainer:
        trainer.run(make_batches(1), 1)
        assert exported(trainer, -1)
        first = tmp_path / "first"
        shutil.copytree(folder, first)
        old = found()
        trainer.run(make_batches(2)[1:], 1)
        assert exported(trainer, -1)
        new = found()
        assert not all(torch.equal(old[name], new[name]) for name in new)
        most, outcomes = 0, set[str]()
        while True:
            shutil.rmtree(folder)
            shutil.copytree(first, folder)
            is_whole = exported(trainer, most)
            for read in (found, lambda: read_whole(hollow, folder)):
                try:
                    loaded = read()
                except (OSError, WeightsError):
                    outcomes.add("refused")
                    assert not is_whole
                    continue
                which = {all(torch.equal(loaded[name], of[name]) for name in loaded) for of in (old, new)}
                assert True in which, f"a mixture, after {most} operations"
                outcomes.add("loaded")
            if is_whole:
                break
            most += 1
    assert outcomes == {"refused", "loaded"}
    assert most > len(list(first.glob("*.safetensors")))
    (folder / "model.safetensors").write_bytes(b"of someone who saved it as one")
    (other := folder / "model_of_mine.safetensors").write_bytes(b"is nobody's business")
    with Trainer(schedule, model, nvme_dir=tmp_path / "nvme") as trainer:
        trainer.run(make_batches(1), 1)
        assert exported(trainer, -1)
    assert found()
    assert other.exists()


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    make_model("gpt2").save_pretrained(tmp_path)  # type: ignore[operator]
    batch = make_batches(1)[0]
    other = hollow_model(raw_config(make_model("opt")), CPU)
    with pytest.raises(WeightsError, match=r"has no tensor 'model\.decoder"):
        checkpoint_weights(other, tmp_path)(split_model(other, batch)[0])
    mixtral = hf.MixtralForCausalLM(
        hf.MixtralConfig(
            vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, num_local_experts=4, max_position_embeddings=64,
        )
    )  # fmt: skip
    hollow, tiny = hollow_model(raw_config(mixtral), CPU), {k: v.remainder(64) for k, v in batch.items()}
    write: Any = mixtral.save_pretrained
    write(tmp_path / "renamed")
    with pytest.raises(WeightsError, match="save it once more"):
        [checkpoint_weights(hollow, tmp_path / "renamed")(unit) for unit in split_model(hollow, tiny)]
    write(tmp_path / "anew", save_original_format=False)
    assert [checkpoint_weights(hollow, tmp_path / "anew")(unit) for unit in split_model(hollow, tiny)]
    wider = hollow_model({**raw_config(make_model("gpt2")), "n_positions": 32}, CPU)
    with pytest.raises(WeightsError, match=r"shape \(64, 32\), but the model needs \(32, 32\)"):
        checkpoint_weights(wider, tmp_path)(split_model(wider, batch)[0])
    (tmp_path / "empty").mkdir()
    with pytest.raises(WeightsError, match="holds no"):
        checkpoint_weights(wider, tmp_path / "empty")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json", "model-Q4_K_M.gguf"])
def test_weights_in_a_format_that_is_not_read_are_not_passed_over(name: str, tmp_path: Path) -> None:
    """They were, in silence, for random ones."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "training_args.bin").touch()
    assert not has_weights(tmp_path)
    (tmp_path / name).touch()
    with pytest.raises(WeightsError, match=rf"holds '{name}' and no \*\.safetensors, which alone is read"):
        has_weights(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert has_weights(tmp_path)


def test_an_index_without_its_files_is_a_checkpoint_that_is_not_whole(tmp_path: Path) -> None:
    model = make_model("gpt2")
    model.save_pretrained(tmp_path, max_shard_size="50KB")  # type: ignore[operator]
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    assert has_weights(tmp_path)
    hollow = hollow_model(raw_config(model), CPU)
    with pytest.raises(WeightsError, match="is no whole safetensors file"):
        checkpoint_weights(hollow, tmp_path)(split_model(hollow, make_batches(1)[0])[0])


def test_a_hollow_model_trains_like_a_whole_one(tmp_path: Path) -> None:
    whole = make_model("gpt2")
    whole.save_pretrained(tmp_path / "start")  # type: ignore[operator]
    schedule = schedule_for(whole, NVME)
    losses = []
    hollow = hollow_model(raw_config(whole), CPU)
    for model, weights in ((whole, None), (hollow, checkpoint_weights(hollow, tmp_path / "start"))):
        with Trainer(schedule, model, nvme_dir=tmp_path / "nvme", weights=weights) as trainer:
            trainer.run(make_batches(3), 3)
            losses.append(trainer.result().losses)
    assert losses[0] == losses[1]
    assert bytes_with_memory(hollow) < 1000


def test_buffers_of_a_checkpoint_are_read_and_written(tmp_path: Path) -> None:
    """DeepSeek's routers have a bias that is no parameter: it decides which experts a token meets."""
    config = hf.DeepseekV3Config(
        vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64, n_routed_experts=4,
        n_shared_experts=1, num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=0,
        q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
    )  # fmt: skip
    whole: Any = hf.DeepseekV3ForCausalLM(config)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    bias = dict(whole.named_buffers())[name]
    bias.copy_(torch.tensor([0.5, -1.0, 2.0, 0.0]))
    batch = {k: v.remainder(64) for k, v in make_batches(1)[0].items()}
    hollow = hollow_model(raw_config(whole), CPU)
    write = whole.save_pretrained
    write(tmp_path / "start", save_original_format=False)
    weights = checkpoint_weights(hollow, tmp_path / "start")
    assert torch.equal(dict(hollow.named_buffers())[name], bias)
    schedule = lower(uniform_plan(workload := observed_workload(whole, batch, CPU), UnitPlan()), workload, machine())
    with Trainer(schedule, hollow, weights=weights) as trainer:
        trainer.run([batch], 1)
        export(trainer, tmp_path / "end")
    loaded, wrong = hf.DeepseekV3ForCausalLM.from_pretrained(tmp_path / "end", output_loading_info=True)
    assert not wrong["missing_keys"]
    assert torch.equal(dict(loaded.named_buffers())[name], bias)
