"""A job for the worker pool that trains real megatron-core models in the manner of Megatron-LM's scripts, through the drop-in.

``megatron.training`` itself is not on PyPI: the fake of the unit tests stands for it, with the signatures of the real one.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.reference.engine_jobs import go_on, new_trainer
from tests.reference.observing import END, LOOK, Observation, Session, look
from tests.unit.integrations.fake_megatron import FakeMegatron, script_args

if TYPE_CHECKING:
    from mcore_rlhf.demo.trainer import DemoTrainer

FLOPS = 1000.0


@dataclass(frozen=True)
class Ran:
    """What a rank saw, what loading returned, and the counters that it set."""

    seen: Observation
    loaded: tuple[int, float]
    consumed: int
    printed: list[str] = field(default_factory=list)


def run_script(session: Session, given: dict[str, Any], asynchronous: bool = False) -> Ran:
    """Load if there is something to load, look at iteration 2, save it, and train to the end.

    Args:
        session: What to train; ``load`` and ``save`` are the script's ``--load`` and ``--save``.
        given: Further arguments of the script.
        asynchronous: Whether saves go on behind training.
    """
    trainer, seen = new_trainer(session)
    for _ in range(1 if session.load else 0):
        trainer.train_step()  # of which nothing may be left
    megatron = FakeMegatron(arguments(trainer, session, given))
    with drop_in(megatron, asynchronous) as training:
        loaded = (0, 0.0)
        if session.load is not None:
            loaded = training.load_checkpoint(trainer.chunks, trainer.optimizer, trainer.scheduler)
            trainer.iteration = trainer.loaded_iteration = (
                LOOK  # also where it counts from 0: the data are those of step 3
            )
            trainer.consumed_train_samples = megatron.args.consumed_train_samples
            look(trainer, seen)
        while trainer.iteration < LOOK:
            step(trainer, seen, megatron.args)
            if trainer.iteration == LOOK:
                training.save_checkpoint(LOOK, trainer.chunks, trainer.optimizer, trainer.scheduler, FLOPS)
                look(trainer, seen)
        go_on(trainer, seen)
        assert trainer.iteration == END
        training.maybe_finalize_async_save(blocking=True, terminate=True)
    printed = [call[1] for call in megatron.calls if call[0] == "print"]
    return Ran(seen, loaded, megatron.args.consumed_train_samples, printed)


def step(trainer: DemoTrainer, seen: Observation, args: Namespace) -> None:
    loss = trainer.train_step()
    seen.losses[trainer.iteration] = loss
    args.consumed_train_samples = trainer.consumed_train_samples


def arguments(trainer: DemoTrainer, session: Session, given: dict[str, Any]) -> Namespace:
    """Megatron-LM's ``args``: those that describe the model, and those that the drop-in looks at."""
    from mcore_rlhf.demo import megatron_args

    described = megatron_args.build(session.model, session.parallel, session.training, 0, 0)
    files = {"save": session.save, "load": session.load, "optimizer": "adam", "ckpt_format": "torch"}
    return script_args(**{**vars(described), **files, **given})


@contextmanager
def drop_in(megatron: FakeMegatron, asynchronous: bool) -> Iterator[Any]:
    from mcore_rlhf.integrations import megatron_lm
    from mcore_rlhf.manager.run.manager import ManagerOptions

    sys.modules.update(megatron.modules)
    megatron_lm.install(asynchronous=asynchronous, options=ManagerOptions(fsync=False))
    try:
        yield megatron.module("training")
    finally:
        megatron_lm.uninstall()
        for name in megatron.modules:
            del sys.modules[name]
