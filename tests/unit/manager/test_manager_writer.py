"""Files that several ranks fill: their checksums come from those of the pieces, and zip and torch agree with them."""

from __future__ import annotations

import os
import threading
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_rlhf.core.catalog import Record, dtype_of
from mcore_rlhf.engines.base import LiveFile, Segment
from mcore_rlhf.errors import CheckpointError, CoverageError, Incomplete, StorageError
from mcore_rlhf.manager.run import stream
from mcore_rlhf.manager.run.commit import Messages, Stopped
from mcore_rlhf.manager.run.staging import StepFile
from mcore_rlhf.manager.run.write import RankWriter, WrittenPiece, _record_crc, _with_zeros
from mcore_rlhf.storage.notes import FolderNotes
from mcore_rlhf.storage.pt import Pt
from mcore_rlhf.storage.stored import StoredTensor

NUMEL = 500


@st.composite
def cut(draw: st.DrawFn) -> tuple[bytes, list[tuple[int, int]]]:
    """Bytes with some pieces that are written, and zeros in between."""
    lengths = draw(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 60)), max_size=6))
    data, pieces = b"", []
    for gap, length in lengths:
        start = len(data) + gap
        data += bytes(gap) + draw(st.binary(min_size=length, max_size=length))
        pieces.append((start, length))
    return data + bytes(draw(st.integers(0, 40))), pieces


@given(cut(), st.randoms())
def test_the_crc_of_a_record_from_those_of_its_pieces(
    record: tuple[bytes, list[tuple[int, int]]], random: object
) -> None:
    data, cuts = record
    pieces = [WrittenPiece("r", at, length, zlib.crc32(data[at : at + length])) for at, length in cuts]
    random.shuffle(pieces)  # type: ignore[attr-defined]
    assert _record_crc("r", pieces, len(data)) == zlib.crc32(data)


@given(st.binary(max_size=50), st.integers(0, 5000))
def test_zeros(data: bytes, count: int) -> None:
    assert _with_zeros(zlib.crc32(data), count) == zlib.crc32(data + bytes(count))


def test_many_zeros() -> None:
    assert _with_zeros(zlib.crc32(b"x"), 3 << 20) == zlib.crc32(b"x" + bytes(3 << 20))


@pytest.mark.parametrize("pieces", [[(0, 8), (7, 3)], [(4, 4), (0, 5)], [(0, 8), (0, 8)], [(0, 11)], [(8, 1), (9, 2)]])
def test_pieces_that_overlap_or_lie_outside(pieces: list[tuple[int, int]]) -> None:
    made = [WrittenPiece("data/0", at, length, 0) for at, length in pieces]
    with pytest.raises(CoverageError, match="weights"):
        _record_crc("weights", made, 10)


def shared_file(rank: int, size: int, whole: torch.Tensor, gap: int = 0) -> StepFile:
    """This rank's share of a file with one vector; the last elements of each share are left out."""
    share = whole.numel() // size
    record = Record("v.pt", "data/0", dtype_of(whole.dtype), whole.numel(), 0)
    mine = whole[rank * share : (rank + 1) * share - gap]
    halves = (Segment("v", rank * share * 4, mine[:3]), Segment("v", rank * share * 4 + 12, mine[3:]))
    tree = Pt.of({"v": StoredTensor(record, 0, (whole.numel(),), (1,)), "n": 7}) if rank == 0 else None
    return StepFile("actor", LiveFile("v.pt", tuple(range(size)), halves, tree, {"v": "data/0"} if rank == 0 else {}))


def written(folder: Path, files: list[StepFile]) -> tuple[list[RankWriter], list[BaseException]]:
    """All ranks write at once."""
    (folder / ".parts").mkdir(parents=True)
    ranks = [
        RankWriter(folder, rank, Messages(FolderNotes(folder / ".parts"), 5.0), False) for rank in range(len(files))
    ]
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            ranks[rank].write([files[rank]])
        except CheckpointError as error:
            if not isinstance(error, Stopped):
                Messages(FolderNotes(folder / ".parts"), 5.0).fail(f"rank {rank}", error)
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(files))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return ranks, errors


