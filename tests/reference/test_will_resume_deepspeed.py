"""``will-resume --trainer deepspeed`` says what real DeepSpeed does with folders from which one thing was taken."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf.demo.workers import WorkerPool
from mcore_rlhf.manager.will_resume import forecast, loader_named
from mcore_rlhf.trainers.resuming import Outcome, Thing
from mcore_rlhf.trainers.settings_file import read_settings
from tests.helpers.damage import gone, zeroed
from tests.helpers.one_key import keys_of, without_key
from tests.reference.deepspeed_live import Live
from tests.reference.deepspeed_matrix import Matrix, same
from tests.reference.deepspeed_models import Setting, config

SAVED = Setting("plain", "bf16", 2, 1)
_OPTIM, _MODEL = "*_optim_states.pt", "*_model_states.pt"


@pytest.fixture(scope="module")
def matrix(deepspeed_pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(deepspeed_pool, tmp_path_factory.mktemp("restored"))


CASES: dict[str, tuple[Callable[[Path], object], dict[str, Any], Setting, Setting]] = {
    "whole": (lambda root: None, {}, SAVED, SAVED),
    "whole, in stage 0": (lambda root: None, {}, Setting("plain", "fp32", 0, 1), Setting("plain", "fp32", 0, 1)),
    "no optimizer's file": (gone(f"*/{_OPTIM}"), {}, SAVED, SAVED),
    "optimizer's file of zeros": (zeroed(f"*/{_OPTIM}"), {}, SAVED, SAVED),
    "no model's file": (gone(f"*/{_MODEL}"), {}, SAVED, SAVED),
    "model's file of zeros": (zeroed(f"*/{_MODEL}"), {}, SAVED, SAVED),
    "without the optimizer": (lambda root: None, {"load_optimizer_states": False}, SAVED, SAVED),
    "without the scheduler": (lambda root: None, {"load_lr_scheduler_states": False}, SAVED, SAVED),
    "the model alone": (lambda root: None, {"load_module_only": True}, SAVED, SAVED),
    "by an engine of fp32": (lambda root: None, {}, SAVED, Setting("plain", "fp32", 2, 1)),
    "whole, by stage 1": (lambda root: None, {}, SAVED, Setting("plain", "bf16", 1, 1)),
    "of stage 3": (lambda root: None, {}, SAVED, Setting("plain", "bf16", 3, 1)),
    "of stage 3, by stage 2": (lambda root: None, {}, Setting("plain", "bf16", 3, 1), SAVED),
    "of stage 0": (lambda root: None, {}, Setting("plain", "fp32", 2, 1), Setting("plain", "fp32", 0, 1)),
    "of stage 0, by stage 2": (lambda root: None, {}, Setting("plain", "fp32", 0, 1), Setting("plain", "fp32", 2, 1)),
    "by fewer ranks": (lambda root: None, {}, Setting("plain", "bf16", 2, 2), SAVED),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_deepspeed(matrix: Matrix, name: str, tmp_path: Path) -> None:
    change, options, saved, loading = CASES[name]
    source, seen = matrix.source(saved)
    root, file = tmp_path / "root", tmp_path / "ds.json"
    shutil.copytree(source, root)
    change(root)
    file.write_text(json.dumps({**config(loading, universal=False), **options}))
    job = "tests.reference.deepspeed_restored:after_loading"
    (live,) = matrix.pool.run(job, loading, str(root), options, world_size=1, timeout=60.0)
    found = forecast(root, loader_named("deepspeed")[0], read_settings(file))
    told = {one.thing: one.row.outcome for one in found.roles[""]}
    assert found.stops == isinstance(live, str), (told, live)
    if isinstance(live, Live):
        for thing, restored in _restored(live, seen[0].start).items():
            assert (told[thing] is Outcome.RESTORED) == restored, (thing, told[thing])
    assert found.resumes == name.startswith("whole")


def _restored(live: Live, wanted: Live) -> dict[Thing, bool]:
    return {
        Thing.WEIGHTS: all(same(live.param[name], value) for name, value in wanted.param.items()),
        Thing.OPTIMIZER: all(
            same(live.states[key], value) for key, value in wanted.states.items() if key in live.states
        )
        and live.states.keys() == wanted.states.keys(),
        Thing.SCHEDULER: live.counters["scheduler"] == wanted.counters["scheduler"],
        Thing.COUNTERS: live.counters["global_steps"] == wanted.counters["global_steps"],
    }


def test_without_a_tracker_training_begins_anew(matrix: Matrix, tmp_path: Path) -> None:
    source, _ = matrix.source(SAVED)
    root = tmp_path / "root"
    shutil.copytree(source, root)
    (root / "latest").unlink()
    job = "tests.reference.deepspeed_restored:after_loading"
    assert matrix.pool.run(job, SAVED, str(root), {}, world_size=1, timeout=60.0) == [None]
    (root / "latest").write_text("")
    found = forecast(root, loader_named("deepspeed")[0], read_settings(_written(tmp_path)))
    assert found.taken.folder is None
    assert not found.resumes


def _written(folder: Path) -> Path:
    (folder / "ds.json").write_text("{}")
    return folder / "ds.json"


EACH = [SAVED, *(
    pytest.param(Setting("plain", dtype, stage, 1), marks=pytest.mark.slow)
    for dtype, stage in (("fp32", 0), ("bf16", 3), ("fp16", 1), ("fp16", 0))
)]  # fmt: skip
_UNREAD = re.compile(r".*/\d+|param_shapes.*|checkpoint_parallel_dimensions/.*")
"""What our reader needs, or needs to agree, and DeepSpeed may not: the folder cannot be opened, which is said in place of an outcome."""


@pytest.mark.parametrize("setting", EACH, ids=lambda setting: f"stage{setting.stage}-{setting.dtype}")
def test_each_key_of_each_file_taken(matrix: Matrix, setting: Setting, tmp_path: Path) -> None:
    source, seen = matrix.source(setting)
    root, file = tmp_path / "root", tmp_path / "ds.json"
    shutil.copytree(source, root)
    file.write_text(json.dumps(config(setting, universal=False)))
    settings, job = read_settings(file), "tests.reference.deepspeed_restored:after_loading"
    wrong, taken = [], 0
    for path in sorted(root.glob("global_step*/*.pt")):
        whole = path.read_bytes()
        for at in keys_of(torch.load(path, weights_only=False)):
            if "ds_config" in at[:-1]:
                continue
            path.write_bytes(whole)
            torch.save(without_key(torch.load(path, weights_only=False), at), path)
            (live,) = matrix.pool.run(job, setting, str(root), {}, world_size=1, timeout=60.0)
            found = forecast(root, loader_named("deepspeed")[0], settings)
            told = {one.thing: one.row.outcome is Outcome.RESTORED for one in found.roles[""]}
            restored = _restored(live, seen[0].start) if isinstance(live, Live) else {}
            agrees = found.stops == isinstance(live, str) and all(told[thing] == one for thing, one in restored.items())
            named = "/".join(map(str, at))
            if not agrees and not (found.doubtful and _UNREAD.fullmatch(named)):
                wrong.append(f"{path.name}: {named}: {live if isinstance(live, str) else restored}, told {told}")
            taken += 1
        path.write_bytes(whole)
    assert not wrong
    assert taken > 60
