"""How large the numbers of a description may be that become loops, lists and files: more than any model or run has, and far from
what fills a memory. Everything else that is said of sizes is held against the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isnan
from types import MappingProxyType

from mcore_rlhf.errors import LayoutMismatch, Problems, shown

MOST_LAYERS = 4096
"""Layers of a model, of one kind; also model chunks."""
MOST_RANKS = 1 << 17
"""Ranks of a run: 131,072."""
MOST_LETTERS = 10 * MOST_LAYERS
"""Letters of a text that says what every layer is, or where it lies."""
_MOST_EXPERTS = 1 << 12
_MOST_HEADS = 1 << 14
_MOST_LAYERS_OF_EXPERTS = 1 << 17
"""Experts of all layers together: Kimi-K2 has 23,424."""

_NAMES = {
    "layers": (MOST_LAYERS, """
        num_layers encoder_num_layers decoder_num_layers mtp_num_layers decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers
        num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank virtual_pipeline_model_parallel_size
        num_hidden_layers num_nextn_predict_layers mtp_num_hidden_layers first_k_dense_replace n_layer
    """),
    "ranks": (MOST_RANKS, """
        tensor_model_parallel_size model_parallel_size pipeline_model_parallel_size transformer_pipeline_model_parallel_size
        context_parallel_size expert_model_parallel_size expert_tensor_parallel_size data_parallel_size world_size
    """),
    "experts": (_MOST_EXPERTS, "num_experts num_moe_experts num_local_experts n_routed_experts moe_num_experts n_shared_experts"),
    "heads": (_MOST_HEADS, """
        num_attention_heads num_query_groups num_key_value_heads mamba_num_heads mamba_num_groups linear_num_key_heads
        linear_num_value_heads n_head
    """),
}  # fmt: skip
_MOST = MappingProxyType({name: (most, what) for what, (most, names) in _NAMES.items() for name in names.split()})
_DEPTH, _EXPERTS = ("num_layers", "num_hidden_layers"), tuple(_NAMES["experts"][1].split())


def is_number(text: str) -> bool:
    """Whether a part of a name, or a tracker's text, is a number; more digits than anything has are a name."""
    return text.isdecimal() and len(text) < 19


def check_sizes(values: Mapping[str, object], where: str) -> None:
    """Refuse numbers that no model and no run has, before anything is made of them.

    Args:
        values: Megatron's arguments, or the fields of a ``config.json``; other types than whole numbers are somebody else's to judge.
        where: What they are and where they are stored, for messages.

    Raises:
        LayoutMismatch: They are too large, or no numbers; all of them are named.
    """
    problems = Problems()
    advice = "The file is damaged or forged: take the one that belongs to this checkpoint."
    for name, value in values.items():
        if (isinstance(value, float) and isnan(value)) or (isinstance(value, bool) and name in _MOST):
            problems.add(LayoutMismatch, f"{where}: {name} is {value}, where a number belongs", advice)
    for name in _MOST.keys() & values.keys():
        value, (most, what) = values[name], _MOST[name]
        if isinstance(value, int) and abs(value) > most:
            text = f"{where}: {name} is {shown(value)}; nothing has more than {most:,} {what}"
            problems.add(LayoutMismatch, text, advice)
    depth, experts = (max((_count(values, name) for name in names), default=0) for names in (_DEPTH, _EXPERTS))
    parts = _count(values, "expert_model_parallel_size")
    if experts and parts > experts:
        problems.add(
            LayoutMismatch, f"{where}: expert_model_parallel_size is {parts:,}, of {experts:,} experts", advice
        )
    if not problems and depth * experts > _MOST_LAYERS_OF_EXPERTS:
        text = f"{where}: {depth:,} layers of {experts:,} experts; nothing has more than {_MOST_LAYERS_OF_EXPERTS:,} of them together"
        problems.add(LayoutMismatch, text, advice)
    problems.raise_if_any()


def _count(values: Mapping[str, object], name: str) -> int:
    value = values.get(name)
    return value if isinstance(value, int) else 0
