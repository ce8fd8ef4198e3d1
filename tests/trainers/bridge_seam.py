"""Megatron-Bridge's own manager with our commit round it, on each rank: ``python -m tests.trainers.bridge_seam JOB FOLDER RESULT``.

Its ``create_checkpoint_manager`` makes ours, ``_should_load_checkpoint`` of its ``setup`` asks for the trackers, and its
``save_checkpoint`` and ``load_checkpoint`` do the rest. The model, its optimizer and schedule are Megatron-core's own, on a CPU: Bridge's
providers and its loop need Transformer Engine and a GPU, which are empty modules here, as are loggers and ModelOpt.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mcore_rlhf.demo.with_megatron  # noqa: F401

# isort: split
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator

from mcore_rlhf.demo import cpu_megatron
from mcore_rlhf.demo.configs import Parallel, TinyGPT, Training
from mcore_rlhf.demo.trainer import DemoTrainer
from mcore_rlhf.integrations import megatron_bridge
from tests.trainers.absent import stand_in
from tests.trainers.seam_kills import Told

stand_in("transformer_engine", "modelopt", "wandb", "comet_ml", "mlflow", "nvidia_resiliency_ext")
stand_in("torch.utils.tensorboard", instead=True)
import_module("transformer_engine.pytorch.ops")  # as what lies in it is asked for
TINY = {
    "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 8, "ffn_hidden_size": 48,
    "seq_length": 16, "vocab_size": 128, "make_vocab_size_divisible_by": 16, "add_qkv_bias": True,
}  # fmt: skip


def configured(bridge: Any, folder: str, world: int) -> Any:
    """Bridge's own configuration of such a run."""
    config = bridge.config
    from megatron.bridge.models.gpt_provider import GPTModelProvider  # type: ignore[import-not-found]
    from megatron.bridge.training.tokenizers.config import TokenizerConfig  # type: ignore[import-not-found]

    model = GPTModelProvider(
        **TINY, gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False, normalization="RMSNorm",
        position_embedding_type="rope", bf16=True, params_dtype=torch.bfloat16, share_embeddings_and_output_weights=False,
        hidden_dropout=0.0, attention_dropout=0.0, rotary_base=10000,
    )  # fmt: skip
    model.transformer_impl = "local"
    found = config.ConfigContainer(
        model=model,
        train=config.TrainingConfig(micro_batch_size=2, global_batch_size=4, train_iters=100),
        optimizer=config.OptimizerConfig(
            optimizer="adam", lr=1e-3, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True
        ),
        ddp=config.DistributedDataParallelConfig(use_distributed_optimizer=True),
        scheduler=config.SchedulerConfig(), dataset=None, logger=config.LoggerConfig(),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=127),
        checkpoint=config.CheckpointConfig(
            save=folder, load=folder, ckpt_format="torch_dist", async_save=False, save_tokenizer_assets=False, most_recent_k=2
        ),
    )  # fmt: skip
    found.data_parallel_size = world
    return found


def imported() -> Any:
    """Bridge's modules; what needs ModelOpt, or a machine of several GPUs, does nothing."""
    import megatron.bridge.training.checkpointing as checkpointing  # type: ignore[import-not-found]
    import megatron.bridge.training.config as config
    import megatron.bridge.training.setup as setup  # type: ignore[import-not-found]
    import megatron.bridge.training.state as state  # type: ignore[import-not-found]

    checkpointing.save_sharded_modelopt_state = lambda *given, **named: None
    nothing = SimpleNamespace(
        state_dict=lambda **named: None,
        load_state_dict=lambda *given: None,
        validate_state_dict=lambda *given: False,
    )
    checkpointing.get_rerun_state_machine = lambda: nothing
    for name in (
        "_get_write_results_queue",
        "get_write_results_queue",
    ):  # of threads: a process more for each rank is slow
        setattr(filesystem_async, name, queue.Queue)
    return SimpleNamespace(checkpointing=checkpointing, config=config, setup=setup, state=state)


