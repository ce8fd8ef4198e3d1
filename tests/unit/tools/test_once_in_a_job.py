"""All ranks of one job call a tool with one target, as DeepSpeed's own test of ``zero_to_fp32.py`` does."""

from __future__ import annotations

import os
import runpy
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.forked import Forked
from tests.helpers.damage import flip

PROJECT = Path(__file__).resolve().parents[3]
GOLDEN = PROJECT / "tests" / "goldens" / "deepspeed" / "z2_bf16_ac_dp2"
JOB = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512"}
OTHER = "written by another process of this job"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    shutil.copytree(GOLDEN / "step3", tmp_path / "run" / "step3")
    (tmp_path / "run" / "latest").write_text("step3")
    return tmp_path / "run"


@dataclass(frozen=True)
class Tool:
    """What a rank runs.

    Args:
        name: The script's.
        rank: The rank's number in the job; None where it is in none.
    """

    name: str
    rank: int | None

    def __call__(self, words: Sequence[str]) -> None:
        os.environ.update({} if self.rank is None else {**JOB, "RANK": str(self.rank)})
        code = runpy.run_path(str(PROJECT / "tools" / self.name))["main"](words)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@dataclass
class Rank:
    """A rank that runs a tool, in a process of its own, and what it says."""

    tool: str
    args: Sequence[object]
    rank: int | None
    log: Any = field(default_factory=tempfile.TemporaryFile)

    def __post_init__(self) -> None:
        words = [str(arg) for arg in self.args]
        self.child = Forked(Tool(self.tool, self.rank), words, self.log.fileno())

    def ended(self) -> tuple[int | None, str]:
        code = self.child.wait()
        with self.log:
            self.log.seek(0)
            return code, self.log.read().decode()


def started(tool: str, *args: object, rank: int | None = None) -> Rank:
    return Rank(tool, args, rank)


def ended(ranks: list[Rank]) -> list[tuple[int | None, str]]:
    return [rank.ended() for rank in ranks]


def one_writes(ranks: list[Rank]) -> None:
    results = ended(ranks)
    assert [code for code, _ in results] == [0] * len(results), results
    assert sorted(OTHER in said for _, said in results) == [False, *[True] * (len(results) - 1)]
    assert all("written" in said for _, said in results)


def test_one_writes_and_the_others_wait(run: Path, tmp_path: Path) -> None:
    target = tmp_path / "new" / "fp32"
    one_writes([started("zero_to_fp32.py", run, target, rank=rank) for rank in range(3)])
    assert sorted(path.name for path in target.iterdir()) == ["mcore_rlhf.json", "pytorch_model.bin"]
    assert [path.name for path in target.parent.iterdir()] == ["fp32"]
    ((code, said),) = ended([started("zero_to_fp32.py", run, target, rank=2)])  # which came late
    assert (code, OTHER in said) == (0, True)


def test_a_run_of_actor_and_critic(run: Path, tmp_path: Path) -> None:
    for role in ("_actor", "_critic"):
        shutil.copytree(run, tmp_path / "ckpt" / role)
    one_writes([started("zero_to_universal.py", tmp_path / "ckpt", rank=rank) for rank in range(2)])
    for role in ("_actor", "_critic"):
        assert (tmp_path / "ckpt" / role / "latest_universal").read_text() == "step3_uni"
        assert not list((tmp_path / "ckpt" / role).glob(".*"))


def test_what_is_not_the_same_is_refused_as_ever(run: Path, tmp_path: Path) -> None:
    """Another source, other options, another job before this one, or no job at all."""
    target = tmp_path / "fp32"
    one_writes([started("zero_to_fp32.py", run, target, rank=0)])
    model = run / "step3" / "mp_rank_00_model_states.pt"
    os.utime(model, ns=(1, 1))
    cases = ended(
        [
            started("zero_to_fp32.py", run, target, rank=1),
            started("zero_to_fp32.py", run, target, "--safe_serialization", rank=1),
            started("zero_to_fp32.py", run, target),
        ]
    )
    assert [(code, "exists already" in said) for code, said in cases] == [(2, True)] * 3


def test_what_an_earlier_job_wrote_is_not_trusted(run: Path, tmp_path: Path) -> None:
    target = tmp_path / "fp32"
    one_writes([started("zero_to_fp32.py", run, target, rank=0)])
    os.utime(target / "mcore_rlhf.json", (1_000_000_000, 1_000_000_000))
    ((code, said),) = ended([started("zero_to_fp32.py", run, target, rank=1)])
    assert (code, "exists already" in said) == (2, True)
    ((code, said),) = ended([started("zero_to_fp32.py", run, target, "--overwrite", rank=1)])
    assert (code, OTHER in said) == (0, False)


def test_where_one_fails_all_fail(run: Path, tmp_path: Path) -> None:
    (file,) = (run / "step3").glob("*zero_pp_rank_0_*")
    flip(file, "data/0", 3)
    results = ended([started("zero_to_fp32.py", run, tmp_path / "fp32", rank=rank) for rank in range(2)])
    assert [code for code, _ in results] == [1, 1], results
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
