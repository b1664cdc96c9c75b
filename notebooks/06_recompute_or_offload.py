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

machine = tp.load_machine("desktop-4090", ["host.capacity=256 GB", "nvme.drives=2"])
ACTIONS = ("keep", "recompute", "host", "nvme")


def plan_with(workload, action):
    """Parameters and states in host memory; every block's activations as `action` says."""
    block = tp.UnitPlan(params="host", grads="host", states="host", acts=action)
    ends = tp.UnitPlan(params="host", grads="host", states="host")
    units = tuple(block if u.kind == "block" else ends for u in workload.units)
    return tp.UnitwisePlan(policy=action, units=units, prefetch_params_units=2, prefetch_acts_units=2)


# %%
speeds = {action: {} for action in ACTIONS}
for batch in (4, 8, 12, 16):
    workload = tp.load_workload("gpt-6.7b", tp.Training(per_device_train_batch_size=batch))
    for action in ACTIONS:
        p = predict_plan(plan_with(workload, action), workload, machine)
        if p.fits:
            speeds[action][batch] = p.tokens_per_s
        shown = f"{p.tokens_per_s:6.0f} tokens/s, limited by {p.limited_by}" if p.fits else "does not fit"
        print(f"batch {batch:3} {action:10} {shown}")

# %%
figure, ax = plt.subplots(figsize=(7, 3.5), layout="constrained")
for action, marker in zip(ACTIONS, "osD^", strict=True):
    size = 12 if action == "keep" else 6  # its one point lies below another
    ax.plot(list(speeds[action]), list(speeds[action].values()), marker=marker, markersize=size, label=action)
ax.set(xlabel="batch", ylabel="tokens per second", ylim=(0, None), title="gpt-6.7b: what happens to activations")
ax.set_xticks([4, 8, 12, 16])
_ = ax.legend()

# %% [markdown]
# **Answer.** It depends on what has time to spare. At batch 8 the optimizer keeps DRAM busy, and activations that go
# through DRAM cost more than computing them again. At batch 16 computation is the limit, and parking them in host
# memory is quicker. One or two drives are too slow to take them all. A plan need not choose one for all tensors: the
# planner mixes them.

# %%
assert list(speeds["keep"]) == [4], "from batch 8 on the activations do not fit on the GPU"
assert speeds["recompute"][8] > speeds["host"][8]
assert speeds["recompute"][16] < speeds["host"][16]
assert all(speeds["nvme"][b] < min(speeds["recompute"][b], speeds["host"][b]) for b in speeds["nvme"])
