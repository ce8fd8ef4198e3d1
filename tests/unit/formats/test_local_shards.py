"""RLinf's rank files without offsets: nobody can put them together, and none may be missing or damaged without a word."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from mcore_rlhf.convert import convert
from mcore_rlhf.errors import Incomplete, Unsupported
from mcore_rlhf.families.options import ConvertOptions, ReadOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.manager.run.adopt import adopt
from mcore_rlhf.storage.torchzip import read_directory
from mcore_rlhf.verify.checkpoint import verify
from tests.helpers.damage import flip

ACTOR = Path(__file__).parents[2] / "goldens" / "dcp" / "fsdp2_ws2" / "actor"


@pytest.fixture
def actor(tmp_path: Path) -> Path:
    """Those of three ranks, beside the whole weights."""
    actor = Path(shutil.copytree(ACTOR, tmp_path / "global_step_3" / "actor"))
    shutil.rmtree(actor / "dcp_checkpoint")
    full = torch.load(actor / "model_state_dict" / "full_weights.pt", weights_only=True)
    (actor / "local_shard_checkpoint").mkdir()
    for rank in range(3):
        local = {name: w.tensor_split(3)[rank].clone() if w.dim() else w for name, w in full.items()}
        state = {"model": local, "optimizers": {"state": {0: {"exp_avg": torch.ones(4)}}, "param_groups": []}}
        torch.save(state, actor / "local_shard_checkpoint" / f"checkpoint_rank_{rank}.pt")
    return actor


def test_the_optimizer_in_them_is_not_understood_and_the_weights_beside_them_are(actor: Path, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="holds the optimizer in 3 rank files"):
        open_checkpoint(actor, ReadOptions())
    assert verify(actor, ReadOptions()).intact
    assert open_checkpoint(actor, ReadOptions(optimizer=False)).optimizer is None
    convert(actor, tmp_path / "hf", ConvertOptions(to="hf"))
    with pytest.raises(Unsupported, match="--no-optimizer"):
        convert(actor, tmp_path / "dcp", ConvertOptions(to="dcp"))
    assert adopt(actor.parent).parts[0]["unread"]


@pytest.mark.parametrize("rank", range(3))
def test_every_one_of_them_is_needed_and_checked(actor: Path, rank: int) -> None:
    file = actor / "local_shard_checkpoint" / f"checkpoint_rank_{rank}.pt"
    largest = max(read_directory(file).members.values(), key=lambda member: member.nbytes)
    flip(file, largest.name, 0)
    assert not verify(actor, ReadOptions()).intact
    file.unlink()
    assert "missing" in verify(actor, ReadOptions()).problems.describe()
    with pytest.raises(Incomplete, match="missing"):
        adopt(actor.parent)
