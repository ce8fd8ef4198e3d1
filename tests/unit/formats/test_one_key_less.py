"""From what genuine files hold one key is taken: whoever opens the folder says what is wrong, or can do without it.

A reader of ours that takes a key for granted ends in a KeyError, of which a user learns only that something was not expected.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf.errors import CheckpointError, Incomplete, Unforeseen
from mcore_rlhf.families.inventory import inventory_of
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.formats.registry import is_model, open_without_manifest
from tests.helpers.one_key import At, keys_of, without_key

GOLDENS = Path(__file__).parents[2] / "goldens"
FOLDERS = sorted(path for path in GOLDENS.glob("*/*") if path.is_dir() and is_model(path))
_GOLDENS, _FILES, _EACH = 16, 3, 5
"""So many goldens are chosen, of each so many files, and of each so many keys, of some hundreds."""


def _load(file: Path) -> Any:
    """What is in a file; None where it is neither JSON nor torch's."""
    try:
        return json.loads(file.read_text()) if file.suffix == ".json" else torch.load(file, weights_only=False)
    except Exception:  # whatever torch raises for other files
        return None


def _files(folder: Path) -> list[Path]:
    return [file for file in sorted(folder.rglob("*")) if file.is_file()]


def _cases(files: list[Path]) -> list[tuple[Path, At]]:
    return [(file, at) for file in files for at in keys_of(_load(file))]


def _take(folder: Path, cases: list[tuple[Path, At]], scratch: Path) -> Iterator[str]:
    """What went wrong with each key gone, by file and key."""
    copy = Path(shutil.copytree(folder, scratch / folder.parent.name / folder.name))
    for file, at in cases:
        changed, tree = copy / file.relative_to(folder), without_key(_load(file), at)
        if file.suffix == ".json":
            changed.write_text(json.dumps(tree))
        else:
            torch.save(tree, changed)
        try:
            inventory_of(open_without_manifest(copy, ReadOptions()))
        except Unforeseen as error:
            yield f"{file.relative_to(GOLDENS)}: {'/'.join(map(str, at))}: {error.__cause__!r}"
        except CheckpointError:
            pass
        except Exception as error:
            yield f"{file.relative_to(GOLDENS)}: {'/'.join(map(str, at))}: {error!r}"
        shutil.copy(file, changed)


def test_a_key_is_gone(rng: random.Random, tmp_path: Path) -> None:
    wrong: list[str] = []
    for folder in rng.sample(FOLDERS, _GOLDENS):
        files = _files(folder)
        cases = [_cases([file]) for file in rng.sample(files, min(_FILES, len(files)))]
        wrong += _take(folder, [one for of in cases for one in rng.sample(of, min(_EACH, len(of)))], tmp_path)
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: f"{folder.parent.name}-{folder.name}")
def test_every_key_is_gone(folder: Path, tmp_path: Path) -> None:
    assert not list(_take(folder, _cases(_files(folder)), tmp_path))


@pytest.mark.parametrize(
    ("golden", "file", "at"),
    [
        ("transformers/checkpoint-2", "optimizer.pt", ("state", 1, "exp_avg")),
        ("transformers/checkpoint-2", "optimizer.pt", ("state", 0, "exp_avg_sq")),
        ("torch/actor", "state.pt", ("optimizer", "state", 1, "exp_avg_sq")),
        ("megatron/tp1_bf16_do", "*/*/distrib_optim.pt", (0, None, "exp_avg")),
        ("megatron/tp1_bf16_do", "*/*/distrib_optim.pt", (0, None, "exp_avg_sq")),
        ("megatron/tp1_bf16_do", "*/*/distrib_optim.pt", (0, None, "param")),
        ("deepspeed/z0_fp32_untied_dp1", "*/mp_rank_00_model_states.pt", ("optimizer", "state", 3, "exp_avg")),
        ("transformers/checkpoint-2", "optimizer.pt", ("param_groups", 0, "lr")),
        ("torch/actor", "state.pt", ("optimizer", "param_groups", 0, "lr")),
        ("transformers/checkpoint-2", "optimizer.pt", ("state", 12, "step")),
        ("torch/actor", "state.pt", ("optimizer", "state", 3, "step")),
    ],
)
def test_a_moment_that_is_gone_is_missed(golden: str, file: str, at: tuple[Any, ...], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(GOLDENS / golden, tmp_path / "copy"))
    (path,) = copy.glob(file)
    tree = _load(path)
    where = tuple(next(iter(tree[at[0]])) if key is None else key for key in at)
    torch.save(without_key(tree, where), path)
    with pytest.raises(Incomplete, match=r"exp_avg|'param'|no 'lr'|no 'step'"):
        open_without_manifest(copy, ReadOptions())
