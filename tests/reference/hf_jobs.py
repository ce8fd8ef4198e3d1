"""What a rank does in real Megatron with weights that came from Hugging Face, or go there: load them, and predict.

The module is imported by the tests too, so Megatron is imported only when a worker runs the job.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mcore_rlhf.demo.configs import Parallel, TinyGPT, Training

Logits = NDArray[np.float32]


def logits(model: TinyGPT, root: str, tokens: list[list[int]]) -> Logits:
    """What a model predicts, on one rank, without dropout.

    Args:
        model: What it is.
        root: A checkpoint of it, at TP 1 and PP 1.
        tokens: Samples.

    Returns:
        Logits of shape (samples, tokens, rows of the vocabulary).
    """
    import torch

    from mcore_rlhf.demo import megatron_checkpoint
    from mcore_rlhf.demo.trainer import DemoTrainer

    trainer = DemoTrainer(model, Parallel(), Training(optimizer="none"))
    (file,) = Path(root).glob("*/mp_rank_00/model_optim_rng.pt")
    state = torch.load(file, weights_only=False)  # written a moment ago by our own conversion
    megatron_checkpoint._load_model(trainer, state)
    (chunk,) = trainer.chunks
    chunk.eval()
    batch = torch.tensor(tokens)
    positions = torch.arange(batch.shape[1]).expand_as(batch)
    with torch.no_grad():
        found: Logits = chunk(batch, positions, None).float().numpy()
    return found
