"""A watcher whose results lie in an object store: each whole or absent, wherever the watcher was killed."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.manager.run import steps
from mcore_rlhf.storage.urls import checkpoint_path
from mcore_rlhf.verify.checkpoint import verify
from tests.crash.test_watch import STEPS, watching
from tests.crash.test_watch import root as root  # a fixture
from tests.helpers.object_store import S3, url


def events(process: subprocess.Popen[str]) -> list[str]:
    said, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return [f"{event['kind']} {event['step']}" for event in map(json.loads, said.splitlines())]


def results(key: str) -> list[int]:
    """Every result that is published is whole; which there are."""
    out = checkpoint_path(url(key))
    found = [step for step in steps.listed(out) if step.state == "committed"] if out.is_dir() else []
    for step in found:
        assert verify(step.path / "actor", ReadOptions()).intact
    return [step.step for step in found]


def test_each_step_is_published_and_retired(root: Path, s3: S3, tmp_path: Path) -> None:
    said = tmp_path / "said"
    command = f"sh -c 'echo \"$0\" >> {said}' {{path}}"
    assert events(watching(root, url("evals"), "--once", "--run", command)) == [
        f"{kind} {step}" for step in reversed(STEPS) for kind in ("converted", "ran")
    ]
    assert results("evals") == list(STEPS)
    assert said.read_text().splitlines() == [url(f"evals/global_step_{step}") for step in reversed(STEPS)]
    assert events(watching(root, url("evals"), "--once", "--run", command)) == [], "once on each"


def test_rules_and_what_no_watcher_made(root: Path, s3: S3) -> None:
    assert events(watching(root, url("kept"), "--once", "--keep-last", "1")) == [
        "skipped 1",
        "skipped 2",
        "converted 3",
    ]
    assert results("kept") == [3]
    assert events(watching(root, url("kept"), "--once", "--keep-last", "2")) == ["skipped 1", "converted 2"]
    store = checkpoint_path(url("kept")).store  # type: ignore[union-attr]
    store.remove([f"kept/.watch/step-{step}.json" for step in (2, 3)])
    process = watching(root, url("kept"), "--once")
    said, _ = process.communicate(timeout=120)
    found = {(event["kind"], event["step"]) for event in map(json.loads, said.splitlines())}
    assert found == {("failed", 3), ("failed", 2), ("converted", 1)}
    assert "no watcher made it" in said


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_is_killed_at_random(root: Path, s3: S3, rng: random.Random) -> None:
    for _ in range(3):
        process = watching(root, url("killed"))
        time.sleep(rng.uniform(0.5, 5))
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=10)
        results("killed")
    assert "failed" not in "".join(events(watching(root, url("killed"), "--once")))
    assert results("killed") == list(STEPS)


@pytest.mark.parametrize("target", ["https://host/evals", "hf://models/a"])
def test_what_cannot_be_written_is_refused(root: Path, target: str) -> None:
    process = watching(root, target, "--once")  # type: ignore[arg-type]
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "Traceback" not in errors
