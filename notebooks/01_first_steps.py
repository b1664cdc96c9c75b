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
# A *machine* comes from the catalog, a *workload* from a model and its training settings. A *plan* says what lives
# where, and what is moved when; the simulator says what comes of it.

# %%
import tierplan as tp
from tierplan.planner.prediction import predict
from tierplan.sim.output.plots import plot_memory, plot_step_time, plot_timeline
from tierplan.sim.output.text import format_bytes, in_short

machine = tp.load_machine("desktop-4090")
workload = tp.load_workload("gpt-6.7b", tp.Training(per_device_train_batch_size=16, sequence_length=1024))
print(f"{workload.num_parameters / 1e9:.1f} B parameters in {len(workload.blocks)} blocks")
for tier in machine.tiers:
    print(f"{tier.name:5} {format_bytes(tier.capacity_bytes)}")

# %% [markdown]
# Parameters in bf16, an fp32 copy of them and two moments are 14 bytes per parameter, more than the GPU has.

# %%
plain = predict("in-memory", workload, machine)
print(in_short(plain.why_not))

# %% [markdown]
# A published system, Fuyou, keeps everything on NVMe and brings each part to the GPU when it is needed. The planner
# looks for what is best for this machine.

# %%
fuyou = predict("fuyou", workload, machine)
best = tp.plan(workload, machine).prediction
for p in (fuyou, best):
    print(f"{p.policy:8} step {p.step_s:.1f} s, {p.tokens_per_s:.0f} tokens/s, limited by {p.limited_by}")

# %% [markdown]
# The timeline of one step in steady state, stream by stream, and what each stream waited for:

# %%
window = best.steady.window_s
plot_timeline(best.steady.trace, window_s=window)

# %%
plot_step_time(best.steady.trace, window_s=window)

# %%
plot_memory(best.steady.trace, window_s=window)

# %% [markdown]
# **Answer.** It does not fit into the GPU's memory, and trains from DRAM and NVMe in less than half of the time that it
# takes from NVMe alone. The drive is still what it waits for.

# %%
assert not plain.fits
assert best.step_s < 0.5 * fuyou.step_s
assert fuyou.limited_by.startswith("nvme")
assert best.limited_by.startswith("nvme")
