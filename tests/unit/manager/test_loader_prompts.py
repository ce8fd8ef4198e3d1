"""Anybody's loader, whose prompts are acknowledged: none is lost or repeated, whatever is in flight at a save."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf import CheckpointManager, JournalWriter, LoaderPrompts, ManagerOptions, Rollout, RolloutJournal
from mcore_rlhf.errors import CheckpointError, LayoutMismatch, UsageError
from mcore_rlhf.manager.rlhf.consumed import Consumed
from tests.helpers.crashing_loader import crashing, wanted


class Loader:
    """Counts what it yields, as torchdata's does; an epoch's order is known by a state of that epoch alone."""

    def __init__(self, items: int = 11, batch: int = 3) -> None:
        self.items, self.batch, self.yielded = items, batch, 0
        self.rng = random.Random(0)
        self.start = self.rng.getstate()
        self.resumes = False

    def __iter__(self) -> Iterator[list[int]]:
        if not self.resumes:
            self.start, self.yielded = self.rng.getstate(), 0
        self.resumes = False
        self.rng.setstate(self.start)
        return self._batches(self.rng.sample(range(self.items), self.items))

    def _batches(self, order: list[int]) -> Iterator[list[int]]:
        while self.yielded < self.items:
            batch = order[self.yielded : self.yielded + self.batch]
            self.yielded += len(batch)
            yield batch
        self.rng.random()

    def state_dict(self) -> dict[str, Any]:
        version, numbers, gauss = self.start
        return {"start": [version, list(numbers), gauss], "yielded": self.yielded}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        version, numbers, gauss = state_dict["start"]
        self.start, self.yielded, self.resumes = (version, tuple(numbers), gauss), state_dict["yielded"], True


def prompts(**how: Any) -> LoaderPrompts:
    return LoaderPrompts(Loader(), seed=5, **{"group_size": 2, "epochs": 3, **how})


@pytest.mark.parametrize("crashes", [0, 1, 3, 8, 20])
def test_each_sample_of_each_prompt_once_whatever_happens(rng: random.Random, crashes: int) -> None:
    for _ in range(5):
        assert crashing(prompts, lambda batch, place: batch[place], rng, crashes) == wanted(11, 3, 2)


def test_what_is_in_flight_comes_again_with_the_same_seeds() -> None:
    one = prompts()
    first, second = one.next_batch(), one.next_batch()
    assert first is not None
    assert second is not None
    one.acknowledge(first.prompts[0])
    one.acknowledge_all(second.prompts[:2])
    one.acknowledge(second.prompts[2], 1)
    again = prompts()
    again.load_state_dict(one.state_dict())
    batches = [again.next_batch() for _ in range(3)]
    found = [
        [(prompt.prompt_id, prompt.pending, prompt.reissued) for prompt in batch.prompts] for batch in batches if batch
    ]
    assert found == [
        [(1, (0, 1), True), (2, (0, 1), True)],
        [(2, (0,), True)],
        [(at, (0, 1), False) for at in range(3)],
    ]
    assert batches[0] is not None
    assert batches[0].content == first.content
    assert batches[0].prompts[0].sample_seeds == first.prompts[1].sample_seeds
    assert again.state_dict() != one.state_dict()


def test_a_run_with_a_journal_and_somebody_elses_loader(tmp_path: Path) -> None:
    options = ManagerOptions(asynchronous=False, fsync=False, catch_signals=False)
    one = prompts()
    with CheckpointManager(tmp_path, torch.nn.Linear(2, 2), data=one, options=options) as manager:
        first, second = one.next_batch(), one.next_batch()
        assert first is not None
        assert second is not None
        with JournalWriter(tmp_path, "w") as writer:
            for prompt in (*first.prompts, *second.prompts):
                writer.add(Rollout.of(prompt, 0, version=0))
        one.acknowledge_all(first.prompts)
        manager.save(1)
    seen = Consumed.by(tmp_path / "global_step_1")
    assert [Rollout.of(prompt, 0, version=0).key in seen for prompt in (*first.prompts, *second.prompts)] == [
        True
    ] * 3 + [False] * 3
    again = prompts()
    with CheckpointManager(tmp_path, torch.nn.Linear(2, 2), data=again, options=options) as manager:
        manager.load("auto")
        journal, batch = RolloutJournal(tmp_path), again.next_batch()
        assert batch is not None
        assert batch.content == second.content
        assert [journal.take(prompt, 0).missing for prompt in batch.prompts] == [(1,)] * 3
        again.acknowledge_all(batch.prompts)
        manager.save(2)
        assert journal.trim() == 0, "step 1 may still be named"


@pytest.mark.parametrize(
    ("batch", "size"), [({"a": [1, 2], "b": "xyz"}, 2), ([1, 2, 3], 3), ({}, 0), (torch.zeros(4, 2), 4)]
)
def test_sizes_of_batches(batch: Any, size: int) -> None:
    from mcore_rlhf.manager.rlhf.loader_prompts import size_of

    assert size_of(batch) == size


def test_mistakes() -> None:
    one = prompts()
    batch = one.next_batch()
    assert batch is not None
    one.acknowledge(batch.prompts[0], 0)
    for samples in (0, (1, 1), 2):
        with pytest.raises(UsageError, match="not all pending"):
            one.acknowledge(batch.prompts[0], samples)
    one.acknowledge(batch.prompts[0], 1)
    with pytest.raises(UsageError, match="not in flight"):
        one.acknowledge(batch.prompts[0])
    with pytest.raises(UsageError, match="yields nothing"):
        LoaderPrompts(Loader(items=0), seed=1).next_batch()
    with pytest.raises(LayoutMismatch, match="group_size: expected 3, as this run has, found 2"):
        prompts(group_size=3).load_state_dict(one.state_dict())
    state = one.state_dict()
    for other in (
        {},
        {"yielded": 3},
        {**state, "loaders": []},
        {**state, "loader_prompts": {}},
        {**state, "loaders": 7},
    ):
        with pytest.raises(CheckpointError, match=r"data/data\.pt"):
            prompts().load_state_dict(other)
