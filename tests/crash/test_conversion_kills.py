"""A conversion is killed after each of its operations on the disk, also in the middle of a write: there is a whole target, or none.

The next conversion ends what was begun. The one thing that stays is a lock file with less than its host's name, where nothing but that had
been made.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.verify.checkpoint import verify
from tests.crash.recorder import Recorder
from tests.crash.scenes import copied, tree
from tests.crash.test_every_operation import stops

SOURCE = Path(__file__).parents[1] / "goldens" / "transformers" / "checkpoint-2"
SAMPLE = 12
"""Of all stops, where not every one is looked at."""


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", os.fstat)


def killed_everywhere(folder: Path, chosen: Sequence[float], *, overwrite: bool) -> int:
    """How many stops were looked at: with none chosen all of them, otherwise those at such parts of the way."""
    base, options = folder / "base", ConvertOptions(to="torch", workers=1, fsync=False, overwrite=overwrite)
    shutil.copytree(SOURCE, base / SOURCE.name)
    if overwrite:
        convert(base / SOURCE.name, base / "out", options)
    live = copied(base, folder / "live")
    with Recorder(live).recording() as recorder:
        convert(live / SOURCE.name, live / "out", options)
    wanted = (live / "out" / "state.pt").read_bytes()
    meant, crash, looked = {int(part * len(recorder.ops)) for part in chosen}, folder / "crash", 0
    for at in stops(base, recorder.ops, crash):
        if meant and at not in meant:
            continue
        looked += 1
        out = crash / "out"
        assert verify(out, ReadOptions()).intact if out.exists() else not overwrite or list(crash.glob(".out.old-*")), (
            at
        )
        convert(crash / SOURCE.name, out, ConvertOptions(to="torch", workers=1, fsync=False, overwrite=True))
        assert (out / "state.pt").read_bytes() == wanted, at
        assert verify(out, ReadOptions()).intact
        left = {name: content for name, content in tree(crash).items() if name.startswith(".")}
        assert len(left) <= (at == 1), (at, list(left))
    return looked


@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "in place of another"])
def test_a_sample(tmp_path: Path, rng: random.Random, overwrite: bool) -> None:
    chosen = [rng.random() for _ in range(SAMPLE)]
    assert killed_everywhere(tmp_path, chosen, overwrite=overwrite) >= SAMPLE // 2


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "in place of another"])
def test_after_each_operation(tmp_path: Path, overwrite: bool) -> None:
    assert killed_everywhere(tmp_path, (), overwrite=overwrite) > 300
