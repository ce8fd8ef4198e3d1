"""Checkpoints in object stores, read by ranges: S3, Google Cloud Storage, Azure, and what speaks the same protocols.

The requests are obstore's (Rust's object_store): signed, one connection pool for all threads; for how long they are made again says
:mod:`.requests`. What stands here is what a checkpoint's reader knows and it does not: a folder is listed once; a file's two ends are
fetched once and kept; an object that changes while it is read is an error, never a mixture of two; and what :mod:`.upload`
published lies below the prefix that its manifest names, which no reader notices.

Source: obstore 0.12.1 (https://developmentseed.org/obstore); object_store's ``GetOptions`` for ranges and ``If-Match``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from ..errors import NotACheckpoint, StorageError, UsageError
from ..installation import to_install
from .fetched import FetchingStore
from .manifest import PREFIX, STEP_MANIFEST, Manifest
from .notes import Notes
from .publish import MANIFEST_NAME
from .requests import OF_REQUESTS, Requests, is_refusal, said
from .settings import SETTINGS, StoreSettings, redacted, stores_with
from .store import Store, StorePath
from .threads import Pool
from .waiting import waiting_for

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Client

MANIFESTS = (MANIFEST_NAME, STEP_MANIFEST)
"""Names of our manifests: of a checkpoint, and of a step."""

BESIDE = (*MANIFESTS, "quarantined.json")
"""What lies in a published folder itself, and not below its prefix."""

_WHILE_BUSY_S = (0.1, 0.5, 2.0)

_MOST_COPIED = 5 << 30
"""Bytes that a store copies by itself. Source: Amazon S3, API reference, CopyObject."""


class Tag(NamedTuple):
    """What tells an object from what is put in its place: its ETag, or its generation, by which Google goes."""

    e_tag: str | None
    version: str | None


class ObjectStore(FetchingStore):
    """One bucket or container.

    Args:
        requests: Makes the requests; keys count from the bucket's top.
        root: What the user named in it. Above it nobody may have the right to look, which means that nothing is there.
    """

    def __init__(self, requests: Requests, root: str = "") -> None:
        self.settings = SETTINGS.get()
        super().__init__(self.settings.connections)
        self.requests, self.root = requests, root
        self._folders: dict[str, dict[str, int | None]] = {}
        self._tags: dict[str, tuple[int, str | None]] = {}
        self._prefixes: dict[str, str] = {}
        self._answers = False

    def __str__(self) -> str:
        return self.requests.url

    def __reduce__(self) -> tuple[Any, ...]:
        """For another process: the same store, asked in the same way, of which nothing is known yet."""
        return _reopened, (self.requests.url, self.root, self.settings)

    def listed(self, folder: str) -> Mapping[str, int | None]:
        """See :meth:`Store.listed`; asked of the store once, in as many pages as it takes.

        Raises:
            StorageError: The store refuses, or cannot be reached.
        """
        if folder not in self._folders:
            names = self._names(self._real(folder))
            if not names and not self._answers:
                self._ask_for_nothing(folder)
            if not names and self._is_in_published(folder):
                names = self._names(self._real(folder))
            self._folders[folder] = self._of_published(folder, names)
        return self._folders[folder]

    def _ask_for_nothing(self, folder: str) -> None:
        """See that what is not there is not found: of a web page, such as a store's console, every listing is an empty one.

        Raises:
            StorageError: It is there, whatever it is.
        """
        from obstore.exceptions import BaseError

        key = f"{folder}/{PREFIX}nothing-{os.urandom(4).hex()}".lstrip("/")
        with suppress(FileNotFoundError, BaseError):
            with waiting_for(f"{self.requests.url} to answer"):
                self.requests.patiently(lambda: _obstore().head(self.requests.client, key))
            raise StorageError(
                f"{self}{key}: is found, though nobody has put it there: what answers is no object store.\n"
                "Does the endpoint (AWS_ENDPOINT_URL, or --store-option endpoint=…) name a web page, such as the store's console?"
            )
        self._answers = True

    def _names(self, folder: str) -> dict[str, int | None]:
        found = self._list(folder)
        names: dict[str, int | None] = {PurePosixPath(prefix).name: None for prefix in found["common_prefixes"]}
        for item in found["objects"]:
            if item["path"].rstrip("/") != folder:  # what a console makes for an empty folder
                names[PurePosixPath(item["path"]).name] = item["size"]
                self._tags[item["path"]] = item["size"], item["e_tag"]
        return names

    def _of_published(self, folder: str, names: dict[str, int | None]) -> dict[str, int | None]:
        """What is seen of a folder: of one that was published here, the manifest and what lies below its prefix."""
        if not any(name.startswith(PREFIX) for name in names):
            return names
        for name in MANIFESTS:
            if names.get(name) is None:
                continue
            with suppress(NotACheckpoint):  # somebody else's file of that name
                text = self.pread(f"{folder}/{name}", names[name] or 0, 0)
                prefix = Manifest.from_json(text, f"{self}{folder}/{name}").prefix
                if prefix:
                    self._prefixes[folder] = prefix
                    beside = {name: names[name] for name in BESIDE if name in names}
                    return {**self._names(f"{folder}/{prefix}"), **beside}
        return {name: nbytes for name, nbytes in names.items() if not name.startswith(PREFIX)}

    def _real(self, path: str) -> str:
        """Where a path lies: below the prefix of the published folder that it is in, if it is in one, and names none itself."""
        for folder in (path, *map(str, PurePosixPath(path).parents)):
            prefix = self._prefixes.get(folder)
            below = path[len(folder) + 1 :]
            if prefix is not None and below not in BESIDE and not below.startswith(PREFIX):
                return f"{folder}/{prefix}/{below}".rstrip("/")
        return path

    def _is_in_published(self, path: str) -> bool:
        """Whether a folder above was published: asked where there is nothing of that name itself."""
        parent = str(PurePosixPath(path).parent)
        return parent != "." and bool(self.listed(parent)) and self._real(path) != path

    def forget(self) -> None:
        """See :meth:`Store.forget`."""
        self._folders.clear()
        self._tags.clear()
        self._prefixes.clear()
        self.requests.forgive()
        self.drop()

    def _list(self, folder: str) -> Any:
        from obstore.exceptions import BaseError

        def ask(client: Client) -> Any:
            try:
                return _obstore().list_with_delimiter(client, folder or None)
            except BaseError as error:
                if PurePosixPath(folder).is_relative_to(self.root) or not is_refusal(error):
                    raise
                return {"common_prefixes": [], "objects": []}

        return self.requests.ask(folder, "list", ask)

    def size(self, path: str) -> int | None:
        """See :meth:`Store.size`: what the listing of its folder says."""
        if path == self.root:
            return None if self.listed(path) else self.length(path)
        return Store.size(self, path)

    def length(self, path: str) -> int:
        """See :meth:`Store.length`; a key that the listing lacks is asked for by itself: a listing can be older than the object.

        Raises:
            StorageError: The store refuses, or cannot be reached.
        """
        real = self._real(path)
        if real not in self._tags:
            try:
                self._ask_length(real)
            except FileNotFoundError:
                if real != path or not self._is_in_published(path):
                    raise
                real = self._real(path)
                self._ask_length(real)
        return self._tags[real][0]

    def version(self, path: str) -> str:
        """See :meth:`Store.version`; its ETag."""
        self.length(path)
        return self._tags[self._real(path)][1] or ""

    def _ask_length(self, key: str) -> None:
        found = self.requests.ask(key, "read", lambda client: _obstore().head(client, key))
        self._tags[key] = found["size"], found["e_tag"]

    def written(self, key: str) -> tuple[int, str]:
        """Length and ETag of an object that has just been written."""
        self._ask_length(key)
        nbytes, e_tag = self._tags.pop(key)
        return nbytes, e_tag or ""

    def fetch(self, file: str, start: int, stop: int) -> bytes:
        """See :meth:`FetchingStore.fetch`; asks for the version that the listing named."""
        file = self._real(file)
        tag = self._tags[file][1]

        def ask(client: Client) -> bytes:
            answer = _obstore().get(client, file, options={"range": (start, stop), "if_match": tag})
            return bytes(answer.bytes())

        return self.requests.ask(file, "read", ask)

    def read_whole(self, key: str) -> tuple[bytes, Tag] | None:
        """A small object as it is now, with its tag; None where there is none.

        Raises:
            StorageError: The store refuses, or cannot be reached.
        """

        def ask(client: Client) -> tuple[bytes, Tag]:
            answer = _obstore().get(client, key)
            return bytes(answer.bytes()), Tag(answer.meta["e_tag"], answer.meta["version"])

        try:
            return self.requests.ask(key, "read", ask)
        except FileNotFoundError:
            return None

    def put_if(self, key: str, data: bytes, tag: Tag | None) -> Tag | None:
        """Put a small object if nothing is there (None), or what is there has that tag.

        Args:
            key: Its key.
            data: Bytes that nobody else puts there: by them a put is known whose answer was lost.
            tag: Of what may be replaced.

        Returns:
            The new object's tag; None where something else is there.

        Raises:
            StorageError: The store refuses, cannot be reached, or keeps no conditions.
        """
        from obstore.exceptions import NotSupportedError

        try:
            return self.requests.ask(key, "write", _Condition(self, key, data, tag))
        except StorageError as error:
            if isinstance(error.__cause__, NotSupportedError) or "501 Not Implemented" in str(error.__cause__):
                raise StorageError(
                    f"{self}{key}: the store has no conditional puts, by which one of two writers would win.\n{said(error.__cause__)}\n"
                    "Use one that has: S3, Google Cloud Storage, Azure, MinIO, R2. Or write to a local folder, and copy it."
                ) from error
            raise

    def put(self, key: str, data: bytes) -> None:
        """Put a small object, whatever is there."""
        self.requests.ask(key, "write", lambda client: _obstore().put(client, key, data, use_multipart=False))

    def open_writer(self, key: str, part_nbytes: int, at_a_time: int) -> Any:
        """Begin an object that is sent in parts as it is written."""
        sender = self.requests.sender
        return _obstore().open_writer(sender, key, buffer_size=part_nbytes, max_concurrency=at_a_time)

    def send(self, key: str, file: Path, part_nbytes: int, at_a_time: int) -> None:
        """Send a local file."""
        with self.requests.asking(key, "write"):
            _obstore().put(self.requests.sender, key, file, chunk_size=part_nbytes, max_concurrency=at_a_time)

    def copy(self, key: str, to: str, part_nbytes: int, at_a_time: int) -> None:
        """Copy an object: by the store itself, up to the size at which that ends; what is larger passes through here."""
        nbytes = self.length(key)
        if nbytes <= _MOST_COPIED:
            with self.requests.asking(to, "write"):
                _obstore().copy(self.requests.sender, key, to)
            return
        with self.open_writer(to, part_nbytes, at_a_time) as writer:
            for start in range(0, nbytes, part_nbytes):
                data = self.fetch(key, start, min(start + part_nbytes, nbytes))
                with self.requests.asking(to, "write"):
                    writer.write(data)

    def objects(self, folder: str) -> list[Any]:
        """All objects below a folder, at any depth, whatever they are: ``path``, ``size``, ``last_modified``."""
        return self.requests.ask(
            folder, "list", lambda client: [item for page in _obstore().list(client, folder or None) for item in page]
        )

    def remove(self, keys: Sequence[str]) -> None:
        """Delete objects; those that are not there are gone already."""
        if not keys:
            return
        try:
            self.requests.ask(keys[0], "delete", lambda client: _obstore().delete(client, list(keys)))
        except FileNotFoundError:  # some stores end there
            for key in keys if len(keys) > 1 else ():
                self.remove([key])

    def now(self, folder: str) -> datetime:
        """What the store's own clock says: a small object is put for it, and deleted."""
        key = f"{folder}/{PREFIX}clock-{os.urandom(4).hex()}".lstrip("/")
        self.put(key, b"")
        found = self.requests.ask(key, "read", lambda client: _obstore().head(client, key))
        self.remove([key])
        now: datetime = found["last_modified"]
        return now


