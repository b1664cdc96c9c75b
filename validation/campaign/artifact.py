"""An artifact: the JSON file that one run of a campaign leaves. Pages and statistics are made from artifacts alone.

Runs of other machines are added to a page by copying their files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import sqrt
from pathlib import Path
from statistics import median, stdev
from typing import Any

from tierplan.hwmodels.values.records import NotNegative, Positive, Whole, load_record
from tierplan.sim.trace import write_atomically
from tierplan.validation.campaign.spec import CampaignError

FORMAT = "tierplan-campaign-run"
VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """One run: its settings, what was predicted, and what was measured."""

    campaign: str
    group: str
    run: str
    model: str
    """Family, blocks and parameters, for people: `gpt2, 8 blocks, 16.1 M parameters`."""
    settings: Mapping[str, Any]
    """Of the run and its group."""
    machine: str
    """Its name, or its cores, memory and GPU."""
    when: str
    versions: Mapping[str, str]
    answered: bool
    """Whether the run was predicted and executed."""
    why_not: str = ""
    capacity_bytes: Mapping[str, Whole] = field(default_factory=dict)
    predicted_step_s: NotNegative = 0.0
    interval_s: tuple[Positive, Positive] | None = None
    """The predicted 90 % interval."""
    measured_steps_s: tuple[Positive, ...] = ()
    """All steps, in order."""
    warmup_steps: Whole = 0
    """How many of the first steps are not counted."""
    skipped_steps: tuple[Whole, ...] = ()
    """Numbers of further steps that are not counted: the first one of each later turn."""
    turn_predictions_s: tuple[Positive, ...] = ()
    """Predicted seconds per step, by turn, for the slowdown measured right before the turn. `predicted_step_s` is for
    the median slowdown of all turns."""
    slowdowns: tuple[Positive, ...] = ()
    """By turn: seconds per step of the calibration model right before it, over those in the calibration run."""
    campaign_runs: tuple[str, ...] = ()
    """`group/run` of all runs of the campaign, so that a table knows which are missing."""
    predicted_peak_bytes: Mapping[str, Whole] = field(default_factory=dict)
    measured_peak_bytes: Mapping[str, Whole] = field(default_factory=dict)
    predicted_bytes: Mapping[str, Whole] = field(default_factory=dict)
    """Per step, by stream."""
    measured_bytes: Mapping[str, NotNegative] = field(default_factory=dict)
    busy_s: Mapping[str, tuple[NotNegative, NotNegative]] = field(default_factory=dict)
    """By stream: predicted, measured, per step."""
    kinds_s: Mapping[str, tuple[NotNegative, NotNegative]] = field(default_factory=dict)
    """By kind of op and stream (`copy on nvme.read`): predicted, measured, per step."""
    causes: tuple[tuple[str, float], ...] = ()
    """Largest contributions to the difference: ops, seconds of the step."""

    @property
    def measured_step_s(self) -> float:
        """Median of the steps that count."""
        return median(self.counted_steps_s)

    @property
    def counted_steps_s(self) -> tuple[float, ...]:
        """Measured steps without warm-up and without skipped ones."""
        steps = enumerate(self.measured_steps_s)
        return tuple(s for k, s in steps if k >= self.warmup_steps and k not in self.skipped_steps)

    @property
    def noise_s(self) -> float:
        """Standard error of `measured_step_s`, from the scatter of the counted steps."""
        steps = self.counted_steps_s
        return 1.2533 * stdev(steps) / sqrt(len(steps)) if len(steps) > 1 else 0.0

    @property
    def first_error_frac(self) -> float:
        """Error of the prediction for the first turn, which was made before any step of the run was executed."""
        return (self.turn_predictions_s or (self.predicted_step_s,))[0] / self.measured_step_s - 1.0

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
        made_by = "an artifact of a campaign as Artifact.save writes it"
        found = load_record(
            cls, path, format=FORMAT, version=VERSION, made_by=made_by, error=CampaignError, complete=False
        )
        if wrong := found._contradiction():
            raise CampaignError(f"{path} is not {made_by}: {wrong}")
        return found

    def _contradiction(self) -> str:
        """What no run leaves, though each value alone may be; empty where there is nothing of the kind."""
        if not self.answered:
            return "" if self.why_not else "answered is false, and why_not is empty; it must say why"
        if self.why_not:
            return f"answered is true, but why_not is {self.why_not!r}; one of both must go"
        if not self.predicted_step_s:
            return "predicted_step_s is 0 or not there; a run that is answered has a prediction above 0"
        if not self.counted_steps_s:
            num = len(self.measured_steps_s)
            return (
                f"none of its {num} measured_steps_s counts, with warmup_steps {self.warmup_steps} and skipped_steps "
                f"{[*self.skipped_steps]}; one or more must"
            )
        if beyond := [k for k in self.skipped_steps if k >= len(self.measured_steps_s)]:
            return f"skipped_steps has {beyond[0]}, but there are {len(self.measured_steps_s)} steps, from 0 on"
        if self.interval_s and self.interval_s[0] > self.interval_s[1]:
            return f"interval_s is {[*self.interval_s]}; it must be its lower end, then its upper one"
        if missing := sorted({*self.measured_peak_bytes} - {*self.predicted_peak_bytes}):
            return f"measured_peak_bytes has tier {missing[0]!r}, which predicted_peak_bytes has not"
        return ""


def load_artifacts(folder: str | os.PathLike[str]) -> list[Artifact]:
    """All artifacts in a folder and below, by path. Raises `CampaignError` where one is there twice: every run counts
    once in statistics."""
    artifacts: list[Artifact] = []
    paths = sorted(Path(folder).rglob("*.json"))
    for path in paths:
        artifact = Artifact.load(path)
        if artifact in artifacts:
            raise CampaignError(
                f"{path} and {paths[artifacts.index(artifact)]} are one run, which would count twice; take one of both "
                "out of the folder"
            )
        artifacts.append(artifact)
    return artifacts
