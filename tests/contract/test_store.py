"""What a store of objects has to answer, and no more: every format opens a checkpoint that lies in memory, and reads every byte of it.

This is the contract for stores: :class:`Memory` below is the smallest one there is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.core.catalog import Chunk
from mcore_rlhf.errors import Incomplete
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.families.source import Source
from mcore_rlhf.formats.registry import FORMATS, open_checkpoint
from mcore_rlhf.storage.publish import MANIFEST_NAME
from mcore_rlhf.storage.reading import OpenFiles, open_bytes, read_bytes, read_json
from mcore_rlhf.storage.store import Store, StorePath
from mcore_rlhf.verify.checkpoint import Depth, verify
from tests.helpers.conversions import GOLDENS as MEGATRON

GOLDENS = MEGATRON.parent
ONE_OF_EACH = {
    "megatron": "megatron/tp2pp2dp2_bf16_do", "megatron-dist": "megatron_dist/tp2pp2dp2_fully_reshardable",
    "deepspeed": "deepspeed/z3_bf16_frozen_dp2", "dcp": "dcp/fsdp2_ws2", "hf": "huggingface/llama_tied_bf16_sharded",
    "peft": "peft/adapter", "hf-trainer": "transformers/checkpoint-2", "hf-accelerate": "transformers/step_2",
    "fsdp-ranks": "verl/fsdp2_ws3",
    "torch": "torch/actor",
}  # fmt: skip


@dataclass
class Memory(Store):
    """Files by path; no folder is made, as in a store of objects."""

    files: Mapping[str, bytes]
    reads: list[tuple[str, int]] = field(default_factory=list)

    def __str__(self) -> str:
        return "memory://"

    def listed(self, folder: str) -> dict[str, int | None]:
        prefix = f"{folder}/" if folder else ""
        found: dict[str, int | None] = {}
        for path, data in self.files.items():
            if path.startswith(prefix):
                name, _, below = path[len(prefix) :].partition("/")
                found[name] = None if below else len(data)
        return found

    def pread(self, file: str, nbytes: int, offset: int) -> bytes:
        self.reads.append((file, nbytes))
        return self.files[file][offset : offset + nbytes]


def stored(folder: Path) -> Memory:
    files = (Path(parent, name) for parent, _, names in os.walk(folder) for name in names)
    return Memory({file.relative_to(folder).as_posix(): file.read_bytes() for file in files})


def contents(source: Source) -> dict[object, list[tuple[object, bytes]]]:
    """Every chunk of every tensor, with its bytes."""
    found: dict[object, list[tuple[object, bytes]]] = {}
    with OpenFiles(source.root) as files:
        for name in source.catalog:
            entry = source.catalog.get(name)
            assert entry is not None
            found[name] = [(chunk.box, data(files, chunk)) for chunk in entry.chunks]
    return found


def data(files: OpenFiles, chunk: Chunk) -> bytes:
    record = chunk.record
    return bytes(files.view(record.file, record.byte_offset, record.nbytes))


@pytest.mark.parametrize("path", ONE_OF_EACH.values(), ids=list(ONE_OF_EACH))
def test_a_checkpoint_in_a_store_is_read_as_one_on_a_disk(path: str) -> None:
    folder = GOLDENS / path
    here, there = open_checkpoint(folder, ReadOptions()), open_checkpoint(StorePath(stored(folder)), ReadOptions())
    assert contents(there) == contents(here)
    assert (there.format, there.parallel, there.states, there.model) == (
        here.format, here.parallel, here.states, here.model,
    )  # fmt: skip
    assert [(file.path, file.nbytes, tuple(file.records)) for file in there.files] == [
        (file.path, file.nbytes, tuple(file.records)) for file in here.files
    ]


def test_universal_in_a_store(tmp_path: Path) -> None:
    """No golden of it is kept: DeepSpeed makes one of its own files."""
    convert(GOLDENS / ONE_OF_EACH["deepspeed"], tmp_path / "u", ConvertOptions(to="universal", fsync=False))
    here, there = (
        open_checkpoint(tmp_path / "u", ReadOptions()),
        open_checkpoint(StorePath(stored(tmp_path / "u")), ReadOptions()),
    )
    assert there.format == "universal"
    assert contents(there) == contents(here)


@pytest.mark.parametrize("to", ["megatron", "hf"])
def test_a_checkpoint_in_a_store_is_converted_and_verified(tmp_path: Path, to: str) -> None:
    folder = GOLDENS / ONE_OF_EACH["megatron"]
    there = StorePath(stored(folder))
    assert not verify(there, ReadOptions(), Depth.DEEP).problems
    for source, target in ((folder, "here"), (there, "there")):
        convert(source, tmp_path / target, ConvertOptions(to=to, fsync=False))
    files = [stored(tmp_path / target).files for target in ("here", "there")]
    assert files[0].keys() == files[1].keys()
    assert [name for name in files[0] if files[0][name] != files[1][name]] == [MANIFEST_NAME]


def test_every_format_is_here() -> None:
    assert {*ONE_OF_EACH, "universal"} == {known.name for known in FORMATS}


def test_paths_of_a_store() -> None:
    store = Memory({"a/b/c.txt": b"1", "a/d.json": b"{}", "e": b""})
    root = StorePath(store)
    assert [str(path) for path in sorted(root.rglob("*"))] == [
        "memory://a", "memory://a/b", "memory://a/b/c.txt", "memory://a/d.json", "memory://e",
    ]  # fmt: skip
    assert [path.name for path in root.glob("*/*.json")] == ["d.json"]
    assert (root / "a").is_dir()
    assert (root / "a/b/c.txt").is_file()
    assert not (root / "a/x").exists()
    assert (root / "a/b").parent == root / "a"
    assert (root / "a/b/c.txt").relative_to(root / "a").as_posix() == "b/c.txt"
    assert (root / "a/b/c.txt").stat().st_size == 1
    assert read_json(root / "a/d.json") == {}
    assert read_bytes(root / "e") == b""


def test_errors_are_those_of_a_file_system() -> None:
    root = StorePath(Memory({"a/b": b"123"}))
    with pytest.raises(FileNotFoundError):
        open_bytes(root / "no")
    with pytest.raises(IsADirectoryError):
        open_bytes(root / "a")
    with pytest.raises(Incomplete, match="memory://a/b: ends at byte 3, but bytes up to 9 were expected"):
        open_bytes(root / "a/b").read(1, 8)
