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

from tierplan.sim.output.text import format_s
from tierplan.studies.evaluate import best_plan
from tierplan.studies.study import Point

MODELS = ("llama-3.1-8b", "llama-3.3-70b")
LORA = "r=16,targets=all-linear"
WAYS = {
    "full": {},
    "8-bit states": {"optimizer": "adamw:states=8bit"},
    "LoRA": {"lora": LORA},
    "QLoRA": {"lora": LORA, "base": "nf4-double"},
}

# %% [markdown]
# The question of `tierplan plan --sequences 16` for each, as on the page about fine-tuning: the planner divides a
# step's sequences into micro-batches as is quickest. It takes two minutes.

# %%
best = {
    (model, way): best_plan(Point(model=model, machine="desktop-4090", sequences=16, **WAYS[way]))
    for model in MODELS
    for way in WAYS
}

# %% [markdown]
# How much has to be trained, and how much only read? Adapters are less than 1 % of the parameters. The rest is frozen:
# it has no gradient and no optimizer states.

# %%
for (model, way), one in best.items():
    print(f"{model:14} {way:13} trains {one.workload.num_trained / 1e6:9,.1f} M parameters")

# %% [markdown]
# A plan fills what there is, so look at the drive to see what does not fit beside the GPU:

# %%
planned = {key: one.result for key, one in best.items()}
tokens = 16 * 1024
hours = {key: p.step_s * 10e6 / tokens / 3600 for key, p in planned.items()}
drive_gib = {key: p.steady.peak_bytes.get("nvme", 0) / 2**30 for key, p in planned.items()}
for (model, way), p in planned.items():
    key = model, way
    print(
        f"{model:14} {way:13} {format_s(p.step_s):>10}  {hours[key]:5.1f} h  {drive_gib[key]:6.1f} GiB on the drive, "
        f"limited by {p.limited_by}"
    )

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
for ax, model in zip(axes, MODELS, strict=True):
    bars = ax.bar(list(WAYS), [hours[model, way] for way in WAYS], color="#0072B2")
    ax.bar_label(bars, fmt="%.1f")
    ax.set_title(model)
    ax.set_ylabel("hours for 10 M tokens")
    ax.margins(y=0.15)

# %% [markdown]
# **Answer.** All eight fit. LoRA takes half of the time of full fine-tuning for 8 B parameters and a fifth for 70 B,
# since full fine-tuning moves its states through the drive. States in 8 bits lie between. QLoRA is no quicker than LoRA
# for 8 B parameters, whose base stays in memory either way. For 70 B it is: less of the base comes from the drive.

# %%
for model in MODELS:
    assert hours[model, "LoRA"] < hours[model, "8-bit states"] < hours[model, "full"]
    assert drive_gib[model, "LoRA"] < drive_gib[model, "full"]
assert 0.95 < hours["llama-3.1-8b", "QLoRA"] / hours["llama-3.1-8b", "LoRA"] < 1.05
assert hours["llama-3.3-70b", "QLoRA"] < 0.95 * hours["llama-3.3-70b", "LoRA"]
assert hours["llama-3.1-8b", "full"] < 2.5 * hours["llama-3.1-8b", "LoRA"]
assert hours["llama-3.3-70b", "full"] > 4 * hours["llama-3.3-70b", "LoRA"]