def dies_within(checkpointing: Any, job: str) -> None:
    """Have rank 0 die, or fail, once the tensors of step 4 are written, and counters and trackers not."""
    write, count = checkpointing.dist_checkpointing.save, iter(range(9))

    def save(*given: Any, **named: Any) -> Any:
        done = write(*given, **named)
        if next(count) == 1 and job == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if job == "fails" and dist.get_rank() == 0:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return done

    checkpointing.dist_checkpointing.save = save


def loads(bridge: Any, folders: list[str]) -> list[Any]:
    """What a new run has of each folder, by Bridge's own manager: two losses, and what is counted and drawn; the error where it stops.

    A folder with ``of-a-gpu`` in it has random states that no CPU takes.
    """
    found: list[Any] = []
    for folder in folders:
        run = DemoTrainer(
            TinyGPT(**TINY, dtype="bf16", dropout=0.0),
            Parallel(),
            Training(micro_batch_size=2, global_batch_size=4, seed=9),
        )
        run.training = Training(micro_batch_size=2, global_batch_size=4)  # the same data
        state, torch_state = bridge.state.GlobalState(), torch.get_rng_state()
        state.cfg = config = configured(bridge, folder, 1)
        config.checkpoint.load_rng = not Path(folder, "of-a-gpu").exists()
        manager = bridge.checkpointing.create_checkpoint_manager(config.checkpoint)
        try:
            if not bridge.setup._should_load_checkpoint(config, manager):
                found.append(None)
                continue
            given = (run.chunks, run.optimizer, run.scheduler)
            manager.load(bridge.checkpointing.CheckpointLoadContext(state, *given))
            counted = state.train_state
            run.iteration = 4
            found.append({
                "counters": [counted.step, counted.floating_point_operations_so_far], "data": counted.consumed_train_samples,
                "RNG": not torch.equal(torch.get_rng_state(), torch_state) and torch.get_rng_state()[:64].tolist(),
                "scheduler": run.scheduler.num_steps if run.scheduler else 0, "losses": [run.train_step(), run.train_step()],
            })  # fmt: skip
        except BaseException as error:  # an exit, and torch's CheckpointException, which is no Exception
            found.append(f"{type(error).__name__}: {error}"[:300])
    return found


def main(job: str, folder: str, result: Path) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{result}.{job}.store", rank=rank, world_size=world)
    bridge = imported()
    with cpu_megatron.CudaMeansCpu():
        run = DemoTrainer(
            TinyGPT(**TINY, dtype="bf16", dropout=0.0),
            Parallel(dp=world),
            Training(micro_batch_size=2, global_batch_size=4),
        )
        init_num_microbatches_calculator(rank, None, 4, 2, world)
        state = bridge.state.GlobalState()
        state.cfg = config = configured(bridge, folder, world)
        if job != "plain":
            megatron_bridge.use(config.checkpoint)
        manager = bridge.checkpointing.create_checkpoint_manager(config.checkpoint)
        if job == "loads":
            result.write_text(json.dumps(loads(bridge, Path(folder, "copies.txt").read_text().splitlines())))
            return
        if job in ("killed", "fails"):
            dies_within(bridge.checkpointing, job)
        given = (run.chunks, run.optimizer, run.scheduler)
        if bridge.setup._should_load_checkpoint(config, manager):
            manager.load(bridge.checkpointing.CheckpointLoadContext(state, *given))
            run.iteration, run.consumed_train_samples = state.train_state.step, state.train_state.consumed_train_samples
        seen = Told()
        while run.iteration < (4 if job == "plain" else 6):
            seen.append([run.iteration + 1, run.train_step()])
            if run.iteration % (4 if job == "plain" else 2) == 0:
                state.train_state.step, state.train_state.consumed_train_samples = (
                    run.iteration,
                    run.consumed_train_samples,
                )
                manager.save(bridge.checkpointing.CheckpointSaveContext(state, *given, 1000), None)
        manager.finalize_async_saves(state, blocking=True, terminate=True)
    if rank == 0:
        result.write_text(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
