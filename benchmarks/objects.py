"""Row 17: a checkpoint in an object store that is 30 ms away, read by ranges, against downloading it first.

The store is a process of its own: it answers S3's GET, HEAD and LIST for the files of a folder, after a pause, and counts what it sends.
Nothing is signed, and nothing limits its speed but this machine. Run as a module, it is the store, or the process that is watched.

Source: Amazon S3, API reference: ListObjectsV2, GetObject, HeadObject.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit
from urllib.request import urlopen
from xml.sax.saxutils import escape

from mcore_rlhf.convert import ConvertOptions, convert, prepare
from mcore_rlhf.core.execute import FileRun
from mcore_rlhf.families.options import WriteOptions
from mcore_rlhf.storage.objects import open_url
from mcore_rlhf.storage.pt import read_pt
from mcore_rlhf.storage.upload import object_store
from mcore_rlhf.storage.urls import checkpoint_path, open_files
from mcore_rlhf.verify.audit import Ledger

from .measure import MIB, Contest, high_water, in_fresh_process
from .table import Row

_DELAY_S = 0.03
_CONNECTIONS, _PIECE_NBYTES = 16, 8 << 20
"""As many, and as large, as the command takes by default; for the download as well."""
_TINY = 0.02


def row_17(folder: Path, gigabytes: float, rounds: int) -> Iterator[Row]:
    from .checkpoints import make

    checkpoint = make(folder, gigabytes, 2)
    with _serving(folder) as store:
        yield Row(
            17, "requests to open a rank file of an object store", _requests_to_open(store, checkpoint.root), "", 3, 2
        )
        read, needed = _one_rank(store, checkpoint.root)
        what = f"the same: bytes read ÷ needed by one rank of TP4, {gigabytes:g} GB"
        yield Row(17, what, read / needed, "×", 1.05, 1.01)
        store.counted()
        _convert(store.url(checkpoint.root), folder / "out")
        ratio = store.counted()[1] / checkpoint.nbytes
        shutil.rmtree(folder / "out")
        yield Row(17, "the same: bytes read ÷ bytes of the source, whole reshape", ratio, "×", 1.05, 1.01)
        yield from _against_download(store, checkpoint.root, folder, gigabytes, rounds)
    extra = (_watched(folder, gigabytes) - _watched(folder, _TINY)) / MIB
    yield Row(17, f"the same: extra memory of TP2→TP4, {gigabytes:g} GB", extra, " MiB", 128, 64)


def _against_download(store: _Store, root: Path, folder: Path, gigabytes: float, rounds: int) -> Iterator[Row]:
    target, copy = folder / "out", folder / "copy"

    def downloaded() -> None:
        _download(store.url(root), copy)
        _convert(str(copy), target)

    def clear() -> None:
        for path in (target, copy):
            shutil.rmtree(path, ignore_errors=True)

    contenders = {"by ranges": lambda: _convert(store.url(root), target), "download first": downloaded}
    contest = Contest(contenders, before=clear).run(rounds)
    ratio = contest.ratio("by ranges", "download first", "wall")
    what = f"reshape TP2→TP4 of a store at {1000 * _DELAY_S:g} ms a request ÷ download, then reshape, {gigabytes:g} GB: wall"
    seconds = (contest.spread(name, "wall").median for name in contenders)
    text = f"{ratio}; {', '.join(f'{name} {one:.1f} s' for name, one in zip(contenders, seconds, strict=True))}"
    yield Row(17, what, ratio.median, "×", 0.7, 0.5, text)


def _convert(source: str, target: Path) -> None:
    convert(checkpoint_path(source), target, ConvertOptions(write=WriteOptions(tp=4), fsync=False))


def _requests_to_open(store: _Store, root: Path) -> float:
    file = next(root.rglob("distrib_optim.pt"))
    there = checkpoint_path(store.url(root))
    name = file.relative_to(root).as_posix()
    store.counted()
    read_pt(there, name)
    return store.counted()[0]


def _one_rank(store: _Store, root: Path) -> tuple[int, int]:
    """Bytes that are fetched for one new rank, besides those by which the source was opened, and the bytes of its tensors."""
    there = checkpoint_path(store.url(root))
    job = prepare(there, ConvertOptions(write=WriteOptions(tp=4)))
    needed, _ = 0, store.counted()
    with open_files(there) as files:
        for planned in job.plans():
            plan = planned.plan
            if "mp_rank_00" in plan.file:
                FileRun(plan, planned.records, files, _Nowhere(), Ledger(())).run()
                needed += sum(copy.numel * copy.source.dtype.itemsize for copy in plan.copies)
    return store.counted()[1], needed


class _Nowhere:
    def write(self, key: str, byte_offset: int, data: memoryview) -> None:
        pass


def _download(url: str, target: Path) -> None:
    """As fast as it goes: ranges of all files, as many at a time as the conversion asks for."""
    import obstore

    root = open_url(url)
    store = object_store(root)

    def fetch(job: tuple[str, Path, int, int]) -> None:
        key, path, start, stop = job
        fd, get = os.open(path, os.O_WRONLY), partial(obstore.get_range, path=key, start=start, end=stop)
        os.pwrite(fd, store.requests.ask(key, "read", get), start)
        os.close(fd)

    jobs = []
    for item in store.objects(str(root.path)):
        path = target / item["path"][len(str(root.path)) + 1 :]
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.truncate(item["size"])
        for start in range(0, item["size"], _PIECE_NBYTES):
            jobs.append((item["path"], path, start, min(start + _PIECE_NBYTES, item["size"])))
    with ThreadPoolExecutor(_CONNECTIONS) as pool:
        list(pool.map(fetch, jobs))


def _watched(folder: Path, gigabytes: float) -> float:
    from .checkpoints import make

    make(folder, gigabytes, 2)
    return in_fresh_process(__name__, "watched", folder, gigabytes)["own"]


@dataclass(frozen=True)
class _Store:
    """The process that is the store, and the folder that it serves."""

    address: str
    folder: Path

    def url(self, path: Path) -> str:
        return f"s3://bench/{path.relative_to(self.folder).as_posix()}"

    def counted(self) -> tuple[int, int]:
        """Requests, and bytes that were sent, since it was last asked."""
        with urlopen(f"{self.address}/counted") as answer:
            requests, nbytes = json.load(answer)
        return requests, nbytes


@contextmanager
def _serving(folder: Path) -> Iterator[_Store]:
    command = [sys.executable, "-m", "benchmarks.objects", "serve", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        os.environ.update(
            AWS_ACCESS_KEY_ID="x", AWS_SECRET_ACCESS_KEY="x", AWS_REGION="us-east-1", AWS_ENDPOINT_URL=address
        )
        try:
            yield _Store(address, folder)
        finally:
            process.terminate()


class _Objects(BaseHTTPRequestHandler):
    """Files below a folder, by S3's requests."""

    protocol_version = "HTTP/1.1"
    folder = Path()
    requests = nbytes = 0

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        if parts.path == "/counted":
            self._answer(200, json.dumps([_Objects.requests, _Objects.nbytes]).encode())
            _Objects.requests = _Objects.nbytes = 0
            return
        time.sleep(_DELAY_S)
        _Objects.requests += 1
        query, key = parse_qs(parts.query), parts.path.removeprefix("/bench").lstrip("/")
        if "list-type" in query:
            prefix = query.get("prefix", [""])[0]
            self._answer(200, _listing(self.folder, prefix, "delimiter" in query).encode())
        elif (self.folder / key).is_file():
            self._send(self.folder / key)
        else:
            self._answer(404, b"<Error><Code>NoSuchKey</Code><Message>none</Message></Error>")

    def _send(self, path: Path) -> None:
        size = path.stat().st_size
        first, last = 0, size - 1
        asked = self.headers.get("Range")
        if asked:
            start, _, stop = asked.removeprefix("bytes=").partition("-")
            first, last = int(start), min(int(stop or last), last)
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(last + 1 - first))
        self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        for name, value in (("ETag", '"1"'), ("Last-Modified", "Sun, 22 Nov 2026 00:00:00 GMT")):
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            _Objects.nbytes += last + 1 - first
            with path.open("rb") as file:
                self.wfile.flush()
                while first <= last:
                    first += os.sendfile(self.connection.fileno(), file.fileno(), first, last + 1 - first)

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing is said."""


def _listing(folder: Path, prefix: str, one_level: bool) -> str:
    there = folder / prefix
    below = sorted(there.iterdir() if one_level else there.rglob("*")) if there.is_dir() else []
    items = [
        f"<Contents><Key>{escape(path.relative_to(folder).as_posix())}</Key><Size>{path.stat().st_size}</Size>"
        '<LastModified>2026-11-22T00:00:00Z</LastModified><ETag>"1"</ETag></Contents>'
        for path in below
        if path.is_file()
    ]
    folders = [
        f"<CommonPrefixes><Prefix>{escape(path.relative_to(folder).as_posix())}/</Prefix></CommonPrefixes>"
        for path in below
        if one_level and path.is_dir()
    ]
    return f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(items + folders)}</ListBucketResult>"


def _serve(folder: Path) -> None:
    _Objects.folder = folder
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Objects)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


def _watch(folder: Path, gigabytes: float) -> None:
    from .checkpoints import make

    result = dict[str, int]()
    with _serving(folder) as store, high_water(result):
        _convert(store.url(make(folder, gigabytes, 2).root), folder / "out")
    shutil.rmtree(folder / "out")
    print(json.dumps(result))


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        _serve(Path(sys.argv[2]))
    else:
        _watch(Path(sys.argv[2]), float(sys.argv[3]))
