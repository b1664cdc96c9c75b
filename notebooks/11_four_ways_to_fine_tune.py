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
# # Full, 8-bit states, LoRA or QLoRA: what fits my desktop, and how long does it take?
#
# A model of 8 B and one of 70 B parameters on an RTX 4090 with 24 GB, 64 GB of DRAM and one drive. Each is fine-tuned
# on 10 M tokens in four ways. Steps are of 16 sequences of 1,024 tokens.

# %%
import matplotlib.pyplot as plt

import tierplan as tp
from tierplan.sim.output.text import format_s
from tierplan.sim.workloads.workload import NotCovered

machine = tp.load_machine("desktop-4090")
LORA = "r=16,targets=all-linear"
WAYS = {
    "full": {},
    "8-bit states": {"optimizer": "adamw:states=8bit"},
    "LoRA": {"lora": LORA},
    "QLoRA": {"lora": LORA, "base": "nf4-double"},
}


def workload_of(model, way):
    """By closed forms where there are some, which takes no time; else traced."""
    training = tp.Training(per_device_train_batch_size=16, sequence_length=1024, loss_chunks=8, **WAYS[way])
    try:
        return tp.load_workload(model, training)
    except NotCovered:
        return tp.trace_workload(model, training)


# %% [markdown]
# How much has to be trained, and how much only read? Adapters are less than 1 % of the parameters. The rest is frozen:
# it has no gradient and no optimizer states.

# %%
workloads = {(model, way): workload_of(model, way) for model in ("llama-3.1-8b", "llama-3.3-70b") for way in WAYS}
for (model, way), workload in workloads.items():
    trained = sum(u.num_trained for u in workload.units)
    print(f"{model:14} {way:13} trains {trained / 1e6:9,.1f} M parameters")

# %% [markdown]
# The planner's plan for each. A plan fills what there is, so look at the drive to see what does not fit beside the GPU:

# %%
planned = {key: tp.plan(workload, machine, orders=("horizontal",)) for key, workload in workloads.items()}
tokens = 16 * 1024
hours = {key: p.step_s * 10e6 / tokens / 3600 for key, p in planned.items()}
drive_gib = {key: p.steady.peak_bytes.get("nvme", 0) / 2**30 for key, p in planned.items()}
for (model, way), p in planned.items():
    limit = max(p.bound_shares, key=p.bound_shares.get)
    key = model, way
    print(
        f"{model:14} {way:13} {format_s(p.step_s):>14}  {hours[key]:5.1f} h  {drive_gib[key]:6.1f} GiB on the drive, "
        f"{hours[key] * 0.6 * 0.3:.2f} USD of power, limited by {limit}"
    )

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
for ax, model in zip(axes, ("llama-3.1-8b", "llama-3.3-70b"), strict=True):
    bars = ax.bar(list(WAYS), [hours[model, way] for way in WAYS], color="tab:orange")
    ax.bar_label(bars, fmt="%.1f")
    ax.set_title(model)
    ax.set_ylabel("hours for 10 M tokens")
    ax.margins(y=0.15)

# %% [markdown]
# **Answer.** All eight fit. LoRA takes half of the time of full fine-tuning for 8 B parameters and a fifth for 70 B,
# since full fine-tuning moves its states through the drive. States in 8 bits lie between. QLoRA is hardly quicker than
# LoRA where the base can be streamed; it saves memory, which a plan uses for activations.

# %%
for model in ("llama-3.1-8b", "llama-3.3-70b"):
    assert hours[model, "LoRA"] < hours[model, "8-bit states"] < hours[model, "full"]
    assert drive_gib[model, "LoRA"] < drive_gib[model, "full"]
assert hours["llama-3.1-8b", "full"] < 2.5 * hours["llama-3.1-8b", "LoRA"]
assert hours["llama-3.3-70b", "full"] > 4 * hours["llama-3.3-70b", "LoRA"]
