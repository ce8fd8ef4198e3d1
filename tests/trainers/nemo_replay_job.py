"""NeMo-RL's own ReplayBuffer, whose state goes through a step of ours into another one; prints what both hand out.

The class is theirs, and so is ``BatchedDataDict``. What their packages import besides, and the buffer does not use (vLLM, Megatron,
workers), are empty modules here.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import torch

from mcore_rlhf import CheckpointManager, ManagerOptions, RlhfState
from mcore_rlhf.manager.rlhf.replay import buffer_of, state_of

_EMPTY = (
    "vllm",
    "uvicorn",
    "fastapi",
    "zmq",
    "pynvml",
    "megatron",
    "transfer_queue",
    "nemo_rl.models",
    "nemo_rl.environments",
)
_WITHOUT_INIT = ("nemo_rl.algorithms", "nemo_rl.algorithms.async_utils", "nemo_rl.experience")


class Empty(types.ModuleType):
    """A module of which any name is a class without anything."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds those modules."""

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        is_one = any(f"{name}.".startswith(f"{one}.") for one in _EMPTY)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_one else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def without_init() -> None:
    """Their packages without what stands in their ``__init__``."""
    found = importlib.util.find_spec("nemo_rl")
    assert found is not None
    assert found.submodule_search_locations is not None
    base = Path(next(iter(found.submodule_search_locations)))
    for name in _WITHOUT_INIT:
        package = types.ModuleType(name)
        package.__path__ = [str(base.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package


def imported() -> tuple[Any, Any]:
    without_init()
    sys.meta_path.insert(0, Absent())
    from nemo_rl.algorithms.async_utils.replay_buffer import ReplayBufferImpl
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    return ReplayBufferImpl, BatchedDataDict


def filled(buffer: Any, batched: Any) -> Any:
    for number in range(4):
        ids = torch.arange(3) + number
        batch = batched(
            {
                "message_log": [[{"role": "user", "token_ids": ids}]] * 2,
                "total_reward": torch.ones(2) * number,
                "idx": [number] * 2,
            }
        )
        group = {"batch": batch, "rollout_metrics": {"mean_gen_tokens": 3.0}, "timestamp": 1.5 + number}
        assert buffer.add(group, weight_version=number // 2, target_weight_version=2 + number // 2) == "success"
    return buffer


def seen(buffer: Any, batched: Any) -> list[object]:
    sampled = buffer.sample(num_prompt_groups=2, current_weight_version=2, max_age_steps=3)
    whole = batched.from_batches([one["batch"] for one in sampled["trajectories"]])
    log = [message["token_ids"].tolist() for sample in whole["message_log"] for message in sample]
    return [whole["total_reward"].tolist(), whole["idx"], log, sampled["avg_trajectory_age"], buffer.size()]


def main(root: Path) -> None:
    made, batched = imported()
    theirs = filled(made(8, False), batched)
    options = ManagerOptions(asynchronous=False, fsync=False, catch_signals=False)
    state = RlhfState(buffers={"replay": buffer_of(theirs.state_dict())})
    with CheckpointManager(root, torch.nn.Linear(2, 2), state=state, options=options) as manager:
        manager.save(1)
    again, ours = RlhfState(), made(8, False)
    with CheckpointManager(root, torch.nn.Linear(2, 2), state=again, options=options) as manager:
        manager.load(1)
    ours.load_state_dict(state_of(again.buffers["replay"], {"BatchedDataDict": batched}), 2, 2, 3)
    print(json.dumps([seen(theirs, batched), seen(ours, batched)]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
