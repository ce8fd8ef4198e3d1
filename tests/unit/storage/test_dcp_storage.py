"""DCP folders: what torch wrote is read in place, what we write torch loads, what is broken is named."""

from __future__ import annotations

import io
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf.core.catalog import Box, Chunk, dtype_of
from mcore_rlhf.engines.stateful import torch_values
from mcore_rlhf.errors import CheckpointError, Corrupt, Incomplete, Unsupported, Untrusted
from mcore_rlhf.storage.checksum import crc32
from mcore_rlhf.storage.dcp import METADATA_FILE
from mcore_rlhf.storage.dcp.folder import DcpFolder, load_tensor, unwrap
from mcore_rlhf.storage.dcp.writer import Distcp, Item, ObjectItem, TensorItem, dcp_metadata, records, saved
from mcore_rlhf.storage.torch_values import SmallTensor
from tests.helpers.dcp_by_torch import load, save

GOLDENS = Path(__file__).parents[2] / "goldens" / "dcp"
NAMES = tuple(sorted(path.name for path in GOLDENS.iterdir()))
FLOAT = dtype_of("float32")


def folder_of(name: str) -> Path:
    return GOLDENS / name / "actor" / "dcp_checkpoint"


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder_of("fsdp2_ws3"), tmp_path / "dcp"))


def stored_records(folder: Path) -> dict[str, tuple[tuple[str, int, int, int], ...]]:
    """The checksums of a folder, all of which is read for them."""
    return {file.path: tuple(file.records) for file in DcpFolder.open(folder, folder).files()}


def edit(folder: Path, change: Any) -> None:
    """Change ``.metadata`` with torch's own classes."""
    path = folder / METADATA_FILE
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def value(folder: Path, chunk: Chunk, dtype: torch.dtype) -> torch.Tensor:
    data = bytearray((folder / chunk.record.file).read_bytes()[chunk.record.byte_offset :][: chunk.record.nbytes])
    return torch.frombuffer(data, dtype=dtype).as_strided(chunk.box.shape, chunk.strides, chunk.start)


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_lies_where_torch_finds_it(name: str) -> None:
    folder = folder_of(name)
    opened = DcpFolder.open(folder, folder.parent)
    wanted = {
        key: torch.zeros(tensor.global_shape, dtype=getattr(torch, tensor.dtype.name))
        for key, tensor in opened.tensors.items()
    }
    found = {key: torch.zeros_like(tensor) for key, tensor in wanted.items()}
    load(wanted, folder)
    for key, tensor in opened.tensors.items():
        for chunk in tensor.chunks():
            assert chunk.record.file.startswith("dcp_checkpoint/__")
            where = tuple(slice(a, b) for a, b in zip(chunk.box.offset, chunk.box.stop, strict=True))
            found[key][where] = value(folder.parent, chunk, found[key].dtype)
        assert torch.equal(found[key], wanted[key]), key
        assert torch.equal(torch_values(load_tensor(tensor)), wanted[key])
    assert len(wanted) == 38


def test_empty_chunks_are_skipped_and_every_byte_has_a_checksum() -> None:
    folder = folder_of("fsdp2_ws3")
    opened = DcpFolder.open(folder, folder)
    head = opened.tensors["fsdp_checkpoint.model.value_head.weight"]
    assert head.boxes == (Box((0, 0), (1, 8)),)
    assert len(head.meta.chunks) == 2
    for file in opened.files():
        data = (folder / file.path).read_bytes()
        assert len(data) == file.nbytes
        for key, offset, nbytes, crc in file.records:
            assert crc32(data[offset : offset + nbytes]) == crc, key
    assert sum(len(file.records) for file in opened.files()) > 100


def test_objects_are_what_was_saved() -> None:
    opened = DcpFolder.open(folder_of("fsdp2_ws2"), folder_of("fsdp2_ws2"))
    head = "fsdp_checkpoint.optimizers.param_groups"
    assert opened.objects[f"{head}.0.betas"].load() == (0.9, 0.999)
    assert opened.objects[f"{head}.1.weight_decay"].load() == 0.0
    assert opened.objects[f"{head}.1.params"].load()[0] == "layers.0.bias"
    assert opened.objects["fsdp_checkpoint.rng.numpy"].load()[0] == "MT19937"
    assert opened.planner_data[f"{head}.0.lr"] == ("fsdp_checkpoint", "optimizers", "param_groups", 0, "lr")


