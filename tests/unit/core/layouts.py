"""Random relations for the tests of planning: a tensor cut into boxes that lie somewhere in records."""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import prod

import numpy as np

from mcore_rlhf.core.catalog import Box, Chunk, Record, TensorEntry, TensorName, dtype_of, row_major
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.core.plan import Copy

NAME = TensorName("actor", "weight")
INT32 = dtype_of("int32")


def cut(rng: random.Random, box: Box, pieces: int) -> list[Box]:
    """Cut a box at random places into disjoint boxes that cover it."""
    done = [box]
    for _ in range(pieces - 1):
        which = rng.randrange(len(done))
        whole = done[which]
        dim = rng.randrange(len(whole.shape))
        if whole.shape[dim] < 2:
            continue
        at = rng.randrange(1, whole.shape[dim])
        low, high = list(whole.shape), list(whole.shape)
        low[dim], high[dim] = at, whole.shape[dim] - at
        start = list(whole.offset)
        start[dim] += at
        done[which : which + 1] = [Box(whole.offset, tuple(low)), Box(tuple(start), tuple(high))]
    return done


@dataclass
class Stored:
    """A tensor that lies in records: its entry, and what each record holds."""

    entry: TensorEntry
    contents: dict[str, np.ndarray]


def stored(
    rng: random.Random, tensor: np.ndarray, file: str, pieces: int, records: int = 2, transposed: bool = False
) -> Stored:
    """Put the pieces of a tensor into records: some by themselves, some as parts of a larger local tensor, with gaps."""
    shape = tensor.shape
    places: list[tuple[Box, int, int, tuple[int, ...]]] = []  # box, record, start, strides
    ends = [0] * records
    for box in cut(rng, Box.whole(shape), pieces):
        number = rng.randrange(records)
        start = ends[number] + rng.randrange(5)
        if rng.random() < 0.5:  # as it is
            strides, length = row_major(box.shape), prod(box.shape)
        else:  # a column range of a wider local tensor
            wide = (*box.shape[:-1], box.shape[-1] + rng.randrange(1, 4))
            strides, length = row_major(wide), prod(wide)
            start += rng.randrange(wide[-1] - box.shape[-1] + 1)
        if transposed and len(box.shape) > 1 and rng.random() < 0.5:
            order = list(range(len(box.shape)))
            rng.shuffle(order)
            packed = row_major(tuple(box.shape[i] for i in order))
            strides = tuple(packed[order.index(i)] for i in range(len(order)))
        places.append((box, number, start, strides))
        ends[number] = start + length
    made = [Record(file, f"data/{n}", INT32, end + 7, 0) for n, end in enumerate(ends)]
    contents = {r.key: np.full(r.numel, -1, np.int32) for r in made}
    for box, number, start, strides in places:
        region = tuple(slice(a, a + n) for a, n in zip(box.offset, box.shape, strict=True))
        view(contents[made[number].key], start, box.shape, strides)[...] = tensor[region]
    chunks = tuple(Chunk(box, made[n], start, strides) for box, n, start, strides in places)
    return Stored(TensorEntry(NAME, shape, INT32, chunks), contents)


def view(flat: np.ndarray, start: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    return np.lib.stride_tricks.as_strided(flat[start:], shape, [s * flat.itemsize for s in strides])


def catalog(*entries: TensorEntry) -> Chunks:
    return Chunks.of(entries)


def naive(copy: Copy, source: np.ndarray, target: np.ndarray) -> None:
    """Carry a copy out, element by element."""
    for index in np.ndindex(*copy.shape):
        to = copy.target_start + sum(i * s for i, s in zip(index, copy.target_strides, strict=True))
        target[to] = source[copy.source_start + sum(i * s for i, s in zip(index, copy.source_strides, strict=True))]


def random_tensor(rng: random.Random) -> np.ndarray:
    shape = tuple(rng.randrange(1, 9) for _ in range(rng.randrange(1, 4)))
    return np.arange(1, prod(shape) + 1, dtype=np.int32).reshape(shape)
