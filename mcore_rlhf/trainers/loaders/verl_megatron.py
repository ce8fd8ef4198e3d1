"""What verl restores of a step of its Megatron backend: rows beside those of its rank files.

Source: verl 0.9.1, ``verl/utils/checkpoint/megatron_checkpoint_manager.py`` (``load_checkpoint``), and below it megatron-core 0.19.2,
``dist_checkpointing/serialization.py`` (``load``), ``optimizer/distrib_optimizer.py`` (``sharded_state_dict``).
"""

from __future__ import annotations

import re
from collections.abc import Callable

from mcore_rlhf.families.run_folders import SPLIT, SPLIT_BESIDE, SPLIT_MODEL, SPLIT_WEIGHTS
from mcore_rlhf.trainers.conditions import ADAM, both, broken, has, unlisted, without
from mcore_rlhf.trainers.resuming import OF_OPTIMIZER, Habit, Outcome, Seen, Thing

from .megatron import BUCKETS, OF_BUCKETS, cut_schedule, not_listed

_RESTORED, _ANEW, _IGNORED, _REFUSED, _ABSENT = Outcome
_OPTIMIZER, _EXTRA = SPLIT_BESIDE
_DEGREES = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
_ALL = (Thing.WEIGHTS, *OF_OPTIMIZER, Thing.SCHEDULER, Thing.RNG)
_LINE = "utils/checkpoint/megatron_checkpoint_manager.py:{} (load_checkpoint)"

_KIND = "param_state_sharding_type"
_OF_RANK = re.compile(r"rng_state/shard_\d{1,6}\.\d{1,6}_(\d{1,6})\.(\d{1,6})")
_BUCKET = r"(chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.gbuf_idx_\d+\.dtype_.*\.bucket_idx_\d+\."

FILES = ("dist_ckpt/*", "*/dist_ckpt/*")
ON_MEGATRON = has(*FILES)
"""The step is one of the Megatron backend, in either layout."""


def _keys(seen: Seen, name: str) -> tuple[str, ...]:
    """Where the configuration says something of a role; that of SFT has no roles, and one engine.

    Source: verl 0.9.1, ``verl/trainer/config/{ppo_megatron_trainer,sft_trainer_engine}.yaml``.
    """
    alone = name.replace("megatron.", "engine.")
    role = "critic" if seen.role == "critic" else "actor"
    return (f"{role}.{name}", *([alone] if alone in seen.settings.values else ()))


def left_out(*contents: str) -> Callable[[Seen], object]:
    """The role's ``load_contents`` names none of some contents."""

    def when(seen: Seen) -> object:
        found = seen.settings.listed(*_keys(seen, "checkpoint.load_contents"))
        return found is not None and not {*contents} & {*found}

    return when


def _says(name: str) -> Callable[[Seen], bool]:
    """The role's configuration says yes to a key; it is off unless it does."""
    return lambda seen: seen.settings.says(*_keys(seen, name))


_BESIDE = _says("megatron.use_dist_checkpointing")
_ADAPTERS = f"{SPLIT_WEIGHTS}/adapter/*"
"""What a bridge leaves beside an adapter that is trained, and saved in ``torch_dist`` without its base."""


def _adapted(seen: Seen) -> bool:
    """An adapter is trained, whose weights are asked of ``torch_dist`` and its base's of the model that the run begins with."""
    return seen.has(_ADAPTERS) and seen.settings.number("model.lora.rank") != 0


def _by_ranks(seen: Seen) -> bool:
    """Weights are asked of ``torch_dist``, all or an adapter's."""
    return _BESIDE(seen) or _adapted(seen)


_KEEPS_SCHEDULE = _says("optim.use_checkpoint_opt_param_scheduler")


def _common(part: str) -> tuple[str, str]:
    """Where a part has what all ranks share: in a file, or, since megatron-core 0.19, in an object."""
    return f"{part}/common.pt", f"{part}/.metadata//common_state/*"


def _older(seen: Seen) -> object:
    """A step of layout v1, as 0.7 writes it."""
    return seen.has("dist_ckpt/*") and not seen.has("model/*", "optimizer/*", "extra/*")


