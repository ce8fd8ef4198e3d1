"""What AReaL recovers with ``recover.mode=auto``: by ``RecoverHandler``, its FSDP engine's DCP folders or its Megatron engine's.

Source: AReaL 1.0.4, ``areal/utils/recover.py`` (``RecoverInfo.load``, ``RecoverHandler.load``), ``areal/engine/fsdp_engine.py``
(``_load_from_dcp``), ``areal/engine/megatron_utils/checkpointer.py`` (``load_checkpoint``), ``areal/utils/timeutil.py``.
"""

from __future__ import annotations

from collections.abc import Callable

from mcore_rlhf.families.run_folders import RECOVER_INFO, RECOVER_STEP
from mcore_rlhf.trainers.areal import TRAINER
from mcore_rlhf.trainers.conditions import (
    ADAM,
    OF_GROUP,
    OTHER_CLASS,
    asked,
    both,
    broken,
    has,
    incomplete,
    lacks,
    other_dtype,
    other_optimizer,
    refused,
    undealt,
    unlisted,
    without,
)
from mcore_rlhf.trainers.resuming import EVERYTHING, OF_OPTIMIZER, Habit, Loader, Outcome, Seen, Thing, rows_of
from mcore_rlhf.trainers.torchdata import STOPS, stops_at

_RESTORED, _ANEW, _IGNORED, _REFUSED, _ABSENT = Outcome
_MODEL = (Thing.WEIGHTS, *OF_OPTIMIZER)
_INFO, _LOAD = "utils/recover.py:96 (RecoverInfo.load)", "utils/recover.py:272 (RecoverHandler.load)"
_DCP, _MEGATRON = (
    "engine/fsdp_engine.py:1758 (_load_from_dcp)",
    "engine/megatron_utils/checkpointer.py:336 (load_checkpoint)",
)
_STEP = f"{RECOVER_INFO}/{RECOVER_STEP}"
_ANYWAY = "a warning says “This should not be a resumed experiment!”, and the next checkpoint is written over this one"
_OF_STEP = ("epoch", "epoch_step", "global_step", "steps_per_epoch")
_OF_CONTROL = (
    "frequence_seconds", "frequency_steps", "start_time", "steps", "last_time", "last_steps", "interval_steps", "interval_seconds",
    "initial_value",
)  # fmt: skip


def _gone(seen: Seen) -> object:
    """A file is not there without which nothing is loaded: ``{file}``."""
    return next(({"file": name} for name in TRAINER.needs if name not in seen.above), None)


def _wrong(seen: Seen) -> object:
    """Such a file cannot be read: ``{file}`` and ``{wrong}``."""
    return next(({"file": name, "wrong": seen.broken[name]} for name in TRAINER.needs if name in seen.broken), None)


def _other_step(seen: Seen) -> object:
    """Fields of the step are more or fewer than there are: ``{file}`` and ``{key}``."""
    there = {key for key in seen.keys(_STEP) if "/" not in key}
    wrong = sorted(there.symmetric_difference(_OF_STEP))
    return wrong and {"file": _STEP, "key": wrong[0]}


def _lacks_control(seen: Seen) -> object:
    """What counts when it saves lacks a key: ``{file}`` and ``{key}``."""
    for name in ("saver_info.json", "evaluator_info.json", "checkpoint_info.json"):
        there = seen.keys(f"{RECOVER_INFO}/{name}")
        wanted = [f"{what}/{key}" for what in ("epoch", "step", "time") for key in _OF_CONTROL]
        if gone := [key for key in wanted if key not in there]:
            return {"file": f"{RECOVER_INFO}/{name}", "key": gone[0]}
    logged = f"{RECOVER_INFO}/stats_logger_info.json"
    return "last_commit_step" not in seen.keys(logged) and {"file": logged, "key": "last_commit_step"}


def _shares(seen: Seen) -> int:
    """How many ranks' shares of the data are counted; none where one loader has all."""
    there = {key for key in seen.keys(TRAINER.data) if "/" not in key}
    return len(there) if there and all(key.isdecimal() for key in there) else 0


def _other_world(seen: Seen) -> object:
    """Other ranks load than saved, each of which had a share: ``{was}`` and ``{now}``."""
    was = _shares(seen)
    return was and seen.world not in (None, was) and {"was": was, "now": seen.world}


def _begun(seen: Seen) -> object:
    return seen.keys(TRAINER.data)


def _unlisted(before: str, *names: str) -> Habit:
    """Whatever is not there, the one call that loads everything stops."""
    return Habit(_MODEL, _REFUSED, "{file} has no {key}: DCP stops where one that is asked for is not there", _DCP,
        both(_of_fsdp, unlisted(".metadata", before, *names)))  # fmt: skip


_of_fsdp: Callable[[Seen], object] = lacks("metadata.json")
_of_megatron: Callable[[Seen], object] = has("metadata.json")

