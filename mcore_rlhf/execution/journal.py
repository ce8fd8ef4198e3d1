"""What was done of a conversion, written down beside the staging: whoever comes after a kill goes on from there.

A line is written once what it speaks of is on the disk: first the file's bytes, then the folder's entry, then the line. Each carries
its own checksum, so that a line that was torn, and everything behind it, counts as not written. The first line says of which plan the
journal is; lines of files say their length and CRC-32, and which bytes of the source were read for them with which CRC-32: whoever
goes on holds these against the source's own checksums as if it had read them itself.

The bytes of a finished file are not read again by whoever goes on: its length is looked at, and that nobody has touched it since the
last line. They were on the disk before the line was, the manifest lists their CRC-32, and ``--verify`` reads them all the same.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mcore_rlhf.storage import reading
from mcore_rlhf.storage.beneath import open_to_lock
from mcore_rlhf.storage.checksum import crc32
from mcore_rlhf.storage.destination import Publication
from mcore_rlhf.storage.manifest import PREFIX, FileEntry
from mcore_rlhf.storage.paths import storage_error
from mcore_rlhf.storage.publish import sync_folder
from mcore_rlhf.storage.store import StorePath
from mcore_rlhf.storage.upload import StorePublication
from mcore_rlhf.verify.audit import Spans

from .fingerprint import Fingerprint, digest

_VERSION = 1
_MAX_NBYTES = 4 << 30
_WHOLE = "whole-"
_SYNC_S = 0.2
"""Thousands of small files do not wait for the disk once more each."""


@dataclass(frozen=True, slots=True)
class Done:
    """What one task left behind.

    Args:
        entry: The file that it wrote; None where it compared.
        seen: The checksums of what it read, by file and record of the source.
        compared: A digest of what it compared, where it did.
    """

    entry: FileEntry | None = None
    seen: Spans = field(default_factory=dict)
    compared: str = ""

    def as_plain(self) -> dict[str, Any]:
        """As data for JSON."""
        found: dict[str, Any] = {} if self.entry is None else {"bytes": self.entry.nbytes, "crc32": self.entry.crc32}
        more = {"compared": self.compared} if self.compared else {}
        return {**found, **more, "seen": plain_spans(self.seen)}

    @classmethod
    def of_plain(cls, told: Mapping[str, Any]) -> Done:
        """From :meth:`as_plain`.

        Raises:
            ValueError, KeyError, TypeError: It is something else.
        """
        entry = FileEntry(int(told["bytes"]), int(told["crc32"])) if "bytes" in told else None
        return cls(entry, spans_of(told["seen"]), str(told.get("compared", "")))


def plain_spans(seen: Spans) -> list[list[Any]]:
    """Spans as data for JSON: file, record, and start, stop and CRC-32 of each in turn."""
    return [[file, key, *(number for span in spans for number in span)] for (file, key), spans in seen.items()]


def spans_of(told: list[list[Any]]) -> Spans:
    """From :func:`plain_spans`.

    Raises:
        ValueError, TypeError: It is something else.
    """
    found: Spans = {}
    for file, key, *numbers in told:
        columns = [iter(map(int, numbers))] * 3
        found[str(file), str(key)] = list(zip(*columns, strict=True))
    return found


class _Finished:
    """What is done, by the name of its task."""

    __slots__ = ()
    done: dict[str, Done]

    def __contains__(self, name: str) -> bool:
        return name in self.done

    @property
    def files(self) -> dict[str, FileEntry]:
        """The files that are done, by path."""
        return {name: done.entry for name, done in self.done.items() if done.entry is not None}


class Journal(_Finished):
    """The journal of one staging folder. For several threads.

    Args:
        path: The file; one that is there is read, and gone on with.
        fingerprint: Of the plan.
        durable: Whether lines, and what they speak of, are on the disk before anything else is done. A journal that was begun so
            stays so: whoever comes after a reboot believes all of it.

    Raises:
        StorageError: It cannot be written.
    """

    def __init__(self, path: Path, fingerprint: Fingerprint, *, durable: bool) -> None:
        self.path, self.durable = path, durable
        self.done: dict[str, Done] = {}
        self._lock, self._synced = threading.Lock(), 0.0
        header = {**_header(fingerprint), "durable": durable, "boot": _boot()}
        try:
            good = 0
            for end, line in _lines(path) if path.exists() else ():
                self.durable = self.durable or bool(line.get("durable"))
                self.done |= {str(name): Done.of_plain(told) for name, told in line.get("done", {}).items()}
                good = end
            self._fd = open_to_lock(path)
            os.ftruncate(self._fd, good)
            os.lseek(self._fd, 0, os.SEEK_END)
            if not good:
                self._write(header)
                sync_folder(path.parent) if durable else None
        except OSError as error:
            raise storage_error(error, path, "write") from error

    @property
    def left(self) -> str:
        """Where what is finished stays, for a message."""
        return f"beside the target, in {self.path.name.replace('.journal-', '.partial-')}"

    def retain(self, files: Collection[str]) -> None:
        """Forget files that are not there any more, or not as long as they should be: they are made again."""
        self.done = {name: done for name, done in self.done.items() if done.entry is None or name in files}

    def add(self, name: str, done: Done) -> None:
        """Note that a task is done, whose file is on the disk.

        Args:
            name: Of the task: the file's path, or what was compared.
            done: What it left.

        Raises:
            StorageError: It cannot be written.
        """
        with self._lock:
            self.done[name] = done
            try:
                self._write({"done": {name: done.as_plain()}})
            except OSError as error:
                raise storage_error(error, self.path, "write") from error

    def _write(self, line: Mapping[str, Any]) -> None:
        text = json.dumps(line, separators=(",", ":")).encode()
        data = memoryview(b"%08x %s\n" % (crc32(text), text))
        while data:
            data = data[os.write(self._fd, data) :]
        # A kill loses nothing, a reboot what is younger than that.
        if self.durable and time.monotonic() >= self._synced + _SYNC_S:
            os.fsync(self._fd)
            self._synced = time.monotonic()

    def close(self) -> None:
        """Let the file go."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@dataclass(slots=True)
