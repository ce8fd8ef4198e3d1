"""File names of a Hugging Face folder.

Source: transformers 5.23.0, ``utils/__init__.py`` (``SAFE_WEIGHTS_NAME``, ``WEIGHTS_NAME``, …), ``modeling_utils.py``
(``save_pretrained``), ``tokenization_utils_base.py``.
"""

from __future__ import annotations

import re

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
SAFETENSORS, BIN = "safetensors", "bin"
MODEL_STEM = {SAFETENSORS: "model", BIN: "pytorch_model"}
"""What the names of weight files begin with, by their ending; the first kind that is there counts."""

OPTIMIZER = "optimizer"
"""The folder in which we keep what has no place in a Hugging Face folder; transformers does not look at it."""
STATE = f"{OPTIMIZER}/state.json"

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "chat_template.jinja", "chat_template.json",
    "processor_config.json", "preprocessor_config.json",
)  # fmt: skip
"""What is carried along byte for byte, where it is there."""

_SHARD = "{stem}-{number:05d}-of-{count:05d}.{ending}"
_NUMBERS = re.compile(r"-(\d{5,})-of-(\d{5,})\.")


def file_name(stem: str, ending: str, number: int = 1, count: int = 1) -> str:
    """The name of a weight file: ``model.safetensors``, or ``model-00002-of-00007.safetensors``."""
    if count == 1:
        return f"{stem}.{ending}"
    return _SHARD.format(stem=stem, number=number, count=count, ending=ending)


def index_name(stem: str, ending: str) -> str:
    """The name of the file that says which tensor is in which: ``model.safetensors.index.json``."""
    return f"{stem}.{ending}.index.json"


def shard_count(file: str) -> int | None:
    """How many files a shard's name says there are, or None for one that is whole."""
    found = _NUMBERS.search(file)
    return int(found.group(2)) if found else None
