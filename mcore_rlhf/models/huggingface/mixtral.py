"""Mixtral: Llama's attention, all layers mixtures; on disk its experts have names of their own."""

from __future__ import annotations

from . import dense, moe
from .attention_fields import window
from .expert_fields import softmax_weights
from .fields import always
from .table import Architecture, Packed

_MOE = "block_sparse_moe"
_INSIDE = (f"{_MOE}.experts.{{e}}", "w1", "w3", "w2")
_EXPERTS = tuple(f"model.layers.{{i}}.{_MOE}.experts.{{e}}.{part}.weight" for part in ("w1", "w2", "w3"))

MIXTRAL = Architecture(
    "mixtral",
    "MixtralForCausalLM",
    (
        dense.EMBEDDING,
        dense.INPUT_NORM,
        dense.PROJ,
        dense.FUSED_INPUT_NORM,
        dense.QKV,
        moe.NORM,
        moe.router(f"{_MOE}.gate"),
        *moe.experts(*_INSIDE),
        dense.FINAL_NORM,
        *dense.HEADS,
    ),
    dense.in_order(*dense.SELF_ATTENTION, f"model.layers.{{i}}.{_MOE}.gate.weight", *_EXPERTS),
    (
        *dense.FIELDS,
        window(),
        *moe.fields("num_local_experts", "num_experts", ffn="intermediate_size"),
        always("qk_layernorm", False),
        softmax_weights(),
        always("moe_router_score_function", "softmax"),
    ),
    (
        Packed("model.layers.{i}.mlp.gate.weight", (f"model.layers.{{i}}.{_MOE}.gate.weight",)),
        *moe.packed(*_INSIDE),
    ),
    moe.NEEDS,
)
