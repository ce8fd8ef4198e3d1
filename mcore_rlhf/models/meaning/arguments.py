"""Megatron's arguments: first those that change what a trained model computes, then all others, names by kind and nothing else.

Those that an architecture of Hugging Face can express are related to fields of its ``config.json`` in the tables of
:mod:`mcore_rlhf.models.huggingface`. All that are not must be neutral, or the conversion is refused.

Sources: megatron-core 0.16.1, ``transformer/{transformer_config,attention,dot_product_attention,mlp,utils}.py``,
``transformer/moe/{router,moe_utils,experts}.py``; Megatron-LM core_v0.16.1, ``megatron/training/arguments.py``; the last
section: Megatron-LM core_v0.19.0, the same files. ``geglu`` is no argument of it: a live engine says so of a model. Of the others:
``transformer/transformer_config.py``, ``model_parallel_config.py``, ``megatron/training/arguments.py`` of the same; what stands after
an empty line came later: arguments in checkpoints of Megatron-LM core_v0.19.
"""

from __future__ import annotations

from collections.abc import Callable

from .kinds import About, MeaningRow, Values, by_name

_MOE, _MLA, _HYBRID, _DELTA = "num_experts", "multi_latent_attention", "is_hybrid_model", "linear_attention_freq"
_MUP = {
    "attn_scale_power": 1.0, "base_head_dim": None, "base_hidden_size": None, "embedding_mult": 1.0, "output_mult": 1.0,
    "width_mult": 1.0,
}  # fmt: skip
_INDEXER = {
    "k_norm_epsilon": None, "k_norm_fp32": False, "rope_interleaved": False, "rotate_activation": True, "scoring_relu": True,
    "skip_topk_offset": 0, "topk_freq": 1,
}  # fmt: skip

