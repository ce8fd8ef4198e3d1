"""What ``Accelerator.load_state`` restores.

Source: accelerate 1.15.0, ``checkpointing.py`` (``load_accelerator_state``), ``accelerator.py`` (``load_state``).
"""

from __future__ import annotations

from collections.abc import Callable

from mcore_rlhf.trainers.accelerate import TRAINER
from mcore_rlhf.trainers.conditions import (
    OTHER_BACKEND,
    UNRATED,
    asked,
    both,
    broken,
    has,
    incomplete_in,
    lacks,
    lacks_tensors,
    lambdaless,
    missing_ranks,
    other_backend,
    refused,
    stateless,
    uneven,
    ungrouped,
    unrated,
    without,
)
from mcore_rlhf.trainers.resuming import OF_OPTIMIZER, Habit, Loader, Outcome, Seen, Thing, rows_of
from mcore_rlhf.trainers.torchdata import STOPS, stops_at

from . import accelerate_fsdp, deepspeed

_RESTORED, _ANEW, _IGNORED, _REFUSED, _ABSENT = Outcome
_ZERO, _FSDP = ("latest", "pytorch_model/*"), ("pytorch_model_fsdp*",)
_BACKENDS = {
    "DEEPSPEED": _ZERO, "FSDP": _FSDP,
    **dict.fromkeys(("NO", "MULTI_CPU", "MULTI_GPU"), ("model*.safetensors", "pytorch_model*.bin")),
}  # fmt: skip
"""By what ``accelerate config`` writes. Source: accelerate 1.15.0, ``utils/dataclasses.py`` (``DistributedType``)."""
_RNG, _STATEFUL = "random_states_{rank}.pkl", "use_stateful_dataloader"


def _alone(gone: str, there: str) -> Callable[[Seen], object]:
    """Of one of several models there is one file, and not the other: ``{file}`` and ``{there}``."""

    def when(seen: Seen) -> object:
        numbers = seen.ranks(there + "_{rank}.bin") - seen.ranks(gone + "_{rank}.bin")
        return numbers and {"file": f"{gone}_{min(numbers)}.bin", "there": f"{there}_{min(numbers)}.bin"}

    return when


def _unscheduled(seen: Seen) -> bool:
    """The script has no schedule: each of torch's leaves ``initial_lr`` in the groups (2.13.0, ``optim/lr_scheduler.py``)."""
    groups = [
        key for name in seen.matching("optimizer.bin") for key in seen.keys(name) if key.startswith("param_groups/")
    ]
    rated = any(key.endswith("/initial_lr") for key in groups)
    return bool(groups) and not rated and not seen.has("scheduler*.bin", "optimizer_*.bin")


