"""ROLL's own save and load of a run on Megatron, on each rank: ``python -m tests.trainers.roll_job JOB FOLDER RESULT``.

``MegatronTrainStrategy.save_checkpoint`` and ``load_checkpoint`` run as they are, round the model of its mcore_adapter, ``McaGPTModel``, on
a CPU, whose optimizer and schedule are Megatron-core's. Ray, the workers, data and rollouts of ROLL, which no checkpoint needs, are empty
modules.
"""

from __future__ import annotations

import json
import os
import queue
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mcore_rlhf.demo.with_megatron  # noqa: F401

# isort: split
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from transformers import GenerationMixin  # noqa: F401  # before empty modules stand where it looks for others

from mcore_rlhf.demo import cpu_megatron, trainer
from mcore_rlhf.demo.configs import Parallel, TinyGPT, Training
from tests.trainers.absent import stand_in
from tests.trainers.verl_megatron_job import by_steps

stand_in("ray", "codetiming", "tensordict", "PIL", "torch.utils.tensorboard", "modelscope", "datasets")
stand_in(
    "roll.datasets", "roll.models", "roll.third_party", "roll.platforms", "roll.distributed.executor", "roll.distributed.scheduler",
    "roll.distributed.strategy.strategy",
    *(f"roll.utils.{name}" for name in (
        "logging", "collective", "context_managers", "functionals", "offload_states", "dynamic_batching", "sequence_packing",
    )),
    instead=True,
)  # fmt: skip
TINY: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 8, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 2, "ffn_hidden_size": 12,
    "seq_length": 16, "vocab_size": 32, "make_vocab_size_divisible_by": 16, "add_qkv_bias": True,
}  # fmt: skip
STEP = 4
_FULLY = {"distrib_optim_sharding_type": "fully_reshardable", "distrib_optim_fully_reshardable_mem_efficient": False}


def imported() -> Any:
    """Its strategy of training, and mcore_adapter's model."""
    for name in ("_get_write_results_queue", "get_write_results_queue"):  # a process more for each rank is slow
        setattr(filesystem_async, name, queue.Queue)
    timed: Any = import_module("codetiming")
    timed.Timer = type("Timer", (), {
        "__init__": lambda self, *given, **named: None, "__enter__": lambda self: self, "__exit__": lambda self, *given: None, "last": 0.0,
    })  # fmt: skip
    import_module("roll.utils.logging").get_logger = lambda: SimpleNamespace(info=print)  # type: ignore[attr-defined]
    # which megatron-core before 0.11 had, and its save of a plain optimizer asks for
    parallel_state.get_data_modulo_expert_parallel_rank = parallel_state.get_expert_data_parallel_rank  # type: ignore[attr-defined]
    platform = import_module("mcore_adapter.platforms").current_platform
    platform.get_rng_state, platform.set_rng_state = (
        torch.cuda.get_rng_state,
        torch.cuda.set_rng_state,
    )  # as a GPU's has them
    import_module("roll.platforms").current_platform = platform  # type: ignore[attr-defined]
    import_module("roll.utils.offload_states").clear_memory = lambda **given: None  # type: ignore[attr-defined]
    return import_module("roll.distributed.strategy.megatron_strategy").MegatronTrainStrategy


def chunk_of(model: TinyGPT, parallel: Parallel, config: Any, stage: int | None) -> Any:
    """A chunk of mcore_adapter's own model, as it makes one."""
    declared = import_module("mcore_adapter.models.model_config").McaModelConfig
    given = declared(
        **{name: getattr(config, name) for name in (
            "num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size",
            "tensor_model_parallel_size", "pipeline_model_parallel_size", "add_qkv_bias", "bf16", "params_dtype",
        )},
        expert_tensor_parallel_size=parallel.tp, padded_vocab_size=model.vocab_size, max_sequence_length=16, swiglu=True,
        add_bias_linear=False, normalization="RMSNorm", transformer_impl="local", hidden_dropout=0.0, attention_dropout=0.0,
        bias_activation_fusion=False,
        masked_softmax_fusion=False, persist_layer_norm=False, bias_dropout_fusion=False, apply_rope_fusion=False,
        gradient_accumulation_fusion=False, cross_entropy_loss_fusion=False, hf_model_type="qwen2",
    )  # fmt: skip
    return import_module("mcore_adapter.models").McaGPTModel(given, vp_stage=stage).bfloat16()


