from __future__ import annotations

import argparse
import io
import pickle
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from mcore_rlhf.core.catalog import dtype_of
from mcore_rlhf.engines.stateful import torch_values
from mcore_rlhf.errors import CheckpointError, Corrupt, Incomplete, NotACheckpoint, Unsupported, Untrusted
from mcore_rlhf.storage.pt import PtFile, StoredTensor, read_pt
from mcore_rlhf.storage.stored import Namespace, StoredArray, stub_class
from mcore_rlhf.storage.torchzip import read_directory
from tests.unit.storage.forge import flatten, saved_pickle, write_pt

GOLDENS = Path(__file__).parents[2] / "goldens" / "megatron"
GOLDEN = "tp2pp2dp2_bf16_do/iter_0000002/mp_rank_00_000/model_optim_rng.pt"


def saved(folder: Path, tree: Any) -> PtFile:
    torch.save(tree, folder / "x.pt")
    return read_pt(folder, "x.pt")


def test_a_genuine_megatron_file() -> None:
    found = read_pt(GOLDENS, GOLDEN)
    tensors = {k: v for k, v in flatten(found.tree).items() if isinstance(v, StoredTensor)}
    names = get_unsafe_globals_in_checkpoint(GOLDENS / GOLDEN)
    with safe_globals([(stub_class(name), name) for name in names]):
        expected = flatten(torch.load(GOLDENS / GOLDEN, weights_only=True)["model"])
    assert len(tensors) == 18
    weight = found.tree["model"]["decoder.layers.0.mlp.linear_fc1.weight"]
    assert (weight.shape, weight.strides, str(weight.record.dtype)) == ((96, 64), (64, 1), "bfloat16")
    assert weight.record.file == GOLDEN
    args = found.tree["args"]
    assert type(args) is Namespace
    assert args.attention_backend.stub_args == (5,)
    assert repr(args.exit_signal) == "<stub signal.Signals(15)>"
    assert found.tree["rng_state"][0]["np_rng_state"][1].array().dtype == np.uint32
    for path, stored in flatten(found.tree["model"]).items():
        if stored is not None:
            assert torch.equal(torch_values(found.load(stored)), expected[path])


def test_places_agree_with_the_file(tmp_path: Path) -> None:
    tensor = torch.arange(24, dtype=torch.int32).reshape(4, 6)
    found = saved(tmp_path, {"part": tensor[1:3, 2:], "turned": tensor.t(), "scalar": torch.tensor(7.0)})
    part, turned, scalar = (found.tree[key] for key in ("part", "turned", "scalar"))
    assert part.record == turned.record
    assert (part.start, part.shape, part.strides, part.stop) == (8, (2, 4), (6, 1), 18)
    assert (turned.shape, turned.strides) == ((6, 4), (1, 6))
    assert scalar.shape == ()
    raw = (tmp_path / "x.pt").read_bytes()
    record = part.record
    assert np.array_equal(np.frombuffer(raw, "<i4", record.numel, record.byte_offset), np.arange(24))
    assert record.key == "data/0"
    assert torch.equal(torch_values(found.load(part)), tensor[1:3, 2:])
    assert torch.equal(torch_values(found.load(turned)), tensor.t())
    assert found.load(scalar).item() == 7.0


@pytest.mark.parametrize(
    "name",
    ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int16", "int8",
     "uint64", "uint32", "uint16", "uint8", "bool", "complex64", "complex128"],
)  # fmt: skip
def test_every_dtype(tmp_path: Path, name: str) -> None:
    tensor = torch.arange(6, dtype=torch.float32).reshape(2, 3).to(getattr(torch, name))
    found = saved(tmp_path, [tensor, torch.empty(0, 4, dtype=tensor.dtype)])
    assert found.tree[0].record.dtype is dtype_of(name)
    for stored, real in zip(found.tree, (tensor, torch.empty(0, 4, dtype=tensor.dtype)), strict=True):
        loaded = torch_values(found.load(stored))
        assert loaded.dtype == real.dtype
        assert torch.equal(loaded.view(torch.uint8), real.view(torch.uint8))


