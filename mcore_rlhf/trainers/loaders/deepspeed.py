"""What ``DeepSpeedEngine.load_checkpoint`` restores: of its own files, without a trainer round it.

Source: DeepSpeed 0.19.8, ``deepspeed/runtime/engine.py`` (``load_checkpoint``, ``_load_checkpoint``, ``_load_zero_checkpoint``,
``_get_all_zero_checkpoints``), ``deepspeed/runtime/state_dict_factory.py`` (``check_ckpt_list``).
"""

from __future__ import annotations

import re
from dataclasses import replace

from mcore_rlhf.trainers.conditions import (
    OTHER_CLASS,
    UNRATED,
    asked,
    both,
    broken,
    has,
    incomplete,
    incomplete_in,
    lacks,
    lacks_of,
    missing_ranks,
    other_optimizer,
    refused,
    stateless,
    uneven,
    ungrouped,
    unrated,
    without,
)
from mcore_rlhf.trainers.resuming import OF_OPTIMIZER, Habit, Loader, Outcome, Seen, Thing, rows_of
from mcore_rlhf.trainers.table import Trainer

_RESTORED, _ANEW, _IGNORED, _REFUSED, _ABSENT = Outcome
MODEL, _OPTIM, _BF16 = "*_model_states.pt", "*_optim_states.pt", "bf16_*_optim_states.pt"
_WITH_OPTIMIZER = (*OF_OPTIMIZER, Thing.SCALER)
_ALL = (Thing.WEIGHTS, *_WITH_OPTIMIZER, Thing.SCHEDULER, Thing.COUNTERS)
_FLAT, _PLAIN = "optimizer_state_dict/", "optimizer/"
_INNER = ("base_optimizer_state/", "optimizer_state_dict/")
"""What stages 1 and 2, and stage 3, call torch's optimizer; an elastic checkpoint has a list there."""
_NOT_OPTIMIZER = "load_optimizer_states"

