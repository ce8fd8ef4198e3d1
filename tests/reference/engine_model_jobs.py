"""Jobs with models that the demonstration's training does not have: value heads, frozen parameters, other optimizers."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_rlhf.engines.base import HasRng, LoadRequest, apply
from tests.reference.engine_jobs import engine_of, new_trainer, save_with_engine
from tests.reference.observing import LOOK, Observation, Session

if TYPE_CHECKING:
    from mcore_rlhf.demo.trainer import DemoTrainer


@contextmanager
def freezing(names: tuple[str, ...]) -> Iterator[None]:
    """Trainers that are built inside have parameters that are not trained: those in whose global names one of the parts is."""
    from mcore_rlhf.demo import trainer
    from mcore_rlhf.engines.megatron.importing import unwrapped

    build = trainer.build_chunk

    def frozen(*args: Any) -> Any:
        chunk = build(*args)
        for name, param in unwrapped([chunk])[0].named_parameters():
            if any(part in _global_name(chunk, name) for part in names):
                param.requires_grad_(False)
        return chunk

    trainer.build_chunk = frozen
    try:
        yield
    finally:
        trainer.build_chunk = build


def _global_name(chunk: Any, name: str) -> str:
    """A parameter of a chunk with the numbers that its layer and its expert have in the whole model."""
    from megatron.core import parallel_state

    from mcore_rlhf.engines.megatron.importing import unwrapped
    from mcore_rlhf.models.megatron import renumbered

    layer = re.search(r"\bdecoder\.layers\.(\d+)\.", name)
    (module,) = unwrapped([chunk])
    ahead = module.decoder.layers[int(layer[1])].layer_number - 1 - int(layer[1]) if layer else 0
    experts = (module.config.num_moe_experts or 0) // parallel_state.get_expert_model_parallel_world_size()
    return renumbered(name, ahead, experts * parallel_state.get_expert_model_parallel_rank())


def step_on_noise(trainer: DemoTrainer) -> None:
    """An optimizer step without a loss: gradients are noise, equal where parameters are copies of one another."""
    import torch
    from megatron.core import parallel_state

    from mcore_rlhf.engines.megatron.importing import unwrapped

    for chunk, module in zip(trainer.chunks, unwrapped(trainer.chunks), strict=True):
        chunk.zero_grad_buffer()
        for name, param in module.named_parameters():
            if param.requires_grad:
                rank = parallel_state.get_tensor_model_parallel_rank() if param.tensor_model_parallel else 0
                seed = zlib.crc32(f"{name} {rank} {trainer.iteration}".encode())
                noise = torch.randn(param.shape, generator=torch.Generator().manual_seed(seed))
                param.main_grad.copy_(noise)
    trainer._update()
    trainer.iteration += 1
    trainer.consumed_train_samples += trainer.training.global_batch_size


def save_after_noise(session: Session, root: str, frozen: tuple[str, ...] = ()) -> Observation:
    """Two steps, then save with the engine and with Megatron's own methods."""
    from mcore_rlhf.demo import live_state, megatron_checkpoint

    with freezing(frozen):
        trainer, seen = new_trainer(session)
    for _ in range(LOOK):
        step_on_noise(trainer)
    assert session.save is not None
    megatron_checkpoint.save(trainer, session.save)
    save_with_engine(trainer, Path(root))
    seen.states[LOOK] = live_state.full_state(trainer)
    return seen


def load_over_noise(session: Session, frozen: tuple[str, ...] = (), optimizer: bool = True) -> Observation:
    """Load with the engine over a model that was stepped once."""
    from mcore_rlhf.demo import live_state

    with freezing(frozen):
        trainer, seen = new_trainer(session)
    step_on_noise(trainer)
    assert session.load is not None
    engine = engine_of(trainer)
    apply(engine.prepare_load(LoadRequest(Path(session.load), "critic", LOOK, optimizer=optimizer)))
    assert engine.loaded_iteration == LOOK
    seen.states[LOOK] = live_state.full_state(trainer)
    return seen


