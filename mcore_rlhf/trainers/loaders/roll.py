"""What ROLL's ``MegatronTrainStrategy.load_checkpoint`` restores: the optimizer first, then the schedule, the weights, the random states.

Source: ROLL 8eb27cc2, ``roll/distributed/strategy/megatron_strategy.py`` (``load_checkpoint``),
``mcore_adapter/src/mcore_adapter/checkpointing.py`` (``load_state_dict_from_checkpoint``), ``roll/utils/worker_state.py``
(``WorkerState.load_from_json``); what megatron-core does below it as in :mod:`.megatron`.
"""

from __future__ import annotations

from math import prod

from mcore_rlhf.families import run_folders
from mcore_rlhf.families.run_folders import COUNTED, SCHEDULE
from mcore_rlhf.trainers.conditions import asked, both, broken, has, incomplete, lacks, without
from mcore_rlhf.trainers.resuming import MOST_RANKS, Habit, Loader, Outcome, Seen, Thing, rows_of
from mcore_rlhf.trainers.roll import FSDP, TRAINER

from .megatron import ALL, STREAMS, cut_schedule, not_listed

_RESTORED, _ANEW, _IGNORED, _REFUSED, _ABSENT = Outcome
_OPTIMIZER, _MODEL, _WEIGHTS = "iter_*/dist_optimizer", "iter_*/mp_rank_*/model_optim_rng.pt", "iter_*/dist_model/*"
_EACH = run_folders.RANDOM[0]
_RANDOM = _EACH.format(rank="*")
_LOAD, _TRACKER = "load_checkpoint", "latest_checkpointed_iteration.txt"


_OWN = "iter_*/mp_rank_*/optimizer.pt"
_DISTRIBUTED, _FULLY = "use_distributed_optimizer", "distrib_optim_fully_reshardable"


def _ranks_gone(seen: Seen) -> object:
    """A rank has no random states: ``{file}``."""
    degrees = (seen.held.args.get(f"{axis}_model_parallel_size") for axis in ("tensor", "pipeline"))
    saved = seen.held.dp * prod(size for size in degrees if type(size) is int and 0 < size < MOST_RANKS)
    gone = sorted({*range(min(seen.world or saved, MOST_RANKS))} - seen.ranks(_EACH))
    return gone and {"file": _EACH.format(rank=gone[0])}


def _unasked(seen: Seen) -> object:
    """How the optimizer lies, where the configuration, which is silent of it, asks for another way: ``{found}``."""
    asks = not seen.settings.values or seen.settings.says(_FULLY)
    return "" if asks or not seen.held.sharding.startswith("fully") else seen.held.sharding


def _as_told(seen: Seen) -> object:
    """The optimizer is of another kind than the configuration says: ``{there}`` and ``{told}``."""
    told = seen.settings.get(_DISTRIBUTED) is not None
    own, flat = seen.has(_OWN), seen.has(f"{_OPTIMIZER}/metadata.json")
    if told and own != flat and seen.settings.says(_DISTRIBUTED) == own:
        return {"there": "optimizer.pt of each rank" if own else "dist_optimizer", "told": "true" if own else "false"}
    return None


_OF_PIPELINE = rows_of(
    "ROLL 8eb27cc2, ",
    Habit((Thing.COUNTERS, Thing.DATA), _REFUSED, f"{COUNTED} is not there: a FileNotFoundError. It lies with the pipeline's own folder "
        "until checkpoint_config copies all into one", "roll/utils/worker_state.py:load_from_json",
        lambda seen: COUNTED not in seen.above),
    Habit((Thing.COUNTERS,), _RESTORED, f"step, in {COUNTED}", "roll/pipeline/base_pipeline.py:__init__"),
    Habit((Thing.DATA,), _RESTORED, f"scheduler_state_… of each domain, in {COUNTED}", "roll/pipeline/rlvr/rlvr_pipeline.py:303"),
)  # fmt: skip


def _tracks_another(seen: Seen) -> object:
    """Its tracker names an iteration that is not there: ``{wrong}``."""
    return next(({"wrong": text} for text in seen.held.contradicts if text.startswith(_TRACKER)), None)


