"""One rank of a verl run on Megatron: trains, saves and resumes by verl's own ``MegatronCheckpointManager``, as a list of orders says.

``python -m tests.trainers.verl_megatron_job ORDERS RANK``, with the packages of verl on the path. Nothing of verl is stubbed. Model, DDP,
optimizer and schedule are megatron-core's own, on the stand-ins for a GPU of :mod:`mcore_rlhf.demo`; verl's engine makes them the same way
(``verl/workers/engine/megatron/transformer_impl.py``, 0.9.1), out of a base model that there is none of here. Weights as Hugging Face's
files are saved and loaded by mbridge's own bridge, which is told the names of norms that are modules of their own. The random generators
of this process alone are saved, as verl does: no device's. For 0.7.0, a class of transformers that newer releases lack has another one in
its place, and a field of newer releases of megatron-core, which it cannot write as JSON, is empty.
Adapters are those of ``tests.reference.bridge_jobs``; of Megatron-Bridge, which needs a GPU's toolchain, the filter of their names is ours.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from mcore_rlhf.demo.trainer import DemoTrainer

# isort: split
import torch
from transformers.utils.import_utils import _LazyModule

from mcore_rlhf.demo import megatron_checkpoint
from mcore_rlhf.demo.configs import Parallel, TinyGPT, Training
from mcore_rlhf.families.megatron.folders import TRACKER
from tests.reference.dist_jobs import write_in_this_process
from tests.trainers.absent import stand_in
from tests.trainers.lessons import Step, begin

_found = _LazyModule.__getattr__
_LazyModule.__getattr__ = lambda self, name: _found(
    self, "AutoModelForImageTextToText" if name == "AutoModelForVision2Seq" else name
)
stand_in("cachetools", "transfer_queue", "vllm", "fastapi", "uvicorn", "aiohttp")


def model_of(orders: dict[str, Any]) -> TinyGPT:
    """The model; verl pads no vocabulary, so its size is one that needs none."""
    return TinyGPT(
        num_layers=orders.get("layers", 2), value_head=orders.get("critic", False), vocab_size=128, dropout=0.0,
        dtype=orders.get("dtype", "bf16"),
        untie_embeddings_and_output_weights=not orders["tied"], num_experts=orders.get("experts"),
    )  # fmt: skip


class Run:
    """An actor of verl's on Megatron."""

    def __init__(self, orders: dict[str, Any]) -> None:
        parallel = Parallel(**orders["parallel"])
        training = Training(seed=orders["seed"], optimizer=orders.get("optimizer", "distributed"))
        make = with_adapters if orders.get("lora") else DemoTrainer
        self.trainer = make(model_of(orders), parallel, training)
        self.trainer.training = replace(training, seed=1)  # whatever the first weights are, the batches are the same
        self.trainer.config.inference_cuda_graph_scope = None
        self.orders = orders
        write_in_this_process()
        self.manager = manager_of(self.trainer, orders)
        self.by_samples = False

    def step(self, number: int) -> Step:
        self.trainer.iteration = number - 1
        with nullcontext() if self.by_samples else by_steps(self.trainer.scheduler):
            loss = self.trainer.train_step()
        seen = {"loss": loss, "lr": [group["lr"] for group in self.trainer.optimizer.param_groups]}
        return {**seen, "drawn": torch.rand(1).item()} if self.orders.get("draw") else seen

    def save(self, path: str, at: int) -> None:
        self.manager.save_checkpoint(path, global_step=at)

    def load(self, path: str) -> None:
        """By verl; or what Megatron-LM loads, without the states of a GPU's generators, of which verl saves none here."""
        if Path(path, TRACKER).is_file():
            self.trainer.scheduler.use_checkpoint_opt_param_scheduler = True  # as Megatron-LM's option of that name
            megatron_checkpoint.load(self.trainer, path, rng=False)
            self.by_samples = True
        else:
            self.manager.load_checkpoint(path)


@contextmanager
def by_steps(scheduler: Any) -> Iterator[None]:
    """Have the scheduler count a step, as verl's ``lr_scheduler_step`` does, where this trainer counts samples."""
    step = scheduler.step
    scheduler.step = lambda increment: step(1)
    try:
        yield
    finally:
        del scheduler.step


