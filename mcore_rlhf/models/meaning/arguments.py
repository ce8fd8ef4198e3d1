"""Megatron's arguments that change what a trained model computes.

Those that an architecture of Hugging Face can express are related to fields of its ``config.json`` in the tables of
:mod:`mcore_rlhf.models.huggingface`. All that are not must be neutral, or the conversion is refused.

Sources: megatron-core 0.16.1, ``transformer/{transformer_config,attention,dot_product_attention,mlp,utils}.py``,
``transformer/moe/{router,moe_utils,experts}.py``; Megatron-LM core_v0.16.1, ``megatron/training/arguments.py``; the last
section: Megatron-LM core_v0.19.0, the same files. ``geglu`` is no argument of it: a live engine says so of a model.
"""

from __future__ import annotations

from .kinds import Row, Values

_MOE, _MLA, _HYBRID, _DELTA = "num_experts", "multi_latent_attention", "is_hybrid_model", "linear_attention_freq"
_MUP = {
    "attn_scale_power": 1.0, "base_head_dim": None, "base_hidden_size": None, "embedding_mult": 1.0, "output_mult": 1.0,
    "width_mult": 1.0,
}  # fmt: skip
_INDEXER = {
    "k_norm_epsilon": None, "k_norm_fp32": False, "rope_interleaved": False, "rotate_activation": True, "scoring_relu": True,
    "skip_topk_offset": 0, "topk_freq": 1,
}  # fmt: skip