ROWS: tuple[MeaningRow, ...] = (
    # sizes
    MeaningRow("num_layers", (None,)),
    MeaningRow("hidden_size", (None,)),
    MeaningRow("ffn_hidden_size", (None,)),
    MeaningRow("num_attention_heads", (None,)),
    MeaningRow("num_query_groups", (1, None), "group_query_attention"),
    MeaningRow("group_query_attention", (False,)),
    MeaningRow("kv_channels", (None,)),
    MeaningRow("vocab_size", (None,)),
    MeaningRow("untie_embeddings_and_output_weights", (False,)),
    MeaningRow("mtp_num_layers", (None, 0)),
    MeaningRow("max_position_embeddings", (None,)),
    # positions
    MeaningRow("add_position_embedding", (True,)),
    MeaningRow("position_embedding_type", ("learned_absolute",)),
    MeaningRow("use_rotary_position_embeddings", (False,)),
    MeaningRow("relative_attention_num_buckets", (32,)),
    MeaningRow("relative_attention_max_distance", (128,)),
    MeaningRow("rotary_base", (10000,)),
    MeaningRow("rotary_percent", (1.0,)),
    MeaningRow("rotary_interleaved", (False,)),
    MeaningRow("rotary_seq_len_interpolation_factor", (None, 1)),
    MeaningRow("use_rope_scaling", (False,)),
    MeaningRow("rope_scaling_factor", (8.0,), "use_rope_scaling"),
    MeaningRow("rope_type", (None,), _MLA),
    MeaningRow("rotary_scaling_factor", (1.0,)),
    MeaningRow("original_max_position_embeddings", (4096,), _MLA),
    MeaningRow("beta_fast", (32,), _MLA),
    MeaningRow("beta_slow", (1,), _MLA),
    MeaningRow("mscale", (1.0,)),
    MeaningRow("mscale_all_dim", (0.0,)),
    MeaningRow("yarn_rotary_scaling_factor", (None,)),
    MeaningRow("yarn_original_max_position_embeddings", (None,)),
    MeaningRow("yarn_beta_fast", (None,)),
    MeaningRow("yarn_beta_slow", (None,)),
    MeaningRow("yarn_mscale", (None,)),
    MeaningRow("yarn_mscale_all_dim", (None,)),
    MeaningRow("yarn_correction_range_round_to_int", (None, True)),
    MeaningRow("mrope_section", (None,)),
    MeaningRow("no_rope_freq", (None, 0)),
    # attention
    MeaningRow("softmax_scale", (None,)),
    MeaningRow("softmax_type", ("vanilla",)),
    MeaningRow("window_size", (None, (-1, 0), (-1, -1))),
    MeaningRow("window_attn_skip_freq", (None,), "window_size"),
    MeaningRow("qk_layernorm", (False,)),
    MeaningRow("qk_l2_norm", (False,)),
    MeaningRow("attention_output_gate", (False,)),
    MeaningRow("add_qkv_bias", (False,)),
    MeaningRow("multi_latent_attention", (False,)),
    MeaningRow("q_lora_rank", (None,), _MLA),
    MeaningRow("kv_lora_rank", (32,), _MLA),
    MeaningRow("qk_head_dim", (128,), _MLA),
    MeaningRow("qk_pos_emb_head_dim", (64,), _MLA),
    MeaningRow("v_head_dim", (128,), _MLA),
    MeaningRow("experimental_attention_variant", (None,)),
    MeaningRow("dsa_indexer_n_heads", (None,), "experimental_attention_variant"),
    MeaningRow("dsa_indexer_head_dim", (None,), "experimental_attention_variant"),
    MeaningRow("dsa_indexer_topk", (None,), "experimental_attention_variant"),
    MeaningRow("linear_attention_freq", (None,)),
    MeaningRow("linear_conv_kernel_dim", (4,), _DELTA),
    MeaningRow("linear_key_head_dim", (128,), _DELTA),
    MeaningRow("linear_value_head_dim", (128,), _DELTA),
    MeaningRow("linear_num_key_heads", (16,), _DELTA),
    MeaningRow("linear_num_value_heads", (32,), _DELTA),
    # norms and feed-forward
    MeaningRow("normalization", ("LayerNorm",)),
    MeaningRow("layernorm_epsilon", (1e-5,)),
    MeaningRow("layernorm_zero_centered_gamma", (False,)),
    MeaningRow("apply_residual_connection_post_layernorm", (False,)),
    MeaningRow("add_bias_linear", (True,)),
    MeaningRow("swiglu", (False,)),
    MeaningRow("gated_linear_unit", (False,)),
    MeaningRow("activation_func", (None,)),
    MeaningRow("squared_relu", (False,)),
    MeaningRow("openai_gelu", (False,)),
    MeaningRow("onnx_safe", (None, False)),
    MeaningRow("quick_geglu", (False,)),
    MeaningRow("geglu", (False,)),
    MeaningRow("glu_linear_offset", (0.0,)),
    MeaningRow("activation_func_clamp_value", (None,)),
    # mixtures of experts
    MeaningRow("num_experts", (None, 0)),
    MeaningRow("num_moe_experts", (None, 0)),
    MeaningRow("moe_layer_freq", (1,), _MOE),
    MeaningRow("moe_ffn_hidden_size", (None,), _MOE),
    MeaningRow("moe_shared_expert_intermediate_size", (None,), _MOE),
    MeaningRow("moe_shared_expert_gate", (False,), _MOE),
    MeaningRow("moe_router_topk", (2,), _MOE),
    MeaningRow("moe_router_topk_limited_devices", (None,), _MOE),
    MeaningRow("moe_router_num_groups", (None,), _MOE),
    MeaningRow("moe_router_group_topk", (None,), _MOE),
    MeaningRow("moe_router_pre_softmax", (False,), _MOE),
    MeaningRow("moe_router_topk_scaling_factor", (None, 0, 1.0), _MOE),
    MeaningRow("moe_router_score_function", ("softmax",), _MOE),
    MeaningRow("moe_router_enable_expert_bias", (False,), _MOE),
    # the other kinds add a loss and leave the choice as it is; sinkhorn chooses otherwise
    MeaningRow("moe_router_load_balancing_type", ("aux_loss", "seq_aux_loss", "global_aux_loss", "none"), _MOE),
    MeaningRow("moe_router_force_load_balancing", (False,), _MOE),
    MeaningRow("moe_expert_capacity_factor", (None,), _MOE),
    MeaningRow("moe_token_drop_policy", ("probs",), "moe_expert_capacity_factor"),
    MeaningRow("moe_token_dropping", (False,), _MOE),
    MeaningRow("moe_apply_probs_on_input", (False,), _MOE),
    MeaningRow("moe_latent_size", (None,), _MOE),
    # layers of other kinds
    MeaningRow("spec", (None,)),
    MeaningRow("is_hybrid_model", (False,)),
    MeaningRow("hybrid_attention_ratio", (0.0,)),
    MeaningRow("hybrid_mlp_ratio", (0.0,)),
    MeaningRow("hybrid_override_pattern", (None,)),
    MeaningRow("mamba_state_dim", (128,), _HYBRID),
    MeaningRow("mamba_head_dim", (64,), _HYBRID),
    MeaningRow("mamba_num_groups", (8,), _HYBRID),
    MeaningRow("mamba_num_heads", (None,), _HYBRID),
    MeaningRow("heterogeneous_block_specs", (False,)),
    MeaningRow("heterogeneous_layers_config_path", (None,)),
    MeaningRow("heterogeneous_layers_config_encoded_json", (None,)),
    # newer Megatron-LM
    MeaningRow("hybrid_layer_pattern", (None,)),
    MeaningRow("use_mup", (False,)),
    *(MeaningRow(f"mup_{name}", (usual, None), "use_mup") for name, usual in _MUP.items()),
    *(
        MeaningRow(f"dsa_indexer_{name}", (usual, None), "experimental_attention_variant")
        for name, usual in _INDEXER.items()
    ),
    MeaningRow("moe_expert_rank_capacity_factor", (None,), _MOE),
    MeaningRow("mtp_hybrid_override_pattern", (None,)),
    MeaningRow("mtp_use_repeated_layer", (False,)),
    MeaningRow("moe_mlp_glu_interleave_size", (None, 0), _MOE),
    MeaningRow("moe_shared_expert_glu_interleave_size", (None, 0), _MOE),
    MeaningRow("moe_router_force_biased", (None, False), _MOE),
)
"""In Megatron's own order of subjects."""

