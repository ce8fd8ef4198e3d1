"""The values of a logical tensor as its catalogue says them, put together with numpy alone."""

from __future__ import annotations

import numpy as np
import torch

from mcore_rlhf.core.catalog import TensorName
from mcore_rlhf.families.source import Source

_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def tensor_of(source: Source, param: str, state: str) -> torch.Tensor:
    """A whole tensor, from the first replica of each of its boxes."""
    entry = source.catalog.get(TensorName(source.role, param, state))
    assert entry is not None, (param, state)
    word = _WORDS[entry.dtype.itemsize]
    whole = np.zeros(entry.global_shape, word)
    for chunk in entry.primary():
        flat = np.fromfile(source.root / chunk.record.file, word, chunk.record.numel, offset=chunk.record.byte_offset)
        steps = [stride * flat.itemsize for stride in chunk.strides]
        part = np.lib.stride_tricks.as_strided(flat[chunk.start :], chunk.box.shape, steps)
        whole[tuple(slice(a, b) for a, b in zip(chunk.box.offset, chunk.box.stop, strict=True))] = part
    return torch.from_numpy(whole).view(getattr(torch, entry.dtype.name))
