"""Is my slow step normal? What it should take, where the difference probably lies, what to change first.

--config is a configuration of DeepSpeed, accelerate, or the Hugging Face Trainer (TrainingArguments as JSON). What it
leaves open is taken from the options below. Give the seconds of a step, a DeepSpeed log with wall_clock_breakdown, or a
trace of PyTorch's profiler: with either of the last two the parts that are to blame can be told apart.

    tierplan explain-run --step-s 14.2 --config ds_config.json --model gpt-6.7b --machine desktop-4090
    tierplan explain-run --log train.log --config ds_config.json --model gpt2-xl --machine here
    tierplan explain-run --trace kineto.json --step-s 3.1 --config args.json --model llama-3.2-1b --machine here
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from tierplan.commands.options import scenario
from tierplan.commands.options.arguments import existing_file, finite, option
from tierplan.commands.options.terminal import tell, working
from tierplan.planner.training_files.configured import Configured


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what was measured")
    option(what, "--step-s S", "seconds of one optimizer step", finite(above=0))
    option(what, "--log FILE", "DeepSpeed's, with wall_clock_breakdown", existing_file)
    option(
        what, "--trace FILE", "of torch.profiler, as export_chrome_trace writes it (.json or .json.gz)", existing_file
    )
    option(what, "--config FILE", "DeepSpeed JSON, accelerate YAML, or TrainingArguments JSON", existing_file)
    option(what, "--policy NAME", "instead of a configuration: a policy of `tierplan simulate` (default: in-memory)")
    option(parser, "--time-limit S", "seconds that the planner searches (default: by counted work)", finite(above=0))
    scenario.add_arguments(parser, searches=False)


def run(args: argparse.Namespace) -> int:
    from tierplan.planner.policies import check_name
    from tierplan.studies.evaluate import machine_of, training_of
    from tierplan.studies.slow_step.explain import explain_run
    from tierplan.studies.slow_step.measured import MeasuredStep, micro_batches_of, read_kineto, read_log
    from tierplan.studies.slow_step.text import explanation_lines

    if args.log and args.trace:
        raise ValueError("--log and --trace both say how long a step took; give one of them")
    if not (args.log or args.trace or args.step_s):
        raise ValueError("no measured step was given; use --step-s, --log or --trace")
    if args.config and args.policy:
        raise ValueError("--config and --policy both say how it is trained; give one of them")
    shown = micro_batches_of(args.log) if args.log and args.accumulation is None else None
    if shown:
        said_by = {"accumulation": f"the number of micro-batches in a step of {args.log}"}
        args = argparse.Namespace(**{**vars(args), "accumulation": shown, "said_by": said_by})
    point = scenario.read_point(args)
    machine = machine_of(point)
    base = training_of(point, machine)
    if args.config:
        configured = scenario.read_configured(args, args.config, base, devices=machine.num_devices)
        if args.semantics:
            configured = replace(configured, options={**configured.options, "semantics": args.semantics})
    else:
        check_name(args.policy or "in-memory")
        options = {"semantics": args.semantics} if args.semantics else {}
        configured = Configured(training=base, policy=args.policy or "in-memory", options=options)
        if not args.policy:
            how = "in-memory, with everything on the device and nothing made again"
            configured = configured.noting(f"neither --config nor --policy says how it is trained: taken as {how}")
    if shown and shown > 1:
        configured = configured.noting(f"the log shows {shown} micro-batches in a step (--accumulation)")
    if args.log:
        measured = read_log(args.log, configured.training.gradient_accumulation_steps, args.step_s)
    elif args.trace:
        measured = read_kineto(args.trace, args.step_s)
    else:
        measured = MeasuredStep(step_s=args.step_s)
    with working("simulating"):
        explanation = explain_run(point, configured, measured)
        _ = explanation.expected.limits
    tell(args, explanation.record(), explanation_lines(explanation))
    return 0 if explanation.expected_s is not None else 3
