"""Copies behind training that happen as late as they may: whoever changes a tensor too early is seen in what was saved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from mcore_rlhf.manager.run.stream import Stream


@contextmanager
def copied_at_the_latest() -> Iterator[list[Stream]]:
    """Nothing is copied behind training before the fence; gives the streams that were waited for."""
    fence, start, waited = Stream.fence, Stream.start, list[Stream]()

    def late(stream: Stream, patience: float, only_urgent: bool = False) -> bool:
        if stream not in waited:
            waited.append(stream)
            start(stream)
        return fence(stream, patience, only_urgent)

    def later(stream: Stream) -> None:
        stream._begun = True

    with patch.object(Stream, "fence", late), patch.object(Stream, "start", later):
        yield waited
