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
"""The folder in which we keep the optimizer's tensors; transformers does not look at it."""
OLD_STATE = f"{OPTIMIZER}/state.json"
"""Where everything but tensors once lay."""

CHAT_TEMPLATES = "chat_templates"
_TOKENIZER = re.compile(
    r"(tokenizer|tokenization_|vocab|merges|special_tokens_map|added_tokens|spiece|sentencepiece|tekken|tiktoken|chat_template"
    r"|processor_config|preprocessor_config|video_preprocessor_config|processing_|image_processing_|video_processing_"
    r"|feature_extraction_).*|.*\.(model|tiktoken|spm|bpe)(\.v\d+)?"
)
"""What turns texts, images and sound into numbers and back. Sources: transformers 5.23.0, ``vocab_files_names`` of
``models/*/tokenization_*.py``, ``processing_utils.py``, ``utils/__init__.py``; mistral-common, ``tekken.json``, ``tokenizer.model.v3``."""
_CODE = re.compile(r"[A-Za-z_]\w*\.py")


def is_of_tokenizer(path: str) -> bool:
    """Whether a file of a model's folder belongs to the tokenizer, or to another processor of the model's input.

    Args:
        path: Relative to the folder, with ``/``: also a file in ``chat_templates/``.
    """
    return _TOKENIZER.fullmatch(path.partition("/")[0]) is not None


def is_code(path: str) -> bool:
    """Whether a file is a module of Python at the top of the folder: carried, never run here."""
    return _CODE.fullmatch(path) is not None


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
