"""An adapter on two ranks under DDP: rank 0 writes, both load, and the run goes on bit for bit."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mcore_rlhf import CheckpointManager
from mcore_rlhf.engines.adapter import AdapterEngine
from tests.distributed.forked import SERVER
from tests.helpers.live_lora import Adapted, optimizer_of, train

WORLD = 2


def run_rank(rank: int, folder: Path) -> None:
    """Save at step 2, go on to 4; then the same again from what was saved."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=60))
    first = Adapted(1, head=True)
    optimizer = optimizer_of(first)
    model = DistributedDataParallel(first)
    train(model, optimizer, range(2))
    with CheckpointManager(folder / "run", {"actor": AdapterEngine(model, optimizer)}) as manager:
        manager.save(2, blocking=True)
    expected = train(model, optimizer, range(2, 4))
    again = Adapted(2 + rank, head=True)  # a fresh model is not even the same on all ranks
    fresh = optimizer_of(again)
    with CheckpointManager(folder / "run", {"actor": AdapterEngine(again, fresh)}) as manager:
        resumed = manager.load()
    found = train(DistributedDataParallel(again), fresh, range(2, 4))
    step = None if resumed is None else resumed.step
    (folder / f"seen-{rank}.json").write_text(json.dumps({"expected": expected, "found": found, "step": step}))
    # The reducer goes before its group: as the last owner it would join gloo's thread under the GIL, which that thread waits for.
    del model
    dist.destroy_process_group()


@pytest.mark.timeout(420)
def test_two_ranks(tmp_path: Path) -> None:
    ranks = [SERVER.Process(target=run_rank, args=(rank, tmp_path)) for rank in range(WORLD)]
    try:
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(180)
        assert [rank.exitcode for rank in ranks] == [0] * WORLD
    finally:
        for rank in ranks:
            rank.kill()
    seen = [json.loads((tmp_path / f"seen-{rank}.json").read_text()) for rank in range(WORLD)]
    assert all(one["step"] == 2 and one["found"] == one["expected"] for one in seen)
    names = {path.name for path in (tmp_path / "run" / "global_step_2" / "actor").iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors", "mcore_rlhf", "state.pt"}
