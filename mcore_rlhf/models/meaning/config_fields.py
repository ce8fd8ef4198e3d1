"""Fields of a ``config.json`` that stand in no relation to an argument of Megatron's: names by kind.

Sources: transformers 5.23.0, ``configuration_utils.py`` and ``models/*/configuration_*.py``, and of 4.x what published
folders have of it; deepseek-ai/DeepSeek-V3 and moonshotai/Kimi-K2-Instruct, ``config.json``.
"""

from __future__ import annotations

from .kinds import Kind, by_name

_TRAINING = """
aux_loss_alpha classifier_dropout embd_pdrop hidden_dropout output_router_logits pretraining_tp resid_pdrop residual_dropout
router_aux_loss_coef router_jitter_noise seq_aux
"""
_EXECUTION = """
attn_implementation _attn_implementation chunk_size_feed_forward dtype ep_size output_attentions output_hidden_states
return_dict torch_dtype torchscript use_cache use_return_dict use_mrope
"""
_LAYOUT = "compression_config quantization_config"
_BOOKKEEPING = """
_commit_hash _name_or_path architectures auto_map bos_token_id eos_token_id id2label is_decoder is_encoder_decoder
keys_to_ignore_at_inference label2id mcore_rlhf_origin model_type num_labels pad_token_id problem_type
summary_activation task_specific_params tokenizer_class transformers_version unk_token_id unsloth_fixed unsloth_version
"""

OF_TENSORS = {
    "vocab_size": "vocab_size", "tie_word_embeddings": "untie_embeddings_and_output_weights",
    "attention_bias": "add_qkv_bias", "qkv_bias": "add_qkv_bias", "mlp_bias": "add_bias_linear",
}  # fmt: skip
"""Fields that say what the tensors say as well, each with Megatron's argument for it; the tensors decide."""

OTHERS = by_name(
    {Kind.TRAINING: _TRAINING, Kind.EXECUTION: _EXECUTION, Kind.LAYOUT: _LAYOUT, Kind.BOOKKEEPING: _BOOKKEEPING}
)
"""By name of a field: its kind."""
