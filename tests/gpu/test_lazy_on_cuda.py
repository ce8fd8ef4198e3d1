"""Copies behind training on a GPU: streams that wait for one another, and a CPU that waits for none of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf.engines.plain import TorchEngine
from mcore_rlhf.errors import StorageError
from mcore_rlhf.manager.run import steps
from mcore_rlhf.manager.run.manager import CheckpointManager
from mcore_rlhf.manager.run.options import ManagerOptions
from mcore_rlhf.manager.run.stream import Stream
from tests.unit.manager.test_manager_lazy import Run, saved

OPTIONS = ManagerOptions(catch_signals=False, fsync=False, lazy_snapshot=True)
MIB = 1 << 20
A_SECOND = 2_000_000_000
"""Clock cycles of a GPU, about."""


def on_the_gpu(width: int = 2000, **settings: Any) -> Run:
    """A run of some 100 MB whose passes write its buffers."""
    run = Run(width)
    run.model.cuda()
    run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=0.1, **settings)
    return run


def passes(run: Run) -> None:
    """Forward and backward; what ``Run.passes`` does, with a batch on the GPU."""
    counts: Any = run.model.counts
    counts += 1
    loss = run.model(torch.randn(64, run.model[0].in_features, device="cuda")).pow(2).mean()
    run.optimizer.zero_grad()
    loss.backward()


@pytest.mark.parametrize("limit", [None, 16 * MIB])
@pytest.mark.parametrize("settings", [{}, {"fused": True}, {"foreach": False}], ids=["foreach", "fused", "one by one"])
def test_it_is_what_a_blocking_save_saves(tmp_path: Path, settings: dict[str, Any], limit: int | None) -> None:
    run, options = on_the_gpu(**settings), replace(OPTIONS, max_host_memory=limit)
    with run.manager(tmp_path, options) as manager:
        for number in range(0, 30, 3):
            passes(run)
            run.optimizer.step()
            manager.save(number, blocking=True)
            torch.cuda._sleep(A_SECOND // 20)  # what is queued before the copy
            manager.save(number + 1)
            passes(run)
            run.optimizer.step()  # at once: behind the copy, on the GPU's own account
            manager.wait()
            assert saved(tmp_path, number) == saved(tmp_path, number + 1)


def test_the_cpu_does_not_wait_at_the_fence(tmp_path: Path) -> None:
    run = on_the_gpu()
    passes(run)
    run.optimizer.step()
    with run.manager(tmp_path, OPTIONS) as manager:
        manager.save(1, blocking=True)
        manager.reserve()  # pinning memory waits for the GPU
        torch.cuda._sleep(A_SECOND)
        slept = torch.cuda.Event()
        slept.record()
        manager.save(2)
        passes(run)
        run.optimizer.step()
        assert not slept.query(), "training has gone on while what was queued before the save still runs"
        manager.wait()
        assert saved(tmp_path, 1) == saved(tmp_path, 2)


def test_without_the_fence_it_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch does not count what a fused kernel writes to weights; that the optimizer has counted a step, it does."""
    run = on_the_gpu(fused=True)
    passes(run)
    run.optimizer.step()
    with run.manager(tmp_path, OPTIONS) as manager:
        manager.save(1, blocking=True)
        passes(run)
        begin, begun = Stream.start, list[Stream]()
        monkeypatch.setattr(Stream, "fence", lambda stream, patience: True)
        monkeypatch.setattr(Stream, "start", lambda stream: begun.append(stream))
        manager.save(2)
        run.optimizer.step()
        torch.cuda.synchronize()
        begin(*begun)
        with pytest.raises(StorageError, match="was written to after save"):
            manager.wait()
    assert [step.step for step in steps.committed(tmp_path)] == [1]


def test_an_optimizer_in_a_cuda_graph_is_not_waited_for_but_copied_at_once(tmp_path: Path) -> None:
    run = on_the_gpu(capturable=True)
    for param in run.model.parameters():
        param.grad = torch.ones_like(param)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run.optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run.optimizer.step()
    with CheckpointManager(tmp_path, TorchEngine(run.model, run.optimizer), options=OPTIONS) as manager:
        for number in range(0, 10, 2):
            graph.replay()
            manager.save(number, blocking=True)
            manager.save(number + 1)
            graph.replay()
            manager.wait()
            assert saved(tmp_path, number) == saved(tmp_path, number + 1)
