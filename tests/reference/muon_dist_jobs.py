"""Megatron-core's own Muon since 0.18, plain and layer-wise, saved to ``torch_dist`` and loaded from it by megatron-core itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tests.reference.observing import END, LOOK, Session

PLAIN, PING_PONG, BY_LAYOUT = "plain", "ping-pong", "by layout"


@dataclass(frozen=True)
class MuonRun:
    """What to train, with which of the two, what to load first, and where to save at iteration 2.

    Args:
        session: The model, the layout and the training.
        kind: ``plain``, or the layer-wise optimizer: ``ping-pong``, or ``by layout``, where Adam's part is cut in flat buckets.
        sharding: What Megatron-LM writes as the sharding of the distributed optimizer.
        save, load: Roots of ``torch_dist`` checkpoints.
    """

    session: Session
    kind: str
    sharding: str = "dp_reshardable"
    save: str | None = None
    load: str | None = None


def train(run: MuonRun) -> dict[int, float]:
    """Train (or continue) to iteration 3; every rank of the layout calls. Returns the losses."""
    from mcore_rlhf.demo.trainer import DemoTrainer
    from tests.reference import dist_jobs

    losses: dict[int, float] = {}
    with _with_muon(run.kind):
        trainer = DemoTrainer(run.session.model, run.session.parallel, run.session.training)
        if run.load is not None:
            dist_jobs.load(trainer, Path(run.load), rng=True)
        while trainer.iteration < END:
            loss = trainer.train_step()
            losses[trainer.iteration] = loss
            if trainer.iteration == LOOK and run.save is not None:
                dist_jobs.save(trainer, Path(run.save), run.sharding, {})
        losses[END + 1] = trainer.evaluate()
    return losses


@contextmanager
def _with_muon(kind: str) -> Iterator[None]:
    """Trainers that are built inside have Muon for their matrices, and checkpoints say so as Megatron-LM's do."""
    from megatron.core.optimizer import get_megatron_optimizer

    from mcore_rlhf.demo import trainer
    from tests.reference import dist_jobs, muon_jobs

    def build(config: Any, chunks: Any, config_overrides: Any) -> Any:
        own = replace(
            config,
            optimizer="muon",
            use_layer_wise_distributed_optimizer=kind != PLAIN,
            use_distributed_optimizer=False,
        )
        return get_megatron_optimizer(own, chunks, config_overrides=config_overrides)

    def common(made: Any) -> dict[str, Any]:
        found = usual_common(made)
        args = found["args"]
        args.optimizer, args.use_distributed_optimizer = "muon", False
        args.use_layer_wise_distributed_optimizer, args.use_layer_wise_param_layout = kind != PLAIN, kind == BY_LAYOUT
        return found

    def metadata(made: Any, sharding: str) -> dict[str, Any]:
        found = usual_metadata(made, sharding)
        found.pop("distrib_optim_sharding_type", None)
        return found if kind == PLAIN else {**found, "distrib_optim_sharding_type": sharding}

    usual, usual_common, usual_metadata = trainer.get_megatron_optimizer, dist_jobs._common, dist_jobs.content_metadata
    wrapped = trainer.DistributedDataParallel
    trainer.get_megatron_optimizer = build  # type: ignore[assignment]
    if kind == BY_LAYOUT:
        trainer.DistributedDataParallel = partial(muon_jobs._laid_out, wrapped)  # type: ignore[assignment, misc]
    dist_jobs._common, dist_jobs.content_metadata = common, metadata
    try:
        yield
    finally:
        trainer.get_megatron_optimizer, trainer.DistributedDataParallel = usual, wrapped
        dist_jobs._common, dist_jobs.content_metadata = usual_common, usual_metadata
