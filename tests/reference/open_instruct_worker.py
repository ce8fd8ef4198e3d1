"""One rank of open-instruct's GRPO, as far as it saves and resumes: its calls, with DeepSpeed's own engine.

Source: open-instruct e6c3044, ``open_instruct/grpo_fast.py`` (``save_checkpoint_state``, ``from_pretrained``).
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.reference.deepspeed_models import Setting, build_engine
from tests.reference.deepspeed_resident import begin, train


def save(root: Path, setting: Setting) -> None:
    """Train and save at step 3, with the reference policy."""
    begin()
    engine = build_engine(setting, 1)
    train(engine, 0, 3)
    client: dict[str, Any] = {"training_step": 3, "episode": 24, "num_total_tokens": 1000}
    client |= {"dataloader_state": {"current_epoch": 1}, "data_prep_actor_state": {"last_consumed_step": 2}}
    client["rng_states"] = {
        "torch_cpu_rng_state": torch.get_rng_state(),
        "numpy_rng_state": np.random.get_state(),
        "python_rng_state": random.getstate(),
    }
    client["rank"] = dist.get_rank()
    if client["rank"] == 0:
        (root / "ref_policy").mkdir(parents=True, exist_ok=True)
        torch.save(engine.module.state_dict(), root / "ref_policy" / "pytorch_model.bin")
    client["ref_policy_saved"] = True
    engine.save_checkpoint(str(root), client_state=client)


def resume(root: Path, setting: Setting) -> tuple[int, int]:
    """Load as it does: the step that it goes on behind, and whose random states a rank has."""
    begin()
    engine = build_engine(setting, 2)
    path, states = engine.load_checkpoint(
        str(root),
        load_module_strict=True,
        load_optimizer_states=True,
        load_lr_scheduler_states=True,
        load_module_only=False,
    )
    if path is None:
        raise ValueError(f"Failed to load checkpoint from {root}")
    done, rng = states["training_step"], states["rng_states"]
    torch.set_rng_state(rng["torch_cpu_rng_state"])
    np.random.set_state(rng["numpy_rng_state"])
    random.setstate(rng["python_rng_state"])
    return done, states["rank"]
