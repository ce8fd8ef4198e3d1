"""FSDP1's optimizer states: bare pieces of flattened tensors, of one each or of all of a layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mcore_rlhf.core.catalog import Chunk, Shape, dot, flat_boxes, row_major
from mcore_rlhf.families.fsdp.order import Unit, by_table, units_of
from mcore_rlhf.families.lora.names import OF_ADAPTER, in_base
from mcore_rlhf.storage.stored import StoredTensor


@dataclass(frozen=True, slots=True)
class Pieces:
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
        copies: See :class:`Pieces`.
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
        copies: See :class:`Pieces`.
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