def test_strides_are_those_that_were_saved(tmp_path: Path) -> None:
    turned = torch.arange(12.0).reshape(3, 4).t()
    save({"turned": turned, "half": turned.to(torch.bfloat16)}, tmp_path)
    opened = DcpFolder.open(tmp_path, tmp_path)
    (chunk,) = opened.tensors["turned"].chunks()
    assert chunk.strides == (1, 4)
    assert torch.equal(value(tmp_path, chunk, torch.float32), turned)
    assert torch.equal(torch_values(load_tensor(opened.tensors["half"])), turned.to(torch.bfloat16))


# What we write


def write(folder: Path, files: dict[str, list[Item]], tensors: dict[str, torch.Tensor]) -> None:
    for name, items in files.items():
        writer = Distcp(items).create(folder / name)
        crcs = {}
        for record in records(name, items):
            item = next(i for i in items if isinstance(i, TensorItem) and i.key == record.key)
            where = tuple(slice(a, a + n) for a, n in zip(item.offset, item.shape, strict=True))
            data = tensors[item.fqn][where].contiguous().numpy().tobytes()
            assert len(data) == record.nbytes
            assert writer.offset(record.key) == record.byte_offset
            half = len(data) // 2
            writer.write(record.key, half, memoryview(data)[half:])
            writer.write(record.key, 0, memoryview(data)[:half])
            crcs[record.key] = crc32(data)
        written = writer.finish(crcs, fsync=True)
        assert (written.nbytes, written.crc32) == (len(writer.path.read_bytes()), crc32(writer.path.read_bytes()))


