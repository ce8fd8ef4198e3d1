"""What a reader is told of a target that is not all there, or not where it belongs: neither that it is damaged, nor half of it. See
:mod:`.transactions`.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from ..errors import Unreadable
from .paths import ReadablePath

_ENTERING = re.compile(r"\..+\.entering-.+")
_ASIDE = re.compile(r"\.(?P<name>.+)\.old-[0-9]+-[0-9a-f]+")


def refuse_unfinished(target: ReadablePath) -> None:
    """Read nothing of what is only being put in its place, or lies aside.

    Raises:
        Unreadable: So it is.
    """
    if not isinstance(target, Path):
        return
    if os.path.ismount(target):
        entering = [target / name for name in _names(target) if _ENTERING.fullmatch(name) and _names(target / name)]
        if entering:
            raise Unreadable(
                f"{target}: is not all there: the rest lies in {entering[0].name}, and moving it up was interrupted\n"
                "The next conversion to it moves the rest up. Where one goes on, try again in a moment."
            )
    elif not os.path.lexists(target) and any(name.startswith(f".{target.name}.old-") for name in _names(target.parent)):
        raise replaced(target)


def replaced(target: ReadablePath) -> Unreadable:
    """What is to be said of a target that lies aside: it is whole, and nothing else may be taken for it."""
    return Unreadable(
        f"{target}: lies aside, as .{target.name}.old-…: its replacement was interrupted\n"
        "The next run, or conversion, that writes there puts it back, and so does mcore-rlhf prune in the root of a run. Then try again."
    )


def interrupted(folder: ReadablePath) -> str:
    """What is to be said of a folder in which one of them is all that is left of something; empty where none is."""
    there = _names(folder) if isinstance(folder, Path) else []
    gone = sorted(left["name"] for left in map(_ASIDE.fullmatch, there) if left and left["name"] not in there)
    return str(replaced(folder / gone[0])) if gone else ""


def _names(folder: Path) -> list[str]:
    with suppress(OSError):  # who may not look there hears what reading it says
        return os.listdir(folder)
    return []
