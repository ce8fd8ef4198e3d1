"""Memory of a host that processes share: never more than they may take together, least of all where one of them is killed."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from mcore_rlhf.errors import StorageError
from mcore_rlhf.storage import host_pool
from mcore_rlhf.storage.host_pool import LEAST, HostPool

MIB = 1 << 20


@contextmanager
def pools(run: Path, *limits: int, timeout: float = 5.0) -> Iterator[list[HostPool]]:
    with ExitStack() as left:
        made = [HostPool(run, limit, timeout) for limit in limits]
        for pool in made:
            left.callback(pool.close)
        yield made


def test_shares_follow_from_what_everybody_copies(tmp_path: Path) -> None:
    with pools(tmp_path, *[100 * MIB] * 3) as (actor, critic, reference):
        for pool, needed in ((actor, 600 * MIB), (critic, 200 * MIB), (reference, 0)):
            pool.say(needed)
        assert actor.take(600 * MIB) == 75 * MIB
        assert critic.take(200 * MIB) == 17 * MIB, "the least of a third one is left to it"
        assert reference.take(0) == 0
        assert reference.take(3 * MIB) == 3 * MIB
        assert sum(pool.held for pool in (actor, critic, reference)) <= 100 * MIB


def test_of_whom_nothing_is_known_the_mean_is_thought(tmp_path: Path) -> None:
    with pools(tmp_path, *[100 * MIB] * 2) as (actor, critic):
        actor.say(600 * MIB)
        assert actor.take(600 * MIB) == 50 * MIB
        critic.say(200 * MIB)
        assert critic.take(200 * MIB) == 25 * MIB
        assert actor.take(600 * MIB) == 75 * MIB


def test_memory_stays_where_little_would_change(tmp_path: Path) -> None:
    dropped: list[int] = []
    with pools(tmp_path, *[100 * MIB] * 2) as (actor, critic):
        for needed in (500 * MIB, 460 * MIB, 100 * MIB):
            actor.say(needed)
            critic.say(500 * MIB)
            actor.take(needed, lambda needed=needed: dropped.append(needed))  # type: ignore[misc]
    assert dropped == [100 * MIB]


def test_the_smallest_limit_counts(tmp_path: Path) -> None:
    with pools(tmp_path, 100 * MIB, 40 * MIB) as (actor, critic):
        for pool in (actor, critic):
            pool.say(100 * MIB)
        assert [pool.take(100 * MIB) for pool in (actor, critic)] == [20 * MIB] * 2


def test_what_is_too_little_for_all_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pools(tmp_path, MIB, MIB) as both:
        for pool in both:
            pool.say(100 * MIB)
            assert [pool.take(100 * MIB) for _ in range(2)] == [LEAST] * 2
            assert pool.take(MIB) == MIB
    assert [record.getMessage() for record in caplog.records] == [
        f"max_host_memory: 1.0 MB are less than 8.4 MB for each of the {count} processes that save on this host; each takes that"
        for count in (2, 2)
    ]


def test_who_comes_late_waits_and_is_told_for_whom(tmp_path: Path) -> None:
    with pools(tmp_path, 50 * MIB, timeout=0.3) as (actor,):
        actor.say(100 * MIB)
        assert actor.take(100 * MIB) == 50 * MIB
        with pools(tmp_path, 50 * MIB, timeout=0.3) as (critic,):
            critic.say(100 * MIB)
            with pytest.raises(
                StorageError, match=rf"of 52.4 MB on this host nothing .* process {os.getpid()} \(52.4 MB\)"
            ):
                critic.take(100 * MIB)
            actor.give_back()
            assert critic.take(100 * MIB) == 25 * MIB


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    with pools(tmp_path, 50 * MIB, 50 * MIB) as (actor, _):
        folder = actor._folder
        actor.close()
        assert folder.is_dir()
    assert not folder.exists()


def test_what_killed_runs_left_goes_with_the_next_one(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    killed = os.fork()
    if killed == 0:
        pool = HostPool(tmp_path / "killed", 50 * MIB, 5.0)
        os.write(writing, os.fsencode(pool._folder))
        time.sleep(60)
        os._exit(0)
    left = Path(os.fsdecode(os.read(reading, 4096)))
    for fd in (reading, writing):
        os.close(fd)
    with pools(tmp_path / "next", 50 * MIB):
        assert left.is_dir(), "it lives"
    os.kill(killed, signal.SIGKILL)
    os.waitpid(killed, 0)
    assert left.is_dir()
    with pools(tmp_path / "next", 50 * MIB):
        assert not left.exists()


def test_one_that_cleans_up_in_memory_changes_nothing(tmp_path: Path) -> None:
    with pools(tmp_path, 50 * MIB, 50 * MIB) as both:
        shutil.rmtree(both[0]._folder)
        for pool in both:
            pool.say(100 * MIB)
        assert [pool.take(100 * MIB) for pool in both] == [25 * MIB] * 2


def test_a_folder_that_is_taken_away_and_made_anew_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, first = host_pool.open_to_lock, [True]

    def anew(path: Path) -> int:
        if first:
            first.clear()
            shutil.rmtree(path.parent)
            path.parent.mkdir()
        return real(path)

    monkeypatch.setattr(host_pool, "open_to_lock", anew)
    with pools(tmp_path, 50 * MIB) as (pool,):
        assert len(os.listdir(pool._folder)) == 2, "the lock, and its own file"


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    with pools(tmp_path, 50 * MIB) as (pool,):
        folder = pool._folder
    folder.symlink_to(tmp_path)
    try:
        with pytest.raises(StorageError, match="cannot share memory of this host by"):
            HostPool(tmp_path, 50 * MIB, 1.0)
    finally:
        folder.unlink()


def test_a_forked_worker_holds_nothing(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    trainer = os.fork()
    if trainer == 0:
        pool = HostPool(tmp_path, 50 * MIB, 5.0)
        pool.say(100 * MIB)
        pool.take(100 * MIB)
        worker = os.fork()
        if worker:
            os.write(writing, f"{worker}\n".encode())
        time.sleep(60)
        os._exit(0)
    worker = int(os.read(reading, 20))
    try:
        os.kill(trainer, signal.SIGKILL)
        os.waitpid(trainer, 0)
        with pools(tmp_path, 50 * MIB, timeout=1.0) as (pool,):
            pool.say(100 * MIB)
            assert pool.take(100 * MIB) == 50 * MIB, "the worker lives, and holds nothing"
    finally:
        os.kill(worker, signal.SIGKILL)
        os.close(reading)
        os.close(writing)


_WORKER = """
import mmap, random, sys, time
from pathlib import Path
from mcore_rlhf.storage.host_pool import HostPool
random.seed(int(sys.argv[2]))
needed = int(sys.argv[3])
pool = HostPool(Path(sys.argv[1]), int(sys.argv[4]), 20.0)
pool.say(needed)
fields = Path("/proc/self/statm").read_text().split()
print((int(fields[1]) - int(fields[2])) * 4096, flush=True)
held = None
def drop():
    global held
    held = None
