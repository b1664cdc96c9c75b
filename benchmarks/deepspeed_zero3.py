"""Steps of tierplan against steps of DeepSpeed's ZeRO-3 with parameters and optimizer states on NVMe.

    python benchmarks/deepspeed_zero3.py --nvme-dir /mnt/nvme/scratch --deepspeed-python /path/to/venv/bin/python

Both train the same `transformers` model from the same weights on the same batch, each in a process of its own under the
same cap on its memory, and make their steps in turn; the median of the ratios of turns counts, since a shared machine
drifts. DeepSpeed is no dependency of tierplan: it is run by the Python that `--deepspeed-python` names, on its CPU
accelerator, with its asynchronous file I/O and its CPU Adam, which it compiles (g++, ninja and libaio's headers). In a
virtual environment of its own:

    pip install torch==2.13.0 transformers==5.23.0 ninja wheel && pip install deepspeed==0.19.8 --no-build-isolation

Compiling takes minutes, the first time. With very few blocks (2) DeepSpeed 0.19.8 stops on an assertion of its own
parameter swapper.

A worker prints one line of JSON for each line that it reads, so anything that speaks this can be compared.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

MIB = 2**20
GIB = 2**30
VOCABULARY = 512
LEARNING_RATE = 1e-4

Step = Callable[[], float]
"""Makes one optimizer step and returns its loss."""


def config(args: argparse.Namespace) -> dict[str, Any]:
    """A GPT-2 without dropout, so that both draw no random numbers."""
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": VOCABULARY,
        "n_positions": args.length,
        "n_embd": args.width,
        "n_layer": args.blocks,
        "n_head": args.width // 64,
        "bos_token_id": 0,
        "eos_token_id": 0,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    }


def make_batch(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    ids = torch.randint(0, VOCABULARY, (args.batch, args.length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def make_model(args: argparse.Namespace) -> Any:
    """The same weights in every process."""
    import torch
    from transformers import AutoModelForCausalLM, GPT2Config

    raw = {k: v for k, v in config(args).items() if k not in ("model_type", "architectures")}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(GPT2Config(**raw))
    return model.to(torch.bfloat16 if args.dtype == "bf16" else torch.float32).train()


# ---- workers ----


def with_tierplan(args: argparse.Namespace, folder: Path) -> tuple[Step, Callable[[], dict[str, Any]]]:
    import itertools

    from benchmarks.runtime import machine
    from tierplan.planner.lowering import lower
    from tierplan.planner.plan import UnitPlan, UnitwisePlan
    from tierplan.runtime.optim.adam import OptimizerSettings
    from tierplan.runtime.tracing.trace import trace_config
    from tierplan.runtime.trainer import Trainer
    from tierplan.sim.workloads.workload import Training

    training = Training(
        per_device_train_batch_size=args.batch, sequence_length=args.length, dtype=args.dtype, backend="cpu"
    )
    workload = trace_config("benchmark", config(args), training)
    choice = UnitPlan(params="nvme", grads="host", states="nvme")
    plan = UnitwisePlan(
        policy="benchmark",
        units=(choice,) * len(workload.units),
        prefetch_params_units=2,
        prefetch_states_units=3,
    )
    place = machine(int(args.device_mib * MIB), int(args.host_mib * MIB))
    trainer = Trainer(
        lower(plan, workload, place), make_model(args), nvme_dir=folder, optimizer=OptimizerSettings(lr=LEARNING_RATE)
    )
    batches = itertools.repeat(make_batch(args))

    def step() -> float:
        trainer.run(batches, 1)
        return sum(trainer.last_losses)

    def finish() -> dict[str, Any]:
        result = trainer.result()
        trainer.close()
        return {
            "num_parameters": workload.num_parameters,
            "peak_bytes": dict(result.peak_bytes),
            "moved_bytes_per_step": {k: v // len(result.step_ends_s) for k, v in result.moved_bytes.items()},
        }

    return step, finish


def with_deepspeed(args: argparse.Namespace, folder: Path) -> tuple[Step, Callable[[], dict[str, Any]]]:
    os.environ.update(
        DS_ACCELERATOR="cpu", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=args.port
    )
    import deepspeed  # type: ignore[import-not-found]

    deepspeed.init_distributed("gloo")
    model = make_model(args)
    largest = max(p.numel() for p in model.parameters())
    drive = {"device": "nvme", "nvme_path": str(folder), "pin_memory": False}
    settings = {
        "train_micro_batch_size_per_gpu": args.batch,
        "bf16": {"enabled": args.dtype == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": args.sub_group,
            "offload_param": {**drive, "buffer_count": 16, "buffer_size": largest + 4096, "max_in_cpu": 0},
            "offload_optimizer": {
                **drive, "buffer_count": args.swap_buffers, "pipeline_read": bool(args.pipeline),
                "pipeline_write": bool(args.pipeline),
            },
        },
        "aio": {
            "block_size": args.aio_block, "queue_depth": 16, "intra_op_parallelism": args.aio_threads,
            "single_submit": False,
            "overlap_events": True,
        },
        "steps_per_print": 10**9,
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    batch = make_batch(args)

    def step() -> float:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        return float(loss.item())

    return step, lambda: {"deepspeed": deepspeed.__version__, "settings": settings}


WORKERS = {"tierplan": with_tierplan, "deepspeed": with_deepspeed}


def work(args: argparse.Namespace) -> None:
    """Answers each line with a number n by n steps: their losses and seconds, and the highest memory of the process."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print goes to standard error
    import torch

    torch.set_num_threads(args.threads)
    resource.setrlimit(resource.RLIMIT_DATA, (int(args.cap_gib * GIB),) * 2)
    folder = args.nvme_dir / args.worker
    folder.mkdir(parents=True, exist_ok=True)
    step, finish = WORKERS[args.worker](args, folder)
    is_new = True
    for line in sys.stdin:
        if not (count := int(line)):
            break
        began, losses = time.perf_counter(), [step() for _ in range(count)]
        answer = {"s": time.perf_counter() - began, "losses": losses, **memory_bytes()}
        if is_new:  # setting up is over
            Path("/proc/self/clear_refs").write_text("5")
            is_new = False
        print(json.dumps(answer), file=answers, flush=True)
    print(json.dumps({"torch": torch.__version__, **finish()}), file=answers, flush=True)


