"""Trains a model as a plan says, and commits its steps so that a run can be resumed after anything.

PLAN is what `tierplan plan -o` or `tierplan simulate -o` wrote. The run's folder gets `metrics.jsonl` (one line per
step), `trace.json` (what ran when, for `tierplan compare`), the commits, and the trained model in `model/`.

Examples:

    tierplan run plan.json --model ./gpt2 --data corpus/ --steps 1000 --out run1
    tierplan run plan.json --model config.json --data text.txt --steps 200 --out run2 --nvme /mnt/a --nvme /mnt/b
    tierplan run plan.json --model ./gpt2 --data corpus/ --steps 1000 --out run1 --resume
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, metavar="PLAN", help="a schedule file")
    parser.add_argument(
        "--model",
        type=Path,
        required=True,
        metavar="M",
        help="a folder with config.json and, if any, *.safetensors and a tokenizer; or a config.json alone",
    )
    parser.add_argument(
        "--data", type=Path, required=True, metavar="D", help="a text file, a folder of them, or tokens (.npy, .bin)"
    )
    parser.add_argument("--steps", type=int, required=True, metavar="N", help="optimizer steps of the whole run")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the run's folder")
    parser.add_argument("--resume", action="store_true", help="go on from the last commit in DIR, if there is one")
    parser.add_argument(
        "--nvme",
        type=Path,
        action="append",
        metavar="DIR",
        help="folder of the NVMe tier (default: DIR/nvme in the run's folder); repeat it to stripe over several drives",
    )
    parser.add_argument(
        "--nvme-weights",
        type=float,
        nargs="+",
        default=(),
        metavar="W",
        help="relative speeds of those folders, one each (default: measured before the run, in about a second)",
    )
    parser.add_argument(
        "--checkpoint-every", type=int, metavar="K", help="commit every K steps (default: at the end, and on Ctrl-C)"
    )
    parser.add_argument("--no-export", action="store_true", help="do not write the trained model")
    training = parser.add_argument_group("training")
    training.add_argument("--lr", type=float, default=1e-3, help="learning rate (default 1e-3)")
    training.add_argument("--lr-schedule", choices=("constant", "linear", "cosine"), default="constant")
    training.add_argument("--warmup-steps", type=int, default=0, metavar="W")
    training.add_argument("--betas", type=float, nargs=2, default=(0.9, 0.999), metavar=("B1", "B2"))
    training.add_argument("--eps", type=float, default=1e-8)
    training.add_argument("--weight-decay", type=float, default=0.01)
    training.add_argument("--seed", type=int, default=0, help="of weights, order of data, and dropout (default 0)")
    machine = parser.add_argument_group("machine")
    machine.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    machine.add_argument("--threads", type=int, metavar="T", help="threads for kernels on the CPU")


def run(args: argparse.Namespace) -> int:
    from tierplan.runtime.job import Job, run_job

    job = Job(
        plan=args.plan,
        model=args.model,
        data=args.data,
        num_steps=args.steps,
        out_dir=args.out,
        resume=args.resume,
        nvme_dirs=tuple(args.nvme or ()),
        nvme_weights=tuple(args.nvme_weights),
        checkpoint_every=args.checkpoint_every,
        export=not args.no_export,
        lr=args.lr,
        lr_schedule=args.lr_schedule,
        warmup_steps=args.warmup_steps,
        betas=tuple(args.betas),
        eps=args.eps,
        weight_decay=args.weight_decay,
        seed=args.seed,
        device=args.device,
        num_threads=args.threads,
    )
    done = run_job(job, show_progress=True)
    print(done.summary())
    return 130 if done.was_stopped else 0
