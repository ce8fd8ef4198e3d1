"""Live tensors as the place to which a plan writes: host memory directly, a device's through pinned pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from mcore_rlhf.core.catalog import Record

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
