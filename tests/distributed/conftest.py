"""Resident workers with torch and the manager imported, and no training framework."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mcore_rlhf.demo.workers import WorkerPool

PRELOAD = "tests.distributed.preload"


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(4, preload=PRELOAD) as workers:
        yield workers


@contextmanager
def _mounted(folder: Path, megabytes: int) -> Iterator[Path]:
    folder.mkdir()
    mount = shutil.which("mount")
    options = ["-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    done = mount and subprocess.run([mount, *options], check=False, capture_output=True, timeout=20)
    if not done or done.returncode:
        pytest.skip("no right to mount a tmpfs here; the shims of the other tests stand in for it")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=20)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB of its own."""
    with _mounted(tmp_path / "disk", 8) as folder:
        yield folder
