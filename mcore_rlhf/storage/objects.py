"""Checkpoints in object stores, read by ranges: S3, Google Cloud Storage, Azure, and what speaks the same protocols.

The requests are obstore's (Rust's object_store): signed, retried with jitter on 5xx, resets and time-outs, one connection pool for
all threads. What stands here is what a checkpoint's reader knows and it does not: a folder is listed once; a file's two ends are
fetched once and kept; an object that changes while it is read is an error, never a mixture of two.

Source: obstore 0.12.1 (https://developmentseed.org/obstore); object_store's ``GetOptions`` for ranges and ``If-Match``.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ..errors import StorageError, UsageError
from .fetched import FetchingStore
from .store import Store, StorePath

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Client

SCHEMES = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION and AWS_ENDPOINT_URL",
    "s3a": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION and AWS_ENDPOINT_URL",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS (or GOOGLE_SERVICE_ACCOUNT)",
    "az": "AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN or a managed identity",
    "abfs": "AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN or a managed identity",
}
"""What can be read, and the environment variables that say with which rights."""


class ObjectStore(FetchingStore):
    """One bucket or container.

    Args:
        url: What paths begin with in messages: ``s3://bucket/``.
        client: Makes the requests; its keys count from the bucket's top.
        root: What the user named in it. Above it nobody may have the right to look, which means that nothing is there.
    """

    def __init__(self, url: str, client: Client, root: str = "") -> None:
        super().__init__()
        self.url, self.client, self.root = url, client, root
        self._folders: dict[str, dict[str, int | None]] = {}
        self._tags: dict[str, tuple[int, str | None]] = {}

    def __str__(self) -> str:
        return self.url

    def listed(self, folder: str) -> Mapping[str, int | None]:
        """See :meth:`Store.listed`; asked of the store once, in as many pages as it takes.

        Raises:
            StorageError: The store refuses, or cannot be reached.
        """
        if folder not in self._folders:
            found = self._list(folder)
            names: dict[str, int | None] = {PurePosixPath(prefix).name: None for prefix in found["common_prefixes"]}
            for item in found["objects"]:
                if item["path"].rstrip("/") != folder:  # what a console makes for an empty folder
                    names[PurePosixPath(item["path"]).name] = item["size"]
                    self._tags[item["path"]] = item["size"], item["e_tag"]
            self._folders[folder] = names
        return self._folders[folder]

    def _list(self, folder: str) -> Any:
        from obstore.exceptions import BaseError

        with self._asking(folder, "list"):
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
        if path not in self._tags:
            with self._asking(path, "read"):
                found = _obstore().head(self.client, path)
            self._tags[path] = found["size"], found["e_tag"]
        return self._tags[path][0]

    def fetch(self, file: str, start: int, stop: int) -> bytes:
        """See :meth:`FetchingStore.fetch`; asks for the version that the listing named."""
        tag = self._tags[file][1]
        with self._asking(file, "read"):
            answer = _obstore().get(self.client, file, options={"range": (start, stop), "if_match": tag})
            return bytes(answer.bytes())

    @contextmanager
    def _asking(self, key: str, doing: str) -> Iterator[None]:
        from obstore import exceptions as refused

        where = f"{self}{key}"
        try:
            yield
        except (FileNotFoundError, refused.NotFoundError) as error:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), where) from error
        except refused.PreconditionError as error:
            raise StorageError(
                f"{where}: has changed while it was read: it is no longer the object that the folder's listing named.\n"
                "Is another program still writing this checkpoint? Try again when it is done."
            ) from error
        except refused.BaseError as error:
            why = ": the store refuses" if _is_refusal(error) else ""
            raise StorageError(f"{where}: cannot {doing}{why}.\n{_said(error)}\n{self._rights()}") from error

    def _rights(self) -> str:
        scheme = self.url.partition(":")[0]
        return f"Credentials, region and endpoint come from {SCHEMES[scheme]}."


def open_url(url: str, options: Mapping[str, str] | None = None) -> StorePath:
    """The file or folder that a URL names.

    Args:
        url: ``s3://bucket/path``, or with another of :data:`SCHEMES`.
        options: obstore's settings of the store by name, such as ``endpoint`` or ``region``; the environment's are read without.

    Raises:
        UsageError: obstore is not installed, or it knows no such setting.
    """
    parts = urlsplit(url)
    if not parts.netloc:
        raise UsageError(f"{url}: names no bucket\nA URL is {parts.scheme}://BUCKET/PATH.")
    try:
        from obstore import exceptions as refused
        from obstore import store as stores
    except ImportError:
        raise UsageError(
            f"{url}: is a URL, and obstore, which reads object stores, is not installed.\n"
            'Install it: pip install "mcore_rlhf[object]". Or copy the checkpoint to a local folder.'
        ) from None
    top = f"{parts.scheme}://{parts.netloc}/"
    settings: Any = {**(options or {})}
    try:
        client = stores.from_url(
            top, config=settings, client_options={"allow_http": _is_plain_http(parts.scheme, settings), "timeout": "5m"}
        )
    except (refused.BaseError, ValueError, TypeError) as error:
        raise UsageError(f"{url}: obstore cannot open such a store: {_said(error)}") from error
    key = parts.path.strip("/")
    return StorePath(ObjectStore(top, client, key), PurePosixPath(key))


def _is_plain_http(scheme: str, settings: Mapping[str, str]) -> bool:
    """Whether the user names an endpoint without TLS, such as a server on the own machine; that is consent enough."""
    names = {"s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"), "az": ("AZURE_STORAGE_ENDPOINT",)}
    named = [os.environ.get(name, "") for name in names.get(scheme, ())]
    named += [value for key, value in settings.items() if "endpoint" in key.lower()]
    return any(value.startswith("http://") for value in named)


def _is_refusal(error: BaseException) -> bool:
    """Whether it is about rights; of listings the class does not say it."""
    return "status code: 403" in str(error) or "status code: 401" in str(error)


_ANSWER = re.compile(r"<Code>(.*?)</Code>\s*<Message>(.*?)</Message>", re.DOTALL)


def _said(error: BaseException) -> str:
    """What the store said, without its XML, and without where in Rust that arrived."""
    text = str(error).strip().partition("Debug source")[0].strip()
    answer = _ANSWER.search(text)
    return f"{answer[1]}: {answer[2]}" if answer else text


def _obstore() -> Any:
    import obstore

    return obstore
