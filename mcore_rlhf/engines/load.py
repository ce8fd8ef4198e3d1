"""Loading, once for all frameworks: what is matched, planned through the catalogue, checked, installed with an undo, and filled.

A framework says which live tensors there are (:class:`Slot`), what the checkpoint calls that which they hold, and what its own
code is handed besides (:class:`Hooks`). Where local tensors are the stored ones, the catalogue is this rank's own files
(:func:`planned_locally`), and otherwise a source's (:func:`planned`): the planner checks both, and one piece of code fills.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.catalog import (
    Box,
    Chunk,
    DType,
    Record,
    Shape,
    TensorEntry,
    TensorName,
    dot,
    dtype_of,
    flat_boxes,
    row_major,
)
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.core.execute import FileRun, SourceBytes
from mcore_rlhf.core.plan import Copy, FilePlan, coalesced, plan_file
from mcore_rlhf.errors import CheckpointError, Problem, Problems
from mcore_rlhf.families.source import Computed, Source, open_bytes
from mcore_rlhf.layouts.tensor import LocalLayout
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.stored import StoredTensor

from .stateful import Undo

LIVE = "live"
"""What plans call the live model, where otherwise the name of a target file stands."""
WINDOW_BYTES = 8 << 20
MOST_PROBLEMS = 1000
"""A user who built another model wants to see every difference."""
BOUNCE_BYTES = 32 << 20
"""Size of each of the two pinned buffers: one is filled while the device takes the other."""

T = TypeVar("T")
Put = Callable[[Mapping[str, torch.Tensor]], None]
Pair = tuple[StoredTensor, torch.Tensor]
"""Where a tensor lies, and the live one of its shape that it is copied into: any strides, any device."""


@dataclass(frozen=True, slots=True, eq=False)
class Slot(Generic[T]):
    """A live tensor that is to be filled.

    Args:
        owner: What the framework calls the parameter, buffer or flat tensor that it is, or that has it as a state.
        state: ``param``, ``master``, or the name of an optimizer state.
        record: Its memory as a record of the plan; the key is the slot's own.
        tensor: Gives the memory, once the optimizer has its states; on any device.
        start: Where the record begins in the flattened local tensor.
        put: Takes all states of the owner by name, where they are kept in another form; they are filled in fp32 buffers.
    """

    owner: T
    state: str
    record: Record
    tensor: Callable[[], torch.Tensor]
    start: int = 0
    put: Put | None = None

    def entry(self, name: TensorName, global_shape: Shape, chunks: Iterable[Chunk]) -> TensorEntry:
        """What it holds of a logical tensor."""
        return TensorEntry(name, global_shape, self.record.dtype, tuple(chunks))


@dataclass(slots=True)
class Slots(Generic[T]):
    """Collects what is to be filled."""

    found: list[Slot[T]] = field(default_factory=list)

    def add(
        self,
        owner: T,
        state: str,
        dtype: DType,
        numel: int,
        tensor: Callable[[], torch.Tensor],
        start: int = 0,
        put: Put | None = None,
    ) -> Slot[T]:
        """Add one; see :class:`Slot`."""
        record = Record(LIVE, str(len(self.found)), dtype, numel, 0)
        self.found.append(Slot(owner, state, record, tensor, start, put))
        return self.found[-1]


def planned(
    slots: Iterable[Slot[T]], holds: Callable[[Slot[T]], Iterable[TensorEntry]], catalog: Chunks, problems: Problems
) -> FilePlan:
    """Plan a load out of a source's catalogue.

    Args:
        slots: What is to be filled.
        holds: The logical tensors of which a slot holds parts, under the source's names.
        catalog: The source's, as this run wants to see it.
        problems: What was found before; with any, nothing is planned. They become the plan's.
    """
    entries = (entry for slot in slots for entry in holds(slot) if entry.chunks)
    plan = FilePlan(LIVE) if problems else plan_file(LIVE, Chunks.of(entries), catalog)
    plan.problems.extend(problems.found)
    return plan


def planned_locally(
    slots: Iterable[Slot[T]], find: Callable[[Slot[T]], object], missing: Callable[[Slot[T]], Problem]
) -> FilePlan:
    """Plan a load where local tensors are the stored ones: the catalogue has them under the slots' keys, flat.

    Args:
        slots: What is to be filled. One that is longer than what is stored ends in padding, which stays.
        find: Where the local tensor lies that a slot is, or is a range of.
        missing: What is wrong where it lies nowhere.
    """
    stored: dict[TensorName, TensorEntry] = {}
    wanted: list[TensorEntry] = []
    problems = Problems()
    for slot in slots:
        place = find(slot)
        if not isinstance(place, StoredTensor):
            problems.extend([missing(slot)])
            continue
        name, numel = TensorName("", slot.record.key, slot.state), place.stop - place.start
        here = Box((slot.start,), (min(slot.record.numel, numel) if not slot.start else slot.record.numel,))
        whole = Chunk(Box.whole((numel,)), place.record, place.start, (1,))
        stored[name] = TensorEntry(name, (numel,), place.record.dtype, (whole,))
        if here.numel:
            wanted.append(slot.entry(name, (numel,), [Chunk(here, slot.record, 0, (1,))]))
    plan = plan_file(LIVE, Chunks.of(wanted), Chunks.of(stored.values()))
    plan.problems.extend(problems.found)
    return plan


def fill_places(root: ReadablePath, pairs: Iterable[Pair]) -> None:
    """Copy stored tensors into live ones of the same shapes; values are converted where the types differ.

    Args:
        root: Folder of the files.
        pairs: See :data:`Pair`.
    """
    slots, copies = Slots[None](), list[Copy]()
    for place, tensor in pairs:
        if tensor.numel():
            slot = slots.add(None, "", dtype_of(tensor.dtype), tensor.numel(), lambda tensor=tensor: tensor)  # type: ignore[misc]
            shape, box = place.shape, Box.whole(place.shape)
            have = Chunk(box, place.record, place.start, place.strides)
            want = Chunk(box, slot.record, 0, tuple(tensor.stride()) if _is_dense(tensor) else row_major(shape))
            copies.append(coalesced(shape, have, want))
    LoadExecution(root, None, FilePlan(LIVE, copies), slots.found).run()


class Hooks(Protocol):
    """What a framework does in a load besides its tensors."""

    def check(self, problems: Problems) -> None:
        """Note what its own code would refuse; nothing live changes."""
        ...

    def install(self, undo: Undo) -> None:
        """Hand its code param groups, states to be filled, schedules; note first how each is put back."""
        ...

    def fill(self, copy: Callable[[], None]) -> None:
        """Call ``copy``, which fills all slots, amid what has to be done before and after."""
        ...


@dataclass(slots=True)
class Load(Generic[T]):
    """A load as one rank sees it: once checked, everything that is needed to overwrite the live model.

    Args:
        root: Folder to which the plan's files are relative.
        slots: What is filled.
        plan: What fills it, and what does not fit.
        report: What is kept, derived, changed and lost.
        opened: Files that were read already, while the load was prepared.
        rng: RNG states that this rank's own file holds, under the manager's names; None where it holds none.
        computed: What the plan takes that is stored nowhere, but computed of files, which are all in ``opened``.
    """

    root: ReadablePath
    slots: Sequence[Slot[T]]
    plan: FilePlan
    report: Report
    opened: Sequence[ReadablePath] = ()
    rng: Mapping[str, object] | None = None
    computed: Computed | None = None
    _hooks: Hooks | None = None

    @classmethod
    def of(
        cls,
        source: Source,
        slots: Sequence[Slot[T]],
        plan: FilePlan,
        report: Report,
        opened: Sequence[ReadablePath] = (),
    ) -> Load[T]:
        """The load of an opened checkpoint; see the class."""
        behind = [source.root / file.path for file in source.files] if source.computed is not None else []
        return cls(source.root, slots, plan, report, [*opened, *behind], computed=source.computed)

    @property
    def files(self) -> Sequence[ReadablePath]:
        """The files that this rank will read."""
        copied = dict.fromkeys(copy.source.file for copy in self.plan.copies if not copy.source.computed)
        return tuple(dict.fromkeys([*self.opened, *(self.root / file for file in copied)]))

    def checked(self, hooks: Hooks) -> Load[T]:
        """The load, when nothing is wrong with it.

        Args:
            hooks: What the framework does.

        Raises:
            CheckpointError: All problems together.
        """
        self._hooks, problems = hooks, Problems(list(self.plan.problems.found))
        hooks.check(problems)
        problems.raise_if_any(limit=MOST_PROBLEMS)
        return self

    def install(self, undo: Undo) -> None:
        """All that may refuse.

        Raises:
            CheckpointError: A part refused its state.
        """
        assert self._hooks is not None
        with torch.no_grad():
            self._hooks.install(undo)

    def fill(self) -> None:
        """The tensors, in place.

        Raises:
            StorageError: A file cannot be read any more.
        """
        assert self._hooks is not None
        with torch.no_grad():
            self._hooks.fill(LoadExecution(self.root, self.computed, self.plan, self.slots).run)


@dataclass(slots=True)
class LoadExecution(Generic[T]):
    """Carries out a plan, one window at a time.

    Args:
        root: Folder of the files.
        computed: What is computed of them.
        plan: What is copied.
        slots: Where to.
    """

    root: ReadablePath
    computed: Computed | None
    plan: FilePlan
    slots: Sequence[Slot[T]]

    def run(self) -> None:
        """Copy everything; states in another form take the way through fp32 buffers, one owner at a time."""
        by_key: dict[str, list[Copy]] = {}
        for copy in self.plan.copies:
            by_key.setdefault(copy.target.key, []).append(copy)
        with open_bytes(self.root, self.computed) as source, torch.no_grad():
            straight = [slot for slot in self.slots if slot.put is None and slot.record.numel]
            _copy(source, by_key, straight, {slot.record.key: slot.tensor() for slot in straight})
            converted = [slot for slot in self.slots if slot.put is not None]
            for _, group in groupby(converted, key=lambda slot: id(slot.owner)):
                inside = list(group)
                buffers = {one.record.key: torch.empty(one.record.numel, device="cpu") for one in inside}
                _copy(source, by_key, inside, buffers)
                put = inside[0].put
                assert put is not None
                put({one.state: buffers[one.record.key] for one in inside})


def _copy(
    source: SourceBytes,
    copies: Mapping[str, Sequence[Copy]],
    slots: Sequence[Slot[T]],
    tensors: Mapping[str, torch.Tensor],
) -> None:
    for slot in slots:
        found = tensors[slot.record.key]
        assert found.numel() * found.element_size() == slot.record.nbytes, (slot.owner, slot.state)
    memory = LiveMemory(tensors)
    plan = FilePlan(LIVE, [one for slot in slots for one in copies.get(slot.record.key, ())])
    FileRun(plan, [slot.record for slot in slots], source, memory, Unchecked(), WINDOW_BYTES).run()
    memory.finish()


@contextmanager
def naming(part: str, file: ReadablePath) -> Iterator[None]:
    """Others' code may raise anything; the user is to hear whose state it was, and that nothing has changed."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{file}: {part} refused its state: {type(error).__name__}: {error}\n"
            "What had been loaded was put back. Build this part as it was when it was saved, or load the weights alone: "
            "load(optimizer=False)."
        ) from error


