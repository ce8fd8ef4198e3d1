"""Asynchronous GRPO in several processes, and a supervisor that kills them: ``python -m tests.crash.async_grpo FOLDER --kills N --seed S``.

A trainer asks workers for rollouts over sockets, some batches ahead, and trains on whichever groups are finished first. What a rollout
is depends on its seed alone, what it is worth to the learner on the weights that made it, so that runs can be compared by a digest of
what was trained on, in whatever order: of ids, seeds, tokens and rewards. It is part of the step, and goes back with it.

The processes are forked from one that has imported everything: a start takes milliseconds, and a hundred kills minutes.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import queue
import random
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

import numpy as np
import torch

from mcore_rlhf import (
    CheckpointManager,
    EverySteps,
    JournalWriter,
    KeepLast,
    ManagerOptions,
    Prompt,
    PromptSampler,
    Retention,
    RlhfState,
    Rollout,
    RolloutJournal,
    TorchEngine,
)
from mcore_rlhf.manager.rlhf.prompts import sample_seed
from mcore_rlhf.manager.rlhf.rollouts import SampleKey
from mcore_rlhf.manager.run.snapshot import Role

GROUP, BATCH, AHEAD, PROMPTS, SEED, WORKERS = 4, 4, 3, 24, 7, 2
MAX_STALENESS = 6
_KEY = b"of a test"
_MODULUS = 1 << 256


def tokens_of(seed: int) -> np.ndarray:
    """What a seed samples; long ones are rare."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 8, size=1 + int(rng.exponential(12)))


def reward_of(tokens: np.ndarray) -> float:
    return float((tokens == 3).mean())


def digest_of(prompt_id: int | str, key: SampleKey, seed: int, tokens: np.ndarray, reward: float | None) -> int:
    text = json.dumps([prompt_id, *key, seed, tokens.tolist(), reward])
    return int.from_bytes(hashlib.sha256(text.encode()).digest(), "big")


def expected(epochs: int) -> str:
    """The digest of all samples of all prompts of so many epochs, each once; without a run."""
    from mcore_rlhf.manager.rlhf.prompts import epoch_order

    total = 0
    for epoch in range(epochs):
        for position, prompt_id in enumerate(map(int, epoch_order(SEED, epoch, PROMPTS))):
            for sample in range(GROUP):
                seed = sample_seed(SEED, epoch, prompt_id, sample)
                tokens = tokens_of(seed)
                total += digest_of(prompt_id, SampleKey(epoch, position, sample), seed, tokens, reward_of(tokens))
    return f"{total % _MODULUS:064x}"


# The worker.


