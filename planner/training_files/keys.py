"""Which settings of DeepSpeed, accelerate and the Hugging Face Trainer are taken into account, or cost a step nothing.

    unaccounted_note(flat(raw), OF_DEEPSPEED)   those that are in no table, or have another value than the one there

So a key that nobody knows, of another release or misspelt, is named in the answer and never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping

AUTO = "auto"
Known = Mapping[str, tuple[object, ...] | None]
"""By dotted key, or that of the section around it: the values that change nothing of what is simulated; None for any,
where the key is read or costs a step nothing. A key that ends with `*` is of all that begin so."""


def unaccounted_note(says: Mapping[str, object], known: Known) -> tuple[str, ...]:
    """The note that names what a file says and nobody takes into account, by dotted keys, if there is any."""
    names = sorted(key for key, value in says.items() if not _is_known(key, value, says, known))
    return (f"not taken into account: {', '.join(names)}",) if names else ()


def _is_known(setting: str, value: object, says: Mapping[str, object], known: Known) -> bool:
    parts = setting.split(".")
    sections = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    if value in (None, AUTO) or any(says.get(f"{section}.enabled") is False for section in sections):
        return True
    for name in (*sections, *(f"{parts[0][:count]}*" for count in range(len(parts[0]), 0, -1))):
        if name in known:
            neutral = known[name]
            return neutral is None or value in neutral
    return False


def _known(prefix: str, read: str = "", **neutral: object) -> Known:
    """Keys of one section: those that are `read` or cost nothing, and the values of others that change nothing."""
    others = {name: value if isinstance(value, tuple) else (value,) for name, value in neutral.items()}
    return {f"{prefix}{name}": value for name, value in {**dict.fromkeys(read.split()), **others}.items()}


_ZERO = "zero_optimization."
OF_DEEPSPEED: Known = {
    **_known("", """train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping
        scheduler steps_per_print wall_clock_breakdown dump_state memory_breakdown tensorboard wandb
        csv_monitor comet monitor_config checkpoint comms_config zero_allow_untested_optimizer
        zero_force_ds_cpu_optimizer""",
        communication_data_type=(), prescale_gradients=False, gradient_predivide_factor=1.0, sparse_gradients=False),
    **_known("aio.", "block_size queue_depth thread_count intra_op_parallelism single_submit overlap_events"),
    **_known("bf16.", "enabled immediate_grad_update check_grad_overflow", bf16_master_weights_and_grads=False,
        bf16_optimizer_states=False),
    **_known("fp16.", """enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis min_loss_scale
        consecutive_hysteresis""", fp16_master_weights_and_grads=False),
    **_known(_ZERO, """stage cpu_offload cpu_offload_params overlap_comm round_robin_gradients elastic_checkpoint
        load_from_fp32_weights stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save
        ignore_unused_parameters""",
        reduce_bucket_size=5e8, allgather_bucket_size=5e8, allgather_partitions=True, reduce_scatter=True,
        contiguous_gradients=True, sub_group_size=1e9, stage3_max_live_parameters=1e9,
        stage3_max_reuse_distance=1e9, stage3_prefetch_bucket_size=(0, 5e7), stage3_param_persistence_threshold=1e5,
        stage3_module_granularity_threshold=0, stage3_use_all_reduce_for_fetch_params=False,
        memory_efficient_linear=True, zero_quantized_weights=False, zero_quantized_gradients=False,
        zero_quantized_nontrainable_weights=False, zero_hpz_partition_size=1, mics_shard_size=-1,
        mics_hierarchical_params_gather=False),
    **_known(f"{_ZERO}offload_optimizer.", "device nvme_path pin_memory fast_init pipeline pipeline_read "
        "pipeline_write", ratio=1.0, buffer_count=4, super_offload=False),
    **_known(f"{_ZERO}offload_param.", "device nvme_path pin_memory", buffer_count=5, buffer_size=1e8, max_in_cpu=1e9),
    **_known("activation_checkpointing.", "profile", partition_activations=False, cpu_checkpointing=False,
        number_checkpoints=(), contiguous_memory_optimization=False, synchronize_checkpoint_boundary=False),
    **_known("", sequence_parallel_size=1),
    **_known("tensor_parallel.", autotp_size=(0, 1)),
    **_known("optimizer.", "type"),
    **_known("optimizer.params.", """lr betas eps weight_decay bias_correction adam_w_mode adamw_mode torch_adam
        momentum dampening nesterov set_grad_none muon_lr adam_lr""", amsgrad=False, fp32_optimizer_states=True),
}  # fmt: skip
"""With DeepSpeed's own defaults."""

