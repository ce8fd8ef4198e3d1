"""What ROLL's ``MegatronTrainStrategy.load_checkpoint`` restores: the optimizer first, then the schedule, the weights, the random states.

Source: ROLL 8eb27cc2, ``roll/distributed/strategy/megatron_strategy.py`` (``load_checkpoint``),
``mcore_adapter/src/mcore_adapter/checkpointing.py`` (``load_state_dict_from_checkpoint``), ``roll/utils/worker_state.py``
(``WorkerState.load_from_json``); what megatron-core does below it as in :mod:`.megatron`.
"""

from __future__ import annotations

from mcore_rlhf.families import run_folders
from mcore_rlhf.families.run_folders import SCHEDULE
from mcore_rlhf.trainers.conditions import both, broken, has, incomplete, lacks, without
from mcore_rlhf.trainers.resuming import Habit, Loader, Outcome, Seen, Thing, rows_of
from mcore_rlhf.trainers.roll import COUNTED, TRAINER

from .megatron import ALL, STREAMS, cut_schedule, not_listed

_RESTORED, _ANEW, _IGNORED, _REFUSED, _ABSENT = Outcome
_OPTIMIZER, _MODEL, _WEIGHTS = "iter_*/dist_optimizer", "iter_*/mp_rank_*/model_optim_rng.pt", "iter_*/dist_model/*"
_EACH = run_folders.RANDOM[0]
_RANDOM = _EACH.format(rank="*")
_LOAD = "load_checkpoint"


def _ranks_gone(seen: Seen) -> object:
    """A rank has no random states: ``{file}``."""
    there, world = seen.ranks(_EACH), seen.world or seen.held.dp
    gone = sorted({*range(world)} - there)
    return gone and {"file": _EACH.format(rank=gone[0])}


ROWS = rows_of(
    "ROLL 8eb27cc2, roll/distributed/strategy/megatron_strategy.py:",
    Habit(ALL, _REFUSED, "iter_0000001/dist_optimizer is not there, or not whole, and use_distributed_optimizer looks for it first: a "
        "CheckpointingException", _LOAD, both(lacks(f"{_OPTIMIZER}/metadata.json"), lacks("iter_*/*/optimizer.pt")), True),
    Habit(ALL, _REFUSED, "{file} {wrong}: loading it fails", _LOAD,
        broken("*.distcp", f"{_OPTIMIZER}/.metadata", f"{_OPTIMIZER}/metadata.json", _MODEL, SCHEDULE, _RANDOM), True),
    Habit(ALL, _REFUSED, "{problem}: what is asked for and not listed ends the process with torch's CheckpointException", _LOAD,
        not_listed),
    Habit(ALL, _REFUSED, f"{SCHEDULE} is not there: a FileNotFoundError", _LOAD, lacks(SCHEDULE), True),
    Habit(ALL, _REFUSED, "{file} has no {key}: a KeyError", _LOAD, cut_schedule((SCHEDULE,), ""), True),
    Habit(ALL, _REFUSED, "the weights lie in dist_model (ckpt_format: torch_dist), which it loads without the model: an AttributeError; "
        "save them with ckpt_format: legacy", f"{_LOAD}; mcore_adapter/checkpointing.py:load_state_dict_from_checkpoint", has(_WEIGHTS),
        True),
    Habit(ALL, _REFUSED, "latest_checkpointed_iteration.txt is not there: “No model state_dict found in checkpoint”", _LOAD,
        lacks("latest_checkpointed_iteration.txt"), True),
    Habit(ALL, _REFUSED, "a rank's model_optim_rng.pt is not there: {problem}", _LOAD,
        lambda seen: not seen.has(_MODEL) and {"problem": seen.held.problem or "a FileNotFoundError"}, True),
    Habit((Thing.WEIGHTS,), _REFUSED, "a file is missing: {problem}", _LOAD, incomplete),
    Habit((Thing.WEIGHTS,), _RESTORED, "each rank's own model_optim_rng.pt, whose degrees must be the run's", _LOAD, ran=True),
    Habit((Thing.OPTIMIZER, Thing.GROUPS), _RESTORED, "dist_optimizer", _LOAD, ran=True),
    Habit((Thing.SCHEDULER,), _RESTORED, SCHEDULE, _LOAD, ran=True),
    Habit((Thing.SCALER,), _RESTORED, "grad_scaler, with the optimizer", _LOAD, lambda seen: seen.held.scaler),
    Habit((Thing.SCALER,), _ABSENT, "none is stored; only fp16 has one", _LOAD),
    Habit((Thing.RNG,), _ANEW, "{file} is not there: the states stay the seed's; only a line in the log", _LOAD, _ranks_gone, True),
    Habit((Thing.RNG,), _REFUSED, "{file} has no {key}: a KeyError", _LOAD, without(_RANDOM, *STREAMS)),
    Habit((Thing.RNG,), _RESTORED, _RANDOM.replace("*", "R") + " of each rank", _LOAD, ran=True),
    Habit((Thing.COUNTERS, Thing.DATA), _REFUSED, f"{COUNTED} is not there: a FileNotFoundError. It lies with the pipeline's own folder "
        "until checkpoint_config copies all into one", "roll/utils/worker_state.py:load_from_json",
        lambda seen: COUNTED not in seen.above),
    Habit((Thing.COUNTERS,), _RESTORED, f"step, in {COUNTED}", "roll/pipeline/base_pipeline.py:__init__"),
    Habit((Thing.DATA,), _RESTORED, f"scheduler_state_… of each domain, in {COUNTED}", "roll/pipeline/rlvr/rlvr_pipeline.py:303"),
)  # fmt: skip

LOADER = Loader(TRAINER, "8eb27cc2", ROWS, ("resume_from_checkpoint",), ("mcore-adapter",))
