"""Parts of a conversion, done by processes that know nothing of one another, make the bytes that one process makes."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from mcore_rlhf.errors import StorageError
from mcore_rlhf.families.options import ConvertOptions, ReadOptions, WriteOptions
from mcore_rlhf.manager import subject
from mcore_rlhf.manager.convert_step import convert_step, finish_parts
from mcore_rlhf.storage import parts
from mcore_rlhf.storage.publish import LocalPublication
from tests.helpers.damage import flip_a_bit
from tests.helpers.killed import begun, content, run, start

TO = ("--tp", 4, "--pp", 1, "--no-fsync", "--workers", 1)


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("whole") / "out"
    assert run("convert", source, target, *TO)[0] == 0
    return target


@pytest.fixture(scope="module")
def three(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which three parts were done, the last one twice at once, and all three in any order."""
    folder = tmp_path_factory.mktemp("three")
    for part in ("2/3", "1/3"):
        code, _, stderr = run("convert", source, folder / "out", *TO, "--part", part)
        assert code == 0, stderr
    both = [start("convert", source, folder / "out", *TO, "--part", "3/3") for _ in range(2)]
    assert [(process.communicate(timeout=240)[1], process.returncode)[1] for process in both] == [0, 0]
    return folder


def copied(three: Path, tmp_path: Path) -> Path:
    shutil.copytree(three, tmp_path / "copy")
    return tmp_path / "copy" / "out"


