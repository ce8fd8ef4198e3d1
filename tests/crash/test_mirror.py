"""Steps that are mirrored into an S3 store behind training: nothing waits for it, is sent twice, or is taken for good that is not."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf.errors import StorageError, UsageError
from mcore_rlhf.manager.run import mirror as mirroring
from mcore_rlhf.manager.run import retention, steps
from mcore_rlhf.manager.run.manager import CheckpointManager
from mcore_rlhf.manager.run.mirror_status import MirrorStatus
from mcore_rlhf.manager.run.options import Event, Mirror
from mcore_rlhf.manager.run.retention import KeepLast, Retention
from mcore_rlhf.storage.manifest import check
from mcore_rlhf.storage.objects import open_url
from mcore_rlhf.storage.store import StorePath
from tests.distributed.forked import SERVER
from tests.helpers.damage import flip_a_bit
from tests.helpers.mirror_child import MirroredRun, save_there, train_on_a_host
from tests.helpers.object_store import BUCKET, S3, Request, url


@pytest.fixture
def s3(s3: S3, monkeypatch: pytest.MonkeyPatch) -> S3:
    """The server; the mirror's patience, and what this process knows of its earlier runs, are not under test."""
    monkeypatch.setattr(mirroring, "PATIENCE_S", 0.2)
    monkeypatch.setattr(mirroring, "_PAUSE_S", 0.1)
    return s3


