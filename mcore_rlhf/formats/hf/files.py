"""The files of a Hugging Face folder: their names, which tensor goes into which, and the index that says so.

Source: transformers 5.23.0, ``utils/__init__.py`` (``SAFE_WEIGHTS_NAME``, ``WEIGHTS_NAME``, …), ``modeling_utils.py``
(``save_pretrained``), ``tokenization_utils_base.py``; huggingface_hub, ``serialization/_base.py``
(``split_state_dict_into_shards_factory``): tensors in order, as many as fit into each file, none ever cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import PurePosixPath

from mcore_rlhf.core.catalog import Box, Chunk, DType, Record, Shape, TensorEntry, TensorName, row_major
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.formats.base import FileLayout, TargetFile
from mcore_rlhf.layouts.fsdp import cut
from mcore_rlhf.storage.pieces import PLACES, PLACES_VERSION, SAVED_OFFSETS, piece_name
from mcore_rlhf.storage.safetensors import Safetensors
from mcore_rlhf.storage.stored import StoredTensor

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
SAFETENSORS, BIN = "safetensors", "bin"
MODEL_STEM = {SAFETENSORS: "model", BIN: "pytorch_model"}
"""What the names of weight files begin with, by their ending; the first kind that is there counts."""

OPTIMIZER = "optimizer"
"""The folder in which we keep the optimizer's tensors; transformers does not look at it."""

CHAT_TEMPLATES = "chat_templates"
_TOKENIZER = re.compile(
    r"(tokenizer|tokenization_|vocab|merges|special_tokens_map|added_tokens|spiece|sentencepiece|tekken|tiktoken|chat_template"
    r"|processor_config|preprocessor_config|video_preprocessor_config|processing_|image_processing_|video_processing_"
    r"|feature_extraction_).*|.*\.(model|tiktoken|spm|bpe)(\.v\d+)?"
)
"""What turns texts, images and sound into numbers and back. Sources: transformers 5.23.0, ``vocab_files_names`` of
``models/*/tokenization_*.py``, ``processing_utils.py``, ``utils/__init__.py``; mistral-common, ``tekken.json``, ``tokenizer.model.v3``."""
_CODE = re.compile(r"[A-Za-z_]\w*\.py")


def is_of_tokenizer(path: str) -> bool:
    """Whether a file of a model's folder belongs to the tokenizer, or to another processor of the model's input.

    Args:
        path: Relative to the folder, with ``/``: also a file in ``chat_templates/``.
    """
    return _TOKENIZER.fullmatch(path.partition("/")[0]) is not None


def is_code(path: str) -> bool:
    """Whether a file is a module of Python at the top of the folder: carried, never run here."""
    return _CODE.fullmatch(path) is not None


_SHARD = "{stem}-{number:05d}-of-{count:05d}.{ending}"
_NUMBERS = re.compile(r"-(\d{5,})-of-(\d{5,})\.")


def file_name(stem: str, ending: str, number: int = 1, count: int = 1) -> str:
    """The name of a weight file: ``model.safetensors``, or ``model-00002-of-00007.safetensors``."""
    if count == 1:
        return f"{stem}.{ending}"
    return _SHARD.format(stem=stem, number=number, count=count, ending=ending)


def index_name(stem: str, ending: str) -> str:
    """The name of the file that says which tensor is in which: ``model.safetensors.index.json``."""
    return f"{stem}.{ending}.index.json"


def shard_count(file: str) -> int | None:
    """How many files a shard's name says there are, or None for one that is whole."""
    found = _NUMBERS.search(file)
    return int(found.group(2)) if found else None


DEFAULT_SHARD = 5 * 10**9
"""Bytes of tensors in a file; 4.x of transformers has the same."""


@dataclass(frozen=True, slots=True)
class WrittenTensor:
    """One tensor to be written.

    Args:
        source: Which logical tensor it is.
        shape: Its shape as written: the first rows of a padded vocabulary.
        dtype: Its type as written.
        names: What it is called in the files: more than one name where tied parameters are written under each.
        sharded: Whether FSDP cuts it: buffers stay whole.
    """

    source: TensorName
    shape: Shape
    dtype: DType
    names: tuple[str, ...]
    sharded: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes of its elements, once."""
        return prod(self.shape) * self.dtype.itemsize

    def placed(self, record: Record, part: Box | None = None) -> TensorEntry:
        """The tensor, of which all or a part is the whole of a record."""
        box = part or Box.whole(self.shape)
        return TensorEntry(self.source, self.shape, self.dtype, (Chunk(box, record, 0, row_major(box.shape)),))

    def boxes(self, ranks: int) -> list[Box]:
        """The part that each rank has, the first ranks first; what is not cut is the first one's alone."""
        return [*cut(self.shape, ranks)] if self.sharded and self.shape else [Box.whole(self.shape)]


