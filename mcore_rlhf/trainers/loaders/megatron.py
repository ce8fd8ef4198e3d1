"""What Megatron-LM's ``load_checkpoint`` restores; Megatron-Bridge has a loader of its own, :mod:`.megatron_bridge`.

Source: Megatron-LM, as megatron-core 0.19.2 brings it, ``megatron/training/checkpointing.py`` (``load_checkpoint``,
``_load_base_checkpoint``), ``megatron/core/optimizer_param_scheduler.py`` (``load_state_dict``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from mcore_rlhf.families.megatron.state import TIMELESS
from mcore_rlhf.trainers.conditions import (
    OTHER_CLASS,
    asked,
    both,
    broken,
    has,
    incomplete,
    lacks,
    other_optimizer,
    uneven,
    unlisted,
    without,
)
from mcore_rlhf.trainers.megatron import LM
from mcore_rlhf.trainers.resuming import INSIDE, OF_OPTIMIZER, Habit, Loader, Outcome, Seen, Thing, rows_of

_RESTORED, _ANEW, _IGNORED, _REFUSED, _ABSENT = Outcome
_PLAIN, DIST = "mp_rank_*/*", (".metadata", "*.distcp")
WITH_OPTIMIZER = (*OF_OPTIMIZER, Thing.SCHEDULER, Thing.SCALER)
_DEGREES = ("tensor_model_parallel_size", "pipeline_model_parallel_size")


def _of(seen: Seen, name: str) -> int:
    found = seen.held.args.get(name, 1)
    return found if isinstance(found, int) else 1


def other_degrees(seen: Seen) -> object:
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
        seen.has(*DIST)
        and args.get("use_distributed_optimizer") is True
        and args.get("dist_ckpt_optim_fully_reshardable") is False
    )


_TYPES = {"bf16": "bfloat16", "fp16": "float16"}


def _other_type(seen: Seen) -> Mapping[str, str] | None:
    """The configuration trains in another type than is stored: ``{was}`` and ``{now}``."""
    now, was = next((name for flag, name in _TYPES.items() if seen.settings.says(flag)), ""), seen.held.dtype
    return {"was": was, "now": now} if was and now not in ("", was) else None


def _other_buffers(seen: Seen) -> object:
    """The same, where a distributed optimizer's buffers go by their type: in ``distrib_optim.pt``, and in flat buckets."""
    by_type = lies_flat(seen) or (seen.has(_PLAIN) and seen.matching(_DISTRIB))
    return by_type and _other_type(seen)


def _other_nest(seen: Seen) -> object:
    """The same, where a plain optimizer has masters in the one and none in the other."""
    plain = seen.held.args.get("use_distributed_optimizer") is False
    return plain and seen.held.dtype == "float32" and _other_type(seen)


def lies_flat(seen: Seen) -> bool:
    """Whether the optimizer lies in flat buckets, which another TP or PP, or another type, cannot load."""
    return any(
        "optimizer.distributed.dp_group_idx_" in key for name in seen.matching("*.metadata") for key in seen.keys(name)
    )


def _stepless(seen: Seen) -> object:
    """Param groups of a torch_dist folder, which are those of its first rank, lack the step that Adam is at: ``{file}`` and ``{key}``."""
    args = seen.held.args
    if args.get("use_distributed_optimizer") is not True or args.get("optimizer") != "adam":
        return None
    for name in seen.places(*COMMON[1:]):
        keys = seen.keys(name)
        for group in sorted({found[0] for key in keys if (found := _A_GROUP.match(key))}):
            if f"{group}step" not in keys:
                return {"file": name.replace(INSIDE, ": "), "key": f"{group}step"}
    return None


