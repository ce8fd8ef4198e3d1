"""A script like Megatron-LM's ``pretrain_gpt.py``, for the package megatron-core 0.19, which has ``pretrain`` and no script that calls it.

Source: megatron-core 0.19.2, ``megatron/training/training.py`` (``pretrain``), and Megatron-LM core_v0.19.0, ``pretrain_gpt.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.training import get_args, get_tokenizer, training
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args


def datasets(samples: list[int], vp_stage: int | None = None) -> Any:
    """Training, validation and test data; every rank reads its own."""
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed, sequence_length=args.seq_length, split="90,5,5", tokenizer=get_tokenizer(),
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, create_attention_mask=True,
    )  # fmt: skip
    return BlendedMegatronDatasetBuilder(MockGPTDataset, samples, lambda: True, config).build()


def loss_of(mask: torch.Tensor, output: torch.Tensor, model: Any = None) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Sum of the losses, number of tokens, and what is logged."""
    total, tokens = (output.view(-1).float() * mask.view(-1)).sum(), mask.sum().int()
    return total, tokens, {"lm loss": torch.stack([total.detach(), tokens.float()])}


def forward_step(batches: Any, model: Any, return_schedule_plan: bool = False) -> tuple[torch.Tensor, Any]:
    """One micro-batch."""
    batch = next(batches)
    output = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
    return output, partial(loss_of, batch["loss_mask"])


def main(train: Callable[..., object] | None = None) -> None:
    """Call ``pretrain`` as such a script does.

    Args:
        train: What it calls where it would begin to train, in the place of its own.
    """
    datasets.is_distributed = True  # type: ignore[attr-defined]
    if train is not None:
        training.train = train
    arguments = parse_and_validate_args()
    container = pretrain_cfg_container_from_args(arguments, gpt_config_from_args(arguments))
    training.pretrain(container, datasets, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    main()
