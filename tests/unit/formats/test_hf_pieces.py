"""Hugging Face's names in pieces, files of every rank, as torch's writer leaves them that puts nothing together."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mcore_rlhf.convert import convert
from mcore_rlhf.core.catalog import PARAM, TensorName
from mcore_rlhf.errors import Corrupt, Incomplete, LayoutMismatch, Unsupported
from tests.helpers.conversions import options
from tests.unit.formats.hf_by_hand import CONFIG, Tensors, llama, tensors_in, write
from tests.unit.formats.test_hf_reading import native, opened, unequal


def pieces(folder: Path, tensors: Tensors, ranks: int) -> Path:
    """As torch's writer names files and says where pieces belong; rows are dealt to ranks, vectors stand in every file."""
    folder.mkdir()
    for rank in range(ranks):
        held, places = {}, {}
        for name, tensor in tensors.items():
            parts = tensor.tensor_split(ranks) if tensor.dim() > 1 else [tensor] * ranks
            held[name] = parts[rank].contiguous()
            before = sum(len(part) for part in parts[:rank]) if tensor.dim() > 1 else 0
            places[name] = {"saved_offsets": [before, *(0 for _ in tensor.shape[1:])]}
        about = {"DCP_SHARDING_INFO": json.dumps(places), "DCP_VERSION": "1.0", "format": "pt"}
        save_file(held, folder / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors", about)
    return folder


def test_pieces_of_every_rank_are_put_together(tmp_path: Path) -> None:
    folder, tensors = pieces(tmp_path / "pieces", llama(), 3), llama()
    source = opened(folder)
    assert {spec.name: spec.global_shape for spec in source.model.params} == {
        n: tuple(t.shape) for n, t in tensors.items()
    }
    assert unequal(source, tensors) == []
    norm = source.catalog.get(TensorName("actor", "model.norm.weight", PARAM))
    assert norm is not None
    assert len([*norm.replicas()]) == 2
    assert source.unplaced == ()
    (folder / "shard-00002-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(Incomplete, match="those of some ranks are missing"):
        opened(folder)


def test_pieces_of_the_last_rank_are_missed_where_the_model_is_described(tmp_path: Path) -> None:
    folder = pieces(tmp_path / "pieces", llama(), 3)
    (folder / ".hf_metadata").mkdir()
    (folder / ".hf_metadata" / "config.json").write_text(json.dumps(CONFIG))
    assert native(opened(folder)).config == CONFIG
    (folder / "shard-00003-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(LayoutMismatch, match=r"config\.json"):
        opened(folder)


def test_pieces_that_torch_wrote(tmp_path: Path) -> None:
    from torch.distributed.checkpoint import save
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    writer = HuggingFaceStorageWriter(str(tmp_path / "pieces"), save_distributed=True)
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        save({"embed.weight": torch.ones(4, 2)}, storage_writer=writer, no_dist=True)
    assert unequal(opened(tmp_path / "pieces"), {"embed.weight": torch.ones(4, 2)}) == []


def test_pieces_that_nobody_places_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pieces").mkdir()
    save_file({"embed.weight": torch.ones(4, 2)}, tmp_path / "pieces" / "shard-00001-model-00001-of-00001.safetensors")
    with pytest.raises(Unsupported, match="does not say in DCP_SHARDING_INFO"):
        opened(tmp_path / "pieces")


@pytest.mark.parametrize("other", [torch.ones(4), torch.ones(2, 2, dtype=torch.bfloat16)])
def test_pieces_of_two_tensors_are_not_one(tmp_path: Path, other: torch.Tensor) -> None:
    folder = pieces(tmp_path / "pieces", {"embed.weight": torch.ones(4, 2)}, 2)
    about = {"DCP_SHARDING_INFO": json.dumps({"embed.weight": {"saved_offsets": [2, 0][: other.dim()]}})}
    save_file({"embed.weight": other}, folder / "shard-00002-model-00001-of-00001.safetensors", about)
    with pytest.raises(Corrupt, match="not of one tensor"):
        opened(folder)


def test_pieces_that_overlap_are_not_one_even_where_as_many_are_missing(tmp_path: Path) -> None:
    folder = pieces(tmp_path / "pieces", {"embed.weight": torch.ones(4, 2)}, 2)
    for number, (tensor, offsets) in enumerate(((torch.ones(2, 1), [1, 0]), (torch.ones(1, 2), [4, 0])), 3):
        about = {"DCP_SHARDING_INFO": json.dumps({"embed.weight": {"saved_offsets": offsets}})}
        save_file({"embed.weight": tensor}, folder / f"shard-{number:05d}-model-00001-of-00001.safetensors", about)
    with pytest.raises(
        Corrupt, match=r"two pieces of embed.weight overlap, \[0, 0\] to \[2, 2\] and \[1, 0\] to \[3, 1\]"
    ):
        opened(folder)


@pytest.mark.parametrize(
    "places",
    ["[" * 100_000, '{"embed.weight": ' * 2000, "[]", "7", '{"embed.weight": {"saved_offsets": ' + "9" * 10_000 + "}}"],
)
def test_places_that_are_none(tmp_path: Path, places: str) -> None:
    (tmp_path / "pieces").mkdir()
    file = tmp_path / "pieces" / "shard-00001-model-00001-of-00001.safetensors"
    save_file({"embed.weight": torch.ones(4, 2)}, file, {"DCP_SHARDING_INFO": places})
    with pytest.raises(Unsupported, match="does not say in DCP_SHARDING_INFO"):
        opened(tmp_path / "pieces")


def test_a_piece_far_away_is_of_a_tensor_whose_others_are_missing(tmp_path: Path) -> None:
    (tmp_path / "pieces").mkdir()
    file = tmp_path / "pieces" / "shard-00001-model-00001-of-00001.safetensors"
    places = {"../../embed.weight": {"saved_offsets": [10**18, 10**18]}}
    save_file({"../../embed.weight": torch.ones(4, 2)}, file, {"DCP_SHARDING_INFO": json.dumps(places)})
    with pytest.raises(Incomplete, match="those of some ranks are missing"):
        opened(tmp_path / "pieces")


@pytest.mark.parametrize("number", [1, 3, 40])
def test_pieces_that_we_wrote_hold_the_model(tmp_path: Path, number: int) -> None:
    """More ranks than rows too: those without any have no part, and all know the model's description."""
    tensors = llama()
    whole = write(tmp_path / "hf", tensors, CONFIG)
    convert(whole, tmp_path / "pieces", replace(options(pieces=number), to="hf"))
    source = opened(tmp_path / "pieces")
    assert unequal(source, tensors) == []
    assert native(source).config == CONFIG
    assert not list((tmp_path / "pieces").glob("*.index.json"))
    again = tmp_path / "again"
    assert convert(tmp_path / "pieces", again, replace(options(), to="hf", strict=True)).lossless
    found = tensors_in(again)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_what_nemo_rl_has_beside_pieces_goes_along(tmp_path: Path) -> None:
    folder, tensors = pieces(tmp_path / "pieces", llama(), 2), llama()
    beside = folder / ".hf_metadata"
    beside.mkdir()
    for name, text in {
        "config.json": json.dumps(CONFIG),
        "generation_config.json": '{"eos_token_id": 3}',
        "tokenizer_config.json": "{}",
        "fqn_to_file_index_mapping.json": json.dumps(dict.fromkeys(tensors, 1)),
    }.items():
        (beside / name).write_text(text)
    assert convert(folder, tmp_path / "whole", replace(options(), to="hf", strict=True)).lossless
    found = sorted(path.relative_to(tmp_path / "whole").as_posix() for path in (tmp_path / "whole").rglob("*"))
    assert found == [
        "config.json",
        "generation_config.json",
        "mcore_rlhf.json",
        "model.safetensors",
        "tokenizer_config.json",
    ]
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "whole" / name).read_bytes() == (beside / name).read_bytes()
