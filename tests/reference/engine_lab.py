"""Runs of the engine's tests, each uninterrupted run done once and looked at by several tests."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from mcore_rlhf.demo.configs import Parallel, TinyGPT, Training
from tests.reference import engine_jobs
from tests.reference.engine_jobs import Loaded
from tests.reference.lab import TIMEOUT, Lab, Trained, together
from tests.reference.observing import Observation, Session

GPT = TinyGPT(dropout=0.1)
SAME_ROWS = TinyGPT(vocab_size=190, dropout=0.1)
TIED = replace(SAME_ROWS, untie_embeddings_and_output_weights=False)
MOE = replace(SAME_ROWS, num_experts=4)
CUBE = Parallel(tp=2, pp=2, dp=2)
ADAM = Training()
WIDE = Training(global_batch_size=8)
PLAIN = Training(optimizer="plain")
BUCKETS = replace(WIDE, overlap_grad_reduce=True, ddp_bucket_size=5000)


@dataclass(frozen=True)
class Saved:
    """An uninterrupted run, saved at iteration 2 by the engine and by Megatron itself."""

    run: Trained
    ours: Path
    theirs: Path


SAVED: dict[Path, dict[Session, Saved]] = {}


@dataclass
class EngineLab:
    """Trains, saves and loads on the pool."""

    lab: Lab

    @property
    def saved(self) -> dict[Session, Saved]:
        """Runs that were done; all test modules of a session share them."""
        return SAVED.setdefault(self.lab.folder, {})

    def save(self, model: TinyGPT, parallel: Parallel, training: Training) -> Saved:
        key = Session(model, parallel, training)
        if key not in self.saved:
            ours, theirs = self.lab.new_root(), self.lab.new_root()
            session = Session(model, parallel, training, save=str(theirs))
            ranks = self._run(engine_jobs.train_and_save, session, str(ours))
            self.saved[key] = Saved(together(session, ours, ranks), ours, theirs)
        return self.saved[key]

    def load(
        self, root: Path, model: TinyGPT, parallel: Parallel, training: Training, **options: object
    ) -> tuple[Trained, list[Loaded]]:
        session = Session(model, parallel, training, load=str(root))
        loaded: list[Loaded] = self._run(engine_jobs.load_and_train, session, **options)
        return together(session, root, [rank.seen for rank in loaded]), loaded

    def refuse(self, root: Path, model: TinyGPT, parallel: Parallel, training: Training) -> list[tuple[str, str, bool]]:
        session = Session(model, parallel, training, load=str(root))
        return self._run(engine_jobs.refused, session)

    def save_at_once(self, root: Path, model: TinyGPT, parallel: Parallel, training: Training) -> list[Observation]:
        return self._run(engine_jobs.save_at_once, Session(model, parallel, training), str(root))

    def save_lazily(self, model: TinyGPT, parallel: Parallel, training: Training) -> list[list[str]]:
        return self._run(engine_jobs.save_lazily, Session(model, parallel, training), str(self.lab.new_root()))

    def start_from(self, root: Path, model: TinyGPT, parallel: Parallel, training: Training) -> list[Observation]:
        return self._run(engine_jobs.start_from, Session(model, parallel, training, load=str(root)))

    def save_a_third_moment(self, root: Path, model: TinyGPT, parallel: Parallel, training: Training) -> list[int]:
        return self._run(engine_jobs.save_a_third_moment, Session(model, parallel, training), str(root))

    def load_a_third_moment(
        self, root: Path, model: TinyGPT, parallel: Parallel, training: Training
    ) -> list[list[str]]:
        return self._run(engine_jobs.load_a_third_moment, Session(model, parallel, training, load=str(root)))

    def with_swapped_shards(self, saved: Saved) -> Saved:
        """The run with a copy of its checkpoint in which two data-parallel ranks' masters are in each other's place."""
        root = self.lab.new_root()
        shutil.copytree(saved.ours, root)
        file = next(root.glob("iter_*/mp_rank_00*/distrib_optim.pt"))
        self.lab.pool.run(engine_jobs.swap_halves, str(file), world_size=1, timeout=TIMEOUT)
        return replace(saved, ours=root)

    def file_differences(self, saved: Saved) -> list[str]:
        return self.file_differences_of(saved.ours, saved.theirs)

    def file_differences_of(self, ours: Path, theirs: Path) -> list[str]:
        jobs = self.lab.pool.run(engine_jobs.file_differences, str(ours), str(theirs), world_size=1, timeout=TIMEOUT)
        return jobs[0]

    def _run(self, job: object, session: Session, *args: object, **options: object) -> list:  # type: ignore[type-arg]
        world = session.parallel.world_size
        return self.lab.pool.run(job, session, *args, world_size=world, timeout=TIMEOUT, **options)  # type: ignore[arg-type]
