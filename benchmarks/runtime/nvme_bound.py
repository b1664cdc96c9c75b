"""How close a training step comes to its busiest stream, on plans that the drive limits.

`benchmarks.runtime.speed --only busiest` runs it. The machine is measured first (half a minute). Then each
configuration is planned for it, predicted, and trained:

    states                              a GPT-2 whose optimizer states lie on the drive, the rest in memory
    parameters and states               a Llama; gradients wait in host memory
    parameters, gradients and states    an OPT whose gradients are clipped: they wait on the drive for the norm
    parameters, activations and states  a GPT-2 whose saved tensors leave too, each by itself
    what the planner puts there         the same Llama in the same memory, as `tierplan.planner.planning.plan` decides

How they were chosen. A plan is NVMe-bound here when the drive alone, with nothing beside it, is predicted to need at
least `MARGIN` times as long as any other stream alone; each line says by how much. With only states on it, a quick
drive may miss the margin beside slow cores, and the line says so. Per parameter in bf16 with Adam, the drive moves 24
to 34 bytes per step, whatever the batch, while compute grows with the tokens: so micro-batches are one sequence of 32
tokens (with 64, two cores that work on matrix products and updates at the same time were the limit as often as the
drive). Everything of a kind lies on the drive, as in ZeRO-Infinity: that is what the planner comes to for a model much
larger than memory. Models are shallow so that a run takes a minute, and their memory is too small for what lies on the
drive. In what memory is left the planner holds some blocks' states, which makes its plans quicker; the last one shows
whether they are limited by the drive too.

What is left is chosen as the planner does, by simulation over its own settings (`candidates`): which updates are late,
how far ahead to read, into how many parts states are cut, in which order updates come behind the clipping norm. The
quickest step in steady state counts; what is measured afterwards decides nothing.

For each: step time over the busy time of the busiest stream, predicted and measured (the median over steps, and the
whole run); over the time in which the drive read or wrote, since a drive that is asked for both shares itself; and the
run over what the simulator makes of it when each op takes as long as it did, which is what the runtime itself adds.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.models import GIB, VOCABULARY, gpt2
from benchmarks.records import Record
from benchmarks.trainings import batches
from tierplan.hwmodels.build import build_machine
from tierplan.hwmodels.machine import Cost, Machine
from tierplan.hwmodels.names import DEVICE, HOST, NVME_READ, NVME_WRITE
from tierplan.hwmodels.scaling import with_capacity
from tierplan.planner.lowering import lower
from tierplan.planner.milp.amounts import problem
from tierplan.planner.plan import UnitPlan, UnitwisePlan
from tierplan.planner.planning import plan as solve
from tierplan.planner.search.budget import Budget
from tierplan.planner.search.candidates import PlanSimulator
from tierplan.planner.search.from_program import late_updates
from tierplan.planner.search.knobs import SETTINGS
from tierplan.planner.search.local.moves import with_shards, with_windows
from tierplan.runtime.checkpoint.weights import hollow_model, random_weights
from tierplan.runtime.measure.machine import measure_description
from tierplan.runtime.run_result import RunResult
from tierplan.runtime.tracing.trace import trace_config
from tierplan.runtime.trainer import Trainer
from tierplan.sim.analysis.explain import StreamTime, stream_times
from tierplan.sim.analysis.steady import steady_state
from tierplan.sim.columns import unroll
from tierplan.sim.engine import simulate
from tierplan.sim.schedule import Schedule
from tierplan.sim.trace import Span
from tierplan.sim.workloads.workload import Training, Workload
from tierplan.validation.comparison.steps import cut_steps

SEQUENCE_LENGTH = 32
MARGIN = 1.5
DRIVE = (NVME_READ, NVME_WRITE)
STRETCHES = (float("inf"), 2.5, 1.5, 1.0, 0.7)
"""Of the planner's: how much of the updates backward has time for; the rest is late."""
PARTS = (1, 4)
WINDOWS = (*SETTINGS["windows"], (3, 4, 4), (3, 4, 6))
"""In units, for parameters, activations and states: the planner's, and two that read states further ahead."""
PLANNER_S = 15.0
WARMUP_STEPS, STEPS = 4, 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """A model, how it is trained, where its bytes live, and the memory that it gets."""

    name: str
    config: Mapping[str, object]
    places: UnitPlan | None
    """None: as the planner decides."""
    device_bytes: int
    host_bytes: int
    max_grad_norm: float | None = None

    def workload(self) -> Workload:
        training = Training(
            sequence_length=SEQUENCE_LENGTH, dtype="bf16", backend="cpu", max_grad_norm=self.max_grad_norm
        )
        return trace_config(self.name, self.config, training)

    def on(self, machine: Machine) -> Machine:
        """The machine with this much memory."""
        return with_capacity(machine, {DEVICE: self.device_bytes, HOST: self.host_bytes})