def test_parameters_subclasses_and_tensors_with_attributes_become_stored_tensors(tmp_path: Path) -> None:
    marked = torch.ones(3)
    marked.tensor_model_parallel = True  # type: ignore[attr-defined]  # as Megatron marks its parameters
    found = saved(tmp_path, [torch.nn.Parameter(torch.ones(2)), marked, torch.nn.Buffer(torch.ones(4))])
    assert [type(item) for item in found.tree] == [StoredTensor] * 3


def test_one_storage_under_two_dtypes_gives_two_records_of_one_key(tmp_path: Path) -> None:
    words = torch.arange(4).to(torch.uint16)
    found = saved(tmp_path, [words, words.view(torch.float8_e5m2)])
    first, second = (item.record for item in found.tree)
    assert first.key == second.key
    assert first.byte_offset == second.byte_offset
    assert (first.numel, second.numel) == (4, 8)


def test_files_written_on_a_gpu_load(tmp_path: Path) -> None:
    pickled = saved_pickle({"w": torch.ones(2)}).replace(b"X\3\0\0\0cpu", b"X\6\0\0\0cuda:3")
    assert b"cuda:3" in pickled
    write_pt(tmp_path / "x.pt", pickled, _0=torch.ones(2).numpy().tobytes())
    found = read_pt(tmp_path, "x.pt")
    assert torch.equal(torch_values(found.load(found.tree["w"])), torch.ones(2))


def test_containers_and_plain_values_come_back_as_they_were(tmp_path: Path) -> None:
    state = OrderedDict(a=1)
    state._metadata = {"version": 2}  # type: ignore[attr-defined]  # as nn.Module.state_dict has it
    tree = {
        "namespace": argparse.Namespace(lr=1e-3, betas=(0.9, 0.95), dtype=torch.bfloat16),
        "default": defaultdict(list, {"a": [1]}), "deque": deque([1, 2], maxlen=3), "counter": Counter("aab"),
        "set": {1, 2}, "frozen": frozenset({3}), "bytes": b"\0\xff", "array": bytearray(b"x"), "complex": 1j,
        "big": 2**70, "device": torch.device("cuda", 1), "size": torch.Size([2, 3]), "state": state,
        (torch.bfloat16, torch.float32): None, 0: True,
    }  # fmt: skip
    found = torch_values(saved(tmp_path, tree).tree)
    assert found == tree
    assert [type(value) for value in found.values()] == [Namespace, *[type(value) for value in tree.values()][1:]]
    assert found["default"].default_factory is list
    assert found["deque"].maxlen == 3
    assert vars(found["state"]) == {"_metadata": {"version": 2}}


def test_numpy_comes_back_as_it_was(tmp_path: Path) -> None:
    tree = {
        "c": np.arange(6, dtype=np.uint32).reshape(2, 3), "f": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "big": np.arange(3, dtype=">i4"), "text": np.array(["ab", "c"]), "empty": np.empty((0, 2)),
        "objects": np.array([{"a": 1}, None], dtype=object), "scalar": np.float32(1.5), "dtype": np.dtype("int16"),
        "zero-d": np.array(3), "bool": np.array([True]), "state": np.random.RandomState(7).get_state(),
    }  # fmt: skip
    opened = saved(tmp_path, {**tree, "again": tree["c"]})
    assert isinstance(opened.tree["c"], StoredArray), "numbers wait until somebody wants them"
    found = opened.materialize(opened.tree)
    assert found["again"] is found["c"]
    for key, value in tree.items():
        if isinstance(value, np.ndarray):
            assert found[key].dtype == value.dtype
            assert np.array_equal(found[key], value)
            assert found[key].flags.writeable
    assert found["f"].flags.f_contiguous
    assert (found["scalar"], type(found["scalar"])) == (np.float32(1.5), np.float32)
    assert found["dtype"] == np.dtype("int16")
    assert np.array_equal(found["state"][1], tree["state"][1])


def test_old_numpy_names_are_read(tmp_path: Path) -> None:
    pickled = saved_pickle({"a": np.arange(3)})
    for old, new in ((b"numpy.core", b"numpy._core"), (b"numpy._core", b"numpy.core")):
        write_pt(tmp_path / "x.pt", pickled.replace(old + b".multiarray", new + b".multiarray"))
        assert np.array_equal(read_pt(tmp_path, "x.pt").tree["a"].array(), np.arange(3))


