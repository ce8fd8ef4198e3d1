"""Asynchronous GRPO (:mod:`tests.crash.async_grpo`) on a disk that fills up, fails and hangs, and by clocks that jump, while it is killed.

``LD_PRELOAD=shim.so python -m tests.crash.grpo_weather FOLDER --kills N --seed S``. Each trainer takes the options of a save in another
combination; what they promise is looked at from within as well: threads, descriptors, and what is left in the root.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import gc
import json
import logging
import os
import random
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from mcore_rlhf import EverySteps, KeepLast, ManagerOptions, Retention, TorchEngine
from mcore_rlhf.errors import CheckpointError
from mcore_rlhf.manager.run import steps
from mcore_rlhf.manager.run.snapshot import Role
from mcore_rlhf.storage.manifest import check
from tests.crash.async_grpo import Supervisor, Trainer, work
from tests.faults.disk import EVERY, WRITING, Disk

HANGS_S, WIDTH = 1.5, 1500
_clock = time.time


def jumping(rng: random.Random) -> None:
    """From now on this process' clock goes by jumps: by hours, to and fro."""
    by = [0.0]

    def jump() -> None:
        while True:
            by[0] = rng.choice([0, -7200, 7200, -1e8, 1e8])
            time.sleep(rng.random())

    time.time = lambda: _clock() + by[0]
    time.time_ns = lambda: int(time.time() * 1e9)
    threading.Thread(target=jump, daemon=True, name="jump").start()


def weather(disk: Disk, folder: Path, rng: random.Random) -> None:
    """Bad and good in turns, until the run is to end."""

    def blow() -> None:
        while not (folder / "stop").exists():
            time.sleep(rng.random() * 0.6)
            kind = rng.choice(["full", "fails", "hangs", "stale", "slow"])
            if kind == "full":
                disk.arm(1, rng.choice([errno.ENOSPC, errno.EDQUOT]), WRITING, many=-1)
            elif kind == "fails":
                disk.arm(
                    rng.randint(1, 60),
                    rng.choice([errno.EIO, errno.ESTALE, errno.EACCES]),
                    EVERY,
                    many=rng.choice([1, 3, 40]),
                )
            elif kind == "stale":
                disk.arm(1, errno.ESTALE, "open,stat,opendir,readdir", many=-1)
            elif kind == "hangs":
                disk.arm(rng.randint(1, 60), 0, EVERY, many=1, mode="sleep", ms=int(1000 * HANGS_S))
            else:
                disk.arm(1, 0, EVERY, many=-1, mode="sleep", ms=5)
            time.sleep(rng.random() * 0.8)
            disk.mend()
        disk.mend()

    threading.Thread(target=blow, daemon=True, name="weather").start()