BY_NAME = {row.name: row for row in ROWS}

SPELLED = {
    "num_moe_experts": "num_experts", "gated_linear_unit": "swiglu", "norm_epsilon": "layernorm_epsilon",
    "apply_layernorm_1p": "layernorm_zero_centered_gamma",
}  # fmt: skip
"""Other names of arguments: fields of ``TransformerConfig``, and what Megatron-LM before 0.16 called them."""
_LENGTH, _TRAINED = "max_position_embeddings", "original_max_position_embeddings"
_ROTARY, _POSITIONS = "use_rotary_position_embeddings", "position_embedding_type"
_SAYS_NOTHING: tuple[tuple[str, object, Callable[[Values], bool]], ...] = (
    (_ROTARY, False, lambda args: True),
    ("add_position_embedding", True, lambda args: args.get(_POSITIONS) == "rope"),
    ("moe_router_pre_softmax", False, lambda args: args.get("moe_router_score_function", "softmax") != "softmax"),
)
"""An argument, its default, and beside which others Megatron does not look at it: the two old flags of rotary positions, which
``position_embedding_type`` says (of a model's layers nobody reads them), and the softmax of a router that has none.

Sources: megatron-core 0.16.1 and 0.19.2, ``training/arguments.py`` (``validate_args``: "Legacy RoPE arguments"),
``models/common/embeddings/language_model_embedding.py``, ``transformer/moe/moe_utils.py`` (``topk_routing_with_score_function``).
"""


def modern(args: Values) -> dict[str, object]:
    """Arguments under the names that Megatron-LM 0.16 has for them; what is there under both stays as it is.

    Before 0.14 latent attention's YaRN took ``max_position_embeddings`` for the length that the model was trained for. What
    ``_SAYS_NOTHING`` names says nothing beside another argument, and gets its default.

    Sources: Megatron-LM core_v0.8.0 to core_v0.15.0, ``megatron/training/arguments.py``
    (``core_transformer_config_from_args``); megatron-core 0.13.0 and 0.14.0, ``transformer/multi_latent_attention.py``.

    Args:
        args: Of a run of any version.
    """
    found = {new: args[old] for old, new in SPELLED.items() if old in args and new not in args}
    before_14 = "norm_epsilon" in args and "cache_mla_latents" not in args
    if args.get(_MLA) and before_14 and _TRAINED not in args and _LENGTH in args:
        found[_TRAINED] = args[_LENGTH]
    if args.get(_ROTARY):
        found[_POSITIONS] = "rope"
    said = {**args, **found}
    return said | {name: value for name, value, beside in _SAYS_NOTHING if name in said and beside(said)}


