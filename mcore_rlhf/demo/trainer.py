"""Train a tiny GPT with Megatron's own schedules, DDP, optimizer and scheduler, as Megatron-LM's loop does."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import mcore_rlhf.demo.with_megatron  # noqa: F401

# isort: split
import numpy as np
import torch
import torch.distributed as dist
from megatron.core import optimizer as optimizers
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func

from mcore_rlhf.demo import data, versions
from mcore_rlhf.demo.configs import Parallel, TinyGPT, Training
from mcore_rlhf.demo.model import DTYPES, build_chunk, transformer_config, virtual_stages

Batch = dict[str, torch.Tensor]
get_standard_config_overrides = getattr(optimizers, "get_standard_config_overrides", None)
"""None before 0.16, where biases and norms do not decay without anybody's saying so."""
_initialized: dict[str, Parallel] = {}


class DemoTrainer:
    """A model, its optimizer and its place in the data, on this rank.

    ``torch.distributed`` must be initialized with ``parallel.world_size`` ranks; Megatron's process groups are made
    here. Everything random follows from ``training.seed``.

    Args:
        model: What to train.
        parallel: On which layout.
        training: How.

    Attributes:
        chunks: Model chunks of this rank, wrapped in Megatron's DDP (one, or one per virtual stage).
        optimizer: Megatron's optimizer, or ``None``.
        scheduler: Megatron's learning-rate scheduler, or ``None``.
        iteration: Steps done.
        loaded_iteration: Steps that were done when the run started from a checkpoint.
        consumed_train_samples: Samples consumed.
    """

    def __init__(self, model: TinyGPT, parallel: Parallel, training: Training) -> None:
        self.model, self.parallel, self.training = model, parallel, training
        initialize_parallel_state(parallel)
        seed_everything(training.seed)
        self.config = transformer_config(model, parallel)
        self.chunks = _build_chunks(model, parallel, training, self.config)
        self.optimizer, self.scheduler = _build_optimizer(self.chunks, model, training)
        self.iteration = self.loaded_iteration = 0
        self.consumed_train_samples = 0
        self.num_microbatches = training.num_microbatches(parallel.dp)
        _connect(self.config, self.chunks, self.optimizer, training)

    def train_step(self) -> float:
        """Train on the next global batch.

        Returns:
            The mean loss over the global batch, the same float on every rank.
        """
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        losses = self._forward_backward(forward_only=self.optimizer is None)
        self._update()
        self.iteration += 1
        self.consumed_train_samples += self.training.global_batch_size
        return losses

    def evaluate(self) -> float:
        """The mean loss on the next global batch, without training on it (dropout off)."""
        for chunk in self.chunks:
            chunk.eval()
        loss = self._forward_backward(forward_only=True)
        for chunk in self.chunks:
            chunk.train()
        return loss

    def _update(self) -> None:
        if self.optimizer is None or self.scheduler is None:
            return
        successful, _, _ = self.optimizer.step()
        if successful:
            self.scheduler.step(increment=self.training.global_batch_size)

    def _forward_backward(self, forward_only: bool) -> float:
        iterators = [self._batches() for _ in self.chunks]
        reports = get_forward_backward_func()(
            forward_step_func=_value_step if self.model.value_head else _forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=self.num_microbatches,
            seq_length=self.model.seq_length,
            micro_batch_size=self.training.micro_batch_size,
            forward_only=forward_only,
        )
        return _global_mean([report["lm loss"] for report in reports])

    def _batches(self) -> Iterator[Batch]:
        """This data-parallel rank's micro-batches of the next global batch."""
        dp_rank, size = parallel_state.get_data_parallel_rank(), self.training.micro_batch_size
        for number in range(self.num_microbatches):
            first = (number * self.parallel.dp + dp_rank) * size
            yield versions.on_this_cp_rank(self._micro_batch(range(first, first + size)))

    def _micro_batch(self, indices: range) -> Batch:
        """Samples of the next global batch."""
        model = self.model
        batch = data.micro_batch(self.training.seed, self.iteration, indices, model.seq_length, model.vocab_size)
        return {name: tensor.cuda() for name, tensor in batch.items()}


def initialize_parallel_state(parallel: Parallel) -> None:
    """Make Megatron's process groups for a layout; those of an equal layout are kept, so that models can share them.

    Raises:
        ValueError: If the number of processes is not the layout's.
    """
    if dist.get_world_size() != parallel.world_size:
        raise ValueError(f"{parallel} needs {parallel.world_size} processes, there are {dist.get_world_size()}")
    if parallel_state.model_parallel_is_initialized():
        if _initialized["layout"] == parallel:
            return
        parallel_state.destroy_model_parallel()
    _initialized["layout"] = parallel
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=virtual_stages(parallel),
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp,
    )


