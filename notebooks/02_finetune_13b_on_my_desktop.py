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
# # Can I fine-tune 13 B parameters on my desktop?
#
# The desktop: an RTX 4090 with 24 GB, 64 GB of DRAM, one PCIe 4.0 drive of 2 TB. Full fine-tuning with Adam, nothing
# quantised: 13 B parameters and their optimizer states are 180 GB.

# %%
import tierplan as tp
from tierplan.planner.prediction import predict
from tierplan.sim.output.plots import plot_timeline
from tierplan.sim.output.text import format_bytes, in_short

machine = tp.load_machine("desktop-4090")
training = tp.Training(per_device_train_batch_size=16, sequence_length=1024)
workload = tp.load_workload("gpt-13b", training)

# %% [markdown]
# What the published systems make of it, one row each:

# %%
policies = ("in-memory", "full-recompute", "zero-offload", "ssdtrain", "sliding-window", "fuyou")
found = {name: predict(name, workload, machine) for name in policies}
for name, p in found.items():
    why_not, *_ = in_short(p.why_not).split(". ")
    print(f"{name:16}", f"{p.step_s:7.1f} s  {p.tokens_per_s:6.0f} tokens/s" if p.fits else why_not)

# %% [markdown]
# The planner looks for a better plan, and says how much better any plan could be:

# %%
planned = tp.plan(workload, machine)
tokens = training.tokens_per_step
print(f"planner: {planned.step_s:.1f} s, {tokens / planned.step_s:.0f} tokens/s")
print(f"no plan can be quicker than {planned.lower_bound_s:.1f} s")
print("what the bound rests on:", ", ".join(f"{name} {part:.0%}" for name, part in planned.bound_shares.items()))

# %% [markdown]
# A fine-tuning set of 10 M tokens, three times over:

# %%
hours = 3 * 10e6 / (tokens / planned.step_s) / 3600
peaks = ", ".join(f"{tier} {format_bytes(peak)}" for tier, peak in planned.steady.peak_bytes.items())
print(f"{hours:.0f} hours; most held: {peaks}")
plot_timeline(planned.steady.trace, window_s=planned.steady.window_s)

# %% [markdown]
# **Answer.** Yes, within a day. Only plans that use the drive fit, and the planner's step takes less than two thirds
# of the quickest published one's.

# %%
fitting = {name: p.step_s for name, p in found.items() if p.fits}
assert "in-memory" not in fitting
assert "zero-offload" not in fitting
assert planned.lower_bound_s <= planned.step_s < 2 / 3 * min(fitting.values())
assert planned.steady.peak_bytes["nvme"] > 100e9
assert hours < 24
