"""Folders in folders, deeper than Python's stack: no command calls itself for each level."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcore_rlhf.storage.leftovers import Reason, leftovers
from mcore_rlhf.storage.paths import files_below, walk

from .conftest import Cli

GOLDENS = Path(__file__).parents[2] / "goldens"
LEVELS = 1100
READING = (("inspect",), ("verify",), ("steps",))


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Path]:
    """Where they are dug, removed again by what does not mind: pytest's own cleaning calls itself as well."""
    yield tmp_path / "source"
    subprocess.run(["rm", "-rf", tmp_path / "source"], check=True)


def _dig(folder: Path) -> None:
    """Folders that no single path names any more, and a file at the bottom."""
    folder.mkdir(parents=True)
    here = os.open(folder, os.O_RDONLY)
    for _ in range(LEVELS):
        os.mkdir("d", dir_fd=here)
        here, above = os.open("d", os.O_RDONLY, dir_fd=here), here
        os.close(above)
    os.close(os.open("x.txt", os.O_CREAT | os.O_WRONLY, dir_fd=here))
    os.close(here)


@pytest.mark.parametrize(
    ("golden", "where"),
    [
        ("huggingface/llama_tied_bf16_sharded", "deep"),
        ("deepspeed/z1_fp32_tied_dp2", "step3_universal/zero/deep"),
        ("dcp/fsdp2_ws2", "deep"),
    ],
)
def test_no_command_falls_into_them(cli: Cli, source: Path, golden: str, where: str) -> None:
    shutil.copytree(GOLDENS / golden, source)
    if "universal" in where:
        where = f"{next(source.glob('*_uni*')).name}/zero/deep"
    _dig(source / where)
    for command, *options in READING:
        found = cli(command, source, *options)
        assert found.code in (0, 1, 2)
        assert "This is a bug" not in found.stderr + found.stdout
    converted = cli("convert", source, source.parent / "target", "--to", "dcp", "--no-fsync")
    assert "This is a bug" not in converted.stderr


def test_a_step_with_them_is_not_adopted(cli: Cli, source: Path) -> None:
    step = source / "global_step_2"
    shutil.copytree(GOLDENS / "megatron" / "tp1_bf16_do", step / "actor")
    _dig(step / "data" / "deep")
    assert "2 steps" not in cli("steps", source).stdout
    found = cli("adopt", step)
    assert found.code == 1
    assert "at most 64 are taken" in found.stderr


def test_every_file_is_found_and_those_deep_down_stay_behind(source: Path) -> None:
    _dig(source / "deep")
    (source / "a.json").write_text("{}")
    bottom = f"deep/{'/'.join('d' * LEVELS)}/x.txt"
    assert files_below(source) == ["a.json", bottom]
    assert len([*walk(source)]) == LEVELS + 2
    found = {item.path: item.reason for item in leftovers(source, ())}
    assert found == {"a.json": None, f"deep/{'/'.join('d' * 63)}": Reason.TOO_DEEP}


def test_folders_come_before_what_lies_in_them_and_links_are_not_entered(tmp_path: Path) -> None:
    for name in ("b/2", "b/1/x", "a"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "b" / "f").touch()
    (tmp_path / "b" / "to_a").symlink_to(tmp_path / "a")
    found = [(path.relative_to(tmp_path).as_posix(), files) for path, files in walk(tmp_path)]
    assert found == [(".", []), ("a", []), ("b", ["f"]), ("b/1", []), ("b/1/x", []), ("b/2", [])]
    assert [*walk(tmp_path / "nothing")] == []
