"""What Megatron-Bridge's ``load_checkpoint`` restores: its own code round megatron-core's ``dist_checkpointing``.

Source: NVIDIA-NeMo/Megatron-Bridge 067f987, ``src/megatron/bridge/training/checkpointing.py`` (``load_checkpoint``,
``_load_checkpoint_from_path``, ``_load_base_checkpoint``), ``training/state.py`` (``TrainState.load_state_dict``); what megatron-core does
below it as in :mod:`.megatron`. It runs round a model of megatron-core's on a CPU; with its own, Megatron-Bridge needs Transformer Engine.
"""

from __future__ import annotations

from mcore_rlhf.families.run_folders import RUN_CONFIG, TRAIN_STATE
from mcore_rlhf.trainers.conditions import (
    OTHER_CLASS,
    asked,
    both,
    broken,
    has,
    incomplete,
    lacks,
    other_optimizer,
    refused,
    unlisted,
    without,
)
from mcore_rlhf.trainers.megatron import BRIDGE
from mcore_rlhf.trainers.resuming import OF_OPTIMIZER, Habit, Loader, Outcome, Seen, Thing, rows_of

from .megatron import (
    ALL,
    BUCKETS,
    COMMON,
    DIST,
    OF_BUCKETS,
    RESUMED,
    STREAMS,
    WITH_OPTIMIZER,
    cut_schedule,
    in_groups,
    lies_flat,
    not_listed,
    other_degrees,
    uncounted,
)

_RESTORED, _ANEW, _IGNORED, _REFUSED, _ABSENT = Outcome
_COUNTED = (
    "step", "consumed_train_samples", "skipped_train_samples", "consumed_valid_samples", "floating_point_operations_so_far", "do_train",
    "do_valid", "do_test",
)  # fmt: skip
_HF = ("model*.safetensors", "model.safetensors.index.json", "pytorch_model*.bin")


def _argless(seen: Seen) -> object:
    """Nothing says how the run was laid out: neither its configuration, nor Megatron-LM's arguments: ``{file}``."""
    return lacks(RUN_CONFIG)(seen) and without(COMMON, "args")(seen)


def _counterless(seen: Seen) -> object:
    """Neither counters, nor arguments that have them."""
    return lacks(TRAIN_STATE)(seen) and without(COMMON, "args")(seen)


def _is_adapter(seen: Seen) -> bool:
    return any(".adapter." in key for key in seen.keys(".metadata"))


