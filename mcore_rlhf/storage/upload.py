"""Publishing in an object store, where nothing can be renamed: files under a prefix of their own, and a manifest that names it.

For a target ``ckpt`` a transaction uses keys that no other one ever uses:

* ``ckpt/.tx-<id>/…``      the files
* ``ckpt/.tx-<id>.writer`` says that somebody writes, and was how the store was asked whether it keeps conditions
* ``ckpt/.tx-<id>.parts/…`` small notes for processes that send together, or after one that was killed

One conditional put of the manifest publishes it: of two writers, one wins. A target without a manifest does not exist. What a dead
process left is removed by :func:`prune`, by the store's own clock; unfinished multipart uploads by a lifecycle rule of the bucket.

Source: obstore 0.12.1 (``put`` with ``mode``, ``open_writer``, ``copy``); Amazon S3's user guide: conditional writes (412, 409), 10,000
parts of 5 MiB to 5 GiB in a multipart upload.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import PurePosixPath
from types import TracebackType
from typing import Any

from ..errors import CheckpointError, StorageError, UsageError
from .checksum import crc32
from .destination import WENT_ON, Publication
from .manifest import PREFIX, FileEntry, Manifest
from .notes import Notes
from .objects import MANIFESTS, ObjectStore, StoreNotes, Tag
from .paths import ReadablePath, human, storage_error
from .publish import MANIFEST_NAME
from .reading import opened
from .record_file import Layout, RecordFile
from .settings import SCHEMES
from .store import StorePath
from .threads import Pool
from .transactions import new_transaction
from .uploaded import StagedFile, UploadedFile, at_a_time, part_nbytes

_PIECE_NBYTES = 1 << 20
_WHOLE = "whole-"
_REMOVED = b"removed "  # in place of a writer's name once its files go: nobody may count on them
DEAD_AFTER = timedelta(hours=24)
"""A prefix that no manifest names, and to which nothing was added for so long, is nobody's."""


def _never(_path: ReadablePath) -> bool:
    return False


def _mine() -> bytes:
    """What a marker says: who put it, and what no other put says, by which one is known whose answer was lost."""
    return f"{os.uname().nodename} {new_transaction()}".encode()


