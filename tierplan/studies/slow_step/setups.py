"""A setup of training as a configuration file has it, and the changes to it that may save time.

Settings that the simulator knows are judged by simulating again. For others the table below says how much slower a part
of the machine is by them: that is an assumption, and is named as one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.names import NVME_READ, NVME_WRITE, parse_stream
from tierplan.planner.policies.options import has_nvme
from tierplan.planner.training_files.configured import Configured
from tierplan.sim.workloads.workload import Training, Workload, WorkloadError

COMPUTE, LINKS, DRIVES, CORES, PEERS = "GPU", "host links", "drives", "host cores", "links between GPUs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is trained, how, and how much slower than the machine says its parts are by assumption."""

    training: Training
    policy: str
    options: Mapping[str, str]
    slower: Mapping[str, float] = field(default_factory=dict)
    """Factors above 1, by part (`part_of`)."""
    extra_s: float = 0.0
    """Of a step, beside what is simulated: checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupChange:
    """One thing to change."""

    what: str
    why: str
    setup: Setup
    assumed: bool = False
    """Rests on an assumed factor; else all of the gain is simulated."""


class CostlySetting(NamedTuple):
    """A setting that makes a part of the machine slower."""

    key: str
    value: object
    part: str
    factor: float
    better: str
    why: str


_UNPINNED = "copies from memory that is not pinned go through a buffer, at about half the rate, and block"
_ON_CPU = "Adam of PyTorch took 56 s where DeepSpeed's took 8.2 s (DeepSpeed pull request 735)"
_PIN, _OWN_ADAM = "zero_optimization.offload_{}.pin_memory", "zero_force_ds_cpu_optimizer"
COSTS = (
    CostlySetting(_PIN.format("param"), False, LINKS, 2.0, "pin_memory: true", _UNPINNED),
    CostlySetting("optimizer.params.torch_adam", True, CORES, 6.5, "torch_adam: false", _ON_CPU),
    CostlySetting(_OWN_ADAM, False, CORES, 6.5, f"{_OWN_ADAM}: true", _ON_CPU),
)


def part_of(stream: str) -> str:
    """The part of the machine that a stream belongs to."""
    name = parse_stream(stream)
    if name.is_drive:
        return DRIVES
    if name.device is None:
        return CORES
    return COMPUTE if name.is_compute else LINKS if name.is_host_link else PEERS


def setup_of(configured: Configured, machine: Machine) -> tuple[Setup, tuple[str, ...]]:
    """The setup of a configuration on a machine, and what was assumed for it.

    Raises `WorkloadError` where the configuration is of another number of GPUs than the machine has.
    """
    if configured.devices not in (None, machine.num_devices):
        raise WorkloadError(
            f"the configuration has {configured.why_devices}: a run on {configured.devices} GPUs, but machine "
            f"{machine.name!r} has {machine.num_devices}; give --devices {configured.devices} (gpu.count), or the "
            f"configuration of a run on {machine.num_devices}"
        )
    says, slower, assumed = configured.says, {}, []
    of_optimizer = "host" if configured.policy == "zero-offload" else "device"
    places = {LINKS: configured.options.get("params"), CORES: configured.options.get("optimizer", of_optimizer)}
    for cost in COSTS:  # of parameters and of an optimizer that leave the device
        is_used = places[cost.part] in ("host", "nvme")
        if is_used and says.get(cost.key) == cost.value and cost.part not in slower:
            slower[cost.part] = cost.factor
            assumed.append(f"{cost.key} is {cost.value}: {cost.part} {cost.factor:g} times slower, since {cost.why}")
    setup = Setup(training=configured.training, policy=configured.policy, options=configured.options, slower=slower)
    uses_drive = "nvme" in setup.options.values() and has_nvme(machine)
    if uses_drive and (factor := _queue_factor(says, machine)) > 1.02:
        setup = replace(setup, slower={**slower, DRIVES: factor})
        assumed.append(f"aio keeps too few requests in flight: drives {factor:.3g} times slower ({_QUEUE_WHY})")
    if setup.policy == "zero-infinity" and "checkpoints" not in setup.options:
        assumed.append("blocks are recomputed from checkpoints in backward, as ZeRO-3 users do")
    for where in ("optimizer", "param"):
        place = says.get(f"zero_optimization.offload_{where}.device")
        if place in ("cpu", "nvme") and (key := _PIN.format(where)) not in says:
            assumed.append(f"{key} is not given, which DeepSpeed before 0.19.5 takes for false: it is true here")
            setup = replace(setup, options={"pin_memory": "on", **setup.options})
    overlap, several = says.get("zero_optimization.overlap_comm"), machine.num_devices > 1
    if setup.policy == "zero-infinity" and overlap is False and several:
        assumed.append("overlap_comm is False: GPUs exchange beside compute all the same")
    paths = set(filter(None, (says.get(f"zero_optimization.offload_{w}.nvme_path") for w in ("param", "optimizer"))))
    if uses_drive and len(paths) == 1:
        assumed.append(
            f"nvme_path {paths.pop()} lies on the machine's drives alone, not on the system's drive or a tmpfs"
        )
    return setup, tuple(assumed)


_QUEUE_WHY = "requests in flight x block_size / (latency + time of a block)"


def _queue_factor(says: Mapping[str, object], machine: Machine) -> float:
    """How much slower drives are with DeepSpeed's few asynchronous requests: each takes latency and transfer."""

    def number(key: str, default: float) -> float:
        value = says.get(f"aio.{key}", default)
        return float(value) if isinstance(value, int | float) and value > 0 else default

    stream = machine.stream(NVME_READ)
    rate = max(per_s for _, per_s in stream.rates["bytes"].points)
    block = number("block_size", 2**20)
    depth = number("queue_depth", 8) * number("intra_op_parallelism", number("thread_count", 1))
    return max(1.0, rate * (stream.latency_s + block / rate) / (depth * block))


