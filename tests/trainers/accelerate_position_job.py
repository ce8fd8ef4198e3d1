"""accelerate's own ``save_state`` within an epoch of a ``StatefulDataLoader``: with verl's file, torchdata's loader goes on from there."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torchdata.stateful_dataloader import StatefulDataLoader

from mcore_rlhf.families.options import ConvertOptions, ReadOptions, WriteOptions
from mcore_rlhf.manager.convert_step import convert_step
from mcore_rlhf.manager.subject import find
from mcore_rlhf.trainers.known import trainer_named
from tests.trainers.hf_runs import _batch, _data, model, on_cpu

STEP, ITEMS, BATCH = 3, 40, 4


def loader_of(seed: int, workers: int) -> StatefulDataLoader[int]:
    generator = torch.Generator().manual_seed(seed)
    return StatefulDataLoader(range(ITEMS), batch_size=BATCH, shuffle=True, generator=generator, num_workers=workers)  # type: ignore[arg-type]


def run(to: str, workers: int, folder: Path) -> tuple[list[list[int]], list[list[int]]]:
    """What accelerate's loader gave after the step, and what torchdata's gives that took the position out of the target."""
    with on_cpu():
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
        trained = model(1, tie_word_embeddings=False)
        trained.config.save_pretrained(folder / "config")
        optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
        data = loader_of(1, workers)
        trained, optimizer, loader = accelerator.prepare(trained, optimizer, data)
        before = []
        for number, batch in enumerate(loader, 1):
            if number > STEP:
                before.append(batch.tolist())
                continue
            accelerator.backward(trained(**_batch(_data()[:2])).loss)
            optimizer.step()
            optimizer.zero_grad()
            if number == STEP:
                accelerator.save_state(str(folder / f"step_{STEP}"))
    options = ConvertOptions(to=to, fsync=False, write=WriteOptions(reference_config=str(folder / "config")))
    convert_step(find(folder / f"step_{STEP}", ReadOptions()), folder / "to", options)
    trainer = trainer_named(to)
    assert trainer is not None
    taken = loader_of(2, workers)
    place = folder / "to" / f"global_step_{STEP}" / trainer.data
    taken.load_state_dict(torch.load(place, weights_only=False))
    return before, [batch.tolist() for batch in taken]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        before, after = run(sys.argv[1], int(sys.argv[2]), Path(made))
    print(f"{len(after)} batches, {'the same' if before == after else f'{after}, not {before}'}")
