"""A list of SHA-256 sums is the same whoever wrote the files that it lists: one process, parts, or two after one another."""

from __future__ import annotations

import hashlib
import json
import signal
from pathlib import Path

import pytest

from tests.helpers.conversions import GOLDENS
from tests.helpers.damage import flip_a_bit
from tests.helpers.killed import begun, content, run

SOURCE = GOLDENS / "tp2pp2dp2_bf16_do"
TO = ("--to", "megatron-dist", "--integrity", "--no-fsync", "--workers", 1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("whole") / "out"
    assert run("convert", SOURCE, target, *TO)[0] == 0
    return target


def sums(target: Path) -> dict[str, str]:
    """What the list says, once that is what the files are: all that lie beside it."""
    (written,) = target.rglob("integrity.json")
    listed: dict[str, str] = json.loads(written.read_text())["files"]
    there = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in written.parent.iterdir()}
    there.pop(written.name)
    assert listed == there
    return listed


def test_by_parts(whole: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    for part in ("2/2", "1/2"):
        code, _, stderr = run("convert", SOURCE, target, *TO, "--part", part)
        assert code == 0, stderr
    assert not list(tmp_path.rglob("integrity.json"))  # no part has all files
    code, stdout, stderr = run("convert", SOURCE, target, *TO, "--finish", "--verify", "--json")
    assert (code, json.loads(stdout)["proved"]) == (0, True), stderr
    assert sums(target) == sums(whole)
    assert content(target) == content(whole)


def test_after_a_kill(whole: Path, tmp_path: Path) -> None:
    target, log = tmp_path / "out", tmp_path / "log"
    assert run("convert", SOURCE, target, *TO, after=2, log=log)[0] == -signal.SIGKILL
    code, _, stderr = run("convert", SOURCE, target, *TO, log=log)
    assert code == 0, stderr
    assert len(begun(log)) == len(set(begun(log)))  # what was done is not done again
    assert sums(target) == sums(whole)
    assert content(target) == content(whole)


def test_nobody_vouches_for_what_was_damaged_since_it_was_written(tmp_path: Path) -> None:
    target = tmp_path / "out"
    assert run("convert", SOURCE, target, *TO, "--part", "1/1")[0] == 0
    file = max(tmp_path.glob(".out.parts-*/part-0001/**/*.distcp"), key=lambda path: path.stat().st_size)
    flip_a_bit(file)
    code, _, stderr = run("convert", SOURCE, target, *TO, "--finish")
    assert (code, f"{file.name}: is damaged" in stderr, target.exists()) == (1, True, False), stderr
