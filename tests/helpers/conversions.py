"""Conversions of the goldens that several tests look at: each is made once per run."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from mcore_rlhf.convert import ConvertOptions, Job, convert
from mcore_rlhf.families.options import WriteOptions
from tests.helpers.independent_reader import Reading, read

GOLDENS = Path(__file__).parents[1] / "goldens" / "megatron"
NAMES = tuple(sorted(path.name for path in GOLDENS.iterdir()))


@cache
def golden(name: str) -> Reading:
    """A golden as the independent reader sees it."""
    return read(GOLDENS / name)


def options(**write: Any) -> ConvertOptions:
    """Options of a conversion in a test: nothing is waited for."""
    return ConvertOptions(fsync=False, write=WriteOptions(**write))


@dataclass
class Conversions:
    """Converted goldens below one folder."""

    folder: Path
    _made: dict[str, tuple[Path, Job]] = field(default_factory=dict)
    _read: dict[Path, Reading] = field(default_factory=dict)

    def of(self, source: Path, **write: Any) -> Path:
        """The root of a converted checkpoint."""
        return self.job(source, **write)[0]

    def job(self, source: Path, **write: Any) -> tuple[Path, Job]:
        """The root of a converted checkpoint, and the job that made it."""
        key = f"{source} {sorted(write.items())}"
        if key not in self._made:
            target = self.folder / str(len(self._made))
            self._made[key] = target, convert(source, target, options(**write))
        return self._made[key]

    def reading(self, root: Path) -> Reading:
        """What the independent reader sees in a converted checkpoint."""
        if root not in self._read:
            self._read[root] = read(root)
        return self._read[root]
