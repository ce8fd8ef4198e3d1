"""Real DeepSpeed, ZeRO-2 and ZeRO-3 on two ranks, whose tags are committed: its own ``load_checkpoint`` says what is there."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
from click.testing import CliRunner

from mcore_rlhf.cli.app import app
from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.demo.workers import WorkerError, WorkerPool
from mcore_rlhf.storage.manifest import Manifest, check
from tests.reference import deepspeed_commit as jobs
from tests.reference import deepspeed_resident as resident
from tests.reference.deepspeed_live import Live
from tests.reference.deepspeed_matrix import differences
from tests.reference.deepspeed_models import Setting

STAGES = [Setting("actor-critic", "bf16", 2, 2), Setting("actor-critic", "bf16", 3, 2)]
TAG = f"global_step{resident.SAVED}"


@pytest.fixture(params=STAGES, ids=["zero2", "zero3"])
def setting(request: pytest.FixtureRequest) -> Setting:
    found: Setting = request.param
    return found


@pytest.fixture
def run(deepspeed_pool: WorkerPool, setting: Setting) -> Any:
    def on_ranks(job: Any, *args: object, **named: object) -> list[Any]:
        return deepspeed_pool.run(job, setting, *args, world_size=setting.dp, timeout=90.0, **named)

    return on_ranks


def names_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def assert_whole(folder: Path) -> None:
    manifest = Manifest.read(folder / "mcore_rlhf.json")
    assert names_in(folder) == {*manifest.files, "mcore_rlhf.json"}
    assert not check(folder, manifest)


def verify(folder: Path) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["verify", str(folder)])
    return done.exit_code, done.output


def test_deepspeed_alone_loads_what_was_committed(run: Any, tmp_path: Path, setting: Setting) -> None:
    """The files are those that it would have written, and the run goes on bit for bit."""
    ours, its = tmp_path / "ours", tmp_path / "its"
    saved = run(jobs.save_twice, str(ours))
    alone = run(resident.train_and_save, str(its))
    assert names_in(ours / TAG) == names_in(its / TAG) | {"mcore_rlhf.json"}
    assert {path.name for path in ours.iterdir()} == {path.name for path in its.iterdir()} | {"best"}
    assert (ours / "latest").read_text() == TAG
    for tag in (TAG, "best"):
        assert_whole(ours / tag)
        assert verify(ours / tag)[0] == 0
    loaded = run(resident.load_and_train, str(ours))
    for seen, one, other in zip(loaded, saved, alone, strict=True):
        assert differences(seen.start, one.start) == differences(one.start, other.start) == []
        assert seen.losses == one.losses == other.losses
        assert differences(seen.end, one.end) == []
    for seen, one in zip(run(jobs.load_verified, str(ours), None), saved, strict=True):
        assert differences(seen.start, one.start) == []
    convert(ours, tmp_path / "universal", ConvertOptions(to="universal", fsync=False, workers=1))


def test_damage_is_found_before_it_is_loaded(run: Any, tmp_path: Path, rng: Random) -> None:
    run(jobs.save_twice, str(tmp_path))
    path = tmp_path / TAG / rng.choice(sorted(names_in(tmp_path / TAG) - {"mcore_rlhf.json"}))
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    code, text = verify(tmp_path / TAG)
    assert code == 1
    assert path.name in text
    for said in run(jobs.load_verified, str(tmp_path), None):
        assert f"{path}: is damaged" in said
        assert "there as a whole: best" in said
    assert all(not isinstance(seen, str) for seen in run(jobs.load_verified, str(tmp_path), "best"))


def test_where_there_is_nothing_deepspeed_says_so(run: Any, tmp_path: Path) -> None:
    assert run(jobs.load_verified, str(tmp_path / "new"), None) == ["nothing", "nothing"]
    (tmp_path / "latest").write_text("")  # DeepSpeed alone, killed between open and write
    (said, _) = run(jobs.load_verified, str(tmp_path), None)
    assert f"{tmp_path / 'latest'}: is empty" in said
    (tmp_path / "latest").write_text("../../etc")
    assert "not a plain path" in run(jobs.load_verified, str(tmp_path), None)[1]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_is_named_and_nothing_is_published(run: Any, tmp_path: Path, rank: int) -> None:
    found: list[tuple[str, list[str], Live]] = run(jobs.save_with_one_that_fails, str(tmp_path), rank)
    for number, (said, left, _) in enumerate(found):
        assert "No space left on device" in said
        assert number == rank or f"failed on rank {rank}" in said
        assert left == ["a", "latest", "zero_to_fp32.py", "zero_to_torch.py"]
    assert_whole(tmp_path / "a")
    assert_whole(tmp_path / "b")
    assert (tmp_path / "latest").read_text() == "b"
    before = run(jobs.loaded_by_deepspeed, str(tmp_path), "a")
    assert differences(before[0], found[0][2]) == []
    assert differences(run(jobs.loaded_by_deepspeed, str(tmp_path))[0], run(jobs.trained, 2)[0]) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_leaves_what_was_there(run: Any, tmp_path: Path, rank: int) -> None:
    with pytest.raises(WorkerError, match="died"):
        run(jobs.save_and_die, str(tmp_path), rank)
    assert differences(run(jobs.loaded_by_deepspeed, str(tmp_path))[0], run(jobs.trained, 1)[0]) == []
    run(jobs.load_verified, str(tmp_path), None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "latest", "zero_to_fp32.py", "zero_to_torch.py"]
    assert_whole(tmp_path / "a")


def test_what_cannot_be_published_is_refused(run: Any) -> None:
    decoupled, local, *tags, url = run(jobs.refusals)[0]
    assert "checkpoint.writer.decoupled" in decoupled
    assert "use_node_local_storage" in local
    assert all("is to be the name of one folder" in said for said in tags)
    assert "is a URL" in url
