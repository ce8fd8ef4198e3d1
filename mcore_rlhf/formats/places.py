"""Where parts of tensors lie, in few words: a row of an index, read both ways, and which part of a tensor each of several ranks has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, product
from math import prod
from operator import index, itemgetter
from typing import Any

from mcore_rlhf.core.catalog import (
    MASTER,
    PARAM,
    Box,
    Chunk,
    DType,
    Record,
    Shape,
    TensorEntry,
    TensorName,
    dtype_of,
    row_major,
)
from mcore_rlhf.core.plan import check_tiles
from mcore_rlhf.errors import Corrupt, Incomplete, LayoutMismatch, Unsupported, Untrusted, shown
from mcore_rlhf.families.source import Source
from mcore_rlhf.layouts.tensor import Shard, local_layout
from mcore_rlhf.models.spec import REPLICATED
from mcore_rlhf.storage.paths import ReadablePath

_MOST_CUT = 8
"""Dimensions in which tensors may be cut: a part has two corners in each. Experts, rows and columns are three."""
Row = Sequence[Any]
"""``[parameter, state, shape, type, [[file, byte, first element, shape], …]]``, in JSON; of what lies whole ``[file, byte]`` is enough."""


def lay(name: TensorName, shape: Shape, dtype: DType, parts: str | Iterable[tuple[str, Box]]) -> TensorEntry:
    """A tensor that is to lie in these files; its container says where in them.

    Args:
        name, shape, dtype: As :meth:`WholeFormat.laid` is given them.
        parts: The file that has all of it; or files, each with a part of it.
    """
    boxes = [(parts, Box.whole(shape))] if isinstance(parts, str) else parts
    return entry_of(
        name.role, [*name[1:], shape, dtype, [(file, 0, box.offset, box.shape) for file, box in boxes if box.numel]]
    )


def entry_of(role: str, row: Row) -> TensorEntry:
    """A tensor, of its row in an index: each part row by row in a record of its own.

    Args:
        role: Whose model it is.
        row: See :data:`Row`; a reader makes one of any other index.
    """
    param, state, shape, dtype, places = row
    kind, shape, chunks = dtype_of(dtype), _numbers(shape), list[Chunk]()
    for number, (file, byte, *of) in enumerate(places):
        offset, size = map(_numbers, of or ((0,) * len(shape), shape))
        record = Record(file, f"{param}:{state}" + f":{number}" * bool(number), kind, prod(size), index(byte))
        chunks.append(Chunk(Box(offset, size), record, 0, row_major(size)))
    return TensorEntry(TensorName(role, param, state), shape, kind, tuple(chunks))


def _numbers(of: Iterable[Any]) -> Shape:
    return tuple(map(index, of))  # of 2.0, "2" or None a TypeError


def row_of(entry: TensorEntry) -> Row:
    """The row of such a tensor.

    Args:
        entry: As :func:`lay` made it.
    """
    places = [(c.record.file, c.record.byte_offset, c.box.offset, c.box.shape) for c in entry.chunks]
    return [*entry.name[1:], entry.global_shape, str(entry.dtype), places]


def rows_of_ranks(shape: Shape, ranks: int) -> Iterator[tuple[int, Box]]:
    """Ranks, and the rows of a tensor that each of them has; a single number is the first's.

    Args:
        shape: The whole tensor's.
        ranks: How many there are.
    """
    if not shape:
        yield 0, Box.whole(shape)
        return
    for rank in range(ranks):
        start, stop = shape[0] * rank // ranks, shape[0] * (rank + 1) // ranks
        if start < stop:
            yield rank, Box((start, *(0,) * len(shape[1:])), (stop - start, *shape[1:]))


def parts_of_ranks(source: Source, name: TensorName, shape: Shape, ranks: int) -> Iterator[tuple[int, Box]]:
    """Tensor-parallel ranks, and what each has of a tensor as Megatron cuts it, in its order there; of what is not cut every rank has all.

    Args:
        source: Whose it is.
        name, shape: The tensor's.
        ranks: How many there are.

    Raises:
        LayoutMismatch: It cannot be cut into so many.
    """
    spec = source.model.get(name.param)
    partition = REPLICATED if spec is None or len(spec.global_shape) != len(shape) else spec.partition
    for rank in range(ranks):
        try:
            pieces = local_layout(partition, shape, Shard(rank, ranks)).pieces
        except LayoutMismatch as error:
            raise LayoutMismatch(f"{shown(str(name))}: {error}") from None
        yield from ((rank, piece.box) for piece in pieces)


def require_places(root: ReadablePath, entries: Sequence[TensorEntry], lengths: Mapping[str, int]) -> None:
    """See that all that is said to lie somewhere can lie there.

    Args:
        root: The folder.
        entries: Every tensor.
        lengths: Bytes of each file.

    Raises:
        Incomplete: A file ends before a tensor does; a part of a tensor is missing.
        Corrupt: A tensor is there twice, or a part of one lies outside of it, or of its record, or is of another type; two parts are of
            the same elements, or lie in the same bytes.
        Unsupported: A tensor is cut in more ways than are followed.
        Untrusted: A tensor lies in a file that is not listed, or before its beginning.
    """
    names = set[TensorName]()
    for entry in entries:
        if entry.name in names:
            raise Corrupt(f"{root}: {shown(str(entry.name))} is there twice: its index is damaged")
        names.add(entry.name)
        for chunk in entry.chunks:
            _require_stored(root, chunk.record, lengths)
            _require_inside(root, entry, chunk)
        _require_whole(root, entry)
    _require_apart(root, entries)


def _require_stored(root: ReadablePath, record: Record, lengths: Mapping[str, int]) -> None:
    start, stop = index(record.byte_offset), record.byte_offset + record.nbytes
    if start < 0 or stop < start or record.file not in lengths:
        raise Untrusted(
            f"{root}: {record.key} is said to be bytes {start} to {stop} of {shown(record.file)}: no file has those"
        )
    if stop > lengths[record.file]:
        raise Incomplete(
            f"{root / record.file}: ends at byte {lengths[record.file]}, and {record.key} is bytes {start} to {stop}\n"
            "Copy it again from where it came from."
        )


def _require_inside(root: ReadablePath, entry: TensorEntry, chunk: Chunk) -> None:
    """A chunk is a part of its tensor, and of its record, and its elements have the tensor's type."""
    box, record, shape = chunk.box, chunk.record, entry.global_shape
    text = ""
    if len(box.shape) != len(shape) or not Box.whole(shape).contains(box):
        text = f"{box} lies outside the tensor, whose shape is {shape}"
    elif box.numel:
        steps = [(n - 1) * stride for n, stride in zip(box.shape, chunk.strides, strict=True)]
        first, last = (chunk.start + sum(limit(0, step) for step in steps) for limit in (min, max))
        if first < 0 or last >= record.numel:
            text = f"elements {first} to {last} of {shown(record.key)} are said to be {box}, and it has {record.numel}"
    if not text and entry.dtype != record.dtype:
        text = f"is said to be of {entry.dtype}, and {shown(record.key)} is of {record.dtype}"
    if text:
        raise Corrupt(f"{root}: {shown(str(entry.name))}: {text}: its index is damaged")


