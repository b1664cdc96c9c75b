"""PyTorch's own data parallelism on the same ranks: `DistributedDataParallel` and FSDP2."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.runtime.models import make_batches
from tests.runtime.ranks.test_ranks import ADAM, STEPS, Case, prepared
from tierplan.runtime.checkpoint.weights import export
from tierplan.runtime.ranks.group import Ranks
from tierplan.runtime.reference import loss_of, micro_batch_seed, without_cache
from tierplan.runtime.trainer import Trainer

DDP = [Case("ddp"), Case("ddp", family="llama", clip=0.5), Case("ddp", accumulation=2, clip=0.5)]
FSDP = [Case("zero-3"), Case("fsdp", family="llama")]


def with_ddp(model: nn.Module, accumulation: int) -> tuple[nn.Module, Callable[[bool], None]]:
    """The wrapped model, and what says of each micro-batch whether gradients are exchanged behind it."""
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(model)

    def set_exchange(is_last: bool) -> None:
        wrapped.require_backward_grad_sync = is_last

    return wrapped, set_exchange


def with_fsdp(model: nn.Module, accumulation: int) -> tuple[nn.Module, Callable[[bool], None]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    inner: Any = model
    blocks = inner.transformer.h if hasattr(inner, "transformer") else inner.model.layers
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in (*blocks, model):
        fully_shard(block, mesh=mesh)
    return model, lambda is_last: None


def losses_of(case: Case, wrap: Any, model: nn.Module, ranks: Ranks) -> list[float]:
    """Ordinary training: each rank's loss is the mean over its micro-batches, and gradients are averaged over ranks."""
    wrapped, set_exchange = wrap(model, case.accumulation)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=ADAM.lr, weight_decay=ADAM.weight_decay, fused=True)
    count, found = case.accumulation * ranks.size, []
    batches = iter(make_batches(STEPS * count))
    with without_cache(model):
        for step in range(STEPS):
            own = []
            for m, batch in enumerate([next(batches) for _ in range(count)][ranks.rank :: ranks.size]):
                torch.manual_seed(micro_batch_seed(0, step, m * ranks.size + ranks.rank))
                set_exchange(m + 1 == case.accumulation)
                loss = loss_of(wrapped, batch, None) / case.accumulation
                loss.backward()
                own.append(loss.item() / ranks.size)
            if case.clip is not None:
                torch.nn.utils.clip_grad_norm_(wrapped.parameters(), case.clip, foreach=False)
            optimizer.step()
            optimizer.zero_grad()
            found.append(sum(loss for row in zip(*ranks.share(own, "steps"), strict=True) for loss in row))
    return found


def unlike_torch(ranks: Ranks, folder: Path) -> list[str]:
    """What is wrong, by case: losses and weights are PyTorch's, bit for bit (the sum of two ranks has one order), and
    its distributed checkpoints read what was exported."""
    wrong = []
    for case, wrap in [*((case, with_ddp) for case in DDP), *((case, with_fsdp) for case in FSDP)]:
        model, schedule = prepared(case, ranks.size)
        other = copy.deepcopy(model)
        with Trainer(schedule, model, optimizer=ADAM, ranks=ranks) as trainer:
            trainer.run(make_batches(STEPS * ranks.size * case.accumulation), STEPS)
            export(trainer, folder / str(case))
            trainer.restore_model()
            losses = list(trainer.result().losses)
        wanted = losses_of(case, wrap, other, ranks)
        if losses != wanted:
            wrong.append(f"{case}: losses {losses} are {wanted} with {wrap.__name__}")
        if not all(torch.equal(p, whole(q)) for p, q in zip(model.parameters(), other.parameters(), strict=True)):
            wrong.append(f"{case}: weights differ from those {wrap.__name__}")
        if wrap is with_fsdp and not all(map(torch.equal, model.parameters(), loaded_anew(other, folder / str(case)))):
            wrong.append(f"{case}: the exported weights are others")
    return wrong


def loaded_anew(model: nn.Module, folder: Path) -> list[torch.Tensor]:
    """The weights of a model that FSDP2 divides, read by each rank from an exported one."""
    from torch.distributed import checkpoint

    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    checkpoint.load(dict(model.named_parameters()), storage_reader=checkpoint.HuggingFaceStorageReader(str(folder)))
    return [whole(p) for p in model.parameters()]


def whole(p: Any) -> torch.Tensor:
    return p.full_tensor() if hasattr(p, "full_tensor") else p
