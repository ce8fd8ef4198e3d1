"""A watcher whose results lie in an object store: each whole or absent, wherever the watcher was killed."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from mcore_rlhf.cli import converting, job, watching
from mcore_rlhf.cli.app import app
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.manager.run import steps
from mcore_rlhf.storage import lease
from mcore_rlhf.storage.urls import checkpoint_path
from mcore_rlhf.verify.checkpoint import verify
from tests.crash.test_watch import STEPS
from tests.crash.test_watch import command as on_disk
from tests.crash.test_watch import root as root  # a fixture
from tests.helpers.object_store import S3, url

PERIOD_S = 2.0
QUICK = f"from mcore_rlhf.storage import lease; lease.PERIOD_S = {PERIOD_S}; from mcore_rlhf.cli import main; main()"


def command(root: Path, out: str) -> list[str]:
    """A watcher that need not wait for a minute to know that another one is gone."""
    return [sys.executable, "-c", QUICK, *on_disk(root, out)[3:]]


def line(process: subprocess.Popen[str], kind: str) -> str:
    """What a watcher says of a kind, the next time."""
    assert process.stdout is not None
    return next(str(said["text"]) for said in map(json.loads, process.stdout) if said["kind"] == kind)


def events(said: str) -> list[str]:
    return [f"{event['kind']} {event['step']}" for event in map(json.loads, said.splitlines())]


def results(key: str) -> list[int]:
    """Every result that is published is whole; which there are."""
    out = checkpoint_path(url(key))
    found = [step for step in steps.listed(out) if step.state == "committed"] if out.is_dir() else []
    for step in found:
        assert verify(step.path / "actor", ReadOptions()).intact
    return [step.step for step in found]


def ended(root: Path, key: str, *more: str) -> list[str]:
    """A watcher that looks once, in processes as a user starts it; what it said."""
    done = subprocess.run(
        [*command(root, url(key)), "--once", *more], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return events(done.stdout)


@pytest.fixture
def here(root: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """A watcher that looks once, and converts, in this process: what only starting others would show is shown beside it."""

    def convert(given: dict[str, Any], config: Path | None, check: Callable[[], None]) -> None:
        with redirect_stdout(StringIO()):
            converting.run(job.make_job(given, config), True)

    monkeypatch.setattr(watching, "_in_a_child", convert)
    return lambda out, *more: CliRunner().invoke(app, [*command(root, out)[3:], "--once", *more])


def test_each_step_is_published_and_retired(here: Callable[..., Result], s3: S3, tmp_path: Path) -> None:
    said = tmp_path / "said"
    run = ("--run", f"sh -c 'echo \"$0\" >> {said}' {{path}}")
    assert events(here(url("evals"), *run).stdout) == [
        f"{kind} {step}" for step in reversed(STEPS) for kind in ("converted", "ran")
    ]
    assert results("evals") == list(STEPS)
    assert said.read_text().splitlines() == [url(f"evals/global_step_{step}") for step in reversed(STEPS)]
    assert events(here(url("evals"), *run).stdout) == [], "once on each"


def test_rules_and_what_no_watcher_made(root: Path, here: Callable[..., Result], s3: S3) -> None:
    assert ended(root, "kept", "--keep-last", "1") == ["skipped 1", "skipped 2", "converted 3"]
    assert results("kept") == [3]
    assert events(here(url("kept"), "--keep-last", "2").stdout) == ["skipped 1", "converted 2"]
    store = checkpoint_path(url("kept")).store  # type: ignore[union-attr]
    store.remove([f"kept/.watch/step-{step}.json" for step in (2, 3)])
    done = here(url("kept"))
    assert set(events(done.stdout)) == {"failed 3", "failed 2", "converted 1"}
    assert "no watcher made it" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_is_killed_at_random(root: Path, s3: S3, rng: random.Random) -> None:
    for _ in range(3):
        process = subprocess.Popen(command(root, url("killed")), stdout=subprocess.DEVNULL)
        time.sleep(rng.uniform(0.3, 3 + PERIOD_S))
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=10)
        results("killed")
    assert "failed" not in "".join(ended(root, "killed"))
    assert results("killed") == list(STEPS)


def test_a_second_watcher_is_refused_and_one_of_another_prefix_is_not(
    root: Path, here: Callable[..., Result], s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "PERIOD_S", PERIOD_S)
    with subprocess.Popen(command(root, url("one")), stdout=subprocess.PIPE, text=True) as first:
        line(first, "converted")
        refused = here(url("one"))
        assert refused.exit_code == 2
        assert f"another process writes here: process {first.pid} on " in str(refused.stderr)
        assert "End that one, or give this one another target" in str(refused.stderr)
        assert events(here(url("other")).stdout) == [f"converted {step}" for step in reversed(STEPS)]
        first.terminate()
    assert first.returncode == 0
    assert "waiting" not in here(url("one")).stdout, "it has let others have it"
    assert results("one") == results("other") == list(STEPS)


def test_one_that_was_stopped_ends_and_takes_nothing_from_who_came_after_it(root: Path, s3: S3) -> None:
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    more = ("--every", "0.2", "--keep-last", "1")
    with subprocess.Popen([*command(root, url("stopped")), *more], **given) as first:  # type: ignore[call-overload]
        line(first, "converted")
        first.send_signal(signal.SIGSTOP)
        with subprocess.Popen([*command(root, url("stopped")), "--every", "0.2"], **given) as second:  # type: ignore[call-overload]
            assert f"process {first.pid} on " in line(second, "waiting")
            line(second, "converted")
            first.send_signal(signal.SIGCONT)
            _, said = first.communicate(timeout=60)
            assert first.returncode == 2
            assert f"another process writes here: process {second.pid} on " in said
            line(second, "converted")
            second.terminate()
    assert results("stopped") == list(STEPS)


@pytest.mark.parametrize("target", ["https://host/evals", "hf://models/a"])
def test_what_cannot_be_written_is_refused(here: Callable[..., Result], target: str) -> None:
    refused = here(target)
    assert refused.exit_code == 2
    assert isinstance(refused.exception, SystemExit)
