"""One rank of a verl run: trains, saves and resumes by verl's own checkpoint manager, as a list of orders says, and prints what it saw.

``python -m tests.trainers.verl_job ORDERS RANK``, with the packages of verl on the path. Nothing of verl is stubbed. The model is that
of ``lessons``, wrapped by verl's ``apply_fsdp2`` or with its wrap policy; optimizer and schedule are made as its FSDP engine makes them
(``verl/workers/engine/fsdp/transformer_impl.py``, 0.9.1: ``_build_optimizer``, ``_build_lr_scheduler``). The first weights are of one
seed on all ranks, not sent from the first, for which verl asks for a GPU. Of transformers, a class that 0.7 asks for and newer releases
lack has another one in its place.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from transformers.utils.import_utils import _LazyModule

from tests.trainers.lessons import Learner, begin, model_of

_found = _LazyModule.__getattr__
_LazyModule.__getattr__ = lambda self, name: _found(  # on the class: 0.7 makes the module anew
    self, "AutoModelForImageTextToText" if name == "AutoModelForVision2Seq" else name
)
torch.cpu.empty_cache = lambda: None  # type: ignore[attr-defined]  # verl asks the device that it computes on for it


def wrapped(orders: dict[str, Any]) -> torch.nn.Module:
    """The model as verl's engine wraps it."""
    from omegaconf import OmegaConf
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from verl.utils import fsdp_utils

    made, world = model_of(orders), dist.get_world_size()
    if orders.get("lora"):
        made = adapted(made, orders["seed"])
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    if size := orders.get("fsdp_size"):  # smaller than the world: so many ranks have a copy of all
        mesh = init_device_mesh("cpu", (world // size, size), mesh_dim_names=("ddp", "fsdp"))
    if orders["strategy"] == "fsdp":
        policy = fsdp_utils.get_fsdp_wrap_policy(module=made, config=None, is_lora=bool(orders.get("lora")))
        kind = ShardingStrategy.HYBRID_SHARD if mesh.ndim > 1 else ShardingStrategy.FULL_SHARD
        return FullyShardedDataParallel(
            made, auto_wrap_policy=policy, sharding_strategy=kind, device_mesh=mesh, use_orig_params=orders.get("original", False),
            device_id=torch.device("cpu"),
        )  # fmt: skip
    how: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": True}
    if orders.get("placement"):  # as 0.7 does
        how["shard_placement_fn"] = fsdp_utils.get_shard_placement_fn(world)
    layers = [orders["model"].capitalize() + "DecoderLayer"]  # which 0.7 takes from a list that has become a set
    fsdp_utils.apply_fsdp2(made, how, OmegaConf.create({"wrap_policy": {"transformer_layer_cls_to_wrap": layers}}))
    return made


def adapted(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """The model with an adapter, as verl's engine puts it there (``_build_lora_module``); no matrix is zero, and others after each seed."""
    from peft import LoraConfig, TaskType, get_peft_model

    model.enable_input_require_grads()  # type: ignore[operator]
    made = get_peft_model(
        model, LoraConfig(task_type=TaskType.CAUSAL_LM, r=2, lora_alpha=6, target_modules=["q_proj", "down_proj"])
    )
    torch.manual_seed(seed + 50)
    for name, param in made.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(param.data, std=0.05)
    return made


class ByName:
    """An optimizer as veomni's ``MultiOptimizer`` saves and loads it (0.1.12, ``veomni/optim/optimizer.py``)."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        from torch.distributed.checkpoint.state_dict import StateDictOptions

        self.of, self.options = (model, optimizer), StateDictOptions(flatten_optimizer_state_dict=True)

    def state_dict(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        return get_optimizer_state_dict(*self.of, options=self.options)

    def load_state_dict(self, states: dict[str, Any]) -> None:
        from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

        set_optimizer_state_dict(*self.of, optim_state_dict=states, options=self.options)


class Run(Learner):
    """A run of verl's: model, optimizer, schedule, and the manager that keeps them."""

    def __init__(self, orders: dict[str, Any]) -> None:
        from omegaconf import OmegaConf
        from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
        from verl.utils.torch_functional import get_cosine_schedule_with_warmup

        self.model = wrapped(orders)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.01)
        self.schedule = get_cosine_schedule_with_warmup(
            self.optimizer, num_warmup_steps=2, num_training_steps=20, min_lr_ratio=0.1
        )
        contents = ["model", "optimizer", "extra"]
        config = OmegaConf.create(
            {
                "load_contents": orders.get("load_contents", contents),
                "save_contents": contents,
                "save_lora_only": orders.get("lora") == "alone",
            }
        )
        kept = ByName(self.model, self.optimizer) if orders.get("by_name") else self.optimizer
        self.manager = FSDPCheckpointManager(
            self.model, kept, self.schedule, processing_class=None, checkpoint_config=config
        )

    def save(self, path: str, at: int) -> None:
        self.manager.save_checkpoint(path, global_step=at)

    def load(self, path: str) -> None:
        self.manager.load_checkpoint(path)

    def tell(self, path: str) -> None:
        """All values of an FSDP1 run as torch itself puts them together."""
        from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, StateDictType
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

        whole = FullStateDictConfig(False, False), FullOptimStateDictConfig(False, False)
        with FSDP.state_dict_type(self.model, StateDictType.FULL_STATE_DICT, *whole):
            model, optimizer = self.model.state_dict(), FSDP.optim_state_dict(self.model, self.optimizer)
        if dist.get_rank() == 0:
            torch.save({"model": model, "state": optimizer["state"]}, path)


if __name__ == "__main__":
    begin(Run)
