"""The scenarios that are scheduled and simulated: each a model, a machine, training settings, and who decides."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import tierplan as tp

# All that is not at the front door is imported here, so that a move is followed in one place.
from tierplan.planner.plan import GradientsByLink
from tierplan.planner.search import budget

SMALL_VOCABULARY = 8192
LLAMA = {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "intermediate_size": 5632,
    "vocab_size": SMALL_VOCABULARY,
    "max_position_embeddings": 2048,
}
MODELS: Mapping[str, Mapping[str, object]] = {
    "gpt2-6": {"model_type": "gpt2", "n_embd": 2048, "n_layer": 6, "n_head": 16, "vocab_size": SMALL_VOCABULARY},
    "gpt2-12": {"model_type": "gpt2", "n_embd": 1024, "n_layer": 12, "n_head": 16, "vocab_size": 50257},
    "gpt2-wide-4": {"model_type": "gpt2", "n_embd": 4096, "n_layer": 4, "n_head": 32, "vocab_size": 50257},
    "gpt2-small-4": {"model_type": "gpt2", "n_embd": 512, "n_layer": 4, "n_head": 8, "vocab_size": SMALL_VOCABULARY},
    "llama-6": {
        "model_type": "llama",
        "num_hidden_layers": 6,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        **LLAMA,
    },
    "llama-tied-4": {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "num_key_value_heads": 16,
        "tie_word_embeddings": True,
        **LLAMA,
    },
    "opt-8": {
        "model_type": "opt",
        "hidden_size": 2048,
        "word_embed_proj_dim": 2048,
        "ffn_dim": 8192,
        "num_hidden_layers": 8,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "vocab_size": 50272,
    },
    "bert-6": {
        "model_type": "bert",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 6,
        "num_attention_heads": 16,
        "max_position_embeddings": 1024,
        "vocab_size": 30522,
    },
    "t5-3": {
        "model_type": "t5",
        "d_model": 1024,
        "d_kv": 64,
        "d_ff": 4096,
        "num_layers": 3,
        "num_heads": 16,
        "vocab_size": 32128,
        "decoder_start_token_id": 0,
    },
}
"""Few blocks, as wide as real ones; everything else is the family's default."""

Decide = Callable[[tp.Workload, tp.Machine], Any]
"""Gives the plan. Its type is the plan's own affair; only `tp.lower` looks at it."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What is trained where, and who decides how."""

    model: str
    """A name of `MODELS`, or of the models that the package knows."""
    machine: str
    decide: Decide | None = None
    """None: the planner does, under `search`."""
    overrides: Sequence[str] = ()
    traced: bool = False
    """Whether the workload comes from the model's class rather than from closed forms."""
    training: Mapping[str, Any] = field(default_factory=dict)
    search: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `tp.plan`."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A schedule, and its steady state."""

    schedule: tp.Schedule
    steady: Any


def run(scenario: Scenario, folder: Path) -> Outcome:
    """Schedules and simulates one scenario. `folder` takes the model's config."""
    machine = tp.load_machine(scenario.machine, scenario.overrides)
    workload = _workload(scenario, folder)
    if scenario.decide is None:
        return _planned(workload, machine, scenario.search)
    schedule = tp.lower(scenario.decide(workload, machine), workload, machine)
    return Outcome(schedule=schedule, steady=tp.steady_state(schedule, machine))


def _workload(scenario: Scenario, folder: Path) -> tp.Workload:
    training = tp.Training(**scenario.training)
    load = tp.trace_workload if scenario.traced else tp.load_workload
    if scenario.model not in MODELS:
        return load(scenario.model, training)
    file = folder / f"{scenario.model}.json"
    file.write_text(json.dumps(MODELS[scenario.model]), encoding="utf-8")
    return load(file, training)


# ---- who decides ----


def policy(name: str, **options: object) -> Decide:
    """The plan of a published system."""
    return lambda workload, machine: tp.POLICIES[name](workload, machine, options)


