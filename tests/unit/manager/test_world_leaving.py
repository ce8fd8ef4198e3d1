"""A rank whose trainer fails within a save raises its own error, while another waits for it in a collective of the trainer's own; and one
that hangs for longer than it is waited for costs that save, and no later one."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mcore_rlhf.manager.run.together import GOES_AFTER, Together
from mcore_rlhf.manager.runs import listed_steps
from mcore_rlhf.manager.trainer_steps import StepOptions, TrainerSteps
from tests.distributed.forked import SERVER

PATIENCE = 2.0


def _rank(rank: int, folder: str, job: str) -> None:
    from mcore_rlhf.manager import trainer_steps

    trainer_steps.GOES_AFTER = PATIENCE
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    steps = TrainerSteps(f"{folder}/run", "transformers", StepOptions(timeout=60.0))

    def write(staging: Path) -> None:
        if rank == 0:
            raise RuntimeError("CUDA error: out of memory")
        if job == "collective":
            dist.barrier()  # as the trainer's own code does, for the rank that failed
        elif job == "slow":
            time.sleep(3 * PATIENCE)

    started, said = time.monotonic(), ""
    try:
        steps.save(1, write)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    Path(folder, f"{rank}.said").write_text(f"{time.monotonic() - started:.1f} {said}")
    if rank == 1 and job == "slow":
        return
    import os

    os._exit(1)  # as a process ends that nobody catches that in


@pytest.mark.parametrize("job", ["collective", "slow", "none"])
def test_the_rank_that_failed_goes(tmp_path: Path, job: str) -> None:
    ranks = [SERVER.Process(target=_rank, args=(rank, str(tmp_path), job)) for rank in range(2)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(120)
        assert one.exitcode is not None
    first, second = ((tmp_path / f"{rank}.said").read_text().split(" ", 1) for rank in range(2))
    assert first[1] == "RuntimeError: CUDA error: out of memory"
    assert float(first[0]) < 20, "not the time-out"
    assert float(second[0]) < 30
    if job == "none":
        assert "failed on rank 0: RuntimeError: CUDA error: out of memory" in second[1]
    elif job == "slow":
        assert "Incomplete" in second[1]
        assert "another rank died" in second[1]
    assert not list((tmp_path / "run").glob("checkpoint-*"))


def _late_rank(rank: int, folder: str, where: str) -> None:
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    steps = TrainerSteps(f"{folder}/run", "transformers", StepOptions(timeout=PATIENCE, on_error="continue"))
    own = Together._on_rank_0

    def hangs(at: str) -> None:
        if rank == 1 and step == 1 and at == where:
            time.sleep(2.5 * PATIENCE)

    def on_rank_0(self: Together, action: Any) -> Any:
        hangs("beginning")  # when rank 0 has begun
        return own(self, action)

    def write(staging: Path) -> None:
        hangs("writing")
        if rank == 0:
            (staging / "trainer_state.json").write_text("{}")

    Together._on_rank_0 = on_rank_0  # type: ignore[method-assign]
    for step in (1, 2):
        steps.save(step, write)
        dist.barrier()  # as training does
    steps.close()


@pytest.mark.parametrize("where", ["beginning", "writing"])
def test_a_rank_that_hangs_costs_one_save(tmp_path: Path, where: str) -> None:
    ranks = [SERVER.Process(target=_late_rank, args=(rank, str(tmp_path), where)) for rank in range(2)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(120)
        assert one.exitcode == 0
    assert [(step.step, step.state) for step in listed_steps(tmp_path / "run")] == [(2, "committed")]
    assert not [*(tmp_path / "run").glob(".*.partial-*"), *(tmp_path / "run").glob(".*.lock-*")]


def test_it_is_no_longer_than_a_launcher_waits() -> None:
    assert GOES_AFTER <= 60
