"""An empty mount point as target: what lies beside it is on another disk, so everything happens inside it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_rlhf.errors import StorageError, Unreadable
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.storage.manifest import FileEntry, Manifest
from mcore_rlhf.storage.publish import MANIFEST_NAME, LocalPublication
from mcore_rlhf.storage.transactions import recover

MANIFEST = Manifest({"a": FileEntry(3, 0)})
FILES = ["a", "b", "sub"]


@pytest.fixture
def volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty disk of its own, as ``mkfs.ext4`` leaves it."""
    volume = tmp_path / "volume"
    (volume / "lost+found").mkdir(parents=True)
    is_mount = os.path.ismount
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == volume or is_mount(path))
    return volume


def publish(volume: Path, **options: bool) -> None:
    with LocalPublication(volume, **options) as publication:
        for name in FILES:
            if name == "sub":
                (publication.staging / name).mkdir()
                (publication.staging / name / "deep").write_text("deep")
            else:
                (publication.staging / name).write_text("abc")
        assert publication.staging.parent == volume
        publication.commit(MANIFEST)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_is_made_inside_and_nothing_beside(volume: Path) -> None:
    publish(volume)
    assert names(volume) == sorted([*FILES, MANIFEST_NAME, "lost+found"])
    assert (volume / "sub" / "deep").read_text() == "deep"
    assert names(volume.parent) == ["volume"]


@pytest.mark.parametrize("overwrite", [True, False])
def test_one_that_is_not_empty_is_refused(volume: Path, overwrite: bool) -> None:
    (volume / "thesis").write_text("x")
    with pytest.raises(StorageError, match="mount point that is not empty") as raised:
        publish(volume, overwrite=overwrite)
    assert str(volume / "checkpoint") in str(raised.value)
    assert names(volume) == ["lost+found", "thesis"]


@pytest.mark.parametrize("renames", range(len(FILES) + 2))
def test_after_an_error_the_target_is_as_before(volume: Path, monkeypatch: pytest.MonkeyPatch, renames: int) -> None:
    rename, done = os.rename, list[object]()

    def fails_once(source: str, target: str) -> None:
        done.append(source)
        if len(done) == renames + 1:
            raise OSError(errno.EIO, "the disk failed", str(source))
        rename(source, target)

    monkeypatch.setattr(os, "rename", fails_once)
    with pytest.raises(StorageError, match="cannot publish: Input/output error"):
        publish(volume)
    assert names(volume) == ["lost+found"]


def killed(volume: Path, renames: int) -> int:
    """Publish in a child that dies before the next rename after so many; its exit code."""
    child = os.fork()
    if not child:
        rename, done = os.rename, list[object]()

        def ends(source: str, target: str) -> None:
            if len(done) == renames:
                os._exit(9)
            done.append(source)
            rename(source, target)

        os.rename = ends  # type: ignore[assignment]
        publish(volume)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("renames", range(1, len(FILES) + 2))
def test_nobody_reads_what_is_half_moved_up(volume: Path, renames: int) -> None:
    """Neither as damaged nor as if it were all; and whoever converts there again hears that it is all there now."""
    killed(volume, renames)
    with pytest.raises(Unreadable, match=r"is not all there: the rest lies in \.volume\.entering-"):
        open_checkpoint(volume, ReadOptions())
    with pytest.raises(StorageError, match=r"(?s)mount point that is not empty.*moved the rest of .* into"):
        publish(volume)
    assert names(volume) == sorted([*FILES, MANIFEST_NAME, "lost+found"])


@pytest.mark.parametrize("renames", range(len(FILES) + 3))
def test_whoever_comes_after_a_kill_ends_it(volume: Path, renames: int) -> None:
    assert killed(volume, renames) == (0 if renames == len(FILES) + 2 else 9)
    # It has a manifest only when everything else is there.
    if (volume / MANIFEST_NAME).exists():
        assert names(volume / "sub") == ["deep"]
    recover(volume)
    begun = renames > 0  # from the first rename on it is complete, and is moved up
    assert names(volume) == sorted([*(FILES if begun else []), *([MANIFEST_NAME] if begun else []), "lost+found"])


def test_a_real_one(tmp_path: Path) -> None:
    """In a mount namespace of its own, so that nothing stays mounted."""
    program = (
        "import sys; from pathlib import Path; from tests.unit.storage.test_mount_point import publish, names\n"
        "volume = Path(sys.argv[1]); publish(volume); print(*names(volume), *names(volume.parent))"
    )
    script = 'mount -t tmpfs tmpfs "$1" && exec "$2" -c "$3" "$1"'
    (tmp_path / "volume").mkdir()
    done = subprocess.run(
        ["unshare", "--mount", "--map-root-user", "sh", "-c", script, "sh", str(tmp_path / "volume"), sys.executable, program],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    if done.returncode and "Traceback" not in done.stderr:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    assert done.stdout.split() == [*FILES[:2], MANIFEST_NAME, FILES[2], "volume"], done.stderr
