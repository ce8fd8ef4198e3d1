"""Reading Hugging Face folders: whole, in shards, ``.bin``, tied, and everything that can be wrong with one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mcore_rlhf.errors import (
    CheckpointError,
    Corrupt,
    Incomplete,
    NotACheckpoint,
    Unsupported,
    Untrusted,
)
from mcore_rlhf.families.module import ModuleState
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.families.source import Source
from mcore_rlhf.formats.hf import FORMAT
from mcore_rlhf.formats.registry import open_checkpoint
from tests.helpers.catalog_values import tensor_of
from tests.unit.formats.hf_by_hand import CONFIG, LAYERS, WORDS, Tensors, index_of, llama, write, write_index

GOLDEN = Path(__file__).parents[2] / "goldens" / "huggingface" / "llama_tied_bf16_sharded"
TIED = {**CONFIG, "tie_word_embeddings": True}
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def opened(folder: Path, **read: Any) -> Source:
    return open_checkpoint(folder, ReadOptions(**read))


def native(source: Source) -> ModuleState:
    assert isinstance(source.family, ModuleState)
    return source.family


def unequal(source: Source, expected: Tensors) -> list[str]:
    names = {spec.name for spec in source.model.params}
    return sorted(names ^ expected.keys()) + [
        name for name in names & expected.keys() if not torch.equal(tensor_of(source, name, "param"), expected[name])
    ]


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_tensor_is_found(shards: int, dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = llama(dtype)
    source = opened(write(tmp_path / "hf", tensors, CONFIG, shards=shards))
    assert unequal(source, tensors) == []
    assert (source.format, source.optimizer, source.states, source.state.release) == ("hf", None, (), True)
    assert native(source).config == CONFIG
    assert (source.model.num_layers, source.model.vocab_size, source.model.tied) == (LAYERS, WORDS, False)


def test_what_transformers_wrote() -> None:
    source = opened(GOLDEN)
    assert (source.model.tied, len(source.model.params), source.model.vocab_size) == (True, 20, 72)
    assert native(source).shared == {HEAD: EMBEDDING}
    assert native(source).config["rope_parameters"] == {"rope_theta": 10000.0, "rope_type": "default"}
    assert all(spec.trainable for spec in source.model.params)


def test_bin_files(tmp_path: Path) -> None:
    """Through the safe reader: tied tensors share a storage there, and strides may be any."""
    tensors = llama(tied=True)
    folder = write(tmp_path / "hf", {}, TIED)
    (folder / "model.safetensors").unlink()
    tree = {HEAD: tensors[EMBEDDING], **tensors, "turned": torch.arange(6.0).reshape(2, 3).T}
    torch.save(tree, folder / "pytorch_model.bin")
    source = opened(folder)
    assert unequal(source, {**tensors, "turned": tree["turned"]}) == []
    assert native(source).shared == {HEAD: EMBEDDING}
    assert all(file.records for file in source.files if file.path.endswith(".bin"))


def test_bin_files_with_an_index(tmp_path: Path) -> None:
    tensors, names = llama(), list(llama())
    folder = tmp_path / "hf"
    folder.mkdir()
    where = {}
    for number in (1, 2):
        file = f"pytorch_model-{number:05d}-of-00002.bin"
        mine = names[number - 1 :: 2]
        torch.save({name: tensors[name] for name in mine}, folder / file)
        where |= dict.fromkeys(mine, file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    assert unequal(opened(folder), tensors) == []


def test_a_bin_that_wants_to_run_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return print, ("ran",)

    folder = tmp_path / "hf"
    folder.mkdir()
    torch.save({"w": torch.ones(2), "x": Evil()}, folder / "pytorch_model.bin")
    with pytest.raises(Untrusted, match=r"builtins\.print"):
        opened(folder)


def test_safetensors_go_before_bin(tmp_path: Path) -> None:
    folder = write(tmp_path / "hf", llama(), CONFIG)
    torch.save({"other": torch.ones(1)}, folder / "pytorch_model.bin")
    assert unequal(opened(folder), llama()) == []


def test_shards_without_an_index(tmp_path: Path) -> None:
    tensors = llama()
    folder = write(tmp_path / "hf", tensors, CONFIG, shards=3)
    (folder / "model.safetensors.index.json").unlink()
    source = opened(folder)
    assert unequal(source, tensors) == []
    assert "index.json is not there" in source.notes.lines[0][1]
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(Incomplete, match=r"model-00002-of-00003\.safetensors missing"):
        opened(folder)


def test_an_index_that_is_wrong(tmp_path: Path) -> None:
    """Everything that is wrong comes at once."""
    folder = write(tmp_path / "hf", llama(), CONFIG, shards=3)
    where = index_of(folder)
    write_index(folder, {**where, "a": "model-00004-of-00003.safetensors", "b": "model-00005-of-00003.safetensors"})
    with pytest.raises(Incomplete, match="2 problems") as error:
        opened(folder)
    assert "model-00004-of-00003.safetensors: is not there; model.safetensors.index.json says that 1 tensors" in str(
        error.value
    )
    moved = {**where, HEAD: next(file for file in where.values() if file != where[HEAD]), "ghost": where[HEAD]}
    moved.pop("model.norm.weight")
    write_index(folder, moved)
    with pytest.raises(Incomplete, match="3 problems") as error:
        opened(folder)
    for text in (
        f"says that {HEAD} is in",
        "ghost is in",
        "none of the files has it",
        "holds model.norm.weight, which",
    ):
        assert text in str(error.value)


@pytest.mark.parametrize(
    ("content", "kind", "text"),
    [
        ("{", Corrupt, "is no JSON"), ("[]", Unsupported, "expected a JSON object"), ("{}", Unsupported, "expected a weight_map"),
        ('{"weight_map": {"w": 3}}', Unsupported, "expected a weight_map"),
        ('{"weight_map": {"w": "../outside.safetensors"}}', Untrusted, "plain path inside"),
        ('{"weight_map": {"w": "/etc/passwd"}}', Untrusted, "plain path inside"),
    ],
)  # fmt: skip
def test_an_index_that_is_none(content: str, kind: type[CheckpointError], text: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "hf", llama(), CONFIG, shards=2)
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(kind, match=text):
        opened(folder)


def test_one_tensor_in_two_files(tmp_path: Path) -> None:
    folder = write(tmp_path / "hf", llama(), CONFIG, shards=2)
    save_file({**llama()}, folder / "model-00002-of-00002.safetensors")
    with pytest.raises(Corrupt, match="and again in model-00002"):
        opened(folder)


def test_damage_in_several_shards_is_said_at_once(tmp_path: Path) -> None:
    folder = write(tmp_path / "hf", llama(), CONFIG, shards=3)
    for number in (1, 3):
        path = folder / f"model-0000{number}-of-00003.safetensors"
        path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(Incomplete, match="2 problems"):
        opened(folder)


def test_integer_tensors_are_buffers(tmp_path: Path) -> None:
    source = opened(write(tmp_path / "hf", {**llama(), "model.seen": torch.tensor([3])}, CONFIG))
    assert native(source).buffers == ("model.seen",)
    assert [spec.name for spec in source.model.params if not spec.trainable] == ["model.seen"]


def test_what_is_no_folder_of_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    assert not FORMAT.detect(tmp_path)
    with pytest.raises(NotACheckpoint, match=r"has neither model\.safetensors nor"):
        FORMAT.read(tmp_path, ReadOptions())
