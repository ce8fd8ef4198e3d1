"""An S3 server on this machine (moto's), which counts what is asked of it, and fails where a test wants it to."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mcore_rlhf.storage.checksum import crc32
from mcore_rlhf.storage.manifest import Manifest
from mcore_rlhf.storage.objects import ObjectStore, open_url
from tests.distributed.forked import SERVER

BUCKET = "bucket"


def url(key: str) -> str:
    return f"s3://{BUCKET}/{key}"


@dataclass(frozen=True)
class Request:
    method: str
    key: str
    query: str
    first: int = 0
    last: int = -1
    if_match: str = ""
    if_none_match: str = ""
    who: str = ""

    @property
    def conditional(self) -> bool:
        return self.method == "PUT" and bool(self.if_match or self.if_none_match)

    @property
    def writes(self) -> bool:
        return self.method not in {"GET", "HEAD"}

    @property
    def nbytes(self) -> int:
        return self.last - self.first + 1


class LostAnswer(Exception):
    """The connection breaks before the answer."""


@dataclass
class S3:
    """The server. ``fault`` may answer a request itself: with a status such as ``503 Slow Down``, and a body after a line break.
    ``after`` is called when a request was carried out and not yet answered; what it raises loses the answer.

    moto checks a condition and then writes, and closes what another request writes to the same key, without a lock: writes pass
    one by one here.
    """

    application: Any
    url: str = ""
    delay: float = 0.0
    fault: Callable[[Request], str | None] = lambda request: None
    after: Callable[[Request], None] = lambda request: None
    requests: list[Request] = field(default_factory=list)
    one_by_one: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        first, _, last = environ.get("HTTP_RANGE", "bytes=0--1").removeprefix("bytes=").partition("-")
        path = environ["PATH_INFO"].removeprefix(f"/{BUCKET}").strip("/")
        request = Request(
            environ["REQUEST_METHOD"],
            path,
            environ["QUERY_STRING"],
            int(first),
            int(last),
            environ.get("HTTP_IF_MATCH", ""),
            environ.get("HTTP_IF_NONE_MATCH", ""),
            environ.get("HTTP_AUTHORIZATION", "").partition("Credential=")[2].partition("/")[0],
        )
        self.requests.append(request)
        time.sleep(self.delay)
        answer = self.fault(request)
        if answer is not None:
            status, _, body = answer.partition("\n")
            start_response(status, [("Content-Length", str(len(body)))])
            return [body.encode()]
        with self.one_by_one if request.writes else nullcontext():
            answered: Iterable[bytes] = self.application(environ, start_response)
        try:
            self.after(request)
        except LostAnswer:
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        return answered

    @property
    def environment(self) -> dict[str, str]:
        """What names the server to a process."""
        return {
            "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1", "AWS_ENDPOINT_URL": self.url,
        }  # fmt: skip

    def forget(self) -> None:
        """There is one empty bucket, nobody has asked for anything, and nothing fails."""
        self.delay, self.fault, self.after = 0.0, lambda request: None, lambda request: None
        _ask("POST", f"{self.url}/moto-api/reset")
        _ask("PUT", f"{self.url}/{BUCKET}")
        self.requests.clear()

    @property
    def gets(self) -> list[Request]:
        return [request for request in self.requests if request.method == "GET" and "list-type" not in request.query]

    def upload(self, folder: Path, key: str) -> None:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.put(f"{key}/{path.relative_to(folder).as_posix()}", path.read_bytes())

    def put(self, key: str, data: bytes) -> None:
        import obstore

        obstore.put(self._client(), key, data)

    def get(self, key: str) -> bytes:
        import obstore

        return bytes(obstore.get(self._client(), key).bytes())

    @staticmethod
    def _client() -> Any:
        from mcore_rlhf.storage.objects import ObjectStore, open_url

        store = open_url(f"s3://{BUCKET}/").store
        assert isinstance(store, ObjectStore)
        return store.requests.client


@dataclass
class Google:
    """The same server as Google's XML API looks: as S3, but conditions of writes are about generations, and ETags are not looked at.

    Source: cloud.google.com/storage/docs, XML API, request and response headers (``x-goog-if-generation-match``, ``x-goog-generation``,
    ``x-goog-copy-source``) and "Simple migration from Amazon S3".
    """

    s3: S3
    generations: dict[str, str] = field(default_factory=dict)

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        wanted = environ.get("HTTP_X_GOOG_IF_GENERATION_MATCH")
        if environ["REQUEST_METHOD"] == "PUT":
            environ.pop("HTTP_IF_MATCH", None)
            environ.pop("HTTP_IF_NONE_MATCH", None)
        if wanted == "0":
            environ["HTTP_IF_NONE_MATCH"] = "*"
        elif wanted is not None:
            environ["HTTP_IF_MATCH"] = self.generations.get(wanted, '"gone"')
        if "HTTP_X_GOOG_COPY_SOURCE" in environ:
            environ["HTTP_X_AMZ_COPY_SOURCE"] = environ["HTTP_X_GOOG_COPY_SOURCE"]
        environ["HTTP_AUTHORIZATION"] = _AUTHORIZATION  # by which moto knows what it is asked for

        def answer(status: str, headers: list[tuple[str, str]], *more: Any) -> Any:
            tag = next((value for name, value in headers if name.lower() == "etag"), None)
            if tag is not None:
                generation = str(1 + int(tag.strip('"').partition("-")[0], 16) % 10**15)
                self.generations[generation] = tag
                headers = [*headers, ("x-goog-generation", generation)]
            return start_response(status, headers, *more)

        return self.s3(environ, answer)


_AUTHORIZATION = "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request"


@contextmanager
def serving(outside: Callable[[S3], Any] = lambda s3: s3) -> Iterator[S3]:
    """A server; what it holds is the process', as moto has it.

    Args:
        outside: What it looks like from outside.
    """
    pytest.importorskip("moto", reason="moto[server], which plays S3, is not installed")
    pytest.importorskip("obstore", reason="obstore, which reads object stores, is not installed")
    from moto import backends
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    backends.list_of_moto_modules = partial(
        frozenset, frozenset(backends.list_of_moto_modules())
    )  # else it looks into two hundred folders at each request
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    s3 = S3(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, outside(s3), threaded=True)
    s3.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield s3
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def _ask(method: str, address: str) -> None:
    from urllib.request import Request as Call
    from urllib.request import urlopen

    with urlopen(Call(address, method=method, headers={"Authorization": _AUTHORIZATION}), timeout=30):
        pass


def keys(below: str = "") -> list[str]:
    """What lies in the bucket."""
    store = open_url(url("")).store
    assert isinstance(store, ObjectStore)
    return sorted(item["path"] for item in store.objects(below))


@contextmanager
def killing(s3: S3, number: int, victims: Callable[[Request], Iterable[int]]) -> Iterator[list[Request]]:
    """Kill processes before request ``number``, counted from zero, is carried out: that is after the one before it was.

    Args:
        s3: The server.
        number: Of the request.
        victims: By a request the processes that are killed, now and at each later one.
    """
    seen = list[Request]()

    def kill(request: Request) -> str | None:
        seen.append(request)
        if len(seen) <= number:
            return None
        for pid in victims(request):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return "503 Slow Down"

    s3.fault = kill
    try:
        yield seen
    finally:
        s3.fault = lambda request: None


def killed_at(s3: S3, number: int, main: Callable[..., object], *words: object) -> bool:
    """Whether a process of its own, ``main(environment, *words)``, came as far as request ``number``, where it is killed."""
    child = SERVER.Process(target=main, args=(s3.environment, *words))
    with killing(s3, number, lambda request: [child.pid or 0]):
        child.start()
        child.join(120)
    assert child.exitcode in (0, -signal.SIGKILL)
    return child.exitcode != 0


def downloaded(s3: S3, folder: Path, key: str) -> Path:
    """What a manifest names, as it says of each file."""
    manifest = Manifest.from_json(s3.get(f"{key}/mcore_rlhf.json"), key)
    folder.mkdir(parents=True)
    for name, entry in manifest.files.items():
        data = s3.get(f"{key}/{manifest.prefix}/{name}")
        assert (len(data), crc32(data)) == (entry.nbytes, entry.crc32)
        (folder / name).write_bytes(data)
    return folder
