"""The bytes of a snapshot on their way into host memory, and from there into files: at once, behind training, or in waves.

Three work on one :class:`Stream`: who copies, who writes, and who trains and has to wait at the fence until live tensors are read.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

import torch

from mcore_rlhf.engines.base import Segment
from mcore_rlhf.errors import CheckpointError, StorageError, headline
from mcore_rlhf.storage import threads
from mcore_rlhf.storage.paths import human

from .commit import Stopped
from .options import LOG

WINDOW_BYTES = 1 << 20
"""One window is summed and written while it is in the cache."""
PIECE_BYTES = 4 << 20
"""So much is copied at a time behind training, and handed on; the writer's windows are within it."""
Lined: TypeAlias = "tuple[int, torch.Tensor, str]"
"""Where a tensor's bytes begin in a stream, these bytes, and their name."""
_LOOK_S = 0.25


@dataclass(frozen=True, slots=True, eq=False)
class Staged:
    """What a stream brings of a :class:`~mcore_rlhf.engines.base.Segment`.

    Args:
        label: See there.
        byte_offset: See there.
        nbytes: See there.
        start: Where it begins in the stream.
        stream: It.
    """

    label: str
    byte_offset: int
    nbytes: int
    start: int
    stream: Stream


Share: TypeAlias = "Segment | Staged"
"""What a rank puts into a record: a segment that nothing changes while it is written, in a blocking save, or what a stream brings of
one."""


def windows(share: Share) -> Iterator[memoryview]:
    """The bytes of a share, one window after the other; each is good until the next one is asked for."""
    if isinstance(share, Staged):
        yield from share.stream.read(share.start, share.nbytes)
        return
    flat = as_bytes(share.tensor)
    for start in range(0, flat.numel(), WINDOW_BYTES):
        yield flat[start : start + WINDOW_BYTES].cpu().numpy().data  # those of a GPU come over one at a time


@dataclass(frozen=True, slots=True, eq=False)
class _Source:
    """A live tensor's bytes, and where they were when the snapshot was taken.

    Memory may be given back below a tensor that goes on (``untyped_storage().resize_(0)``, with which trainers send weights to host memory
    for a rollout), which torch does not count as a write.
    """

    tensor: torch.Tensor
    label: str
    place: tuple[int, int]

    @classmethod
    def of(cls, tensor: torch.Tensor, label: str) -> _Source:
        return cls(tensor, label, _place(tensor))

    def refuse_elsewhere(self) -> None:
        """See that the memory has not been given back.

        Raises:
            StorageError: It has, or lies elsewhere.
        """
        if _place(self.tensor) != self.place:
            raise StorageError(
                f"{self.label}: its memory was given back after save(), and before its optimizer's next step: expected "
                f"{human(self.place[1])} where it was, found {human(_place(self.tensor)[1])} at another place or none\n"
                "The step is not saved. Call manager.before_step() before weights are sent to host memory, or save without lazy_snapshot."
            )


