"""Files of one checkpoint must agree with each other and with their folders; nothing is guessed, nothing is dropped."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.errors import CheckpointError, Incomplete, LayoutMismatch, UsageError
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.formats.registry import open_checkpoint
from tests.helpers.conversions import GOLDENS
from tests.helpers.damage import copied, edited

SHARDED, SINGLE = "tp2pp2dp2_bf16_do", "tp1_bf16_do"
ITERATION, MODEL = "iter_0000002", "model_optim_rng.pt"


def refused(folder: Path, kind: type[CheckpointError]) -> str:
    with pytest.raises(kind) as caught:
        open_checkpoint(folder, ReadOptions())
    return str(caught.value)


def test_ranks_of_another_iteration_are_found(tmp_path: Path) -> None:
    source = copied(SHARDED, tmp_path)
    with edited(source / ITERATION / "mp_rank_01_000" / MODEL) as tree:
        tree["iteration"] = 5
    message = refused(source, LayoutMismatch)
    assert "different iterations" in message
    assert "mp_rank_01_000" in message


def test_arguments_of_one_rank_alone_are_said(tmp_path: Path) -> None:
    source = copied(SHARDED, tmp_path)
    assert "arguments" not in str(open_checkpoint(source, ReadOptions()).notes.lines)
    for rank in ("mp_rank_00_001", "mp_rank_01_001"):
        with edited(source / ITERATION / rank / MODEL) as tree:
            tree["args"].lr, tree["args"].weight_decay = 0.5, float("nan")
            del tree["args"].min_lr
    (said,) = (text for _, text in open_checkpoint(source, ReadOptions()).notes.lines if "arguments" in text)
    assert said.startswith(
        "mp_rank_00_001, mp_rank_01_001: other arguments than those of mp_rank_00_000, which are taken: lr (0.5, not "
    )
    assert "min_lr (None, not " in said


def test_a_renamed_iteration_folder_is_found(tmp_path: Path) -> None:
    source = copied(SINGLE, tmp_path)
    (source / ITERATION).rename(source / "iter_0000007")
    (source / "latest_checkpointed_iteration.txt").write_text("7")
    assert "iteration 7, its files are of iteration 2" in refused(source, LayoutMismatch)


def test_a_folder_of_another_name_is_no_release(tmp_path: Path) -> None:
    source = copied(SINGLE, tmp_path)
    (source / ITERATION).rename(source / "backup")
    state = open_checkpoint(source / "backup", ReadOptions()).state
    assert (state.iteration, state.release) == (2, False)


def test_swapped_rank_folders_are_found(tmp_path: Path) -> None:
    source = copied(SHARDED, tmp_path)
    first, second = source / ITERATION / "mp_rank_00_000", source / ITERATION / "mp_rank_01_000"
    shutil.move(first, source / "aside")
    shutil.move(second, first)
    shutil.move(source / "aside", second)
    assert "belongs to rank 0" in refused(source, LayoutMismatch)


def test_a_key_that_one_rank_lacks_is_found(tmp_path: Path) -> None:
    source = copied(SHARDED, tmp_path)
    with edited(source / ITERATION / "mp_rank_01_000" / MODEL) as tree:
        del tree["model"]["decoder.layers.0.input_layernorm.weight"]
    message = refused(source, Incomplete)
    assert "decoder.layers.0.input_layernorm.weight" in message
    assert "mp_rank_01_000" in message


def test_a_key_that_all_ranks_lack_is_found(tmp_path: Path) -> None:
    source = copied(SHARDED, tmp_path)
    for rank in ("mp_rank_00_000", "mp_rank_01_000"):
        with edited(source / ITERATION / rank / MODEL) as tree:
            del tree["model"]["decoder.layers.1.self_attention.linear_proj.weight"]
    assert "decoder layer 1 has no self_attention.linear_proj.weight" in refused(source, Incomplete)


def test_a_parameter_may_be_in_some_layers_only(tmp_path: Path) -> None:
    source = copied(SHARDED, tmp_path)
    for rank in ("mp_rank_00_000", "mp_rank_01_000"):
        with edited(source / ITERATION / rank / MODEL) as tree:
            tree["model"]["decoder.layers.1.gate_scale"] = torch.ones(64, dtype=torch.int64)
    names = {spec.name for spec in open_checkpoint(source, ReadOptions()).model.params}
    assert "decoder.layers.1.gate_scale" in names


def test_fp32_becomes_what_a_bf16_run_stores(tmp_path: Path) -> None:
    """Megatron reduces the gradients of a bf16 model in fp32, and names its buffers so."""
    convert(GOLDENS / "tp2pp2dp2_fp32_do", tmp_path / "out", ConvertOptions(write=WriteOptions(dtype="bf16")))
    folder = tmp_path / "out" / ITERATION / "mp_rank_00_000"
    stored = torch.load(folder / "distrib_optim.pt", weights_only=True)
    assert set(stored[0]) == {(torch.bfloat16, torch.float32)}


def test_an_optimizer_without_its_files_is_not_dropped_in_silence(tmp_path: Path) -> None:
    source = copied(SHARDED, tmp_path)
    for file in source.glob("*/*/distrib_optim.pt"):
        file.unlink()
    assert "--no-optimizer" in refused(source, Incomplete)
    job = convert(source, tmp_path / "weights", ConvertOptions(write=WriteOptions(tp=1, pp=1, no_optimizer=True)))
    assert not job.lossless


def test_a_gated_feed_forward_is_what_its_shapes_say(tmp_path: Path) -> None:
    source = copied(SINGLE, tmp_path)
    with edited(source / ITERATION / "mp_rank_00" / MODEL) as tree:
        tree["args"].swiglu = False
    assert "the feed-forward is gated" in refused(source, LayoutMismatch)
    with edited(source / ITERATION / "mp_rank_00" / MODEL) as tree:
        del tree["args"].swiglu
    specs = open_checkpoint(source, ReadOptions()).model
    fc1 = specs.get("decoder.layers.0.mlp.linear_fc1.weight")
    assert fc1 is not None
    assert fc1.partition.blocks == 2


@pytest.mark.parametrize("name", [SINGLE, SHARDED])
def test_single_numbers_that_nobody_knows_are_replicated(name: str, tmp_path: Path) -> None:
    source = copied(name, tmp_path)
    for file in source.glob("*/*/model_optim_rng.pt"):
        with edited(file) as tree:
            tree["model"]["decoder.steps_seen"] = torch.tensor(7)
    convert(source, tmp_path / "out", ConvertOptions(write=WriteOptions(tp=2, pp=1)))
    shapes = {spec.name: spec.global_shape for spec in open_checkpoint(tmp_path / "out", ReadOptions()).model.params}
    assert shapes["decoder.steps_seen"] == ()


def test_a_vocabulary_that_does_not_explain_the_rows_cuts_nothing(tmp_path: Path) -> None:
    source = copied(SHARDED, tmp_path)
    for file in source.glob("*/*/model_optim_rng.pt"):
        with edited(file) as tree:
            tree["args"].vocab_size = 40
    with pytest.raises(UsageError, match="--vocab-size"):
        convert(source, tmp_path / "out", ConvertOptions(write=WriteOptions(tp=1, pp=1)))
    convert(source, tmp_path / "out", ConvertOptions(write=WriteOptions(tp=1, pp=1, vocab_size=132)))
    rows = open_checkpoint(tmp_path / "out", ReadOptions()).model.padded_vocab_size
    assert rows == 144


def test_a_rank_file_that_lies_in_two_folders_is_found(tmp_path: Path) -> None:
    """Without a distributed optimizer nothing else in the files says so: every tensor has the shape of the other rank's."""
    source = Path(shutil.copytree(GOLDENS.parent / "megatron_0_19" / "muon_tp2_bf16", tmp_path / "source"))
    folder = source / "iter_0000006"
    shutil.copyfile(folder / "mp_rank_01" / MODEL, folder / "mp_rank_00" / MODEL)
    message = refused(source, LayoutMismatch)
    assert f"mp_rank_00/{MODEL}: written by rank 1, but mp_rank_00 belongs to rank 0" in message
    assert "copy of that rank's file" in message