def seed_everything(seed: int) -> None:
    """Seed all generators as Megatron-LM does: one seed per pipeline stage, trackers per tensor and expert rank."""
    stage_seed = seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(stage_seed)
    np.random.seed(stage_seed)
    torch.manual_seed(stage_seed)
    tensor_parallel.model_parallel_cuda_manual_seed(stage_seed)


def _build_chunks(model: TinyGPT, parallel: Parallel, training: Training, config: Any) -> list[DistributedDataParallel]:
    stages = virtual_stages(parallel)
    chunks = [build_chunk(model, parallel, config, stage) for stage in (range(stages) if stages else [None])]
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=training.grads_in_fp32(model.dtype),
        overlap_grad_reduce=training.overlap_grad_reduce,
        use_distributed_optimizer=training.optimizer == "distributed",
        bucket_size=_bucket_size(training, parallel),
        pad_buckets_for_high_nccl_busbw=training.ddp_pad_buckets_for_high_nccl_busbw,
        check_for_nan_in_grad=model.dtype != "fp16",
    )
    return [
        DistributedDataParallel(config=config, ddp_config=ddp_config, module=chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]


def _bucket_size(training: Training, parallel: Parallel) -> int | None:
    """Megatron-LM's rule: no limit unless reduction overlaps the backward pass."""
    if not training.overlap_grad_reduce:
        return None
    return training.ddp_bucket_size or max(40_000_000, 1_000_000 * parallel.dp * parallel.cp)


def _build_optimizer(
    chunks: list[DistributedDataParallel], model: TinyGPT, training: Training
) -> tuple[MegatronOptimizer | None, OptimizerParamScheduler | None]:
    if training.optimizer == "none":
        return None, None
    config = OptimizerConfig(
        optimizer="adam",
        lr=training.lr,
        min_lr=training.min_lr,
        decoupled_lr=training.decoupled_lr,
        weight_decay=training.weight_decay,
        clip_grad=training.clip_grad,
        bf16=model.dtype == "bf16",
        fp16=model.dtype == "fp16",
        params_dtype=DTYPES[model.dtype],
        initial_loss_scale=training.initial_loss_scale,
        use_distributed_optimizer=training.optimizer == "distributed",
    )
    told = {} if get_standard_config_overrides is None else {"config_overrides": get_standard_config_overrides(config)}
    optimizer = get_megatron_optimizer(config, chunks, **told)
    return optimizer, _build_scheduler(optimizer, training)


def _build_scheduler(optimizer: MegatronOptimizer, training: Training) -> OptimizerParamScheduler:
    samples = training.global_batch_size  # Megatron counts the scheduler's steps in samples
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=training.lr,
        min_lr=training.min_lr,
        lr_warmup_steps=training.lr_warmup_iters * samples,
        lr_decay_steps=training.train_iters * samples,
        lr_decay_style="cosine",
        start_wd=training.weight_decay,
        end_wd=training.weight_decay,
        wd_incr_steps=training.train_iters * samples,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=False,
    )


def _connect(
    config: Any, chunks: list[DistributedDataParallel], optimizer: MegatronOptimizer | None, training: Training
) -> None:
    """Give the schedules the functions that Megatron-LM's loop gives them."""
    config.finalize_model_grads_func = finalize_model_grads
    if optimizer is not None:
        config.grad_scale_func = optimizer.scale_loss
    if training.overlap_grad_reduce:
        no_sync, grad_sync = [chunk.no_sync for chunk in chunks], [chunk.start_grad_sync for chunk in chunks]
        several = len(chunks) > 1
        config.no_sync_func = no_sync if several else no_sync[0]
        config.grad_sync_func = grad_sync if several else grad_sync[0]


def _forward_step(batches: Iterator[Batch], chunk: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    batch = next(batches)
    output = chunk(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(_loss)


def _value_step(batches: Iterator[Batch], chunk: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """A critic's: with labels Megatron would take its one value for the only word of a vocabulary, whose loss is always 0."""
    batch = next(batches)
    return chunk(batch["tokens"], batch["position_ids"], None), partial(_value_loss, batch["labels"])


def _value_loss(
    labels: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """What :func:`_loss` gives, of values that are to be a number made of the next word."""
    return _loss((values.float().squeeze(-1) - labels.float().sin()).square())


def _loss(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The loss summed over a micro-batch's tokens, their number, and both as the report."""
    loss = output.float().sum()
    tokens = torch.tensor(output.numel(), dtype=torch.int, device="cuda")
    return loss, tokens, {"lm loss": torch.stack([loss.detach().double(), tokens.double()])}


def _global_mean(reports: list[torch.Tensor]) -> float:
    """Mean over the global batch of what the last stage saw, sent to every rank."""
    total = torch.zeros(2, dtype=torch.float64, device="cuda")
    if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        total = torch.stack(reports).sum(dim=0)
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    dist.broadcast(total, src=dist.get_world_size() - 1)  # the last rank is on the last stage in every layout
    return (total[0] / total[1]).item()
