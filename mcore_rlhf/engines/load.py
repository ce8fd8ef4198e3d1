"""Filling live tensors from files."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from mcore_rlhf.core.box import Box, dot, flat_boxes, row_major
from mcore_rlhf.core.catalog import Chunk, Record
from mcore_rlhf.layouts.tensor import LocalLayout
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.ptfile import StoredTensor
from mcore_rlhf.storage.reading import OpenFiles

SPAN_BYTES = 64 << 20
"""Mapped at a time, so that loading needs no more memory than that."""


def fill_named(root: ReadablePath, stored: Mapping[str, object], live: Mapping[str, object]) -> None:
    """Copy stored tensors into existing ones of the same names.

    Args:
        root: Folder of the file.
        stored: Name → where it lies; other values are passed over.
        live: Name → live tensor of the same shape, any device.
    """
    with OpenFiles(root) as files, torch.no_grad():
        for name, place in stored.items():
            target = live.get(name)
            if isinstance(place, StoredTensor) and isinstance(target, torch.Tensor):
                copy_into(files, place, target)


def copy_into(files: OpenFiles, place: StoredTensor, target: torch.Tensor) -> None:
    """Copy a stored tensor into an existing one.

    Args:
        files: The checkpoint's files.
        place: Where it lies.
        target: Of the same shape; any device and dtype (values are converted).
    """
    for part, rows in _parts(place, target):
        itemsize = part.record.dtype.itemsize
        at, nbytes = part.record.byte_offset + part.start * itemsize, (part.stop - part.start) * itemsize
        data = files.view(part.record.file, at, nbytes)
        flat = tensor_over(data, getattr(torch, part.record.dtype.name))
        rows.copy_(flat.as_strided(part.shape, part.strides))
        del flat, data
        files.release(part.record.file, at, nbytes)


def _parts(place: StoredTensor, target: torch.Tensor) -> Iterator[tuple[StoredTensor, torch.Tensor]]:
    """Large tensors a few rows at a time."""
    nbytes = (place.stop - place.start) * place.record.dtype.itemsize
    if not target.numel():
        return
    if nbytes <= SPAN_BYTES or not place.shape or place.shape[0] < 2:
        yield place, target
        return
    step = max(1, place.shape[0] * SPAN_BYTES // nbytes)
    for first in range(0, place.shape[0], step):
        count = min(step, place.shape[0] - first)
        start = place.start + first * place.strides[0]
        yield StoredTensor(place.record, start, (count, *place.shape[1:]), place.strides), target[first : first + count]


def tensor_over(data: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor over mapped bytes, without a copy; read it only, and only while ``data`` lives.

    ``torch.frombuffer`` warns about read-only memory, so that it is given the address instead.
    """
    buffer = (ctypes.c_char * len(data)).from_address(np.frombuffer(data, np.uint8).ctypes.data)
    return torch.frombuffer(buffer, dtype=dtype)


BOUNCE_BYTES = 32 << 20
"""Size of each of the two pinned buffers: one is filled while the device takes the other."""


@dataclass(slots=True)
class LiveMemory:
    """A sink for the executor whose records are live tensors.

    Args:
        tensors: By record key; contiguous, on any device.
    """

    tensors: Mapping[str, torch.Tensor]
    _bytes: dict[str, torch.Tensor] = field(default_factory=dict)
    _bounce: Bounce | None = None

    def write(self, key: str, byte_offset: int, data: memoryview) -> None:
        """Put bytes into a live tensor."""
        target = self._target(key)[byte_offset : byte_offset + len(data)]
        source = np.frombuffer(data, np.uint8)
        if target.device.type == "cpu":
            np.copyto(target.numpy(), source)
            return
        if self._bounce is None:
            self._bounce = Bounce.make()
        self._bounce.copy(source, target)

    def finish(self) -> None:
        """Wait until the device has everything."""
        if self._bounce is not None:
            self._bounce.wait()

    def _target(self, key: str) -> torch.Tensor:
        if key not in self._bytes:
            tensor = self.tensors[key].detach()
            assert tensor.is_contiguous(), key
            self._bytes[key] = tensor.view(-1).view(torch.uint8)
        return self._bytes[key]


@dataclass(slots=True)
class Bounce:
    """Two pinned buffers that take turns."""

    buffers: tuple[torch.Tensor, torch.Tensor]
    events: list[torch.cuda.Event]
    turn: int = 0

    @classmethod
    def make(cls) -> Bounce:
        """Allocate them."""
        first, second = (torch.empty(BOUNCE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2))
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
