"""Make ``v2_ws2`` anew: ``torchrun --nproc-per-node 2 make.py FOLDER``, with nemo_automodel 0.4.0 beside torch and transformers.

NeMo-RL's DTensor v2 worker calls this ``Checkpointer`` (``nemo_rl/models/automodel/checkpoint.py`` at 7ea279a); no line of NeMo-RL is run.
"""

import os
import sys

import torch
import torch.distributed as dist
from nemo_automodel.components.checkpoint.checkpointing import Checkpointer, CheckpointingConfig
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Qwen2Config, Qwen2ForCausalLM

folder = sys.argv[1]
dist.init_process_group("gloo")
torch.manual_seed(1)
config = Qwen2Config(
    vocab_size=24, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    max_position_embeddings=64, tie_word_embeddings=True, architectures=["Qwen2ForCausalLM"],
)  # fmt: skip
model = Qwen2ForCausalLM(config).float()
for name, parameter in model.named_parameters():
    if parameter.ndim == 1:  # biases are zero at birth, and norms one
        torch.nn.init.normal_(parameter.data, mean=float("norm" in name), std=0.05)
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.01)
scheduler = torch.optim.lr_scheduler.SequentialLR(
    optimizer,
    [
        torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=4),
        torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0, total_iters=10**10),
    ],
    [4],
)
for step in range(3):
    words = torch.randint(0, 24, (2, 8), generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    model(input_ids=words, labels=words, use_cache=False).loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
settings = CheckpointingConfig(
    enabled=True, checkpoint_dir=folder, model_save_format="safetensors", model_cache_dir="", model_repo_id="",
    save_consolidated=False, is_peft=False,
)  # fmt: skip
checkpointer = Checkpointer(settings, 0, 0, 0)
weights = f"{folder}/step_3/policy/weights"
os.makedirs(weights, exist_ok=True)
checkpointer.save_model(model, weights)
checkpointer.save_optimizer(optimizer, model, f"{folder}/step_3/policy/optimizer", scheduler)
whole, states = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
if dist.get_rank() == 0:
    torch.save({"model": dict(whole), "states": states["state"]}, f"{folder}/expected.pt")
dist.barrier()
os._exit(0)