class StoreJournal(_Finished):
    """The same, in an object store: a note a file, since nothing can be added to an object. For several threads.

    That a file is the one of which a note speaks is told by its version (ETag). Comparisons are not noted, and made again.

    Args:
        publication: Where the files go.
        number: Of the part that is done; 1 where all is one.
    """

    publication: StorePublication
    number: int = 1
    done: dict[str, Done] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    durable: bool = False

    @property
    def left(self) -> str:
        """See :attr:`Journal.left`."""
        return f"in the store, in {self.publication.target}/{self.publication.prefix}"

    def add(self, name: str, done: Done) -> None:
        """See :meth:`Journal.add`; only of a file a note is left."""
        self.done[name] = done
        if done.entry is not None:
            self.versions[name] = version = self.publication.version(name)
            told = {"name": name, "version": version, "done": done.as_plain()}
            self.publication.note(f"{self.number:04d}/{digest([name])[:16]}", json.dumps(told).encode())

    def read(self) -> bool:
        """Take over what a killed process has noted, as far as that is still there; whether there is any."""
        there = self.publication.versions()
        for data in self.publication.notes(f"{self.number:04d}"):
            with suppress(ValueError, KeyError, TypeError):  # a note that cannot be read is none
                told = reading.parse_json(data)
                done, name, version = Done.of_plain(told["done"]), str(told["name"]), str(told["version"])
                if done.entry is not None and there.get(name) == (done.entry.nbytes, version):
                    self.done[name], self.versions[name] = done, version
        return bool(self.done)

    def close(self) -> None:
        """Nothing is open."""


def open_journal(fingerprint: Fingerprint, publication: Publication, *, durable: bool) -> Journal | StoreJournal | None:
    """The journal of what is published, with what a killed process did; None where none is kept.

    Args:
        fingerprint: Of the plan.
        publication: It has begun.
        durable: See :class:`Journal`.

    Raises:
        StorageError: It cannot be read or written.
    """
    if isinstance(publication, StorePublication):
        publication.go_on(f"{_WHOLE}{fingerprint.key}-{digest([publication.before()])[:8]}")
        found = StoreJournal(publication)
        if found.read():
            publication.recovered.append(f"went on with what a process left that was killed, {found.left}")
        return found
    path = publication.resume(partial(why_not, fingerprint=fingerprint))
    if path is None:
        return None
    journal = Journal(path, fingerprint, durable=durable)
    try:
        journal.retain(publication.keep({name: entry.nbytes for name, entry in journal.files.items()}))
    except BaseException:
        journal.close()
        raise
    return journal


def conversions_left(target: StorePath) -> list[str]:
    """Where conversions that were killed have left finished files, and the same command goes on.

    Raises:
        CheckpointError: The store refuses.
    """
    noted = StorePublication(target).noted()
    return [f"{target}/{PREFIX}{name}" for name in sorted(noted) if name.startswith(_WHOLE)]


def why_not(path: Path, fingerprint: Fingerprint) -> str:
    """Why a journal is of no use for a plan; empty where it is.

    Args:
        path: The journal.
        fingerprint: Of the plan.
    """
    try:
        _, header = next(_lines(path), (0, {}))
    except OSError as error:
        return str(error.strerror)
    if header.get("journal") != _VERSION or not isinstance(header.get("fingerprint"), dict):
        return "its journal cannot be read"
    differs = fingerprint.differs(header["fingerprint"])
    if differs:
        return f"it is of {differs}"
    if not header.get("durable") and (header.get("boot") != _boot() or not _boot()):
        return "it was written with --no-fsync before this machine started"
    return ""


def _header(fingerprint: Fingerprint) -> dict[str, Any]:
    return {"journal": _VERSION, "fingerprint": asdict(fingerprint)}


def _boot() -> str:
    """What tells the machine's last start from the one before: what was not synced may be gone since."""
    try:
        return f"{os.uname().nodename} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
    except OSError:
        return ""


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The lines up to the first that is not whole: where each ends, and what it says."""
    end = 0
    for line in reading.read_bytes(path, _MAX_NBYTES).splitlines(keepends=True):
        crc, _, text = line.rstrip(b"\n").partition(b" ")
        try:
            if not line.endswith(b"\n") or int(crc, 16) != crc32(text):
                return
            told = reading.parse_json(text)
        except ValueError:
            return
        end += len(line)
        yield end, told
