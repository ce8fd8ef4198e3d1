"""Random histories of a run: batches, acknowledgements in any order, saves, kills, resumes at another DP size.

Weights and sampler are saved together, so a kill also takes back what was trained since the save. What the weights
that survive have been trained on is kept in a ledger, and the ledger must hold every sample of every prompt of every
epoch once. Two samplers that save the wrong cursor must be caught by the very same checker.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mcore_rlhf.manager.rlhf.prompts import Prompt, shard
from mcore_rlhf.manager.rlhf.sampler import PromptSampler

Place = tuple[int, int]
Trained = tuple[int, int, int]  # epoch, prompt, sample


@dataclass(frozen=True)
class Run:
    """What a run is; ``last_batch`` and ``batch_size`` are those of the sampler."""

    num_prompts: int
    epochs: int
    group_size: int
    batch_size: int
    last_batch: Any
    shuffle: bool
    kind: type[PromptSampler] = PromptSampler

    def sampler(self) -> PromptSampler:
        return self.kind(
            self.num_prompts, seed=11, group_size=self.group_size, shuffle=self.shuffle, epochs=self.epochs,
            batch_size=self.batch_size, last_batch=self.last_batch,
        )  # fmt: skip

    def uninterrupted(self) -> list[Prompt]:
        reference = PromptSampler(
            self.num_prompts, seed=11, group_size=self.group_size, shuffle=self.shuffle, epochs=self.epochs,
            batch_size=self.batch_size, last_batch=self.last_batch,
        )  # fmt: skip
        return [prompt for batch in reference for prompt in batch]


@dataclass
class Trainer:
    """One sampler on each data-parallel rank, prompts on their way, and the ledger of the weights."""

    run: Run
    samplers: list[PromptSampler]
    held: list[Prompt] = field(default_factory=list)
    ledger: Counter[tuple[Place, int]] = field(default_factory=Counter)
    fresh: list[Prompt] = field(default_factory=list)  # in the order in which this lineage handed them out first
    awaited: list[Place] = field(default_factory=list)  # to be issued again before anything else

    @classmethod
    def start(cls, run: Run, dp: int) -> Trainer:
        return cls(run, [run.sampler() for _ in range(dp)])

    def take(self, n: int) -> int:
        """All ranks ask for a global batch and take their shards; its size."""
        batches = [sampler.next_batch(n) for sampler in self.samplers]
        assert all(batch == batches[0] for batch in batches)
        dp = len(self.samplers)
        assert [p for rank in range(dp) for p in shard(batches[rank], rank, dp)] == batches[0]
        for prompt in batches[0]:
            if prompt.reissued:
                assert self.awaited, "issued again without need"
                assert (prompt.epoch, prompt.position) == self.awaited.pop(0), "not in the original order"
            else:
                assert not self.awaited, "something new before what was in flight"
                self.fresh.append(prompt)
        self.held += batches[0]
        return len(batches[0])

    def train(self, index: int, samples: list[int] | None) -> None:
        """Train on a prompt that is held, or on some of its pending samples."""
        prompt = self.held.pop(index % len(self.held))
        used = [s for s in prompt.pending if samples is None or s in samples]
        for sample in used:
            self.ledger[(prompt.epoch, prompt.position), sample] += 1
        for sampler in self.samplers:
            sampler.acknowledge(prompt, used)
        left = tuple(s for s in prompt.pending if s not in used)
        if left:
            again = Prompt(prompt.prompt_id, prompt.epoch, prompt.position, prompt.sample_seeds, left, prompt.padding)
            self.held.append(again)

    def save(self) -> Checkpoint:
        states = [json.dumps(sampler.state_dict()) for sampler in self.samplers]
        assert len(set(states)) == 1
        flying = sorted({*self.awaited, *((p.epoch, p.position) for p in self.held)})
        return Checkpoint(states[0], Counter(self.ledger), list(self.fresh), flying)

    def finish(self) -> None:
        """Train until nothing is left."""
        while self.take(self.run.batch_size) or self.held:
            while self.held:
                self.train(0, None)

    def problems(self) -> str:
        """What is lost, repeated or out of order, once nothing is left; empty if nothing is."""
        expected = self.run.uninterrupted()
        wanted = {((p.epoch, p.position), sample) for p in expected for sample in range(self.run.group_size)}
        found = [f"lost {item}" for item in sorted(wanted - self.ledger.keys())]
        found += [f"{count} times {item}" for item, count in sorted(self.ledger.items()) if count != 1]
        if [_key(p) for p in self.fresh] != [_key(p) for p in expected]:
            found.append("the order is not the uninterrupted one")
        return "; ".join(found[:3])


@dataclass(frozen=True)
class Checkpoint:
    """What a save holds: the sampler's state, and, in the role of the weights, what they have been trained on."""

    state: str
    ledger: Counter[tuple[Place, int]]
    fresh: list[Prompt]
    flying: list[Place]

    def resume(self, run: Run, dp: int) -> Trainer:
        trainer = Trainer.start(run, dp)
        for sampler in trainer.samplers:
            sampler.load_state_dict(json.loads(self.state))
        trainer.ledger, trainer.fresh, trainer.awaited = Counter(self.ledger), list(self.fresh), list(self.flying)
        return trainer


