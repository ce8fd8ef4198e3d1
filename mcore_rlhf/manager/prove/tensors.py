"""Comparing the bytes of stored tensors, a window at a time, and saying which element is the first that differs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from mcore_rlhf.storage.mapped import MappedFile
from mcore_rlhf.storage.ptfile import PtFile, StoredTensor

_WINDOW_NBYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """The bytes of one file's tensors.

    Args:
        pt: The file, opened.
        mapped: Its bytes.
    """

    pt: PtFile
    mapped: MappedFile

    def windows(self, tensor: StoredTensor) -> Iterator[np.ndarray[Any, Any]]:
        """The tensor's elements in logical order, as flat arrays of bytes; a window is valid until the next one."""
        nbytes = prod(tensor.shape) * tensor.record.dtype.itemsize
        if not is_contiguous(tensor):
            whole = _bytes_of(self.pt, tensor)
            yield from (whole[at : at + _WINDOW_NBYTES] for at in range(0, nbytes, _WINDOW_NBYTES))
            return
        start = tensor.record.byte_offset + tensor.start * tensor.record.dtype.itemsize
        for at in range(0, nbytes, _WINDOW_NBYTES):
            count = min(_WINDOW_NBYTES, nbytes - at)
            yield np.frombuffer(self.mapped.view(start + at, count), np.uint8)
            self.mapped.release(start + at, count)


def is_contiguous(tensor: StoredTensor) -> bool:
    """Whether the elements lie one after another."""
    expected = 1
    for length, stride in reversed(list(zip(tensor.shape, tensor.strides, strict=True))):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True


def _bytes_of(pt: PtFile, tensor: StoredTensor) -> np.ndarray[Any, Any]:
    import torch

    flat = pt.load(tensor).contiguous().reshape(-1).view(torch.uint8)
    array: np.ndarray[Any, Any] = flat.numpy()
    return array


@dataclass(frozen=True, slots=True)
class TensorDiffer:
    """Compares tensors of two files.

    Args:
        a: The uninterrupted run's.
        b: The other one's.
    """

    a: StoredBytes
    b: StoredBytes

    def __call__(self, a: StoredTensor, b: StoredTensor) -> str | None:
        """What differs between two tensors of one shape and type; None where nothing does."""
        itemsize, differing, first, at = a.record.dtype.itemsize, 0, "", 0
        for left, right in zip(self.a.windows(a), self.b.windows(b), strict=True):
            if not np.array_equal(left, right):
                wrong = np.flatnonzero((left != right).reshape(-1, itemsize).any(axis=1))
                differing += len(wrong)
                first = first or _first(a, at, int(wrong[0]), left, right)
            at += len(left) // itemsize
        return f"{differing} of {at} elements; first: {first}" if differing else None


def _first(
    tensor: StoredTensor, before: int, index: int, left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]
) -> str:
    place = [int(number) for number in np.unravel_index(before + index, tensor.shape)] if tensor.shape else []
    values = [_value(tensor.record.dtype.name, window, index) for window in (left, right)]
    return f"{place} is {values[0]} and {values[1]}"


def _value(dtype: str, window: np.ndarray[Any, Any], index: int) -> str:
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    raw = bytearray(window[index * kind.itemsize : (index + 1) * kind.itemsize].tobytes())
    return repr(torch.frombuffer(raw, dtype=kind)[0].item())
