"""What ms-swift's ``load_mcore_checkpoint`` restores: its own code round megatron-core's ``dist_checkpointing``.

Source: ms-swift 4.6.0, ``swift/megatron/utils/megatron_lm_utils.py`` (``load_mcore_checkpoint``, ``_load_iteration``),
``swift/megatron/arguments/megatron_args.py``; what megatron-core does below it as in :mod:`.megatron`.
"""

from __future__ import annotations

from mcore_rlhf.trainers.conditions import (
    OTHER_CLASS,
    both,
    broken,
    incomplete,
    lacks,
    other_optimizer,
    unlisted,
    without,
)
from mcore_rlhf.trainers.ms_swift import TRAINER
from mcore_rlhf.trainers.resuming import OF_OPTIMIZER, Habit, Loader, Outcome, Seen, Thing, rows_of

from .megatron import (
    ALL,
    BUCKETS,
    COMMON,
    OF_BUCKETS,
    RESUMED,
    STREAMS,
    WITH_OPTIMIZER,
    cut_schedule,
    in_groups,
    lies_flat,
    not_listed,
    other_degrees,
)

_RESTORED, _ANEW, _IGNORED, _REFUSED, _ABSENT = Outcome
_DEGREES = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
_COUNTED = "consumed_train_samples"


def _argless(seen: Seen) -> object:
    """The stored arguments do not say the layout, to which its own is compared: ``{key}``."""
    gone = [name for name in _DEGREES if name not in seen.held.args]
    return not seen.held.problem and gone and {"key": f"args.{gone[0]}" if seen.held.args else "args"}


def _begins_anew(seen: Seen) -> bool:
    """``finetune`` is true where nobody says otherwise."""
    return not seen.settings.denies("finetune")


