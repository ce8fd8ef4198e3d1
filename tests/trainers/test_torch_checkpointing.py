"""torch_checkpointing ("DCP v2") itself saves and loads through our storage: its files, our commit; and loads what ``convert`` writes.

The package's own storage is the witness: it writes the same bytes beside ours, and loads folders without knowing of us.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mcore_rlhf.convert import convert
from mcore_rlhf.dcp import clean_up
from mcore_rlhf.errors import CheckpointError, Corrupt, StorageError, UsageError
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.manager.runs import listed_steps
from mcore_rlhf.storage.manifest import Manifest
from mcore_rlhf.storage.reading import read_bytes
from mcore_rlhf.storage.urls import checkpoint_path
from mcore_rlhf.verify.checkpoint import Depth, verify
from tests.crash.dcp_writer_kills import Killer, forked
from tests.distributed.forked import SERVER
from tests.helpers.conversions import options
from tests.helpers.object_store import S3, Request, downloaded, killed_at, killing, url
from tests.trainers.lab import PROJECT

RELEASE = "torch_checkpointing-0.1.1"
GOLDENS = PROJECT / "tests" / "goldens" / "torch_checkpointing"
pytestmark = pytest.mark.timeout(300)
SLOW = (pytest.mark.slow, pytest.mark.timeout(1500))


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
            downloaded(s3, step, f"runs/{name}/step_3")
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
    assert not verify(tmp_path / "step_1", ReadOptions(), Depth.DEEP).problems
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


MANY = 5 << 19
"""Floats of a tensor of 10 MiB, which is sent in parts."""


def save_one(environment: Mapping[str, str], package: str, value: float) -> None:
    """Of one rank."""
    os.environ.update(environment)
    sys.path.append(package)
    manager(overwrite=True).save(url("runs/step_1"), state(value, MANY))


@pytest.mark.parametrize("nth", [4, pytest.param(1, marks=SLOW)], ids=["one in four", "each"])
def test_a_kill_at_any_request_leaves_all_or_nothing(s3: S3, package: Path, nth: int, rng: random.Random) -> None:
    outcomes = []
    for number in itertools.count(rng.randrange(nth), nth):
        s3.forget()
        manager(overwrite=True).save(url("runs/step_1"), state(1.0, MANY))
        was_killed = killed_at(s3, number, save_one, str(package), 2.0)
        outcomes.append(value_of(url("runs/step_1"), MANY))
        if not was_killed:
            break
    assert len(outcomes) > 3
    assert outcomes == sorted(outcomes, key=lambda value: value or 0.0)
    assert (outcomes[0], outcomes[-1]) == (1.0, 2.0)


RANKS = 2


def save_of_rank(
    environment: Mapping[str, str], package: str, meeting: str, rank: int, value: float, root: str
) -> None:
    """Of one of several ranks, whose requests are told from the others' by its key; it waits two seconds for them."""
    os.environ.update({**environment, "AWS_ACCESS_KEY_ID": f"rank{rank}"})
    sys.path.append(package)
    dist.init_process_group(
        "gloo", store=dist.FileStore(meeting, RANKS), rank=rank, world_size=RANKS, timeout=timedelta(seconds=60)
    )
    by = manager(overwrite=True, writer={"checkpoint_write_barrier_timeout_sec": 2})
    with suppress(Exception):  # nothing may be said to have been saved that was not: who looks finds out
        by.save(root, state(value, MANY))
    os._exit(0)


