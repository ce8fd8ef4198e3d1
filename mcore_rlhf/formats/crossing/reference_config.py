"""The description of a model that a checkpoint does not hold itself: its Hugging Face ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from mcore_rlhf.errors import UsageError


def read_config(folder: str) -> dict[str, object]:
    """The ``config.json`` of a model's folder, or such a file itself.

    Raises:
        UsageError: There is none, or it is none.
    """
    path = Path(folder).expanduser()
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"{path}: cannot read the model's config: {error.strerror}\nGive --reference-config the folder of a Hugging Face model."
        ) from None
    except ValueError as error:
        raise UsageError(f"{path}: is no JSON: {error}") from None
    if not isinstance(config, dict):
        raise UsageError(f'{path}: expected an object such as {{"hidden_size": 4096}}, found {type(config).__name__}')
    return config


def plain(values: Mapping[str, object]) -> dict[str, object]:
    """Those of the values that any reader understands: numbers, texts, and lists of them."""
    return {key: value for key, value in values.items() if _is_plain(value)}


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)
