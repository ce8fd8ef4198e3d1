"""What fields of ``config.json`` imply of tensors, held against transformers: every class is built with every field on and off."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from mcore_rlhf.models.huggingface import ARCHITECTURES
from mcore_rlhf.models.implied import against_config
from mcore_rlhf.models.meaning.declared import config_fields

pytestmark = pytest.mark.reference

SMALL = dict.fromkeys(("hidden_size", "q_lora_rank", "kv_lora_rank"), 32) | dict(
    intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, vocab_size=64, moe_intermediate_size=16,
    num_experts=4, n_shared_experts=1, num_experts_per_tok=2, n_routed_experts=4, num_local_experts=4,
    qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
    shared_expert_intermediate_size=16, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
FLAGS = ("attention_bias", "qkv_bias", "attention_out_bias", "mlp_bias", "use_bias", "use_qk_norm")
CASES = [
    (known.model_type, flag) for known in ARCHITECTURES for flag in FLAGS if flag in config_fields(known.model_type)
]


def built(model_type: str, flag: str, value: bool) -> tuple[dict[str, Any], list[str]]:
    """What transformers says of a class with a field set, and the tensors that it makes."""
    own = transformers.AutoConfig.for_model(model_type).to_dict()
    config = transformers.AutoConfig.for_model(model_type, **{n: size for n, size in SMALL.items() if n in own})
    setattr(config, flag, value)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return config.to_dict() | {flag: value}, [name for name, _ in model.named_parameters()]


UNKNOWN = [
    ("llama4_text", "use_qk_norm"),
    ("kimi_linear", "attention_bias"),
    ("deepseek_v32", "mlp_bias"),
    ("cohere", "use_qk_norm"),
]
"""Classes in no table, of which the first three make no tensor of the field's."""


@pytest.mark.parametrize("value", [False, True])
@pytest.mark.parametrize(("model_type", "flag"), UNKNOWN)
def test_a_class_in_no_table_is_what_transformers_makes_of_it(model_type: str, flag: str, value: bool) -> None:
    assert not config_fields(model_type)
    config, names = built(model_type, flag, value)
    assert list(against_config(config, names)) == []


@pytest.mark.parametrize(("model_type", "flag"), CASES)
def test_a_field_and_the_tensors_that_it_makes(model_type: str, flag: str) -> None:
    made = {value: built(model_type, flag, value) for value in (False, True)}
    for value in (False, True):
        (config, names), (_, others) = made[value], made[not value]
        assert list(against_config(config, names)) == []
        (found,) = against_config(config, others)
        assert (found.field, found.there) == (flag, not value)
        assert set(found.tensors) == set(names) ^ set(others)
