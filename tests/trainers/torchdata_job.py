"""torchdata's StatefulDataLoader, shuffled, whose consumer crashes again and again; prints how many samples were wrong."""

from __future__ import annotations

import random
import sys

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from mcore_rlhf import LoaderPrompts
from tests.helpers.crashing_loader import crashing, wanted

ITEMS = 23


def make(workers: int) -> LoaderPrompts:
    data = [{"question": torch.tensor(number)} for number in range(ITEMS)]
    generator = torch.Generator().manual_seed(5)
    loader = StatefulDataLoader(data, batch_size=4, shuffle=True, generator=generator, num_workers=workers)
    return LoaderPrompts(loader, seed=1, group_size=2, epochs=3)


if __name__ == "__main__":
    seed, workers, histories = map(int, sys.argv[1:])
    for number in range(histories):
        found = crashing(
            lambda: make(workers), lambda batch, place: int(batch["question"][place]), random.Random(seed + number), 8
        )
        print(f"{number}: {len(found - wanted(ITEMS, 3, 2))} repeated, {len(wanted(ITEMS, 3, 2) - found)} skipped")
