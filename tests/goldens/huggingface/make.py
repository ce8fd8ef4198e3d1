"""Writes the folder beside this file with transformers itself; see ../ORIGIN.md. Its files are kept: nothing runs this in a test."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

FOLDER = Path(__file__).parent / "llama_tied_bf16_sharded"


def main() -> None:
    """A tied Llama in bf16, in two shards, with a tokenizer of 69 words for 72 rows, and two tokens that end a text."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=72, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, tie_word_embeddings=True, eos_token_id=2,
        bos_token_id=1, pad_token_id=0, rms_norm_eps=1e-5,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        eos_token_id=[2, 3], do_sample=True, temperature=0.7, bos_token_id=1, pad_token_id=0
    )
    model.save_pretrained(FOLDER, max_shard_size="20KB")
    words = ["<pad>", "<s>", "</s>", "<end>", *(f"w{number}" for number in range(64))]
    words_only = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    words_only.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words_only, eos_token="</s>", bos_token="<s>", pad_token="<pad>"
    )
    tokenizer.add_tokens(["<think>"], special_tokens=True)
    tokenizer.save_pretrained(FOLDER)


if __name__ == "__main__":
    main()
