"""One rank of a SkyRL run: its ``FSDPStrategy`` wraps, saves and loads, and its trainer's own code what lies beside the models.

``python -m tests.trainers.skyrl_job ORDERS RANK``, with the packages of SkyRL on the path. Of SkyRL nothing that saves or loads is
stubbed: ``FSDPStrategy.save_checkpoint`` and ``load_checkpoint`` run on every rank, as its workers call them
(``backends/skyrl_train/workers/worker.py``), and ``RayPPOTrainer.save_checkpoints`` and ``load_checkpoints``, or those of its fully
asynchronous trainer or its SFT, as its driver does. What is another: Ray's dispatch hands the calls on to the rank itself; the driver's
part runs on rank 0 alone, so that one process writes ``trainer_state.pt``, ``data.pt`` and the tracker; the mesh is of CPUs, and buffers
that no state dict has are sent by gloo, since both name ``cuda``; ``torch.cuda.synchronize`` does nothing; and generation, attention
kernels and monitors, which stand at the top of its modules, are empty (:mod:`.absent`).
"""

from __future__ import annotations

import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import typing_extensions

from tests.trainers.absent import stand_in
from tests.trainers.lessons import BATCH as SHARED
from tests.trainers.lessons import (
    BETAS,
    DECAY,
    RATE,
    VOCABULARY,
    WARM,
    WHOLE,
    WIDTH,
    Learner,
    Step,
    begin,
    loss_of,
    model_of,
    seen_of,
)

typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]  # which pydantic wants before Python 3.12
stand_in("flash_attn", "vllm", "httpx", "wandb", "liger_kernel")
torch.cuda.synchronize = lambda *given: None  # type: ignore[assignment]
torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
ITEMS, BATCH = 72, 6


def _on_cpus() -> None:
    """Let the strategy's helpers, which name ``cuda``, do the same on CPUs."""
    from skyrl.backends.skyrl_train.distributed import fsdp_utils
    from torch.distributed.device_mesh import init_device_mesh

    def sync(model: torch.nn.Module, loaded: dict[str, Any]) -> None:
        for module in model.modules():
            for key in sorted(module._non_persistent_buffers_set):
                if (held := module._buffers.get(key)) is not None:
                    here = held if dist.get_rank() == 0 else torch.empty(held.shape, dtype=held.dtype)
                    dist.broadcast(here, src=0)
                    module._buffers[key] = here

    fsdp_utils.init_device_mesh = lambda device, *given, **named: init_device_mesh("cpu", *given, **named)
    fsdp_utils._sync_non_persistent_buffers = sync


def critic_of(orders: dict[str, Any]) -> torch.nn.Module:
    """SkyRL's own class of a critic, with weights from a seed."""
    from skyrl.backends.skyrl_train.workers.model_wrapper import _get_critic_model
    from transformers import AutoModel

    made: Any = model_of(orders)
    base = AutoModel._model_mapping[type(made.config)]
    critic: torch.nn.Module = _get_critic_model(base.__base__, base)(made.config).float()
    critic.model.load_state_dict(made.model.state_dict())
    return critic


class Model(Learner):
    """A policy, or a critic, under SkyRL's strategy."""

    def __init__(self, orders: dict[str, Any], role: str) -> None:
        from skyrl.backends.skyrl_train.distributed.fsdp_strategy import FSDPStrategy
        from skyrl.train.config import FSDPConfig, MixedPrecisionConfig, ModelConfig, OptimizerConfig

        self.loss = {"policy": loss_of, "critic": _loss_of_values}[role]
        made = {"policy": model_of, "critic": critic_of}[role](orders)
        if lora := orders.get("lora"):
            from peft import LoraConfig, get_peft_model

            made = get_peft_model(made, LoraConfig(task_type="CAUSAL_LM", r=lora, target_modules=["q_proj", "v_proj"]))
        fsdp = FSDPConfig(mixed_precision=MixedPrecisionConfig("fp32", "fp32", "fp32"))
        learning = OptimizerConfig(
            lr=RATE, adam_betas=list(BETAS), weight_decay=DECAY, num_warmup_steps=WARM, scheduler="cosine",
            max_grad_norm=orders.get("clip", 1.0),
        )  # fmt: skip
        described = ModelConfig()
        described.lora.rank = orders.get("lora", 0)
        self.strategy = FSDPStrategy(fsdp, learning, described, num_training_steps=WHOLE)
        self.strategy.setup_distributed()
        self.model, self.optimizer, self.schedule = self.strategy.prepare((made, None, None))

    def step(self, number: int) -> Step:
        loss = self.loss(self.model, number)
        self.strategy.backward(loss, self.model, self.optimizer)
        self.strategy.optimizer_step(self.optimizer, self.model, self.schedule)
        return seen_of(loss, self.schedule.get_last_lr())


