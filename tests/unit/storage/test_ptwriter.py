from __future__ import annotations

import argparse
import enum
import errno
import os
import pickle
import shutil
import subprocess
import sys
import types
import zipfile
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rlhf.core.catalog import Record, dtype_of
from mcore_rlhf.errors import StorageError, Unsupported
from mcore_rlhf.storage.checksum import combine, crc32
from mcore_rlhf.storage.pickling import pickle_tree
from mcore_rlhf.storage.pt import Pt, StoredTensor, read_pt
from mcore_rlhf.storage.stored import new_stub, stub_class
from tests.unit.storage.forge import copy_pt, member

GOLDENS = Path(__file__).parents[2] / "goldens" / "megatron"
GOLDEN = "tp2pp2dp2_bf16_do/iter_0000002/mp_rank_00_000/model_optim_rng.pt"
UINT8 = dtype_of("uint8")


def stored(key: str, shape: tuple[int, ...], numel: int, dtype: str = "float32", start: int = 0) -> StoredTensor:
    strides = torch.empty(shape, device="meta").stride()
    return StoredTensor(Record("x.pt", f"data/{key}", dtype_of(dtype), numel, 0), start, shape, strides)


def written(path: Path, tree: Any) -> Path:
    with Pt.of(tree).create(path, "x.pt") as writer:
        writer.finish({})
    return path