_IN_SCHEDULER = "load_checkpoint, and megatron/core/optimizer_param_scheduler.py:load_state_dict"
_MODEL, _DISTRIB = "*model_optim_rng.pt", "*distrib_optim.pt"
COMMON = (_MODEL, "*common.pt", "*.metadata//common_state/*")
"""What is not a tensor's of any rank: in each rank's file, in a file of its own, or, since 0.19, in an object."""
_FLAT_GROUPS = "*.metadata//*optimizer.distributed.dp_group_idx_*.optimizer/*"
RESUMED = (*WITH_OPTIMIZER, Thing.COUNTERS, Thing.RNG, Thing.DATA)
ALL = (Thing.WEIGHTS, *RESUMED)
_COMPARED = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    *_DEGREES,
)
"""Degrees last: of a torch_dist folder they are not compared."""
_GROUP = ("wd_mult|pre_wd_mult", "lr_mult|pre_lr_mult", "is_expert_parallel", "is_decoupled_lr")
_OF_SOME = ("max_lr", "min_lr")
"""What groups are told apart by in 0.19, and did not have before."""
_SCHEDULE = (
    "max_lr|start_lr", "lr_warmup_steps|warmup_iter|warmup_steps", "num_steps|num_iters", "lr_decay_style|decay_style",
    "lr_decay_steps|end_iter|decay_steps", "min_lr",
)  # fmt: skip
_WEIGHT_DECAY = ("end_wd", "wd_incr_style", "wd_incr_steps")
"""What a scheduler's state must have, and what of the weight decay where it has ``start_wd``: keys of one release, or of an older one."""
STREAMS = ("random_rng_state", "np_rng_state", "torch_rng_state", "cuda_rng_state", "rng_tracker_states")
_UNFIT = re.compile("|".join((
    r"layer \d+ (has no |is missing)", r"(^|: )\S+\.(weight|bias) is missing", "which no parameter of the model",
    "computed from the model's parameters", "is true, but output_layer",
)))  # fmt: skip
_NOT_THERE = re.compile(
    r"has neither common.pt nor |output_layer.weight is not there|: should have \d+ elements, has \d+"
)
"""How a reader says of a torch_dist folder that something is gone, where it could also be another run's."""
BUCKETS = r"(chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.(?=optimizer/|per_bucket_)"
OF_BUCKETS = ("optimizer/shard_0_1", "per_bucket_numel/shard_0_1", "per_bucket_numel_unpadded/shard_0_1")
"""What flat buckets have besides tensors, and what each group of ranks is asked for."""
_EMPTY, _MORE = (
    re.compile("found none|buffers stored"),
    re.compile(r"param group \d+ has (\d+) parameters, (\d+) expected"),
)
_PARTIAL = re.compile("which other parameters have|fp32 masters|but its other moment")


def _lacks_tensors(seen: Seen) -> object:
    """By other layers, by its args, or by what the optimizer has of them, the model's files lack tensors: ``{problem}``."""
    problem = seen.held.problem or seen.held.unread
    more = _MORE.search(problem)
    unfit = (_UNFIT.search(problem) and not _EMPTY.search(problem)) or (more and int(more[1]) > int(more[2]))
    return seen.has(_PLAIN) and unfit and {"problem": problem}


def not_listed(seen: Seen) -> object:
    """A folder of torch_dist lacks something, of the model or of the optimizer, that the loader asks for: ``{problem}``."""
    gone = seen.held.incomplete or _NOT_THERE.search(seen.held.problem)
    return seen.has(*DIST) and gone and {"problem": seen.held.problem}


def _partial(seen: Seen) -> object:
    """Of some parameters the optimizer's state is not there: ``{problem}``."""
    return (
        _PARTIAL.search(seen.held.problem)
        and "distrib_optim" not in seen.held.problem
        and {"problem": seen.held.problem}
    )


def _unlike(seen: Seen) -> object:
    """The distributed optimizer's file is not what its reader knows: ``{problem}``."""
    problem = seen.held.problem or seen.held.unread
    named = "distrib_optim" in problem or "distributed optimizer: buffer" in problem
    return named and not _lacks_tensors(seen) and {"problem": problem}


def _dealt_flat(seen: Seen) -> bool:
    """A torch_dist folder has a distributed optimizer, as its args say, and that is to be loaded."""
    is_wanted = not seen.settings.says("finetune", "no_load_optim")
    return is_wanted and seen.has(*DIST) and seen.held.args.get("use_distributed_optimizer") is True


def _uncompared(seen: Seen) -> object:
    """Stored ``args`` lack one that is compared: ``{key}``."""
    gone = [name for name in _COMPARED[: None if seen.has(_PLAIN) else -len(_DEGREES)] if name not in seen.held.args]
    return seen.held.args and not seen.held.problem and {"key": gone[0]} if gone else None


