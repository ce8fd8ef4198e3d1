"""Measuring: wall and CPU time of this process or of its children, memory high-water, and files out of the page cache."""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

MIB = 1 << 20


@dataclass(frozen=True)
class Sample:
    """One run, in seconds; ``cpu`` is user and system time of all its threads and children."""

    wall: float
    cpu: float


def timed(work: Callable[[], object]) -> Sample:
    """Run once."""
    cpu, start = _cpu(), time.perf_counter()
    work()
    return Sample(time.perf_counter() - start, _cpu() - cpu)


def _cpu() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@dataclass
class Contest:
    """Contenders that run one after the other, round by round, so that noise meets them alike."""

    contenders: Mapping[str, Callable[[], object]]
    before: Callable[[], object] = lambda: None
    samples: dict[str, list[Sample]] = field(default_factory=dict)

    def run(self, rounds: int, warm_up: int = 1) -> Contest:
        """Rounds of all contenders; the first ones only warm up."""
        for number in range(warm_up + rounds):
            for name, work in self.contenders.items():
                self.before()
                sample = timed(work)
                if number >= warm_up:
                    self.samples.setdefault(name, []).append(sample)
        self.before()
        return self

    def ratio(self, name: str, to: str, of: str) -> Spread:
        """How many times as long ``name`` took as ``to``; ``of`` is ``wall`` or ``cpu``."""
        ours = [getattr(sample, of) for sample in self.samples[name]]
        theirs = [getattr(sample, of) for sample in self.samples[to]]
        return Spread([a / b for a, b in zip(ours, theirs, strict=True)])

    def spread(self, name: str, of: str) -> Spread:
        """The seconds of one contender."""
        return Spread([getattr(sample, of) for sample in self.samples[name]])


@dataclass(frozen=True)
class Spread:
    """Figures of several rounds."""

    figures: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.figures)

    def __str__(self) -> str:
        return f"{min(self.figures):.3g} / {self.median:.3g} / {max(self.figures):.3g}"


def warm(files: Iterable[Path]) -> None:
    """Read files, so that the page cache has them."""
    buffer = bytearray(MIB)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def cold(files: Iterable[Path]) -> None:
    """Drop files from the page cache; they are flushed first, or dirty pages would stay."""
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def flush(folder: Path) -> None:
    """What ``--no-fsync`` leaves out: every file and folder on the disk."""
    for path in [folder, *folder.rglob("*")]:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def status(*fields: str) -> int:
    """The sum of fields of this process's ``/proc/self/status``, in bytes."""
    with open("/proc/self/status") as lines:
        return sum(int(line.split()[1]) << 10 for line in lines if line.split(":")[0] in fields)


@contextmanager
def high_water(result: dict[str, int], seconds: float = 0.002) -> Iterator[None]:
    """Note the most memory of its own (not: pages of files) that this process had meanwhile."""
    done, peak = threading.Event(), 0

    def watch() -> None:
        nonlocal peak
        while not done.wait(seconds):
            peak = max(peak, status("RssAnon", "RssShmem"))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    result["own"] = max(peak, status("RssAnon", "RssShmem"))
    result["VmHWM"] = status("VmHWM")


def in_fresh_process(module: str, *arguments: object) -> dict[str, float]:
    """Run a module of this package in a process of its own, and return the JSON that it prints last."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    result: dict[str, float] = json.loads(output.strip().splitlines()[-1])
    return result
