"""What every format takes and gives: a Source that it reads, a Target to fill."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mcore_rlhf.core.account import Inventory, Report
from mcore_rlhf.core.catalog import Record
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.families.source import Names, Source
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.record_file import Container


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
