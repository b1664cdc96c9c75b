"""Steps of tierplan against steps of other systems on this machine, pair by pair.

    python -m benchmarks.runtime.peers --nvme-dir /mnt/nvme/scratch --peers-python /path/to/venv/bin/python --json FILE
    python -m benchmarks.runtime.peers --nvme-dir /mnt/nvme/scratch --only "plain, all kept" --width 512

Both of a pair train the same `transformers` model from the same weights on the same batch, each in a process of its
own, and make their steps in turn; the median of the ratios of turns counts, since a shared machine drifts. A pair has
its states, parameters and activations in the same places, and the same recomputation. `--cap-gib` caps each process's
own memory. `--json` keeps what was measured and passes over the pairs that it has, so a run goes on where it was ended.

DeepSpeed is no dependency of tierplan: it is run by the Python that `--peers-python` names, on its CPU accelerator,
with its asynchronous file I/O and its CPU Adam, which it compiles (g++, ninja and libaio's headers; minutes, the first
time). In a virtual environment of its own:

    pip install torch==2.13.0 transformers==5.23.0 ninja wheel && pip install deepspeed==0.19.8 --no-build-isolation

A worker prints one line of JSON for each line that it reads, so anything that speaks this can be compared.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.models import GIB, MIB, VOCABULARY, gpt2
from benchmarks.records import Record, about, append, arguments, read, spread

LEARNING_RATE = 1e-4
MARGIN = 4096
"""Elements that DeepSpeed's swap buffers are larger than the largest parameter."""

Steps = Callable[[int], list[float]]
"""Makes so many optimizer steps and returns their losses."""
Working = tuple[Steps, Callable[[], Record]]
"""And what there is to say in the end."""

IN_MEMORY = {"params": "device", "grads": "device", "states": "device"}
STATES_IN_HOST = {"params": "device", "grads": "host", "states": "host"}
ALL_IN_HOST = {"params": "host", "grads": "host", "states": "host"}
STATES_ON_NVME = {"params": "host", "grads": "host", "states": "nvme"}
ALL_ON_NVME = {"params": "nvme", "grads": "host", "states": "nvme"}
PAIRS: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, Any]]] = {
    "plain, all kept": ("plain", {}, IN_MEMORY),
    "plain, checkpointing": ("plain", {"checkpoint": True}, IN_MEMORY),
    "plain, states in mapped files": ("plain", {"checkpoint": True, "mapped": True}, STATES_ON_NVME),
    "FSDP2, CPU offload": ("fsdp", {"checkpoint": True}, STATES_IN_HOST),
    "DeepSpeed ZeRO-2, optimizer in host": ("deepspeed", {"stage": 2, "optimizer": "cpu"}, STATES_IN_HOST),
    "DeepSpeed ZeRO-3, all in host": (
        "deepspeed", {"stage": 3, "optimizer": "cpu", "param": "cpu", "checkpoint": True}, ALL_IN_HOST,
    ),
    "DeepSpeed ZeRO-3, optimizer on NVMe": (
        "deepspeed", {"stage": 3, "optimizer": "nvme", "checkpoint": True}, STATES_ON_NVME,
    ),
    "DeepSpeed ZeRO-3, all on NVMe": ("deepspeed", {"stage": 3, "optimizer": "nvme", "param": "nvme"}, ALL_ON_NVME),
    "DeepSpeed ZeRO-3, all on NVMe, checkpointing": (
        "deepspeed", {"stage": 3, "optimizer": "nvme", "param": "nvme", "checkpoint": True}, ALL_ON_NVME,
    ),
}  # fmt: skip
"""By name, the other system's worker, its settings, and where tierplan has everything."""


def config(args: argparse.Namespace) -> Record:
    """A GPT-2 without dropout, so that both draw no random numbers."""
    return gpt2(args.width, args.blocks, positions=args.length, vocabulary=VOCABULARY)


def make_batch(args: argparse.Namespace) -> Record:
    import torch

    shape = (args.batch, args.length)
    ids = torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def make_model(args: argparse.Namespace, settings: Mapping[str, Any], *, dtype: str | None = None) -> Any:
    """The same weights in every process."""
    import torch
    from transformers import AutoModelForCausalLM, GPT2Config

    raw = {k: v for k, v in config(args).items() if k not in ("model_type", "architectures")}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(GPT2Config(**raw))
    if settings.get("checkpoint"):
        # with DeepSpeed 0.19.8's parameters on NVMe, the other kind computes wrong gradients
        model.gradient_checkpointing_enable({"use_reentrant": settings.get("param") == "nvme"})
    return model.to(torch.bfloat16 if (dtype or args.dtype) == "bf16" else torch.float32).train()