def by_hand(*choices: Mapping[str, Any], **settings: Any) -> Decide:
    """A plan that gives block after block the next of the choices, in turn; embedding and head take the first one's
    places and keep what they save."""

    def decide(workload: tp.Workload, machine: tp.Machine) -> object:
        units, num_blocks = [], 0
        for unit in workload.units:
            if unit.kind == "block":
                units.append(tp.UnitPlan(**_cut_to(choices[num_blocks % len(choices)], len(unit.saved))))
                num_blocks += 1
            else:
                places = {k: v for k, v in choices[0].items() if k in ("params", "grads", "states")}
                units.append(tp.UnitPlan(**places))
        return tp.UnitwisePlan(policy="by hand", units=tuple(units), **settings)

    return decide


def _cut_to(choice: Mapping[str, Any], num_saved: int) -> Mapping[str, Any]:
    """The choice, with a sequence of actions repeated or cut to one per saved tensor."""
    acts = choice.get("acts", "keep")
    if isinstance(acts, str):
        return choice
    return {**choice, "acts": tuple(acts[k % len(acts)] for k in range(num_saved))}


GENEROUS_S = 300.0
"""Seconds that no search here comes near, so that only the count of simulated ops ends it."""


def _planned(workload: tp.Workload, machine: tp.Machine, settings: Mapping[str, Any]) -> Outcome:
    """The planner's result under a budget that is counted in ops alone."""
    budget_ops = settings["budget_ops"]
    others = {name: value for name, value in settings.items() if name != "budget_ops"}
    with mock.patch.object(budget, "OPS_PER_S", budget_ops / GENEROUS_S):
        found = tp.plan(workload, machine, time_limit_s=GENEROUS_S, **others)
    if found.status == "time-limit" or found.total_s > GENEROUS_S / 4:
        raise RuntimeError(f"the search took {found.total_s:.0f} s; its clock may have decided the result")
    return Outcome(schedule=found.schedule, steady=found.steady)


# ---- the scenarios ----

FP32 = {"dtype": "fp32"}
MIXED: Mapping[str, Any] = {"params": "nvme", "grads": "host", "states": "nvme", "input": "host", "acts": "host"}
PER_SLOT = ("keep", "recompute", "host", "nvme")


def _of(
    model: str,
    machine: str,
    decide: Decide | None = None,
    *,
    overrides: Sequence[str] = (),
    traced: bool = False,
    search: Mapping[str, Any] | None = None,
    batch: int = 1,
    accumulation: int = 1,
    seq: int = 1024,
    clip: float | None = None,
    **training: Any,
) -> Scenario:
    settings = {
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": accumulation,
        "sequence_length": seq,
        "max_grad_norm": clip,
        **training,
    }
    return Scenario(
        model=model,
        machine=machine,
        decide=decide,
        overrides=overrides,
        traced=traced,
        training=settings,
        search=search or {},
    )


