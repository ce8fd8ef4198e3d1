from __future__ import annotations

import io
import random
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from mcore_rlhf.errors import CheckpointError, Corrupt, Incomplete, NotACheckpoint, Unsupported
from mcore_rlhf.storage.torchzip import LIMIT16, Directory, archive, read_directory


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "model_optim_rng.pt"
    torch.save({"a": torch.arange(100.0), "b": torch.ones(3, dtype=torch.bfloat16), "e": torch.empty(0)}, path)
    return path


def test_directory_agrees_with_zipfile(saved: Path) -> None:
    directory = read_directory(saved)
    with zipfile.ZipFile(saved) as zipped:
        infos = {info.filename.partition("/")[2]: info for info in zipped.infolist()}
        assert list(directory.members) == list(infos)
        for name, found in directory.members.items():
            assert (found.nbytes, found.crc32) == (infos[name].file_size, infos[name].CRC)
            assert directory.read(name) == zipped.read(infos[name])
    assert directory.stem == "model_optim_rng"
    assert directory.nbytes == saved.stat().st_size
    assert directory.checksummed
    assert directory.members["data/0"].byte_offset % 64 == 0


def test_every_truncation_is_noticed(saved: Path) -> None:
    whole = saved.read_bytes()
    for nbytes in (*range(0, len(whole), 7), len(whole) - 1):
        saved.write_bytes(whole[:nbytes])
        with pytest.raises((Incomplete, Corrupt), match=str(saved)):
            read_directory(saved)


def test_a_flipped_byte_is_noticed_or_harmless(saved: Path, rng: random.Random) -> None:
    """Never another error than ours, never a record in another place."""
    whole, intact = saved.read_bytes(), read_directory(saved)
    for _ in range(150):
        at = rng.randrange(len(whole))
        saved.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << rng.randrange(8))]) + whole[at + 1 :])
        try:
            found = read_directory(saved)
            places = {name: (m.byte_offset, m.nbytes) for name, m in found.members.items()}
            for name, item in intact.members.items():
                place = (item.byte_offset, item.nbytes)
                assert places.get(name, place) == place or (not item.nbytes and not places[name][1])
        except CheckpointError as error:
            assert str(saved) in str(error)  # noqa: PT017  # either outcome is right


def test_no_flipped_bit_of_the_directory_moves_a_record(tmp_path: Path) -> None:
    path = tmp_path / "small.pt"
    torch.save({"a": torch.ones(1)}, path)
    whole, intact = path.read_bytes(), read_directory(path)
    begin = whole.index(b"PK\1\2")
    for bit in range(8 * begin, 8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            found = read_directory(path).members
        except CheckpointError:
            continue
        for name, item in intact.members.items():
            place = (found[name].byte_offset, found[name].nbytes) if name in found else None
            assert place in (None, (item.byte_offset, item.nbytes)), (bit, name)


def test_damaged_bytes_are_noticed_when_read(saved: Path) -> None:
    place = read_directory(saved).members["data.pkl"].byte_offset
    data = bytearray(saved.read_bytes())
    data[place + 5] ^= 1
    saved.write_bytes(data)
    with pytest.raises(Corrupt, match=r"'data.pkl' is damaged: its CRC-32 is"):
        read_directory(saved).read("data.pkl")


def test_files_without_checksums_are_known_as_such(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.ones(3)}, path)
    finally:
        torch.serialization.set_crc32_options(True)
    directory = read_directory(path)
    assert not directory.checksummed
    assert directory.read("data.pkl")


def _legacy() -> bytes:
    buffer = io.BytesIO()
    torch.save({"a": torch.ones(3)}, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


def _zip(compression: int = zipfile.ZIP_STORED, **members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as zipped:
        for name, data in members.items():
            zipped.writestr(name.replace("__", "/").replace("_pkl", ".pkl"), data)
    return buffer.getvalue()


FOREIGN = {
    "empty": (b"", Incomplete, "is empty"),
    "cut off": (archive("x", {"data.pkl": b"N."})[0][:90], Incomplete, "cut off"),
    "git lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", Incomplete, "git lfs pull"),
    "legacy torch": (_legacy(), Unsupported, "torch before 1.6"),
    "old tar": (b"\0" * 257 + b"ustar" + b"\0" * 300, Unsupported, "torch before 1.6"),
    "zeros": (b"\0" * 4096, Corrupt, "not a file of torch.save"),
    "other zip": (_zip(a__arr_0=b"1"), Unsupported, "not one that torch.save wrote"),
    "compressed": (_zip(zipfile.ZIP_DEFLATED, a__data_pkl=b"1" * 99), Unsupported, "compressed"),
    "two roots": (_zip(a__data_pkl=b"1", b__version=b"3"), Unsupported, "not one that torch.save wrote"),
    "torchscript": (_zip(a__data_pkl=b"1", a__constants_pkl=b"1"), Unsupported, "TorchScript"),
    "big-endian": (archive("x", {"data.pkl": b"N.", "byteorder": b"big"})[0], Unsupported, "big-endian"),
    "more behind": (archive("x", {"data.pkl": b"N."})[0] + b"more", Corrupt, "foreign bytes"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_foreign_files_are_named_for_what_they_are(tmp_path: Path, case: str) -> None:
    data, kind, message = FOREIGN[case]
    path = tmp_path / "x.pt"
    path.write_bytes(data)
    with pytest.raises(kind, match=message) as raised:
        read_directory(path)
    assert str(path) in str(raised.value)
    assert type(raised.value) is kind


def test_a_member_listed_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as zipped:
        zipped.writestr("x/data.pkl", b"a")
        with pytest.warns(UserWarning, match="Duplicate name"):
            zipped.writestr("x/data.pkl", b"b")
    path.write_bytes(buffer.getvalue())
    with pytest.raises(Corrupt, match="twice"):
        read_directory(path)


def test_missing_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpoint, match="no such file"):
        read_directory(tmp_path / "none.pt")
    with pytest.raises(NotACheckpoint, match="is a folder"):
        read_directory(tmp_path)


def test_more_than_65535_members(tmp_path: Path) -> None:
    path = tmp_path / "many.pt"
    members = {"data.pkl": b"N."} | {
        f"data/{number}": b"" for number in range(LIMIT16)
    }  # and data.pkl: one too many for 16 bits
    path.write_bytes(archive("many", members)[0])
    with zipfile.ZipFile(path) as zipped:
        assert len(zipped.infolist()) == len(members)
    found: Directory = read_directory(path)
    assert len(found.members) == len(members)


def test_reading_a_directory_imports_no_torch() -> None:
    import subprocess

    program = (
        "import sys, mcore_rlhf.storage.torchzip, mcore_rlhf.storage.pt, mcore_rlhf.storage.pt, "
        "mcore_rlhf.storage.reading, mcore_rlhf.storage.publish; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
