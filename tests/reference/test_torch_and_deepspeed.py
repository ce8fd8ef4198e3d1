"""Runs of Megatron and DeepSpeed that become a plain loop's ``state.pt``, and such a loop's that becomes Megatron's: the next losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch

from mcore_rlhf.demo.configs import Parallel, Training
from mcore_rlhf.demo.workers import WorkerPool
from tests.reference import deepspeed_from_megatron
from tests.reference.deepspeed_from_megatron import batches
from tests.reference.deepspeed_models import Batch, Tuning
from tests.reference.lab import Lab
from tests.reference.test_crossing_deepspeed import CONFIG, FP32, JOBS, TIMEOUT, TOLERANCE, converted, described

WANTED = {**CONFIG, "vocab_size": FP32.vocab_size}


class Loop:
    """As anybody writes one: matrices decay, vectors do not, gradients are clipped."""

    def __init__(self) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(9)
        self.model = LlamaForCausalLM(LlamaConfig(**WANTED))
        params = [*self.model.parameters()]
        groups = [
            {"params": [one for one in params if one.ndim > 1], "weight_decay": 0.1},
            {"params": [one for one in params if one.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=Training().lr, betas=(0.9, 0.999), eps=1e-8)

    def load(self, folder: Path) -> dict[str, Any]:
        state: dict[str, Any] = torch.load(folder / "state.pt", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        return state

    def train(self, data: list[Batch]) -> list[float]:
        losses = []
        for tokens, labels in data:
            logits = self.model(input_ids=torch.tensor(tokens), use_cache=False).logits.float()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(labels).flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


def test_a_loop_goes_on_as_megatron_does(lab: Lab, tmp_path: Path) -> None:
    trained, loop = lab.train(FP32, Parallel(tp=2, pp=2), Training()), Loop()
    state = loop.load(converted(trained.root, tmp_path / "torch", "torch"))
    assert (state["iteration"], state["global_samples"]) == (2, 2 * Training().global_batch_size)
    assert {float(of["step"]) for of in state["optimizer"]["state"].values()} == {2.0}
    data = batches(FP32, Training(), 2, 4)
    assert loop.train(data) == pytest.approx([trained.losses[3], trained.losses[4]], rel=TOLERANCE)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_loop_goes_on_as_deepspeed_does(stage: int, deepspeed_pool: WorkerPool, tmp_path: Path) -> None:
    tuning, data = Tuning("llama", WANTED, "fp32", stage, 2, lr=Training().lr), batches(FP32, Training(), 0, 4)
    seen = deepspeed_pool.run(
        f"{JOBS}:train_and_save", tuning, str(tmp_path / "ds"), data[:2], data[2:], world_size=2, timeout=TIMEOUT
    )[0]
    loop, root = Loop(), converted(tmp_path / "ds", tmp_path / "torch", "torch")
    assert loop.load(root)["iteration"] == 2
    assert loop.train(data[2:]) == pytest.approx(seen.losses, rel=TOLERANCE)


def test_megatron_goes_on_as_a_loop_does(pool: WorkerPool, tmp_path: Path) -> None:
    loop, data, training = Loop(), batches(FP32, Training(), 0, 4), Training()
    loop.train(data[:2])
    folder = tmp_path / "global_step_2" / "actor"
    folder.mkdir(parents=True)
    held = {"model": loop.model.state_dict(), "optimizer": loop.optimizer.state_dict(), "iteration": 2}
    torch.save({**held, "global_samples": 2 * Training().global_batch_size}, folder / "state.pt")
    wanted = loop.train(data[2:])
    root = converted(
        folder, tmp_path / "mcore", "megatron", tp=2, pp=2, padded_vocab_size=FP32.vocab_size,
        reference_config=described(tmp_path, Tuning("llama", WANTED, "fp32", 1, 1)), transformer_impl="local",
        lr_limits=(training.lr, training.min_lr),
    )  # fmt: skip
    losses = pool.run(
        deepspeed_from_megatron.load_and_train, FP32, Parallel(tp=2, pp=2), training, str(root), 2, world_size=4, timeout=2 * TIMEOUT
    )[0]  # fmt: skip
    assert losses == pytest.approx(wanted, rel=TOLERANCE)
