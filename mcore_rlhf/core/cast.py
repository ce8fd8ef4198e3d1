"""The only arithmetic there is: converting values from one element type to another, as torch does."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .dtype import DType

Words = NDArray[Any]
"""Elements as unsigned words that hold their bits; numpy cannot say which width at type-checking time."""


def convert(words: Words, source: DType, target: DType) -> Words:
    """Convert elements, given and returned as unsigned words that hold their bits (numpy has no bfloat16).

    Args:
        words: Elements of type ``source``, any shape.
        source: What the words hold.
        target: What they become; rounding is to the nearest, ties to even.

    Returns:
        Words as wide as ``target``, of the same shape.
    """
    import torch  # a plan without casts never needs it

    values = torch.from_numpy(_borrowed(words)).view(getattr(torch, source.name))
    result = values.to(getattr(torch, target.name), copy=True)
    word = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}[target.itemsize]
    return result.view(word).numpy()


def differing_after_rounding(masters: Words, params: Words, master: DType, param: DType) -> int:
    """Count the elements whose master copy, rounded, is not the parameter, bit for bit; NaN agrees with NaN.

    Args:
        masters: Words of elements of type ``master``.
        params: As many words of elements of type ``param``, of the same shape.

    Returns:
        The number of elements that differ; 0 when the two agree.
    """
    rounded = masters if master == param else convert(masters, master, param)
    if np.array_equal(rounded, params):
        return 0
    both_nan = np.isnan(as_floats(rounded, param)) & np.isnan(as_floats(params, param))  # whose bits nobody agrees on
    return int(((rounded != params) & ~both_nan).sum())


def as_floats(words: Words, dtype: DType) -> Words:
    """The values of elements as float64, for comparing with a tolerance."""
    import torch

    values = torch.from_numpy(_borrowed(words)).view(getattr(torch, dtype.name))
    result: Words = values.to(torch.float64, copy=True).numpy()
    return result


class _Unlocked:
    """The same memory, said to be writable: torch warns of arrays that are not, even where it only reads."""

    def __init__(self, words: Words) -> None:
        self.words = words
        described = words.__array_interface__
        self.__array_interface__ = {**described, "data": (described["data"][0], False)}


def _borrowed(words: Words) -> Words:
    """An array that torch takes without a copy, as far as it can; only to be read from."""
    if not words.flags.c_contiguous:
        return np.array(words)
    return words if words.flags.writeable else np.asarray(_Unlocked(words))
