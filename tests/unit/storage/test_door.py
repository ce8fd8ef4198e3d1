"""Nothing gets out of the folder that is written into, nothing of elsewhere gets in, and what is removed is all beneath."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mcore_rlhf.errors import Corrupt, Untrusted
from mcore_rlhf.storage import beneath, links, reading
from mcore_rlhf.storage.beneath import Beneath, append, remove_beneath, write_new
from mcore_rlhf.storage.destination import LocalFolder, TargetPaths
from mcore_rlhf.storage.manifest import FileEntry, Manifest
from mcore_rlhf.storage.publish import LocalPublication
from mcore_rlhf.storage.record_file import Raw
from mcore_rlhf.storage.transactions import Lock, TransactionPaths, joined, recover


@pytest.fixture(params=[True, False], ids=["openat2", "part by part"])
def _each_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beneath, "_has_openat2", request.param and beneath._has_openat2)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    found = tmp_path / "outside"
    found.mkdir()
    (found / "secret").write_text("secret")
    return found


@pytest.fixture
def root(tmp_path: Path, outside: Path) -> Path:
    found = tmp_path / "root"
    found.mkdir()
    (found / "out").symlink_to(outside)
    (found / "up").symlink_to("..")
    (found / "file").symlink_to(outside / "secret")
    return found


@pytest.mark.usefixtures("_each_way")
@pytest.mark.parametrize(
    "act",
    [
        lambda root: os.close(root.create("out/new")),
        lambda root: os.close(root.create("up/new")),
        lambda root: os.close(root.create("file")),
        lambda root: os.close(root.create("file/below")),
        lambda root: os.close(root.fill("file")),
        lambda root: os.close(root.fill("out/secret")),
        lambda root: root.make("out/folder"),
        lambda root: root.remove("out/secret"),
        lambda root: root.remove("up/outside"),
        lambda root: root.move("out/secret", "mine"),
        lambda root: root.link(root.root / "file", "mine"),
    ],
)
def test_no_link_is_followed(root: Path, outside: Path, act: Callable[[Beneath], None]) -> None:
    with Beneath(root) as folder, pytest.raises(OSError):  # noqa: PT011 - which one depends on the call
        act(folder)
    assert sorted(path.name for path in outside.iterdir()) == ["secret"]
    assert (outside / "secret").read_text() == "secret"
    assert sorted(path.name for path in root.parent.iterdir()) == ["outside", "root"]


@pytest.mark.usefixtures("_each_way")
def test_folders_are_made_on_the_way_and_found_again(root: Path) -> None:
    with Beneath(root) as folder:
        for name in ("a/b/c", "a/b/d", "e"):
            os.close(folder.create(name))
        folder.move("a/b/c", "e")
        with pytest.raises(FileExistsError):
            folder.create("a/b/d")
        assert folder.remove("a")
        assert not folder.remove("a")
    assert sorted(path.name for path in root.iterdir()) == ["e", "file", "out", "up"]


def test_a_tree_of_any_depth_goes_and_what_links_lead_to_stays(root: Path, outside: Path) -> None:
    (root / "deep").mkdir()
    fd = os.open(root / "deep", os.O_RDONLY)
    for _ in range(3_000):
        os.mkdir("d", dir_fd=fd)
        os.symlink(outside, "link", dir_fd=fd)
        below = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    assert remove_beneath(root, "deep")
    assert not os.path.lexists(root / "deep")
    assert (outside / "secret").read_text() == "secret"


def test_a_link_itself_can_be_removed(root: Path, outside: Path) -> None:
    assert remove_beneath(root, "out")
    assert (outside / "secret").exists()


@pytest.mark.parametrize("name", ["../x", "/x", "", "a//b"])
def test_no_name_leads_out(root: Path, name: str) -> None:
    with Beneath(root) as folder:
        for act in (folder.create, folder.make, folder.remove):
            with pytest.raises(Untrusted):
                act(name)
    with pytest.raises(Untrusted):
        LocalFolder(root).put(name, "x")


def test_small_files_are_written_through_no_link(root: Path, outside: Path) -> None:
    for act in (lambda: append(root / "file", b"x"), lambda: write_new(root / "file", b"x")):
        with pytest.raises(OSError):  # noqa: PT011 - which one depends on the call
            act()
    assert (outside / "secret").read_text() == "secret"


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (("a", "a"), "two files"),
        (("a", "a/b"), "a file and a folder"),
        (("a/b/c", "a/b"), "a file and a folder"),
        (("mcore_rlhf.json",), "kept for"),
        ((".tx-1/a",), "kept for"),
        (("a", "b//c"), "not a plain path"),
    ],
)
def test_two_names_are_two_files(names: tuple[str, ...], why: str) -> None:
    taken = TargetPaths("here", ("mcore_rlhf.json", ".tx-"))
    for name in names[:-1]:
        taken.add(name)
    with pytest.raises(Untrusted, match=why):
        taken.add(names[-1])


def test_names_that_differ_in_case_are_two_files(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    for name in ("a/x", "A/x", "b/x", "mcore_rlhf.json.txt"):
        folder.put(name, name)
    assert (tmp_path / "A/x").read_text() == "A/x"


def test_a_publication_writes_into_the_folder_that_it_made(tmp_path: Path, outside: Path) -> None:
    with LocalPublication(tmp_path / "out") as publication:
        publication.put("first", "1")
        publication.staging.rename(tmp_path / "elsewhere")
        publication.staging.symlink_to(outside)
        with publication.writer("second", Raw(head=b"2").layout("second")) as writer:
            writer.finish({})
    assert sorted(path.name for path in outside.iterdir()) == ["secret"]


def test_what_others_have_planted_is_not_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "out"
    places = TransactionPaths(target, "0000000000000-00000000")
    Lock(places.lock).let_go()
    places.staging.mkdir()
    (places.staging / "weights").write_text("theirs")
    places.journal.write_text("")
    parts = tmp_path / ".out.parts-00-of-1"
    parts.mkdir()
    (parts / "joined").write_text(places.transaction)
    assert places.resumable
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000)
    monkeypatch.setattr(beneath.tempfile, "TemporaryFile", _nothing_can_be_made)
    assert not places.resumable
    assert joined(target) == []
    assert recover(target) == []
    assert (places.staging / "weights").read_text() == "theirs"


def _nothing_can_be_made(**_: object) -> None:
    raise PermissionError


@pytest.mark.parametrize("name", ["staging", "journal"])
def test_a_link_in_place_of_what_was_left_is_not_gone_on_with(tmp_path: Path, outside: Path, name: str) -> None:
    places = TransactionPaths(tmp_path / "out", "0000000000000-00000000")
    places.staging.mkdir()
    places.journal.write_text("")
    assert places.resumable
    if name == "staging":
        places.staging.rmdir()
        places.staging.symlink_to(outside)
    else:
        places.journal.unlink()
        places.journal.symlink_to(outside / "secret")
    assert not places.resumable


def test_what_a_link_leads_out_to_is_not_read(root: Path, outside: Path) -> None:
    (root / "real").write_text("mine")
    (root / "near").symlink_to("real")
    links.enclose(root)
    assert reading.read_text(root / "near") == "mine"
    for name in ("file", "out/secret", "up/outside/secret"):
        with pytest.raises(Untrusted, match="--follow-links"):
            reading.read_text(root / name)
    links.enclose(root / "out")  # what is in a folder that was named is a stranger's still
    with pytest.raises(Untrusted):
        reading.read_text(root / "out/secret")
    links.enclose(root, follow=True)
    assert reading.read_text(root / "file") == "secret"
    assert links.followed(root) == {str(root / "file"): str(outside / "secret")}


def test_a_folder_that_is_named_by_a_link_is_read(tmp_path: Path, outside: Path) -> None:
    (tmp_path / "link").symlink_to(outside)
    links.enclose(tmp_path / "link")
    assert reading.read_text(tmp_path / "link/secret") == "secret"


def test_a_hub_cache_is_read(tmp_path: Path) -> None:
    model = tmp_path / "hub" / "models--org--name"
    snapshot, blobs = model / "snapshots" / "c0ffee", model / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "0123").write_text("weights")
    (tmp_path / "hub" / "token").write_text("secret")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    (snapshot / "token").symlink_to("../../../token")
    links.enclose(snapshot)
    assert reading.read_text(snapshot / "model.safetensors") == "weights"
    with pytest.raises(Untrusted):
        reading.read_text(snapshot / "token")
    blobs.rename(tmp_path / "hub/others")
    blobs.symlink_to("../others")  # of a cache that somebody has packed up and published
    with pytest.raises(Untrusted, match="--follow-links"):
        reading.read_text(snapshot / "model.safetensors")


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a//b", ""])
def test_a_manifest_names_canonical_paths_only(name: str) -> None:
    text = Manifest({name: FileEntry(1, 1)}).to_json()
    with pytest.raises(Untrusted):
        Manifest.from_json(text, "manifest.json")


def test_a_name_that_is_taken_stays_so(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    folder.put("a", "first")
    for _ in range(3):
        with pytest.raises(Untrusted, match="two files"):
            folder.put("a", "second")
    assert (tmp_path / "a").read_text() == "first"


def test_a_file_that_is_given_up_at_once_may_be_begun_anew(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    with pytest.raises(Corrupt):
        folder.put("a", "other", FileEntry(1, 0))
    folder.put("a", "first")
    assert (tmp_path / "a").read_text() == "first"
