"""Executes a schedule on real hardware, and measures that hardware. In reading order:

trainer     trains a model on a schedule
run_result  what a run did
reference   plain in-memory training: the numbers that every schedule must give, bit for bit
execution   the four rules on threads, and what each kind of op does
ranks       several processes that execute one schedule together, a device each
autograd    an unmodified model, run unit by unit; what it saves, kept, moved or made again
memory      host memory, and the NVMe tier as files
optim       the optimizer step in PyTorch's bits
checkpoint  commits that survive any crash, and weights in and out
data        tokens from text, and reproducible batches
tracing     exact workloads, from a model run on fake tensors
measure     how fast this machine is
job         one training run from files to files: `tierplan run`
hf_trainer  the same from the Hugging Face `Trainer`
hf_arguments  which of its settings are honoured, and which refused
"""
