"""``mcore_rlhf.dcp.Writer`` into an S3 store, one rank: all of a save or none of it, whatever is killed, lost, refused or in the way.

Torch's own ``FileSystemReader``, which knows nothing of us, reads what was downloaded.
"""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from mcore_rlhf.dcp import AnyReader, Writer, clean_up
from mcore_rlhf.dcp.targets import target_of
from mcore_rlhf.errors import UsageError
from mcore_rlhf.storage import requests
from mcore_rlhf.storage.checksum import crc32
from mcore_rlhf.storage.manifest import Manifest
from mcore_rlhf.storage.objects import ObjectStore, open_url
from mcore_rlhf.storage.settings import StoreSettings, stores_with
from mcore_rlhf.storage.uploaded import UploadedStream
from tests.helpers.object_store import S3, LostAnswer, Request, downloaded, keys, killed_at, url

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")

KEY = "runs/step_1"
MANY = 5 << 19
"""Floats of a tensor of 10 MiB, which is sent in parts."""


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test sees after a second what a user sees after three minutes."""
    monkeypatch.setattr(requests, "DEADLINE_S", 1.0)


def state(value: float, many: int = 12) -> dict[str, Any]:
    return {"model": {"weight": torch.full((many,), value), "bias": torch.full((3,), value)}, "step": int(value)}


def save(value: float, key: str = KEY, many: int = 12, **named: Any) -> None:
    dcp.save(state(value, many), storage_writer=Writer(url(key), **named), no_dist=True)


def why(value: float, key: str = KEY, many: int = 12, **named: Any) -> str:
    """What ``dcp.save`` says; torch's class of it is no Exception."""
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        save(value, key, many, **named)
    return str(caught.value)


def download(s3: S3, folder: Path, key: str = KEY) -> Path:
    """What a manifest names, as it says of each file; and nothing else lies there."""
    found, prefix = downloaded(s3, folder, key), Manifest.from_json(s3.get(f"{key}/mcore_rlhf.json"), key).prefix
    files = [f"{key}/{prefix}/{name}" for name in os.listdir(found)]
    assert keys(key) == sorted([f"{key}/mcore_rlhf.json", *files])
    return found


def loaded(reader: Any, many: int = 12) -> float:
    """The value that torch fills all with."""
    found = state(0.0, many)
    if isinstance(reader, AnyReader):
        del found["step"]
    dcp.load(found, storage_reader=reader, no_dist=True)
    values = {
        *found["model"]["weight"].tolist(),
        *found["model"]["bias"].tolist(),
        float(found.get("step", found["model"]["bias"][0])),
    }
    (value,) = values
    return float(value)


def there(key: str = KEY, many: int = 12) -> float | None:
    """The value that is seen in the store; None where no checkpoint is."""
    path = open_url(url(key))
    return loaded(AnyReader(url(key)), many) if (path / "mcore_rlhf.json").is_file() else None


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("one_file", [True, False])
def test_torch_reads_what_was_downloaded(s3: S3, tmp_path: Path, threads: int, one_file: bool) -> None:
    save(3.0, many=MANY, thread_count=threads, single_file_per_rank=one_file)
    assert loaded(dcp.FileSystemReader(download(s3, tmp_path / "there")), MANY) == 3.0
    assert there(many=MANY) == 3.0
    parts = [request for request in s3.requests if "partNumber" in request.query]
    assert len(parts) == 2  # 8 MiB, and the rest


def test_it_is_torchs_own_file(s3: S3, tmp_path: Path) -> None:
    save(2.0)
    dcp.save(state(2.0), storage_writer=dcp.FileSystemWriter(tmp_path / "torchs"), no_dist=True)
    ours = download(s3, tmp_path / "ours")
    assert (ours / "__0_0.distcp").read_bytes() == (tmp_path / "torchs" / "__0_0.distcp").read_bytes()


def test_verify_says_of_the_url_that_it_is_intact(s3: S3) -> None:
    save(1.0)
    words = [sys.executable, "-m", "mcore_rlhf", "verify", url(KEY)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, "intact" in done.stdout) == (0, True), done
    name = next(key for key in keys(KEY) if key.endswith(".distcp"))
    data = bytearray(s3.get(name))
    data[len(data) // 2] ^= 1
    s3.put(name, bytes(data))
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, "intact" in done.stdout) == (1, False), done


def test_what_is_there_is_replaced_only_where_that_is_said(s3: S3, tmp_path: Path) -> None:
    save(1.0)
    before = keys()
    assert f"{url(KEY)}: exists already.\nSave under another name, or with Writer(overwrite=True)." in why(2.0)
    assert (keys(), there()) == (before, 1.0)
    save(2.0, overwrite=True)
    assert loaded(dcp.FileSystemReader(download(s3, tmp_path / "there"))) == 2.0
    s3.put("thesis/thesis.txt", b"years of work")
    assert "does not look like a checkpoint" in why(1.0, "thesis", overwrite=True)
    assert keys("thesis") == ["thesis/thesis.txt"]