_TRAINING = """
accumulate_allreduce_grads_in_fp32 adam_beta1 adam_beta2 adam_eps apply_wd_to_qk_layernorm attention_dropout
batch_size bert_binary_head bert_embedder_type bert_load biencoder_projection_dim
biencoder_shared_query_context_model block_data_path calculate_per_token_loss classes_fraction clip_grad
create_attention_mask_in_dataloader data_args_path data_parallel_random_init data_path data_per_class_fraction
data_sharding dataloader_defer_npy_index_mmap dataloader_type ddp_average_in_collective
ddp_reduce_scatter_with_fp32_accumulation decoder_seq_length decoupled_lr decoupled_min_lr
decrease_batch_size_if_needed dino_bottleneck_size dino_freeze_last_layer dino_head_hidden_size
dino_local_crops_number dino_local_img_size dino_norm_last_layer dino_teacher_temp dino_warmup_teacher_temp
dino_warmup_teacher_temp_epochs dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss embedding_init_method
embedding_init_method_std embedding_path encoder_seq_length end_weight_decay eod_mask_loss eval_interval eval_iters
evidence_data_path fim_data fim_eod_token fim_fragment_rate fim_middle_token fim_no_prefix fim_pad_token
fim_prefix_token fim_rate fim_split_sample fim_spm_rate fim_suffix_token full_validation global_batch_size
grpo_clamp_eps_lower grpo_clamp_eps_upper grpo_entropy_term_weight grpo_filter_groups_with_same_reward
grpo_group_size grpo_iterations grpo_kl_beta grpo_prompts_per_step head_lr_mult hidden_dropout hysteresis
ict_head_size ict_load img_h img_w indexer_batch_size init_method init_method_std init_method_xavier_uniform
initial_loss_scale iter_per_epoch langrl_env_config langrl_external_server loss_scale loss_scale_window lr
lr_decay_iters lr_decay_samples lr_decay_style lr_warmup_fraction lr_warmup_init lr_warmup_iters lr_warmup_samples
lr_wsd_decay_iters lr_wsd_decay_samples lr_wsd_decay_style mask_factor mask_prob mask_type micro_batch_size
mid_level_dataset_surplus min_loss_scale min_lr mmap_bin_files mock_data moe_aux_loss_coeff moe_input_jitter_eps
moe_router_bias_update_rate moe_upcycling_granularity moe_use_upcycling moe_z_loss_coeff mtp_loss_scaling_factor
multiple_validation_sets muon_extra_scale_factor muon_fp32_matmul_prec muon_momentum muon_num_ns_steps
muon_scale_mode muon_split_qkv muon_tp_mode muon_use_nesterov no_weight_decay_cond_type num_channels num_classes
num_dataset_builder_threads num_workers optimizer output_bert_embeddings output_layer_init_method patch_dim
per_dataset_sequences_path per_split_data_args_path perform_initialization perform_rl_step
phase_transition_iterations pin_cpu_grads pin_cpu_params qk_clip qk_clip_alpha qk_clip_threshold query_in_block_prob
rampup_batch_size refit_method reset_attention_mask reset_position_ids retriever_report_topk_accuracies
retriever_score_scaling rl_default_temperature rl_default_top_k rl_default_top_p
rl_importance_sampling_truncation_coef rl_parallel_generation_tasks rl_partial_rollouts rl_prompts_per_eval
rl_sequence_packing_algo rl_sequence_packing_max_sequences_per_bin rl_skip_bos_token rl_use_sequence_packing
rl_verify_model_weights_swap sample_rate seed seq_length sft sft_tokenizer_prompt_format sgd_momentum short_seq_prob
skip_train split start_weight_decay swin_backbone_type test_data_path titles_data_path tp_only_amax_red
train_data_path train_iters train_samples train_sync_interval use_legacy_static_engine use_one_sent_docs
valid_data_path variable_seq_lengths vision_backbone_type vision_pretraining vision_pretraining_type warmup
weight_decay weight_decay_incr_style

_is_global_batch_size_explicitly_specified dataloader_inter_document_masking
ddp_param_name_patterns_for_fp32_local_accumulation eval_global_batch_size eval_micro_batch_size freeze_all_layers
lion_beta1 lion_beta2 logits_load_decode_threads logits_load_dir logits_load_ignore_errors logits_load_kd_loss_alpha
logits_load_msc_prefetch_depth logits_load_prefetch_factor moe_paged_stash moe_paged_stash_buffer_size_factor_cpu
moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_page_size mtp_detach_heads muon_coefficient_type
muon_nesterov muon_scalar_optimizer num_speculative_tokens offset_sampling_seed_by_dp_rank
moe_router_quantile_balancing_ema rl_consumption_granularity rl_generation_lag rl_submission_granularity start_eval_at_iter
step_batch_size_schedule
"""

