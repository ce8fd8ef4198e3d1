"""What ``Trainer.train(resume_from_checkpoint=…)`` restores; TRL's trainers are transformers'.

Source: transformers 5.23.0, ``trainer.py`` (``_load_from_checkpoint``, ``_load_optimizer_and_scheduler``, ``_load_rng_state``,
``_load_scaler``, ``_init_training_state``).
"""

from __future__ import annotations

from dataclasses import replace

from mcore_rlhf.trainers.conditions import (
    OTHER_CLASS,
    UNRATED,
    asked,
    both,
    broken,
    has,
    incomplete_in,
    lacks,
    lacks_tensors,
    lambdaless,
    other_dtype,
    other_optimizer,
    refused,
    stateless,
    uneven,
    ungrouped,
    unrated,
    without,
)
from mcore_rlhf.trainers.resuming import MOST_RANKS, OF_OPTIMIZER, Habit, Loader, Outcome, Seen, Thing, rows_of
from mcore_rlhf.trainers.transformers import TRAINER

from . import accelerate_fsdp, deepspeed

_RESTORED, _ANEW, _IGNORED, _REFUSED, _ABSENT = Outcome
_WEIGHTS = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json", "adapter_model.*",
    "*/adapter_model.*", "pytorch_model_fsdp*", "latest",
)  # fmt: skip
_STORED = ("*.safetensors", "pytorch_model*", "*/adapter_model.*", "adapter_model.bin")
_OPTIMIZER, _ZERO = ("optimizer.pt", "optimizer.bin", "optimizer*/*"), ("latest", "global_step*/*")
_BY_OTHERS = "DeepSpeed's own, with the model"

_COUNTED = (
    "epoch", "log_history", "best_metric", "best_global_step", "best_model_checkpoint", "total_flos", "num_input_tokens_seen",
    "stateful_callbacks",
)  # fmt: skip
"""What of ``TrainerState`` is the file's, and empty without it; the rest is computed of the arguments."""


def _ranks(seen: Seen) -> int:
    """Processes that are to load; a run of one never numbers its file."""
    there = seen.ranks("rng_state_{rank}.pth")
    shards = seen.ranks("pytorch_model_fsdp_0/__{rank}_0.distcp")
    return seen.world if seen.world is not None else max(2, len(shards), *(rank + 1 for rank in there)) if there else 1


def _headed(seen: Seen) -> object:
    """LLaMA-Factory 0.9.5 takes the head out of the file: ``train/callbacks.py`` (``fix_valuehead_checkpoint``)."""
    return seen.held.headed or seen.has("value_head.*")


def _rng_missing(seen: Seen) -> object:
    count = min(_ranks(seen), MOST_RANKS)
    wanted = ["rng_state.pth"] if count == 1 else [f"rng_state_{rank}.pth" for rank in range(count)]
    gone = [name for name in wanted if name not in seen.files]
    return gone and {"file": gone[0], "count": f"{len(gone)} of {count}"}


def _other_world(seen: Seen) -> object:
    """Other processes load than saved, and nothing says that they take smaller or larger batches: ``{was}`` and ``{now}``."""
    there = seen.ranks("rng_state_{rank}.pth")
    was = 1 if "rng_state.pth" in seen.files else max(there, default=-1) + 1
    now = seen.world
    said = seen.settings.get("per_device_train_batch_size", "gradient_accumulation_steps")
    return was and now and was != now and said is None and {"was": was, "now": now}


def _by_deepspeed(seen: Seen) -> bool:
    """The configuration gives DeepSpeed's: the name of its file, or its keys; null says nothing, as accelerate's launcher may give it."""
    keys = any(key.startswith("deepspeed.") or ".deepspeed." in key for key in seen.settings.values)
    return keys or (seen.settings.get("deepspeed") is not None and not seen.settings.denies("deepspeed"))


def _argument(seen: Seen, key: str) -> int:
    """A number of the configuration, or else of the arguments that the step itself keeps; 0 where neither has it."""
    kept = seen.held.args.get(key)
    return seen.settings.number(key) or (kept if isinstance(kept, int) else 0)


def _between_generations(seen: Seen) -> object:
    """TRL's samples are for several updates, of which some are still to come: ``{made}`` and ``{per}``."""
    parts = _argument(seen, "gradient_accumulation_steps") or 1
    per = (_argument(seen, "steps_per_generation") or parts) * (_argument(seen, "num_iterations") or 1)
    made = (seen.step or 0) * parts % per
    return made and {"made": made, "per": per}


def _synced(seen: Seen) -> object:
    return seen.settings.says("sync_ref_model") or (
        not seen.settings.denies("sync_ref_model") and seen.held.args.get("sync_ref_model") is True
    )