def _key(prompt: Prompt) -> tuple[Any, ...]:
    return prompt.epoch, prompt.position, prompt.prompt_id, prompt.sample_seeds, prompt.padding


RUNS = st.builds(
    Run,
    num_prompts=st.integers(4, 24),
    epochs=st.integers(1, 3),
    group_size=st.integers(1, 4),
    batch_size=st.integers(1, 4),
    last_batch=st.sampled_from(["carry", "short", "drop", "pad"]),
    shuffle=st.booleans(),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(1, 9)),
        st.tuples(st.just("train"), st.integers(0, 99)),
        st.tuples(st.just("train"), st.integers(0, 99)),
        st.tuples(st.just("some"), st.integers(0, 99), st.sets(st.integers(0, 3), max_size=3)),
        st.tuples(st.just("save")),
        st.tuples(st.just("kill"), st.integers(1, 5)),
    ),
    max_size=40,
)


def play(run: Run, dp: int, steps: list[tuple[Any, ...]]) -> Trainer:
    """Live through a history, then train to the end."""
    trainer = Trainer.start(run, dp)
    newest = trainer.save()
    for name, *values in steps:
        if name == "take":
            trainer.take(values[0])
        elif name in ("train", "some") and trainer.held:
            trainer.train(values[0], sorted(values[1]) if name == "some" else None)
        elif name == "save":
            newest = trainer.save()
        elif name == "kill":
            trainer = newest.resume(run, values[0])
    trainer.finish()
    return trainer


@given(run=RUNS, dp=st.integers(1, 5), steps=STEPS)
@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
def test_every_prompt_of_every_epoch_is_trained_on_once(run: Run, dp: int, steps: list[tuple[Any, ...]]) -> None:
    trainer = play(run, dp, steps)
    assert trainer.problems() == ""
    assert all(sampler.finished for sampler in trainer.samplers)
    by_epoch = Counter((p.epoch, p.prompt_id) for p in trainer.fresh if not p.padding)
    assert set(by_epoch.values()) == {1}
    left_out = run.epochs * run.num_prompts - len(by_epoch)
    assert left_out == (run.epochs * (run.num_prompts % run.batch_size) if run.last_batch == "drop" else 0)


class SavesTheYieldedCursor(PromptSampler):
    """As torchdata's loader does: what was handed out counts as done."""

    def state_dict(self) -> dict[str, Any]:
        saved = super().state_dict()
        saved["state"]["consumed"] += len(saved["state"]["in_flight"])
        saved["state"]["in_flight"] = []
        return saved


class SavesTheLowestCursor(PromptSampler):
    """Goes back to the first prompt in flight, and forgets what was done beyond it."""

    def state_dict(self) -> dict[str, Any]:
        saved = super().state_dict()
        epoch, position = self.consumed
        place = {"epoch": epoch, "position": position}
        count = epoch * saved["state"]["epoch_length"] + position
        saved["state"].update(next=place, consumed=count, in_flight=[])
        return saved


@pytest.mark.parametrize(
    ("kind", "text"), [(PromptSampler, ""), (SavesTheYieldedCursor, "lost"), (SavesTheLowestCursor, "2 times")]
)
@pytest.mark.parametrize("group_size", [1, 3])
def test_a_broken_sampler_is_caught_by_the_same_checker(kind: type[PromptSampler], text: str, group_size: int) -> None:
    run = Run(8, 2, group_size, 4, "carry", True, kind)
    trainer = Trainer.start(run, 2)
    trainer.take(4)
    trainer.train(2, None)  # three in flight, and one beyond the first of them that is done
    checkpoint = trainer.save()
    trainer = checkpoint.resume(run, 2)
    if kind is not PromptSampler:
        with pytest.raises(AssertionError, match="something new before what was in flight"):
            trainer.take(1)
        trainer = checkpoint.resume(run, 2)
        trainer.awaited = []  # so that the ledger has to notice by itself
    trainer.finish()
    problems = trainer.problems()
    assert text in problems
    assert bool(problems) == bool(text)


@given(run=RUNS, dp=st.integers(1, 5), steps=STEPS)
@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
def test_the_uninterrupted_run_is_not_accused(run: Run, dp: int, steps: list[tuple[Any, ...]]) -> None:
    """The checker's other half: histories without a kill are sound even with samplers that save nonsense."""
    broken = Run(**{**run.__dict__, "kind": SavesTheYieldedCursor})
    assert play(broken, dp, [step for step in steps if step[0] != "kill"]).problems() == ""