def test_torch_loads_what_we_write(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print("seed", seed)
    torch.manual_seed(seed)
    tensors = {"m.w": torch.randn(5, 4), "m.one": torch.randn(1, 3), "step": torch.tensor(7.0)}
    files: dict[str, list[Item]] = {
        "__0_0.distcp": [
            TensorItem("m.w", FLOAT, (0, 0), (3, 4)),
            TensorItem("step", FLOAT, (), (), b"\0\0\xe0\x40"),
            ObjectItem("o.0.lr", saved({"lr": 1e-3, "at": torch.arange(3)}, "o.0.lr")),
            TensorItem("m.one", FLOAT, (0, 0), (1, 3)),
        ],
        "__1_0.distcp": [TensorItem("m.w", FLOAT, (3, 0), (2, 4)), TensorItem("m.one", FLOAT, (1, 0), (0, 3))],
    }
    write(tmp_path, files, tensors)
    paths = {"m.w": ("m", "w"), "m.one": ("m", "one"), "step": ("step",), "o.0.lr": ("o", 0, "lr")}
    shapes = {"m.w": (5, 4), "m.one": (1, 3), "step": ()}
    (tmp_path / METADATA_FILE).write_bytes(dcp_metadata(shapes, files, paths))
    state: dict[str, Any] = {
        "m": {"w": torch.zeros(5, 4), "one": torch.zeros(1, 3)}, "step": torch.tensor(0.0), "o": [{"lr": None}],
    }  # fmt: skip
    load(state, tmp_path)
    assert torch.equal(state["m"]["w"], tensors["m.w"])
    assert torch.equal(state["m"]["one"], tensors["m.one"])
    assert state["step"] == 7
    assert torch.equal(state["o"][0]["lr"]["at"], torch.arange(3))
    opened = DcpFolder.open(tmp_path, tmp_path)
    assert opened.tensors["m.w"].boxes == (Box((0, 0), (3, 4)), Box((3, 0), (2, 4)))
    assert dict(opened.planner_data) == paths
    assert opened.files()[1].records


@pytest.mark.parametrize("shape", [(3, 5), (), (0, 8), (70000,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn])
def test_an_item_is_what_torch_saves(shape: tuple[int, ...], dtype: torch.dtype, tmp_path: Path) -> None:
    """All bytes but the 40 digits that torch makes of a hash of its own, and their checksums."""
    tensor = torch.ones(shape).to(dtype)
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    item = TensorItem(
        "t", dtype_of(dtype), (0,) * len(shape), shape, bytes(tensor.reshape(-1).view(torch.uint8).numpy())
    )
    Distcp([item]).create(tmp_path / "f").finish({})
    ours, theirs = (tmp_path / "f").read_bytes(), buffer.getvalue()
    assert len(ours) == len(theirs)
    differing = [n for n, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]]
    digits = theirs.index(b"serialization_id") + 16
    assert len(differing) <= 48
    assert all(at > digits for at in differing)
    assert torch.equal(torch.load(io.BytesIO(ours), weights_only=True).float(), tensor.float())


def test_metadata_holds_no_path_and_is_torchs_own_class(tmp_path: Path) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    items: list[Item] = [TensorItem("w", FLOAT, (0, 0), (2, 2)), ObjectItem("x", saved(None, "x"))]
    data = dcp_metadata({"w": (2, 2)}, {"__0_0.distcp": items})
    assert str(tmp_path).encode() not in data
    (tmp_path / METADATA_FILE).write_bytes(data)
    found = FileSystemReader(tmp_path).read_metadata()
    assert found.planner_data is None
    assert found.state_dict_metadata["w"].size == torch.Size([2, 2])
    assert found.state_dict_metadata["w"].properties.memory_format == torch.contiguous_format
    assert found.version == "1.0.0"
    with pytest.raises(ValueError, match="twice"):
        dcp_metadata({"w": (2, 2)}, {"a": items, "b": items})


def test_large_offsets_survive() -> None:
    """Beyond 2 and 4 GiB, numbers have other opcodes."""
    from mcore_rlhf.storage.dcp.metadata import DcpMetadata, ItemPlace
    from mcore_rlhf.storage.dcp.writer import pickle_metadata

    numbers = [0, 255, 256, (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 45]
    places = {(f"x{n}", None): ItemPlace("f", n, n) for n in numbers}
    loaded = pickle.loads(pickle_metadata(DcpMetadata({}, tuple(f"x{n}" for n in numbers), places)))
    assert {info.offset for info in loaded.storage_data.values()} == set(numbers)


def test_a_wrapped_object_needs_no_class_of_its_own(tmp_path: Path) -> None:
    inner = saved({"a": [1, 2.5], "t": torch.arange(3)}, "x")
    items: list[Item] = [ObjectItem("x", saved(SmallTensor.of_bytes(inner), "x"))]
    write(tmp_path, {"__0_0.distcp": items}, {})
    (tmp_path / METADATA_FILE).write_bytes(dcp_metadata({}, {"__0_0.distcp": items}))
    opened = DcpFolder.open(tmp_path, tmp_path)
    assert torch_values(opened.objects["x"].load()).dtype == torch.uint8
    found = torch_values(unwrap(opened, "x"))
    assert found["a"] == [1, 2.5]
    assert torch.equal(found["t"], torch.arange(3))


def test_a_writer_refuses_what_does_not_fit(tmp_path: Path) -> None:
    writer = Distcp([TensorItem("w", FLOAT, (0,), (2,))]).create(tmp_path / "f")
    with pytest.raises(ValueError, match="do not fit"):
        writer.write("w[0]", 4, memoryview(bytes(8)))
    with pytest.raises(ValueError, match="no CRC"):
        writer.finish({})
    with pytest.raises(CheckpointError, match="exist"):
        Distcp([]).create(tmp_path / "f")


# What is broken


def test_a_save_that_was_not_finished(broken: Path) -> None:
    (broken / METADATA_FILE).unlink()
    with pytest.raises(Incomplete, match=r"writes it last.*\n.*hidden"):
        DcpFolder.open(broken, broken)


def test_missing_and_cut_files_are_all_named(broken: Path) -> None:
    (broken / "__1_0.distcp").unlink()
    data = (broken / "__2_0.distcp").read_bytes()
    (broken / "__2_0.distcp").write_bytes(data[:-500])
    with pytest.raises(Incomplete) as caught:
        DcpFolder.open(broken, broken)
    assert "__1_0.distcp: missing" in str(caught.value)
    assert "__2_0.distcp: " in str(caught.value)
    assert "cut off" in str(caught.value)


@pytest.mark.parametrize("at", [0.0, 0.3, 0.9])
def test_cut_metadata(broken: Path, at: float) -> None:
    data = (broken / METADATA_FILE).read_bytes()
    (broken / METADATA_FILE).write_bytes(data[: int(at * len(data))])
    with pytest.raises((Incomplete, Corrupt), match=r"\.metadata: "):
        DcpFolder.open(broken, broken)


def _index(metadata: Any, fqn: str) -> Any:
    return [index for index in metadata.storage_data if index.fqn == fqn]


WEIGHT = "fsdp_checkpoint.model.embed.weight"


def test_wrong_places_are_named(broken: Path) -> None:
    def overlap(metadata: Any) -> None:
        first, second = _index(metadata, WEIGHT)[:2]
        metadata.storage_data[second] = metadata.storage_data[first]

    edit(broken, overlap)
    with pytest.raises(Corrupt, match="overlaps"):
        DcpFolder.open(broken, broken)


def test_a_shifted_item_is_named(broken: Path) -> None:
    edit(broken, lambda m: setattr(m.storage_data[_index(m, WEIGHT)[0]], "offset", 1601))
    with pytest.raises(Corrupt):
        stored_records(broken)


def test_items_that_changed_places_are_named(broken: Path) -> None:
    def swap(metadata: Any) -> None:
        one = _index(metadata, "fsdp_checkpoint.model.layers.0.weight")[0]
        other = _index(metadata, "fsdp_checkpoint.model.layers.0.bias")[0]
        data = metadata.storage_data
        data[one], data[other] = data[other], data[one]

    edit(broken, swap)
    opened = DcpFolder.open(broken, broken)
    with pytest.raises(Corrupt, match=r"is a float32 tensor \(.*\.metadata says float32"):
        opened.tensors["fsdp_checkpoint.model.layers.0.weight"].chunks()


def test_gaps_and_overlaps_between_chunks(broken: Path) -> None:
    edit(broken, lambda m: m.state_dict_metadata[WEIGHT].chunks.pop())
    with pytest.raises(Incomplete, match="leave a gap"):
        DcpFolder.open(broken, broken)
    assert len(DcpFolder.open(broken, broken, tiled=False).tensors[WEIGHT].boxes) == 2

    def again(metadata: Any) -> None:
        chunks = metadata.state_dict_metadata[WEIGHT].chunks
        chunks.append(chunks[0])

    edit(broken, again)
    with pytest.raises(Corrupt, match="overlap"):
        DcpFolder.open(broken, broken)


def test_a_chunk_that_lies_nowhere(broken: Path) -> None:
    edit(broken, lambda m: m.storage_data.pop(_index(m, WEIGHT)[0]))
    with pytest.raises(Incomplete, match=r"nowhere where .*embed\.weight\[0,0\] lies"):
        DcpFolder.open(broken, broken)


@pytest.mark.parametrize("name", ["../outside.distcp", "/etc/passwd", "a/../../b"])
def test_files_outside_the_folder_are_refused(broken: Path, name: str) -> None:
    edit(broken, lambda m: setattr(m.storage_data[_index(m, WEIGHT)[0]], "relative_path", name))
    with pytest.raises(Untrusted, match="not a plain path"):
        DcpFolder.open(broken, broken)


def test_transformed_items_are_not_supported(broken: Path) -> None:
    edit(broken, lambda m: setattr(m.storage_data[_index(m, WEIGHT)[0]], "transform_descriptors", ["zstd"]))
    with pytest.raises(Unsupported, match="zstd"):
        DcpFolder.open(broken, broken)


class Evil:
    def __reduce__(self) -> Any:
        import os

        return os.system, ("true",)


class Foreign:
    pass


def test_code_in_metadata_is_refused_and_never_run(broken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (broken / METADATA_FILE).write_bytes(pickle.dumps({"a": Evil()}, protocol=4))
    monkeypatch.setattr("os.system", lambda command: pytest.fail("it was run"))
    with pytest.raises(Untrusted, match=r"posix.system.*refused always"):
        DcpFolder.open(broken, broken)


def test_plans_that_megatron_keeps_are_passed_over(broken: Path) -> None:
    """With ``--ckpt-assume-constant-structure``, from the second save of a run on; seen in a folder of megatron-core 0.19.2."""
    from torch.distributed.checkpoint.filesystem import _StoragePrefix
    from torch.distributed.checkpoint.planner import SavePlan

    before = DcpFolder.open(broken, broken).tensors.keys()
    plan = SavePlan(items=[], storage_data=_StoragePrefix("__0_"))
    edit(broken, lambda metadata: setattr(metadata, "all_local_plans", [plan]))
    assert DcpFolder.open(broken, broken).tensors.keys() == before


def test_unknown_classes_in_metadata_want_a_stub(broken: Path) -> None:
    edit(broken, lambda m: setattr(m, "note", Foreign()))
    name = f"{Foreign.__module__}.Foreign"
    with pytest.raises(Untrusted, match="--stub"):
        DcpFolder.open(broken, broken)
    assert DcpFolder.open(broken, broken, (name,)).tensors


def test_a_pickle_cannot_change_our_classes(broken: Path) -> None:
    """BUILD on a class, and on a dtype: what was loaded afterwards must not have changed."""
    name = b"\x8c\x25torch.distributed.checkpoint.metadata\x8c\x08Metadata\x93"
    for attack in (name + b"N}\x8c\x01xK\x01s\x86b.", b"\x8c\x05torch\x8c\x07float32\x93N}\x8c\x01xK\x01s\x86b."):
        (broken / METADATA_FILE).write_bytes(b"\x80\x04" + attack)
        with pytest.raises(Corrupt):
            DcpFolder.open(broken, broken)
    assert DcpFolder.open(folder_of("fsdp2_ws3"), folder_of("fsdp2_ws3")).tensors[WEIGHT].dtype == FLOAT


def test_forged_metadata_is_refused_whatever_it_holds(broken: Path) -> None:
    """Random changes of a genuine pickle: an error of ours, or the same tensors as ever; never another exception."""
    seed = random.SystemRandom().randrange(1 << 30)
    print("seed", seed)
    rng, path = random.Random(seed), broken / METADATA_FILE
    good = path.read_bytes()
    refused = 0
    for _ in range(150):
        data = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(bytes(data))
        try:
            stored_records(broken)
        except CheckpointError:
            refused += 1
    assert refused > 50


def test_flipped_bytes_of_a_file_are_found(broken: Path) -> None:
    """Headers, directories, small records: named when the checksums are listed; data: by its checksum."""
    seed = random.SystemRandom().randrange(1 << 30)
    print("seed", seed)
    rng, path = random.Random(seed), broken / "__1_0.distcp"
    good = path.read_bytes()
    before = stored_records(broken)
    found = 0
    for _ in range(60):
        at = rng.randrange(len(good))
        data = bytearray(good)
        data[at] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(data))
        try:
            after = stored_records(broken)
        except CheckpointError:
            found += 1
            continue
        in_data = any(offset <= at < offset + nbytes for _, offset, nbytes, _ in before[path.name])
        if in_data:
            found += 1
        else:  # padding and dates of the zips' headers
            assert after == before
    assert found > 15


def test_a_record_that_became_empty_is_found(broken: Path) -> None:
    """One bit of the second of the two lengths in an item's directory."""
    path = broken / "__1_0.distcp"
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\1\2") + 24] = 0
    path.write_bytes(data)
    with pytest.raises(Corrupt, match="is empty, but its CRC is"):
        stored_records(broken)