def work(folder: Path, name: str) -> None:
    """Make rollouts for whatever trainer there is, until it is killed."""
    log = os.open(folder / "finished", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    writer = JournalWriter(folder / "root", name)
    while True:
        try:
            connection = Client(("127.0.0.1", int((folder / "port").read_text())), authkey=_KEY)
            while True:
                prompt, missing, version = connection.recv()
                for sample in missing:
                    rollout = made(prompt, sample, version)
                    writer.add(rollout)
                    os.write(log, json.dumps([time.monotonic(), os.getpid(), *rollout.key]).encode() + b"\n")
                    connection.send(rollout)
        except (OSError, EOFError, ValueError, AuthenticationError):
            time.sleep(0.01)


def made(prompt: Prompt, sample: int, version: int) -> Rollout:
    tokens = tokens_of(prompt.sample_seeds[sample])
    time.sleep(0.0005 * len(tokens))  # the long ones take long
    logprobs = torch.full((len(tokens),), -1.0 - 0.001 * version, dtype=torch.bfloat16)
    return Rollout.of(prompt, sample, version=version, reward=reward_of(tokens), tokens=tokens, logprobs=logprobs)


# The trainer.


Job = tuple[Prompt, tuple[int, ...], int]


@dataclass
class Workers:
    """Whoever has connected. What a worker that dies has not delivered is another's."""

    folder: Path
    todo: queue.Queue[Job] = field(default_factory=queue.Queue)
    done: queue.Queue[tuple[Prompt, Rollout]] = field(default_factory=queue.Queue)

    def listen(self) -> None:
        listener = Listener(("127.0.0.1", 0), authkey=_KEY, backlog=16)
        aside = self.folder / f"port.{os.getpid()}"
        aside.write_text(str(listener.address[1]))
        aside.rename(self.folder / "port")
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def _accept(self, listener: Listener) -> None:
        while True:
            try:
                connection = listener.accept()
            except (OSError, EOFError, AuthenticationError):
                continue
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        while True:
            prompt, missing, version = self.todo.get()
            left = list(missing)
            try:
                connection.send((prompt, missing, version))
                while left:
                    rollout = connection.recv()
                    left.remove(rollout.sample)
                    self.done.put((prompt, rollout))
            except (OSError, EOFError):
                self.todo.put((prompt, tuple(left), version))
                return


@dataclass
class Trainer:
    """Trains on groups that are finished, and saves every few steps."""

    folder: Path

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.policy = torch.nn.Linear(8, 8)
        optimizer = torch.optim.Adam(self.policy.parameters(), lr=0.01)
        self.engine, self.optimizer = TorchEngine(self.policy, optimizer), optimizer
        self.state = RlhfState(algorithm="grpo", extra={"digest": "0", "samples": 0, "stale": 0, "given": 0})
        self.sampler = PromptSampler(PROMPTS, seed=SEED, group_size=GROUP, batch_size=BATCH)
        self.workers = Workers(self.folder)
        self.groups: dict[tuple[int, int], dict[int, Rollout]] = {}
        self.prompts: dict[tuple[int, int], Prompt] = {}

    def roles(self) -> dict[str, Role]:
        return {"actor": self.engine}

    def options(self) -> ManagerOptions:
        return ManagerOptions(save=EverySteps(3), keep=Retention((KeepLast(2),)), fsync=False, catch_signals=False)

    def run(self) -> None:
        root = self.folder / "root"
        with CheckpointManager(
            root, self.roles(), data=self.sampler, state=self.state, options=self.options()
        ) as manager:
            manager.load("auto")
            self.journal = RolloutJournal(root, max_staleness=MAX_STALENESS)
            self._note_losses()
            self.workers.listen()
            while not self._is_over():
                self._fill()
                self._train(self._finished())
                manager.maybe_save(self.state.iteration)
            manager.save(self.state.iteration)

    def _is_over(self) -> bool:
        """At the end of an epoch. As many prompts as it has may have been trained on before: one of the next, and not all of this."""
        whole = self.sampler.num_consumed % PROMPTS == 0 and not self.sampler.in_flight()
        return whole and self.sampler.num_consumed > 0 and (self.folder / "stop").exists()

    def _fill(self) -> None:
        """Hand out some batches ahead; not beyond the epoch, where the run is to stop."""
        last = (self.folder / "stop").exists() and self.sampler.num_consumed + len(self.groups) > 0
        while len(self.groups) < AHEAD * BATCH:
            if (
                last
                and (self.sampler.num_consumed + len(self.groups)) % PROMPTS == 0
                and self.sampler.yielded.position == 0
            ):
                return
            (prompt,) = self.sampler.next_batch(1)
            place = (prompt.epoch, prompt.position)
            rollouts, missing = self.journal.take(prompt, self.state.weight_version)
            self.prompts[place], self.groups[place] = prompt, {one.sample: one for one in rollouts}
            if missing:
                self.workers.todo.put((prompt, missing, self.state.weight_version))

    def _finished(self) -> list[tuple[int, int]]:
        """The first groups that are whole; fewer than a batch where no more are on their way."""
        wanted = min(BATCH, len(self.groups))
        while len(whole := [place for place, group in self.groups.items() if len(group) == GROUP]) < wanted:
            prompt, rollout = self.workers.done.get(timeout=60)
            group = self.groups.get((prompt.epoch, prompt.position))
            if group is not None:
                group.setdefault(rollout.sample, rollout)
        return whole[:wanted]

    def _train(self, places: list[tuple[int, int]]) -> None:
        rollouts = [rollout for place in places for rollout in self.groups[place].values()]
        losses = []
        for place in places:
            group = list(self.groups[place].values())
            rewards = torch.tensor([one.reward for one in group])
            for one, advantage in zip(group, rewards - rewards.mean(), strict=True):
                logits = self.policy(torch.nn.functional.one_hot(torch.as_tensor(one.tensors["tokens"]), 8).float())
                now = logits.log_softmax(-1).gather(1, torch.as_tensor(one.tensors["tokens"])[:, None])[:, 0]
                losses.append(-((now - one.tensors["logprobs"].float()).exp() * advantage).mean())
        self.optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        self.optimizer.step()
        total = int(str(self.state.extra["digest"]), 16)
        for one in rollouts:
            total += digest_of(one.prompt_id, one.key, one.seed, np.asarray(one.tensors["tokens"]), one.reward)
        self.state.extra["digest"] = f"{total % _MODULUS:064x}"
        self.state.extra["samples"] = int(self.state.extra["samples"]) + len(rollouts)  # type: ignore[call-overload]
        self.state.iteration += 1
        self.state.weight_version += 1
        for place in places:
            self.sampler.acknowledge(self.prompts.pop(place))
            del self.groups[place]

    def _note_losses(self) -> None:
        """How old the oldest rollout is that was finished, is not trained on, and is not in the journal; when its worker died."""
        killed = json.loads((self.folder / "killed").read_text()) if (self.folder / "killed").exists() else {}
        waiting = {(prompt.epoch, prompt.position) for prompt in self.sampler.in_flight()}
        beyond = self.sampler.yielded
        there = {found.place.key for group in self.journal._finished.values() for found in group.values()}
        lost = [0.0]
        text = (self.folder / "finished").read_text() if (self.folder / "finished").exists() else ""
        done = dict[SampleKey, float]()
        for line in text.split("\n")[:-1]:
            at, pid, epoch, position, sample = json.loads(line)
            done[SampleKey(epoch, position, sample)] = killed.get(str(pid), time.monotonic()) - at  # the last of them
        for key, age in done.items():
            untrained = (key.epoch, key.position) in waiting or (key.epoch, key.position) >= beyond
            if untrained and key not in there:
                lost.append(age)
        line = {
            "finished": len(done),
            "given": self.journal.counts.finished,
            "lost": len(lost) - 1,
            "oldest_s": max(lost),
        }
        with (self.folder / "losses").open("a") as file:
            file.write(json.dumps(line) + "\n")


# The supervisor.


def forked(main: Callable[[], None], log: Path) -> int:
    """Run something in a child, which dies with this process."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        main()
        code = 0
    except BaseException:
        with log.open("a") as file:
            traceback.print_exc(file=file)
    finally:
        os._exit(code)


@dataclass
class Supervisor:
    """Starts all of them, kills some, and starts those again."""

    folder: Path
    kills: int
    rng: random.Random
    trainer: Callable[[Path], Trainer] = Trainer
    worker: Callable[[Path, str], None] = work
    pids: dict[str, int] = field(default_factory=dict)
    died: dict[str, float] = field(default_factory=dict)

    def start(self) -> None:
        mains: dict[str, Callable[[], None]] = {"trainer": lambda: self.trainer(self.folder).run()}
        for number in range(WORKERS):
            name = f"worker-{number}"
            mains[name] = lambda name=name: self.worker(self.folder, name)  # type: ignore[misc]
        for name in mains.keys() - self.pids.keys():
            self.pids[name] = forked(mains[name], self.folder / "errors")

    def kill(self, names: list[str]) -> None:
        for name in names:
            os.kill(self.pids[name], signal.SIGKILL)
            self.died[str(self.pids[name])] = time.monotonic()
        for name in names:
            os.waitpid(self.pids.pop(name), 0)
        aside = self.folder / "killed.new"
        aside.write_text(json.dumps(self.died))
        aside.rename(self.folder / "killed")

    def run(self) -> dict[str, int]:
        workers = [f"worker-{number}" for number in range(WORKERS)]
        choices = {"trainer": ["trainer"], "worker": [], "both": ["trainer", *workers]}
        done = dict.fromkeys(choices, 0)
        (self.folder / "root").mkdir(parents=True)
        self.trainer(self.folder)  # imports what is imported when it is needed, once for all
        self.start()
        for _ in range(self.kills):
            time.sleep(self.rng.choice([0.15, 0.4, 0.9]) * (0.3 + self.rng.random()))
            which = self.rng.choice(list(choices))
            self.kill(choices[which] or [self.rng.choice(workers)])
            done[which] += 1
            self.start()
        (self.folder / "stop").touch()
        self._wait()
        self.kill(workers)
        return done

    def _wait(self, seconds: float = 120) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pid, status = os.waitpid(self.pids["trainer"], os.WNOHANG)
            if pid:
                del self.pids["trainer"]
                if status:
                    raise SystemExit(f"the trainer: status {status}; {(self.folder / 'errors').read_text()}")
                return
            time.sleep(0.02)
        raise SystemExit("the trainer does not end")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(Supervisor(given.folder, given.kills, random.Random(given.seed)).run()))
