"""Notes keep the same promises wherever they lie."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_rlhf.storage.notes import FileNotes, FolderNotes, Notes


@pytest.fixture(params=["folder", "file"])
def notes(request: pytest.FixtureRequest, tmp_path: Path) -> Notes:
    return FolderNotes(tmp_path) if request.param == "folder" else FileNotes(tmp_path / "notes")


def test_what_is_put_is_there_and_what_is_put_once_stays(notes: Notes) -> None:
    assert notes.get("a") is None
    assert list(notes.list("*")) == []
    assert notes.put("a", b"1")
    assert notes.put("a", b"2 and more")
    assert not notes.put("a", b"3", once=True)
    assert notes.put("b", b"4", once=True)
    notes.close()
    assert notes.get("a") == b"2 and more"
    assert sorted(notes.list("*")) == ["a", "b"]
    assert list(notes.read("b*")) == [("b", b"4")]


def test_a_torn_note_and_all_behind_it_are_not_written(tmp_path: Path) -> None:
    notes = FileNotes(tmp_path / "notes")
    for name in ("note a", "note b", "note c"):
        notes.put(name.replace(" ", "-"), name.encode())
    notes.close()
    whole = notes.path.read_bytes()
    notes.path.write_bytes(whole.replace(b"note b", b"note x"))
    again = FileNotes(notes.path)
    assert list(again.list()) == ["note-a"]
    again.put("d", b"d")
    again.close()
    assert list(again.list()) == ["note-a", "d"]
    notes.path.write_bytes(whole[:-1])
    assert list(FileNotes(notes.path).list()) == ["note-a", "note-b"]
