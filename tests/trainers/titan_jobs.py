"""What each process of the torchtitan tests does: torchtitan's own model, containers and CheckpointManager, on the CPU.

Nothing of torchtitan is put together anew but the ``train_state`` of its ``Trainer`` (``torchtitan/train.py``). Packages that its
modules import and a checkpoint does not need (data sets, metrics, triton kernels) are empty where they are not installed.

``python -m tests.trainers.titan_jobs FOLDER`` writes the golden anew.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.trainers.absent import stand_in

WORDS, HEADS, GROUPS, WIDTH, LAYERS = 24, 2, 1, 16, 2
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": 48,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "head_dim": WIDTH // HEADS,
    "vocab_size": WORDS, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False, "hidden_act": "silu",
    "max_position_embeddings": 32,
}  # fmt: skip
SAVED, LAST = 3, 5
Seen = list[tuple[float, float, list[int]]]
"""Of every step: the losses of all ranks together, the learning rate, the samples."""


def _import_torchtitan() -> None:
    stand_in("torchtitan.models.moe.kernels", instead=True)
    stand_in("datasets")
    if importlib.util.find_spec("tensorboard") is None:
        stand_in("torch.utils.tensorboard", instead=True)


@dataclass
class TrainState:
    """As ``Trainer.state_dict`` and ``load_state_dict`` of ``torchtitan/train.py`` at 0.2.2."""

    step: int = 0
    ntokens_seen: int = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]


class Run:
    """A run of torchtitan's: one param group, which decays vectors too."""

    def __init__(self, folder: str, seed: int) -> None:
        _import_torchtitan()
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torchdata.stateful_dataloader import StatefulDataLoader
        from torchtitan.components.checkpoint import CheckpointManager
        from torchtitan.components.lr_scheduler import LRSchedulersContainer
        from torchtitan.components.optimizer import OptimizersContainer
        from torchtitan.config import Checkpoint
        from torchtitan.models.llama3.model.args import TransformerModelArgs
        from torchtitan.models.llama3.model.model import Transformer

        torch.manual_seed(seed)
        self.args = TransformerModelArgs(
            dim=WIDTH,
            n_layers=LAYERS,
            n_heads=HEADS,
            n_kv_heads=GROUPS,
            vocab_size=WORDS,
            multiple_of=16,
            max_seq_len=32,
        )
        self.model = Transformer(self.args)
        with torch.no_grad():
            self.model.init_weights()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in self.model.layers.values():
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        settings = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1, "eps": 1e-8, "fused": False, "foreach": True}
        self.optimizers = OptimizersContainer([self.model], torch.optim.AdamW, settings)
        self.schedulers = LRSchedulersContainer(self.optimizers, lambda step: max(0.1, 1 - step / 20))
        samples = torch.Generator().manual_seed(5)
        self.loader = StatefulDataLoader(list(range(64)), batch_size=4, shuffle=True, generator=samples)
        self.ids: Iterator[torch.Tensor] | None = None
        self.state = TrainState()
        self.manager = CheckpointManager(
            dataloader=self.loader, model_parts=[self.model], optimizers=self.optimizers, lr_schedulers=self.schedulers,
            states={"train_state": self.state}, sd_adapter=None, base_folder=folder,
            checkpoint_config=Checkpoint(enable=True, folder="checkpoint", interval=SAVED, last_save_model_only=False),
        )  # fmt: skip

    def train(self, to: int) -> Seen:
        """Steps up to one."""
        seen: Seen = []
        self.ids = self.ids or iter(self.loader)
        while self.state.step < to:
            self.state.step += 1
            made = torch.Generator().manual_seed(1000 * self.state.step + dist.get_rank())
            words = torch.randint(0, WORDS, (2, 12), generator=made)
            batch = next(self.ids).tolist()
            logits = self.model(words).float()
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, WORDS), words[:, 1:].reshape(-1))
            loss.backward()
            self.optimizers.step()
            self.schedulers.step()
            self.optimizers.zero_grad()
            whole = loss.detach().double()
            dist.all_reduce(whole)
            self.state.ntokens_seen += words.numel()
            seen.append((whole.item(), self.schedulers.schedulers[0].get_last_lr()[0], batch))
        return seen


def train(folder: str) -> Seen:
    """Train, save, go on; the golden's values beside it, as torchtitan's own adapter names them."""
    run = Run(folder, 1)
    seen = run.train(SAVED)
    run.manager.save(SAVED)
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
    from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter

    gather = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole, states = get_state_dict(run.model, run.optimizers.optimizers[0], options=gather)
    if dist.get_rank() == 0:
        adapter = Llama3StateDictAdapter(run.args, None)
        moments = {key: {n: s[key] for n, s in states["state"].items()} for key in ("exp_avg", "exp_avg_sq")}
        expected = {"master": adapter.to_hf(dict(whole)), **{key: adapter.to_hf(of) for key, of in moments.items()}}
        torch.save(
            {key: {n: t.clone() for n, t in of.items()} for key, of in expected.items()}, Path(folder, "expected.pt")
        )
    seen += run.train(LAST)
    if dist.get_rank() == 0:
        Path(folder, "seen.json").write_text(json.dumps(seen))
        Path(folder, "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    return seen


def resume(folder: str) -> Seen:
    """Load what is there into other weights, and go on; nothing where the trainer begins anew."""
    run = Run(folder, 2)
    if not run.manager.load(step=-1):
        return []
    return run.train(LAST)


def resume_without(folder: str, excluded: list[str]) -> tuple[int, Seen] | str | None:
    """The step that was found and what two more saw, of what is loaded but for some keys; the error, or None where it begins anew."""
    from torch.distributed.checkpoint.api import CheckpointException

    run = Run(folder, 2)
    run.manager.exclude_from_loading = excluded
    try:
        if not run.manager.load(step=-1):
            return None
    except (
        Exception,
        CheckpointException,
    ) as error:  # whatever it is: that is what is looked at; torch's is no Exception
        return f"{type(error).__name__}: {error}"
    found, run.state.step = run.state.step, SAVED  # the words of a step are of its number
    return found, run.train(LAST)


def resume_in(folder: str, dtype: str) -> list[bool]:
    """Of each weight and moment whether it is what is stored, rounded to the type that ``training.dtype`` names.

    torchtitan makes its model within ``utils.set_default_dtype`` of it (``torchtitan/train.py:149``).
    """
    made: list[list[torch.Tensor]] = []
    for one in (torch.float32, getattr(torch, dtype)):
        before = torch.get_default_dtype()
        torch.set_default_dtype(one)
        try:
            run = Run(folder, 2)
        finally:
            torch.set_default_dtype(before)
        assert run.manager.load(step=-1)
        states = run.optimizers.optimizers[0].state.values()
        moments = [state[key] for state in states for key in ("exp_avg", "exp_avg_sq")]
        made.append([value.to_local().detach() for value in (*run.model.parameters(), *moments)])
    return [
        bool(torch.equal(stored.to(now.dtype), now)) and str(now.dtype) == f"torch.{dtype}"
        for stored, now in zip(*made, strict=True)
    ]


if __name__ == "__main__":
    from mcore_rlhf.demo.workers import WorkerPool

    with WorkerPool(2, preload="tests.trainers.titan_jobs") as pool:
        losses = pool.run(train, sys.argv[1], world_size=2)
    print(losses[0])
