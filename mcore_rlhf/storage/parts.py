"""What several processes make for one target, on as many hosts, each a part of it; one of them joins all parts.

For a target ``out``, whose plan is called so, and of which there are ``N`` parts:

* ``.out.parts-<plan>-of-<N>/part-0003/``         what part 3 wrote, and ``part.json``, its ledger: lengths, CRCs, and what it read of
  the source. It is published as every folder is, by one rename: tried twice, even at once, it is there once.

In an object store nothing can be renamed or linked, and no byte should move twice. So all parts send into the one transaction ``T`` that
is published in the end, each file under the key that it will have; its name follows from the plan and from what is at the target
now, so that hosts need not talk:

* ``out/.tx-T/…``                          the files
* ``out/.tx-T.parts/part-0003/…``          what part 3 has finished; whoever comes after a kill goes on from there
* ``out/.tx-T.parts/part-0003/part.json``  its ledger, put once: of two attempts the first counts

In both, ``joined`` beside the ledgers names the transaction that joins them, from before it publishes: whoever comes after a kill knows
that all is done.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType

from ..errors import CheckpointError, StorageError
from .destination import Destination, LocalFolder, Publication
from .manifest import Manifest
from .notes import FolderNotes, Notes
from .objects import StoreNotes
from .paths import ReadablePath
from .publish import LocalPublication
from .store import StorePath
from .transactions import JOINED, joined, place_of, recover, remove_joined
from .upload import StorePublication

LEDGER = "part.json"


@dataclass
class Parts(ABC):
    """All parts of one plan for one target.

    Args:
        whole: What publishes the target; not begun.
        plan: What tells the plan from all others.
        count: How many parts there are.
        since: What was at the target when they were begun, where that matters.
    """

    whole: LocalPublication | StorePublication
    plan: str
    count: int
    since: str = ""

    @property
    @abstractmethod
    def notes(self) -> FolderNotes | StoreNotes:
        """Their ledgers, and who joins them."""

    @property
    @abstractmethod
    def joining(self) -> LocalPublication | StorePublication:
        """What publishes the target of them."""

    @abstractmethod
    def place(self, number: int) -> ReadablePath:
        """The folder that a part's files lie in."""

    @abstractmethod
    def files(self, number: int) -> Destination:
        """What a part wrote, to be looked at."""

    @abstractmethod
    def versions(self, number: int) -> Mapping[str, tuple[int, str]]:
        """Its length and version, by path."""

    @abstractmethod
    def begin(self, number: int, *, anew: bool) -> Publication:
        """What publishes one part; its manifest is the ledger. With ``anew`` nothing is gone on with that a killed process left."""

    @abstractmethod
    def is_joined(self) -> bool:
        """Whether the target was published of them, by a process that died before it could remove them."""

    @abstractmethod
    def take(self, number: int, file: str) -> None:
        """Let the target have a file of a part."""

    @abstractmethod
    def remove(self) -> None:
        """Remove all of them, which were joined."""


def part_of(number: int | str) -> str:
    """What a part is called, or all of them (``*``)."""
    return f"part-{number:04d}" if isinstance(number, int) else f"part-{number}"


class _InFolder(Parts):
    whole: LocalPublication

    def __str__(self) -> str:
        return str(self.folder)

    @property
    def folder(self) -> Path:
        return place_of(self.whole.target) / f".{self.whole.target.name}.parts-{self.plan}-of-{self.count}"

    @property
    def notes(self) -> FolderNotes:
        return FolderNotes(self.folder)

    @property
    def joining(self) -> LocalPublication:
        return self.whole

    def place(self, number: int) -> Path:
        return self.folder / part_of(number)

    def files(self, number: int) -> LocalFolder:
        return LocalFolder(self.place(number))

    def versions(self, number: int) -> Mapping[str, tuple[int, str]]:
        return self.files(number).versions()

    def begin(self, number: int, *, anew: bool) -> LocalPublication:
        if anew:
            recover(self.place(number), LEDGER)
        return LocalPublication(self.place(number), True, self.whole.fsync, _has_no_ledger, LEDGER, resumable=True)

    def is_joined(self) -> bool:
        return self.folder in joined(
            self.whole.target, self.whole.manifest_name
        )  # a note of another user may be a trap

    def take(self, number: int, file: str) -> None:
        self.whole.take(self.place(number) / file, file)

    def remove(self) -> None:
        remove_joined(self.folder)
        recover(self.whole.target, self.whole.manifest_name, resumable=False)  # what else that process left


