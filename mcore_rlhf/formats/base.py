"""What every format takes and gives: a Source that it reads, a Target to fill."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.catalog import Box, Chunk, DType, Record, Shape, TensorEntry, TensorName, row_major
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.core.facts import Inventory
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.families.source import Names, Source
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.pt import Pt
from mcore_rlhf.storage.record_file import Container
from mcore_rlhf.storage.stored import StoredTensor


@dataclass(frozen=True, slots=True)
class FileLayout:
    """What a target file will hold.

    Args:
        holds: The logical tensors of which it holds parts, with those parts as chunks.
        records: Its records.
        container: What kind of file it is, and what it holds besides.
    """

    holds: Chunks
    records: Sequence[Record]
    container: Container

    @classmethod
    def of_tree(cls, tree: object) -> FileLayout:
        """A ``.pt`` file without tensors of the catalogue."""
        return cls(Chunks(), (), Pt.of(tree))


@dataclass(slots=True)
class PtLayout:
    """A ``.pt`` file on its way: its records, and the parts of tensors that lie in them.

    Args:
        path: Relative to the target's root.
    """

    path: str
    records: list[Record] = field(default_factory=list)
    entries: list[TensorEntry] = field(default_factory=list)

    def record(self, dtype: DType, numel: int) -> Record:
        """A further record."""
        self.records.append(Record(self.path, f"data/{len(self.records)}", dtype, numel, 0))
        return self.records[-1]

    def add(self, name: TensorName, shape: Shape, dtype: DType, box: Box | None = None) -> StoredTensor:
        """A tensor in a further record of its own.

        Args:
            name: The logical tensor.
            shape: Its global shape.
            dtype: Of its elements here.
            box: The part of it that lies here; None for all of it.
        """
        box = box or Box.whole(shape)
        record = self.record(dtype, box.numel)
        if box.numel or box.shape == shape:
            self.entries.append(TensorEntry(name, shape, dtype, (Chunk(box, record, 0, row_major(box.shape)),)))
        return StoredTensor.whole(record, box.shape)

    def layout(self, tree: object) -> FileLayout:
        """The file, with what stands around its tensors."""
        return FileLayout(Chunks.of(self.entries), self.records, Pt.of(tree))


@dataclass(frozen=True, slots=True)
class TargetFile:
    """A file to be written, described lazily: one file is laid out, planned and written at a time.

    Args:
        path: Relative to the target's root.
        layout: Computes what it will hold.
    """

    path: str
    layout: Callable[[], FileLayout]


@dataclass(slots=True)
class Target:
    """A checkpoint to be written.

    Args:
        format: Name of the format.
        source: Where its tensors come from: the source's catalogue, or a view of it with other rows or names.
        files: The large files.
        report: What was kept, derived, changed and dropped.
        parallel: How the model will be cut.
        texts: Small files and their content; a text is stored as UTF-8.
        holds: Everything but tensors that it will have of its source, under the source's own names, with its value.
        carried: Files that are taken over byte for byte, by their path in the target.
        sums: Files that are written last, by path: each made of the SHA-256 of the others in its folder, by name.
        needs: What a run must be told besides what :meth:`Format.load_hint` says, in brackets.
        alike: Formats besides its own whose files have nothing for which it has no place.
        described: The folder in it for the model's config and tokenizer; empty where its format has one for all.
    """

    format: str
    source: Chunks
    files: tuple[TargetFile, ...]
    report: Report
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    texts: dict[str, str | bytes] = field(default_factory=dict)
    holds: Inventory = field(default_factory=dict)
    carried: dict[str, ReadablePath] = field(default_factory=dict)
    sums: Mapping[str, Callable[[Mapping[str, str]], str]] = field(default_factory=dict)
    needs: str = ""
    alike: tuple[str, ...] = ()
    described: str = ""


class Format(Names, ABC):
    """A checkpoint format: its names, and three functions.

    Args:
        tracker: The file in a root that names the checkpoint which is meant; it is written anew with every step. Empty for none.
        joins: The tracker of runs that go on, into which a checkpoint of this format is added, named by its own tracker; empty for none.
        markers: What a folder of this format, or a root, has one of in it, as a name or a pattern; none where every folder is looked into.
        tags: Whether a run's checkpoints are folders with tags, beside which transformers' Trainer leaves config and tokenizer.
        model_folder: Whether its folders are a model's own, in which config, tokenizer and code lie beside the weights.
        own_sidecar: Whether its reader and writer themselves look after what it has no place for, and lies beside.
        model_beside: The folder beside a step's files in which its trainer keeps the model's config and tokenizer; empty for none.
        tokenizer_beside: Whether its framework leaves a folder ``tokenizer`` beside a step's own files.
    """

    tracker: str = ""
    joins: str = ""
    markers: tuple[str, ...] = ()
    tags: bool = False
    model_folder: bool = False
    own_sidecar: bool = False
    model_beside: str = ""
    tokenizer_beside: bool = False

    def load_hint(self, path: ReadablePath, *, optimizer: bool = True) -> str:
        """How the framework is told to load a checkpoint that was written there: an option, or a line of Python.

        Args:
            path: The checkpoint.
            optimizer: Whether it has one.

        Returns:
            Nothing where the framework cannot load it as it is.
        """
        return ""

    @abstractmethod
    def detect(self, path: ReadablePath) -> bool:
        """Whether a folder looks like a checkpoint of this format."""

    @abstractmethod
    def read(self, path: ReadablePath, options: ReadOptions) -> Source:
        """Open a checkpoint."""

    @abstractmethod
    def target(self, source: Source, options: WriteOptions) -> Target:
        """Describe the checkpoint of this format that holds what the source has."""
