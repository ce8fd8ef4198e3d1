"""Ranks of a Megatron mixture with router bias, saved with all options at once, on bad disks and into a busy store, while they are killed.

``LD_PRELOAD=shim.so python -m tests.crash.mixture_weather FOLDER --rounds N --seed S --mirror URL``. First a run is left alone; each start
of the others must then be, in every bit of model, optimizer, data and random states, where that one was, and have its losses.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import logging
import os
import random
import shutil
import signal
import socket
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mcore_rlhf.demo.trainer import DemoTrainer, seed_everything

# isort: split
import numpy as np
import torch
import torch.distributed as dist

from mcore_rlhf import (
    CheckpointManager,
    EverySteps,
    KeepLast,
    ManagerOptions,
    PromptSampler,
    Retention,
    RlhfState,
    TorchEngine,
)
from mcore_rlhf.demo.configs import Parallel, Training
from mcore_rlhf.errors import CheckpointError
from mcore_rlhf.manager.run import job, later, mirror, steps
from mcore_rlhf.storage import host_pool
from mcore_rlhf.storage.manifest import check
from tests.crash.grpo_weather import jumping, weather
from tests.faults.disk import Disk
from tests.reference.cases import MOE
from tests.reference.engine_jobs import engine_of

MODEL = replace(
    MOE, num_layers=2, moe_layer_freq=(0, 1), moe_shared_expert_intermediate_size=32, moe_router_enable_expert_bias=True
)
WORLD, LAST, BROKEN, REFUSED = 2, 24, 9, 3


@dataclass
class Rank:
    """What one rank trains; everything random follows from the same seed."""

    def __post_init__(self) -> None:
        self.frozen = DemoTrainer(
            MODEL, Parallel(ep=WORLD, dp=WORLD), Training(optimizer="none", seed=7)
        )  # so is this one
        self.frozen.evaluate()  # a first pass makes the router's bias fp32, as a first save does
        self.trainer = DemoTrainer(MODEL, Parallel(ep=WORLD, dp=WORLD), Training())
        seed_everything(1234)
        self.reference = torch.nn.Linear(300, 300)  # frozen: it is linked
        self.state = RlhfState(algorithm="grpo", extra={"loss": 0.0})
        self.sampler = PromptSampler(50, seed=3, batch_size=4)
        self.engine, self.still = engine_of(self.trainer), engine_of(self.frozen)

    def manager(self, root: Path, options: ManagerOptions) -> CheckpointManager:
        roles = {"actor": self.engine, "reference": TorchEngine(self.reference), "frozen": self.still}
        return CheckpointManager(root, roles, data=self.sampler, state=self.state, options=options)

    def load(self, manager: CheckpointManager) -> None:
        if (found := manager.load("auto")) is not None:
            self.trainer.iteration = self.trainer.loaded_iteration = self.engine.loaded_iteration
            self.trainer.consumed_train_samples = 4 * self.trainer.iteration
            assert found.step == self.state.iteration == self.trainer.iteration == self.still.loaded_iteration

    def step(self) -> None:
        batch = self.sampler.next_batch()
        self.state.extra["loss"] = self.trainer.train_step() + random.random() + float(np.random.random())
        self.frozen.consumed_train_samples += 4
        self.state.iteration += 1
        self.sampler.acknowledge_all(batch)

    def bits(self) -> str:
        """A digest of all that is to come back."""
        told = hashlib.sha256(repr([self.state.extra, self.sampler.state_dict(), random.getstate()]).encode())
        told.update(repr([np.random.get_state()[1].tolist(), self.trainer.scheduler.num_steps]).encode())  # type: ignore[index, union-attr]
        for tensor in [torch.get_rng_state(), *self._tensors()]:
            told.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return told.hexdigest()

    def _tensors(self) -> Iterable[torch.Tensor]:
        for module in [*self.trainer.chunks, *self.frozen.chunks, self.reference]:
            yield from [*module.parameters(), *(one for _, one in module.named_buffers() if one.numel())]
        for member in self.trainer.optimizer.chained_optimizers:  # type: ignore[union-attr]
            for group in member.optimizer.param_groups:
                for one in group["params"]:
                    yield one
                    yield from (
                        value for _, value in sorted(member.optimizer.state[one].items()) if torch.is_tensor(value)
                    )


def options_of(rng: random.Random, url: str) -> ManagerOptions:
    pick = rng.choice
    return ManagerOptions(
        save=EverySteps(1), keep=Retention((KeepLast(2),)), timeout=6, catch_signals=False, mirror=url or None,
        lazy_snapshot=pick([True, True, False]), link_unchanged=pick([True, True, False]), max_host_memory=pick([None, 20_000, 200_000]),
        save_timeout=pick([None, 1.0, 2.0]), save_retries=pick([0, 2]), on_error=pick(["continue", "continue", "raise"]),
        fsync=pick([True, False]), asynchronous=pick([True, True, True, False]),
    )  # fmt: skip


def be_rank(folder: Path, rank: int, port: int, seed: int, url: str) -> int:
    """Train to the end, as if nothing had ever happened; without a URL, nothing does, and it is noted what that is like."""
    torch.set_num_threads(1)
    host_pool.LEAST, job._FIRST_PAUSE_S, later._FIRST_PAUSE_S = 16 << 10, 0.1, 0.1
    mirror.PATIENCE_S, mirror._PAUSE_S = 1.0, 0.1
    noted, alone, rng = folder / f"expected.{rank}", not url, random.Random(seed)
    options = ManagerOptions(catch_signals=False) if alone else options_of(rng, url)
    if not alone and rng.random() < 0.4:
        jumping(random.Random(seed + rank))
    with suppress(RuntimeError):  # another rank was killed
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
        run = Rank()
        expected = [run.bits()] if alone else json.loads(noted.read_text())
        if not alone:
            weather(Disk(folder / "root"), folder, random.Random(31 * seed + rank))
        try:
            with run.manager(folder / ("base" if alone else "root"), options) as manager:
                run.load(manager)
                (folder / f"loaded.{rank}").write_text(str(os.getpid()))
                while True:
                    if not alone and run.bits() != expected[run.state.iteration]:
                        raise AssertionError(f"rank {rank}, step {run.state.iteration}: it is not as it was; {options}")
                    if run.state.iteration == LAST:
                        break
                    run.step()
                    if alone:
                        expected.append(run.bits())
                    time.sleep(0 if alone else 0.05)
                    manager.maybe_save(run.state.iteration)
                    manager.before_step()
        except CheckpointError:
            return REFUSED
        if alone:
            noted.write_text(json.dumps(expected))
        return 0
    return REFUSED


@dataclass
class Supervisor:
    """Starts ranks, kills or stops some, and looks at what they left."""

    folder: Path
    rng: random.Random
    url: str
    newest: int = 0
    done: dict[str, int] = field(default_factory=dict)

    def start(self, url: str) -> dict[int, int]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        seed, pids = self.rng.randrange(1 << 30), dict[int, int]()
        for rank in range(WORLD):
            pid = os.fork()
            if pid == 0:
                code = BROKEN
                try:
                    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
                    code = be_rank(self.folder, rank, port, seed, url)
                except BaseException:
                    with (self.folder / "errors").open("a") as file:
                        traceback.print_exc(file=file)
                finally:
                    os._exit(code)
            pids[pid] = rank
        return pids

    def ended(self, pids: dict[int, int], seconds: float) -> list[int]:
        """The exit codes of those that end within so long; they are taken out of the mapping."""
        codes, end = list[int](), time.monotonic() + seconds
        while pids and time.monotonic() < end:
            for pid in list(pids):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    del pids[pid]
                    codes.append(os.waitstatus_to_exitcode(status))
            time.sleep(0.02)
        return codes

    def round(self) -> None:
        pids, how = self.start(self.url), self.rng.choice(["all", "one", "one", "stop", "stop", "none", "at once"])
        self.done[how] = self.done.get(how, 0) + 1
        end = time.monotonic() + (self.rng.random() * 4 if how == "at once" else 60)
        while time.monotonic() < end and not all(self._has_loaded(*one) for one in pids.items()):
            time.sleep(0.05)
        time.sleep(self.rng.random() * 4)
        if how == "none":
            self.ended(pids, 120)
            assert not pids, "a run that nobody disturbs but its disks ends"
        elif how == "one":
            os.kill(self.rng.choice(list(pids)), signal.SIGKILL)
            self.ended(pids, 25)
        elif how == "stop" and pids:
            victim = self.rng.choice(list(pids))
            os.kill(victim, signal.SIGSTOP)
            time.sleep(self.rng.choice([0.3, 3.0, 9.0]))
            os.kill(victim, signal.SIGCONT)
            self.ended(pids, 2)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        self.ended(pids, 30)
        self.look()

    def _has_loaded(self, pid: int, rank: int) -> bool:
        noted = self.folder / f"loaded.{rank}"
        return noted.exists() and noted.read_text() == str(pid)

    def look(self) -> None:
        """No step is lost, and none is listed as whole that is not. Now and then the root is lost, and what is in the mirror remains."""
        if (self.folder / "errors").exists():
            raise SystemExit((self.folder / "errors").read_text())
        root = self.folder / "root"
        for step in steps.committed(root):
            assert not check(step.local, steps.read_manifest(step.local), sizes_only=False).found
        found = steps.newest(root)
        now = 0 if found is None else found.step
        assert now >= self.newest, f"step {self.newest} was there, and {now} is the newest"
        self.newest = now
        if now == LAST or self.rng.random() < 0.1:
            shutil.rmtree(root)
            root.mkdir()
            self.newest, self.url = 0, f"{self.url}+" if now == LAST else self.url

    def run(self, rounds: int, seconds: float) -> None:
        (self.folder / "root").mkdir(parents=True)
        codes = self.ended(self.start(""), 200)
        assert codes == [0] * WORLD, (self.folder / "errors").read_text()
        end = time.monotonic() + seconds
        while rounds and time.monotonic() < end:
            rounds -= 1
            self.round()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=3600, help="none is begun after that")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mirror", default="")
    given: Any = parser.parse_args()
    logging.getLogger("mcore_rlhf").setLevel(logging.CRITICAL)
    supervisor = Supervisor(given.folder, random.Random(given.seed), given.mirror)
    supervisor.run(given.rounds, given.seconds)
    print(json.dumps(supervisor.done))