ROWS = rows_of(
    "AReaL 1.0.4, areal/",
    Habit(EVERYTHING, _ANEW, "recover.mode is {mode}: nothing is loaded", "utils/recover.py:283 (RecoverHandler.load)",
        lambda seen: (mode := seen.settings.get("recover.mode")) in ("disabled", "off", False) and {"mode": mode}),
    Habit(EVERYTHING, _ANEW, f"{{file}} is not there: {_ANYWAY}", _INFO, _gone, True),
    Habit(EVERYTHING, _ANEW, f"{{file}} {{wrong}}: {_ANYWAY}", _INFO, _wrong, True),
    Habit(EVERYTHING, _ANEW, f"{{file}} has too much or too little, {{key}}: {_ANYWAY}", _INFO, _other_step),
    Habit(EVERYTHING, _ANEW, f"{TRAINER.data} counts the shares of {{was}} ranks, and {{now}} load: {_ANYWAY}", _INFO, _other_world, True),
    Habit(EVERYTHING, _REFUSED, "{file} has no {key}: a KeyError", "utils/timeutil.py:67 (FrequencyControl.load_state_dict)",
        _lacks_control),
    Habit(_MODEL, _REFUSED, "{file} {wrong}: loading it fails", _DCP, broken(".metadata", "*.distcp", "common.pt")),
    Habit(_MODEL, _REFUSED, "nothing is there that its engine saves: loading it fails", _DCP, lacks(".metadata", "metadata.json")),
    Habit(_MODEL, _REFUSED, "a file is missing: {problem}", _DCP, incomplete),
    Habit(OF_OPTIMIZER, _ANEW, "recover.no_load_optim: the optimizer is not loaded", "utils/recover.py:377 (_load_checkpoint)",
        asked("recover.no_load_optim")),
    _unlisted(r"dcp\.optim\.state\..+\.", *ADAM),
    _unlisted(r"dcp\.optim\.param_groups\.\d+\.", *OF_GROUP, "initial_lr", "params"),
    Habit(_MODEL, _REFUSED, "{file} has no {key}: its optimizer has one param group, of all", _DCP,
        both(_of_fsdp, undealt(".metadata", r"dcp\.optim\."))),
    Habit(OF_OPTIMIZER, _REFUSED, "no optimizer is stored, and its keys are asked for; recover.no_load_optim=true begins it anew", _DCP,
        lambda seen: not seen.held.problem and not seen.held.optimizer, True),
    Habit((Thing.SCHEDULER,), _ANEW, "use_checkpoint_opt_param_scheduler is off: the schedule begins anew", _MEGATRON,
        both(_of_megatron, refused("use_checkpoint_opt_param_scheduler"))),
    Habit((*_MODEL, Thing.SCHEDULER, Thing.RNG), _REFUSED, "{file} has no {key}: an AssertionError, unless "
        "use_checkpoint_opt_param_scheduler is off", _MEGATRON, both(_of_megatron, without("common.pt", "lr_scheduler"))),
    Habit((Thing.SCHEDULER,), _RESTORED, "lr_scheduler, as use_checkpoint_opt_param_scheduler asks", _MEGATRON, _of_megatron, True),
    Habit((Thing.SCHEDULER,), _ANEW, "the FSDP engine stores no schedule: the first step has the rate that is stored with the optimizer, "
        "all others those of a run that begins, its warm-up too", "engine/fsdp_engine.py:1743 (_save_to_dcp)", ran=True),
    Habit((Thing.RNG,), _RESTORED, "rng_state, of tensor and pipeline rank", _MEGATRON, _of_megatron, True),
    Habit((Thing.RNG,), _ANEW, "the FSDP engine stores no random states", "engine/fsdp_engine.py:1743 (_save_to_dcp)", ran=True),
    Habit((Thing.OPTIMIZER,), _ANEW, "a new optimizer is asked which moments it has, and has none: masters are restored, moments begin at "
        "zero; nothing is said. From megatron-core 0.16 on it stops, as its save does: “ShardedTensor.flattened_range is not supported”",
        "engine/megatron_utils/checkpointer.py:301 (generate_state_dict)", _of_megatron, True),
    Habit(_MODEL, _RESTORED, "model and param groups of torch_dist", _MEGATRON, _of_megatron, True),
    Habit(OF_OPTIMIZER, _REFUSED, OTHER_CLASS, _DCP, other_optimizer("{role}.optimizer.type", ".metadata")),
    Habit(_MODEL, _RESTORED, "dcp.model and dcp.optim, by name, whatever the ranks", _DCP, ran=True),
    Habit((Thing.DTYPE,), _IGNORED, "stored as {was}, cast to the {now} of optimizer_dtype, moments too; nothing is said", _DCP,
        both(_of_fsdp, lambda seen: other_dtype(f"{seen.role or 'actor'}.optimizer_dtype")(seen))),
    Habit((Thing.COUNTERS,), _RESTORED, "global_step; and how often it saves, evaluates and writes such a checkpoint is what recover_info "
        "says, whatever the configuration does", _LOAD, ran=True),
    Habit((Thing.DATA,), _REFUSED, STOPS, _LOAD, stops_at(TRAINER.data), True),
    Habit((Thing.DATA,), _RESTORED, TRAINER.data, _LOAD, _begun, True),
    Habit((Thing.DATA,), _ANEW, f"{TRAINER.data} is of a loader that has given nothing yet: the data begin anew", _LOAD, ran=True),
)  # fmt: skip

LOADER = Loader(TRAINER, "1.0.4", ROWS)
