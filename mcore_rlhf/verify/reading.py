"""Reading strided pieces of records as arrays of words, in bands of bounded size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from mcore_rlhf.core.box import Shape
from mcore_rlhf.core.cast import Words
from mcore_rlhf.core.catalog import Record
from mcore_rlhf.core.execute import WINDOW_BYTES, WORDS, SourceBytes, strided
from mcore_rlhf.core.plan import Copy
from mcore_rlhf.core.windows import rows_of


def bands(copy: Copy, limit_bytes: int = WINDOW_BYTES) -> Iterator[Copy]:
    """Cut a pair of equally shaped pieces along their outer dimension, so that each band spans little of both sides."""
    pitch = max(
        copy.source_strides[0] * copy.source.dtype.itemsize, copy.target_strides[0] * copy.target.dtype.itemsize, 1
    )
    rows = max(1, limit_bytes // pitch)
    for row in range(0, copy.shape[0], rows):
        yield rows_of(copy, row, min(row + rows, copy.shape[0]))


@contextmanager
def values(source: SourceBytes, record: Record, start: int, shape: Shape, strides: Shape) -> Iterator[Words]:
    """The elements of a strided piece of a record as unsigned words; valid inside the context only."""
    itemsize = record.dtype.itemsize
    at = record.byte_offset + start * itemsize
    nbytes = (1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))) * itemsize
    data = source.view(record.file, at, nbytes)
    try:
        yield strided(np.frombuffer(data, WORDS[itemsize]), 0, shape, strides)
    finally:
        del data
        source.release(record.file, at, nbytes)
