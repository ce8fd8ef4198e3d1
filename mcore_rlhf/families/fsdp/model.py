"""What an FSDP run's files say of its model besides tensors: how many layers it has, and the description beside them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from mcore_rlhf.storage import reading
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.pieces import DESCRIBED

_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|blocks|block|h)\.(\d{1,18})\.")


def num_layers(names: Iterable[str]) -> int:
    """Decoder layers, as far as the names of parameters tell."""
    return max((1 + int(match[1]) for name in names if (match := _LAYER.search(name))), default=0)


def model_config(root: ReadablePath, weights: ReadablePath | None = None) -> dict[str, object]:
    """The model's ``config.json`` where the run put one: in the checkpoint, in ``huggingface`` in it, or beside its pieces; else empty.

    Args:
        root: The checkpoint's folder.
        weights: That of the weights, where it is another.
    """
    folders = (root, root / "huggingface", *(() if weights is None else (weights / DESCRIBED, weights)))
    for folder in folders:
        try:
            config = reading.read_json(folder / "config.json")
        except (OSError, ValueError):
            continue
        if isinstance(config, dict):
            return config
    return {}
