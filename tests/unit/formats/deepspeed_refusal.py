"""Copies of DeepSpeed's own checkpoints to be broken, and what must be so when one is refused."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from mcore_rlhf.convert import convert
from mcore_rlhf.errors import CheckpointError
from mcore_rlhf.families.options import ReadOptions
from tests.helpers.conversions import options
from tests.helpers.damage import snapshot
from tests.helpers.deepspeed_goldens import GOLDENS


def copied(name: str, root: Path) -> Path:
    """A copy of a golden's native part, as a root with ``latest``."""
    shutil.copytree(GOLDENS / name / "step3", root / "step3")
    (root / "latest").write_text("step3")
    return root


def refused(root: Path, kind: type[CheckpointError], *words: str, read: ReadOptions | None = None) -> str:
    before, there = snapshot(root), sorted(path.name for path in root.parent.iterdir())
    chosen = replace(options(zero_stage=2, dp=2), to="deepspeed", read=read or ReadOptions())
    with pytest.raises(CheckpointError) as caught:
        convert(root, root.parent / "target", chosen)
    message = str(caught.value)
    assert type(caught.value) is kind, message
    assert [word for word in words if word not in message] == [], message
    assert sorted(path.name for path in root.parent.iterdir()) == there
    assert snapshot(root) == before
    return message
