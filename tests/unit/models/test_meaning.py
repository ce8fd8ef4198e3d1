"""The table of what every argument and every field means."""

from __future__ import annotations

from typing import Any

import pytest

from mcore_rlhf.models.huggingface import ARCHITECTURES
from mcore_rlhf.models.huggingface.llama import LLAMA
from mcore_rlhf.models.huggingface.mistral import MISTRAL
from mcore_rlhf.models.meaning import About
from mcore_rlhf.models.meaning.arguments import BY_NAME, OTHER_ARGUMENTS, SPELLED, modern
from mcore_rlhf.models.meaning.declared import arguments, common_fields, complete, config_fields, transformer_fields
from mcore_rlhf.models.meaning.lookup import (
    OF_TENSORS,
    OTHER_FIELDS,
    inexpressible_arguments,
    inexpressible_fields,
    of_arguments,
    of_config,
    undeclared,
)


def test_every_declared_argument_has_a_row_and_one_only() -> None:
    assert [name for name in arguments() if name not in BY_NAME and name not in OTHER_ARGUMENTS] == []
    assert [name for name in BY_NAME if name in OTHER_ARGUMENTS] == []


_OF_EVERY_MODEL = {"num_layers", "hidden_size", "num_attention_heads", "activation_func"}
_OF_LATENT_ATTENTION = {"q_lora_rank", "kv_lora_rank", "rope_type", "rotary_scaling_factor"}
"""Their defaults are DeepSeek's, or nothing that a model can have."""


@pytest.mark.parametrize("version", transformer_fields())
def test_every_field_of_megatrons_configuration_is_crossed_refused_or_without_meaning(version: str) -> None:
    """The list is that of the real dataclass, which a reference test compares; a default is never refused."""
    fields = transformer_fields()[version]
    assert len(fields) > 250
    assert [n for n in fields if n not in BY_NAME and n not in SPELLED and n not in OTHER_ARGUMENTS] == []
    rows = (BY_NAME[name] for name in fields if name in BY_NAME)
    refused = [row.name for row in rows if row.matters({row.needs: True, row.name: fields[row.name]})]
    assert set(refused) == _OF_EVERY_MODEL | _OF_LATENT_ATTENTION


@pytest.mark.parametrize("known", ARCHITECTURES, ids=lambda known: known.model_type)
def test_every_declared_field_has_a_row(known: Any) -> None:
    related = {name for field in known.fields for name in field.names}
    declared = {**common_fields(), **config_fields(known.model_type)}
    assert config_fields(known.model_type), "the snapshot lacks its class: python -m tests.reference.declared --write"
    assert [
        name for name in declared if name not in related and name not in OTHER_FIELDS and name not in OF_TENSORS
    ] == []


@pytest.mark.parametrize("known", ARCHITECTURES, ids=lambda known: known.model_type)
def test_what_an_architecture_relates_is_in_the_table(known: Any) -> None:
    related = {name for field in known.fields for name in field.arguments}
    assert [name for name in related if name not in BY_NAME and name not in OTHER_ARGUMENTS] == []


def test_what_is_known_of_an_argument() -> None:
    said = {
        "window_size": (127, 0),
        "swiglu": True,
        "lr": 1e-5,
        "bf16": True,
        "rank": 3,
        "init_method_std": 0.02,
        "rlinf": 1,
    }
    meanings = of_arguments(said, MISTRAL.fields)
    assert {name: (m.about, m.target) for name, m in meanings.items()} == {
        "window_size": (About.COMPUTES, ("sliding_window",)),
        "swiglu": (About.COMPUTES, ()),
        "lr": (About.TRAINING, ()),
        "bf16": (About.EXECUTION, ()),
        "rank": (About.BOOKKEEPING, ()),
        "init_method_std": (About.TRAINING, ("initializer_range",)),
        "rlinf": (About.UNDECLARED, ()),
    }
    assert undeclared(meanings.values()) == ("rlinf",)


def test_what_is_known_of_a_field() -> None:
    said = {"sliding_window": 128, "use_cache": True, "router_aux_loss_coef": 0.1, "my_field": 2, "vocab_size": 10}
    meanings = of_config(said, "mistral", MISTRAL.fields)
    assert {name: m.about for name, m in meanings.items()} == {
        "sliding_window": About.COMPUTES, "use_cache": About.EXECUTION,
        "router_aux_loss_coef": About.TRAINING, "my_field": About.UNDECLARED,
        "vocab_size": About.COMPUTES,
    }  # fmt: skip
    assert meanings["sliding_window"].default == 4096