ROWS: tuple[Row, ...] = (
    # sizes
    Row("num_layers", (None,)),
    Row("hidden_size", (None,)),
    Row("ffn_hidden_size", (None,)),
    Row("num_attention_heads", (None,)),
    Row("num_query_groups", (1, None), "group_query_attention"),
    Row("group_query_attention", (False,)),
    Row("kv_channels", (None,)),
    Row("vocab_size", (None,)),
    Row("untie_embeddings_and_output_weights", (False,)),
    Row("mtp_num_layers", (None, 0)),
    Row("max_position_embeddings", (None,)),
    # positions
    Row("add_position_embedding", (True,)),
    Row("position_embedding_type", ("learned_absolute",)),
    Row("use_rotary_position_embeddings", (False,)),
    Row("relative_attention_num_buckets", (32,)),
    Row("relative_attention_max_distance", (128,)),
    Row("rotary_base", (10000,)),
    Row("rotary_percent", (1.0,)),
    Row("rotary_interleaved", (False,)),
    Row("rotary_seq_len_interpolation_factor", (None, 1)),
    Row("use_rope_scaling", (False,)),
    Row("rope_scaling_factor", (8.0,), "use_rope_scaling"),
    Row("rope_type", (None,), _MLA),
    Row("rotary_scaling_factor", (1.0,)),
    Row("original_max_position_embeddings", (4096,), _MLA),
    Row("beta_fast", (32,), _MLA),
    Row("beta_slow", (1,), _MLA),
    Row("mscale", (1.0,)),
    Row("mscale_all_dim", (0.0,)),
    Row("yarn_rotary_scaling_factor", (None,)),
    Row("yarn_original_max_position_embeddings", (None,)),
    Row("yarn_beta_fast", (None,)),
    Row("yarn_beta_slow", (None,)),
    Row("yarn_mscale", (None,)),
    Row("yarn_mscale_all_dim", (None,)),
    Row("yarn_correction_range_round_to_int", (None, True)),
    Row("mrope_section", (None,)),
    Row("no_rope_freq", (None, 0)),
    # attention
    Row("softmax_scale", (None,)),
    Row("softmax_type", ("vanilla",)),
    Row("window_size", (None, (-1, 0), (-1, -1))),
    Row("window_attn_skip_freq", (None,), "window_size"),
    Row("qk_layernorm", (False,)),
    Row("qk_l2_norm", (False,)),
    Row("attention_output_gate", (False,)),
    Row("add_qkv_bias", (False,)),
    Row("multi_latent_attention", (False,)),
    Row("q_lora_rank", (None,), _MLA),
    Row("kv_lora_rank", (32,), _MLA),
    Row("qk_head_dim", (128,), _MLA),
    Row("qk_pos_emb_head_dim", (64,), _MLA),
    Row("v_head_dim", (128,), _MLA),
    Row("experimental_attention_variant", (None,)),
    Row("dsa_indexer_n_heads", (None,), "experimental_attention_variant"),
    Row("dsa_indexer_head_dim", (None,), "experimental_attention_variant"),
    Row("dsa_indexer_topk", (None,), "experimental_attention_variant"),
    Row("linear_attention_freq", (None,)),
    Row("linear_conv_kernel_dim", (4,), _DELTA),
    Row("linear_key_head_dim", (128,), _DELTA),
    Row("linear_value_head_dim", (128,), _DELTA),
    Row("linear_num_key_heads", (16,), _DELTA),
    Row("linear_num_value_heads", (32,), _DELTA),
    # norms and feed-forward
    Row("normalization", ("LayerNorm",)),
    Row("layernorm_epsilon", (1e-5,)),
    Row("layernorm_zero_centered_gamma", (False,)),
    Row("apply_residual_connection_post_layernorm", (False,)),
    Row("add_bias_linear", (True,)),
    Row("swiglu", (False,)),
    Row("gated_linear_unit", (False,)),
    Row("activation_func", (None,)),
    Row("squared_relu", (False,)),
    Row("openai_gelu", (False,)),
    Row("onnx_safe", (None, False)),
    Row("quick_geglu", (False,)),
    Row("geglu", (False,)),
    Row("glu_linear_offset", (0.0,)),
    Row("activation_func_clamp_value", (None,)),
    # mixtures of experts
    Row("num_experts", (None, 0)),
    Row("num_moe_experts", (None, 0)),
    Row("moe_layer_freq", (1,), _MOE),
    Row("moe_ffn_hidden_size", (None,), _MOE),
    Row("moe_shared_expert_intermediate_size", (None,), _MOE),
    Row("moe_shared_expert_gate", (False,), _MOE),
    Row("moe_router_topk", (2,), _MOE),
    Row("moe_router_topk_limited_devices", (None,), _MOE),
    Row("moe_router_num_groups", (None,), _MOE),
    Row("moe_router_group_topk", (None,), _MOE),
    Row("moe_router_pre_softmax", (False,), _MOE),
    Row("moe_router_topk_scaling_factor", (None, 0, 1.0), _MOE),
    Row("moe_router_score_function", ("softmax",), _MOE),
    Row("moe_router_enable_expert_bias", (False,), _MOE),
    # the other kinds add a loss and leave the choice as it is; sinkhorn chooses otherwise
    Row("moe_router_load_balancing_type", ("aux_loss", "seq_aux_loss", "global_aux_loss", "none"), _MOE),
    Row("moe_router_force_load_balancing", (False,), _MOE),
    Row("moe_expert_capacity_factor", (None,), _MOE),
    Row("moe_token_drop_policy", ("probs",), "moe_expert_capacity_factor"),
    Row("moe_token_dropping", (False,), _MOE),
    Row("moe_apply_probs_on_input", (False,), _MOE),
    Row("moe_latent_size", (None,), _MOE),
    # layers of other kinds
    Row("spec", (None,)),
    Row("is_hybrid_model", (False,)),
    Row("hybrid_attention_ratio", (0.0,)),
    Row("hybrid_mlp_ratio", (0.0,)),
    Row("hybrid_override_pattern", (None,)),
    Row("mamba_state_dim", (128,), _HYBRID),
    Row("mamba_head_dim", (64,), _HYBRID),
    Row("mamba_num_groups", (8,), _HYBRID),
    Row("mamba_num_heads", (None,), _HYBRID),
    Row("heterogeneous_block_specs", (False,)),
    Row("heterogeneous_layers_config_path", (None,)),
    Row("heterogeneous_layers_config_encoded_json", (None,)),
    # newer Megatron-LM
    Row("hybrid_layer_pattern", (None,)),
    Row("use_mup", (False,)),
    *(Row(f"mup_{name}", (usual, None), "use_mup") for name, usual in _MUP.items()),
    *(Row(f"dsa_indexer_{name}", (usual, None), "experimental_attention_variant") for name, usual in _INDEXER.items()),
    Row("moe_expert_rank_capacity_factor", (None,), _MOE),
    Row("mtp_hybrid_override_pattern", (None,)),
    Row("mtp_use_repeated_layer", (False,)),
    Row("moe_mlp_glu_interleave_size", (None, 0), _MOE),
    Row("moe_shared_expert_glu_interleave_size", (None, 0), _MOE),
    Row("moe_router_force_biased", (None, False), _MOE),
)
"""In Megatron's own order of subjects."""

BY_NAME = {row.name: row for row in ROWS}

SPELLED = {
    "num_moe_experts": "num_experts", "gated_linear_unit": "swiglu", "norm_epsilon": "layernorm_epsilon",
    "apply_layernorm_1p": "layernorm_zero_centered_gamma",
}  # fmt: skip
"""Other names of arguments: fields of ``TransformerConfig``, and what Megatron-LM before 0.16 called them."""
_LENGTH, _TRAINED = "max_position_embeddings", "original_max_position_embeddings"


def modern(args: Values) -> dict[str, object]:
    """Arguments under the names that Megatron-LM 0.16 has for them; what is there under both stays as it is.

    Before 0.14 latent attention's YaRN took ``max_position_embeddings`` for the length that the model was trained for.

    Sources: Megatron-LM core_v0.8.0 to core_v0.15.0, ``megatron/training/arguments.py``
    (``core_transformer_config_from_args``); megatron-core 0.13.0 and 0.14.0, ``transformer/multi_latent_attention.py``.

    Args:
        args: Of a run of any version.
    """
    found = {new: args[old] for old, new in SPELLED.items() if old in args and new not in args}
    before_14 = "norm_epsilon" in args and "cache_mla_latents" not in args
    if args.get(_MLA) and before_14 and _TRAINED not in args and _LENGTH in args:
        found[_TRAINED] = args[_LENGTH]
    return {**args, **found}
