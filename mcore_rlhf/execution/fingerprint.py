"""What decides every byte of a conversion's output: two plans of one fingerprint may share what was done of either."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields

from mcore_rlhf import __version__
from mcore_rlhf.errors import StorageError
from mcore_rlhf.families.options import ConvertOptions
from mcore_rlhf.storage.checksum import crc32
from mcore_rlhf.storage.paths import ReadablePath, storage_error
from mcore_rlhf.storage.record_file import StoredFile
from mcore_rlhf.storage.store import StoreStat
from mcore_rlhf.storage.urls import checkpoint_path

_LISTED = "crc32 "


@dataclass(frozen=True, slots=True)
class PlanFingerprint:
    """What decides every byte, as digests; what differs can be named.

    Args:
        source: The files of the source: names, lengths, times or checksums.
        options: How the source is read, and what the target is to be.
        release: The version of this library.
        layouts: Every file of the target as it was planned: its length, what is known of its bytes, its copies.
    """

    source: str
    options: str
    layouts: str
    release: str = __version__

    @classmethod
    def joined(cls, several: Mapping[str, PlanFingerprint]) -> PlanFingerprint:
        """That of several models, by role, which are published together."""
        if set(several) == {""}:
            return several[""]
        columns = {place.name: [] for place in fields(cls)} | {"release": [__version__]}  # type: dict[str, list[str]]
        for role, one in sorted(several.items()):
            for name in ("source", "options", "layouts"):
                columns[name].append(f"{role} {getattr(one, name)}")
        digests = {name: digest(columns[name]) for name in ("source", "options", "layouts")}
        return cls(**digests)

    @property
    def key(self) -> str:
        """All of it, in one word that a file's name can hold."""
        return digest(asdict(self).values())[:16]

    def differs(self, other: PlanFingerprint) -> str:
        """In what another one is not the same; empty where it is."""
        words = {"source": "another source", "options": "other options", "release": "another release"}
        found = [word for name, word in words.items() if getattr(other, name) != getattr(self, name)]
        return ", ".join(found) or ("" if other == self else "another plan")


@dataclass(frozen=True, slots=True)
class Binding:
    """What a fingerprint of one model is made of, in full.

    Args:
        root: The source's folder.
        files: Its files, as :func:`identity` has them.
        options: See :class:`PlanFingerprint`.
        lines: What decides the bytes of the target, a line for each file, and for what is computed.
        computed: Whether values are computed on the way.
    """

    root: ReadablePath
    files: Mapping[str, str]
    options: str
    lines: Sequence[str]
    computed: bool = False

    def fingerprint(self) -> PlanFingerprint:
        """Its digests."""
        source = digest(f"{name} {facts}" for name, facts in sorted(self.files.items()))
        return PlanFingerprint(source, self.options, digest(self.lines))


def digest(texts: Iterable[str]) -> str:
    """SHA-256 of texts, each of which counts by itself."""
    whole = hashlib.sha256()
    for text in texts:
        data = text.encode("utf-8", "surrogateescape")
        whole.update(b"%d:" % len(data) + data)
    return whole.hexdigest()


def identity(root: ReadablePath, stored: Iterable[StoredFile], more: Iterable[ReadablePath] = ()) -> dict[str, str]:
    """What tells the files of a source from what they were before.

    A file whose checksum a manifest lists is told by that: it may lie elsewhere, and every byte is held against it. Others are told
    by their length and the times of their last change; of an object store, by what it calls the version.

    Args:
        root: The source's folder.
        stored: Its files.
        more: Files besides, that are taken over as they are.

    Raises:
        StorageError: One of them is not there any more.
    """
    found = {file.path: _listed(file) or _facts(root / file.path) for file in stored}
    return found | {str(path): _facts(path) for path in more}


def changed(root: ReadablePath, told: Mapping[str, str]) -> list[str]:
    """The files of a source that are not any more what :func:`identity` said of them, each with what is the case.

    One that a manifest's checksum tells is looked at for its length alone: whoever reads it holds it against the checksum.
    """
    found: list[str] = []
    for name, before in told.items():
        try:
            now = _facts(checkpoint_path(name) if "://" in name else root / name)
        except StorageError as error:
            found.append(str(error).partition("\n")[0])
            continue
        size, _, how = before.partition(" ")
        if now != before and not (how.startswith(_LISTED) and now.partition(" ")[0] == size):
            found.append(f"{name}: was {before}, and is {now}")
    return found


def _listed(file: StoredFile) -> str:
    return "" if file.whole is None else f"{file.nbytes} {_LISTED}{file.whole:08x}"


def _facts(path: ReadablePath) -> str:
    """Length and times; ``ctime``, which nobody can set back, tells a file that was written in place from one that was not."""
    try:
        facts = path.stat()
    except OSError as error:
        raise storage_error(error, path, "look at it") from error
    if isinstance(facts, StoreStat):
        return f"{facts.st_size} {facts.version}"
    there = os.stat(str(path))
    return f"{there.st_size} {there.st_mtime_ns} {there.st_ctime_ns}"


def told_texts(texts: Mapping[str, str | bytes]) -> Iterator[str]:
    """A target's small files, a line each."""
    for name, text in sorted(texts.items()):
        data = text.encode() if isinstance(text, str) else text
        yield f"{name} {len(data)} {crc32(data)}"


def of_options(options: ConvertOptions) -> str:
    """A digest of :func:`told_options`."""
    return digest([json.dumps(told_options(options), sort_keys=True)])


def told_options(options: ConvertOptions) -> dict[str, str]:
    """The options that decide the bytes, or what is compared: not how many workers there are, nor what is waited for."""
    told = {"to": options.to, "trust_replicas": repr(options.trust_replicas)}
    for section in (options.read, options.write):
        for place in fields(section):
            told[f"{type(section).__name__}.{place.name}"] = repr(getattr(section, place.name))
    return told
