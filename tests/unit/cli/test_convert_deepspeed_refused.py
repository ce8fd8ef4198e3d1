"""What bad DeepSpeed input gets on the command line: one clear message, exit code 1 or 2, nothing written."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.helpers.damage import edited, snapshot, truncate
from tests.helpers.plain_load import plain_load, plain_save

from .conftest import Cli, everything_below

GOLDENS = Path(__file__).parents[2] / "goldens" / "deepspeed"
OPTIM = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
MODEL = "mp_rank_00_model_states.pt"
VALUE = "step3_uni/zero/critic.value_head.weight"
Break = Callable[[Path], object]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of DeepSpeed's with a native checkpoint of stage 2, and DeepSpeed's own universal one of it."""
    shutil.copytree(
        GOLDENS / "z2_bf16_ac_dp2", tmp_path / "run", ignore=shutil.ignore_patterns("expected.pt", "*.json")
    )
    return tmp_path / "run"


def _without_masters(root: Path) -> None:
    """Stage 0 in bf16 whose optimizer has moments and no masters: nothing that ZeRO could go on with."""
    shutil.rmtree(root / "step3")
    shutil.copytree(GOLDENS / "z0_bf16_tied_dp2" / "step3", root / "step3")
    with edited(root / "step3" / MODEL) as tree:
        tree["optimizer"] = tree["optimizer"]["optimizer_state_dict"]


def _patterns(**patterns: object) -> Break:
    def change(root: Path) -> None:
        with edited(root / "step3" / MODEL) as tree:
            tree["universal_checkpoint_info"] = {"universal_checkpoint_version": 0.4, **patterns}

    return change


def _runs_code(root: Path) -> None:
    tree = plain_load(root / "step3" / MODEL)
    (root / "step3" / MODEL).unlink()
    plain_save({**tree, "hook": exec}, root / "step3" / MODEL)


def _world(root: Path) -> None:
    with edited(root / "step3" / OPTIM) as tree:
        tree["optimizer_state_dict"]["partition_count"] = [4, 4]


def _step(root: Path) -> None:
    with edited(root / "step3" / OPTIM) as tree:
        for state in tree["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            state["step"] += 1


CASES: dict[str, tuple[Break, str, int, tuple[str, ...]]] = {
    "missing rank file": (lambda root: (root / "step3" / OPTIM).unlink(), "native", 1, (OPTIM, "missing", "Copy")),
    "truncated rank file": (lambda root: truncate(root / "step3" / OPTIM, 0.5), "native", 1, (OPTIM, "cut off")),
    "latest to nowhere": (lambda root: (root / "latest").write_text("step9"), "native", 2, ("'step9'", "found step3")),
    "mixed world sizes": (_world, "native", 1, (OPTIM, "cut for 4", "say 2")),
    "mixed steps": (_step, "native", 1, (OPTIM, "step of the flat group")),
    "mixed stages": (
        lambda root: [shutil.copy(p, root / "step3") for p in (GOLDENS / "z3_bf16_frozen_dp2/step3").glob("zero*model*")],
        "native", 1, ("(stages 0 to 2)", "(stage 3)"),
    ),
    "universal: state missing": (lambda root: (root / VALUE / "exp_avg.pt").unlink(), "universal", 1, ("exp_avg.pt is missing",)),
    "universal: stray file": (lambda root: (root / VALUE / "fp32.bak").write_text(""), "universal", 1, ("fp32.bak",)),
    "universal: nowhere": (
        lambda root: ((root / "latest").unlink(), (root / "latest_universal").write_text("x_uni")), "root", 1, ("'x_uni'", "step3_uni"),
    ),
    "no masters": (_without_masters, "native", 1, ("has no fp32 master weights", "--no-optimizer")),
    "pattern matches never": (_patterns(parameter_to_average_patterns=["no_such"]), "native", 1, ("no_such",)),
    "patterns match twice": (
        _patterns(parameter_with_row_parallelism_patterns=["critic.*", "critic.value_head.*"]), "native", 1,
        ("critic.value_head.weight matches 'critic.*' and ",),
    ),
    "runs code": (_runs_code, "native", 1, (MODEL, "exec", "refused")),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_with_one_message(cli: Cli, run: Path, tmp_path: Path, name: str) -> None:
    change, kind, code, words = CASES[name]
    change(run)
    before, there = snapshot(run), everything_below(run)
    source = {
        "native": run if name == "latest to nowhere" else run / "step3",
        "universal": run / "step3_uni",
        "root": run,
    }
    done = cli("convert", source[kind], tmp_path / "out", "--to", "universal", "--no-fsync")
    assert done.code == code, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert [word for word in words if word not in done.stderr] == [], done.stderr
    assert (snapshot(run), everything_below(run)) == (before, there)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_all_of_it_is_accepted_unbroken(cli: Cli, run: Path, tmp_path: Path) -> None:
    for number, source in enumerate((run, run / "step3", run / "step3_uni")):
        done = cli("convert", source, tmp_path / f"out{number}", "--to", "universal", "--no-fsync")
        assert done.code == 0, done.stderr
    assert torch.load(tmp_path / "out0" / VALUE / "step.pt", weights_only=True) == 3