_EXECUTION = """
_cpu_offloading_context activation_func_fp8_input_store align_grad_reduce align_param_gather
apply_query_key_layer_scaling apply_rope_fusion attention_backend attention_softmax_in_fp32 autocast_dtype
batch_invariant_mode batch_p2p_comm batch_p2p_sync bf16 bias_activation_fusion bias_dropout_fusion bias_gelu_fusion
bias_swiglu_fusion cache_mla_latents checkpoint_activations clone_scatter_output_in_embedding cp_comm_type
cpu_offloading cpu_offloading_activations cpu_offloading_double_buffering cpu_offloading_num_layers
cpu_offloading_weights create_all_gather_group cross_entropy_fusion_impl cross_entropy_loss_fusion cuda_graph_impl
cuda_graph_retain_backward_graph cuda_graph_scope cuda_graph_use_single_mempool cuda_graph_warmup_steps
dataloader_fast_cache_load decode_only_cuda_graphs defer_embedding_wgrad_compute delay_wgrad_compute
deterministic_mode disable_bf16_reduced_precision_matmul disable_chunked_prefill disable_jit_fuser
disable_parameter_transpose_cache disable_symmetric_registration distribute_saved_activations distributed_backend
distributed_timeout_minutes distributed_timeout_seconds_after_init empty_unused_memory_level enable_autocast
enable_cuda_graph enable_gloo_process_groups ep_overlap_early_attn_memory_release exp_avg_dtype exp_avg_sq_dtype
external_cuda_graph fake_process_group finalize_model_grads_func fine_grained_activation_offloading
first_last_layers_bf16 flash_decode fp16 fp16_lm_cross_entropy fp32_residual_connection fp4 fp4_param
fp4_quantizer_factory fp4_recipe fp8 fp8_amax_compute_algo fp8_amax_history_len fp8_dot_product_attention
fp8_interval fp8_margin fp8_multi_head_attention fp8_param fp8_param_gather fp8_quantizer_factory fp8_recipe
fp8_wgrad fused_single_qkv_rope grad_reduce_in_bf16 grad_scale_func grad_sync_func gradient_accumulation_fusion
gradient_reduce_div_fusion high_priority_stream_groups hybrid_context_parallel
inference_batch_times_seqlen_threshold inference_coordinator_port inference_dynamic_batching
inference_dynamic_batching_block_size inference_dynamic_batching_buffer_size_gb
inference_dynamic_batching_cuda_graph_max_tokens inference_dynamic_batching_cuda_graph_mixed_prefill_count
inference_dynamic_batching_max_requests inference_dynamic_batching_max_tokens
inference_dynamic_batching_num_cuda_graphs inference_dynamic_batching_paused_buffer_size_gb
inference_dynamic_batching_track_paused_request_events inference_dynamic_batching_unified_memory_level
inference_fuse_tp_communication inference_max_batch_size inference_max_seq_length inference_rng_tracker
inference_sampling_seed init_model_with_meta_device keep_fp8_transpose_cache kitchen_attention_backend lazy_mpu_init
main_grads_dtype main_params_dtype manual_gc manual_gc_eval manual_gc_interval masked_softmax_fusion
max_seqlen_per_dp_cp_rank memory_efficient_layer_norm microbatch_group_size_per_vp_stage min_offloaded_tensor_size
mlp_chunks_for_prefill moe_deepep_num_sms moe_enable_deepep moe_enable_routing_replay moe_flex_dispatcher_backend
moe_hybridep_num_sms moe_layer_recompute moe_pad_expert_input_to_capacity moe_pad_experts_for_cuda_graph_inference
moe_permute_fusion moe_router_dtype moe_router_fusion moe_router_padding_for_fp8 moe_router_padding_for_quantization
moe_shared_expert_overlap moe_token_dispatcher_type nccl_all_reduce_for_prefill nccl_communicator_config_path
nccl_ub no_persist_layer_norm no_sync_func num_layers_at_end_in_bf16 num_layers_at_start_in_bf16
num_microbatches_with_partial_activation_checkpoints offload_modules optimizer_cpu_offload
optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d overlap_grad_reduce overlap_moe_expert_parallel_comm
overlap_p2p_comm overlap_p2p_comm_warmup_flush overlap_param_gather overlap_param_gather_with_optimizer_step
param_sync_func params_dtype persist_layer_norm quant_recipe recompute_activations recompute_granularity
recompute_method recompute_modules recompute_num_layers reuse_grad_buf_for_mxfp8_param_ag
rl_inference_logprobs_is_correction rl_inference_model_unified_memory_level
rl_offload_inference_model_weights_when_idle rl_offload_kv_cache_during_training
rl_offload_optimizer_during_inference rl_remove_kv_cache_during_training rl_reset_cuda_graphs
rl_training_cuda_graphs sharp_enabled_group symmetric_ar_type te_precision_config_file te_rng_tracker
tp_comm_atomic_ag tp_comm_atomic_rs tp_comm_bootstrap_backend tp_comm_bulk_dgrad tp_comm_bulk_wgrad tp_comm_overlap
tp_comm_overlap_ag tp_comm_overlap_cfg tp_comm_overlap_disable_fc1 tp_comm_overlap_disable_qkv tp_comm_overlap_rs
tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_split_rs use_cpu_initialization use_flash_attn
use_fused_weighted_squared_relu use_inference_optimized_layers use_kitchen use_kitchen_attention
use_mamba_mem_eff_path use_precision_aware_optimizer use_ring_exchange_p2p use_sharp use_te_activation_func
use_te_rng_tracker use_torch_optimizer_for_cpu_offload wgrad_deferral_limit

activation_offload_fraction cpu_offloading_retain_pinned_cpu_buffers cuda_graph_modules cuda_graph_scope_deprecated
experimental_attention_variant_loss_scale_func moe_grad_scale_func mtp_grad_scale_func
delay_offload_until_cuda_graph delta_offload_bytes_across_pp_ranks dsa_kernel_backend enable_chunked_prefill
fine_grained_offloading_max_inflight_offloads flash_attention_version fp4_param_gather fp8_output_proj
fused_residual_rmsnorm high_priority_a2a_comm_stream inference_cuda_graph_all_prefills
inference_cuda_graph_max_tokens inference_cuda_graph_scope inference_disable_ep_consensus
inference_disable_triton_nvls_kernels inference_dynamic_batching_async_sched_mode
inference_dynamic_batching_cuda_graph_sizing_distribution inference_dynamic_batching_enable_prefix_caching
inference_dynamic_batching_logprobs_mode inference_dynamic_batching_mamba_memory_ratio
inference_dynamic_batching_prefix_caching_coordinator_policy
inference_dynamic_batching_prefix_caching_eviction_policy inference_dynamic_batching_prefix_caching_mamba_gb
inference_dynamic_batching_prefix_caching_routing_alpha inference_dynamic_batching_sampling_backend
inference_dynamic_batching_track_generated_token_events inference_grouped_gemm_backend inference_max_requests
inference_moe_disable_fused_quant_kernels inference_moe_token_dispatcher_type inference_shards
inference_use_synchronous_zmq_collectives mamba_inference_conv_states_dtype mamba_inference_ssm_states_dtype
mamba_training_ssm_states_dtype mlp_chunks_for_training moe_flex_dispatcher_num_sms moe_hybridep_num_blocks_permute
moe_hybridep_num_blocks_unpermute moe_hybridep_num_sms_preprocessing moe_hybridep_pad_uneven_dispatch_inputs
moe_ncclep_static_shape moe_ncclep_zero_copy moe_permute_fusion_into_hybridep
optimizer_cuda_graph overlap_dispatch_backward_with_experts_wgrad rl_inference_parsers rl_kv_cache_management_mode
rl_persist_cuda_graphs stream_ckpt_dequant use_gloo_process_groups use_grouped_gemm_for_dense_mlp
use_grouped_gemm_for_shared_expert use_transformer_engine_op_fuser
"""