def test_extra_state_in_a_bytesio_stays_bytes(tmp_path: Path) -> None:
    inner = io.BytesIO(b"abc")
    inner.seek(2)
    found = saved(tmp_path, {"layer._extra_state": inner}).tree["layer._extra_state"]
    assert (type(found), found.getvalue(), found.tell()) == (io.BytesIO, b"abc", 2)


def test_sharing_inside_the_tree_is_kept(tmp_path: Path) -> None:
    shared: list[Any] = [torch.ones(1)]
    found = saved(tmp_path, {"a": shared, "b": [shared]}).tree
    assert found["a"] is found["b"][0]
    assert found["a"][0] is found["b"][0][0]


def test_no_tensor_byte_is_read_and_damage_shows_when_one_is(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(100)}, tmp_path / "x.pt")
    place = read_directory(tmp_path / "x.pt").members["data/0"].byte_offset
    data = bytearray((tmp_path / "x.pt").read_bytes())
    data[place] ^= 1
    (tmp_path / "x.pt").write_bytes(data)
    found = read_pt(tmp_path, "x.pt")
    with pytest.raises(Corrupt, match="'data/0' is damaged"):
        found.load(found.tree["a"])


def test_a_large_record_is_read_only_where_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcore_rlhf.storage.pt._CHECKED_NBYTES", 8)
    found = saved(tmp_path, torch.arange(100.0)[10:13])
    assert torch.equal(torch_values(found.load(found.tree)), torch.tensor([10.0, 11.0, 12.0]))


def test_materialize_replaces_stored_tensors_only(tmp_path: Path) -> None:
    found = saved(tmp_path, {"rng": [{"torch": torch.arange(3)}], "args": argparse.Namespace(a=(torch.ones(1),))})
    real = torch_values(found.materialize(found.tree))
    assert torch.equal(real["rng"][0]["torch"], torch.arange(3))
    assert torch.equal(real["args"].a[0], torch.ones(1))
    assert isinstance(found.tree["rng"][0]["torch"], StoredTensor)