TRAINER = Trainer(
    name="deepspeed",
    title="DeepSpeed",
    steps=("global_step{step}",),
    marks=(MODEL,),
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


def _fewer(seen: Seen) -> object:
    """The module has fewer tensors, apart from buffers, than stage 0's optimizer has parameters: ``{file}``, ``{there}``, ``{wanted}``."""
    for name in seen.matching(MODEL):
        keys = seen.keys(name)
        wanted = sum(1 for key in keys if _TRAINED.fullmatch(key))
        own = {found[1] for key in keys if (found := _TENSOR.fullmatch(key))}
        there = sum(1 for tensor in own if f"buffer_names/{tensor}" not in keys)
        if there < wanted:
            return {"file": name, "there": there, "wanted": wanted}
    return None


def _baseless(seen: Seen) -> object:
    """The module's file has an adapter without what it adapts, and whatever the engine's module has is asked for: ``{file}``, ``{key}``."""
    for name in () if seen.settings.denies("load_module_strict") else seen.matching(MODEL):
        keys = seen.keys(name)
        based = {key.rpartition(_BASE)[0] for key in keys if _BASE in key}
        gone = sorted({found[1] for key in keys if (found := _ADAPTED.fullmatch(key))} - based)
        if gone:
            return {"file": name, "key": f"{gone[0].removeprefix('module/')}{_BASE}weight"}
    return None


_BASE, _ADAPTED = ".base_layer.", re.compile(r"(module/[^/]+)\.lora_(?:embedding_)?A\.[^/]+")
_TRAINED = re.compile(r"optimizer/(?:optimizer_state_dict/)?param_groups/\d+/params/\d+")
_TENSOR = re.compile(r"module/([^/]+)")


def _nowhere(seen: Seen) -> bool:
    """Neither files of partitions, nor what stage 0 has in the model's."""
    within = any(key.startswith(_PLAIN) for name in seen.matching(MODEL) for key in seen.keys(name))
    return not seen.held.problem and not within and not seen.has(_OPTIM)


def _sliced(seen: Seen) -> bool:
    """Stage 3 has a model's file of each data-parallel rank."""
    return seen.has("zero_pp_rank_*_model_states.pt")


def _not_sliced(seen: Seen) -> bool:
    return not _sliced(seen)


def _wrapped(seen: Seen) -> bool:
    """Stage 0 in 16 bits has masters round the optimizer's own state."""
    return any(f"{_PLAIN}optimizer_state_dict" in seen.keys(name) for name in seen.matching(MODEL))


def _scheduled(seen: Seen) -> bool:
    """The engine had a scheduler: a dictionary is stored, however empty."""
    return seen.held.scheduler or seen.settings.get("scheduler", "scheduler.type") is not None


def _stage(seen: Seen) -> int | None:
    """The stage of the engine that is to load; None where nobody says."""
    return seen.settings.number("zero_optimization.stage")


def _other_files(seen: Seen) -> object:
    """Stage 3 has a model's file of each rank, and the others one: ``{now}``."""
    now = _stage(seen)
    return now is not None and seen.has(MODEL) and not _universal(seen) and (now == 3) != _sliced(seen) and {"now": now}


def _unpartitioned(seen: Seen) -> object:
    """Stage 0 has its optimizer in the model's file, and the others each rank's: ``{now}``."""
    now = _stage(seen)
    return (
        now is not None and seen.has(MODEL) and not _universal(seen) and (now > 0) != seen.has(_OPTIM) and {"now": now}
    )


def _universal(seen: Seen) -> bool:
    return seen.settings.says("load_universal", "checkpoint.load_universal")


STRICT = "{file} has no {key}, as it holds an adapter alone: it is not loaded without load_module_strict=False"
ROWS = rows_of(
    "DeepSpeed 0.19.8, runtime/",
    Habit((Thing.WEIGHTS,), _REFUSED, "no …model_states.pt is there", "state_dict_factory.py:168 (check_ckpt_list)", lacks(MODEL), True),
    Habit(_ALL, _REFUSED, "the engine is of ZeRO's stage {now}, and looks for files of the model under other names",
        "state_dict_factory.py:168 (check_ckpt_list)", _other_files, True),
    Habit((Thing.WEIGHTS,), _REFUSED, "{file} {wrong}: loading it fails", "state_dict_factory.py:170 (check_ckpt_list)",
        broken(MODEL), True),
    Habit(_ALL, _REFUSED, "{file} has no {key}: a KeyError", "engine.py:4568 (_load_checkpoint)",
        without(MODEL, "module", "dp_world_size"), True),
    Habit((Thing.WEIGHTS,), _REFUSED, "{file} has no {key}, which stands in its own lists: loading it fails",
        "engine.py:4643 (_load_checkpoint)", lacks_of(MODEL, "module", "param_shapes", "buffer_names"), True),
    Habit((Thing.WEIGHTS,), _REFUSED, STRICT, "engine.py:4662 (_load_checkpoint)", _baseless, True),
    Habit((Thing.WEIGHTS,), _REFUSED, "{file} has {there} parameters, its optimizer {wanted}: loading it fails",
        "engine.py:4643 (_load_checkpoint)", _fewer, True),
    Habit((Thing.WEIGHTS,), _REFUSED, "a rank's file is missing: {problem}", "engine.py:4568 (_load_checkpoint)",
        incomplete_in("_model_states")),
    Habit((Thing.WEIGHTS,), _RESTORED, "…model_states.pt", "engine.py:4568 (_load_checkpoint)", ran=True),
    Habit((*_WITH_OPTIMIZER, Thing.SCHEDULER, Thing.COUNTERS), _ANEW, "{key}: the model alone is loaded; masters are made of its weights",
        "engine.py:4670 (_load_checkpoint)", asked("load_module_only"), True),
    Habit((*_WITH_OPTIMIZER, Thing.SCHEDULER, Thing.COUNTERS), _REFUSED, "{file} has no {key}: a KeyError",
        "engine.py:4712 (_load_checkpoint)", without(MODEL, "global_steps", "skipped_steps", "mp_world_size"), True),
    Habit(_WITH_OPTIMIZER, _ANEW, "{key}: masters are made of the model's weights", "engine.py:4455 (load_checkpoint)",
        refused(_NOT_OPTIMIZER), True),
    Habit(_WITH_OPTIMIZER, _REFUSED, "saved by {was} data-parallel ranks, loaded by {now}: ZeRO's pieces are not dealt anew",
        "engine.py:4748 (_load_zero_checkpoint)", both(lambda seen: not _universal(seen), has(_OPTIM), _other_world)),
    Habit(_WITH_OPTIMIZER, _REFUSED, "the engine is of ZeRO's stage {now}, and looks for the optimizer where it is not",
        "engine.py:4696 (_load_checkpoint)", _unpartitioned, True),
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
        "engine.py:4839 (_get_all_zero_checkpoints)", _nowhere),
    *(
        Habit(_WITH_OPTIMIZER, _REFUSED, "{file} has no {key}: a KeyError", where, condition, True)
        for where, condition in (
            ("engine.py:4802 (_get_all_zero_checkpoint_state_dicts)", without(_OPTIM, "optimizer_state_dict")),
            ("zero/stage_1_and_2.py:3678 (_load_global_state)", both(_not_sliced, without(_OPTIM, "ds_version", inside=_FLAT))),
            ("zero/stage_1_and_2.py:3721 (_load_legacy_checkpoint)", both(_not_sliced, without(
                _OPTIM, "base_optimizer_state", "single_partition_of_fp32_groups", inside=_FLAT))),
            ("zero/stage3.py:3542 (_rigid_load_state_dict)", both(_sliced, without(
                _OPTIM, "loss_scaler", "dynamic_loss_scale", "overflow", "optimizer_state_dict", "fp32_flat_groups", inside=_FLAT))),
            *(("zero/stage_1_and_2.py:3746 (_load_legacy_checkpoint)",
               without(_OPTIM, "state|0", "param_groups|0", inside=_FLAT + inner)) for inner in _INNER),
            ("engine.py:4695 (_load_checkpoint)", without(
                MODEL, "state|optimizer_state_dict", "param_groups|optimizer_state_dict", inside=_PLAIN)),
            ("fp16/unfused_optimizer.py:381 (load_state_dict)", both(_wrapped, without(
                MODEL, "dynamic_loss_scale", "cur_scale", "cur_iter", "fp32_groups|fp32_groups_flat", inside=_PLAIN))),
            ("fp16/unfused_optimizer.py:390 (load_state_dict)",
             without(MODEL, "state", "param_groups", inside=f"{_PLAIN}optimizer_state_dict/")),
        )
    ),
    *(
        row
        for pattern, inside in ((_OPTIM, _FLAT + _INNER[0]), (_OPTIM, _FLAT + _INNER[1]), (MODEL, _PLAIN), (MODEL, _PLAIN + _INNER[1]))
        for row in (
            Habit(OF_OPTIMIZER, _REFUSED, "{file} has no {key}: loading it, or the first step, fails",
                "engine.py:4696 (_load_checkpoint)", ungrouped(pattern, inside), True),
            Habit(OF_OPTIMIZER, _REFUSED, "{file} has no {key} for {count} parameters: loading it, or the first step, fails",
                "engine.py:4696 (_load_checkpoint)", uneven(pattern, inside), True),
            Habit((Thing.OPTIMIZER,), _ANEW, "{file} has no state for {count} parameters: frozen, or begun at zero; nothing is said",
                "engine.py:4696 (_load_checkpoint)", stateless(pattern, inside), True),
        )
    ),
    Habit(OF_OPTIMIZER, _REFUSED, OTHER_CLASS, "engine.py:4696 (_load_checkpoint)", other_optimizer("optimizer.type", _OPTIM, MODEL)),
    Habit(OF_OPTIMIZER, _RESTORED, "…optim_states.pt of each rank, or the model's file where ZeRO is off",
        "engine.py:4733 (_load_zero_checkpoint)", ran=True),
    Habit((Thing.SCALER,), _RESTORED, "with the optimizer; only fp16 uses it", "engine.py:4733 (_load_zero_checkpoint)",
        lambda seen: seen.held.scaler),
    Habit((Thing.SCALER,), _ABSENT, "none is stored; only fp16 has one", "engine.py:4733 (_load_zero_checkpoint)"),
    Habit((Thing.SCHEDULER, Thing.COUNTERS), _REFUSED, "{file} {wrong}: loading it fails", "state_dict_factory.py:170 (check_ckpt_list)",
        broken(MODEL), True),
    Habit((Thing.SCHEDULER,), _ANEW, "{key}: the scheduler begins anew", "engine.py:4704 (_load_checkpoint)",
        refused("load_lr_scheduler_states"), True),
    Habit((Thing.SCHEDULER,), _REFUSED, "the configuration has a scheduler, and None is stored", "engine.py:4704 (_load_checkpoint)",
        lambda seen: not seen.held.problem and not seen.held.scheduler and seen.settings.get("scheduler", "scheduler.type") is not None),
    Habit((Thing.SCHEDULER,), _ABSENT, "the engine had none; a scheduler outside is the script's", "engine.py:4704 (_load_checkpoint)",
        lambda seen: not seen.held.problem and not seen.held.scheduler),
    Habit((Thing.SCHEDULER,), _REFUSED, "{file} has no {key}: a KeyError of DeepSpeed's own schedules",
        "lr_schedules.py:780 (load_state_dict)",
        both(_scheduled, without(MODEL, "lr_scheduler/last_batch_iteration|lr_scheduler/last_epoch|lr_scheduler/base_lrs")), True),
    Habit((Thing.SCHEDULER,), _ANEW, "{file} has no {key}: the schedule keeps its own; nothing is said",
        "engine.py:4704 (_load_checkpoint)",
        both(_scheduled, without(MODEL, "lr_scheduler/last_batch_iteration|lr_scheduler/last_epoch"))),
    Habit((Thing.SCHEDULER,), _REFUSED, UNRATED,
        "engine.py:4704 (_load_checkpoint)", unrated(MODEL, "*_states.pt", "lr_scheduler/"), True),
    Habit((Thing.SCHEDULER,), _RESTORED, "lr_scheduler, where the engine has one", "engine.py:4704 (_load_checkpoint)", ran=True),
    Habit((Thing.COUNTERS,), _RESTORED, "global_steps, global_samples, skipped_steps; the rest is handed to the script as client state",
        "engine.py:4712 (_load_checkpoint)", ran=True),
    Habit((Thing.RNG,), _ABSENT, "DeepSpeed stores no random states", "engine.py:4568 (_load_checkpoint)", ran=True),
    Habit((Thing.DATA,), _ABSENT, "the place in the data is the script's, apart from a curriculum's sampler",
        "engine.py:4709 (_load_checkpoint)"),
)  # fmt: skip

