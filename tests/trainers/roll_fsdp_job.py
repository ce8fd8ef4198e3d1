"""One rank of a ROLL run on FSDP2: trains, saves and loads by ROLL's own ``FSDP2TrainStrategy``, as a list of orders says.

``python -m tests.trainers.roll_fsdp_job ORDERS RANK``, with ROLL 8eb27cc2 and its mcore_adapter on the path. ``save_checkpoint`` and
``load_checkpoint`` run as they are; model, optimizer and schedule are made as its ``initialize`` makes them. Ray, workers, data and
rollouts of ROLL are empty modules, as in :mod:`.roll_job`.
"""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from transformers import GenerationMixin, get_scheduler  # noqa: F401  # before empty modules stand where it looks for others

from tests.trainers.absent import stand_in
from tests.trainers.lessons import BETAS, DECAY, RATE, WARM, WHOLE, Step, begin, loss_of, model_of, seen_of

stand_in("ray", "codetiming", "tensordict", "PIL", "torch.utils.tensorboard", "modelscope", "datasets")
stand_in(
    "roll.datasets", "roll.models", "roll.third_party", "roll.platforms", "roll.distributed.executor", "roll.distributed.scheduler",
    "roll.distributed.strategy.strategy",
    *(f"roll.utils.{name}" for name in (
        "logging", "collective", "context_managers", "functionals", "offload_states", "context_parallel", "fsdp_utils",
    )),
    instead=True,
)  # fmt: skip


def imported() -> Any:
    """Its strategy of training."""
    timed: Any = import_module("codetiming")
    timed.Timer = type("Timer", (), {
        "__init__": lambda self, *given, **named: None, "__enter__": lambda self: self, "__exit__": lambda self, *given: None, "last": 0.0,
    })  # fmt: skip
    say = SimpleNamespace(info=print, warning=print, error=print)
    import_module("roll.utils.logging").get_logger = lambda: say  # type: ignore[attr-defined]
    platform = SimpleNamespace(device_type="cpu", get_rng_state=torch.get_rng_state, set_rng_state=torch.set_rng_state)
    import_module("roll.platforms").current_platform = platform  # type: ignore[attr-defined]
    return import_module("roll.distributed.strategy.fsdp2_strategy").FSDP2TrainStrategy


class Run:
    """An actor of ROLL's on FSDP2."""

    def __init__(self, orders: dict[str, Any]) -> None:
        from torch.distributed.fsdp import fully_shard

        strategy = imported()
        torch.manual_seed(orders["seed"])
        model: Any = model_of(orders)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=BETAS, weight_decay=DECAY)
        self.scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=WARM, num_training_steps=WHOLE)
        self.its: Any = object.__new__(strategy)
        vars(self.its).update(
            model=model, optimizer=optimizer, scheduler=self.scheduler, async_save_strategy=False, checkpoint_future=None,
            save_only_model=False, cpu_offload_enabled=False, load_states=lambda: None, unwrap_model=lambda: model, processor=None,
            tokenizer=SimpleNamespace(save_pretrained=lambda folder: None), _dcp_process_group=None, checkpoint_manager=SimpleNamespace(
                upload=lambda **given: None
            ),
            worker_config=SimpleNamespace(
                checkpoint_config={"async_upload": False}, training_args=SimpleNamespace(max_steps=100)
            ),
        )  # fmt: skip

    def step(self, number: int) -> Step:
        loss = loss_of(self.its.model, number)
        loss.backward()
        self.its.optimizer.step()
        self.its.optimizer.zero_grad()
        rates = [group["lr"] for group in self.its.optimizer.param_groups]
        self.scheduler.step()
        return seen_of(loss.detach(), rates)

    def save(self, path: str, at: int) -> None:
        self.its.save_checkpoint(path, at - 1, f"checkpoint-{at - 1}")
        dist.barrier()

    def load(self, path: str) -> None:
        self.its.load_checkpoint(path)


if __name__ == "__main__":
    begin(Run)