def saved_by_ranks(
    s3: S3, package: Path, value: float, number: int, who: str = "all", root: str = "runs/step_1"
) -> bool:
    """Save on several ranks; at a request all are killed, or the one that asks. Whether that many requests were made."""
    with tempfile.TemporaryDirectory() as folder:
        words = (s3.environment, str(package), f"{folder}/store")
        ranks_there = [
            SERVER.Process(target=save_of_rank, args=(*words, rank, value, url(root))) for rank in range(RANKS)
        ]

        def victims(request: Request) -> list[int]:
            asking = [one for rank, one in enumerate(ranks_there) if who == "all" or request.who == f"rank{rank}"]
            return [one.pid for one in asking if one.pid is not None]

        with killing(s3, number, victims) as seen:
            for one in ranks_there:
                one.start()
            for one in ranks_there:
                one.join(120)
        assert {one.exitcode for one in ranks_there} <= {0, -signal.SIGKILL}
        return len(seen) > number


def rank_values(root: str = "runs/step_1") -> tuple[float | None, ...]:
    """What each rank would load; of every file as its manifest says. None where nothing is."""
    path = checkpoint_path(url(root))
    path.store.forget()
    if not (path / "mcore_rlhf.json").is_file():
        return (None,) * RANKS
    assert verify(path, ReadOptions(), Depth.FULL).problems.found == []
    return tuple(
        float(torch.load(io.BytesIO(read_bytes(path / f"model_{rank}.pt")))["bias"][0]) for rank in range(RANKS)
    )


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("who", ["all", "one"])
@pytest.mark.parametrize("nth", [11, pytest.param(1, marks=SLOW)], ids=["one in eleven", "each"])
def test_two_ranks_that_are_killed_at_any_request_leave_all_or_nothing(
    s3: S3, package: Path, who: str, nth: int, rng: random.Random
) -> None:
    """Into a place where nothing is, and over a step that is there; the next save, with what was left, goes on."""
    outcomes = []
    for number in itertools.count(rng.randrange(nth), nth):
        s3.forget()
        came = [saved_by_ranks(s3, package, 1.0, number, who)]
        first = rank_values()
        assert first in ((None,) * RANKS, (1.0,) * RANKS)
        saved_by_ranks(s3, package, 2.0, 1 << 30)
        assert rank_values() == (2.0,) * RANKS
        came.append(saved_by_ranks(s3, package, 3.0, number, who))
        second = rank_values()
        assert second in ((2.0,) * RANKS, (3.0,) * RANKS)
        saved_by_ranks(s3, package, 4.0, 1 << 30)
        assert rank_values() == (4.0,) * RANKS
        outcomes.append((first[0], second[0]))
        if not any(came):
            break
    assert len(outcomes) > 3
    assert (outcomes[0], outcomes[-1]) == ((None, 2.0), (1.0, 3.0))


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


@pytest.mark.parametrize("where", ["folder", "store"])
def test_steps_and_prune_know_its_folders(s3: S3, tmp_path: Path, where: str) -> None:
    """A damaged step counts for nothing, and the last good one stays."""
    root = str(tmp_path) if where == "folder" else url("runs")
    for number in (1, 2, 3, 4):
        manager().save(f"{root}/step_{number}", state(float(number)))
    for number in (3, 4):
        if where == "folder":
            os.truncate(tmp_path / f"step_{number}" / "model_0.pt", 100)
        else:
            prefix = Manifest.from_json(s3.get(f"runs/step_{number}/mcore_rlhf.json"), root).prefix
            s3.put(f"runs/step_{number}/{prefix}/model_0.pt", b"cut")
    states = {1: "committed", 2: "committed", 3: "damaged", 4: "damaged"}
    assert {step.step: step.state for step in listed_steps(checkpoint_path(root))} == states
    done = subprocess.run(
        [sys.executable, "-m", "mcore_rlhf", "prune", root, "--keep-last", "1", "--json"],
        cwd=PROJECT,
        env={**os.environ, **s3.environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert [one["step"] for one in json.loads(done.stdout)["deleted"]] == [1], done.stderr
    assert (value_of(f"{root}/step_1"), value_of(f"{root}/step_2")) == (None, 2.0)
    (found,) = [step for step in listed_steps(checkpoint_path(root)) if step.state == "committed"]
    assert (found.step, found.roles) == (2, ("actor",))


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