def _has_no_ledger(folder: Path) -> bool:
    """Whether it is no part any more, and may be replaced by one."""
    return not (folder / LEDGER).exists()


class _InStore(Parts):
    whole: StorePublication

    def __str__(self) -> str:
        return str(self.place(0))

    @cached_property
    def joining(self) -> StorePublication:
        return self._shared("")

    def _shared(self, part: str) -> _Sent:
        one, transaction = self.whole, f"parts-{self.plan}-of-{self.count}-{self.since}"
        return _Sent(
            one.target, one.overwrite, one.replaceable, one.manifest_name, one.memory, transaction, True, part=part
        )

    @property
    def notes(self) -> StoreNotes:
        return self.joining.notes

    def place(self, number: int) -> StorePath:
        del number  # all lie in one folder
        return self.whole.target / self.joining.prefix

    def files(self, number: int) -> StorePublication:
        del number
        return self.joining

    @cached_property
    def _versions(self) -> Mapping[str, tuple[int, str]]:
        return self.joining.versions()

    def versions(self, number: int) -> Mapping[str, tuple[int, str]]:
        del number
        return self._versions

    def begin(self, number: int, *, anew: bool) -> StorePublication:
        if anew:
            self.notes.remove(f"{part_of(number)}/*")
        return self._shared(part_of(number))

    def is_joined(self) -> bool:
        return self.notes.get(JOINED) == self.whole.before().encode() != b""

    def take(self, number: int, file: str) -> None:
        """It is where it should be."""

    def remove(self) -> None:
        with suppress(CheckpointError, OSError):  # what cannot be removed now, `prune --dead` removes
            self.notes.remove("*")
            self.notes.store.remove([f"{self.notes.root.removesuffix('.parts')}.writer"])


@dataclass(slots=True)
class _Sent(StorePublication):
    """What others send into as well: nothing of it is removed by one that fails. Of one part, the ledger is all that is published."""

    part: str = ""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def resume(self, plan: str, why_not: object) -> Notes | None:
        del plan, why_not
        return self._gone_on(StoreNotes(self.notes.store, f"{self.notes.root}/{self.part}"))

    def commit(self, manifest: Manifest) -> StorePath:
        if not self.part:
            return StorePublication.commit(self, manifest)
        if not self.notes.put(f"{self.part}/{LEDGER}", manifest.to_json().encode(), once=True):
            raise StorageError(f"{self.notes}/{self.part}: another process has done it meanwhile")
        return self.target


def parts_of(publication: LocalPublication | StorePublication, plan: str, count: int) -> Parts:
    """The parts of a plan for what is at the target of a publication now; see :class:`Parts`."""
    if isinstance(publication, LocalPublication):
        return _InFolder(publication, plan, count)
    return _InStore(publication, plan, count, publication.since())


def parts_there(publication: LocalPublication | StorePublication) -> list[Parts]:
    """All that lie at the target of a publication, of whatever plan, in order of their names."""
    kind: type[Parts]
    if isinstance(publication, LocalPublication):
        kind, name = _InFolder, publication.target.name
        names, before = (path.name for path in place_of(publication.target).glob(".*")), rf"\.{re.escape(name)}\."
    else:
        kind, names, before = _InStore, (name for name in publication.noted()), ""
    pattern = re.compile(rf"{before}parts-([0-9a-f]+)-of-(\d+)(?:-([0-9a-f]+))?")
    found = (match for name in sorted(names) if (match := pattern.fullmatch(name)))
    return [kind(publication, match[1], int(match[2]), match[3] or "") for match in found]
