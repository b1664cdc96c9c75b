"""A campaign's file: many configurations that are to be predicted and then run.

The file lists groups of runs. A group is one model family at one width, batch and sequence length. Right before its
runs comes a calibration run, with a model of a depth that none of the runs has.
"""

from __future__ import annotations

import os
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from math import inf
from pathlib import Path
from typing import Literal

from tierplan.hwmodels.values.records import Count, Positive, RecordError, Whole, decode

LEVELS = ("tight", "middle", "roomy")


class CampaignError(ValueError):
    """A campaign or an artifact that cannot be read; names the file and the entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One configuration of a group."""

    blocks: Count
    policy: str
    """A policy's name, or `planner`."""
    device: str = "roomy"
    """Budget of device memory. `roomy`: no op waits for memory. `tight`: 2 % more than the least with which the plan
    completes. `middle`: half-way. For the planner, a fraction of what plain training takes, such as `0.5`; its plan is
    then given 2 % more than it holds of that."""
    host: str = "roomy"
    """Budget of host memory, in the same words."""
    accumulation: Count = 1
    max_grad_norm: Positive | None = None
    options: Mapping[str, object] = field(default_factory=dict)

    @property
    def name(self) -> str:
        accumulation = f"-acc{self.accumulation}" if self.accumulation > 1 else ""
        clip = "" if self.max_grad_norm is None else "-clip"
        return f"{self.blocks}-blocks-{self.policy}-{self.device}-{self.host}{accumulation}{clip}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Runs of one model family at one width, batch and sequence length."""

    name: str
    config: Mapping[str, object]
    """The model's `config.json`, without its depth."""
    depth_key: str
    """Name of the depth in `config`: `n_layer`, `num_hidden_layers`."""
    batch: Count
    seq: Count
    dtype: str = "fp32"
    calibration_blocks: Count = 3
    """Depth of the calibration model, on which all predictions of this group rest."""
    runs: tuple[Run, ...]

    def model_config(self, blocks: int) -> dict[str, object]:
        """The `config.json` of a model of this group with that many blocks."""
        return {**self.config, self.depth_key: blocks}


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """Groups of runs, and how each run is executed."""

    name: str
    summary: str = ""
    steps: Count = 12
    """Optimizer steps of each run."""
    warmup_steps: Whole = 2
    """Steps of the first turn that are not counted; of each later turn, one is not."""
    turns: Count = 3
    """Turns in which each run is executed. Before each, the calibration model is trained for a step or a few."""
    interleaved: bool = False
    """The runs of a group take their turns alternately. All their models are then in memory at once."""
    device: Literal["any", "cuda"] = "any"
    """`cuda`: the models are too large for anything but a GPU. `any`: whatever device is there."""
    groups: tuple[Group, ...]

    @property
    def run_names(self) -> tuple[str, ...]:
        """`group/run` of all runs, in order."""
        return tuple(f"{g.name}/{r.name}" for g in self.groups for r in g.runs)

    @property
    def steps_by_turn(self) -> tuple[int, ...]:
        """Number of steps of each turn; the first also has the remainder of the division."""
        each, rest = divmod(self.steps, self.turns)
        return (each + rest, *[each] * (self.turns - 1))


def load_campaign(name_or_path: str | os.PathLike[str]) -> Campaign:
    """The campaign of a TOML file, or the one of that name that comes with tierplan. Raises `CampaignError`."""
    path = Path(name_or_path)
    known = {f.name.removesuffix(".toml"): f for f in files(__package__).joinpath("campaigns").iterdir()}
    if str(name_or_path) in known:
        text, where = known[str(name_or_path)].read_text(encoding="utf-8"), f"campaign {name_or_path}"
    elif path.is_file():
        try:
            text, where = path.read_text(encoding="utf-8-sig"), str(path)
        except UnicodeDecodeError as error:
            raise CampaignError(f"{path} is not text in UTF-8 ({error}); give another file") from error
    else:
        raise CampaignError(
            f"no campaign {str(name_or_path)!r}; give a TOML file, or one of {', '.join(sorted(known))}"
        )
    try:
        record = tomllib.loads(text)
        groups = [{**entry, "runs": entry.get("run", [])} for entry in record.pop("group", [])]
        for entry in groups:
            entry.pop("run", None)
        return _checked(decode(Campaign, {**record, "groups": groups}, complete=False), where)
    except tomllib.TOMLDecodeError as error:
        raise CampaignError(f"{where} is not TOML: {error}") from error
    except RecordError as error:
        raise CampaignError(f"{where}: {error}") from error


def _checked(campaign: Campaign, where: str) -> Campaign:
    if not campaign.run_names:
        raise CampaignError(f"{where} has no run; give it a [[group]] with [[group.run]] entries")
    for group in campaign.groups:
        if group.name in ("", ".", "..") or {*group.name} & {*"/\\"}:
            raise CampaignError(f"{where}: group name {group.name!r} is to be that of a folder; leave out slashes")
        for run in group.runs:
            if run.blocks == group.calibration_blocks:
                raise CampaignError(
                    f"{where}: run {run.name!r} of group {group.name!r} has {run.blocks} blocks, as many as the "
                    "calibration model; change blocks or calibration_blocks, so that nothing is predicted from itself"
                )
            if run.policy != "planner" and not {run.device, run.host} <= set(LEVELS):
                raise CampaignError(f"{where}: run {run.name!r}: device and host are one of {', '.join(LEVELS)}")
            if run.policy == "planner" and not all(map(_is_budget, (run.device, run.host))):
                raise CampaignError(
                    f"{where}: run {run.name!r}: device and host of the planner are 'roomy', or a fraction such as "
                    "'0.5' of what plain training takes"
                )
    if campaign.steps_by_turn[-1] < 2 or campaign.steps_by_turn[0] <= campaign.warmup_steps:
        raise CampaignError(
            f"{where}: {campaign.steps} steps in {campaign.turns} turns leave no step to count after "
            f"{campaign.warmup_steps} of warm-up, and one in each later turn; give more steps or fewer turns"
        )
    for what, names in (("group", [group.name for group in campaign.groups]), ("run", campaign.run_names)):
        (name, count), *_ = Counter(names).most_common(1)
        if count > 1:
            raise CampaignError(f"{where} lists {what} {name!r} twice")
    return campaign


def _is_budget(level: str) -> bool:
    try:
        return level == "roomy" or 0 < float(level) < inf
    except ValueError:
        return False
