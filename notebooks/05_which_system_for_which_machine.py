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
# # Which system for which machine?
#
# **Question: is there one offloading system that is best everywhere?** Five of them, three machines, two models.
# What has no bar does not fit.

# %%
import matplotlib.pyplot as plt

from tierplan.studies.study import Study
from tierplan.studies.sweep import sweep

study = Study(
    name="systems",
    scenario={
        "model": ["gpt2-xl", "gpt-13b"],
        "machine": ["desktop-4090", "fuyou-4090", "server-8xh100"],
        "policy": ["in-memory", "full-recompute", "zero-offload", "sliding-window", "fuyou"],
        "batch": [16],
    },
)
rows = sweep(study.points(), num_workers=1)

# %%
best = {}
for machine in study.scenario["machine"]:
    for model in study.scenario["model"]:
        mine = [r for r in rows if (r["machine"], r["model"]) == (machine, model)]
        fitting = {r["policy"]: r["tokens_per_s"] for r in mine if r.get("fits")}
        best[machine, model] = max(fitting, key=fitting.get)
        print(f"{model:8} on {machine:14} {best[machine, model]}")

figure, axes = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained", sharey=True)
for ax, model in zip(axes, study.scenario["model"], strict=True):
    for k, policy in enumerate(study.scenario["policy"]):
        speeds = [r.get("tokens_per_s", 0) for r in rows if (r["model"], r["policy"]) == (model, policy)]
        ax.bar([place + 0.16 * (k - 2) for place in range(3)], speeds, width=0.16, label=policy)
    ax.set(title=f"{model}, batch 16", yscale="log", ylim=(100, None))
    ax.set_xticks(range(3), study.scenario["machine"], fontsize="small")
axes[0].set_ylabel("tokens per second")
_ = figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize="small")

# %% [markdown]
# **Answer.** No. The less is moved the better: what fits on the GPU should stay on it; where the states fit into
# DRAM, a plan that keeps them there wins; and where they do not, the drive is needed.

# %%
assert best["server-8xh100", "gpt2-xl"] == "full-recompute", "80 GB hold 1.6 B parameters' states"
assert best["desktop-4090", "gpt2-xl"] == "sliding-window", "24 GB do not, but 64 GB of DRAM do"
assert best["desktop-4090", "gpt-13b"] == "fuyou", "64 GB of DRAM do not hold 13 B parameters' states"
