"""Trains a model as a plan says, and commits its steps so that a run can be resumed after anything.

PLAN is what `tierplan plan -o` or `tierplan simulate -o` wrote. The run's folder gets `metrics.jsonl` (one line per
step), `trace.json` (what ran when, for `tierplan compare`), the commits, and the trained model in `model/`.

Examples:

    tierplan run plan.json --model ./gpt2 --data corpus/ --steps 1000 --out run1
    tierplan run plan.json --model config.json --data text.txt --steps 200 --out run2 --nvme /mnt/a --nvme /mnt/b
    tierplan run plan.json --model ./gpt2 --data corpus/ --steps 1000 --out run1 --resume
    tierplan run zero2.json --model ./gpt2 --data corpus/ --steps 1000 --out run3 --devices 2
    torchrun --nproc-per-node 2 -m tierplan run zero2.json --model ./gpt2 --data corpus/ --steps 1000 --out run3
    tierplan run --verify --out run1
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from tierplan.commands.options.arguments import add_device, existing_file, finite, new_folder, option, seed, whole
from tierplan.commands.options.terminal import tell


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=existing_file, nargs="?", metavar="PLAN", help="a plan or a schedule, in a file")
    option(
        parser, "--model M", "a folder with config.json and, if any, *.safetensors and a tokenizer; or a config.json "
        "alone", Path,
    )  # fmt: skip
    option(parser, "--data D", "a text file, a folder of them, or tokens (.npy, .bin)", Path)
    option(parser, "--steps N", "optimizer steps of the whole run", whole(1))
    option(parser, "--out DIR", "the run's folder", new_folder, required=True)
    option(parser, "--resume", "go on from the last commit in DIR, if there is one")
    option(
        parser, "--nvme --nvme-dir DIR", "folder of the NVMe tier (default: DIR/nvme in the run's folder); repeat it "
        "to stripe over several drives", new_folder, repeat=True,
    )  # fmt: skip
    option(
        parser, "--nvme-weights W", "relative speeds of those folders, one each (default: measured before the run, in "
        "about a second)", finite(above=0), (), nargs="+",
    )  # fmt: skip
    option(parser, "--checkpoint-every K", "commit every K steps (default: at the end, and on Ctrl-C)", whole(1))
    option(
        parser, "--no-read-back", "do not read each commit back from the drives before it counts, only the last one "
        "(saves a reading of the parameters and states per commit)",
    )  # fmt: skip
    option(parser, "--verify", "do not train: read all of the last commit in DIR and say whether it is whole")
    option(parser, "--no-export", "do not write the trained model")
    training = parser.add_argument_group("training")
    option(training, "--lr LR", "learning rate", finite(least=0), 1e-3)
    option(
        training, "--lr-schedule", "what becomes of the rate after the warm-up: it stays, or falls to 0 at the last "
        "step", default="constant", choices=("constant", "linear", "cosine"),
    )  # fmt: skip
    option(training, "--warmup-steps W", "steps in which the rate rises", whole(0), 0)
    option(
        training, "--betas", "of AdamW (default 0.9 0.999)", finite(least=0, below=1), (0.9, 0.999), nargs=2,
        metavar=("B1", "B2"),
    )  # fmt: skip
    option(training, "--eps EPS", "of AdamW", finite(above=0), 1e-8)
    option(training, "--weight-decay D", "per unit of rate", finite(least=0), 0.01)
    option(training, "--no-decay-on-norms", "no weight decay for biases and the parameters of norms")
    option(training, "--seed N", "of weights, order of data, and dropout", seed, 0)
    machine = parser.add_argument_group("machine")
    add_device(machine)
    option(machine, "--devices N", "execute a plan of N devices, each in a process of its own (CPUs)", whole(1))
    option(machine, "--threads T", "threads for kernels on the CPU (default: as PyTorch chooses)", whole(1, 1024))


def run(args: argparse.Namespace) -> int:
    if args.verify:
        from tierplan.runtime.checkpoint.commits import verify_commit

        whole = verify_commit(args.out, args.nvme or ())
        tell(args, {"whole": True, "what": whole}, [whole])
        return 0
    wanted = {"PLAN": args.plan, "--model": args.model, "--data": args.data, "--steps": args.steps}
    if missing := [name for name, value in wanted.items() if value is None]:
        args.parser.error(f"the following arguments are required: {', '.join(missing)}")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

    from tierplan.runtime.job import Job, run_job
    from tierplan.runtime.ranks.group import LAUNCHED
    from tierplan.runtime.ranks.launch import is_rank, own_ranks, start_ranks

    if args.devices is not None and not is_rank() and LAUNCHED not in os.environ:
        return start_ranks(args.devices, args.given)

    alike = (
        "model", "data", "resume", "checkpoint_every", "lr", "lr_schedule", "warmup_steps", "eps", "weight_decay",
        "no_decay_on_norms", "seed", "device",
    )  # fmt: skip
    job = Job(
        plan=Path(args.plan),
        num_steps=args.steps,
        out_dir=Path(args.out),
        nvme_dirs=tuple(map(Path, args.nvme or ())),
        nvme_weights=tuple(args.nvme_weights),
        read_back=not args.no_read_back,
        export=not args.no_export,
        betas=tuple(args.betas),
        num_threads=args.threads,
        **{name: getattr(args, name) for name in alike},
    )
    with own_ranks(f"tierplan {args.command}", num_threads=args.threads) as ranks:
        is_first = ranks is None or ranks.rank == 0
        done = run_job(job, show_progress=is_first, ranks=ranks)
        if is_first:
            tell(args, done.record(), [done.summary()])
        return 130 if done.was_stopped else 0
