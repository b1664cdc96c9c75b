"""Published figures beside predictions: every row that was asked, with its signed error, answered or not.

The rows are in `published/*.toml`, each with its source and role: `calibrate` rows fixed named constants of a machine
of the catalog, `check` rows were never fitted, `prediction` rows have no published figure, `variant` rows repeat a row
under another reading of the system. A quantity's function below says how a row is put to the simulator; nothing there
depends on the value that was published.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import lru_cache
from importlib import resources
from itertools import combinations
from statistics import median
from typing import Any

from tierplan.hwmodels import load_machine
from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.names import DEVICE, parse_stream
from tierplan.planner.lowering import lower
from tierplan.planner.policies import decide
from tierplan.planner.policies.zero_infinity import OPTIMIZER_BUFFERS, SUB_GROUP_PARAMETERS
from tierplan.planner.prediction import Prediction, predict
from tierplan.sim.analysis.steady import SteadyState
from tierplan.sim.contents import parse_key
from tierplan.sim.output.text import format_count
from tierplan.sim.pricing import simulate_on
from tierplan.sim.schedule import Schedule
from tierplan.sim.trace import Trace
from tierplan.sim.workloads.models import load_workload, workload_of
from tierplan.sim.workloads.workload import Training, Workload
from tierplan.validation.comparison.compare import ninth_decile
from tierplan.validation.published.workloads import layered_workload, tensor_parallel_workload

Settings = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """One published figure and what the simulator says."""

    system: str
    role: str
    quantity: str
    label: str
    low: float | None
    """Published, or the lower end of what was published; None for a pure prediction."""
    high: float | None
    predicted: float | None
    """None where there is no answer; `why_not` says why."""
    why_not: str = ""
    note: str = ""
    prediction: Prediction | None = field(default=None, repr=False)
    """What the row was taken from, where it is a step time."""
    group: str = ""
    """What it may be ranked within: rows of one machine, model and length, by speed; empty where ranked by step."""
    tokens: int = 0
    """In the step, where rows are ranked by speed."""

    @property
    def path(self) -> str:
        """Seconds of the critical path by stream: what a difference may come from. Not of steps on several GPUs, which
        are too long for the simulation by SimPy that it takes."""
        parts = self.prediction.critical_path_s if self.prediction and not self.group else {}
        shortest = 0.01 * sum(parts.values())
        return ", ".join(f"{stream} {seconds:.1f}" for stream, seconds in parts.items() if seconds >= shortest)

    def record(self) -> dict[str, object]:
        """The row as JSON values."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("prediction", "group", "tokens")}
        return {**own, "path": self.path, "value": self.value, "error": self.error}

    @property
    def value(self) -> float | None:
        """The published value, or the middle of the published range."""
        return None if self.low is None or self.high is None else (self.low + self.high) / 2

    @property
    def error(self) -> float | None:
        """Signed and relative: predicted over the nearest published value, less 1; 0 inside a published range.

        For shares and overheads, whose published value may be 0, the difference itself.
        """
        if self.predicted is None or self.low is None or self.high is None:
            return None
        nearest = min(max(self.predicted, self.low), self.high)
        return self.predicted - nearest if self.quantity in DIFFERENCES else self.predicted / nearest - 1


OF_ERRORS: Mapping[str, Callable[[list[float]], float]] = {
    "mean_abs_error": lambda errors: sum(errors) / len(errors), "median_abs_error": median,
    "ninth_decile": ninth_decile, "max_abs_error": max,
}  # fmt: skip
"""What a report says of its sorted errors."""
SAME_SPEED = 0.01
"""Measured speeds that differ by less may be in another order in the next run: such a pair has none."""
PEAKS: Mapping[str, float] = {"peak_gb": 1e9, "peak_gib": 2.0**30}
"""Published peaks of one GPU's memory, in bytes."""
DIFFERENCES = ("activation_peak_reduction", "step_overhead", "peak_below_recompute", "fits")
"""Quantities that are shares of something, or yes (1) or no (0): their error is the difference."""


