"""Stores that reset connections, cut answers, are away for a while, or say nothing: asked again until a deadline, and no longer."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.errors import StorageError
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.manager.run import mirror, steps
from mcore_rlhf.manager.run.mirror_status import MirrorStatus
from mcore_rlhf.manager.run.options import Event
from mcore_rlhf.storage import waiting
from mcore_rlhf.storage.manifest import Manifest
from mcore_rlhf.storage.objects import open_url
from mcore_rlhf.storage.reading import read_bytes
from mcore_rlhf.storage.settings import StoreSettings, stores_with
from mcore_rlhf.storage.upload import StorePublication
from mcore_rlhf.verify.checkpoint import Depth, verify
from tests.contract.test_store import GOLDENS
from tests.contract.test_store_writing import contents
from tests.faults.proxy import Proxy, between
from tests.helpers.mirror_child import MirroredRun
from tests.helpers.object_store import S3, LostAnswer, Request, url

SOURCE = GOLDENS / "megatron" / "tp1_bf16_do"
OPTIONS = ConvertOptions(to="dcp", fsync=False, trust_replicas=True)
MANY = ConvertOptions(to="universal", fsync=False, trust_replicas=True)
"""Into so many files that something befalls some of them."""


@pytest.fixture
def proxy(s3: S3, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """What the environment names as the store."""
    with between(s3.url, rng) as found:
        monkeypatch.setenv("AWS_ENDPOINT_URL", found.url)
        yield found


@pytest.fixture
def expected(tmp_path: Path) -> dict[str, bytes]:
    """What a disk would hold."""
    convert(SOURCE, tmp_path / "here", OPTIONS)
    return contents(tmp_path / "here")


def test_resets_and_cut_answers_cost_time_and_nothing_else(proxy: Proxy, tmp_path: Path) -> None:
    """Of every request, those that are under a condition too: each file is there, once, and what is read is what was written."""
    convert(SOURCE, tmp_path / "here", MANY)
    proxy.reset, proxy.cut = 0.03, 0.03
    convert(SOURCE, Path(url("reset")), MANY)
    assert not verify(url("reset"), ReadOptions(), Depth.FULL).problems
    proxy.reset = proxy.cut = 0.0
    assert contents(open_url(url("reset"))) == contents(tmp_path / "here")
    assert proxy.done["reset"], "nothing was reset"
    assert proxy.done["cut"], "nothing was cut"


def test_every_condition_is_kept_though_each_answer_is_lost_once(s3: S3, expected: dict[str, bytes]) -> None:
    """Nobody else writes there: it is neither taken for another writer's, nor published twice."""
    lost = dict[str, int]()

    def lose(request: Request) -> None:
        if request.conditional and not lost.setdefault(request.key, 0):
            lost[request.key] += 1
            raise LostAnswer

    s3.after = lose
    convert(SOURCE, Path(url("lost")), OPTIONS)
    assert len(lost) > 2
    assert contents(open_url(url("lost"))) == expected


def test_of_two_writers_one_publishes_though_answers_are_lost(s3: S3) -> None:
    """The manifest of one arrives, its answer does not, and the other one is there meanwhile: nobody is told that both published."""
    first, second = StorePublication(open_url(url("two"))), StorePublication(open_url(url("two")))
    once = threading.Event()

    def lose(request: Request) -> None:
        if request.key == "two/mcore_rlhf.json" and request.method == "PUT" and not once.is_set():
            once.set()
            raise LostAnswer

    with first:
        one = first.put("x", b"1")
        s3.after = lose
        with second:
            two = second.put("x", b"2")
            second.commit(Manifest({"x": two}))
        with pytest.raises(StorageError, match=r"another writer has published|something else was written"):
            first.commit(Manifest({"x": one}))
    assert contents(open_url(url("two")))["x"] == b"2"


def test_a_store_that_is_away_for_a_while_is_waited_for(proxy: Proxy, expected: dict[str, bytes]) -> None:
    """Ten tries with jitter ended after three to six seconds."""
    proxy.refuse = True
    threading.Timer(9, lambda: setattr(proxy, "refuse", False)).start()
    convert(SOURCE, Path(url("away")), OPTIONS)
    assert proxy.done["refused"] > 3
    assert contents(open_url(url("away"))) == expected


