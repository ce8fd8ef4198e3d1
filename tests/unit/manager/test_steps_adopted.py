"""Steps of other trainers get a manifest, when all of them is sound; made of what Megatron-LM itself wrote."""

from __future__ import annotations

import errno
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mcore_rlhf.errors import (
    CheckpointError,
    Corrupt,
    Incomplete,
    LayoutMismatch,
    NotACheckpoint,
    StorageError,
    Untrusted,
    UsageError,
)
from mcore_rlhf.manager.run import adopt as module
from mcore_rlhf.manager.run import steps
from mcore_rlhf.manager.run.adopt import Adoption, adopt
from mcore_rlhf.storage.manifest import check
from mcore_rlhf.verify.checkpoint import Depth
from tests.helpers.damage import flip_a_bit

from .roots import make_step

GOLDENS = Path(__file__).parents[2] / "goldens" / "megatron"


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A step as RLinf leaves it: actor and critic as Megatron wrote them, and the loader's state."""
    folder = tmp_path / "global_step_2"
    _copy("tp1_bf16_do", folder / "actor")
    _copy("pp2_vpp2_bf16_do", folder / "critic")
    (folder / "data").mkdir()
    torch.save({"_sampler_iter_yielded": 3, "rng": torch.arange(5)}, folder / "data" / "data.pt")
    return folder


def _copy(name: str, target: Path) -> None:
    shutil.copytree(GOLDENS / name, target)
    for path in target.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)


def _refused(folder: Path, kind: type[CheckpointError], match: str) -> None:
    before = sorted(folder.rglob("*"))
    with pytest.raises(kind, match=match):
        adopt(folder)
    assert sorted(folder.rglob("*")) == before
    assert not (folder / "manifest.json").exists()


def test_a_sound_step_is_committed_then(foreign: Path) -> None:
    assert steps.listed(foreign.parent)[0].state == "foreign"
    read: list[int] = []
    manifest = adopt(foreign, Adoption(depth=Depth.DEEP, progress=read.append))
    (step,) = steps.committed(foreign.parent)
    assert (step.step, step.roles) == (2, ("actor", "critic"))
    assert steps.read_manifest(foreign) == manifest
    assert manifest.provenance["adopted"] is True
    assert [(part["role"], part["format"]) for part in manifest.parts] == [
        ("actor", "megatron"),
        ("critic", "megatron"),
    ]
    on_disk = {path.relative_to(foreign).as_posix() for path in foreign.rglob("*") if path.is_file()}
    assert set(manifest.files) == on_disk - {"manifest.json"}
    for name, entry in manifest.files.items():
        data = (foreign / name).read_bytes()
        assert (entry.nbytes, entry.crc32) == (len(data), zlib.crc32(data))
    assert sum(read) >= sum(entry.nbytes for entry in manifest.files.values())


def test_a_second_time_changes_nothing(foreign: Path) -> None:
    manifest = adopt(foreign)
    before = (foreign / "manifest.json").read_bytes()
    assert adopt(foreign) == manifest
    assert (foreign / "manifest.json").read_bytes() == before


def test_notes_and_leftovers_are_not_part_of_it(foreign: Path) -> None:
    steps.quarantine(foreign, "not yet")
    (foreign / ".manifest.json.tmp-1-ab").write_text("{")
    manifest = adopt(foreign)
    assert not [name for name in manifest.files if "quarantined" in name or ".tmp-" in name]
    steps.release(foreign)
    assert not check(foreign, manifest)
    assert steps.is_committed(foreign)


def test_a_step_that_is_itself_a_model_is_the_actors(tmp_path: Path) -> None:
    _copy("tp1_bf16_do", tmp_path / "global_step_2")
    assert [part["role"] for part in adopt(tmp_path / "global_step_2").parts] == ["actor"]


def _model_file(folder: Path) -> Path:
    return folder / "critic" / "iter_0000002" / "mp_rank_00_001" / "model_optim_rng.pt"


def test_a_flipped_bit_anywhere_in_a_model_is_refused(foreign: Path) -> None:
    flip_a_bit(foreign / "actor" / "iter_0000002" / "mp_rank_00" / "distrib_optim.pt")
    _refused(foreign, Corrupt, "distrib_optim.pt")


def test_a_missing_rank_is_refused(foreign: Path) -> None:
    shutil.rmtree(_model_file(foreign).parent)
    _refused(foreign, CheckpointError, "mp_rank_00_001")


