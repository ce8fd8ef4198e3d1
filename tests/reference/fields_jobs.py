"""What real megatron-core computes when one field of its configuration is another, and nothing else."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from typing import Any

SIZES: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 48,
    "kv_channels": 8, "num_moe_experts": 4, "moe_layer_freq": [0, 1], "moe_ffn_hidden_size": 24, "moe_router_topk": 2,
    "normalization": "RMSNorm", "add_bias_linear": False, "gated_linear_unit": True, "use_cpu_initialization": True,
    "hidden_dropout": 0.0, "attention_dropout": 0.0, "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "none", "attention_softmax_in_fp32": True,
}  # fmt: skip
"""A dense layer and a mixture."""


def differences(changed: Mapping[str, object]) -> dict[str, float | str]:
    """How far the logits of the same weights are apart when a field is another.

    Args:
        changed: Other values of fields, each tried by itself.

    Returns:
        By field the largest difference, or why there is no such model.
    """
    from mcore_rlhf.demo.configs import Parallel
    from mcore_rlhf.demo.trainer import initialize_parallel_state, seed_everything

    initialize_parallel_state(Parallel())
    seed_everything(1)
    usual = _model({})
    weights, expected = usual.state_dict(), _logits(usual)
    found: dict[str, float | str] = {}
    for name, value in changed.items():
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                model = _model({name: value})
                model.load_state_dict(weights, strict=True)
                found[name] = float((_logits(model) - expected).abs().max())
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def _model(changed: Mapping[str, object]) -> Any:
    import torch
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.transformer import TransformerConfig

    from mcore_rlhf.demo.versions import known_fields

    said = {**SIZES, "activation_func": torch.nn.functional.silu, "cuda_graph_scope": [], **changed}
    config = TransformerConfig(**known_fields(TransformerConfig, said))
    block = gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    return GPTModel(
        config=config, transformer_layer_spec=block, vocab_size=64, max_sequence_length=32, position_embedding_type="rope"
    ).eval()  # fmt: skip


def _logits(model: Any) -> Any:
    import torch

    tokens = torch.arange(17).reshape(1, 17) * 7 % 64
    with torch.no_grad():
        output = model(tokens, torch.arange(17)[None], None)
    return output[0] if isinstance(output, tuple) else output