for count in range(10**6):
    room = pool.take(needed, drop)
    if held is None or len(held) < room:
        held = None
        held = mmap.mmap(-1, room)  # the heap would keep some of it
        for at in range(0, room, 4096):
            held[at] = 1
    time.sleep(0.02 * random.random())
    if random.random() < 0.7:
        held = None
        pool.give_back()
    print(count, flush=True)
"""


def test_processes_that_are_killed_at_random(tmp_path: Path, seed: int) -> None:
    """Counted by what they say, and by what the kernel knows of their memory."""
    chance, limit = random.Random(seed), 96 * MIB
    needs = [400 * MIB, 200 * MIB, 100 * MIB, 4 * MIB]
    log = [tmp_path / f"{number}.log" for number in range(len(needs))]

    def start(number: int) -> subprocess.Popen[bytes]:
        args = [tmp_path, chance.randrange(10**6), needs[number], limit]
        with log[number].open("wb") as out:
            return subprocess.Popen([sys.executable, "-c", _WORKER, *map(str, args)], stdout=out)

    def at_one_moment(processes: list[subprocess.Popen[bytes]]) -> tuple[int, int]:
        """What they say that they hold, and what they have."""
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        said = held_by(watching)
        had = [memory_of(one.pid) - int(file.read_bytes().split()[0]) for one, file in zip(processes, log, strict=True)]
        for process in processes:
            process.send_signal(signal.SIGCONT)
        return sum(said.get(process.pid, 0) for process in processes), sum(had)

    def worked(number: int) -> int:
        return log[number].read_bytes().count(b"\n")

    with pools(tmp_path, limit) as (watching,):
        running = [start(number) for number in range(len(needs))]
        try:
            until(lambda: all(worked(number) > 1 for number in range(len(needs))))
            most = most_said = 0
            for _ in range(4):
                for _ in range(10):
                    time.sleep(0.03 * chance.random())
                    said, held = at_one_moment(running)
                    most, most_said = max(most, held), max(most_said, said)
                number = chance.randrange(len(needs))
                running[number].kill()
                running[number].wait()
                running[number] = start(number)
                until(lambda: all(worked(number) > 1 for number in range(len(needs))))
        finally:
            for process in running:
                process.kill()
                process.wait()
        assert limit // 2 < most_said <= limit
        assert most < limit + 4 * MIB, "each has some heap besides"
        watching.say(100 * MIB)
        assert watching.take(limit) == limit, "what the dead held is free"


def until(come: object) -> None:
    end = time.monotonic() + 30
    while not come():  # type: ignore[operator]
        assert time.monotonic() < end, "somebody waits for good"
        time.sleep(0.01)


def held_by(pool: HostPool) -> dict[int, int]:
    """By process, what the names of the files say."""
    names = [name.split(".") for name in os.listdir(pool._folder) if name != "alone"]
    return {int(pid): int(held) for pid, _, _, _, held in names}


def memory_of(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return (int(fields[1]) - int(fields[2])) * 4096
