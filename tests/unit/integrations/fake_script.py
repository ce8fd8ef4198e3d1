"""What a script of Megatron-LM does: it saves and loads through the names that ``megatron.training.training`` has imported."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mcore_rlhf.integrations import megatron_lm
from mcore_rlhf.manager.run.manager import ManagerOptions
from tests.unit.integrations.fake_megatron import FakeMegatron, script_args


def save(megatron: FakeMegatron, iteration: int, one: SimpleNamespace, **named: Any) -> None:
    megatron.module("training").save_checkpoint(
        iteration, one.model, one.optimizer, one.scheduler, 100.0 * iteration, **named
    )


def load(megatron: FakeMegatron, one: SimpleNamespace, **named: Any) -> tuple[int, float]:
    result: tuple[int, float] = megatron.module("training").load_checkpoint(
        one.model, one.optimizer, one.scheduler, **named
    )
    return result


def installed_on(megatron: FakeMegatron, root: Path, **choices: Any) -> None:
    megatron.args = script_args(save=str(root), load=str(root))
    megatron_lm.install(options=ManagerOptions(fsync=False), **choices)
