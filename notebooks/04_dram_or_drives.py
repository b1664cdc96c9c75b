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
# # DRAM or drives?
#
# **Question: I have 600 dollars to make 13 B training on my desktop quicker. More DRAM, or more drives?**
#
# Each answer is the best plan for a machine, as `tierplan plan` finds it. Prices are those of `tierplan advise`.

# %%
import matplotlib.pyplot as plt

from tierplan.hwmodels import load_description
from tierplan.studies.advise import answer_point
from tierplan.studies.purchases import PriceList, purchases
from tierplan.studies.study import Point

today = Point(model="gpt-13b", machine="desktop-4090", batch=16)


def answer(bought=None):
    """What `tierplan plan` says of the desktop, perhaps with something bought."""
    return answer_point(today if bought is None else bought.applied(today))


as_is = answer()
print(f"as it is: {as_is['tokens_per_s']:.0f} tokens/s, limited by {as_is['limited_by']}")

# %%
offers = purchases(load_description(today.machine), PriceList())
sold = [one for one in offers if "gpu.count" not in one.overrides and one.price_usd < 2500]
speed = {}
for bought in sold:
    found = answer(bought)
    speed[bought.what] = found["tokens_per_s"]
    gain = found["tokens_per_s"] / as_is["tokens_per_s"] - 1
    print(f"{bought.what:24} {bought.price_usd:5.0f} USD {gain:+5.0%}, then limited by {found['limited_by']}")

# %%
figure, ax = plt.subplots(figsize=(7, 3), layout="constrained")
ax.barh(["as it is", *speed], [as_is["tokens_per_s"], *speed.values()], color="#0072B2")
ax.invert_yaxis()
_ = ax.set(xlabel="tokens per second", title="gpt-13b on the desktop, batch 16, best plan of each machine")

# %% [markdown]
# **Answer.** Drives, of what costs up to 2,500 dollars in 2026. The drive is the limit, so another one takes half of
# its work, and gives most for the money; three more give most for 600 dollars. What DRAM holds need not come from a
# drive: 128 GiB give less for more than 600 dollars, 192 GiB give most of all. A quicker GPU costs much and gives
# least: it waits for the same drive.

# %%
afford = {bought.what: speed[bought.what] for bought in sold if bought.price_usd <= 600}
best = max(afford, key=afford.get)
assert as_is["limited_by"].startswith("nvme")
assert all(tokens_per_s > as_is["tokens_per_s"] for tokens_per_s in speed.values()), "each helps"
assert best.startswith("3 more drives")
assert not any("DRAM" in what for what in afford), "128 GiB cost more"
assert max(speed, key=speed.get).startswith("192 GiB DRAM"), "all states in DRAM are better still, for more money"
assert min(speed, key=speed.get).startswith("rtx-5090"), "a quicker GPU waits for the same drive"
