"""Checkpoints in object stores, read by ranges: S3, Google Cloud Storage, Azure, and what speaks the same protocols.

The requests are obstore's (Rust's object_store): signed, retried with jitter on 5xx, resets and time-outs, one connection pool for
all threads. What stands here is what a checkpoint's reader knows and it does not: a folder is listed once; a file's two ends are
fetched once and kept; an object that changes while it is read is an error, never a mixture of two; and what :mod:`.upload`
published lies below the prefix that its manifest names, which no reader notices.

Source: obstore 0.12.1 (https://developmentseed.org/obstore); object_store's ``GetOptions`` for ranges and ``If-Match``.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from ..errors import NotACheckpoint, StorageError, UsageError
from ..installation import to_install
from .fetched import FetchingStore
from .manifest import PREFIX, Manifest
from .publish import MANIFEST_NAME
from .settings import SCHEMES, SETTINGS, StoreSettings, redacted, stores_with
from .store import Store, StorePath

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Client

MANIFESTS = (MANIFEST_NAME, "manifest.json")
"""Names of our manifests: of a checkpoint, and of a step."""

BESIDE = (*MANIFESTS, "quarantined.json")
"""What lies in a published folder itself, and not below its prefix."""

_ADVICE = {
    "NoSuchBucket|ContainerNotFound": "Check the bucket's name, and the endpoint (AWS_ENDPOINT_URL, or --store-option endpoint=…).",
    "without LOCATION|PermanentRedirect|AuthorizationHeaderMalformed": (
        "The bucket lies in another region: name that one, by AWS_REGION or --store-option region=…"
    ),
    "RequestTimeTooSkewed|RequestExpired": "Requests are signed with the time, and this machine's clock is wrong: set it, and try again.",
    "ExpiredToken": "The credentials are too old: get new ones, and try again.",
    "SlowDown|status code: (503|429)|ServerBusy": (
        "The store is busy; it was asked again, with growing pauses. Try again later, or with fewer --connections."
    ),
}
"""What helps, by what a store says. Source: Amazon S3, API reference, Error responses; object_store 0.12, ``client/retry.rs``
(redirects); Azure, Blob service error codes."""

_MOST_COPIED = 5 << 30
"""Bytes that a store copies by itself. Source: Amazon S3, API reference, CopyObject."""


class Tag(NamedTuple):
    """What tells an object from what is put in its place: its ETag, or its generation, by which Google goes."""

    e_tag: str | None
    version: str | None


class ObjectStore(FetchingStore):
    """One bucket or container.

    Args:
        url: What paths begin with in messages: ``s3://bucket/``.
        client: Makes the requests; its keys count from the bucket's top.
        root: What the user named in it. Above it nobody may have the right to look, which means that nothing is there.
    """

    def __init__(self, url: str, client: Client, root: str = "") -> None:
        self.settings = SETTINGS.get()
        super().__init__(self.settings.connections)
        self.url, self.client, self.root = url, client, root
        self._folders: dict[str, dict[str, int | None]] = {}
        self._tags: dict[str, tuple[int, str | None]] = {}
        self._prefixes: dict[str, str] = {}
        self._answers = False

    def __str__(self) -> str:
        return self.url

    def __reduce__(self) -> tuple[Any, ...]:
        """For another process: the same store, asked in the same way, of which nothing is known yet."""
        return _reopened, (self.url, self.root, self.settings)

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
            _obstore().head(self.client, key)
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
        """Where a path lies: below the prefix of the published folder that it is in, if it is in one."""
        for folder in (path, *map(str, PurePosixPath(path).parents)):
            prefix = self._prefixes.get(folder)
            below = path[len(folder) + 1 :]
            if prefix is not None and below not in BESIDE:
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
        self.drop()

    def _list(self, folder: str) -> Any:
        from obstore.exceptions import BaseError

        with self.asking(folder, "list"):
            try:
                return _obstore().list_with_delimiter(self.client, folder or None)
            except BaseError as error:
                if PurePosixPath(folder).is_relative_to(self.root) or not _is_refusal(error):
                    raise
                return {"common_prefixes": [], "objects": []}

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
        with self.asking(key, "read"):
            found = _obstore().head(self.client, key)
        self._tags[key] = found["size"], found["e_tag"]

    def version_now(self, key: str) -> str:
        """The ETag of an object that has just been written."""
        self._ask_length(key)
        return self._tags.pop(key)[1] or ""

    def fetch(self, file: str, start: int, stop: int) -> bytes:
        """See :meth:`FetchingStore.fetch`; asks for the version that the listing named."""
        file = self._real(file)
        tag = self._tags[file][1]
        with self.asking(file, "read"):
            answer = _obstore().get(self.client, file, options={"range": (start, stop), "if_match": tag})
            return bytes(answer.bytes())

    def read_whole(self, key: str) -> tuple[bytes, Tag] | None:
        """A small object as it is now, with its tag; None where there is none.

        Raises:
            StorageError: The store refuses, or cannot be reached.
        """
        try:
            with self.asking(key, "read"):
                answer = _obstore().get(self.client, key)
                return bytes(answer.bytes()), Tag(answer.meta["e_tag"], answer.meta["version"])
        except FileNotFoundError:
            return None

    def put_if(self, key: str, data: bytes, tag: Tag | None) -> Tag | None:
        """Put a small object if nothing is there (None), or what is there has that tag.

        Returns:
            The new object's tag; None where something else is there.

        Raises:
            StorageError: The store refuses, cannot be reached, or keeps no conditions.
        """
        from obstore import exceptions as refused

        mode: Any = (
            "create" if tag is None else {name: value for name, value in tag._asdict().items() if value is not None}
        )
        try:
            with self.asking(key, "write"):
                try:
                    put = _obstore().put(self.client, key, data, mode=mode, use_multipart=False)
                    return Tag(put["e_tag"], put["version"])
                except (refused.AlreadyExistsError, refused.PreconditionError, refused.NotFoundError):
                    return None
        except StorageError as error:
            if isinstance(error.__cause__, refused.NotSupportedError) or "501 Not Implemented" in str(error.__cause__):
                raise StorageError(
                    f"{self}{key}: the store has no conditional puts, by which one of two writers would win.\n{said(error.__cause__)}\n"
                    "Use one that has: S3, Google Cloud Storage, Azure, MinIO, R2. Or write to a local folder, and copy it."
                ) from error
            raise

    def put(self, key: str, data: bytes) -> None:
        """Put a small object, whatever is there."""
        with self.asking(key, "write"):
            _obstore().put(self.client, key, data, use_multipart=False)

    def open_writer(self, key: str, part_nbytes: int, at_a_time: int) -> Any:
        """Begin an object that is sent in parts as it is written."""
        return _obstore().open_writer(self.client, key, buffer_size=part_nbytes, max_concurrency=at_a_time)

    def send(self, key: str, file: Path, part_nbytes: int, at_a_time: int) -> None:
        """Send a local file."""
        with self.asking(key, "write"):
            _obstore().put(self.client, key, file, chunk_size=part_nbytes, max_concurrency=at_a_time)

    def copy(self, key: str, to: str, part_nbytes: int, at_a_time: int) -> None:
        """Copy an object: by the store itself, up to the size at which that ends; what is larger passes through here."""
        with self.asking(to, "write"):
            if self.length(key) <= _MOST_COPIED:
                _obstore().copy(self.client, key, to)
            else:
                there = _obstore().get(self.client, key).stream(min_chunk_size=part_nbytes)
                _obstore().put(self.client, to, there, chunk_size=part_nbytes, max_concurrency=at_a_time)

    def objects(self, folder: str) -> list[Any]:
        """All objects below a folder, at any depth, whatever they are: ``path``, ``size``, ``last_modified``."""
        with self.asking(folder, "list"):
            return [item for page in _obstore().list(self.client, folder or None) for item in page]

    def remove(self, keys: Sequence[str]) -> None:
        """Delete objects; those that are not there are gone already."""
        if keys:
            with self.asking(keys[0], "delete"), suppress(FileNotFoundError):
                _obstore().delete(self.client, list(keys))

    def now(self, folder: str) -> datetime:
        """What the store's own clock says: a small object is put for it, and deleted."""
        key = f"{folder}/{PREFIX}clock-{os.urandom(4).hex()}".lstrip("/")
        with self.asking(key, "write"):
            _obstore().put(self.client, key, b"", use_multipart=False)
            now: datetime = _obstore().head(self.client, key)["last_modified"]
        self.remove([key])
        return now

    @contextmanager
    def asking(self, key: str, doing: str, hint: str = "") -> Iterator[None]:
        """Say in our words what the store refuses.

        Args:
            key: What it is asked about.
            doing: What for: completes "cannot …".
            hint: What the user should know besides.
        """
        from obstore import exceptions as refused

        where = f"{self}{key}"
        try:
            yield
        except (FileNotFoundError, refused.NotFoundError) as error:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), where) from error
        except refused.PreconditionError:  # no cause: what was made of it is of no use to whoever comes after
            raise StorageError(
                f"{where}: has changed while it was read: it is no longer the object that the folder's listing named.\n"
                "Is another program still writing this checkpoint? Try again when it is done."
            ) from None
        except (refused.BaseError, OSError) as error:  # of writers, the latter
            why = ": the store refuses" if _is_refusal(error) else ""
            text = "\n".join(filter(None, (f"{where}: cannot {doing}{why}.", said(error), hint, self._advice(error))))
            raise StorageError(text) from error

    def _advice(self, error: BaseException) -> str:
        found = next((advice for pattern, advice in _ADVICE.items() if re.search(pattern, str(error))), "")
        names = SCHEMES.get(self.url.partition(":")[0])
        return found or (f"Credentials, region and endpoint come from {names}, or --store-option." if names else "")


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
        from obstore import store as stores
    except ImportError:
        raise UsageError(
            f"{url}: is a URL, and obstore, which reads object stores, is not installed.\n"
            f"Install it: {to_install('object')}; or copy the checkpoint to a local folder."
        ) from None
    top = f"{parts.scheme}://{parts.netloc}/"
    settings: Any = {**SETTINGS.get().options, **(options or {})}
    patience = SETTINGS.get().patience
    try:
        client = _client(
            stores.from_url, top, frozenset(settings.items()), patience, frozenset(os.environ.items()), os.getpid()
        )
    except BaseException as error:  # a panic of Rust's is no Exception
        if (
            not isinstance(error, refused.BaseError | ValueError | TypeError)
            and type(error).__name__ != "PanicException"
        ):
            raise
        names = ", ".join(sorted(settings))
        raise UsageError(
            f"{url}: obstore cannot open such a store: {said(error)}\n--store-option gave: {names or 'nothing'}. Its names are those "
            f"of obstore's configuration of the store, and of its requests: {', '.join(sorted(_OF_REQUESTS))}."
        ) from error
    key = parts.path.strip("/")
    return StorePath(ObjectStore(top, client, key), PurePosixPath(key))


