"""Passes of Megatron's pipeline schedule over a batch: forward only, or with gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import mcore_rlhf.demo.with_megatron  # noqa: F401

# isort: split
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.pipeline_parallel import get_forward_backward_func

Batch = dict[str, torch.Tensor]
"""Tensors of one length, an answer per row; ``tokens`` (int64, (samples, length)) is always there."""
Read = Callable[[torch.Tensor, Batch], torch.Tensor]
"""What to keep of a micro-batch's output (samples, length, vocabulary or 1): fp32 as a rule, a row per sample."""
Loss = Callable[[torch.Tensor, Batch], tuple[torch.Tensor, torch.Tensor]]
"""The loss of a micro-batch, and numbers to report with it."""


@dataclass(frozen=True, slots=True)
class Passes:
    """How batches go through a model.

    Args:
        micro_batches: Parts into which a rank's batch is cut; with virtual stages a multiple of the pipeline stages.
        vocabulary: True tokens; the rows that pad the vocabulary for tensor parallelism are never sampled. 0 for a
            value head.
    """

    micro_batches: int
    vocabulary: int = 0

    def forward(
        self, chunks: Sequence[torch.nn.Module], batch: Batch, read: Read, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Run a model without gradients and without dropout.

        Args:
            chunks: Its chunks on this rank.
            batch: This rank's; equal on all ranks of a model-parallel group.
            read: What to keep of the last stage's output.
            dtype: Of what it keeps.

        Returns:
            What was kept, a row per sample in the order of the batch; the same on every pipeline stage.
        """
        with _evaluating(chunks), torch.no_grad():
            kept = self._run(chunks, batch, partial(self._reading, read), forward_only=True)
        return _from_last_stage(torch.cat(kept) if kept else None, dtype)

    def backward(self, chunks: Sequence[torch.nn.Module], batch: Batch, loss: Loss) -> torch.Tensor:
        """Run a model, and leave the gradients of the mean loss in its buffers, summed over the ranks as Megatron does.

        Returns:
            Mean over the global batch of what ``loss`` reports; the same on every rank.
        """
        reports = self._run(chunks, batch, partial(self._losing, loss), forward_only=False)
        table = _from_last_stage(torch.stack(reports) if reports else None, torch.float64)
        return global_sum(table.mean(dim=0)) / parallel_state.get_data_parallel_world_size()

    def _run(self, chunks: Sequence[torch.nn.Module], batch: Batch, finish: Any, *, forward_only: bool) -> list[Any]:
        samples, length = batch["tokens"].shape
        size = samples // self.micro_batches
        iterators = [self._micro_batches(batch, size) for _ in chunks]
        several = len(iterators) > 1
        return get_forward_backward_func()(
            forward_step_func=partial(_step, finish),
            data_iterator=iterators if several else iterators[0],
            model=list(chunks) if several else chunks[0],
            num_microbatches=self.micro_batches,
            seq_length=length,
            micro_batch_size=size,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _micro_batches(self, batch: Batch, size: int) -> Iterator[Batch]:
        for first in range(0, size * self.micro_batches, size):
            yield {name: tensor[first : first + size] for name, tensor in batch.items()}

    def _whole(self, output: torch.Tensor) -> torch.Tensor:
        """Every token's logit on every tensor-parallel rank; values are whole already."""
        if not self.vocabulary:
            return output
        return tensor_parallel.gather_from_tensor_model_parallel_region(output)[..., : self.vocabulary]

    def _reading(self, read: Read, batch: Batch, output: torch.Tensor, non_loss_data: bool = True) -> torch.Tensor:
        return read(self._whole(output), batch)

    def _losing(self, loss: Loss, batch: Batch, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        value, report = loss(self._whole(output), batch)
        return value, report.detach().double()


def _step(finish: Any, batches: Iterator[Batch], chunk: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    batch = next(batches)
    tokens = batch["tokens"]
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return chunk(tokens, positions, None), partial(finish, batch)


@contextmanager
def _evaluating(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Switch dropout off."""
    before = [chunk.training for chunk in chunks]
    for chunk in chunks:
        chunk.eval()
    try:
        yield
    finally:
        for chunk, training in zip(chunks, before, strict=True):
            chunk.train(training)


def _from_last_stage(table: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Send what only the last pipeline stage knows to the others.

    Args:
        table: (rows, columns) of ``dtype`` on the last stage, None elsewhere.
        dtype: Its type.
    """
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        source = parallel_state.get_pipeline_model_parallel_last_rank()
        group = parallel_state.get_pipeline_model_parallel_group()
        shape = torch.tensor(table.shape if table is not None else (0, 0), device="cuda")
        dist.broadcast(shape, source, group=group)
        if table is None:
            table = torch.empty(*shape.tolist(), dtype=dtype, device="cuda")
        dist.broadcast(table, source, group=group)
    if table is None:
        raise RuntimeError("the schedule returned nothing on the last pipeline stage")
    return table


def global_sum(values: torch.Tensor) -> torch.Tensor:
    """Add up over the data-parallel ranks; the same bits on every rank."""
    total = values.clone()
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    return total
