"""Saving what the plain engine describes, without a manager around it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mcore_rlhf.engines.base import LoadRequest, apply
from mcore_rlhf.engines.plain import FILE, RECORD, TorchEngine
from mcore_rlhf.storage.checksum import crc32


def save(engine: TorchEngine, folder: Path) -> Path:
    """As the manager does: segment by segment."""
    (live,) = engine.live(1).files
    assert live.container is not None
    with live.container.create(folder / FILE) as writer:
        crcs = {}
        for segment in live.segments:
            data = segment.tensor.contiguous().view(torch.uint8).numpy().data
            writer.write(segment.label, segment.byte_offset, data)
            crcs[segment.label] = crc32(data)
        writer.finish(crcs)
    return folder


def save_without_names(engine: TorchEngine, folder: Path) -> Path:
    """As before the file said whose state the optimizer's is; written by torch."""
    torch.save(engine._parts(), folder / FILE)
    return folder


def load(engine: TorchEngine, folder: Path, optimizer: bool = True) -> Any:
    prepared = engine.prepare_load(LoadRequest(folder, "actor", optimizer=optimizer))
    apply(prepared)
    return prepared.report


def stored(folder: Path) -> Any:
    """What torch reads."""
    found = torch.load(folder / FILE, weights_only=True)
    assert RECORD in found
    return found


def same(some: object, other: object) -> bool:
    """Equal to the last bit, type, shape and key, in a nest."""
    if isinstance(some, torch.Tensor):
        assert isinstance(other, torch.Tensor)
        return (some.dtype, some.shape, some.device) == (other.dtype, other.shape, other.device) and torch.equal(
            some.contiguous().reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8)
        )
    if isinstance(some, dict) and isinstance(other, dict):
        return some.keys() == other.keys() and all(same(some[key], other[key]) for key in some)
    if isinstance(some, list | tuple) and isinstance(other, list | tuple):
        return len(some) == len(other) and all(same(a, b) for a, b in zip(some, other, strict=True))
    return type(some) is type(other) and some == other
