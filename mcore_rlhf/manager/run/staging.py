"""Host memory that a snapshot is copied into: which part of it is copied when, and how much there is for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TypeAlias

import torch

from mcore_rlhf.engines.base import LiveFile, Segment
from mcore_rlhf.errors import CheckpointError, StorageError
from mcore_rlhf.storage.host_pool import HostPool
from mcore_rlhf.storage.paths import human

from .options import LOG
from .stream import PIECE_BYTES, Lined, Share, Staged, Stream, as_bytes

_ALIGNMENT = 64
_Coming: TypeAlias = "tuple[StepFile, Segment]"


@dataclass(frozen=True, slots=True, eq=False)
class StepFile:
    """A file of a step.

    Args:
        folder: The role's folder in the step.
        live: The file, as the role describes it.
        staged: What this rank puts into it, where that is not the file's live segments.
    """

    folder: str
    live: LiveFile
    staged: Sequence[Share] | None = None

    @property
    def path(self) -> str:
        """Relative to the step's folder."""
        return f"{self.folder}/{self.live.path}"

    @property
    def shares(self) -> Sequence[Share]:
        """What this rank puts into it."""
        return self.live.segments if self.staged is None else self.staged


@dataclass(slots=True)
class HostStaging:
    """One flat buffer of host memory: pinned where there is a GPU.

    A save needs as much of it as this rank contributes; it is made by :meth:`reserve` or by the first save, grows when a
    save needs more, and is not given back before :meth:`free`, or :meth:`give_back` where others may need it meanwhile.

    Args:
        pool: What it is taken from, which may be less than there is to be copied: then it is used again and again during a save. None for
            as much as that.
        keeps: Whether it stays from one save to the next.
    """

    pool: HostPool | None = None
    keeps: bool = True
    _said: bool = False
    _buffer: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8, device="cpu"))
    _side: dict[torch.device, torch.cuda.Stream] = field(default_factory=dict)
    _last: tuple[Stream, ...] = ()
    _taking: threading.Lock = field(default_factory=threading.Lock)

    @property
    def nbytes(self) -> int:
        """How much is held."""
        return self._buffer.numel()

    def reserve(self, files: Sequence[StepFile]) -> None:
        """Make room for a snapshot of these files, and touch it: the system hands out memory at the first touch only."""
        if self.keeps:
            self._make(needed(files))

    def staged(
        self,
        files: Sequence[StepFile],
        waits: Callable[[str, Segment], bool] = lambda folder, segment: False,
        changed: Callable[[], CheckpointError | None] = lambda: None,
    ) -> tuple[list[StepFile], Stream]:
        """Prepare the copy of all segments; those that cannot wait are copied now, which on a GPU is to be queued now.

        Args:
            files: In the order in which they are written.
            waits: Whether a segment of a role's folder stays as it is until :meth:`Stream.fence`; asked only where it matters. Where there
                is no room for those that do not, they go in waves as well, first those of files that have no others, and are urgent.
            changed: See :class:`Stream`.

        Returns:
            The same files, whose shares are valid until the next call; and the stream, which is to be run.
        """
        with self._taking:
            self._let_go()
        coming = [(file, segment) for file in files for segment in file.live.segments]
        later = {id(segment) for file, segment in coming if waits(file.folder, segment)}
        room = self._make(needed(files))
        urgent = self._urgent(coming, later, room) if later and room < needed(files) else set()
        files = sorted(
            files, key=lambda file: (file.live.container is None, not _is_all(file, urgent))
        )  # first its own
        coming = [(file, segment) for file in files for segment in file.live.segments]
        at_once = [one for one in coming if later and id(one[1]) not in later | urgent]
        streamed = [one for one in coming if not later or id(one[1]) in later | urgent]
        first = _bytes_of(segment for _, segment in at_once)
        ahead, behind = _lined_up(at_once), _lined_up(streamed)
        now = Stream(
            self._buffer[:first], ahead, {device: torch.cuda.current_stream(device) for device in _gpus_of(ahead)}
        )
        now.queue()
        rest = min(room - first, _bytes_of(one for _, one in streamed))
        stream = Stream(self._buffer[first : first + rest], behind, self._side_streams(behind), changed)
        ends = [
            start + one.nbytes for (start, _, _), (_, one) in zip(behind, streamed, strict=True) if id(one) in urgent
        ]
        stream.urgent = max(ends, default=0)
        self._last = now, stream
        shares = {
            id(segment): Staged(segment.label, segment.byte_offset, segment.nbytes, start, brings)
            for brings, sources, some in ((now, ahead, at_once), (stream, behind, streamed))
            for (start, _, _), (_, segment) in zip(sources, some, strict=True)
        }
        return [
            StepFile(file.folder, replace(file.live, segments=()), [shares[id(one)] for one in file.live.segments])
            for file in files
        ], stream

    def give_back(self, stream: Stream | None = None) -> None:
        """Nothing is read any more of what was staged: where other processes may need the memory before the next save, they may have it.

        Args:
            stream: The one that is done with, if another may have begun since; None for the last.
        """
        if self.keeps or self.pool is None:
            return
        with self._taking:
            if stream is None or stream in self._last:
                self._let_go()
                self._drop()
                with suppress(StorageError):  # it is counted until this process takes memory again
                    self.pool.give_back()

    def free(self) -> None:
        """Give the memory back, and leave those that share it."""
        with self._taking:
            self._let_go()
            self._drop()
        if self.pool is not None:
            self.pool.close()

    def _make(self, wanted: int) -> int:
        """See that so much is there, or as much as there may be; how much that is."""
        pinned = torch.cuda.is_available()
        room = wanted
        if self.pool is not None:
            room = self.pool.take(_rounded_up(wanted) if pinned else wanted, self._drop)
            room = min(wanted, _rounded_down(room) if pinned else room)
        if room > self.nbytes:
            self._drop()  # the old one first: never two at a time
            self._buffer = torch.empty(room, dtype=torch.uint8, device="cpu", pin_memory=pinned)
            self._buffer.zero_()
        return room

    def _let_go(self) -> None:
        for stream in self._last:
            stream.let_go()
        self._last = ()

    def _drop(self) -> None:
        """Give the memory back; what was pinned, also to the system."""
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        if self.pool is not None and torch.cuda.is_available():
            with suppress(AttributeError):  # before torch 2.10
                torch.accelerator.empty_host_cache()

    def _urgent(self, coming: Sequence[_Coming], later: set[int], room: int) -> set[int]:
        """What cannot wait, and finds no room beside what can, so that it goes in waves while training waits."""
        found = [(file, segment) for file, segment in coming if id(segment) not in later]
        if _bytes_of(segment for _, segment in found) + PIECE_BYTES <= room:
            return set()
        mixed = {file.path for file, segment in coming if id(segment) in later}
        beside = [segment for file, segment in found if file.path in mixed]
        some = found
        if _bytes_of(beside) + PIECE_BYTES <= room:  # training need not wait for what can
            some = [(file, segment) for file, segment in found if file.path not in mixed]
        if not self._said:
            self._said = True
            LOG.warning(
                "max_host_memory: %s of this rank's part may change at any time, for which its %s of host memory are too little beside the "
                "rest: training waits inside save() until they are written", human(_bytes_of(one for _, one in found)), human(room),
            )  # fmt: skip
        return {id(segment) for _, segment in some}

    def _side_streams(self, sources: Sequence[Lined]) -> dict[torch.device, torch.cuda.Stream]:
        """A stream for each GPU, behind what training has queued."""
        devices = _gpus_of(sources)
        for device in devices:
            if device not in self._side:
                self._side[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._side[device].wait_stream(torch.cuda.current_stream(device))
        return {device: self._side[device] for device in devices}


def needed(files: Sequence[StepFile]) -> int:
    """Bytes of host memory that a copy of all their segments takes."""
    return _bytes_of(segment for file in files for segment in file.live.segments)


def _is_all(file: StepFile, some: set[int]) -> bool:
    return bool(some) and all(id(segment) in some for segment in file.live.segments)


def _bytes_of(segments: Iterable[Segment]) -> int:
    return sum(_padded(segment.nbytes) for segment in segments)


def _rounded_up(nbytes: int) -> int:
    """What pinned memory of this size takes; it has a power of two.

    Source: torch 2.13.0, ``aten/src/ATen/core/CachingHostAllocator.h`` (``allocate``).
    """
    return 1 << max(0, nbytes - 1).bit_length()


def _rounded_down(nbytes: int) -> int:
    return 1 << nbytes.bit_length() - 1 if nbytes else 0


def _lined_up(some: Sequence[tuple[StepFile, Segment]]) -> list[Lined]:
    """Where each begins in a stream of them, its bytes, and its name."""
    starts = accumulate((_padded(segment.nbytes) for _, segment in some), initial=0)
    return [
        (start, as_bytes(segment.tensor), f"{file.folder}/{file.live.path}, record {segment.label}")
        for start, (file, segment) in zip(starts, some, strict=False)
    ]


def _gpus_of(sources: Sequence[Lined]) -> set[torch.device]:
    return {tensor.device for _, tensor, _ in sources if tensor.is_cuda}


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
