"""One rank of a SkyRL run on Megatron: trains, saves and resumes by SkyRL's own ``MegatronStrategy``, as a list of orders says.

``python -m tests.trainers.skyrl_megatron_job ORDERS RANK``, with the packages of SkyRL and megatron-core 0.16 on the path, of which it asks
for modules that newer releases lack. ``save_checkpoint`` and ``load_checkpoint`` are SkyRL's and not stubbed. Model, DDP, optimizer and
schedule are megatron-core's own, on the stand-ins for a GPU of :mod:`mcore_rlhf.demo`; SkyRL makes them by Megatron-Bridge, which needs a
GPU's toolchain and is an empty module here, as are generation and attention kernels (:mod:`.absent`). A LoRA's adapters are those of
:mod:`tests.reference.bridge_jobs`.
"""

from __future__ import annotations

import typing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from mcore_rlhf.demo.trainer import DemoTrainer

# isort: split
import torch
import torch.distributed as dist
import typing_extensions

from mcore_rlhf.demo import trainer
from mcore_rlhf.demo.configs import Parallel, Training
from tests.reference import bridge_jobs
from tests.reference.dist_jobs import write_in_this_process
from tests.trainers.absent import stand_in
from tests.trainers.lessons import Step, begin
from tests.trainers.verl_megatron_job import by_steps, model_of

typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]  # which pydantic wants before Python 3.12
stand_in("flash_attn", "vllm", "httpx", "wandb", "liger_kernel", "megatron.bridge", "transformer_engine")


class Run:
    """A policy of SkyRL's on Megatron."""

    def __init__(self, orders: dict[str, Any]) -> None:
        from skyrl.backends.skyrl_train.distributed.megatron.megatron_strategy import MegatronStrategy
        from skyrl.train.config import MegatronConfig
        from transformers import LlamaConfig

        training = Training(seed=orders["seed"])
        if orders.get("lora"):
            building = trainer.build_chunk
            trainer.build_chunk = lambda *given: bridge_jobs._adapted(building(*given))
        self.trainer = DemoTrainer(model_of(orders), Parallel(**orders["parallel"]), training)
        self.trainer.training = replace(training, seed=1)  # whatever the first weights are, the batches are the same
        write_in_this_process()
        config = MegatronConfig(dist_ckpt_optim_fully_reshardable=orders.get("fully", False))
        self.strategy = MegatronStrategy(config, is_lora=orders.get("lora", False))
        self.strategy.hf_config = LlamaConfig(
            vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            head_dim=16, rms_norm_eps=1e-5, tie_word_embeddings=orders["tied"], architectures=["LlamaForCausalLM"],
        )  # fmt: skip
        self.model = SimpleNamespace(actor_module=self.trainer.chunks)

    def step(self, number: int) -> Step:
        self.trainer.iteration = number - 1
        with by_steps(self.trainer.scheduler):
            loss = self.trainer.train_step()
        lr = [group["lr"] for group in self.trainer.optimizer.param_groups]
        return {"loss": loss, "lr": lr, "drawn": torch.rand(1).item()}

    def save(self, path: str, at: int) -> None:
        self.strategy.save_checkpoint(self.model, path, dist.get_rank(), self.trainer.optimizer, self.trainer.scheduler)

    def load(self, path: str) -> None:
        self.strategy.load_checkpoint(self.model, path, self.trainer.optimizer, self.trainer.scheduler)


if __name__ == "__main__":
    begin(Run)
