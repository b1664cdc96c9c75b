# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Recompute or offload?
#
# **Question: the activations do not fit. Is it better to compute them again, to park them in host memory, or to write
# them to the drive?** A plan by hand: parameters and optimizer as in ZeRO-Offload, only the activations differ.

# %%
import matplotlib.pyplot as plt

import tierplan as tp
from tierplan.planner.prediction import predict_plan

GPUS = ("rtx-4090", "rtx-3090")
ACTIONS = ("keep", "recompute", "host", "nvme")


def desktop(gpu):
    return tp.load_machine("desktop-4090", ["host.capacity=256 GB", "nvme.drives=2", f"gpu.part={gpu}"])


def plan_with(workload, action):
    """Parameters and states in host memory; every block's activations as `action` says."""
    block = tp.UnitPlan(params="host", grads="host", states="host", acts=action)
    ends = tp.UnitPlan(params="host", grads="host", states="host")
    units = tuple(block if u.kind == "block" else ends for u in workload.units)
    return tp.UnitwisePlan(policy=action, units=units, prefetch_params_units=2, prefetch_acts_units=2)


# %%
speeds = {gpu: {action: {} for action in ACTIONS} for gpu in GPUS}
for gpu in GPUS:
    machine = desktop(gpu)
    for batch in (4, 8, 16):
        workload = tp.load_workload("gpt-6.7b", tp.Training(per_device_train_batch_size=batch))
        for action in ACTIONS:
            p = predict_plan(plan_with(workload, action), workload, machine)
            if p.fits:
                speeds[gpu][action][batch] = p.tokens_per_s
            shown = f"{p.tokens_per_s:6.0f} tokens/s, limited by {p.limited_by}" if p.fits else "does not fit"
            print(f"{gpu} batch {batch:3} {action:10} {shown}")

# %%
figure, axes = plt.subplots(1, len(GPUS), figsize=(8, 3.5), layout="constrained", sharey=True)
for ax, gpu in zip(axes, GPUS, strict=True):
    for action, marker in zip(ACTIONS, "osD^", strict=True):
        size = 12 if action == "keep" else 6  # its one point lies below another
        found = speeds[gpu][action]
        ax.plot(list(found), list(found.values()), marker=marker, markersize=size, label=action)
    ax.set(xlabel="batch", ylim=(0, None), title=gpu)
    ax.set_xticks([4, 8, 16])
axes[0].set_ylabel("tokens per second")
axes[0].legend()
_ = figure.suptitle("gpt-6.7b: what happens to activations")

# %% [markdown]
# **Answer.** It depends on what has time to spare. A 4090 computes quickly: to make activations again costs less than
# the link takes to move them. A 3090 is busy with computing, and its link is as quick: there, parking them in host
# memory is quicker from batch 8 on. Two drives are too slow to take them all. A plan need not choose one for all
# tensors: the planner mixes them.

# %%
quick, slow = (speeds[gpu] for gpu in GPUS)
assert list(quick["keep"]) == list(slow["keep"]) == [4], "from batch 8 on the activations do not fit on the GPU"
assert quick["recompute"][8] > quick["host"][8]
assert quick["recompute"][16] > quick["host"][16]
assert slow["recompute"][8] < slow["host"][8]
assert slow["recompute"][16] < slow["host"][16]
