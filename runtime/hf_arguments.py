"""Which settings of the Hugging Face `Trainer` a schedule honours; every other one is refused, and none is ignored.

`HONOURED`, `OF_THE_SCHEDULE` and `REFUSED` together are the reviewed fields of `TrainingArguments`. One that is in
none of them (of a subclass, or of another release of `transformers`) has to keep its default.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from tierplan.runtime.execution.placement import TrainingError
from tierplan.sim.ranks import num_ranks
from tierplan.sim.schedule import Schedule
from tierplan.sim.workloads.optimizers import OF_TRANSFORMERS
from tierplan.sim.workloads.workload import Training

_HONOURED = {
    "the Trainer's own business: how long, which data, what to log and where": """
        output_dir num_train_epochs max_steps seed data_seed full_determinism use_cpu accelerator_config tf32
        dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers
        dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order remove_unused_columns
        label_names train_sampling_strategy length_column_name average_tokens_across_devices
        logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter log_level
        log_level_replica include_num_input_tokens_seen disable_tqdm report_to run_name project trackio_space_id
        trackio_bucket_id trackio_static_space_id skip_memory_metrics do_train do_eval do_predict local_rank""",
    "evaluation, which is the Trainer's, with the whole model": """
        eval_strategy eval_steps eval_delay per_device_eval_batch_size prediction_loss_only eval_on_start
        eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics batch_eval_metrics
        metric_for_best_model greater_is_better use_cache""",
    "checkpoints, which hold the schedule's states beside the model": """
        save_strategy load_best_model_at_end resume_from_checkpoint restore_callback_states_from_checkpoint
        ignore_data_skip save_steps save_only_model save_on_each_node save_total_limit push_to_hub hub_token
        hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision""",
    "handed to the schedule's optimizer": """
        learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps weight_decay adam_beta1 adam_beta2
        adam_epsilon optim""",
    "of no effect while the setting that they belong to is refused": """
        activation_checkpointing_kwargs gradient_checkpointing_kwargs liger_kernel_config fsdp_config
        ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph
        ddp_backend ddp_timeout""",
}
HONOURED = frozenset(name for names in _HONOURED.values() for name in names.split())
OF_THE_SCHEDULE = ("per_device_train_batch_size", "gradient_accumulation_steps", "max_grad_norm")
"""Must be those that the schedule was made for."""

_ADAMW = "the schedule updates with the optimizer that it was made for"
_OPTIMS = ("adamw_torch", "adamw_torch_fused", "adamw_torch_8bit", "adamw_torch_4bit", "sgd", "lion_32bit")
EXECUTED = {name: OF_TRANSFORMERS[name] for name in _OPTIMS}
"""What the Trainer's `optim` has to be, for each optimizer of a schedule; AdamW has the bits of `AdamW(fused=True)`, in
8 and 4 bits those of torchao's steps uncompiled."""
_OF_BF16 = "adamw:states=bf16"
"""What the Trainer's AdamW does with a model in bf16: states in bf16, and no other copy of the weights."""
_LOSS = "a step of the schedule takes the loss that the model returns"
_MEMORY = "where tensors are, and what is computed again, is in the schedule"
_NOT_COMPILED = ("ops of a schedule are executed eagerly", "leave out all of torch_compile*")
_ONE_PROCESS = "a schedule is executed by one process"
_PRECISION = "the precision is the schedule's, without autocast"

REFUSED: Mapping[str, tuple[tuple[object, ...], str, str]] = {
    "optim_args": ((None, ""), _ADAMW, "use adam_beta1, adam_beta2, adam_epsilon and weight_decay"),
    "optim_target_modules": ((None,), _ADAMW, "leave it out"),
    "label_smoothing_factor": ((0.0,), _LOSS, "smooth labels in the model's own loss"),
    "neftune_noise_alpha": ((None,), "embeddings get no noise in a schedule's forward", "leave it out"),
    "bf16": ((False,), _PRECISION, "plan for dtype bf16 and load the model in bf16"),
    "fp16": ((False,), f"{_PRECISION} or loss scaling", "plan for dtype bf16 and load the model in bf16"),
    "bf16_full_eval": ((False,), _PRECISION, "evaluate a copy of the saved model"),
    "fp16_full_eval": ((False,), _PRECISION, "evaluate a copy of the saved model"),
    "activation_checkpointing": ((False, None), _MEMORY, "let the planner choose what is computed again"),
    "gradient_checkpointing": ((False, None), _MEMORY, "let the planner choose what is computed again"),
    "torch_compile": ((False,), *_NOT_COMPILED),
    "torch_compile_backend": ((None,), *_NOT_COMPILED),
    "torch_compile_mode": ((None,), *_NOT_COMPILED),
    "use_liger_kernel": ((False,), "the schedule was made for the model's own kernels", "leave it out"),
    "torch_empty_cache_steps": ((None,), _MEMORY, "leave it out"),
    "auto_find_batch_size": ((False,), "a schedule is made for one batch size", "plan for the batch size that fits"),
    "enable_jit_checkpoint": ((False,), "a step is executed whole", "use `tierplan run`, which commits on SIGTERM"),
    "debug": (([], "", None), "its hooks would run inside the schedule's ops", "debug with the plain Trainer"),
    "fsdp": ((None, "", [], False), _ONE_PROCESS, "leave it out"),
    "deepspeed": ((None, "", False), _ONE_PROCESS, "leave it out"),
    "parallelism_config": ((None,), _ONE_PROCESS, "leave it out"),
}
"""By field, the values that are taken, the rule, and what to do instead."""

