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
# Fuyou's machine has an RTX 4090 and twelve drives. How many of them does a 13 B model need, and where does another one
# stop to help?

# %%
from itertools import pairwise

import matplotlib.pyplot as plt

from tierplan.studies.study import Study
from tierplan.studies.sweep import sweep

study = Study(
    name="drives",
    scenario={"model": ["gpt-13b"], "machine": ["fuyou-4090"], "policy": ["fuyou"], "batch": [8, 32]},
    overrides={"nvme.drives": [1, 2, 3, 6, 12]},
)
rows = sweep(study.points(), num_workers=1)
print(len(rows), "simulations")

# %%
figure, ax = plt.subplots(figsize=(7, 3.5), layout="constrained")
for batch, marker in ((8, "o"), (32, "s")):
    mine = [r for r in rows if r["batch"] == batch]
    ax.plot([r["nvme.drives"] for r in mine], [r["tokens_per_s"] for r in mine], marker=marker, label=f"batch {batch}")
ax.set(xlabel="drives", ylabel="tokens per second", ylim=(0, None), title="gpt-13b on fuyou-4090, policy fuyou")
ax.set_xticks([1, 2, 3, 6, 12])
_ = ax.legend()

# %% [markdown]
# What each drive adds to the speed before it, and the share of the speed of twelve that is reached:


# %%
def gains(batch):
    mine = [(r["nvme.drives"], r["tokens_per_s"]) for r in rows if r["batch"] == batch]
    return {n: (speed / before - 1) / (n - m) for (m, before), (n, speed) in pairwise(mine)}


def shares(batch):
    mine = {r["nvme.drives"]: r["tokens_per_s"] for r in rows if r["batch"] == batch}
    return {n: speed / mine[12] for n, speed in mine.items()}


for r in rows:
    gain = gains(r["batch"]).get(r["nvme.drives"])
    each = "" if gain is None else f"{gain:+.0%}"
    share = f"{shares(r['batch'])[r['nvme.drives']]:.0%}"
    print(f"batch {r['batch']:2} drives {r['nvme.drives']:2} {each:>5} {share:>5}  limited by {r['limited_by']}")

# %% [markdown]
# **Answer.** Six. The second drive nearly doubles the speed, the third adds about a quarter, and with six it is at
# least 80 % of that with twelve, where the host's Adam is the limit and each further drive adds 3 or 4 %. A larger
# batch does not change that: it has more to compute for the same traffic, so a little less depends on the drives.

# %%
speeds = [r["tokens_per_s"] for r in rows if r["batch"] == 32]
assert speeds[1] > 1.5 * speeds[0], "the second drive nearly doubles the speed"
assert all(later >= 0.98 * before for before, later in pairwise(speeds)), "a drive never harms"
assert gains(32)[2] > gains(32)[12], "the twelfth helps less than the second"
assert all(shares(batch)[3] < 0.8 < shares(batch)[6] and gains(batch)[12] < 0.05 for batch in (8, 32)), "six do"
assert shares(32)[6] > shares(8)[6], "a little less depends on the drives"
