"""Seed-OSS: Llama's layers, with biases of queries, keys and values alone."""

from __future__ import annotations

from . import dense
from .attention_fields import NO_WINDOW
from .fields import always, only
from .table import Architecture

SEED_OSS = Architecture(
    "seed_oss",
    "SeedOssForCausalLM",
    (  # in the order in which Megatron registers its parameters
        dense.EMBEDDING,
        dense.INPUT_NORM,  # its name in local layers …
        dense.PROJ,
        dense.FUSED_INPUT_NORM,  # … and in Transformer Engine's
        dense.QKV,
        dense.QKV_BIAS,
        dense.MLP_NORM,
        dense.FUSED_MLP_NORM,
        dense.FC1,
        dense.FC2,
        dense.FINAL_NORM,
        *dense.HEADS,
    ),
    dense.ORDER,  # model.parameters()
    (  # config.json and args
        *dense.FIELDS,
        NO_WINDOW,
        always("qk_layernorm", False),
        only("attention_out_bias", False, "Megatron's --add-bias-linear gives the feed-forward biases as well"),
    ),
)
