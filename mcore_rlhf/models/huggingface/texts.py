"""The text of a model of text and images: its description and its names, as those of a model of text alone.

Positions of images (``mrope_section``) are those of text where there are none.

Sources: transformers 5.23.0, ``models/{qwen2_vl,qwen2_5_vl,qwen3_vl,qwen3_5,qwen3_5_moe}/configuration_*.py`` (folders of 2025 say all of
it in one section), ``conversion_mapping.py``: so does a class of text alone read the folder of a model of both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from mcore_rlhf.models.meaning.declared import common_fields, complete, config_fields

from . import TEXTS
from .rotary_fields import ROPE_NAMES, rope_type

Config = Mapping[str, object]

_TEXT, _IMAGES = "model.language_model.", ("model.visual.", "visual.")
_OF_IMAGES = ("mrope_section", "mrope_interleaved")


def text_of(config: Config) -> Config:
    """The description of the text where a model is of text and images and its text is known by itself; otherwise what it is."""
    kind = str(config.get("model_type"))
    known, inside = TEXTS.get(kind), config.get("text_config")
    if known is None:
        return config
    own = f"{kind}_text"
    if not isinstance(inside, Mapping):
        spoken = {*config_fields(own), *common_fields(), *ROPE_NAMES, "torch_dtype"}
        inside = {name: value for name, value in config.items() if name in spoken}
    if own != known.model_type:  # a class of text has other defaults
        inside = {name: _without_images(value) for name, value in complete(inside, own).items()}
    tied = {name: config[name] for name in ("tie_word_embeddings",) if name in config}
    return {**inside, **tied, "model_type": known.model_type, "architectures": [known.class_name]}


def _without_images(value: object) -> object:
    """What is said of positions, without what is said of those of images."""
    if not isinstance(value, Mapping) or not any(name in value for name in (*_OF_IMAGES, "rope_type", "type")):
        return value
    left = {name: said for name, said in value.items() if name not in (*_OF_IMAGES, "type", "rope_type")}
    kind = rope_type(value)
    return {**left, "rope_type": "default" if kind == "mrope" else kind}


def is_of_images(name: str) -> bool:
    """Whether a tensor is of the model of images."""
    return name.startswith(_IMAGES)


def name_in_text(name: str) -> str:
    """What a tensor of the text is called in a model of text alone."""
    return re.sub(f"^{re.escape(_TEXT)}", "model.", name)


_MOVED = ("qwen2_vl", "qwen2_5_vl")
"""Classes whose modules have other names than their folders: the text lies below one module, and the images below the same."""


def is_moved(config: Config) -> bool:
    """Whether names in memory are others than on disk."""
    return config.get("model_type") in _MOVED


def name_in_memory(name: str) -> str:
    """What a tensor on disk is called in memory, where its class is one of those."""
    inside = re.sub(r"^model\.(?!language_model\.|visual\.)", _TEXT, name)
    return re.sub(r"^visual\.", "model.visual.", inside)


def name_on_disk(name: str) -> str:
    """The other way round."""
    return re.sub(r"^model\.visual\.", "visual.", name_in_text(name))
