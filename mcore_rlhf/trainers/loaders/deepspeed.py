"""What ``DeepSpeedEngine.load_checkpoint`` restores: of its own files, without a trainer round it.

Source: DeepSpeed 0.19.8, ``deepspeed/runtime/engine.py`` (``load_checkpoint``, ``_load_checkpoint``, ``_load_zero_checkpoint``,
``_get_all_zero_checkpoints``), ``deepspeed/runtime/state_dict_factory.py`` (``check_ckpt_list``).
"""

from __future__ import annotations

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
    incomplete_in,
    lacks,
    missing_ranks,
    refused,
    rows_of,
)
from mcore_rlhf.trainers.table import Trainer

_RESTORED, _ANEW, _IGNORED, _REFUSED, _ABSENT = Outcome
_MODEL, _OPTIM, _BF16 = "*_model_states.pt", "*_optim_states.pt", "bf16_*_optim_states.pt"
_WITH_OPTIMIZER = (*OF_OPTIMIZER, Thing.SCALER)
_NOT_OPTIMIZER = "load_optimizer_states"

TRAINER = Trainer(
    name="deepspeed",
    title="DeepSpeed",
    steps=("global_step{step}",),
    marks=(_MODEL,),
    tracker="latest",
    tracked="global_step{step}",
    told='engine.load_checkpoint("{root}")',
)


def _world(seen: Seen) -> int | None:
    """Data-parallel ranks that are to load, by what is said, or by the sizes of batches."""
    whole, micro = seen.settings.number("train_batch_size"), seen.settings.number("train_micro_batch_size_per_gpu")
    steps = seen.settings.number("gradient_accumulation_steps") or 1
    return seen.world if seen.world is not None else whole // (micro * steps) if whole and micro else None


def _other_world(seen: Seen) -> object:
    now = _world(seen)
    return {"was": seen.held.dp, "now": now} if now and seen.held.dp and now != seen.held.dp else None


def _other_prefix(seen: Seen) -> object:
    """Files of bf16 carry that in their names, others do not; each engine looks for its own."""
    if (
        not seen.has(_OPTIM)
        or seen.settings.get("train_batch_size", "train_micro_batch_size_per_gpu", "bf16.enabled") is None
    ):
        return None
    now = seen.settings.says("bf16.enabled")
    return {"now": "bf16" if now else "another dtype"} if now != seen.has(_BF16) else None


def _universal(seen: Seen) -> bool:
    return seen.settings.says("load_universal", "checkpoint.load_universal")


ROWS = rows_of(
    "DeepSpeed 0.19.8, runtime/",
    Habit((Thing.WEIGHTS,), _REFUSED, "no …model_states.pt is there", "state_dict_factory.py:168 (check_ckpt_list)", lacks(_MODEL), True),
    Habit((Thing.WEIGHTS,), _REFUSED, "{file} {wrong}: loading it fails", "state_dict_factory.py:170 (check_ckpt_list)",
        broken(_MODEL), True),
    Habit((Thing.WEIGHTS,), _REFUSED, "a rank's file is missing: {problem}", "engine.py:4568 (_load_checkpoint)",
        incomplete_in("_model_states")),
    Habit((Thing.WEIGHTS,), _RESTORED, "…model_states.pt", "engine.py:4568 (_load_checkpoint)", ran=True),
    Habit((*_WITH_OPTIMIZER, Thing.SCHEDULER, Thing.COUNTERS), _ANEW, "{key}: the model alone is loaded; masters are made of its weights",
        "engine.py:4670 (_load_checkpoint)", asked("load_module_only"), True),
    Habit(_WITH_OPTIMIZER, _ANEW, "{key}: masters are made of the model's weights", "engine.py:4455 (load_checkpoint)",
        refused(_NOT_OPTIMIZER), True),
    Habit(_WITH_OPTIMIZER, _REFUSED, "saved by {was} data-parallel ranks, loaded by {now}: ZeRO's pieces are not dealt anew",
        "engine.py:4748 (_load_zero_checkpoint)", both(lambda seen: not _universal(seen), has(_OPTIM), _other_world)),
    Habit(_WITH_OPTIMIZER, _REFUSED, "an engine of {now} looks for files of other names (bf16_… or without) and does not find them",
        "engine.py:4839 (_get_all_zero_checkpoints)", _other_prefix),
    Habit(_WITH_OPTIMIZER, _REFUSED, "{file} {wrong}: loading it fails", "engine.py:4802 (_get_all_zero_checkpoint_state_dicts)",
        broken(_OPTIM), True),
    *(
        Habit(_WITH_OPTIMIZER, _REFUSED, "{file} is not there ({ranks} ranks): its rank fails to load",
            "engine.py:4802 (_get_all_zero_checkpoint_state_dicts)", missing_ranks(name))
        for name in ("zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", "bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    ),
    Habit(_WITH_OPTIMIZER, _REFUSED, "a rank's file is missing: {problem}", "engine.py:4802 (_get_all_zero_checkpoint_state_dicts)",
        incomplete, True),
    Habit(OF_OPTIMIZER, _REFUSED, "no optimizer state is there, and an engine with ZeRO asks for each rank's file",
        "engine.py:4839 (_get_all_zero_checkpoints)", lambda seen: not seen.held.problem and not seen.held.optimizer),
    Habit(OF_OPTIMIZER, _RESTORED, "…optim_states.pt of each rank, or the model's file where ZeRO is off",
        "engine.py:4733 (_load_zero_checkpoint)", ran=True),
    Habit((Thing.SCALER,), _RESTORED, "with the optimizer; only fp16 uses it", "engine.py:4733 (_load_zero_checkpoint)",
        lambda seen: seen.held.scaler),
    Habit((Thing.SCALER,), _ABSENT, "none is stored; only fp16 has one", "engine.py:4733 (_load_zero_checkpoint)"),
    Habit((Thing.SCHEDULER, Thing.COUNTERS), _REFUSED, "{file} {wrong}: loading it fails", "state_dict_factory.py:170 (check_ckpt_list)",
        broken(_MODEL), True),
    Habit((Thing.SCHEDULER,), _ANEW, "{key}: the scheduler begins anew", "engine.py:4704 (_load_checkpoint)",
        refused("load_lr_scheduler_states"), True),
    Habit((Thing.SCHEDULER,), _REFUSED, "the configuration has a scheduler, and None is stored", "engine.py:4704 (_load_checkpoint)",
        lambda seen: not seen.held.problem and not seen.held.scheduler and seen.settings.get("scheduler", "scheduler.type") is not None),
    Habit((Thing.SCHEDULER,), _ABSENT, "the engine had none; a scheduler outside is the script's", "engine.py:4704 (_load_checkpoint)",
        lambda seen: not seen.held.problem and not seen.held.scheduler),
    Habit((Thing.SCHEDULER,), _RESTORED, "lr_scheduler, where the engine has one", "engine.py:4704 (_load_checkpoint)", ran=True),
    Habit((Thing.COUNTERS,), _RESTORED, "global_steps, global_samples, skipped_steps; the rest is handed to the script as client state",
        "engine.py:4712 (_load_checkpoint)", ran=True),
    Habit((Thing.RNG,), _ABSENT, "DeepSpeed stores no random states", "engine.py:4568 (_load_checkpoint)", ran=True),
    Habit((Thing.DATA,), _ABSENT, "the place in the data is the script's, apart from a curriculum's sampler",
        "engine.py:4709 (_load_checkpoint)"),
)  # fmt: skip

LOADER = Loader(TRAINER, "0.19.8", ROWS, others=("ds", "zero"))
