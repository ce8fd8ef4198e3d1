"""Megatron-Bridge and slime go on, by their own code, from runs that ``convert RUN NEW --to TRAINER`` made.

Bridge's own manager loads and trains two steps, with the losses that the run itself sees behind the same step. Of slime its own code says
with which rollout it begins, and with which prompts; its weights are Megatron-LM's, which its loader hands on to
(``tests/reference/test_pretrain.py``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mcore_rlhf.families.options import ConvertOptions, ReadOptions, WriteOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.manager.convert_step import convert_step
from mcore_rlhf.manager.runs import run_at
from mcore_rlhf.manager.subject import find
from tests.trainers.lab import PROJECT
from tests.trainers.test_run_seams import run
from tests.trainers.test_slime import FOLDERS, seen
from tests.unit.manager.test_further_trainers import slime

BRIDGE, JOB = "Megatron-Bridge-067f987", "tests.trainers.bridge_seam"
GOLDENS = PROJECT / "tests" / "goldens"


def into(source: Path, root: Path, to: str, **write: Any) -> Path:
    options = ConvertOptions(to=to, fsync=False, workers=1, write=WriteOptions(**write))
    convert_step(find(source, ReadOptions()), root, options)
    return root


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_bridge_goes_on(trainers: Path, tmp_path: Path) -> None:
    root = tmp_path / "whole"
    status, _, said = run(trainers, BRIDGE, JOB, "plain", root)
    assert status == 0, said[-3000:]
    there = into(root, tmp_path / "there", "openrlhf", dp=2, vocab_size=127)
    made = [
        into(root, tmp_path / "directly", "megatron-bridge"),
        into(
            into(root, tmp_path / "cut", "megatron-lm", tp=2, pp=2), tmp_path / "joined", "megatron-bridge", tp=1, pp=1
        ),
        into(there, tmp_path / "back", "megatron-bridge", tp=1, pp=1, dp=1),
    ]
    (made[-1] / "of-a-gpu").touch()
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "copies.txt").write_text("\n".join(map(str, [root, *made])))
    status, found, said = run(trainers, BRIDGE, JOB, "loads", tmp_path / "all")
    assert status == 0, said[-3000:]
    whole, directly, joined, back = found
    assert directly == whole
    for way in (joined, back):  # whose ranks had other random states in between
        assert {way[what] == whole[what] for what in ("counters", "data", "scheduler")} == {True}
    assert joined["losses"] == whole["losses"]
    assert back["losses"] == pytest.approx(whole["losses"], abs=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("package", FOLDERS)
def test_slime_begins_behind_what_is_done(package: str, trainers: Path, tmp_path: Path) -> None:
    """Its rollouts are numbered from 0: after iteration 2 three are done, which is everybody else's step 3."""
    if not (trainers / FOLDERS[package]).is_dir():
        pytest.skip(f"the repository of {package} is not there")
    own = slime(tmp_path / "own")
    resharded = into(own, tmp_path / "resharded", "slime", tp=1, pp=1)
    verl = into(resharded, tmp_path / "verl", "verl", dp=2)
    back = into(verl, tmp_path / "back", "slime", tp=2)
    found = run_at(verl)
    assert found is not None
    assert [*found.found] == [3]
    assert open_checkpoint(verl / "global_step_3" / "actor", ReadOptions()).state.iteration == 3
    for root, offset in ((own, 8), (resharded, 8), (back, 0)):
        assert (root / "latest_checkpointed_iteration.txt").read_text() == "2"
        assert open_checkpoint(root, ReadOptions()).state.iteration == 2
        assert seen(trainers, package, root, [(2, {})]) == [{"begin": 3, "offset": offset}]
