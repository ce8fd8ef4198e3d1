"""A pipe where a file was: named, by whatever reads the folder, and nobody waits for what comes out of it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from mcore_rlhf.errors import CheckpointError
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.verify.checkpoint import Depth, verify

GOLDENS = Path(__file__).resolve().parents[2] / "goldens"
GONE = [
    ("megatron/tp1_bf16_do", "iter_0000002/mp_rank_00/model_optim_rng.pt"),
    ("transformers/checkpoint-2", "optimizer.pt"),
    ("transformers/checkpoint-2", "config.json"),
    ("transformers/checkpoint-2", "trainer_state.json"),
    ("huggingface/llama_tied_bf16_sharded", "model.safetensors.index.json"),
]


def _with_pipe(golden: str, file: str, folder: Path) -> Path:
    shutil.copytree(GOLDENS / golden, folder)
    (folder / file).unlink()
    os.mkfifo(folder / file)
    return folder


@pytest.mark.parametrize(("golden", "file"), GONE)
def test_a_pipe_in_a_files_place_is_named(tmp_path: Path, golden: str, file: str) -> None:
    """It was *missing*, though it was there, or the folder was intact."""
    found = verify(_with_pipe(golden, file, tmp_path / "copy"), ReadOptions(), Depth.FULL)
    assert not found.intact
    (said,) = [one.message for one in found.problems.found if "a pipe, a socket or a device" in one.message]
    assert file in said


@pytest.mark.parametrize(
    ("golden", "file"),
    [GONE[0], ("megatron_dist/plain_tp2", "iter_0000002/common.pt"), ("torch/actor", "state.pt")],
)
def test_who_cannot_open_a_folder_for_it_hears_why(tmp_path: Path, golden: str, file: str) -> None:
    folder = _with_pipe(golden, file, tmp_path / "copy")
    with pytest.raises(CheckpointError, match=f"No file, but a pipe, a socket or a device: {file}$"):
        open_checkpoint(folder, ReadOptions())


def test_what_nobody_takes_for_a_file_is_no_damage(tmp_path: Path) -> None:
    shutil.copytree(GOLDENS / "transformers" / "checkpoint-2", tmp_path / "copy")
    os.mkfifo(tmp_path / "copy" / "control.sock")
    assert verify(tmp_path / "copy", ReadOptions(), Depth.FULL).intact
