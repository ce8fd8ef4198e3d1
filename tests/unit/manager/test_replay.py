"""Replay buffers of other trainers, through a step of ours."""

from __future__ import annotations

from collections import UserDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mcore_rlhf import Buffer, CheckpointManager, ManagerOptions, RlhfState
from mcore_rlhf.errors import CheckpointError, UsageError
from mcore_rlhf.manager.rlhf.replay import buffer_of, state_of


class Batched(UserDict):  # type: ignore[type-arg]
    """As NeMo-RL's BatchedDataDict."""


def state() -> dict[str, Any]:
    batch = Batched(
        {
            "tokens": torch.arange(6).reshape(2, 3),
            "log": [[{"role": "user", "ids": torch.ones(2, dtype=torch.bfloat16)}]],
            "idx": [4, 4],
        }
    )
    return {
        "trajectories": [{"batch": batch, "metrics": {"mean": float("inf"), 3: None}, "pair": (1, "x")}],
        "versions": [3], "max_size": 8, "array": np.arange(3, dtype=np.int16),
    }  # fmt: skip


def test_it_comes_back_out_of_a_step(tmp_path: Path) -> None:
    options = ManagerOptions(asynchronous=False, fsync=False, catch_signals=False)
    live = RlhfState(buffers={"replay": buffer_of(state())})
    with CheckpointManager(tmp_path, torch.nn.Linear(2, 2), state=live, options=options) as manager:
        manager.save(1)
    again = RlhfState()
    with CheckpointManager(tmp_path, torch.nn.Linear(2, 2), state=again, options=options) as manager:
        manager.load(1)
    found, expected = state_of(again.buffers["replay"], {"Batched": Batched}), state()
    (one,), (wanted,) = found.pop("trajectories"), expected.pop("trajectories")
    assert isinstance(one["batch"], Batched)
    assert torch.equal(one["batch"]["tokens"], wanted["batch"]["tokens"])
    assert torch.equal(one["batch"]["log"][0][0]["ids"], wanted["batch"]["log"][0][0]["ids"])
    assert (one["metrics"], one["pair"], one["batch"]["idx"]) == (wanted["metrics"], (1, "x"), [4, 4])
    assert found.pop("array").tolist() == expected.pop("array").tolist()
    assert found == expected
    assert type(state_of(again.buffers["replay"])["trajectories"][0]["batch"]) is dict


def test_what_cannot_be_loaded_safely_is_named() -> None:
    with pytest.raises(UsageError, match=r"(?s)buffer\['a'\]\[1\] is a PosixPath.*buffer\['b'\] is an array of object"):
        buffer_of({"a": [1, Path("x")], "b": np.array([None])}, "buffer")


@pytest.mark.parametrize(
    "tree",
    [
        {}, {"tensor": "x"}, {"tensor": []}, {"mapping": 3, "class": ""}, {"mapping": [[1]], "class": ""},
        {"mapping": [[[], 1]], "class": ""}, {"mapping": [7], "class": ""}, {"mapping": [[{"tuple": [[]]}, 1]], "class": ""},
        {"tuple": 3}, {"more": 1}, [{"array": "000001"}],
    ],
)  # fmt: skip
def test_a_forged_one_is_refused(tree: Any) -> None:
    with pytest.raises(CheckpointError, match="replay buffer"):
        state_of(Buffer({"000000": torch.ones(1)}, {"tree": tree}))
    with pytest.raises(CheckpointError, match="replay buffer"):
        state_of(Buffer({}, {}))