ROWS = deepspeed.IN_A_TAG + accelerate_fsdp.ROWS + rows_of(
    "accelerate 1.15.0, checkpointing.py:",
    Habit((Thing.WEIGHTS, *OF_OPTIMIZER), _REFUSED, OTHER_BACKEND, "239", other_backend(_BACKENDS, "distributed_type"), True),
    Habit((Thing.WEIGHTS,), _REFUSED, "{file} {wrong}: loading it fails", "239", broken("model*.safetensors", "pytorch_model*"), True),
    Habit((Thing.WEIGHTS,),
        _REFUSED, "neither model.safetensors nor pytorch_model.bin is there; weights in several files are not looked for",
        "239", lacks("model.safetensors", "pytorch_model.bin", *_ZERO, *_FSDP), True),
    Habit((Thing.WEIGHTS,), _REFUSED, "a file of the weights is missing: {problem}", "239",
        incomplete_in("pytorch_model_fsdp", ".safetensors", "_model_states")),
    Habit((Thing.WEIGHTS,), _REFUSED, "{problem}: every tensor is asked for, and loading it fails", "239", lacks_tensors, True),
    Habit((Thing.WEIGHTS,), _REFUSED, "DeepSpeed's tag pytorch_model, which is asked for by name, has no …model_states.pt", "239",
        both(has("latest", "*_states.pt"), lacks("pytorch_model/*_model_states.pt", "model.safetensors", "pytorch_model.bin")), True),
    Habit((Thing.WEIGHTS,), _RESTORED, "the model's file, or what DeepSpeed or FSDP has", "239", ran=True),
    Habit(OF_OPTIMIZER, _REFUSED, "a file of the optimizer is missing: {problem}", "255",
        incomplete_in("_optim_states", "_model_states", "optimizer")),
    Habit(OF_OPTIMIZER, _RESTORED, "DeepSpeed's own, with the model", "239", has(*_ZERO)),
    Habit(OF_OPTIMIZER, _REFUSED, "{file} {wrong}: loading it fails", "255", broken("optimizer*"), True),
    Habit(OF_OPTIMIZER, _REFUSED, "optimizer.bin is not there, and is opened without a look", "255",
        lacks("optimizer.bin", "optimizer_0/*", "pytorch_optimizer*"), True),
    Habit(OF_OPTIMIZER, _REFUSED, "{file} is not there, and {there} is: it is opened where the script prepared one for each model", "255",
        _alone("optimizer", "scheduler"), True),
    Habit(OF_OPTIMIZER, _REFUSED, "{file} has no {key}: loading it fails", "255", without("optimizer*.bin", "param_groups", "state"), True),
    Habit(OF_OPTIMIZER, _REFUSED, "{file} has no {key}: loading it, or the first step, fails", "255", ungrouped("optimizer*.bin"), True),
    Habit(OF_OPTIMIZER, _REFUSED, "{file} has no {key} for {count} parameters: it is loaded, and the first step fails", "255",
        uneven("optimizer*.bin"), True),
    Habit((Thing.OPTIMIZER,), _ANEW, "{file} has no state for {count} parameters: frozen, or begun at zero; nothing is said", "255",
        stateless("optimizer*.bin"), True),
    Habit(OF_OPTIMIZER, _RESTORED, "by position: the run must give its parameters in the same order", "255", ran=True),
    Habit((Thing.SCHEDULER,), _REFUSED, "{file} {wrong}: loading it fails", "263", broken("scheduler*.bin"), True),
    Habit((Thing.SCHEDULER,), _ABSENT, "no scheduler.bin, and no schedule has been at the optimizer: its groups have no initial_lr", "263",
        _unscheduled, True),
    Habit((Thing.SCHEDULER,), _REFUSED, "scheduler.bin is not there; it is opened where the script prepared a scheduler", "263",
        lacks("scheduler.bin"), True),
    Habit((Thing.SCHEDULER,), _REFUSED, "{file} is not there, and {there} is: it is opened where the script prepared one for each", "263",
        _alone("scheduler", "optimizer"), True),
    Habit((Thing.SCHEDULER,), _ANEW, "{file} has no {key}: the scheduler keeps its own; nothing is said", "263",
        without("scheduler*.bin", "last_epoch"), True),
    Habit((Thing.SCHEDULER,), _REFUSED, "{file} has no {key}, which LambdaLR asks for: loading it fails", "263",
        lambdaless("scheduler*.bin"), True),
    Habit((Thing.SCHEDULER,), _REFUSED, UNRATED,
        "263", unrated("scheduler*.bin", "optimizer*.bin"), True),
    Habit((Thing.SCHEDULER,), _RESTORED, "scheduler.bin, where the script prepared one", "263", ran=True),
    Habit((Thing.SCALER,), _REFUSED, "{file} {wrong}: loading it fails", "288", broken("scaler.pt")),
    Habit((Thing.SCALER,), _REFUSED, "the run is in fp16, and scaler.pt is not there", "288", both(lacks("scaler.pt"), asked("fp16"))),
    Habit((Thing.SCALER,), _REFUSED, "the run is in fp16, and scaler.pt is not there", "288",
        both(lacks("scaler.pt"), lambda seen: seen.settings.get("mixed_precision") == "fp16")),
    Habit((Thing.SCALER,), _RESTORED, "scaler.pt, where the run is in fp16", "288", has("scaler.pt")),
    Habit((Thing.SCALER,), _ABSENT, "no scaler.pt; only a run in fp16 has one", "288", ran=True),
    Habit((Thing.RNG, Thing.COUNTERS), _ANEW, "{file} {wrong}: the error is swallowed, an info line says so", "293",
        broken("random_states_*.pkl"), True),
    Habit((Thing.RNG, Thing.COUNTERS), _ANEW, "no random_states_0.pkl: the error is swallowed, an info line says so", "293",
        lacks("random_states_*.pkl"), True),
    Habit((Thing.RNG, Thing.COUNTERS),
        _ANEW, "{file} is not there ({ranks} ranks have none): the error is swallowed, an info line says so",
        "293", missing_ranks(_RNG)),
    Habit((Thing.RNG,), _ANEW, "{file} has no {key}: the error is swallowed, an info line says so", "293",
        without("random_states_*.pkl", "random_state", "numpy_random_seed", "torch_manual_seed"), True),
    Habit((Thing.COUNTERS,), _ANEW, "{file} has no {key}: the accelerator's own begins at 0; nothing is said", "293",
        without("random_states_*.pkl", "step"), True),
    Habit((Thing.RNG,), _RESTORED, "random_states_….pkl of each rank", "293", ran=True),
    Habit((Thing.COUNTERS,),
        _RESTORED, "the accelerator's own step, in random_states_….pkl; counters of the script are in what it registered",
        "293", ran=True),
    Habit((Thing.DATA,), _ANEW, "use_stateful_dataloader, and dl_state_dict.bin is not there; nothing is said", "277",
        both(lacks("dl_state_dict*.bin"), asked(_STATEFUL))),
    Habit((Thing.DATA,), _IGNORED, "dl_state_dict.bin is read with use_stateful_dataloader alone", "277",
        both(has("dl_state_dict*.bin"), refused(_STATEFUL))),
    Habit((Thing.DATA,), _REFUSED, "{file} {wrong}: loading it fails", "277", broken("dl_state_dict*.bin")),
    Habit((Thing.DATA,), _REFUSED, STOPS, "277", stops_at("dl_state_dict*.bin"), True),
    Habit((Thing.DATA,), _RESTORED, "dl_state_dict.bin, where the run has use_stateful_dataloader", "277", has("dl_state_dict*.bin")),
    Habit((Thing.DATA,), _ABSENT, "the place in the data is not stored: the script goes forward itself (skip_first_batches)", "265"),
)  # fmt: skip

LOADER = Loader(TRAINER, "1.15.0", ROWS, knows=has(accelerate_fsdp.WHOLE))