HONOURED_SETTINGS = {
    "model", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class", "compute_metrics",
    "callbacks", "preprocess_logits_for_metrics",
}  # fmt: skip
_OWN_OPTIMIZER = (f"{_ADAMW}, and the Trainer's scheduler sets its rate", "use TrainingArguments for both")
REFUSED_SETTINGS: Mapping[str, tuple[str, str]] = {
    "model_init": ("a schedule trains the one model that it was made for", "give the model itself"),
    "compute_loss_func": (_LOSS, "compute it in the model's forward"),
    "optimizers": _OWN_OPTIMIZER,
    "optimizer_cls_and_kwargs": _OWN_OPTIMIZER,
}
"""By argument of the Trainer's constructor, the rule and what to do instead."""

REFUSED_ATTRIBUTES: Mapping[str, tuple[str, str]] = {
    **{name: REFUSED_SETTINGS[name] for name in ("model_init", "compute_loss_func", "optimizer_cls_and_kwargs")},
    "optimizer": _OWN_OPTIMIZER,
    "label_smoother": (_LOSS, "smooth labels in the model's own loss"),
    "neftune_noise_alpha": REFUSED["neftune_noise_alpha"][1:],
}
"""Likewise, by attribute of the Trainer that somebody can set before training."""

NEVER_CALLED = (
    "compute_loss", "compute_loss_context_manager", "autocast_smart_context_manager", "training_step",
    "create_optimizer", "create_optimizer_and_scheduler", "get_optimizer_cls_and_kwargs", "_clip_grad_norm",
    "_get_grad_norm", "_prepare_context_parallel_inputs",
)  # fmt: skip
"""Methods that the schedule stands for, or that the adapter needs as they are."""


def check_trainer_settings(settings: Mapping[str, Any]) -> None:
    """Raises `TrainingError` for what is given to the Trainer's constructor and not honoured."""
    for name, value in settings.items():
        is_given = any(part is not None for part in value) if isinstance(value, tuple) else value is not None
        if name in HONOURED_SETTINGS or not is_given:
            continue
        rule, advice = {**REFUSED_SETTINGS, **REFUSED_ATTRIBUTES}.get(
            name, ("it is not known to be honoured", "leave it out")
        )
        shown = " ".join(repr(value).split())
        raise TrainingError(f"the Trainer is given {name}={shown}, but {rule}; {advice}")


SWITCHES = {
    "ACCELERATE_DYNAMO_BACKEND": (("", "no"), _NOT_COMPILED[0]),
    **dict.fromkeys(
        (f"ACCELERATE_USE_{way}" for way in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG")),
        (("", "0", "false", "no", "off"), _ONE_PROCESS),
    ),
}
"""By variable of the environment, what leaves it off, and the rule; `accelerate launch` sets them."""


def check_environment(environment: Mapping[str, str]) -> None:
    """Raises `TrainingError` for what accelerate reads there beside the arguments, and a schedule does not honour."""
    for name, (off, rule) in SWITCHES.items():
        if (value := environment.get(name, "")).lower() not in off:
            raise TrainingError(
                f"the environment has {name}={value}, but {rule}; unset it, or leave its option of `accelerate launch` "
                "or key of `accelerate config` out"
            )


def check_accelerator(accelerator: Any) -> None:
    """Raises `TrainingError` for what accelerate has from its environment, whatever the arguments say."""
    if accelerator.mixed_precision != "no":
        _, rule, advice = REFUSED["bf16"]
        raise TrainingError(
            f"accelerate has mixed_precision={accelerator.mixed_precision!r}, but {rule}; unset "
            f"ACCELERATE_MIXED_PRECISION (`accelerate launch --mixed_precision no`), {advice}"
        )


def check_attributes(trainer: Any, optimizer: Any) -> None:
    """Raises `TrainingError` where somebody has set on the Trainer itself what is not honoured; `optimizer` is its own,
    if it is made already."""
    now = {name: getattr(trainer, name) for name in REFUSED_ATTRIBUTES}
    check_trainer_settings({name: value for name, value in now.items() if value is not optimizer})


def check_epoch(num_examples: int, args: Any, num_micro_batches: int) -> None:
    """Raises `TrainingError` where an epoch of so many examples ends in less than a whole step of the schedule, and
    training comes to its end."""
    num_whole, rest = divmod(num_examples, args.train_batch_size)
    num_steps, left = divmod(num_whole, num_micro_batches)
    rest = 0 if args.dataloader_drop_last else rest
    num_of_epoch = max(1, math.ceil((num_whole + bool(rest)) / num_micro_batches))  # as the Trainer counts its steps
    num_wanted = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * num_of_epoch)
    if num_wanted > num_steps and (rest or left or not num_steps):
        ending = f"a micro-batch of {rest}" if rest else f"a step of {left} micro-batches"
        remedy = "set dataloader_drop_last=True, or " if rest and not left and num_steps else ""
        raise TrainingError(
            f"an epoch of {num_examples} examples ends in {ending}, but the schedule's steps have {num_micro_batches} "
            f"micro-batches of {args.train_batch_size}; {remedy}leave examples out so that their number is a multiple "
            "of both, or give max_steps that end sooner"
        )


