"""Descriptions of models: config.json and Megatron's arguments, each from the other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mcore_rlhf.errors import Unsupported, UsageError
from mcore_rlhf.models.huggingface.config import Build, args_of, config_of, sizes_of_args, sizes_of_config
from mcore_rlhf.models.huggingface.llama import LLAMA
from mcore_rlhf.models.huggingface.order import module_order
from mcore_rlhf.models.huggingface.qwen2 import QWEN2
from mcore_rlhf.models.huggingface.qwen3 import QWEN3

CONFIG: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 131, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
    "rope_theta": 500000.0, "hidden_act": "silu",
}  # fmt: skip

ORDERS = json.loads((Path(__file__).parents[2] / "goldens" / "transformers_4" / "parameters.json").read_text())
TRAINED = {"original_max_position_embeddings": 8192}


def args(**more: Any) -> dict[str, object]:
    return args_of({**CONFIG, **more}, LLAMA, Build())


def test_sizes_come_from_the_config() -> None:
    sizes = sizes_of_config(CONFIG)
    assert (sizes.layers, sizes.heads, sizes.groups, sizes.head, sizes.vocabulary) == (3, 4, 2, 32, 131)
    assert (sizes.q_rows, sizes.k_rows) == (128, 64)


def test_heads_are_as_wide_as_the_hidden_size_allows_unless_said() -> None:
    assert sizes_of_config({**CONFIG, "head_dim": None}).head == 16
    assert sizes_of_config({k: v for k, v in CONFIG.items() if k != "num_key_value_heads"}).groups == 4


def test_what_a_config_lacks_is_named_at_once() -> None:
    with pytest.raises(UsageError, match="lacks hidden_size, vocab_size"):
        sizes_of_config({k: v for k, v in CONFIG.items() if k not in ("hidden_size", "vocab_size")})


def test_what_args_lack_is_named_at_once() -> None:
    with pytest.raises(UsageError, match="lack hidden_size, ffn_hidden_size"):
        sizes_of_args({"num_layers": 2, "num_attention_heads": 4}, 10)


def test_megatron_ignores_query_groups_without_the_flag() -> None:
    said = {"num_layers": 1, "hidden_size": 8, "ffn_hidden_size": 8, "num_attention_heads": 4, "num_query_groups": 1}
    assert sizes_of_args(said, 10).groups == 4
    assert sizes_of_args({**said, "group_query_attention": True}, 10).groups == 1


def test_arguments_under_megatrons_names() -> None:
    assert args() == {
        "num_layers": 3, "hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 4, "num_query_groups": 2,
        "group_query_attention": True, "kv_channels": 32, "vocab_size": 131, "max_position_embeddings": 512,
        "layernorm_epsilon": 1e-6, "untie_embeddings_and_output_weights": True, "rotary_base": 500000, "rotary_percent": 1.0,
        "add_bias_linear": False, "add_qkv_bias": False, "use_rope_scaling": False, "swiglu": True, "normalization": "RMSNorm",
        "position_embedding_type": "rope", "add_position_embedding": True, "layernorm_zero_centered_gamma": False,
        "rotary_interleaved": False, "qk_layernorm": False, "attention_dropout": 0.0, "init_method_std": 0.02,
    }  # fmt: skip


def test_rotary_embeddings_as_transformers_5_writes_them() -> None:
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 32.0, "low_freq_factor": 1.0, **TRAINED}
    found = args(rope_parameters=rope, rope_theta=None)
    assert (found["rotary_base"], found["use_rope_scaling"], found["rope_scaling_factor"]) == (10000, True, 32.0)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "longrope"),
        ({"rope_scaling": {"rope_type": "llama3", "high_freq_factor": 2.0}}, "high_freq_factor"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "original_max_position_embeddings is 512"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_theta": 10000.5}, "whole number"),
    ],
)
def test_what_megatron_cannot_compute_is_refused(more: dict[str, Any], named: str) -> None:
    with pytest.raises(Unsupported, match=named):
        args(**more)


@pytest.mark.parametrize("known", [LLAMA, QWEN2, QWEN3], ids=lambda known: known.model_type)
@pytest.mark.parametrize("tied", [False, True])
def test_there_and_back(known: Any, tied: bool) -> None:
    biased = known is QWEN2
    build = Build(tied=tied, biased=biased)
    config = {
        **CONFIG,
        "model_type": known.model_type,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, **TRAINED},
    }
    theirs = args_of(config, known, build)
    back = config_of(theirs, sizes_of_args(theirs, 131), known, build)
    assert {key: back[key] for key in CONFIG} == {**CONFIG, "model_type": known.model_type}
    assert back["tie_word_embeddings"] is tied
    assert back["architectures"] == [known.class_name]
    assert args_of(back, known, build) == theirs
    assert (theirs["add_qkv_bias"], theirs["add_bias_linear"]) == (biased, False)
    assert theirs["qk_layernorm"] is (known is QWEN3)


def test_the_order_of_a_module_is_of_the_names_that_are_given() -> None:
    """Of all architectures it is held against transformers 5 in tests/reference/test_architectures.py."""
    names = {
        "lm_head.weight",
        "model.embed_tokens.weight",
        "model.layers.10.mlp.up_proj.weight",
        "model.layers.2.mlp.up_proj.weight",
    }
    config = {**CONFIG, "num_hidden_layers": 11}
    assert module_order(config, names) == [
        "model.embed_tokens.weight", "model.layers.2.mlp.up_proj.weight", "model.layers.10.mlp.up_proj.weight", "lm_head.weight",
    ]  # fmt: skip
    with pytest.raises(
        Unsupported, match=r"1 parameters have no place in LlamaForCausalLM that is known: reward\.summary"
    ):
        module_order(config, {*names, "reward.summary.weight"})
    with pytest.raises(Unsupported, match="model_type gpt2 is in no table"):
        module_order({"model_type": "gpt2"}, names)


@pytest.mark.parametrize("kind", ORDERS)
def test_experts_one_by_one_are_in_the_order_of_transformers_4(kind: str) -> None:
    config, names = ORDERS[kind]["config"], ORDERS[kind]["names"]
    assert module_order(config, sorted(names)) == names


def test_without_a_description_all_tables_must_agree() -> None:
    layer = "model.layers.1000000000000."
    names = [f"{layer}mlp.up_proj.weight", f"{layer}self_attn.q_proj.weight", "model.norm.weight"]
    assert module_order({}, names) == [names[1], names[0], names[2]]
    experts = [f"{layer}mlp.experts.7.up_proj.weight", f"{layer}mlp.gate.weight"]
    assert module_order({**CONFIG, "model_type": "glm4_moe"}, experts) == experts
    with pytest.raises(Unsupported, match="of its 2 parameters in memory tables that have them differ"):
        module_order({}, experts)
    with pytest.raises(Unsupported, match="no table has them all"):
        module_order({}, ["transformer.wte.weight"])
