"""Saves of tags that are killed at every change of the file system, each in a fork of this process; the trainer writes a few files.

``python -m tests.crash.tag_kills FOLDER`` prints as JSON what lay there after each kill, before anything cleaned up and after.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

from mcore_rlhf.manager.tagged import TagOptions, Tags
from mcore_rlhf.storage.manifest import Manifest, check
from tests.crash.dcp_writer_kills import Killer, forked

OLD, NEW = "old", "new"
FILES = ("mp_rank_00_model_states.pt", "experts/layer_0.pt")
SCRIPT = "zero_to_fp32.py"


def save(root: Path, tag: str, text: str) -> None:
    """Save a tag, over what is there."""

    def write(staging: Path) -> None:
        for name in FILES:
            (staging / tag / name).parent.mkdir(parents=True, exist_ok=True)
            (staging / tag / name).write_text(text * 1000)
        (staging / SCRIPT).write_text("print()")

    Tags("deepspeed", TagOptions(fsync=False)).save(root, tag, write, step=1, latest="latest", beside=(SCRIPT,))


def there(root: Path) -> dict[str, str]:
    """What ``latest`` names, and what each tag holds; every tag is as its manifest says."""
    found = {"latest": (root / "latest").read_text()}
    for folder in sorted(root.iterdir()):
        if folder.is_dir() and not folder.name.startswith("."):
            manifest = Manifest.read(folder / "mcore_rlhf.json")
            assert not check(folder, manifest)
            lies = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
            assert lies == {*FILES, "mcore_rlhf.json"} == {*manifest.files, "mcore_rlhf.json"}
            (found[folder.name],) = {(folder / name).read_text()[:3] for name in FILES}
    return found


def killed(root: Path, at: int, again: bool) -> dict[str, object]:
    """Save a tag, then another or the same again, be killed at a change, look, open the root, and look."""

    def run() -> object:
        save(root, "a", OLD)
        killer = Killer(at)
        save(root, "a" if again else "b", NEW)
        return killer.count

    status, changes = forked(run)
    at_once = forked(lambda: there(root))
    for path in root.glob(".*.tmp-*"):
        os.utime(path, (0, 0))  # a minute passes
    forked(lambda: Tags("deepspeed", TagOptions(fsync=False)).check(root, None, "latest"))
    after = forked(lambda: there(root))
    left = sorted(path.name for path in root.iterdir() if path.name.startswith("."))
    return {
        "at": at,
        "again": again,
        "status": status,
        "changes": changes,
        "at_once": at_once,
        "after": after,
        "left": left,
    }


def main(folder: Path) -> list[dict[str, object]]:
    """Saves that are not killed, and one for each of their changes."""
    save(folder / "imported", "a", OLD)  # what is imported late is so once, not in every child
    there(folder / "imported")
    Tags("deepspeed", TagOptions(fsync=False)).check(folder / "imported", None, "latest")
    gc.freeze()
    found = []
    for again in (False, True):
        whole = killed(folder / f"whole-{again}", -1, again)
        ends = range(1, int(str(whole["changes"])) + 1)
        found += [whole, *(killed(folder / f"at-{again}-{at}", at, again) for at in ends)]
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
