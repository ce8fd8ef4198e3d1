"""Two checkpoints seen as lying in one folder, so that one plan can read from both."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from mcore_rlhf.core.catalog import Catalog, TensorEntry
from mcore_rlhf.core.names import TensorName
from mcore_rlhf.families.source import Source


@dataclass(frozen=True, slots=True)
class MovedView:
    """A catalogue whose files are named from a folder further up.

    Args:
        catalog: The source's.
        folder: What is put in front of every file's name, with a ``/`` at the end; may be empty.
    """

    catalog: Catalog
    folder: str

    def __iter__(self) -> Iterator[TensorName]:
        return iter(self.catalog)

    def __len__(self) -> int:
        return len(self.catalog)

    def get(self, name: TensorName, /) -> TensorEntry | None:
        """The entry of that name, or None."""
        entry = self.catalog.get(name)
        if entry is None or not self.folder:
            return entry
        chunks = (replace(c, record=replace(c.record, file=self.folder + c.record.file)) for c in entry.chunks)
        return replace(entry, chunks=tuple(chunks))


def side_by_side(a: Source, b: Source) -> tuple[Source, Source]:
    """Both with the folder that they have in common as their root.

    Args:
        a, b: Opened checkpoints, anywhere on this machine.
    """
    roots = [Path(os.path.abspath(source.root)) for source in (a, b)]
    common = Path(os.path.commonpath(roots))
    first, second = (_moved(source, common, root) for source, root in zip((a, b), roots, strict=True))
    return first, second


@dataclass(frozen=True, slots=True)
class BothView:
    """Two catalogues as one, for whoever looks at everything that is read; where both have a name, the first one's counts.

    Args:
        first, second: The catalogues.
    """

    first: Catalog
    second: Catalog

    def __iter__(self) -> Iterator[TensorName]:
        yield from self.first
        yield from (name for name in self.second if self.first.get(name) is None)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def get(self, name: TensorName, /) -> TensorEntry | None:
        """The entry of that name, or None."""
        return self.first.get(name) or self.second.get(name)


def _moved(source: Source, root: Path, old: Path) -> Source:
    below = old.relative_to(root).as_posix()
    folder = "" if below == "." else f"{below}/"
    files = tuple(replace(file, path=folder + file.path) for file in source.files)
    return replace(source, root=root, catalog=MovedView(source.catalog, folder), files=files)
