"""A trainer of a few lines that saves with CheckpointManager, for ``resume-check`` to kill; it can be told to resume wrongly.

``python -m tests.distributed.toy_trainer --dir D --steps N``, alone or under torchrun.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from mcore_rlhf.engines.plain import TorchEngine
from mcore_rlhf.manager.rlhf.controls import AdaptiveKL
from mcore_rlhf.manager.rlhf.sampler import PromptSampler
from mcore_rlhf.manager.rlhf.state import RlhfState
from mcore_rlhf.manager.run.manager import CheckpointManager, ManagerOptions
from mcore_rlhf.manager.run.policies import EverySteps

FAULTS = (
    "none", "unseeded", "forgets-rng", "moves-cursor", "drops-kl", "ignores-checkpoint", "forgets-optimizer", "fails-on-resume",
    "skips-step", "forgets-on-load", "saves-nothing-again",
)  # fmt: skip
WIDTH = 16


class Run:
    """Model, optimizer, data and state of a run."""

    def __init__(self, noise: float = 0.0) -> None:
        self.noise = noise  # what kernels do that add in another order at every run
        torch.manual_seed(7)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, WIDTH), torch.nn.Dropout(0.3), torch.nn.Linear(WIDTH, 1)
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.sampler = PromptSampler(24, seed=3, batch_size=4)
        self.state = RlhfState(kl={"actor": AdaptiveKL(0.1, 0.5, 10)})
        rank = dist.get_rank() if dist.is_initialized() else 0
        torch.manual_seed(100 + rank)
        random.seed(rank)
        np.random.seed(rank)  # not used, and yet saved: unseeded, it would differ from run to run

    def step(self) -> dict[str, object]:
        """Train a step."""
        prompts = self.sampler.next_batch()
        inputs = torch.stack([torch.sin(torch.arange(WIDTH) * (prompt.prompt_id + 1.0)) for prompt in prompts])
        kl_coef = self.state.kl["actor"].value
        loss = (self.model(inputs).square().mean() - random.random()) ** 2 + kl_coef * self.model[
            0
        ].weight.square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        for parameter in self.model.parameters():
            if dist.is_initialized():
                dist.all_reduce(parameter.grad)
            if self.noise and parameter.grad is not None:
                off = [random.SystemRandom().uniform(-self.noise, self.noise) for _ in range(parameter.numel())]
                parameter.grad *= 1 + torch.tensor(off).view_as(parameter)
        self.optimizer.step()
        self.sampler.acknowledge_all(prompts)
        mean = loss.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(mean)  # the RLHF state is one for all ranks
        self.state.kl["actor"].update(float(mean), 4)
        self.state.iteration += 1
        ids = [prompt.prompt_id for prompt in prompts]
        loss_said, kl_said = float(mean), kl_coef
        return {
            "step": self.state.iteration,
            "loss": loss_said if self.noise else loss_said.hex(),
            "kl_coef": kl_said if self.noise else kl_said.hex(),
            "prompts": ids,
        }


def resume(manager: CheckpointManager, run: Run, fault: str) -> None:
    """Resume, well or badly."""
    if fault == "ignores-checkpoint" or manager.load("auto") is None:
        return
    if fault == "fails-on-resume":
        raise SystemExit("cannot read my own checkpoint")
    if fault == "forgets-rng":
        torch.manual_seed(1)
    if fault == "moves-cursor":
        run.sampler.acknowledge_all(run.sampler.next_batch())
    if fault == "drops-kl":
        run.state.kl["actor"] = AdaptiveKL(0.1, 0.5, 10)
    if fault in ("forgets-optimizer", "forgets-on-load"):
        run.optimizer.state.clear()
    if fault == "skips-step":
        run.state.iteration += 1


def train(args: argparse.Namespace) -> None:
    """The whole run."""
    run = Run(args.noise)
    if args.fault == "unseeded":
        random.seed()
    options = ManagerOptions(
        save=EverySteps(args.save_interval), asynchronous=False, fsync=False, catch_signals=False,
        on_existing="continue" if args.fault == "ignores-checkpoint" else "refuse",
    )  # fmt: skip
    roles = {"actor": TorchEngine(run.model, run.optimizer)}
    root = args.dir / "toy" / "checkpoints"
    with CheckpointManager(root, roles, data=run.sampler, state=run.state, options=options) as manager:
        resume(manager, run, args.fault)
        if args.again:
            if args.fault != "saves-nothing-again":
                manager.save(run.state.iteration)
            return
        while run.state.iteration < args.steps:
            line = run.step()
            if args.metrics is not None and (is_first() or args.each_rank):
                rank = dist.get_rank() if dist.is_initialized() else 0
                path = args.metrics.with_name(f"{args.metrics.name}.{rank}") if rank else args.metrics
                with path.open("a") as file:
                    file.write(json.dumps({**line, "seconds": random.SystemRandom().random()}) + "\n")
            manager.maybe_save(run.state.iteration)
            time.sleep(0.02)


def is_first() -> bool:
    """Whether this is rank 0."""
    return not dist.is_initialized() or dist.get_rank() == 0


def main(arguments: Sequence[str]) -> None:
    """Read the command line, and train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, default=os.environ.get("MCORE_RLHF_CHECK_DIR"))
    parser.add_argument("--steps", type=int, default=os.environ.get("MCORE_RLHF_CHECK_STEPS"))
    parser.add_argument("--metrics", type=Path)
    parser.add_argument("--save-interval", type=int, default=1)
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument("--again", type=int, default=0)
    parser.add_argument("--each-rank", action="store_true")
    parser.add_argument("--fault", choices=FAULTS, default="none")
    args = parser.parse_args(arguments)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    try:
        train(args)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