_LOST = (Thing.WEIGHTS, *_WITH_OPTIMIZER)


def _tag_in(seen: Seen) -> Seen | None:
    """What DeepSpeed sees of a step that has a tag in it; None where it has none."""
    places = {name.rpartition("/")[0] for name in seen.matching(MODEL, _OPTIM)} - {""}
    if not places:
        return None
    before = f"{min(places)}/"
    return replace(
        seen,
        files=frozenset(name.removeprefix(before) for name in seen.files if name.startswith(before)),
        broken={name.removeprefix(before): wrong for name, wrong in seen.broken.items()},
        keys=lambda name: seen.keys(before + name),
        on=lambda name: seen.on(before + name),
    )


def _of_tag(row: Habit) -> Habit:
    def when(seen: Seen) -> object:
        tag = _tag_in(seen)
        return None if tag is None else row.when(tag)

    return replace(row, things=tuple(thing for thing in row.things if thing in _LOST), when=when)


def adapter_in_tag(seen: Seen) -> object:
    """A step's tag has an adapter alone: ``{file}`` and ``{key}``, which is of its base."""
    tag = _tag_in(seen)
    return None if tag is None else _baseless(tag)


IN_A_TAG = tuple(_of_tag(row) for row in ROWS if row.outcome.is_loss and {*row.things} & {*_LOST})
"""What DeepSpeed loses of its own, for trainers that save with it: of weights and optimizer; what else there is, is theirs."""

LOADER = Loader(TRAINER, "0.19.8", ROWS, others=("ds", "zero"))
