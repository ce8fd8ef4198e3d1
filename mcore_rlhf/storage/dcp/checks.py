"""What must hold of a DCP folder before anything of it is used: files are there, items lie in them, chunks tile tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

from mcore_rlhf.core.catalog import Box, Shape
from mcore_rlhf.errors import Corrupt, Incomplete, Problems, Untrusted

from ..paths import ReadablePath, beneath, cannot_open
from . import METADATA_FILE
from .metadata import RESTORE, DcpMetadata, ItemPlace, TensorMeta


def item_key(fqn: str, offset: Shape | None) -> str:
    """What an item is called in messages and among the records of its file: ``layers.0.weight[4,0]``; an object, its name."""
    return fqn if offset is None else f"{fqn}[{','.join(map(str, offset))}]"


def boxes(tensor: TensorMeta) -> Iterator[Box]:
    """The chunks that hold something; FSDP stores an empty one for each rank that has none."""
    return (Box(offsets, sizes) for offsets, sizes in tensor.chunks if 0 not in sizes)


def check(folder: ReadablePath, metadata: DcpMetadata, *, tiled: bool) -> dict[str, int]:
    """Check a folder against its ``.metadata``.

    Args:
        folder: The folder.
        metadata: What ``.metadata`` says.
        tiled: Whether the chunks of a tensor must cover it without a gap.

    Returns:
        The length of every file that is named.

    Raises:
        Untrusted: A file is named that lies outside the folder.
        Incomplete: Files, items or chunks are missing.
        Corrupt: Items or chunks contradict each other.
    """
    problems = Problems()
    sizes = _sizes(folder, metadata, problems)
    _check_items(folder, metadata, sizes, problems)
    for fqn, tensor in metadata.tensors.items():
        _check_chunks(folder, metadata, fqn, tensor, problems, tiled=tiled)
    for fqn in metadata.objects:
        if (fqn, None) not in metadata.places:
            problems.add(Incomplete, f"{folder / METADATA_FILE}: says nowhere where {fqn} lies", RESTORE)
    problems.raise_if_any()
    return sizes


def _sizes(folder: ReadablePath, metadata: DcpMetadata, problems: Problems) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for name in sorted({place.file for place in metadata.places.values()}):
        try:
            sizes[name] = beneath(folder, name).stat().st_size
        except Untrusted as error:
            problems.add_error(error)
        except FileNotFoundError:
            problems.add(Incomplete, f"{folder / name}: missing; {METADATA_FILE} names it", RESTORE)
        except OSError as error:
            problems.add_error(cannot_open(error, folder / name))
    return sizes


def _check_items(folder: ReadablePath, metadata: DcpMetadata, sizes: Mapping[str, int], problems: Problems) -> None:
    """Items lie in their files, one behind the other."""
    ends: dict[str, int] = {}
    for (fqn, offset), place in sorted(metadata.places.items(), key=_position):
        if place.file not in sizes:
            continue
        key, stop = item_key(fqn, offset), place.offset + place.length
        if stop > sizes[place.file]:
            problems.add(
                Incomplete,
                f"{folder / place.file}: {key} should lie at bytes {place.offset} to {stop}, but the file has "
                f"{sizes[place.file]}: it was cut off",
                RESTORE,
            )
        elif place.offset < ends.get(place.file, 0):
            problems.add(
                Corrupt, f"{folder / place.file}: {key}, at byte {place.offset}, overlaps the item before it", RESTORE
            )
        ends[place.file] = max(stop, ends.get(place.file, 0))


def _position(item: tuple[tuple[str, Shape | None], ItemPlace]) -> tuple[str, int]:
    return item[1].file, item[1].offset


def _check_chunks(
    folder: ReadablePath, metadata: DcpMetadata, fqn: str, tensor: TensorMeta, problems: Problems, *, tiled: bool
) -> None:
    shape, held = tensor.global_shape, sorted(boxes(tensor), key=lambda box: box.offset)
    for box in held:
        if (fqn, box.offset) not in metadata.places:
            problems.add(
                Incomplete, f"{folder / METADATA_FILE}: says nowhere where {item_key(fqn, box.offset)} lies", RESTORE
            )
        if not Box.whole(shape).contains(box):
            problems.add(Corrupt, f"{folder / METADATA_FILE}: {fqn} has the shape {shape}, but a chunk {box}", RESTORE)
    shared = overlap(held)
    if shared is not None:
        problems.add(
            Corrupt, f"{folder / METADATA_FILE}: the chunks {shared[0]} and {shared[1]} of {fqn} overlap", RESTORE
        )
    elif tiled and sum(box.numel for box in held) < prod(shape):
        there = ", ".join(map(str, held[:8])) or "none"
        problems.add(
            Incomplete,
            f"{folder / METADATA_FILE}: {fqn} has the shape {shape}, but its chunks ({there}) leave a gap",
            RESTORE,
        )


def overlap(held: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two boxes that share elements, or None where no two do.

    Boxes are parted at the gaps between them along one dimension after the other, until each stands alone: exact, and as fast as
    sorting for whatever cuts a tensor again and again from edge to edge, as all frameworks do. What cannot be parted along any
    dimension is compared box by box.

    Args:
        held: Boxes of one tensor, none of them empty.

    Raises:
        ValueError: Two have steps that cannot be compared.
    """
    if len(held) < 2:
        return None
    ndim = len(held[0].shape)
    pending: list[tuple[Sequence[Box], int, int]] = [(held, 0, 0)]
    while pending:
        boxes, dim, tried = pending.pop()
        if tried == ndim:
            found = _pair(boxes)
            if found is not None:
                return found
            continue
        parts = list(_parted(boxes, dim))
        tried = tried + 1 if len(parts) == 1 else 1  # a part cannot be parted again along the same dimension
        pending += [(part, (dim + 1) % ndim, tried) for part in parts if len(part) > 1]
    return None


def _parted(boxes: Sequence[Box], dim: int) -> Iterator[list[Box]]:
    """Groups of boxes between which there is a cut, from edge to edge, across a dimension."""
    ordered = sorted(boxes, key=lambda box: box.offset[dim])
    part, stop = [ordered[0]], _stop(ordered[0], dim)
    for box in ordered[1:]:
        if box.offset[dim] >= stop:
            yield part
            part = []
        part.append(box)
        stop = max(stop, _stop(box, dim))
    yield part


def _stop(box: Box, dim: int) -> int:
    """``box.stop`` of one dimension, without the others: there are many boxes, and hardly any has steps."""
    return box.offset[dim] + box.shape[dim] if box.step is None else box.stop[dim]


def _pair(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two boxes that share elements, by comparison; those that end before the next row are done with."""
    active: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.offset):
        if box.shape:
            active = [other for other in active if other.stop[0] > box.offset[0]]
        for other in active:
            if other.intersect(box) is not None:
                return other, box
        active.append(box)
    return None
