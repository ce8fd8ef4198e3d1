"""In which order Megatron registers the parameters of a model: ``torch_dist`` does not store it, flat buffers depend on it.

Sources: megatron-core 0.16.1, ``models/gpt/gpt_model.py``, ``transformer/{transformer_layer,attention,multi_latent_attention,
mlp,multi_token_prediction}.py``, ``transformer/moe/{moe_layer,router,experts,shared_experts}.py``; Transformer Engine,
``pytorch/module/{layernorm_linear,grouped_linear}.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from mcore_rlhf.models.megatron import in_registration_order

_PARTS = (
    "embedding", "word_embeddings", "position_embeddings", "tokentype_embeddings", "decoder", "enorm", "hnorm", "eh_proj",
    "transformer_layer", "layers", "input_layernorm", "self_attention",
    # attention
    "core_attention", "softmax_offset", "linear_proj", "linear_qkv", "linear_q_proj", "linear_q_down_proj",
    "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj", "q_layernorm", "k_layernorm", "kv_layernorm",
    "pre_cross_attn_layernorm", "cross_attention", "linear_q", "linear_kv", "pre_mlp_layernorm", "mlp",
    # feed-forward and experts; a module's own parameters come before those of the modules in it
    "router", "gate_weight", "gate_bias", "weight1", "weight2", "experts", "local_experts", "linear_fc1", "linear_fc2",
    "shared_experts", "final_layernorm", "final_norm", "mtp", "output_layer",
    # of one module
    "layer_norm_weight", "layer_norm_bias", "weight", "bias", "local_tokens_per_expert", "expert_bias", "_extra_state",
)  # fmt: skip
_RANK = {part: rank for rank, part in enumerate(_PARTS)}
_EXPERT_NUMBER = re.compile(r"(?<=[a-z])\d+$")
_BEHIND_ALL = len(_PARTS)


def registration_order(names: Iterable[str]) -> list[str]:
    """Global names, opaque ones included, as one process that held the whole model would register them.

    Names of which a part is in no table stand behind their neighbours, in alphabetical order.
    """
    return in_registration_order(sorted(names, key=_sort_key))


def _sort_key(name: str) -> tuple[tuple[int, int, str], ...]:
    return tuple(map(_rank, name.split(".")))


def _rank(part: str) -> tuple[int, int, str]:
    """(kind, number, text) of one part of a dotted name."""
    if part.isdigit():
        return 0, int(part), ""
    known = _RANK.get(part)
    if known is None:
        number = _EXPERT_NUMBER.search(part)
        stem = part[: number.start()] if number else part
        known = _RANK.get(stem)
        if number is not None and known is not None:
            return known, int(number.group()), ""
    return (_BEHIND_ALL, 0, part) if known is None else (known, 0, "")
