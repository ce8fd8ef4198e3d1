"""miles' hook gives a step that was just written a manifest, and never ends the training that calls it."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from mcore_rlhf.integrations.miles import post_save
from mcore_rlhf.manager.runs import listed_steps

GOLDEN = Path(__file__).resolve().parents[2] / "goldens" / "megatron_dist" / "tp2pp2dp2_fully_reshardable"


def states(root: Path) -> list[tuple[int, str]]:
    return [(step.step, step.state) for step in listed_steps(root)]


def saved(root: Path) -> None:
    """What miles does once Megatron-LM has saved."""
    post_save(SimpleNamespace(save=str(root)), 2, str(root / "iter_0000002"), None).result(60)


def test_a_step_is_committed_and_once_more_where_it_is_written_over(tmp_path: Path) -> None:
    root = tmp_path / "run"
    shutil.copytree(GOLDEN, root)
    assert states(root) != [(2, "committed")]
    saved(root)
    assert states(root) == [(2, "committed")]
    shard = next((root / "iter_0000002").glob("*.distcp"))
    shard.rename(tmp_path / "aside")
    shutil.copy(tmp_path / "aside", shard)
    manifest = next((root / "iter_0000002").glob("*mcore*"))
    before = manifest.read_text()
    saved(root)
    assert states(root) == [(2, "committed")]
    assert manifest.read_text() != before, "it is of what was written last"


def test_a_damaged_step_gets_no_manifest_and_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "run"
    shutil.copytree(GOLDEN, root)
    saved(root)
    shard = next((root / "iter_0000002").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-100])
    with caplog.at_level(logging.WARNING):
        saved(root)
    assert "has no manifest" in caplog.text
    assert [state for _, state in states(root)] != ["committed"], "nor the one of before"


def test_what_is_not_there_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        saved(tmp_path)
    assert "there is no such folder" in caplog.text