@dataclass(slots=True)
class StoreNotes(Notes):
    """An object each, under a prefix of a store.

    Args:
        store: The store.
        root: The prefix.
    """

    store: ObjectStore
    root: str

    def __str__(self) -> str:
        return f"{self.store}{self.root}"

    def put(self, name: str, data: bytes, *, once: bool = False) -> bool:
        """See :meth:`Notes.put`."""
        if once:
            return self.store.put_if(f"{self.root}/{name}", data, None) is not None
        self.store.put(f"{self.root}/{name}", data)
        return True

    def get(self, name: str) -> bytes | None:
        """See :meth:`Notes.get`."""
        found = self.store.read_whole(f"{self.root}/{name}")
        return None if found is None else found[0]

    def list(self, pattern: str = "*") -> Iterator[str]:
        """See :meth:`Notes.list`."""
        names = (item["path"][len(self.root) + 1 :] for item in self.store.objects(self.root))
        return (name for name in names if fnmatchcase(name, pattern))

    def read(self, pattern: str = "*") -> Iterator[tuple[str, bytes]]:
        """See :meth:`Notes.read`; by a few connections."""
        names = list(self.list(pattern))
        with Pool(self.store.settings.connections, "read") as pool:
            yield from (
                (name, data) for name, data in zip(names, pool.map(self.get, names), strict=True) if data is not None
            )

    def remove(self, pattern: str) -> None:
        """Remove the notes of such names.

        Raises:
            StorageError: They cannot be removed.
        """
        self.store.remove([f"{self.root}/{name}" for name in self.list(pattern)])


