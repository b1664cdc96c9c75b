"""A campaign: many configurations, predicted and run for real, and what became of the predictions.

A campaign file lists groups of runs. A group is one model family at one width, batch and sequence length: its machine
and its blocks are measured right before its runs, on a depth that none of its runs has. Each run is kept as one JSON
file (an artifact); tables are made from artifacts alone, so runs of other machines can be added by copying their files.
"""

from __future__ import annotations

import itertools
import json
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from math import hypot, sqrt
from pathlib import Path
from statistics import median, stdev
from typing import Any

from scipy.stats import kendalltau

from tierplan.sim.trace import write_atomically

__all__ = [
    "Artifact",
    "Campaign",
    "CampaignError",
    "Group",
    "Run",
    "Summary",
    "load_artifacts",
    "load_campaign",
    "summarise",
]

FORMAT = "tierplan-campaign-run"
VERSION = 1
LEVELS = ("tight", "middle", "roomy")
DEVICES = ("any", "cuda")


class CampaignError(ValueError):
    """A campaign or an artifact that cannot be read; names the file and the entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One configuration of a group."""

    blocks: int
    policy: str
    """A policy's name, or `planner`."""
    device: str = "roomy"
    """`roomy`: no op waits for memory. `tight`: the least that the plan completes with, and 2 %. `middle`: between.
    For the planner, a part of what plain training takes: `0.5`; its plan then gets what it holds of that, and 2 %."""
    host: str = "roomy"
    accumulation: int = 1
    max_grad_norm: float | None = None
    options: Mapping[str, object] = field(default_factory=dict)

    @property
    def name(self) -> str:
        parts = [f"{self.blocks}-blocks", self.policy, self.device, self.host]
        if self.accumulation > 1:
            parts.append(f"acc{self.accumulation}")
        if self.max_grad_norm is not None:
            parts.append("clip")
        return "-".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Runs of one model family at one width, batch and sequence length."""

    name: str
    config: Mapping[str, object]
    """The model's `config.json`, without its depth."""
    depth_key: str
    """Name of the depth in `config`: `n_layer`, `num_hidden_layers`."""
    batch: int
    seq: int
    dtype: str = "fp32"
    profile_blocks: int = 3
    """Depth of the model whose blocks are timed for all predictions of this group."""
    runs: tuple[Run, ...]

    def model_config(self, blocks: int) -> dict[str, object]:
        """The `config.json` of a model of this group with that many blocks."""
        return {**self.config, self.depth_key: blocks}


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """What is asked."""

    name: str
    summary: str = ""
    steps: int = 12
    """Optimizer steps of each run."""
    warmup_steps: int = 2
    """Of these, not counted; of each later piece, one."""
    pieces: int = 3
    """Each run is made in so many pieces; before each, the shallow model is trained for a little while."""
    together: bool = False
    """A group's runs take turns, piece by piece; all their models are in memory at once."""
    device: str = "any"
    """`cuda`: its models are for a GPU, and nothing else is asked to train them. `any`: for whatever is there."""
    groups: tuple[Group, ...]

    @property
    def run_names(self) -> tuple[str, ...]:
        """`group/run` of all runs, in order."""
        return tuple(f"{g.name}/{r.name}" for g in self.groups for r in g.runs)

    @property
    def num_runs(self) -> int:
        return len(self.run_names)

    @property
    def steps_of_pieces(self) -> tuple[int, ...]:
        """Steps of each piece; the first has what the division leaves over."""
        each, rest = divmod(self.steps, self.pieces)
        return (each + rest, *[each] * (self.pieces - 1))


def load_campaign(name_or_path: str | os.PathLike[str]) -> Campaign:
    """The campaign of that name that comes with tierplan, or of a TOML file. Raises `CampaignError`."""
    path = Path(name_or_path)
    known = {f.name.removesuffix(".toml"): f for f in files(__package__).joinpath("campaigns").iterdir()}
    if str(name_or_path) in known:
        text, where = known[str(name_or_path)].read_text(encoding="utf-8"), f"campaign {name_or_path}"
    elif path.is_file():
        text, where = path.read_text(encoding="utf-8"), str(path)
    else:
        raise CampaignError(
            f"no campaign {str(name_or_path)!r}; give a TOML file, or one of {', '.join(sorted(known))}"
        )
    try:
        return _campaign(tomllib.loads(text), where)
    except tomllib.TOMLDecodeError as error:
        raise CampaignError(f"{where} is not TOML: {error}") from error
    except TypeError as error:
        raise CampaignError(f"{where}: {str(error).partition('() ')[2] or error}") from error


