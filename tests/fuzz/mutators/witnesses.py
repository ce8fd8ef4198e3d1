"""Numbers that another place says, too: whoever looks sees which two do not agree, and none of these may be taken without a word."""

from __future__ import annotations

import random
import zipfile
from pathlib import Path

from . import pickles, zips
from .change import Change

_SAID_TWICE = (
    "_num_yielded",
    "_sampler_iter_yielded",
    "_snapshot_step",
    "base_lrs",
    "_last_lr",
    "world_size",
    "samples_yielded",
)
"""Keys of pickles. The loader's state counts what its sampler counts, the schedule has the groups' learning rates, degrees make ranks."""
_NEAR = 4
"""Opcodes between a key and its first number."""


def edit_number(path: Path, rng: random.Random) -> Change | None:
    """One of two numbers is another; the zip is sound."""
    with zipfile.ZipFile(path) as archive:
        (name,) = (info.filename for info in archive.infolist() if info.filename.endswith("data.pkl"))
        opcodes = pickles.parsed(archive.read(name))
    keys = [at for at, (_, text, _) in enumerate(opcodes) if text in _SAID_TWICE]
    if not keys:
        return None
    at = rng.choice(keys)
    for place in range(at + 1, min(at + _NEAR, len(opcodes))):
        kind, old, _ = opcodes[place]
        if kind in ("BININT1", "BININT2", "BININT"):
            new = int(str(old)) + rng.choice((1, 2))
            opcodes[place] = (kind, new, pickles.integer(new))
        elif kind == "BINFLOAT":
            new_float = float(str(old)) * 2 + 1
            opcodes[place] = (kind, new_float, pickles.real(new_float))
        else:
            continue
        zips.rebuild(path, {name.partition("/")[2]: b"".join(raw for _, _, raw in opcodes)})
        return Change(f"{opcodes[at][1]} becomes {opcodes[place][1]}, which was {old}", witnessed=True)
    return None


MUTATORS = (edit_number,)
