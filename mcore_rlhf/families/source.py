"""What every reader gives and is asked for, and what every writer is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from mcore_rlhf.core.account import Item, Report
from mcore_rlhf.core.catalog import Catalog
from mcore_rlhf.core.computed import Computation
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.models.spec import ModelSpec
from mcore_rlhf.storage.leftovers import Carried

from .options import ReadOptions as ReadOptions
from .options import WriteOptions as WriteOptions


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """One group of an optimizer: its own learning rate, weight decay, betas, step.

    Args:
        fields: Everything the format stores of it, except which parameters belong to it.
        expert: Whether it holds routed experts that expert parallelism deals out.
        params: Names of the parameters in it, in the optimizer's own order; empty where the format does not store them.
        scalars: Which of the fields the optimizer keeps once per parameter and not per group, such as ``step``.
    """

    fields: Mapping[str, object]
    expert: bool = False
    params: tuple[str, ...] = ()
    scalars: tuple[str, ...] = ()


@dataclass(slots=True)
class TrainingState:
    """What a checkpoint holds besides tensors.

    Args:
        iteration: The training iteration; 0 for a release.
        release: Whether the checkpoint is a release: weights only, no iteration of its own.
        args: The run's arguments by name; empty where the format stores none.
        groups: The optimizer's param groups.
        scheduler: The learning-rate scheduler's state, or None.
        grad_scaler: The loss scaler's state, or None.
        other: Further values, each under the format's own key, that are equal on all ranks.
    """

    iteration: int
    release: bool = False
    args: dict[str, object] = field(default_factory=dict)
    groups: tuple[ParamGroup, ...] = ()
    scheduler: dict[str, object] | None = None
    grad_scaler: object | None = None
    other: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a source, with the checksums that it carries itself.

    Args:
        path: Relative to the source's root.
        nbytes: Its length.
        records: ``(key, byte offset, bytes, crc32)`` of every part that has a checksum. Some formats read them only when asked,
            and raise CheckpointError then where the file is damaged.
        whole: CRC-32 of all its bytes, where a manifest lists one besides those of the records.
    """

    path: str
    nbytes: int
    records: Sequence[tuple[str, int, int, int]]
    whole: int | None = None


@dataclass(frozen=True, slots=True)
class Computed:
    """Tensors that are made of stored ones: sums with an adapter, weights times their scales.

    Args:
        root: Folder to which the files of the catalogue are relative; that of several checkpoints, as a rule.
        computations: What is computed, by the name of its record's file.
    """

    root: Path
    computations: Mapping[str, Computation]


@dataclass(slots=True)
class Source:
    """An opened checkpoint: nothing of its tensors has been read yet.

    Args:
        format: Name of the format.
        root: Folder to which all paths are relative.
        role: Whose model it is.
        model: What the model is.
        parallel: How it is cut.
        catalog: Where every logical tensor lies.
        state: What is not a tensor.
        files: All files, for checksums.
        states: Names of the optimizer's tensor states, without the parameter itself: ``master``, ``exp_avg``, …
        optimizer: What kind of optimizer wrote it: ``distributed``, ``plain``, ``zero1`` to ``zero3``, …, or None.
        notes: What a reader should know.
        native: The format's own view, for a target of the same format.
        computed: What of it is stored nowhere, but computed from files; None for an ordinary checkpoint.
        moved: Items of the source that this one was made of, and what they are a part of here; see :mod:`.crossing`.
        distrust: Why parameters and their masters may disagree though no byte is damaged: a fault of the framework that wrote
            them; empty where nothing of the kind is known.
        unread: Why the optimizer was not read though it is there; empty where it was, or was not to be.
        carried: Files that belong to the model and are none of its tensors: its config, tokenizer, code; None where there are none.
        unplaced: Values in its files of which the reader does not know what they are; see :mod:`.unplaced`.
    """

    format: str
    root: Path
    role: str
    model: ModelSpec
    parallel: ParallelConfig
    catalog: Catalog
    state: TrainingState
    files: tuple[StoredFile, ...]
    states: tuple[str, ...]
    optimizer: str | None
    notes: Report
    native: object = None
    computed: Computed | None = None
    distrust: str = ""
    unread: str = ""
    carried: Carried | None = None
    moved: Mapping[Item, Item] = field(default_factory=dict)
    unplaced: tuple[str, ...] = ()


class Names(Protocol):
    """Under whose names a format has its tensors."""

    @property
    def name(self) -> str:
        """What the command line calls the format."""
        ...

    @property
    def family(self) -> str:
        """``megatron``, or ``module`` for a torch module's own names, which are Hugging Face's."""
        ...
