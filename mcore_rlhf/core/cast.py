"""The only arithmetic there is: converting values from one element type to another, as torch does."""

from __future__ import annotations

import numpy as np

from .dtype import DType


def convert(words: np.ndarray, source: DType, target: DType) -> np.ndarray:
    """Convert elements, given and returned as unsigned words that hold their bits (numpy has no bfloat16).

    Args:
        words: Elements of type ``source``, any shape.
        source: What the words hold.
        target: What they become; rounding is to the nearest, ties to even.

    Returns:
        Words as wide as ``target``, of the same shape.
    """
    import torch  # a plan without casts never needs it

    values = torch.from_numpy(_owned(words)).view(getattr(torch, source.name))
    result = values.to(getattr(torch, target.name))
    word = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}[target.itemsize]
    return result.view(word).numpy()


def differing_after_rounding(masters: np.ndarray, params: np.ndarray, master: DType, param: DType) -> int:
    """Count the elements whose master copy, rounded, is not the parameter, bit for bit.

    Args:
        masters: Words of elements of type ``master``.
        params: As many words of elements of type ``param``, of the same shape.

    Returns:
        The number of elements that differ; 0 when the two agree.
    """
    rounded = masters if master == param else convert(masters, master, param)
    return 0 if np.array_equal(rounded, params) else int((rounded != params).sum())


def as_floats(words: np.ndarray, dtype: DType) -> np.ndarray:
    """The values of elements as float64, for comparing with a tolerance."""
    import torch

    values = torch.from_numpy(_owned(words)).view(getattr(torch, dtype.name))
    result: np.ndarray = values.to(torch.float64).numpy()
    return result


def _owned(words: np.ndarray) -> np.ndarray:
    """Contiguous and writable: torch does not take views of read-only files without complaint."""
    return np.array(words) if not words.flags.writeable or not words.flags.c_contiguous else words