@pytest.fixture(autouse=True)
def forgetful(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Every test, and every call, is another process' memory of what it has loaded and saved."""

    def forget() -> None:
        monkeypatch.setattr(retention, "_OF_THIS_RUN", set())

    forget()
    return forget


def there(key: str) -> StorePath:
    return open_url(url(key))


def mirrored(key: str) -> list[int]:
    """Steps of a mirror, of which every byte is as it was written."""
    found = steps.committed(there(key))
    for step in found:
        assert not check(step.path, steps.read_manifest(step.path)).found
    return [step.step for step in found]


def local(root: Path) -> list[int]:
    return [step.step for step in steps.committed(root)]


def saved(manager: CheckpointManager, run: MirroredRun, *numbers: int) -> None:
    for step in numbers:
        run.step()
        manager.save(step, blocking=True)


def kinds(heard: list[Event], kind: str) -> list[int | None]:
    return [event.step for event in heard if event.kind == kind]


def is_file(request: Request, key: str) -> bool:
    """Whether a request sends a step's file."""
    inside = request.key.startswith(f"{key}/global_step_") and "/.tx-" in request.key
    return request.method == "PUT" and inside and not request.key.endswith(".writer")


def test_a_run_whose_root_is_gone_goes_on_from_its_mirror_bit_for_bit(
    s3: S3, tmp_path: Path, forgetful: Callable[[], None]
) -> None:
    run, heard = MirroredRun(), list[Event]()
    with run.manager(tmp_path / "root", url("whole"), on_event=heard.append) as manager:
        saved(manager, run, 1, 2)
        assert manager.wait_for_mirror(30) == []
    assert mirrored("whole") == [1, 2]
    assert sorted(kinds(heard, "mirror")) == [1, 2]  # type: ignore[type-var]
    assert {"seconds", "bytes", "gb_per_s", "waiting", "waiting_bytes"} <= set(
        next(event for event in heard if event.kind == "mirror").values
    )
    expected = [run.step() for _ in range(3)]
    shutil.rmtree(tmp_path / "root")
    forgetful()
    torch.manual_seed(99)
    again = MirroredRun()
    with again.manager(tmp_path / "root", url("whole")) as manager:
        resumed = manager.load("auto")
        assert resumed is not None
        assert (resumed.step, str(resumed.path)) == (2, url("whole/global_step_2"))
        assert [again.step() for _ in range(3)] == expected
        saved(manager, again, 3)
        assert manager.wait_for_mirror(30) == []
    assert local(tmp_path / "root") == [3]
    assert mirrored("whole") == [1, 2, 3]
    with MirroredRun().manager(tmp_path / "root", url("whole")) as manager:
        by_number = manager.load(1)
        assert by_number is not None
        assert by_number.step == 1


@pytest.mark.parametrize("how", ["continue", "raise"])
def test_where_there_is_no_thread_for_it_training_goes_on_and_it_is_tried_again(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: Any
) -> None:
    def none(*args: Any) -> threading.Thread:
        raise StorageError("mcore_rlhf mirror: the system gives no thread for it")

    run, heard, begin = MirroredRun(), list[Event](), mirroring.begin
    monkeypatch.setattr(mirroring, "begin", none)
    with run.manager(tmp_path / "root", Mirror(url(f"no-{how}"), on_error=how), on_event=heard.append) as manager:
        saved(manager, run, 1)
        if how == "raise":
            with pytest.raises(StorageError, match=r"the mirror .*: mcore_rlhf mirror: the system gives no thread"):
                saved(manager, run, 2)
        else:
            saved(manager, run, 2)
        assert (local(tmp_path / "root"), mirrored(f"no-{how}")) == ([1] if how == "raise" else [1, 2], [])
        assert manager.wait_for_mirror(30) == local(tmp_path / "root")
        monkeypatch.setattr(mirroring, "begin", begin)
        assert manager.wait_for_mirror(30) == []
    assert mirrored(f"no-{how}") == local(tmp_path / "root")
    assert any("gives no thread" in event.text for event in heard)


def test_a_killed_upload_goes_on_and_sends_nothing_twice(s3: S3, tmp_path: Path) -> None:
    environment = s3.environment
    child = SERVER.Process(target=save_there, args=(str(tmp_path / "root"), url("mirror-of-a-killed"), environment, 1))
    complete, kill = list[str](), threading.Event()

    def after(request: Request) -> None:
        if is_file(request, "mirror-of-a-killed"):
            complete.append(request.key)
            if len(complete) == 2:
                kill.set()

    s3.after = after
    started = list[str]()

    def fault(request: Request) -> str | None:
        """Two files come through, however many are sent at a time."""
        if is_file(request, "mirror-of-a-killed") and request.key not in started:
            started.append(request.key)
        return "503 Slow Down" if kill.is_set() or request.key in started[2:] else None

    s3.fault = fault
    child.start()
    assert kill.wait(60)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join(10)
    time.sleep(0.5)  # requests that were under way when it died
    done = list(complete)
    s3.after, s3.fault = lambda request: None, lambda request: None
    assert local(tmp_path / "root") == [1]
    assert mirrored("mirror-of-a-killed") == []
    s3.requests.clear()
    with MirroredRun().manager(tmp_path / "root", url("mirror-of-a-killed")) as manager:
        assert manager.load("auto") is not None
        assert manager.wait_for_mirror(30) == []
    assert mirrored("mirror-of-a-killed") == [1]
    again = {request.key for request in s3.requests if is_file(request, "mirror-of-a-killed")}
    assert again, done
    assert not again & set(done)
    assert not [item for item in keys("mirror-of-a-killed") if item.endswith(".writer")]


def keys(key: str) -> list[str]:
    return [item["path"] for item in there(key).store.objects(key)]  # type: ignore[attr-defined]


class TwoHosts:
    """Processes on two hosts, one of which gets a single file through, and is then killed, or both are.

    Args:
        s3: The server.
        folder: Of their root.
        name: Of the mirror.
        both: Whether both are killed.
    """

    def __init__(self, s3: S3, folder: Path, name: str, both: bool) -> None:
        self.s3, self.folder, self.name, self.both = s3, folder, name, both
        self.complete, self.allowed, self.kill = list[Request](), list[str](), threading.Event()
        s3.after, s3.fault = self.after, self.fault
        self.processes = self.started()

    def started(self) -> list[Any]:
        environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        words = str(self.folder), str(self.folder / f"meeting-{time.monotonic_ns()}"), url(self.name), environment
        found = [SERVER.Process(target=train_on_a_host, args=(rank, *words)) for rank in (0, 1)]
        for process in found:
            process.start()
        return found

    def fault(self, request: Request) -> str | None:
        if is_file(request, self.name) and (request.who == "node-1" or (self.both and self.kill.is_set())):
            self.allowed.append(request.key)
            return "503 Slow Down" if request.key != self.allowed[0] else None
        return None

    def after(self, request: Request) -> None:
        if is_file(request, self.name):
            self.complete.append(request)
            if request.who == "node-1":
                self.kill.set()

    def killed(self) -> None:
        assert self.kill.wait(60)
        for process in self.processes if self.both else self.processes[1:]:
            process.kill()
            process.join(10)

    def restarted(self) -> None:
        time.sleep(0.5)  # requests that were under way when they died
        assert mirrored(self.name) == []
        self.s3.fault = lambda request: None
        self.processes = self.started()

    def senders(self) -> dict[str, str]:
        """Who sent each file of the step: nobody has sent one that was there."""
        for process in self.processes:
            process.join(90)
        sent = [request.key.partition("/.tx-")[2].partition("/")[2] for request in self.complete]
        assert len(sent) == len(set(sent)), sent
        return {path: request.who for path, request in zip(sent, self.complete, strict=True)}


@pytest.mark.parametrize("restarted", [True, False], ids=["all restart", "the other goes on"])
def test_every_host_sends_what_its_ranks_wrote_and_a_kill_loses_and_repeats_nothing(
    s3: S3, tmp_path: Path, restarted: bool
) -> None:
    name = f"hosts-{restarted}"
    hosts = TwoHosts(s3, tmp_path, name, both=restarted)
    try:
        hosts.killed()
        if restarted:
            hosts.restarted()
        senders = hosts.senders()
    finally:
        for process in hosts.processes:
            process.kill()
    told = {path.name: path.read_text() for path in tmp_path.glob("waiting-*")}
    assert told == ({"waiting-0": "[]", "waiting-1": "[]"} if restarted else {"waiting-0": "[]"})
    assert mirrored(name) == [1]
    manifest = steps.read_manifest(there(name) / "global_step_1")
    writers = {path: host for host, paths in manifest.report["hosts"].items() for path in paths}
    moments = {f"{role}/moments.pt" for role in ("actor", "critic", "reward")}
    assert {path for path, host in writers.items() if host == "node-1"} == moments
    assert set(senders) == set(writers) == set(manifest.files)
    strangers = {path for path, host in writers.items() if senders[path] != host}
    assert strangers <= moments
    assert len(strangers) == (0 if restarted else 2)  # of the host that was killed, all but the one that it had sent


def test_a_server_that_is_away_costs_a_line_and_no_step(s3: S3, tmp_path: Path) -> None:
    s3.fault = lambda request: "503 Slow Down"
    run, heard = MirroredRun(), list[Event]()
    with run.manager(tmp_path / "root", url("away"), on_event=heard.append) as manager:
        began = time.monotonic()
        saved(manager, run, 1, 2)
        assert time.monotonic() - began < 10
        assert manager.wait_for_mirror(2) == [1, 2]
        failed = [event for event in heard if event.kind == "failed"]
        assert failed
        assert "503" in failed[0].text
        assert "Training goes on, " in failed[0].text
        assert failed[-1].values["waiting"] >= 1
        status = MirrorStatus.read(tmp_path / "root")
        assert status is not None
        assert "away" in status.problem
        assert [status.of(step) for step in steps.listed(tmp_path / "root")] == ["waiting", "waiting"]
        s3.fault = lambda request: None
        assert manager.wait_for_mirror(60) == []
    assert mirrored("away") == [1, 2]
    assert kinds(heard, "mirror") == [2, 1]  # the newest first
    status = MirrorStatus.read(tmp_path / "root")
    assert status is not None
    assert status.problem == ""


def test_a_root_that_cannot_be_read_for_a_moment_ends_no_mirror(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What failed was asked once more, to say what waits: with that the thread had ended, and nothing was sent any more."""
    run, heard, real = MirroredRun(), list[Event](), steps.listed
    stale = threading.Event()

    def listed(root: Any) -> Any:
        if stale.is_set() and threading.current_thread().name == "mcore_rlhf mirror":
            raise StorageError(f"{root}: cannot list: Stale file handle")
        return real(root)

    monkeypatch.setattr(steps, "listed", listed)
    with run.manager(tmp_path / "root", url("stale"), on_event=heard.append) as manager:
        stale.set()
        saved(manager, run, 1)
        while not kinds(heard, "failed"):
            time.sleep(0.05)
        assert "Stale file handle\nTraining goes on, it is tried again" in heard[-1].text
        stale.clear()
        saved(manager, run, 2)
        assert manager.wait_for_mirror(30) == []
    assert mirrored("stale") == [1, 2]


def test_closing_waits_for_the_root_alone_and_the_next_start_goes_on(s3: S3, tmp_path: Path) -> None:
    s3.delay = 1.0
    run = MirroredRun()
    began = time.monotonic()
    with run.manager(tmp_path / "root", url("closing")) as manager:
        saved(manager, run, 1)
    assert time.monotonic() - began < 8
    assert local(tmp_path / "root") == [1]
    s3.delay = 0.0
    with MirroredRun().manager(tmp_path / "root", url("closing")) as manager:
        assert manager.load("auto") is not None
        assert manager.wait_for_mirror(30) == []
    assert mirrored("closing") == [1]


def test_each_tier_keeps_what_its_own_rules_want(s3: S3, tmp_path: Path) -> None:
    run, heard = MirroredRun(), list[Event]()
    here = Retention([KeepLast(1)])
    mirror = Mirror(url("tiers"), keep=Retention([KeepLast(2)]))
    with run.manager(tmp_path / "root", mirror, keep=here, on_event=heard.append) as manager:
        for step in (1, 2, 3, 4):
            saved(manager, run, step)
            assert manager.wait_for_mirror(30) == []
    assert local(tmp_path / "root") == [4]
    assert mirrored("tiers") == [3, 4]
    assert kinds(heard, "drop") == []
    sent = kinds(heard, "mirror")
    with MirroredRun().manager(tmp_path / "root", mirror, keep=here, on_event=heard.append) as manager:
        manager.load("auto")
        assert manager.wait_for_mirror(30) == []
    assert kinds(heard, "mirror") == sent


def test_steps_that_wait_stay_in_the_root_up_to_a_number_and_then_go_with_a_line(s3: S3, tmp_path: Path) -> None:
    s3.fault = lambda request: "503 Slow Down"
    run, heard = MirroredRun(), list[Event]()
    mirror = Mirror(url("waiting"), most_waiting=3)
    with run.manager(tmp_path / "root", mirror, keep=Retention([KeepLast(1)]), on_event=heard.append) as manager:
        saved(manager, run, 1, 2, 3, 4, 5)
        assert local(tmp_path / "root") == [3, 4, 5]
        assert kinds(heard, "drop") == [1, 2]
        s3.fault = lambda request: None
        assert manager.wait_for_mirror(60) == []
        assert mirrored("waiting") == [3, 4, 5]
        saved(manager, run, 6)
    assert local(tmp_path / "root")[-1] == 6
    assert kinds(heard, "drop") == [1, 2]


def test_a_step_that_was_damaged_after_its_commit_is_not_sent_as_good(s3: S3, tmp_path: Path) -> None:
    run, heard = MirroredRun(), list[Event]()
    s3.fault = lambda request: "503 Slow Down"
    with run.manager(tmp_path / "root", url("damaged"), on_event=heard.append) as manager:
        saved(manager, run, 1, 2)
        file = tmp_path / "root" / "global_step_2" / "actor" / "state.pt"
        flip_a_bit(file)
        s3.fault = lambda request: None
        assert manager.wait_for_mirror(60) == []
    assert mirrored("damaged") == [1]
    (told,) = [event for event in heard if event.kind == "failed" and event.step == 2]
    assert "actor/state.pt: is damaged" in told.text
    assert not [key for key in keys("damaged") if "global_step_2" in key]
    status = MirrorStatus.read(tmp_path / "root")
    assert status is not None
    assert [status.of(step) for step in steps.listed(tmp_path / "root")] == ["mirrored", "failed"]


def test_of_a_step_in_both_tiers_the_one_that_is_intact_is_taken(s3: S3, tmp_path: Path) -> None:
    run, heard = MirroredRun(), list[Event]()
    with run.manager(tmp_path / "root", url("either")) as manager:
        saved(manager, run, 1, 2)
        assert manager.wait_for_mirror(30) == []
    file = tmp_path / "root" / "global_step_2" / "actor" / "state.pt"
    flip_a_bit(file)
    with MirroredRun().manager(tmp_path / "root", url("either"), on_event=heard.append) as manager:
        resumed = manager.load("auto")
    assert resumed is not None
    assert str(resumed.path) == url("either/global_step_2")
    assert kinds(heard, "skip") == [2]
    s3.fault = lambda request: "403 Forbidden"
    with MirroredRun().manager(tmp_path / "root", url("either"), on_event=heard.append) as manager:
        older = manager.load("auto")  # the mirror cannot be asked
    assert older is not None
    assert older.step == 1
    shutil.rmtree(tmp_path / "root")
    anew = MirroredRun().manager(tmp_path / "root", url("either"))
    with anew as manager, pytest.raises(StorageError, match="its mirror cannot be read"):
        manager.load("auto")  # beginning anew would be silently wrong


def test_what_a_run_that_went_back_leaves_behind_is_not_resumed_from(
    s3: S3, tmp_path: Path, forgetful: Callable[[], None]
) -> None:
    run, root = MirroredRun(), tmp_path / "root"
    with run.manager(root, url("back")) as manager:
        saved(manager, run, 1, 2, 3)
        assert manager.wait_for_mirror(30) == []
    for step in (2, 3):
        retention.delete(root / f"global_step_{step}")  # the mirror alone has them
    forgetful()
    s3.fault = lambda request: "503 Slow Down"
    with MirroredRun().manager(root, url("back")) as manager:
        manager.load(1)
        saved(manager, MirroredRun(), 2)  # and the mirror hears nothing of it
    s3.fault = lambda request: None
    forgetful()
    with MirroredRun().manager(root, url("back")) as manager:
        resumed = manager.load("auto")
        assert resumed is not None
        assert (resumed.step, resumed.path) == (2, root / "global_step_2")
        assert manager.wait_for_mirror(30) == []
    assert mirrored("back") == [1, 2]
    assert [step.step for step in steps.committed(there("back"), quarantined=True)] == [1, 2, 3]
    transactions = {steps.read_manifest(place / "global_step_2").transaction for place in (root, there("back"))}
    assert len(transactions) == 1


def test_another_runs_mirror_is_left_alone(s3: S3, tmp_path: Path, forgetful: Callable[[], None]) -> None:
    run, heard = MirroredRun(), list[Event]()
    with run.manager(tmp_path / "one", url("taken")) as manager:
        saved(manager, run, 1, 2)
        assert manager.wait_for_mirror(30) == []
    forgetful()
    before = keys("taken")
    with MirroredRun().manager(tmp_path / "two", url("taken"), on_event=heard.append) as manager:
        saved(manager, MirroredRun(), 1)
        assert manager.wait_for_mirror(1) == [1]
    assert keys("taken") == before
    assert "neither loaded nor sent (1, 2)" in next(event for event in heard if event.kind == "failed").text


def test_an_error_is_raised_where_that_is_wanted_and_a_url_that_is_none_at_once(s3: S3, tmp_path: Path) -> None:
    s3.fault = lambda request: "403 Forbidden"
    run, heard = MirroredRun(), list[Event]()
    mirror = Mirror(url("raising"), on_error="raise")
    with run.manager(tmp_path / "root", mirror, on_event=heard.append) as manager:
        saved(manager, run, 1)
        while not kinds(heard, "failed"):
            time.sleep(0.05)
        with pytest.raises(StorageError, match="the mirror s3://bucket/raising"):
            manager.save(2)
        saved(manager, run, 3)
    for wrong in (str(tmp_path), f"s3://{BUCKET}", "hf://org/model"):
        with pytest.raises(UsageError):
            MirroredRun().manager(tmp_path / "root2", wrong)
    with pytest.raises(UsageError, match="most_waiting"):
        Mirror(url("x"), most_waiting=0)
    wrong_choice: Any = "whatever"
    with pytest.raises(UsageError, match="on_error"):
        Mirror(url("x"), on_error=wrong_choice)
