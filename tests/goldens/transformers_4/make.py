"""Writes what lies beside it with transformers 4 itself, whose experts are modules one by one.

Run in an environment with torch 2.8.0, transformers 4.57.6 and accelerate 1.10.1: python -m tests.goldens.transformers_4.make
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import transformers

from tests.trainers.hf_runs import model, train

HERE = Path(__file__).parent
BASE: dict[str, Any] = {
    "vocab_size": 24, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 6, "num_experts": 2, "num_experts_per_tok": 1}
ROUTED = {
    "moe_intermediate_size": 6, "n_routed_experts": 2, "n_shared_experts": 1, "num_experts_per_tok": 1, "first_k_dense_replace": 1,
    "n_group": 1, "topk_group": 1,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 4, "kv_lora_rank": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
MIXTURES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {**ROUTED, **LATENT},
    "deepseek_v3": {**ROUTED, **LATENT},
    "glm4_moe": {**ROUTED, "head_dim": 4, "use_qk_norm": True, "attention_bias": True},
    "gpt_oss": {"num_local_experts": 2, "head_dim": 4},
    "mixtral": {"num_local_experts": 2},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 6, "mlp_only_layers": [0]},
    "qwen3_moe": {**EXPERTS, "head_dim": 4},
    "qwen3_next": {
        **EXPERTS, "head_dim": 4, "shared_expert_intermediate_size": 6, "linear_num_value_heads": 2, "linear_num_key_heads": 1,
        "linear_key_head_dim": 4, "linear_value_head_dim": 4, "layer_types": ["linear_attention", "full_attention"],
    },
}  # fmt: skip

if __name__ == "__main__":
    orders = {}
    for kind, sizes in MIXTURES.items():
        config = transformers.AutoConfig.for_model(kind, **{**BASE, **sizes})
        made = transformers.AutoModelForCausalLM.from_config(config)
        orders[kind] = {
            "config": {"model_type": kind, **BASE, **sizes},
            "names": [n for n, _ in made.named_parameters()],
        }
    (HERE / "parameters.json").write_text(json.dumps(orders, indent=1) + "\n")
    with tempfile.TemporaryDirectory() as name:
        seen = train(model(1, "qwen3_moe", tie_word_embeddings=False, **EXPERTS, head_dim=4), Path(name))
        shutil.rmtree(HERE / "checkpoint-2", ignore_errors=True)
        shutil.copytree(
            Path(name) / "checkpoint-2", HERE / "checkpoint-2", ignore=shutil.ignore_patterns("training_args.bin")
        )
    (HERE / "checkpoint-2.json").write_text(json.dumps(seen) + "\n")