@dataclass(slots=True)
class LiveMemory:
    """A sink for the executor whose records are live tensors: host memory directly, a device's through pinned pages.

    Args:
        tensors: By record key, on any device. One with gaps between its elements is filled through a copy.
    """

    tensors: Mapping[str, torch.Tensor]
    _bytes: dict[str, torch.Tensor] = field(default_factory=dict)
    _gappy: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    _bounce: Bounce | None = None

    def write(self, key: str, byte_offset: int, data: memoryview) -> None:
        """Put bytes into a live tensor."""
        target = self._target(key)[byte_offset : byte_offset + len(data)]
        if target.device.type == "cpu":
            target.copy_(_tensor_over(data))
            return
        if self._bounce is None:
            self._bounce = Bounce.make()
        self._bounce.copy(np.frombuffer(data, np.uint8), target)

    def finish(self) -> None:
        """Wait until the device has everything."""
        if self._bounce is not None:
            self._bounce.wait()
        for tensor, values in self._gappy:
            tensor.copy_(values)

    def _target(self, key: str) -> torch.Tensor:
        if key not in self._bytes:
            tensor = self.tensors[key].detach()
            if not _is_dense(tensor):
                self._gappy.append((tensor, torch.empty_like(tensor, memory_format=torch.contiguous_format)))
                tensor = self._gappy[-1][1]
            self._bytes[key] = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        return self._bytes[key]


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements lie side by side, in whatever order of dimensions."""
    numel = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != numel:
                return False
            numel *= size
    return True


def _tensor_over(data: memoryview) -> torch.Tensor:
    """Bytes as a tensor, without a copy; read it only, and only while ``data`` lives.

    ``torch.frombuffer`` warns about read-only memory, so that it is given the address instead.
    """
    buffer = (ctypes.c_char * len(data)).from_address(np.frombuffer(data, np.uint8).ctypes.data)
    return torch.frombuffer(buffer, dtype=torch.uint8)


@dataclass(slots=True)
class Bounce:
    """Two pinned buffers that take turns."""

    buffers: tuple[torch.Tensor, torch.Tensor]
    events: list[torch.cuda.Event]
    turn: int = 0

    @classmethod
    def make(cls) -> Bounce:
        """Allocate them."""
        first, second = (torch.empty(BOUNCE_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(2))
        return cls((first, second), [torch.cuda.Event(), torch.cuda.Event()])

    def copy(self, source: np.ndarray, target: torch.Tensor) -> None:
        """Copy host bytes to device bytes; the source may change after the call."""
        for start in range(0, len(source), BOUNCE_BYTES):
            part = source[start : start + BOUNCE_BYTES]
            self.turn ^= 1
            self.events[self.turn].synchronize()
            pinned = self.buffers[self.turn][: len(part)]
            np.copyto(pinned.numpy(), part)
            target[start : start + len(part)].copy_(pinned, non_blocking=True)
            self.events[self.turn].record()

    def wait(self) -> None:
        """Wait for both."""
        for event in self.events:
            event.synchronize()


class Unchecked:
    """Checksums that nobody asks for: the manager has verified the files before they are loaded."""

    def crc32(self, data: memoryview) -> int:
        """Nothing."""
        return 0

    def combine(self, first: int, second: int, second_nbytes: int) -> int:
        """Nothing."""
        return 0

    def saw(self, record: Record, byte_offset: int, nbytes: int, crc32: int) -> None:
        """Nothing."""


def range_chunks(layout: LocalLayout, record: Record, start: int, stop: int) -> Iterator[Chunk]:
    """The chunks of a record that holds elements ``[start, stop)`` of a flattened local tensor, and nothing else.

    Args:
        layout: The part of the whole tensor that the rank holds.
        record: Its first element is the local tensor's element ``start``.
        start: First element of the range.
        stop: One past the last.
    """
    strides = row_major(layout.view)
    for part in flat_boxes(layout.view, start, stop):
        for piece in layout.pieces:
            inside = part.intersect(Box(piece.offset, piece.box.shape))
            if inside is not None:
                offset = tuple(a + i - p for a, i, p in zip(piece.box.offset, inside.offset, piece.offset, strict=True))
                yield Chunk(Box(offset, inside.shape), record, dot(inside.offset, strides) - start, strides)
