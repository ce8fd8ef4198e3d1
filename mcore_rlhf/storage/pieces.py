"""Tensors in pieces, a safetensors file for every rank, as torch's ``HuggingFaceStorageWriter`` leaves them that puts nothing together.

Source: torch 2.13.0, ``distributed/checkpoint/hf_storage.py`` (``HuggingFaceStorageWriter`` with ``save_distributed``), ``_hf_utils.py``
(``SHARDED_FILE_NAME``, ``CUSTOM_METADATA_KEY``), ``filesystem.py`` (``_write_files_from_queue``).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from operator import add

from ..core.catalog import Box, Chunk, DType, Shape
from ..core.rows import Tensor
from ..errors import CheckpointError, Corrupt, Incomplete, Problems, Unsupported
from . import reading
from .checksum import crc32
from .dcp.checks import overlap
from .paths import ReadablePath
from .record_file import OpenedFile

PLACES, PLACES_VERSION, SAVED_OFFSETS = "DCP_SHARDING_INFO", "DCP_VERSION", "saved_offsets"
"""What a header has: as JSON, for every tensor the offsets of its piece; and the version of that."""
DESCRIBED = ".hf_metadata"
"""Where NeMo-RL has the model's description and tokenizer beside pieces, and which tensor goes into which file that is made of them.

Source: nemo_automodel 0.4.0, ``components/checkpoint/addons.py`` (``ConsolidatedHFAddon``).
"""
PIECES_INDEX = f"{DESCRIBED}/fqn_to_file_index_mapping.json"
_TIED = "lm_head.weight"
"""What the index of a tied model may list, and no state dict has: ``components/checkpoint/{checkpointing,stateful_wrappers}.py``."""
_OF_RANK = re.compile(r"shard-\d{5,}-.*\.safetensors")
_WINDOW = 16 << 20
_AGAIN = "Copy all files again from one step."


def piece_name(rank: int, file: str) -> str:
    """What a rank's part of a file is called; ranks count from 1."""
    return f"shard-{rank:05d}-{file}"


def has_pieces(folder: ReadablePath) -> bool:
    """Whether a folder has files of that name."""
    return folder.is_dir() and any(_OF_RANK.fullmatch(path.name) for path in folder.iterdir())


@dataclass(frozen=True, slots=True)
class PieceTensor:
    """A tensor that ranks have piece by piece.

    Args:
        root: The checkpoint's folder.
        dtype: Element type.
        global_shape: Shape of the whole: no file says it, and it reaches as far as its pieces do.
        pieces: Where they lie; what several ranks have is there several times.
    """

    root: ReadablePath
    dtype: DType
    global_shape: Shape
    pieces: tuple[Chunk, ...]

    @property
    def cut(self) -> bool:
        """Whether several ranks have different parts of it."""
        return len({piece.box for piece in self.pieces}) > 1

    def identity(self) -> object:
        """Type, places and CRC of its pieces, of which all bytes are read: tensors with equal ones hold equal bytes.

        Raises:
            StorageError: They cannot be read.
        """
        found = set()
        for piece in self.pieces:
            record = piece.record
            with reading.opened(self.root / record.file) as file:
                crc, end = 0, record.byte_offset + record.nbytes
                for at in range(record.byte_offset, end, _WINDOW):
                    crc = crc32(file.read(at, min(_WINDOW, end - at)), crc)
            found.add((piece.box, crc))
        return self.dtype, frozenset(found)

    def as_tensor(self) -> Tensor:
        """The tensor as a table has it."""
        return Tensor(self.global_shape, self.dtype, lambda rows: rows.strips(self.pieces))


@dataclass(slots=True)
class PieceFiles:
    """The files of all ranks, opened.

    Args:
        tensors: By name.
        files: The files.
    """

    tensors: dict[str, PieceTensor] = field(default_factory=dict)
    files: list[OpenedFile] = field(default_factory=list)