@pytest.mark.parametrize(("size", "gap"), [(1, 0), (2, 0), (5, 0), (4, 2)])
def test_a_file_of_several_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, gap: int) -> None:
    monkeypatch.setattr(stream, "WINDOW_BYTES", 64)
    whole = torch.randn(NUMEL, generator=torch.Generator().manual_seed(size))
    ranks, errors = written(tmp_path, [shared_file(rank, size, whole, gap) for rank in range(size)])
    assert errors == []
    path = tmp_path / "actor" / "v.pt"
    assert set(ranks[0].written) == {"actor/v.pt"}
    assert all(not rank.written for rank in ranks[1:])
    entry = ranks[0].written["actor/v.pt"]
    assert (entry.nbytes, entry.crc32) == (path.stat().st_size, zlib.crc32(path.read_bytes()))
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    expected = whole.clone()
    for rank in range(size if gap else 0):
        expected[(rank + 1) * (NUMEL // size) - gap : (rank + 1) * (NUMEL // size)] = 0
    loaded = torch.load(path, weights_only=True)
    assert torch.equal(loaded["v"], expected)
    assert loaded["n"] == 7


def test_ranks_that_overlap(tmp_path: Path) -> None:
    whole = torch.zeros(NUMEL)
    files = [shared_file(0, 1, whole).live, shared_file(1, 2, whole).live]
    shares = [StepFile("actor", LiveFile("v.pt", (0, 1), f.segments, files[0].container, f.labels)) for f in files]
    _, errors = written(tmp_path, shares)
    assert any(isinstance(error, CoverageError) for error in errors)
    assert not (tmp_path / "actor" / "v.pt").exists(), "an unfinished file is removed"


def test_a_rank_that_never_contributes(tmp_path: Path) -> None:
    (tmp_path / ".parts").mkdir()
    alone = RankWriter(tmp_path, 0, Messages(FolderNotes(tmp_path / ".parts"), 0.1), False)
    with pytest.raises(Incomplete, match="rank 00001 did not deliver its part") as failure:
        alone.write([shared_file(0, 2, torch.zeros(NUMEL))])
    assert "within 0.1 s" in str(failure.value)
    assert not (tmp_path / "actor" / "v.pt").exists()


def test_a_folder_that_was_removed_is_not_made_again(tmp_path: Path) -> None:
    """A rank that is late must not leave files of a step that was given up."""
    gone = tmp_path / "gone"
    late = RankWriter(gone, 0, Messages(FolderNotes(gone / ".parts"), 0.1), False)
    with pytest.raises(StorageError):
        late.save_text("critic/latest.txt", "1")
    with pytest.raises(StorageError):
        late.save_pt("rng/rng_state.pt", {})
    assert not gone.exists()


def test_small_files(tmp_path: Path) -> None:
    one = RankWriter(tmp_path, 0, Messages(FolderNotes(tmp_path / ".parts"), 0.1), True)
    one.save_text("a/b/c.txt", "grüße\n")
    one.save_pt("rng/x.pt", {"t": torch.arange(5), "s": "x"})
    for name, entry in one.written.items():
        data = (tmp_path / name).read_bytes()
        assert (entry.nbytes, entry.crc32) == (len(data), zlib.crc32(data))
    assert (tmp_path / "a" / "b" / "c.txt").read_text(encoding="utf-8") == "grüße\n"
    assert torch.equal(torch.load(tmp_path / "rng" / "x.pt", weights_only=True)["t"], torch.arange(5))
    with pytest.raises(StorageError, match="File exists"):
        one.save_text("a/b/c.txt", "twice")


def test_everything_is_synced_before_it_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    (tmp_path / ".parts").mkdir()
    one = RankWriter(tmp_path, 0, Messages(FolderNotes(tmp_path / ".parts"), 0.1), True)
    one.write([shared_file(0, 1, torch.zeros(NUMEL))])
    one.save_text("t.txt", "x")
    assert synced == ["v.pt", "t.txt"]
