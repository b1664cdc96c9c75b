"""Which of the settings that can be planned are also executed: for whoever plans, and for whoever executes.

not_executed(training)          what is simulated only, and what to plan instead; None where it runs
has_frozen_encoder(workload)    that it is an encoder-decoder of which not all is trained, which is simulated only, too
"""

from __future__ import annotations

from collections.abc import Collection

from tierplan.sim.workloads.formats import executed_bases
from tierplan.sim.workloads.workload import Training, Workload

OPTIMIZERS = ("adamw", "sgd", "lion", "muon", "adafactor")
"""By name without options: those whose steps the runtime has."""
BEHIND_ENCODER = "between"
"""How the name begins of what lies between blocks: in models that have a config, behind the last of an encoder."""


def not_executed(
    training: Training, *, num_devices: int = 1, optimizers: Collection[str] = OPTIMIZERS
) -> tuple[str, str] | None:
    """What the training does that is simulated only, and the advice; None where `tierplan run` executes it.

    `optimizers` are those that this PyTorch has.
    """
    if training.dtype == "fp16":
        without = "whose small gradients would become zero without a gradient scaler"
        return f"trains in fp16, {without}", "plan with dtype bf16 or fp32"
    if cast := training.autocast:
        return f"trains under autocast to {cast}", (
            f"plan with dtype {cast} and an fp32 master copy, which takes less memory and time, or with dtype fp32"
        )
    for what, is_so in (("a fused loss", training.loss == "fused"), ("compiled blocks", training.torch_compile)):
        if is_so:
            return f"trains with {what}", (
                "the runtime runs the model's own kernels, so plan without --loss fused and --torch-compile "
                "(--loss-chunks keeps logits small, too)"
            )
    optimizer = training.optimizer
    if optimizer.partition(":")[0] not in optimizers:
        return f"updates with {optimizer}", f"plan with one of {', '.join(optimizers)}"
    if num_devices > 1 and not training.optim.is_flat:
        return f"has states of {optimizer}, not alike for all values, on {num_devices} devices", (
            "plan for one, or with --optimizer adamw, adamw:states=bf16, lion or sgd"
        )
    if training.dtype_of_trained != "fp32" and not training.has_master:
        moments = training.optim.moments((1024, 1024), True, training.dtype_of_trained)
        if any(moment.format == "fp32" for moment in moments):
            whose = f"{training.dtype_of_trained} weights by fp32 states of {optimizer}"
            return f"updates {whose} without a master copy of the weights", (
                "kernels have both in one dtype, so plan with master weights, or with states in the weights' dtype or "
                "in 8 bits (adamw:states=bf16)"
            )
    if training.base and training.base not in (bases := executed_bases()):
        return f"has a base in {training.base}", f"plan with one of {', '.join(bases)}"
    return None


def has_frozen_encoder(workload: Workload) -> bool:
    """Whether it is an encoder-decoder, by its config, with parameters that are not trained."""
    two_stacks = workload.config and any(unit.name.startswith(BEHIND_ENCODER) for unit in workload.units)
    return bool(two_stacks) and any(unit.num_frozen for unit in workload.units)