def use_one_rank() -> None:
    """What torch.distributed reads: a world of this process."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in alone.items()})


# ---- workers ----


def one_by_one(step: Callable[[], float]) -> Steps:
    return lambda count: [step() for _ in range(count)]


def with_tierplan(args: argparse.Namespace, settings: Mapping[str, Any], folder: Path) -> Working:
    from benchmarks.trainings import machine, schedule_of
    from tierplan.planner.plan import UnitPlan
    from tierplan.runtime.execution.executor import traced_steps
    from tierplan.runtime.optim.adam import OptimizerSettings
    from tierplan.runtime.trainer import Trainer
    from tierplan.sim.workloads.workload import Training

    training = Training(
        per_device_train_batch_size=args.batch, sequence_length=args.length, dtype=args.dtype, backend="cpu"
    )
    choice = UnitPlan(**settings["homes"])
    choice = replace(choice, acts="recompute") if settings.get("checkpoint") else choice
    place = machine(int(args.device_mib * MIB), int(args.host_mib * MIB))
    schedule = schedule_of(config(args), choice, training, place, prefetch_params_units=2, prefetch_states_units=3)
    losses: list[float] = []
    model = make_model(args, {})
    trainer = Trainer(
        schedule,
        model,
        nvme_dir=folder,
        optimizer=OptimizerSettings(lr=LEARNING_RATE),
        on_step=lambda step, loss: losses.append(loss),
        trace_steps=traced_steps(schedule),
    )
    num_parameters = sum(p.numel() for p in model.parameters())
    batches = itertools.repeat({k: v for k, v in make_batch(args).items() if k != "use_cache"})

    def steps(count: int) -> list[float]:
        losses.clear()
        trainer.run(batches, count)
        return list(losses)

    def finish() -> Record:
        result = trainer.result()
        trainer.close()
        num_traced = min(traced_steps(schedule), len(result.step_ends_s))
        busy_s: dict[str, float] = {}
        for span in result.trace.spans:
            if int(span.key[1:].partition("/")[0]) >= args.warmup:
                busy_s[span.stream] = busy_s.get(span.stream, 0.0) + span.duration_ns / 1e9
        return {
            "num_parameters": num_parameters,
            "busy_s": {stream: s / (num_traced - args.warmup) for stream, s in busy_s.items()},
            "peak_bytes": dict(result.peak_bytes),
        }

    return steps, finish


def plainly(args: argparse.Namespace, settings: Mapping[str, Any], folder: Path) -> Working:
    """PyTorch's fused AdamW with an fp32 master copy, whose states are in memory or in files that are mapped."""
    import torch

    model = make_model(args, settings)
    params = list(model.parameters())
    count = itertools.count()

    def place(t: torch.Tensor) -> torch.Tensor:
        if not settings.get("mapped"):
            return t
        path = folder / f"{next(count)}.bin"
        with path.open("wb") as file:
            file.truncate(t.numel() * t.element_size())
        mapped = torch.from_file(str(path), shared=True, size=t.numel(), dtype=t.dtype).view(t.shape)
        return mapped.copy_(t)

    is_mixed = args.dtype == "bf16"
    masters = [place(p.detach().float()).requires_grad_() if is_mixed else p for p in params]
    optimizer = torch.optim.AdamW(masters, lr=LEARNING_RATE, fused=True)
    for m in masters:
        moments = {name: place(torch.zeros_like(m)) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[m].update(step=torch.tensor(0.0), **moments)
    batch = make_batch(args)

    def step() -> float:
        loss = model(**batch).loss
        loss.backward()
        if is_mixed:
            for p, m in zip(params, masters, strict=True):
                assert p.grad is not None
                m.grad, p.grad = p.grad.float(), None
        optimizer.step()
        optimizer.zero_grad()
        if is_mixed:
            with torch.no_grad():
                for p, m in zip(params, masters, strict=True):
                    p.copy_(m)
        return float(loss.item())

    return one_by_one(step), dict


def with_fsdp(args: argparse.Namespace, settings: Mapping[str, Any], folder: Path) -> Working:
    import torch
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    use_one_rank()
    distributed.init_process_group("gloo")
    model = make_model(args, settings, dtype="fp32")
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if args.dtype == "bf16" else None)
    mesh, in_host = init_device_mesh("cpu", (1,)), CPUOffloadPolicy(pin_memory=False)
    for part in (*model.transformer.h, model):
        fully_shard(part, mesh=mesh, mp_policy=mixed, offload_policy=in_host)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    batch = make_batch(args)

    def step() -> float:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    return one_by_one(step), dict


