"""What ``--load`` means."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_rlhf.errors import NotACheckpoint
from mcore_rlhf.integrations.megatron_arguments import find, has_steps
from mcore_rlhf.manager.run.steps import quarantine
from mcore_rlhf.storage.manifest import FileEntry, Manifest, crc_of_file


def megatron(root: Path, name: str, tracker: str | None) -> Path:
    folder = root / name / "mp_rank_00"
    folder.mkdir(parents=True)
    (folder / "model_optim_rng.pt").write_bytes(b"x")
    if tracker is not None:
        (root / "latest_checkpointed_iteration.txt").write_text(tracker)
    return root


def committed(root: Path, step: int) -> Path:
    folder = megatron(root / f"global_step_{step}" / "actor", f"iter_{step:07d}", str(step)).parent
    files = {
        str(p.relative_to(folder)): FileEntry(p.stat().st_size, crc_of_file(p))
        for p in folder.rglob("*")
        if p.is_file()
    }
    part = {"role": "actor", "format": "megatron", "parallel": "TP1"}
    (folder / "manifest.json").write_text(Manifest(files, step=step, transaction="t", parts=(part,)).to_json())
    return folder


def test_nothing(tmp_path: Path) -> None:
    assert find(None).kind == "nothing"
    assert find(str(tmp_path / "none")).kind == "nothing"
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / ".global_step_5.partial-abc").mkdir()  # killed in its first save
    assert find(str(tmp_path)).kind == "nothing"
    assert not has_steps(str(tmp_path))
    assert not has_steps(None)


def test_a_root_and_a_step(tmp_path: Path) -> None:
    first, second = committed(tmp_path, 1), committed(tmp_path, 2)
    found = find(str(tmp_path))
    assert (found.kind, found.root, found.which) == ("root", tmp_path, "auto")
    assert found.model_folder("actor") == second / "actor"
    assert has_steps(str(tmp_path))
    assert has_steps(str(first))
    for given in (find(str(first)), find(str(tmp_path), 1)):
        assert (given.kind, given.path, given.root, given.which) == ("step", first, tmp_path, first)
        assert given.model_folder("critic") == first / "critic"
    with pytest.raises(NotACheckpoint, match="--ckpt-step asks for 7"):
        find(str(tmp_path), 7)


@pytest.mark.parametrize(
    ("name", "tracker", "release"), [("iter_0000012", "12\n", False), ("release", "release", True)]
)
def test_a_folder_of_megatrons(tmp_path: Path, name: str, tracker: str, release: bool) -> None:
    megatron(tmp_path, name, tracker)
    found = find(str(tmp_path))
    assert (found.kind, found.path, found.release, found.which) == ("model", tmp_path, release, tmp_path)
    assert find(str(tmp_path / name)).kind == "model"
    assert find(str(tmp_path / name)).release == release
    assert not has_steps(str(tmp_path))


def test_an_iteration_that_is_named(tmp_path: Path) -> None:
    megatron(tmp_path, "iter_0000012", None)
    megatron(tmp_path, "iter_0000024", "24")
    assert find(str(tmp_path), 12).path == tmp_path / "iter_0000012"


@pytest.mark.parametrize(("mark", "name"), [("metadata.json", "torch_dist"), (".metadata", "torch_dcp")])
def test_formats_of_megatrons_own(tmp_path: Path, mark: str, name: str) -> None:
    megatron(tmp_path, "iter_0000012", "12")
    (tmp_path / "iter_0000012" / mark).write_text("")
    assert (find(str(tmp_path)).kind, find(str(tmp_path)).format) == ("megatron", name)
    assert find(str(tmp_path), 12).kind == "megatron"


def test_a_run_that_went_over_to_the_manager_goes_on_from_the_newest_step(tmp_path: Path) -> None:
    megatron(tmp_path, "iter_0000012", "12")
    committed(tmp_path, 15)
    assert find(str(tmp_path)).kind == "root"
    assert find(str(tmp_path), 12).path == tmp_path / "iter_0000012"


def test_steps_that_nothing_can_be_resumed_from_are_no_fresh_start(tmp_path: Path) -> None:
    megatron(tmp_path / "global_step_5" / "actor", "iter_0000005", "5")
    with pytest.raises(NotACheckpoint, match=r"global_step_5 \(foreign: .*(?s:.*)mcore-rlhf adopt"):
        find(str(tmp_path))
    assert has_steps(str(tmp_path))
    assert find(str(tmp_path / "global_step_5")).kind == "step"
    bad = committed(tmp_path / "other", 6)
    quarantine(bad, "loss went up")
    with pytest.raises(NotACheckpoint, match="loss went up"):
        find(str(tmp_path / "other"))
