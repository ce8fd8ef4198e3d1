"""The models of ``tests/goldens/megatron_fsdp``."""

from __future__ import annotations

from dataclasses import replace

from mcore_rlhf.demo.configs import TinyGPT

MODEL = TinyGPT(
    num_layers=2, hidden_size=32, ffn_hidden_size=48, num_attention_heads=4, num_query_groups=2, kv_channels=8
)
WITH_EXPERTS = replace(MODEL, num_experts=4, moe_router_topk=2, moe_ffn_hidden_size=24)
