"""Damaged, incomplete and contradictory torch_dist checkpoints: one clear message, nothing written."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mcore_rlhf.errors import (
    CheckpointError,
    Corrupt,
    Incomplete,
    LayoutMismatch,
    NotACheckpoint,
    Unsupported,
    Untrusted,
    UsageError,
)
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.storage.dcp.folder import DcpFolder
from tests.helpers.conversions import GOLDENS
from tests.helpers.damage import edited, truncate
from tests.unit.formats.refusal import refused

DIST = GOLDENS.parent / "megatron_dist"
FULLY, BUCKETS = "tp2pp2dp2_fully_reshardable", "tp2pp2dp2_dp_reshardable"
STEP = "iter_0000002"


def copied(name: str, folder: Path) -> Path:
    return Path(shutil.copytree(DIST / name, folder / "source"))


def edit_args(root: Path, **values: object) -> None:
    with edited(root / STEP / "common.pt") as tree:
        vars(tree["args"]).update(values)


MISSING = [
    (".metadata", Incomplete, ".metadata: missing"),
    ("common.pt", Unsupported, "has neither common.pt nor common_state"),
    ("metadata.json", Incomplete, "the save was not finished"),
    ("__3_1.distcp", Incomplete, "__3_1.distcp: missing"),
]


@pytest.mark.parametrize(("file", "kind", "word"), MISSING)
def test_a_missing_file(file: str, kind: type[CheckpointError], word: str, tmp_path: Path) -> None:
    root = copied(FULLY, tmp_path)
    (root / STEP / file).unlink()
    refused(root, kind, word)


def test_a_save_that_was_killed(tmp_path: Path) -> None:
    """Neither ``.metadata`` nor ``metadata.json`` are there yet."""
    root = copied(FULLY, tmp_path)
    for file in (".metadata", "metadata.json"):
        (root / STEP / file).unlink()
    refused(root, Incomplete, "the save was not finished", "older step")


def test_another_backend(tmp_path: Path) -> None:
    root = copied(FULLY, tmp_path)
    (root / STEP / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr", "sharded_backend_version": 1}))
    refused(root, Unsupported, "'zarr'", "--ckpt-format torch_dist")


@pytest.mark.parametrize("key", ["sharded_backend_version", "common_backend_version"])
def test_a_version_that_nobody_knows(key: str, tmp_path: Path) -> None:
    root = copied(FULLY, tmp_path)
    file = root / STEP / "metadata.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: 2}))
    refused(root, Unsupported, f"{key} is 2", "--ckpt-format torch")


def test_a_file_that_was_cut_off(tmp_path: Path) -> None:
    root = copied(FULLY, tmp_path)
    truncate(root / STEP / "__0_0.distcp", 0.5)
    refused(root, Incomplete, "__0_0.distcp", "cut off")


def test_a_flipped_byte(tmp_path: Path) -> None:
    root = copied(FULLY, tmp_path)
    folder = DcpFolder.open(root / STEP, root)
    chunk = folder.tensors["optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight"].chunks()[3]
    with (root / chunk.record.file).open("r+b") as file:
        file.seek(chunk.record.byte_offset + 17)
        file.write(bytes([file.read(1)[0] ^ 1]) if file.seek(chunk.record.byte_offset + 17) else b"")
    refused(root, Corrupt, "exp_avg.decoder.layers.mlp.linear_fc1.weight", chunk.record.file)


WRONG_ARGUMENTS: list[tuple[str, dict[str, object], str]] = [
    (FULLY, {"num_layers": 6}, "args.num_layers is 6"),
    (FULLY, {"hidden_size": 128}, "args.hidden_size is 128"),
    (FULLY, {"padded_vocab_size": 144}, "args.padded_vocab_size is 144"),
    (FULLY, {"num_query_groups": 4}, "query groups"),
    (FULLY, {"swiglu": False}, "args.swiglu is False"),
    (BUCKETS, {"tensor_model_parallel_size": 1, "world_size": 4}, "buffer 0"),
    (BUCKETS, {"pipeline_model_parallel_size": 1}, "elements"),
    (BUCKETS, {"overlap_grad_reduce": True, "ddp_bucket_size": 5000, "ddp_pad_buckets_for_high_nccl_busbw": True}, ""),
]


@pytest.mark.parametrize(("name", "values", "word"), WRONG_ARGUMENTS[:-1])
def test_arguments_that_contradict_the_tensors(name: str, values: dict[str, object], word: str, tmp_path: Path) -> None:
    root = copied(name, tmp_path)
    edit_args(root, **values)
    refused(root, LayoutMismatch, word)


def test_padding_that_was_dropped_does_not_matter(tmp_path: Path) -> None:
    """Where buckets end changes nothing of what is stored, as long as the sizes are multiples of 64."""
    root = copied(BUCKETS, tmp_path)
    edit_args(root, **WRONG_ARGUMENTS[-1][1])
    assert open_checkpoint(root, ReadOptions()).states == ("master", "exp_avg", "exp_avg_sq")


def test_the_arguments_of_a_run_of_other_degrees(tmp_path: Path) -> None:
    """``common.pt`` of the same model, cut otherwise: what each rank has of random states is in as many parts as there were ranks."""
    root = copied("plain_tp2", tmp_path)
    assert not open_checkpoint(root, ReadOptions()).notes.contradictions
    edit_args(root, tensor_model_parallel_size=1, world_size=1)
    (text,) = open_checkpoint(root, ReadOptions()).notes.contradictions
    assert "are of PP 1 and TP 1, and the random states of PP 1 and TP 2" in text


def test_more_words_than_the_embedding_has_rows(tmp_path: Path) -> None:
    root = copied("plain_tp2", tmp_path)
    edit_args(root, vocab_size=64)
    refused(root, LayoutMismatch, "found 32 in the files, too few for the 64 words")


@pytest.mark.parametrize(
    ("tokenizer", "said", "words"),
    [("NullTokenizer", 31, 32), ("NullTokenizer", 32, 32), ("HuggingFaceTokenizer", 30, 30), ("HuggingFaceTokenizer", 64, None)],
    ids=["with another word, as in 0.16", "with the last word, as in 0.19", "as the tokenizer has them", "not of the tokenizer"],
)  # fmt: skip
def test_how_many_words_there_are(tmp_path: Path, tokenizer: str, said: int, words: int | None) -> None:
    root = copied("plain_tp2", tmp_path)
    edit_args(root, tokenizer_type=tokenizer, vocab_size=said)
    assert open_checkpoint(root, ReadOptions()).model.vocab_size == words


def test_two_kinds_of_sharding(tmp_path: Path) -> None:
    root = copied(FULLY, tmp_path)
    with edited(root / STEP / "common.pt") as tree:
        tree["optimizer"]["param_state_sharding_type"] = "dp_reshardable"
    refused(root, LayoutMismatch, "two kinds of sharding")


def test_a_kind_of_sharding_that_is_not_known(tmp_path: Path) -> None:
    root = copied(FULLY, tmp_path)
    with edited(root / STEP / "common.pt") as tree:
        tree["optimizer"]["param_state_sharding_type"] = "dp_zero_gather_scatter"
        tree["content_metadata"]["distrib_optim_sharding_type"] = "dp_zero_gather_scatter"
    refused(root, Unsupported, "dp_zero_gather_scatter", "fully_reshardable", "--no-optimizer")


def test_no_param_groups(tmp_path: Path) -> None:
    root = copied(FULLY, tmp_path)
    with edited(root / STEP / "common.pt") as tree:
        del tree["optimizer"]["optimizer"]
    refused(root, Incomplete, "param groups", "--no-optimizer")


def test_a_pickle_that_wants_to_run_code(tmp_path: Path) -> None:
    root = copied(FULLY, tmp_path)

    class Evil:
        def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
            return os.system, ("touch pwned",)

    torch.save({"args": Evil(), "iteration": 2}, root / STEP / "common.pt")
    refused(root, Untrusted, "system")
    shutil.copy(DIST / FULLY / STEP / "common.pt", root / STEP / "common.pt")
    (root / STEP / ".metadata").write_bytes(pickle.dumps(Evil()))
    refused(root, Untrusted, "system")
    assert not Path("pwned").exists()


def test_folders_without_a_checkpoint(tmp_path: Path) -> None:
    root = tmp_path / "source"
    (root / STEP).mkdir(parents=True)
    refused(root, NotACheckpoint, str(root))
    root = copied(FULLY, tmp_path / "more")
    (root / "latest_checkpointed_iteration.txt").unlink()
    shutil.copytree(root / STEP, root / "iter_0000004")
    refused(root, UsageError, "iter_0000002", "iter_0000004", "--step N")
    refused(root, NotACheckpoint, "iter_0000003", read=ReadOptions(step=3))


def test_a_step_whose_number_is_not_its_own(tmp_path: Path) -> None:
    root = copied(FULLY, tmp_path)
    (root / STEP).rename(root / "iter_0000009")
    (root / "latest_checkpointed_iteration.txt").write_text("9")
    refused(root, LayoutMismatch, "iter_0000009", "iteration 2")
