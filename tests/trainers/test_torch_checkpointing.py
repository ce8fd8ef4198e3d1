"""torch_checkpointing ("DCP v2") itself saves and loads through our storage: its files, our commit; and loads what ``convert`` writes.

The package's own storage is the witness: it writes the same bytes beside ours, and loads folders without knowing of us.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf.convert import convert
from mcore_rlhf.dcp import clean_up
from mcore_rlhf.errors import CheckpointError, Corrupt, StorageError, UsageError
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.storage.checksum import crc32
from mcore_rlhf.storage.manifest import Manifest
from mcore_rlhf.storage.urls import checkpoint_path
from mcore_rlhf.verify.checkpoint import Depth, verify
from tests.crash.dcp_writer_kills import Killer, forked
from tests.helpers.conversions import options
from tests.helpers.object_store import S3, Request, url
from tests.trainers.lab import PROJECT

RELEASE = "torch_checkpointing-0.1.1"
GOLDENS = PROJECT / "tests" / "goldens" / "torch_checkpointing"
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def package(trainers: Path) -> Path:
    folder = trainers / RELEASE
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    return folder


def ranks(package: Path, world: int, job: str, *words: object, env: Mapping[str, str] | None = None) -> list[str]:
    """What ranks print that run a job of :mod:`.tc_jobs`."""
    paths = os.pathsep.join(map(str, [PROJECT, package]))
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(world),
    ]
    done = subprocess.run(
        [*command, "-m", "tests.trainers.tc_jobs", job, *map(str, words)], cwd=PROJECT, capture_output=True, text=True, timeout=280,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **(env or {})}, check=False,
    )  # fmt: skip
    return [*(line for line in done.stdout.splitlines() if line), *done.stderr.splitlines()[-30:]]


def answers(lines: list[str]) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in lines if line.startswith("{")]
    assert found, "\n".join(lines)
    return found


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "mcore_rlhf.json"}


def downloaded(s3: S3, key: str, folder: Path) -> Path:
    """What the manifest names, as it says of each file."""
    manifest = Manifest.from_json(s3.get(f"{key}/mcore_rlhf.json"), key)
    folder.mkdir(parents=True)
    for name, entry in manifest.files.items():
        data = s3.get(f"{key}/{manifest.prefix}/{name}")
        assert (len(data), crc32(data)) == (entry.nbytes, entry.crc32)
        (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize(("saves", "where"), [("sync", "folder"), ("async", "folder"), ("async", "store")])
def test_its_own_files_are_committed_as_one(package: Path, s3: S3, tmp_path: Path, saves: str, where: str) -> None:
    root = str(tmp_path / "ours") if where == "folder" else url("runs")
    lines = ranks(package, 2, "save", root, tmp_path / "own", saves, env=s3.environment)
    for answer in answers(lines):
        assert answer["after"] == answer["losses"]
    for name in ("numbered", "named"):
        step = tmp_path / "ours" / name / "step_3"
        there = checkpoint_path(f"{root}/{name}/step_3")
        if where == "store":
            downloaded(s3, f"runs/{name}/step_3", step)
        assert contents(step) == contents(tmp_path / "own" / name / "step_3")
        assert verify(there, ReadOptions(), Depth.DEEP).intact
        if where == "folder":
            assert os.listdir(step.parent) == ["step_3"]
    theirs = answers(ranks(package, 2, "load", tmp_path / "ours" / "named" / "step_3", "named"))
    assert [one["losses"] for one in theirs] == [one["losses"] for one in answers(lines)]


@pytest.mark.parametrize(
    ("like", "world", "reshards"), [("named", 2, ""), ("numbered", 2, ""), ("named", 3, ""), ("named", 3, "reshards")]
)
def test_it_goes_on_from_what_convert_writes(
    package: Path, tmp_path: Path, like: str, world: int, reshards: str
) -> None:
    """Out of another format, whose run never heard of the package; with a resharder, out of the files of two ranks."""
    convert(GOLDENS / "numbered" / "step_3", tmp_path / "dcp", replace(options(), to="dcp"))
    wrote, more = (2, [reshards]) if reshards else (world, [])
    how = options(like=str(GOLDENS / like / "step_3"), dp=wrote)
    job = convert(tmp_path / "dcp", tmp_path / "step_3", replace(how, to="fsdp-ranks", strict=True))
    assert job.lossless
    assert len(list((tmp_path / "step_3").glob("optimizer_*.pt"))) == wrote
    found = answers(ranks(package, world, "load", tmp_path / "step_3", like, *more))
    theirs = answers(ranks(package, world if reshards else 2, "load", GOLDENS / like / "step_3", like, *more))
    assert len(found) == world
    for one in found:
        assert (one["train"], one["lr"]) == (theirs[0]["train"], theirs[0]["lr"])
        assert one["losses"] == pytest.approx(theirs[0]["losses"], rel=0 if len(theirs) == world else 1e-6)


@pytest.mark.parametrize("how", ["killed", "fails"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_ends_in_the_middle_leaves_nothing(package: Path, tmp_path: Path, rank: int, how: str) -> None:
    lines = ranks(package, 2, "interrupted", tmp_path, rank, how)
    assert [name for name in os.listdir(tmp_path) if not name.startswith(".")] == ["step_1"], "\n".join(lines)
    assert verify(tmp_path / "step_1", ReadOptions(), Depth.DEEP).problems == []
    assert clean_up(tmp_path)
    assert os.listdir(tmp_path) == ["step_1"]


def manager(**named: Any) -> Any:
    """One rank's, in this process."""
    import torch_checkpointing as v2
    from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig
    from torch_checkpointing.config import SyncCheckpointSaverConfig

    from mcore_rlhf.dcp.v2 import CommittedStorageConfig

    writer = CheckpointWriterConfig(**named.pop("writer", {}))
    return v2.CheckpointManager.Config(
        save=SyncCheckpointSaverConfig(writer_config=writer), storage_config=CommittedStorageConfig(**named)
    ).build()


