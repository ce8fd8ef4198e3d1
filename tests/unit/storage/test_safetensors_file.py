"""The safetensors writer: what the safetensors library itself reads of what it wrote."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from mcore_rlhf.core.catalog import Record, dtype_of
from mcore_rlhf.errors import StorageError, Unsupported
from mcore_rlhf.storage.safetensors import Safetensors
from mcore_rlhf.storage.stored import StoredTensor

TENSORS = {
    "a.weight": torch.randn(3, 5),
    "half": torch.randn(7).to(torch.bfloat16),
    "scalar": torch.tensor(5, dtype=torch.int64),
    "flag": torch.tensor([True, False, True]),
    "none": torch.empty(0, 4),
    "ünïcode": torch.arange(6, dtype=torch.uint8).reshape(2, 3),
}


def _wanted(name: str, tensor: torch.Tensor) -> StoredTensor:
    return StoredTensor.whole(Record("x", name, dtype_of(tensor.dtype), tensor.numel(), 0), tuple(tensor.shape))


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def test_the_library_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    writer = Safetensors([_wanted(*item) for item in TENSORS.items()], {"format": "pt"}).create(path)
    for name, tensor in reversed(TENSORS.items()):
        data = _bytes(tensor)
        for at in range(0, len(data), 7):  # in pieces, in any order
            writer.write(name, at, memoryview(data[at : at + 7]))
    written = writer.finish({name: zlib.crc32(_bytes(tensor)) for name, tensor in TENSORS.items()}, fsync=True)
    found = load_file(path)
    assert set(found) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    assert (written.nbytes, written.crc32) == (path.stat().st_size, zlib.crc32(path.read_bytes()))
    assert all(writer.offset(name) % 8 == 0 for name in ("a.weight",))


def test_what_is_never_written_is_zero(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    writer = Safetensors([_wanted("w", torch.ones(4))], {}).create(path)
    writer.write("w", 4, memoryview(_bytes(torch.ones(1))))
    writer.finish({"w": 0})
    assert load_file(path)["w"].tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize(("at", "length"), [(-1, 1), (15, 2), (17, 0), (0, 17)])
def test_bytes_outside_are_refused(tmp_path: Path, at: int, length: int) -> None:
    writer = Safetensors([_wanted("w", torch.ones(4))], {}).create(tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="do not fit into w of 16 bytes"):
        writer.write("w", at, memoryview(bytes(length)))
    writer.finish({"w": 0})


def test_types_that_safetensors_lacks(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="w: safetensors has no complex128"):
        Safetensors([_wanted("w", torch.ones(2, dtype=torch.complex128))], {}).create(tmp_path / "x.safetensors")
    assert not list(tmp_path.iterdir())


def test_an_existing_file_stays(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_text("mine")
    with pytest.raises(StorageError):
        Safetensors([], {}).create(tmp_path / "x.safetensors")
    assert (tmp_path / "x.safetensors").read_text() == "mine"