def same(path: Path, original: Path) -> None:
    """Byte for byte equal, except for the id, which torch makes from other facts, and its CRCs."""
    a, b = path.read_bytes(), original.read_bytes()
    assert len(a) == len(b)
    with zipfile.ZipFile(original) as zipped:
        info = zipped.infolist()[-1]
    assert info.filename.endswith("serialization_id")
    differ = [at for at, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
    directory = a.index(b"PK\1\2", info.header_offset)
    assert all(info.header_offset < at < directory or directory < at < len(a) - 22 for at in differ)
    assert len([at for at in differ if at > directory]) <= 4


def test_a_genuine_file_is_written_again_byte_for_byte(tmp_path: Path) -> None:
    result = copy_pt(read_pt(GOLDENS, GOLDEN), tmp_path / "model_optim_rng.pt")
    same(tmp_path / "model_optim_rng.pt", GOLDENS / GOLDEN)
    assert result.nbytes == (GOLDENS / GOLDEN).stat().st_size
    assert result.crc32 == crc32((tmp_path / "model_optim_rng.pt").read_bytes())


def test_the_same_tree_gives_torchs_own_bytes(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    tree = {
        "view": base[1:, 2:], "tied": base, "turned": base.t(), "empty": torch.empty(0, 3), "scalar": torch.tensor(1),
        "f8": torch.ones(3).to(torch.float8_e4m3fn), "u16": torch.ones(3).to(torch.uint16), "b": torch.tensor([True]),
        "c": torch.ones(2, dtype=torch.complex64), "np": np.arange(3), "args": argparse.Namespace(a=1, d=torch.int8),
        "od": OrderedDict(x=1), "dd": defaultdict(list, {1: [2]}), "dq": deque([1], 4), "set": {3, 1, 2}, "b\0": b"\xff",
        "big": 2**80, "none": None, "text": "ü", "size": torch.Size([1]), "dev": torch.device("cuda:1"),
    }  # fmt: skip
    (tmp_path / "torch").mkdir()
    torch.save(tree, tmp_path / "torch" / "x.pt")
    same(written(tmp_path / "x.pt", tree), tmp_path / "torch" / "x.pt")


@pytest.mark.parametrize(
    "options", [{"weights_only": True}, {"weights_only": False}, {"weights_only": True, "mmap": True}]
)
def test_torch_loads_it(tmp_path: Path, options: dict[str, Any]) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    source = tmp_path / "x.pt"
    torch.save({"view": base[1:, 2:], "tied": base, "f8": torch.ones(3).to(torch.float8_e5m2)}, source)
    (tmp_path / "out").mkdir()
    copy_pt(read_pt(tmp_path, "x.pt"), tmp_path / "out" / "x.pt")
    loaded = torch.load(tmp_path / "out" / "x.pt", **options)
    assert torch.equal(loaded["view"], base[1:, 2:])
    assert loaded["view"].storage_offset() == 8
    assert loaded["view"].untyped_storage().data_ptr() == loaded["tied"].untyped_storage().data_ptr()
    assert torch.equal(loaded["f8"].view(torch.uint8), torch.ones(3).to(torch.float8_e5m2).view(torch.uint8))


def test_unzip_agrees(tmp_path: Path) -> None:
    path = written(tmp_path / "x.pt", {"a": torch.arange(100), "e": torch.empty(0)})
    with zipfile.ZipFile(path) as zipped:
        assert zipped.testzip() is None
    if shutil.which("unzip"):
        assert subprocess.run(["unzip", "-tq", path], capture_output=True, check=False).returncode == 0


def test_records_are_filled_in_any_order_and_holes_are_zeros(tmp_path: Path) -> None:
    tree = {"a": stored("0", (4,), 4), "b": stored("1", (2, 2), 4)}
    zeros, ones = bytes(8), np.ones(2, np.float32).tobytes()
    with Pt.of(tree).create(tmp_path / "x.pt", "x.pt") as writer:
        writer.write("data/1", 8, memoryview(np.ones(2, np.float32)))
        writer.write("data/0", 0, ones)
        result = writer.finish({"data/0": crc32(ones + zeros), "data/1": crc32(zeros + ones)}, fsync=True)
    loaded = torch.load(tmp_path / "x.pt")
    assert loaded["a"].tolist() == [1, 1, 0, 0]
    assert loaded["b"].tolist() == [[0, 0], [1, 1]]
    assert result.crc32 == crc32((tmp_path / "x.pt").read_bytes())


def test_keys_that_are_not_in_torchs_order_are_kept_without_the_promise_of_order(tmp_path: Path) -> None:
    tree = {"a": stored("7", (2,), 2), "real": torch.ones(1), "b": stored("0", (1,), 1)}
    with Pt.of(tree).create(tmp_path / "x.pt", "x.pt") as writer:
        two, one = np.array([5, 6], np.float32).tobytes(), np.array([9], np.float32).tobytes()
        writer.write("data/7", 0, two)
        writer.write("data/0", 0, one)
        writer.finish({"data/7": crc32(two), "data/0": crc32(one)})
    loaded = torch.load(tmp_path / "x.pt")
    assert [loaded[key].tolist() for key in ("a", "real", "b")] == [[5, 6], [1], [9]]
    assert torch.load(tmp_path / "x.pt", map_location="meta")["a"].shape == (2,)
    assert ".format_version" not in zipfile.ZipFile(tmp_path / "x.pt").namelist()


def test_one_record_under_two_dtypes(tmp_path: Path) -> None:
    tree = [stored("0", (2,), 2, "float32"), stored("0", (8,), 8, "uint8"), stored("1", (1,), 1)]
    data = np.array([1, 2], np.float32).tobytes()
    with Pt.of(tree).create(tmp_path / "x.pt", "x.pt") as writer:
        writer.write("data/0", 0, data)
        writer.finish({"data/0": crc32(data), "data/1": crc32(bytes(4))})
    floats, raw, _ = torch.load(tmp_path / "x.pt")
    assert floats.tolist() == [1, 2]
    assert bytes(raw.tolist()) == data


@settings(max_examples=25)
@given(st.lists(st.integers(0, 200), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_any_records_in_any_pieces(sizes: list[int], random: Any) -> None:
    import tempfile

    contents = [random.randbytes(size) for size in sizes]
    tree = [stored(str(i), (size,), size, "uint8") for i, size in enumerate(sizes)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.pt")
        with Pt.of(tree).create(path, "x.pt") as writer:
            pieces = [(i, at) for i, size in enumerate(sizes) for at in range(0, size, 50)]
            random.shuffle(pieces)
            for i, at in pieces:
                writer.write(f"data/{i}", at, contents[i][at : at + 50])
            result = writer.finish({f"data/{i}": crc32(data) for i, data in enumerate(contents)})
        assert [bytes(tensor.tolist()) for tensor in torch.load(path)] == contents
        assert zipfile.ZipFile(path).testzip() is None
        assert result.crc32 == crc32(path.read_bytes())


def test_files_past_4_gib(tmp_path: Path) -> None:
    """Sparse, so it is quick: the layout must be torch's own there too."""
    large = (1 << 32) + 10
    if shutil.disk_usage(tmp_path).free < 3 * large:
        pytest.skip("not enough space for a file system without sparse files")
    tree = {"a": stored("0", (large,), large, "uint8"), "b": stored("1", (3,), 3), "e": stored("2", (0,), 0)}
    tail = np.array([1, 2, 3], np.float32).tobytes()
    with Pt.of(tree).create(tmp_path / "x.pt", "x.pt") as writer:
        if writer.path.stat().st_blocks * 512 > 1 << 20:
            pytest.skip("this file system has no sparse files")
        writer.write("data/0", large - 3, b"end")
        writer.write("data/1", 0, tail)
        zeros = 0
        for bit in range(33):  # the CRC of 4 GiB + 7 zeros, by doubling
            zeros = combine(zeros, _zeros(bit), 1 << bit) if (large - 3) >> bit & 1 else zeros
        writer.finish({"data/0": combine(zeros, crc32(b"end"), 3), "data/1": crc32(tail), "data/2": 0})
    ours = [(i.filename, i.header_offset, i.file_size) for i in zipfile.ZipFile(tmp_path / "x.pt").infolist()]
    (tmp_path / "torch").mkdir()
    import mmap

    nothing = mmap.mmap(-1, large, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # MAP_NORESERVE
    reserved = torch.frombuffer(nothing, dtype=torch.uint8)
    with torch.serialization.skip_data():
        torch.save({"a": reserved, "b": torch.ones(3), "e": torch.empty(0)}, tmp_path / "torch" / "x.pt")
    theirs = zipfile.ZipFile(tmp_path / "torch" / "x.pt").infolist()
    assert ours == [(i.filename, i.header_offset, i.file_size) for i in theirs]
    loaded = torch.load(tmp_path / "x.pt", mmap=True)
    assert bytes(loaded["a"][-4:].tolist()) == b"\0end"
    assert loaded["b"].tolist() == [1, 2, 3]
    found = read_pt(tmp_path, "x.pt")
    assert found.load(found.tree["b"]).tolist() == [1, 2, 3]


def _zeros(bit: int) -> int:
    crc, nbytes = crc32(b"\0"), 1
    for _ in range(bit):
        crc, nbytes = combine(crc, crc, nbytes), 2 * nbytes
    return crc


@pytest.fixture
def framework() -> Iterator[Any]:
    """A training framework that is installed where the file is loaded."""
    module = types.ModuleType("megatron.core.fake")

    class Backend(enum.Enum):
        auto = 5

    class Scaler:
        pass

    class Rows(list):  # type: ignore[type-arg]
        pass

    class Table(dict):  # type: ignore[type-arg]
        pass

    def gelu() -> None: ...

    for item in (Backend, Scaler, Rows, Table, gelu):
        item.__module__ = module.__name__
        item.__qualname__ = item.__name__
        setattr(module, item.__name__, item)
    parents = {name: types.ModuleType(name) for name in ("megatron", "megatron.core")}
    before = {name: sys.modules.get(name) for name in (*parents, module.__name__)}
    sys.modules.update(parents | {module.__name__: module})
    yield module
    for name, value in before.items():
        if value is None:
            del sys.modules[name]
        else:
            sys.modules[name] = value


def test_the_real_framework_gets_its_own_objects_back(tmp_path: Path, framework: Any) -> None:
    scaler, rows, table = framework.Scaler(), framework.Rows([1, torch.ones(2)]), framework.Table(a=1)
    scaler.scale, table.note = 2.0, "x"
    source = tmp_path / "x.pt"
    torch.save([framework.Backend.auto, scaler, rows, table, framework.gelu, scaler], source)
    names = [f"megatron.core.fake.{name}" for name in ("Backend", "Scaler", "Rows", "Table", "gelu")]
    found = read_pt(tmp_path, "x.pt", stubs=names)
    backend, stub, list_stub, dict_stub, function, again = found.tree
    assert (backend.stub_args, stub.scale, stub is again) == ((5,), 2.0, True)
    assert list_stub.stub_items[0] == 1
    assert isinstance(list_stub.stub_items[1], StoredTensor)
    assert (dict_stub.stub_items, dict_stub.note) == ({"a": 1}, "x")
    assert function == stub_class("megatron.core.fake.gelu")
    (tmp_path / "out").mkdir()
    path = tmp_path / "out" / "x.pt"
    copy_pt(found, path)
    assert member(path, "data.pkl") == member(source, "data.pkl")
    real = torch.load(path, weights_only=False)
    assert real[0] is framework.Backend.auto
    assert (type(real[1]), real[1].scale) == (framework.Scaler, 2.0)
    assert type(real[2]) is framework.Rows
    assert (type(real[3]), real[3], real[3].note) == (framework.Table, {"a": 1}, "x")
    assert real[4] is framework.gelu


def test_stubs_of_two_files_are_equal_and_travel_to_other_processes() -> None:
    enum_name = "megatron.core.enums.ModelType"
    first, second = stub_class(enum_name)(1), stub_class(enum_name)(1)
    assert first == second
    assert hash(first) == hash(second)
    assert first != stub_class(enum_name)(2)
    assert first != stub_class("megatron.core.enums.Other")(1)
    fragment = new_stub("deepspeed.utils.tensor_fragment.fragment_address", {"numel": 3, "start": 0})
    assert pickle.loads(pickle.dumps([first, fragment, type(first)])) == [first, fragment, type(first)]
    assert fragment.numel == 3


def test_output_is_the_same_in_every_process(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from mcore_rlhf.storage.pt import Pt\n"
        "w = Pt.of({'s': {'b', 'a', 'c'}, 't': (1, 'x')}).create(Path(sys.argv[1]), 'x')\n"
        "print(w.finish({}).crc32)"
    )
    (tmp_path / "there").mkdir()
    run = [sys.executable, "-c", program, str(tmp_path / "there" / "x.pt")]
    env = {**os.environ, "PYTHONHASHSEED": "1"}
    there = subprocess.run(run, capture_output=True, text=True, check=True, env=env).stdout
    with Pt.of({"s": {"c", "b", "a"}, "t": (1, "x")}).create(tmp_path / "x.pt", "x") as writer:
        assert writer.finish({}).crc32 == int(there)


def test_abandoned_files_are_removed(tmp_path: Path) -> None:
    def interrupted() -> None:
        with Pt.of({"a": 1}).create(tmp_path / "x.pt", "x.pt") as writer:
            assert writer.path.exists()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told_with_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: Any) -> int:
        raise OSError(errno.ENOSPC, "full")

    with Pt.of([stored("0", (1000,), 1000)]).create(tmp_path / "x.pt", "x.pt") as writer:
        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(StorageError, match=r"x\.pt: cannot write: .* \(the file needs 5\.\d kB, .* are free\)"):
            writer.write("data/0", 0, bytes(10))


def test_folders_that_cannot_be_written_and_files_that_exist(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"none/x\.pt: cannot create"):
        Pt.of({}).create(tmp_path / "none" / "x.pt", "x.pt")
    (tmp_path / "x.pt").write_text("mine")
    with pytest.raises(StorageError, match="cannot create: File exists"):
        Pt.of({}).create(tmp_path / "x.pt", "x.pt")
    assert (tmp_path / "x.pt").read_text() == "mine"


def test_mistakes_of_the_caller(tmp_path: Path) -> None:
    tensor = stored("0", (2,), 2)
    foreign = replace(tensor, record=replace(tensor.record, file="other.pt"))
    longer = replace(tensor, record=replace(tensor.record, numel=3))
    with pytest.raises(ValueError, match="of another file"):
        pickle_tree([foreign], "x.pt")
    with pytest.raises(ValueError, match="two lengths"):
        pickle_tree([tensor, longer], "x.pt")
    with Pt.of([tensor]).create(tmp_path / "x.pt", "x.pt") as writer:
        with pytest.raises(ValueError, match="do not fit"):
            writer.write("data/0", 4, bytes(5))
        with pytest.raises(ValueError, match="no CRC was given for data/0"):
            writer.finish({})


@pytest.mark.parametrize("thing", [tensor_like := object(), lambda: None, Record("x", "data/0", UINT8, 1, 0)])
def test_what_cannot_be_read_back_elsewhere_is_refused(thing: Any) -> None:
    with pytest.raises(Unsupported, match=r"x\.pt"):
        pickle_tree({"a": thing} if thing is not tensor_like else {"a": torch.eye(2).to_sparse()}, "x.pt")
