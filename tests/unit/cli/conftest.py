"""The command line in this process, and genuine Megatron-LM checkpoints to try it on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mcore_rlhf.cli.app import app
from tests.helpers.damage import flip_a_bit

GOLDENS = Path(__file__).parents[2] / "goldens" / "megatron"


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        """Standard output, which must be JSON and nothing else."""
        return json.loads(self.stdout)

    def words(self) -> str:
        """Standard output with every run of blanks as one."""
        return " ".join(self.stdout.split())


Cli = Callable[..., Outcome]


@pytest.fixture
def cli() -> Cli:
    """Runs a command; no exception but SystemExit may leave it, and no traceback be printed."""

    def run(*args: object) -> Outcome:
        result = CliRunner().invoke(app, [str(arg) for arg in args])
        if not isinstance(result.exception, SystemExit | None):
            raise result.exception
        assert "Traceback" not in result.output
        return Outcome(result.exit_code, result.stdout, result.stderr)

    return run


@pytest.fixture
def tp2pp2() -> Path:
    """TP2×PP2×DP2, bf16, distributed optimizer."""
    return GOLDENS / "tp2pp2dp2_bf16_do"


@pytest.fixture
def tp1() -> Path:
    """One rank, bf16, distributed optimizer; another run than ``tp2pp2``."""
    return GOLDENS / "tp1_bf16_do"


@pytest.fixture
def moe() -> Path:
    """EP2, with experts."""
    return GOLDENS / "ep2dp2_moe_seq_bf16_do"


@pytest.fixture
def damaged(tp1: Path, tmp_path: Path) -> Path:
    """A copy of ``tp1`` in which one bit of an optimizer state is flipped."""
    copy = tmp_path / "damaged"
    shutil.copytree(tp1, copy)
    flip_a_bit(copy / "iter_0000002" / "mp_rank_00" / "distrib_optim.pt")
    return copy


def everything_below(folder: Path) -> list[str]:
    """Every file and folder, hidden ones too."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))
