"""How transformers is told to load a folder, where it can at all.

Source: transformers 5.23.0, ``models/auto/modeling_auto.py``, ``models/auto/auto_factory.py`` (``from_pretrained``): the class follows
from ``model_type``, so a folder without one is refused; code of the folder's own needs ``trust_remote_code``.
"""

from __future__ import annotations

from mcore_rlhf.errors import CheckpointError
from mcore_rlhf.storage.paths import ReadablePath

from .config import read_own_config

_CAUSAL = "ForCausalLM"
_AUTO = (
    _CAUSAL,
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForImageTextToText",
    "ForQuestionAnswering",
    "Model",
)
"""Ends of class names, each of which has an ``AutoModel`` of its own."""


def loading_line(folder: ReadablePath) -> str:
    """The line of Python; empty for a folder that does not say which model it is.

    Args:
        folder: The folder.
    """
    try:
        config = read_own_config(folder)
    except CheckpointError:
        return ""
    classes = config.get("architectures")
    named = str(classes[0]) if isinstance(classes, list) and classes else _CAUSAL
    if not isinstance(config.get("model_type"), str):
        return ""
    code = ", trust_remote_code=True" if config.get("auto_map") else ""
    end = next((end for end in _AUTO if named.endswith(end)), None)
    loader = named if end is None else f"AutoModel{end.removesuffix('Model')}"
    return f'{loader}.from_pretrained("{folder}"{code})'
