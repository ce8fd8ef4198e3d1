"""ms-swift's own save and load of a run on Megatron, on each rank: ``python -m tests.trainers.ms_swift_job JOB FOLDER RESULT``.

Its ``save_mcore_checkpoint`` and ``load_mcore_checkpoint`` run as they are, on the arguments of its ``MegatronArguments``. Model, optimizer
and schedule are Megatron-core's own, on a CPU: mcore_bridge's model is one of Transformer Engine, which needs a GPU and is an empty module
here, as are Triton, ModelScope, and ms-swift's data, templates and rollouts. That the layers are Megatron's local ones, ``args`` say.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import queue
import sys
from argparse import Namespace
from importlib import import_module
from pathlib import Path
from typing import Any

import mcore_rlhf.demo.with_megatron  # noqa: F401

# isort: split
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.extensions import transformer_engine
from transformers import GenerationMixin, Qwen2Config  # noqa: F401  # before empty modules stand where it looks for others

from mcore_rlhf.demo import cpu_megatron
from mcore_rlhf.demo.configs import Parallel, TinyGPT, Training
from mcore_rlhf.demo.trainer import DemoTrainer
from tests.trainers.absent import stand_in

stand_in("transformer_engine", "triton", "modelscope", "binpacking", "json_repair", "nvidia_resiliency_ext", "trl")
stand_in(
    "torch.utils.tensorboard", *(f"swift.{name}" for name in ("model", "template", "dataset", "arguments", "tuners", "rlhf_trainers")),
    "swift.megatron.init", "swift.megatron.model", "swift.megatron.utils.convert_utils", instead=True,
)  # fmt: skip
TINY: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 4, "ffn_hidden_size": 24,
    "seq_length": 16, "vocab_size": 64, "make_vocab_size_divisible_by": 16, "add_qkv_bias": True,
}  # fmt: skip
STEP = 4


def imported() -> Any:
    """Its module that saves and loads, and its arguments."""
    logger = logging.getLogger("modelscope")
    logger.addHandler(logging.NullHandler())
    import_module("modelscope.utils.logger").get_logger = lambda *given, **named: logger  # type: ignore[attr-defined]
    triton: Any = import_module("triton")
    for name in ("jit", "autotune", "heuristics"):
        setattr(triton, name, lambda of=None, **named: of if callable(of) else lambda of: of)
    for name in ("TEGroupedLinear", "TELinear"):  # which mcore_bridge patches as it is imported
        if getattr(transformer_engine, name, None) is None:
            setattr(transformer_engine, name, type(name, (), {"__init__": lambda self, *given, **named: None}))
    for name in ("_get_write_results_queue", "get_write_results_queue"):  # a process more for each rank is slow
        setattr(filesystem_async, name, queue.Queue)
    found = import_module("swift.megatron.utils.megatron_lm_utils")
    return found, import_module("swift.megatron.arguments.megatron_args").MegatronArguments


def arguments(declared: Any, tp: int, **given: object) -> Namespace:
    """What a script of its gives, and the defaults of all else."""
    values = {}
    for one in dataclasses.fields(declared):
        if one.default is not dataclasses.MISSING:
            values[one.name] = one.default
        elif one.default_factory is not dataclasses.MISSING:
            values[one.name] = one.default_factory()
    ours = {
        "tensor_model_parallel_size": tp,
        "bf16": True,
        "fp16": False,
        "tuner_type": "full",
        "transformer_impl": "local",
    }
    return Namespace(**{**values, **ours, **given})


def trainer(tp: int, world: int) -> DemoTrainer:
    return DemoTrainer(
        TinyGPT(**TINY, dtype="bf16", dropout=0.0), Parallel(tp=tp, dp=world // tp), Training(micro_batch_size=2, global_batch_size=4)
    )  # fmt: skip


def loads(swift: Any, declared: Any, tp: int, world: int, folders: list[str]) -> list[Any]:
    """What a new run has of each step: two losses, and what is counted and drawn; the error where it stops."""
    found: list[Any] = []
    for folder in folders:
        run = trainer(tp, world)
        torch.manual_seed(99)
        before = torch.get_rng_state()
        for parameter in (one for chunk in run.chunks for one in chunk.parameters()):
            parameter.data.fill_(0.01)  # so that what is not restored shows
        args = arguments(declared, tp, mcore_model=folder, finetune=False)
        try:
            run.iteration = swift.load_mcore_checkpoint(args, run.chunks, run.optimizer, run.scheduler)
            found.append({
                "counters": run.iteration, "data": getattr(args, "consumed_train_samples", 0),
                "RNG": not torch.equal(torch.get_rng_state(), before) and torch.get_rng_state()[:64].tolist(),
                "scheduler": run.scheduler.num_steps if run.scheduler else 0, "losses": [],
            })  # fmt: skip
            run.iteration = STEP  # the same data
            found[-1]["losses"] = [run.train_step(), run.train_step()]
        except BaseException as error:  # an exit, and torch's CheckpointException, which is no Exception
            found.append(f"{type(error).__name__}: {error}"[:300])
    return found


def main(job: str, folder: str, result: Path) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    tp = int(os.environ.get("TP", "1"))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{result}.{job}.store", rank=rank, world_size=world)
    with cpu_megatron.CudaMeansCpu():
        swift, declared = imported()
        seen: list[Any] = []
        if job == "loads":
            seen = loads(swift, declared, tp, world, Path(folder, "copies.txt").read_text().splitlines())
        else:
            run = trainer(tp, world)
            while run.iteration < STEP:
                run.train_step()
            step = Path(folder, f"checkpoint-{STEP}")
            step.mkdir(parents=True, exist_ok=True)
            args = arguments(
                declared, tp, consumed_train_samples=run.consumed_train_samples, output_dir="megatron_output",
                dist_ckpt_optim_fully_reshardable=job == "reshardable",
            )  # fmt: skip
            swift.save_mcore_checkpoint(
                args, run.chunks, run.optimizer, run.scheduler, iteration=STEP, output_dir=str(step)
            )
            if rank == 0:  # as its ``save_args`` and mcore_bridge's ``save_weights``, which needs Transformer Engine
                (step / "args.json").write_text(json.dumps(swift.check_json_format(vars(args)), indent=2))
                Qwen2Config(
                    hidden_size=16, intermediate_size=24, num_attention_heads=4, num_hidden_layers=2, num_key_value_heads=2,
                    vocab_size=64, rms_norm_eps=1e-5, tie_word_embeddings=False, architectures=["Qwen2ForCausalLM"],
                ).save_pretrained(step)  # fmt: skip
            seen = [run.train_step(), run.train_step()]
    if rank == 0:
        result.write_text(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
