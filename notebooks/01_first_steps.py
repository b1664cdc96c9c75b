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
# # First steps
#
# **Question: how long is a training step of a 6.7 B model on a desktop, and where does the time go?**
#
# A *machine* comes from the catalog, a *workload* from a model and its training settings. A *policy* decides what lives
# where; the simulator says what comes of it.

# %%
import tierplan as tp
from tierplan.planner.prediction import predict
from tierplan.sim.output.plots import plot_memory, plot_step_time, plot_timeline

machine = tp.load_machine("desktop-4090")
workload = tp.load_workload("gpt-6.7b", tp.Training(per_device_train_batch_size=16, sequence_length=1024))
print(f"{workload.num_parameters / 1e9:.1f} B parameters in {len(workload.blocks)} blocks")
for tier in machine.tiers:
    print(f"{tier.name:5} {tier.capacity_bytes / 1e9:6.0f} GB")

# %% [markdown]
# Parameters in bf16, an fp32 copy of them and two moments are 14 bytes per parameter, more than the GPU has.

# %%
plain = predict("in-memory", workload, machine)
print(plain.why_not)

# %% [markdown]
# Fuyou's policy keeps everything on NVMe and brings each part to the GPU when it is needed.

# %%
fuyou = predict("fuyou", workload, machine)
print(f"step {fuyou.step_s:.1f} s, {fuyou.tokens_per_s:.0f} tokens/s, limited by {fuyou.limited_by}")
for name, part in fuyou.utilization.items():
    print(f"  {name:14} {part:4.0%}")

# %% [markdown]
# The timeline of one step in steady state, stream by stream, and what each stream waited for:

# %%
window = fuyou.steady.window_s
plot_timeline(fuyou.steady.trace, window_s=window)

# %%
plot_step_time(fuyou.steady.trace, window_s=window)

# %%
plot_memory(fuyou.steady.trace, window_s=window)

# %% [markdown]
# **Answer.** It does not fit in memory, and it trains from NVMe. The drive is what it waits for: the GPU works for less
# than half of the step.

# %%
assert not plain.fits
assert fuyou.fits
assert fuyou.limited_by.startswith("nvme")
assert fuyou.utilization["gpu0.compute"] < 0.5
