"""Megatron-LM's ``args`` as far as a checkpoint's reader looks at them.

Names and meanings are those of Megatron-LM core_v0.16.1 (``megatron/training/arguments.py``), which stores its whole
command line, 662 values; these are the ones that describe the model, the layout, the optimizer and the progress.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import mcore_rlhf.demo.with_megatron  # noqa: F401

# isort: split
import torch
import torch.distributed as dist
from megatron.core.enums import ModelType
from megatron.core.transformer.enums import AttnBackend

from mcore_rlhf.demo.configs import GPT_OSS, Parallel, TinyGPT, Training
from mcore_rlhf.demo.model import DTYPES, virtual_stages
from mcore_rlhf.demo.versions import MEGATRON


def build(
    model: TinyGPT, parallel: Parallel, training: Training, iteration: int, consumed_train_samples: int
) -> Namespace:
    """The ``args`` that Megatron-LM would have for a run.

    Args:
        model: The model.
        parallel: The layout.
        training: How it is trained.
        iteration: Steps done when the run started: Megatron-LM does not count on in ``args``.
        consumed_train_samples: Samples consumed.
    """
    return Namespace(
        **_model(model, parallel),
        **_experts(model),
        **_latent(model),
        **_vocabulary(model, parallel),
        **_parallel(model, parallel),
        **_optimizer(model, training),
        **_buckets(model, training),
        **_schedule(training),
        **_checkpoint(training),
        iteration=iteration,
        consumed_train_samples=consumed_train_samples,
        consumed_valid_samples=0,
        skipped_train_samples=0,
    )


def _model(model: TinyGPT, parallel: Parallel) -> dict[str, Any]:
    return dict(
        model_type=ModelType.encoder_or_decoder,
        transformer_impl="local",
        attention_softmax_in_fp32=False,
        spec=None,
        use_legacy_models=False,
        attention_backend=AttnBackend.auto,
        num_layers=model.num_layers,
        encoder_num_layers=model.num_layers,
        decoder_num_layers=None,
        decoder_first_pipeline_num_layers=parallel.first_stage_layers,
        decoder_last_pipeline_num_layers=parallel.last_stage_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        group_query_attention=model.num_query_groups is not None,
        num_query_groups=model.num_query_groups or model.num_attention_heads,
        kv_channels=model.kv_channels,
        swiglu=model.gated and not model.gpt_oss,
        squared_relu=False,
        quick_geglu=model.gpt_oss,
        **(GPT_OSS if model.gpt_oss else {}),
        openai_gelu=False,
        onnx_safe=None,
        normalization=model.normalization,
        layernorm_epsilon=1e-5,
        layernorm_zero_centered_gamma=False,
        no_persist_layer_norm=True,
        add_bias_linear=model.add_bias_linear,
        add_qkv_bias=model.add_qkv_bias or model.add_bias_linear,
        qk_layernorm=model.qk_layernorm,
        qk_l2_norm=False,
        attention_output_gate=False,
        untie_embeddings_and_output_weights=model.untie_embeddings_and_output_weights,
        add_position_embedding=True,
        position_embedding_type=model.position_embedding_type,
        max_position_embeddings=model.seq_length,
        rotary_base=10000,
        rotary_percent=1.0,
        rotary_interleaved=False,
        rotary_scaling_factor=1.0,
        rotary_seq_len_interpolation_factor=None,
        use_rope_scaling=False,
        rope_scaling_factor=8.0,
        use_rotary_position_embeddings=False,
        seq_length=model.seq_length,
        encoder_seq_length=model.seq_length,
        mtp_num_layers=model.mtp_num_layers,
        **({"hybrid_layer_pattern": None} if MEGATRON >= (0, 17) else {}),
        **({"mamba_training_ssm_states_dtype": None} if MEGATRON >= (0, 19) else {}),
        hidden_dropout=model.dropout,
        attention_dropout=model.dropout,
        is_hybrid_model=False,
        hybrid_override_pattern=None,
        heterogeneous_layers_config_path=None,
        experimental_attention_variant=None,
        params_dtype=DTYPES[model.dtype],
        bf16=model.dtype == "bf16",
        fp16=model.dtype == "fp16",
        fp8=None,
        fp4=None,
    )


def _experts(model: TinyGPT) -> dict[str, Any]:
    frequency, moe = model.moe_layer_freq, model.num_experts is not None
    biased = model.moe_router_enable_expert_bias
    return dict(
        num_experts=model.num_experts,
        moe_layer_freq=frequency if isinstance(frequency, int) else list(frequency),
        moe_ffn_hidden_size=model.moe_ffn_hidden_size if moe else None,
        moe_shared_expert_intermediate_size=model.moe_shared_expert_intermediate_size,
        moe_shared_expert_overlap=False,
        moe_shared_expert_gate=False,
        moe_grouped_gemm=model.moe_grouped_gemm,
        moe_use_legacy_grouped_gemm=model.moe_grouped_gemm,
        moe_router_topk=model.moe_router_topk,
        moe_router_pre_softmax=model.moe_router_pre_softmax,
        moe_router_enable_expert_bias=biased,
        moe_router_score_function="sigmoid" if biased else "softmax",
        moe_router_load_balancing_type="none" if biased else "aux_loss",
        moe_aux_loss_coeff=1e-2 if moe and not biased else 0.0,
        moe_token_dispatcher_type="alltoall" if moe else "allgather",
        moe_latent_size=None,
    )


def _latent(model: TinyGPT) -> dict[str, Any]:
    return dict(
        multi_latent_attention=model.multi_latent_attention,
        q_lora_rank=model.q_lora_rank,
        kv_lora_rank=model.kv_lora_rank,
        qk_head_dim=model.kv_channels if model.multi_latent_attention else 128,
        qk_pos_emb_head_dim=model.kv_channels // 2 if model.multi_latent_attention else 64,
        v_head_dim=model.kv_channels if model.multi_latent_attention else 128,
    )


def _vocabulary(model: TinyGPT, parallel: Parallel) -> dict[str, Any]:
    return dict(
        tokenizer_type="NullTokenizer",
        tokenizer_model=None,
        vocab_file=None,
        merge_file=None,
        vocab_size=model.vocab_size - 1,  # the null tokenizer adds one, for the end of a document
        vocab_extra_ids=0,
        make_vocab_size_divisible_by=model.make_vocab_size_divisible_by,
        padded_vocab_size=model.padded_vocab_size(parallel.tp),
    )


def _parallel(model: TinyGPT, parallel: Parallel) -> dict[str, Any]:
    stages = virtual_stages(parallel)
    return dict(
        rank=dist.get_rank(),
        local_rank=dist.get_rank(),
        world_size=parallel.world_size,
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        transformer_pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=stages,
        num_layers_per_virtual_pipeline_stage=_layers_per_virtual_stage(model, parallel),
        num_virtual_stages_per_pipeline_rank=None,
        pipeline_model_parallel_layout=parallel.pipeline_layout,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
        context_parallel_size=parallel.cp,
        hierarchical_context_parallel_sizes=None,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp or parallel.tp,
        data_parallel_size=parallel.dp,
        num_distributed_optimizer_instances=1,
        use_tp_pp_dp_mapping=False,
        sequence_parallel=parallel.sequence_parallel,
        distributed_backend="gloo",
        overlap_p2p_comm=stages is not None,
    )


def _layers_per_virtual_stage(model: TinyGPT, parallel: Parallel) -> int | None:
    if parallel.vpp is None or parallel.pipeline_layout is not None:
        return None
    return model.num_layers // (parallel.pp * parallel.vpp)


def _optimizer(model: TinyGPT, training: Training) -> dict[str, Any]:
    return dict(
        optimizer="adam",
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_eps=1e-8,
        use_distributed_optimizer=training.optimizer == "distributed",
        use_precision_aware_optimizer=False,
        optimizer_cpu_offload=False,
        use_torch_fsdp2=False,
        use_megatron_fsdp=False,
        main_grads_dtype=torch.float32,
        main_params_dtype=torch.float32,
        exp_avg_dtype=torch.float32,
        exp_avg_sq_dtype=torch.float32,
        apply_wd_to_qk_layernorm=False,
        clip_grad=training.clip_grad,
        loss_scale=None,
        initial_loss_scale=training.initial_loss_scale,
        min_loss_scale=1.0,
        loss_scale_window=1000,
        hysteresis=2,
        check_for_nan_in_loss_and_grad=model.dtype != "fp16",
    )


def _buckets(model: TinyGPT, training: Training) -> dict[str, Any]:
    return dict(
        accumulate_allreduce_grads_in_fp32=training.grads_in_fp32(model.dtype),
        grad_reduce_in_bf16=model.dtype == "bf16" and not training.grads_in_fp32(model.dtype),
        overlap_grad_reduce=training.overlap_grad_reduce,
        overlap_param_gather=False,
        overlap_param_gather_with_optimizer_step=False,
        ddp_bucket_size=training.ddp_bucket_size,
        ddp_num_buckets=None,
        ddp_pad_buckets_for_high_nccl_busbw=training.ddp_pad_buckets_for_high_nccl_busbw,
        ddp_average_in_collective=False,
    )


def _schedule(training: Training) -> dict[str, Any]:
    return dict(
        seed=training.seed,
        data_parallel_random_init=False,
        micro_batch_size=training.micro_batch_size,
        global_batch_size=training.global_batch_size,
        rampup_batch_size=None,
        train_iters=training.train_iters,
        train_samples=None,
        lr=training.lr,
        min_lr=training.min_lr,
        decoupled_lr=training.decoupled_lr,
        decoupled_min_lr=None,
        lr_decay_style="cosine",
        lr_decay_iters=training.train_iters,
        lr_decay_samples=None,
        lr_warmup_fraction=None,
        lr_warmup_init=0.0,
        lr_warmup_iters=training.lr_warmup_iters,
        lr_warmup_samples=0,
        weight_decay=training.weight_decay,
        start_weight_decay=training.weight_decay,
        end_weight_decay=training.weight_decay,
        weight_decay_incr_style="constant",
        phase_transition_iterations=None,
    )


def _checkpoint(training: Training) -> dict[str, Any]:
    return dict(
        ckpt_format="torch",
        use_dist_ckpt=False,
        finetune=False,
        no_save_optim=True if training.optimizer == "none" else None,
        no_save_rng=None,
        no_load_optim=None,
        no_load_rng=None,
        save=None,
        load=None,
    )
