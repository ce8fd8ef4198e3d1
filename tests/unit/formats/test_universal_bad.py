"""Damaged, incomplete and contradictory universal checkpoints: one clear error, nothing written, the source untouched."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.errors import (
    CheckpointError,
    Corrupt,
    Incomplete,
    LayoutMismatch,
    NotACheckpoint,
    Unsupported,
    Untrusted,
)
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.formats.universal import FORMAT
from tests.helpers.damage import edited, flip, snapshot, truncate
from tests.helpers.universal_by_hand import adam, write

Break = Callable[[Path], None]


class Evil:
    """Unpickled by a real loader, it would run a command."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("true",)


def _remove(path: str) -> Break:
    return lambda folder: (folder / path).unlink()


def _put(path: str, tree: object) -> Break:
    return lambda folder: torch.save(tree, folder / path)


def _top(**values: object) -> Break:
    def change(folder: Path) -> None:
        with edited(folder / "mp_rank_00_model_states.pt") as tree:
            tree.update(values)

    return change


def _remove_folder(folder: Path) -> None:
    for path in (folder / "zero" / "b.weight").iterdir():
        path.unlink()
    (folder / "zero" / "b.weight").rmdir()


def _remove_models(folder: Path) -> None:
    (folder / "mp_rank_00_model_states.pt").unlink()


def _text(path: str, text: str) -> Break:
    return lambda folder: (folder / path).write_text(text) and None  # type: ignore[func-returns-value]


def _flat(*shape: int) -> Break:
    def save(folder: Path) -> None:
        for state in ("fp32", "exp_avg", "exp_avg_sq"):
            torch.save(torch.zeros(shape), folder / "zero" / "b.weight" / f"{state}.pt")

    return save


