"""What every trainer is given to learn, so that what one saw can be held against what another saw: model, batches, orders.

A job is a module with a ``Run``: it makes a trainer's own model wrapper, optimizer, schedule and checkpoint code, and carries orders out,
each rank in a process of its own: ``python -m tests.trainers.JOB ORDERS RANK``.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

VOCABULARY, BATCH, WIDTH = 120, 6, 16
RATE, WARM, WHOLE, LEAST = 1e-2, 2, 20, 0.1
"""Of the schedule: highest rate, steps to it, all steps, and what it ends with as a part of the highest."""
BETAS, DECAY = (0.9, 0.95), 0.01
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
}  # fmt: skip
Step = dict[str, Any]
"""What all ranks saw together in a step: the loss, learning rates, what the random generators drew."""


class Running(Protocol):
    """A trainer with a model, that trains, saves and loads."""

    def step(self, number: int) -> Step:
        """Train on the batch of that number."""

    def save(self, path: str, at: int) -> None:
        """Save the step of that number."""

    def load(self, path: str) -> None:
        """Go on from what lies there."""


class Learner:
    """A trainer whose updates are torch's own, of a model, an optimizer and a schedule."""

    model: Any
    optimizer: torch.optim.Optimizer
    schedule: Any

    def step(self, number: int) -> Step:
        """See :meth:`Running.step`."""
        loss = loss_of(self.model, number)
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return seen_of(loss, self.schedule.get_last_lr())


def model_of(orders: dict[str, Any]) -> torch.nn.Module:
    """The model with weights from a seed."""
    import transformers

    torch.manual_seed(orders["seed"])
    sizes = {**SIZES, "tie_word_embeddings": orders["tied"], **orders.get("sizes", {})}
    kinds = {"qwen2": transformers.Qwen2Config, "llama": transformers.LlamaConfig}
    config = kinds[orders["model"]](**sizes, architectures=[orders["model"].capitalize() + "ForCausalLM"])
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    for name, param in made.named_parameters():
        if param.ndim == 1:  # biases are zero at birth, and norms one: let them tell apart
            torch.nn.init.normal_(param.data, mean=1.0 if "norm" in name else 0.0, std=0.05)
        param.requires_grad_(not any(part in name for part in orders.get("frozen", ())))
    return made.to(getattr(torch, orders.get("dtype", "float32")))


def loss_of(model: Callable[..., Any], number: int) -> torch.Tensor:
    """The loss of this rank's share of a batch; the batch is the same, however many ranks share it."""
    words = torch.randint(0, VOCABULARY, (BATCH, WIDTH), generator=torch.Generator().manual_seed(1000 + number))
    share = words.tensor_split(dist.get_world_size())[dist.get_rank()]
    model.train()  # type: ignore[attr-defined]
    logits = model(input_ids=share, use_cache=False).logits.float()
    return torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, logits.size(-1)), share[:, 1:].reshape(-1))


def seen_of(loss: torch.Tensor, rates: list[float]) -> Step:
    """What all ranks saw."""
    mean = loss.detach().double()
    dist.all_reduce(mean)
    drawn = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(drawn, torch.rand(1))
    return {"loss": mean.item() / dist.get_world_size(), "lr": rates, "drawn": [one.item() for one in drawn]}


def _carried_out(make: Callable[[dict[str, Any]], Running], orders: dict[str, Any]) -> list[Step]:
    """Train some steps, save, load, in the order in which it is asked for."""
    run, seen, at = make(orders), list[Step](), 0
    torch.manual_seed(100 + dist.get_rank())
    for what, value in orders["do"]:
        if what == "train":
            for _ in range(value):
                at += 1
                seen.append(run.step(at))
        elif what == "load":
            run.load(value)
            at = orders["step"]
        elif what == "save":
            run.save(value, at)
        elif what == "attempt":
            seen.append(_attempted(make, orders, value))
        else:
            getattr(run, what)(value)
    return seen


def _attempted(make: Callable[[dict[str, Any]], Running], orders: dict[str, Any], path: str) -> Step:
    """What a new run sees in two steps after it has loaded a folder; the error, where that or a step fails. Of one rank alone."""
    run = make({**orders, "seed": orders["seed"] + 8})
    torch.manual_seed(100)
    try:
        run.load(path)
        return {"steps": [run.step(orders["step"] + 1), run.step(orders["step"] + 2)]}
    except BaseException as error:  # whatever it is, and DCP's is no Exception: that is what is looked at
        return {"failed": f"{type(error).__name__}: {error}"[-300:]}


def begin(make: Callable[[dict[str, Any]], Running]) -> None:
    """Carry the orders out whose file the command line names, as the rank that it names; rank 0 writes what was seen beside them."""
    path, rank = Path(sys.argv[1]), int(sys.argv[2])
    orders = json.loads(path.read_text())
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = dist.FileStore(str(path.with_suffix(".store")), orders["world"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=orders["world"])
    seen = _carried_out(make, orders)
    if rank == 0:
        path.with_suffix(".seen").write_text(json.dumps(seen))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # frameworks leave threads behind that no exit waits for
