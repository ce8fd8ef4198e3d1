"""One rank of a run of verl's SFT: saves and resumes by its ``CheckpointHandler``, which keeps a loader's state beside the model.

``python -m tests.trainers.verl_sft_job ORDERS RANK``. Its engine is not verl's, which asks for a GPU: what the handler asks of one is
handed on to verl's own manager, as ``verl/workers/engine/fsdp/transformer_impl.py`` does (0.9.1). The loader is made as
``verl/trainer/sft_trainer.py`` makes it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.trainers.lessons import Step, begin
from tests.trainers.verl_job import Run

ITEMS, BATCH = 72, 6


class _Engine:
    """What the handler asks of verl's."""

    def __init__(self, manager: Any) -> None:
        self.save_checkpoint, self._manager = manager.save_checkpoint, manager

    def load_checkpoint(self, path: str) -> None:
        self._manager.load_checkpoint(path)

    def is_mp_src_rank_with_outputs(self) -> bool:
        return True

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank()


class Tuning(Run):
    """A run of its SFT, each of whose steps takes a batch out of the loader."""

    def __init__(self, orders: dict[str, Any]) -> None:
        from torch.utils.data import DistributedSampler
        from torchdata.stateful_dataloader import StatefulDataLoader

        super().__init__(orders)
        world = dist.get_world_size()
        items: Any = range(ITEMS)
        sampler: DistributedSampler[int] = DistributedSampler(
            items, shuffle=True, num_replicas=world, rank=dist.get_rank(), drop_last=True
        )
        self.loader = StatefulDataLoader(
            items, batch_size=BATCH // world, sampler=sampler, num_workers=orders.get("workers", 0), drop_last=True
        )
        self.batches: Any = None

    def step(self, number: int) -> Step:
        if self.batches is None:  # not before the state was loaded
            self.batches = iter(self.loader)
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, next(self.batches).tolist())
        return {**super().step(number), "data": sorted(item for part in parts for item in part)}

    def save(self, path: str, at: int) -> None:
        self._handler(path).save_checkpoint(at)

    def load(self, path: str) -> None:
        assert self._handler(path).load_checkpoint() == int(Path(path).name.rpartition("_")[2])

    def _handler(self, path: str) -> Any:
        """Of the run in whose root a step lies."""
        from verl.utils.checkpoint.checkpoint_handler import CheckpointHandler

        return CheckpointHandler(
            engine=_Engine(self.manager), train_dataloader=self.loader, default_local_dir=str(Path(path).parent)
        )


if __name__ == "__main__":
    begin(Tuning)