def _not_there(part: str) -> Callable[[Seen], object]:
    """A part has no directory of its tensors, or is not finished: ``{file}``."""

    def when(seen: Seen) -> object:
        wanted = (f"{part}/.metadata", f"{part}/metadata.json")
        return next(({"file": name} for name in wanted if ON_MEGATRON(seen) and name not in seen.files), None)

    return when


def _unshared(part: str) -> Callable[[Seen], object]:
    """A part has nowhere what all ranks share: ``{file}``."""

    def when(seen: Seen) -> object:
        return ON_MEGATRON(seen) and not seen.places(*_common(part)) and {"file": f"{part}/common.pt"}

    return when


def _unkind(seen: Seen) -> object:
    """The first part that is there does not say how a distributed optimizer lies: ``{file}`` and ``{key}``."""
    part = next((one for one in SPLIT if seen.has(f"{one}/*")), SPLIT_MODEL)
    key = "content_metadata/distrib_optim_sharding_type"
    return _is_distributed(seen) and without(_common(part), key)(seen)


def _is_distributed(seen: Seen) -> bool:
    places = seen.places(*_common(_OPTIMIZER))
    return _lies_flat(seen) or any(key.endswith(_KIND) for name in places for key in seen.keys(name))


def _ranks_gone(seen: Seen) -> object:
    """Random states of a rank are not listed: ``{file}`` and ``{key}``."""
    file = f"{_EXTRA}/.metadata"
    names = seen.keys(file) if file in seen.files and file not in seen.broken else None
    if names is None:
        return None
    shapes = {(int(found[1]), int(found[2])) for name in names if (found := _OF_RANK.fullmatch(name))}
    pp, tp = max(shapes, default=(1, 1))
    wanted = (f"rng_state/shard_{p}.{t}_{pp}.{tp}" for p in range(min(pp, 1 << 10)) for t in range(min(tp, 1 << 10)))
    gone = next((name for name in wanted if name not in names), None)
    return gone and {"file": file, "key": gone}


def _gone(part: str) -> Callable[[Seen], object]:
    """The reader misses something of a part: ``{problem}``."""
    return lambda seen: part in seen.held.problem and seen.held.incomplete and {"problem": seen.held.problem}


def _other_degrees(seen: Seen) -> object:
    """TP and PP of the configuration are not those of the files: ``{was}`` and ``{now}``."""
    if seen.held.problem or not seen.held.args or not ON_MEGATRON(seen):
        return None
    was = [_size(seen.held.args.get(name)) for name in _DEGREES]
    said = [seen.settings.number(*_keys(seen, f"megatron.{name}")) for name in _DEGREES]
    now = [one or before for one, before in zip(said, was, strict=True)]
    return {"was": f"TP{was[0]} PP{was[1]}", "now": f"TP{now[0]} PP{now[1]}"} if was != now else None


def _size(value: object) -> int:
    return value if isinstance(value, int) else 1


def _lies_flat(seen: Seen) -> bool:
    """Whether the optimizer lies in flat buckets, as its names say."""
    return any(".bucket_idx_" in key for key in seen.keys(f"{_OPTIMIZER}/.metadata"))


def _is_gated(seen: Seen) -> bool:
    """Whether megatron-core makes other parameters of the model's own when it saves and loads: gate and up, each by itself."""
    args = seen.held.args
    return any(args.get(name) is True for name in ("swiglu", "gated_linear_unit", "geglu", "quick_geglu"))


def _behind_weights(seen: Seen) -> bool:
    """States that lie parameter by parameter are loaded after the weights of a gated model."""
    return _is_gated(seen) and seen.held.optimizer and not _lies_flat(seen) and not left_out("model")(seen)


def _bridged(seen: Seen) -> bool:
    """Weights are asked of Hugging Face's folder."""
    return bool(ON_MEGATRON(seen)) and not _by_ranks(seen)


def _undescribed(seen: Seen) -> object:
    """The folder has no ``config.json``, by which a bridge finds it."""
    return f"{SPLIT_WEIGHTS}/config.json" not in seen.files


