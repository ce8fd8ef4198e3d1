"""What every refused conversion must keep: one error of the right class, nothing published, nothing left, source untouched."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mcore_rlhf.convert import convert
from mcore_rlhf.errors import CheckpointError, Unsupported
from mcore_rlhf.families.options import ReadOptions
from tests.helpers.conversions import options
from tests.helpers.damage import snapshot

EXIT_CODES = {
    "CheckpointError": 1, "NotACheckpoint": 2, "Unsupported": 2, "UsageError": 2, "StorageError": 2, "Untrusted": 1,
    "Incomplete": 1, "Corrupt": 1, "LayoutMismatch": 1, "CoverageError": 1, "Lossy": 1,
}  # fmt: skip


def refused(
    source: Path, kind: type[CheckpointError], *words: str, read: ReadOptions | None = None, **write: Any
) -> str:
    """Convert, and expect that it is refused; returns the message, which must hold all of ``words``."""
    parent = source.parent
    before = snapshot(source) if source.is_dir() else {}
    there = {path.name for path in parent.iterdir()}
    chosen = replace(options(**write), read=read or ReadOptions())
    with pytest.raises(CheckpointError) as caught:
        convert(source, parent / "target", chosen)
    message = str(caught.value)
    assert type(caught.value) is kind, message
    if kind is Unsupported:  # what is merely not known is no reason to throw a step away
        assert not any(advice in message for advice in ("older step", "older tag", "another step")), message
    assert caught.value.exit_code == EXIT_CODES[kind.__name__]
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in: {message}"
    assert {path.name for path in parent.iterdir()} == there, "something was left behind"
    assert (snapshot(source) if source.is_dir() else {}) == before, "the source was touched"
    return message
