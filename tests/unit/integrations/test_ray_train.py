"""What ``Commits`` does around Ray Train, with a stand-in for Ray: refusals, names, and when is saved. ``tests/trainers`` has Ray."""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mcore_rlhf.errors import Corrupt, Unsupported, UsageError
from mcore_rlhf.integrations.ray_train import Commits, _who_copies, _who_notes
from mcore_rlhf.manager.run.policies import EverySteps


class Ray(ModuleType):
    """Has of ``ray.train`` what is asked for, and one worker."""

    def __init__(self, folder: Path) -> None:
        super().__init__("ray.train")
        self.info: Any = None
        self.size, self.kind, self.folder = 1, "local", folder

    class Checkpoint:
        """Notes as Ray's does."""

        def __init__(self, path: str) -> None:
            self.file = Path(path, ".metadata.json")

        def update_metadata(self, more: Any) -> None:
            found = json.loads(self.file.read_text())
            found.update(more)
            self.file.write_text(json.dumps(found))

    def get_preemption_info(self) -> Any:
        return self.info

    def get_context(self) -> Any:
        storage = SimpleNamespace(
            experiment_fs_path=str(self.folder), storage_filesystem=SimpleNamespace(type_name=self.kind)
        )
        return SimpleNamespace(get_storage=lambda: storage, get_world_size=lambda: self.size, get_node_rank=lambda: 0)

    def report(
        self, metrics: Any, checkpoint: Any = None, checkpoint_dir_name: Any = None, checkpoint_upload_mode: Any = None,
        delete_local_checkpoint_after_upload: Any = None, checkpoint_upload_fn: Any = None, validation: Any = False,
    ) -> None: ...  # fmt: skip


@pytest.fixture
def ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ray:
    """Where Ray is looked for."""
    found = Ray(tmp_path)
    monkeypatch.setitem(sys.modules, "ray.train", found)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(train=found))
    return found


def test_a_seam_that_changed_is_named(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ray, "report", lambda self, metrics, checkpoint=None: None)
    with pytest.raises(Unsupported, match=r"report: expected \(metrics, checkpoint, checkpoint_dir_name, .*found \("):
        Commits()


def test_what_no_step_could_be_published_in_is_refused(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    ray.kind = "s3"
    with pytest.raises(Unsupported, match="file system 's3'"):
        Commits()
    ray.kind, ray.size = "local", 2
    with pytest.raises(UsageError, match=r"2 workers, and torch\.distributed has 1"):
        Commits()
    monkeypatch.setattr(Ray, "get_context", lambda self: SimpleNamespace())
    with pytest.raises(Unsupported, match=r"does not say where the run is kept: .*get_storage"):
        Commits()


def test_a_name_says_its_step_and_is_given_once(ray: Ray, tmp_path: Path) -> None:
    commits = Commits()
    assert commits.name(6) == "checkpoint_step_6"
    for name in ("checkpoint_step_6", "checkpoint_step_6-02"):
        (tmp_path / name).mkdir()
    assert commits.name(6) == "checkpoint_step_6-03"
    with pytest.raises(UsageError, match="says no step"):
        commits(SimpleNamespace(), "checkpoint_2026-11-28_04-00-00")
    with pytest.raises(
        UsageError, match="checkpoint_2026-11-28_04-00-00 could not be saved, and Ray waits for its report"
    ):
        commits(SimpleNamespace(), "checkpoint_step_8")


def test_an_upload_beside_the_training_is_refused(ray: Ray, tmp_path: Path) -> None:
    commits = Commits()
    with ThreadPoolExecutor(1) as threads, pytest.raises(Unsupported, match=r"CheckpointUploadMode\.ASYNC"):
        threads.submit(commits, SimpleNamespace(), "checkpoint_step_2").result()
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("content", ["", "[1]", '{"a": ', "[" * 100_000])
def test_notes_that_are_none_of_rays(ray: Ray, tmp_path: Path, content: str) -> None:
    commits, file = Commits(), tmp_path / ".metadata.json"
    file.write_text('{"a": 1}')
    commits._note(tmp_path, 6)
    assert json.loads(file.read_text()) == {"a": 1, "mcore_rlhf_step": 6}
    file.write_text(content)
    with pytest.raises(Corrupt, match=r"\.metadata\.json of this worker's files: expected an object in JSON"):
        commits._note(tmp_path, 6)


def test_when_is_saved(ray: Ray) -> None:
    commits = Commits(EverySteps(10))
    assert [step for step in range(1, 21) if commits.wants(step)] == [10, 20]

    def told(seconds: float | None) -> Any:
        return SimpleNamespace(deadline_ms=None if seconds is None else int(1000 * (time.time() + seconds)))

    ray.info = told(None)
    assert commits.wants(21) == "a node is about to be taken away"
    assert commits.wants(22) is None, "once"
    ray.info = told(3600)
    assert commits.wants(23) is None, "there is time"
    ray.info = told(30)
    assert (commits.wants(24) or "").startswith("the deadline is in ")
    ray.info = told(7200)
    assert (commits.wants(25) or "").startswith("the deadline is in "), "the earlier one holds, and nothing was saved"


def test_who_copies() -> None:
    shared = ("/a", ("x", "y"))
    assert _who_copies([(0, shared), (0, shared), (0, ("", ())), (1, ("/b", ("z",)))]) == [
        True, False, False, True,
    ]  # fmt: skip
    assert _who_notes([(0, shared), (0, ("/b", ("notes",)))], "notes") == 1, "nobody writes where another copies"
    assert _who_notes([(0, ("", ())), (0, shared)], "notes") == 0
    with pytest.raises(UsageError, match="x: is reported by worker 0 and by worker 1") as raised:
        _who_copies([(0, shared), (1, shared)])
    assert "y: is reported by worker 0 and by worker 1" in str(raised.value)