def _loss_of_values(model: Any, number: int) -> torch.Tensor:
    """How far a critic's values of this rank's share of a batch are from what its words say."""
    words = torch.randint(0, VOCABULARY, (SHARED, WIDTH), generator=torch.Generator().manual_seed(2000 + number))
    share = words.chunk(dist.get_world_size())[dist.get_rank()]
    model.train()
    values = model(share, num_actions=WIDTH - 1, attention_mask=torch.ones_like(share))
    return torch.nn.functional.mse_loss(values, share[:, 1:] / VOCABULARY)


class Dispatch:
    """What SkyRL's hands on to workers through Ray, handed on to those of this process."""

    def __init__(self, models: dict[str, Model]) -> None:
        self.models = models

    def save_checkpoint(self, model: str, ckpt_dir: str, tokenizer: object = None) -> None:
        one = self.models[model]
        one.strategy.save_checkpoint(
            model=one.model, optimizer=one.optimizer, scheduler=one.schedule, ckpt_dir=ckpt_dir,
            node_local_rank=dist.get_rank(), tokenizer=tokenizer,
        )  # fmt: skip

    def load_checkpoint(
        self, model: str, ckpt_dir: str, load_optimizer_states: bool = True, load_lr_scheduler_states: bool = True
    ) -> None:
        one = self.models[model]
        one.strategy.load_checkpoint(
            model=one.model, optimizer=one.optimizer if load_optimizer_states else None,
            scheduler=one.schedule if load_lr_scheduler_states else None, ckpt_dir=ckpt_dir,
            load_optimizer_states=load_optimizer_states, load_lr_scheduler_states=load_lr_scheduler_states,
        )  # fmt: skip


class Run:
    """A policy, a critic, and the trainer's own code that keeps them, its place in the data and its counters."""

    def __init__(self, orders: dict[str, Any]) -> None:
        from skyrl.train.fully_async_trainer import FullyAsyncRayPPOTrainer
        from skyrl.train.sft_trainer import SFTTrainer
        from skyrl.train.trainer import RayPPOTrainer
        from torchdata.stateful_dataloader import StatefulDataLoader

        _on_cpus()
        self.kind = orders.get("kind", "ppo")
        self.trainer = {"ppo": RayPPOTrainer, "async": FullyAsyncRayPPOTrainer, "sft": SFTTrainer}[self.kind]
        roles = ("policy", "critic") if orders.get("critic") else ("policy",)
        self.models = {role: Model(orders, role) for role in roles}
        order = torch.Generator().manual_seed(orders["seed"])
        items: Any = range(ITEMS)
        self.loader = StatefulDataLoader(items, batch_size=BATCH, shuffle=True, num_workers=0, generator=order)
        self.batches: Any = None
        self.at: int | None = None

    def step(self, number: int) -> Step:
        if self.batches is None:
            self.batches = iter(self.loader)
        seen: Step = {"data": next(self.batches).tolist()}
        for name, one in self.models.items():
            seen |= {key if name == "policy" else f"{name} {key}": value for key, value in one.step(number).items()}
        return seen | ({} if self.at is None else {"at": self.at})

    def save(self, path: str, at: int) -> None:
        """Save a step, whose folder is named, into the run in whose root it lies."""
        driver = self._driver(Path(path).parent, at)
        if dist.get_rank() == 0:
            (self.trainer.save_checkpoint if self.kind == "sft" else self.trainer.save_checkpoints)(driver)
        else:
            for name in self.models:
                driver.dispatch.save_checkpoint(name, f"{path}/{name}")
        dist.barrier()

    def load(self, path: str) -> None:
        """Go on as a run in whose root a step lies does, by its tracker; where a step is named that is none, from that."""
        driver = self._driver(Path(path).parent, 0)
        found = (self.trainer.load_checkpoint if self.kind == "sft" else self.trainer.load_checkpoints)(driver)
        self.at, self.batches = found if self.kind == "sft" else found[0], None
        dist.barrier()

    def _driver(self, root: Path, at: int) -> Any:
        """What the trainer's methods ask of themselves."""
        from skyrl.train.config import SkyRLTrainConfig
        from skyrl.train.config.sft_config import SFTConfig
        from skyrl.train.utils.trainer_utils import ResumeMode

        config = SFTConfig() if self.kind == "sft" else SkyRLTrainConfig()
        own: Any = config if self.kind == "sft" else config.trainer
        own.ckpt_path, own.ckpt_interval = str(root), 1
        uids = SimpleNamespace(get_consumed_uids_list=lambda: ["a", "b"], get_filtered_uids_list=lambda: ["b"])
        driver = self.trainer.__new__(self.trainer)
        own = {
            "cfg": config, "sft_cfg": config, "global_step": at, "dispatch": Dispatch(self.models), "tokenizer": None,
            "train_dataloader": self.loader, "all_timings": {}, "resume_mode": ResumeMode.LATEST, "epoch": 0,
            "async_train_dataloader": uids, "has_critic": "critic" in self.models, "_cleanup_old_checkpoints": lambda: None,
        }  # fmt: skip
        for name, value in own.items():
            try:
                setattr(driver, name, value)
            except AttributeError:  # a property of what else is set
                setattr(type(driver), name, value)
        if self.kind == "sft":
            config.resume_from = "latest"
        return driver


if __name__ == "__main__":
    begin(Run)
