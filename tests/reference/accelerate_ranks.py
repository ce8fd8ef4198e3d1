"""Two ranks of accelerate whose ``save_state`` is committed, under DDP or FSDP2; ``torchrun … -m tests.reference.accelerate_ranks``.

Each rank leaves as JSON what it saw of a run, of one that went on from its checkpoint, and of a save that failed on rank 1 alone.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from mcore_rlhf.integrations.accelerate_state import TagOptions, attach


def new(how: str, seed: int) -> tuple[Any, Any, Any]:
    """An accelerator, a model and its optimizer."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False) if how == "fsdp2" else None
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    if plugin is not None:  # accelerate takes one on accelerators alone: ``state.py``, ``AcceleratorState.__init__``
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
        assert accelerator.is_fsdp2
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    attach(accelerator, TagOptions(fsync=False, timeout=60.0))
    return accelerator, model, optimizer


def train(accelerator: Any, model: Any, optimizer: Any, steps: range) -> list[float]:
    """The losses of some steps, each of its own data."""
    losses = []
    for step in steps:
        torch.manual_seed(100 * step + accelerator.process_index)
        loss = model(torch.randn(4, 6)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(how: str, folder: Path) -> dict[str, Any]:
    """All of it."""
    accelerator, model, optimizer = new(how, 1)
    train(accelerator, model, optimizer, range(2))
    accelerator.save_state(folder / "runs" / "a")
    found: dict[str, Any] = {"whole": train(accelerator, model, optimizer, range(2, 4))}
    hook: Any = None

    def failing(models: Any, weights: Any, output_dir: str) -> None:
        if accelerator.process_index == 1:
            raise OSError(5, "Input/output error")

    accelerator.save_state(folder / "runs" / "b")
    hook = accelerator.register_save_state_pre_hook(failing)
    try:
        accelerator.save_state(folder / "runs" / "a")
    except Exception as error:
        found["failed"] = f"{type(error).__name__}: {error}"
    hook.remove()
    accelerator.wait_for_everyone()
    found["there"] = sorted(os.listdir(folder / "runs"))
    accelerator.load_state(folder / "runs" / "a")
    found["again"] = train(accelerator, model, optimizer, range(2, 4))
    other = new(how, 9)
    other[0].load_state(folder / "runs" / "a")
    found["resumed"] = train(*other, range(2, 4))
    accelerator.wait_for_everyone()
    return found


if __name__ == "__main__":
    signal.alarm(120)  # a rank that hangs outlives whoever waits for it
    warnings.simplefilter("ignore")
    told = main(sys.argv[1], Path(sys.argv[2]))
    Path(sys.argv[2], f"seen-{os.environ['RANK']}.json").write_text(json.dumps(told))
    os._exit(0)  # gloo's groups wait for one another where ranks end at different moments, with this package or without
