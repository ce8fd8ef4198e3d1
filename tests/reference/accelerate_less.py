"""One rank of accelerate, under FSDP2 or DeepSpeed, that loads its own step with one thing gone from it; beside, what ``will-resume`` says.

``python -m tests.reference.accelerate_less SHARDED_STATE_DICT|FULL_STATE_DICT|ZERO-2|ZERO-3 FOLDER`` takes each thing in turn, and prints
as JSON how many there were, and of which the two are not of one mind. Each load is into a new run, of which two steps are seen: the first
loss shows the weights, the rate the schedule, what is drawn the random states, the second loss the moments. With ``others`` behind it, and
``NO`` as well, it loads instead what other backends have left in the folder, prints of each what is said and what was seen, and leaves its
own there.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DeepSpeedPlugin, DistributedType, FullyShardedDataParallelPlugin

from mcore_rlhf.manager.will_resume import forecast, loader_named
from mcore_rlhf.trainers.resuming import Outcome, Settings, Thing
from tests.helpers.one_key import copies_without

_OF_SOME = ("decoupled_weight_decay", "_is_initial")
"""What not every release of torch has: whether a run asks for it no file says."""


def _falling(step: int) -> float:
    return 1 / (1 + step)


def _fsdp(kind: str) -> Accelerator:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False, state_dict_type=kind)
    made = Accelerator(cpu=True, fsdp_plugin=plugin)
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP  # see accelerate_ranks
    made.state.distributed_type, made.state.fsdp_plugin = DistributedType.FSDP, plugin
    return made


def _zero(kind: str) -> Accelerator:
    settings = {
        "zero_optimization": {"stage": int(kind[-1])}, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1,
        "train_batch_size": 4, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
    }  # fmt: skip
    AcceleratorState._reset_state(False)
    return Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings))


class Run:
    """A model, its optimizer and schedule, prepared by accelerate."""

    def __init__(self, kind: str, seed: int) -> None:
        alone = Accelerator(cpu=True) if kind == "NO" else None
        self.accelerator: Any = alone or (_zero(kind) if kind.startswith("ZERO") else _fsdp(kind))
        torch.manual_seed(seed)
        made = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        adam = torch.optim.AdamW(made.parameters(), lr=1e-2)
        if kind.startswith(
            "ZERO"
        ):  # the engine is made of all at once, and of a loader, which says how large a batch is
            falling = torch.optim.lr_scheduler.LambdaLR(adam, _falling)
            data: Any = torch.utils.data.DataLoader(list(range(8)), batch_size=4)  # type: ignore[arg-type]
            self.model, self.optimizer, self.schedule, _ = self.accelerator.prepare(made, adam, falling, data)
        else:
            self.model, self.optimizer = self.accelerator.prepare(made, adam)
            falling = torch.optim.lr_scheduler.LambdaLR(self.optimizer.optimizer, _falling)
            self.schedule = self.accelerator.prepare(falling)

    def train(self, first: int) -> list[tuple[float, float]]:
        """Two steps: losses and rates."""
        seen = []
        for number in (first, first + 1):
            torch.manual_seed(number)
            loss = self.model(torch.randn(4, 6)).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            seen.append((loss.item(), self.schedule.get_last_lr()[0]))
        return seen


Went = tuple[float, int, list[tuple[float, float]]]


def loaded(kind: str, folder: Path) -> Went | None:
    """What a new run draws, counts and sees that has loaded a step; None where it stopped with an error."""
    try:
        run = Run(kind, 9)
        torch.manual_seed(99)
        run.accelerator.step = 0
        run.accelerator.load_state(str(folder))
        return torch.rand(1).item(), run.accelerator.step, run.train(10)
    except BaseException:  # torch's CheckpointException is no Exception
        return None


def agrees(kind: str, folder: Path, wanted: Went, *, rated: bool = True) -> bool:
    """Whether what is said of a step is what was seen."""
    found, seen = forecast(folder, loader_named("accelerate")[0], Settings(), 1), loaded(kind, folder)
    if seen is None or found.stops:
        return found.stops == (seen is None)
    told = {one.thing: one.row.outcome for of in found.roles.values() for one in of}
    (drawn, count, steps), (had, counted, went) = seen, wanted
    restored = {
        Thing.RNG: drawn == had, Thing.COUNTERS: count == counted, Thing.WEIGHTS: steps[0][0] == went[0][0],
        Thing.SCHEDULER: [rate for _, rate in steps] == [rate for _, rate in went],
    }  # fmt: skip
    if rated and restored[Thing.WEIGHTS] and restored[Thing.SCHEDULER]:
        restored[Thing.OPTIMIZER] = steps[1][0] == went[1][0]
    same = all((told[thing] is Outcome.RESTORED) == one for thing, one in restored.items())
    return same and (not found.doubtful or kind.startswith("ZERO"))  # a reader of ours needs more than DeepSpeed


_CALLED = {"NO": "NO", "SHARDED_STATE_DICT": "FSDP", "ZERO-2": "DEEPSPEED"}
"""What ``accelerate config`` calls each backend."""


def of_others(kind: str, folder: Path) -> dict[str, list[bool]]:
    """Of steps that other backends saved: whether the configuration is said to stop at each, and whether loading it does."""
    found = {}
    for step in sorted(folder.glob("*/step_2")):
        told = forecast(step, loader_named("accelerate")[0], Settings({"distributed_type": _CALLED[kind]}), 1)
        found[step.parent.name] = [told.stops, loaded(kind, step) is None]
    run = Run(kind, 1)
    run.train(0)
    run.accelerator.save_state(str(folder / kind / "step_2"))
    return found


def main(kind: str, folder: Path, *others: str) -> dict[str, Any]:
    """All of it."""
    if kind.startswith("ZERO"):
        from tests.reference.accelerate_zero import on_the_cpu

        on_the_cpu()
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / f"store-{os.getpid()}"), 1), rank=0, world_size=1)
    if others:
        return of_others(kind, folder)
    run, step = Run(kind, 1), folder / "run" / "step_2"
    run.train(0)
    torch.manual_seed(55)
    run.accelerator.step = 7
    run.accelerator.save_state(str(step))
    wanted = torch.rand(1).item(), 7, run.train(10)
    resumes = forecast(step, loader_named("accelerate")[0], Settings(), 1).resumes and agrees(kind, step, wanted)
    wrong, count = list[str](), 0
    for count, (copy, what) in enumerate(copies_without(step, folder / "copies"), 1):  # noqa: B007
        rated = not what.endswith("param_groups/0/lr")  # the first step is of the run's own rate then
        if not what.endswith(_OF_SOME) and not agrees(kind, copy, wanted, rated=rated):
            wrong.append(what)
        shutil.rmtree(copy.parent)
    return {"whole": resumes, "count": count, "wrong": wrong}


if __name__ == "__main__":
    signal.alarm(240)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])), flush=True)
    os._exit(0)