def with_deepspeed(args: argparse.Namespace, settings: Mapping[str, Any], folder: Path) -> Working:
    use_one_rank()
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed  # type: ignore[import-not-found]

    deepspeed.init_distributed("gloo")
    model = make_model(args, settings)
    largest = max(p.numel() for p in model.parameters())
    places: dict[str, Mapping[str, Any]] = {
        "cpu": {"device": "cpu", "pin_memory": False},
        "nvme": {"device": "nvme", "nvme_path": str(folder), "pin_memory": False},
    }
    zero: Record = {"stage": settings["stage"], "overlap_comm": False, "sub_group_size": args.sub_group}
    swaps = {"buffer_count": args.swap_buffers, "pipeline_read": True, "pipeline_write": True}
    zero["offload_optimizer"] = {
        **places[settings["optimizer"]],
        **(swaps if settings["optimizer"] == "nvme" else {}),
    }
    if "param" in settings:
        sizes = {"buffer_count": 40, "buffer_size": largest + MARGIN, "max_in_cpu": 0}
        zero["offload_param"] = {**places[settings["param"]], **(sizes if settings["param"] == "nvme" else {})}
    if settings.get("checkpoint") and settings["stage"] == 3:
        zero["stage3_prefetch_bucket_size"] = 0  # with recomputation its prefetching fails (DeepSpeed issue 4072)
    given = {
        "train_micro_batch_size_per_gpu": args.batch,
        "bf16": {"enabled": args.dtype == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": 0.01}},
        "zero_optimization": zero,
        "aio": {
            "block_size": 8 * MIB,
            "queue_depth": 16,
            "intra_op_parallelism": 1,
            "single_submit": False,
            "overlap_events": True,
        },
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=given)
    batch = make_batch(args)

    def step() -> float:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        return float(loss.item())

    told = json.loads(json.dumps(given).replace(str(folder), "DIR"))  # where it lay is nobody's business
    return one_by_one(step), lambda: {"deepspeed": deepspeed.__version__, "settings": told}


WORKERS = {"tierplan": with_tierplan, "plain": plainly, "fsdp": with_fsdp, "deepspeed": with_deepspeed}


def work(args: argparse.Namespace) -> None:
    """Answers each line with a number n by n steps: their losses and seconds, and the highest memory of the process."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print goes to standard error
    import torch

    asked = json.loads(sys.stdin.readline())
    vars(args).update(asked["args"])
    torch.set_num_threads(args.threads)
    if args.cap_gib:
        resource.setrlimit(resource.RLIMIT_DATA, (int(args.cap_gib * GIB),) * 2)
    folder = args.nvme_dir / args.worker
    folder.mkdir(parents=True, exist_ok=True)
    steps, finish = WORKERS[args.worker](args, asked["settings"], folder)
    is_new = True
    for line in sys.stdin:
        if not (count := int(line)):
            break
        began, losses = time.perf_counter(), steps(count)
        answer = {"s": time.perf_counter() - began, "losses": losses, "peak_rss": peak_rss_bytes()}
        if is_new:  # setting up is over
            Path("/proc/self/clear_refs").write_text("5")
            is_new = False
        print(json.dumps(answer), file=answers, flush=True)
    print(json.dumps({"torch": torch.__version__, **finish()}), file=answers, flush=True)
    answers.flush()
    os._exit(0)  # DeepSpeed's threads would be waited for


def peak_rss_bytes() -> int:
    """The highest resident memory of this process since that was last reset."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) * 1024


# ---- the comparison ----


class WorkerError(RuntimeError):
    """A worker has ended before it was told to."""


class Contender:
    """A worker in its own process, which reads what is asked in its first line."""

    def __init__(self, worker: str, settings: Mapping[str, Any], python: str, args: argparse.Namespace) -> None:
        self.name = worker
        path = os.pathsep.join((str(Path(python).parent), os.environ.get("PATH", "")))
        root = str(Path(__file__).resolve().parents[2])
        environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "PYTHONPATH": root, "PATH": path}
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": args.log, "text": True}
        command = [python, str(Path(__file__).resolve()), "--nvme-dir", str(args.nvme_dir), "--worker", worker]
        self._process = subprocess.Popen(command, env=environment, **pipes)
        self._tell({"settings": settings, "args": settings_of(args)})

    def _tell(self, what: object) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"{json.dumps(what)}\n")
            self._process.stdin.flush()

    def ask(self, count: int) -> Record:
        assert self._process.stdout is not None
        self._tell(count)
        line = self._process.stdout.readline()
        if not line:
            raise WorkerError(f"{self.name} ended with status {self._process.wait()}; --log FILE has what it said")
        return dict(json.loads(line))

    def end(self) -> Record:
        last = self.ask(0)
        self._process.wait()
        return last

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def compare(args: argparse.Namespace, name: str) -> Record:
    """One pair: the other system's seconds per step over tierplan's, turn by turn."""
    worker, theirs, homes = PAIRS[name]
    ours = {"homes": homes, "checkpoint": theirs.get("checkpoint", False)}
    contenders = [
        Contender(worker, theirs, args.peers_python if worker == "deepspeed" else sys.executable, args),
        Contender("tierplan", ours, sys.executable, args),
    ]
    try:
        losses = {c.name: c.ask(args.warmup)["losses"] for c in contenders}
        seconds: dict[str, list[float]] = {c.name: [] for c in contenders}
        peaks: dict[str, int] = {}
        for turn in range(args.turns):
            for c in contenders if turn % 2 else contenders[::-1]:
                answer = c.ask(args.steps)
                seconds[c.name].append(answer["s"] / args.steps)
                losses[c.name] += answer["losses"]
                peaks[c.name] = answer["peak_rss"]
        said = {c.name: c.end() for c in contenders}
    finally:
        for c in contenders:
            c.kill()
            shutil.rmtree(args.nvme_dir / c.name, ignore_errors=True)
    ratios = spread([t / o for t, o in zip(seconds[worker], seconds["tierplan"], strict=True)])
    return {
        "pair": name,
        "worker": worker,
        **about(),
        "settings": settings_of(args),
        "median_step_s": {name: statistics.median(s) for name, s in seconds.items()},
        **ratios,
        "peak_rss_bytes": peaks,
        "losses": losses,
        "about": said,
    }


