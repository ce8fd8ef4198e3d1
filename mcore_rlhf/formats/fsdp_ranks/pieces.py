"""FSDP1's optimizer states: bare pieces of flattened tensors, of one each or of all of a layer; read, and written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from mcore_rlhf.core.catalog import Chunk, DType, Shape, TensorEntry, TensorName, dot, flat_boxes, row_major
from mcore_rlhf.errors import Unsupported
from mcore_rlhf.families.fsdp.order import Unit, by_table, units_of
from mcore_rlhf.families.lora.names import OF_ADAPTER, in_base
from mcore_rlhf.formats.base import PtLayout
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.stored import StoredTensor

_ALIGNED = 8
"""Elements of 2 bytes in 16; of 4 bytes there are fewer, which end there, too."""


@dataclass(frozen=True, slots=True)
class FlatPieces:
    """A tensor that ranks have piece by piece, flattened, one behind the other.

    Args:
        global_shape: Its shape.
        pieces: What the ranks have of it, in their order; those that have nothing are left out.
        copies: How often they have it, where the mesh's first axis replicates (HSDP): one copy's ranks stand behind another's.
    """

    global_shape: Shape
    pieces: tuple[StoredTensor, ...]
    copies: int = 1

    @property
    def numel(self) -> int:
        """Elements of a copy; of copies that are cut in several ways there are none, and no parameter is meant."""
        sizes = [piece.shape[0] for piece in self.pieces]
        whole = sizes[: len(sizes) // self.copies]
        return sum(whole) if whole * self.copies == sizes else -1

    def chunks(self) -> Iterator[Chunk]:
        """Where its elements lie."""
        at, strides = 0, row_major(self.global_shape)
        for piece in self.pieces:
            first, at = at, (at + piece.shape[0]) % (self.numel or 1)
            for part in flat_boxes(self.global_shape, first, first + piece.shape[0]):
                yield Chunk(part, piece.record, piece.start + dot(part.offset, strides) - first, strides)


@dataclass(frozen=True, slots=True)
class Flattened:
    """A tensor that is flattened with others, of which every rank has a piece.

    Args:
        name: It.
        unit: All of them.
        pieces: Those of all ranks.
        copies: See :class:`FlatPieces`.
    """

    name: str
    unit: Unit
    pieces: tuple[StoredTensor, ...]
    copies: int = 1

    @property
    def global_shape(self) -> Shape:
        """Its shape."""
        return self.unit.shapes[self.name]

    def chunks(self) -> Iterator[Chunk]:
        """Where its elements lie."""
        shards = len(self.pieces) // self.copies
        for rank, piece in enumerate(self.pieces):
            yield from self.unit.chunks(self.name, shards, rank % shards, piece.record, piece.start)


def units_in(
    found: Mapping[str, Mapping[str, Sequence[StoredTensor]]],
    listed: Sequence[object],
    shapes: Mapping[str, Shape],
    config: Mapping[str, object],
    world: int,
    copies: int = 1,
) -> dict[str, Unit] | None:
    """The flat parameters of a model by their numbers, where a table says their order and every rank has the piece of each that it should;
    else None.

    A flat parameter is trained as a whole or not at all, and one that is not has no states; the optimizer lists it all the same. So it does
    where an adapter is saved without its base: those that have states are its matrices.
    Sources: torch 2.13.0, ``distributed/fsdp/_flat_param.py`` (``_validate_tensors_to_flatten``); verl 0.9.1,
    ``workers/engine/fsdp/transformer_impl.py`` (``_build_optimizer``: of ``parameters()``).

    Args:
        found: The ranks' pieces of every state, by the number of the flat parameter.
        listed: The numbers in the optimizer's one group.
        shapes: Of the model's parameters, in the order of its state dict.
        config: Its description.
        world: Ranks.
        copies: See :class:`FlatPieces`.
    """
    base = [in_base(name) or name for name in shapes if not OF_ADAPTER.fullmatch(name)]
    if by_table(base, config) != base:
        return None
    units = units_of(shapes)
    numbers = [str(number) for number in range(len(listed)) if base or str(number) in found]
    if [*listed] != [*range(len(listed))] or len(numbers) != len(units):
        return None
    of_numbers = dict(zip(numbers, units, strict=True))
    wanted = {number: [(unit.piece(world // copies),)] * world for number, unit in of_numbers.items()}
    fits = all(
        [piece.shape for piece in pieces] == wanted.get(number)
        for number, of in found.items()
        for pieces in of.values()
    )
    return of_numbers if fits else None


def flattened(
    file: PtLayout, of: Sequence[tuple[TensorName, Shape]], dtype: DType, unit: Unit, world: int, rank: int
) -> StoredTensor:
    """A rank's piece of several tensors, one behind the other.

    Args:
        file: Gets it.
        of: The tensors, and their shapes.
        dtype: Of its elements.
        unit: All of them.
        world: Ranks that have one copy together.
        rank: Which of them.
    """
    record = file.record(dtype, unit.piece(world))
    placed = ((name, shape, tuple(unit.chunks(name.param, world, rank, record))) for name, shape in of)
    file.entries += [TensorEntry(name, shape, dtype, chunks) for name, shape, chunks in placed if chunks]
    return StoredTensor.whole(record, (record.numel,))


def units_aligned(shapes: Mapping[str, Shape], root: ReadablePath) -> dict[str, Unit]:
    """With which others each parameter lies in a flat one, of original parameters, trained or not.

    Each begins at 16 bytes of the type in which the run computes, which no file says: 4 bytes to an element, or 2.
    Source: torch 2.13.0, ``distributed/fsdp/_flat_param.py`` (``_get_aligned_numel``, ``align_addresses``).

    Args:
        shapes: Of the model's parameters, in its order.
        root: For messages.

    Raises:
        Unsupported: Where one begins depends on that type.
    """
    units = units_of(shapes)
    apart = next((name for unit in units for name in [*unit.shapes][:-1] if prod(shapes[name]) % _ALIGNED), None)
    if apart is not None:
        raise Unsupported(
            f"{root}: {apart} has {prod(shapes[apart])} elements; behind such a number FSDP1 with use_orig_params leaves some free, and "
            "how many depends on the type in which the run computes, which no file says\n"
            "verl's strategy fsdp2 takes it; --no-optimizer writes the weights alone."
        )
    return {name: unit for unit in units for name in unit.shapes}


def own_piece(file: PtLayout, entry: TensorEntry, unit: Unit, world: int, rank: int) -> StoredTensor | None:
    """What a rank's piece has of one tensor alone, as with original parameters; None where it has nothing.

    Args:
        file, unit, world, rank: See :func:`flattened`.
        entry: The tensor.
    """
    name, shape = entry.name, entry.global_shape
    first, stop = unit.span(name.param, world, rank)
    if first >= stop:
        return None
    record, strides = file.record(entry.dtype, stop - first), row_major(shape)
    boxes = flat_boxes(shape, first, stop)
    chunks = tuple(Chunk(box, record, dot(box.offset, strides) - first, strides) for box in boxes)
    file.entries.append(TensorEntry(name, shape, entry.dtype, chunks))
    return StoredTensor.whole(record, (record.numel,))