TENSOR = {"cat_dim": 0, "param": torch.zeros(3, 4)}
CASES: dict[str, tuple[Break, type[CheckpointError], tuple[str, ...]]] = {
    "state missing": (_remove("zero/b.weight/exp_avg.pt"), Incomplete, ("b.weight: exp_avg.pt is missing", "3 parameters have")),
    "no master": (_remove("zero/b.weight/fp32.pt"), Incomplete, ("b.weight: expected fp32.pt", "exp_avg.pt, exp_avg_sq.pt, step.pt")),
    "no folder": (_remove_folder, Incomplete, ("b.weight: there is no such folder", "said to train")),
    "no param groups": (_remove("zero/optimizer_state.pt"), Incomplete, ("optimizer_state.pt", "there is no such file")),
    "no model": (_remove_models, Incomplete, ("mp_rank_*_model_states.pt", "zero_pp_rank_*", "convert again")),
    "stray text": (_text("zero/b.weight/notes.txt", "x"), LayoutMismatch, ("notes.txt", "remove what does not belong")),
    "stray copy": (_text("zero/b.weight/fp32.pt.bak", "x"), LayoutMismatch, ("fp32.pt.bak",)),
    "stray beside": (_text("zero/README", "x"), LayoutMismatch, ("zero/README",)),
    "stray state": (_put("zero/b.weight/ema.pt", TENSOR), LayoutMismatch, ("ema.pt: a stray file", "only 1 of 4 parameters")),
    "other shape": (
        _put("zero/b.weight/exp_avg.pt", {"param": torch.zeros(4, 3)}), LayoutMismatch, ("exp_avg.pt", "(3, 4)", "(4, 3)"),
    ),
    "other length": (_flat(9), LayoutMismatch, ("b.weight/fp32.pt", "the shape (3, 4)", "12 elements", "found (9,)")),
    "transposed": (_flat(4, 3), LayoutMismatch, ("b.weight/fp32.pt", "the shape (3, 4)", "found (4, 3)")),
    "no tensor": (_put("zero/b.weight/exp_avg.pt", {"cat_dim": 0}), Unsupported, ("exp_avg.pt", "under 'param'", "with cat_dim")),
    "a number": (_put("zero/b.weight/exp_avg.pt", 3), Unsupported, ("exp_avg.pt", "found int")),
    "no module": (_put("mp_rank_00_model_states.pt", {"global_steps": 3}), Unsupported, ("'module'", "a dictionary with global_steps")),
    "groups no list": (_put("zero/optimizer_state.pt", {"ds_version": "0"}), Unsupported, ("'param_groups'", "found none")),
    "other step": (_put("zero/b.weight/step.pt", torch.tensor(8.0)), LayoutMismatch, ("at step 7.0", "b.weight at 8.0")),
    "no step": (_remove("zero/b.weight/step.pt"), Incomplete, ("zero/b.weight: expected step.pt", "there for a.weight")),
    "no second rank": (_top(mp_world_size=2), Incomplete, ("mp_rank_01_model_states.pt: there is no such", "2 model-parallel ranks")),
    "step of words": (_put("zero/b.weight/step.pt", "seven"), Unsupported, ("b.weight/step.pt", "expected a number", "'seven'")),
    "step of many": (_put("zero/b.weight/step.pt", torch.ones(3)), Unsupported, ("b.weight/step.pt", "one element")),
    "shape of words": (_top(param_shapes=[{"a.weight": "x"}]), Unsupported, ("mp_rank_00", "the shape of a.weight, found 'x'")),
    "frozen shape": (_top(frozen_param_shapes={"f": 3}), Unsupported, ("mp_rank_00", "the shape of f, found 3")),
    "cut off": (lambda folder: truncate(folder / "zero/b.weight/exp_avg.pt", 0.6), Incomplete, ("b.weight/exp_avg.pt", "cut off")),
    "empty": (_text("zero/b.weight/exp_avg.pt", ""), Incomplete, ("exp_avg.pt", "the file is empty")),
    "no zip": (_text("zero/b.weight/exp_avg.pt", "hello world"), Corrupt, ("exp_avg.pt", "not a file of torch.save")),
    "runs code": (_put("zero/b.weight/step.pt", Evil()), Untrusted, ("step.pt", "system")),
    "flipped bit": (lambda folder: flip(folder / "zero/b.weight/exp_avg.pt", "data/0", 17), Corrupt, ("b.weight/exp_avg.pt", "CRC-32")),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    params = {name: adam(3, 4, seed=i) for i, name in enumerate(("a.weight", "b.weight", "c.weight", "d.weight"))}
    shapes = [{name: torch.Size((3, 4)) for name in params}]
    module = {name: torch.empty(0) for name in params}
    (tmp_path / "run").mkdir()
    return write(tmp_path / "run", params, top={"param_shapes": shapes, "module": module})


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused(folder: Path, case: str, tmp_path: Path) -> None:
    break_it, kind, words = CASES[case]
    break_it(folder)
    before = snapshot(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        convert(folder, tmp_path / "target", ConvertOptions(to="universal", fsync=False))
    message = str(caught.value)
    assert type(caught.value) is kind, message
    assert [word for word in words if word not in message] == [], message
    assert snapshot(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_it_is_accepted_unbroken(folder: Path, tmp_path: Path) -> None:
    convert(folder, tmp_path / "target", ConvertOptions(to="universal", fsync=False))


def test_every_problem_is_said_at_once(folder: Path) -> None:
    _text("zero/a.weight/notes.txt", "x")(folder)
    _remove("zero/b.weight/fp32.pt")(folder)
    _text("zero/c.weight/exp_avg.pt", "")(folder)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder, ReadOptions())
    for words in ("3 problems", "notes.txt", "b.weight: expected fp32.pt", "c.weight/exp_avg.pt: the file is empty"):
        assert words in str(caught.value)


@pytest.mark.parametrize("name", ["global_step8_uni", "", "global_step7"])
def test_a_tracker_that_points_nowhere(folder: Path, name: str) -> None:
    (folder.parent / "latest_universal").write_text(name)
    with pytest.raises(Incomplete, match=r"latest_universal: names .*there are: global_step7_uni.*\n.*convert again"):
        open_checkpoint(folder.parent, ReadOptions())


def test_a_tracker_that_points_outside(folder: Path) -> None:
    (folder.parent / "latest_universal").write_text("../run/global_step7_uni")
    with pytest.raises(Untrusted, match="not a plain path"):
        open_checkpoint(folder.parent, ReadOptions())


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpoint, match="zero/"):
        FORMAT.read(tmp_path, ReadOptions())


def test_a_frozen_parameter_that_was_excluded_is_said_to_be_lost(folder: Path) -> None:
    with edited(folder / "mp_rank_00_model_states.pt") as tree:
        tree["frozen_param_shapes"] = {"frozen.weight": torch.Size((2,))}
    notes = open_checkpoint(folder, ReadOptions()).notes
    assert notes.lost == ["frozen.weight: frozen and excluded from the checkpoint"]


@pytest.mark.parametrize(
    "values",
    [
        {"checkpoint_parallel_dimensions": {"pp_degree": "two", "tp_degree": None}},
        {"checkpoint_parallel_dimensions": 3},
        {"buffer_names": None, "shared_params": 5, "ds_config": "none", "lr_scheduler": [1]},
        {"dp_world_size": 0, "mp_world_size": "x", "global_steps": None},
        {"universal_checkpoint_info": 7},
        {"param_shapes": 5},
    ],
)
def test_odd_values_that_nothing_hangs_on(folder: Path, values: dict[str, object], tmp_path: Path) -> None:
    _top(**values)(folder)
    convert(folder, tmp_path / "target", ConvertOptions(to="universal", fsync=False))