def read_pieces(root: ReadablePath, inside: str = "") -> PieceFiles:
    """Open the files of all ranks, and hold their pieces against each other. No byte of a tensor is read.

    Args:
        root: The checkpoint's folder, to which paths are relative.
        inside: The folder of the files below it; empty for the root's own.

    Raises:
        CheckpointError: Files are damaged, pieces overlap, or some are missing between others; all problems together.
    """
    found, problems, pieces = PieceFiles(), Problems(), dict[str, list[Chunk]]()
    folder = root / inside if inside else root
    for name in sorted(path.name for path in folder.iterdir() if _OF_RANK.fullmatch(path.name)):
        try:
            for tensor, chunk in _pieces_in(root, f"{inside}/{name}" if inside else name, found):
                pieces.setdefault(tensor, []).append(chunk)
        except CheckpointError as error:
            problems.add_error(error)
    problems.raise_if_any()
    for tensor, chunks in pieces.items():
        try:
            found.tensors[tensor] = _joined(root, folder, tensor, chunks)
        except CheckpointError as error:
            problems.add_error(error)
    problems.raise_if_any()
    _require_listed(folder, found.tensors.keys())
    return found


def _require_listed(folder: ReadablePath, tensors: Collection[str]) -> None:
    """See that every tensor for which the index has a file is there; a file of one rank may have lost what no other says.

    Raises:
        Corrupt: The index is none.
        Incomplete: One is not there.
    """
    path = folder / PIECES_INDEX
    try:
        listed = reading.read_json(path) if path.is_file() else {}
    except ValueError as error:
        listed = str(error)
    if not isinstance(listed, dict):
        raise Corrupt(
            f"{path}: is no JSON object: {listed!r:.200}\nCopy the file again; or move it away: only who puts the pieces together needs it."
        )
    if gone := sorted(name for name in listed if name not in tensors and not name.endswith(_TIED)):
        raise Incomplete(
            f"{folder}: {PIECES_INDEX} lists {gone[0]}, of which no file has a piece ({len(gone)} such)\n{_AGAIN}"
        )


def _joined(root: ReadablePath, folder: ReadablePath, name: str, chunks: Sequence[Chunk]) -> PieceTensor:
    """The tensor that pieces are of."""
    kinds = {(chunk.record.dtype.name, len(chunk.box.shape)) for chunk in chunks}
    if len(kinds) > 1:
        text = ", ".join(f"{dtype} with {dimensions} dimensions" for dtype, dimensions in sorted(kinds))
        raise Corrupt(f"{folder}: the pieces of {name} are not of one tensor: {text}\n{_AGAIN}")
    shape = tuple(map(max, zip(*(map(add, c.box.offset, c.box.shape) for c in chunks), strict=True)))
    apart = sorted({chunk.box for chunk in chunks if chunk.box.numel}, key=lambda box: box.offset)
    shared = overlap(apart)
    if shared is not None:
        one, other = (f"{list(box.offset)} to {list(box.stop)}" for box in shared)
        raise Corrupt(f"{folder}: two pieces of {name} overlap, {one} and {other}\n{_AGAIN}")
    if sum(box.numel for box in apart) != prod(shape):
        raise Incomplete(
            f"{folder}: the pieces of {name} are not {list(shape)}, as far as they reach: those of some ranks are missing\n"
            "Each node writes the files of its own ranks: bring those of all nodes together."
        )
    return PieceTensor(root, chunks[0].record.dtype, shape, tuple(chunks))


def _pieces_in(root: ReadablePath, file: str, found: PieceFiles) -> Iterator[tuple[str, Chunk]]:
    """The pieces in one file, each with its place in the whole."""
    from .containers import open_tensors

    opened = open_tensors(root, file, ())
    found.files.append(opened)
    try:
        places = reading.parse_json(opened.metadata[PLACES])
        offsets = {name: tuple(places[name][SAVED_OFFSETS]) for name in opened.tensors}
    except (LookupError, TypeError, ValueError) as error:
        raise Unsupported(
            f"{root / file}: its header does not say in {PLACES} where its pieces belong: {error!r:.200}\n"
            "Save the run with torch's HuggingFaceStorageWriter, or put the pieces together where it was written."
        ) from None
    for name, tensor in opened.tensors.items():
        offset = offsets[name]
        if len(offset) != len(tensor.shape) or not all(type(at) is int and at >= 0 for at in offset):
            raise Corrupt(f"{root / file}: {PLACES} places {name} of {len(tensor.shape)} dimensions at {offset!r:.80}")
        yield name, Chunk(Box(offset, tensor.shape), tensor.record, tensor.start, tensor.strides)