def test_a_torn_file_is_refused(foreign: Path) -> None:
    os.truncate(_model_file(foreign), _model_file(foreign).stat().st_size // 2)
    _refused(foreign, Incomplete, "model_optim_rng.pt")


def test_all_damaged_models_are_named(foreign: Path) -> None:
    flip_a_bit(foreign / "actor" / "iter_0000002" / "mp_rank_00" / "distrib_optim.pt")
    os.truncate(_model_file(foreign), 100)
    with pytest.raises(CheckpointError) as caught:
        adopt(foreign)
    assert "distrib_optim.pt" in str(caught.value)
    assert "model_optim_rng.pt" in str(caught.value)


def test_a_flipped_bit_in_the_loaders_state_is_refused(foreign: Path) -> None:
    path = foreign / "data" / "data.pt"
    torch.save({"order": torch.arange(1 << 12)}, path)
    flip_a_bit(path)
    _refused(foreign, Corrupt, "data.pt")


def test_a_state_that_would_run_code_is_refused(foreign: Path) -> None:
    torch.save({"iterator": os.system}, foreign / "data" / "data.pt")
    _refused(foreign, Untrusted, "system")


def test_broken_json_is_refused(foreign: Path) -> None:
    (foreign / "rlhf").mkdir()
    (foreign / "rlhf" / "rlhf_state.json").write_text('{"kl_coef": ')
    _refused(foreign, Corrupt, "rlhf_state.json: is not valid JSON")


def test_another_iteration_than_the_folder_says_is_refused(foreign: Path) -> None:
    other = foreign.rename(foreign.with_name("global_step_7"))
    _refused(other, LayoutMismatch, "is of iteration 2, but the step is 7")


def test_a_role_without_an_iteration_does_not_contradict_the_folder(foreign: Path) -> None:
    """A reward model that nobody trains lies there as it was published: a Hugging Face folder says no iteration."""
    shutil.copytree(GOLDENS.parent / "huggingface" / "llama_tied_bf16_sharded", foreign / "reward")
    parts = {part["role"]: part["format"] for part in adopt(foreign).parts}
    assert parts == {"actor": "megatron", "critic": "megatron", "reward": "hf"}
    assert steps.is_committed(foreign)


def test_a_role_in_an_unknown_format_is_refused(foreign: Path) -> None:
    (foreign / "reward").mkdir()
    (foreign / "reward" / "latest_checkpointed_iteration.txt").write_text("2")
    _refused(foreign, NotACheckpoint, "reward: not a checkpoint in a format that is known")


def test_a_folder_without_models_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "global_step_2"
    (folder / "data").mkdir(parents=True)
    _refused(folder, NotACheckpoint, "no model in a format that is known")


def test_other_folders_are_refused(foreign: Path, tmp_path: Path) -> None:
    with pytest.raises(NotACheckpoint, match="there is no such folder"):
        adopt(tmp_path / "global_step_3")
    with pytest.raises(UsageError, match="is called global_step_N"):
        adopt(foreign / "actor")


def test_a_damaged_step_with_a_manifest_is_refused(tmp_path: Path) -> None:
    folder = make_step(tmp_path, 2)
    (folder / "actor" / "weights.bin").unlink()
    before = (folder / "manifest.json").read_bytes()
    with pytest.raises(Corrupt, match=r"has a manifest already, but .*weights\.bin: is missing"):
        adopt(folder)
    assert (folder / "manifest.json").read_bytes() == before


def test_a_link_out_of_the_step_is_refused(foreign: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("x")
    (foreign / "data" / "more.bin").symlink_to(tmp_path / "elsewhere")
    _refused(foreign, Untrusted, "leads out of")


@pytest.mark.parametrize("change", [lambda path: path.write_bytes(b"longer than before" * 99), Path.unlink])
def test_a_step_that_is_still_written_is_refused(
    foreign: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], object]
) -> None:
    (foreign / "log.txt").write_text("x")
    genuine = module.crc_of_file

    def meanwhile(path: Path, progress: Callable[[int], None]) -> int:
        found = genuine(path, progress)
        if path.name == "log.txt":
            change(path)
        return found

    monkeypatch.setattr(module, "crc_of_file", meanwhile)
    with pytest.raises(Incomplete, match="is it still being written"):
        adopt(foreign)
    assert not (foreign / "manifest.json").exists()


def test_a_full_disk_leaves_no_manifest(foreign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "replace", full)
    _refused(foreign, StorageError, "No space left")