class Stream:
    """Bytes on their way into host memory, one share after the other, in the order in which they are written.

    Where the room is smaller than what comes, a part of it is used again as soon as it is written: then they can be read once only.

    Args:
        room: The host memory.
        sources: Where it begins in the stream, what comes, and its name; first to last, without gaps but for alignment.
        side: By GPU, the stream on which it is copied: behind what training has queued so far, and, where it is training's own, ahead of
            what it queues next.
        changed: Says what of the live tensors is no longer as it was when the snapshot was taken; None where all is.
    """

    def __init__(
        self,
        room: torch.Tensor,
        sources: Sequence[Lined],
        side: dict[torch.device, torch.cuda.Stream] | None = None,
        changed: Callable[[], CheckpointError | None] = lambda: None,
    ) -> None:
        self._room, self._side = room, side or {}
        self._sources = deque((start, _Source.of(tensor, label)) for start, tensor, label in sources)
        self.nbytes = max((start + tensor.numel() for start, tensor, _ in sources), default=0)
        self.copied = 0
        """How far it has come; on a GPU, how much is queued."""
        self._written = 0
        self._events: list[tuple[int, torch.cuda.Event]] = []
        self._moved = time.monotonic()
        self._changed: Callable[[], CheckpointError | None] | None = changed
        self._error: BaseException | None = None
        self._cancelled = False
        self._begun = self._queued = False
        self.urgent = 0
        """Before so many bytes have come, training may not go on: any of them may change at any time."""
        self._ended = threading.Event()
        self._news = threading.Condition()

    @property
    def wraps(self) -> bool:
        """Whether the room is used again."""
        return self.nbytes > self._room.numel()

    @property
    def ended(self) -> bool:
        """Whether nothing is copied any more."""
        return self._ended.is_set()

    def start(self) -> None:
        """Copy behind training; where there is no thread for that, now."""
        self._begun = True
        try:
            threads.begin("mcore_rlhf copy", self.run, PIECE_BYTES)
        except StorageError as error:
            LOG.warning("%s; training waits for it", headline(str(error)))
            self.run(PIECE_BYTES)

    def queue(self) -> None:
        """Copy all now; what lies on a GPU is only queued there, and who reads it waits."""
        self._queue(None, [])

    def run(self, piece: int | None = None) -> None:
        """Copy all, or until it is cancelled.

        Args:
            piece: At most so many bytes at a time; None for as many as there are in one place.
        """
        # by a GPU: who lets it go lets others have its memory, so all are held until the streams have ended
        still_read: list[_Source] = []
        try:
            self._queue(piece, still_read)
            with self._news:
                self._queued = True
                self._news.notify_all()
            self._come_to_the_end()
            self.check()
        except BaseException as error:
            self._fail(error)
        finally:
            with suppress(
                RuntimeError
            ):  # given up, or failed: what is queued still reads, and writes into memory that is used next
                self._come_to_the_end()
            still_read.clear()
            with self._news:
                self._queued = True
                self._sources.clear()
                self._ended.set()
                self._news.notify_all()

    def _queue(self, piece: int | None, still_read: list[_Source]) -> None:
        while self._sources:
            start, source = self._sources.popleft()
            self._copy(start, source, piece)
            if source.tensor.is_cuda:
                still_read.append(source)

    def _come_to_the_end(self) -> None:
        for stream in self._side.values():
            stream.synchronize()

    def _copy(self, start: int, whole: _Source, piece: int | None) -> None:
        source = whole.tensor
        at, stop, room = start, start + source.numel(), self._room.numel()
        while at < stop:
            within = at % room
            end = min(stop, at + room - within, at + (piece - at % piece if piece else stop - at))
            with self._news:
                self._news.wait_for(lambda end=end: self._cancelled or end - self._written <= room)  # type: ignore[misc]
                if self._cancelled:
                    raise Stopped("the copy was given up")
            whole.refuse_elsewhere()
            self._copy_into(self._room[within : within + end - at], source[at - start : end - start], piece is not None)
            whole.refuse_elsewhere()
            with self._news:
                if source.is_cuda:
                    self._events.append((end, self._side[source.device].record_event()))
                self.copied, self._moved = end, time.monotonic()
                self._news.notify_all()
            at = end

    def _copy_into(self, aside: torch.Tensor, source: torch.Tensor, behind: bool) -> None:
        """From a GPU on a stream of its own, after what training had queued; all copies overlap one another."""
        if source.is_cuda:
            with torch.cuda.stream(self._side[source.device]):
                aside.copy_(source, non_blocking=True)
        elif behind:  # one thread is enough, and leaves the cores to training
            aside.numpy()[:] = source.cpu().numpy()
        else:
            aside.copy_(source)

    def read(self, start: int, nbytes: int) -> Iterator[memoryview]:
        """The bytes of a share, in windows, as soon as they are there.

        Raises:
            StorageError: They cannot be copied, or are there no more.
        """
        at, stop, room = start, start + nbytes, self._room.numel()
        while at < stop:
            within = at % room
            end = min(stop, at + room - within, at + WINDOW_BYTES - at % WINDOW_BYTES)
            self._await(at, end)
            yield self._room[within : within + end - at].numpy().data
            if self.wraps:
                with self._news:
                    self._written = end
                    self._news.notify_all()
            at = end

    def _await(self, start: int, end: int) -> None:
        with self._news:
            self._news.wait_for(lambda: self.copied >= end or self._ended.is_set() or self._cancelled)
            self._raise()
            if self._cancelled or self.copied < end:
                raise Stopped("the copy was given up")
            if start < self.copied - self._room.numel():
                raise StorageError(
                    "what was copied is there no more: it is written once where max_host_memory is given"
                )
            at = bisect_left(self._events, end, key=lambda one: one[0])
            event = self._events[at][1] if at < len(self._events) else None
        if event is not None:
            event.synchronize()

    def finish(self) -> None:
        """Wait until all is copied.

        Raises:
            CheckpointError: It cannot be, or live tensors were changed meanwhile: the snapshot is of no one moment.
        """
        self._ended.wait()
        self._raise()

    def fence(self, patience: float, only_urgent: bool = False) -> bool:
        """Wait until live tensors may change; on a GPU, only let what is queued from now on wait.

        Args:
            patience: For how many seconds nothing may come.
            only_urgent: Whether only what is :attr:`urgent` may change.

        Returns:
            False where nothing has come for so long.
        """
        with self._news:
            while not (self._queued or self._cancelled or (only_urgent and self.copied >= self.urgent)):
                if not self._news.wait(_LOOK_S) and time.monotonic() - self._moved > patience:
                    return False
            last = {} if self._cancelled else dict(self._side)
        if not only_urgent:
            self.check()
        for device, stream in last.items():
            torch.cuda.current_stream(device).wait_stream(stream)
        return True

    def check(self) -> None:
        """See, once, that nobody has changed what is copied: when it has been, or when it may change from now on."""
        with self._news:
            changed, self._changed = self._changed, None
            if changed is not None and not self._cancelled and (error := changed()) is not None:
                self._error = self._error or error

    def cancel(self) -> None:
        """Nobody needs it any more."""
        with self._news:
            self._cancelled, self._changed = True, None
            self._news.notify_all()

    def join(self) -> None:
        """Wait until nothing is copied any more."""
        if self._begun:
            self._ended.wait()

    def let_go(self) -> None:
        """Nothing of it is read any more: give up the host memory."""
        self.cancel()
        self.join()
        self._room = self._room[:0].clone()

    def _fail(self, error: BaseException) -> None:
        with self._news:
            self._error = self._error or error
            self._changed = None

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def __str__(self) -> str:
        return f"{human(self.copied)} of {human(self.nbytes)}"


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory as a flat tensor of bytes; a view."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """Address and size of what a tensor lies in."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()
