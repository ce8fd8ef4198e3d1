"""Let real megatron-core 0.13.1 write small checkpoints on the CPU, ``torch`` and ``torch_dist`` at the same iteration:

PYTHONPATH=.venv/megatron-0.13.1 python tests/goldens/megatron_0_13/make.py

Writes ``experts_tp2ep2`` and ``pp2`` beside this file, and ``dist_…`` of both. The tests need no megatron-core.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from mcore_rlhf.demo.configs import Parallel, TinyGPT, Training
from mcore_rlhf.demo.workers import WorkerPool
from tests.reference.dist_jobs import MODEL_SPACE, DistSession, observe_dist
from tests.reference.observing import Session

HERE = Path(__file__).parent
SMALL = TinyGPT(
    num_layers=2, hidden_size=16, num_attention_heads=2, num_query_groups=2, kv_channels=8, ffn_hidden_size=24, seq_length=16,
    vocab_size=30, dropout=0.0,
)  # fmt: skip
CASES = {
    "experts_tp2ep2": (replace(SMALL, num_experts=4), Parallel(tp=2, ep=2, dp=2, sequence_parallel=True)),
    "pp2": (SMALL, Parallel(pp=2)),
}


def save(folder: str, wanted: DistSession) -> None:
    """Train two steps and save, below a folder that the checkpoint does not know."""
    os.chdir(folder)  # torch stores the path that it was given
    observe_dist(wanted)


def main() -> None:
    for name, (model, parallel) in CASES.items():
        for folder in (name, f"dist_{name}"):
            shutil.rmtree(HERE / folder, ignore_errors=True)
        session = Session(model, parallel, Training(global_batch_size=8), save=name)
        with WorkerPool(parallel.world_size) as pool:
            wanted = DistSession(session, MODEL_SPACE, save=f"dist_{name}")
            pool.run(save, str(HERE), wanted, world_size=parallel.world_size)
        nbytes = sum(path.stat().st_size for path in (HERE / name).rglob("*") if path.is_file())
        print(f"{name}: {nbytes:,} bytes")


if __name__ == "__main__":
    main()
