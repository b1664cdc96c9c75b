"""What people ask for that is not planned yet, and what is nearest: added to the errors that refuse it."""

from __future__ import annotations

import re
from collections.abc import Mapping

NOT_YET: Mapping[str, str] = {
    r"[dpk][pt]o$|grpo|orpo|rlhf|reward|prefer": (
        "only supervised training is planned: DPO, PPO, GRPO, KTO and reward models run a second model, pairs of "
        "sequences or generation"
    ),
    "nodes|num.?machines|hosts$": "one machine is planned; nearest: --devices N for its number of GPUs",
    "^[tpsce]p$|parallel": (
        "how GPUs share the work is the plan's to choose; a published way: simulate --policy (a wrong name lists all)"
    ),
    "lora|peft|adapter": "adapters: --lora r=16,targets=all-linear",
    "4.?bit|8.?bit|nf4|int[48]|fp8|quant": "a quantised base: --base nf4 with --lora r=16; 8-bit states: --optimizer "
    "adamw:states=8bit; activations that leave the device: --acts fp8",
    r"^mi\d{3}|^rx|^w[67]9|radeon|amd|rocm": (
        "of AMD's GPUs the catalog has the mi300x, and no plan was executed on one; nearest: their data sheet on a "
        "machine of the catalog: --set gpu.capacity='192 GB' --set gpu.memory_bandwidth='5.3 TB/s' --set "
        "gpu.peak_bf16='1307 TFLOP/s' (these are an MI300X's)"
    ),
    r"^m[1-5]\b|apple|^mac(book|-|$)|mps": (
        "Apple's memory, which CPU and GPU share, is not planned yet; nearest: simulate --policy in-memory, with "
        "--set gpu.capacity=, gpu.memory_bandwidth= and gpu.peak_bf16= of its data sheet"
    ),
    r"checkpointing|recompute|offload|zero.?(stage|\d)|stage|fsdp|deepspeed": (
        "what is recomputed, offloaded or sharded is the plan's to choose; a published system's choice: simulate "
        "--policy, compare-policies"
    ),
    "gpus|nproc|^devices?$|world": (
        "nearest: --devices N for the number of GPUs, --set gpu.part=NAME for what they are"
    ),
    "gpu|card": "nearest: --set gpu.part=NAME (names: tierplan machine list)",
    "chunk|liger|cross.?entropy": "a loss in chunks: --loss-chunks N; a fused one, as Liger's: --loss fused",
    "compile|inductor": "compiled blocks: --torch-compile",
    r"\bd?ram\b|memory": "nearest: --set host.capacity='128 GiB'",
    "drive|nvme|ssd": "nearest: --set nvme.drives=2",
    "len|context|tokens": "nearest: --seq for the tokens of a sequence; of the whole job, `tierplan advise --tokens`",
    "batch.?size": "nearest: --batch",
}
"""By what is in the refused word."""
REFUSED = re.compile(r"(?:no option|invalid choice:|no part|no machine) '?-*([\w./-]+)")


def nearest(message: str) -> str:
    """What to add to an error that refuses a word, if it is one of these."""
    typed = REFUSED.search(message)
    found = (text for pattern, text in NOT_YET.items() if typed and re.search(pattern, typed[1].lower()))
    return next((f"; {text}" for text in found), "")
