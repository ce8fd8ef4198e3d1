"""What comes out of a checkpoint, or is typed by ``*``, commands no terminal: through every command, every script and every log line."""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf.cli.app import app
from mcore_rlhf.errors import log_of
from mcore_rlhf.manager.run.options import Reporter
from tests.helpers.damage import edited

PROJECT = Path(__file__).resolve().parents[2]
PACKAGE = PROJECT / "mcore_rlhf"
GOLDENS = PROJECT / "tests" / "goldens"
EVIL = "\x1b]0;x\x07\x1b[2J\x9b31m\u202e\x08\r</script><img src=x>[/b]{0}%s"
COMMANDING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
BUG = ("This is a bug in mcore_rlhf", "Traceback")
OUTLETS = {"output.py", "guard.py", "progress.py"}
"""Modules of ``cli`` that print; all others say it through them."""


def scripts() -> dict[str, str]:
    """The console scripts, by name."""
    text = (PROJECT / "pyproject.toml").read_text(encoding="utf-8")
    section = text.partition("[project.scripts]\n")[2].partition("\n[")[0]
    return dict(re.findall(r'^([\w-]+) = "(.+)"$', section, re.MULTILINE))


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of three formats, and a run, with such a text wherever there is a text."""
    root = tmp_path_factory.mktemp("hostile")
    for name, golden in (
        ("megatron", "megatron/tp1_bf16_do"), ("deepspeed", "deepspeed/z1_fp32_tied_dp2"), ("hf", "huggingface/llama_tied_bf16_sharded"),
    ):  # fmt: skip
        shutil.copytree(GOLDENS / golden, root / name, ignore=shutil.ignore_patterns("*_uni*", "expected.pt"))
    for path in root.rglob("model_optim_rng.pt"):
        with edited(path) as tree:
            vars(tree["args"]).update({"save": EVIL, EVIL: EVIL})
            tree[EVIL] = EVIL
            tree["model"][f"decoder.layers.0.{EVIL}.weight"] = torch.ones(3)
    for path in root.glob("deepspeed/*/*_model_states.pt"):
        with edited(path) as tree:
            tree[EVIL] = {EVIL: EVIL}
    for path in root.glob("hf/*config.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), EVIL: EVIL, "a": "\ud800"}))
    shutil.copytree(root / "hf", root / "run" / "global_step_2" / "actor")
    for folder in (root / "hf", root / "run", root / "run" / "global_step_2"):
        for name in (os.fsencode(EVIL.replace("/", "")), b"\xff\x1b[2J.json", b"a\nb"):
            Path(os.fsdecode(os.path.join(os.fsencode(folder), name))).write_bytes(b"{}")
    odd = root / EVIL.replace("/", "")
    shutil.copytree(root / "hf", odd)
    return root


COMMANDS = (
    "inspect {}",
    "inspect {} --json",
    "inspect {} --tensors",
    "plan {} --to hf",
    "plan {} --to universal --copies",
    "verify {} --deep",
    "verify {} --json",
    "diff {} {}",
    "report {} -o {out}.html",
    "steps {}",
    "steps {} --json",
    "adopt {}/global_step_2",
    "will-resume {} --trainer megatron-lm",
    "will-resume {}/global_step_2 --trainer verl --json",
    "prune {} --keep-last 1",
    "interval --root {}",
    "convert {} {out} --to hf --no-fsync",
    "convert {} {out} --to megatron --tp 1 --no-fsync",
    "convert {} {out} --to universal --no-fsync",
    "--progress json convert {} {out} --to dcp --no-fsync",
    "resume-check --compare {} {}",
    "inspect {}/nothing",
    "steps {}/nothing --quarantine 2",
    "convert {} {out} --to hf --rules {}",
    "convert {} {out} --config {}",
    "--debug inspect {}/nothing",
)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", ["megatron", "deepspeed", "run", EVIL.replace("/", "")], ids=ascii)
def test_no_command_prints_them(hostile: Path, tmp_path: Path, name: str, command: str) -> None:
    words = [word.format(hostile / name, out=tmp_path / "out") for word in command.split()]
    code, text = _ended(partial(app, words, prog_name="mcore-rlhf"))
    assert code in (0, 1, 2), text
    _clean(text, "--debug" not in command)


@pytest.mark.parametrize(
    "words", [["{evil}"], ["inspect", "x", "{evil}"], ["inspect", "--{evil}"], ["convert", "a", "b", "--to", "{evil}"]]
)
def test_what_was_typed_is_shown_and_not_obeyed(words: list[str]) -> None:
    for evil in (EVIL, os.fsdecode(b"\xff\x1b[2J")):
        code, text = _ended(partial(app, [word.replace("{evil}", evil) for word in words], prog_name="mcore-rlhf"))
        assert code == 2
        _clean(text)


@pytest.mark.parametrize("script", sorted(scripts().keys() - {"mcore-rlhf"}))
def test_no_script_prints_them(hostile: Path, tmp_path: Path, script: str) -> None:
    module, _, function = scripts()[script].partition(":")
    main = getattr(importlib.import_module(module), function)
    for words in LINES[script]:
        line = [
            word.format(source=hostile, out=tmp_path / f"out{EVIL}".replace("/", ""), evil=EVIL)
            for word in words.split("|")
        ]
        code, text = _ended(partial(main, line))
        assert code in (0, 1, 2), text
        _clean(text, "-d" not in line)


LINES = {
    "mcore-rlhf-to-hf": (
        "--input-dir|{source}/megatron|--output-dir|{out}", "--input-dir|{source}/hf|--output-dir|{out}",
        "--input-dir|{source}/{evil}|--output-dir|{out}",
        "--{evil}", "--input-dir|{source}/deepspeed|--output-dir|{out}|--origin-hf-dir|{source}/hf",
    ),
    "mcore-rlhf-reshape-megatron": (
        "--model-type|GPT|--loader|core|--saver|core|--load-dir|{source}/megatron|--save-dir|{out}",
        "--model-type|{evil}|--loader|core|--saver|core|--load-dir|{source}/megatron|--save-dir|{out}", "{evil}",
    ),
    "mcore-rlhf-zero-to-fp32": ("{source}/deepspeed|{out}", "{source}/{evil}|{out}", "-d|{source}/{evil}|{out}", "a|b|{evil}"),
    "mcore-rlhf-zero-to-universal": (
        "--input_folder|{source}/deepspeed/step3|--output_folder|{out}", "--input_folder|{source}/{evil}|--output_folder|{out}", "--{evil}",
    ),
}  # fmt: skip


def test_no_log_line_has_them(caplog: pytest.LogCaptureFixture) -> None:
    """Metric names, notes of steps and errors of others go through the loggers of the manager and of the engines."""

    def hook(_: object) -> None:
        raise ValueError(EVIL)

    with caplog.at_level(logging.DEBUG):
        Reporter(0, hook).say("save", 2, f"note: {EVIL}", **{EVIL: 1.0})
        for name in _loggers():
            log_of(name).warning("quarantined: %s", EVIL)
    assert EVIL[:4] not in caplog.text
    assert not COMMANDING.search(caplog.text)
    assert "\\x1b[2J" in caplog.text


def test_who_logs_and_who_prints() -> None:
    """Whoever asks ``logging`` for a logger, or prints by himself, goes round what makes texts printable."""
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        calls = [
            node.func for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)
        ]
        named = {ast.unparse(call) for call in calls}
        if "logging.getLogger" in named and path.name not in ("errors.py", "cpu_megatron.py", "train.py"):
            wrong.append(f"{path.relative_to(PROJECT)}: logging.getLogger; use errors.log_of")
        prints = named & {
            "print",
            "click.echo",
            "click.secho",
            "sys.stdout.write",
            "sys.stderr.write",
            "traceback.print_exc",
        }
        if path.parent.name in ("cli", "tools") and path.name not in OUTLETS and prints - ALLOWED.get(path.name, set()):
            wrong.append(f"{path.relative_to(PROJECT)}: {', '.join(sorted(prints))}; use output.say")
    assert not wrong


ALLOWED = {"__init__.py": {"sys.stderr.write"}, "app.py": {"click.echo"}}
"""The word ``interrupted``, before anything is imported; the version."""


def _loggers() -> Iterator[str]:
    for path in PACKAGE.rglob("*.py"):
        yield from re.findall(r'log_of\("([\w.]+)"\)', path.read_text(encoding="utf-8"))


def _ended(main: Any) -> tuple[Any, str]:
    """Exit code, and both streams."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main()
        except SystemExit as end:
            code = end.code
    return 0 if code is None else code, out.getvalue() + err.getvalue()


def _clean(text: str, without_traceback: bool = True) -> None:
    found = COMMANDING.search(text)
    assert not found, repr(text[max(0, found.start() - 100) : found.end() + 50])
    assert not any(mark in text for mark in BUG[: 1 + without_traceback]), text
