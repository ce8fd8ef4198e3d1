"""Writes the folders beside it: peft itself saves adapters of tiny transformers models, and merges one. Run: python make.py"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

HERE = Path(__file__).parent
SIZES = {
    "vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 64,
}  # fmt: skip


def save(model: torch.nn.Module, name: str, config: LoraConfig) -> torch.nn.Module:
    """Give the model an adapter of random values, and save it."""
    adapted = get_peft_model(model, config)
    for key, parameter in adapted.named_parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.2)
    adapted.save_pretrained(HERE / name)
    (HERE / name / "README.md").unlink()
    return adapted


def loaded(kind: type[PreTrainedModel], name: str) -> PreTrainedModel:
    """A base, which does not tell on which machine it lay."""
    model = kind.from_pretrained(HERE / name)
    model.config._name_or_path = model.name_or_path = name
    return model


def main() -> None:
    """Write everything anew."""
    for name in ("base", "adapter", "merged", "base_moe", "adapter_moe"):
        shutil.rmtree(HERE / name, ignore_errors=True)
    torch.manual_seed(11)
    LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)).save_pretrained(HERE / "base")
    adapted = save(
        loaded(LlamaForCausalLM, "base"),
        "adapter",
        LoraConfig(
            r=4, lora_alpha=12, target_modules=["q_proj", "v_proj", "o_proj", "down_proj"], task_type="CAUSAL_LM",
            modules_to_save=["lm_head"], rank_pattern={"o_proj": 2}, alpha_pattern={"o_proj": 5},
        ),
    )  # fmt: skip
    adapted.merge_and_unload().save_pretrained(HERE / "merged")
    moe = Qwen3MoeConfig(
        **{**SIZES, "num_hidden_layers": 1}, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2
    )
    Qwen3MoeForCausalLM(moe).save_pretrained(HERE / "base_moe")
    everywhere = LoraConfig(r=2, lora_alpha=4, target_modules="all-linear")
    save(loaded(Qwen3MoeForCausalLM, "base_moe"), "adapter_moe", everywhere)
    for path in HERE.rglob("*.safetensors"):
        path.chmod(0o644)


if __name__ == "__main__":
    main()