BAD: dict[str, tuple[Any, type[CheckpointError], str]] = {
    "sparse": (lambda: {"m": {"w": torch.eye(2).to_sparse()}}, Unsupported, r"m\.w is a sparse"),
    "meta": (lambda: {"w": torch.empty(2, device="meta")}, Unsupported, "w is a tensor without stored data"),
    "structured": (lambda: [np.zeros(2, "i4,f8")], Unsupported, "numpy array of dtype 'V12'"),
    "storage": (lambda: {"s": torch.ones(2).untyped_storage()}, Unsupported, "s is an object of the type torch"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_not_supported_is_named_with_its_place(tmp_path: Path, case: str) -> None:
    make, kind, message = BAD[case]
    with pytest.raises(kind, match=message):
        saved(tmp_path, make())


def test_a_storage_that_is_missing_or_of_another_length(tmp_path: Path) -> None:
    pickled = saved_pickle({"model": {"w": torch.ones(4)}})
    write_pt(tmp_path / "missing.pt", pickled)
    with pytest.raises(Corrupt, match=r"missing\.pt"):
        read_pt(tmp_path, "missing.pt")
    write_pt(tmp_path / "short.pt", pickled, _0=b"\0" * 8)
    with pytest.raises(Corrupt, match=r"model\.w is a tensor that ends at element 4 of a storage of 2"):
        read_pt(tmp_path, "short.pt")
    write_pt(tmp_path / "odd.pt", pickled, _0=b"\0" * 17)
    with pytest.raises(Corrupt, match="whose length is 17 bytes"):
        read_pt(tmp_path, "odd.pt")
    write_pt(tmp_path / "long.pt", pickled, _0=b"\0" * 20)
    with pytest.raises(Corrupt, match=r"model\.w is a tensor in a storage of 16 bytes, whose record 'data/0' has 20"):
        read_pt(tmp_path, "long.pt")


@pytest.mark.parametrize("pickled", [b"", b"\x80\x02", b"garbage", b"\x80\x02h\x00.", b"\x80\x02}q\x00.."[:5], b"."])
def test_broken_pickles_are_corrupt_not_tracebacks(tmp_path: Path, pickled: bytes) -> None:
    write_pt(tmp_path / "x.pt", pickled)
    with pytest.raises((Corrupt, Incomplete), match=r"x\.pt: the pickle inside cannot be read"):
        read_pt(tmp_path, "x.pt")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_gives_the_same_tree(tmp_path: Path, protocol: int) -> None:
    tree = {
        "w": torch.arange(3), "args": argparse.Namespace(a=(1, 2.5)), "np": np.arange(3), "set": {1, 2}, "b": b"\0\xff",
        "frozen": frozenset({"x"}), "od": OrderedDict(a=[1]), "deque": deque([1], 2), "size": torch.Size([2]), "1j": 1j,
        np.int64(5): "a number of numpy's", torch.float16: "a dtype", (1, "a"): "a tuple", b"k": "bytes",
    }  # fmt: skip
    torch.save(tree, tmp_path / "x.pt", pickle_protocol=protocol)
    if protocol == 5:  # numpy then writes a mutable buffer, which nobody needs
        with pytest.raises(Untrusted, match="opcode"):
            read_pt(tmp_path, "x.pt")
        torch.save({k: v for k, v in tree.items() if k != "np"}, tmp_path / "x.pt", pickle_protocol=5)
    opened = read_pt(tmp_path, "x.pt")
    found = torch_values(opened.materialize(opened.tree))
    assert found.pop("w").shape == (3,)
    assert protocol == 5 or np.array_equal(found.pop("np"), np.arange(3))
    assert found == {k: v for k, v in tree.items() if k not in ("w", "np")}


@pytest.mark.parametrize("protocol", [0, 1])
def test_protocols_of_python_2_are_named(tmp_path: Path, protocol: int) -> None:
    write_pt(tmp_path / "x.pt", b"\x80" + bytes([protocol]) + pickle.dumps({"a": 1}, protocol))
    with pytest.raises(Unsupported, match=f"protocol {protocol}"):
        read_pt(tmp_path, "x.pt")


def test_deep_nesting_is_refused_politely(tmp_path: Path) -> None:
    write_pt(tmp_path / "x.pt", b"\x80\x02" + b"]" * 5000 + b"a" * 4999 + b".")
    with pytest.raises(Unsupported, match="nested too deeply"):
        read_pt(tmp_path, "x.pt")


def test_paths_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(Untrusted):
        read_pt(tmp_path, "../x.pt")
    with pytest.raises(NotACheckpoint, match="no such file"):
        read_pt(tmp_path, "x.pt")
    (tmp_path / "x.pt").touch()
    with pytest.raises(Incomplete, match="is empty"):
        read_pt(tmp_path, "x.pt")


def test_names_allowed_elsewhere_in_the_process_change_nothing(tmp_path: Path) -> None:
    with safe_globals([(argparse.ArgumentParser, "megatron.core.Enum")]):
        write_pt(tmp_path / "x.pt", b"\x80\x02cmegatron.core\nEnum\nK\x01\x85R.")
        assert repr(read_pt(tmp_path, "x.pt").tree) == "<stub megatron.core.Enum(1)>"


def test_no_torch_is_imported_to_read_tensors(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2, 3), "args": argparse.Namespace(a=1), "rng": np.arange(3)}, tmp_path / "x.pt")
    code = (
        "import sys; from pathlib import Path; from mcore_rlhf.storage.pt import read_pt\n"
        "print(read_pt(Path(sys.argv[1]), 'x.pt').tree['w'].shape, 'torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert run.stdout == "(2, 3) False\n"


def test_lists_in_an_array_of_objects_stay_whole(tmp_path: Path) -> None:
    array = np.empty((2, 2), object)
    array[:] = [[[1, 2], "a"], [None, {"b": 3}]]
    for order in "CF":
        found = saved(tmp_path, {"a": np.array(array, order=order)}).tree["a"]
        assert found.tolist() == array.tolist()
