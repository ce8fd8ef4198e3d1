"""Which mutators suit which file, and a case's draw from them."""

from __future__ import annotations

import random
from pathlib import Path

from mcore_rlhf.storage.manifest import CHECKSUM

from . import folders, headers, pickles, raw, texts, witnesses, zips
from .change import Change, Mutator

_TEXTS = (".json", ".txt", ".yaml", "")
_LARGE = 64 << 20
_SELDOM = {"latest": 0.2, "latest_universal": 0.2, ".txt": 0.2}
_TRACKERS = ("latest", "latest_universal", "latest_checkpointed_iteration.txt")
"""Frameworks write them anew with every step: no checksum is held against them."""
_MANIFESTS = ("manifest.json", "mcore_rlhf.json")


def mutate(folder: Path, rng: random.Random) -> list[Change]:
    """Change one file below a folder, sometimes two or three.

    Args:
        folder: A case's own, whose files may be links to originals.
        rng: Decides everything.

    Returns:
        What was done, in order.
    """
    done: list[Change] = []
    wanted = rng.choice((1, 1, 1, 1, 1, 2, 3))
    while len(done) < wanted:
        files = [path for path in sorted(folder.rglob("*")) if _is_small(path)]
        if not files:
            break
        change = _change_one(_pick(files, rng), folder, rng)
        if change is not None:
            done.append(change)
    return done


def _is_small(path: Path) -> bool:
    return path.is_file() and not path.is_symlink() and path.stat().st_size < _LARGE


def _pick(files: list[Path], rng: random.Random) -> Path:
    """Every kind of file alike, and then one of them: one index weighs as much as sixteen shards, trackers less."""
    kinds = sorted({_kind(path) for path in files})
    (kind,) = rng.choices(kinds, [_SELDOM.get(kind, 1.0) for kind in kinds])
    return rng.choice([path for path in files if _kind(path) == kind])


def _kind(path: Path) -> str:
    return path.suffix or path.name  # .metadata


def _change_one(path: Path, folder: Path, rng: random.Random) -> Change | None:
    before, name, beside = path.read_bytes(), path.relative_to(folder), set(path.parent.iterdir())
    try:
        change = rng.choice(suited(path, rng))(path, rng)
    except Exception:
        if _is_small(path) and path.read_bytes() == before:
            return None  # not what its name says, since an earlier change
        raise
    same = _is_small(path) and path.read_bytes() == before
    if change is None or (same and {*path.parent.iterdir()} == beside):
        return None
    listed = not same and path.parent.is_dir() and _manifest_says_otherwise(path, folder)
    return Change(f"{name}: {change.text}", change.checked, listed, name.as_posix(), change.witnessed)


def suited(path: Path, rng: random.Random) -> tuple[Mutator, ...]:
    """Mutators for a file: mostly those of its kind."""
    chance = rng.random()
    if chance < 0.15:
        return folders.MUTATORS
    if chance < 0.25:
        return raw.MUTATORS
    return _of_kind(path)


def _of_kind(path: Path) -> tuple[Mutator, ...]:
    if path.suffix == ".safetensors":
        return headers.MUTATORS
    if path.name == ".metadata":
        return pickles.MUTATORS
    if path.suffix in _TEXTS:
        return texts.MUTATORS
    if zips.is_zip(path):
        return (*zips.MUTATORS, *witnesses.MUTATORS)
    return raw.MUTATORS


def _manifest_says_otherwise(path: Path, folder: Path) -> bool:
    """Whether a manifest lists a changed file, or checks itself; it is taken for unchanged otherwise."""
    import json

    if path.name in _MANIFESTS:
        return _is_small(path) and f'"{CHECKSUM}":' in path.read_text(encoding="utf-8", errors="replace")[-60:]
    for above in path.parents:
        for name in _MANIFESTS:
            if _is_small(above / name):
                try:
                    listed = json.loads((above / name).read_bytes())["files"]
                except (ValueError, KeyError, TypeError, RecursionError):
                    return False
                return path.relative_to(above).as_posix() in listed and path.name not in _TRACKERS
        if above == folder:
            break
    return False
