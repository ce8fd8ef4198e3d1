"""What decides every byte of a conversion's output: two plans of one fingerprint may share what was done of either."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from mcore_rlhf import __version__
from mcore_rlhf.core.plan import FilePlan
from mcore_rlhf.families.options import ConvertOptions
from mcore_rlhf.families.source import StoredFile
from mcore_rlhf.storage.checksum import crc32
from mcore_rlhf.storage.paths import ReadablePath, storage_error
from mcore_rlhf.storage.store import StoreStat

if TYPE_CHECKING:
    from mcore_rlhf.core.computed import Computation
    from mcore_rlhf.storage.record_file import Layout


@dataclass(frozen=True, slots=True)
class Fingerprint:
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
    def joined(cls, several: Mapping[str, Fingerprint]) -> Fingerprint:
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

    def differs(self, other: Mapping[str, Any]) -> str:
        """In what another one, as plain data, is not the same; empty where it is."""
        words = {"source": "another source", "options": "other options", "release": "another release", "layouts": ""}
        mine = asdict(self)
        found = [words[name] for name in words if other.get(name) != mine[name] and words[name]]
        return ", ".join(found) or ("" if other == mine else "another plan")


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


def _listed(file: StoredFile) -> str:
    return "" if file.whole is None else f"{file.nbytes} crc32 {file.whole:08x}"


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


@dataclass(slots=True)
class Digests:
    """Collects the digest of a target as its files are planned, one after the other."""

    _whole: Any = field(default_factory=hashlib.sha256)

    def add(self, path: str, layout: Layout, plan: FilePlan) -> None:
        """A file of the target."""
        known = crc = 0
        for offset, data, key in layout.known:
            view = memoryview(data).cast("B")
            known, crc = known + len(view), crc32(view, crc32(f"{offset} {key};".encode(), crc))
        for copy in plan.copies:
            source, target = copy.source, copy.target
            text = (
                f"{source.file}:{source.byte_offset}:{copy.source_start}:{copy.source_strides}:{source.dtype}>"
                f"{target.key}:{copy.target_start}:{copy.target_strides}:{copy.shape}:{target.dtype};"
            )
            crc = crc32(text.encode("utf-8", "surrogateescape"), crc)
        self._whole.update(f"{path} {layout.nbytes} {known} {crc}\n".encode("utf-8", "surrogateescape"))

    def computed(self, computations: Mapping[str, Computation]) -> None:
        """What is computed on the way, with its numbers: copies say only where from."""
        for name in sorted(computations):
            self._whole.update(f"{name} {computations[name]!r}\n".encode("utf-8", "surrogateescape"))

    def text(self, texts: Mapping[str, str | bytes]) -> str:
        """The digest, with the target's small files."""
        for name, text in sorted(texts.items()):
            data = text.encode() if isinstance(text, str) else text
            self._whole.update(f"{name} {len(data)} {crc32(data)}\n".encode("utf-8", "surrogateescape"))
        return str(self._whole.hexdigest())


def of_options(options: ConvertOptions) -> str:
    """A digest of what options decide the bytes, or what is compared: not how many workers there are, nor what is waited for."""
    told = {"to": options.to, "trust_replicas": repr(options.trust_replicas)}
    for section in (options.read, options.write):
        for place in fields(section):
            told[f"{type(section).__name__}.{place.name}"] = repr(getattr(section, place.name))
    return digest([json.dumps(told, sort_keys=True)])
