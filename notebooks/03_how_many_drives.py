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
# # How many drives pay off?
#
# A 13 B model on an RTX 4090 with 128 GiB of DRAM: how many drives does it need, and where does another one stop to
# help? That depends on who makes the schedule: here Fuyou's, and the planner's.

# %%
from itertools import pairwise

import matplotlib.pyplot as plt

from tierplan.studies.study import Study
from tierplan.studies.sweep import sweep

study = Study(
    name="drives",
    scenario={"model": ["gpt-13b"], "machine": ["fuyou-4090"], "policy": ["fuyou", "planner"], "batch": [32]},
    overrides={"host.capacity": ["128 GiB"], "nvme.drives": [1, 2, 3, 6]},
)
rows = sweep(study.points(), num_workers=1)
speeds = {(r["policy"], r["nvme.drives"]): r["tokens_per_s"] for r in rows}
print(len(rows), "simulations")

# %%
figure, ax = plt.subplots(figsize=(7, 3.5), layout="constrained")
for policy, marker in (("fuyou", "o"), ("planner", "s")):
    mine = {drives: speed for (who, drives), speed in speeds.items() if who == policy}
    ax.plot(mine.keys(), mine.values(), marker=marker, label=policy)
ax.set(xlabel="drives", ylabel="tokens per second", ylim=(0, None), title="gpt-13b, batch 32, RTX 4090 with 128 GiB")
ax.set_xticks([1, 2, 3, 6])
_ = ax.legend()

# %% [markdown]
# What each drive adds to the speed before it, and the share of the speed of six that is reached:


# %%
def gains(policy):
    mine = [(drives, speed) for (who, drives), speed in speeds.items() if who == policy]
    return {n: (speed / before - 1) / (n - m) for (m, before), (n, speed) in pairwise(mine)}


for r in rows:
    policy, drives = r["policy"], r["nvme.drives"]
    each = "" if drives == 1 else f"{gains(policy)[drives]:+.0%}"
    share = f"{speeds[policy, drives] / speeds[policy, 6]:.0%}"
    print(f"{policy:7} drives {drives:2} {each:>5} {share:>5}  limited by {r['limited_by']}")

# %% [markdown]
# **Answer.** One or two. With Fuyou's schedule the second drive nearly doubles the speed, the third adds about a
# quarter, and each one after that nearly a tenth. The planner keeps off the drives what has room elsewhere: with one
# drive it is quicker than Fuyou with six, and a further one adds less than a sixth at first and a few per cent later.

# %%
assert speeds["fuyou", 2] > 1.7 * speeds["fuyou", 1], "the second drive nearly doubles the speed"
assert 0.2 < gains("fuyou")[3] < 0.3, "the third adds about a quarter"
assert 0.07 < gains("fuyou")[6] < 0.11, "each one after that nearly a tenth"
assert speeds["planner", 1] > speeds["fuyou", 6], "quicker with one drive than Fuyou with six"
assert 0.05 < gains("planner")[2] < 1 / 6, "less than a sixth at first"
assert 0.015 < gains("planner")[6] < 0.05, "a few per cent later"
assert all(gain > 0 for who in ("fuyou", "planner") for gain in gains(who).values()), "a drive never harms"
