"""Where the experiments of this folder run: real Megatron trains and resumes, our library reshapes in between."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcore_rlhf.convert import ConvertOptions, Job, convert
from mcore_rlhf.demo.configs import Parallel, TinyGPT, Training
from mcore_rlhf.demo.workers import WorkerPool
from mcore_rlhf.families.options import WriteOptions
from tests.reference.merge import Merged, merged, merged_groups
from tests.reference.observing import END, LOOK, Observation, Session, observe

TIMEOUT = 200.0
"""Seconds for one run of four tiny steps; two cores that others use as well take their time."""


@dataclass(frozen=True)
class Trained:
    """A run, the checkpoint that it wrote at iteration 2 or was loaded from, and what all its ranks saw together.

    Args:
        session: The run.
        root: Its checkpoint.
        losses: Mean loss over the global batch, by iteration.
        evaluation: Mean loss of the third batch at iteration 2, without dropout.
        models: Every whole tensor of every state, at iterations 2 and 4.
        groups: The optimizer group of every parameter.
        scheduler: The scheduler's state.
        scaler: The loss scaler's state, one per optimizer.
        wrong_arguments: Of every rank that loaded.
    """

    session: Session
    root: Path
    losses: dict[int, float]
    evaluation: float
    models: dict[int, Merged]
    groups: dict[str, dict[str, object]]
    scheduler: dict[str, Any]
    scaler: list[dict[str, Any]]
    wrong_arguments: list[dict[str, tuple[str, str]]]


def together(session: Session, root: Path, ranks: list[Observation]) -> Trained:
    """Merge what the ranks saw; on what all know, all agree."""
    first, model = ranks[0], session.model
    for rank in ranks:
        known = (rank.losses, rank.evaluation, rank.scheduler, rank.scaler)
        assert known == (first.losses, first.evaluation, first.scheduler, first.scaler), "ranks do not agree"
    return Trained(
        session, root, first.losses, first.evaluation[0],
        {step: merged(ranks, step, model) for step in (LOOK, END)},
        merged_groups(ranks, model), first.scheduler, first.scaler, [rank.wrong_arguments for rank in ranks],
    )  # fmt: skip


@dataclass
class Lab:
    """Runs sessions on the pool, and remembers uninterrupted ones."""

    pool: WorkerPool
    folder: Path
    trained: dict[Session, Trained] = field(default_factory=dict)
    roots: int = 0

    def new_root(self) -> Path:
        self.roots += 1
        return self.folder / f"checkpoint_{self.roots}"

    def train(self, model: TinyGPT, parallel: Parallel, training: Training) -> Trained:
        """Train from the start without interruption, and save on the way."""
        key = Session(model, parallel, training)
        if key not in self.trained:
            root = self.new_root()
            self.trained[key] = self._run(Session(model, parallel, training, save=str(root)), root)
        return self.trained[key]

    def resume(self, root: Path, model: TinyGPT, parallel: Parallel, training: Training) -> Trained:
        """Load a checkpoint and train on."""
        return self._run(Session(model, parallel, training, load=str(root)), root)

    def reshape(self, root: Path, **write: Any) -> tuple[Path, Job]:
        """Convert a checkpoint with our library; the options are those of ``WriteOptions``."""
        target = self.new_root()
        job = convert(root, target, ConvertOptions(write=WriteOptions(**write), workers=2, fsync=False))
        return target, job

    def _run(self, session: Session, root: Path) -> Trained:
        world = session.parallel.world_size
        return together(session, root, self.pool.run(observe, session, world_size=world, timeout=TIMEOUT))


def layout_options(parallel: Parallel, num_layers: int) -> dict[str, Any]:
    """What to ask of the converter for a layout."""
    options = dict(tp=parallel.tp, pp=parallel.pp, ep=parallel.ep, etp=parallel.etp or parallel.tp, dp=parallel.dp)
    if parallel.pipeline_layout is not None:
        chunks = len(parallel.pipeline_layout.split("|"))
        return {**options, "vpp": chunks // parallel.pp, "pipeline_layout": parallel.pipeline_layout}
    return {**options, "vpp": parallel.vpp or 1, "pipeline_layout": layers_per_stage(parallel, num_layers)}


def layers_per_stage(parallel: Parallel, num_layers: int) -> str | None:
    """``2,4,4,2`` for a first or last stage of another size, None for equal stages."""
    first, last = parallel.first_stage_layers, parallel.last_stage_layers
    if first is None or last is None:
        return None
    between = parallel.pp - 2
    return ",".join(map(str, [first, *[(num_layers - first - last) // max(between, 1)] * between, last]))