@dataclass
class Weathered(Trainer):
    """Saves whatever the weather. Beside the policy there is a reference that nothing changes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reference = TorchEngine(torch.nn.Linear(WIDTH, WIDTH))  # 9 MiB: more than the least that waves go through
        self.events: list[str] = []

    def roles(self) -> dict[str, Role]:
        return {"actor": self.engine, "reference": self.reference}

    def options(self) -> ManagerOptions:
        pick = self.rng.choice
        self.picked = {
            "save_retries": pick([0, 1, 3]),
            "save_timeout": pick([None, 0.5, 1.0]),
            "lazy_snapshot": pick([False, True]),
            "max_host_memory": pick([None, 4096, 1 << 30]),
            "link_unchanged": pick([False, True]),
            "fsync": pick([False, True]),
            "asynchronous": pick([True, True, False]),
            "on_error": pick(["continue", "continue", "raise"]),
        }
        keep = Retention((KeepLast(2),))
        return ManagerOptions(
            save=EverySteps(1), keep=keep, catch_signals=False, on_event=self._note, timeout=5, **self.picked
        )

    def _note(self, event: object) -> None:
        self.events.append(str(event))

    def run(self) -> None:
        self.rng = random.Random(os.urandom(8))
        seed = self.rng.randrange(1 << 32)
        self.rng = random.Random(seed)
        log = self.folder / "trainers"
        root = self.folder / "root"
        with log.open("a") as file:
            file.write(f"{os.getpid()} {seed}\n")
        if self.rng.random() < 0.5:
            jumping(random.Random(seed))
        before = set(os.listdir("/proc/self/fd"))
        disk = Disk(root)
        weather(disk, self.folder, random.Random(seed + 1))
        status = "ended"
        try:
            super().run()
        except CheckpointError as error:
            status = f"{type(error).__name__}: {error}"
            with (self.folder / "refused").open("a") as file:
                file.write(f"{os.getpid()} {self.__dict__.get('picked')} {status}\n")
        self._look(before, status)
        if status != "ended":
            os._exit(3)

    def _look(self, before: set[str], status: str) -> None:
        """What is left of a manager that was closed, once what hung has come to its end."""
        end = time.monotonic() + 8
        while time.monotonic() < end:
            gc.collect()
            threads = [one.name for one in threading.enumerate() if one.name.startswith("mcore_rlhf")]
            descriptors = []
            for number in set(os.listdir("/proc/self/fd")) - before:
                try:
                    target = os.readlink(f"/proc/self/fd/{number}")
                except OSError:
                    continue
                if str(self.folder / "root") in target or "mcore" in target:
                    descriptors.append(target)
            if not threads and not descriptors:
                break
            time.sleep(0.1)
        if threads or descriptors:
            with (self.folder / "leaks").open("a") as file:
                file.write(
                    f"{os.getpid()} {self.picked} {status}: {threads} {descriptors}\n"
                    + "\n".join(self.events[-8:])
                    + "\n"
                )


def work_in_weather(folder: Path, name: str) -> None:
    logging.disable()
    rng = random.Random(os.urandom(8))
    if rng.random() < 0.5:
        jumping(rng)
    if ROUGH:
        weather(Disk(folder / "root"), folder, rng)
    while True:
        try:
            work(folder, name)
        except CheckpointError:
            time.sleep(0.05)


@dataclass
class Rough(Supervisor):
    """Also tears the journal's files, and lets who ended of a disk begin again."""

    seen: set[str] = field(default_factory=set)

    def kill(self, names: list[str]) -> None:
        super().kill(names)
        if self.rng.random() < 0.4:
            self._tear()
        self._check()

    def _tear(self) -> None:
        """What a power failure leaves behind what was confirmed: zeros, noise, half a record; of dead producers."""
        for path in (self.folder / "root" / "journal").glob("*.seg"):
            try:
                with path.open("ab") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    file.write(
                        self.rng.choice([bytes(self.rng.randint(1, 5000)), os.urandom(self.rng.randint(1, 300))])
                    )
            except (BlockingIOError, FileNotFoundError):
                continue

    def _check(self) -> None:
        """No step is listed that is not intact."""
        if "trainer" in self.pids:
            return
        for step in steps.listed(self.folder / "root"):
            if step.state == "committed":
                found = check(step.local, steps.read_manifest(step.local), sizes_only=False).found
                if found:
                    raise SystemExit(f"step {step.step}: {found}")

    def _wait(self, seconds: float = 120) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pid, status = os.waitpid(self.pids["trainer"], os.WNOHANG)
            if pid:
                del self.pids["trainer"]
                if not status:
                    return
                if (self.folder / "errors").exists():
                    raise SystemExit((self.folder / "errors").read_text())
                self.start()
            time.sleep(0.02)
        raise SystemExit("the trainer does not end")


ROUGH = False

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rough", action="store_true")
    given = parser.parse_args()
    ROUGH = given.rough
    torch.set_num_threads(1)
    logging.getLogger("mcore_rlhf").setLevel(logging.ERROR)
    print(json.dumps(Rough(given.folder, given.kills, random.Random(given.seed), Weathered, work_in_weather).run()))
