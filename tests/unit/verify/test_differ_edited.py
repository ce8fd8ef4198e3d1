"""A copy in which one thing was edited: ``diff`` names it, whatever it is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.storage.reading import OpenFiles
from mcore_rlhf.verify.differ import Comparison, Differ

GOLDEN = Path(__file__).resolve().parents[2] / "goldens" / "transformers" / "checkpoint-2"


def _compared(copy: Path) -> Comparison:
    a, b = (open_checkpoint(path, ReadOptions()) for path in (GOLDEN, copy))
    with OpenFiles(a.root) as bytes_a, OpenFiles(b.root) as bytes_b:
        return Differ(a, b, bytes_a, bytes_b).compare()


def _optimizer(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        content = torch.load(folder / "optimizer.pt", weights_only=True)
        change(content)
        torch.save(content, folder / "optimizer.pt")

    return edit


def _json(file: str) -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_text(
        json.dumps({**json.loads((folder / file).read_text()), "edited": 1})
    )


EDITS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a group's field": (
        _optimizer(lambda c: c["param_groups"][1].update(edited=0.5)), "param groups are not the same: 'edited'",
    ),
    "a group's rate": (_optimizer(lambda c: c["param_groups"][0].update(lr=7.0)), "param groups are not the same: 'lr'"),
    "a key that nobody knows": (_optimizer(lambda c: c.update(edited=3)), "value edited in optimizer.pt"),
    "a file beside": (_json("generation_config.json"), "file generation_config.json"),
    "a file that was not there": (lambda f: (f / "edited.json").write_text("{}"), "file edited.json"),
}  # fmt: skip


@pytest.mark.parametrize("edit", EDITS)
def test_what_was_edited_is_named(tmp_path: Path, edit: str) -> None:
    """Param groups were "not the same", and of the rest it said that all other values are the same."""
    change, words = EDITS[edit]
    shutil.copytree(GOLDEN, tmp_path / "copy")
    change(tmp_path / "copy")
    found = _compared(tmp_path / "copy")
    told = [*found.notes, *(one.what for one in found.differences)]
    assert any(words in text for text in told), told


def test_what_nobody_knows_in_both_is_said_to_be_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(GOLDEN, tmp_path / "first")
    _optimizer(lambda c: c.update(edited=3))(tmp_path / "first")
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    monkeypatch.setattr(f"{__name__}.GOLDEN", tmp_path / "first")
    assert "not known, and not compared: edited in optimizer.pt" in _compared(tmp_path / "second").notes
