"""torchdata's StatefulDataLoader, shuffled, whose consumer crashes again and again; prints how many samples were wrong."""

from __future__ import annotations

import copy
import json
import random
import sys

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from mcore_rlhf import LoaderPrompts
from mcore_rlhf.manager.will_resume import _paths
from mcore_rlhf.trainers.torchdata import missing
from tests.helpers.crashing_loader import crashing, wanted
from tests.helpers.one_key import keys_of, without_key

ITEMS = 23


def make(workers: int) -> LoaderPrompts:
    data = [{"question": torch.tensor(number)} for number in range(ITEMS)]
    generator = torch.Generator().manual_seed(5)
    loader = StatefulDataLoader(data, batch_size=4, shuffle=True, generator=generator, num_workers=workers)
    return LoaderPrompts(loader, seed=1, group_size=2, epochs=3)


def without_each_key(workers: int) -> dict[str, list[str]]:
    """Of the state without each of its keys: whether torchdata stops, or begins with which batch; and what ``will-resume`` says of it."""

    def begun() -> StatefulDataLoader:
        generator = torch.Generator().manual_seed(5)
        return StatefulDataLoader(list(range(64)), batch_size=4, shuffle=True, generator=generator, num_workers=workers)

    loader = begun()
    batches = iter(loader)
    next(batches)
    state, wanted_next, found = loader.state_dict(), next(batches).tolist(), {}
    for at in keys_of(state):
        less, again = without_key(copy.deepcopy(state), at), begun()
        told = "stops" if missing(dict(_paths(less, "", 6))) else "goes on"
        try:
            again.load_state_dict(less)
            seen = "goes on" if next(iter(again)).tolist() == wanted_next else "another batch"
        except (KeyError, AssertionError):
            seen = "stops"
        found["/".join(map(str, at))] = [told, seen]
    return found


if __name__ == "__main__":
    if sys.argv[1] == "keys":
        print(json.dumps(without_each_key(int(sys.argv[2]))))
        raise SystemExit
    seed, workers, histories = map(int, sys.argv[1:])
    for number in range(histories):
        found = crashing(
            lambda: make(workers), lambda batch, place: int(batch["question"][place]), random.Random(seed + number), 8
        )
        print(f"{number}: {len(found - wanted(ITEMS, 3, 2))} repeated, {len(wanted(ITEMS, 3, 2) - found)} skipped")