def settings_of(args: argparse.Namespace) -> Record:
    """What both of a pair are told, and what tells apart runs of the same pair."""
    others = ("nvme_dir", "peers_python", "only", "turns", "steps", "json", "log", "worker")
    return {name: value for name, value in vars(args).items() if name not in others}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--nvme-dir", type=Path, required=True)
    parser.add_argument("--peers-python", metavar="PYTHON", help="that has DeepSpeed; its pairs are left out without")
    parser.add_argument("--only", nargs="+", choices=tuple(PAIRS), metavar="PAIR", help=", ".join(PAIRS))
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--steps", type=int, default=2, help="per turn")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cap-gib", type=float, default=0.0, help="of each process's own memory; 0: none")
    parser.add_argument("--device-mib", type=float, default=4096.0, help="budget of tierplan's device tier")
    parser.add_argument("--host-mib", type=float, default=4096.0, help="budget of tierplan's host tier")
    parser.add_argument("--sub-group", type=int, default=12_000_000, help="DeepSpeed's sub_group_size")
    parser.add_argument("--swap-buffers", type=int, default=12, help="DeepSpeed's offload_optimizer.buffer_count")
    parser.add_argument("--json", type=Path, help="a line for each pair; pairs that it has are passed over")
    parser.add_argument("--log", type=argparse.FileType("w"), help="what the workers say")
    parser.add_argument("--worker", choices=tuple(WORKERS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args)
        return
    known = [row["pair"] for row in read(args.json) if row["settings"] == settings_of(args)]
    for name in args.only or PAIRS:
        if name in known or (PAIRS[name][0] == "deepspeed" and not args.peers_python):
            print(f"{name}: {'known' if name in known else 'needs --peers-python, a Python that has DeepSpeed'}")
            continue
        try:
            record = compare(args, name)
        except WorkerError as error:
            print(f"{name}: {error}", flush=True)
            continue
        peaks = ", ".join(f"{who} {peak / MIB:,.0f} MiB" for who, peak in record["peak_rss_bytes"].items())
        print(f"{name} / tierplan: {record['ratio']:.2f}, median of {len(record['ratios'])} turns; {peaks}", flush=True)
        if args.json:
            append(args.json, record)


if __name__ == "__main__":
    main()
