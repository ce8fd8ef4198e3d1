"""What was done of a conversion, noted beside what is written: whoever comes after a kill goes on from there.

A note is left once what it speaks of is there: on a disk, first the file's bytes, then the folder's entry, then the note. The first
says of which plan they are; those of files say their length and CRC-32, and which bytes of the source were read for them with which
CRC-32: whoever goes on holds these against the source's own checksums as if it had read them itself.

The bytes of a finished file are not read again by whoever goes on: its length is looked at, and its version, which tells that nobody has
touched it. They were there before the note was, the manifest lists their CRC-32, and ``--verify`` reads them all the same.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from mcore_rlhf.errors import CheckpointError, StorageError
from mcore_rlhf.storage.destination import Publication
from mcore_rlhf.storage.manifest import FileEntry
from mcore_rlhf.storage.notes import Notes
from mcore_rlhf.storage.records import parsed
from mcore_rlhf.verify.audit import Spans

from .fingerprint import PlanFingerprint, digest

_VERSION = 3
_PLAN = "plan"


@dataclass(frozen=True, slots=True)
class Done:
    """What one task left behind.

    Args:
        entry: The file that it wrote; None where it compared.
        version: What tells that file from what is put in its place; see :meth:`~mcore_rlhf.storage.destination.Destination.version`.
        seen: The checksums of what it read, by file and record of the source.
        compared: A digest of what it compared, where it did.
    """

    entry: FileEntry | None = None
    version: str = ""
    seen: Spans = field(default_factory=dict)
    compared: str = ""


@dataclass(frozen=True, slots=True)
class Begun:
    """The first note: of which plan the others are.

    Args:
        journal: The version of such notes.
        fingerprint: Of the plan.
        durable: Whether what is noted is on the disk.
        boot: The machine's start; see :func:`_boot`.
    """

    journal: int
    fingerprint: PlanFingerprint
    durable: bool
    boot: str


@dataclass(frozen=True, slots=True)
class _Note:
    name: str
    done: Done


@dataclass(slots=True)
class Finished:
    """What is done, by the name of its task. For several threads.

    Args:
        done: What was done before.
        durable: Whether what is done is on the disk before it is said.
    """

    done: dict[str, Done] = field(default_factory=dict)
    durable: bool = False

    def __contains__(self, name: str) -> bool:
        return name in self.done

    @property
    def files(self) -> dict[str, FileEntry]:
        """The files that are done, by path."""
        return {name: done.entry for name, done in self.done.items() if done.entry is not None}

    def add(self, name: str, done: Done) -> None:
        """Hear that a task is done, whose file is there.

        Args:
            name: Of the task: the file's path, or what was compared.
            done: What it left.

        Raises:
            StorageError: It cannot be noted.
        """
        self.done[name] = done


@dataclass(slots=True)
class Journal(Finished):
    """The same, noted for whoever comes after a kill; what is noted already, and is still there as it was, is gone on with.

    One that was begun durable stays so: whoever comes after a reboot believes all of it.

    Args:
        notes: Where.
        fingerprint: Of the plan.
        publication: Of the files.

    Raises:
        StorageError: The notes cannot be read or written.
    """

    notes: Notes = field(kw_only=True)
    fingerprint: PlanFingerprint = field(kw_only=True)
    publication: Publication = field(kw_only=True)

    def __post_init__(self) -> None:
        begun = False
        for name, data in self.notes.read():
            with suppress(CheckpointError):  # a note that cannot be read is none
                if name == _PLAN:
                    durable = parsed(Begun, data, _PLAN, sparse=True).durable
                    begun, self.notes.durable = True, self.notes.durable or durable
                else:
                    note = parsed(_Note, data, name, sparse=True)
                    self.done[note.name] = note.done
        self.durable = self.notes.durable
        kept = self.publication.keep({name: (one.nbytes, self.done[name].version) for name, one in self.files.items()})
        self.done = {name: done for name, done in self.done.items() if done.entry is None or name in kept}
        if not begun:
            self.notes.say(_PLAN, Begun(_VERSION, self.fingerprint, self.durable, _boot()))

    def add(self, name: str, done: Done) -> None:
        """See :meth:`Finished.add`."""
        if done.entry is not None:
            done = replace(done, version=self.publication.version(name))
        self.done[name] = done
        self.notes.say(digest([name])[:16], _Note(name, done))


def open_journal(fingerprint: PlanFingerprint, publication: Publication) -> Journal | None:
    """The journal of what is published, with what a killed process did; None where none is kept.

    Args:
        fingerprint: Of the plan.
        publication: It has begun.

    Raises:
        StorageError: It cannot be read or written.
    """
    notes = publication.resume(fingerprint.key, partial(why_not, fingerprint=fingerprint))
    if notes is None:
        return None
    try:
        return Journal(notes=notes, fingerprint=fingerprint, publication=publication)
    except BaseException:
        notes.close()
        raise


def why_not(notes: Notes, fingerprint: PlanFingerprint) -> str:
    """Why a journal is of no use for a plan; empty where it is.

    Args:
        notes: The journal.
        fingerprint: Of the plan.
    """
    try:
        begun = notes.said(Begun, _PLAN)
    except StorageError as error:
        return str(error)
    except CheckpointError:
        begun = None
    if begun is None or begun.journal != _VERSION:
        return "its journal cannot be read"
    differs = fingerprint.differs(begun.fingerprint)
    if differs:
        return f"it is of {differs}"
    if not begun.durable and (begun.boot != _boot() or not _boot()):
        return "it was written with --no-fsync before this machine started"
    return ""


def _boot() -> str:
    """What tells the machine's last start from the one before: what was not synced may be gone since."""
    try:
        return f"{os.uname().nodename} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
    except OSError:
        return ""