class _Condition:
    """A put under a condition, which may be made again although its answer was lost; see :meth:`ObjectStore.put_if`."""

    def __init__(self, store: ObjectStore, key: str, data: bytes, tag: Tag | None) -> None:
        self._store, self._key, self._data, self._tag = store, key, data, tag
        self._is_sent = False

    def __call__(self, client: Client) -> Tag | None:
        from obstore import exceptions as refused

        tag = self._tag
        mode: Any = (
            "create" if tag is None else {name: value for name, value in tag._asdict().items() if value is not None}
        )
        was_lost, self._is_sent = self._is_sent, True
        for pause in (*_WHILE_BUSY_S, None):
            try:
                put = _obstore().put(client, self._key, self._data, mode=mode, use_multipart=False)
                return Tag(put["e_tag"], put["version"])
            except (refused.AlreadyExistsError, refused.PreconditionError, refused.NotFoundError, FileNotFoundError):
                there = self._store.read_whole(self._key)
            if there is not None and was_lost and there[0] == self._data:
                return there[1]
            if (there[1] if there is not None else None) != tag:
                return None
            if pause is not None:
                time.sleep(pause)  # S3 answers 409 while it is busy with another writer, who may fail
        return None


def _reopened(url: str, root: str, settings: StoreSettings) -> Store:
    with stores_with(settings):
        return open_url(f"{url}{root}").store


