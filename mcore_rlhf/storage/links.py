"""Where links of a checkpoint may lead: inside the checkpoint, or into the blobs of the hub's cache that it lies in. Nowhere else.

Whoever publishes a checkpoint can put a link to any file of its reader's into it, and a conversion would carry that file along. So every
file that is opened below a folder that a user named must lie in it, whatever path led there; asked of the open file, not of its name.
People link roles to scratch disks, too: ``--follow-links`` says that this user knows.

Source: huggingface_hub 2.4.0, ``file_download.py``: ``models--ORG--NAME/snapshots/COMMIT/FILE`` is a link to ``../../blobs/HASH``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import Untrusted
from .paths import ReadablePath

_BLOBS, _SNAPSHOTS = "blobs", "snapshots"


@dataclass(slots=True)
class _Fence:
    """A folder that a user named.

    Args:
        root: It.
        follow: Whether links may lead out of it.
        followed: Where they did, by the path that was opened.
    """

    root: str
    follow: bool = False
    followed: dict[str, str] = field(default_factory=dict)

    def lets(self, real: str) -> bool:
        root = os.path.realpath(self.root)
        return any(real == allowed or real.startswith(f"{allowed}/") for allowed in (root, *_blobs(root)))


_FENCES: dict[str, _Fence] = {}
"""By absolute path. Of one in another, the outer one counts: a user has named it first, and what is in it is a stranger's."""


def enclose(root: ReadablePath, *, follow: bool | None = None) -> None:
    """Say that a user has named a folder, so that what is opened below it must lie in it.

    Args:
        root: The folder.
        follow: Whether links may lead out of it; None leaves it as it was said, and says no at first.
    """
    if not isinstance(root, Path):
        return  # a store has no links
    path = os.path.abspath(root)
    fence = _fence_of(path) or _FENCES.setdefault(path, _Fence(path))
    fence.follow = fence.follow if follow is None else follow


def followed(root: ReadablePath) -> Mapping[str, str]:
    """Where links of a folder have led out of it, since it was named: by path."""
    fence = _fence_of(os.path.abspath(root)) if isinstance(root, Path) else None
    below = f"{os.path.abspath(root)}/" if isinstance(root, Path) else ""
    return {} if fence is None else {path: real for path, real in fence.followed.items() if path.startswith(below)}


def require_inside(path: ReadablePath, fd: int = -1, *, beside: Path | None = None) -> None:
    """Refuse a file that a link out of the folder that the user named led to.

    Args:
        path: How it was found.
        fd: The file, open; without, it is asked of the path.
        beside: A folder with it that the user need not have named, as it holds more than what was: no link below it is followed then.

    Raises:
        Untrusted: It lies elsewhere.
    """
    if not isinstance(path, Path):
        return  # a store has no links
    named, real = os.path.abspath(path), _real(path, fd)
    if real == named:
        return
    fence = _fence_of(named)
    if (
        fence is None
        and beside is not None
        and real != os.path.realpath(beside) + named[len(os.path.abspath(beside)) :]
    ):
        raise Untrusted(
            f"{path}: a symbolic link beside what was named, to {real}\nName {beside} if that is yours too."
        )
    if fence is None or fence.lets(real):
        return
    if not fence.follow:
        raise Untrusted(
            f"{path}: a symbolic link leads out of {fence.root}, to {real}; followed with --follow-links, of a run with follow_links=True\n"
            "A checkpoint can so bring in any file of its reader's: know the link first."
        )
    fence.followed[named] = real


def _real(path: Path, fd: int) -> str:
    if fd >= 0:
        try:
            return os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            pass
    return os.path.realpath(path)


def _fence_of(path: str) -> _Fence | None:
    found, at = None, path
    while True:
        found = _FENCES.get(at, found)
        above = os.path.dirname(at)
        if above == at:
            return found
        at = above


def _blobs(root: str) -> list[str]:
    """The blobs of a hub's cache, of the model whose snapshot a folder is or lies in: the folder itself, and not what a link says is it."""
    parts = root.split("/")
    if _SNAPSHOTS not in parts:
        return []
    at = len(parts) - 1 - parts[::-1].index(_SNAPSHOTS)
    return ["/".join([*parts[:at], _BLOBS])] if parts[at - 1].startswith(("models--", "datasets--")) else []