@dataclass(frozen=True, slots=True)
class Report:
    """All rows of one system."""

    system: str
    source: str
    rows: tuple[Row, ...]
    constants: tuple[str, ...]
    """What was calibrated, with its value and source; the same for all rows of a machine."""

    def record(self) -> dict[str, object]:
        """The report as JSON values."""
        return {
            "source": self.source,
            "constants": list(self.constants),
            "answered": self.coverage[0],
            "asked": self.coverage[1],
            **{name: self.figures.get(name) for name in OF_ERRORS},
            "kendall_tau": self.kendall_tau,
            "rankings": self.rankings,
            "rows": [row.record() for row in self.rows],
        }

    @property
    def checked(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.role == "check")

    @property
    def coverage(self) -> tuple[int, int]:
        """Check rows answered, and asked."""
        return sum(row.predicted is not None for row in self.checked), len(self.checked)

    @property
    def step_rows(self) -> tuple[Row, ...]:
        """Check rows that are step times, with an answer."""
        return tuple(r for r in self.checked if is_step_time(r) and r.error is not None)

    @property
    def abs_errors(self) -> list[float]:
        return sorted(abs(row.error) for row in self.step_rows if row.error is not None)

    @property
    def figures(self) -> dict[str, float]:
        """Of the errors of step times, by `OF_ERRORS`; empty where there are none."""
        return {name: of(self.abs_errors) for name, of in OF_ERRORS.items()} if self.abs_errors else {}

    @property
    def peak_errors(self) -> list[float]:
        """Of check rows that are peaks of a GPU's memory."""
        return sorted(abs(r.error) for r in self.checked if r.quantity in PEAKS and r.error is not None)

    @property
    def rankings(self) -> dict[str, float]:
        """Kendall's tau of the order by speed, by machine: over pairs of rows that differ in system and speed alone."""
        signs: dict[str, list[int]] = {}
        for a, b in combinations([row for row in self.step_rows if row.group], 2):
            policies = [row.prediction and row.prediction.policy for row in (a, b)]
            is_pair = a.group == b.group and (policies[0] is None or policies[0] != policies[1])
            if is_pair and a.predicted and b.predicted and a.value and b.value:
                faster, told = (
                    (a.tokens * y) / (b.tokens * x) - 1 for x, y in ((a.value, b.value), (a.predicted, b.predicted))
                )
                if abs(faster) > SAME_SPEED:
                    signs.setdefault(a.group.split(",")[0], []).append(1 if faster * told > 0 else -1)
        return {machine: sum(pairs) / len(pairs) for machine, pairs in signs.items()}

    @property
    def kendall_tau(self) -> float | None:
        """Of the order of step times; None with fewer than two, or where rows are ranked within groups."""
        rows = self.step_rows
        if len(rows) < 2 or any(row.group for row in rows):
            return None
        from scipy.stats import kendalltau

        return float(kendalltau([row.value for row in rows], [row.predicted for row in rows]).statistic)


def is_step_time(row: Row) -> bool:
    return row.quantity in ("step_s", "iteration_s") or (row.quantity == "phases_s" and ", step" in row.label)


def systems() -> list[str]:
    """Names of the files of published figures."""
    folder = resources.files("tierplan.validation.published")
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def check_named(system: str, known: Sequence[str]) -> None:
    """Raises `ValueError` for a system that has no figures, with what was probably meant."""
    if system not in known:
        near = "".join(f"did you mean {close!r}? " for close in get_close_matches(system, known, n=1))
        raise ValueError(f"there are no published figures of {system!r}; {near}choose among {', '.join(known)}")


def published(system: str) -> dict[str, Any]:
    """One file of published figures. Raises `ValueError` for a system that has none."""
    check_named(system, systems())
    return table_of(f"{system}.toml")


def table_of(*path: str) -> dict[str, Any]:
    """The content of a TOML file in this folder."""
    return tomllib.loads(resources.files("tierplan.validation.published").joinpath(*path).read_text(encoding="utf-8"))


