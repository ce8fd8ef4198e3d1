"""Checkpoints that Megatron-FSDP itself writes, on the CPU: ``RANK=0 WORLD_SIZE=2 python -m tests.goldens.megatron_fsdp.make OUT``, once for
each rank; with ``TP=2`` or ``EP=2`` in the environment.

The demo's stand-ins suffice, with two more: ``torch.device`` of ``cuda`` is the CPU's, and the demo's FusedAdam has no state of parameters
of which a rank has no element, where Transformer Engine's has an empty one, so that all ranks name the same.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import mcore_rlhf.demo.with_megatron  # noqa: F401

# isort: split
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.utils import unwrap_model
from megatron.training import checkpointing

from mcore_rlhf.demo import cpu_megatron, megatron_args, megatron_checkpoint, trainer
from mcore_rlhf.demo.configs import Parallel, Training
from tests.reference.fsdp_dtensor import MODEL, WITH_EXPERTS

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
TP, EP = int(os.environ.get("TP", "1")), int(os.environ.get("EP", "1"))
LOOK, END = 2, 4


class AnyDevice(cpu_megatron.CudaMeansCpu):
    """Also ``torch.device("cuda:0")`` is the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.device and args and str(args[0]).startswith("cuda"):
            args = ("cpu",)
        return super().__torch_function__(func, types, args, kwargs)


def chunks(model: Any, parallel: Any, training: Any, config: Any) -> list[Any]:
    """The model, wrapped as Megatron-LM's ``get_model`` does with ``--use-megatron-fsdp``."""
    config.gradient_accumulation_fusion = False
    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=True, overlap_param_gather=True, use_distributed_optimizer=True,
        use_megatron_fsdp=True, data_parallel_sharding_strategy="optim_grads_params", check_for_nan_in_grad=False,
    )  # fmt: skip
    chunk = trainer.build_chunk(model, parallel, config, None)
    return [FullyShardedDataParallel(config=config, ddp_config=options, module=chunk, device=torch.device("cpu"))]


def fill_states(optimizer: Any) -> None:
    """Empty states of parameters of which this rank has no element, all in the order of the groups."""
    state = optimizer.state
    old, some = dict(state), next(iter(state.values()))
    state.clear()
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        empty = {name: torch.zeros_like(param) if value.ndim else value.clone() for name, value in some.items()}
        state[param] = old.get(param) or empty


def save(run: trainer.DemoTrainer, folder: Path) -> None:
    """As ``save_checkpoint`` does."""
    args = megatron_args.build(run.model, run.parallel, run.training, 0, run.consumed_train_samples)
    values = dict(ckpt_format="fsdp_dtensor", use_megatron_fsdp=True, data_parallel_sharding_strategy="optim_grads_params")
    vars(args).update(values, no_save_optim=False, no_save_rng=False, use_layer_wise_distributed_optimizer=False)
    at = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()
    models, metadata = unwrap_model(run.chunks), checkpointing._build_sharded_state_dict_metadata(args)
    state = checkpointing.generate_state_dict(
        args, models, run.optimizer, run.scheduler, {str(at): [megatron_checkpoint.rng_state()]}, iteration=run.iteration,
        optim_sd_kwargs={"metadata": {**metadata, "chained_optim_avoid_prefix": True}},
    )  # fmt: skip
    state["num_floating_point_operations_so_far"] = 1.0
    state = checkpointing.preprocess_fsdp_dtensor_state_dict(args, state, models[0])
    dist.checkpoint.save(state, storage_writer=dist.checkpoint.FileSystemWriter(folder))


def main(out: Path) -> None:
    """Train to iteration 4, and save at 2."""
    AnyDevice().__enter__()
    dist.init_process_group("gloo", rank=RANK, world_size=WORLD)
    trainer._build_chunks = chunks
    layout = Parallel(tp=TP, dp=WORLD // TP, ep=EP)
    run = trainer.DemoTrainer(WITH_EXPERTS if EP > 1 else MODEL, layout, Training(optimizer="distributed", global_batch_size=8))
    losses = {}
    while run.iteration < END:
        loss = run.train_step()
        losses[run.iteration] = loss
        if run.iteration == LOOK:
            assert run.optimizer is not None
            fill_states(run.optimizer.optimizer)
            save(run, out / f"iter_{LOOK:07d}")
    if RANK == 0:
        (out / "latest_checkpointed_iteration.txt").write_text(str(LOOK))
        out.with_suffix(".json").write_text(json.dumps({"losses": losses}, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
