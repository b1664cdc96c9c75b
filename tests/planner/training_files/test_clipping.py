"""By what norm gradients are clipped beside DeepSpeed, as accelerate and transformers themselves fill it in."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.planner.training_files.test_reading import BASE, written
from tierplan.cli import main
from tierplan.planner.training_files import read_training_file

ZERO = {"zero_optimization": {"stage": 2}}
SAID = [{}, {"gradient_clipping": "auto"}, {"gradient_clipping": 0.5}, {"gradient_clipping": 0}]


@pytest.mark.parametrize("said", SAID)
@pytest.mark.parametrize("own", [{}, {"max_grad_norm": 0.5}])
def test_the_trainers_norm_is_deepspeeds_where_its_file_says_auto_and_nowhere_else(
    tmp_path: Path, own: dict[str, float], said: dict[str, object]
) -> None:
    theirs = pytest.importorskip("transformers.integrations.deepspeed").HfTrainerDeepSpeedConfig
    config = pytest.importorskip("accelerate.utils.deepspeed").HfDeepSpeedConfig({**said})
    config.mismatches = []
    theirs.fill_match(config, "gradient_clipping", own.get("max_grad_norm", 1.0), "max_grad_norm")
    expected = config.config.get("gradient_clipping", 0.0)  # DeepSpeed's default, by which nothing is clipped
    path = written(tmp_path, {"output_dir": "x", **own, "deepspeed": {**ZERO, **said}})
    if config.mismatches and own:
        with pytest.raises(ValueError, match=r"max_grad_norm is 0\.5, but DeepSpeed's gradient_clipping"):
            read_training_file(path, BASE)
        return
    found = read_training_file(path, BASE)
    assert found.training.max_grad_norm == (expected or None)
    not_used = f"max_grad_norm {own.get('max_grad_norm', 1.0)} is not used"
    assert any(not_used in note for note in found.notes) == (not said)


@pytest.mark.parametrize("said", [*SAID, {"gradient_clipping": None}])
@pytest.mark.parametrize("in_file", [False, True])
def test_accelerate_clips_by_1_where_its_own_section_says_nothing_and_where_a_file_says_auto(
    tmp_path: Path, said: dict[str, object], in_file: bool
) -> None:
    plugin_of = pytest.importorskip("accelerate.utils").DeepSpeedPlugin
    plugin = plugin_of(hf_ds_config={**ZERO, **said}) if in_file else plugin_of(**said)
    plugin.fill_match("gradient_clipping", must_match=False, gradient_clipping=1.0)  # as `_prepare_deepspeed` does
    (tmp_path / "beside.json").write_text(json.dumps({**ZERO, **said}))
    section = {"deepspeed_config_file": "beside.json"} if in_file else {"zero_stage": 2, **said}
    path = written(tmp_path, {"distributed_type": "DEEPSPEED", "deepspeed_config": section})
    found = read_training_file(path, BASE)
    assert found.training.max_grad_norm == (plugin.deepspeed_config.get("gradient_clipping") or None)
    is_filled = plugin.deepspeed_config.get("gradient_clipping") == 1.0
    assert any("gradient_clipping is auto" in note for note in found.notes) == is_filled


@pytest.mark.parametrize(("given", "auto"), [(2.0, 2.0), (None, 1.0)])
def test_a_file_of_deepspeed_alone_clips_where_it_says_so(tmp_path: Path, given: float | None, auto: float) -> None:
    """`auto` is filled in by accelerate or the Trainer, which have 1.0."""
    base = replace(BASE, max_grad_norm=given)
    found = [read_training_file(written(tmp_path, {**ZERO, **said}), base) for said in SAID]
    assert [of.training.max_grad_norm for of in found] == [None, auto, 0.5, None]
    is_noted = ["gradient_clipping is auto" in " ".join(of.notes) for of in found]
    assert is_noted == [False, given is None, False, False]


def test_an_option_to_clip_where_deepspeed_does_not_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["explain-run", "--model", "gpt2", "--machine", "desktop-4090", "--step-s", "1", "--max-grad-norm", "1"]
    for content in (ZERO, {"output_dir": "x", "deepspeed": ZERO}):
        path = written(tmp_path, content)
        assert main([*asked, "--config", str(path)]) == 1
        assert f"--max-grad-norm is 1.0, but {path} says none" in capsys.readouterr().err
