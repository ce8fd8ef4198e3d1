"""The drop-in for Megatron-LM's scripts, with a fake Megatron around a real manager."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from mcore_rlhf.errors import Unsupported, UsageError
from mcore_rlhf.integrations import megatron_lm
from mcore_rlhf.manager.rlhf.state import RlhfState
from mcore_rlhf.manager.run import steps
from tests.unit.integrations.fake_engine import script, weights
from tests.unit.integrations.fake_megatron import FakeMegatron, script_args
from tests.unit.integrations.fake_script import installed_on, load, save

NAMES = ("save_checkpoint", "load_checkpoint", "checkpoint_exists", "load_args_from_checkpoint")


def test_importing_it_imports_no_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("mcore_rlhf.integrations", "megatron"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "megatron", None)  # importing it is an error now
    assert importlib.import_module("mcore_rlhf.integrations.megatron_lm") is not megatron_lm


def test_functions_are_replaced_wherever_they_were_imported_and_put_back(
    megatron: FakeMegatron, monkeypatch: pytest.MonkeyPatch
) -> None:
    user: Any = ModuleType("my_script")
    user.load_checkpoint = megatron.checkpointing.load_checkpoint
    user.save_checkpoint = own = lambda: None  # of the same name, and not Megatron's
    monkeypatch.setitem(sys.modules, "my_script", user)
    before = {name: dict(vars(module)) for name, module in megatron.modules.items()}
    megatron_lm.install()
    training, initialize = megatron.module("training"), megatron.module("initialize")
    for name in NAMES:
        replaced = getattr(megatron.checkpointing, name)
        assert replaced is not before["megatron.training.checkpointing"][name]
        assert replaced.__name__ == name
    assert training.save_checkpoint is megatron.checkpointing.save_checkpoint
    assert initialize.load_args_from_checkpoint is megatron.checkpointing.load_args_from_checkpoint
    assert training.maybe_finalize_async_save is megatron.module("async_utils").maybe_finalize_async_save
    assert user.load_checkpoint is training.load_checkpoint
    assert user.save_checkpoint is own
    with pytest.raises(UsageError, match="installed already"):
        megatron_lm.install()
    megatron_lm.uninstall()
    assert {name: dict(vars(module)) for name, module in megatron.modules.items()} == before
    assert user.load_checkpoint is megatron.checkpointing.load_checkpoint


def test_without_megatron_lm_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.training.checkpointing", None)
    with pytest.raises(Unsupported, match="PYTHONPATH"):
        megatron_lm.install()


def test_a_script_saves_and_goes_on(megatron: FakeMegatron, tmp_path: Path) -> None:
    state = RlhfState()
    installed_on(megatron, tmp_path / "run", state=state)
    one = script()
    assert load(megatron, one) == (0, 0)
    megatron.args.consumed_train_samples, state.samples_consumed = 24, 24
    save(megatron, 3, one, train_data_iterator="iterator")
    assert ("dataloader", "iterator", 3, None) in megatron.calls
    assert ("end", False) in megatron.calls
    assert [step.step for step in steps.committed(tmp_path / "run")] == [3]
    megatron.args.consumed_train_samples = state.samples_consumed = 0
    other = script(seed=1)
    assert not torch.equal(weights(one), weights(other))
    assert load(megatron, other) == (3, 300.0)
    assert torch.equal(weights(one), weights(other))
    assert (megatron.args.consumed_train_samples, state.samples_consumed, megatron.samples[-1]) == (24, 24, 24)
    assert ("loaded", False) in megatron.calls
    assert ("loaded_iteration", 3) in megatron.calls
    assert megatron.checkpointing.checkpoint_exists(str(tmp_path / "run"))


def test_the_last_save_is_finished_at_the_end(megatron: FakeMegatron, tmp_path: Path) -> None:
    installed_on(megatron, tmp_path / "run", asynchronous=True)
    one, finalize = script(), megatron.module("training").maybe_finalize_async_save
    save(megatron, 1, one)
    finalize(blocking=True)
    assert [step.step for step in steps.committed(tmp_path / "run")] == [1]
    save(megatron, 2, one)
    finalize(blocking=True, terminate=True)
    assert [step.step for step in steps.committed(tmp_path / "run")] == [1, 2]
    assert ("megatron finalizes", True, True) in megatron.calls
    save(megatron, 3, one)  # Megatron saves once more after it has finalized: the folder is opened again
    finalize(blocking=True, terminate=True)
    assert [step.step for step in steps.committed(tmp_path / "run")] == [1, 2, 3]


def test_random_states_are_restored_unless_the_script_says_no(megatron: FakeMegatron, tmp_path: Path) -> None:
    installed_on(megatron, tmp_path / "run")
    one = script()
    torch.manual_seed(5)
    save(megatron, 1, one)
    wanted = torch.rand(3)
    load(megatron, one)
    assert torch.equal(torch.rand(3), wanted)
    for given in ({"no_load_rng": True}, {"finetune": True}):
        megatron.args = script_args(load=str(tmp_path / "run"), **given)
        torch.manual_seed(6)
        own = torch.rand(3)
        torch.manual_seed(6)
        load(megatron, one)
        assert torch.equal(torch.rand(3), own), given


def test_random_states_that_the_script_did_not_want_saved_are_not_restored(
    megatron: FakeMegatron, tmp_path: Path
) -> None:
    installed_on(megatron, tmp_path / "run")
    megatron.args.no_save_rng = True
    one = script()
    save(megatron, 1, one)
    torch.manual_seed(6)
    own = torch.rand(3)
    torch.manual_seed(6)
    load(megatron, one)
    assert torch.equal(torch.rand(3), own)


def test_fine_tuning_begins_anew(megatron: FakeMegatron, tmp_path: Path) -> None:
    state = RlhfState(samples_consumed=24)
    installed_on(megatron, tmp_path / "run", state=state)
    megatron.args.consumed_train_samples = 24
    save(megatron, 3, script())
    state.samples_consumed = 5
    megatron.args = script_args(load=str(tmp_path / "empty"), pretrained_checkpoint=str(tmp_path / "run"))
    other = script(seed=1)
    iteration, _ = load(megatron, other)
    assert iteration == 0
    assert megatron.args.finetune
    assert (megatron.args.consumed_train_samples, state.samples_consumed) == (0, 5)
    assert torch.equal(weights(other), weights(script()))
    assert megatron.samples == []


def test_a_call_without_optimizer_wants_weights_not_the_run(megatron: FakeMegatron, tmp_path: Path) -> None:
    """``train_rl.py`` loads its weights once more when the run is restored already."""
    state = RlhfState(samples_consumed=24)
    installed_on(megatron, tmp_path / "run", state=state)
    save(megatron, 3, script())
    state.samples_consumed = 99
    other = script(seed=1)
    assert megatron.module("training").load_checkpoint(other.model, None, None)[0] == 3
    assert state.samples_consumed == 99
    assert torch.equal(weights(other), weights(script()))
    load(megatron, other)
    assert state.samples_consumed == 24


def test_what_is_megatrons_own_is_handed_on(megatron: FakeMegatron, tmp_path: Path) -> None:
    installed_on(megatron, tmp_path / "run")
    one = script()
    save(megatron, 1, one, release=True)
    save(megatron, 2, one, tensor_rank=0)
    megatron.args.ckpt_convert_format = "torch_dist"
    save(megatron, 3, one)
    assert [call for call in megatron.calls if call[0] == "megatron saves"] == [
        ("megatron saves", 1, True), ("megatron saves", 2, False), ("megatron saves", 3, False),
    ]  # fmt: skip
    distributed = tmp_path / "old" / "iter_0000005"
    distributed.mkdir(parents=True)
    (distributed / "metadata.json").write_text("{}")
    (tmp_path / "old" / "latest_checkpointed_iteration.txt").write_text("5")
    megatron.args = script_args(load=str(tmp_path / "old"))
    assert load(megatron, one) == (77, 7.0)
    assert megatron.calls[-1] == ("megatron loads", str(tmp_path / "old"), "torch_dist", True)
    assert (megatron.args.ckpt_format, megatron.args.use_dist_ckpt) == ("torch", False)
    assert steps.committed(tmp_path / "run") == []


def test_retention_as_megatron_has_it(megatron: FakeMegatron, tmp_path: Path) -> None:
    installed_on(megatron, tmp_path / "run")
    megatron.args.save_retain_interval = 2
    one = script()
    for iteration in range(1, 6):
        save(megatron, iteration, one)
    megatron_lm.uninstall()
    assert [step.step for step in steps.committed(tmp_path / "run")] == [2, 4, 5]


def test_weights_alone_where_the_script_saves_no_optimizer(megatron: FakeMegatron, tmp_path: Path) -> None:
    installed_on(megatron, tmp_path / "run")
    megatron.args.no_save_optim = True
    save(megatron, 1, script())
    stored = torch.load(tmp_path / "run" / "global_step_1" / "actor" / "state.pt", weights_only=True)
    assert "optimizer" not in stored
    assert "model" in stored


def test_arguments_are_read_from_the_newest_step(megatron: FakeMegatron, tmp_path: Path) -> None:
    installed_on(megatron, tmp_path / "run")
    for iteration in (1, 2):
        save(megatron, iteration, script())
    read = megatron.module("initialize").load_args_from_checkpoint
    read(megatron.args)
    assert megatron.calls[-1] == ("megatron reads args", str(tmp_path / "run" / "global_step_2" / "actor"), None)
    assert megatron.args.load == str(tmp_path / "run")
    megatron.args.ckpt_step = 1
    read(megatron.args, load_arg="load")
    assert megatron.calls[-1] == ("megatron reads args", str(tmp_path / "run" / "global_step_1" / "actor"), None)
    assert megatron.args.ckpt_step == 1
    megatron.args = script_args(load=None)
    read(megatron.args)
    assert megatron.calls[-1] == ("megatron reads args", None, None)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_bank_of_rollouts_is_compacted_once_a_step_is_committed(
    megatron: FakeMegatron, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    root, compacted = tmp_path / "run", list[int]()

    def compact(iteration: int) -> None:
        assert iteration in [step.step for step in steps.committed(root)]
        compacted.append(iteration)

    bank: Any = ModuleType("megatron.rl.rl_utils")
    bank.maybe_compact_rollout_bank = compact
    for module in (ModuleType("megatron.rl"), bank):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    installed_on(megatron, root, asynchronous=asynchronous)
    one = script()
    megatron.args.rl_durable_rollout_bank = True
    for iteration in (1, 2, 3):
        save(megatron, iteration, one)
    assert compacted == ([1, 2] if asynchronous else [1, 2, 3])
    megatron_lm.uninstall()
    assert compacted == [1, 2, 3]
