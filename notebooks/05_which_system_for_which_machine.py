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
# **Question: is there one offloading system that is best everywhere?** Six policies, three machines, three models.

# %%
from tierplan.studies.study import Study
from tierplan.studies.sweep import sweep

study = Study(
    name="systems",
    scenario={
        "model": ["gpt-6.7b", "gpt-13b"],
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
        best[machine, model] = max(fitting, key=fitting.get) if fitting else None
        shown = ", ".join(f"{policy} {speed:.0f}" for policy, speed in sorted(fitting.items(), key=lambda kv: -kv[1]))
        print(f"{machine:14} {model:9} {shown or 'nothing fits'}")

# %% [markdown]
# **Answer.** No. Where DRAM is scarce, the drive is needed; where the states fit into DRAM, plans that stay there win;
# and the less is moved the better: what fits on the GPU should stay on it.

# %%
print({f"{machine}, {model}": policy for (machine, model), policy in best.items()})
assert len({policy for policy in best.values() if policy}) >= 2, "no system is best everywhere"
assert best["desktop-4090", "gpt-13b"] == "fuyou", "64 GB of DRAM do not hold 13 B parameters' states"
assert best["fuyou-4090", "gpt-6.7b"] != "in-memory", "24 GB do not hold 6.7 B parameters' states"