@dataclass(slots=True)
class SafetensorsShard:
    """One file.

    Args:
        parts: Its tensors.
        file: Its path.
        nbytes: Bytes of its tensors.
    """

    parts: list[WrittenTensor] = field(default_factory=list)
    file: str = ""
    nbytes: int = 0

    def names(self) -> list[str]:
        """All names in it."""
        return [name for part in self.parts for name in part.names]

    def target(self) -> TargetFile:
        """The file as part of a target: all of its tensors, where nothing is shared: a second name is a copy."""
        return TargetFile(
            self.file, partial(_layout, self.file, [(part, Box.whole(part.shape)) for part in self.parts])
        )

    def pieces(self, ranks: int) -> list[TargetFile]:
        """The same tensors as a file for each rank instead, without those of ranks that have nothing of them.

        Which rank writes what: torch 2.13.0, ``distributed/checkpoint/default_planner.py`` (a tensor that is not cut is one rank's).
        """
        held: dict[int, list[_Part]] = {}
        for part in self.parts:
            for rank, box in enumerate(part.boxes(ranks), 1):
                held.setdefault(rank, []).append((part, box))
        named = ((piece_name(rank, self.file), held[rank]) for rank in sorted(held))
        return [TargetFile(file, partial(_layout, file, parts, placed=True)) for file, parts in named]


_Part = tuple[WrittenTensor, Box]


def _layout(file: str, parts: Sequence[_Part], *, placed: bool = False) -> FileLayout:
    """What a safetensors file will hold. The widest elements come first, as in safetensors' own files: readers want each tensor at a
    multiple of its width.

    Args:
        file: Its path.
        parts: Which part of which tensors.
        placed: Whether the header says where the parts belong.
    """
    named = [(name, part, box) for part, box in parts for name in part.names]
    named.sort(key=lambda item: -item[1].dtype.itemsize)
    records = [Record(file, name, part.dtype, box.numel, 0) for name, part, box in named]
    tensors = [StoredTensor.whole(record, box.shape) for record, (_, _, box) in zip(records, named, strict=True)]
    entries = [part.placed(record, box) for record, (_, part, box) in zip(records, named, strict=True)]
    places = {name: {SAVED_OFFSETS: list(box.offset)} for name, _, box in named}
    about = {PLACES: json.dumps(places), PLACES_VERSION: "1.0"} if placed else {}
    return FileLayout(Chunks.of(entries), records, Safetensors(tensors, {**about, "format": "pt"}))


def shards_of(
    parts: Iterable[WrittenTensor],
    stem: str,
    limit: int = DEFAULT_SHARD,
    ending: str = SAFETENSORS,
    *,
    copies: bool = True,
    pieces: bool = False,
) -> list[SafetensorsShard]:
    """Deal tensors to files, in order.

    Args:
        parts: The tensors.
        stem: What the files' names begin with; may have a folder before it.
        limit: Bytes of tensors per file; a tensor that is larger has a file of its own.
        ending: ``safetensors`` or ``bin``.
        copies: Whether every further name of a tensor takes its bytes again.
        pieces: Whether ranks are to have pieces of them: then one file says that it is one, too.
    """
    shards: list[SafetensorsShard] = []
    for part in parts:
        nbytes = part.nbytes * (len(part.names) if copies else 1)
        if not shards or shards[-1].nbytes + nbytes > limit:
            shards.append(SafetensorsShard())
        shards[-1].parts.append(part)
        shards[-1].nbytes += nbytes
    for number, shard in enumerate(shards, 1):
        one = file_name(stem, ending, number, len(shards))
        shard.file = _SHARD.format(stem=stem, number=1, count=1, ending=ending) if pieces and len(shards) == 1 else one
    return shards


def index_of(shards: Sequence[SafetensorsShard], stem: str, ending: str = SAFETENSORS) -> dict[str, str]:
    """The index of several files, by its path; nothing for one file, which needs none."""
    if len(shards) < 2:
        return {}
    weights = {name: PurePosixPath(shard.file).name for shard in shards for name in shard.names()}
    parts = [part for shard in shards for part in shard.parts]
    totals = {
        "total_parameters": sum(prod(part.shape) for part in parts),
        "total_size": sum(part.nbytes for part in parts),
    }
    text = json.dumps({"metadata": totals, "weight_map": weights}, indent=2) + "\n"
    return {index_name(stem, ending): text}
