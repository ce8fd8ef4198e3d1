"""Who has a prefix of a store to itself: seen by a record's changes, whatever clocks say, answers are lost and processes are killed."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from mcore_rlhf.errors import StorageError
from mcore_rlhf.manager.watched_results import Note, StoreResults
from mcore_rlhf.storage import lease
from mcore_rlhf.storage.lease import Lease
from mcore_rlhf.storage.objects import open_url
from tests.helpers.object_store import S3, LostAnswer, Request, url

PERIOD_S = 1.2
RECORD = "out/.watch/lease.json"
OTHER = f"""
import time
from mcore_rlhf.storage import lease
from mcore_rlhf.storage.objects import open_url
lease.PERIOD_S = {PERIOD_S}
out = open_url("{url("out")}")
lease.Lease(out, out / ".watch/lease.json", print).hold()
print("held", flush=True)
time.sleep(100)
"""

Make = Callable[[], Lease]


@pytest.fixture
def make(s3: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes leases of one place, which are closed in the end."""
    monkeypatch.setattr(lease, "PERIOD_S", PERIOD_S)
    out = open_url(url("out"))
    with ExitStack() as ending:

        def made() -> Lease:
            found = Lease(out, out / ".watch/lease.json", lambda text: None)
            ending.callback(found.close)
            return found

        yield made


def test_it_has_one_holder_and_is_given_up(make: Make) -> None:
    first, second = make(), make()
    first.hold()
    with pytest.raises(StorageError, match=r"another process writes here: process \d+ on .*, since 20.*\nEnd that one"):
        second.hold()
    first.close()
    begun = time.monotonic()
    make().hold()
    assert time.monotonic() - begun < PERIOD_S / 2


def test_who_gets_no_thread_to_renew_it_gives_it_up(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*args: object) -> threading.Thread:
        raise StorageError("lease: the system gives no thread for it")

    with monkeypatch.context() as patched:
        patched.setattr(lease, "begin", none)
        with pytest.raises(StorageError, match="gives no thread"):
            make().hold()
    begun = time.monotonic()
    make().hold()
    assert time.monotonic() - begun < PERIOD_S / 2


def test_who_was_killed_is_taken_over_from_after_a_period(make: Make) -> None:
    with subprocess.Popen([sys.executable, "-c", OTHER], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(StorageError, match=f"process {other.pid} on"):
            make().hold()
        other.kill()
    begun = time.monotonic()
    make().hold()
    assert time.monotonic() - begun >= PERIOD_S


@pytest.mark.parametrize(
    "record",
    [
        {"owner": "x", "host": "h", "pid": 1, "since": "2099-01-01T00:00:00Z"},
        {"owner": "x", "host": "h", "pid": -1, "since": []},
        [1],
    ],
)
def test_a_record_says_who_and_never_when(make: Make, s3: S3, record: object) -> None:
    """One from the future, and such as nobody of ours has put, count for a period, too."""
    s3.put(RECORD, json.dumps(record).encode())
    begun = time.monotonic()
    make().hold()
    assert time.monotonic() - begun >= PERIOD_S


def test_of_many_that_want_a_dead_ones_place_one_has_it(make: Make, s3: S3) -> None:
    s3.put(RECORD, b'{"owner": "x", "host": "h", "pid": 1, "since": "then"}')
    outcomes = list[str]()

    def want(one: Lease) -> None:
        try:
            one.hold()
        except StorageError as error:
            outcomes.append(str(error))
        else:
            outcomes.append("held")

    threads = [threading.Thread(target=want, args=(make(),)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(outcome == "held" for outcome in outcomes) == [False] * 4 + [True], outcomes


def test_lost_answers_are_not_taken_for_another_holder(make: Make, s3: S3) -> None:
    """Of its own puts some arrive and are not answered, and some do not arrive."""
    one, number = make(), iter(range(1000))

    def lose(request: Request) -> None:
        if request.conditional and next(number) % 2:
            raise LostAnswer

    def fail(request: Request) -> str | None:
        return "503 Slow Down\n" if request.conditional and next(number) % 3 == 0 else None

    s3.after, s3.fault = lose, fail
    end = time.monotonic() + 3 * PERIOD_S
    while time.monotonic() < end:
        one.hold()
        time.sleep(0.05)
    assert not one.lost
    assert next(number) > 6, "nothing was lost"


def test_a_record_that_somebody_removed_is_put_anew(make: Make, s3: S3) -> None:
    one = make()
    one.hold()
    open_url(url("out")).store.remove([RECORD])  # type: ignore[attr-defined]
    time.sleep(PERIOD_S)
    one.hold()
    with pytest.raises(StorageError, match="another process writes here"):
        make().hold()


def test_who_was_cut_off_changes_nothing_of_who_came_after_it(make: Make, s3: S3) -> None:
    """Its thread does not come to renew anything, as of a process that is stopped; then it wants to note, to retire and to take back."""
    stopped = StoreResults(open_url(url("out")), lambda text: None)
    with pytest.MonkeyPatch.context() as still:
        still.setattr(Lease, "_beat", lambda self: None)
        stopped.say(Note(1, "a"))
    after = StoreResults(open_url(url("out")), lambda text: None)
    after.say(Note(1, "b"))
    s3.put("out/global_step_1/mcore_rlhf.json", b"{}")
    time.sleep(PERIOD_S)
    for action in (
        lambda: stopped.say(Note(1, "c")),
        lambda: stopped.publish(Note(1, "c")),
        lambda: stopped.drop(1),
        lambda: stopped.retire(1),
        lambda: stopped.begin(2),
        stopped.check,
    ):
        with pytest.raises(StorageError, match=r"Of this one, process .*, nothing was heard for long enough"):
            action()
    assert after.note(1) == Note(1, "b")
    assert after.note(2) is None
    assert s3.get("out/global_step_1/mcore_rlhf.json") == b"{}"
    stopped.close()
    after.hold()
    after.close()


def test_a_store_without_conditions_is_refused(make: Make, s3: S3) -> None:
    s3.fault = lambda request: "501 Not Implemented\n" if request.conditional else None
    with pytest.raises(StorageError, match="has no conditional puts"):
        make().hold()


def test_a_bucket_that_is_not_there_is_no_other_holder(make: Make) -> None:
    out = open_url("s3://nowhere/out")
    with pytest.raises(StorageError, match=r"cannot be put\nIs there such a bucket\?"):
        Lease(out, out / "lease.json", print).hold()


def test_a_whole_bucket_has_notes_too(make: Make, s3: S3) -> None:
    results = StoreResults(open_url("s3://bucket/"), print)
    results.say(Note(1, "a"))
    assert [note.step for note in results.all()] == [1]
    results.close()
    assert json.loads(s3.get(".watch/lease.json"))["gone"]