POLICY_SCENARIOS: Mapping[str, Scenario] = {
    "in-memory gpt2": _of("gpt2-6", "server-8xh100", policy("in-memory", devices=1), batch=8),
    "in-memory llama, clipped": _of("llama-6", "ssdtrain-a100", policy("in-memory", devices=1), batch=4, clip=1.0),
    "in-memory opt, sgd, 3 micro-batches": _of(
        "opt-8", "desktop-4090", policy("in-memory"), accumulation=3, optimizer="sgd", master_weights=False
    ),
    "full-recompute gpt2": _of("gpt2-12", "desktop-4090", policy("full-recompute"), batch=8),
    "full-recompute bert by threes": _of(
        "bert-6", "desktop-4090", policy("full-recompute", every=3), batch=16, seq=512
    ),
    "full-recompute llama in backward, 2 micro-batches": _of(
        "llama-6",
        "ssdtrain-a100",
        policy("full-recompute", devices=1, semantics="in-backward"),
        batch=4,
        accumulation=2,
    ),
    "zero-offload gpt2": _of("gpt2-wide-4", "desktop-4090", policy("zero-offload"), batch=8),
    "zero-offload gpt-10b": _of("gpt-10b-zero-offload", "zero-offload-v100", policy("zero-offload"), dtype="fp16"),
    "zero-offload opt, partly on the device, clipped": _of(
        "opt-8",
        "laptop",
        policy("zero-offload", device_frac=0.2, checkpointing="off"),
        clip=0.5,
        accumulation=2,
        overrides=["gpu.capacity=16 GB"],
    ),
    "zero-offload llama, delayed": _of(
        "llama-6", "desktop-4090", policy("zero-offload", semantics="delayed-1"), batch=4
    ),
    "zero-infinity gpt2": _of(
        "gpt2-wide-4", "desktop-4090", policy("zero-infinity", host_buffers="none"), batch=8, accumulation=2
    ),
    "zero-infinity llama, pipelined, clipped": _of(
        "llama-6", "laptop", policy("zero-infinity", pipeline="on", host_buffers="none"), batch=2, clip=1.0
    ),
    "zero-infinity gpt2, operator tiles": _of(
        "gpt2-wide-4", "fuyou-4090", policy("zero-infinity", operator_tiles=4, checkpoints="nvme"), batch=2
    ),
    "zero-infinity opt, optimizer on drives only": _of(
        "opt-8", "fuyou-4090", policy("zero-infinity", params="device", prefetch=0, pin_memory="on"), batch=2
    ),
    "zero-infinity gpt2, four devices": _of(
        "gpt2-wide-4", "zero-infinity-4xh100", policy("zero-infinity"), batch=4, accumulation=2
    ),
    "fuyou gpt-13b": _of("gpt-13b", "fuyou-4090", policy("fuyou"), batch=32),
    "fuyou gpt2": _of("gpt2-wide-4", "laptop", policy("fuyou"), batch=4),
    "fuyou llama, delayed writes, all swapped": _of(
        "llama-6", "desktop-4090", policy("fuyou", write_back="delayed", swap="all", window=2), batch=8
    ),
    "fuyou opt, two tiles, none swapped": _of(
        "opt-8", "desktop-4090", policy("fuyou", sub_batches=2, swap="none"), batch=4, accumulation=2
    ),
    "fuyou gpt2, clipped": _of("gpt2-12", "desktop-4090", policy("fuyou"), batch=16, clip=1.0),
    "ssdtrain bert": _of("bert-6", "ssdtrain-a100", policy("ssdtrain", devices=1), batch=16, dtype="fp16"),
    "ssdtrain gpt2, no tail, 2 micro-batches": _of(
        "gpt2-6",
        "ssdtrain-a100",
        policy("ssdtrain", devices=1, tail="none", prefetch=2),
        batch=8,
        accumulation=2,
        dtype="fp16",
    ),
    "ssdtrain t5, traced": _of(
        "t5-3", "ssdtrain-a100", policy("ssdtrain", devices=1), batch=8, seq=512, dtype="fp16", traced=True
    ),
    "sliding-window gpt2": _of("gpt2-wide-4", "desktop-4090", policy("sliding-window"), batch=8),
    "sliding-window llama, wide window, clipped": _of(
        "llama-tied-4", "laptop", policy("sliding-window", window=2), batch=2, accumulation=3, clip=1.0
    ),
    "vertical gpt2": _of("gpt2-wide-4", "desktop-4090", policy("vertical"), batch=4, accumulation=4),
    "vertical opt without drives": _of(
        "opt-8", "zero-offload-v100", policy("vertical", prefetch=2), batch=2, accumulation=3, dtype="fp16", clip=1.0
    ),
    "harmony gpt2": _of(
        "gpt2-12",
        "harmony-4x1080ti",
        policy("harmony"),
        batch=1,
        accumulation=4,
        overrides=["gpu.capacity=3 GB"],
        **FP32,
    ),
    "harmony bert, packs of two": _of(
        "bert-6",
        "harmony-4x1080ti",
        policy("harmony", pack=2, pack_forward=3),
        batch=2,
        seq=512,
        accumulation=2,
        **FP32,
    ),
    "harmony-dp gpt2": _of("gpt2-12", "harmony-4x1080ti", policy("harmony-dp"), accumulation=8, **FP32),
    "harmony-dp bert on two devices": _of(
        "bert-6", "harmony-4x1080ti", policy("harmony-dp", devices=2, pack=2), seq=512, accumulation=4, **FP32
    ),
    "harmony-pp gpt2": _of("gpt2-12", "harmony-4x1080ti", policy("harmony-pp"), accumulation=4, **FP32),
    "harmony-pp llama on three devices": _of(
        "llama-tied-4", "harmony-4x1080ti", policy("harmony-pp", devices=3), accumulation=3, **FP32
    ),
    "virtual-memory gpt2": _of("gpt2-12", "harmony-4x1080ti", policy("virtual-memory"), accumulation=4, **FP32),
    "virtual-memory opt on one device": _of(
        "opt-8", "harmony-4x1080ti", policy("virtual-memory", devices=1), accumulation=2, **FP32
    ),
}
"""Every policy on two models or more, with the settings that lead to ops of their own."""

