"""Second names of tied weights: an FSDP run stores them under both, and trains one."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from mcore_rlhf.core.account import Fate, Report
from mcore_rlhf.storage.dcp import DcpFolder

_EMBEDDING = re.compile(r"(?:^|[._])(?:embed\w*|wte|word_embeddings)\.")


def find_aliases(
    opened: DcpFolder, model_keys: Mapping[str, str], trained: Collection[str], notes: Report
) -> dict[str, str]:
    """Matrices that the optimizer does not know, and whose bytes are those of a trained one: an embedding and an output layer.

    Args:
        opened: The folder.
        model_keys: Keys of the model's tensors, by name.
        trained: Parameters that the optimizer has states of; without any, nothing can be told.
        notes: Told what was found.

    Returns:
        ``{alias: owner}``.
    """
    found: dict[str, str] = {}
    shapes = {name: opened.tensors[key].global_shape for name, key in model_keys.items()}
    for alias, key in model_keys.items():
        if alias in trained or len(shapes[alias]) != 2:
            continue
        for owner in model_keys:
            fits = owner in trained and shapes[owner] == shapes[alias]
            if (
                fits
                and _EMBEDDING.search(f"{alias} {owner}")
                and _checksums(opened, key) == _checksums(opened, model_keys[owner])
            ):
                found[alias] = owner
                notes.add(Fate.NOTE, f"{alias}: the same tensor as {owner}, stored twice")
                break
    return found


def _checksums(opened: DcpFolder, key: str) -> object:
    """Type, cut and CRC of every part: equal ones hold equal bytes."""
    tensor = opened.tensors[key]
    return tensor.dtype, tuple((box, opened.checksum(tensor, box)) for box in tensor.boxes)
