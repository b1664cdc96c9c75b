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
# # Plan, export, run, compare
#
# **Question: does a run do what was predicted?** A small GPT-2 is planned for a device that is too small for it, the
# plan is written to a file, executed by the PyTorch runtime on this machine, and compared op by op. The machine here is
# a guess, not measured, so only what does not depend on time is asserted: bytes, memory, and the numbers.

# %%
import copy

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel

import tierplan as tp
from tierplan.hwmodels.machine import Machine, Rate, Stream, TierSpec
from tierplan.planner.prediction import predict
from tierplan.runtime.reference import train_plainly
from tierplan.runtime.tracing.trace import trace_workload
from tierplan.sim.output.plots import plot_timelines
from tierplan.validation.report.report import typical_steps

transformers.logging.set_verbosity_error()
config = GPT2Config(n_layer=4, n_embd=128, n_head=4, n_positions=64, vocab_size=256, use_cache=False,
                    bos_token_id=0, eos_token_id=0)  # fmt: skip
config.save_pretrained("model")
training = tp.Training(
    per_device_train_batch_size=4, sequence_length=64, dtype="fp32", master_weights=False, backend="cpu"
)
workload = trace_workload("model", training)

# %% [markdown]
# A machine of rough guesses, with a device that holds about half of what plain training takes:

# %%
MIB = 2**20
kinds = ("bytes", "parameters", "elementwise_bytes", "matmul_fp32_flops", "attention_fp32_flops")
rates = dict(zip(kinds, map(Rate.constant, (2e9, 2e8, 5e9, 5e10, 2e10)), strict=True))
streams = ("gpu0.compute", "gpu0.h2d", "gpu0.d2h", "nvme.read", "nvme.write", "host.adam")


def machine(device_mib):
    return Machine(
        name="guess",
        tiers=(TierSpec(name="gpu0", kind="device", capacity_bytes=device_mib * MIB),
               TierSpec(name="host", kind="host", capacity_bytes=12 * MIB),
               TierSpec(name="nvme", kind="nvme", capacity_bytes=200 * MIB)),
        streams=tuple(Stream(name=name, rates=rates) for name in streams),
    )  # fmt: skip


plain = predict("in-memory", workload, machine(1000)).steady.peak_bytes["gpu0"]
device_mib = int(0.5 * plain / MIB)
print(f"plain training takes {plain / MIB:.0f} MiB on the device; it gets {device_mib} MiB, and host memory 12 MiB")

# %%
planned = tp.plan(workload, machine(device_mib), time_limit_s=1, orders=("horizontal",))
tp.save_schedule(planned.schedule, "plan.json")
schedule = tp.load_schedule("plan.json")
peaks = ", ".join(f"{tier} {size / MIB:.1f} MiB" for tier, size in planned.steady.peak_bytes.items())
print(f"{len(schedule.ops)} ops; predicted to hold at most {peaks}")

# %%
STEPS = 6
torch.manual_seed(0)
model = GPT2LMHeadModel(config)
twin = copy.deepcopy(model)
tokens = torch.randint(256, (STEPS, 4, 64))
batches = [{"input_ids": t, "labels": t} for t in tokens]
result = tp.train(schedule, model, batches, steps=STEPS, nvme_dir=".")
comparison = tp.compare(schedule, planned.steady.trace, result.trace, predicted_step_s=planned.step_s)
tp.write_report("report.html", comparison, planned.steady.trace, result.trace, losses=result.losses, schedule=schedule)
plot_timelines(typical_steps(planned.steady.trace, result.trace, comparison.warmup_steps))

# %% [markdown]
# The same training, plainly in memory:

# %%
plain_losses = train_plainly(twin, batches, steps=STEPS)
for name, losses in (("planned", result.losses), ("plain", plain_losses)):
    print(f"{name:8}", *(f"{loss:.4f}" for loss in losses))

# %% [markdown]
# **Answer.** It moved the predicted bytes exactly, stayed within the budgets, and gave the numbers of plain training,
# bit for bit. `report.html` has both timelines, to zoom into.

# %%
from pathlib import Path

assert comparison.bytes_agree
assert all(result.peak_bytes[t.name] <= t.capacity_bytes for t in schedule.tiers)
assert result.peak_bytes["gpu0"] < plain
assert list(result.losses) == list(plain_losses)
assert Path("report.html").stat().st_size > 10_000