class Run:
    """A run of ROLL's: what its strategy has of the model, the optimizer and the schedule."""

    def __init__(self, tp: int, pp: int, world: int, ckpt_format: str, kind: str, sharding: bool) -> None:
        strategy = imported()
        trainer.build_chunk = chunk_of
        self.of = trainer.DemoTrainer(
            TinyGPT(**TINY, dtype="bf16", dropout=0.0), Parallel(tp=tp, pp=pp, dp=world // (tp * pp)),
            Training(micro_batch_size=2, global_batch_size=4, optimizer=kind),
        )  # fmt: skip
        factory, utils = (
            import_module("mcore_adapter.models.model_factory"),
            import_module("mcore_adapter.trainer.utils"),
        )
        args = SimpleNamespace(
            ckpt_format=ckpt_format, save_hf_model=False, save_only_model=False, device="cpu",
            use_distributed_optimizer=kind == "distributed",
            process_index=dist.get_rank(), distrib_optim_fully_reshardable=sharding,
            distrib_optim_fully_reshardable_mem_efficient=False,
        )  # fmt: skip
        chunks = [chunk.module for chunk in self.of.chunks]
        models = factory.VirtualModels.__new__(factory.VirtualModels)
        models.models, models.config = self.of.chunks, chunks[0].config
        self.its: Any = object.__new__(strategy)
        vars(self.its).update(
            model=models, models_unwrapped=chunks, models_wrapped=self.of.chunks, optimizer=self.of.optimizer, scheduler=self.of.scheduler,
            megatron_train_args=args, tokenizer=None, processor=None, load_states=lambda: None, _validate_access_integrity=True,
            worker_config=SimpleNamespace(checkpoint_config={"async_upload": False}),
            checkpoint_manager=SimpleNamespace(upload=lambda **given: None),
            ckpt_sharding_metadata=utils.build_sharded_state_dict_metadata(args),
            save_strategy=FullyParallelSaveStrategyWrapper(
                get_default_save_sharded_strategy(), parallel_state.get_data_parallel_group(with_context_parallel=True), True
            ),
        )  # fmt: skip

    def step(self) -> float:
        with by_steps(self.of.scheduler):
            return self.of.train_step()

    def load_core(self, folder: str) -> list[float]:
        """Two losses of a new run that Megatron-core's own loader filled, of a folder in ``torch_dist`` whose schedule counts samples."""
        (chunk,), optimizer, scheduler = self.its.models_unwrapped, self.of.optimizer, self.of.scheduler
        assert optimizer is not None
        assert scheduler is not None
        model = {"model": chunk.sharded_state_dict()}
        wanted = {**model, "optimizer": optimizer.sharded_state_dict(model, is_loading=True, metadata=dict(_FULLY))}
        loaded = dist_checkpointing.load(wanted, folder)
        chunk.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        scheduler.use_checkpoint_opt_param_scheduler = True  # as Megatron-LM's option of that name
        scheduler.load_state_dict(loaded["opt_param_scheduler"])
        self.of.iteration = STEP
        return [self.of.train_step(), self.of.train_step()]

    def load(self, folder: str) -> Any:
        """What a new run has of a step: two losses, and what is counted and drawn; the error where it stops."""
        torch.manual_seed(99)
        before = torch.get_rng_state()
        for parameter in (one for chunk in self.of.chunks for one in chunk.parameters()):
            parameter.data.fill_(0.01)  # so that what is not restored shows
        try:
            self.its.load_checkpoint(folder)
            drawn = not torch.equal(torch.get_rng_state(), before) and torch.get_rng_state()[:64].tolist()
            found = {"RNG": drawn, "scheduler": self.of.scheduler.num_steps if self.of.scheduler else 0}
            self.of.iteration = STEP  # the same data
            return {**found, "losses": [self.step(), self.step()]}
        except BaseException as error:  # torch's CheckpointException is no Exception
            return f"{type(error).__name__}: {error}"[:300]


def main(job: str, folder: str, result: Path) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    tp, pp = int(os.environ.get("TP", "1")), int(os.environ.get("PP", "1"))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{result}.{job}.store", rank=rank, world_size=world)
    with cpu_megatron.CudaMeansCpu():
        told = [os.environ.get(name, usual) for name, usual in (("CKPT_FORMAT", "legacy"), ("KIND", "distributed"))]
        make = partial(Run, tp, pp, world, *told, job.endswith("reshardable"))
        if job in ("loads", "loads_reshardable", "core"):
            by = Run.load_core if job == "core" else Run.load
            seen = [by(make(), step) for step in Path(folder, "copies.txt").read_text().splitlines()]
        else:
            run = make()
            for _ in range(STEP):
                run.step()
            step = f"checkpoint-{STEP - 1}"  # counted from 0
            run.its.save_checkpoint(str(Path(folder, step)), STEP - 1, step, is_last_step=True)
            if rank == 0:  # as ``BasePipeline.do_checkpoint``, whose folder is copied into the same step
                counted = import_module("roll.utils.worker_state").WorkerState(step=STEP - 1)
                counted.save_to_json(save_dir=str(Path(folder, step, "pipeline")), tag="pipeline")
            seen = [run.step(), run.step()]
    if rank == 0:
        result.write_text(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
