"""From a file straight into live tensors: one copy, out of the page cache, and no tensor in between."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch

from mcore_rlhf.storage.mapped import MappedFiles
from mcore_rlhf.storage.ptfile import StoredTensor

SPAN_BYTES = 64 << 20
"""Mapped at a time, so that loading needs no more memory than that."""


def fill(root: Path, stored: Mapping[str, object], live: Mapping[str, object]) -> None:
    """Copy stored tensors into existing ones of the same names.

    Args:
        root: Folder of the file.
        stored: Name → where it lies; other values are passed over.
        live: Name → live tensor of the same shape, any device.
    """
    with MappedFiles(root) as files, torch.no_grad():
        for name, place in stored.items():
            target = live.get(name)
            if isinstance(place, StoredTensor) and isinstance(target, torch.Tensor):
                copy_into(files, place, target)


def copy_into(files: MappedFiles, place: StoredTensor, target: torch.Tensor) -> None:
    """Copy a stored tensor into an existing one.

    Args:
        files: The checkpoint's files.
        place: Where it lies.
        target: Of the same shape; any device and dtype (values are converted).
    """
    for part, rows in _parts(place, target):
        itemsize = part.record.dtype.itemsize
        at, nbytes = part.record.byte_offset + part.start * itemsize, (part.stop - part.start) * itemsize
        data = files.view(part.record.file, at, nbytes)
        flat = tensor_over(data, getattr(torch, part.record.dtype.name))
        rows.copy_(flat.as_strided(part.shape, part.strides))
        del flat, data
        files.release(part.record.file, at, nbytes)


def _parts(place: StoredTensor, target: torch.Tensor) -> Iterator[tuple[StoredTensor, torch.Tensor]]:
    """Large tensors a few rows at a time."""
    nbytes = (place.stop - place.start) * place.record.dtype.itemsize
    if not target.numel():
        return
    if nbytes <= SPAN_BYTES or not place.shape or place.shape[0] < 2:
        yield place, target
        return
    step = max(1, place.shape[0] * SPAN_BYTES // nbytes)
    for first in range(0, place.shape[0], step):
        count = min(step, place.shape[0] - first)
        start = place.start + first * place.strides[0]
        yield StoredTensor(place.record, start, (count, *place.shape[1:]), place.strides), target[first : first + count]


def tensor_over(data: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor over mapped bytes, without a copy; read it only, and only while ``data`` lives.

    ``torch.frombuffer`` warns about read-only memory, so that it is given the address instead.
    """
    buffer = (ctypes.c_char * len(data)).from_address(np.frombuffer(data, np.uint8).ctypes.data)
    return torch.frombuffer(buffer, dtype=dtype)