HAND_SCENARIOS: Mapping[str, Scenario] = {
    "by hand: a fate per saved tensor, late updates, states in parts": _of(
        "gpt2-12",
        "desktop-4090",
        by_hand(
            {**MIXED, "acts": PER_SLOT, "late_update": True, "state_shards": 3},
            {"params": "host", "grads": "nvme", "states": "nvme", "input": "nvme", "acts": "recompute"},
            {"params": "device", "grads": "device", "states": "device", "acts": PER_SLOT[::-1]},
            prefetch_params_units=2,
            prefetch_states_units=2,
        ),
        batch=8,
        accumulation=2,
    ),
    "by hand: vertical, clipped, gradients wide on the drive": _of(
        "llama-6",
        "laptop",
        by_hand(
            {"params": "nvme", "grads": "nvme", "states": "nvme", "input": "host", "acts": "host"},
            {"params": "host", "grads": "host", "states": "nvme", "input": "nvme", "acts": "nvme", "state_shards": 2},
            semantics="exact-clip",
            order="vertical",
            by_link=GradientsByLink(),
            update_order="backward",
            updates_in_flight=2,
            strict_windows=True,
        ),
        batch=2,
        accumulation=3,
        clip=1.0,
    ),
    "by hand: delayed updates, tiles": _of(
        "opt-8",
        "desktop-4090",
        by_hand(
            {**MIXED, "params": "device", "states": "host"},
            {"params": "host", "grads": "host", "states": "nvme", "acts": "recompute"},
            semantics="delayed-1",
            order="vertical",
            sub_batches=4,
            prefetch_acts_units=2,
            write_back="delayed",
        ),
        batch=8,
    ),
    "by hand: eight devices, traced": _of(
        "gpt2-6",
        "server-8xh100",
        by_hand({"params": "host", "grads": "host", "states": "host", "acts": "recompute"}, devices=8),
        batch=4,
        accumulation=2,
        traced=True,
    ),
}
"""Settings of a plan that no policy chooses, and mixtures of them."""

PLANNED_SCENARIOS: Mapping[str, Scenario] = {
    "planned: gpt2": _of(
        "gpt2-small-4", "laptop", batch=8, overrides=["gpu.capacity=1.5 GB", "host.capacity=9 GB"],
        search={"budget_ops": 480_000},
    ),
    "planned: llama, clipped": _of(
        "llama-tied-4", "laptop", batch=4, clip=1.0, overrides=["gpu.capacity=3 GB", "host.capacity=11 GB"],
        search={"budget_ops": 480_000},
    ),
    "planned: opt, 2 micro-batches": _of(
        "opt-8", "laptop", batch=4, accumulation=2, overrides=["gpu.capacity=4 GB", "host.capacity=14 GB"],
        search={"budget_ops": 480_000, "seed": 1},
    ),
    "planned: drives that are spared": _of(
        "gpt2-12", "laptop", batch=4, accumulation=2, overrides=["gpu.capacity=4 GB", "host.capacity=11 GB"],
        search={"budget_ops": 480_000, "drive_lifetime_years": 0.05},
    ),
    "planned: four devices": _of(
        "gpt2-small-4", "harmony-4x1080ti", accumulation=4, overrides=["gpu.capacity=2 GB"],
        search={"budget_ops": 480_000}, **FP32,
    ),
}  # fmt: skip
"""The planner's own results, under budgets of a few seconds."""

SCENARIOS: Mapping[str, Scenario] = {**POLICY_SCENARIOS, **HAND_SCENARIOS, **PLANNED_SCENARIOS}
