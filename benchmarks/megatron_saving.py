"""Row 14: the legacy save of a Megatron model at TP2×PP2, by the manager and by Megatron's own methods, in one run."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from mcore_rlhf.demo.configs import Parallel, TinyGPT, Training
from mcore_rlhf.demo.workers import WorkerPool

from .table import Row

PARALLEL = Parallel(tp=2, pp=2)
MODEL = TinyGPT(
    num_layers=12, hidden_size=1280, num_attention_heads=20, num_query_groups=4, kv_channels=64, ffn_hidden_size=3072,
    vocab_size=32000, seq_length=16, dtype="bf16", dropout=0.0,
)  # fmt: skip
_TIMEOUT = 900.0


def row_14(folder: Path, rounds: int) -> Iterator[Row]:
    with WorkerPool(PARALLEL.world_size) as pool:
        (facts, *_) = pool.run(save_both, str(folder / "megatron"), min(rounds, 3), timeout=_TIMEOUT)
    shutil.rmtree(folder / "megatron", ignore_errors=True)
    theirs, ours, stall = facts["theirs"], facts["ours"], facts["stall"]
    size = f"{facts['params'] / 1e6:.0f}M parameters, {facts['nbytes'] / 1e9:.2f} GB"
    text = f"Megatron {statistics.median(theirs):.2f} s, ours {statistics.median(ours):.2f} s"
    ratio = statistics.median(theirs) / statistics.median(ours)
    yield Row(14, f"Megatron's own save ÷ save, TP2×PP2, {size}: wall", ratio, "×", 3, None, text, at_least=True)
    text = f"stall {statistics.median(stall):.3f} s"
    yield Row(
        14, "the same, training stalled", statistics.median(theirs) / statistics.median(stall), "×", 3, None, text, True
    )


def save_both(root: str, rounds: int) -> dict[str, object]:
    """Runs on every rank: the same live model, saved in both ways by turns."""
    import torch.distributed as dist

    from mcore_rlhf.demo import megatron_args, megatron_checkpoint
    from mcore_rlhf.demo.trainer import DemoTrainer
    from mcore_rlhf.engines.megatron import MegatronEngine
    from mcore_rlhf.manager.run.manager import CheckpointManager
    from mcore_rlhf.manager.run.options import ManagerOptions

    training = Training(optimizer="distributed", global_batch_size=2, micro_batch_size=1)
    trainer = DemoTrainer(MODEL, PARALLEL, training)
    trainer.train_step()

    def args() -> object:
        return megatron_args.build(MODEL, PARALLEL, training, 0, trainer.consumed_train_samples)

    engine = MegatronEngine(trainer.chunks, trainer.optimizer, trainer.scheduler, args=args)  # type: ignore[arg-type]
    theirs, ours, stalls = [], [], []
    options = ManagerOptions(fsync=False, catch_signals=False)
    with CheckpointManager(f"{root}/ours", engine, options=options) as manager:
        manager.reserve()
        for number in range(1, 2 * (rounds + 1), 2):
            theirs.append(_timed(lambda: megatron_checkpoint.save(trainer, f"{root}/theirs")))
            ours.append(_timed(lambda number=number: manager.save(number, blocking=True)))
            stalls.append(_timed(lambda number=number: manager.save(number + 1)))
            manager.wait()
            nbytes = sum(path.stat().st_size for path in Path(root, "theirs").rglob("*.pt"))
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(f"{root}/theirs")
                for path in Path(root, "ours").glob("global_step_*"):
                    shutil.rmtree(path)
            dist.barrier()
    params = sum(param.numel() for chunk in trainer.chunks for param in chunk.parameters())
    total = [0]
    gathered: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, params)
    total[0] = sum(count or 0 for count in gathered)
    return {"theirs": theirs[1:], "ours": ours[1:], "stall": stalls[1:], "nbytes": nbytes, "params": total[0]}


def _timed(work: object) -> float:
    """Seconds until the slowest rank is done."""
    import torch
    import torch.distributed as dist

    assert callable(work)
    dist.barrier()
    start = time.perf_counter()
    work()
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)
