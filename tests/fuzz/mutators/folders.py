"""Files as a whole: gone, empty, twice, in each other's place, or not what their name says."""

from __future__ import annotations

import os
import random
import shutil
import socket
from pathlib import Path

from .change import Change, rewrite

TOPS = ("source", "beside")
"""Folders of a case that keep their name: the command asks for them."""


def remove(path: Path, rng: random.Random) -> Change | None:
    """The file is gone."""
    path.unlink()
    return Change("removed")


def empty(path: Path, rng: random.Random) -> Change | None:
    """The file has no bytes."""
    rewrite(path, b"")
    return Change("emptied")


def swap(path: Path, rng: random.Random) -> Change | None:
    """Two files of a kind have each other's name."""
    others = _like(path)
    if not others:
        return None
    other = rng.choice(others)
    aside = path.with_name("aside")
    path.rename(aside)
    other.rename(path)
    aside.rename(other)
    return Change(f"swapped with {other.parent.name}/{other.name}")


def overwrite(path: Path, rng: random.Random) -> Change | None:
    """The file is a copy of another one."""
    others = _like(path)
    if not others:
        return None
    other = rng.choice(others)
    rewrite(path, other.read_bytes())
    return Change(f"a copy of {other.parent.name}/{other.name}")


def from_afar(path: Path, rng: random.Random) -> Change | None:
    """The file is one of the same name from another place: another rank's, role's or step's; sometimes as a hard link."""
    top = next((above for above in path.parents if above.name in TOPS), path.parent)
    others = [p for p in sorted(top.rglob(path.name)) if p.is_file() and not p.is_symlink() and p != path]
    if not others:
        return None
    other = rng.choice(others)
    if rng.random() < 0.5:
        rewrite(path, other.read_bytes())
    else:
        path.unlink()
        os.link(other, path)
    return Change(f"that of {other.parent.relative_to(top)}")


def loop(path: Path, rng: random.Random) -> Change | None:
    """Beside it a folder that is a link to one above, or two links to each other."""
    name = path.with_name(rng.choice(("global_step_8", "iter_0000008", "checkpoint-8", "step_8", "actor", "x")))
    if name.exists() or name.is_symlink():
        return None
    to = rng.choice((".", "..", f"{name.name}.too"))
    name.symlink_to(to)
    if to == f"{name.name}.too":
        name.with_name(to).symlink_to(name.name)
    return Change(f"beside it {name.name}, a link to {to}")


def duplicate(path: Path, rng: random.Random) -> Change | None:
    """Another file, with nearly the same name."""
    old = path.name
    name = rng.choice(
        (f"{old}.bak", f"copy_{old}", old.replace("0", "1"), old.replace("0", "00"), old.upper(), old.title())
    )
    if path.with_name(name).exists():
        return None
    shutil.copyfile(path, path.with_name(name))
    return Change(f"copied to {name}")


def folder_renamed(path: Path, rng: random.Random) -> Change | None:
    """The folder of the file has another name."""
    old = path.parent.name
    new = rng.choice(
        (old.replace("0", "1"), old + "0", old.replace("2", "9" * 20), old.replace("_", "-"), "x", f"{old} ")
    )
    if old in TOPS or path.parent.with_name(new).exists():
        return None
    path.parent.rename(path.parent.with_name(new))
    return Change(f"folder {old} is called {new!r}")


def folder_for_file(path: Path, rng: random.Random) -> Change | None:
    """A folder has the file's name."""
    path.unlink()
    path.mkdir()
    return Change("a folder in its place")


def pipe(path: Path, rng: random.Random) -> Change | None:
    """A pipe or a socket has the file's name: whoever opens it waits for ever."""
    path.unlink()
    if rng.random() < 0.7:
        os.mkfifo(path)
        return Change("a pipe in its place")
    with socket.socket(socket.AF_UNIX) as opened:
        here = os.open(path.parent, os.O_PATH)
        opened.bind(f"/proc/self/fd/{here}/{path.name}")  # a socket's own path may not be long
        os.close(here)
    return Change("a socket in its place")


def link(path: Path, rng: random.Random) -> Change | None:
    """The file is a link: to what never ends, to itself, to nothing, or to a true copy."""
    aside = path.with_name(f"{path.name}.aside")
    to = rng.choice(
        (
            "/dev/zero",
            "/dev/zero",
            "/dev/null",
            path.name,
            "nowhere",
            "/etc/hostname",
            "/proc/self/mem",
            "..",
            aside.name,
        )
    )
    path.rename(aside)
    if to != aside.name:
        aside.unlink()
    path.symlink_to(to)
    return Change(f"a link to {to}")


def sparse(path: Path, rng: random.Random) -> Change | None:
    """The file goes on for gigabytes, none of which are on the disk."""
    rewrite(path, path.read_bytes())
    os.truncate(path, rng.choice((1 << 32, 1 << 36, 1 << 40)))
    return Change("lengthened by gigabytes of nothing")


def odd_name(path: Path, rng: random.Random) -> Change | None:
    """A file or a folder beside it, with a name that no terminal likes."""
    name = rng.choice(
        (
            b"a\x1b[31mb",
            b"\xff\xfe",
            "\u202e".encode(),
            b"a\nb",
            b"-x",
            b"~",
            b"global_step_7",
            b"iter_0000009",
            b"latest",
        )
    )
    odd = path.with_name(os.fsdecode(name))
    if odd.exists():
        return None
    odd.mkdir() if rng.random() < 0.5 else shutil.copyfile(path, odd)
    return Change(f"beside it {name!r}")


def _like(path: Path) -> list[Path]:
    """Files with the same ending, near by."""
    near = path.parent if path.parent.name in TOPS else path.parent.parent
    return [p for p in sorted(near.rglob(f"*{path.suffix}")) if p.is_file() and p != path and p.suffix == path.suffix]


MUTATORS = (
    remove, empty, swap, overwrite, from_afar, duplicate, folder_renamed, folder_for_file, pipe, link, loop, sparse, odd_name,
)  # fmt: skip