def open_url(url: str, options: Mapping[str, str] | None = None) -> StorePath:
    """The file or folder that a URL names.

    Args:
        url: ``s3://bucket/path``, or with another of :data:`SCHEMES`.
        options: obstore's settings of the store by name, such as ``endpoint`` or ``region``; the environment's are read without.

    Raises:
        UsageError: obstore is not installed, or it knows no such setting.
    """
    url = redacted(url)  # who is asked for is not what a bucket is called, and keys have options of their own
    parts = urlsplit(url)
    if not parts.netloc:
        raise UsageError(f"{url}: names no bucket\nA URL is {parts.scheme}://BUCKET/PATH.")
    try:
        from obstore import exceptions as refused
    except ImportError:
        raise UsageError(
            f"{url}: is a URL, and obstore, which reads object stores, is not installed.\n"
            f"Install it: {to_install('object')}; or copy the checkpoint to a local folder."
        ) from None
    top = f"{parts.scheme}://{parts.netloc}/"
    settings = {**SETTINGS.get().options, **(options or {})}
    try:
        requests = Requests(top, SETTINGS.get(), settings)
    except BaseException as error:  # a panic of Rust's is no Exception
        if (
            not isinstance(error, refused.BaseError | ValueError | TypeError)
            and type(error).__name__ != "PanicException"
        ):
            raise
        names = ", ".join(sorted(settings))
        raise UsageError(
            f"{url}: obstore cannot open such a store: {said(error)}\n--store-option gave: {names or 'nothing'}. Its names are those "
            f"of obstore's configuration of the store, and of its requests: {', '.join(sorted(OF_REQUESTS))}."
        ) from error
    key = parts.path.strip("/")
    return StorePath(ObjectStore(requests, key), PurePosixPath(key))


def _obstore() -> Any:
    import obstore

    return obstore
