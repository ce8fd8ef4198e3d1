"""A loader whose consumer acknowledges in any order, saves now and then, and crashes: what was trained on in the history that counts."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mcore_rlhf import LoaderPrompts, Prompt

Trained = Counter[tuple[int, int, int]]


def crashing(
    make: Callable[[], LoaderPrompts], read: Callable[[Any, int], int], rng: random.Random, crashes: int
) -> Trained:
    """How often each (epoch, item, sample) was trained on.

    Args:
        make: Makes the loader, as a new process does.
        read: An item of a batch, as a number.
        rng: What happens when.
        crashes: How many, at most.
    """
    loader, flight, done = make(), list[tuple[Prompt, int]](), Trained()
    saved: tuple[dict[str, Any], Trained] = (copy.deepcopy(loader.state_dict()), Trained())
    while True:
        batch = loader.next_batch() if not flight or rng.random() < 0.4 else None
        if batch is None and not flight:
            return done
        if batch is not None:
            flight += [(prompt, read(batch.content, prompt.prompt_id)) for prompt in batch.prompts]
        else:
            prompt, item = flight.pop(rng.randrange(len(flight)))
            some = rng.sample(prompt.pending, rng.randint(1, len(prompt.pending)))
            loader.acknowledge(prompt, some)
            done.update((prompt.epoch, item, sample) for sample in some)
            left = tuple(sample for sample in prompt.pending if sample not in some)
            flight += [(replace(prompt, pending=left), item)] if left else []
        if rng.random() < 0.1:
            saved = copy.deepcopy(loader.state_dict()), done.copy()
        if crashes and rng.random() < 0.05:
            crashes -= 1
            loader, flight, done = make(), [], saved[1].copy()
            loader.load_state_dict(copy.deepcopy(saved[0]))


def wanted(items: int, epochs: int, group_size: int) -> Trained:
    """Each once."""
    return Counter(
        (epoch, item, sample) for epoch in range(epochs) for item in range(items) for sample in range(group_size)
    )
