"""Where the system gives few threads, work goes on with these; where it gives none, it is said what would help."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.errors import StorageError
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.storage import threads
from mcore_rlhf.storage.threads import Pool, begin_some
from mcore_rlhf.verify.checkpoint import Depth, verify
from mcore_rlhf.weights import iter_weights

SOURCE = Path(__file__).parents[2] / "goldens" / "megatron" / "tp2pp2dp2_bf16_do"


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many threads more the system gives, in a list of one."""
    real, given = threading.Thread.start, [0]

    def start(thread: threading.Thread) -> None:
        if not given[0]:
            raise RuntimeError("can't start new thread")
        given[0] -= 1
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    return given


@pytest.mark.parametrize("few", [1, 2])
def test_one_suffices(left: list[int], few: int) -> None:
    left[0] = few
    with Pool(5, "count") as pool:
        assert list(pool.map(abs, range(-20, 0))) == list(range(20, 0, -1))
    left[0] = few
    done = list[None]()
    for thread in begin_some(5, "count", done.append, None):
        thread.join()
    assert len(done) == few


@pytest.mark.parametrize("comes", [False, True], ids=["never", "late"])
def test_one_that_is_given_and_does_not_begin_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch, comes: bool
) -> None:
    """It found no memory; or the machine was so slow that it begins when it has been given up, and then does nothing."""
    real, late, ended = threading.Thread._bootstrap, threading.Event(), threading.Event()  # type: ignore[attr-defined]

    def bootstrap(thread: threading.Thread) -> None:
        if comes and late.wait(10):
            real(thread)
        ended.set()

    monkeypatch.setattr(threading.Thread, "_bootstrap", bootstrap)
    monkeypatch.setattr(threads, "_BEGINS_S", 0.1)
    done = list[None]()
    with pytest.raises(StorageError, match=r"no thread for it: one was given, and has not begun within 0.1 s"):
        threads.begin("count", done.append, None)
    late.set()
    assert ended.wait(10)
    assert done == []
    monkeypatch.undo()
    threads.begin("count", done.append, None).join()
    assert done == [None]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("begin", [0, 1, 3])
def test_a_pool_goes_on_with_those_that_begin(monkeypatch: pytest.MonkeyPatch, begin: int) -> None:
    """The system gives all that are asked for, and to some no memory to begin with."""
    real, given, waited = threading.Thread._bootstrap, [0], time.monotonic()  # type: ignore[attr-defined]

    def bootstrap(thread: threading.Thread) -> None:
        given[0] += 1
        if given[0] <= begin:
            real(thread)

    monkeypatch.setattr(threading.Thread, "_bootstrap", bootstrap)
    monkeypatch.setattr(threads, "_BEGINS_S", 0.3)
    with Pool(5, "count") as pool:
        if begin:
            assert list(pool.map(abs, range(-200, 0))) == list(range(200, 0, -1))
        else:
            with pytest.raises(StorageError, match=r"count: the system gives no thread for it: one was given"):
                pool.submit(abs, -1)
    assert time.monotonic() - waited < 3, "the first that does not begin is the last that is asked for"


def test_a_pool_hands_on_what_is_raised_and_cancels_what_nobody_has_begun() -> None:
    free, begun, done = threading.Event(), threading.Event(), list[int]()

    def hold() -> None:
        begun.set()
        assert free.wait(10)

    pool = Pool(1, "hold")
    held, others = pool.submit(hold), [pool.submit(done.append, number) for number in range(3)]
    assert begun.wait(10)
    pool.shutdown(wait=False, cancel_futures=True)
    free.set()
    assert held.result(10) is None
    assert all(one.cancelled() for one in others)
    assert not done
    with Pool(2, "fail") as pool:
        with pytest.raises(ZeroDivisionError):
            pool.submit(divmod, 1, 0).result(10)
        assert pool.submit(divmod, 7, 2).result(10) == (3, 1), "the thread goes on"


@pytest.mark.timeout(20)
def test_a_pool_ends_where_an_interrupt_comes_as_a_thread_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """It began, and nobody has it on a list: it took the word to end that was for another, which was waited for then."""
    begin = threads.begin
    free, given = threading.Event(), list[threading.Thread]()

    def interrupted(name: str, job: Callable[..., object], *args: object) -> threading.Thread:
        given.append(begin(name, job, *args))
        if len(given) == 2:
            raise KeyboardInterrupt
        return given[-1]

    monkeypatch.setattr(threads, "begin", interrupted)
    pool = Pool(3, "count")
    pool.submit(free.wait, 10)
    with pytest.raises(KeyboardInterrupt):
        pool.submit(abs, -1)
    threading.Timer(0.2, free.set).start()  # the unlisted one is the first to be told
    pool.shutdown(wait=True, cancel_futures=True)
    for thread in given:
        thread.join(5)
        assert not thread.is_alive()


def test_conversions_verdicts_and_weights_say_that_there_is_none(left: list[int], tmp_path: Path) -> None:
    options = ConvertOptions(to="megatron", write=WriteOptions(tp=1, pp=1), fsync=False)
    for action in (
        lambda: convert(SOURCE, tmp_path / "out", options),
        lambda: verify(SOURCE, ReadOptions(), Depth.FULL),
        lambda: list(iter_weights(SOURCE)),
    ):
        with pytest.raises(
            StorageError, match=r"the system gives no thread for it: can't start new thread\nRaise the limit"
        ):
            action()
    left[0] = 100
    convert(SOURCE, tmp_path / "out", options)
    left[0] = 1
    assert not verify(tmp_path / "out", ReadOptions(), Depth.FULL).problems
