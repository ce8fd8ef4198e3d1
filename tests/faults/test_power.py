"""The power fails after each operation on the disk. Whatever the disk has kept by then, a step that was committed is not lost."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mcore_rlhf import JournalWriter, PromptSampler, Rollout, RolloutJournal
from mcore_rlhf.errors import CheckpointError
from mcore_rlhf.manager.run import steps
from mcore_rlhf.manager.run.retention import KeepLast, Retention
from mcore_rlhf.storage import transactions
from mcore_rlhf.storage.appending import Pace
from mcore_rlhf.storage.manifest import Manifest, check
from mcore_rlhf.storage.publish import MANIFEST_NAME
from tests.crash.recorder import Op, Recorder
from tests.crash.scenes import QUIET, SingleRun, copied, leftovers
from tests.faults.power import MODELS, Disk
from tests.faults.sweeps import GOLDENS, called

SYNCED = replace(QUIET, fsync=True)
OLD, NEW = SingleRun(seed=1), SingleRun(seed=2)
EVERY = [pytest.param(11, id="sample"), pytest.param(1, id="all", marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the disk keeps is said by the model, not by the disk of this machine; and who is dead does not go on."""
    monkeypatch.setattr(os, "fsync", os.fstat)
    monkeypatch.setattr(transactions, "PAUSES", (0.0,))


def recorded(live: Path, action: Callable[[], object]) -> list[Op]:
    with Recorder(live).recording() as recorder:
        action()
    return recorder.ops


def power_failures(
    base: Path, ops: list[Op], every: int, rng: random.Random, judge: Callable[[Path, int], Collection[str]]
) -> int:
    """Let the power fail after every so manieth operation, and have every state of the disk judged; none may be found wrong.

    Returns:
        How many states there were.
    """
    disk, at, states, wrong = Disk(base), 0, 0, list[str]()
    for number in range(rng.randrange(every), len(ops) + 1, every):
        disk.do(ops[at:number])
        at = number
        for model in MODELS:
            crash = disk.left(base.with_name("crash"), model, rng)
            wrong += [f"after {number} of {len(ops)}, {model}: {found}" for found in judge(crash, number)]
            states += 1
    assert not wrong, "\n".join(wrong)
    return states


def resumed(root: Path) -> tuple[int, SingleRun] | str:
    """What a restart resumes from."""
    reader = SingleRun(99)
    try:
        with reader.manager(root) as manager:
            found = manager.load("auto")
    except CheckpointError as error:
        return str(error)
    return "nothing" if found is None else (found.step, reader)


def safe_from(ops: list[Op], path: str) -> int:
    """After how many operations what was renamed there is safe."""
    there = next(number for number, op in enumerate(ops) if op.kind == "rename" and op.to == path)
    return next(number for number, op in enumerate(ops[there:], there + 1) if op.kind == "fsync" and op.path == ".")


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("another_host", [False, True], ids=["here", "another host"])
@pytest.mark.parametrize("step", [2, 1], ids=["a new step", "saved again"])
@pytest.mark.parametrize("keep", [False, True], ids=["", "old ones go"])
def test_a_save(
    tmp_path: Path,
    rng: random.Random,
    step: int,
    keep: bool,
    another_host: bool,
    every: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = tmp_path / "base"
    OLD.save(base, 1, SYNCED)
    live = copied(base, tmp_path / "live")
    options = replace(SYNCED, keep=Retention((KeepLast(1),)) if keep else None)
    ops = recorded(live, lambda: NEW.save(live, step, options))
    safe = safe_from(ops, f"global_step_{step}")
    if another_host:
        monkeypatch.setattr(transactions, "_is_ours", lambda owner: False)

    def judge(crash: Path, number: int) -> list[str]:
        found = resumed(crash)
        if isinstance(found, str):
            return [f"a step is lost: {found}"]
        number_found, reader = found
        expected = [NEW] if number >= safe else [NEW, OLD]
        if not any(number_found == (step if run is NEW else 1) and reader.bits() == run.bits() for run in expected):
            return [f"step {number_found} is not what was saved"]
        states = {found.path.name: found.state for found in steps.listed(crash) if not steps.is_hidden(found.path)}
        return [f"{name} is {state}" for name, state in states.items() if state != "committed"] + (
            [] if another_host else [f"left: {name}" for name in leftovers(crash)]
        )

    assert power_failures(base, ops, every, rng, judge) > len(MODELS)


@pytest.mark.parametrize("every", EVERY)
def test_a_conversion_that_replaces_another(tmp_path: Path, rng: random.Random, every: int) -> None:
    source, base = tmp_path / "source", tmp_path / "base"
    shutil.copytree(GOLDENS / "huggingface" / "llama_tied_bf16_sharded", source)
    base.mkdir()

    def convert(folder: Path) -> None:
        code, said = called(["convert", str(source), str(folder / "out"), "--to", "dcp", "--overwrite"])
        assert code == 0, said

    convert(base)
    live = copied(base, tmp_path / "live")
    ops = recorded(live, lambda: convert(live))

    def judge(crash: Path, number: int) -> list[str]:
        transactions.recover(crash / "out")
        out = crash / "out"
        if not (out / MANIFEST_NAME).is_file():
            return ["there is no target any more"]
        return [found.message for found in check(out, Manifest.read(out / MANIFEST_NAME)).found]

    assert power_failures(base, ops, every, rng, judge) > len(MODELS)


@pytest.mark.parametrize("every", EVERY)
def test_rollouts(tmp_path: Path, rng: random.Random, every: int) -> None:
    base, live = tmp_path / "base", tmp_path / "live"
    base.mkdir()
    live.mkdir()
    prompts = PromptSampler(12, seed=1).next_batch(12)
    safe = dict[int, int]()
    with Recorder(live).recording() as recorder:
        with JournalWriter(live, "w", pace=Pace(write_s=0, sync_s=0.001, segment_nbytes=300)) as writer:
            for at, prompt in enumerate(prompts):
                writer.add(Rollout.of(prompt, 0, version=0, tokens=np.arange(at)))
                writer.flush()
                safe[at] = len(recorder.ops)
        written = len(recorder.ops)
        RolloutJournal(live).trim(lambda key: key.position < 4)

    def judge(crash: Path, number: int) -> list[str]:
        try:
            journal = RolloutJournal(crash)
        except CheckpointError as error:
            return [f"the journal is refused: {error}"]
        taken = [journal.take(prompt, 0).rollouts for prompt in prompts]
        kept = range(12) if number <= written else range(4, 12)
        return [f"rollout {at} was confirmed, and is lost" for at in kept if safe[at] <= number and not taken[at]]

    assert power_failures(base, recorder.ops, every, rng, judge) > len(MODELS)