_OF_TRL = rows_of(
    "TRL 1.16.0, trl/trainer/",
    Habit((Thing.DATA,), _ANEW, "{made} of the {per} micro-steps for which samples were generated are done: the samples are stored "
        "nowhere, and generated anew by the policy as it is now; nothing is said", "grpo_trainer.py:1539 (_prepare_inputs)",
        _between_generations, True),
    Habit((Thing.AVERAGE,), _ANEW, "sync_ref_model: the reference, into which the policy was mixed, is not saved; it begins as the run "
        "is given it, and nothing is said", "callbacks.py (SyncRefModelCallback)", _synced, True),
)  # fmt: skip
_OF_OTHERS = tuple(
    replace(row, ran=False)
    for row in (*deepspeed.IN_A_TAG, *accelerate_fsdp.ROWS)
    if row.why != deepspeed.STRICT  # it gives load_module_strict=False with an adapter (trainer.py:1804)
)
ROWS = _OF_OTHERS + _OF_TRL + rows_of(
    "transformers 5.23.0, trainer.py:",
    Habit((Thing.WEIGHTS,), _REFUSED, "{file} {wrong}: loading it fails", "3602 (_load_from_checkpoint)", broken(*_STORED), True),
    Habit((Thing.WEIGHTS,), _REFUSED, "no file of weights that it knows: “Can't find a valid checkpoint”", "3657 (_load_from_checkpoint)",
        lacks(*_WEIGHTS), True),
    Habit((Thing.WEIGHTS,), _REFUSED, "pytorch_model_fsdp… is loaded by a run with FSDP alone, and the configuration has none",
        "3640 (_load_from_checkpoint)", both(has("pytorch_model_fsdp*"), refused("fsdp"))),
    Habit((Thing.WEIGHTS, *OF_OPTIMIZER, Thing.SCHEDULER), _REFUSED, "deepspeed is given, and no global_step… of its own is there: "
        "“Can't find a valid checkpoint”", "../integrations/deepspeed.py:698 (deepspeed_load_checkpoint)",
        both(lacks("global_step*/*"), _by_deepspeed), True),
    Habit((Thing.WEIGHTS, *OF_OPTIMIZER), _REFUSED, "latest is not there: DeepSpeed knows no tag, and the trainer stops",
        "../integrations/deepspeed.py:698 (deepspeed_load_checkpoint)", both(has("global_step*/*"), lacks("latest"))),
    Habit((Thing.WEIGHTS,), _REFUSED, "a file of the weights is missing: {problem}", "3602 (_load_from_checkpoint)",
        incomplete_in("pytorch_model", ".safetensors", "_model_states")),
    Habit((Thing.WEIGHTS, Thing.LORA), _REFUSED, "a value head is upon a model with an adapter, as in LLaMA-Factory's reward models: no "
        "PeftModel, and the trainer stops where it finds no whole model; give it this folder as the adapter and begin anew",
        "3731 (_load_from_checkpoint)", both(_headed, both(has("adapter_model.*"), lacks("model*.safetensors", *_ZERO)))),
    Habit((Thing.WEIGHTS,), _ANEW, "a value head is upon the model, as TRL's and LLaMA-Factory's wrapper has it: that asks for "
        "pretrained_model.…, the file has the model's own names, and no weights but the head's are loaded, without a word: make it "
        "of this folder, then resume", "3695 (_load_from_checkpoint); trl 0.24.0, models/modeling_value_head.py (state_dict); "
        "LLaMA-Factory 0.9.5, model/patcher.py (patch_valuehead_model)",
        both(_headed, lacks(*_ZERO, "pytorch_model_fsdp*")), True),
    Habit((Thing.WEIGHTS,), _ANEW, "{problem}: what is not there keeps what the run made it with; a warning", "4069 "
        "(_issue_warnings_after_load)", lacks_tensors, True),
    Habit((Thing.WEIGHTS,), _RESTORED, "the model's file is read into the model that the run made", "3602 (_load_from_checkpoint)",
        ran=True),
    Habit((Thing.LORA,), _RESTORED, "with DeepSpeed's own files; its base is the one that the run gives", "1804 (_prepare_for_training)",
        deepspeed.adapter_in_tag, True),
    Habit((Thing.LORA,), _RESTORED, "the adapter's file is read; its base is the one that the run gives", "3690 (_load_from_checkpoint)",
        has("adapter_model.*", "*/adapter_model.*"), True),
    Habit((Thing.DTYPE,), _IGNORED, "stored as {was}, cast to the {now} in which the configuration makes the model",
        "3602 (_load_from_checkpoint)", other_dtype("dtype", "torch_dtype", "model_init_kwargs.dtype")),
    Habit(OF_OPTIMIZER, _REFUSED, "{file} {wrong}: DeepSpeed fails to load it", "1803 (_prepare_for_training)", broken("global_step*/*")),
    Habit(OF_OPTIMIZER, _REFUSED, "a file is missing: {problem}", "1803 (_prepare_for_training)", incomplete_in("_optim_states",
        "_model_states")),
    Habit((*OF_OPTIMIZER, Thing.SCHEDULER), _ANEW, "it lies in DeepSpeed's global_step…, and the configuration has no DeepSpeed; nothing "
        "is said", "3923 (_load_optimizer_and_scheduler)", both(has("global_step*/*"), lacks(*_OPTIMIZER), refused("deepspeed"))),
    Habit(OF_OPTIMIZER, _RESTORED, _BY_OTHERS, "3891 (_load_optimizer_and_scheduler)", has(*_ZERO)),
    Habit((*OF_OPTIMIZER, Thing.SCHEDULER),
        _ANEW, "neither optimizer.pt nor scheduler.pt is there, as after save_only_model; nothing is said",
        "3923 (_load_optimizer_and_scheduler)", both(lacks(*_OPTIMIZER), lacks("scheduler.pt"), lacks(*_ZERO)), True),
    Habit(OF_OPTIMIZER, _ANEW, "optimizer.pt is not there; nothing is said", "3923 (_load_optimizer_and_scheduler)",
        lacks(*_OPTIMIZER), True),
    Habit((Thing.SCHEDULER,), _IGNORED, "scheduler.pt is passed over, as optimizer.pt is not there: both or neither; nothing is said",
        "3923 (_load_optimizer_and_scheduler)", both(lacks(*_OPTIMIZER), lacks(*_ZERO)), True),
    Habit((Thing.SCHEDULER,), _REFUSED, "scheduler.pt is not there, and a run on DeepSpeed opens it without a look",
        "3896 (_load_optimizer_and_scheduler)", both(has(*_ZERO), lacks("scheduler.pt"), lambda seen: not seen.held.scheduler)),
    Habit((Thing.SCHEDULER,), _RESTORED, "DeepSpeed's own: the Trainer gave it the schedule, with the optimizer of its configuration",
        "3891 (_load_optimizer_and_scheduler)", both(has(*_ZERO), lacks("scheduler.pt")), True),
    Habit(OF_OPTIMIZER, _IGNORED, "passed over, as scheduler.pt is not there: both or neither; nothing is said",
        "3923 (_load_optimizer_and_scheduler)", lacks("scheduler.pt"), True),
    Habit((Thing.SCHEDULER,), _ANEW, "scheduler.pt is not there; nothing is said", "3923 (_load_optimizer_and_scheduler)",
        lacks("scheduler.pt"), True),
    Habit(OF_OPTIMIZER, _REFUSED, "{file} {wrong}: loading it fails", "3886 (_load_optimizer_and_scheduler)", broken(*_OPTIMIZER), True),
    Habit((Thing.SCHEDULER,), _REFUSED, "{file} {wrong}: loading it fails", "3886 (_load_optimizer_and_scheduler)",
        broken("scheduler.pt"), True),
    Habit(OF_OPTIMIZER, _REFUSED, "a file of the optimizer is missing: {problem}", "3886 (_load_optimizer_and_scheduler)",
        incomplete_in("optimizer")),
    Habit(OF_OPTIMIZER, _REFUSED, "{file} has no {key}: loading it fails", "3886 (_load_optimizer_and_scheduler)",
        without("optimizer.pt", "param_groups", "state"), True),
    Habit(OF_OPTIMIZER, _REFUSED, "{file} has no {key}: loading it, or the first step, fails",
        "3886 (_load_optimizer_and_scheduler)", ungrouped("optimizer.pt"), True),
    Habit(OF_OPTIMIZER, _REFUSED, "{file} has no {key} for {count} parameters: it is loaded, and the first step fails",
        "3886 (_load_optimizer_and_scheduler)", uneven("optimizer.pt"), True),
    Habit((Thing.OPTIMIZER,), _ANEW, "{file} has no state for {count} parameters: frozen, or begun at zero; nothing is said",
        "3886 (_load_optimizer_and_scheduler)", stateless("optimizer.pt"), True),
    Habit(OF_OPTIMIZER, _REFUSED, OTHER_CLASS, "3886 (_load_optimizer_and_scheduler)",
        other_optimizer("optim", *_OPTIMIZER, "optimizer_0/.metadata"), True),
    Habit(OF_OPTIMIZER, _RESTORED, "by position: the run must give its parameters in the same order",
        "3886 (_load_optimizer_and_scheduler)",
        ran=True),
    Habit((Thing.SCHEDULER,), _ANEW, "{file} has no {key}: the scheduler keeps its own; nothing is said",
        "3886 (_load_optimizer_and_scheduler)", without("scheduler.pt", "last_epoch"), True),
    Habit((Thing.SCHEDULER,), _REFUSED, "{file} has no {key}, which LambdaLR asks for: loading it fails",
        "3886 (_load_optimizer_and_scheduler)", lambdaless("scheduler.pt"), True),
    Habit((Thing.SCHEDULER,), _REFUSED, UNRATED,
        "3886 (_load_optimizer_and_scheduler)", unrated("scheduler.pt", "optimizer.pt"), True),
    Habit((Thing.SCHEDULER,), _RESTORED, "scheduler.pt", "3886 (_load_optimizer_and_scheduler)", ran=True),
    Habit((Thing.SCALER,), _REFUSED, "{file} {wrong}: loading it fails", "3993 (_load_scaler)", broken("scaler.pt")),
    Habit((Thing.SCALER,), _RESTORED, "scaler.pt", "3993 (_load_scaler)", has("scaler.pt")),
    Habit((Thing.SCALER,), _ANEW, "the run is in fp16, and scaler.pt is not there; nothing is said", "3993 (_load_scaler)",
        asked("fp16")),
    Habit((Thing.SCALER,), _ABSENT, "no scaler.pt; only a run in fp16 has one", "3993 (_load_scaler)", ran=True),
    Habit((Thing.COUNTERS, Thing.DATA), _REFUSED, "trainer_state.json is not there, and is opened without a look", "1565 (train)",
        lacks("trainer_state.json"), True),
    Habit((Thing.COUNTERS, Thing.DATA), _REFUSED, "{file} {wrong}", "1565 (train)", broken("trainer_state.json"), True),
    Habit((Thing.COUNTERS, Thing.DATA), _ANEW, "{file} has no {key}: training begins at step 0; nothing is said", "1565 (train)",
        without("trainer_state.json", "global_step"), True),
    Habit((Thing.COUNTERS, Thing.DATA), _REFUSED, "{file} has no {key}, with which the arguments are compared: that fails",
        "1704 (_init_training_state)", without("trainer_state.json", "train_batch_size"), True),
    Habit((Thing.COUNTERS,), _ANEW, "{file} has no {key}: that is every 500 steps, whatever the arguments say, with a warning",
        "1704 (_init_training_state)", without("trainer_state.json", "logging_steps", "eval_steps", "save_steps"), True),
    Habit((Thing.COUNTERS,), _ANEW, "{file} has no {key}: it begins empty; nothing is said", "1565 (train)",
        without("trainer_state.json", *_COUNTED), True),
    Habit((Thing.COUNTERS,), _RESTORED, "trainer_state.json: step, epoch, log", "1697 (_init_training_state)", ran=True),
    Habit((Thing.RNG,), _REFUSED, "{file} {wrong}: loading it fails", "3866 (_load_rng_state)", broken("rng_state*.pth"), True),
    Habit((Thing.RNG,), _ANEW, "{file} is not there ({count} ranks have none): an info line, and other random numbers",
        "3841 (_load_rng_state)",
        _rng_missing, True),
    Habit((Thing.RNG,), _REFUSED, "{file} has no {key}: loading it fails", "3866 (_load_rng_state)",
        without("rng_state*.pth", "python", "numpy", "cpu"), True),
    Habit((Thing.RNG,), _RESTORED, "rng_state….pth of each rank", "3841 (_load_rng_state)", ran=True),
    Habit((Thing.DATA,), _ANEW, "ignore_data_skip: the data begin again", "1707 (_init_training_state)", asked("ignore_data_skip"), True),
    Habit((Thing.DATA,), _ANEW, "saved by {was}, loaded by {now} processes: as many batches are skipped, which are of another size, "
        "so that samples are seen again, or never", "1714 (_init_training_state)", _other_world),
    Habit((Thing.DATA,), _RESTORED, "batches of this epoch that were seen are skipped, in the order that the run's seed gives",
        "1844 (_run_epoch)", ran=True),
)  # fmt: skip

LOADER = Loader(
    TRAINER,
    "5.23.0",
    ROWS,
    ("resume_from_checkpoint",),
    ("trl", "trainer", "hf-trainer"),
    takes_any=True,
    knows=has(accelerate_fsdp.WHOLE),
)