def check_step(args: Any, training: Training) -> None:
    """Raises `TrainingError` where the Trainer's next step is not one that a schedule made for `training` has."""
    for name in OF_THE_SCHEDULE:
        value, wanted, source = getattr(args, name), getattr(training, name) or 0.0, ""
        given = (args.accelerator_config.gradient_accumulation_kwargs or {}).get("num_steps", 1)
        if name == "gradient_accumulation_steps" and value == 1 != given:  # then the Trainer takes accelerate's
            value, source = given, " (num_steps of accelerator_config)"
        if value != wanted:
            raise TrainingError(
                f"TrainingArguments have {name}={value!r}{source}, but the schedule was made for {wanted!r}; "
                "set it so, or plan again"
            )


def check_arguments(args: Any, training: Training) -> None:
    """Raises `TrainingError` for the first of `TrainingArguments` that a schedule made for `training` cannot honour.

    To be called again when the Trainer has begun, which changes some, and before it trains.
    """
    check_step(args, training)
    optim = getattr(args.optim, "value", args.optim)
    spec = "adamw" if training.optimizer == _OF_BF16 else training.optimizer
    if EXECUTED.get(optim) != spec:
        remedies = [f"set optim={name!r}" for name, executed in EXECUTED.items() if executed == spec]
        remedies += [f"plan with --optimizer {EXECUTED[optim]}"] if optim in EXECUTED else []
        raise TrainingError(
            f"TrainingArguments have optim={optim!r}, but the schedule updates with {training.optimizer}; "
            f"{', or '.join([*remedies, 'use the plain Trainer'])}"
        )
    for field in dataclasses.fields(args):
        name = field.name
        if name in HONOURED or name in OF_THE_SCHEDULE:
            continue
        value = getattr(args, name)
        taken, rule, advice = REFUSED.get(name, ((_default(field),), "it is not known to be honoured", "leave it out"))
        if value not in taken:
            shown = getattr(value, "value", value)
            known = " or ".join(repr(t) for t in taken)
            raise TrainingError(f"TrainingArguments have {name}={shown!r}, not {known}, but {rule}; {advice}")
    num_devices = max(args.world_size, args.n_gpu)
    if num_devices > 1:
        raise TrainingError(
            f"the Trainer would use {num_devices} processes or GPUs, but {_ONE_PROCESS} on one device; start one "
            "process and show it one GPU (CUDA_VISIBLE_DEVICES)"
        )


def check_devices(schedule: Schedule) -> None:
    """Raises `TrainingError` for a schedule of several devices, however many processes there are."""
    if (num := num_ranks(schedule)) > 1:
        raise TrainingError(
            f"schedule {schedule.name!r} is for {num} devices, but under the Hugging Face Trainer {_ONE_PROCESS} on "
            f"one device; plan for one, or train without it: `tierplan run --devices {num}`"
        )


def _default(field: dataclasses.Field[Any]) -> object:
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def check_methods(trainer: Any, adapter: type) -> None:
    """Raises `TrainingError` where a subclass of the adapter, or somebody on this one, overrides what would never be
    called."""
    own = type(trainer)
    for name in NEVER_CALLED:
        is_set = name in vars(trainer)
        if is_set or getattr(own, name, None) is not getattr(adapter, name, None):
            who = "the Trainer is given its own" if is_set else f"{own.__name__} overrides"
            raise TrainingError(
                f"{who} {name}, but the schedule stands for forward, loss, backward, clipping and "
                "update, so it would not be called as the Trainer calls it; put what it does into the model's forward"
            )


def check_callbacks(callbacks: Iterable[Any], base: type) -> None:
    """Raises `TrainingError` for a callback that wants to see gradients, which are gone when it would be called."""
    for callback in callbacks:
        if getattr(type(callback), "on_pre_optimizer_step", None) is not base.on_pre_optimizer_step:  # type: ignore[attr-defined]
            raise TrainingError(
                f"callback {type(callback).__name__} has on_pre_optimizer_step, but gradients are the schedule's and "
                "the update is made already; leave the callback out"
            )