_FSDP = _known("", """version sharding_strategy reshard_after_forward offload_params cpu_offload
    activation_checkpointing transformer_layer_cls_to_wrap state_dict_type use_orig_params sync_module_states
    cpu_ram_efficient_loading forward_prefetch""", auto_wrap_policy="TRANSFORMER_BASED_WRAP", min_num_params=0,
    backward_prefetch=("BACKWARD_PRE", 1), limit_all_gathers=True, xla=False, xla_fsdp_v2=False,
    xla_fsdp_grad_ckpt=False, activation_checkpointing_offload=False)  # fmt: skip
"""Its `forward_prefetch` changes little: the host issues gathers ahead of the GPU without it too."""
_IN_FSDP: Known = {f"fsdp_config.{prefix}{key}": value for key, value in _FSDP.items() for prefix in ("", "fsdp_")}

_NO = ("no", "NO", "No", False)
_COMPILED = (*_NO, "inductor", "INDUCTOR")
OF_ACCELERATE: Known = {
    **_IN_FSDP,
    **_known("", """compute_environment debug distributed_type enable_cpu_affinity gpu_ids machine_rank main_process_ip
        main_process_port main_training_function mixed_precision num_machines num_processes rdzv_backend same_network
        command_file commands tpu_env tpu_name tpu_zone""", use_cpu=False, downcast_bf16=_NO,
        dynamo_backend=_COMPILED, tpu_use_cluster=False, tpu_use_sudo=False),
    **_known("deepspeed_config.", """zero_stage gradient_accumulation_steps gradient_clipping zero3_init_flag
        zero3_save_16bit_model deepspeed_config_file deepspeed_multinode_launcher deepspeed_moe_layer_cls_names
        offload_optimizer_device offload_param_device offload_optimizer_nvme_path offload_param_nvme_path"""),
    **_known("parallelism_config.parallelism_config_", """dp_shard_size cp_backend cp_comm_strategy sp_backend
        sp_seq_length sp_seq_length_is_variable sp_attn_implementation""", dp_replicate_size=1, tp_size=1, cp_size=1,
        sp_size=1),
    **_known("dynamo_config.", "dynamo_use_dynamic dynamo_use_fullgraph dynamo_use_regional_compilation",
        dynamo_backend=_COMPILED, dynamo_mode="default"),
}  # fmt: skip

_RECOMPUTING = _known("", "use_reentrant preserve_rng_state determinism_check", early_stop=True, debug=False,
    every_n_layers=1, offload=False)  # fmt: skip
OF_TRAINER: Known = {
    **_IN_FSDP,
    **_known("", """per_device_train_batch_size gradient_accumulation_steps max_grad_norm bf16 fp16 optim deepspeed
        fsdp gradient_checkpointing activation_checkpointing finetuning_type stage disable_gradient_checkpointing
        cutoff_len max_length max_seq_length packing output_dir overwrite_output_dir num_train_epochs max_steps seed
        data_seed learning_rate weight_decay run_name project report_to disable_tqdm skip_memory_metrics local_rank
        prediction_loss_only per_device_eval_batch_size include_for_metrics include_inputs_for_metrics
        batch_eval_metrics metric_for_best_model greater_is_better load_best_model_at_end resume_from_checkpoint
        ignore_data_skip restore_callback_states_from_checkpoint remove_unused_columns label_names length_column_name
        average_tokens_across_devices include_num_input_tokens_seen bf16_full_eval fp16_full_eval use_cache past_index
        ray_scope jit_mode_eval enable_jit_checkpoint evaluation_strategy push_to_hub* hub_* trackio_* logging_* log_*
        eval_* save_* dataloader_* lr_scheduler_* warmup_* adam_* do_* ddp_* torch_compile use_liger_kernel""",
        torch_compile_backend="inductor", torch_compile_mode="default", tf32=False,
        group_by_length=False, train_sampling_strategy=("random", "sequential"), neftune_noise_alpha=(),
        label_smoothing_factor=0.0, torch_empty_cache_steps=(), auto_find_batch_size=False,
        optim_args="", optim_target_modules=(), parallelism_config=(), use_cpu=False, no_cuda=False, use_ipex=False,
        use_mps_device=False, adafactor=False, split_batches=False, half_precision_backend="cuda_amp",
        full_determinism=False, mp_parameters="", fp16_opt_level="O1", debug=([], ""), torchdynamo=()),
    **_known("accelerator_config.", """dispatch_batches even_batches use_seedable_sampler non_blocking
        use_configured_state""", split_batches=False),
    **_known("accelerator_config.gradient_accumulation_kwargs.", "num_steps adjust_scheduler sync_with_dataloader",
        sync_each_batch=False),
    **_known("liger_kernel_config.", """rope cross_entropy fused_linear_cross_entropy rms_norm layer_norm swiglu geglu
        relu_squared"""),
    **{f"{way}_checkpointing_kwargs.{key}": value for way in ("gradient", "activation")
       for key, value in _RECOMPUTING.items()},
}  # fmt: skip
"""With the Trainer's own defaults."""