def _campaign(record: dict[str, Any], where: str) -> Campaign:
    groups = []
    if not any(entry.get("run") for entry in record.get("group", [])):
        raise CampaignError(f"{where} asks for no run; give it a [[group]] with [[group.run]] entries")
    for entry in record.pop("group", []):
        runs = tuple(Run(**run) for run in entry.pop("run", []))
        group = Group(**entry, runs=runs)
        for run in runs:
            if run.blocks == group.profile_blocks:
                raise CampaignError(
                    f"{where}: run {run.name!r} of group {group.name!r} has {run.blocks} blocks, the depth that the "
                    "blocks are timed on; change blocks or profile_blocks, so that nothing measured is predicted"
                )
            if run.policy != "planner" and not {run.device, run.host} <= set(LEVELS):
                raise CampaignError(f"{where}: run {run.name!r}: device and host are one of {', '.join(LEVELS)}")
        groups.append(group)
    campaign = Campaign(**record, groups=tuple(groups))
    if campaign.pieces < 1 or campaign.steps_of_pieces[-1] < 2 or campaign.steps_of_pieces[0] <= campaign.warmup_steps:
        raise CampaignError(
            f"{where}: {campaign.steps} steps in {campaign.pieces} pieces leave no step to count after "
            f"{campaign.warmup_steps} of warm-up, and one in each later piece; give more steps or fewer pieces"
        )
    if campaign.device not in DEVICES:
        raise CampaignError(f"{where}: device is {campaign.device!r}; choose one of {', '.join(DEVICES)}")
    names = list(campaign.run_names)
    for name in names:
        if names.count(name) > 1:
            raise CampaignError(f"{where} lists run {name!r} twice")
    return campaign


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """One run: what was asked, what was predicted, what was measured."""

    campaign: str
    group: str
    run: str
    model: str
    """Family, blocks and parameters, for people: `gpt2, 8 blocks, 16.1 M parameters`."""
    asked: Mapping[str, Any]
    """The run and its group's settings."""
    machine: str
    """Its name, or what it is."""
    when: str
    versions: Mapping[str, str]
    answered: bool
    why_not: str = ""
    capacity_bytes: Mapping[str, int] = field(default_factory=dict)
    predicted_step_s: float = 0.0
    interval_s: tuple[float, float] | None = None
    """The predicted 90 % interval."""
    measured_steps_s: tuple[float, ...] = ()
    """All, warm-up first."""
    warmup_steps: int = 0
    left_out: tuple[int, ...] = ()
    """Steps that do not count beside those of warm-up: the first of each later piece."""
    predictions_s: tuple[float, ...] = ()
    """By piece, from what was measured right before it; `predicted_step_s` is for the median of all paces."""
    paces: tuple[float, ...] = ()
    """By piece: how slow the shallow model was right before it, relative to the rehearsals."""
    campaign_runs: tuple[str, ...] = ()
    """`group/run` of all runs that the campaign asks for."""
    predicted_peak_bytes: Mapping[str, int] = field(default_factory=dict)
    measured_peak_bytes: Mapping[str, int] = field(default_factory=dict)
    predicted_bytes: Mapping[str, int] = field(default_factory=dict)
    """Per step, by stream."""
    measured_bytes: Mapping[str, float] = field(default_factory=dict)
    busy_s: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """By stream: predicted, measured, per step."""
    kinds_s: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """By kind of op and stream (`copy on nvme.read`): predicted, measured, per step."""
    causes: tuple[tuple[str, float], ...] = ()
    """Largest contributions to the difference: ops, seconds of the step."""

    @property
    def measured_step_s(self) -> float:
        """Median of the steps that count."""
        return median(self.counted_steps_s)

    @property
    def counted_steps_s(self) -> tuple[float, ...]:
        """Without warm-up and what is left out."""
        steps = enumerate(self.measured_steps_s)
        return tuple(s for k, s in steps if k >= self.warmup_steps and k not in self.left_out)

    @property
    def noise_s(self) -> float:
        """Standard error of `measured_step_s`, from the scatter of the steps."""
        steps = self.counted_steps_s
        return 1.2533 * stdev(steps) / sqrt(len(steps)) if len(steps) > 1 else 0.0

    @property
    def first_error_frac(self) -> float:
        """Of the prediction for the first piece alone, made before anything of the run was executed."""
        return (self.predictions_s or (self.predicted_step_s,))[0] / self.measured_step_s - 1.0

    @property
    def error_frac(self) -> float:
        """Predicted over measured step time, minus 1."""
        return self.predicted_step_s / self.measured_step_s - 1.0

    @property
    def bytes_exact(self) -> bool:
        return dict(self.predicted_bytes) == {s: self.measured_bytes.get(s) for s in self.predicted_bytes}

    @property
    def worst_peak_error_frac(self) -> float:
        """The signed error of the tier whose predicted peak is farthest off."""
        errors = [self.predicted_peak_bytes[t] / m - 1.0 for t, m in self.measured_peak_bytes.items() if m]
        return max(errors, key=abs, default=0.0)

    @property
    def in_interval(self) -> bool | None:
        """Whether the measured step lies in the predicted interval; None where none was predicted."""
        if self.interval_s is None:
            return None
        return self.interval_s[0] <= self.measured_step_s <= self.interval_s[1]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the artifact, replacing the file atomically."""
        record = {"format": FORMAT, "version": VERSION, **asdict(self)}
        write_atomically(path, json.dumps(record, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Artifact:
        """Reads what `save` wrote. Raises `CampaignError`."""
        try:
            record = json.loads(Path(path).read_text(encoding="utf-8"))
            if (record.pop("format"), record.pop("version")) != (FORMAT, VERSION):
                raise CampaignError(f"{path} is not a {FORMAT} of version {VERSION}")
            if record["interval_s"] is not None:
                record["interval_s"] = tuple(record["interval_s"])
            for name in ("measured_steps_s", "left_out", "predictions_s", "paces", "campaign_runs"):
                record[name] = tuple(record.get(name, ()))
            record["causes"] = tuple((name, seconds) for name, seconds in record["causes"])
            for name in ("busy_s", "kinds_s"):
                record[name] = {what: tuple(pair) for what, pair in record.get(name, {}).items()}
            return cls(**record)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, CampaignError):
                raise
            raise CampaignError(f"{path} is not an artifact of a campaign: {error!r}") from error


def load_artifacts(folder: str | os.PathLike[str]) -> list[Artifact]:
    """All artifacts in a folder and below, by path."""
    return [Artifact.load(path) for path in sorted(Path(folder).rglob("*.json"))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What became of all predictions. Errors are of the step time, unless they say otherwise."""

    asked: int
    """Runs of the campaign, on each machine that has any."""
    answered: int
    not_run: tuple[str, ...]
    """Runs that the campaign asks for and that have left no artifact."""
    median_error_frac: float
    """Of absolute errors."""
    p90_error_frac: float
    """Nine in ten absolute errors are at most this."""
    mean_signed_error_frac: float
    within_10_frac: float
    """Of the runs asked."""
    median_first_error_frac: float
    """As `median_error_frac`, for predictions made before anything of the run was executed."""
    bytes_exact: int
    """Runs in which every stream moved exactly the bytes predicted."""
    worst_peak_error_frac: float
    """Signed; of any tier of any run."""
    interval_coverage_frac: float | None
    tau: Mapping[str, float]
    """Kendall's tau of predicted and measured step times, by model with three plans or more."""
    tau_apart: Mapping[str, float]
    """The same over those pairs of plans whose measured times differ by more than twice their standard error."""

    def record(self) -> dict[str, object]:
        return asdict(self)


