"""Host time of a pass of a block, plain and with the hooks of DeepSpeed's ZeRO or of FSDP2 around it.

    python -m benchmarks.runtime.hooks                      # plain
    python -m benchmarks.runtime.hooks zero-3 --lora        # with adapters; wants deepspeed
    python -m benchmarks.runtime.hooks fsdp

Blocks of Qwen2 are so narrow that there is nothing to compute, on one process that gathers from nobody. What is printed
is processor time, which other programs hardly change: the median of eight steps of four micro-batches, with
checkpointing, over the three passes of each block.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from importlib import import_module
from statistics import median
from typing import Any

import torch

from benchmarks.records import arguments
from benchmarks.runtime.peers import use_one_rank

BLOCKS, BATCHES, STEPS, WIDTH, VOCABULARY = 12, 4, 8, 64, 128


def _model(*, lora: bool) -> Any:
    transformers = import_module("transformers")
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": BLOCKS}
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes, **heads)).to(torch.bfloat16)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    if lora:
        peft = import_module("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.05))
    return model.train()


def _micro_batch(system: str, model: Any) -> Callable[[], object]:
    """Forward and backward of one micro-batch, and the update where DeepSpeed finds that it is due."""
    ids = torch.randint(0, VOCABULARY, (1, 8))
    given = {"input_ids": ids, "labels": ids, "use_cache": False}
    if system.startswith("zero"):
        deepspeed = import_module("deepspeed")
        deepspeed.init_distributed("gloo")
        trained = [p for p in model.parameters() if p.requires_grad]
        zero = {"stage": int(system[-1]), "contiguous_gradients": True}
        zero |= {"stage3_param_persistence_threshold": 10 * WIDTH, "stage3_prefetch_bucket_size": WIDTH**2 * 9 // 10}
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": BATCHES,
            "zero_optimization": zero,
        }
        config |= {"bf16": {"enabled": True}, "zero_allow_untested_optimizer": True}
        optimizer = torch.optim.AdamW(trained, lr=1e-5)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, model_parameters=trained, config=config)
        return lambda: (engine.backward(engine(**given).loss), engine.step())
    if system == "fsdp":
        torch.distributed.init_process_group("gloo")
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        for part in (*model.model.layers, model):
            torch.distributed.fsdp.fully_shard(part, mesh=mesh)
    return lambda: model(**given).loss.backward()


def main() -> None:
    """Prints one figure."""
    parser = arguments(__doc__)
    parser.add_argument("system", nargs="?", default="plain", choices=["plain", "zero-1", "zero-2", "zero-3", "fsdp"])
    parser.add_argument("--lora", action="store_true")
    asked = parser.parse_args()
    use_one_rank()
    os.environ["DS_ACCELERATOR"] = "cpu"
    torch.set_num_threads(1)
    model, took_s = _model(lora=asked.lora), []
    block = next(m for m in model.modules() if type(m).__name__.endswith("DecoderLayer"))
    modules = sum(any(True for _ in m.parameters(recurse=False)) for m in block.modules())
    micro_batch = _micro_batch(asked.system, model)
    for _ in range(STEPS + 3):
        begin_s = time.process_time()
        for _ in range(BATCHES):
            micro_batch()
        took_s.append(time.process_time() - begin_s)
    each_s = median(took_s[3:]) / (BATCHES * BLOCKS * 3)
    what = f"{asked.system}{' with adapters' if asked.lora else ''}"
    print(f"{what}: {each_s * 1e3:.2f} ms for a pass of a block, {modules} of whose modules have parameters")


if __name__ == "__main__":
    main()