def load_through_buffers(session: Session) -> Observation:
    """Load as for an optimizer that keeps its states in another form (``--use-precision-aware-optimizer``).

    There is none without Transformer Engine, but Megatron's method that takes the values is the same.
    """
    from unittest.mock import PropertyMock, patch

    from mcore_rlhf.engines.megatron.optimizers import ChainMember

    with patch.object(ChainMember, "converts", PropertyMock(return_value=True)):
        return load_over_noise(session)


def load_with_megatron(session: Session, frozen: tuple[str, ...] = ()) -> Observation:
    """Load what the engine saved with Megatron's own methods."""
    from mcore_rlhf.demo import live_state, megatron_checkpoint

    with freezing(frozen):
        trainer, seen = new_trainer(session)
    assert session.load is not None
    assert megatron_checkpoint.load(trainer, session.load) == LOOK
    seen.states[LOOK] = live_state.full_state(trainer)
    return seen


def placed_pieces(session: Session, engine: bool) -> list[Any]:
    """Load with the engine or with Megatron, and tell the pieces where Megatron's ``sharded_state_dict`` places them."""
    from mcore_rlhf.demo import megatron_checkpoint, placed_state

    trainer, _ = new_trainer(session)
    assert session.load is not None
    if engine:
        apply(engine_of(trainer).prepare_load(LoadRequest(Path(session.load), "actor", LOOK)))
    else:
        megatron_checkpoint.load(trainer, session.load)
    return list(placed_state._pieces(trainer))


def derived(session: Session) -> dict[str, Any]:
    """Derived random states of a rank, from states of some rank 0, at two steps."""
    import random

    import numpy as np
    import torch

    trainer, seen = new_trainer(session)
    engine = engine_of(trainer)
    assert isinstance(engine, HasRng)
    first = {
        "python": random.Random(1).getstate(),
        "numpy": np.random.RandomState(1).get_state(),
        "torch": torch.Generator().manual_seed(1).get_state(),
        "cuda": torch.Generator().manual_seed(2).get_state(),
        "tracker": {name: torch.Generator().manual_seed(3).get_state() for name in engine.rng_states()},
    }
    own = engine.rng_states()
    engine.set_rng_states(engine.derived_rng(first, 5)["tracker"])  # type: ignore[arg-type]
    changed = engine.rng_states()
    return {
        "place": seen.coordinates,
        "own": own,
        "changed": changed,
        "derived": engine.derived_rng(first, 5),
        "later": engine.derived_rng(first, 6),
    }


@contextmanager
def gathering_late() -> Iterator[None]:
    """Trainers that are built inside gather parameters during the next forward pass (``--overlap-param-gather``)."""
    from functools import partial

    from mcore_rlhf.demo import trainer

    ddp, optimizer = trainer.DistributedDataParallelConfig, trainer.OptimizerConfig
    trainer.DistributedDataParallelConfig = partial(ddp, overlap_param_gather=True)
    trainer.OptimizerConfig = lambda **fields: optimizer(**{**fields, "overlap_param_gather": True})
    try:
        yield
    finally:
        trainer.DistributedDataParallelConfig, trainer.OptimizerConfig = ddp, optimizer


def save_while_gathering(session: Session, root: str) -> Observation:
    """Save in the moment when this rank's parameters are those of the last step, but for its own shards."""
    from mcore_rlhf.demo import live_state

    with gathering_late():
        trainer, seen = new_trainer(session)
    while trainer.iteration < LOOK:
        loss = trainer.train_step()
        seen.losses[trainer.iteration] = loss
    before = live_state.full_state(trainer)
    save_with_engine(trainer, Path(root))
    seen.states[LOOK] = live_state.full_state(trainer)
    seen.states[0] = before
    for _ in range(2):
        loss = trainer.train_step()
        seen.losses[trainer.iteration] = loss
    return seen