def with_checkpoints(setup: Setup, says: Mapping[str, object], machine: Machine, workload: Workload) -> Setup:
    """The setup with the time that the Trainer's checkpoints take: written while training waits."""
    every = says.get("save_steps")
    if not isinstance(every, int) or every < 1 or says.get("save_strategy", "steps") != "steps":
        return setup
    rates = [s.rates["bytes"].points for s in machine.streams if s.name == NVME_WRITE]
    if not rates:
        return setup
    num = workload.num_trained if setup.training.lora else workload.num_parameters  # of adapters, these alone
    size = num * setup.training.param_bytes + (0 if says.get("save_only_model") else workload.states_bytes)
    return replace(setup, extra_s=size / max(rate for _, rate in rates[0]) / every)


ON_GPU = ("in-memory", "full-recompute", "zero-1", "zero-2", "ddp", "fsdp")
"""Policies that offload nothing."""


def changes(setup: Setup, says: Mapping[str, object], num_devices: int = 1) -> Iterator[SetupChange]:
    """What might save time, each by itself; whether it fits and what it saves is for the simulation to say."""
    training, options = setup.training, setup.options

    def change(what: str, why: str, *, assumed: bool = False, **changed: Any) -> SetupChange:
        return SetupChange(what=what, why=why, setup=replace(setup, **changed), assumed=assumed)

    def as_fast_as_said(part: str) -> dict[str, float]:
        return {other: factor for other, factor in setup.slower.items() if other != part}

    for cost in COSTS:
        if says.get(cost.key) == cost.value and setup.slower.get(cost.part) == cost.factor:
            yield change(cost.better, cost.why, assumed=True, slower=as_fast_as_said(cost.part))
    if DRIVES in setup.slower:
        what, why = "aio: queue_depth 32, intra_op_parallelism 4", "keeps the drives' queues full"
        yield change(what, why, assumed=True, slower=as_fast_as_said(DRIVES))
    if setup.extra_s:
        what, why = f"save_steps: {10 * int(str(says['save_steps']))}", "training waits while a checkpoint is written"
        yield change(what, why, assumed=True, extra_s=setup.extra_s / 10)

    def option(what: str, why: str, **more: str) -> SetupChange:
        return change(what, why, options={**options, **more})

    if options.get("pin_memory") == "off":
        yield option("pin_memory: true", _UNPINNED, pin_memory="on")
    if options.get("overlap") == "off" and setup.policy == "zero-offload":
        yield option("overlap_comm: true", "gradients are copied beside backward", overlap="on")
    if setup.policy == "zero-infinity":
        if options.get("prefetch") == "0":
            yield option("overlap_comm: true, and prefetching", "parameters come while the GPU computes", prefetch="2")
        if options.get("optimizer") == "nvme":
            if options.get("pipeline") != "on":
                why = "states are read and written while others are updated"
                yield option("pipeline_read: true, pipeline_write: true", why, pipeline="on")
            yield option("offload_optimizer: cpu", "states need not go through the drives", optimizer="host")
        if options.get("params") == "nvme":
            yield option("offload_param: cpu", "parameters need not go through the drives", params="host")
            both = {"params": "host", "optimizer": "host"}
            yield option("offload_param and offload_optimizer: cpu", "nothing goes through the drives", **both)
        if options.get("params") in ("host", "nvme"):
            pinned = options.get("pin_memory", "on")
            yield option("no offload_param", "parameters stay on the GPU", params="device", pin_memory=pinned)
        if options.get("checkpoints") == "none":
            yield option("gradient checkpointing", "fewer activations are kept", checkpoints="device")
        if options.get("checkpoints", "host") in ("host", "nvme"):
            yield option("checkpoints of activations on the GPU", "they need not be copied", checkpoints="device")
    if options.get("checkpointing") == "on":
        yield option("no gradient checkpointing", "nothing is computed twice", checkpointing="off")
    if options.get("checkpointing") == "off":
        yield option("gradient checkpointing", "fewer activations are kept", checkpointing="on")
    if options.get("reshard") == "on":
        why = "parameters are gathered once for forward and backward"
        yield option("SHARD_GRAD_OP (FSDP2: reshard_after_forward: false)", why, reshard="off")
    if options.get("reshard") == "off":
        yield option("FULL_SHARD (FSDP2: reshard_after_forward: true)", "less is on the GPU at once", reshard="on")

    def instead(what: str, why: str, policy: str, **more: str) -> SetupChange:
        own = {"semantics": options["semantics"]} if "semantics" in options else {}
        return change(what, why, policy=policy, options=own | more, slower={})

    kept = {key: options[key] for key in ("checkpointing", "reduces") if key in options}
    if setup.policy == "fsdp":
        yield instead("fsdp_offload_params: true", "parameters and states leave the GPU", "fsdp-offload", **kept)
    if num_devices > 1:  # one GPU has all of it, as below
        why = "what is divided among the GPUs fits there"
        if setup.policy == "fsdp-offload":
            yield instead("fsdp_offload_params: false", why, "fsdp", **kept)
        if setup.policy == "zero-offload":
            yield instead("no offload_optimizer", why, "zero-2", **kept)
        if setup.policy == "zero-infinity" and options.get("optimizer") != "device":
            yield option("no offload_optimizer, no offload_param", why, params="device", optimizer="device")
        if setup.policy in ("in-memory", "full-recompute", "ddp", "zero-1", "zero-2"):
            why = "parameters, gradients and states are divided among the GPUs"
            yield instead("FSDP with FULL_SHARD", why, "fsdp", checkpointing="on", reduces="last")
    if setup.policy == "zero-infinity":
        why = "parameters stay on the GPU, and backward need not fetch them"
        yield instead("stage 2 with offload_optimizer: cpu", why, "zero-offload", checkpointing="on")
    if setup.policy in ("in-memory", "full-recompute"):
        yield instead("gradient checkpointing", "fewer activations are kept", "full-recompute")
    if setup.policy in ON_GPU:
        why = "optimizer states leave the GPU"
        yield instead("DeepSpeed stage 2 with offload_optimizer: cpu", why, "zero-offload", checkpointing="on")
    if setup.policy in ("zero-infinity", "zero-offload", "fsdp-offload"):
        yield instead("no offloading, with gradient checkpointing", "everything fits on the GPU", "full-recompute")
    if setup.policy != "in-memory":
        yield instead("no offloading and no recomputation", "everything fits on the GPU", "in-memory")
    if (cast := training.autocast) and training.dtype == "fp32":
        narrow = replace(training, dtype=cast, autocast="")
        what = f"a model in {cast} with an fp32 copy, as DeepSpeed and FSDP have it"
        yield change(what, "nothing is cast, and gradients take half the bytes", training=narrow)
    elif training.dtype == "fp32":
        for name in ("bf16", "fp16"):
            faster = replace(training, dtype=name)  # type: ignore[arg-type]
            yield change(f"{name} instead of fp32", "half the bytes, and tensor cores", training=faster)
    if training.attention == "plain":
        flash = replace(training, attention="flash")
        yield change("flash attention", "no matrix of scores is kept", training=flash)
    if training.loss == "plain":
        chunks = 8 if training.loss_chunks == 1 else 1
        what, why = f"the loss in {chunks} chunks (--loss-chunks {chunks})", "logits take less of the GPU's memory"
        if chunks == 1:
            what, why = "the loss in one piece (--loss-chunks 1)", "the head's products are not computed twice"
        yield change(what, why, training=replace(training, loss_chunks=chunks))
    batch, steps = training.per_device_train_batch_size, training.gradient_accumulation_steps
    for size in (2**k for k in range(12)):
        if size != batch and batch * steps % size == 0 and max(size, batch) % min(size, batch) == 0:
            num = batch * steps // size
            other = replace(training, per_device_train_batch_size=size, gradient_accumulation_steps=num)
            larger = "products are larger, and what is fetched for them comes less often"
            why = larger if size > batch else "less is on the GPU at once"
            yield change(f"micro-batches of {size}, {num} in a step", why, training=other)