def test_a_store_that_stays_busy_is_asked_until_the_deadline(s3: S3) -> None:
    """Growing pauses ended at half of it, where the next one would have led past it."""
    asked = list[float]()

    def busy(_: Request) -> str:
        asked.append(time.monotonic())
        return "503 Slow Down\n"

    s3.fault = busy
    with stores_with(StoreSettings({"timeout": "4s"})), pytest.raises(StorageError, match="The store is busy"):
        verify(url("busy"), ReadOptions(), Depth.FULL)
    assert 3 < asked[-1] - asked[0] < 6


def test_a_large_file_is_sent_in_parts_though_its_beginning_and_its_end_lose_their_answers(
    s3: S3, proxy: Proxy, tmp_path: Path
) -> None:
    data = proxy.rng.randbytes((40 << 20) + 5)
    (tmp_path / "large").write_bytes(data)
    lost = set[str]()

    def lose(request: Request) -> None:
        what = request.query.partition("=")[0]
        if request.method == "POST" and what not in lost:
            lost.add(what)
            raise LostAnswer

    s3.after = lose
    proxy.reset = 0.0003
    with StorePublication(open_url(url("large"))) as publication:
        publication.commit(Manifest({"x": publication.put("x", tmp_path / "large")}))
    assert lost >= {"uploads", "uploadId"}
    proxy.reset = 0.0
    assert read_bytes(open_url(url("large")) / "x", 1 << 30) == data


def test_a_mirror_that_stands_still_says_so_and_goes_on(
    s3: S3, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store takes a file of the second step, and says nothing from then on."""
    monkeypatch.setattr(mirror, "STILL_S", 1.0)
    once = set[str]()

    def fall_silent(request: Request) -> None:
        if "global_step_2/.tx-" in request.key and request.key.endswith(".pt") and not once:
            once.add(request.key)
            proxy.silent = True

    s3.after = fall_silent
    run, heard = MirroredRun(), list[Event]()
    with run.manager(tmp_path / "root", url("still"), on_event=heard.append) as manager:
        for step in (1, 2):
            run.step()
            manager.save(step, blocking=True)
            assert step == 2 or manager.wait_for_mirror(30) == []
        end = time.monotonic() + 20
        while not any("stands still" in event.text for event in heard) and time.monotonic() < end:
            time.sleep(0.1)
        status = MirrorStatus.read(tmp_path / "root")
        assert status is not None
        assert "the store has taken nothing for" in status.problem
        proxy.silent = False
        assert manager.wait_for_mirror(30) == []
    status = MirrorStatus.read(tmp_path / "root")
    assert status is not None
    assert not status.problem
    assert [step.step for step in steps.committed(open_url(url("still")))] == [1, 2]


ASKED: dict[str, Callable[[Path], object]] = {
    "verify": lambda _: verify(url("quiet"), ReadOptions(), Depth.FULL),
    "convert from there": lambda folder: convert(url("quiet"), folder / "out", OPTIONS),
    "convert to there": lambda _: convert(SOURCE, Path(url("quiet-too")), OPTIONS),
}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("when", ["from the beginning", "in the middle"])
def test_a_store_that_says_nothing_is_given_up_once(
    s3: S3,
    proxy: Proxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    asked: str,
    when: str,
) -> None:
    """After the deadline, not after the deadline of every request that follows; and it is said before what is waited for."""
    monkeypatch.setattr(waiting, "FIRST_S", 1.0)
    s3.upload(SOURCE, "quiet")
    if when == "from the beginning":
        proxy.silent = True
    else:
        s3.requests.clear()
        s3.after = lambda request: setattr(proxy, "silent", len(s3.requests) > 6)
    started = time.monotonic()
    with (
        stores_with(StoreSettings({"timeout": "4s"})),
        caplog.at_level(logging.WARNING),
        pytest.raises(StorageError, match="timeout=SECONDS"),
    ):
        ASKED[asked](tmp_path)
    assert 3 < time.monotonic() - started < 12
    proxy.silent = False
    assert any("s3://bucket/ to answer" in text for text in caplog.messages), caplog.messages
    assert not (tmp_path / "out").exists()
