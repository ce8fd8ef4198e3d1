"""One rank of a verl run: trains, saves and resumes by verl's own checkpoint manager, as a list of orders says, and prints what it saw.

Run as ``python tests/trainers/verl_job.py ORDERS RANK``, with the packages of verl on the path. Nothing of verl is stubbed. The model is a
small Qwen2 or Llama with weights of its own, wrapped by verl's ``apply_fsdp2`` or with its wrap policy; optimizer and schedule are made as
its FSDP engine makes them (``verl/workers/engine/fsdp/transformer_impl.py``, 0.9.1: ``_build_optimizer``, ``_build_lr_scheduler``). The
first weights are of one seed on all ranks, not sent from the first, for which verl asks for a GPU. Of transformers, a class that 0.7
asks for and newer releases lack has another one in its place.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers.utils.import_utils import _LazyModule

warnings.simplefilter("ignore")
_found = _LazyModule.__getattr__
_LazyModule.__getattr__ = lambda self, name: _found(  # on the class: 0.7 makes the module anew
    self, "AutoModelForImageTextToText" if name == "AutoModelForVision2Seq" else name
)
torch.cpu.empty_cache = lambda: None  # type: ignore[attr-defined]  # verl asks the device that it computes on for it

VOCABULARY, BATCH = 120, 6


def model_of(orders: dict[str, Any]) -> torch.nn.Module:
    """The model with weights from a seed."""
    torch.manual_seed(orders["seed"])
    sizes = dict(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=orders["tied"], rms_norm_eps=1e-6,
    )  # fmt: skip
    sizes |= orders.get("sizes", {})
    kinds = {"qwen2": transformers.Qwen2Config, "llama": transformers.LlamaConfig}
    config = kinds[orders["model"]](**sizes, architectures=[orders["model"].capitalize() + "ForCausalLM"])
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    for name, param in made.named_parameters():
        if param.ndim == 1:  # biases are zero at birth, and norms one: let them tell apart
            torch.nn.init.normal_(param.data, mean=1.0 if "norm" in name else 0.0, std=0.05)
    return made


def wrapped(orders: dict[str, Any]) -> torch.nn.Module:
    """The model as verl's engine wraps it."""
    from omegaconf import OmegaConf
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from verl.utils import fsdp_utils

    made, world = model_of(orders), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    if orders["strategy"] == "fsdp":
        policy = fsdp_utils.get_fsdp_wrap_policy(module=made, config=None)
        return FullyShardedDataParallel(
            made, auto_wrap_policy=policy, sharding_strategy=ShardingStrategy.FULL_SHARD, device_mesh=mesh,
            use_orig_params=False, device_id=torch.device("cpu"),
        )  # fmt: skip
    how: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": True}
    if orders.get("placement"):  # as 0.7 does
        how["shard_placement_fn"] = fsdp_utils.get_shard_placement_fn(world)
    layers = [orders["model"].capitalize() + "DecoderLayer"]  # which 0.7 takes from a list that has become a set
    fsdp_utils.apply_fsdp2(made, how, OmegaConf.create({"wrap_policy": {"transformer_layer_cls_to_wrap": layers}}))
    return made


class Run:
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
        config = OmegaConf.create({"load_contents": contents, "save_contents": contents})
        self.manager = FSDPCheckpointManager(
            self.model, self.optimizer, self.schedule, processing_class=None, checkpoint_config=config
        )

    def step(self, number: int) -> dict[str, Any]:
        """A step on this rank's share of the batch; what all ranks saw together."""
        words = torch.randint(0, VOCABULARY, (BATCH, 16), generator=torch.Generator().manual_seed(1000 + number))
        share = words.chunk(dist.get_world_size())[dist.get_rank()]
        self.model.train()
        logits = self.model(input_ids=share, use_cache=False).logits.float()
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), share[:, 1:].reshape(-1))
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        drawn = [torch.zeros(1) for _ in range(dist.get_world_size())]
        dist.all_gather(drawn, torch.rand(1))
        return {
            "loss": mean.item() / dist.get_world_size(),
            "lr": self.schedule.get_last_lr(),
            "drawn": [one.item() for one in drawn],
        }

    def tell(self, path: str) -> None:
        """All values of an FSDP1 run as torch itself puts them together."""
        from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, StateDictType
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

        whole = FullStateDictConfig(False, False), FullOptimStateDictConfig(False, False)
        with FSDP.state_dict_type(self.model, StateDictType.FULL_STATE_DICT, *whole):
            model, optimizer = self.model.state_dict(), FSDP.optim_state_dict(self.model, self.optimizer)
        if dist.get_rank() == 0:
            torch.save({"model": model, "state": optimizer["state"]}, path)


def main(orders: dict[str, Any]) -> list[dict[str, Any]]:
    """Carry the orders out: train some steps, save, load."""
    run, seen, at = Run(orders), list[dict[str, Any]](), 0
    torch.manual_seed(100 + dist.get_rank())
    for what, value in orders["do"]:
        if what == "train":
            for _ in range(value):
                at += 1
                seen.append(run.step(at))
        elif what == "save":
            run.manager.save_checkpoint(value, global_step=at)
        elif what == "truth":
            run.tell(value)
        else:
            run.manager.load_checkpoint(value)
            at = orders["step"]
    return seen


if __name__ == "__main__":
    path, rank = Path(sys.argv[1]), int(sys.argv[2])
    given = json.loads(path.read_text())
    torch.set_num_threads(1)
    store = dist.FileStore(str(path.with_suffix(".store")), given["world"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=given["world"])
    found = main(given)
    if rank == 0:
        path.with_suffix(".seen").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
