from __future__ import annotations

import errno
import os
import re
import signal
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from mcore_rlhf.cli import inspecting, main
from mcore_rlhf.cli.app import app
from mcore_rlhf.cli.guard import explain, stopped_by_signals
from mcore_rlhf.errors import CheckpointError, Corrupt, NotACheckpoint, StorageError
from mcore_rlhf.families.option_types import GROUPS
from mcore_rlhf.families.options import of_command

from .conftest import Cli


@pytest.fixture
def inspect_raises(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Makes ``inspect`` raise what it is given."""

    def arrange(error: BaseException) -> None:
        def run(*_: object) -> None:
            raise error

        monkeypatch.setattr(inspecting, "run", run)

    return arrange


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (Corrupt("a.pt: is damaged\nCopy it again."), 1, "error: a.pt: is damaged\nCopy it again.\n"),
        (NotACheckpoint("x: nothing"), 2, "error: x: nothing\n"),
        (
            OSError(errno.ENOSPC, "No space left on device", "/out/a.pt"),
            2,
            "error: /out/a.pt: cannot read or write: No space left on device\n"
            "Free some space, or choose a target on another disk.\n",
        ),
        (OSError(errno.EIO, "Input/output error"), 2, "error: Input/output error\n"),
        (MemoryError(), 2, "error: out of memory\nGive fewer --workers, or a smaller --max-memory.\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (KeyboardInterrupt(signal.SIGTERM), 143, "interrupted\n"),
    ],
    ids=repr,
)
def test_every_error_has_a_message_and_a_code(
    cli: Cli, inspect_raises, error: BaseException, code: int, text: str
) -> None:  # type: ignore[no-untyped-def]
    inspect_raises(error)
    outcome = cli("inspect", "x")
    assert (outcome.code, outcome.stdout, outcome.stderr) == (code, "", text)


def test_an_interrupt_before_any_command_runs_is_no_traceback_either(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C while modules are still being loaded."""

    def interrupted(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("mcore_rlhf.cli.app.app", interrupted)
    with pytest.raises(SystemExit) as stop:
        main()
    assert (stop.value.code, capsys.readouterr().err) == (130, "interrupted\n")


def test_what_nobody_expected_is_a_bug_and_one_line(cli: Cli, inspect_raises) -> None:  # type: ignore[no-untyped-def]
    inspect_raises(ValueError("odd"))
    outcome = cli("inspect", "x")
    assert (outcome.code, outcome.stdout) == (1, "")
    assert outcome.stderr.startswith("error: ValueError at test_guard.py:")
    assert ": odd\nThis is a bug in mcore_rlhf" in outcome.stderr
    assert "MCORE_RLHF_DEBUG=1" in outcome.stderr


@pytest.mark.parametrize("how", ["option", "environment"])
def test_debug_shows_the_traceback(
    cli: Cli, inspect_raises, how: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:  # type: ignore[no-untyped-def]
    inspect_raises(ValueError("odd"))
    if how == "environment":
        monkeypatch.setenv("MCORE_RLHF_DEBUG", "1")
    result = CliRunner().invoke(app, [*(["--debug"] if how == "option" else []), "inspect", "x"])
    assert result.exit_code == 1
    assert "Traceback (most recent call last)" in result.stderr
    assert result.stderr.rstrip().endswith("to report with it.")


def test_with_json_an_error_is_json_as_well(cli: Cli, inspect_raises) -> None:  # type: ignore[no-untyped-def]
    inspect_raises(Corrupt("a.pt: is damaged"))
    outcome = cli("inspect", "x", "--json")
    assert outcome.json == {"error": {"kind": "Corrupt", "message": "a.pt: is damaged", "exit_code": 1}}
    assert outcome.stderr == "error: a.pt: is damaged\n"


def test_usage_errors_are_clicks_own(cli: Cli) -> None:
    unknown, no_number = cli("inspect", "x", "--bogus"), cli("convert", "a", "b", "--tp", "two")
    assert (unknown.code, no_number.code) == (2, 2)
    assert "--bogus" in unknown.stderr
    assert "error: --tp: should be a valid integer, found 'two'" in no_number.stderr
    assert cli("frobnicate").code == 2


@pytest.mark.parametrize("kind", [*CheckpointError.__subclasses__()], ids=lambda kind: kind.__name__)
def test_the_error_class_decides_the_code(kind: type[CheckpointError]) -> None:
    assert explain(kind("x")) == (kind.exit_code, "x")
    assert StorageError.exit_code == 2


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stopped_by_signals():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_sigterm_interrupts_and_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt) as stopped, stopped_by_signals():
        os.kill(os.getpid(), signal.SIGTERM)
    assert stopped.value.args == (signal.SIGTERM,)
    assert signal.getsignal(signal.SIGTERM) == before


LOADING = """
import signal, time
for _ in range(2):
    signal.raise_signal(signal.SIGTERM)
    time.sleep(0.1)
loaded = True
"""


def _load_and_wait(name: str) -> None:
    import_module(name)
    for _ in range(600):
        time.sleep(0.05)


def test_an_interrupt_waits_until_a_module_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Native modules abort the process, or swallow what is raised, where that comes out of their own set-up."""
    (tmp_path / "being_loaded.py").write_text(LOADING)
    monkeypatch.syspath_prepend(tmp_path)
    alarm = signal.getsignal(signal.SIGALRM)
    with pytest.raises(KeyboardInterrupt) as stopped, stopped_by_signals():
        _load_and_wait("being_loaded")
    assert stopped.value.args == (signal.SIGTERM,)
    assert sys.modules.pop("being_loaded").loaded
    assert signal.getsignal(signal.SIGALRM) == alarm


class _Dying:
    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def _let_die_and_wait() -> None:
    dying = [_Dying()]
    dying.clear()
    for _ in range(600):
        time.sleep(0.05)


def test_an_interrupt_that_nobody_can_hear_comes_again(capfd: pytest.CaptureFixture[str]) -> None:
    """What is raised in a ``__del__`` Python prints and forgets: a conversion went on as if nobody had pressed Ctrl-C."""
    hook, before = (
        sys.unraisablehook,
        signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # a shell's "&" ignores it
    try:
        with pytest.raises(KeyboardInterrupt) as stopped, stopped_by_signals():
            _let_die_and_wait()
    finally:
        signal.signal(signal.SIGINT, before)
    assert stopped.value.args == (signal.SIGINT,)
    assert sys.unraisablehook is hook
    assert "ignored" not in capfd.readouterr().err


def test_version_is_the_packages(cli: Cli) -> None:
    import mcore_rlhf

    assert cli("--version").stdout == f"mcore-rlhf {mcore_rlhf.__version__}\n"


def test_a_shell_completes_options_and_their_words() -> None:
    """With what click has for it: ``eval "$(_MCORE_RLHF_COMPLETE=bash_source mcore-rlhf)"``."""

    def completed(*words: str) -> set[str]:
        complete = ShellComplete(app, {}, "mcore-rlhf", "_MCORE_RLHF_COMPLETE")
        return {item.value for item in complete.get_completions(list(words[:-1]), words[-1])}

    assert completed("con") == {"configs", "convert"}
    assert completed("convert", "--zero") == {"--zero-stage"}
    assert completed("convert", "--rng", "d") == {"derive", "drop"}


def test_the_help_has_the_options_under_their_headings(cli: Cli) -> None:
    _, *sections = re.split(r"^([A-Z][^:\n]*):$", cli("convert", "--help").stdout, flags=re.MULTILINE)
    shown = dict(zip(sections[::2], sections[1::2], strict=True))
    assert list(shown) == ["Positional arguments", *GROUPS, "Options", "Examples"]
    for row in of_command("convert"):
        assert f"  {row.flag} " in shown[row.group]
