"""One rank of FSDP or DeepSpeed on a GPU: ``torchrun … -m tests.gpu.sharded_job KIND FOLDER``, what it saw as JSON.

Kinds: ``fsdp2``, ``zero-2``, ``zero-3`` and ``zero-3 on the CPU`` (its optimizer). A run saves behind its passes, goes on at
once, and is gone on with by another one, in whose model nothing is as it was. Dropout draws from the GPU's generator.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from mcore_rlhf import CheckpointManager, FsdpEngine, ManagerOptions

WIDTH, SAVED, END = 1024, 2, 5


def module(seed: int) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.LayerNorm(WIDTH), torch.nn.Dropout(0.2), torch.nn.Linear(WIDTH, WIDTH)]  # fmt: skip
    return torch.nn.Sequential(*layers).cuda()


class Sharded:
    """A model under FSDP."""

    def __init__(self, kind: str, seed: int) -> None:
        del kind
        made: Any = module(seed)
        for layer in (made[0], made[3], made):
            fully_shard(layer)
        self.model = made
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.engine: Any = FsdpEngine(self.model, self.optimizer)

    def step(self, batch: torch.Tensor) -> float:
        loss = self.model(batch).pow(2).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


class Zero:
    """A model under DeepSpeed."""

    def __init__(self, kind: str, seed: int) -> None:
        import deepspeed

        from mcore_rlhf import DeepSpeedEngine

        zero: dict[str, Any] = {"stage": int(kind[5])}
        if "CPU" in kind:
            zero |= {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
        config = {
            "train_batch_size": 8, "bf16": {"enabled": True}, "zero_optimization": zero, "gradient_clipping": 1.0,
            "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, "steps_per_print": 10**9,
        }  # fmt: skip
        made = module(seed)
        optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
        self.model, *_ = deepspeed.initialize(model=made, optimizer=optimizer, config=config)
        self.optimizer = self.model.optimizer.optimizer
        self.engine: Any = DeepSpeedEngine(self.model)

    def step(self, batch: torch.Tensor) -> float:
        loss = self.model(batch.bfloat16()).float().pow(2).mean()
        self.model.backward(loss)
        self.model.step()
        return float(loss.item())


def trained(run: Any, first: int, last: int) -> list[float]:
    return [run.step(torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(n)).cuda()) for n in range(first, last)]  # fmt: skip


def digest(run: Any) -> str:
    """Of all that the optimizer trains and keeps."""
    found = hashlib.sha256()
    for tensor in _tensors(run.optimizer):
        local = getattr(tensor, "_local_tensor", tensor).detach().cpu().contiguous()
        found.update(local.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for param, values in optimizer.state.items():  # some wrappers empty the groups between steps
        yield param
        yield from (value for _, value in sorted(values.items()) if isinstance(value, torch.Tensor))


def main(kind: str, folder: Path) -> dict[str, Any]:
    make = Zero if kind.startswith("zero") else Sharded
    options, root = ManagerOptions(lazy_snapshot=True, catch_signals=False), folder / "run"
    first = make(kind, 1)
    trained(first, 0, SAVED)
    torch.cuda._sleep(100_000_000)  # what is queued before the copy
    with CheckpointManager(root, {"actor": first.engine}, options=options) as manager:
        manager.save(SAVED)
        went_on = trained(first, SAVED, END)
        manager.wait()
    second = make(kind, 9)
    trained(second, 7, 8)
    before = digest(second)
    with CheckpointManager(root, {"actor": second.engine}, options=options) as manager:
        found = manager.load("auto", must_exist=True)
        assert found is not None
        assert digest(second) != before
        resumed = trained(second, SAVED, END)
    return {"went on": went_on, "resumed": resumed, "states": [digest(first), digest(second)], "moved": _places(second)}


def _places(run: Any) -> list[str]:
    return sorted({tensor.device.type for tensor in _tensors(run.optimizer) if tensor.numel() > 1})


if __name__ == "__main__":
    torch.cuda.set_device(0)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("nccl")
    seen = main(sys.argv[1], Path(sys.argv[2]))
    (Path(sys.argv[2]) / f"{sys.argv[1]}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()
