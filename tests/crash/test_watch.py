"""A watcher is killed at random moments: whatever lies in its target is whole, and the next one ends with all."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from mcore_rlhf import CheckpointManager, ManagerOptions, TorchEngine
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.manager.run import steps
from mcore_rlhf.verify.checkpoint import verify

STEPS = (1, 2, 3)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("watched") / "run"
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.AdamW(model.parameters())
    options = ManagerOptions(catch_signals=False, fsync=False)
    with CheckpointManager(found, TorchEngine(model, optimizer), options=options) as manager:
        for step in STEPS:
            model(torch.randn(2, 300)).sum().backward()
            optimizer.step()
            manager.save(step, blocking=True)
    return found


def command(root: Path, out: Path | str) -> list[str]:
    return [*(sys.executable, "-m", "mcore_rlhf"), *("watch", str(root), "--to", "dcp", "--into", str(out), "--json")]


def watching(root: Path, out: Path, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen([*command(root, out), *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def check(out: Path) -> list[int]:
    """Every result is whole; which there are."""
    there = sorted(out.glob("global_step_*"))
    for folder in there:
        assert steps.is_committed(folder)
        assert verify(folder / "actor", ReadOptions()).intact
    return [int(folder.name.rpartition("_")[2]) for folder in there]


@pytest.mark.parametrize("kills", [1, pytest.param(30, marks=pytest.mark.slow)])
def test_it_is_killed_at_random(root: Path, tmp_path: Path, kills: int) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    draws, out = random.Random(seed), tmp_path / "out"
    for _ in range(kills):
        process = watching(root, out)
        time.sleep(draws.uniform(0.2, 2.5))
        process.kill()
        process.communicate(timeout=60)
        check(out)
    process = watching(root, out, "--once")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert sorted(check(out)) == [*STEPS]


def test_a_signal_ends_it(root: Path, tmp_path: Path) -> None:
    process = watching(root, tmp_path / "out")
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["kind"] == "converted"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert 3 in check(tmp_path / "out")


UNHEARD = """
import signal
from mcore_rlhf.cli import main
from mcore_rlhf.manager.watch import Watcher


class Dying:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)  # Python forgets what its handler raises here


look = Watcher.look


def once(self):
    Watcher.look = look
    Dying()
    return look(self)


Watcher.look = once
main()
"""


def test_a_signal_that_python_drops_ends_it(root: Path, tmp_path: Path) -> None:
    given = [sys.executable, "-c", UNHEARD, *command(root, tmp_path / "out")[3:]]
    done = subprocess.run(given, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    check(tmp_path / "out")
