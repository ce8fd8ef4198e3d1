"""Of what trainers wrote on Megatron and in DCP, each file taken away, and each cut: ``verify`` names it, and a conversion says so.

What neither says is in a table, with the reason.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import Cli

GOLDENS = Path(__file__).parents[2] / "goldens" / "trainers"
RUNS = {
    "bridge": ("", "megatron-bridge"),
    "roll": ("checkpoint-3", "roll"),
    "swift": ("checkpoint-4", "ms-swift"),
    "nm_v1": ("step_3", "nemo-rl"),
    "rl_fsdp2": ("grpo/checkpoints/global_step_3", "rlinf"),
    "skyrl_fsdp2": ("global_step_3", "skyrl"),
}
"""Which step of it is named, and whose run it becomes."""
UNSAID = {
    "gone bridge/latest_train_state.pt": "the tracker of Megatron-LM's beside it names the same, and Bridge goes by that",
    "gone swift/checkpoint-4/args.json": "ms-swift looks whether it is there, and takes the run's own arguments",
    "gone swift/checkpoint-4/config.json": "it describes the model for other programs: ms-swift's is --model",
    "gone rl_fsdp2/grpo/checkpoints/global_step_3/actor/model_state_dict/full_weights.pt": "the same weights again, for other programs",
    "gone skyrl_fsdp2/latest_ckpt_global_step.txt": "the tracker of a run, of which the step is named",
    "gone skyrl_fsdp2/global_step_3/policy/fsdp_config.json": "SkyRL writes it, and opens none",
    "gone skyrl_fsdp2/global_step_3/policy/huggingface/config.json": "it describes the model for other programs: SkyRL's is a setting",
    "cut skyrl_fsdp2/latest_ckpt_global_step.txt": "the same",
}
UNCONVERTED = {
    "cut bridge/latest_train_state.pt": "the tracker, which a new run has of its own",
    "cut roll/checkpoint-3/latest_checkpointed_iteration.txt": "it says 1 at every step",
    "cut skyrl_fsdp2/global_step_3/policy/fsdp_config.json": "a new step has its own",
    "cut rl_fsdp2/grpo/checkpoints/global_step_3/actor/model_state_dict/full_weights.pt": "the same weights again, which no run takes",
}
"""What ``verify`` alone says."""


def gone(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


@pytest.mark.parametrize("change", [gone, cut])
@pytest.mark.parametrize("run", RUNS)
def test_it_is_said(run: str, change: Callable[[Path], None], cli: Cli, tmp_path: Path) -> None:
    (step, to), wrong = RUNS[run], []
    for file in sorted(path.relative_to(GOLDENS) for path in (GOLDENS / run).rglob("*") if path.is_file()):
        copy = tmp_path / str(len(list(tmp_path.iterdir())))
        shutil.copytree(GOLDENS / run, copy / run)
        change(copy / file)
        named = f"{change.__name__} {file.as_posix()}"
        seen, made = (
            cli("verify", copy / run / step),
            cli("convert", copy / run / step, copy / "new", "--to", to, "--no-fsync"),
        )
        told = file.name in seen.stdout + seen.stderr and (seen.code != 0 or "missing  " in seen.stdout)
        lines = [
            line for line in made.stdout.splitlines() if file.name in line and ("lost" in line or "missing" in line)
        ]
        if told == (named in UNSAID) or (made.code != 0 or bool(lines)) == (named in {*UNSAID, *UNCONVERTED}):
            wrong.append((named, seen.code, seen.stdout[-500:], made.code, lines))
    assert not wrong, "\n".join(map(str, wrong))
