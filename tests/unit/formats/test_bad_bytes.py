"""Damaged files, copies that differ, masters that do not fit: found by converting, before anything is published."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mcore_rlhf.convert import convert
from mcore_rlhf.errors import CheckpointError, Corrupt, Incomplete, Untrusted
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.verify.checkpoint import Depth, verify
from tests.helpers.conversions import options
from tests.helpers.damage import (
    ITERATION,
    MODEL,
    OPTIMIZER,
    copied,
    edited,
    flip,
    record_of,
    truncate,
    wreck_directory,
)
from tests.helpers.plain_load import plain_load
from tests.unit.formats.refusal import refused

MANY, PLAIN, TIED = "tp2pp2dp2_bf16_do", "tp2pp2dp2_bf16_nodo", "tp2pp2dp2_tied_bf16_do"
ONE = "tp1_bf16_do"
FOLDER, ONLY = "mp_rank_01_001", "mp_rank_00"


def verified(source: Path, depth: Depth = Depth.FULL) -> str:
    return verify(source, ReadOptions(), depth).problems.describe()


@pytest.mark.parametrize("file", [MODEL, OPTIMIZER])
@pytest.mark.parametrize("fraction", [0.0, 0.999])
def test_a_file_that_was_cut_off(tmp_path: Path, file: str, fraction: float) -> None:
    source = copied(ONE, tmp_path)
    truncate(source / ITERATION / ONLY / file, fraction)
    refused(source, Incomplete, f"{ONLY}/{file}")
    assert f"{ONLY}/{file}" in verified(source, Depth.QUICK)


def test_a_damaged_directory(tmp_path: Path) -> None:
    source = copied(ONE, tmp_path)
    wreck_directory(source / ITERATION / ONLY / OPTIMIZER)
    with pytest.raises(CheckpointError, match=f"{ONLY}/{OPTIMIZER}") as caught:
        convert(source, tmp_path / "target", options())
    assert caught.value.exit_code == 1
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_damaged_files_are_listed_together(tmp_path: Path) -> None:
    source = copied(MANY, tmp_path)
    for folder in ("mp_rank_00_001", FOLDER):
        truncate(source / ITERATION / folder / OPTIMIZER, 0.5)
    refused(source, Incomplete, f"mp_rank_00_001/{OPTIMIZER}", f"{FOLDER}/{OPTIMIZER}", "2 problems")


@pytest.mark.parametrize("state", ["param", "exp_avg", "exp_avg_sq"])
def test_a_flipped_bit_in_an_optimizer_state(tmp_path: Path, state: str) -> None:
    source = copied(ONE, tmp_path)
    path = source / ITERATION / ONLY / OPTIMIZER
    (states,) = plain_load(path)[0].values()
    record = record_of(path, states[state])
    flip(path, record, 4 * states["numel_unpadded"] // 3)
    for write in ({}, {"tp": 2}):  # straight copies, and strided ones
        refused(source, Corrupt, f"{ONLY}/{OPTIMIZER}", record, "CRC-32", **write)
    assert record in verified(source)


@pytest.mark.parametrize("write", [{"tp": 2}, {"no_optimizer": True}], ids=str)
def test_a_flipped_bit_in_a_parameter(tmp_path: Path, write: dict[str, int]) -> None:
    source = copied(ONE, tmp_path)
    path = source / ITERATION / ONLY / MODEL
    record = record_of(path, plain_load(path)["model"]["output_layer.weight"])
    flip(path, record, 4321)
    refused(source, Corrupt, f"{ONLY}/{MODEL}", record, **write)
    assert record in verified(source)


@pytest.mark.parametrize("padding", ["gap", "rng"])
def test_a_flipped_bit_where_no_tensor_lies(tmp_path: Path, padding: str) -> None:
    """The gap before an aligned parameter, and a state of the random numbers, are checked as well."""
    source = copied(ONE, tmp_path)
    path = source / ITERATION / "mp_rank_00" / MODEL
    tree = plain_load(path)
    if padding == "gap":
        tensor = tree["model"]["embedding.word_embeddings.weight"]
        byte = tensor.untyped_storage().nbytes() - 1  # the end of the buffer, rounded up to 128 elements
    else:
        tensor, byte = tree["rng_state"][0]["torch_rng_state"], 77
    record = record_of(path, tensor)
    flip(path, record, byte)
    refused(source, Corrupt, f"mp_rank_00/{MODEL}", record, tp=2)


def test_flipped_bits_are_listed_together(tmp_path: Path) -> None:
    source = copied(MANY, tmp_path)
    for folder in ("mp_rank_00_000", FOLDER):
        flip(source / ITERATION / folder / OPTIMIZER, "data/1", 100)
    message = refused(source, Corrupt, f"mp_rank_00_000/{OPTIMIZER}", f"{FOLDER}/{OPTIMIZER}")
    assert "2 problems" in message


def test_a_flipped_bit_in_a_plain_optimizer(tmp_path: Path) -> None:
    source = copied(PLAIN, tmp_path)
    path = source / ITERATION / FOLDER / MODEL
    record = record_of(path, plain_load(path)["optimizer"]["optimizer"]["state"][3]["exp_avg_sq"])
    flip(path, record, 11)
    refused(source, Corrupt, f"{FOLDER}/{MODEL}", record, optimizer="distributed")


def _norm_slice(source: Path, folder: str) -> slice:
    """Where the state of the first layer's input norm lies in a rank's optimizer file: the last but one, from behind."""
    model = plain_load(source / ITERATION / folder / MODEL)["model"]
    norm = model["decoder.layers.0.input_layernorm.weight"]
    return slice(norm.storage_offset(), norm.storage_offset() + norm.numel())


def test_copies_that_differ_between_tensor_parallel_ranks(tmp_path: Path) -> None:
    source = copied(MANY, tmp_path)
    with edited(source / ITERATION / "mp_rank_01_000" / OPTIMIZER) as tree:
        (states,) = tree[0].values()
        states["exp_avg"][_norm_slice(source, "mp_rank_01_000")][5] += 1.0
    words = ("decoder.layers.0.input_layernorm.weight (exp_avg)", "1 elements", "mp_rank_00_000", "mp_rank_01_000")
    refused(source, Corrupt, *words, "--trust-replicas")
    assert words[0] in verified(source, Depth.DEEP)
    assert verify(source, ReadOptions()).intact
    convert(source, tmp_path / "target", replace(options(tp=1), trust_replicas=True))


def test_a_tied_copy_that_differs(tmp_path: Path) -> None:
    source = copied(TIED, tmp_path)
    with edited(source / ITERATION / "mp_rank_00_001" / OPTIMIZER) as tree:
        (states,) = tree[0].values()
        states["exp_avg_sq"][7] *= 2  # the output layer was registered last, so it lies first
    refused(source, Corrupt, "embedding.word_embeddings.weight (exp_avg_sq)", "mp_rank_00_001", "mp_rank_00_000")


@pytest.mark.parametrize("where", ["master", "parameter"])
def test_masters_that_are_not_their_parameters(tmp_path: Path, where: str) -> None:
    source = copied(ONE, tmp_path)
    folder = source / ITERATION / ONLY
    if where == "master":
        with edited(folder / OPTIMIZER) as tree:
            (states,) = tree[0].values()
            states["param"][100:103] += 1.0
    else:
        with edited(folder / MODEL) as tree:
            tree["model"]["output_layer.weight"][0, :3] += 1.0
    refused(source, Corrupt, "output_layer.weight", "3 elements", ONLY, "--no-optimizer")
    assert "output_layer.weight" in verified(source, Depth.DEEP)
    convert(source, tmp_path / "target", options(no_optimizer=True))


def test_not_a_number_is_a_value_like_any_other(tmp_path: Path) -> None:
    """Bits are compared, not values: NaN in master and parameter, and in equal replicas, is no damage."""
    source = copied(ONE, tmp_path)
    folder = source / ITERATION / ONLY
    with edited(folder / OPTIMIZER) as tree, edited(folder / MODEL) as model:
        (states,) = tree[0].values()
        states["param"][100] = float("nan")
        flat = model["model"]["output_layer.weight"].view(-1)
        flat[100] = torch.tensor(float("nan")).to(flat.dtype)
    convert(source, tmp_path / "target", options(tp=1))


class Evil:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.target),)


def test_code_is_not_run(tmp_path: Path) -> None:
    source = copied(PLAIN, tmp_path)
    with edited(source / ITERATION / FOLDER / MODEL) as tree:
        tree["model"]["extra"] = Evil(tmp_path / "ran")
    refused(source, Untrusted, f"{FOLDER}/{MODEL}", "posix.mkdir")
    assert not (tmp_path / "ran").exists()