ROWS = rows_of(
    "ms-swift 4.6.0, swift/megatron/utils/megatron_lm_utils.py:",
    Habit(ALL, _REFUSED, "neither metadata.json nor .metadata is there: not a distributed checkpoint", "493 (load_mcore_checkpoint)",
        lacks("*/metadata.json", "*/.metadata")),
    Habit(ALL, _REFUSED, "metadata.json is not there: not a distributed checkpoint", "493 (load_mcore_checkpoint)",
        lacks("*/metadata.json"), True),
    Habit(ALL, _REFUSED, "{file} {wrong}: loading it fails", "493 (load_mcore_checkpoint)",
        broken("*.distcp", "*/.metadata", "*/common.pt", "*/metadata.json")),
    Habit(ALL, _REFUSED, "{file} has no {key}: a TypeError", "493 (load_mcore_checkpoint)", without("*/metadata.json", "sharded_backend"),
        True),
    Habit(ALL, _REFUSED, "{key} is not stored, and is compared: an AttributeError, or a KeyError", "495 (load_mcore_checkpoint)",
        _argless),
    Habit(ALL, _REFUSED, "{problem}: what is asked for and not listed ends the process with torch's CheckpointException",
        "565 (load_mcore_checkpoint)", not_listed, True),
    Habit((Thing.WEIGHTS,), _REFUSED, "a file is missing: {problem}", "565 (load_mcore_checkpoint)", incomplete),
    Habit((Thing.WEIGHTS,), _RESTORED, "model, whatever TP and PP", "573 (load_mcore_checkpoint)", ran=True),
    Habit(RESUMED, _ANEW, "finetune is true, which it is by itself: weights alone are loaded, at iteration 0; give --finetune false",
        "568 (load_mcore_checkpoint)", _begins_anew, True),
    Habit(WITH_OPTIMIZER, _ANEW, "no_load_optim: masters are made of the model's weights; the scheduler is not loaded either",
        "585 (load_mcore_checkpoint)", lambda seen: seen.settings.says("no_load_optim")),
    Habit((Thing.RNG,), _ANEW, "no_load_rng: the seed's own states", "588 (load_mcore_checkpoint)",
        lambda seen: seen.settings.says("no_load_rng")),
    Habit((Thing.RNG,), _ANEW, "saved as {was}, loaded as {now}: “RNG state will be ignored”", "522 (load_mcore_checkpoint)",
        other_degrees),
    Habit(OF_OPTIMIZER, _REFUSED, "saved as {was}, loaded as {now}, and the optimizer lies as its buffers do: “not supported for "
        "DistributedOptimizer”", "534 (load_mcore_checkpoint)", both(lies_flat, other_degrees)),
    Habit(WITH_OPTIMIZER, _REFUSED, "saved with no_save_optim, and it is asked for: a KeyError; give --no_load_optim true",
        "582 (load_mcore_checkpoint)", lambda seen: seen.held.args.get("no_save_optim") is True),
    Habit(WITH_OPTIMIZER, _REFUSED, "no optimizer is stored: torch's CheckpointException ends the process", "565 (load_mcore_checkpoint)",
        lambda seen: not seen.held.problem and not seen.held.optimizer),
    Habit(OF_OPTIMIZER, _REFUSED, "{file} has no {key}: torch's CheckpointException ends the process", "565 (load_mcore_checkpoint)",
        unlisted("*/.metadata", BUCKETS, *OF_BUCKETS), True),
    Habit(OF_OPTIMIZER, _REFUSED, "{file} has no {key}: states are asked for as they do not lie, a CheckpointingException",
        "540 (load_mcore_checkpoint)", without(COMMON, "content_metadata/distrib_optim_sharding_type")),
    Habit(OF_OPTIMIZER, _REFUSED, "{file} has no {key}: an AssertionError", "582 (load_mcore_checkpoint)",
        both(lies_flat, without(COMMON, "optimizer/param_state_sharding_type|optimizer/0/param_state_sharding_type"))),
    Habit(OF_OPTIMIZER, _REFUSED, "{file} has no {key}, by which groups are told apart: a KeyError", "582 (load_mcore_checkpoint)",
        in_groups),
    Habit(OF_OPTIMIZER, _REFUSED, OTHER_CLASS, "582 (load_mcore_checkpoint)", other_optimizer("optimizer", "*/.metadata")),
    Habit(OF_OPTIMIZER, _RESTORED, "optimizer", "582 (load_mcore_checkpoint)", ran=True),
    Habit((Thing.SCHEDULER,), _REFUSED, "{file} has no {key}: a KeyError", "584 (load_mcore_checkpoint)",
        without(COMMON, "opt_param_scheduler")),
    Habit((Thing.SCHEDULER,), _REFUSED, "{file} has no {key}: a KeyError", "584 (load_mcore_checkpoint)", cut_schedule(COMMON)),
    Habit((Thing.SCHEDULER,), _RESTORED, "opt_param_scheduler", "584 (load_mcore_checkpoint)", ran=True),
    Habit((Thing.SCALER,), _RESTORED, "grad_scaler, with the optimizer", "582 (load_mcore_checkpoint)", lambda seen: seen.held.scaler),
    Habit((Thing.SCALER,), _ABSENT, "none is stored; only fp16 has one", "582 (load_mcore_checkpoint)"),
    Habit((Thing.COUNTERS,), _RESTORED, "the iteration, which the step's tracker says", "482 (load_mcore_checkpoint)", ran=True),
    Habit((Thing.DATA,), _ANEW, f"the stored args have no {_COUNTED}: samples are counted from 0; nothing is said",
        "570 (load_mcore_checkpoint)", lambda seen: not seen.held.problem and _COUNTED not in seen.held.args),
    Habit((Thing.DATA,), _RESTORED, "consumed_train_samples, by which its samplers go forward", "570 (load_mcore_checkpoint)", ran=True),
    Habit((Thing.RNG,), _ANEW, "saved with no_save_rng: the seed's own states; nothing is said", "505 (load_mcore_checkpoint)",
        lambda seen: seen.held.args.get("no_save_rng") is True),
    Habit((Thing.RNG,), _REFUSED, "no random states are stored: torch's CheckpointException ends the process",
        "565 (load_mcore_checkpoint)", lambda seen: not seen.held.problem and not seen.held.rng, True),
    Habit((Thing.RNG,), _REFUSED, "{file} has no {key}: a KeyError", "599 (load_mcore_checkpoint)",
        without(("*/.metadata//rng_state/*",), *STREAMS, inside="0/")),
    Habit((Thing.RNG,), _RESTORED, "rng_state of each (PP, TP) rank", "599 (load_mcore_checkpoint)", ran=True),
)  # fmt: skip

LOADER = Loader(TRAINER, "4.6.0", ROWS, others=("swift", "megatron-swift"))