def _unsized(seen: Seen) -> object:
    """A buffer of the distributed optimizer does not say how many elements it has: ``{file}``."""
    for name in seen.matching(_DISTRIB):
        keys = seen.keys(name)
        if any(key.endswith("/exp_avg") and key.removesuffix("exp_avg") + "numel_unpadded" not in keys for key in keys):
            return {"file": name}
    return None


def in_groups(seen: Seen) -> object:
    """A param group lacks what tells it from others, whichever chained optimizer it is of: ``{file}`` and ``{key}``."""
    for name in seen.places(*COMMON, _FLAT_GROUPS):
        keys = seen.keys(name)
        for group in sorted({found[0] for key in keys if (found := _A_GROUP.match(key))}):
            others = [key for key in _OF_SOME if any(_A_GROUP.sub("", one) == key for one in keys)]
            for wanted in (*_GROUP, *others):
                if not any(f"{group}{one}" in keys for one in wanted.split("|")):
                    return {"file": name.replace(INSIDE, ": "), "key": group + wanted.partition("|")[0]}
    return None


def _masterless(seen: Seen) -> object:
    """An optimizer with states has masters of none, and its reader misses them."""
    keys = {key for name in seen.matching(_MODEL) for key in seen.keys(name)}
    return "fp32 masters of" in seen.held.problem and not any(
        key.startswith("optimizer/fp32_from_fp16") for key in keys
    )


def _memberless(seen: Seen) -> object:
    """A param group of an optimizer that has states does not list its parameters: ``{file}`` and ``{key}``."""
    for name in seen.matching(_MODEL):
        keys = seen.keys(name)
        for group in sorted({found[0] for key in keys if (found := _A_GROUP.match(key))}):
            if "optimizer/optimizer/state" in keys and f"{group}params" not in keys:
                return {"file": name, "key": f"{group}params"}
    return None


def _hollow(seen: Seen) -> object:
    """An optimizer is stored in which nothing is: ``{file}`` and ``{key}``."""
    for name in seen.matching(_MODEL):
        keys = seen.keys(name)
        for key in ("optimizer", "optimizer/optimizer"):
            if key in keys and not any(one.startswith(f"{key}/") for one in keys):
                return {"file": name, "key": f"{key}/{'optimizer' if key == 'optimizer' else 'param_groups'}"}
    return None


def cut_schedule(places: tuple[str, ...], key: str = "opt_param_scheduler") -> Callable[[Seen], object]:
    """A scheduler's state lacks a key that its loader asks for: ``{file}`` and ``{key}``.

    Args:
        places: Where a state may lie, see :meth:`.Seen.places`.
        key: What it is called there; empty where it is all that lies there.
    """
    inside = f"{key}/" if key else ""
    always, decaying = (without(places, *names, inside=inside) for names in (_SCHEDULE, _WEIGHT_DECAY))

    def when(seen: Seen) -> object:
        decays = any(f"{inside}start_wd" in seen.keys(name) for name in seen.places(*places))
        return always(seen) or (decays and decaying(seen))

    return when


_A_GROUP = re.compile(r"(?:optimizer/)?(?:\d+/)?(?:optimizer/)?param_groups/\d+/")


def uncounted(seen: Seen) -> object:
    """The arguments have no consumed samples, or none for a schedule that has gone on."""
    samples = seen.held.args.get("consumed_train_samples")
    return not seen.held.problem and (samples is None or (samples == 0 and seen.held.counted > 0))


def _counts_steps(seen: Seen) -> object:
    """Another trainer counted, and nobody made samples of its steps: ``{at}`` and ``{each}``."""
    each, at = seen.held.args.get("global_batch_size"), seen.held.counted
    return isinstance(each, int) and each > 1 and 0 < at == seen.step and {"at": at, "each": each}