def reproduce(system: str, *, progress: Callable[[str], None] = lambda text: None) -> Report:
    """The report of a system, all rows included."""
    table = published(system)
    rows = []
    for result in table["result"]:
        common = {**table["system"], **{k: v for k, v in result.items() if k != "rows"}}
        for row in result["rows"]:
            settings = {**common, **row}
            progress(f"{system}: {result['quantity']} {label_of(settings)}")
            rows.append(_answer(system, table, settings))
    constants = tuple(constants_of(table["system"].get("machine")))
    return Report(system, table["system"]["source"], tuple(rows), constants)


def label_of(settings: Settings) -> str:
    """A row's distinguishing settings, for people."""
    names = ("policy", "head", "model", "parameters", "hidden", "layers", "decoder_layers", "drives", "devices",
             "batch", "accumulation", "contention", "phase")  # fmt: skip
    parts = []
    for name in names:
        if name in settings:
            value, words = settings[name], name.replace("_", " ")
            parts.append(str(value) if name in ("policy", "head", "model", "phase")
                         else f"{format_count(value)} parameters" if name == "parameters" else f"{words} {value:g}"
                         if isinstance(value, (int, float)) else f"{words}: {value}")  # fmt: skip
    parts += [f"{name}={value}" for name, value in settings.get("options", {}).items()]
    parts += settings.get("set", [])
    return ", ".join(parts)


def _answer(system: str, table: Settings, settings: Settings) -> Row:
    low = settings.get("low", settings.get("value"))
    high = settings.get("high", settings.get("value"))
    base = (system, settings["role"], settings["quantity"], label_of(settings), low, high)
    note = settings.get("note", "")
    outcome = QUANTITIES[settings["quantity"]](table, settings)
    if isinstance(outcome, Prediction):
        return Row(*base, outcome.step_s, outcome.why_not, note, outcome)
    return Row(*base, outcome, note=note)


