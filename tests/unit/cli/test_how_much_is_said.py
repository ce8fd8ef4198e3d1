"""``-v``, ``-q`` and ``--log-file``; streams that are closed or full; what a shell completes."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import click
import pytest
import torch
from click.shell_completion import ShellComplete

from mcore_rlhf import CheckpointManager, TorchEngine
from mcore_rlhf.cli.app import app
from mcore_rlhf.manager.run.options import ManagerOptions
from mcore_rlhf.storage import waiting

from .conftest import Cli


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run with two roles and three steps."""
    model = torch.nn.Linear(2, 2)
    roles = {"actor": TorchEngine(model), "critic": TorchEngine(model)}
    with CheckpointManager(
        tmp_path / "run", roles, options=ManagerOptions(catch_signals=False, fsync=False)
    ) as manager:
        for step in (1, 2, 12):
            manager.save(step)
    return tmp_path / "run"


def test_quiet_says_nothing_but_results(cli: Cli, tp1: Path, tmp_path: Path) -> None:
    loud = cli("convert", tp1, tmp_path / "loud", "--tp", "2")
    quiet = cli("convert", tp1, tmp_path / "quiet", "--tp", "2", "-q")
    assert "converting" in loud.stderr
    assert (quiet.code, quiet.stderr) == (0, "")
    without_speed = [re.sub(r"\d+\.\d+", "", outcome.stdout) for outcome in (quiet, loud)]
    assert without_speed[0] == without_speed[1].replace("loud", "quiet")
    assert cli("convert", tp1, tmp_path / "quiet", "-q").stderr.startswith("error: ")


def test_verbose_says_what_is_done(cli: Cli, tp1: Path, tmp_path: Path) -> None:
    said = cli("convert", tp1, tmp_path / "out", "--tp", "2", "-v").stderr
    assert re.search(r"opened \S*tp1_bf16_do\S*: megatron, TP1×PP1×DP1, \d+ tensors", said)
    assert len(re.findall(r"wrote iter_0000002/mp_rank_0[01]/\S+\.pt: ", said)) == 4
    assert "mcore_rlhf.shown" not in said


def test_both_contradict_each_other(cli: Cli, tp1: Path) -> None:
    outcome = cli("inspect", tp1, "-v", "-q")
    assert (outcome.code, outcome.stdout) == (2, "")
    assert outcome.stderr.startswith("error: -v and -q contradict each other")


def test_a_log_file_has_everything_with_the_time(cli: Cli, tp1: Path, tmp_path: Path) -> None:
    log = tmp_path / "work.log"
    assert cli("convert", tp1, tmp_path / "out", "--tp", "2", "-q", "--log-file", log).code == 0
    assert cli("verify", tmp_path / "gone", "--log-file", log).code == 2
    lines = log.read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (INFO|ERROR) ", line) for line in lines[:3])
    text = log.read_text()
    for what in (
        "convert, process ",
        "wrote iter_",
        "converting",
        "convert: done",
        "verify: NotACheckpoint: ",
        "Traceback",
    ):
        assert what in text
    assert not logging.getLogger("mcore_rlhf").handlers  # nothing of a command stays behind


@pytest.mark.parametrize("place", ["no/such/folder/log", "link"])
def test_a_log_file_that_cannot_be_written_ends_the_command(cli: Cli, tp1: Path, tmp_path: Path, place: str) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "other")
    outcome = cli("inspect", tp1, "--log-file", tmp_path / place)
    assert (outcome.code, outcome.stdout) == (2, "")
    assert f"error: {tmp_path / place}: cannot write" in outcome.stderr
    assert not (tmp_path / "other").exists()


_COMMAND = [sys.executable, "-c", "from mcore_rlhf.cli import main; main()"]


@pytest.mark.parametrize("command", ["inspect {} --json", "inspect {}", "convert --help", "--version", "configs list"])
@pytest.mark.parametrize("stream", [">&-", ">/dev/full"])
def test_output_that_cannot_be_written_ends_in_one_line(tp1: Path, command: str, stream: str) -> None:
    line = " ".join([*map(_quoted, _COMMAND), command.format(tp1), stream])
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"error: standard output: cannot write: .* \(errno \d+\)\n", done.stderr)


@pytest.mark.parametrize("stream", ["2>&-", "<&-", "2>&- <&-"])
def test_other_streams_may_be_closed(tp1: Path, stream: str) -> None:
    line = " ".join([*map(_quoted, _COMMAND), f"inspect {tp1} --json", stream])
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("{")


def test_a_reader_that_has_seen_enough_is_no_error(tp1: Path) -> None:
    line = " ".join([*map(_quoted, _COMMAND), f"inspect {tp1} --tensors --json | head -1"])
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("{\n", "")


def _quoted(word: str) -> str:
    return f"'{word}'"


def completed(*words: object) -> list[str]:
    """What a shell offers for the last word."""
    *before, begun = map(str, words)
    shell = ShellComplete(app, {}, "mcore-rlhf", "_MCORE_RLHF_COMPLETE")
    return [item.value for item in shell.get_completions(before, begun)]


def test_values_are_completed(root: Path) -> None:
    assert completed("convert", "a", "b", "--to", "m") == [
        "megatron-dist",
        "megatron",
        "ms-swift",
        "megatron-bridge",
        "megatron-lm",
    ]
    assert completed("convert", "a", "b", "--dtype", "") == ["bf16", "fp16", "fp32"]
    assert completed("convert", "a", "b", "--rng", "d") == ["derive", "drop"]
    assert completed("configs", "show", "qwen2.5-7b") == [
        "qwen2.5-7b-eval-tp1", "qwen2.5-7b-grpo-16-to-8-gpus", "qwen2.5-7b-to-hugging-face",
    ]  # fmt: skip
    assert completed("inspect", root, "--role", "") == ["actor", "critic"]
    assert completed("verify", root / "global_step_1", "--role", "c") == ["critic"]
    assert completed("inspect", root, "--step", "1") == ["12", "1"]
    assert completed("steps", root, "--quarantine", "") == ["12", "2", "1"]


@pytest.mark.parametrize("place", ["nowhere", "s3://bucket/run", "/dev/null", "\x00"])
def test_nothing_is_completed_where_nothing_is_known(place: str) -> None:
    assert completed("inspect", place, "--role", "") == []
    assert completed("inspect", place, "--step", "") == []


def test_every_command_has_them(cli: Cli) -> None:
    groups = [app.commands["configs"]]
    commands = [*app.commands.values(), *(one for group in groups for one in group.commands.values())]  # type: ignore[attr-defined]
    for command in commands:
        if not isinstance(command, click.Group):
            names = {name for param in command.get_params(click.Context(command)) for name in param.opts}
            assert {"-v", "--verbose", "-q", "--quiet", "--log-file"} <= names, command.name


def test_a_lock_that_is_waited_for_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from mcore_rlhf.cli import scripts

    monkeypatch.setattr(waiting, "FIRST_S", 0.1)
    inside, done = threading.Event(), threading.Event()

    def first() -> None:
        with scripts._turn(tmp_path / "out"):
            inside.set()
            done.wait(30)

    def takes_a_turn() -> None:
        with scripts._turn(tmp_path / "out"):
            pass

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(30)
    second = threading.Thread(target=takes_a_turn)
    second.start()
    end = time.monotonic() + 30
    while not caplog.messages and time.monotonic() < end:
        time.sleep(0.05)
    done.set()
    thread.join(30)
    second.join(30)
    assert caplog.messages[0].startswith(f"waits for the lock {tmp_path / '.out.turn'}, which another process")
    assert not list(tmp_path.iterdir())