def state(value: float, many: int = 300) -> dict[str, Any]:
    return {"model": {"weight": torch.full((many,), value), "bias": torch.full((3,), value)}, "train": {"step": value}}


def value_of(root: str, many: int = 300) -> float | None:
    """The value that the package loads through our storage; None where nothing is."""
    into, by = state(0.0, many), manager()
    try:
        train = by.load(root, into=into, strict=True)["train"]
    except FileNotFoundError:
        return None
    (value,) = {*into["model"]["weight"].tolist(), *into["model"]["bias"].tolist(), train["step"]}
    return float(value)


def test_a_kill_at_any_change_leaves_all_or_nothing(tmp_path: Path) -> None:
    """Of a save over an older one, at each change of the file system in turn."""

    def killed(root: Path, at: int) -> tuple[int, Any, Any, Any]:
        def run() -> object:
            by = manager(overwrite=True, fsync=False)
            by.save(str(root / "step_2"), state(1.0))
            killer = Killer(at)
            by.save(str(root / "step_2"), state(2.0))
            return killer.count

        status, count = forked(run)
        at_once = forked(lambda: value_of(str(root / "step_2")))[1]
        forked(lambda: manager(overwrite=True, fsync=False).save(str(root / "step_3"), state(3.0)))
        return status, count, at_once, forked(lambda: value_of(str(root / "step_2")))[1]

    status, changes, *values = killed(tmp_path / "whole", -1)
    assert (status, values) == (0, [2.0, 2.0])
    assert changes > 8
    outcomes = []
    for at in range(1, changes + 1):
        root = tmp_path / f"at-{at}"
        status, _, at_once, after = killed(root, at)
        assert os.WTERMSIG(status) == signal.SIGKILL
        assert at_once in (None, after)
        assert after in (1.0, 2.0)
        assert sorted(os.listdir(root)) == ["step_2", "step_3"]
        outcomes.append(after)
    assert outcomes == sorted(outcomes)
    assert {*outcomes} == {1.0, 2.0}


def test_a_kill_at_any_request_leaves_all_or_nothing(s3: S3) -> None:
    many, number, outcomes = 5 << 19, 0, []
    while True:
        s3.forget()
        manager(overwrite=True).save(url("runs/step_1"), state(1.0, many))
        seen, pids = list[Request](), list[int]()

        def kill(
            request: Request, seen: list[Request] = seen, pids: list[int] = pids, number: int = number
        ) -> str | None:
            seen.append(request)
            if len(seen) <= number:
                return None
            os.kill(pids[0], signal.SIGKILL)
            return "503 Slow Down"

        child = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _ONE, url("runs/step_1"), str(many)], cwd=PROJECT, stdin=subprocess.DEVNULL,
            env={**os.environ, **s3.environment, "PYTHONPATH": os.pathsep.join([str(PROJECT), *sys.path[-1:]])},
        )  # fmt: skip
        pids.append(child.pid)
        s3.fault = kill
        child.wait(120)
        s3.fault = lambda request: None
        assert child.returncode in (0, -signal.SIGKILL)
        outcomes.append(value_of(url("runs/step_1"), many))
        if child.returncode == 0:
            break
        number += 4
    assert len(outcomes) > 3
    assert outcomes == sorted(outcomes, key=lambda value: value or 0.0)
    assert (outcomes[0], outcomes[-1]) == (1.0, 2.0)


