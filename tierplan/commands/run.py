"""Trains a model as a plan says, and commits its steps so that a run can be resumed after anything.

PLAN is what `tierplan plan -o` or `tierplan simulate -o` wrote. The run's folder gets `metrics.jsonl` (one line per
step), `trace.json` (what ran when, for `tierplan compare`), the commits, and the trained model in `model/`.

Examples:

    tierplan run plan.json --model ./gpt2 --data corpus/ --steps 1000 --out run1
    tierplan run plan.json --model config.json --data text.txt --steps 200 --out run2 --nvme /mnt/a --nvme /mnt/b
    tierplan run plan.json --model ./gpt2 --data corpus/ --steps 1000 --out run1 --resume
    tierplan run --verify --out run1
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from tierplan.commands.options.arguments import existing_file, finite, new_folder, whole


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=existing_file, nargs="?", metavar="PLAN", help="a plan or a schedule, in a file")
    parser.add_argument(
        "--model",
        type=Path,
        metavar="M",
        help="a folder with config.json and, if any, *.safetensors and a tokenizer; or a config.json alone",
    )
    parser.add_argument("--data", type=Path, metavar="D", help="a text file, a folder of them, or tokens (.npy, .bin)")
    parser.add_argument("--steps", type=whole(1), metavar="N", help="optimizer steps of the whole run")
    parser.add_argument("--out", type=new_folder, required=True, metavar="DIR", help="the run's folder")
    parser.add_argument("--resume", action="store_true", help="go on from the last commit in DIR, if there is one")
    parser.add_argument(
        "--nvme",
        "--nvme-dir",
        dest="nvme",
        type=new_folder,
        action="append",
        metavar="DIR",
        help="folder of the NVMe tier (default: DIR/nvme in the run's folder); repeat it to stripe over several drives",
    )
    parser.add_argument(
        "--nvme-weights",
        type=finite(above=0),
        nargs="+",
        default=(),
        metavar="W",
        help="relative speeds of those folders, one each (default: measured before the run, in about a second)",
    )
    parser.add_argument(
        "--checkpoint-every",
        type=whole(1),
        metavar="K",
        help="commit every K steps (default: at the end, and on Ctrl-C)",
    )
    parser.add_argument(
        "--no-read-back",
        action="store_true",
        help="do not read each commit back from the drives before it counts, only the last one (saves a reading of the "
        "parameters and states per commit)",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="do not train: read all of the last commit in DIR and say whether it is whole",
    )
    parser.add_argument("--no-export", action="store_true", help="do not write the trained model")
    training = parser.add_argument_group("training")
    training.add_argument("--lr", type=finite(least=0), default=1e-3, metavar="LR", help="learning rate (default 1e-3)")
    training.add_argument(
        "--lr-schedule",
        choices=("constant", "linear", "cosine"),
        default="constant",
        help="what becomes of the rate after the warm-up: it stays, or falls to 0 at the last step (default constant)",
    )
    training.add_argument(
        "--warmup-steps", type=whole(0), default=0, metavar="W", help="steps in which the rate rises (default 0)"
    )
    training.add_argument(
        "--betas",
        type=finite(least=0, below=1),
        nargs=2,
        default=(0.9, 0.999),
        metavar=("B1", "B2"),
        help="of AdamW (default 0.9 0.999)",
    )
    training.add_argument("--eps", type=finite(above=0), default=1e-8, metavar="EPS", help="of AdamW (default 1e-8)")
    training.add_argument(
        "--weight-decay", type=finite(least=0), default=0.01, metavar="D", help="per unit of rate (default 0.01)"
    )
    training.add_argument(
        "--no-decay-on-norms", action="store_true", help="no weight decay for biases and the parameters of norms"
    )
    training.add_argument(
        "--freeze",
        action="append",
        default=[],
        metavar="PATTERN",
        help="do not train parameters whose names match, such as 'transformer.wte.*'; may be repeated",
    )
    training.add_argument(
        "--seed", type=whole(0), default=0, metavar="N", help="of weights, order of data, and dropout (default 0)"
    )
    machine = parser.add_argument_group("machine")
    machine.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto is cuda where PyTorch sees a GPU"
    )
    machine.add_argument(
        "--threads", type=whole(1), metavar="T", help="threads for kernels on the CPU (default: as PyTorch chooses)"
    )


def run(args: argparse.Namespace) -> int:
    if args.verify:
        from tierplan.runtime.checkpoint.verification import verify_commit

        print(verify_commit(args.out, args.nvme or ()))
        return 0
    wanted = {"PLAN": args.plan, "--model": args.model, "--data": args.data, "--steps": args.steps}
    if missing := [name for name, value in wanted.items() if value is None]:
        args.parser.error(f"the following arguments are required: {', '.join(missing)}")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

    from tierplan.runtime.job import Job, run_job

    job = Job(
        plan=Path(args.plan),
        model=args.model,
        data=args.data,
        num_steps=args.steps,
        out_dir=Path(args.out),
        resume=args.resume,
        nvme_dirs=tuple(map(Path, args.nvme or ())),
        nvme_weights=tuple(args.nvme_weights),
        checkpoint_every=args.checkpoint_every,
        read_back=not args.no_read_back,
        export=not args.no_export,
        lr=args.lr,
        lr_schedule=args.lr_schedule,
        warmup_steps=args.warmup_steps,
        betas=tuple(args.betas),
        eps=args.eps,
        weight_decay=args.weight_decay,
        no_decay_on_norms=args.no_decay_on_norms,
        freeze=tuple(args.freeze),
        seed=args.seed,
        device=args.device,
        num_threads=args.threads,
    )
    done = run_job(job, show_progress=True)
    print(done.summary())
    return 130 if done.was_stopped else 0
