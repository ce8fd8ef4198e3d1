"""One folder that all ranks of a world write into: aside, read back for its checksums, published with a manifest by one rename.

A trainer's own code does the writing, and says nothing of what it wrote: whatever lies there when all ranks have returned is the folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from mcore_rlhf.errors import Incomplete, Problem
from mcore_rlhf.storage.manifest import FileEntry, Manifest, check, entry_of
from mcore_rlhf.storage.paths import refused, walk
from mcore_rlhf.storage.publish import LocalPublication

from .world import World

T = TypeVar("T")
Write = Callable[[Path], None]
"""Has the trainer write its files into a folder; called on every rank."""
GOES_AFTER = 30.0
"""Seconds that a rank waits whose trainer failed within a save, before it raises that: the others may wait for it, in a collective of the
trainer's own, which ends when this process does."""


def _nothing() -> None:
    """Nobody wants to know."""


@dataclass(frozen=True, slots=True)
class Together:
    """A folder of which every rank writes a part. All of it but :meth:`publish` is done on rank 0.

    Args:
        world: Who writes.
        target: Where the folder appears.
        begin: Checks the target, and begins.
        arrange: Puts what was written where it belongs, and refuses what nobody could load.
        manifest: Describes the folder, of which the files are given.
        written: Hears, on every rank, that all have written.
        patience: Seconds that a rank whose writing fails waits for the others: see :meth:`.World.on_all_ranks`.
    """

    world: World
    target: Path
    begin: Callable[[], LocalPublication]
    arrange: Callable[[Path], None]
    manifest: Callable[[Path, Mapping[str, FileEntry]], Manifest]
    written: Callable[[], None] = _nothing
    patience: float | None = None

    def publish(self, write: Write) -> int:
        """Have all ranks write, and publish what they wrote. Collective.

        Args:
            write: Called on every rank with the hidden folder.

        Returns:
            How many bytes it is.

        Raises:
            Exception: What was raised, on the rank that it was; a CheckpointError on all others. Nothing is published.
        """
        target, world = self.target, self.world
        with ExitStack() as ended:
            begin = partial(self._on_rank_0, partial(self._begun, ended))
            publication = world.on_all_ranks(f"beginning {target}", begin)
            staging = world.broadcast(None if publication is None else publication.staging)
            assert staging is not None
            world.on_all_ranks(f"writing {target}", partial(write, staging), self.patience)
            self.written()
            world.on_all_ranks(f"writing {target}", partial(self._on_rank_0, partial(self.arrange, staging)))
            listing = partial(self._on_rank_0, partial(_names, staging))
            names = world.broadcast(world.on_all_ranks(f"checking {target}", listing)) or []
            mine = world.share(names)
            entries = world.all_gather(world.on_all_ranks(f"checking {target}", partial(_entries, staging, mine)))
            files = {name: one for some in entries for name, one in some.items()}
            world.on_all_ranks(f"publishing {target}", partial(self._commit, publication, files))
        return sum(one.nbytes for one in files.values())

    def _begun(self, ended: ExitStack) -> LocalPublication:
        """It is ended in any case, also where another rank is lost before this one has heard that all have begun."""
        made = self.begin()
        ended.callback(made.__exit__, None, None, None)
        return made

    def _on_rank_0(self, action: Callable[[], T]) -> T | None:
        return action() if self.world.is_rank0 else None

    def _commit(self, publication: LocalPublication | None, files: Mapping[str, FileEntry]) -> None:
        if publication is not None:
            publication.commit(self.manifest(publication.staging, files))


def _names(staging: Path) -> list[str]:
    found = [
        path.relative_to(staging).as_posix()
        for folder, files in walk(staging, refused)
        for path in map(folder.joinpath, files)
    ]
    if links := [name for name in found if (staging / name).is_symlink()]:
        raise Incomplete(
            f"{staging}: {', '.join(links)}: is a link, and would not be the step's own file; nothing was published"
        )
    return found


def _entries(staging: Path, names: Iterable[str]) -> dict[str, FileEntry]:
    return {name: entry_of(staging / name) for name in names}


def damage_of_share(world: World, manifest: Path, sizes_only: bool) -> list[Problem]:
    """What is wrong with the files of a committed folder that this rank looks at; all ranks together look at all of them.

    Args:
        world: Who looks.
        manifest: The folder's, which lies in it.
        sizes_only: See :func:`~mcore_rlhf.storage.manifest.check`.

    Raises:
        CheckpointError: The manifest cannot be read.
    """
    said = Manifest.read(manifest)
    files = {name: said.files[name] for name in world.share(sorted(said.files))}
    return check(manifest.parent, replace(said, files=files), sizes_only=sizes_only).found


__all__ = ["Together", "Write", "damage_of_share"]
