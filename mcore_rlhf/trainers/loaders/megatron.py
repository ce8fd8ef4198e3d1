"""What Megatron-LM's ``load_checkpoint`` restores; Megatron-Bridge has a loader of its own, of which there are no rows.

Source: Megatron-LM, as megatron-core 0.19.2 brings it, ``megatron/training/checkpointing.py`` (``load_checkpoint``,
``_load_base_checkpoint``), ``megatron/core/optimizer_param_scheduler.py`` (``load_state_dict``).
"""

from __future__ import annotations

from mcore_rlhf.trainers.megatron import LM
from mcore_rlhf.trainers.resuming import (
    OF_OPTIMIZER,
    Habit,
    Loader,
    Outcome,
    Seen,
    Thing,
    asked,
    both,
    broken,
    has,
    incomplete,
    lacks,
    rows_of,
)

_RESTORED, _ANEW, _IGNORED, _REFUSED, _ABSENT = Outcome
_PLAIN, _DIST = "mp_rank_*/*", (".metadata", "*.distcp")
_WITH_OPTIMIZER = (*OF_OPTIMIZER, Thing.SCHEDULER, Thing.SCALER)
_DEGREES = ("tensor_model_parallel_size", "pipeline_model_parallel_size")


def _of(seen: Seen, name: str) -> int:
    found = seen.held.args.get(name, 1)
    return found if isinstance(found, int) else 1


def _other_degrees(seen: Seen) -> object:
    """TP and PP that the configuration gives, where they are not those of the files."""
    if seen.held.problem:
        return None
    was = [_of(seen, name) for name in _DEGREES]
    now = [seen.settings.number(name) or before for name, before in zip(_DEGREES, was, strict=True)]
    return {"was": f"TP{was[0]} PP{was[1]}", "now": f"TP{now[0]} PP{now[1]}"} if was != now else None


def _bound_to_layout(seen: Seen) -> bool:
    """Whether a distributed optimizer was saved as its buffers lie (``dp_reshardable``), which another TP or PP cannot load.

    Source: megatron-core 0.19.2, ``training/checkpointing.py`` (``_build_sharded_state_dict_metadata``).
    """
    args = seen.held.args
    return (
        seen.has(*_DIST)
        and args.get("use_distributed_optimizer") is True
        and args.get("dist_ckpt_optim_fully_reshardable") is False
    )


