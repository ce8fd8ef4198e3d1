"""Roots with saves in them, and what must be true of a root after a crash at any moment."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from mcore_rlhf.engines.base import Engine
from mcore_rlhf.engines.plain import TorchEngine
from mcore_rlhf.manager.rlhf.controls import AdaptiveKL
from mcore_rlhf.manager.rlhf.state import RlhfState
from mcore_rlhf.manager.run import steps
from mcore_rlhf.manager.run.commit import Transaction, new_transaction
from mcore_rlhf.manager.run.job import SaveJob
from mcore_rlhf.manager.run.manager import CheckpointManager, ManagerOptions
from mcore_rlhf.manager.run.options import Reporter
from mcore_rlhf.manager.run.snapshot import Components, described
from mcore_rlhf.manager.run.steps import is_replaceable
from mcore_rlhf.manager.run.world import World, Worlds
from tests.distributed.sharded_engine import ShardedEngine

SURVIVORS = {".mcore_rlhf.lock", "latest_checkpointed_iteration.txt"}
QUIET = ManagerOptions(catch_signals=False, fsync=False, on_existing="continue")


class SingleRun:
    """A run of one process with two roles and an RLHF state; everything in it follows from a seed."""

    def __init__(self, seed: int) -> None:
        self.sharded = ShardedEngine(0, 1, numel=2000, seed=seed)
        self.module = torch.nn.Linear(160, 130)  # more than a small tensor, so that it is written in pieces
        with torch.no_grad():
            self.module.weight.copy_(torch.randn(130, 160, generator=torch.Generator().manual_seed(seed)))
            self.module.bias.fill_(seed)
        self.state = RlhfState(algorithm="ppo", kl=AdaptiveKL(0.1 + seed, 6.0, 100))

    @property
    def roles(self) -> dict[str, Engine]:
        return {"actor": self.sharded, "critic": TorchEngine(self.module)}

    def manager(self, root: Path, options: ManagerOptions = QUIET) -> CheckpointManager:
        return CheckpointManager(root, self.roles, state=self.state, options=options)

    def save(self, root: Path, step: int, options: ManagerOptions = QUIET) -> None:
        with self.manager(root, options) as manager:
            manager.save(step, blocking=True)

    def bits(self) -> list[bytes]:
        tensors = [*self.sharded.values.values(), *self.module.state_dict().values()]
        return [tensor.numpy().tobytes() for tensor in tensors] + [self.state.to_json().encode()]


def tree(root: Path) -> dict[str, bytes | None]:
    """Everything below a folder: the content of files, None for folders."""
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None for path in sorted(root.rglob("*"))
    }


def copied(root: Path, target: Path, *, linked: bool = False) -> Path:
    """A fresh copy, in place of what was there; linked: quicker, and good until a file is written in place."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(root, target, copy_function=os.link if linked else shutil.copy2)
    return target


def committed(root: Path) -> list[int]:
    return [step.step for step in steps.committed(root)]


def leftovers(root: Path) -> list[str]:
    """What no start of a run leaves: hidden files and folders other than the root's lock."""
    return sorted(name for name in os.listdir(root) if name.startswith(".") and name not in SURVIVORS)


def check_start(root: Path, expected: Mapping[int, SingleRun], newest: int) -> None:
    """A start of the run cleans up, finds exactly these steps, and every one loads bit for bit."""
    fresh = SingleRun(seed=99)
    with fresh.manager(root) as manager:
        assert not leftovers(root), leftovers(root)
        assert committed(root) == sorted(expected)
        for which, step in [("auto", newest), *((number, number) for number in expected if number != newest)]:
            fresh.sharded.reset(98)
            loaded = manager.load(which)
            assert loaded is not None
            assert loaded.step == step
            assert fresh.bits() == expected[step].bits()


class Ranks:
    """Several ranks as threads of one process, which meet through files alone, as they do behind a training loop.

    Args:
        root: The folder of all steps.
        engines: By world, then by rank: ``{"": [one engine per rank]}`` for a single world.
        timeout: Seconds to wait for a rank.
    """

    def __init__(self, root: Path, engines: Mapping[str, Sequence[ShardedEngine]], timeout: float = 20.0) -> None:
        self.root, self.engines, self.timeout = root, engines, timeout
        self.errors: dict[str, BaseException] = {}

    def save(self, step: int) -> None:
        """Save on all ranks together; what fails is in :attr:`errors`, by the rank's name."""
        identity, self.errors = new_transaction(), {}
        jobs = [self._job(world, rank, step, identity) for world in self.engines for rank in range(self.size(world))]
        jobs[0].transaction.open(is_replaceable)
        threads = [
            threading.Thread(target=self._run, args=(job,), name=job.world.rank_name, daemon=True) for job in jobs
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(3 * self.timeout)
            assert not thread.is_alive(), f"{thread.name} hangs"

    def size(self, world: str) -> int:
        return len(self.engines[world])

    def _job(self, name: str, rank: int, step: int, identity: str) -> SaveJob:
        worlds = Worlds(name, {other: len(engines) for other, engines in self.engines.items()}) if name else None
        world = World(rank, self.size(name), self.timeout, worlds=worlds)
        parts = Components({name or "actor": self.engines[name][rank]}, None, None)
        transaction = Transaction(self.root, step, identity, world.rank_name, self.timeout, fsync=False)
        return SaveJob(transaction, world, parts, described(parts, world, step), Reporter(rank))

    def _run(self, job: SaveJob) -> None:
        try:
            job.run()
        except BaseException as error:
            self.errors[job.world.rank_name] = error
