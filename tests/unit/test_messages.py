"""Messages with parts of hostile input in them: short, on lines of their own, nothing that a terminal obeys."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from mcore_rlhf.cli.app import app
from mcore_rlhf.errors import clean, printable, shown

TORCH = (
    "shape mismatch\nException raised from check at ../c10/core/X.cpp:12 (most recent call first):\n"
    "frame #0: c10::Error::Error(c10::SourceLocation) + 0x96 (0x7f in libc10.so)\nframe #1: <unknown function>\n"
)


def test_frames_of_c_are_left_out() -> None:
    assert clean(f"x.pt: {TORCH}Copy it again.") == "x.pt: shape mismatch\nCopy it again."


@pytest.mark.parametrize(
    "mark", ["\x1b[2J", "\x07", "\r", "\x85", "\u202e", "\u2066", "\u200f", "\ufeff", "\ud800", "\u2028"]
)
def test_nothing_commands_the_terminal(mark: str) -> None:
    for function in (clean, printable, shown):
        text = function(f"name{mark}\u00e4 \u4e2d")
        assert all(character.isprintable() or character == "\n" for character in text)
        assert "\u00e4 \u4e2d" in text
        text.encode()


def test_endless_messages_are_cut() -> None:
    assert len(clean("x" * 10_000_000)) < 3_000
    assert len(clean("x\n" * 10_000_000)) < 30_000


def test_values_are_shown_in_short_whatever_they_hold() -> None:
    doubled: Any = "x"
    for _ in range(60):
        doubled = [doubled, doubled]
    for value in (doubled, "y" * 10_000_000, 10**5000, {"a": doubled}, list(range(10**6))):
        assert len(shown(value)) <= 120


def run(*args: str) -> Result:
    """A command, in this process; an exception that is none of its ends is the test's."""
    return CliRunner().invoke(app, args, catch_exceptions=False)


@pytest.mark.parametrize("option", ["--rules", "--config"])
@pytest.mark.parametrize("text", ["[" * 20_000, "rules: " + "{a: " * 20_000, None])
def test_files_of_the_user_end_in_one_message(tmp_path: Path, option: str, text: str | None) -> None:
    from tests.unit.core.test_yaml_text import BOMB

    file = tmp_path / "x.yaml"
    file.write_text(BOMB + "rules: *i\n" if text is None else text)
    found = run("convert", str(tmp_path), str(tmp_path / "out"), "--to", "hf", option, str(file))
    assert found.exit_code == 2
    assert found.stderr.startswith("error: ")
    assert "RecursionError" not in found.stderr
    assert len(found.stderr) < 2_000


def test_json_stays_json_and_shows_no_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    from mcore_rlhf.cli.output import emit_json

    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    facts = {"name\u202e": "\x1b[31m\x9b\ud800\U000e0041ä"}
    emit_json(facts)
    assert json.loads(out.getvalue()) == facts
    assert all(character.isprintable() or character == "\n" for character in out.getvalue())
