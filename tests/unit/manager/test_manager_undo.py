"""A load that any part refuses leaves every part of the run as it was, and says which one it was."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf.errors import CheckpointError
from mcore_rlhf.manager.rlhf.carried import Carried
from mcore_rlhf.manager.rlhf.sampler import PromptSampler
from mcore_rlhf.manager.rlhf.state import RlhfState
from mcore_rlhf.manager.run.load import StepLoad
from mcore_rlhf.manager.run.manager import CheckpointManager, ManagerOptions

OPTIONS = ManagerOptions(asynchronous=False, fsync=False, catch_signals=False)


class Part:
    """Anything with a state; it may refuse, having taken half of it."""

    def __init__(self, value: float) -> None:
        self.values, self.refuses = {"first": torch.tensor(value), "second": torch.tensor(value)}, False

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.values["first"] = state["first"].clone()
        if self.refuses:
            self.refuses = False
            raise ValueError("not with me")
        self.values["second"] = state["second"].clone()

    @property
    def numbers(self) -> list[float]:
        return [float(value) for value in self.values.values()]


def test_a_refusing_role_undoes_all_others(tmp_path: Path) -> None:
    actor, critic = torch.nn.Linear(3, 3), Part(1.0)
    sampler, state = PromptSampler(50, seed=1, batch_size=4), RlhfState()
    with CheckpointManager(
        tmp_path, {"actor": actor, "critic": critic}, data=sampler, state=state, options=OPTIONS
    ) as m:
        m.save(1)
        sampler.next_batch()
        state.iteration, critic.values = 7, {"first": torch.tensor(5.0), "second": torch.tensor(5.0)}
        torch.nn.init.constant_(actor.weight, 3.0)
        torch.manual_seed(5)
        rng, given = torch.get_rng_state(), sampler.in_flight()
        critic.refuses = True
        with pytest.raises(CheckpointError, match=r"critic: .*not with me") as told:
            m.load()
        assert "put back" in str(told.value)
        assert bool((actor.weight == 3.0).all())
        assert critic.numbers == [5.0, 5.0]
        assert sampler.in_flight() == given
        assert not any(prompt.reissued for prompt in sampler.in_flight()), "it is in flight, and not to be issued again"
        assert state.iteration == 7
        assert torch.equal(torch.get_rng_state(), rng)
        m.load()
        assert critic.numbers == [1.0, 1.0]
        assert (state.iteration, sampler.in_flight()) == (0, [])


@pytest.mark.parametrize("refuser", ["data", "rng"])
def test_data_and_random_states_that_refuse_undo_the_roles(
    tmp_path: Path, refuser: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor, loader = Part(1.0), Part(2.0)
    with CheckpointManager(tmp_path, {"actor": actor}, data=Carried(loader), options=OPTIONS) as manager:
        manager.save(1)
        for part in (actor, loader):
            part.values = {"first": torch.tensor(9.0), "second": torch.tensor(9.0)}
        if refuser == "data":
            loader.refuses = True
        else:
            monkeypatch.setattr(StepLoad, "_keeper", lambda self: _Refusing())
        with pytest.raises(CheckpointError, match=r"data: |random states: "):
            manager.load()
        assert (actor.numbers, loader.numbers) == ([9.0, 9.0], [9.0, 9.0])


class _Refusing:
    def chosen(self, *args: object) -> dict[str, object]:
        return {}

    def restore(self, state: object) -> None:
        raise TypeError("no such generator")


def test_a_file_that_vanishes_while_it_is_copied_is_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything was checked before; what is half copied cannot be taken back, and nobody is told that it was."""
    actor = torch.nn.Linear(300, 300)
    with CheckpointManager(tmp_path, {"actor": actor}, options=OPTIONS) as manager:
        manager.save(1)
        real = StepLoad.fill

        def fill(self: StepLoad) -> None:
            os.unlink(tmp_path / "global_step_1" / "actor" / "state.pt")
            real(self)

        monkeypatch.setattr(StepLoad, "fill", fill)
        with pytest.raises(CheckpointError, match="actor: ") as told:
            manager.load()
    assert "hold something of both" in str(told.value)
    assert "put back" not in str(told.value)
