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
# **Question: I have 500 dollars to make 13 B training on my desktop quicker. More DRAM, or more drives?**
#
# PriceList are assumptions of this notebook: 160 dollars per 2 TB drive, 3 dollars per GiB of DRAM.

# %%
import tierplan as tp
from tierplan.planner.prediction import predict

DRIVE, GIB = 160, 3
training = tp.Training(per_device_train_batch_size=16, sequence_length=1024)
workload = tp.load_workload("gpt-13b", training)
POLICIES = ("zero-offload", "sliding-window", "fuyou")


def best(*overrides):
    """The quickest policy on the desktop with these changes."""
    machine = tp.load_machine("desktop-4090", overrides)
    fitting = [p for p in (predict(name, workload, machine) for name in POLICIES) if p.fits]
    return max(fitting, key=lambda p: p.tokens_per_s)


as_is = best()
print(f"as it is: {as_is.tokens_per_s:.0f} tokens/s with {as_is.policy}, limited by {as_is.bound_by}")

# %%
options = {
    "3 more drives": (3 * DRIVE, best("nvme.drives=4")),
    "64 GiB more DRAM": (64 * GIB, best("host.capacity=124 GiB")),
    "160 GiB more DRAM": (160 * GIB, best("host.capacity=220 GiB")),
    "1 more drive and 64 GiB": (DRIVE + 64 * GIB, best("nvme.drives=2", "host.capacity=124 GiB")),
}
for name, (price, p) in options.items():
    gain = p.tokens_per_s / as_is.tokens_per_s - 1
    print(
        f"{name:24} {price:4} USD  {p.tokens_per_s:6.0f} tokens/s ({gain:+4.0%})  {p.policy}, limited by {p.bound_by}"
    )

# %% [markdown]
# DRAM is all or nothing: 64 GiB more change little, because all states must still come from the drive. From about
# 200 GB on they fit, a plan without any drive becomes possible, and it wins by far.

# %%
speed = {name: p.tokens_per_s for name, (price, p) in options.items()}
sizes_gib = (60, 120, 180, 200, 220)
by_size = {gib: best(f"host.capacity={gib} GiB") for gib in sizes_gib}
for gib, p in by_size.items():
    print(f"{gib:4} GiB: {p.tokens_per_s:6.0f} tokens/s with {p.policy}")

# %% [markdown]
# **Answer.** Drives, if there is money for a little; DRAM, if there is enough for all of the optimizer's states, 180 GB
# here, and the board takes it. Half of that amount is money lost.

# %%
winner = max(speed, key=speed.get)
assert as_is.bound_by.startswith("nvme")
assert winner == "160 GiB more DRAM"
assert options[winner][1].schedule.bytes_moved().get("nvme.read", 0) == 0
assert speed["64 GiB more DRAM"] < 1.05 * as_is.tokens_per_s
assert speed["3 more drives"] > 1.5 * as_is.tokens_per_s
assert all(price <= 500 for price, _ in options.values())
