"""``torchrun --nproc-per-node 2 -m mcore_rlhf.demo.train --algorithm grpo --tp 2``: a GRPO or PPO run on megatron-core.

The smallest trainer that has everything a checkpoint must keep: sampled rollouts, a frozen reference policy, an adaptive
KL coefficient, running reward statistics, a prompt sampler, dropout, Adam, a learning-rate schedule, RNG states of
every rank, and with PPO a critic. Two runs with the same arguments write the same ``--metrics`` byte for byte, also when
one of them was killed and resumed.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from mcore_rlhf.demo.rl.options import Options, parse
from mcore_rlhf.errors import CheckpointError, log_of

logger = log_of("mcore_rlhf.demo.train")


def main(arguments: Sequence[str] | None = None) -> int:
    """Do a run, as one of the processes that torchrun starts; alone, it is a world of one.

    Args:
        arguments: The command line without the program's name.

    Returns:
        The exit code: 0 when training came to its end, or was asked to stop and has saved.
    """
    _start_logging()
    try:
        options = parse(arguments)
        _initialize()
        return _train(options)
    except CheckpointError as error:
        logger.error("rank=%s %s", os.environ.get("RANK", "0"), error)
        return error.exit_code
    finally:
        _finish()


def _train(options: Options) -> int:
    from mcore_rlhf.demo.rl.run import Run

    Run(options).train()
    return 0


def _start_logging() -> None:
    """Rank 0 tells everything, the others only what is wrong."""
    rank = os.environ.get("RANK", "0")
    logging.basicConfig(
        stream=sys.stdout,
        level=logging.INFO if rank == "0" else logging.WARNING,
        format="%(asctime)s %(levelname)s %(message)s",
    )
    logging.getLogger("megatron").setLevel(logging.ERROR)  # it tells its whole configuration, and worries a lot


def _initialize() -> None:
    """Join the process group: NCCL with GPUs, gloo without, one thread per process so that sums keep their order."""
    import mcore_rlhf.demo.with_megatron  # noqa: F401

    # isort: split
    import torch
    import torch.distributed as dist

    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, value)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    else:
        torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")


def _finish() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