def _require_whole(root: ReadablePath, entry: TensorEntry) -> None:
    """The parts of a tensor are all of it, and each element is in one; equal parts are replicas.

    Boxes make a whole if their corners, counted with the sign that they have in a box, are the whole's.
    """
    whole, boxes = Box.whole(entry.global_shape), [chunk.box for chunk in entry.primary() if chunk.box.numel]
    if boxes == [whole]:
        return
    what = f"{root}: {shown(str(entry.name))}: "
    if why := check_tiles(entry):
        raise (Incomplete if "nowhere" in why else Corrupt)(
            f"{what}{why}: its index is damaged, or a rank's part is missing"
        )
    if any(box.step for box in boxes):
        _require_disjoint(what, boxes)
        return
    cut = [dim for dim, n in enumerate(whole.shape) if any(box.shape[dim] != n for box in boxes)]
    if len(cut) > _MOST_CUT:
        raise Unsupported(f"{what}is cut in {len(cut)} dimensions; up to {_MOST_CUT} are followed")
    corners, ends = Counter[Shape](), list(product((0, 1), repeat=len(cut)))
    for box, sign in ((whole, -1), *((box, 1) for box in boxes)):
        for end in ends:
            corner = tuple(box.offset[dim] + far * box.shape[dim] for dim, far in zip(cut, end, strict=True))
            corners[corner] += sign * (-1) ** sum(end)
    if left := min((corner for corner, count in corners.items() if count), default=None):
        raise Corrupt(
            f"{what}its parts overlap, and leave a gap, from element {left} of dimensions {tuple(cut)} on: its index is damaged"
        )


def _require_disjoint(what: str, boxes: Sequence[Box]) -> None:
    """The same where parts have every so-many-th element: as many elements as the tensor's are in them, so that none may be in two."""
    from mcore_rlhf.storage.dcp.checks import (
        overlap,
    )  # with all of DCP, for what is rare

    try:
        shared = overlap(boxes)
    except ValueError as error:
        raise Unsupported(f"{what}{error}") from None
    if shared is not None:
        one, other = shared
        raise Corrupt(f"{what}{one} and {other} both have {one.intersect(other)}: its index is damaged")


def _is_one(name: TensorName, other: TensorName, weights: Mapping[str, int]) -> bool:
    """Whether two tensors may be the same bytes; parameters are tied whose weights are, which have the same number then."""
    states = {name.state, other.state}
    tied = name.param == other.param or weights.get(name.param, -1) == weights.get(other.param)
    return states == {PARAM} or (tied and (len(states) == 1 or states == {PARAM, MASTER}))


def _require_apart(root: ReadablePath, entries: Sequence[TensorEntry]) -> None:
    """No byte is of two parts, but where two tensors are one: a parameter and its fp32 master, and what is tied.

    Those lie in the same bytes as the same part, and have the same type.
    """
    spans = list[tuple[str, int, int, TensorName, Box, DType]]()
    numbers, weights = dict[object, int](), dict[str, int]()  # of places, so that lists of many parts are compared once
    for entry in entries:
        if entry.name.state == PARAM:
            places = tuple((c.record.file, c.record.byte_offset, c.start, c.box) for c in entry.chunks)
            weights[entry.name.param] = numbers.setdefault(places, len(numbers))
    for entry in entries:
        for chunk in entry.chunks:
            if chunk.box.numel and chunk.strides == row_major(chunk.box.shape):
                start, size = chunk.record.byte_offset + chunk.start * entry.dtype.itemsize, entry.dtype.itemsize
                stop = start + chunk.box.numel * size
                spans.append((chunk.record.file, start, stop, entry.name, chunk.box, entry.dtype))
    spans.sort(key=itemgetter(0, 1, 2))
    for (file, start, stop, name, box, dtype), (beside, then, end, other, part, kind) in pairwise(spans):
        if file != beside or then >= stop:
            continue
        if (start, stop, box, dtype) != (then, end, part, kind) or not _is_one(name, other, weights):
            both = (
                f"{shown(str(name))} and {shown(str(other))}"
                if name != other
                else f"{box} and {part} of {shown(str(name))}"
            )
            raise Corrupt(f"{root / file}: {both} are both said to be at byte {then}: its index is damaged")
