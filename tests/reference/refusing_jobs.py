"""Jobs in which one role of a run refuses what is loaded, on one rank, after others have taken theirs."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_rlhf.errors import CheckpointError
from mcore_rlhf.manager.rlhf.sampler import PromptSampler
from mcore_rlhf.manager.rlhf.state import RlhfState
from mcore_rlhf.manager.run.manager import CheckpointManager, ManagerOptions
from tests.reference.engine_jobs import compare, engine_of
from tests.reference.observing import Session

if TYPE_CHECKING:
    from mcore_rlhf.demo.trainer import DemoTrainer

VICTIM = 1
"""The rank on which a role refuses."""


@dataclass
class Run:
    """A Megatron actor, a critic of plain torch, prompts and counters."""

    trainer: DemoTrainer
    critic: Any
    optimizer: Any
    scheduler: Any
    sampler: PromptSampler = field(default_factory=lambda: PromptSampler(100, seed=3, group_size=2, batch_size=8))
    state: RlhfState = field(default_factory=lambda: RlhfState(algorithm="ppo"))

    @classmethod
    def new(cls, session: Session, seed: int) -> Run:
        import torch

        from mcore_rlhf.demo.trainer import DemoTrainer

        trainer = DemoTrainer(session.model, session.parallel, session.training)
        torch.manual_seed(seed)
        critic = torch.nn.Linear(8, 3)
        optimizer = torch.optim.AdamW(critic.parameters(), lr=0.1)
        return cls(trainer, critic, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))

    def steps(self, count: int) -> None:
        import torch

        for _ in range(count):
            self.trainer.train_step()
            self.critic(torch.ones(2, 8)).square().sum().backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.sampler.acknowledge_all(self.sampler.next_batch()[:-1])
            self.state.iteration += 1
            self.state.extra["last"] = torch.rand(3)

    def everything(self) -> dict[str, Any]:
        """All that a load could change, as copies."""
        import numpy as np
        import torch

        from mcore_rlhf.demo import live_state

        assert self.trainer.optimizer is not None
        assert self.trainer.scheduler is not None
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.trainer.optimizer.param_groups]
        return {
            "actor": dict(live_state.full_state(self.trainer)), "groups": groups,
            "schedule": self.trainer.scheduler.state_dict(), "critic": self.critic.state_dict(),
            "moments": self.optimizer.state_dict(), "steps": self.scheduler.state_dict(),
            "data": self.sampler.state_dict(), "waiting": list(self.sampler._progress.waiting),
            "state": self.state.to_json(), "extra": dict(self.state.extra),
            "rng": [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()],
        }  # fmt: skip


def refuse(owner: Any) -> None:
    """From now on it takes its state, and then raises."""
    real = owner.load_state_dict

    def load_state_dict(state: Any) -> None:
        real(state)
        del owner.load_state_dict  # its former state it takes back, and the same again
        raise RuntimeError("not with me")

    owner.load_state_dict = load_state_dict


def refused(session: Session, root: str, roles: tuple[str, ...], refuser: str) -> dict[str, Any]:
    """Save, train on, load with a role that refuses; then without it. What every rank is told, and what differs."""
    import copy

    import torch.distributed as dist

    from mcore_rlhf import TorchEngine

    run = Run.new(session, 1)
    run.steps(2)
    engines = {"actor": engine_of(run.trainer), "critic": TorchEngine(run.critic, run.optimizer, run.scheduler)}
    told, differs = ("", ""), list[str]()
    options = ManagerOptions(timeout=30, fsync=False, catch_signals=False)
    with CheckpointManager(
        Path(root), {role: engines[role] for role in roles}, data=run.sampler, state=run.state, options=options
    ) as manager:
        manager.save(2, blocking=True)
        saved = copy.deepcopy(run.everything())
        run.steps(1)
        before = copy.deepcopy(run.everything())
        if dist.get_rank() == VICTIM:
            prepare_refusal(run, refuser)
        try:
            manager.load()
        except CheckpointError as error:
            told = type(error).__name__, str(error)
        compare(before, run.everything(), "refused", differs.append)
        manager.load()
        compare(saved | {"waiting": None}, run.everything() | {"waiting": None}, "loaded", differs.append)
    return {"told": told, "differs": differs}


def prepare_refusal(run: Run, refuser: str) -> None:
    """Make a part of the run refuse, once."""
    chosen: dict[str, Callable[[], None]] = {
        "critic": lambda: refuse(run.scheduler),
        "actor": lambda: refuse_after_trial(run.trainer.scheduler),
    }
    chosen[refuser]()


def refuse_after_trial(scheduler: Any) -> None:
    """Megatron's schedule is tried on a copy first, which has another optimizer, and takes it there."""
    optimizer, kind = scheduler.optimizer, type(scheduler)

    class Refusing(kind):  # type: ignore[misc, valid-type]
        refuses = True

        def load_state_dict(self, state: Any) -> None:
            super().load_state_dict(state)
            if self.optimizer is optimizer and Refusing.refuses:
                Refusing.refuses = False
                raise RuntimeError("not with me")

    scheduler.__class__ = Refusing