def _weights_gone(seen: Seen) -> object:
    """Its reader misses some of the weights: ``{problem}``."""
    return (seen.held.incomplete or SPLIT_WEIGHTS in seen.held.problem) and {"problem": seen.held.problem}


def _weightless(seen: Seen) -> object:
    """Weights are asked of Hugging Face's folder, which has none."""
    return _bridged(seen) and not seen.has(f"{SPLIT_WEIGHTS}/*.safetensors")


def _part(things: tuple[Thing, ...], part: str, line: str) -> tuple[Habit, ...]:
    """The rows of one of the parts."""
    where = _LINE.format(line)
    return (
        Habit(things, _REFUSED, "{file} is not there: loading the part fails", where, _not_there(part), True),
        Habit(
            things, _REFUSED, "{file} {wrong}: loading it fails", where, both(ON_MEGATRON, broken(f"{part}/*")), True
        ),
        Habit(
            things,
            _REFUSED,
            "{file} is not there, and no object has what it holds: a RuntimeError",
            where,
            _unshared(part),
            True,
        ),
        Habit(
            things,
            _REFUSED,
            "{file} has no {key}: a TypeError",
            where,
            without(f"{part}/metadata.json", "sharded_backend"),
            True,
        ),
        Habit(things, _REFUSED, "a file is missing: {problem}", where, _gone(part), True),
    )


def _of_model(rows: tuple[Habit, ...]) -> tuple[Habit, ...]:
    return tuple(
        Habit(row.things, row.outcome, row.why, row.source, both(_by_ranks, row.when), row.ran) for row in rows
    )


def _counts_samples(seen: Seen) -> object:
    """Megatron-LM counted, whose arguments lie there still, and nobody made steps of its samples: ``{at}`` and ``{step}``."""
    each, step, at = seen.held.args.get("global_batch_size"), seen.step or 0, seen.held.counted
    return isinstance(each, int) and each > 1 and 0 < step * each == at and {"at": at, "step": step}


