"""OpenRLHF's actor with the state of a loader in its client state, in a run of another trainer: torchdata's loader goes on from there."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from mcore_rlhf.families.options import ConvertOptions, ReadOptions, WriteOptions
from mcore_rlhf.manager.convert_step import convert_step
from mcore_rlhf.manager.subject import find
from mcore_rlhf.trainers.known import trainer_named
from tests.trainers.lab import PROJECT

RUNS = PROJECT / "tests" / "goldens" / "trainers"
STEP, ITEMS, BATCH = 3, 40, 4


def make(seed: int, workers: int) -> StatefulDataLoader[int]:
    generator = torch.Generator().manual_seed(seed)
    return StatefulDataLoader(range(ITEMS), batch_size=BATCH, shuffle=True, generator=generator, num_workers=workers)


def rest(batches: Iterator[torch.Tensor]) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def run(to: str, seed: int, workers: int, folder: Path) -> tuple[list[list[int]], list[list[int]]]:
    """What the source's loader gave after the step, and what one gives that took the position out of the target."""
    loader = make(seed, workers)
    batches = iter(loader)
    for _ in range(STEP):
        next(batches)
    source = folder / "openrlhf"
    shutil.copytree(RUNS / "or_z2", source)
    file = source / "_actor" / f"global_step{STEP}" / "mp_rank_00_model_states.pt"
    state = loader.state_dict()
    torch.save({**torch.load(file, weights_only=False), "data_loader_state_dict": state}, file)
    options = ConvertOptions(to=to, fsync=False, write=WriteOptions(reference_config=str(RUNS / "config.json")))
    convert_step(find(source, ReadOptions()), folder / "to", options)
    trainer = trainer_named(to)
    assert trainer is not None
    taken = make(seed + 1, workers)
    taken.load_state_dict(torch.load(folder / "to" / f"global_step_{STEP}" / trainer.data, weights_only=False))
    return rest(batches), rest(iter(taken))


if __name__ == "__main__":
    to, seed, workers = sys.argv[1], *map(int, sys.argv[2:])
    with tempfile.TemporaryDirectory() as folder:
        before, after = run(to, seed, workers, Path(folder))
    print(f"{len(after)} batches, {'the same' if before == after else f'{after}, not {before}'}")
