"""Pipes, sockets, devices and endless files in place of files: nobody waits, nothing fills the memory, links to files are fine."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tracemalloc
from contextlib import suppress
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from mcore_rlhf.cli.app import app
from mcore_rlhf.errors import CheckpointError, NotACheckpoint, StorageError
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.storage import reading
from mcore_rlhf.storage.manifest import Manifest, crc_of_file
from mcore_rlhf.storage.paths import cannot_open
from mcore_rlhf.storage.pt import read_pt
from mcore_rlhf.storage.reading import MappedFile, opened
from mcore_rlhf.storage.safetensors import read_safetensors

GOLDENS = Path(__file__).parents[2] / "goldens"


def pipe(path: Path) -> None:
    os.mkfifo(path)


def plug(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = os.getcwd()
        os.chdir(path.parent)  # names of sockets are short
        try:
            made.bind(path.name)
        finally:
            os.chdir(here)


def zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


ODD = [pipe, plug, zeros]


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize(
    "read",
    [
        reading.read_bytes, reading.read_line, reading.read_json, Manifest.read, MappedFile, opened, crc_of_file,
        lambda path: read_pt(path.parent, path.name), lambda path: read_safetensors(path.parent, path.name),
    ],
)  # fmt: skip
def test_nobody_reads_what_is_no_file(tmp_path: Path, odd: object, read: object) -> None:
    odd(tmp_path / "x")  # type: ignore[operator]
    with pytest.raises((reading.NotRegular, StorageError), match="a regular file was expected"):
        read(tmp_path / "x")  # type: ignore[operator]


def test_folders_and_missing_files_are_told_apart(tmp_path: Path) -> None:
    for path, kind in ((tmp_path, "is a folder"), (tmp_path / "no", "no such file")):
        with pytest.raises(OSError) as raised:  # noqa: PT011
            reading.read_bytes(path)
        error = cannot_open(raised.value, path)
        assert isinstance(error, NotACheckpoint)
        assert kind in str(error)


def test_small_files_have_a_size(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"12345")
    assert reading.read_bytes(path, 5) == b"12345"
    with pytest.raises(reading.NotRegular, match="larger than 4 bytes"):
        reading.read_bytes(path, 4)
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(reading.NotRegular, match="too much"):
        reading.read_line(path)


def test_what_is_too_large_is_not_read_first(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    os.truncate(tmp_path / "x", 1 << 36)  # none of it is on the disk
    tracemalloc.start()
    with pytest.raises(reading.NotRegular, match="larger than"):
        reading.read_bytes(tmp_path / "x", 1 << 30)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("text", ["[" * 100_000, "[" * 300 + "]" * 300, '{"a":' * 300 + "1" + "}" * 300, "\ud800"])
def test_json_that_is_nested_for_ever(text: str) -> None:
    with pytest.raises(ValueError, match=r"nested|surrogates|JSON|Expecting"):
        reading.parse_json(text)


def test_honest_json_is_what_it_was() -> None:
    value = {"a": [1, {"b": [[2.5, None, "x"]]}], "c": {}}
    assert reading.parse_json(json.dumps(value)) == value


def run(*args: str) -> Result:
    """A command, in this process; an exception that is none of its ends is the test's."""
    return CliRunner().invoke(app, args, catch_exceptions=False)


@pytest.mark.parametrize("odd", [pipe, zeros])
def test_steps_of_a_root_whose_manifests_are_none(tmp_path: Path, odd: object) -> None:
    (tmp_path / "global_step_3").mkdir()
    odd(tmp_path / "global_step_3" / "manifest.json")  # type: ignore[operator]
    found = run("steps", str(tmp_path), "--json")
    assert "Traceback" not in found.stderr
    (step,) = json.loads(found.stdout)["steps"] if found.stdout.startswith("{") else json.loads(found.stdout)
    assert step["state"] != "committed"


@pytest.mark.parametrize("odd", [pipe, plug, zeros])
@pytest.mark.parametrize(
    ("golden", "name"),
    [
        ("megatron/tp1_bf16_do", "latest_checkpointed_iteration.txt"),
        ("megatron/tp1_bf16_do", "mcore_rlhf.json"),
        ("megatron/tp1_bf16_do", "iter_0000002/mp_rank_00/model_optim_rng.pt"),
        ("megatron/tp1_bf16_do", "iter_0000002/mp_rank_00/distrib_optim.pt"),
        ("verl/fsdp2_ws3", "model_world_size_3_rank_1.pt"),
        ("verl/fsdp2_ws3", "fsdp_config.json"),
    ],
)
def test_checkpoints_with_something_else_in_place_of_a_file(
    tmp_path: Path, odd: object, golden: str, name: str
) -> None:
    copy = Path(shutil.copytree(GOLDENS / golden, tmp_path / "copy"))
    (copy / name).unlink(missing_ok=True)
    odd(copy / name)  # type: ignore[operator]
    with suppress(CheckpointError):  # that it ends is the point; what is not needed may be passed over
        open_checkpoint(copy, ReadOptions(step=2 if "latest" in name else None))


def test_a_folder_of_links_reads_as_hugging_face_s_cache_does(tmp_path: Path) -> None:
    """``blobs/`` holds the files under their hashes, ``snapshots/<revision>/`` links to them."""
    source = GOLDENS / "huggingface" / "llama_tied_bf16_sharded"
    repository = tmp_path / "models--org--name"
    snapshot, blobs = repository / "snapshots" / "0123abcd", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(path for path in source.iterdir() if path.is_file())):
        shutil.copy(path, blobs / f"{number:040x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:040x}")
    linked, plain = open_checkpoint(snapshot, ReadOptions()), open_checkpoint(source, ReadOptions())
    assert linked.format == plain.format
    assert [spec.name for spec in linked.model.params] == [spec.name for spec in plain.model.params]
    assert run("verify", str(snapshot)).exit_code == run("verify", str(source)).exit_code == 0