_LAYOUT = """
account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split async_tensor_model_parallel_allreduce
context_parallel_size data_parallel_sharding_strategy data_parallel_size ddp_bucket_size ddp_num_buckets
ddp_pad_buckets_for_high_nccl_busbw deallocate_pipeline_outputs decoder_first_pipeline_num_layers
decoder_last_pipeline_num_layers decoder_num_layers enable_full_sharding_in_hsdp encoder_num_layers
expert_model_parallel_size expert_tensor_parallel_size fsdp_double_buffer fsdp_manual_registration
hetereogenous_dist_checkpoint hierarchical_context_parallel_sizes make_vocab_size_divisible_by model_parallel_size
moe_extended_tp moe_grouped_gemm moe_use_legacy_grouped_gemm mtp_standalone num_distributed_optimizer_instances
num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage num_layers_per_virtual_pipeline_stage
num_virtual_stages_per_pipeline_rank outer_dp_sharding_strategy padded_vocab_size pipeline_dtype
pipeline_model_parallel_comm_backend pipeline_model_parallel_layout pipeline_model_parallel_size
rl_inference_expert_model_parallel_size rl_inference_expert_tensor_model_parallel_size
rl_inference_pipeline_model_parallel_size rl_inference_tensor_model_parallel_size scatter_gather_tensors_in_pipeline
sequence_parallel tensor_model_parallel_size torch_fsdp2_reshard_after_forward transformer_impl
transformer_pipeline_model_parallel_size use_distributed_optimizer use_megatron_fsdp use_torch_fsdp2
use_tp_pp_dp_mapping virtual_pipeline_model_parallel_size world_size

expert_gtp_weight_remat_size expert_tensor_parallel_num_weight_shards fsdp_db_use_persist_buf_on_alloc_fail
gtp_weight_remat_size megatron_fsdp_enable_fine_grained_param_gather megatron_fsdp_grad_comm_dtype
megatron_fsdp_main_grads_dtype megatron_fsdp_main_params_dtype megatron_fsdp_max_pool_double_buffer
mcore_rlhf_laid_out mla_down_proj_fusion moe_single_grouped_bias moe_single_grouped_weight pad_vocab_size
tensor_parallel_num_weight_shards use_layer_wise_distributed_optimizer use_layer_wise_param_layout
"""

