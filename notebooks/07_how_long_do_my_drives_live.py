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
# # How long do my drives live?
#
# **Question: training from NVMe writes all optimizer states in every step. How many days until the drive's rated
# writes are used up, and what can be done about it?**

# %%
import matplotlib.pyplot as plt

import tierplan as tp
from tierplan.hwmodels import load_description
from tierplan.planner.prediction import predict

DAY = 86_400


def life(model, batch, *overrides, policy="fuyou"):
    """(days until the rated writes are used up, bytes written per step, the prediction)."""
    machine = tp.load_machine("desktop-4090", overrides)
    workload = tp.load_workload(model, tp.Training(per_device_train_batch_size=batch))
    p = predict(policy, workload, machine)
    return p.lifetime_s / DAY, p.schedule.bytes_moved()["nvme.write"], p


days, written, p = life("gpt-13b", 16)
rated = load_description("desktop-4090").number("nvme.endurance")
print(f"{written / 1e9:.0f} GB per step of {p.step_s:.0f} s; rated for {rated / 1e12:.0f} TB: {days:.0f} days")

# %% [markdown]
# States are written once per step, however large the batch. So a larger batch wears the drive less per token:

# %%
per_token = {}
for batch in (4, 16, 64):
    days_b, written_b, p_b = life("gpt-13b", batch)
    per_token[batch] = written_b / (batch * 1024)
    print(f"batch {batch:3}: {per_token[batch] / 1e6:6.1f} MB per token, {days_b:5.1f} days")

# %% [markdown]
# A drive for data centres is rated for many more writes:

# %%
lives = {part: life("gpt-13b", 16, f"nvme.part={part}")[0] for part in ("990-pro", "p5510", "p5800x")}
for part, days_part in lives.items():
    print(f"{part:8} {days_part:6.0f} days")
several = life("gpt-13b", 16, "nvme.drives=4")
print(f"four drives: {several[0]:.0f} days, at {several[2].tokens_per_s / p.tokens_per_s:.1f} times the speed")

# %% [markdown]
# With more DRAM, the planner finds a plan that hardly writes:

# %%
roomy = tp.load_machine("desktop-4090", ["host.capacity=256 GB"])
workload = tp.load_workload("gpt-13b", tp.Training(per_device_train_batch_size=16))
sparing = tp.plan(workload, roomy, time_limit_s=1, drive_lifetime_years=3)
lives["256 GB DRAM, planned"] = (sparing.prediction.lifetime_s or float("inf")) / DAY
figure, ax = plt.subplots(figsize=(7, 2.5), layout="constrained")
years = {name: min(days / 365, 100) for name, days in lives.items()}
bars = ax.barh(list(years), list(years.values()), color="#0072B2")
ax.bar_label(bars, [f"{y:.0f} years" if y >= 1 else f"{365 * y:.0f} days" for y in years.values()], padding=3)
ax.margins(x=0.25)
ax.invert_yaxis()
_ = ax.set(xscale="log", xlabel="years until the rated writes are used up", title="gpt-13b, batch 16, without pause")

# %% [markdown]
# **Answer.** A consumer drive lives for days of continuous 13 B training. Larger batches and accumulation write less
# per token and cost nothing; drives made for writing live many times longer, and with enough DRAM hardly
# anything is written (the picture ends at 100 years).

# %%
assert abs(days - rated / written * p.step_s / DAY) < 1e-6 * days, "rated writes over the rate of writing"
assert days < 60
assert per_token[64] < per_token[16] < per_token[4]
assert lives["p5800x"] > lives["p5510"] > lives["990-pro"]
