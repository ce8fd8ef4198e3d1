"""Jobs with an actor that is trained and a reference that nothing trains, in one run whose steps share the reference's files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.reference.engine_jobs import engine_of
from tests.reference.observing import Session

if TYPE_CHECKING:
    import torch

    from mcore_rlhf.demo.trainer import DemoTrainer

REFERENCE = "reference"
CHANGED, LAST = 3, 6
"""The step before which one rank's reference changes by a bit, and the last one."""
States = dict[tuple[str, str], "torch.Tensor"]


@dataclass(frozen=True)
class Seen:
    """What one rank saw of a step.

    Args:
        states: The live tensors by role.
        draws: Random numbers that it would draw next: torch's, and Megatron's within a tensor-parallel rank.
        iteration: What the reference's engine says that was loaded.
        report: Lines of the load's report.
    """

    states: dict[str, States]
    draws: list[float]
    iteration: int = 0
    report: tuple[str, ...] = ()


def _pair(session: Session, seed: int) -> dict[str, DemoTrainer]:
    from mcore_rlhf.demo.trainer import DemoTrainer

    frozen = replace(session.training, optimizer="none", seed=seed + 1)
    return {
        REFERENCE: DemoTrainer(session.model, session.parallel, frozen),
        "actor": DemoTrainer(session.model, session.parallel, replace(session.training, seed=seed)),
    }


def _seen(trainers: Mapping[str, DemoTrainer], iteration: int = 0, report: tuple[str, ...] = ()) -> Seen:
    import torch
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    from mcore_rlhf.demo import live_state

    kept, tracked = torch.get_rng_state(), get_cuda_rng_tracker().get_states()
    tracked = {name: state.clone() for name, state in tracked.items()}
    draws = torch.rand(4).tolist()
    with get_cuda_rng_tracker().fork():
        draws += torch.rand(4).tolist()
    torch.set_rng_state(kept)
    get_cuda_rng_tracker().set_states(tracked)
    return Seen({role: live_state.full_state(one) for role, one in trainers.items()}, draws, iteration, report)


def save_steps(session: Session, root: str, options: dict[str, Any]) -> list[Seen]:
    """Save every step: one before a bit of the second tensor-parallel rank's reference changes, and as many after."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    from mcore_rlhf.manager.run.manager import CheckpointManager, ManagerOptions

    trainers, seen = _pair(session, 5), []
    given = ManagerOptions(**{"link_unchanged": True, "catch_signals": False, "timeout": 60, **options})
    engines = {role: engine_of(one) for role, one in trainers.items()}
    with CheckpointManager(root, engines, options=given) as manager:
        for step in range(1, LAST + 1):
            trainers["actor"].train_step()
            trainers[REFERENCE].evaluate()
            trainers[REFERENCE].consumed_train_samples += 4  # of its arguments, which change at every step
            manager.before_step()
            if step == CHANGED and parallel_state.get_tensor_model_parallel_rank() == 1:
                param = next(trainers[REFERENCE].chunks[0].parameters())
                param.data.view(-1)[:1].view(torch.int16).bitwise_xor_(1)
            manager.wait()
            if step == LAST and dist.get_rank() == 0:
                _damage(Path(root, f"global_step_{step - 1}"))
            dist.barrier()
            manager.save(step)
            seen.append(_seen(trainers))
    return seen


def _damage(step: Path) -> None:
    """Another bit, in this step's own name of the first rank's file."""
    path = next(step.glob(f"{REFERENCE}/*/mp_rank_00*/model_optim_rng.pt"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.unlink()
    path.write_bytes(data)


def load_step(session: Session, root: str, step: int) -> Seen:
    """Load into another pair, by the manager."""
    from mcore_rlhf.manager.run.manager import CheckpointManager, ManagerOptions

    trainers = _pair(session, 9)
    engines = {role: engine_of(one) for role, one in trainers.items()}
    with CheckpointManager(root, engines, options=ManagerOptions(catch_signals=False, timeout=60)) as manager:
        found = manager.load(step)
        assert found is not None
        lines = tuple(text for _, text in found.report.lines)
    return _seen(trainers, engines[REFERENCE].loaded_iteration, lines)


def load_with_megatron(session: Session, folder: str) -> Seen:
    """Load the reference as Megatron-LM does, random states included."""
    from mcore_rlhf.demo import megatron_checkpoint

    trainers = _pair(session, 9)
    iteration = megatron_checkpoint.load(trainers[REFERENCE], folder)
    return _seen(trainers, iteration)