_BOOKKEEPING = """
adlr_autoresume adlr_autoresume_interval allow_ambiguous_pad_tokens app_tag_run_name app_tag_run_version async_save
auto_detect_ckpt_format barrier_with_L1_time calc_ft_timeouts check_for_large_grads check_for_nan_in_loss_and_grad
check_for_spiky_loss check_weight_hash_across_dp_replicas_interval ckpt_assume_constant_structure
ckpt_convert_format ckpt_convert_save ckpt_convert_update_legacy_dist_opt_format ckpt_format
ckpt_fully_parallel_load ckpt_fully_parallel_save ckpt_fully_parallel_save_deprecated ckpt_step config_logger_dir
consumed_train_samples consumed_valid_samples data_cache_path deprecated_use_mcore_models
disable_straggler_on_startup dist_ckpt_format_deprecated dist_ckpt_optim_fully_reshardable
dist_ckpt_save_pre_mcore_014 dist_ckpt_strictness distrib_optim_fully_reshardable_mem_efficient
dump_param_to_param_group_map enable_experimental enable_ft_package enable_msc enable_one_logger
error_injection_rate error_injection_type exit_duration_in_mins exit_interval exit_on_missing_checkpoint exit_signal
exit_signal_handler exit_signal_handler_for_dataloader finetune ft_num_warmup_iters indexer_log_interval
inference_logging_step_interval inference_wandb_logging inprocess_active_world_size inprocess_barrier_timeout
inprocess_completion_timeout inprocess_empty_cuda_cache inprocess_granularity inprocess_hard_timeout
inprocess_heartbeat_interval inprocess_heartbeat_timeout inprocess_last_call_wait inprocess_max_iterations
inprocess_monitor_process_interval inprocess_monitor_thread_interval inprocess_progress_watchdog_interval
inprocess_restart inprocess_soft_timeout inprocess_termination_grace_time iteration iterations_to_skip
langrl_inference_server_conversation_template langrl_inference_server_type legacy_tokenizer load
load_main_params_from_ckpt local_rank log_device_memory_used log_energy log_interval log_loss_scale_to_tensorboard
log_max_attention_logit log_memory_interval log_memory_to_tensorboard log_num_zeros_in_grad log_params_norm
log_progress log_straggler log_throughput log_timers_to_tensorboard log_validation_ppl_to_tensorboard
log_world_size_to_tensorboard logging_level max_tokens_to_oom memory_snapshot_path merge_file model_type
moe_per_layer_logging no_load_optim no_load_rng no_save_optim no_save_rng non_persistent_ckpt_type
non_persistent_global_ckpt_dir non_persistent_local_ckpt_algo non_persistent_local_ckpt_dir
non_persistent_save_interval num_floating_point_operations_so_far object_storage_cache_path one_logger_async
one_logger_project one_logger_run_name override_opt_param_scheduler pretrained_checkpoint profile profile_ranks
profile_step_end profile_step_start rank record_memory_history replication replication_factor replication_jump
rerun_mode result_rejected_tracker_filename run_workload_inspector_server save save_dgrads_interval save_interval
save_retain_interval save_wgrads_interval skipped_train_samples straggler_ctrlr_port straggler_minmax_count
strict_fsdp_dtensor_load suggested_communication_unit_size tensorboard_dir tensorboard_log_interval
tensorboard_queue_size test_mode tiktoken_num_special_tokens tiktoken_pattern tiktoken_special_tokens timers
timing_log_level timing_log_option tokenizer_hf_include_special_tokens tokenizer_hf_use_fast tokenizer_metadata
tokenizer_model tokenizer_sentencepiece_legacy tokenizer_special_tokens tokenizer_type trust_remote_code
use_checkpoint_args use_checkpoint_opt_param_scheduler use_dist_ckpt use_dist_ckpt_deprecated use_legacy_models
use_mp_args_from_checkpoint_args use_persistent_ckpt_worker use_pytorch_profiler
use_tokenizer_model_from_checkpoint_args vocab_extra_ids vocab_file wandb_entity wandb_exp_name wandb_project
wandb_save_dir yaml_cfg

async_ckpt_cpu_priority async_ckpt_io_priority async_ckpt_use_cpu_shm async_strategy chat_template
ckpt_fully_parallel_load_exchange_algo ckpt_fully_parallel_load_process_group ckpt_fully_parallel_save_process_group
ckpt_load_validate_sharding_integrity disable_msc_deprecated dist_ckpt_workers exit_signal_handler_for_training
fault_injector_delay_start_iteration fault_injector_fault_delay fault_injector_fault_probabilities
fault_injector_fault_types fault_injector_mtti_seconds fault_injector_num_ranks fault_injector_offset_seconds
fault_injector_ranks fault_injector_seed flight_recorder_dump_on_timeout flight_recorder_dump_path
flight_recorder_extra_dump_on_exec flight_recorder_include_only_active flight_recorder_include_stack_trace
flight_recorder_trace_buffer_size gpu_sniff_test_interval inference_text_gen_server_logging logits_save_dir
logits_save_dtype logits_save_top_k logits_save_top_p logits_save_top_p_min_k metadata_path
moe_routing_trace_capture_hidden_states moe_routing_trace_capture_logits moe_routing_trace_dump_weights
moe_routing_trace_max_training_iters moe_routing_trace_path null_tokenizer_eod_id null_tokenizer_pad_id nvtx_ranges
override_ckpt_iteration pytorch_profiler_collect_callstack pytorch_profiler_collect_chakra
pytorch_profiler_collect_shapes record_shapes rl_profile rl_profile_dir save_activations_interval
save_params_interval save_tokens_per_expert_interval special_tokens tokenizer_hf_no_include_special_tokens
tokenizer_hf_no_use_fast tokenizer_sentencepiece_ignore_extra_whitespaces validation_set_names verify_integrity
"""

OTHER_ARGUMENTS = by_name(
    {About.TRAINING: _TRAINING, About.EXECUTION: _EXECUTION, About.LAYOUT: _LAYOUT, About.BOOKKEEPING: _BOOKKEEPING}
)
"""By name of an argument, or of a field of ``TransformerConfig``: its kind."""