ROWS = rows_of(
    "Megatron-LM (megatron-core 0.19.2), megatron/training/checkpointing.py:",
    Habit((Thing.WEIGHTS,), _REFUSED, "{file} {wrong}: “could not load the checkpoint”, and it exits with 0", "_load_base_checkpoint",
        broken("*model_optim_rng.pt"), True),
    Habit((Thing.WEIGHTS,), _REFUSED, "{file} {wrong}: loading it fails", "_load_global_dist_base_checkpoint",
        broken("*.distcp", ".metadata", "common.pt", "metadata.json")),
    Habit((Thing.WEIGHTS,), _REFUSED, "a file is missing: {problem}", "load_checkpoint",
        both(lambda seen: "distrib_optim" not in seen.held.problem, incomplete), True),
    Habit((Thing.WEIGHTS,), _REFUSED, "neither mp_rank_…, nor .metadata with metadata.json: an unknown format", "_get_checkpoint_format",
        lacks(_PLAIN, *_DIST), True),
    Habit((Thing.WEIGHTS,), _REFUSED, "saved as {was}, loaded as {now}: files of mp_rank_… are of one layout", "check_checkpoint_args",
        both(has(_PLAIN), _other_degrees)),
    Habit((Thing.WEIGHTS,), _RESTORED, "model", "load_checkpoint", ran=True),
    Habit((*_WITH_OPTIMIZER, Thing.COUNTERS, Thing.RNG, Thing.DATA), _ANEW, "a release has weights alone: iteration 0", "load_checkpoint",
        lambda seen: seen.held.release),
    Habit((*_WITH_OPTIMIZER, Thing.COUNTERS, Thing.RNG, Thing.DATA), _ANEW, "{key}: weights alone are loaded, at iteration 0",
        "load_checkpoint", asked("finetune"), True),
    Habit(_WITH_OPTIMIZER, _ANEW, "{key}: masters are made of the model's weights; the scheduler is not loaded either", "load_checkpoint",
        asked("no_load_optim"), True),
    Habit((Thing.RNG,), _ANEW, "{key}: the seed's own states", "load_checkpoint", asked("no_load_rng")),
    Habit(_WITH_OPTIMIZER, _ANEW, "saved with no_save_optim; nothing is said", "load_checkpoint",
        both(has(*_DIST), lambda seen: seen.held.args.get("no_save_optim") is True)),
    Habit((Thing.RNG,), _ANEW, "saved with no_save_rng; nothing is said", "load_checkpoint",
        both(has(*_DIST), lambda seen: seen.held.args.get("no_save_rng") is True)),
    Habit((Thing.RNG,), _ANEW, "saved as {was}, loaded as {now}: “RNG state will be ignored”", "load_checkpoint", _other_degrees),
    Habit(OF_OPTIMIZER, _REFUSED, "saved as {was}, loaded as {now}, without --dist-ckpt-optim-fully-reshardable", "load_checkpoint",
        both(_bound_to_layout, _other_degrees)),
    Habit(OF_OPTIMIZER, _REFUSED, "{file} {wrong}: loading it fails", "load_checkpoint",
        broken("*distrib_optim.pt", "*layer_wise_optimizer_*"), True),
    Habit(OF_OPTIMIZER, _REFUSED, "distrib_optim.pt is missing: {problem}", "load_checkpoint",
        both(lambda seen: "distrib_optim" in seen.held.problem, incomplete), True),
    Habit(_WITH_OPTIMIZER, _REFUSED, "no optimizer is stored: a KeyError, “Specify --no-load-optim or --finetune”", "load_checkpoint",
        lambda seen: not seen.held.problem and not seen.held.optimizer),
    Habit(OF_OPTIMIZER, _RESTORED, "optimizer, and distrib_optim.pt of the distributed one", "load_checkpoint", ran=True),
    Habit((Thing.SCHEDULER,), _IGNORED, "{key}: the rates of the arguments, and of the file the number of steps alone",
        "load_checkpoint, and megatron/core/optimizer_param_scheduler.py:load_state_dict", asked("override_opt_param_scheduler")),
    Habit((Thing.SCHEDULER,), _REFUSED, "no opt_param_scheduler is stored: a KeyError", "load_checkpoint",
        lambda seen: not seen.held.problem and not seen.held.scheduler),
    Habit((Thing.SCHEDULER,), _RESTORED, "opt_param_scheduler, whose rates must be the arguments' own, unless "
        "use_checkpoint_opt_param_scheduler is given", "load_checkpoint", ran=True),
    Habit((Thing.SCALER,), _RESTORED, "grad_scaler, with the optimizer", "load_checkpoint", lambda seen: seen.held.scaler),
    Habit((Thing.SCALER,), _ABSENT, "none is stored; only fp16 has one", "load_checkpoint"),
    Habit((Thing.RNG,), _REFUSED, "no random states are stored: it exits, “Specify --no-load-rng or --finetune”", "load_checkpoint",
        lambda seen: not seen.held.problem and not seen.held.rng),
    Habit((Thing.RNG,), _RESTORED, "rng_state of each (TP, PP) rank; with data_parallel_random_init of each data-parallel rank, too",
        "load_checkpoint"),
    Habit((Thing.COUNTERS,), _RESTORED, "iteration", "load_checkpoint", ran=True),
    Habit((Thing.DATA,), _ANEW, "no args are stored, and consumed samples stand there: “could not find arguments in the checkpoint”",
        "load_checkpoint", lambda seen: not seen.held.problem and not seen.held.args),
    Habit((Thing.DATA,), _ANEW, "no consumed_train_samples in the stored args: the data begin again; nothing is said", "load_checkpoint",
        lambda seen: not seen.held.problem and "consumed_train_samples" not in seen.held.args),
    Habit((Thing.DATA,), _RESTORED, "consumed_train_samples, by which its own samplers go forward", "load_checkpoint", ran=True),
)  # fmt: skip

LOADER = Loader(LM, "core_v0.19.2", ROWS, ("ckpt_step",), ("megatron", "mcore", "megatron-core"))
