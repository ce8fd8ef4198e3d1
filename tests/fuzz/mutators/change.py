"""What a mutator says of itself, and odd values that all of them draw from."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Change:
    """One mutation.

    Args:
        text: What was done, for people.
        checked: Whether bytes were changed below a checksum of the file's own that still says the old ones.
        listed: Whether they contradict a manifest's.
        path: Of the changed file, in the case's folder.
        witnessed: Whether it was a number that the same file, or one beside it, says in another place.
    """

    text: str
    checked: bool = False
    listed: bool = False
    path: str = ""
    witnessed: bool = False


Mutator = Callable[[Path, random.Random], Change | None]
"""Changes a file in place of a fresh one; None where it has nothing to change."""

NUMBERS = (-(2**63), -(2**31), -1, 0, 1, 2, 3, 7, 127, 255, 2**16, 2**31 - 1, 2**31, 2**40, 2**53 + 1, 2**63 - 1, 2**64)
FLOATS = (0.0, -0.0, 0.5, -1.5, 1e-45, 1e308, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    "", " ", ".", "..", "../..", "/etc/passwd", "0", "-1", "1e9", "None", "null", "true", "NaN", "actor", "*",
    "model", "optimizer", "weight", "é", "𝟙", "torch.float32", "bf16", "a" * 5000, "a.b." * 400, "%s%n{0}", "~",
    "a\x1b[2Jb", "a\x00b", "a\rb", "\u202eabc\u2066", "\ud800", "a\nTraceback", "\x7f\x9b31m",
)  # fmt: skip


def odd_text(rng: random.Random, near: str = "") -> str:
    """A text that nobody expects, or nearly the one that is there."""
    if near and rng.random() < 0.5:
        at = rng.randrange(len(near))
        return rng.choice((near[:at], near[at:], near + near[-1], near[:at] + near[at + 1 :], near.upper(), near + "/"))
    return rng.choice(TEXTS)


def rewrite(path: Path, data: bytes) -> None:
    """New content under the same name; files are links to the originals, which must stay as they are."""
    path.unlink()
    path.write_bytes(data)
