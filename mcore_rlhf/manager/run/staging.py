"""Host memory for a snapshot: kept from save to save, touched before it is needed, so that a save costs one memory copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from mcore_rlhf.engines.base import LiveFile, Segment

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True, eq=False)
class StepFile:
    """A file of a step.

    Args:
        folder: The role's folder in the step.
        live: The file, as the role describes it.
    """

    folder: str
    live: LiveFile

    @property
    def path(self) -> str:
        """Relative to the step's folder."""
        return f"{self.folder}/{self.live.path}"


@dataclass(slots=True)
class HostStaging:
    """One flat buffer of host memory: pinned where there is a GPU.

    A save needs as much of it as this rank contributes; it is made by :meth:`reserve` or by the first save, grows when a
    save needs more, and is never given back before :meth:`free`.
    """

    _buffer: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    _streams: dict[torch.device, torch.cuda.Stream] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """How much is held."""
        return self._buffer.numel()

    def reserve(self, files: Sequence[StepFile]) -> None:
        """Make room for a snapshot of these files, and touch it: the system hands out memory at the first touch only."""
        needed = sum(_padded(segment.nbytes) for file in files for segment in file.live.segments)
        if needed > self.nbytes:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # the old one first: never two at a time
            self._buffer = torch.empty(needed, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
            self._buffer.zero_()

    def snapshot(self, files: Sequence[StepFile]) -> list[StepFile]:
        """Copy all segments aside. On return, training may change the live tensors.

        Returns:
            The same files with segments in host memory, valid until the next snapshot.
        """
        self.reserve(files)
        at, copies = 0, []
        for file in files:
            segments = []
            for segment in file.live.segments:
                segments.append(self._copy(segment, at))
                at += _padded(segment.nbytes)
            copies.append(StepFile(file.folder, replace(file.live, segments=tuple(segments))))
        for stream in self._streams.values():
            stream.synchronize()
        return copies

    def free(self) -> None:
        """Give the memory back."""
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def _copy(self, segment: Segment, at: int) -> Segment:
        aside = self._buffer[at : at + segment.nbytes]
        source = as_bytes(segment.tensor)
        if source.device.type == "cuda":
            self._copy_from_gpu(aside, source)
        else:
            aside.copy_(source)
        return Segment(segment.label, segment.byte_offset, aside)

    def _copy_from_gpu(self, aside: torch.Tensor, source: torch.Tensor) -> None:
        """On a stream of its own, after what the training stream has queued: all copies overlap one another."""
        stream = self._streams.get(source.device)
        if stream is None:
            stream = self._streams[source.device] = torch.cuda.Stream(source.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(stream):
            aside.copy_(source, non_blocking=True)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory as a flat tensor of bytes; a view."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
