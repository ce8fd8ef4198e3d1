"""A run whose kernels add in another order every time: ``python -m tests.gpu.noisy_job DTYPE FOLDER STEPS METRICS AGAIN``.

An embedding, attention and a head, on a GPU that is not asked to be deterministic: atomics add up the gradient of the embedding.
"""

from __future__ import annotations

import json
import random
import sys
import time

import numpy
import torch

from mcore_rlhf import CheckpointManager, EverySteps, ManagerOptions, TorchEngine

WORDS, WIDTH = 32, 256


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(WORDS, WIDTH)
        layer = torch.nn.TransformerEncoderLayer(WIDTH, 4, 512, dropout=0.1, batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.layers(self.embed(words))).float()
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), words[:, 1:].flatten())


def main(dtype: str, folder: str, last: int, metrics: str, again: bool) -> None:
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    model = Model().to("cuda", getattr(torch, dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = ManagerOptions(save=EverySteps(1), fsync=False)
    with CheckpointManager(folder, {"actor": TorchEngine(model, optimizer)}, options=options) as manager:
        resumed = manager.load()
        if again:
            assert resumed is not None
            manager.save(resumed.step)
            return
        for step in range(resumed.step + 1 if resumed else 1, last + 1):
            time.sleep(0.3)
            loss = model(torch.randint(0, WORDS, (64, 128), device="cuda"))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            manager.maybe_save(step)
            with open(metrics, "a") as lines:
                print(json.dumps({"step": step, "loss": loss.item()}), file=lines, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5] == "1")
