"""Megatron-core's ``torch_dist`` checkpoints, written and loaded by megatron-core itself, as Megatron-LM calls it.

Megatron-LM's own part (``megatron/training/checkpointing.py``, core_v0.16.1: ``generate_state_dict``,
``_build_sharded_state_dict_metadata``, ``get_rng_state``, ``load_checkpoint``) is not on PyPI; its few lines stand here.
The module is imported by the tests too, so Megatron is imported only when a worker runs a job.
"""

from __future__ import annotations

import queue
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_rlhf.demo.configs import Parallel, TinyGPT, Training
from tests.reference.observing import END, LOOK, Observation, Session, end, look

if TYPE_CHECKING:
    from mcore_rlhf.demo.trainer import DemoTrainer

FULLY_RESHARDABLE = "fully_reshardable"
DP_RESHARDABLE = "dp_reshardable"
MODEL_SPACE = "fully_sharded_model_space"


@dataclass(frozen=True)
class DistSession:
    """What to train, which torch_dist checkpoint to load first, and where to save both kinds at iteration 2.

    Args:
        session: The model, the layout and the training; ``save`` and ``load`` of it are the legacy format's.
        sharding: How the distributed optimizer's states are stored.
        save: Where megatron-core writes its torch_dist checkpoint.
        load: Which one it loads.
        metadata: More of what Megatron-LM calls the content's metadata.
        rng: Whether random states are loaded, where the ranks are the same.
        until: How far it is trained.
        frozen: Parts of the names of parameters that are not trained.
    """

    session: Session
    sharding: str = FULLY_RESHARDABLE
    save: str | None = None
    load: str | None = None
    metadata: tuple[tuple[str, Any], ...] = ()
    rng: bool = True
    until: int = END
    frozen: tuple[str, ...] = ()


def observe_dist(wanted: DistSession) -> Observation:
    """Train (or continue), and look closely at iterations 2 and 3; every rank of the layout calls."""
    from mcore_rlhf.demo import live_state, megatron_checkpoint
    from mcore_rlhf.demo.trainer import DemoTrainer
    from tests.reference.engine_model_jobs import freezing
    from tests.reference.observing import experts_per_rank, layer_numbers

    session = wanted.session
    with freezing(wanted.frozen):
        trainer = DemoTrainer(session.model, session.parallel, session.training)
    seen = Observation(live_state.coordinates(), layer_numbers(trainer), experts_per_rank(session))
    if wanted.load is not None:
        load(trainer, Path(wanted.load), rng=wanted.rng)
        look(trainer, seen)
    while trainer.iteration < wanted.until:
        loss = trainer.train_step()
        seen.losses[trainer.iteration] = loss
        if trainer.iteration == LOOK:
            if wanted.save is not None:
                save(trainer, Path(wanted.save), wanted.sharding, dict(wanted.metadata))
            if session.save is not None:
                megatron_checkpoint.save(trainer, session.save)
            look(trainer, seen)
    if wanted.until == END:
        end(trainer, seen)
    return seen


def write_in_this_process() -> None:
    """Megatron's own queue of results spawns a process; all is in one here. Before 0.15 other processes write."""
    import numpy as np
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from mcore_rlhf.demo.versions import MEGATRON

    if MEGATRON < (0, 16) and not hasattr(np, "product"):  # gone with NumPy 2
        setattr(np, "product", np.prod)  # noqa: B010
    if MEGATRON < (0, 15):
        from megatron.core.dist_checkpointing.strategies import async_utils, base

        base.async_calls = async_utils.AsyncCallsQueue()  # ranks that have saved with others count otherwise
        return
    for name in ("_get_write_results_queue", "get_write_results_queue"):  # up to 0.16, and since
        setattr(filesystem_async, name, queue.Queue)


def save(trainer: DemoTrainer, root: Path, sharding: str, more: dict[str, Any]) -> None:
    """Write a torch_dist checkpoint of all ranks, and the tracker."""
    import torch.distributed as dist
    from megatron.core import dist_checkpointing

    write_in_this_process()
    folder = root / f"iter_{trainer.iteration:07d}"
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    metadata = {**content_metadata(trainer, sharding), **more}
    state = _common(trainer) | _sharded(trainer, metadata, is_loading=False)
    dist_checkpointing.save(state, str(folder), content_metadata=metadata)
    if dist.get_rank() == 0:
        (root / "latest_checkpointed_iteration.txt").write_text(str(trainer.iteration))
    dist.barrier()