@pytest.mark.parametrize(
    ("name", "value", "more"),
    [
        ("softmax_type", "off-by-one", {}),
        ("qk_l2_norm", True, {}),
        ("glu_linear_offset", 1.0, {}),
        ("activation_func_clamp_value", 7.0, {}),
        ("no_rope_freq", 4, {}),
        ("no_rope_freq", [0, 1], {}),
        ("softmax_scale", 0.1, {}),
        ("apply_residual_connection_post_layernorm", True, {}),
        ("multi_latent_attention", True, {}),
        ("attention_output_gate", True, {}),
        ("spec", ["slime_plugins.models.glm4", "get_glm4_spec"], {}),
        ("hybrid_override_pattern", "M*-", {}),
        ("moe_expert_capacity_factor", 1.0, {"num_experts": 4}),
        ("moe_router_load_balancing_type", "sinkhorn", {"num_experts": 4}),
        ("moe_router_topk_scaling_factor", 2.5, {"num_experts": 4}),
    ],
)
def test_what_llama_cannot_say(name: str, value: object, more: dict[str, Any]) -> None:
    assert name in inexpressible_arguments({name: value, **more}, LLAMA.fields)


@pytest.mark.parametrize(
    "said",
    [
        {"window_size": None, "window_attn_skip_freq": [1, 0]},
        {"no_rope_freq": [0, 0], "softmax_type": "vanilla", "glu_linear_offset": 0},
        {"moe_expert_capacity_factor": 1.0, "moe_router_topk": 8, "kv_lora_rank": 512},
        {"hidden_dropout": 0.5, "recompute_granularity": "full", "fp8": "hybrid", "lr": 3.0, "qk_clip": True},
        {"num_experts": None, "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"]},
    ],
)
def test_what_changes_nothing_is_never_refused(said: dict[str, Any]) -> None:
    assert list(inexpressible_arguments(said, LLAMA.fields)) == []


def test_a_declared_argument_without_a_row_must_be_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(BY_NAME, "qk_l2_norm")
    assert list(inexpressible_arguments({"qk_l2_norm": False}, LLAMA.fields)) == []
    assert list(inexpressible_arguments({"qk_l2_norm": True}, LLAMA.fields)) == ["qk_l2_norm"]


def test_a_declared_field_without_a_row_must_be_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(OTHER_FIELDS, "pretraining_tp")
    assert list(inexpressible_fields({"pretraining_tp": 1, "mine": 2}, "llama", LLAMA.fields)) == []
    assert list(inexpressible_fields({"pretraining_tp": 2}, "llama", LLAMA.fields)) == ["pretraining_tp"]


def test_a_class_fills_in_what_is_not_said_and_leaves_none_alone() -> None:
    filled = complete({"sliding_window": None, "num_nextn_predict_layers": 0, "n_routed_experts": 9}, "deepseek_v3")
    assert (filled["routed_scaling_factor"], filled["n_group"], filled["topk_group"]) == (2.5, 8, 4)
    assert "num_mtp_layers" not in filled
    assert complete({"sliding_window": None}, "mistral")["sliding_window"] is None
    assert complete({}, "mistral")["sliding_window"] == 4096
    assert complete({}, "mixtral")["rope_theta"] == 1e6
    assert complete({}, "glm4_moe")["partial_rotary_factor"] == 0.5
    assert complete({"a": 1}, "nobody's") == {"a": 1}


def test_yarns_length_before_megatron_0_14() -> None:
    old = {"multi_latent_attention": True, "norm_epsilon": 1e-6, "max_position_embeddings": 163840}
    assert modern(old)["original_max_position_embeddings"] == 163840
    assert "original_max_position_embeddings" not in modern({**old, "cache_mla_latents": False})
    assert modern({**old, "original_max_position_embeddings": 4096})["original_max_position_embeddings"] == 4096
    assert of_arguments(old, LLAMA.fields)["norm_epsilon"].target == ("rms_norm_eps",)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        (
            {"use_rotary_position_embeddings": True},
            {"use_rotary_position_embeddings": False, "position_embedding_type": "rope"},
        ),
        ({"add_position_embedding": False, "position_embedding_type": "rope"}, {"add_position_embedding": True}),
        ({"add_position_embedding": False, "position_embedding_type": "learned_absolute"}, {}),
        ({"add_position_embedding": False}, {}),
        ({"moe_router_pre_softmax": True, "moe_router_score_function": "sigmoid"}, {"moe_router_pre_softmax": False}),
        ({"moe_router_pre_softmax": True, "moe_router_score_function": "softmax"}, {}),
        ({"moe_router_pre_softmax": True}, {}),
    ],
)
def test_a_flag_that_says_nothing_beside_another_gets_its_default(said: dict[str, Any], meant: dict[str, Any]) -> None:
    assert modern(said) == {**said, **meant}
