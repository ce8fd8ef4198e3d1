"""An adapter on two ranks under DDP: rank 0 writes, behind training and in waves; both load, and the run goes on bit for bit."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mcore_rlhf import CheckpointManager, ManagerOptions
from mcore_rlhf.demo.workers import WorkerPool
from mcore_rlhf.engines.adapter import AdapterEngine
from mcore_rlhf.storage import host_pool
from tests.helpers.latest import copied_at_the_latest
from tests.helpers.live_lora import Adapted, optimizer_of, train


def run_rank(folder: Path) -> dict[str, object]:
    """Save at step 2, go on to 4; then the same again from what was saved."""
    first = Adapted(1, head=True)
    optimizer = optimizer_of(first)
    model = DistributedDataParallel(first)
    train(model, optimizer, range(2))
    lazy = ManagerOptions(lazy_snapshot=True, max_host_memory=1)
    with (
        patch.object(host_pool, "LEAST", 1 << 10),
        CheckpointManager(folder / "run", {"actor": AdapterEngine(model, optimizer)}, options=lazy) as manager,
        copied_at_the_latest() as waited,
    ):
        manager.save(2)
        assert manager._saver._staging._last[-1].wraps == (dist.get_rank() == 0)
        expected = train(model, optimizer, range(2, 4))
    assert len(waited) == 1
    again = Adapted(2 + dist.get_rank(), head=True)  # a fresh model is not even the same on all ranks
    fresh = optimizer_of(again)
    with CheckpointManager(folder / "run", {"actor": AdapterEngine(again, fresh)}) as manager:
        resumed = manager.load()
    found = train(DistributedDataParallel(again), fresh, range(2, 4))
    step = None if resumed is None else resumed.step
    # The reducer goes before its group: as the last owner it would join gloo's thread under the GIL, which that thread waits for.
    del model
    return {"expected": expected, "found": found, "step": step}


def test_two_ranks(pool: WorkerPool, tmp_path: Path) -> None:
    seen = pool.run(run_rank, tmp_path, world_size=2, timeout=180)
    assert all(one["step"] == 2 and one["found"] == one["expected"] for one in seen)
    names = {path.name for path in (tmp_path / "run" / "global_step_2" / "actor").iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors", "mcore_rlhf", "state.pt"}
