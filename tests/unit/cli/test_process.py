"""What only a real process shows: pipes, signals, what is imported, a terminal."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .conftest import everything_below

PROJECT = Path(__file__).parents[3]

SLOW = """
import time
from mcore_rlhf.core import execute

def run(self):
    for _ in range(2400):  # two minutes
        time.sleep(0.05)
        self.progress(0)
    raise SystemExit("nobody interrupted")

execute.FileRun.run = run
from mcore_rlhf.cli import main
main()
"""


def start(*args: object, code: str | None = None, **more: object) -> subprocess.Popen[str]:
    """Start a command; signals are as in an interactive shell, whatever runs the tests."""
    program = ["-c", code] if code is not None else ["-m", "mcore_rlhf"]
    return subprocess.Popen(
        [sys.executable, *program, *map(str, args)],
        cwd=PROJECT, text=True, stdin=subprocess.DEVNULL, preexec_fn=_default_signals,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more},
    )  # type: ignore[call-overload, no-any-return]  # fmt: skip


def _default_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def wait_for(path: Path, pattern: str, process: subprocess.Popen[str]) -> None:
    while not list(path.glob(pattern)):
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_conversion_leaves_nothing(tp1: Path, tmp_path: Path, number: int, code: int) -> None:
    process = start("convert", tp1, tmp_path / "out", "--tp", 2, code=SLOW)
    wait_for(tmp_path, ".out.partial-*", process)
    time.sleep(0.5)  # into the middle of it
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=120)
    assert (process.returncode, stdout) == (code, "")
    assert "Traceback" not in stderr
    assert stderr.endswith(
        f"interrupted: nothing was published at {tmp_path}/out; what was half-written has been removed\n"
    )
    assert everything_below(tmp_path) == []


def test_an_interrupted_part_says_what_is_left_of_it(tp1: Path, tmp_path: Path) -> None:
    process = start("convert", tp1, tmp_path / "out", "--tp", 2, "--part", "2/2", code=SLOW)
    wait_for(tmp_path, ".out.parts-*/.part-0002.partial-*", process)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 130
    assert stderr.endswith("interrupted: part 2/2 is not done; nothing of it is kept\n")


def test_an_error_with_json_into_a_pipe_that_nobody_reads_keeps_its_code(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = start("inspect", tmp_path / "nowhere", "--json", stdout=writer)
    os.close(writer)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 2
    assert stderr == f"error: {tmp_path}/nowhere: no such file or folder\n"


def test_json_is_alone_on_standard_output(tp2pp2: Path, tmp_path: Path) -> None:
    process = start("convert", tp2pp2, tmp_path / "out", "--tp", 1, "--pp", 1, "--verify", "--json")
    stdout, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr
    assert json.loads(stdout)["proved"] is True
    assert "converting (stage 1 of 4): done" in stderr


def test_a_reader_that_has_seen_enough_ends_it_quietly(tp2pp2: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = start("inspect", tp2pp2, "--tensors", stdout=writing)
    os.close(writing)
    _, stderr = process.communicate(timeout=240)
    assert (process.returncode, stderr) == (128 + signal.SIGPIPE, "")


def test_names_that_are_not_unicode_can_be_printed(tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"caf\xe9")
    process = start("inspect", odd, "--json")
    stdout, stderr = process.communicate(timeout=240)
    assert (process.returncode, json.loads(stdout)["error"]["kind"]) == (2, "NotACheckpoint")
    assert "caf\\udce9: no such file or folder" in stderr


HEAVY = ("torch", "numpy", "ml_dtypes", "rich", "yaml", "pydantic", "omegaconf", "importlib.metadata", "hashlib")


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["convert", "--help"], "--pipeline-layout"),
        (["inspect", "tests/goldens/huggingface/llama_tied_bf16_sharded"], "parameters"),
        (["inspect", "tests/goldens/deepspeed/z2_bf16_ac_dp2"], "parameters"),
        (["inspect", "tests/goldens/megatron/tp1_bf16_do"], "param groups"),
    ],
)
def test_what_only_looks_loads_nothing_heavy(arguments: list[str], shown: str) -> None:
    code = (
        f"import sys\nfrom mcore_rlhf.cli import main\nsys.argv = ['mcore-rlhf', *{arguments}]\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        f"print([m for m in {HEAVY} if m in sys.modules], file=sys.stderr)"
    )
    stdout, stderr = start(code=code).communicate(timeout=240)
    assert stderr.strip() == "[]"
    assert shown in stdout


def test_on_a_terminal_there_is_a_bar_and_the_summary_stays(tp1: Path, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    process = start("convert", tp1, tmp_path / "out", "--tp", 2, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = read_all(ours)
    assert process.wait(timeout=240) == 0
    assert "\x1b[?25l" in shown  # the bar hides the cursor
    assert "\x1b[?25h" in shown  # and gives it back
    assert ": done" not in shown
    assert "lossless" in shown


def read_all(terminal: int) -> str:
    """Everything that appears on a terminal until its last writer is gone."""
    pieces = []
    try:
        while piece := os.read(terminal, 65536):
            pieces.append(piece)
    except OSError:  # Linux says EIO at the end
        pass
    os.close(terminal)
    return b"".join(pieces).decode()
