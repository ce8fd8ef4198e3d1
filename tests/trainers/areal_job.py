"""One rank of an AReaL run: its ``FSDPEngine`` makes, trains, saves and loads, and its ``Saver`` and ``RecoverHandler`` keep the run.

``python -m tests.trainers.areal_job ORDERS RANK``, with AReaL 1.0.4 on the path. A path of the orders is the run's root,
``FILEROOT/checkpoints/USER/EXPERIMENT/TRIAL``. The engine, its optimizer, schedule and checkpoints, the loader of ``create_dataloader``,
saver, evaluator and handler are AReaL's own, on its own CPU platform. Not its own are the losses (those of ``lessons``, as its batches
want flash-attn), the norm of gradients (a kernel of a GPU; nothing is clipped), tokenizers, of which the models have none, and, at
the top of modules, what generates and serves: openai, httpx, numba, uvloop, tenacity, aiofiles, colorlog, lark, wandb and the like.
"""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.trainers.absent import stand_in
from tests.trainers.lessons import (
    BATCH,
    BETAS,
    DECAY,
    LEAST,
    RATE,
    VOCABULARY,
    WARM,
    WHOLE,
    WIDTH,
    Step,
    begin,
    loss_of,
    model_of,
    seen_of,
)

ITEMS, EPOCHS = 60, 2
_SERVES = (
    "httpx", "colorlog", "tenacity", "lark", "uvloop", "numba", "aiofiles", "openai", "wandb", "swanlab", "trackio",
    "tensorboardX", "fastapi", "uvicorn", "zmq", "pybase64", "setproctitle",
)  # fmt: skip
_NEITHER = (
    "areal.experimental.openai", "areal.experimental.engine.archon_engine", "areal.experimental.training_service", "areal.utils.printing",
)  # fmt: skip
"""Of AReaL itself: agents, other engines than the one that runs, and tables in logs."""


def imported() -> None:
    """Empty modules in the place of what is not its own."""
    stand_in(*_NEITHER, instead=True)
    stand_in(*_SERVES)
    logging.raiseExceptions = False  # its formatter is one of colorlog's
    from areal.engine import fsdp_engine

    fsdp_engine.load_hf_tokenizer = lambda path: None
    fsdp_engine.fsdp2_clip_grad_norm = lambda params, **how: 0.0


def _value_loss(model: Any, number: int) -> torch.Tensor:
    """Something for a critic to learn, of which each rank has the same."""
    words = torch.arange(BATCH * WIDTH).reshape(BATCH, WIDTH).mul(7 + number).remainder(VOCABULARY)
    found: torch.Tensor = (model(input_ids=words).logits.float() - 1).pow(2).mean()
    return found


class Run:
    """Actor and, where the orders say so, critic of a run."""

    def __init__(self, orders: dict[str, Any]) -> None:
        imported()
        from areal.api import FinetuneSpec
        from areal.api.cli_args import TrainDatasetConfig
        from areal.utils.dataloader import create_dataloader

        self.orders = orders
        self.spec = FinetuneSpec(EPOCHS, ITEMS, BATCH)
        self.engines = {name: self._engine(name) for name in ("default", *orders.get("more", ()))}
        config = TrainDatasetConfig(path="", type="", batch_size=BATCH, num_workers=orders.get("workers", 0))
        self.loader = create_dataloader(list(range(ITEMS)), dist.get_rank(), dist.get_world_size(), config)
        self.batches: Any = None

    def _engine(self, name: str) -> Any:
        from areal.api.alloc_mode import ParallelStrategy
        from areal.api.cli_args import OptimizerConfig, TrainEngineConfig
        from areal.engine.fsdp_engine import FSDPEngine

        shared: list[Any] = [tempfile.mkdtemp()]
        dist.broadcast_object_list(shared)
        (folder,) = shared
        model_of(self.orders).save_pretrained(folder)  # by the first rank
        dist.barrier()
        optimizer = OptimizerConfig(
            lr=RATE, weight_decay=DECAY, beta1=BETAS[0], beta2=BETAS[1], lr_scheduler_type=self.orders.get("schedule", "cosine"),
            min_lr_ratio=LEAST, warmup_steps_proportion=WARM / WHOLE, gradient_clipping=1.0,
        )  # fmt: skip
        engine = FSDPEngine(
            TrainEngineConfig(
                path=folder, experiment_name="", trial_name="", backend="", dtype="float32", attn_impl="eager", optimizer=optimizer,
                is_critic=name == "critic", gradient_checkpointing=False,
            )
        )  # fmt: skip
        os.environ.setdefault("LOCAL_RANK", "0")
        engine.create_process_group(ParallelStrategy(data_parallel_size=dist.get_world_size()))
        torch.manual_seed(self.orders["seed"])  # a critic's head is new
        engine.initialize(None, self.spec)
        return engine

    def step(self, number: int) -> Step:
        """Of each engine an update, of the actor what was seen."""
        if self.batches is None:
            self.batches = iter(self.loader)
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, next(self.batches))
        actor = self.engines["default"]
        used = [group["lr"] for group in actor.optimizer.param_groups]
        for name, engine in self.engines.items():
            loss = _value_loss(engine.model, number) if name == "critic" else loss_of(engine.model, number)
            loss.backward()
            engine.optimizer_step()
            engine.lr_scheduler_step()
            engine.optimizer_zero_grad()
            if name == "default":
                seen = seen_of(loss, used)
        return {**seen, "data": sorted(item for part in parts for item in part)}

    def _keepers(self, path: str) -> tuple[Any, dict[str, Any]]:
        from areal.api.cli_args import EvaluatorConfig, RecoverConfig, SaverConfig
        from areal.utils.evaluator import Evaluator
        from areal.utils.recover import RecoverHandler
        from areal.utils.saver import Saver
        from areal.utils.stats_logger import StatsLogger

        root = Path(path)
        os.environ["LOGNAME"] = root.parents[1].name
        named = {"experiment_name": root.parent.name, "trial_name": root.name, "fileroot": str(root.parents[3])}
        stats = StatsLogger.__new__(StatsLogger)
        stats._last_commit_step = 0
        handler = RecoverHandler(
            RecoverConfig(**named, freq_steps=1, mode="auto", **self.orders.get("recover", {})), self.spec
        )
        keepers = {
            "saver": Saver(SaverConfig(**named, freq_steps=1), self.spec),
            "evaluator": Evaluator(EvaluatorConfig(**named), self.spec),
            "stats_logger": stats,
            "dataloader": self.loader,
        }
        return handler, keepers

    def save(self, path: str, at: int) -> None:
        """As ``areal/trainer/rl_trainer.py`` does after the step (``_save_hf``, ``_save_recover_checkpoint``)."""
        from areal.api import StepInfo

        handler, keepers = self._keepers(path)
        info = StepInfo(
            epoch=(at - 1) // len(self.loader),
            epoch_step=(at - 1) % len(self.loader),
            global_step=at - 1,
            steps_per_epoch=len(self.loader),
        )
        for name, engine in self.engines.items():
            keepers["saver"].save(engine, info.epoch, info.epoch_step, info.global_step, name=name)
        handler.dump(self.engines, info, **keepers)

    def load(self, path: str) -> None:
        handler, keepers = self._keepers(path)
        found = handler.load(self.engines, **keepers)
        assert found is not None, "no recover info"
        assert found.last_step_info.next().global_step == self.orders["step"], found.last_step_info


if __name__ == "__main__":
    begin(Run)