def load(trainer: DemoTrainer, root: Path, *, rng: bool) -> None:
    """Load the newest checkpoint of a root, with its optimizer, and its random states where the ranks are the same."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    from mcore_rlhf.demo import megatron_checkpoint

    step = (root / "latest_checkpointed_iteration.txt").read_text()
    folder = str(root / f"iter_{int(step):07d}")
    common = dist_checkpointing.load_common_state_dict(folder)
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
    template = _sharded(trainer, metadata, is_loading=True, rng=rng and _same_ranks(trainer, common["args"]))
    state, unasked, absent = dist_checkpointing.load(template, folder, strict=StrictHandling.RETURN_ALL)
    strange = {*absent, *(key for key in unasked if key != "rng_state")}  # which is not always asked for
    assert not strange, strange
    for key, chunk in zip(megatron_checkpoint.model_keys(trainer), trainer.chunks, strict=True):
        chunk.load_state_dict(state[key], strict=True)
    trainer.iteration = trainer.loaded_iteration = state["iteration"]
    trainer.consumed_train_samples = state["args"].consumed_train_samples
    if trainer.optimizer is not None:
        trainer.optimizer.load_state_dict(state["optimizer"])
        trainer.scheduler.load_state_dict(state["opt_param_scheduler"])
    if "rng_state" in template:
        megatron_checkpoint.set_rng_state(state["rng_state"][0])


def found_by_integrity(folder: Path) -> str:
    """What megatron-core itself has to say against a folder's ``integrity.json``; empty where that holds."""
    import mcore_rlhf.demo.with_megatron  # noqa: F401

    # isort: split
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from megatron.core.dist_checkpointing.validation import verify_integrity_manifest

    try:
        verify_integrity_manifest(str(folder))
    except CheckpointingException as error:
        return str(error)
    return ""


def content_metadata(trainer: DemoTrainer, sharding: str) -> dict[str, Any]:
    """What Megatron-LM writes into ``common.pt``, and builds the state dictionary by when it loads."""
    metadata: dict[str, Any] = {}
    if trainer.training.optimizer == "distributed":
        metadata["distrib_optim_sharding_type"] = sharding
        if sharding == FULLY_RESHARDABLE:
            metadata["distrib_optim_fully_reshardable_mem_efficient"] = False
    return {**metadata, "singleton_local_shards": False, "chained_optim_avoid_prefix": True}


def _common(trainer: DemoTrainer) -> dict[str, Any]:
    from mcore_rlhf.demo import megatron_args

    started, consumed = trainer.loaded_iteration, trainer.consumed_train_samples
    return {
        "args": megatron_args.build(trainer.model, trainer.parallel, trainer.training, started, consumed),
        "checkpoint_version": 3.0,
        "iteration": trainer.iteration,
        "num_floating_point_operations_so_far": 1.0,
    }


def _sharded(trainer: DemoTrainer, metadata: dict[str, Any], *, is_loading: bool, rng: bool = True) -> dict[str, Any]:
    from mcore_rlhf.demo import megatron_checkpoint
    from mcore_rlhf.engines.megatron.importing import unwrapped

    keys = megatron_checkpoint.model_keys(trainer)
    chunks = unwrapped(trainer.chunks)
    models = {key: chunk.sharded_state_dict(metadata=dict(metadata)) for key, chunk in zip(keys, chunks, strict=True)}
    state: dict[str, Any] = dict(models)
    if trainer.optimizer is not None:
        state["optimizer"] = trainer.optimizer.sharded_state_dict(
            models, is_loading=is_loading, metadata=dict(metadata)
        )
        state["opt_param_scheduler"] = trainer.scheduler.state_dict()
    if rng:
        state["rng_state"] = _rng(trainer)
    return state


def _rng(trainer: DemoTrainer) -> Any:
    """Megatron-LM's ``get_rng_state``: one object per (pp, tp), with experts dealt over ranks per (pp, tp, dp)."""
    from megatron.core import parallel_state as ps
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    from mcore_rlhf.demo import megatron_checkpoint

    where = (ps.get_pipeline_model_parallel_rank(), ps.get_tensor_model_parallel_rank())
    shape = (ps.get_pipeline_model_parallel_world_size(), ps.get_tensor_model_parallel_world_size())
    dp_rank = ps.get_data_parallel_rank(with_context_parallel=True)
    replica = dp_rank
    if ps.get_expert_model_parallel_world_size() > 1:
        where, replica = (*where, dp_rank), 0
        shape = (*shape, ps.get_data_parallel_world_size(with_context_parallel=True))
    return ShardedObject("rng_state", [megatron_checkpoint.rng_state()], shape, where, replica_id=replica)


def _same_ranks(trainer: DemoTrainer, saved: Any) -> bool:
    parallel = trainer.parallel
    stored = (saved.tensor_model_parallel_size, saved.pipeline_model_parallel_size)
    return stored == (parallel.tp, parallel.pp)


def written(model: TinyGPT, parallel: Parallel, training: Training, root: Path, sharding: str) -> DistSession:
    """A session that trains from the start and saves both formats below a folder: ``dist`` and ``legacy``."""
    session = Session(model, parallel, training, save=str(root / "legacy"))
    return DistSession(session, sharding, save=str(root / "dist"))


def resumed(session: Session, root: Path) -> DistSession:
    """A session that loads a torch_dist checkpoint and trains on."""
    return DistSession(replace(session, load=None, save=None), load=str(root))