def memory_bytes() -> dict[str, int]:
    """Resident memory of this process: the peak since it was last reset, and now, by kind."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    names = {"peak_rss": "VmHWM", "rss_anon": "RssAnon", "rss_file": "RssFile", "rss_shmem": "RssShmem"}
    return {name: int(lines[key].split()[0]) * 1024 for name, key in names.items()}


# ---- the comparison ----


class Contender:
    """A worker in its own process."""

    def __init__(self, name: str, python: str, args: argparse.Namespace) -> None:
        self.name = name
        options = [x for key in SHARED for x in (f"--{key.replace('_', '-')}", str(getattr(args, key)))]
        command = [python, str(Path(__file__).resolve()), "--worker", name, *options]
        root = str(Path(__file__).resolve().parents[1])
        environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "PYTHONPATH": root}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True, stderr=args.log
        )

    def ask(self, count: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(f"{count}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with status {self._process.wait()}; its messages are in --log")
        return dict(json.loads(line))

    def end(self) -> dict[str, Any]:
        last = self.ask(0)
        self._process.wait()
        return last


SHARED = (
    "nvme_dir", "width", "blocks", "dtype", "batch", "length", "threads", "cap_gib", "device_mib", "host_mib",
    "sub_group", "aio_block", "aio_threads", "swap_buffers", "pipeline", "port",
)  # fmt: skip


def compare(args: argparse.Namespace) -> dict[str, Any]:
    contenders = [Contender("deepspeed", args.deepspeed_python, args), Contender("tierplan", sys.executable, args)]
    first = {c.name: c.ask(args.warmup) for c in contenders}
    seconds: dict[str, list[float]] = {c.name: [] for c in contenders}
    peaks: dict[str, int] = {}
    losses = {c.name: first[c.name]["losses"] for c in contenders}
    for turn in range(args.turns):
        for c in contenders if turn % 2 else contenders[::-1]:
            answer = c.ask(args.steps)
            seconds[c.name].append(answer["s"] / args.steps)
            losses[c.name] += answer["losses"]
            peaks[c.name] = answer["peak_rss"]
        print({name: round(s[-1], 3) for name, s in seconds.items()}, flush=True)
    about = {c.name: c.end() for c in contenders}
    for c in contenders:
        shutil.rmtree(args.nvme_dir / c.name, ignore_errors=True)
    ratios = [d / t for d, t in zip(seconds["deepspeed"], seconds["tierplan"], strict=True)]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "load_average": os.getloadavg(),
        "settings": {key: getattr(args, key) for key in SHARED if key not in ("nvme_dir", "port")},
        "median_step_s": {name: statistics.median(s) for name, s in seconds.items()},
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "peak_rss_bytes": peaks,
        "losses": losses,
        "about": about,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme-dir", type=Path, required=True)
    parser.add_argument("--deepspeed-python", metavar="PYTHON")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--steps", type=int, default=2, help="per turn")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cap-gib", type=float, default=6.0, help="of each process's own memory")
    parser.add_argument("--device-mib", type=float, default=512.0, help="budget of tierplan's device tier")
    parser.add_argument("--host-mib", type=float, default=1536.0, help="budget of tierplan's host tier")
    parser.add_argument("--sub-group", type=int, default=12_000_000, help="DeepSpeed's sub_group_size")
    parser.add_argument("--aio-block", type=int, default=8 * MIB, help="DeepSpeed's aio.block_size")
    parser.add_argument("--aio-threads", type=int, default=1, help="DeepSpeed's aio.intra_op_parallelism")
    parser.add_argument("--swap-buffers", type=int, default=12, help="DeepSpeed's offload_optimizer.buffer_count")
    parser.add_argument("--pipeline", type=int, choices=(0, 1), default=1, help="of DeepSpeed's optimizer swaps")
    parser.add_argument("--port", default="29511")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--log", type=argparse.FileType("w"), help="what the workers say")
    parser.add_argument("--worker", choices=tuple(WORKERS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args)
        return
    if not args.deepspeed_python:
        parser.error("--deepspeed-python is needed: a Python that has DeepSpeed")
    record = compare(args)
    print(f"DeepSpeed / tierplan: {record['ratio']:.2f}, median of {len(record['ratios'])} turns")
    print({name: f"{peak / MIB:,.0f} MiB" for name, peak in record["peak_rss_bytes"].items()})
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
