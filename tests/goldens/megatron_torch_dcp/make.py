"""A checkpoint that Megatron-LM itself writes with torch's FSDP2 and ``--ckpt-format torch_dcp``, on the CPU:
``RANK=0 WORLD_SIZE=2 python -m tests.goldens.megatron_torch_dcp.make OUT``, once for each rank.

The stand-ins are those of :mod:`tests.goldens.megatron_fsdp.make`, and one more: the mesh is one of CPUs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import mcore_rlhf.demo.with_megatron  # noqa: F401

# isort: split
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed import torch_fully_sharded_data_parallel as wrapper
from megatron.core.utils import unwrap_model
from megatron.training import checkpointing
from torch.distributed.device_mesh import DeviceMesh

from mcore_rlhf.demo import megatron_args, megatron_checkpoint, trainer
from mcore_rlhf.demo.configs import Parallel, Training
from tests.goldens.megatron_fsdp.make import END, LOOK, RANK, WORLD, AnyDevice
from tests.reference.fsdp_dtensor import MODEL


class OfCpus(DeviceMesh):
    """A mesh of CPUs, whatever is asked for."""

    @staticmethod
    def from_group(group: Any, device_type: str, *args: Any, **kwargs: Any) -> DeviceMesh:
        return DeviceMesh.from_group(group, "cpu", *args, **kwargs)


def chunks(model: Any, parallel: Any, training: Any, config: Any) -> list[Any]:
    """The model, wrapped as Megatron-LM's ``get_model`` does with ``--use-torch-fsdp2``."""
    config.gradient_accumulation_fusion = False
    options = DistributedDataParallelConfig(grad_reduce_in_fp32=True, check_for_nan_in_grad=False)
    chunk = trainer.build_chunk(model, parallel, config, None)
    return [wrapper.TorchFullyShardedDataParallel(config=config, ddp_config=options, module=chunk)]


def save(run: trainer.DemoTrainer, folder: Path) -> None:
    """As ``save_checkpoint`` does."""
    args = megatron_args.build(run.model, run.parallel, run.training, 0, run.consumed_train_samples)
    values = dict(ckpt_format="torch_dcp", use_torch_fsdp2=True, no_save_optim=False, no_save_rng=False)
    vars(args).update(values, use_layer_wise_distributed_optimizer=False)
    rng = [megatron_checkpoint.rng_state()]
    state = checkpointing.generate_state_dict(
        args, unwrap_model(run.chunks), run.optimizer, run.scheduler, rng, iteration=run.iteration
    )
    state["num_floating_point_operations_so_far"] = 1.0
    dist.checkpoint.save(state_dict=state, storage_writer=dist.checkpoint.FileSystemWriter(folder))


def main(out: Path) -> None:
    """Train to iteration 4, and save at 2."""
    AnyDevice().__enter__()
    dist.init_process_group("gloo", rank=RANK, world_size=WORLD)
    wrapper.DeviceMesh, trainer._build_chunks = OfCpus, chunks
    run = trainer.DemoTrainer(MODEL, Parallel(dp=WORLD), Training(optimizer="plain", global_batch_size=8))
    losses = {}
    while run.iteration < END:
        loss = run.train_step()
        losses[run.iteration] = loss
        if run.iteration == LOOK:
            save(run, out / f"iter_{LOOK:07d}")
    if RANK == 0:
        (out / "latest_checkpointed_iteration.txt").write_text(str(LOOK))
        out.with_suffix(".json").write_text(json.dumps({"losses": losses}, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
