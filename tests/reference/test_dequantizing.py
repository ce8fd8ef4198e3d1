"""fp8 folders made plain, against transformers' own ``Fp8Dequantize``: the same weights when it loads them as when we convert them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, LlamaConfig, Qwen3MoeConfig
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from mcore_rlhf.convert import convert
from tests.helpers.conversions import options

SIZES = {
    "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 128, "max_position_embeddings": 64,
}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**SIZES, head_dim=64),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, head_dim=64, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=128),
}


def quantized(folder: Path) -> None:
    """Quantize a saved folder as DeepSeek's release files are: blocks of 128 × 128, fp32 scales."""
    stored = load_file(folder / "model.safetensors")
    for name, tensor in list(stored.items()):
        if not name.endswith("_proj.weight"):
            continue
        rows, columns = tensor.shape
        parts = tensor.float().reshape(rows // 128, 128, columns // 128, 128)
        scale = parts.abs().amax((1, 3)) / 448
        stored[name] = (parts / scale[:, None, :, None]).reshape(rows, columns).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scale
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("middle", ["", "megatron", "deepspeed"])
def test_transformers_finds_the_same_values(family: str, middle: str, tmp_path: Path) -> None:
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(CONFIGS[family]).to(torch.bfloat16).save_pretrained(tmp_path / "fp8")
    quantized(tmp_path / "fp8")
    if middle:
        convert(tmp_path / "fp8", tmp_path / "middle", replace(options(dequantize=True), to=middle))
        convert(tmp_path / "middle", tmp_path / "plain", replace(options(), to="hf"))
    else:
        convert(tmp_path / "fp8", tmp_path / "plain", replace(options(dequantize=True), to="hf"))
    stored, plain = (
        load_file(tmp_path / "fp8" / "model.safetensors"),
        load_file(tmp_path / "plain" / "model.safetensors"),
    )
    theirs = Fp8Dequantize(None)
    for name, tensor in plain.items():
        scale = stored.get(f"{name}_scale_inv")
        expected = stored[name] if scale is None else theirs._dequantize_one(stored[name], scale, torch.bfloat16)
        assert torch.equal(tensor, expected), name
    after, told = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", output_loading_info=True)
    assert not any(told.values()), told
    how = FineGrainedFP8Config(dequantize=True)
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "fp8", quantization_config=how)
    expected_state, found = before.state_dict(), after.state_dict()
    assert expected_state.keys() == found.keys()
    assert [name for name in found if not torch.equal(expected_state[name], found[name])] == []
