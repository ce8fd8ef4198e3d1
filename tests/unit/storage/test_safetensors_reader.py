"""Opening safetensors files: those of the real library, and damaged ones, which the real library refuses as well."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from mcore_rlhf.errors import CheckpointError, Corrupt, Incomplete, NotACheckpoint, Unsupported, Untrusted
from mcore_rlhf.storage.safetensors import read_safetensors

TENSORS = {
    "w": torch.arange(12, dtype=torch.float32).reshape(3, 4), "half": torch.ones(5, dtype=torch.bfloat16),
    "scalar": torch.tensor(7), "empty": torch.empty(0, 3), "flags": torch.tensor([True, False, True]),
    "eight": torch.zeros(2, dtype=torch.float8_e4m3fn), "wide": torch.ones(2, dtype=torch.complex64),
}  # fmt: skip


def test_it_finds_what_the_library_wrote(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "x.safetensors", {"format": "pt", "of": "test"})
    opened = read_safetensors(tmp_path, "x.safetensors")
    content = (tmp_path / "x.safetensors").read_bytes()
    assert opened.nbytes == len(content)
    assert opened.metadata == {"format": "pt", "of": "test"}
    assert set(opened.tensors) == set(TENSORS)
    for name, tensor in TENSORS.items():
        stored = opened.tensors[name]
        assert (stored.shape, stored.strides, stored.start) == (tuple(tensor.shape), tensor.stride(), 0)
        assert stored.record.dtype.name == str(tensor.dtype).removeprefix("torch.")
        at = stored.record.byte_offset
        data = bytearray(content[at : at + stored.record.nbytes])
        assert data == bytearray(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def test_a_file_without_tensors_or_metadata(tmp_path: Path) -> None:
    save_file({}, tmp_path / "x.safetensors")
    opened = read_safetensors(tmp_path, "x.safetensors")
    assert (opened.tensors, opened.metadata) == ({}, {})


def written(path: Path, header: Any, data: bytes = b"") -> Path:
    """A file by hand."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(begin: int, end: int, dtype: str = "U8", shape: list[int] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