def summarise(artifacts: Sequence[Artifact]) -> Summary:
    """The summary of all artifacts. Raises `CampaignError` for none.

    What has no answer counts as asked, and so does what the campaign asks and nobody ran.
    """
    answered = [a for a in artifacts if a.answered]
    if not answered:
        raise CampaignError("there is no answered run to summarise; run the campaign first")
    errors = sorted(abs(a.error_frac) for a in answered)
    covered = [a.in_interval for a in answered if a.in_interval is not None]
    not_run = _not_run(artifacts)
    asked = len(artifacts) + len(not_run)
    return Summary(
        asked=asked,
        answered=len(answered),
        not_run=not_run,
        median_error_frac=median(errors),
        p90_error_frac=errors[max(0, -(-9 * len(errors) // 10) - 1)],
        mean_signed_error_frac=sum(a.error_frac for a in answered) / len(answered),
        within_10_frac=sum(e <= 0.10 for e in errors) / asked,
        median_first_error_frac=median(abs(a.first_error_frac) for a in answered),
        bytes_exact=sum(a.bytes_exact for a in answered),
        worst_peak_error_frac=max((a.worst_peak_error_frac for a in answered), key=abs),
        interval_coverage_frac=sum(covered) / len(covered) if covered else None,
        tau=_by_model(answered, _tau),
        tau_apart=_by_model(answered, _tau_apart),
    )


def _not_run(artifacts: Sequence[Artifact]) -> tuple[str, ...]:
    found = []
    for machine, campaign in dict.fromkeys((a.machine, a.campaign) for a in artifacts):
        here = [a for a in artifacts if (a.machine, a.campaign) == (machine, campaign)]
        there = {f"{a.group}/{a.run}" for a in here}
        wanted = dict.fromkeys(name for a in here for name in a.campaign_runs)
        found += [f"{machine}: {name}" for name in wanted if name not in there]
    return tuple(found)


def _by_model(artifacts: Iterable[Artifact], measure: Callable[[Sequence[Artifact]], float | None]) -> dict[str, float]:
    by_model: dict[str, list[Artifact]] = {}
    for a in artifacts:
        by_model.setdefault(f"{a.machine}: {a.group}, {a.model}", []).append(a)
    taus = {model: measure(runs) for model, runs in by_model.items() if len(runs) >= 3}
    return {model: tau for model, tau in taus.items() if tau is not None}


def _tau(runs: Sequence[Artifact]) -> float:
    return float(kendalltau([a.predicted_step_s for a in runs], [a.measured_step_s for a in runs]).statistic)


def _tau_apart(runs: Sequence[Artifact]) -> float | None:
    """None where no two plans are told apart."""
    signs = []
    for a, b in itertools.combinations(runs, 2):
        difference = a.measured_step_s - b.measured_step_s
        if abs(difference) > 2.0 * hypot(a.noise_s, b.noise_s):
            signs.append(1.0 if difference * (a.predicted_step_s - b.predicted_step_s) > 0 else -1.0)
    return sum(signs) / len(signs) if signs else None