ROWS = (
    Habit(_ALL, _REFUSED, "its layout is the older one, with dist_ckpt at the top: a RuntimeError, which names "
        "scripts/migrate_megatron_checkpoint_layout.py", _LINE.format("871"), _older, True),
    Habit((Thing.WEIGHTS,), _ANEW, "checkpoint.load_contents has no model", _LINE.format("916"),
        both(ON_MEGATRON, left_out("model", "hf_model")), True),
    Habit((*OF_OPTIMIZER, Thing.SCHEDULER), _ANEW, "checkpoint.load_contents has no optimizer", _LINE.format("944"),
        both(ON_MEGATRON, left_out("optimizer")), True),
    Habit((Thing.RNG,), _ANEW, "checkpoint.load_contents has no extra", _LINE.format("968"), both(ON_MEGATRON, left_out("extra")), True),
    Habit((Thing.WEIGHTS,), _REFUSED, f"megatron.use_dist_checkpointing is not set: weights are asked of {SPLIT_WEIGHTS}, by a bridge, and "
        "there are none", _LINE.format("940"), _weightless, True),
    Habit((Thing.WEIGHTS,), _REFUSED, "{file} {wrong}: loading it fails", _LINE.format("940"),
        both(_bridged, broken(f"{SPLIT_WEIGHTS}/*.safetensors")), True),
    Habit((Thing.WEIGHTS,), _REFUSED, f"{SPLIT_WEIGHTS} has no config.json, by which a bridge finds it: an OSError, or a TypeError",
        _LINE.format("940"), both(_bridged, _undescribed), True),
    Habit((Thing.WEIGHTS,), _REFUSED, "{problem}: a ValueError, or a KeyError", _LINE.format("940"), both(_bridged, _weights_gone), True),
    *_of_model((
        *_part((Thing.WEIGHTS,), SPLIT_MODEL, "918"),
        Habit((Thing.WEIGHTS,), _REFUSED, "{problem}: what is asked for and not listed fails", _LINE.format("918"), not_listed, True),
    )),
    *_part(OF_OPTIMIZER, _OPTIMIZER, "946"),
    *_part((Thing.RNG,), _EXTRA, "970"),
    Habit(OF_OPTIMIZER, _REFUSED, f"its states lie parameter by parameter, and weights of a gated model are loaded from {SPLIT_MODEL} "
        "before: a ValueError, “not in model_sharded_state_dict”, or a KeyError", _LINE.format("945"),
        both(ON_MEGATRON, _BESIDE, _behind_weights), True),
    Habit(OF_OPTIMIZER, _REFUSED, "it was saved at {was} in flat buckets, and {now} is to load it", _LINE.format("946"),
        both(_lies_flat, _other_degrees), True),
    Habit((Thing.RNG,), _REFUSED, "random states of {was} are stored, and {now} asks for its own", _LINE.format("970"), _other_degrees,
        True),
    Habit(OF_OPTIMIZER, _REFUSED, "{file} has no {key}: an AssertionError", _LINE.format("950"),
        without(_common(_OPTIMIZER), "optimizer"), True),
    Habit(OF_OPTIMIZER, _REFUSED, "{file} has no {key}: an AssertionError", _LINE.format("954"),
        both(_lies_flat, without(_common(_OPTIMIZER), f"optimizer/{_KIND}|optimizer/0/{_KIND}")), True),
    Habit(OF_OPTIMIZER, _REFUSED, "{file} has no {key}: flattened ranges are asked for, or parameters that are not there",
        _LINE.format("901"), _unkind, True),
    Habit(OF_OPTIMIZER, _REFUSED, "{file} does not list {key}: torch's CheckpointException", _LINE.format("946"),
        unlisted(f"{_OPTIMIZER}/.metadata", _BUCKET, "param", *ADAM[1:]), True),
    Habit(OF_OPTIMIZER, _REFUSED, "{file} does not list {key}: torch's CheckpointException", _LINE.format("946"),
        unlisted(f"{_OPTIMIZER}/.metadata", BUCKETS, *OF_BUCKETS), True),
    Habit((Thing.RNG,), _REFUSED, "{file} does not list {key}: torch's CheckpointException", _LINE.format("970"), _ranks_gone, True),
    Habit((Thing.SCHEDULER,), _ANEW, "optim.use_checkpoint_opt_param_scheduler is not set: the schedule begins at its first step; nothing "
        "is said", _LINE.format("956"), lambda seen: ON_MEGATRON(seen) and not _KEEPS_SCHEDULE(seen), True),
    Habit((Thing.SCHEDULER,), _REFUSED, "{file} has no {key}: an AssertionError", _LINE.format("957"),
        without(_common(_OPTIMIZER), "lr_scheduler"), True),
    Habit((Thing.SCHEDULER,), _REFUSED, "{file} has no {key}: a KeyError", _LINE.format("962"),
        cut_schedule(_common(_OPTIMIZER), "lr_scheduler"), True),
    Habit((Thing.WEIGHTS,), _RESTORED, SPLIT_MODEL, _LINE.format("918"), both(ON_MEGATRON, _BESIDE), True),
    Habit((Thing.WEIGHTS,), _RESTORED, f"{SPLIT_MODEL}: the adapter's; its base's are those of model.path", _LINE.format("918"),
        both(ON_MEGATRON, _adapted), True),
    Habit((Thing.WEIGHTS,), _RESTORED, f"{SPLIT_WEIGHTS}, by a bridge", _LINE.format("940"), ON_MEGATRON, True),
    Habit(OF_OPTIMIZER, _RESTORED, _OPTIMIZER, _LINE.format("946"), ON_MEGATRON, True),
    Habit((Thing.SCHEDULER,), _IGNORED, "num_steps is {at} at step {step}: samples, where verl counts steps; its rates go on at another "
        "pace; nothing is said", _LINE.format("962"),
        both(ON_MEGATRON, _counts_samples)),
    Habit((Thing.SCHEDULER,), _RESTORED, f"lr_scheduler in {_OPTIMIZER}", _LINE.format("962"), ON_MEGATRON, True),
    Habit((Thing.RNG,), _RESTORED, f"rng_state of each (PP, TP) rank, in {_EXTRA}", _LINE.format("978"), ON_MEGATRON, True),
)  # fmt: skip
