"""Our manager held against Megatron-Bridge's protocol, which stands here as data; its own code runs in ``tests/trainers``.

Source: NVIDIA-NeMo/Megatron-Bridge 067f987df03b8355b03192d88d70f1709fedf51a, ``src/megatron/bridge/training/checkpointing.py``: the
protocol ``CheckpointManager``, what ``create_checkpoint_manager`` checks, and where ``save_checkpoint`` writes.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mcore_rlhf.errors import CheckpointError, Unsupported
from mcore_rlhf.integrations import megatron_bridge
from mcore_rlhf.integrations.megatron_bridge import CommittedCheckpointManager
from mcore_rlhf.manager.runs import listed_steps

PROTOCOL = {
    "__init__": "(self, checkpoint_config)",
    "save": "(self, ctx, callback_manager)",
    "load": "(self, ctx)",
    "finalize_async_saves": "(self, state, blocking=False, terminate=False)",
}


class Default:
    """Writes what ``save_checkpoint`` writes, where it does: the step below ``cfg.checkpoint.save``, trackers beside it."""

    def __init__(self, checkpoint_config: Any) -> None:
        self.checkpoint_config, self.checkpointing_context = checkpoint_config, dict[str, Any]()

    def save(self, ctx: Any, callback_manager: Any) -> None:
        config, step = ctx.state.cfg.checkpoint, ctx.state.train_state.step
        assert config.most_recent_k == -1
        folder = Path(config.save, f"iter_{step:07d}")
        folder.mkdir()
        for name in ("run_config.yaml", "train_state.pt", "common.pt", "__0_0.distcp", ".metadata"):
            (folder / name).write_text(f"{name} of {step}")
        if ctx.fails:
            raise RuntimeError("CUDA error")
        Path(config.save, "latest_train_state.pt").write_text(f"state {step}")
        Path(config.save, "latest_checkpointed_iteration.txt").write_text(str(step))

    def load(self, ctx: Any) -> tuple[int, int]:
        return ctx.state.cfg.checkpoint.ckpt_step or 0, 0

    def finalize_async_saves(self, state: Any, blocking: bool = False, terminate: bool = False) -> None: ...


@pytest.fixture(autouse=True)
def bridge(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    prefixes: list[str] = []
    module = ModuleType("megatron.bridge.training.checkpointing")
    module.DefaultCheckpointManager = Default  # type: ignore[attr-defined]
    allowing = ModuleType("megatron.bridge.utils.instantiate_utils")
    allowing.register_allowed_target_prefix = prefixes.append  # type: ignore[attr-defined]
    for one in (module, allowing):
        monkeypatch.setitem(sys.modules, one.__name__, one)
    return prefixes


def config(root: Path, **values: Any) -> Any:
    given = {"save": str(root), "load": str(root), "ckpt_step": None, "most_recent_k": -1, "async_save": False}
    return SimpleNamespace(**{**given, "custom_manager_class": None, **values})


def context(checkpoint: Any, step: int, fails: bool = False, **values: Any) -> Any:
    state = SimpleNamespace(
        cfg=SimpleNamespace(checkpoint=checkpoint, dataset=SimpleNamespace()), train_state=SimpleNamespace(step=step)
    )
    return SimpleNamespace(
        **{"state": state, "non_persistent_ckpt": False, "train_data_iterator": None, "fails": fails, **values}
    )


def saved(checkpoint: Any, *steps: int) -> None:
    manager = CommittedCheckpointManager(checkpoint)
    for step in steps:
        manager.save(context(checkpoint, step), None)
    manager.finalize_async_saves(None, blocking=True, terminate=True)


def test_the_protocol_is_kept(tmp_path: Path) -> None:
    for name, expected in PROTOCOL.items():
        parameters = inspect.signature(getattr(CommittedCheckpointManager, name)).parameters
        names = [part.partition("=")[0] for part in expected.strip("()").split(", ")]
        assert list(parameters) == names
    manager = CommittedCheckpointManager(config(tmp_path))
    inspect.signature(manager.save).bind(None, None)  # create_checkpoint_manager does
    manager.finalize_async_saves(None, terminate=True)


def test_use_names_it_where_that_is_allowed(bridge: list[str], tmp_path: Path) -> None:
    given = config(tmp_path)
    megatron_bridge.use(given)
    assert given.custom_manager_class == "mcore_rlhf.integrations.megatron_bridge.CommittedCheckpointManager"
    assert any(given.custom_manager_class.startswith(f"{prefix}.") for prefix in bridge)


def test_steps_are_committed_with_the_trackers(tmp_path: Path) -> None:
    given = config(tmp_path, most_recent_k=2)
    saved(given, 5, 10, 15)
    assert [(step.step, step.state) for step in listed_steps(tmp_path)] == [(10, "committed"), (15, "committed")]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "15"
    assert (given.save, given.most_recent_k) == (str(tmp_path), 2)
    (tmp_path / "iter_0000015" / "common.pt").write_text("common.pt of 16")
    (tmp_path / "latest_train_state.pt").unlink()
    again = config(tmp_path)
    manager = CommittedCheckpointManager(again)
    assert manager.load(context(again, 0)) == (10, 0)
    assert (tmp_path / "latest_train_state.pt").read_text() == "state 10"
    manager.finalize_async_saves(None, terminate=True)


def test_a_save_that_fails(tmp_path: Path) -> None:
    given = config(tmp_path)
    manager = CommittedCheckpointManager(given)
    manager.save(context(given, 5), None)
    with pytest.raises((RuntimeError, CheckpointError), match="CUDA error"):
        manager.save(context(given, 10, fails=True), None)
    manager.finalize_async_saves(None, terminate=True)
    assert [step.step for step in listed_steps(tmp_path)] == [5]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "5"
    assert given.save == str(tmp_path)


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unsupported, match="async_save=True"):
        CommittedCheckpointManager(config(tmp_path, async_save=True))
    given = config(tmp_path)
    manager = CommittedCheckpointManager(given)
    loader = SimpleNamespace(iterable=SimpleNamespace(save_state=None))
    with pytest.raises(Unsupported, match="dataloader_save"):
        manager.save(context(given, 5, train_data_iterator=loader), None)
    manager.finalize_async_saves(None, terminate=True)
    monkeypatch.setattr(Default, "save", lambda self, ctx: None)
    with pytest.raises(Unsupported, match=r"Default\.save: expected \(ctx, callback_manager\), found \(ctx\)"):
        CommittedCheckpointManager(config(tmp_path))
