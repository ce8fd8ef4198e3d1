"""In place of training: Megatron-LM's own ``load_checkpoint`` takes a frozen model's file that two steps of the manager share."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from megatron.training import checkpointing, get_args

from mcore_rlhf import CheckpointManager, ManagerOptions
from mcore_rlhf.engines.megatron import MegatronEngine
from tests.reference.pretrain_mock import main

OUT = Path(os.environ["SCRIPT_OUT"])


def save_and_load(forward: Any, model: Any, *rest: Any, **more: Any) -> tuple[int, int]:
    """Stands where Megatron's ``train`` is called."""
    args, root = get_args(), OUT.with_suffix(".run")
    engine = MegatronEngine(model, args=get_args)
    with CheckpointManager(
        root, {"ref": engine}, options=ManagerOptions(link_unchanged=True, catch_signals=False)
    ) as manager:
        for step in (1, 2):
            args.iteration, args.consumed_train_samples = step, 4 * step
            manager.save(step)
    files = [next(root.glob(f"global_step_{step}/ref/*/*/model_optim_rng.pt")) for step in (1, 2)]
    weights = [param.detach().clone() for param in model[0].parameters()]
    with torch.no_grad():
        for param in model[0].parameters():
            param.fill_(0.25)
    args.load, args.no_load_optim = str(root / "global_step_2/ref"), True  # it has none
    args.consumed_train_samples, checkpointing._CHECKPOINT_VERSION = 0, None  # as in a new process
    torch.manual_seed(77)
    drawn = torch.get_rng_state()
    iteration, _ = checkpointing.load_checkpoint(model, None, None)
    same = all(torch.equal(one, other) for one, other in zip(weights, model[0].parameters(), strict=True))
    restored = not torch.equal(drawn, torch.get_rng_state())
    OUT.write_text(json.dumps([files[0].samefile(files[1]), iteration, same, restored]))
    os._exit(0)


if __name__ == "__main__":
    main(save_and_load)
