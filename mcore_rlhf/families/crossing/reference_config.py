"""The description of a model that a checkpoint does not hold itself: its Hugging Face ``config.json``."""

from __future__ import annotations

from pathlib import Path

from mcore_rlhf.errors import UsageError
from mcore_rlhf.storage import reading
from mcore_rlhf.storage.leftovers import Carried

CONFIG = "config.json"


def read_config(folder: str) -> dict[str, object]:
    """The ``config.json`` of a model's folder, or such a file itself.

    Raises:
        UsageError: There is none, or it is none.
    """
    path = Path(folder).expanduser()
    path = path / CONFIG if path.is_dir() else path
    try:
        config = reading.read_json(path)
    except OSError as error:
        raise UsageError(
            f"{path}: cannot read the model's config: {error.strerror}\nGive --reference-config the folder of a Hugging Face model."
        ) from None
    except ValueError as error:
        raise UsageError(f"{path}: is no JSON: {error}") from None
    if not isinstance(config, dict):
        raise UsageError(f'{path}: expected an object such as {{"hidden_size": 4096}}, found {type(config).__name__}')
    return config


def config_in(carried: Carried) -> dict[str, object]:
    """The model's description among the files; empty where there is none, or where it is none."""
    path, text = carried.files.get(CONFIG), carried.texts.get(CONFIG)
    try:
        found = reading.parse_json(text or (reading.read_bytes(path) if path is not None else "{}"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
