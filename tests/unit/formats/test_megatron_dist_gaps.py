"""A name is gone from ``.metadata``, which is the only list of what a torch_dist folder holds: whoever opens the folder misses it."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mcore_rlhf.errors import CheckpointError, Incomplete
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.formats.registry import open_checkpoint
from tests.helpers.one_key import without_names

GOLDENS = Path(__file__).parents[2] / "goldens" / "megatron_dist"
FULLY, BUCKETS = GOLDENS / "tp2pp2dp2_fully_reshardable", GOLDENS / "tp2pp2dp2_dp_reshardable"


def forgotten(golden: Path, folder: Path, gone: Callable[[str], bool]) -> Path:
    """A copy in which nothing is said any more of some names."""
    copy = Path(shutil.copytree(golden, folder / "copy"))
    for file in copy.rglob(".metadata"):
        metadata = pickle.loads(file.read_bytes())
        names = {name for name in metadata.state_dict_metadata if gone(name)}
        assert names
        without_names(metadata, names, file)
    return copy


@pytest.mark.parametrize(
    ("golden", "gone", "words"),
    [
        (FULLY, "decoder.layers.mlp.linear_fc2.weight", "linear_fc2.weight is missing, whose state it is"),
        (FULLY, "decoder.final_layernorm.weight", "decoder.final_layernorm.weight is missing, whose state it is"),
        (FULLY, "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight", "but no exp_avg"),
        (FULLY, "optimizer.state.param.decoder.layers.mlp.linear_fc2.weight", "but no master"),
        (FULLY, "decoder.layers.mlp.linear_fc1._extra_state/shard_1_4", "_extra_state of layer 1 is missing"),
        (FULLY, "rng_state/shard_0.1_2.2", "rng_state is of 3 ranks, and says that there are 4"),
        (
            BUCKETS,
            "optimizer.distributed.dp_group_idx_1.optimizer/shard_0_1",
            "group 1 of chained optimizer 0 has no 'optimizer'",
        ),
    ],
)
def test_a_name_that_is_gone_is_missed(golden: Path, gone: str, words: str, tmp_path: Path) -> None:
    root = forgotten(golden, tmp_path, lambda name: name == gone)
    with pytest.raises(Incomplete, match=words):
        open_checkpoint(root, ReadOptions())


@pytest.mark.parametrize("state", ["param", "exp_avg", "exp_avg_sq"])
def test_a_state_of_all_buckets_that_is_gone_is_missed(state: str, tmp_path: Path) -> None:
    root = forgotten(BUCKETS, tmp_path, lambda name: "bucket_idx" in name and name.endswith(f".{state}"))
    with pytest.raises(Incomplete, match=f"no {'master' if state == 'param' else state}"):
        open_checkpoint(root, ReadOptions())


@pytest.mark.parametrize(
    ("gone", "words"),
    [
        ("mlp.linear_fc2.weight", "layers.0.mlp.linear_fc2.weight is missing, and decoder.layers.0.mlp.linear_fc1.weight is there"),
        ("self_attention.linear_proj.weight", "linear_proj.weight is missing"),
        ("input_layernorm.weight|self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight is missing"),
    ],
)  # fmt: skip
def test_a_kind_of_weight_that_all_layers_have_lost_is_missed(gone: str, words: str, tmp_path: Path) -> None:
    """With its states: no layer has it, and no state tells of it."""
    root = forgotten(FULLY, tmp_path, lambda name: name.endswith(tuple(gone.split("|"))))
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(root, ReadOptions(optimizer=False))
