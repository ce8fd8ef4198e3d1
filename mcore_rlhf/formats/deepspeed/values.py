"""Values of a checkpoint that are no model tensors: comparing them between ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal, tensors and arrays inside them element by element and dtype by dtype.

    Args:
        a, b: Nests of plain values, real tensors, numpy arrays and stubs.
    """
    if type(a) is not type(b):
        return False
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if hasattr(a, "dtype") and hasattr(a, "shape"):
        return bool(a.dtype == b.dtype and a.shape == b.shape and (a == b).all())
    return bool(a == b)