ROWS = rows_of(
    "ROLL 8eb27cc2, roll/distributed/strategy/megatron_strategy.py:",
    Habit(ALL, _REFUSED, "iter_0000001/dist_optimizer is not there, or not whole, and use_distributed_optimizer looks for it first: a "
        "CheckpointingException", _LOAD, both(lacks(f"{_OPTIMIZER}/metadata.json"), lacks(_OWN)), True),
    Habit(ALL, _REFUSED, "{there} is there, and use_distributed_optimizer: {told} looks for the other: a FileNotFoundError or a "
        "CheckpointingException", _LOAD, _as_told),
    Habit(ALL, _REFUSED, "the optimizer lies by dp_reshardable, and distrib_optim_fully_reshardable: true asks for other keys: a "
        "CheckpointException", f"{_LOAD}; mcore_adapter/trainer/utils.py:build_sharded_state_dict_metadata",
        both(asked(_FULLY), has(f"{_OPTIMIZER}/metadata.json"), lambda seen: not seen.held.sharding.startswith("fully"))),
    Habit(ALL, _REFUSED, "the optimizer lies by {found}, and without distrib_optim_fully_reshardable: true dp_reshardable is asked for: a "
        "CheckpointException", f"{_LOAD}; mcore_adapter/trainer/utils.py:build_sharded_state_dict_metadata",
        _unasked),
    Habit(ALL, _REFUSED, "{file} {wrong}: loading it fails", _LOAD,
        broken("*.distcp", f"{_OPTIMIZER}/.metadata", f"{_OPTIMIZER}/metadata.json", _MODEL, _OWN, SCHEDULE, _RANDOM), True),
    Habit(ALL, _REFUSED, "{problem}: what is asked for and not listed ends the process with torch's CheckpointException", _LOAD,
        not_listed),
    Habit(ALL, _REFUSED, f"{SCHEDULE} is not there: a FileNotFoundError", _LOAD, lacks(SCHEDULE), True),
    Habit(ALL, _REFUSED, "{file} has no {key}: a KeyError", _LOAD, cut_schedule((SCHEDULE,), ""), True),
    Habit(ALL, _REFUSED, "the weights lie in dist_model (ckpt_format: torch_dist), which it loads without the model: an AttributeError; "
        "save them with ckpt_format: legacy", f"{_LOAD}; mcore_adapter/checkpointing.py:load_state_dict_from_checkpoint", has(_WEIGHTS),
        True),
    Habit(ALL, _REFUSED, f"{_TRACKER} is not there: “No model state_dict found in checkpoint”", _LOAD,
        lacks(_TRACKER), True),
    Habit(ALL, _REFUSED, "{wrong}", _LOAD, _tracks_another),
    Habit(ALL, _REFUSED, "a rank's model_optim_rng.pt is not there: {problem}", _LOAD,
        lambda seen: not seen.has(_MODEL) and {"problem": seen.held.problem or "a FileNotFoundError"}, True),
    Habit((Thing.WEIGHTS,), _REFUSED, "a file is missing: {problem}", _LOAD, incomplete),
    Habit((Thing.WEIGHTS,), _RESTORED, "each rank's own model_optim_rng.pt, whose degrees must be the run's", _LOAD, ran=True),
    Habit((Thing.OPTIMIZER, Thing.GROUPS), _RESTORED, "optimizer.pt of each rank, where use_distributed_optimizer is off", _LOAD,
        has(_OWN), True),
    Habit((Thing.OPTIMIZER, Thing.GROUPS), _RESTORED, "dist_optimizer", _LOAD, ran=True),
    Habit((Thing.SCHEDULER,), _RESTORED, SCHEDULE, _LOAD, ran=True),
    Habit((Thing.SCALER,), _RESTORED, "grad_scaler, with the optimizer", _LOAD, lambda seen: seen.held.scaler),
    Habit((Thing.SCALER,), _ABSENT, "none is stored; only fp16 has one", _LOAD),
    Habit((Thing.RNG,), _ANEW, "{file} is not there: the states stay the seed's; only a line in the log", _LOAD, _ranks_gone, True),
    Habit((Thing.RNG,), _REFUSED, "{file} has no {key}: a KeyError", _LOAD, without(_RANDOM, *STREAMS)),
    Habit((Thing.RNG,), _RESTORED, _RANDOM.replace("*", "R") + " of each rank", _LOAD, ran=True),
)  # fmt: skip

LOADER = Loader(TRAINER, "8eb27cc2", (*ROWS, *_OF_PIPELINE), ("resume_from_checkpoint",), ("mcore-adapter",))

_DCP = "_load_checkpoint_with_dcp"
OF_FSDP = rows_of(
    "ROLL 8eb27cc2, roll/distributed/strategy/fsdp2_strategy.py:",
    Habit(ALL, _REFUSED, "{file} {wrong}: loading it fails", _DCP, broken(".metadata", "*.distcp"), True),
    Habit((Thing.WEIGHTS, Thing.GROUPS, Thing.SCHEDULER), _REFUSED, "a file is missing: {problem}", _DCP, incomplete, True),
    Habit((Thing.WEIGHTS,), _RESTORED, "those in dcp, by name", _DCP, ran=True),
    Habit((Thing.OPTIMIZER,), _ANEW, "a new optimizer is asked which moments it has, and has none yet: they begin at zero; nothing is said",
        _DCP, lambda seen: seen.held.optimizer, True),
    Habit((Thing.GROUPS,), _RESTORED, "optimizer.param_groups", _DCP, lambda seen: seen.held.optimizer),
    Habit((Thing.OPTIMIZER, Thing.GROUPS), _REFUSED, "none is stored, and its param groups are asked for", _DCP),
    Habit((Thing.SCHEDULER,), _RESTORED, "scheduler", _DCP, ran=True),
    Habit((Thing.RNG,), _ANEW, "asked for as an empty dictionary, which nothing fills: those of the seed; nothing is said", _DCP, ran=True),
)  # fmt: skip

FSDP_LOADER = Loader(FSDP, "8eb27cc2", (*OF_FSDP, *_OF_PIPELINE), ("resume_from_checkpoint",))
