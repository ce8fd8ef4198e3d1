"""Thirty ``config.json`` as they are published, fields that no class declares included; only weights' sizes get small."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]


def _llama(**more: Any) -> Config:
    return {
        "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
        "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008, "max_position_embeddings": 4096,
        "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None, "tie_word_embeddings": False,
        "torch_dtype": "float16", "transformers_version": "4.31.0.dev0", "use_cache": True, "vocab_size": 32000, **more,
    }  # fmt: skip


def _llama3(**more: Any) -> Config:
    return _llama(
        attention_bias=False, attention_dropout=0.0, bos_token_id=128000, eos_token_id=128001, intermediate_size=14336,
        num_key_value_heads=8, rope_theta=500000.0, torch_dtype="bfloat16", vocab_size=128256, **more,
    )  # fmt: skip


def _llama31(factor: float) -> Config:
    return {
        "factor": factor, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }  # fmt: skip


def _mistral(**more: Any) -> Config:
    return {
        "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
        "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 32768,
        "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.34.0.dev0", "use_cache": True, "vocab_size": 32000, **more,
    }  # fmt: skip


def _qwen2(**more: Any) -> Config:
    return {
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643,
        "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02, "intermediate_size": 18944,
        "max_position_embeddings": 131072, "max_window_layers": 28, "model_type": "qwen2", "num_attention_heads": 28,
        "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
        "sliding_window": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.37.2",
        "use_cache": True, "use_mrope": False, "use_sliding_window": False, "vocab_size": 152064, **more,
    }  # fmt: skip


def _qwen3(**more: Any) -> Config:
    return _qwen2(
        architectures=["Qwen3ForCausalLM"], attention_bias=False, head_dim=128, model_type="qwen3", rope_scaling=None,
        sliding_window=None, max_window_layers=36, transformers_version="4.51.0", **more,
    )  # fmt: skip


_REMOTE = {
    "AutoConfig": "configuration_deepseek.DeepseekV3Config",
    "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
}


def _yarn(factor: float, mscale: float) -> Config:
    return {
        "beta_fast": 32, "beta_slow": 1, "factor": factor, "mscale": mscale, "mscale_all_dim": mscale,
        "original_max_position_embeddings": 4096, "type": "yarn",
    }  # fmt: skip


def _deepseek(**more: Any) -> Config:
    return {
        "attention_bias": False, "attention_dropout": 0.0, "auto_map": _REMOTE, "aux_loss_alpha": 0.001, "bos_token_id": 0,
        "eos_token_id": 1, "ep_size": 1, "hidden_act": "silu", "initializer_range": 0.02, "kv_lora_rank": 512,
        "max_position_embeddings": 163840, "moe_layer_freq": 1, "pretraining_tp": 1, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000, "seq_aux": True, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.33.1", "use_cache": True, "v_head_dim": 128, **more,
    }  # fmt: skip


def _deepseek2(**more: Any) -> Config:
    return _deepseek(
        architectures=["DeepseekV2ForCausalLM"], first_k_dense_replace=1, hidden_size=2048, intermediate_size=10944,
        model_type="deepseek_v2", moe_intermediate_size=1408, n_routed_experts=64, n_shared_experts=2, norm_topk_prob=False,
        num_attention_heads=16, num_experts_per_tok=6, num_hidden_layers=27, num_key_value_heads=16,
        rope_scaling=_yarn(40, 0.707), scoring_func="softmax", vocab_size=102400,
    ) | more  # fmt: skip


def _deepseek3(**more: Any) -> Config:
    return _deepseek(
        architectures=["DeepseekV3ForCausalLM"], first_k_dense_replace=3, hidden_size=7168, intermediate_size=18432,
        model_type="deepseek_v3", moe_intermediate_size=2048, n_group=8, n_routed_experts=256, n_shared_experts=1,
        norm_topk_prob=True, num_attention_heads=128, num_experts_per_tok=8, num_hidden_layers=61, num_key_value_heads=128,
        num_nextn_predict_layers=1, q_lora_rank=1536, rope_scaling=_yarn(40, 1.0), routed_scaling_factor=2.5,
        scoring_func="sigmoid", topk_group=4, topk_method="noaux_tc", vocab_size=129280,
    ) | more  # fmt: skip


def _glm(**more: Any) -> Config:
    return {
        "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
        "eos_token_id": [151329, 151336, 151338], "first_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 10944, "max_position_embeddings": 131072,
        "model_type": "glm4_moe", "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 96, "num_experts_per_tok": 8,
        "num_hidden_layers": 46, "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "pad_token_id": 151329,
        "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000,
        "routed_scaling_factor": 1.0, "tie_word_embeddings": False, "topk_group": 1, "torch_dtype": "bfloat16",
        "transformers_version": "4.54.0", "use_cache": True, "use_qk_norm": False, "vocab_size": 151552, **more,
    }  # fmt: skip


def _gpt_oss(layers: int, experts: int) -> Config:
    """As published without the MXFP4 of its release."""
    return {
        "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002,
        "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
        "initializer_range": 0.02, "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4,
        "num_hidden_layers": layers, "num_key_value_heads": 8, "num_local_experts": experts, "output_router_logits": False,
        "pad_token_id": 199999, "rms_norm_eps": 1e-05, "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
        "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": False}, "rope_theta": 150000,
        "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.55.0.dev0", "use_cache": True, "vocab_size": 201088,
    }  # fmt: skip


def _without(names: tuple[str, ...], config: Config) -> Config:
    return {name: value for name, value in config.items() if name not in names}


PUBLIC: dict[str, Config] = {
    "meta-llama/Llama-2-7b-hf": _llama(),
    "meta-llama/Meta-Llama-3-8B": _llama3(max_position_embeddings=8192),
    "meta-llama/Llama-3.1-8B-Instruct": _llama3() | {"max_position_embeddings": 131072, "mlp_bias": False,
        "rope_scaling": _llama31(8.0), "eos_token_id": [128001, 128008, 128009]},
    "meta-llama/Llama-3.2-1B": _llama3() | {"head_dim": 64, "mlp_bias": False, "rope_scaling": _llama31(32.0),
        "tie_word_embeddings": True},
    "01-ai/Yi-6B": _llama(num_key_value_heads=4, rope_theta=5000000.0, vocab_size=64000, pad_token_id=0),
    "lmsys/vicuna-7b-v1.5-16k": _llama(rope_scaling={"factor": 4.0, "type": "linear"}, max_sequence_length=16384,
        _name_or_path="vicuna-7b-v1.5-16k", pad_token_id=0),
    "deepseek-ai/deepseek-coder-6.7b-base": _llama(rope_theta=100000, rope_scaling={"factor": 4.0, "type": "linear"},
        max_position_embeddings=16384, vocab_size=32256, rms_norm_eps=1e-06),
    "mistralai/Mistral-7B-v0.1": _mistral(),
    "mistralai/Mistral-7B-v0.3": _mistral(sliding_window=None, rope_theta=1000000.0, vocab_size=32768, attention_dropout=0.0),
    "mistralai/Mixtral-8x7B-v0.1": _mistral(architectures=["MixtralForCausalLM"], model_type="mixtral", num_experts_per_tok=2,
        num_local_experts=8, output_router_logits=False, rope_theta=1000000.0, router_aux_loss_coef=0.02,
        sliding_window=None, attention_dropout=0.0),
    "Qwen/Qwen2-7B": _qwen2(),
    "Qwen/Qwen2.5-0.5B": _qwen2(tie_word_embeddings=True, sliding_window=32768, max_window_layers=24),
    "Qwen/Qwen2.5-7B-Instruct, with its YaRN": _qwen2(
        rope_scaling={"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}),
    "Qwen/Qwen3-4B": _qwen3(tie_word_embeddings=True),
    "Qwen/Qwen3-8B": _qwen3(),
    "Qwen/Qwen1.5-MoE-A2.7B": _qwen2(architectures=["Qwen2MoeForCausalLM"], model_type="qwen2_moe", decoder_sparse_step=1,
        moe_intermediate_size=1408, norm_topk_prob=False, num_experts=60, num_experts_per_tok=4, output_router_logits=False,
        router_aux_loss_coef=0.001, shared_expert_intermediate_size=5632, max_window_layers=21),
    "Qwen/Qwen3-30B-A3B": _qwen3() | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
        "decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True,
        "num_experts": 128, "num_experts_per_tok": 8, "output_router_logits": False, "router_aux_loss_coef": 0.001},
    "deepseek-ai/DeepSeek-V2-Lite": _deepseek2(n_group=1, q_lora_rank=None, routed_scaling_factor=1.0, topk_group=1,
        topk_method="greedy"),
    "deepseek-ai/DeepSeek-V2": _deepseek2(n_group=8, q_lora_rank=1536, routed_scaling_factor=16.0, topk_group=3,
        topk_method="group_limited_greedy", n_routed_experts=160),
    "deepseek-ai/DeepSeek-V3": _deepseek3(),
    "moonshotai/Kimi-K2-Instruct": _deepseek3(model_type="kimi_k2", n_group=1, topk_group=1, first_k_dense_replace=1,
        n_routed_experts=384, num_attention_heads=64, num_key_value_heads=64, num_nextn_predict_layers=0,
        rope_scaling=_yarn(32.0, 1.0), rope_theta=50000.0, routed_scaling_factor=2.827, vocab_size=163840),
    "moonshotai/Moonlight-16B-A3B": _deepseek3(n_group=1, topk_group=1, first_k_dense_replace=1, n_routed_experts=64,
        n_shared_experts=2, num_experts_per_tok=6, num_nextn_predict_layers=0, q_lora_rank=None, rms_norm_eps=1e-05,
        rope_scaling=None, rope_theta=50000.0, routed_scaling_factor=2.446),
    "unsloth/gpt-oss-20b-BF16": _gpt_oss(24, 32),
    "unsloth/gpt-oss-120b-BF16": _gpt_oss(36, 128),
    "zai-org/GLM-4.5-Air": _glm(),
    "zai-org/GLM-4.5": _glm(use_qk_norm=True, first_k_dense_replace=3, routed_scaling_factor=2.5, hidden_size=5120),
    "zai-org/GLM-4.7-Flash": _without(("head_dim", "use_qk_norm"), _glm(
        architectures=["Glm4MoeLiteForCausalLM"], model_type="glm4_moe_lite", attention_bias=False,
        hidden_size=2048, intermediate_size=10240, kv_lora_rank=512, max_position_embeddings=202752, moe_intermediate_size=1536,
        n_routed_experts=64, num_attention_heads=20, num_experts_per_tok=4, num_hidden_layers=47, num_key_value_heads=20,
        partial_rotary_factor=1.0, q_lora_rank=768, qk_nope_head_dim=192, qk_rope_head_dim=64, routed_scaling_factor=1.8,
        topk_method="noaux_tc", v_head_dim=256, vocab_size=154880)),
    "ByteDance-Seed/Seed-OSS-36B-Instruct": _llama(architectures=["SeedOssForCausalLM"], model_type="seed_oss", attention_bias=True,
        attention_dropout=0.1, attention_out_bias=False, bos_token_id=0, pad_token_id=1, head_dim=128, hidden_size=5120,
        intermediate_size=27648, max_position_embeddings=524288, mlp_bias=False, num_attention_heads=80, num_hidden_layers=64,
        num_key_value_heads=8, residual_dropout=0.1, rms_norm_eps=1e-06, rope_scaling={"rope_type": "default"}, rope_theta=10000000.0,
        torch_dtype="bfloat16", vocab_size=155136),
    "microsoft/phi-4": _llama(architectures=["Phi3ForCausalLM"], model_type="phi3", attention_bias=False, attention_dropout=0.0,
        bos_token_id=100257, embd_pdrop=0.0, eos_token_id=100265, hidden_size=5120, intermediate_size=17920,
        max_position_embeddings=16384, num_attention_heads=40, num_hidden_layers=40, num_key_value_heads=10,
        original_max_position_embeddings=16384, pad_token_id=100349, resid_pdrop=0.0, rope_theta=250000, sliding_window=None,
        torch_dtype="bfloat16", transformers_version="4.47.0", vocab_size=100352),
}  # fmt: skip
"""By the name under which they are published."""

WITH_IMAGES: dict[str, Config] = {
    "Qwen/Qwen2.5-VL-7B-Instruct": _qwen2(
        architectures=["Qwen2_5_VLForConditionalGeneration"], eos_token_id=151645, image_token_id=151655,
        max_position_embeddings=128000, model_type="qwen2_5_vl", rope_scaling={"mrope_section": [16, 24, 24], "type": "mrope"},
        sliding_window=32768, transformers_version="4.41.2", video_token_id=151656, vision_end_token_id=151653,
        vision_start_token_id=151652, vision_token_id=151654, vision_config={"depth": 32, "hidden_size": 1280, "out_hidden_size": 3584},
    ),
    "Qwen/Qwen3.5-35B-A3B": {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"], "image_token_id": 248056, "model_type": "qwen3_5_moe",
        "tie_word_embeddings": False, "vision_config": {"model_type": "qwen3_5_moe", "depth": 27, "hidden_size": 1152},
        "text_config": {
            "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "dtype": "bfloat16",
            "eos_token_id": 248044, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048,
            "initializer_range": 0.02, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10, "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
            "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144, "mlp_only_layers": [], "model_type": "qwen3_5_moe_text",
            "moe_intermediate_size": 512, "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
            "num_attention_heads": 16, "num_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 40, "num_key_value_heads": 2,
            "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512,
            "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
                "rope_theta": 10000000, "rope_type": "default"},
            "tie_word_embeddings": False, "use_cache": True, "vocab_size": 248320,
        },
    },
}  # fmt: skip
"""Those whose text lies below a model of images."""


def small(config: Config, words: int) -> Config:
    """The same with small weights; what the model computes of them stays what it is.

    Args:
        config: One of them.
        words: Size of the vocabulary.
    """
    experts = {"num_experts", "num_local_experts", "n_routed_experts"} & config.keys()
    groups = config["num_attention_heads"] // config["num_key_value_heads"]
    sizes = {
        "vocab_size": words, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4 if groups == 1 else 2, "head_dim": 16, "moe_intermediate_size": 24, "q_lora_rank": 12,
        "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
        "shared_expert_intermediate_size": 40, **dict.fromkeys(experts, 16),
    }  # fmt: skip
    if "first_k_dense_replace" in config:
        sizes["first_k_dense_replace"] = 1
    if "layer_types" in config:
        sizes["layer_types"] = config["layer_types"][:2]
    ids = {name: 1 for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in config}
    return {**config, **ids, **{name: size for name, size in sizes.items() if config.get(name) is not None}}
