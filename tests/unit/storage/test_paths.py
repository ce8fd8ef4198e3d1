from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from mcore_rlhf.errors import NotACheckpoint, StorageError, Untrusted, UsageError
from mcore_rlhf.storage.paths import beneath, cannot_open, human, lies_in, local_path, storage_error


@pytest.mark.parametrize(
    "name",
    [
        "", ".", "..", "../x", "a/../../x", "/etc/passwd", "a/..", "a\0b", "..\\x", "a/", "a//b", "a/./b", "a\nb", "\x1b[2J", "a\x7f",
        "\ud800", "/".join("a" * 65), "a" * 256, "ä" * 128,
    ],
)  # fmt: skip
def test_names_that_are_no_canonical_path_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(Untrusted, match="not a plain path"):
        beneath(tmp_path, name)


@pytest.mark.parametrize("name", ["mp_rank_00/a..b.pt", ".metadata", "~", "ä" * 127, "/".join("a" * 64), "a b/…"])
def test_plain_names_are_joined(tmp_path: Path, name: str) -> None:
    assert beneath(tmp_path, name) == tmp_path / name


def test_a_tag_has_one_part(tmp_path: Path) -> None:
    with pytest.raises(Untrusted, match="2 parts"):
        beneath(tmp_path, "a/b", "tag", parts=1)


@pytest.mark.parametrize("url", ["s3://b/x", "gs://b", "hf://org/model", "abfs+ssl://c@a/x", "HTTPS://host/x"])
def test_a_url_is_no_path_not_even_once_it_was_made_one(url: str) -> None:
    for given in (url, Path(url)):
        with pytest.raises(UsageError, match="is a URL") as caught:
            local_path(given)
        assert str(caught.value).startswith(url.rstrip("/"))


@pytest.mark.parametrize("url", ["file:///data/a%20run", "file://localhost/data/a run", "file:/data/a run"])
def test_a_file_url_is_a_path(url: str) -> None:
    assert local_path(url) == Path("/data/a run")


@pytest.mark.parametrize("path", ["C:/run", "runs/a:b/c", "/data/s3:/run", "~/run", "step:3", "x"])
def test_what_is_no_url_stays_as_it_is(path: str) -> None:
    assert local_path(path) == Path(path)


def test_errors_of_the_file_system_say_what_helps(tmp_path: Path) -> None:
    full = storage_error(OSError(errno.ENOSPC, "x"), tmp_path, "write", "needs 3 GB, 1 GB are free")
    assert str(tmp_path) in str(full)
    assert "needs 3 GB" in str(full)
    assert "Free some space" in str(full)
    assert isinstance(cannot_open(FileNotFoundError(), tmp_path), NotACheckpoint)
    assert isinstance(cannot_open(IsADirectoryError(), tmp_path), NotACheckpoint)
    denied = cannot_open(PermissionError(errno.EACCES, "x"), tmp_path)
    assert isinstance(denied, StorageError)
    assert os.strerror(errno.EACCES) in str(denied)


def test_byte_counts_are_readable() -> None:
    assert [human(n) for n in (0, 999, 1000, 3_200_000_000, 5 * 10**15)] == [
        "0 bytes", "999 bytes", "1.0 kB", "3.2 GB", "5000.0 TB",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("mark", "there"),
    [
        ("optimizer.pt", False),
        ("*optimizer*", False),
        ("policy", True),
        ("pol*", True),
        ("a.pt", True),
        ("*.bin", False),
    ],
)
def test_under_the_name_of_a_file_a_folder_is_none(tmp_path: Path, mark: str, there: bool) -> None:
    (tmp_path / "optimizer.pt").mkdir()
    (tmp_path / "policy").mkdir()
    (tmp_path / "a.pt").touch()
    assert lies_in(tmp_path, mark) is there
