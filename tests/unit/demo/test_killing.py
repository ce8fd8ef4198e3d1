"""The kill in the middle of a save: it waits for the save, and strikes everybody at once."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from mcore_rlhf.demo.command import KillDuringSave

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]


def touch(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")


def test_it_strikes_all_once_the_save_is_half_done(tmp_path: Path) -> None:
    processes = [subprocess.Popen(SLEEP) for _ in range(2)]
    try:
        with KillDuringSave(tmp_path, 20, lambda: [process.pid for process in processes]) as kill:
            touch(tmp_path, ".global_step_20.partial-ab/actor/one.pt", ".global_step_2.partial-ab/two.pt", "three.pt")
            time.sleep(0.05)
            assert [process.poll() for process in processes] == [None, None]
            assert not kill.seen
            touch(tmp_path, ".global_step_20.partial-ab/actor/two.pt")
            assert [process.wait(10) for process in processes] == [-signal.SIGKILL] * 2
        assert sorted(kill.seen) == [
            ".global_step_20.partial-ab/actor/one.pt",
            ".global_step_20.partial-ab/actor/two.pt",
        ]
    finally:
        for process in processes:
            process.kill()


def test_a_run_that_never_saves_is_left_alone(tmp_path: Path) -> None:
    with KillDuringSave(tmp_path, 20, lambda: [-1]) as kill:
        touch(tmp_path, "global_step_20/actor/one.pt", "global_step_20/actor/two.pt")
    assert not kill.seen
