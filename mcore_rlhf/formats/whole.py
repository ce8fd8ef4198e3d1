"""Formats of whole tensors: one relation says where they lie, for reading and for writing, and files, account and sidecar follow from it.

What such a format is written with can be had from here.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from mcore_rlhf.core.catalog import (
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
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.errors import NotACheckpoint
from mcore_rlhf.families.module import ModuleState
from mcore_rlhf.families.option_types import Takes
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.families.sidecar import STATE, Sidecar, plain
from mcore_rlhf.families.source import ParamGroup, Source, TrainingState
from mcore_rlhf.families.whole import weights_alone, whole_sidecar, whole_source, whole_tensors
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.reading import opened, parse_json, read_json
from mcore_rlhf.storage.record_file import Container, Raw, StoredFile

from .base import FileLayout, Format, Target, TargetFile

__all__ = [
    "PARAM", "Box", "Chunk", "Container", "DType", "ModuleState", "ParamGroup", "ReadablePath", "Record", "Shape", "Sidecar",
    "Source", "StoredFile", "Takes", "TensorEntry", "TensorName", "TrainingState", "WholeFormat", "WriteOptions", "dtype_of",
    "opened", "parse_json", "plain", "read_json", "records_of", "row_major",
]  # fmt: skip


class WholeFormat(Format):
    """A format that says where each tensor lies, in any number of parts and files; :mod:`~mcore_rlhf.families.whole` sees to the rest.

    Args:
        markers: Files of its own that every folder has: its index, say.
        weights_alone: Whether its files keep weights, and of a run nothing else.
    """

    own_sidecar = True
    takes = (Takes.DTYPE,)
    weights_alone: bool = False

    @abstractmethod
    def stored(self, path: ReadablePath, role: str) -> Iterable[TensorEntry]:
        """Every tensor, and where its parts lie.

        Args:
            path: The folder.
            role: Whose model is read; of a folder with several, others' tensors are passed over.
        """

    @abstractmethod
    def laid(
        self, tensors: Sequence[tuple[TensorName, Shape, DType]], source: Source, options: WriteOptions
    ) -> Iterable[TensorEntry]:
        """The same of a folder that is to be.

        Args:
            tensors: Name, shape and type of all that it is to hold.
            source: Whose they are.
            options: What the user wants of it.
        """

    def texts(self, entries: Sequence[TensorEntry], source: Source) -> dict[str, str | bytes]:
        """Small files, by path: an index, say.

        Args:
            entries: What :meth:`laid` says.
            source: Whose they are.
        """
        return {}

    def container(self, file: str, entries: Sequence[TensorEntry]) -> Container:
        """What kind of file one is: a head, and the records one after the other.

        Args:
            file: Its path.
            entries: The tensors of which it has parts, with these parts.
        """
        return Raw(records_of(entries), self.head(records_of(entries)))

    def head(self, records: Sequence[Record]) -> bytes:
        """What stands before the records in a file that has no other container.

        Args:
            records: They.
        """
        return b""

    def file(self, path: ReadablePath, file: str) -> StoredFile:
        """A file with the checksums in it: none.

        Args:
            path: The folder.
            file: The file's path in it.
        """
        return StoredFile.at(path, file)

    def run(self, path: ReadablePath, entries: Sequence[TensorEntry]) -> Sidecar | None:
        """What files of the format's own say besides tensors, where nothing of ours lies beside; None where they say nothing.

        Args:
            path: The folder.
            entries: What of it is read.
        """
        return None

    def detect(self, path: ReadablePath) -> bool:
        """Whether a folder has one of the files that mark it."""
        return any((path / name).is_file() for name in self.markers)

    def read(self, path: ReadablePath, options: ReadOptions) -> Source:
        """Open a folder."""
        if not self.detect(path):
            raise NotACheckpoint(f"{path}: has no {' or '.join(self.markers)}")
        role = options.role or "actor"
        others = {*self.roles(path)} - {role}
        entries = [
            entry
            for entry in self.stored(path, role)
            if (options.optimizer or entry.name.state == PARAM) and entry.name.role not in others
        ]
        named = dict.fromkeys((*(record.file for record in records_of(entries)), *self.markers))
        files = tuple(self.file(path, file) for file in named)
        own = None if (path / STATE).is_file() else self.run(path, entries)
        return whole_source(self, path, Chunks.of(entries), files, options, own)

    def target(self, source: Source, options: WriteOptions) -> Target:
        """Describe a new folder."""
        report, alone = source.notes.for_target(), self.weights_alone
        view, tensors = whole_tensors(source, replace(options, no_optimizer=options.no_optimizer or alone))
        beside, held = ({}, weights_alone(source, options, report)) if alone else whole_sidecar(source, report)
        entries = [*self.laid(tensors, source, options)]
        parts = defaultdict[str, list[TensorEntry]](list)
        for entry in entries:
            of_file = defaultdict[str, list[Chunk]](list)
            for chunk in entry.chunks:
                of_file[chunk.record.file].append(chunk)
            for file, chunks in of_file.items():
                parts[file].append(replace(entry, chunks=tuple(chunks)))
        files = tuple(TargetFile(file, partial(self._layout, file, of)) for file, of in parts.items())
        return Target(self.name, view, files, report, texts={**self.texts(entries, source), **beside}, holds=held)

    def _layout(self, file: str, entries: Sequence[TensorEntry]) -> FileLayout:
        return FileLayout(Chunks.of(entries), records_of(entries), self.container(file, entries))


def records_of(entries: Iterable[TensorEntry]) -> list[Record]:
    """The records in which parts of tensors lie, each once, in order."""
    return list(dict.fromkeys(chunk.record for entry in entries for chunk in entry.chunks))