@pytest.mark.usefixtures("s3")
def test_bad_places(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="is a whole bucket"):
        Writer("s3://bucket")
    with pytest.raises(UsageError, match="is a URL under which nothing can be written"):
        Writer("hf://someone/model")
    assert Writer.validate_checkpoint_id(url("step_1"))
    assert not Writer.validate_checkpoint_id("s3://bucket")
    assert clean_up(url("runs")) == clean_up(url("")) == []
    monkeypatch.setattr(f"{__name__}.url", lambda key: f"s3://no-such-bucket/{key}")
    for overwrite in (False, True):
        assert "Check the bucket's name" in why(1.0, overwrite=overwrite)


def test_one_writer_saves_many_times_in_a_thread(s3: S3, tmp_path: Path) -> None:
    """The store is asked as it was when the writer was made, though torch's thread knows nothing of that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("AWS_ENDPOINT_URL")
        with stores_with(StoreSettings({"endpoint": s3.url})):
            writer = Writer()
        for step in (1, 2):
            saved: Any = dcp.async_save(
                state(float(step)), storage_writer=writer, checkpoint_id=url(f"runs/step_{step}"), no_dist=True
            )
            saved.result()
    for step in (1, 2):
        assert loaded(dcp.FileSystemReader(download(s3, tmp_path / f"{step}", f"runs/step_{step}"))) == step


def test_files_get_their_plain_names_where_that_is_said(s3: S3, tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        with stores_with(StoreSettings(plain=True)):
            writer = Writer(url(KEY), overwrite=value == 2.0)
        dcp.save(state(value), storage_writer=writer, no_dist=True)
        assert keys() == [f"{KEY}/{name}" for name in (".metadata", "__0_0.distcp", "mcore_rlhf.json")]
        assert there() == value
    for name in (".metadata", "__0_0.distcp"):
        (tmp_path / name).write_bytes(s3.get(f"{KEY}/{name}"))
    assert loaded(dcp.FileSystemReader(tmp_path)) == 2.0


@pytest.mark.usefixtures("impatient")
def test_lost_answers_and_a_busy_store_are_no_failures(s3: S3, tmp_path: Path) -> None:
    """Of each request the first try: some are carried out, and nobody hears of it."""
    seen = dict[tuple[str, str, str], str]()

    def busy(request: Request) -> str | None:
        kind = (request.method, request.key.rpartition("/")[2][-9:], request.query.partition("=")[0])
        if kind in seen:
            return None
        seen[kind] = "busy" if len(seen) % 2 else "lost"
        return "503 Slow Down" if len(seen) % 2 == 0 else None

    def lose(request: Request) -> None:
        kind = (request.method, request.key.rpartition("/")[2][-9:], request.query.partition("=")[0])
        if seen.get(kind) == "lost":
            seen[kind] = "was lost"
            raise LostAnswer

    s3.fault, s3.after = busy, lose
    save(1.0, many=MANY)
    s3.fault, s3.after = lambda request: None, lambda request: None
    assert len(seen) > 8
    assert {*seen.values()} >= {"busy", "was lost"}
    assert loaded(dcp.FileSystemReader(download(s3, tmp_path / "there")), MANY) == 1.0


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("how", ["503 Slow Down", "403 Forbidden", "cut"])
def test_a_store_that_refuses_leaves_what_was_there_and_the_writer_goes_on(s3: S3, tmp_path: Path, how: str) -> None:
    save(1.0)
    writer = Writer(url(KEY), overwrite=True)

    def refuse(request: Request) -> str | None:
        if request.writes and ".distcp" in request.key:
            if how == "cut":
                raise ConnectionError("the test cuts this one")
            return how
        return None

    s3.fault = refuse
    with pytest.raises(BaseException, match=r"not saved: rank 0: StorageError: .*\.distcp: cannot write"):
        dcp.save(state(2.0), storage_writer=writer, no_dist=True)
    assert there() == 1.0
    s3.fault = lambda request: None
    dcp.save(state(3.0), storage_writer=writer, no_dist=True)
    assert there() == 3.0
    if how != "cut":  # nobody asks such a store to remove anything
        assert loaded(dcp.FileSystemReader(download(s3, tmp_path / "there"))) == 3.0


class Failing(DefaultSavePlanner):
    """Fails after so many items."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self._left = after

    def resolve_data(self, write_item: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise MemoryError("no memory is left")
        return super().resolve_data(write_item)


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_rank_that_fails_leaves_nothing(s3: S3, after: int) -> None:
    with pytest.raises(BaseException, match="not saved: rank 0: MemoryError: no memory is left"):
        dcp.save(state(1.0, MANY), storage_writer=Writer(url(KEY)), planner=Failing(after), no_dist=True)
    assert keys() == []
    started = [request for request in s3.requests if request.method == "POST" and request.query == "uploads="]
    ended = [request for request in s3.requests if request.method == "DELETE" and "uploadId" in request.query]
    assert len(started) == len(ended)


def test_another_writer_that_came_first_is_left_alone(s3: S3) -> None:
    """Both began where nothing was: one publishes, and the other says so."""
    ready, said = threading.Barrier(2), list[str]()

    class Waiting(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            if write_item.index.fqn == "model.bias":
                ready.wait(60)
            return super().resolve_data(write_item)

    def write(value: float) -> None:
        try:
            dcp.save(state(value), storage_writer=Writer(url(KEY)), planner=Waiting(), no_dist=True)
        except BaseException as error:
            said.append(str(error))

    threads = [threading.Thread(target=write, args=(value,)) for value in (1.0, 2.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert len(said) == 1
    assert "meanwhile" in said[0]
    assert there() in (1.0, 2.0)
    assert len(keys(KEY)) == 3


def save_there(environment: Mapping[str, str], value: float) -> None:
    """In a process of its own, which can be killed."""
    os.environ.update(environment)
    save(value, many=MANY, overwrite=True)


@pytest.mark.parametrize("nth", [4, pytest.param(1, marks=pytest.mark.slow)], ids=["one in four", "each"])
def test_a_kill_at_a_request_leaves_all_or_nothing(s3: S3, nth: int, rng: random.Random) -> None:
    """Before a request is carried out, which is after the one before it."""
    outcomes = []
    for number in itertools.count(rng.randrange(nth), nth):
        s3.forget()
        save(1.0, many=MANY)
        was_killed = killed_at(s3, number, save_there, 2.0)
        outcomes.append(there(many=MANY))
        save(3.0, many=MANY, overwrite=True)
        assert there(many=MANY) == 3.0
        if not was_killed:
            break
    assert len(outcomes) > 3
    assert outcomes == sorted(outcomes, key=lambda value: value or 0.0)
    assert (outcomes[0], outcomes[-1]) == (1.0, 2.0)


_MEASURED = """
import sys, torch
import torch.distributed.checkpoint as dcp
from mcore_rlhf.dcp import Writer

def most():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) >> 10

dcp.save({"a": torch.ones(3)}, storage_writer=Writer(sys.argv[1] + "/warm"), no_dist=True)
state = {"weight": torch.ones(192 << 18)}
before = most()
dcp.save(state, storage_writer=Writer(sys.argv[1] + "/large"), no_dist=True)
print(most() - before)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("s3")
def test_a_tensor_is_not_copied_as_a_whole() -> None:
    """Of one of 192 MiB, parts are on their way: 64 MiB."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _MEASURED, url("runs")],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    print("MiB more than before:", done.stdout)
    assert int(done.stdout) < 150


def test_a_stream_that_is_not_finished_is_not_there(s3: S3, rng: random.Random) -> None:
    store = open_url(url("")).store
    assert isinstance(store, ObjectStore)
    pieces = [rng.randbytes(rng.choice([0, 1, 1000, 1 << 20, (1 << 20) + 1, 9 << 20])) for _ in range(9)]
    whole, half = UploadedStream(store, "whole", 0), UploadedStream(store, "half", 0)
    for piece in pieces:
        assert whole.write(piece) == half.write(memoryview(piece)) == len(piece)
    assert whole.tell() == half.tell() == sum(map(len, pieces))
    entry, data = whole.finish(), b"".join(pieces)
    for stream in (whole, half):
        stream.abort()
    assert (entry.nbytes, entry.crc32) == (len(data), crc32(data))
    assert keys() == ["whole"]
    assert s3.get("whole") == data


def test_a_target_is_asked_for_the_newest_save_where_a_plan_was_kept(s3: S3) -> None:
    """As ``DefaultSavePlanner(enable_plan_caching=True)`` does."""
    others = [f"{KEY}/.tx-1600000000000-0123abcd.writer", f"{KEY}/.tx-whole-0123abcd.writer"]
    target = target_of(url(KEY))
    with pytest.raises(Exception, match="nobody sends there"):
        target.current("1700000000000-0123abcd")
    for other in others:  # a save that was killed, and a conversion
        s3.put(other, b"")
    publication, word = target.begin(overwrite=False, fsync=True)
    assert target.current(word) == target.current("1700000000000-0123abcd") == word
    publication.__exit__(None, None, None)
    assert keys(KEY) == others