def _shown(value: object) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):  # a curve
        return ", ".join(f"{at:g}: {rate:.4g}" for at, rate in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def constants_of(name: str | None) -> Iterator[str]:
    """Calibrated constants of a machine, named, with where they come from."""
    if name is None:
        return
    for key, quantity in load_machine(name).description.items():
        if isinstance(quantity, Mapping) and quantity.get("basis") == "calibrated":
            yield f"{name} {key} = {_shown(quantity['value'])} ({quantity['source']})"


# ---- what a row asks ----


def _machine(settings: Settings) -> Machine:
    changes = [f"nvme.drives={settings['drives']}"] if "drives" in settings else []
    changes += ["gpu.count=1"] if "tensor_parallel" in settings else []  # whose workload is one GPU's part
    return load_machine(settings["machine"], [*changes, *settings.get("set", [])])


def _workload(settings: Settings) -> Workload:
    training = Training(
        per_device_train_batch_size=settings["batch"],
        gradient_accumulation_steps=settings.get("accumulation", 1),
        sequence_length=settings["seq"],
        dtype=settings.get("dtype", "fp16"),
    )
    if "parameters" not in settings:
        return load_workload(settings["model"], training)
    return sized_decoder(settings["parameters"], settings["layers"], settings["hidden"], training)


def sized_decoder(parameters: float, layers: int, hidden: int, training: Training) -> Workload:
    """A GPT-style decoder of given depth and width whose MLP is as wide as its published size asks for."""
    vocabulary = 50257
    block = (parameters - vocabulary * hidden) / layers
    config = {
        "model_type": "gpt2",
        "vocab_size": vocabulary,
        "n_positions": training.sequence_length,
        "tie_word_embeddings": True,
        "activation_function": "gelu_pytorch_tanh",
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "n_layer": layers,
        "n_head": hidden // 128,
        "n_embd": hidden,
        "n_inner": round((block - 4 * hidden**2) / (2 * hidden)),
    }
    return workload_of(f"decoder-{parameters / 1e9:.0f}b", config, training)


def _step(table: Settings, settings: Settings) -> Prediction:
    return predict(settings["policy"], _workload(settings), _machine(settings), settings.get("options"))


def _best_tflops(table: Settings, settings: Settings) -> float | None:
    """The best throughput over batches, as the papers count it."""
    throughputs = (_step(table, {**settings, "batch": batch}).tflops_8nd for batch in settings["batches"])
    return max((x for x in throughputs if x is not None), default=None)


def _phase(table: Settings, settings: Settings) -> float | Prediction:
    """One phase of a step that does its updates after backward. Gradients' way to their place ends backward.

    What still waits in buffers for its way to NVMe does not: DeepSpeed's writes go on while the update begins.
    """
    scenario = {name: value for name, value in settings.items() if name not in ("phase", "value", "low", "high")}
    prediction, seconds = _logged_phases_s(json.dumps(scenario, sort_keys=True))
    return prediction if settings["phase"] == "step" or not prediction.fits else seconds[settings["phase"]]


@lru_cache(maxsize=4)
def _logged_phases_s(scenario: str) -> tuple[Prediction, Mapping[str, float]]:
    """The prediction for a scenario (as JSON), and the phases of one step where DeepSpeed's log cuts them.

    `tierplan.sim.analysis.phases` cuts by what the device computes, so that its phases do not wait for gradients.
    """
    settings = json.loads(scenario)
    prediction = _step({}, settings)
    if not prediction.fits or prediction.schedule is None:
        return prediction, {}
    trace = simulate_on(prediction.schedule, _machine(settings))
    keys = {op.key: parse_key(op.key) for op in prediction.schedule.ops}
    moves = {key: (k.verb, k.moved) for key, k in keys.items()}
    forward_end_s = min(s.start_ns for s in trace.spans if keys[s.key].verb in ("recompute", "bwd")) / 1e9
    of_backward = {key for key in keys if keys[key].verb in ("bwd", "cast") or moves[key] == ("offload", "grads")}
    ends_ns = [s.end_ns for s in trace.spans if s.key in of_backward]
    size = {op.key: op.work["bytes"] for op in prediction.schedule.ops if moves[op.key] == ("write", "grads")}
    devices = prediction.plan.devices if prediction.plan else 1
    own = min(prediction.num_parameters // devices, SUB_GROUP_PARAMETERS)
    buffered = 4.0 * OPTIMIZER_BUFFERS * own * devices  # fp32 in pinned buffers
    for span in sorted((s for s in trace.spans if s.key in size), key=lambda s: -s.end_ns):
        buffered -= size[span.key]
        if buffered < 0:
            ends_ns.append(span.end_ns)
            break
    backward_end_s = max(ends_ns) / 1e9
    return prediction, {
        "forward": forward_end_s,
        "backward": backward_end_s - forward_end_s,
        "update": trace.duration_s - backward_end_s,
    }


def _efficiency(table: Settings, settings: Settings) -> float:
    """A machine on which compute and one link never overlap, as ZeRO-Infinity's closed form has it."""
    flops_per_parameter = 2.0 * settings["seq"] * settings["batch"]
    compute_s = flops_per_parameter / settings["peak_flops_per_s"]
    bytes_per_parameter = 2.0  # fp16: arithmetic intensity is seq * batch FLOPs per byte
    link_s = bytes_per_parameter / settings["bandwidth_bytes_per_s"]
    return compute_s / (compute_s + link_s)


def profiled(table: Settings, settings: Settings) -> tuple[Workload, Machine, dict[str, object]]:
    """One of Harmony's profiles, the machine, and what its policies are told."""
    profile = next(p for p in table["profile"] if p["model"] == settings["model"])
    workload = layered_workload(profile, micro_batches=profile["batch"] // profile["micro_batch"])
    devices = settings["devices"]
    per_device = table["system"]["host_link_bytes_per_s"] / devices
    is_shared = settings.get("contention") == "fixed shares"
    changes = [f"link.h2d={per_device} B/s", f"link.d2h={per_device} B/s"] if is_shared else []
    options: dict[str, object] = {"devices": devices}
    if not settings.get("search"):
        options["pack"] = profile["layer_pack"]
    if "gpu_memory_bytes" in settings:
        options["memory_bytes"] = settings["gpu_memory_bytes"]
    return workload, load_machine(settings["machine"], changes), options


def _one_iteration(table: Settings, settings: Settings) -> tuple[Schedule, Trace]:
    workload, machine, options = profiled(table, settings)
    if settings["policy"] == "virtual-memory":
        options = {"devices": settings["devices"]}
    schedule = lower(decide(settings["policy"], workload, machine, options), workload, machine)
    return schedule, simulate_on(schedule, machine)


def _iteration(table: Settings, settings: Settings) -> float:
    """From the first op to the end of the last: iterations do not overlap in Harmony."""
    return _one_iteration(table, settings)[1].duration_s


def _weight_swap(table: Settings, settings: Settings) -> float:
    schedule, _ = _one_iteration(table, settings)
    kinds = {b.name: b.kind for b in schedule.buffers}
    on_link = (op for op in schedule.ops if parse_stream(op.stream).is_host_link)
    return sum(op.work.get("bytes", 0.0) for op in on_link if kinds[op.reads[0]] in ("params", "grads")) / 2**30


def _compute_only(table: Settings, settings: Settings) -> float:
    trace = _one_iteration(table, settings)[1]
    return sum(s.duration_ns for s in trace.spans if parse_key(s.key).verb in ("fwd", "recompute", "bwd")) / 1e9


def _speedup(table: Settings, settings: Settings) -> float:
    """Throughput over that of per-GPU memory virtualisation."""
    baseline = {**settings, "policy": "virtual-memory"}
    return _iteration(table, baseline) / _iteration(table, settings)


def peak_of(steady: SteadyState, kinds: Sequence[str] = (), without: Sequence[str] = ()) -> int:
    """Highest holding on the device of buffers of these kinds (none: of all), in steady state."""
    held = peak = 0
    for event in steady.trace.memory:
        if event.tier == DEVICE and (event.kind in kinds or not kinds) and event.kind not in without:
            held += event.delta_bytes
            peak = max(peak, held)
    return peak


def _against(table: Settings, settings: Settings, other: str, **options: object) -> Iterator[SteadyState]:
    """The policy's steady state, and another one's."""
    head_saves, machine = table["head"][settings["head"]]["saves"], _machine(settings)
    workload = tensor_parallel_workload(settings, table["chunk"], head_saves)
    for policy, asked in ((settings["policy"], None), (other, {"semantics": "in-backward", **options})):
        steady = predict(policy, workload, machine, asked).steady
        assert steady is not None
        yield steady


def _peak_below(table: Settings, settings: Settings, other: str, **options: object) -> float:
    """Share by which the peak of activations and their gradients is below that of another policy."""
    offloaded, kept = (peak_of(one, ("acts", "work")) for one in _against(table, settings, other, **options))
    return 1 - offloaded / kept


def _overhead(table: Settings, settings: Settings) -> float:
    offloaded, kept = _against(table, settings, "in-memory")
    return offloaded.period_s / kept.period_s - 1


def _below_recompute(table: Settings, settings: Settings) -> float:
    """Layer by layer."""
    return _peak_below(table, settings, "full-recompute", every=sum(not c.get("decoder") for c in table["chunk"]))


QUANTITIES: Mapping[str, Callable[[Settings, Settings], float | Prediction | None]] = {
    "step_s": _step,
    "fits": lambda table, settings: float(_step(table, settings).fits),
    "tflops_8nd": lambda table, settings: _step(table, settings).tflops_8nd,
    "best_tflops_8nd": _best_tflops,
    "phases_s": _phase,
    "efficiency": _efficiency,
    "iteration_s": _iteration,
    "weight_swap_gib": _weight_swap,
    "compute_only_s": _compute_only,
    "speedup_over_virtual_memory": _speedup,
    "activation_peak_reduction": lambda table, settings: _peak_below(table, settings, "in-memory"),
    "step_overhead": _overhead,
    "peak_below_recompute": _below_recompute,
}
"""How a row of each quantity is put to the simulator."""