def with_adapters(model: TinyGPT, parallel: Parallel, training: Training) -> DemoTrainer:
    """The trainer of a model whose adapters alone are trained, which Megatron-Bridge would have put there."""
    from mcore_rlhf.demo import trainer
    from tests.reference import bridge_jobs

    building = trainer.build_chunk
    trainer.build_chunk = lambda *args: bridge_jobs._adapted(building(*args))
    try:
        return DemoTrainer(model, parallel, training)
    finally:
        trainer.build_chunk = building


class Adapters:
    """What verl asks of Megatron-Bridge to save an adapter's description, without which there is none: see ``save_hf_adapter``."""

    def save_hf_adapter(self, model: Any, folder: str, peft: Any) -> None:
        from tests.reference.bridge_jobs import ALPHA, RANK

        Path(folder).mkdir(parents=True, exist_ok=True)
        parts = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        said = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": parts}
        Path(folder, "adapter_config.json").write_text(json.dumps(said))


def keep_adapters(state: dict[str, Any], peft: Any) -> dict[str, Any]:
    """``apply_peft_adapter_filter_to_state_dict`` of Megatron-Bridge, which is not there."""
    own = {
        key: {name: one for name, one in state[key].items() if ".adapter." in name} for key in state if "model" in key
    }
    return {**state, **own}


def manager_of(trainer: DemoTrainer, orders: dict[str, Any]) -> Any:
    from omegaconf import OmegaConf
    from transformers import LlamaConfig
    from verl.utils.checkpoint.megatron_checkpoint_manager import MegatronCheckpointManager

    contents = ["model", "optimizer", "extra"]
    megatron = {
        "dist_ckpt_optim_fully_reshardable": orders.get("fully", False),
        "distrib_optim_fully_reshardable_mem_efficient": False,
    }
    config = OmegaConf.create({"actor": {"megatron": megatron}, "model": {"path": ""}})
    checkpoint = {
        "load_contents": orders.get("load_contents", contents), "save_contents": contents, "async_save": False,
    }  # fmt: skip
    hf = LlamaConfig.from_pretrained(orders["base"]) if "base" in orders else LlamaConfig(vocab_size=128)
    lora = orders.get("lora")
    bridge = Adapters() if lora == "alone" else bridge_of(hf, trainer, orders["base"]) if "base" in orders else None
    if lora:
        module = ModuleType("megatron.bridge.training.checkpointing")
        module.apply_peft_adapter_filter_to_state_dict = keep_adapters  # type: ignore[attr-defined]
        sys.modules |= {
            "megatron.bridge": ModuleType(""),
            "megatron.bridge.training": ModuleType(""),
            module.__name__: module,
        }
    return MegatronCheckpointManager(
        config, OmegaConf.create(checkpoint), hf, trainer.config, "actor", trainer.chunks, "LlamaForCausalLM", hf,
        trainer.config.params_dtype, False, None, trainer.optimizer, trainer.scheduler, True,
        use_checkpoint_opt_param_scheduler=orders.get("schedule", True), use_dist_checkpointing=bridge is None, bridge=bridge,
        provider=bridge if lora else None, peft_cls=object() if lora and not orders.get("base too") else None,
    )  # fmt: skip


def bridge_of(hf: Any, trainer: DemoTrainer, base: str) -> Any:
    """mbridge's own, with the names of norms that are modules of their own beside those of Transformer Engine, of which it knows alone."""
    from mbridge.models.llama import LLaMABridge

    class Bridge(LLaMABridge):
        _OTHER_MAPPING: ClassVar = {"input_layernorm.weight": ["model.layers.{layer_number}.input_layernorm.weight"]}
        _MLP_MAPPING: ClassVar = {
            **LLaMABridge._MLP_MAPPING, "pre_mlp_layernorm.weight": ["model.layers.{layer_number}.post_attention_layernorm.weight"],
        }  # fmt: skip

        def _build_config(self) -> Any:
            return trainer.config

    found = Bridge(hf, dtype=trainer.config.params_dtype)
    found.safetensor_io = found._get_safetensor_io(
        base
    )  # as loading the base model, of which there are no weights here, leaves it
    return found


if __name__ == "__main__":
    begin(Run)
