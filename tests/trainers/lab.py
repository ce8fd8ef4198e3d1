"""Runs of trainers, each rank in a process of its own, with the trainer's own packages on the path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mcore_rlhf.families.options import ConvertOptions, ReadOptions, WriteOptions
from mcore_rlhf.manager.convert_step import StepJob, convert_step
from mcore_rlhf.manager.subject import find
from tests.trainers.lessons import Step

PROJECT = Path(__file__).parents[2]
TIMEOUT = 400
Orders = Sequence[tuple[str, object]]


@dataclass
class Lab:
    """Runs of trainers, each done once.

    Args:
        packages: Where trainers' packages lie: see ``conftest``.
        folder: Where everything goes.
    """

    packages: Path
    folder: Path
    count: int = 0
    before: dict[str, tuple[Path, list[Step]]] = field(default_factory=dict)

    def run(self, job: str, needed: Iterable[str], world: int, do: Orders, **how: object) -> list[Step]:
        """Carry orders out in processes of their own.

        Args:
            job: The module that does.
            needed: Folders of packages that it imports.
            world: Ranks.
            do: ``train``, ``save`` and ``load``, with how many steps or where.
            how: The model, the strategy.
        """
        folders = [self.packages / name for name in needed]
        for folder in folders:
            if not folder.is_dir():
                pytest.fail(f"{folder}: missing; make test-trainers puts it there")
        self.count += 1
        orders = self.folder / f"orders-{self.count}.json"
        base = {"seed": 1, "tied": False, "model": "qwen2", "world": world, "step": 3}
        orders.write_text(
            json.dumps({**base, **how, "do": [[what, str(v) if what != "train" else v] for what, v in do]})
        )
        path = os.pathsep.join(map(str, [PROJECT, *folders]))
        env = dict(os.environ, PYTHONPATH=path, OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu", PYTHONFAULTHANDLER="1")
        return _seen(orders, [sys.executable, "-m", f"tests.trainers.{job}", str(orders)], world, env)

    def once(self, key: str, path: Path, carry_out: Callable[[Orders], list[Step]]) -> tuple[Path, list[Step]]:
        """A run of three steps that is saved then, done once for all who ask by a key: where, and what it saw in two more."""
        if key not in self.before:
            seen = carry_out([("train", 3), ("save", path), ("train", 2)])
            losses = [step["loss"] for step in seen]
            assert len({*losses}) == len(losses), "what a run that learns nothing goes on with, nobody sees"
            self.before[key] = path, seen[3:]
        return self.before[key]

    def convert(self, source: Path, to: str, name: str, **write: object) -> tuple[Path, StepJob]:
        """Make another trainer's run of one, as ``convert SOURCE NAME --to TO`` does."""
        target = self.folder / name
        given = ConvertOptions(to=to, fsync=False, workers=1, write=WriteOptions(**write))  # type: ignore[arg-type]
        return target, convert_step(find(source, ReadOptions()), target, given)


def _seen(orders: Path, command: list[str], world: int, env: dict[str, str]) -> list[Step]:
    """What all ranks together saw; where one fails or takes too long, all are ended."""
    ranks = [
        subprocess.Popen([*command, str(rank)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(world)
    ]
    said = [""] * world

    def end() -> None:
        for rank in ranks:
            rank.kill()

    def listen(rank: int) -> None:
        said[rank] = ranks[rank].communicate()[0]
        if ranks[rank].returncode:  # the others wait for it
            end()

    threads = [threading.Thread(target=listen, args=(rank,)) for rank in range(world)]
    clock = threading.Timer(TIMEOUT, end)
    for thread in (*threads, clock):
        thread.start()
    for thread in threads:
        thread.join()
    clock.cancel()
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(text[-3000:] for text in said)
    found: list[Step] = json.loads(orders.with_suffix(".seen").read_text())
    return found