BAD: dict[str, tuple[Any, bytes, type[CheckpointError], str]] = {
    "no json": (b"{not json", b"", Corrupt, "not the JSON"),
    "no text": (b'{"\xff": 1}', b"", Corrupt, "not the JSON"),
    "a list": (b"[]", b"", Corrupt, "object of tensors, found list"),
    "twice": (b'{"w": {"dtype": "U8", "shape": [], "data_offsets": [0, 1]}, "w": 1}', b"x", Corrupt, "'w' stands in it twice"),
    "deep": (b"[" * 100_000, b"", Corrupt, "not the JSON"),
    "no entry": ({"w": 3}, b"", Corrupt, "w: expected dtype, shape and data_offsets"),
    "more keys": ({"w": {**entry(0, 1), "x": 1}}, b"x", Corrupt, "expected dtype, shape and data_offsets"),
    "type": ({"w": entry(0, 1, "Q4")}, b"x", Unsupported, "w: elements of type 'Q4'; known are F64"),
    "type is a list": ({"w": {"dtype": [], "shape": [1], "data_offsets": [0, 1]}}, b"x", Unsupported, "elements of type"),
    "negative": ({"w": entry(0, 4, shape=[-4])}, b"xxxx", Corrupt, "are no sizes"),
    "fraction": ({"w": entry(0, 4, shape=[4.0])}, b"xxxx", Corrupt, "are no sizes"),  # type: ignore[list-item]
    "truth": ({"w": {**entry(0, 1), "data_offsets": [False, True]}}, b"x", Corrupt, "are no sizes"),
    "one offset": ({"w": {**entry(0, 1), "data_offsets": [1]}}, b"x", Corrupt, "are no sizes"),
    "length": ({"w": entry(0, 4, "F32", [3])}, b"xxxx", Corrupt, r"w: \[3\] of float32 need 12 bytes, but its offsets are 0:4"),
    "backwards": ({"w": entry(4, 0, shape=[0])}, b"xxxx", Corrupt, "need 0 bytes, but its offsets are 4:0"),
    "overlap": ({"a": entry(0, 4), "b": entry(2, 6)}, b"x" * 6, Corrupt, "b: begins at byte 2 of the data, and overlaps"),
    "gap": ({"a": entry(0, 4), "b": entry(6, 8)}, b"x" * 8, Corrupt, "b: begins at byte 6 of the data, and leaves a gap"),
    "beyond": ({"a": entry(0, 9)}, b"x" * 8, Incomplete, "need 9 bytes after the header, and 8 are there: it is cut off"),
    "left over": ({"a": entry(0, 4)}, b"x" * 6, Corrupt, "2 bytes after the last tensor belong to nothing"),
    "metadata": ({"__metadata__": {"format": 1}, "a": entry(0, 1)}, b"x", Corrupt, "__metadata__ should hold texts"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_with_a_header(name: str, tmp_path: Path) -> None:
    header, data, kind, text = BAD[name]
    path = written(tmp_path / "bad.safetensors", header, data)
    with pytest.raises(kind, match=text) as error:
        read_safetensors(tmp_path, "bad.safetensors")
    assert str(path) in str(error.value)
    if name not in ("twice", "more keys", "negative"):  # which the library has no message for, or takes the last of
        with pytest.raises((SafetensorError, ValueError, OverflowError)), safe_open(path, "pt"):
            pass


def test_everything_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    written(tmp_path / "x.safetensors", {"a": entry(0, 1, "Q4"), "b": 3, "c": entry(0, 4, "F32", [2])}, b"xxxx")
    with pytest.raises(Unsupported, match="3 problems") as error:
        read_safetensors(tmp_path, "x.safetensors")
    assert all(text in str(error.value) for text in ("a: elements", "b: expected", "c: [2]"))


@pytest.mark.parametrize(
    ("content", "kind", "text"),
    [
        (b"", Incomplete, "has 0 bytes"),
        (b"1234567", Incomplete, "has 7 bytes"),
        ((100).to_bytes(8, "little") + b"{}", Incomplete, "header has 100 bytes, but the file has 10: it is cut off"),
        (b"\x80\x02}q\x00X\x01\x00" + b"\0" * 20, Corrupt, "no safetensors header is longer than 100.0 MB"),
    ],
)
def test_the_length_of_the_header(content: bytes, kind: type[CheckpointError], text: str, tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(kind, match=text):
        read_safetensors(tmp_path, "x.safetensors")


@pytest.mark.parametrize("seed", range(40))
def test_any_cut_and_any_flip_in_the_header_is_said_or_harmless(seed: int, tmp_path: Path) -> None:
    """Nothing else than a checkpoint's error comes out, whatever a file says; replay with the seed."""
    save_file(TENSORS, tmp_path / "x.safetensors", {"format": "pt"})
    content = bytearray((tmp_path / "x.safetensors").read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    at = int(torch.randint(0, header, (1,), generator=torch.Generator().manual_seed(seed)))
    content[at] ^= 1 << (seed % 8)
    (tmp_path / "x.safetensors").write_bytes(bytes(content[: at + 1] if seed % 4 == 0 else content))
    try:
        opened = read_safetensors(tmp_path, "x.safetensors")
    except CheckpointError:
        return
    for stored in opened.tensors.values():  # another name, or another type of the same width
        assert header <= stored.record.byte_offset <= stored.record.byte_offset + stored.record.nbytes <= opened.nbytes


def test_where_a_file_may_lie(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    save_file(TENSORS, tmp_path / "x.safetensors")
    with pytest.raises(Untrusted, match="plain path inside"):
        read_safetensors(tmp_path / "inside", "../x.safetensors")
    with pytest.raises(NotACheckpoint, match="no such file"):
        read_safetensors(tmp_path, "y.safetensors")