_ONE = """
import sys
from tests.trainers.test_torch_checkpointing import manager, state
manager(overwrite=True).save(sys.argv[1], state(2.0, int(sys.argv[2])))
"""


@pytest.mark.parametrize("where", ["folder", "store"])
def test_a_damaged_byte_is_named_and_not_loaded(s3: S3, tmp_path: Path, where: str) -> None:
    root = str(tmp_path / "step_1") if where == "folder" else url("runs/step_1")
    manager().save(root, state(1.0))
    if where == "folder":
        file = tmp_path / "step_1" / "model_0.pt"
        data = bytearray(file.read_bytes())
        data[700] ^= 1
        file.write_bytes(data)
    else:
        prefix = Manifest.from_json(s3.get("runs/step_1/mcore_rlhf.json"), root).prefix
        data = bytearray(s3.get(f"runs/step_1/{prefix}/model_0.pt"))
        data[700] ^= 1
        s3.put(f"runs/step_1/{prefix}/model_0.pt", bytes(data))
    problems = verify(checkpoint_path(root), ReadOptions(), Depth.DEEP).problems
    assert "model_0.pt" in problems.describe()
    with pytest.raises(Corrupt, match=r"model_0\.pt: is damaged"):
        value_of(root)


def test_what_is_there_is_replaced_only_where_that_is_said(tmp_path: Path) -> None:
    step = str(tmp_path / "step_1")
    manager().save(step, state(1.0))
    with pytest.raises(
        StorageError, match=r"step_1: exists already\.\nSave under another name, or with overwrite=True"
    ):
        manager().save(step, state(2.0))
    assert value_of(step) == 1.0
    manager(overwrite=True).save(step, state(2.0))
    assert value_of(step) == 2.0
    shutil.rmtree(step)
    Path(step).mkdir()
    Path(step, "thesis.txt").write_text("years of work")
    with pytest.raises(StorageError, match="does not look like a checkpoint"):
        manager(overwrite=True).save(step, state(3.0))
    assert sorted(os.listdir(step)) == ["thesis.txt"]


def test_a_save_without_a_commit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Leave write_to_temp_dir and temp_dir_prefix"):
        manager(writer={"write_to_temp_dir": False}).save(str(tmp_path / "step_1"), state(1.0))
    with pytest.raises(UsageError, match="a prefix of your own goes to CommittedStorageConfig"):
        manager(writer={"temp_dir_prefix": "half_"}).save(str(tmp_path / "step_1"), state(1.0))
    manager(writer={"temp_dir_prefix": "half_"}, temp_dir_prefix="half_").save(str(tmp_path / "step_1"), state(1.0))
    with pytest.raises(CheckpointError, match="is a URL under which nothing can be written"):
        manager().save("ftp://host/step_1", state(1.0))
    assert os.listdir(tmp_path) == ["step_1"]


def test_a_rank_of_which_nothing_is_there_is_named(tmp_path: Path) -> None:
    """As where ranks made their configurations before they knew of each other."""
    from mcore_rlhf.dcp.savings import Ranks, begin
    from mcore_rlhf.dcp.targets import target_of

    target = target_of(tmp_path / "step_1")
    saving = begin(target, Ranks("1700000000000-0123abcd", 0, 2), overwrite=False, before=None)
    with saving.stream("model_0.pt") as stream:
        stream.write(b"all")
    with pytest.raises(CheckpointError, match="nothing of rank 1 is there, of 2"):
        saving.publish(overwrite=False, fsync=False)
    other = begin(target, Ranks("1700000000000-0123abcd", 1, 2), overwrite=False, before=None)
    with other.stream("model_0.pt") as stream:
        stream.write(b"all")
    with pytest.raises(CheckpointError, match=r"rank 0 and rank 1 have both written model_0\.pt"):
        saving.publish(overwrite=False, fsync=False)
    assert not (tmp_path / "step_1").exists()
