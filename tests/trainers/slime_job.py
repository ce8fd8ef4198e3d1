"""Where slime, or miles, begins after a load: ``python -m tests.trainers.slime_job PACKAGE ROOT ORDERS``.

``RolloutDataSource`` and ``create_training_models`` are the trainer's own and not stubbed: which rollout is the next, and in which file its
prompts are looked for. Actors are not made: ``actor.py`` of both hands on the iteration that Megatron's ``load_checkpoint`` returns, plus
1, and so does what stands here for them. Orders are pairs, as JSON: an iteration, and the settings of a run that has loaded it, or
``save``, which saves the data source as of that rollout.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.trainers.absent import stand_in


class Args(SimpleNamespace):
    """Arguments of a run; what nobody gave is None."""

    def __getattr__(self, name: str) -> None:
        return None


class Group:
    """In the place of the actors of one role, which have loaded an iteration."""

    def __init__(self, iteration: int) -> None:
        self.begin = iteration + 1

    def create(self, **_: object) -> list[int]:
        return [self.begin]

    async def init(self) -> list[int]:
        return [self.begin]

    async def set_rollout_manager(self) -> None:
        pass


def main(package: str, root: str, orders: list[tuple[int, Any]]) -> None:
    """Carry out what is asked; print of each load the next rollout, and the offset of its prompts, as JSON."""
    ray = ModuleType("ray")
    vars(ray).update(__path__=[], get=lambda found: found, remote=lambda **_: lambda made: made)
    sys.modules["ray"] = ray
    stand_in("ray.util", *(f"{package}.{name}" for name in _OWN), instead=True)
    print(json.dumps([_carried_out(package, root, loaded, settings) for loaded, settings in orders]))


_OWN = (
    "ray.actor_group", "ray.utils", "ray.rollout", "utils.data", "utils.misc", "utils.processing_utils", "utils.types", "utils.ray_utils",
    "utils.environ",
)  # fmt: skip
"""Modules of the trainer that make actors, read prompts and tokenize."""


def _carried_out(package: str, root: str, loaded: int, settings: Any) -> dict[str, Any] | None:
    args = Args(load=root, save=root, rollout_global_dataset=True, kl_coef=0)
    prompts = import_module(f"{package}.rollout.data_source").RolloutDataSource(args)
    if settings == "save":
        prompts.sample_offset = 3 * loaded
        prompts.save(loaded)
        return None
    vars(args).update(settings)
    placing: Any = import_module(f"{package}.ray.placement_group")
    placing.allocate_train_group = lambda **_: Group(loaded)
    manager = SimpleNamespace(load=SimpleNamespace(remote=_either(prompts.load, placing.create_training_models)))
    made = placing.create_training_models(args, {"actor": None}, manager)
    if inspect.iscoroutine(made):
        asyncio.run(made)
    return {"begin": args.start_rollout_id, "offset": prompts.sample_offset}


def _either(load: Any, caller: Any) -> Any:
    """What is loaded at once, as who waits for it wants."""

    async def later(number: int) -> None:
        load(number)

    return later if inspect.iscoroutinefunction(caller) else load


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
