"""Let real megatron-core 0.16.1 write small torch_dist checkpoints on the CPU: python tests/goldens/megatron_dist/make.py

Writes ``corrupt_dp3``, ``experts_ep2`` and ``plain_tp2`` beside this file. Needs megatron-core; the tests do not.
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
from tests.reference.dist_jobs import DP_RESHARDABLE, FULLY_RESHARDABLE, DistSession, observe_dist
from tests.reference.observing import Session

HERE = Path(__file__).parent
SMALL = TinyGPT(
    num_layers=2, hidden_size=16, num_attention_heads=2, num_query_groups=1, kv_channels=8, ffn_hidden_size=24, seq_length=16,
    vocab_size=30, dropout=0.0,
)  # fmt: skip
CASES = {
    # Bucket ends are padded to a multiple of 384, and one bucket holds 500 elements at least: here the save goes wrong.
    "corrupt_dp3": DistSession(
        Session(
            SMALL, Parallel(dp=3), Training(overlap_grad_reduce=True, ddp_bucket_size=500, global_batch_size=6)
        ),
        FULLY_RESHARDABLE,
    ),
    "experts_ep2": DistSession(
        Session(replace(SMALL, num_experts=4), Parallel(ep=2, dp=2), Training(global_batch_size=8)), DP_RESHARDABLE
    ),
    "plain_tp2": DistSession(Session(SMALL, Parallel(tp=2), Training(optimizer="plain", global_batch_size=8))),
}  # fmt: skip


def save(folder: str, wanted: DistSession) -> None:
    """Train two steps and save, below a folder that the checkpoint does not know."""
    os.chdir(folder)  # torch stores the path that it was given
    observe_dist(wanted)


def main() -> None:
    with WorkerPool(3) as pool:
        for name, wanted in CASES.items():
            shutil.rmtree(HERE / name, ignore_errors=True)
            world = wanted.session.parallel.world_size
            pool.run(save, str(HERE), replace(wanted, save=name), world_size=world)
            nbytes = sum(path.stat().st_size for path in (HERE / name).rglob("*") if path.is_file())
            print(f"{name}: {nbytes:,} bytes")


if __name__ == "__main__":
    main()