@lru_cache(maxsize=8)
def _client(
    from_url: Any, top: str, settings: frozenset[tuple[str, str]], patience: float | None, *_process: object
) -> Client:
    """One for all that is asked alike in a process: it takes 10 ms to make, of TLS' roots, and keeps the connections.

    Besides what is named it depends on the environment, and does not survive a fork; both are among the arguments. ``from_url`` is
    obstore's, which is imported where a URL is opened.
    """
    retries: Any = {} if patience is None else {"retry_config": {"retry_timeout": timedelta(seconds=patience)}}
    named = dict(settings)
    options: dict[str, Any] = {"allow_http": _is_plain_http(top.partition(":")[0], named), "timeout": "5m"}
    options |= {name: _OF_REQUESTS[name](named.pop(name)) for name in _OF_REQUESTS.keys() & named.keys()}
    client: Client = from_url(top, config=named, client_options=options, **retries)
    return client


def _yes(text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0"):
        raise ValueError(f"should be true or false, found {text!r}")
    return text.lower() in ("true", "1")


def _duration(text: str) -> str:
    """``30`` is 30 seconds."""
    return f"{text}s" if text.isdecimal() else text


_OF_REQUESTS: Mapping[str, Callable[[str], Any]] = {
    "allow_http": _yes, "allow_invalid_certificates": _yes, "timeout": _duration, "connect_timeout": _duration,
    "proxy_url": str, "user_agent": str,
}  # fmt: skip
"""Settings that are about requests, and not about the store, and how their texts are read.

Source: obstore 0.12.1, ``store/_client.pyi`` (``ClientConfig``)."""


def _is_plain_http(scheme: str, settings: Mapping[str, str]) -> bool:
    """Whether the user names an endpoint without TLS, such as a server on the own machine; that is consent enough."""
    names = {
        "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
        "gs": ("GOOGLE_BASE_URL",),
        "az": ("AZURE_STORAGE_ENDPOINT",),
    }
    named = [os.environ.get(name, "") for name in names.get(scheme, ())]
    named += [value for key, value in settings.items() if "endpoint" in key.lower() or "base_url" in key.lower()]
    return any(value.startswith("http://") for value in named)


def _is_refusal(error: BaseException) -> bool:
    """Whether it is about rights; of listings the class does not say it."""
    return not _lacks_credentials(error) and any(f"status code: {code}" in str(error) for code in (401, 403))


def _lacks_credentials(error: BaseException | None) -> bool:
    """Whether the environment has none: then obstore asks the machine's own metadata service, which is no store."""
    return any(host in str(error) for host in ("://169.254.169.254", "://169.254.170.2", "://metadata.google.internal"))


_ANSWER = re.compile(r"<Code>(.*?)</Code>\s*<Message>(.*?)</Message>", re.DOTALL)


def said(error: BaseException | None) -> str:
    """What the store said, without its XML, and without where in Rust that arrived."""
    text = redacted(str(error)).strip().partition("Debug source")[0].strip()
    if _lacks_credentials(error):
        return "No credentials: the environment names none, and this machine has no role that would give them."
    answer = _ANSWER.search(text)
    return f"{answer[1]}: {answer[2]}" if answer else text


def _obstore() -> Any:
    import obstore

    return obstore
