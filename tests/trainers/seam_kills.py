"""Runs at a trainer's seam that are killed at random again and again: ``python -m tests.trainers.seam_kills SEAM KILLS FOLDER``.

A process imports the trainer once, and each start of a run is a fork of it: it goes on from what the starts before it left, and is killed
with SIGKILL, in turns at one of its changes of the file system and at a moment of time, in one of its ranks, after which the others are
ended. Every step is told as it is trained. After each kill all steps in the root are whole, to the byte, and what was told is what the run
told that nobody disturbed. A run that has come to its end is followed by a new one. Prints as JSON what was done.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import select
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_RANKS = {"bridge": 2, "titan": 2}
_ROOTS = {"titan": "checkpoint"}
_IMPORTED = {"verl": ("verl.trainer.ppo.ray_trainer", "tests.trainers.verl_job"), "nemo": ("nemo_rl.utils.checkpoint",)}
_LONGEST_S = 120.0
TOLD = "SEAM_TOLD"
"""The variable that names the file in which a rank tells its steps."""


class Told(list[Any]):
    """A list whose items are on the disk as soon as they are in it."""

    def append(self, item: Any) -> None:
        """Add one."""
        super().append(item)
        if name := os.environ.get(TOLD):
            with open(name, "a") as file:
                file.write(json.dumps(item) + "\n")


def main_of(seam: str) -> Callable[[str, str, Path], object]:
    """What a rank does; whatever it imports is there from now on."""
    module = importlib.import_module(f"tests.trainers.{seam}_seam")
    if seam == "nemo":
        module.without_init()
        sys.meta_path.insert(0, module.Absent())
    if seam == "bridge":
        module.imported()
    for name in _IMPORTED.get(seam, ()):
        importlib.import_module(name)
    if seam != "titan":
        return module.main  # type: ignore[no-any-return]

    def titan(job: str, folder: str, result: Path) -> None:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        module.dist.init_process_group("gloo", init_method=f"file://{result}.store", rank=rank, world_size=world)
        module.run(job, folder)
        module.dist.destroy_process_group()

    return titan


class Start:
    """One start of a run: its ranks, each a fork of this process."""

    def __init__(self, seam: str, job: str, folder: Path, mark: str, at: int = 0, victim: int = 0) -> None:
        world = _RANKS.get(seam, 1)
        result = folder.with_name(f"{folder.name}-{mark}")
        self.told = [result.with_suffix(f".told-{rank}") for rank in range(world)]
        self.changes = result.with_suffix(".changes")
        self.ranks = [
            self._forked(seam, job, folder, result, rank, at if rank == victim else 0) for rank in range(world)
        ]

    def _forked(self, seam: str, job: str, folder: Path, result: Path, rank: int, at: int) -> int:
        child = os.fork()
        if child:
            return child
        code = 1
        try:
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(len(self.told)), TOLD: str(self.told[rank])}
            from tests.crash.dcp_writer_kills import Killer

            with open(result.with_suffix(f".log-{rank}"), "w") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            killer = Killer(at or -1)
            main_of(seam)(job, str(folder), result)
            if rank == 0:
                self.changes.write_text(str(killer.count))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def end(self, after: float, victim: int) -> dict[int, int]:
        """Wait until the victim has ended, killed after a while if it has not been; then end the others. The status of each rank."""
        handle = os.pidfd_open(self.ranks[victim])
        select.select([handle], [], [], after)
        os.close(handle)
        found: dict[int, int] = {}
        for rank in sorted(range(len(self.ranks)), key=lambda one: one != victim):
            ended, status = os.waitpid(self.ranks[rank], os.WNOHANG)
            if not ended and rank != victim and not found[victim]:  # it ends by itself, too
                ended, status = os.waitpid(self.ranks[rank], 0)
            if not ended:
                os.kill(self.ranks[rank], signal.SIGKILL)
                status = os.waitpid(self.ranks[rank], 0)[1]
            found[rank] = status
        return found

    def lines(self) -> list[list[Any]]:
        """What each rank told."""
        return [
            [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else [] for file in self.told
        ]


def whole_steps(root: Path) -> list[int]:
    """The steps of a root; every one that has a step's name is whole."""
    from mcore_rlhf.manager.runs import listed_steps, naming_of
    from mcore_rlhf.storage.manifest import Manifest, check

    found, naming = [], naming_of(root)
    for step in listed_steps(root) if root.is_dir() else []:
        if naming.step_of(step.local.name) is None:  # on its way: no trainer takes it
            continue
        assert step.state == "committed", step
        assert not check(step.local, Manifest.read(step.local / naming.manifest)), step
        found.append(step.step)
    return found


def disturbed(seam: str, kills: int, folder: Path, seed: int) -> Iterator[dict[str, Any]]:
    """Start runs until so many starts were killed; of each start what became of it."""
    draws, runs, number = random.Random(seed), 0, 0
    began = time.monotonic()
    alone = Start(seam, "alone", folder / "alone", "alone")
    assert not any(alone.end(_LONGEST_S, 0).values()), folder
    took, expected = time.monotonic() - began, alone.lines()
    assert all(expected)
    changes = int(alone.changes.read_text())
    killed = 0
    while killed < kills:
        run = folder / f"run-{runs}"
        root = run / _ROOTS.get(seam, "")
        done = max(whole_steps(root), default=0)
        number += 1
        victim = draws.randrange(len(expected))
        at = draws.randrange(1, changes + 1) if number % 2 else 0
        after = _LONGEST_S if at else draws.uniform(0.1, 1.0) * took
        start = Start(seam, "kills", run, f"start-{number}", at, victim)
        ended = start.end(after, victim)
        was_killed = ended[victim] == signal.SIGKILL
        assert was_killed or not any(ended.values()), (seed, number, ended)
        for mine, all_ in zip(start.lines(), expected, strict=True):
            assert mine == all_[done : done + len(mine)], (seed, number, done, mine, all_)
            assert was_killed or done + len(mine) == len(all_), (seed, number)
        killed += was_killed
        runs += not was_killed
        yield {"start": number, "from": done, "to": max(whole_steps(root), default=0), "killed": was_killed, "at": at}


def main(seam: str, kills: int, folder: Path) -> None:
    """See the module."""
    seed = int(os.environ.get("SEED") or random.randrange(1 << 30))
    print(f"seed {seed}", file=sys.stderr, flush=True)
    main_of(seam)
    found = list(disturbed(seam, kills, folder, seed))
    moves = Counter((one["from"], one["to"]) for one in found if one["killed"])
    print(json.dumps({
        "seam": seam, "seed": seed, "kills": sum(one["killed"] for one in found), "starts": len(found),
        "within a run that had steps": sum(count for (before, _), count in moves.items() if before),
    }))  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