ROWS = rows_of(
    "Megatron-Bridge 067f987, training/checkpointing.py:",
    Habit(ALL, _REFUSED, "a Hugging Face folder is no run to go on with: a ValueError; pretrained_checkpoint takes one",
        "2752 (_load_checkpoint_from_path)", both(has("config.json"), has(*_HF), lacks(*DIST))),
    Habit(ALL, _REFUSED, "neither metadata.json nor .metadata is there: “Unknown checkpoint format”", "255 (_get_checkpoint_format)",
        lacks("metadata.json", ".metadata")),
    Habit(ALL, _REFUSED, "metadata.json is not there: it is taken for fsdp_dtensor, and the configuration's torch_dist is another: an "
        "AssertionError", "3723 (_load_base_checkpoint)",
        both(lacks("metadata.json"), lambda seen: seen.settings.get("checkpoint.ckpt_format", "ckpt_format") != "fsdp_dtensor"), True),
    Habit(ALL, _REFUSED, "{file} {wrong}: loading it fails", "3528 (_load_global_dist_base_checkpoint)",
        broken("*.distcp", ".metadata", "common.pt", "metadata.json", RUN_CONFIG)),
    Habit(ALL, _REFUSED, "{file} has no {key}: a TypeError", "3528 (_load_global_dist_base_checkpoint)",
        without("metadata.json", "sharded_backend"), True),
    Habit(ALL, _REFUSED, f"neither {RUN_CONFIG}, nor args in {{file}}: “Legacy checkpoint missing 'args'”",
        "378 (_extract_megatron_lm_args_from_state_dict)", _argless, True),
    Habit(ALL, _REFUSED, "{problem}: what is asked for and not listed ends the process with torch's CheckpointException",
        "3572 (_load_global_dist_base_checkpoint)", not_listed, True),
    Habit((Thing.WEIGHTS,), _REFUSED, "a file is missing: {problem}", "3572 (_load_global_dist_base_checkpoint)", incomplete),
    Habit((Thing.WEIGHTS,), _RESTORED, "model, whatever TP and PP", "3135 (_load_checkpoint_from_path)", ran=True),
    Habit((Thing.LORA,), _RESTORED, "the adapter's tensors alone; its base is that of checkpoint.pretrained_checkpoint",
        "3332 (apply_peft_adapter_filter_to_state_dict)", _is_adapter),
    Habit(RESUMED, _ANEW, "{key}: weights alone are loaded, at step 0", "3078 (_load_checkpoint_from_path)", asked("finetune")),
    Habit(WITH_OPTIMIZER, _ANEW, "{key} is off: masters are made of the model's weights; the scheduler is not loaded either",
        "3147 (_load_checkpoint_from_path)", refused("checkpoint.load_optim", "load_optim")),
    Habit((Thing.RNG,), _ANEW, "{key} is off: the seed's own states", "3200 (_load_checkpoint_from_path)",
        refused("checkpoint.load_rng", "load_rng")),
    Habit((Thing.RNG,), _ANEW, "saved as {was}, loaded as {now}: “RNG state will be ignored”", "2859 (_load_checkpoint_from_path)",
        other_degrees),
    Habit(OF_OPTIMIZER, _REFUSED, "saved as {was}, loaded as {now}, and the optimizer lies as its buffers do: “not supported for "
        "DistributedOptimizer with sharding type dp_reshardable”", "2895 (_load_checkpoint_from_path)", both(lies_flat, other_degrees)),
    Habit(WITH_OPTIMIZER, _ANEW, f"{RUN_CONFIG} says save_optim: false: a fresh optimizer; a line says so",
        "2904 (_load_checkpoint_from_path)",
        lambda seen: seen.held.args.get("no_save_optim") is True),
    Habit(WITH_OPTIMIZER, _REFUSED, f"no optimizer is stored, and {RUN_CONFIG} does not say so: torch's "
        "CheckpointException ends the process",
        "3572 (_load_global_dist_base_checkpoint)", lambda seen: not seen.held.problem and not seen.held.optimizer),
    Habit(OF_OPTIMIZER, _REFUSED, "{file} has no {key}: torch's CheckpointException ends the process",
        "3572 (_load_global_dist_base_checkpoint)", unlisted(".metadata", BUCKETS, *OF_BUCKETS), True),
    Habit(OF_OPTIMIZER, _REFUSED, "{file} has no {key}: states are asked for as they do not lie, a CheckpointException",
        "2867 (_load_checkpoint_from_path)",
        both(lambda seen: seen.held.args.get("use_distributed_optimizer") is True,
             without(COMMON, "content_metadata/distrib_optim_sharding_type"))),
    Habit(OF_OPTIMIZER, _REFUSED, "{file} has no {key}: an AssertionError", "3169 (_load_checkpoint_from_path)",
        both(lies_flat, without(COMMON, "optimizer/param_state_sharding_type|optimizer/0/param_state_sharding_type"))),
    Habit(OF_OPTIMIZER, _REFUSED, "{file} has no {key}, by which groups are told apart: a KeyError",
        "3169 (_load_checkpoint_from_path)", in_groups),
    Habit(OF_OPTIMIZER, _REFUSED, OTHER_CLASS, "3169 (_load_checkpoint_from_path)", other_optimizer("optimizer.optimizer", ".metadata")),
    Habit(OF_OPTIMIZER, _RESTORED, "optimizer", "3169 (_load_checkpoint_from_path)", ran=True),
    Habit((Thing.SCHEDULER,), _REFUSED, "{file} has no {key}: a KeyError", "3175 (_load_checkpoint_from_path)",
        without(COMMON, "opt_param_scheduler|lr_scheduler")),
    Habit((Thing.SCHEDULER,), _REFUSED, "{file} has no {key}: a KeyError", "3175 (_load_checkpoint_from_path)", cut_schedule(COMMON)),
    Habit((Thing.SCHEDULER,), _RESTORED, "opt_param_scheduler", "3175 (_load_checkpoint_from_path)", ran=True),
    Habit((Thing.SCALER,), _RESTORED, "grad_scaler, with the optimizer", "3169 (_load_checkpoint_from_path)",
        lambda seen: seen.held.scaler),
    Habit((Thing.SCALER,), _ABSENT, "none is stored; only fp16 has one", "3169 (_load_checkpoint_from_path)"),
    Habit((Thing.COUNTERS, Thing.DATA), _REFUSED, "{file} {wrong}: loading it fails", "3067 (_load_checkpoint_from_path)",
        broken(TRAIN_STATE)),
    Habit((Thing.COUNTERS, Thing.DATA), _REFUSED, "{file} has no {key}: a KeyError", "state.py (TrainState.load_state_dict)",
        without(TRAIN_STATE, *_COUNTED), True),
    Habit((Thing.COUNTERS, Thing.DATA), _ANEW, f"{TRAIN_STATE} is not there, and no args: the step is found in {{file}}, and samples are "
        "counted from 0; a line says the first alone", "3899 (_get_train_state_from_state_dict)", _counterless, True),
    Habit((Thing.COUNTERS,), _RESTORED, f"{TRAIN_STATE}, or where it is not there Megatron-LM's args", "3067 (_load_checkpoint_from_path)",
        ran=True),
    Habit((Thing.DATA,), _ANEW, f"{TRAIN_STATE} is not there, and args have no consumed samples, or 0: they are counted from 0; nothing is "
        "said", "3899 (_get_train_state_from_state_dict)", both(lacks(TRAIN_STATE), uncounted)),
    Habit((Thing.DATA,), _RESTORED, "consumed samples, by which its samplers go forward; Energon's loader has a place of its own in "
        "energon/ beside the steps", "1802 (maybe_load_dataloader_state)", ran=True),
    Habit((Thing.RNG,), _ANEW, f"{RUN_CONFIG} says save_rng: false: the seed's own states", "2846 (_load_checkpoint_from_path)",
        lambda seen: seen.held.args.get("no_save_rng") is True),
    Habit((Thing.RNG,), _REFUSED, f"no random states are stored, and {RUN_CONFIG} does not say so: torch's CheckpointException",
        "3572 (_load_global_dist_base_checkpoint)", lambda seen: not seen.held.problem and not seen.held.rng, True),
    Habit((Thing.RNG,), _REFUSED, "{file} has no {key}: it exits, with 0", "3253 (_load_checkpoint_from_path)",
        without((".metadata//rng_state/*",), *STREAMS, inside="0/")),
    Habit((Thing.RNG,), _RESTORED, "rng_state of each (PP, TP) rank; with data_parallel_random_init of each data-parallel rank, too",
        "3200 (_load_checkpoint_from_path)", ran=True),
)  # fmt: skip

LOADER = Loader(BRIDGE, "067f987", ROWS, ("ckpt_step",), ("bridge", "mbridge"), counted=_COUNTED)
