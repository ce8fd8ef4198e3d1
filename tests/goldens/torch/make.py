"""Writes ``actor/state.pt``: ``python tests/goldens/torch/make.py``."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mcore_rlhf import CheckpointManager, TorchEngine

torch.manual_seed(7)
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
                max_position_embeddings=16)
)  # fmt: skip
groups = [
    {"params": [one for one in model.parameters() if one.ndim > 1], "weight_decay": 0.1},
    {"params": [one for one in model.parameters() if one.ndim < 2], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=1e-2)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
for _ in range(2):
    tokens = torch.randint(0, 32, (2, 8))
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
with tempfile.TemporaryDirectory() as folder:
    with CheckpointManager(folder, {"actor": TorchEngine(model, optimizer, scheduler)}) as manager:
        manager.save(2)
    place = Path(__file__).parent / "actor"
    place.mkdir(exist_ok=True)
    shutil.copy(Path(folder) / "global_step_2" / "actor" / "state.pt", place)
