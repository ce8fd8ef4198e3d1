"""What an engine gives and takes: a live model as files to be written, and a checkpoint prepared to be loaded into it.

An engine knows a framework; it does no input or output of its own while saving and calls no collectives behind the training
loop's back. :class:`LiveState` is a description: which files, who contributes which bytes of them. The manager copies the
bytes aside and writes them later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from mcore_rlhf.core.account import Report
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.record_file import Container

from .stateful import Undo

if TYPE_CHECKING:
    import torch


Text = str | bytes | Callable[[], bytes]
"""Content of a small file; a string is stored as UTF-8."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Bytes of a live tensor that this rank puts into a record of a file.

    Args:
        label: What all contributors call the record; see :attr:`LiveFile.labels`.
        byte_offset: Where they go, from the record's own start.
        tensor: A contiguous tensor on any device, of any dtype; all of its elements are written, as they lie in memory.
    """

    label: str
    byte_offset: int
    tensor: torch.Tensor

    @property
    def nbytes(self) -> int:
        """How many bytes it contributes."""
        return self.tensor.numel() * self.tensor.element_size()


@dataclass(frozen=True, slots=True, eq=False)
class LiveFile:
    """A file to which this rank contributes.

    Args:
        path: Relative to the role's folder, with ``/``; equal on all ranks that contribute.
        writers: Global ranks that contribute, in any order after the first, which lays the file out and completes it.
        segments: What this rank contributes. What nobody contributes reads as zeros.
        container: Only on the first writer: what the file holds, with :class:`~mcore_rlhf.storage.stored.StoredTensor` for what
            segments fill (their records' ``file`` is :attr:`path`), and small real tensors as they are. It is laid out behind
            training: nothing in it may change later, dictionaries and lists are copies.
        labels: Only on the first writer: label → key of the record in the container (``data/0``). A label that is not listed is
            the key itself.
        timeless: The same as the container, without what only says when it was written: what is written in its place where a file that
            is there already is linked. None where the container says nothing of the kind, or where it is needed.
    """

    path: str
    writers: tuple[int, ...]
    segments: Sequence[Segment]
    container: Container | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    timeless: Container | None = None


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A state tensor that a rank holds.

    Args:
        name: The parameter's or buffer's: ``decoder.layers.0.mlp.linear_fc1.weight``.
        state: ``param``, ``buffer``, ``master``, or the optimizer's own name: ``exp_avg``, ``momentum_buffer``.
        what: Its shape and type, for comparing replicas.
        nbytes: Its length.
        here: Whether its memory goes into a file that this rank writes.
        among: Which ranks hold the same, by a name that they share (``mp_rank_00``); None where no other does.
    """

    name: str
    state: str
    what: str
    nbytes: int
    here: bool
    among: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LiveState:
    """A live model as one rank sees it, ready to be copied aside and written.

    Args:
        format: Name of the format that its files have: ``megatron``, ``torch``.
        parallel: How the model is cut, for people: ``TP2×PP2×DP1``.
        files: Those that this rank contributes to.
        texts: Small files and their content, given by the first rank of the role's world only. What takes a while to put
            together is a function, called behind training, that holds no live value.
        state_tensors: Every state tensor that this rank holds, and whether it writes it: see :mod:`.save`. None: the engine does not
            count, and the manifest has no figures of the role.
    """

    format: str
    parallel: str
    files: tuple[LiveFile, ...]
    texts: Mapping[str, Text] = field(default_factory=dict)
    state_tensors: Sequence[StateTensor] | None = None


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What is to be loaded.

    Args:
        folder: The role's folder in a step: ``global_step_50/actor``.
        role: Whose model it is.
        step: The step, where the folder holds several.
        optimizer: Whether the optimizer is restored; without it only weights are.
    """

    folder: ReadablePath
    role: str
    step: int | None = None
    optimizer: bool = True


class PreparedLoad(Protocol):
    """A load of which everything has been checked on this rank, and nothing has been done."""

    @property
    def files(self) -> Sequence[ReadablePath]:
        """The files that this rank will read; their checksums are verified before :meth:`install`."""
        ...

    @property
    def report(self) -> Report:
        """What is kept, derived, changed and lost."""
        ...

    @property
    def rng(self) -> Mapping[str, object] | None:
        """Random states that the model's own files hold for this rank, under the manager's names; None where there are none.

        They are used where a step has no random states of every rank, such as another trainer's.
        """
        ...

    def install(self, undo: Undo) -> None:
        """Do all that may refuse: hand states to others' code, allocate. Nothing in it is collective.

        Args:
            undo: Told, before anything changes, how it is put back: another role, or another rank, may refuse after this.

        Raises:
            CheckpointError: A part refused its state.
        """
        ...

    def fill(self) -> None:
        """Copy the bytes into the live tensors, once every part of every rank is installed. It draws no random numbers.

        Raises:
            StorageError: A file cannot be read any more.
        """
        ...


def apply(prepared: PreparedLoad) -> None:
    """Load one model by itself; if it refuses, it is as it was. The manager does the same for all roles at once."""
    with Undo() as undo:
        prepared.install(undo)
    prepared.fill()


class Engine(Protocol):
    """A live trainer: model, optimizer, scheduler of one role.

    All methods are called on every rank of the role's world, in the same order.
    """

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of the role's world; the first gives what belongs to all."""
        ...

    @property
    def layout(self) -> str:
        """How the model is cut. RNG states of a rank are kept where it is the same: ``TP2×PP1×DP4``."""
        ...

    def live(self, step: int) -> LiveState:
        """Describe what is to be saved; no byte of a tensor is copied yet. All ranks call it or none, so that it may be collective."""
        ...

    def prepare_load(self, request: LoadRequest) -> PreparedLoad:
        """Open a checkpoint, check that it fits and plan the load. No live tensor is changed, nothing is collective.

        Raises:
            CheckpointError: It does not fit: all differences, with shapes.
        """
        ...


@runtime_checkable
class HasRng(Protocol):
    """An engine whose framework keeps random states of its own, such as Megatron's tracker."""

    def rng_states(self) -> dict[str, torch.Tensor]:
        """This rank's states by name: ``model-parallel-rng`` → uint8, on the CPU; copies."""
        ...

    def set_rng_states(self, states: Mapping[str, torch.Tensor]) -> None:
        """Restore what :meth:`rng_states` gave."""
        ...

    def derived_rng(self, first: Mapping[str, object], step: int) -> Mapping[str, object]:
        """Random states of this rank for a layout that is not the one saved.

        Args:
            first: What was saved of rank 0: ``python``, ``numpy``, ``torch``, ``cuda`` and ``tracker``.
            step: The step that was loaded.

        Returns:
            The same fields for this rank. Equal where the framework wants them equal (within a tensor-parallel group).
        """
        ...
