"""What a policy says of fixed answers, in a precision of its own: the same on every layout and every CPU, but for the order of sums."""

from __future__ import annotations

from typing import Literal

import mcore_rlhf.demo.with_megatron  # noqa: F401

# isort: split
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from mcore_rlhf.demo.model import DTYPES
from mcore_rlhf.demo.rl.models import frozen_copy
from mcore_rlhf.demo.rl.passes import Batch, Passes
from mcore_rlhf.demo.rl.task import Reversal
from mcore_rlhf.demo.trainer import DemoTrainer
from mcore_rlhf.manager.run.rng import captured, put_back


def fixed_log_probs(actor: DemoTrainer, dtype: Literal["fp32", "fp64"]) -> torch.Tensor:
    """Log-probabilities of every token of all prompts with their right answers; every rank calls.

    A copy of the model is made for it, with the same weights in a wider type, and no random number is used up.

    Args:
        actor: The policy.
        dtype: What is computed in: ``fp64`` or ``fp32``, which hold every weight as it is.

    Returns:
        fp64, (prompts, tokens - 1); the same on every rank of a model-parallel group.
    """
    task = Reversal()
    tokens = torch.tensor([task[number] for number in range(len(task))], device="cuda")
    random, tracked = captured(), get_cuda_rng_tracker().get_states()
    chunks = frozen_copy(actor, dtype)
    put_back(random)
    get_cuda_rng_tracker().set_states(tracked)
    passes = Passes(actor.parallel.pp, actor.model.vocab_size)
    return passes.forward(chunks, {"tokens": tokens}, _read, DTYPES[dtype]).double()


def _read(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    table = torch.log_softmax(logits[:, :-1], dim=-1)
    return table.gather(-1, batch["tokens"][:, 1:, None]).squeeze(-1)
