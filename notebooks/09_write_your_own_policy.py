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
# # Write your own policy
#
# **Question: what would it give to keep the optimizer states of some blocks in DRAM and those of the others on the
# drive?** A policy is a function from a workload and a machine to a plan. This one fills DRAM first.

# %%
import matplotlib.pyplot as plt

import tierplan as tp
from tierplan.planner.policies import POLICIES
from tierplan.planner.prediction import predict


def dram_first(workload, machine, options):
    """Everything streams as in Fuyou, but states stay in host memory until a share of it is full."""
    share = float(options.get("share", 0.5))
    left = share * machine.tier("host").capacity_bytes
    training = workload.training
    units = []
    for unit in workload.units:
        size = unit.num_parameters * training.param_bytes + training.states_bytes(unit)
        place = "host" if size <= left else "nvme"
        left -= size if place == "host" else 0
        acts = "recompute" if unit.kind == "block" else "keep"
        units.append(
            tp.UnitPlan(
                params=place, grads="host", states=place, acts=acts, input="host" if unit.saves_input else "keep"
            )
        )
    return tp.UnitwisePlan(policy="dram-first", units=tuple(units), prefetch_params_units=2, prefetch_states_units=2)


POLICIES["dram-first"] = dram_first

# %%
machine = tp.load_machine("desktop-4090")
workload = tp.load_workload("gpt-13b", tp.Training(per_device_train_batch_size=16))
fuyou = predict("fuyou", workload, machine)
print(f"fuyou                   {fuyou.step_s:6.1f} s")
found = {}
for share in (0.0, 0.2, 0.4, 0.6):
    p = predict("dram-first", workload, machine, {"share": share})
    found[share] = p
    moved = p.schedule.bytes_moved().get("nvme.read", 0) / 1e9 if p.fits else 0
    print(
        f"dram-first {share:4.0%} of DRAM",
        f"{p.step_s:6.1f} s, {moved:.0f} GB read per step" if p.fits else p.why_not,
    )

best = tp.plan(workload, machine)
print(f"planner                 {best.step_s:6.1f} s")
figure, ax = plt.subplots(figsize=(7, 2.5), layout="constrained")
ax.barh(["fuyou", *(f"dram-first, {share:.0%}" for share in found), "planner"],
        [fuyou.step_s, *(p.step_s for p in found.values()), best.step_s], color="#0072B2")  # fmt: skip
ax.invert_yaxis()
_ = ax.set(xlabel="seconds per step", title="gpt-13b on the desktop, batch 16")

# %% [markdown]
# A policy registered in `POLICIES` is a candidate everywhere: `tierplan simulate`, the planner, sweeps.
#
# **Answer.** Every byte that stays in DRAM is a byte less from the drive, in each direction, and the drive is the
# limit: the step gets shorter in proportion. The planner decides for each unit, and for shards of it: it goes further.

# %%
fitting = {share: p for share, p in found.items() if p.fits}
times = [p.step_s for share, p in sorted(fitting.items())]
reads = [p.schedule.bytes_moved()["nvme.read"] for share, p in sorted(fitting.items())]
del POLICIES["dram-first"]
assert len(fitting) >= 2
assert times == sorted(times, reverse=True)
assert reads == sorted(reads, reverse=True)
assert best.step_s < 0.9 * min(times)
