"""The checkpoints that DeepSpeed wrote, and whole tensors out of any opened checkpoint."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

from mcore_rlhf.core.catalog import TensorEntry, TensorName
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.families.source import Source
from mcore_rlhf.formats.deepspeed import FORMAT

GOLDENS = Path(__file__).parents[1] / "goldens" / "deepspeed"
NAMES = tuple(sorted(path.name for path in GOLDENS.iterdir()))
WITH_EXPECTATION = tuple(name for name in NAMES if not name.startswith(("pp2", "autotp2")))
"""Those of which DeepSpeed said itself what the whole tensors are."""


def tag(name: str) -> Path:
    """The folder of a golden's tag."""
    return GOLDENS / name / "step3"


@cache
def opened(name: str) -> Source:
    """A golden, opened by the package."""
    return FORMAT.read(tag(name), ReadOptions())


@cache
def expected(name: str) -> Any:
    """What DeepSpeed said: ``state`` and ``groups``."""
    return torch.load(GOLDENS / name / "expected.pt", weights_only=True)


def tensor(source: Source, param: str, state: str) -> torch.Tensor | None:
    """A whole tensor, put together by hand from the chunks of its catalogue entry."""
    entry = source.catalog.get(TensorName(source.role, param, state))
    return None if entry is None else assembled(source.root, entry)


def assembled(root: Path, entry: TensorEntry) -> torch.Tensor:
    """All chunks of an entry, copies included, in one tensor; elements that no chunk has are NaN or -1."""
    dtype = getattr(torch, entry.dtype.name)
    whole = torch.full(entry.global_shape, float("nan") if dtype.is_floating_point else -1, dtype=dtype)
    for chunk in (chunk for chunk in entry.chunks if chunk.box.numel):
        with (root / chunk.record.file).open("rb") as file:
            file.seek(chunk.record.byte_offset)
            flat = torch.frombuffer(bytearray(file.read(chunk.record.nbytes)), dtype=dtype)
        part = flat.as_strided(chunk.box.shape, chunk.strides, chunk.start)
        whole[tuple(slice(a, b) for a, b in zip(chunk.box.offset, chunk.box.stop, strict=True))] = part
    return whole
