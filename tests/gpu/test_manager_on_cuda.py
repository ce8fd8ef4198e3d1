"""The manager with live tensors on a GPU: random states, pinned staging, and real megatron-core without the stand-in."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import torch

from mcore_rlhf.engines.plain import TorchEngine
from mcore_rlhf.manager.run import steps
from mcore_rlhf.manager.run.manager import CheckpointManager
from mcore_rlhf.manager.run.options import ManagerOptions
from mcore_rlhf.manager.run.rng import captured, put_back

OPTIONS = ManagerOptions(catch_signals=False)


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    module = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.Dropout(0.3), torch.nn.Linear(2048, 512)).cuda()
    return module, torch.optim.AdamW(module.parameters(), lr=1e-2)


def step(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    loss = module(torch.randn(16, 512, device="cuda")).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item().hex()


def test_the_random_states_of_the_gpu_are_kept() -> None:
    torch.cuda.manual_seed(random.randrange(1 << 30))
    torch.rand(7, device="cuda")
    state = captured()
    expected = torch.rand(5, device="cuda")
    put_back(state)
    assert torch.equal(torch.rand(5, device="cuda"), expected)


def test_resume_is_exact_with_dropout_on_the_gpu(tmp_path: Path) -> None:
    module, optimizer = build()
    uninterrupted = [step(module, optimizer) for _ in range(6)]
    module, optimizer = build()
    with CheckpointManager(tmp_path, TorchEngine(module, optimizer), options=OPTIONS) as manager:
        first = [step(module, optimizer) for _ in range(3)]
        manager.save(3)
        for param in module.parameters():
            param.data.zero_()  # the save has its own copy
    module, optimizer = build()
    with CheckpointManager(tmp_path, TorchEngine(module, optimizer), options=OPTIONS) as manager:
        resumed = manager.load("auto")
        assert resumed is not None
        assert resumed.step == 3
        assert first + [step(module, optimizer) for _ in range(3)] == uninterrupted


def test_staging_is_pinned_and_used_again(tmp_path: Path) -> None:
    module, optimizer = build()
    step(module, optimizer)
    with CheckpointManager(tmp_path, TorchEngine(module, optimizer), options=OPTIONS) as manager:
        manager.reserve()
        staging = manager._saver._staging
        assert staging._buffer.is_pinned()
        address, nbytes = staging._buffer.data_ptr(), staging.nbytes
        for number in range(1, 4):
            manager.save(number)
        manager.wait()
        assert (staging._buffer.data_ptr(), staging.nbytes) == (address, nbytes)


def test_real_megatron_trains_saves_and_resumes_exactly(tmp_path: Path) -> None:
    def train(folder: str, steps_: int) -> list[dict[str, object]]:
        metrics = tmp_path / f"{folder}.jsonl"
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "-m", "mcore_rlhf.demo.train",
            "--algorithm", "grpo", "--tp", "1", "--pp", "1", "--steps", str(steps_), "--save-interval", "2",
            "--output-dir", str(tmp_path / folder), "--async-save", "--resume", "auto", "--metrics", str(metrics),
        ]  # fmt: skip
        subprocess.run(command, check=True, timeout=300)
        return [json.loads(line) for line in metrics.read_text().splitlines()]

    whole = train("whole", 4)
    train("halves", 2)
    assert train("halves", 4) == whole
    assert [found.step for found in steps.committed(next((tmp_path / "halves").rglob("checkpoints")))] == [2, 4]
