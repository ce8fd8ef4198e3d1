"""One rank of an RLinf run: its ``FSDP2Strategy`` wraps, saves and loads, as a list of orders says.

Of RLinf nothing is stubbed but the platform that its worker asks for an accelerator, which there is not. Nothing it imports
is missing once ``needs.txt`` is installed. The optimizer has its state before the first load, as its
``FSDPModelManager`` makes sure (``rlinf/hybrid_engines/fsdp/fsdp_model_manager.py``: ``build_optimizer``, ``fake_optimizer_step``).
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from tests.trainers.lessons import BETAS, DECAY, LEAST, RATE, WARM, WHOLE, Learner, begin, model_of


class Run(Learner):
    """An actor under RLinf's strategy."""

    def __init__(self, orders: dict[str, Any]) -> None:
        from omegaconf import OmegaConf
        from rlinf.hybrid_engines.fsdp.strategy.fsdp2 import FSDP2Strategy
        from rlinf.hybrid_engines.fsdp.utils import get_lr_scheduler
        from rlinf.scheduler import Worker
        from torch.distributed.device_mesh import init_device_mesh

        Worker.torch_platform = SimpleNamespace(
            is_available=lambda: False, synchronize=lambda: None, empty_cache=lambda: None, ipc_collect=lambda: None
        )
        Worker.torch_device_type = "cpu"
        world = dist.get_world_size()
        precision = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")
        layers = {"transformer_layer_cls_to_wrap": [orders["model"].capitalize() + "DecoderLayer"]}
        fsdp = {
            "strategy": "fsdp2", "mixed_precision": precision, "cpu_offload": False, "offload_pin_memory": False,
            "reshard_after_forward": True, "wrap_policy": layers, "use_orig_params": False,
        }  # fmt: skip
        config = OmegaConf.create({"fsdp_config": fsdp, "model": {"is_lora": False, "model_type": "qwen2.5"}})
        self.strategy = FSDP2Strategy
        self.form = orders.get("form", "dcp")
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
        self.model = FSDP2Strategy(cfg=config, world_size=world).wrap_model(model_of(orders), mesh)
        group = {"params": list(self.model.parameters()), "lr": RATE, "betas": BETAS}
        self.optimizer = torch.optim.AdamW([group], eps=1e-8, weight_decay=DECAY)
        _fake_step(self.model, self.optimizer)
        self.schedule = get_lr_scheduler(
            "cosine", self.optimizer, num_warmup_steps=WARM, num_training_steps=WHOLE, num_cycles=0.5,
            min_lr_rate=LEAST,
        )  # fmt: skip

    def save(self, path: str, at: int) -> None:
        self.strategy.save_checkpoint(
            self.model, self.optimizer, self.schedule, str(self._actor(path, at)), checkpoint_format=self.form
        )

    def load(self, path: str) -> None:
        self.strategy.load_checkpoint(
            self.model, self.optimizer, self.schedule, str(self._actor(path, 3)), checkpoint_format=self.form
        )

    def _actor(self, path: str, at: int) -> Path:
        return Path(path, f"global_step_{at}", "actor")


def _fake_step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """As RLinf's ``fake_optimizer_step``: every state is there, and nothing has moved."""
    kept = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = group["weight_decay"] = 0.0
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, (rate, decay) in zip(optimizer.param_groups, kept, strict=True):
        group["lr"], group["weight_decay"] = rate, decay
    for state in optimizer.state.values():
        state["step"].zero_()


if __name__ == "__main__":
    begin(Run)