ROWS = rows_of(
    "Megatron-LM (megatron-core 0.19.2), megatron/training/checkpointing.py:",
    Habit((Thing.WEIGHTS,), _REFUSED, "{file} {wrong}: “could not load the checkpoint”, and it exits with 0", "_load_base_checkpoint",
        broken("*model_optim_rng.pt"), True),
    Habit((Thing.WEIGHTS,), _REFUSED, "{file} {wrong}: loading it fails", "_load_global_dist_base_checkpoint",
        broken("*.distcp", ".metadata", "common.pt", "metadata.json")),
    Habit(ALL, _REFUSED, "{file} has no {key}: a TypeError", "megatron/core/dist_checkpointing/core.py",
        without("metadata.json", "sharded_backend"), True),
    Habit(ALL, _REFUSED, "{problem}: what is asked for and not listed ends the process with torch's "
        "CheckpointException", "_load_global_dist_base_checkpoint", not_listed, True),
    Habit(ALL, _REFUSED, "{file} has no {key}: torch's CheckpointException ends the process",
        "megatron/core/optimizer/distrib_optimizer.py:sharded_param_state_dp_reshardable",
        unlisted(".metadata", BUCKETS, *OF_BUCKETS), True),
    Habit(ALL, _REFUSED, "{file} has no {key}: flattened ranges are asked for, a CheckpointingException",
        "load_checkpoint", both(_dealt_flat, without(COMMON[1:], "content_metadata/distrib_optim_sharding_type")), True),
    Habit(ALL, _REFUSED, "{file} has no {key}: it exits, with 0", "load_checkpoint",
        without(COMMON, "iteration|total_iters"), True),
    Habit(ALL, _REFUSED, "{file} has no {key}: taken for 0, whose args have other names: an AttributeError",
        "check_checkpoint_args", both(lambda seen: seen.held.args or seen.held.problem, without(COMMON, "checkpoint_version"))),
    Habit(ALL, _REFUSED, "the stored args have no {key}, which is compared: an AttributeError",
        "check_checkpoint_args", both(lambda seen: not seen.settings.says("finetune"), _uncompared), True),
    Habit(ALL, _REFUSED, "{file} has no {key}: a KeyError", "load_checkpoint",
        without(_MODEL, "model|model0|model1"), True),
    Habit((Thing.WEIGHTS,), _ANEW, "a tensor of the model is missing ({problem}): loading it falls back to strict=False, and the tensor "
        "keeps what it was made with; only printed", "load_model_state_dict", _lacks_tensors, True),
    Habit((Thing.WEIGHTS,), _REFUSED, "a file is missing: {problem}", "load_checkpoint",
        both(lambda seen: "distrib_optim" not in seen.held.problem and not _partial(seen), incomplete), True),
    Habit((Thing.WEIGHTS,), _REFUSED, "neither mp_rank_…, nor .metadata with metadata.json: an unknown format", "_get_checkpoint_format",
        lacks(_PLAIN, *DIST), True),
    Habit((Thing.WEIGHTS,), _REFUSED, "saved as {was}, loaded as {now}: files of mp_rank_… are of one layout", "check_checkpoint_args",
        both(has(_PLAIN), other_degrees)),
    Habit((Thing.WEIGHTS,), _RESTORED, "model", "load_checkpoint", ran=True),
    Habit((*WITH_OPTIMIZER, Thing.COUNTERS, Thing.RNG, Thing.DATA), _ANEW, "a release has weights alone: iteration 0", "load_checkpoint",
        lambda seen: seen.held.release),
    Habit((Thing.COUNTERS, Thing.RNG), _ANEW, "a frozen model's file, the same at every step: iteration 0, and random states of a start",
        "load_checkpoint", lambda seen: any(TIMELESS in seen.keys(name) for name in seen.matching(_MODEL)), True),
    Habit((*WITH_OPTIMIZER, Thing.COUNTERS, Thing.RNG, Thing.DATA), _ANEW, "{key}: weights alone are loaded, at iteration 0",
        "load_checkpoint", asked("finetune"), True),
    Habit(WITH_OPTIMIZER, _ANEW, "{key}: masters are made of the model's weights; the scheduler is not loaded either", "load_checkpoint",
        asked("no_load_optim"), True),
    Habit((Thing.RNG,), _ANEW, "{key}: the seed's own states", "load_checkpoint", asked("no_load_rng")),
    Habit(WITH_OPTIMIZER, _ANEW, "saved with no_save_optim; nothing is said", "load_checkpoint",
        both(has(*DIST), lambda seen: seen.held.args.get("no_save_optim") is True)),
    Habit((Thing.RNG,), _ANEW, "saved with no_save_rng; nothing is said", "load_checkpoint",
        both(has(*DIST), lambda seen: seen.held.args.get("no_save_rng") is True)),
    Habit((Thing.RNG,), _ANEW, "saved as {was}, loaded as {now}: “RNG state will be ignored”", "load_checkpoint", other_degrees),
    Habit(OF_OPTIMIZER, _REFUSED, "saved as {was}, loaded as {now}, without --dist-ckpt-optim-fully-reshardable", "load_checkpoint",
        both(_bound_to_layout, other_degrees)),
    Habit(OF_OPTIMIZER, _REFUSED, "stored as {was}, trained in {now}: buffers are looked for by their type, a KeyError or torch's "
        "CheckpointException", "megatron/core/optimizer/distrib_optimizer.py:load_parameter_state_from_dp_zero", _other_buffers, True),
    Habit(OF_OPTIMIZER, _REFUSED, "stored as {was}, which has no masters, trained in {now}: a KeyError",
        "megatron/core/optimizer/optimizer.py:load_state_dict", _other_nest, True),
    Habit((Thing.DTYPE,), _IGNORED, "stored as {was}, cast to {now}; nothing is said", "load_checkpoint", _other_type, True),
    Habit((Thing.GROUPS,), _ANEW, "{file} has no {key}, for the first rank trains no parameter of it: Adam's bias correction begins anew; "
        "nothing is said", "megatron/core/optimizer/distrib_optimizer.py:load_state_dict", _stepless, True),
    Habit(OF_OPTIMIZER, _REFUSED, "{file} {wrong}: loading it fails", "load_checkpoint",
        broken("*distrib_optim.pt", "*layer_wise_optimizer_*"), True),
    Habit(OF_OPTIMIZER, _REFUSED, "distrib_optim.pt is missing, or is not whole: {problem}", "load_checkpoint", _unlike, True),
    Habit(OF_OPTIMIZER, _REFUSED, "{file} has no numel_unpadded of a buffer: a KeyError",
        "megatron/core/optimizer/distrib_optimizer.py:load_parameter_state_from_dp_zero", _unsized, True),
    Habit(OF_OPTIMIZER, _REFUSED, "{file} has no {key}: an AssertionError",
        "megatron/core/optimizer/distrib_optimizer.py:load_state_dict",
        both(_dealt_flat, without(COMMON[1:], "optimizer/param_state_sharding_type|optimizer/0/param_state_sharding_type")), True),
    Habit(OF_OPTIMIZER, _REFUSED, "{file} has no {key}: a KeyError", "load_checkpoint", _hollow, True),
    Habit(OF_OPTIMIZER, _REFUSED, "{file} has no {key}: a KeyError", "load_checkpoint",
        without(_MODEL, "optimizer|0", inside="optimizer/"), True),
    Habit(OF_OPTIMIZER, _REFUSED, "{file} has no {key}: a KeyError", "load_checkpoint",
        without(_MODEL, "param_groups", inside="optimizer/optimizer/"), True),
    Habit(OF_OPTIMIZER, _REFUSED, "{file} has no {key} for {count} parameters: it is loaded, and the first step fails", "load_checkpoint",
        uneven(_MODEL, "optimizer/optimizer/"), True),
    Habit(OF_OPTIMIZER, _REFUSED, "{file} has no {key}: a KeyError", "megatron/core/optimizer/optimizer.py:load_state_dict",
        both(_masterless, lambda seen: {"file": "model_optim_rng.pt", "key": "optimizer/fp32_from_fp16_params"}), True),
    Habit(OF_OPTIMIZER, _REFUSED, "{problem}: masters are given out by position, and shapes fail, or some begin anew",
        "megatron/core/optimizer/optimizer.py:load_state_dict",
        lambda seen: "fp32 masters" in seen.held.problem and {"problem": seen.held.problem}, True),
    Habit((Thing.OPTIMIZER,), _ANEW, "{problem}: the rest is loaded, and what is missing begins anew; nothing is said", "load_checkpoint",
        _partial, True),
    Habit(OF_OPTIMIZER, _REFUSED, "its param groups are not those of the model: {problem}",
        "megatron/core/optimizer/optimizer.py:_filter_and_reorder_param_groups",
        lambda seen: "param groups have weight-decay multiplier" in seen.held.problem and {"problem": seen.held.problem}, True),
    Habit(OF_OPTIMIZER, _REFUSED, "{file} has no {key}: a KeyError", "load_checkpoint", _memberless, True),
    Habit(OF_OPTIMIZER, _REFUSED, "{file} has no {key}, by which groups are told apart: a KeyError",
        "megatron/core/optimizer/optimizer.py:_filter_and_reorder_param_groups", in_groups, True),
    Habit(WITH_OPTIMIZER, _REFUSED, "no optimizer is stored: a KeyError, “Specify --no-load-optim or --finetune”", "load_checkpoint",
        lambda seen: not seen.held.problem and not seen.held.optimizer),
    Habit(OF_OPTIMIZER, _REFUSED, OTHER_CLASS, "load_checkpoint", other_optimizer("optimizer", _MODEL, _DISTRIB, ".metadata")),
    Habit(OF_OPTIMIZER, _RESTORED, "optimizer, and distrib_optim.pt of the distributed one", "load_checkpoint", ran=True),
    Habit((Thing.SCHEDULER,), _REFUSED, "{file} has no {key}: a KeyError", _IN_SCHEDULER, cut_schedule(COMMON), True),
    Habit((Thing.SCHEDULER,), _IGNORED, "{key}: the rates of the arguments, and of the file the number of steps alone",
        _IN_SCHEDULER, asked("override_opt_param_scheduler")),
    Habit((Thing.SCHEDULER,), _REFUSED, "no opt_param_scheduler is stored: a KeyError", "load_checkpoint",
        lambda seen: not seen.held.problem and not seen.held.scheduler),
    Habit((Thing.SCHEDULER,), _IGNORED, "num_steps is {at}, as many as its iterations of {each} samples: it should count samples, and its "
        "rates go on at another pace; nothing is said", _IN_SCHEDULER, _counts_steps, True),
    Habit((Thing.SCHEDULER,), _RESTORED, "opt_param_scheduler, whose rates must be the arguments' own, unless "
        "use_checkpoint_opt_param_scheduler is given", "load_checkpoint", ran=True),
    Habit((Thing.SCALER,), _RESTORED, "grad_scaler, with the optimizer", "load_checkpoint", lambda seen: seen.held.scaler),
    Habit((Thing.SCALER,), _ABSENT, "none is stored; only fp16 has one", "load_checkpoint"),
    Habit((Thing.RNG,), _REFUSED, "no random states are stored: it exits, “Specify --no-load-rng or --finetune”", "load_checkpoint",
        lambda seen: not seen.held.problem and not seen.held.rng),
    Habit((Thing.RNG,), _REFUSED, "{file} has no {key}: it exits, with 0", "load_checkpoint",
        without(_MODEL, *STREAMS, inside="rng_state/0/"), True),
    Habit((Thing.RNG,), _REFUSED, "{file} has no {key}: an IndexError", "load_checkpoint",
        both(lambda seen: any("rng_state" in seen.keys(name) for name in seen.matching(_MODEL)), without(_MODEL, "rng_state/0")), True),
    Habit((Thing.RNG,), _RESTORED, "rng_state of each (TP, PP) rank; with data_parallel_random_init of each data-parallel rank, too",
        "load_checkpoint"),
    Habit((Thing.COUNTERS,), _RESTORED, "iteration", "load_checkpoint", ran=True),
    Habit((Thing.DATA,), _ANEW, "no args are stored, and consumed samples stand there: “could not find arguments in the checkpoint”",
        "load_checkpoint", lambda seen: not seen.held.problem and not seen.held.args),
    Habit((Thing.DATA,), _ANEW, "no consumed_train_samples in the args, or 0: the data begin again; nothing is said", "load_checkpoint",
        uncounted),
    Habit((Thing.DATA,), _RESTORED, "consumed_train_samples, by which its own samplers go forward", "load_checkpoint", ran=True),
)  # fmt: skip

LOADER = Loader(LM, "core_v0.19.2", ROWS, ("ckpt_step",), ("megatron", "mcore", "megatron-core"))