def test_joined_they_are_what_one_process_makes(three: Path, source: Path, whole: Path, tmp_path: Path) -> None:
    target = copied(three, tmp_path)
    assert not target.exists()
    code, stdout, stderr = run("convert", source, target, *TO, "--finish", "--verify", "--json")
    assert (code, json.loads(stdout)["proved"]) == (0, True), stderr
    assert content(target) == content(whole)
    assert [path.name for path in target.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("again", ["--finish", "convert"])
def test_parts_that_were_joined_by_who_was_killed_then_are_tidied_up(
    three: Path, source: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: str
) -> None:
    """The same command finds that all is done; another one finds its target taken. Neither leaves the parts."""
    target, options = copied(three, tmp_path), ConvertOptions(write=WriteOptions(tp=4, pp=1), fsync=False)

    def killed(folder: Path) -> None:
        shutil.rmtree(next(folder.glob("part-*")))
        raise KeyboardInterrupt

    with monkeypatch.context() as killing:
        killing.setattr(parts, "remove_joined", killed)
        with pytest.raises(KeyboardInterrupt):
            finish_parts(subject.find(source, ReadOptions()), target, options)
    assert len(list(target.parent.iterdir())) == 2
    if again == "--finish":
        assert finish_parts(subject.find(source, ReadOptions()), target, options).published == target
    else:
        with pytest.raises(StorageError, match="exists already"):
            convert_step(subject.find(source, ReadOptions()), target, options)
    assert [path.name for path in target.parent.iterdir()] == ["out"]
    assert content(target) == content(whole)


def test_of_two_that_join_the_one_that_loses_says_what_happened(
    three: Path, source: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts are gone while it takes them: it is not told to do them again."""
    target, options = copied(three, tmp_path), ConvertOptions(write=WriteOptions(tp=4, pp=1), fsync=False)
    taken = LocalPublication.take

    def late(self: LocalPublication, file: Path, name: str) -> None:
        if not target.exists():
            monkeypatch.setattr(LocalPublication, "take", taken)
            finish_parts(subject.find(source, ReadOptions()), target, options)
        taken(self, file, name)

    monkeypatch.setattr(LocalPublication, "take", late)
    with pytest.raises(StorageError, match="exists already"):
        finish_parts(subject.find(source, ReadOptions()), target, options)
    assert content(target) == content(whole)
    assert [path.name for path in target.parent.iterdir()] == ["out"]


def test_every_file_and_every_byte_of_the_source_is_some_parts(three: Path) -> None:
    ledgers = [json.loads(path.read_text()) for path in sorted(three.glob(".out.parts-*/*/part.json"))]
    files = [name for ledger in ledgers for name in ledger["files"]]
    assert len(files) == len(set(files)) == 8
    assert min(len(ledger["files"]) for ledger in ledgers) >= 2
    sizes = [sum(entry["bytes"] for entry in ledger["files"].values()) for ledger in ledgers]
    assert max(sizes) < 1.6 * min(sizes)


def test_what_joins_reads_next_to_nothing(
    three: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts have checked nearly all records; what they saw in pieces that overlap is read once more."""
    from mcore_rlhf.execution import run as runs

    read: list[int] = []
    monkeypatch.setattr(runs.Execution, "_advance", lambda self, nbytes: read.append(nbytes))
    options = ConvertOptions(write=WriteOptions(tp=4, pp=1), fsync=False)
    finish_parts(subject.find(source, ReadOptions()), copied(three, tmp_path), options)
    assert sum(read) < 0.05 * sum(path.stat().st_size for path in source.rglob("*.pt"))


def test_a_part_that_is_missing_is_named(three: Path, source: Path, tmp_path: Path) -> None:
    target = copied(three, tmp_path)
    shutil.rmtree(next(target.parent.glob(".out.parts-*/part-0002")))
    code, _, stderr = run("convert", source, target, *TO, "--finish")
    assert (code, "parts are not done yet: 2/3" in stderr, target.exists()) == (1, True, False), stderr
    assert run("convert", source, target, *TO, "--part", "2/3")[0] == 0
    assert run("convert", source, target, *TO, "--finish")[0] == 0


def test_parts_of_another_plan_are_refused(three: Path, source: Path, tmp_path: Path) -> None:
    target = copied(three, tmp_path)
    code, _, stderr = run("convert", source, target, "--tp", 2, "--pp", 1, "--finish")
    assert (code, "they are of other options" in stderr) == (2, True), stderr
    code, _, stderr = run("convert", source, tmp_path / "nothing", *TO, "--finish")
    assert (code, "no part has been done" in stderr) == (1, True), stderr


def test_a_ledger_that_was_damaged_is_refused(three: Path, source: Path, tmp_path: Path) -> None:
    target = copied(three, tmp_path)
    ledger = next(target.parent.glob(".out.parts-*/part-0001/part.json"))
    ledger.write_text(ledger.read_text().replace('"crc32": ', '"crc32": 1', 1))
    code, _, stderr = run("convert", source, target, *TO, "--finish")
    assert (code, "damaged" in stderr, target.exists()) == (1, True, False), stderr
    assert "do part 1/3 again" in stderr


def test_a_byte_of_a_part_that_was_flipped_since_is_found(three: Path, source: Path, tmp_path: Path) -> None:
    """Files that nobody has touched are linked and not read; those that were touched since are read, whatever time they say."""
    target = copied(three, tmp_path)
    file = max(target.parent.glob(".out.parts-*/part-0002/*/*/*.pt"))
    before = file.stat().st_mtime_ns
    with file.open("r+b") as data:
        data.seek(file.stat().st_size // 2)
        byte = data.read(1)[0]
        data.seek(-1, 1)
        data.write(bytes([byte ^ 1]))
    os.utime(file, ns=(before, before))
    code, _, stderr = run("convert", source, target, *TO, "--finish")
    assert (code, target.exists()) == (1, False)
    assert f"{file}: is damaged" in stderr
    assert f"{target.parent / file.parents[2].relative_to(target.parent)}" in stderr
    assert "do it again with --part 2/3" in stderr


def test_a_byte_of_the_source_that_only_a_part_read_is_checked_when_they_are_joined(
    source: Path, tmp_path: Path
) -> None:
    source, target = Path(shutil.copytree(source, tmp_path / "run")), tmp_path / "out"
    file = max(source.rglob("*.pt"), key=lambda path: path.stat().st_size)
    flip_a_bit(file)
    codes = [run("convert", source, target, *TO, "--part", f"{part}/2")[0] for part in (1, 2)]
    code, _, stderr = run("convert", source, target, *TO, "--finish")
    assert (code, target.exists()) == (1, False), stderr
    assert "damaged" in stderr or 1 in codes


def test_a_part_that_was_killed_goes_on(source: Path, whole: Path, tmp_path: Path) -> None:
    target, log = tmp_path / "out", tmp_path / "log"
    part = ("convert", source, target, *TO, "--part", "1/2")
    assert run(*part, after=2, log=log)[0] == -signal.SIGKILL
    assert run(*part, log=log)[0] == 0
    assert len(begun(log)) == len(set(begun(log))) == 4
    assert run("convert", source, target, *TO, "--part", "2/2", "--workers", 4)[0] == 0
    assert run("convert", source, target, *TO, "--finish")[0] == 0
    assert content(target) == content(whole)


@pytest.mark.parametrize("given", ["0/3", "4/3", "1", "a/b"])
def test_what_is_no_part(source: Path, tmp_path: Path, given: str) -> None:
    code, _, stderr = run("convert", source, tmp_path / "out", "--part", given)
    assert (code, "such as 3/16" in stderr) == (2, True)