GPT2 = gpt2(1024, 12)
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": VOCABULARY,
    "max_position_embeddings": 256, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12,
    "num_attention_heads": 16, "num_key_value_heads": 16, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
OPT = {
    "model_type": "opt", "architectures": ["OPTForCausalLM"], "vocab_size": VOCABULARY, "max_position_embeddings": 256,
    "hidden_size": 1024, "word_embed_proj_dim": 1024, "ffn_dim": 4096, "num_hidden_layers": 12,
    "num_attention_heads": 16, "dropout": 0.0, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1,
}  # fmt: skip

SMALL = {"device_bytes": GIB // 4, "host_bytes": GIB // 2}
CONFIGURATIONS = (
    Configuration(
        name="states",
        config=GPT2,
        places=UnitPlan(grads="host", states="nvme"),
        device_bytes=GIB,
        host_bytes=int(0.8 * GIB),
    ),
    Configuration(
        name="parameters and states",
        config=LLAMA,
        places=UnitPlan(params="nvme", grads="host", states="nvme"),
        **SMALL,
    ),
    Configuration(
        name="parameters, gradients and states",
        config=OPT,
        places=UnitPlan(params="nvme", grads="nvme", states="nvme"),
        max_grad_norm=1.0,
        **SMALL,
    ),
    Configuration(
        name="parameters, activations and states",
        config=GPT2,
        places=UnitPlan(params="nvme", grads="host", states="nvme", acts="nvme", input="nvme"),
        **SMALL,
    ),
    Configuration(name="what the planner puts there", config=LLAMA, places=None, **SMALL),
)


# ---- the plan ----


def candidates(configuration: Configuration, workload: Workload, machine: Machine) -> Iterator[UnitwisePlan]:
    """Plans with everything where the configuration says, over the planner's settings of what is left to choose."""
    assert configuration.places is not None
    clips = configuration.max_grad_norm is not None
    base = UnitwisePlan(
        policy="benchmark",
        units=(configuration.places,) * len(workload.units),
        semantics="exact-clip" if clips else "in-backward",
    )
    amounts = problem(workload, machine, semantics=base.semantics)
    for num_parts, windows in itertools.product(PARTS, WINDOWS):
        plan = with_windows(with_shards(base, num_parts), windows)
        if clips:
            yield plan
            yield replace(plan, update_order="backward")
        else:
            yield from (late_updates(amounts, plan, stretch=stretch) for stretch in STRETCHES)


def quickest(configuration: Configuration, workload: Workload, machine: Machine) -> UnitwisePlan:
    """The plan whose step takes least time in steady state, by simulation; the planner's plan where it decides."""
    if configuration.places is None:
        found = solve(workload, machine, time_limit_s=PLANNER_S).plan
        assert isinstance(found, UnitwisePlan)
        return found
    simulate_plan = PlanSimulator(workload, machine, Budget(float("inf")))
    tried = [simulate_plan(plan) for plan in candidates(configuration, workload, machine)]
    fitting = [c for c in tried if c.step_s is not None]
    if not fitting:
        raise SystemExit(f"no plan for {configuration.name!r} fits its memory: {tried[0].reason}")
    return min(fitting, key=lambda c: c.step_s or 0.0).plan


# ---- ratios ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratios:
    """Of some stretches of time, one after the other: what was busy in them."""

    step_s: Sequence[float]
    busy_s: Mapping[str, Sequence[float]]
    drive_s: Sequence[float]
    """In which the drive read or wrote, or both."""

    @property
    def busiest(self) -> str:
        return max(self.busy_s, key=lambda stream: sum(self.busy_s[stream]))

    @property
    def over_busiest(self) -> list[float]:
        """Of steps in which it did something: all that it does for a short one may fall into the step before."""
        return [a / b for a, b in zip(self.step_s, self.busy_s[self.busiest], strict=True) if b]

    @property
    def over_drive(self) -> list[float]:
        """As `over_busiest`."""
        return [a / b for a, b in zip(self.step_s, self.drive_s, strict=True) if b]

    def record(self) -> Record:
        total_s = sum(self.step_s)
        return {
            "step_s": total_s / len(self.step_s),
            "busiest_stream": self.busiest,
            "busy_s": {stream: sum(s) / len(s) for stream, s in self.busy_s.items()},
            "drive_s": sum(self.drive_s) / len(self.drive_s),
            "over_busiest": statistics.median(self.over_busiest),
            "over_drive": statistics.median(self.over_drive),
            "over_busiest_whole": total_s / sum(self.busy_s[self.busiest]),
            "over_drive_whole": total_s / sum(self.drive_s),
            "over_busiest_by_step": self.over_busiest,
        }


def ratios_between(spans: Sequence[Span], moments_ns: Sequence[float]) -> Ratios:
    """What was busy between each moment and the next."""
    windows = list(itertools.pairwise(moments_ns))
    streams = sorted({s.stream for s in spans})
    by_stream = {stream: [s for s in spans if s.stream == stream] for stream in streams}
    drive = [s for s in spans if s.stream in DRIVE]
    return Ratios(
        step_s=[(end - begin) / 1e9 for begin, end in windows],
        busy_s={name: [covered_s(mine, begin, end) for begin, end in windows] for name, mine in by_stream.items()},
        drive_s=[covered_s(drive, begin, end) for begin, end in windows],
    )


def covered_s(spans: Sequence[Span], begin_ns: float = 0.0, end_ns: float = float("inf")) -> float:
    """Seconds between two moments in which at least one of the spans ran."""
    total_ns, done_ns = 0.0, begin_ns
    for span in sorted(spans, key=lambda s: s.start_ns):
        total_ns += max(0.0, min(span.end_ns, end_ns) - max(span.start_ns, done_ns))
        done_ns = max(done_ns, span.end_ns)
    return total_ns / 1e9


def drive_margin(streams: Mapping[str, StreamTime]) -> float:
    """How many times as long as any other stream the drive would take, each alone."""
    drive_s = sum(streams[s].alone_s for s in DRIVE)
    return drive_s / max(time.alone_s for name, time in streams.items() if name not in DRIVE)


# ---- one configuration ----


def run(configuration: Configuration, machine: Machine, nvme_dir: Path, *, predict_only: bool) -> Record:
    """Plans, predicts and trains one configuration; what was found, as JSON values."""
    workload, place = configuration.workload(), configuration.on(machine)
    plan = quickest(configuration, workload, place)
    schedule = lower(plan, workload, place)
    steady = steady_state(schedule, place)
    begin_s, end_s = steady.window_s
    predicted = ratios_between(steady.trace.spans, [begin_s * 1e9, end_s * 1e9])
    margin = drive_margin(stream_times(steady.trace, steady.window_s))
    num_late = sum(unit.late_update for unit in plan.units)
    found: Record = {
        "plan": {
            "windows": [plan.prefetch_params_units, plan.prefetch_acts_units, plan.prefetch_states_units],
            "state_shards": max(unit.state_shards for unit in plan.units),
            "late_updates": num_late,
            "update_order": plan.update_order,
            "semantics": plan.semantics,
        },
        "drive_margin": margin,
        "is_nvme_bound": margin >= MARGIN,
        "predicted": predicted.record() | {"step_s": steady.period_s},
    }
    print(
        f"{configuration.name}: predicted {steady.period_s:.3f} s per step, {_shown(predicted)}; "
        f"the drive alone {margin:.1f} times any other stream alone" + ("" if margin >= MARGIN else ": NOT NVMe-bound"),
        flush=True,
    )
    if predict_only:
        return found
    result = train(configuration, workload.training, schedule, nvme_dir)
    ends = [end_ns for _, end_ns in cut_steps(result.trace).windows_ns.values()]
    measured = ratios_between(result.trace.spans, ends[WARMUP_STEPS - 1 : -1])  # nothing follows the last step
    taken = {x.key: Cost(0.0, x.duration_ns / 1e9) for x in result.trace.spans}
    again = simulate(unroll(schedule, len(ends)), taken)
    added_frac = result.trace.duration_ns / again.duration_ns - 1
    found["measured"] = measured.record()
    found["runtime_adds_frac"] = added_frac
    found["moved_bytes_per_step"] = {k: v // len(ends) for k, v in result.moved_bytes.items()}
    found["peak_bytes"] = dict(result.peak_bytes)
    print(
        f"    measured {statistics.fmean(measured.step_s):.3f} s per step, {_shown(measured)}; "
        f"the runtime adds {added_frac:.1%}",
        flush=True,
    )
    return found


def train(configuration: Configuration, training: Training, schedule: Schedule, nvme_dir: Path) -> RunResult:
    """Trains from random weights on the same text again and again."""
    model = hollow_model(dict(configuration.config), training)
    with Trainer(schedule, model, nvme_dir=nvme_dir, weights=random_weights(model, seed=0)) as trainer:
        trainer.run(batches(SEQUENCE_LENGTH), WARMUP_STEPS + STEPS + 1)
        return trainer.result()


def _shown(ratios: Ratios) -> str:
    return (
        f"{statistics.median(ratios.over_busiest):.3f} times {ratios.busiest}'s, "
        f"{statistics.median(ratios.over_drive):.3f} times the drive's"
    )


def busiest(nvme_dir: Path, *, predict_only: bool) -> Record:
    """All configurations on this machine, as it is measured now."""
    machine = build_machine(measure_description(nvme_dir, budget_s=30, device="cpu", dtypes=("bf16", "fp32")))
    rates = {s.name: {kind: rate.points[-1][1] for kind, rate in s.rates.items()} for s in machine.streams}
    found: Record = {"machine": {"rates_per_s": rates, "limits": {x.name: x.limit for x in machine.shared_limits}}}
    for configuration in CONFIGURATIONS:
        found[configuration.name] = run(configuration, machine, nvme_dir, predict_only=predict_only)
    return found
