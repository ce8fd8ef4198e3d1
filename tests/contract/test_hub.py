"""A model on the Hub: read by ranges, at one commit. A server on this machine answers as the Hub's interface does."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.errors import NotACheckpoint, StorageError, UsageError
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.storage.publish import MANIFEST_NAME
from mcore_rlhf.verify.checkpoint import Depth, verify
from tests.contract.test_store import GOLDENS, ONE_OF_EACH, contents

pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FOLDER = GOLDENS / ONE_OF_EACH["hf"]


class Hub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.revisions = ("main", "refs/pr/1")
        self.reads: list[tuple[str, str]] = []
        self.failures = 0


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        info = json.dumps({"id": "org/model", "sha": COMMIT, "siblings": []}).encode()
        match [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]:
            case ["api", "models", "org", "model"]:
                self.answer(info)
            case ["api", "models", "org", "model", "revision", revision] if revision in self.server.revisions:
                self.answer(info)
            case ["api", "models", "org", "model", "tree", commit, *_] if commit == COMMIT:
                self.answer(json.dumps(list(_tree())).encode())
            case ["org", "model", "resolve", commit, *path] if commit == COMMIT:
                self.file("/".join(path))
            case ["api", "models", "org", "model", *_]:
                self.answer(b"{}", 404, "RevisionNotFound")
            case _:
                self.answer(b"{}", 401, "RepoNotFound")

    def file(self, path: str) -> None:
        wanted = self.headers["Range"]
        self.server.reads.append((path, wanted))
        if self.server.failures:
            self.server.failures -= 1
            return self.answer(b"", 503)
        first, last = wanted.removeprefix("bytes=").split("-")
        return self.answer((FOLDER / path).read_bytes()[int(first) : int(last) + 1], 206)

    def answer(self, data: bytes, status: int = 200, code: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if code:
            self.send_header("X-Error-Code", code)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield server
    server.shutdown()
    server.server_close()
    thread.join(10)


def _tree() -> Iterator[dict[str, object]]:
    for path in sorted(FOLDER.rglob("*")):
        if path.is_file():
            name = path.relative_to(FOLDER).as_posix()
            yield {"type": "file", "oid": "0" * 40, "size": path.stat().st_size, "path": name}


@pytest.mark.parametrize(
    "url", ["hf://org/model", "hf://org/model@main", "hf://org/model@refs%2Fpr%2F1", "hf://models/org/model"]
)
def test_a_model_is_read_as_on_a_disk(hub: Hub, url: str) -> None:
    here, there = open_checkpoint(FOLDER, ReadOptions()), open_checkpoint(url, ReadOptions())
    assert there.format == "hf"
    assert contents(there) == contents(here)
    assert len(set(hub.reads)) == len(hub.reads)


def test_a_model_is_converted_and_verified(hub: Hub, tmp_path: Path) -> None:
    assert not verify("hf://org/model", ReadOptions(), Depth.FULL).problems
    hub.failures = 1
    convert("hf://org/model", tmp_path / "there", ConvertOptions(to="hf", fsync=False))
    convert(FOLDER, tmp_path / "here", ConvertOptions(to="hf", fsync=False))
    names = {path.name for path in (tmp_path / "here").iterdir()}
    assert names == {path.name for path in (tmp_path / "there").iterdir()}
    for name in names - {MANIFEST_NAME}:
        assert (tmp_path / "here" / name).read_bytes() == (tmp_path / "there" / name).read_bytes(), name


def test_refusals(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotACheckpoint, match="hf://org/model@gone/: the repository has no such revision"):
        open_checkpoint("hf://org/model@gone", ReadOptions())
    with pytest.raises(
        NotACheckpoint, match="hf://org/other/: there is no such repository, or HF_TOKEN has no right to it"
    ):
        open_checkpoint("hf://org/other", ReadOptions())
    with pytest.raises(UsageError, match="names no model"):
        open_checkpoint("hf://model", ReadOptions())
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(StorageError, match="the Hub cannot be read"):
        open_checkpoint("hf://org/model", ReadOptions())