@dataclass(slots=True)
class StorePublication(Publication):
    """See :class:`Publication`; of an object store.

    Args:
        target: The folder to publish.
        overwrite: Whether an existing one may be replaced.
        replaceable: Says whether an existing folder is one that may be deleted.
        manifest_name: Name of the manifest in the folder.
        memory: Bytes that may be on their way, of one file.
        transaction: Its id.
        goes_on: Whether others may have begun this transaction: what they have sent is used, and never removed by who cannot begin.
        shared: What the prefix is called instead, see :meth:`go_on`.
    """

    target: StorePath
    overwrite: bool = False
    replaceable: Callable[[ReadablePath], bool] = _never
    manifest_name: str = MANIFEST_NAME
    memory: int = 64 << 20
    transaction: str = field(default_factory=new_transaction)
    goes_on: bool = False
    shared: str = ""
    recovered: list[str] = field(default_factory=list)
    _store: ObjectStore = field(init=False)
    _marker: Tag | None = None
    _tag: Tag | None = None
    _old: Manifest | None = None
    _settled: bool = True

    def __post_init__(self) -> None:
        self._store = object_store(self.target)
        if self.target.path == PurePosixPath():
            raise UsageError(f"{self.target}: is a whole bucket\nName a folder in it.")

    @property
    def prefix(self) -> str:
        """The folder in the target that the files lie in."""
        return f"{PREFIX}{self.shared or self.transaction}"

    def _key(self, name: str) -> str:
        return f"{self.target.path}/{name}"

    def __enter__(self) -> StorePublication:
        """See :meth:`Publication.__enter__`; asks the store whether it keeps conditions, before anything large is sent."""
        self.check_target()
        self._settled = False
        try:
            self._ask_for_conditions()
        except BaseException:
            if not self.goes_on:
                self._remove_own()
            self._settled = True
            raise
        return self

    def check_target(self) -> None:
        """Refuse a target that may not be replaced.

        Raises:
            StorageError: It may not.
        """
        found = self._store.read_whole(self._key(self.manifest_name))
        if found is not None:
            data, self._tag = found
            with suppress(CheckpointError):
                self._old = Manifest.from_json(data, f"{self.target}/{self.manifest_name}")
        elif not any(True for _ in self.target.iterdir()):
            return
        if not self.overwrite:
            raise StorageError(f"{self.target}: exists already.\nChoose another target, or give --overwrite.")
        if not self.replaceable(self.target):
            raise StorageError(
                f"{self.target}: exists and does not look like a checkpoint; not even --overwrite replaces it.\n"
                "Choose another target, or remove the folder yourself."
            )

    def _ask_for_conditions(self) -> None:
        key = f"{self._key(self.prefix)}.writer"
        if not self._store.put_if(key, _mine(), None):
            if not self.goes_on:
                raise StorageError(f"{self._store}{key}: is there already, though no two writers have the same name.")
            self._store.put(key, _mine())  # younger now: what the dead one sent is nobody's no more
        elif self._store.put_if(key, _mine(), None):
            raise StorageError(
                f"{self._store}: puts an object where one is, though it was asked not to (If-None-Match): of two writers both would "
                "believe that they published.\nUse a store with conditional puts: S3, Google Cloud Storage, Azure, MinIO, R2, Ceph "
                "from Squid on. Or write to a local folder, and copy it."
            )

    def go_on(self, name: str) -> None:
        """Send where a process with the same plan did, which was killed perhaps. Of two that send there at once one publishes.

        As long as nobody else comes there, what was sent is removed when this one fails.

        Args:
            name: What the prefix is called; it follows from the plan.

        Raises:
            StorageError: The store refuses.
        """
        self._store.remove([f"{self._key(self.prefix)}.writer"])
        self.shared, me = name, _mine()
        while True:
            key = f"{self._key(self.prefix)}.writer"
            self._marker = self._store.put_if(key, me, None)
            found = self._store.read_whole(key) if self._marker is None else None
            if found is not None and found[0].startswith(_REMOVED):
                self.shared += "-anew"
            elif self._marker is not None or (found is not None and self._store.put_if(key, me, found[1]) is not None):
                return  # whoever was there knows from now on that somebody came

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._settled:
            self._remove_own()

    def _remove_own(self) -> None:
        """What was sent, if nobody else counts on it; where the store refuses, or does not answer, it is :func:`prune`'s."""
        self._settled = True
        if self._store.requests.gave_up is not None:
            return
        with suppress(CheckpointError, OSError):
            own = self._key(self.prefix)
            if self.shared and (
                self._marker is None or not self._store.put_if(f"{own}.writer", _REMOVED + _mine(), self._marker)
            ):
                return
            self._store.remove([*keys(self._store, own), *keys(self._store, f"{own}.parts")])
            self._store.remove([f"{own}.writer"])

    def leave(self) -> None:
        """See :meth:`Publication.leave`."""
        self._settled = True

    def versions(self) -> dict[str, tuple[int, str]]:
        """See :meth:`Publication.versions`."""
        prefix = self._key(self.prefix)
        found = self._store.objects(prefix)
        return {item["path"][len(prefix) + 1 :]: (item["size"], item["e_tag"] or "") for item in found}

    def version(self, file: str) -> str:
        """See :meth:`Publication.version`."""
        return self._store.written(self._key(f"{self.prefix}/{file}"))[1]

    def before(self) -> str:
        """What tells what is at the target now from what was there at other times: its transaction; empty where nothing is."""
        found = self._store.read_whole(self._key(self.manifest_name))
        if found is None:
            return ""
        try:
            return Manifest.from_json(found[0], f"{self.target}/{self.manifest_name}").transaction
        except CheckpointError:  # damaged, and about to be replaced
            return f"{crc32(found[0]):08x}"

    @property
    def left(self) -> str:
        """See :attr:`Publication.left`."""
        return f"in the store, in {self.target}/{self.prefix}"

    @property
    def notes(self) -> StoreNotes:
        """What those say of it who send together, or were killed."""
        return StoreNotes(self._store, f"{self._key(self.prefix)}.parts")

    def since(self) -> str:
        """A word for what is at the target now: who replaces it meanwhile ends all that was begun before."""
        return f"{crc32(self.before().encode()):08x}"

    def resume(self, plan: str, why_not: Callable[[Notes], str]) -> Notes | None:
        """See :meth:`Publication.resume`; that the plan is the same is told by the name."""
        del why_not
        self.go_on(f"{_WHOLE}{plan}-{self.since()}")
        return self._gone_on(self.notes)

    def _gone_on(self, notes: StoreNotes) -> StoreNotes:
        if any(True for _ in notes.list()):
            self.recovered.append(f"went on in {self.target}/{self.prefix}{WENT_ON}")
        return notes

    def noted(self) -> set[str]:
        """The transactions at the target of which there are notes."""
        folders = {key[len(self._key("")) :].partition("/")[0] for key in keys(self._store, str(self.target.path))}
        mine = (name for name in folders if name.startswith(PREFIX) and name.endswith(".parts"))
        return {name.removeprefix(PREFIX).removesuffix(".parts") for name in mine}

    def check_space(self, nbytes: int) -> None:
        """A store has no end."""

    def _place(self) -> tuple[object, Collection[str]]:
        return self.target, (self.manifest_name, PREFIX)

    def _writer(self, file: str, layout: Layout) -> RecordFile:
        key = self._key(f"{self.prefix}/{file}")
        if layout.in_order:
            return UploadedFile(self._store, key, layout, self.memory)
        folder = self._store.settings.staging
        if folder is None:
            raise UsageError(
                f"{self._store}{key}: its front is known when its end is, and a store takes a file from its front\n"
                "Give it a local folder for such files: --staging FOLDER."
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise storage_error(error, folder, "create") from error
        return StagedFile(self._store, key, layout, self.memory, folder)

    def _again(
        self, file: str
    ) -> Iterator[memoryview]:  # asked of the store, so that what it has is what is vouched for
        with opened(StorePath(self._store, PurePosixPath(self._key(f"{self.prefix}/{file}")))) as data:
            yield from data.pieces(_PIECE_NBYTES)

    def commit(self, manifest: Manifest) -> StorePath:
        """See :meth:`Publication.commit`; the old one, where there is one, is removed afterwards."""
        there = {item["path"]: item["size"] for item in self._store.objects(str(self.target.path))}
        self._check_sent(manifest, there)
        if not self.overwrite:
            self._check_strangers(there)
        doomed = self._doomed(there) if self.overwrite else []
        whole = replace(manifest, transaction=self.transaction, prefix=self.prefix)
        self._tag = self._put_manifest(whole, self._tag)
        self._settled = True
        with suppress(CheckpointError, OSError):  # it is published: what cannot be removed now, `prune --dead` removes
            found = self._store.read_whole(self._key(self.manifest_name))
            gone = doomed if found is not None and self._is(found[0], whole) else []
            notes = keys(self._store, self.notes.root) if self.shared else []
            self._store.remove([*gone, *notes, f"{self._key(self.prefix)}.writer"])
        self._store.forget()
        if self._store.settings.plain:
            self._make_plain(whole)
        return self.target

    def _check_sent(self, manifest: Manifest, there: Mapping[str, int]) -> None:
        """All that the manifest will name must be there: rules of the bucket, and :func:`dead`, may take a slow writer for a dead one."""
        prefix = self._key(self.prefix)
        gone = [name for name, entry in manifest.files.items() if there.get(f"{prefix}/{name}") != entry.nbytes]
        if gone:
            raise StorageError(
                f"{self.target}: was not published: {len(gone)} of {len(manifest.files)} files that were sent are not there as they were, "
                f"such as {gone[0]}\nDid a lifecycle rule of the bucket, or prune --dead, remove {prefix}? Convert again."
            )

    def _check_strangers(self, there: Mapping[str, int]) -> None:
        """What appeared there since the beginning is somebody's; where it is a manifest, the conditional put says so."""
        marker, sending = str(self.target.path), f"{self._key('')}{PREFIX}"
        others = [key for key in there if not key.startswith(sending) and key.rstrip("/") != marker]
        if others and self._key(self.manifest_name) not in others:
            raise StorageError(
                f"{self.target}: something else was written there meanwhile: {self._store}{others[0]}\n"
                "It was left alone, and nothing of this one is there. Choose another target."
            )

    def _doomed(self, there: Iterable[str]) -> list[str]:
        """What the old one is made of: whatever lies there now, but the manifest and what other writers are sending."""
        own = f"{self._key('')}{PREFIX}"
        before = self._old.prefix if self._old is not None else ""
        old = f"{self._key(before)}/" if before and before != self.prefix else None
        return [
            key
            for key in there
            if key != self._key(self.manifest_name)
            and (not key.startswith(own) or (old is not None and key.startswith(old)))
        ]

    def _put_manifest(self, manifest: Manifest, tag: Tag | None) -> Tag:
        """Put it if what is there still has that tag; returns its own."""
        key, data = self._key(self.manifest_name), manifest.to_json().encode()
        try:
            put = self._store.put_if(key, data, tag)
        except CheckpointError as error:  # an answer can be lost: look, do not believe
            there = self._looked(manifest, error)
            if there is None:
                raise self._unpublished(error) from error
            return there
        if put is not None:
            return put
        raise StorageError(
            f"{self.target}: another writer has published there meanwhile; what it wrote was left alone, and nothing of this one is "
            "there.\nLook at it, then choose another target, or give --overwrite."
        )

    def _looked(self, manifest: Manifest, error: CheckpointError) -> Tag | None:
        """The tag of the manifest, if it is there in spite of an error."""
        self._settled = True  # what was put may be on its way still: the files must be there when it arrives
        self._store.requests.forgive(once=True)
        try:
            found = self._store.read_whole(self._key(self.manifest_name))
        except CheckpointError:
            raise self._unpublished(error, "it is not known whether it was published") from error
        return found[1] if found is not None and self._is(found[0], manifest) else None

    def _unpublished(self, error: CheckpointError, what: str = "was not published") -> StorageError:
        return StorageError(
            f"{self.target}: {what}.\n{error}\nWhat was sent stays, as the manifest may still arrive. Look again in a while: "
            f"mcore-rlhf inspect {self.target}; what is dead after a day goes with: mcore-rlhf prune --dead {self.target}"
        )

    def _is(self, text: bytes, manifest: Manifest) -> bool:
        """Whether a manifest that was read is one that this transaction put."""
        try:
            there = Manifest.from_json(text, str(self.target))
        except CheckpointError:
            return False
        return (there.transaction, there.prefix) == (manifest.transaction, manifest.prefix)

    def _make_plain(self, manifest: Manifest) -> None:
        """Give the files the names that other loaders look for. Until the manifest says so, they are not all there."""
        try:
            with Pool(self._store.settings.connections, "copy") as pool:
                list(pool.map(self._copy_plain, manifest.files.items()))
            self._put_manifest(replace(manifest, prefix=""), self._tag)
        except CheckpointError as error:
            raise StorageError(
                f"{self.target}: is published, and this program reads it; but not all files have their plain names, so that other "
                f"loaders must not read it.\n{error}\nConvert again with --overwrite --layout plain."
            ) from None  # no cause: it is published, and nobody goes on with it
        with suppress(CheckpointError, OSError):
            self._store.remove(keys(self._store, self._key(self.prefix)))
        self._store.forget()

    def _copy_plain(self, file: tuple[str, FileEntry]) -> None:
        name, entry = file
        part = part_nbytes(entry.nbytes)
        there = self._key(f"{self.prefix}/{name}")
        self._store.copy(there, self._key(name), part, at_a_time(self._store, part, self.memory))


def conversions_left(target: StorePath) -> list[str]:
    """Where conversions that were killed have left finished files, and the same command goes on.

    Raises:
        CheckpointError: The store refuses.
    """
    return [f"{target}/{PREFIX}{name}" for name in sorted(StorePublication(target).noted()) if name.startswith(_WHOLE)]


def object_store(path: StorePath) -> ObjectStore:
    """The store that a path is of, where it is one that can be written to.

    Raises:
        UsageError: It is none.
    """
    if not isinstance(path.store, ObjectStore):
        raise UsageError(f"{path}: can be read only\nWrite to a local folder, or to {', '.join(SCHEMES)}.")
    return path.store


def keys(store: ObjectStore, folder: str) -> list[str]:
    """All objects below a folder."""
    return [item["path"] for item in store.objects(folder)]


def remove(target: StorePath, manifest_name: str = MANIFEST_NAME) -> bool:
    """Delete a published folder: the manifest first, so that at no time half of it is there.

    Returns:
        Whether there was one.

    Raises:
        StorageError: The store refuses.
    """
    store = object_store(target)
    there = keys(store, str(target.path))
    if there:
        store.remove([f"{target.path}/{manifest_name}"])
        store.remove(there)
        store.forget()
    return bool(there)


@dataclass(frozen=True, slots=True)
class Dead:
    """What a writer that is no more has left.

    Args:
        path: The prefix.
        keys: All below it.
        nbytes: Their bytes.
    """

    path: str
    keys: Sequence[str]
    nbytes: int

    def __str__(self) -> str:
        return f"{self.path}: {human(self.nbytes)} that were never published"


def dead(root: StorePath, after: timedelta = DEAD_AFTER) -> Iterator[Dead]:
    """Prefixes below a folder that no manifest names, and to which nothing was added for a while, by the store's own clock.

    Args:
        root: A target, or a folder of targets.
        after: How long.

    Raises:
        StorageError: The store refuses.
    """
    store = object_store(root)
    found: dict[str, list[Any]] = {}
    folder = "" if root.path == PurePosixPath() else str(root.path)
    for item in store.objects(folder):
        parts = item["path"].split("/")
        at = next((number for number, part in enumerate(parts) if part.startswith(PREFIX)), None)
        if at is not None:
            name = parts[at].removesuffix(".writer").removesuffix(".parts")
            found.setdefault("/".join([*parts[:at], name]), []).append(item)
    if not found:
        return
    now = store.now(folder)
    for path, items in sorted(found.items()):
        if now - max(item["last_modified"] for item in items) < after:
            continue
        if _is_named(store, path):
            items = [item for item in items if not item["path"].startswith(f"{path}/")]
        if items:
            yield Dead(f"{store}{path}", [item["path"] for item in items], sum(item["size"] for item in items))


def _is_named(store: ObjectStore, prefix: str) -> bool:
    """Whether a manifest names a prefix; one that cannot be read may."""
    folder, _, name = prefix.rpartition("/")
    for manifest in MANIFESTS:
        found = store.read_whole(f"{folder}/{manifest}")
        if found is None:
            continue
        try:
            if Manifest.from_json(found[0], f"{store}{folder}/{manifest}").prefix == name:
                return True
        except CheckpointError as error:
            raise StorageError(
                f"{store}{folder}/{manifest}: cannot be read; what it names is not known.\n{error}"
            ) from error
    return False
