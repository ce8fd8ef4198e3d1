"""Every command has three examples in its help that the parser takes, and completion can be installed."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from mcore_rlhf.cli.app import app
from mcore_rlhf.cli.examples import EXAMPLES
from mcore_rlhf.formats.registry import FORMATS

from .conftest import Cli


def test_every_command_has_three() -> None:
    assert {name: len(lines) for name, lines in EXAMPLES.items()} == dict.fromkeys(app.commands, 3)


@pytest.mark.parametrize("line", [line for lines in EXAMPLES.values() for line in lines])
def test_the_parser_takes_it(line: str) -> None:
    words = shlex.split(line)[1:]
    context = app.make_context("mcore-rlhf", words, resilient_parsing=False)
    name, command, rest = app.resolve_command(context, [*context._protected_args, *context.args])
    assert command is not None
    while isinstance(command, click.Group):
        context = command.make_context(name, rest, parent=context)
        name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        assert command is not None
    command.make_context(name, rest, parent=context)


@pytest.mark.parametrize("command", app.commands)
def test_the_help_shows_them(cli: Cli, command: str) -> None:
    shown = cli(command, "--help").stdout
    for line in EXAMPLES[command]:
        assert f"  {line}\n" in shown


@pytest.mark.parametrize("command", ["inspect", "plan", "convert", "verify", "diff", "report"])
def test_every_format_is_named(cli: Cli, command: str) -> None:
    line = cli(command, "--help").words().partition("Formats: ")[2]
    assert all(re.search(rf"(^|\W){re.escape(known.name)}(\W|$)", line) for known in FORMATS)


def test_the_help_imports_no_reader() -> None:
    """The registry and all formats took longer than the rest of the command."""
    code = (
        "import sys; from mcore_rlhf.cli import main\n"
        "try: main()\n"
        "except SystemExit: print([name for name in sys.modules if name.startswith('mcore_rlhf.formats.')])"
    )
    run = subprocess.run([sys.executable, "-c", code, "convert", "--help"], capture_output=True, text=True)
    assert "Formats: megatron, megatron-dist (torch_dist), " in run.stdout, run.stderr
    assert run.stdout.splitlines()[-1] == "['mcore_rlhf.formats.known']"


@pytest.mark.parametrize(
    ("shell", "place"),
    [
        ("zsh", ".zfunc/_mcore-rlhf"),
        ("fish", ".config/fish/completions/mcore-rlhf.fish"),
        ("bash", ".local/share/bash-completion/completions/mcore-rlhf"),
    ],
)
def test_completion_is_installed(
    cli: Cli, shell: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHELL", f"/bin/{shell}")
    outcome = cli("--install-completion")
    assert outcome.code == 0, outcome.stderr
    assert "_MCORE_RLHF_COMPLETE" in (tmp_path / place).read_text()
    assert str(tmp_path / place) in outcome.stdout


def test_a_shell_that_nobody_knows_is_refused(cli: Cli) -> None:
    outcome = cli("--install-completion", "tcsh")
    assert outcome.code == 2
    assert "bash, zsh, fish" in outcome.stderr
