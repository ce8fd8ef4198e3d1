"""Descriptions that say one thing and tensors that say another: refused, with the field and its file, the tensor and its file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf.errors import Corrupt, LayoutMismatch
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.formats.registry import open_checkpoint
from tests.helpers.conversions import GOLDENS
from tests.helpers.damage import MODEL, copied, edited
from tests.unit.formats.hf_by_hand import CONFIG, Tensors, llama, write
from tests.unit.formats.refusal import refused

QKV = {"q": 8, "k": 4, "v": 4}
MLP = {"gate": 12, "up": 12, "down": 8}


def biases(module: str, parts: dict[str, int], layers: tuple[int, ...] = (0, 1)) -> Tensors:
    """Biases of projections of some layers."""
    return {f"model.layers.{i}.{module}.{p}_proj.bias": torch.ones(n) for i in layers for p, n in parts.items()}


ATTENTION = biases("self_attn", {**QKV, "o": 8})
ON, OFF = {"attention_bias": True}, {"attention_bias": False}


@pytest.mark.parametrize(
    ("more", "fields", "words"),
    [
        (ATTENTION, OFF, ["attention_bias is false", "model.layers.0.self_attn.q_proj.bias", "are there (model.safetensors)"]),
        (ATTENTION, {}, ["attention_bias is not said, which means false"]),
        ({}, ON, ["attention_bias is true", "are not there, and model.layers.0.self_attn.q_proj.weight is (model.safetensors)"]),
        (biases("self_attn", QKV), ON, ["attention_bias is true", "model.layers.1.self_attn.o_proj.bias are not there"]),
        (biases("self_attn", {**QKV, "o": 8}, (0,)), ON, ["attention_bias is true", "model.layers.1.self_attn.q_proj.bias"]),
        (biases("mlp", MLP), {}, ["mlp_bias is not said", "model.layers.0.mlp.down_proj.bias"]),
        ({}, {"mlp_bias": True}, ["mlp_bias is true", "model.layers.0.mlp.gate_proj.bias"]),
        ({"lm_head.weight": torch.ones(24, 8)}, {}, ["vocab_size is 20, but lm_head.weight is [24, 8]"]),
    ],
)  # fmt: skip
def test_a_config_that_is_not_that_of_the_tensors(
    more: Tensors, fields: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    folder = write(tmp_path / "hf", llama() | more, {**CONFIG, **fields})
    refused(folder, LayoutMismatch, f"{folder / 'config.json'}: {words[0]}", *words[1:])


def test_what_a_class_has_no_field_for_says_nothing(tmp_path: Path) -> None:
    """Qwen2 has its biases whatever a field of Llama's says, and a class that nobody knows may call anything anything."""
    qwen = {**CONFIG, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], **OFF}
    assert opened(write(tmp_path / "a", llama() | biases("self_attn", QKV), qwen))
    mine = {**CONFIG, "model_type": "mine", "architectures": ["MineForCausalLM"]}
    assert opened(write(tmp_path / "b", llama() | biases("self_attn", QKV), mine))
    assert opened(write(tmp_path / "c", llama() | biases("self_attn", QKV), {**mine, **ON}))


def test_two_heads_of_one_name(tmp_path: Path) -> None:
    tensors = llama()
    folder = write(tmp_path / "hf", tensors, {**CONFIG, "tie_word_embeddings": True}, shards=2)
    refused(folder, Corrupt, "(lm_head.weight)", "(model.embed_tokens.weight)", "tie_word_embeddings of config.json")
    equal = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    assert opened(write(tmp_path / "b" / "hf", equal, {**CONFIG, "tie_word_embeddings": True}))


def opened(path: Path) -> bool:
    """Whether a folder is opened at all."""
    return bool(open_checkpoint(path, ReadOptions()).model.params)


DENSE, EXPERTS = "tp1_bf16_do", "ep2dp2_moe_seq_bf16_do"
Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("golden", "argument", "value", "tensor"),
    [
        (DENSE, "add_bias_linear", True, "decoder.layers.0.mlp.linear_fc1.bias"),
        (DENSE, "add_qkv_bias", True, "decoder.layers.0.self_attention.linear_qkv.bias"),
        (DENSE, "qk_layernorm", True, "decoder.layers.0.self_attention.q_layernorm.weight"),
        (DENSE, "normalization", "LayerNorm", "decoder.final_layernorm.bias"),
        (DENSE, "untie_embeddings_and_output_weights", False, "output_layer.weight is there (iter_"),
        (DENSE, "num_experts", 4, ".mlp.router.weight"),
        (DENSE, "mtp_num_layers", 1, ".eh_proj.weight"),
        (DENSE, "multi_latent_attention", True, ".linear_kv_up_proj.weight"),
        (DENSE, "ffn_hidden_size", 128, "decoder.layers.0.mlp.linear_fc2.weight of 96 columns"),
        (DENSE, "position_embedding_type", "learned_absolute", "embedding.position_embeddings.weight is not there"),
        (EXPERTS, "moe_shared_expert_intermediate_size", 64, "decoder.layers.0.mlp.shared_experts.linear_fc1.weight"),
        (EXPERTS, "moe_router_enable_expert_bias", True, "decoder.layers.0.mlp.router.expert_bias"),
        (EXPERTS, "moe_ffn_hidden_size", 128, "of 48 columns"),
    ],
)
def test_arguments_that_are_not_those_of_the_tensors(
    golden: str, argument: str, value: object, tensor: str, tmp_path: Path
) -> None:
    source = copied(golden, tmp_path)
    for path in source.rglob(MODEL):
        with edited(path) as tree:
            setattr(tree["args"], argument, value)
    said = str(value).lower() if isinstance(value, bool) else repr(value)
    refused(source, LayoutMismatch, f"{MODEL}: {argument} is {said}", tensor)


@pytest.mark.parametrize(
    ("argument", "change", "tensor"),
    [
        ("untie_embeddings_and_output_weights is true", lambda model: model.pop("output_layer.weight"), "output_layer.weight"),
        ("add_qkv_bias is false", lambda model: add(model, "self_attention.linear_qkv.bias", 128), "linear_qkv.bias"),
        ("add_bias_linear is false", lambda model: add(model, "self_attention.linear_proj.bias", 64), "linear_proj.bias"),
        ("normalization is 'RMSNorm'", lambda model: add(model, "input_layernorm.bias", 64), "input_layernorm.bias"),
    ],
)  # fmt: skip
def test_tensors_that_the_arguments_do_not_know(argument: str, change: Change, tensor: str, tmp_path: Path) -> None:
    source = copied(DENSE, tmp_path)
    for path in source.rglob(MODEL):
        with edited(path) as tree:
            change(tree["model"])
    refused(source, LayoutMismatch, argument, tensor, no_optimizer=True)


def add(model: dict[str, Any], name: str, rows: int) -> None:
    """A tensor more in every layer."""
    model.update({f"decoder.layers.{i}.{name}": torch.ones(rows).bfloat16() for i in range(4)})


@pytest.mark.parametrize(
    "golden",
    sorted(
        path
        for path in GOLDENS.parent.glob("*/*")
        if path.is_dir() and path.parent.name not in ("trainers", "nemo_rl", "areal")
    ),  # roots of runs
    ids=lambda path: path.name,
)
def test_all_that_frameworks_wrote_is_described_by_what_they_wrote(golden: Path) -> None:
    assert open_checkpoint(golden, ReadOptions(), partial=True).model.params
